"""What a request cost and what speculation gave: counts, times, and the field's three measures.

Definitions, used wherever paceline prints a number:

* ``num_drafted`` counts draft tokens the target was asked to verify, ``num_accepted`` those it kept.
* *accept %* is accepted / drafted, as llama.cpp's ``speculative`` prints it.
* *acceptance rate* alpha is accepted / judged, where a token is judged if the walk came to its position: an estimate
  of the chance that a draft token is accepted given that all before it were.
* *acceptance length* tau is tokens emitted per decoding round, the recovered or bonus token included.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias, TypeVar

_K = TypeVar("_K", bound=Hashable)

OffReason: TypeAlias = Literal[
    "asked",
    "no_drafters",
    "prompts",
    "measuring",
    "no_gain",
    "losing",
    "short",
    "no_match",
    "draft_min",
    "no_room",
]
"""Why a round drafted nothing for a request; :data:`OFF_REASONS` says it in words.

``asked``: the request asked for plain decoding, or the policy is one that never drafts. ``no_drafters``: the model has
no drafter, or none of those that the request names. ``prompts``: prompts were read in the same pass, and such rounds
draft nothing, so that they stay short. ``measuring``: the policy made a plain round for all, to learn what plain rounds
take. ``no_gain``: the policy held that no draft was worth its time: it asked for none, or verified none of what was
drafted. ``losing``: speculation is behind plain decoding by what it may lose, so that no draft was risked. ``short``:
fewer than two tokens were left to say, or the answer may be so short that the little it may lose pays for no draft.
``no_match``: every drafter of the request was asked, and none proposed anything. ``draft_min``: what was drafted was
shorter than the policy's least length. ``no_room``: the pass had no row for a draft beside its other requests, the
cache had no cell for one, or the engine cannot step back.
"""

OFF_REASONS: Final[Mapping[OffReason, str]] = {
    "asked": "plain decoding was asked for",
    "no_drafters": "there is no drafter for this request",
    "prompts": "prompts were processed in the same passes",
    "measuring": "plain rounds were measured",
    "no_gain": "no draft would have paid",
    "losing": "earlier drafts had used up what speculation may lose",
    "short": "the answer was too short",
    "no_match": "the drafters had no proposal",
    "draft_min": "the drafts were shorter than draft-min",
    "no_room": "the engine had no room for drafts",
}
"""Every :data:`OffReason` in words, to follow "nothing was drafted:"."""


class Counts(Counter[_K]):
    """A counter that is made of keys with their counts, as a dictionary is.

    So :func:`dataclasses.asdict` makes another of it, where of a plain counter it would count the pairs.
    """

    def __init__(self, counts: Mapping[_K, int] | Iterable[tuple[_K, int]] = ()) -> None:
        super().__init__(dict(counts))


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
class PlainTimes:
    """Seconds that plain decoding takes, or would have taken: of one round, or of all rounds of a request.

    A request's are summed over the rounds of its ``decode_s``. ``T`` is what a round took less its drafting, ``n`` the
    tokens that it added to the request, and ``p`` what the policy says that a plain round of the same requests takes:

    * The round drafted, and read nothing: ``n * p``, with the bounds of ``p``.
    * The round drafted nothing: the policy's ``p``, which is ``T`` unless the rounds before made ``T`` longer. Without
      a policy that knows ``p`` it is ``T``.
    * The round drafted nothing, and read prompts in the same pass: ``T``. Plain decoding reads them as well.
    * The round drafted, and read prompts too, which it does only where rounds beside prompts are not bounded: its first
      token counts as the share of ``T`` that the rows without drafts are of all rows, but at least ``p``. The bounds
      are ``low_s`` of ``p`` and ``T``. The other ``n - 1`` tokens count ``p`` each.
    * The request was read again, after it had lost its place: what the round took.

    ``auto`` says ``p = T`` of plain rounds that follow others like them. Else ``p = d * m``, where ``m`` is what the
    profile says and ``d`` the drift. With ``r`` the times over ``m`` of the latest five plain rounds, the low bound is
    ``min(r) * m`` and the high one ``max(r) * m``. At first ``r`` is 1 / 1.1 and 1.1, which the fourth and the fifth
    plain round displace: a profile alone may be off by a tenth. So the bounds say how much plain rounds differ. A
    machine that becomes another between two plain rounds is seen at the second of them only.

    Attributes:
        expected_s: the estimate.
        low_s: if all plain rounds were as fast as the fastest of late.
        high_s: if all were as slow as the slowest of late.
    """

    expected_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0

    def add(self, expected_s: float, low_s: float, high_s: float) -> None:
        """Add what a round counts."""
        self.expected_s += expected_s
        self.low_s += low_s
        self.high_s += high_s


_NAMES: Final = {
    "queue_ms": "queue_s",
    "prompt_n": "prompt_tokens",
    "prompt_ms": "prompt_s",
    "prompt_per_second": "prompt_per_second",
    "predicted_n": "predicted_tokens",
    "predicted_ms": "decode_s",
    "predicted_per_second": "predicted_per_second",
    "rounds": "rounds",
    "draft_n": "num_drafted",
    "draft_n_accepted": "num_accepted",
    "accept_share": "accept_share",
    "acceptance_rate": "acceptance_rate",
    "acceptance_length": "acceptance_length",
    "drafted_by_source": "drafted_by_source",
    "accepted_by_source": "accepted_by_source",
    "gain": "gain",
    "gain_low": "gain_low",
    "gain_high": "gain_high",
    "off_reason": "off_reason",
    "draft_ms": "phases.draft_s",
    "draft_ms_by_source": "draft_s_by_source",
    "verify_ms": "phases.verify_s",
    "sampling_ms": "phases.sampling_s",
    "rest_ms": "phases.rest_s",
}
"""Figures of a request by what ``--json`` calls them; times are in milliseconds."""

# Of two figures or more: of one it would return no tuple.
_getter = functools.cache(lambda figures: attrgetter(*figures))


@dataclass(slots=True, repr=False)
class RequestStats:
    """Counts and times of one request: plain data, ``json.dumps(stats.to_dict())`` writes it.

    Several requests share a round's time: each is charged the whole round, since each waits for the whole of it.
    The same holds for every part of a round, such as the seconds of each drafter.

    Attributes:
        added_s: clock time at which the loop took the request; its first token arrived at ``arrivals_s[0]``.
        queue_s: seconds from then to its first start, or to its end if it never started; ``None`` while it waits.
        prompt_tokens: tokens fed to the target as prompt.
        prompt_s: seconds of the rounds that fed them; the last of these emits the first token.
        cached_tokens: tokens of the prompt that an engine held already, and that were not fed.
        preemptions: times that it lost its place, in a full cache or to another client, and was read again later.
        predicted_tokens: tokens emitted.
        decode_s: seconds of the rounds after the prompt.
        rounds: decoding rounds after the prompt.
        num_drafted: draft tokens verified.
        num_accepted: draft tokens kept.
        num_judged: draft positions the walks came to.
        accepted_by_source: draft tokens kept, by drafter.
        drafted_by_source: draft tokens verified, by drafter.
        phases: where ``decode_s`` went.
        draft_s_by_source: seconds of each drafter that was asked in those rounds, for whichever request it was.
        plain: what plain decoding would have taken in place of ``decode_s``; ``None`` where the policy cannot say it of
            some round.
        off_rounds: decoding rounds that verified no draft of this request, by the reason.
        arrivals_s: clock time at which each token reached the reader; tokens of one round arrive together.
        tested_by_depth: ``tested_by_depth[d]`` rounds whose walk judged a draft at depth ``d + 1``.
        accepted_by_depth: how many of those were accepted.
    """

    added_s: float = 0.0
    queue_s: float | None = None
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
    accepted_by_source: Counter[str] = field(default_factory=Counts)
    drafted_by_source: Counter[str] = field(default_factory=Counts)
    phases: PhaseTimes = field(default_factory=PhaseTimes)
    draft_s_by_source: dict[str, float] = field(default_factory=dict)
    plain: PlainTimes | None = field(default_factory=PlainTimes)
    off_rounds: Counter[OffReason] = field(default_factory=Counts)
    arrivals_s: list[float] = field(default_factory=list)
    tested_by_depth: Counter[int] = field(default_factory=Counts)
    accepted_by_depth: Counter[int] = field(default_factory=Counts)

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

    @property
    def prompt_per_token_s(self) -> float | None:
        """Seconds for each token of the prompt."""
        return self.prompt_s / self.prompt_tokens if self.prompt_tokens else None

    @property
    def predicted_per_token_s(self) -> float | None:
        """Seconds of decoding for each token but the first."""
        return self.decode_s / (self.predicted_tokens - 1) if self.predicted_tokens > 1 else None

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request to its first token; ``None`` before that."""
        return self.arrivals_s[0] - self.added_s if self.arrivals_s else None

    @property
    def mean_inter_token_s(self) -> float | None:
        """Mean of :meth:`inter_token_s`; ``None`` before the second token."""
        further = len(self.arrivals_s) - 1
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / further if further > 0 else None

    @property
    def gain(self) -> float | None:
        """Times as fast as plain decoding: the estimate of plain decoding's time over ``decode_s``.

        Where every round was plain it is 1, less the share that deciding not to draft took. It is below 1 where drafts
        cost more than they brought, those of other requests in the same rounds included. ``None`` before the first
        decoding round, and where plain decoding's time is not known.
        """
        return self.plain.expected_s / self.decode_s if self.plain is not None and self.decode_s > 0 else None

    @property
    def gain_low(self) -> float | None:
        """The gain by the lower bound of plain decoding's time; see :class:`PlainTimes`."""
        return self.plain.low_s / self.decode_s if self.plain is not None and self.decode_s > 0 else None

    @property
    def gain_high(self) -> float | None:
        """The gain by the upper bound of plain decoding's time; see :class:`PlainTimes`."""
        return self.plain.high_s / self.decode_s if self.plain is not None and self.decode_s > 0 else None

    @property
    def max_depth(self) -> int:
        """Most draft tokens along a path that a walk judged."""
        return max(self.tested_by_depth, default=-1) + 1

    @property
    def accepted_at_depths(self) -> list[int]:
        """``[max_depth]`` drafts that were kept, the first token of a draft first."""
        return [self.accepted_by_depth[depth] for depth in range(self.max_depth)]

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Accepted / judged at each depth that was judged, the first token of a draft first."""
        return [self.accepted_by_depth[depth] / self.tested_by_depth[depth] for depth in sorted(self.tested_by_depth)]

    @property
    def off_reason(self) -> OffReason | None:
        """Why nothing was drafted: the reason of most rounds, the first of them if several are of as many.

        ``None`` where something was drafted, and before the first decoding round.
        """
        if self.num_drafted or not self.off_rounds:
            return None
        return self.off_rounds.most_common(1)[0][0]

    def to_dict(self, names: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return figures as JSON has them; by default those of ``paceline run --json``, under its names.

        Args:
            names: attributes and properties, such as ``prompt_s`` and ``phases.draft_s``, by their names in the result.
                Where the latter have ``_ms``, seconds become milliseconds.
        """
        names = _NAMES if names is None else names
        found = dict(zip(names, _getter(tuple(names.values()))(self), strict=True))
        for name, value in found.items():
            if isinstance(value, dict):
                found[name] = {key: each * 1e3 for key, each in value.items()} if "_ms" in name else dict(value)
            elif "_ms" in name and value is not None:
                found[name] = value * 1e3
        return found

    def __repr__(self) -> str:
        return f"<RequestStats: {self.summarize()}>"

    def summarize(self) -> str:
        """Return the tokens, their speed, and what drafts came to, in a few words."""
        parts = [f"{self.predicted_tokens} tokens"]
        if self.predicted_per_second is not None:
            parts.append(f"{self.predicted_per_second:.1f} t/s")
        if self.num_drafted:
            parts.append(f"{self.num_accepted} of {self.num_drafted} drafts accepted")
            if self.gain is not None:
                parts.append(f"about {self.gain:.2f} times plain")
        elif self.off_reason not in (None, "asked"):
            parts.append(f"nothing was drafted: {OFF_REASONS[self.off_reason]}")
        return "; ".join(parts)

    def inter_token_s(self) -> list[float]:
        """Return the gap before each token but the first, as a reader of the stream sees it, in seconds."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ``values`` that at least ``share`` (0 to 1) of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
