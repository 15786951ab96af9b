"""What a cut costs: how often the cut model's drafts are accepted, and how long its passes take.

The target's own answers are what drafts are measured on. Those that layers are chosen by are others than those that the
result is measured on, so that what is said of it holds for texts that it was not made for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np

from paceline.core.errors import InputError, PacelineError
from paceline.core.params import StopRules
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.loading import open_engine
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.lab.agreement import DRAFT, MAX_CHUNK, Agreement, measure_agreement, measure_survival
from paceline.lab.answers import Answers, WrittenAnswer
from paceline.lab.comparison import Stop, Stopped
from paceline.lab.intervals import ALL, Depth, Estimate, estimate
from paceline.lab.replaying.recording import Recording
from paceline.lab.samples import Sample, make_tasks
from paceline.lab.sessions import Engines, Session, wall_engines
from paceline.model_pair import ModelPair, open_pair
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.runtime.worker import Worker
from paceline.vocabularies.relation import relate_vocabularies

Half: TypeAlias = Literal["choosing", "judging"]
Tell: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, and how much of how much is."""

CONTEXT: Final = 256
"""Context that models are opened with here, in tokens."""
DEPTH: Final = 4
"""Tokens of a draft, of which the accepted ones are counted."""

_SHAPES: Final[Mapping[Half, tuple[int, int]]] = {"choosing": (12, 32), "judging": (16, 48)}
"""Answers of each half, and tokens of each. Texts say more than tokens, as tokens of one text are correlated."""
_PASSES: Final = 48
"""Passes of each model that are timed."""
_FIRST_PASSES: Final = 4
"""Passes before them."""
_PROMPT: Final = 32
"""Tokens of context that timed passes have at least."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How a model's drafts fare with a target.

    Attributes:
        agreement: token by token; ``None`` where its tokens are others, and drafts are translated.
        survival: share of places where the first so many draft tokens are right, by depth.
        texts: answers of the target.
        tokens: in all of them.
    """

    agreement: Agreement | None
    survival: Sequence[Depth]
    texts: int
    tokens: int

    @property
    def accepted(self) -> float:
        """Tokens that are accepted of :data:`DEPTH` drafted ones."""
        return sum(depth.survival or 0.0 for depth in self.survival)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Passes of one token, in turns.

    Attributes:
        before_s: median of the uncut model's.
        after_s: median of the cut model's.
        ratio: of each turn, the second over the first.
    """

    before_s: float
    after_s: float
    ratio: Estimate


class Judge:
    """Measures models as drafts of one target, on its answers to two halves of samples."""

    def __init__(
        self,
        target: ModelOptions,
        halves: tuple[Sequence[Sample], Sequence[Sample]],
        *,
        temperature: float,
        seed: int,
        keep_answers: bool,
        stopped: Stop,
        tell: Tell,
    ) -> None:
        self._target = dataclasses.replace(target, context_length=CONTEXT)
        self._halves: dict[Half, Sequence[Sample]] = {"choosing": halves[0], "judging": halves[1]}
        self._temperature = temperature
        self._seed = seed
        self._answers = Answers(self._target, temperature, keep=keep_answers)
        self._written: dict[Half, list[WrittenAnswer]] = {}
        self._vocab_size = 0
        self._stopped = stopped
        self._tell = tell

    def write(self, half: Half) -> list[WrittenAnswer]:
        """Return the target's answers to one half, written once.

        Raises:
            InputError: there is no answer that says anything.
        """
        if half not in self._written:
            with self._opened(None) as (_, engines, _):
                self._written[half] = self._write(engines, half)
        return self._written[half]

    def _write(self, engines: Engines, half: Half) -> list[WrittenAnswer]:
        texts, tokens = _SHAPES[half]
        self._vocab_size = engines.target.vocabulary.size
        tasks = make_tasks(
            self._halves[half],
            engines.target.vocabulary,
            tokens=tokens,
            context_length=CONTEXT,
            seed=self._seed,
        )
        texts = min(texts, len(tasks))
        self._tell("the target answers", 0, texts)
        written = self._answers.write(
            engines,
            tasks,
            texts,
            stopped=self._stopped,
            in_time=lambda: True,
            report=lambda count: self._tell("the target answers", count, texts),
        )
        if not written:
            raise InputError(
                f"none of the target's {len(tasks)} answers can be used, as they loop or end at once: sample them "
                "(--temp 0.8), give another text (--text), or leave out what has to be measured"
            )
        return written

    def overlap(self, model: ModelOptions, unshared_ids: Sequence[int]) -> float:
        """Return the acceptance of a model's first draft tokens (1 - TV) on the first half.

        The model's tokens are the target's, but for ``unshared_ids``.
        """
        written = self.write("choosing")
        engine = open_engine(dataclasses.replace(model, context_length=CONTEXT, branches=0))
        try:
            return self._agree(engine, written, unshared_ids).overlap[ALL].value or 0.0
        finally:
            engine.close()

    def accept(self, path: Path) -> Acceptance:
        """Measure a model as a draft on the second half.

        Raises:
            VocabularyMismatchError: it cannot draft for the target.
        """
        written = self.write("judging")
        with self._opened(path) as (pair, engines, worker):
            assert pair.draft is not None
            ours, theirs = pair.target.vocabulary, pair.draft.vocabulary
            relation = relate_vocabularies(ours, theirs)
            recordings: list[Recording] = []
            for each in written:
                self._tell("drafting", len(recordings), len(written))
                with Session(engines, [DRAFT], NO_SPECULATION) as session:
                    recordings.append(
                        session.record(
                            each.task.prompt_ids,
                            each.token_ids,
                            params=self._answers.params(each.task),
                            rules=StopRules(each.task.max_tokens),
                            finish_reason=each.finish_reason,
                            name=each.task.name,
                            depth=DEPTH,
                            stopped=self._stopped,
                        )
                    )
            draft, agreement = pair.draft, None
            if relation.fits:
                agreement = worker.call(lambda: self._agree(draft, written, relation.unshared_ids))
        survival = measure_survival(recordings, [each.task.workload for each in written])[ALL]
        return Acceptance(agreement, survival, len(written), sum(len(each.token_ids) for each in written))

    def _agree(self, draft: Engine, written: Sequence[WrittenAnswer], unshared_ids: Sequence[int]) -> Agreement:
        return measure_agreement(
            draft,
            written,
            target_vocab_size=self._vocab_size,
            unshared_ids=unshared_ids,
            temperature=self._temperature,
        )

    @contextlib.contextmanager
    def _opened(self, draft: Path | None) -> Iterator[tuple[ModelPair, Engines, Worker]]:
        options = None
        if draft is not None:
            # Rows of both are compared, so as many are read at once.
            options = dataclasses.replace(DraftOptions(draft).beside(self._target), rows_read=MAX_CHUNK)
        with Worker() as worker, worker.entered(_managed(self._target, options)) as pair:
            yield pair, wall_engines(pair.target, pair.draft, worker, stopped=self._stopped), worker


@contextlib.contextmanager
def _managed(target: ModelOptions, draft: ModelOptions | None) -> Iterator[ModelPair]:
    pair = open_pair(target, draft)
    try:
        yield pair
    finally:
        pair.close()


def time_passes(before: ModelOptions, after: ModelOptions, *, stopped: Stop, tell: Tell) -> PassTimes:
    """Time passes of one token of both models, in turns; raise ``Stopped`` where the user wants no more."""
    with contextlib.ExitStack() as stack:
        runners = []
        for options in (before, after):
            engine = open_engine(dataclasses.replace(options, context_length=CONTEXT, branches=0))
            stack.callback(engine.close)
            runners.append(_Runner(engine))
        seconds: list[tuple[float, float]] = []
        for turn in range(_FIRST_PASSES + _PASSES):
            if stopped():
                raise Stopped
            tell("timing passes", turn, _FIRST_PASSES + _PASSES)
            first, second = (runner.run(turn) for runner in (runners if turn % 2 else runners[::-1]))
            if turn >= _FIRST_PASSES:
                seconds.append((first, second) if turn % 2 else (second, first))
    return PassTimes(
        float(np.median([each[0] for each in seconds])),
        float(np.median([each[1] for each in seconds])),
        estimate([each[1] / each[0] for each in seconds]),
    )


class _Runner:
    """One model that reads on, a token at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sequence = engine.open()
        read_tokens(engine, self._sequence, _PROMPT)

    def run(self, turn: int) -> float:
        """Return the seconds of a pass."""
        token_id = _any_token(self._engine, _PROMPT + turn)
        started_s = time.perf_counter()
        self._engine.forward([Step(self._sequence, (token_id,), (COMMITTED_END,), (0,))]).logits(0, 0)
        took_s = time.perf_counter() - started_s
        self._engine.commit(self._sequence, (0,))
        return took_s


def check_loads(options: ModelOptions) -> None:
    """Load a model and read some tokens; raise ``InputError`` where it says no numbers."""
    engine = open_engine(dataclasses.replace(options, context_length=CONTEXT, branches=0, rollback=False))
    try:
        row = read_tokens(engine, engine.open(), 8)
    except PacelineError as error:
        raise InputError(f"the cut model cannot be run: {error}") from None
    finally:
        engine.close()
    if not np.isfinite(row).all():
        raise InputError("the cut model computes no finite numbers: cut less of it")


def read_tokens(engine: Engine, sequence: int, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Read any ``count`` tokens, and return the last one's row ``[vocab]``."""
    token_ids = [_any_token(engine, place) for place in range(count)]
    output = engine.forward([Step(sequence, token_ids, range(COMMITTED_END, count - 1), (count - 1,))])
    row = np.array(output.logits(0, 0))
    engine.commit(sequence, range(count))
    return row


def _any_token(engine: Engine, place: int) -> int:
    return 7919 * (place + 1) % engine.vocabulary.size
