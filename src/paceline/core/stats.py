"""What a request cost and what speculation gave: counts, times, and the field's three measures.

Definitions, used wherever paceline prints a number:

* ``num_drafted`` counts draft tokens the target was asked to verify, ``num_accepted`` those it kept.
* *accept %* is accepted / drafted, as llama.cpp's ``speculative`` prints it.
* *acceptance rate* alpha is accepted / judged, where a token is judged if the walk came to its position: an estimate
  of the chance that a draft token is accepted given that all before it were.
* *acceptance length* tau is tokens emitted per decoding round, the recovered or bonus token included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class PhaseTimes:
    """Seconds of decoding rounds by what they were spent on."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    sampling_s: float = 0.0
    rest_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all rounds."""
        return self.draft_s + self.verify_s + self.sampling_s + self.rest_s

    def add(self, draft_s: float, verify_s: float, sampling_s: float, round_s: float) -> None:
        """Add one round of ``round_s`` seconds; what its parts leave over is the rest."""
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.sampling_s += sampling_s
        self.rest_s += round_s - draft_s - verify_s - sampling_s


@dataclass(slots=True)
class RequestStats:
    """Counts and times of one request.

    Several requests share a round's time: each is charged the whole round, since each waits for the whole of it.

    Attributes:
        prompt_tokens: tokens fed to the target as prompt.
        prompt_s: seconds of the rounds that fed them; the last of these emits the first token.
        cached_tokens: tokens of the prompt that an engine held already, and that were not fed.
        preemptions: times that it lost its place in a full cache, and was read again later.
        predicted_tokens: tokens emitted.
        decode_s: seconds of the rounds after the prompt.
        rounds: decoding rounds after the prompt.
        num_drafted: draft tokens verified.
        num_accepted: draft tokens kept.
        num_judged: draft positions the walks came to.
        accepted_by_source: draft tokens kept, by drafter.
        drafted_by_source: draft tokens verified, by drafter.
        phases: where ``decode_s`` went.
        arrivals_s: clock time at which each token reached the reader; tokens of one round arrive together.
        tested_by_depth: ``tested_by_depth[d]`` rounds whose walk judged a draft at depth ``d + 1``.
        accepted_by_depth: how many of those were accepted.
    """

    prompt_tokens: int = 0
    prompt_s: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    predicted_tokens: int = 0
    decode_s: float = 0.0
    rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_judged: int = 0
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    phases: PhaseTimes = field(default_factory=PhaseTimes)
    arrivals_s: list[float] = field(default_factory=list)
    tested_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)

    @property
    def accept_share(self) -> float | None:
        """Accepted / drafted; ``None`` if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def acceptance_rate(self) -> float | None:
        """Alpha: accepted / judged; ``None`` if nothing was judged."""
        return self.num_accepted / self.num_judged if self.num_judged else None

    @property
    def acceptance_length(self) -> float | None:
        """Tau: tokens per decoding round, recovered or bonus token included; ``None`` before the first round."""
        return (self.predicted_tokens - 1) / self.rounds if self.rounds else None

    @property
    def prompt_per_second(self) -> float | None:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prompt_s if self.prompt_s > 0 else None

    @property
    def predicted_per_second(self) -> float | None:
        """Emitted tokens per second of decoding; the first token belongs to the prompt's time."""
        return (self.predicted_tokens - 1) / self.decode_s if self.decode_s > 0 else None

    def inter_token_s(self) -> list[float]:
        """Return the gap before each token but the first, as a reader of the stream sees it, in seconds."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ``values`` that at least ``share`` (0 to 1) of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
