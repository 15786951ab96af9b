"""Sessions over engines that are loaded once, each with drafters and a policy of its own.

A bench runs its variants in them, and a doctor has the target answer, drafts recorded and the loop timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.api import Model, Read, Wrap
from paceline.core.arrays import FloatArray
from paceline.core.clock import Clock, WallClock
from paceline.core.errors import ClosedError
from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import FinishReason
from paceline.core.tree import DraftTree
from paceline.core.verify import RowLogits, Verifier, Walk, follow
from paceline.drafters.registry import DraftTokens, build_drafters, relate_draft
from paceline.engines.base import Engine
from paceline.lab.comparison import OpenReader, Stop, Stopped, finish
from paceline.lab.prompt_keeper import PromptKeeper
from paceline.lab.replaying.models import NoteRow
from paceline.lab.replaying.recorder import record_answer
from paceline.lab.replaying.recording import RECORDED_DEPTH, Recording
from paceline.lab.task import Task
from paceline.options import RequestOptions
from paceline.planning.base import Policy, RoundRecord
from paceline.prompts import Prompt
from paceline.runtime.scheduler import PrefilledPrompt
from paceline.runtime.worker import Worker
from paceline.streams import Generation, Stream
from paceline.vocabularies.token_pairs import DraftVocab


@dataclass(frozen=True, slots=True)
class Engines:
    """What all sessions share.

    Attributes:
        open_reader: see :func:`~paceline.lab.comparison.explain`.
        worker: the thread in which the engines were opened, for whoever opened them to close.
        draft_tokens: what the draft's tokens are to the target; ``None`` leaves it to each session to find out.
    """

    target: PromptKeeper
    draft: Engine | None
    clock: Clock
    open_reader: OpenReader | None = None
    worker: Worker = field(default_factory=Worker)
    draft_tokens: DraftTokens | None = None


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Where a session's seconds went: the target's passes, sampling, drafters. The rest is paceline's own."""

    verify_s: float
    sampling_s: float
    drafters_s: float

    @property
    def total_s(self) -> float:
        return self.verify_s + self.sampling_s + self.drafters_s


@dataclass(frozen=True, slots=True)
class Answer:
    """What is measured of an answer, whoever gave it.

    Attributes:
        seconds: from the first token to the last: what happens between rounds is part of it.
        tested_by_depth: see :class:`~paceline.core.stats.RequestStats`; empty if it is not known.
        spent: where the seconds went; ``None`` if it is not known.
        generation: the whole of it, where a session of paceline's gave it.
    """

    token_ids: Sequence[int]
    seconds: float
    rounds: int
    num_drafted: int
    num_accepted: int
    tested_by_depth: Mapping[int, int] = field(default_factory=dict)
    accepted_by_depth: Mapping[int, int] = field(default_factory=dict)
    spent: TimeSpent | None = None
    generation: Generation | None = None

    @property
    def per_second(self) -> float:
        """Tokens per second of decoding; the first comes with the prompt."""
        return (len(self.token_ids) - 1) / self.seconds


class Contestant(Protocol):
    """Answers a variant's tasks."""

    def answer(self, task: Task, temperature: float, stopped: Stop) -> Answer:
        """Return the answer to a task; raise ``Stopped`` where the user wants no more."""
        ...


class _DraftMeter:
    """Adds up the seconds of drafters."""

    def __init__(self) -> None:
        self.drafters_s = 0.0

    def observe(self, record: RoundRecord) -> None:
        if record.draft_seconds:
            self.drafters_s += sum(record.draft_seconds.values())


class ForcedVerifier:
    """Makes a target follow a given text at full cost: what a better model would have written can be measured so.

    Every pass is computed and every visited row is sampled as ever; only then the choice is replaced by the text's
    token, and a drafted token is accepted if it is the text's. Plain runs are forced likewise, so both do the same
    work. What comes of it says what drafting gains *if* the target writes that text, not that it would. Past the
    reference's end the target's own choices count. ``inner``, the request's verifier, draws the proposals of draft
    models.
    """

    # Whether a draft is accepted does not depend on how it was drawn.
    judges_every_draw = False

    def __init__(self, inner: Verifier, reference: Sequence[int], num_prompt: int) -> None:
        self.name = inner.name
        self.sampler = inner.sampler
        # Proposals are drawn as always, from the draft model's own rows.
        self.propose = inner.propose
        self._reference = reference
        self._num_prompt = num_prompt

    def walk(self, tree: DraftTree, num_rows: int, row_logits: RowLogits, history: Sequence[int]) -> Walk:
        """Follow the reference through the tree until it leaves the tree."""
        return follow(tree, row_logits, history, self._choose, reads_history=self.sampler.reads_history)

    def _choose(self, row: FloatArray, position: int, history: Sequence[int]) -> int:
        choice = self.sampler.emit(row, position, history)
        index = position - self._num_prompt
        return self._reference[index] if index < len(self._reference) else choice


