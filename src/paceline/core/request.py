"""One request as the loop carries it, and what a round adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from paceline.core.arrays import FloatArray
from paceline.core.logprobs import LogprobParams, TokenLogprob
from paceline.core.params import CacheParams, SamplingParams, SpeculationParams, StopRules
from paceline.core.stats import RequestStats
from paceline.core.text import TextSegment, TextStream
from paceline.core.verify import Verifier

FinishReason: TypeAlias = Literal["stop", "end", "length", "context", "cancelled", "no_room", "error"]
"""Why a request ended.

``stop``: a stop text; ``end``: an end-of-generation token; ``length``: ``max_tokens``; ``context``: the context is
full; ``cancelled``: by the caller; ``no_room``: the engine's cache had no cells left for it; ``error``: its rows could
not be sampled, and ``request.error`` says why.
"""

SOURCE_TARGET = "target"
"""Source of recovered and bonus tokens; drafted tokens carry their drafter's name."""

_NO_LOGPROBS: Final = LogprobParams()


class StateSource(Protocol):
    """What the target leaves of each token, for drafters that read it: an :class:`~paceline.engines.base.Engine`."""

    def states(self, sequence: int, start: int, stop: int) -> FloatArray:
        """Return the states of committed tokens ``[stop - start, width]``."""
        ...

    def first_state(self, sequence: int) -> int:
        """Return the first committed token whose state is held, with those of all behind it."""
        ...


class Request:
    """A prompt, its growing answer, and everything decided about it. The loop owns it; others only read.

    Attributes:
        id: unique in this process, as loops may share drafters.
        token_ids: prompt and answer. Between rounds the target's cache holds all of them but the last.
        num_prompt: how many of them are the prompt.
        params: how it is sampled.
        rules: when it stops.
        speculation: how it is sped up.
        verifier: judges its trees; holds its randomness.
        cache: what it may start from, and who may start from what it reads.
        logprob_params: which log-probabilities come with its answer.
        sequence: its handle at the target engine.
        target: the target engine, whose states drafters may read.
        sources: for each token of the answer the drafter it came from, or :data:`SOURCE_TARGET`.
        logprobs: for each token of the answer its log-probability; empty where none are asked for.
        prompt_logprobs: for each token of the prompt but the first its log-probability, as far as the prompt was read;
            empty where none are asked for.
        segments: the answer's text, as far as it is final.
        segment_ends: for each token of the answer, how many segments there were once it was added.
        error: why it ended, if by an error.
        cached: how many tokens the target's cache holds; ``len(token_ids) - 1`` once the prompt is done.
        finish_reason: ``None`` while it runs.
        stats: counts and times.
    """

    __slots__ = (
        "cache",
        "cached",
        "error",
        "finish_reason",
        "id",
        "logprob_params",
        "logprobs",
        "num_prompt",
        "params",
        "prompt_logprobs",
        "rules",
        "segment_ends",
        "segments",
        "sequence",
        "sources",
        "speculation",
        "stats",
        "target",
        "text",
        "token_ids",
        "verifier",
    )

    def __init__(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        rules: StopRules,
        speculation: SpeculationParams,
        verifier: Verifier,
        cache: CacheParams,
        logprob_params: LogprobParams = _NO_LOGPROBS,
    ) -> None:
        self.id = request_id
        self.token_ids = list(prompt_ids)
        self.num_prompt = len(prompt_ids)
        self.params = params
        self.rules = rules
        self.verifier = verifier
        self.speculation = speculation
        self.cache = cache
        self.logprob_params = logprob_params
        self.sequence = -1
        self.target: StateSource | None = None
        self.text = new_text(rules)
        self.sources: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.segments: list[TextSegment] = []
        self.segment_ends: list[int] = []
        self.error: Exception | None = None
        self.cached = 0
        self.finish_reason: FinishReason | None = None
        self.stats = RequestStats()

    @property
    def output_ids(self) -> list[int]:
        """Tokens of the answer so far."""
        return self.token_ids[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Number of tokens that the answer may still have."""
        return self.rules.max_tokens - self.num_output

    @property
    def lists_prompt(self) -> bool:
        """Whether rows of the prompt are still wanted, for its log-probabilities."""
        wants = self.logprob_params.prompt_logprobs is not None
        return wants and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def most_reused(self) -> int:
        """Most tokens that it may start from without reading them: the last one is always fed, for its row."""
        if not self.cache.cache_prompt:
            return 0
        return len(self.prompt_logprobs) if self.lists_prompt else len(self.token_ids) - 1

    @property
    def decoding(self) -> bool:
        """Whether the next pass has a tree of this request. The last chunk of a prompt emits a token without one."""
        return self.cached == len(self.token_ids) - 1 and self.num_output > 0


def new_text(rules: StopRules) -> TextStream:
    return TextStream(
        rules.stop,
        rules.preserved_ids,
        rules.min_indent,
        min_tokens=rules.min_tokens,
        include_stop=rules.include_stop,
    )


@dataclass(frozen=True, slots=True)
class JudgedDrafts:
    """The drafts of one request that the target judged in one round: a tree below the request's last token.

    Attributes:
        token_ids: ``[nodes]`` token of each node; node 0 is the request's last token, which was no draft.
        parents: ``[nodes]`` parent of each node; -1 for node 0.
        sources: ``[nodes]`` name of the drafter that proposed the token; empty for node 0.
        accepted: nodes whose tokens the answer has, from the top down.
    """

    token_ids: Sequence[int]
    parents: Sequence[int]
    sources: Sequence[str]
    accepted: Sequence[int]


@dataclass(frozen=True, slots=True)
class Emission:
    """What one round added to one request.

    Attributes:
        request: the request.
        token_ids: emitted tokens, in order.
        sources: for each, the drafter it came from, or :data:`SOURCE_TARGET`.
        segments: text that is final now; withheld while it may be the start of a stop text or of a character.
        finish_reason: set in a request's last emission.
        segment_ends: for each token, how many of the segments became final with it or before it. Those that are left
            became final with the end of the answer.
        logprobs: for each token its log-probability; empty where none are asked for.
        drafts: what was drafted and judged; ``None`` where nothing was.
    """

    request: Request
    token_ids: Sequence[int]
    sources: Sequence[str]
    segments: Sequence[TextSegment]
    finish_reason: FinishReason | None
    segment_ends: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    drafts: JudgedDrafts | None = None