class Session(Model):
    """A loaded model as a user has it: drafters, and a policy that keeps what it learns from prompt to prompt.

    Closing it leaves the engines open, which other sessions use too.

    Attributes:
        reference_ids: tokens that the target is made to say, for the streams that are started next; ``None`` for none.
    """

    def __init__(self, engines: Engines, drafters: Sequence[str], policy: Policy) -> None:
        draft = engines.draft if "draft" in drafters else None
        built = build_drafters(drafters, target=engines.target, draft=draft, draft_tokens=engines.draft_tokens)
        meter = _DraftMeter()
        super().__init__(engines.target, built, policy, clock=engines.clock, observers=[meter], worker=engines.worker)
        self._meter = meter
        self._prompts = engines.target
        self.reference_ids: Sequence[int] | None = None

    def __enter__(self) -> Session:
        return self

    def answer(
        self, task: Task, temperature: float, stopped: Stop, *, speculate: bool = True, wrap: Wrap | None = None
    ) -> Answer:
        drafters_s = self._meter.drafters_s
        generation = finish(self.start(task, temperature, speculate=speculate, wrap=wrap), stopped)
        stats = generation.stats
        return Answer(
            generation.token_ids,
            stats.arrivals_s[-1] - stats.arrivals_s[0],
            stats.rounds,
            stats.num_drafted,
            stats.num_accepted,
            dict(stats.tested_by_depth),
            dict(stats.accepted_by_depth),
            TimeSpent(stats.phases.verify_s, stats.phases.sampling_s, self._meter.drafters_s - drafters_s),
            generation,
        )

    def start(self, task: Task, temperature: float, *, speculate: bool, wrap: Wrap | None = None) -> Stream:
        self.reference_ids = task.reference_ids
        options = task.options(temperature)
        options["speculate"] = speculate
        return self._start(task.prompt_ids, self.read_options(options), wrap=wrap)

    def record(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        *,
        params: SamplingParams,
        rules: StopRules,
        finish_reason: FinishReason | None,
        name: str = "",
        depth: int = RECORDED_DEPTH,
        stopped: Stop = lambda: False,
        note_row: NoteRow | None = None,
    ) -> Recording:
        """Record what every drafter of the session would propose at each place of an answer.

        ``note_row`` is told of each token but the first what row the draft model proposes by.
        """

        def report(share: float) -> None:
            if stopped():
                raise Stopped

        return self.worker.call(
            lambda: record_answer(
                self.drafters,
                self.target.vocabulary,
                prompt_ids,
                token_ids,
                params=params,
                rules=rules,
                finish_reason=finish_reason,
                name=name,
                depth=depth,
                report=report,
                target=self.target,
                note_row=note_row,
            )
        )

    def read(self, prompt_ids: Sequence[int]) -> None:
        """Read a prompt but for its last token, for the answer that is started next."""
        self.worker.call(lambda: self._prompts.read(prompt_ids))

    def _start(
        self, prompt: Prompt, request: RequestOptions, *, wrap: Wrap | None = None, read: Read | None = None
    ) -> Stream:
        """Start an answer, forced if there is a reference; the prompt is read, but for its last token."""
        reference = self.reference_ids

        def forced(verifier: Verifier, prompt_ids: Sequence[int]) -> Verifier:
            if reference is not None:
                verifier = ForcedVerifier(verifier, reference, len(prompt_ids))
            return verifier if wrap is None else wrap(verifier, prompt_ids)

        return super()._start(prompt, request, wrap=forced, read=read or self._prefill)

    def _prefill(self, prompt_ids: Sequence[int]) -> PrefilledPrompt:
        self._prompts.read(prompt_ids)
        # Policies compare a draft model's reading with the time that the prompt took the target, kept or not.
        return PrefilledPrompt(self._prompts.open(), self._prompts.read_s)

    def close(self) -> None:
        """Cancel what still runs."""
        with contextlib.suppress(ClosedError):  # nothing runs any more
            self.worker.call(self._driver.cancel_all)


def wall_engines(
    target: Engine,
    draft: Engine | None,
    worker: Worker,
    open_reader: OpenReader | None = None,
    *,
    stopped: Stop = lambda: False,
    draft_vocab: DraftVocab = "auto",
    draft_map: Sequence[str] = (),
) -> Engines:
    """Return engines timed by the machine's clock, which read no more of a prompt once the user wants no more."""
    clock = WallClock()
    tokens = None if draft is None else relate_draft(target.vocabulary, draft.vocabulary, draft_vocab, draft_map)
    return Engines(PromptKeeper(target, clock, stopped), draft, clock, open_reader, worker, tokens)
