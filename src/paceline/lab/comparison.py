"""Comparing plain and speculative decoding of one prompt: which is faster, by how much, and whether texts are equal.

The runs alternate, so that a machine that speeds up or slows down does so for both; every speculative run has a plain
one on either side, and plain is compared with plain as well, which shows how much of a ratio is noise.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from paceline.api import Model, Wrap
from paceline.core.arrays import FloatArray
from paceline.core.divergence import Divergence, first_difference, judge_divergence
from paceline.core.errors import CapabilityError, EngineError, InputError
from paceline.core.tree import DraftTree
from paceline.core.verify import Proposal, RowLogits, Verifier, Walk
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.exactness import read_rows
from paceline.options import GenerateOptions
from paceline.streams import Generation, Stream

OpenReader: TypeAlias = Callable[[int], Engine]
"""Loads a target once more, for a text of so many tokens and another sequence beside it."""

Stop: TypeAlias = Callable[[], bool]
"""Whether the user wants no more."""


class Stopped(Exception):  # noqa: N818 - the user's wish is no error
    """The user wants no more."""


MAX_REMAKES = 3
"""Times a speculative answer is made again until it differs from plain's."""

VERIFY_WIDTH = 6
"""Rows of a typical verifying pass."""

LAST_ROWS = 16
"""Rows at the end of an answer in which the effect of rounding is looked for: in a single row it may be small."""

NUM_PLACEMENTS = 4
"""Readings with the text's tokens at other places in the cache: in a single one nothing may be rounded differently."""

MAX_PLACEMENTS = 64
"""Readings at other places while they do not explain the difference that was seen.

With quantised weights rows are equal until a last bit turns the rounding of an activation, and then all that follows
differs. [One text in Q8_0: 15 of 150 readings differ, by up to 0.104.]
"""

MAX_NEIGHBOUR_ROWS = 4
"""Most tokens fed to another sequence between two passes over the text."""

CHANCE_OF_LEAVING = 0.2
"""How likely the other sequence is closed between two passes, which leaves gaps for the text's next tokens."""

MAX_ROUNDING = 10.0
"""Most that widths or places may change in half of the rows, in logit tolerances of the engine, for logits of spread
one.

The limit grows with the spread. Sequences that differ by more when another one is beside them are not kept apart, and
passes that differ by more are not of the same text. [Largest found in any row, in tolerances for each of the spread:
the embedded target, of places 3.3 in F16 and 0.9 in Q8_0, of widths 0.7 in Q8_0; SmolLM2-135M, of widths 5.8 in F16
(0.041, spread 3.6), 4.5 in Q8_0 (1.03, spread 3.8).]
"""

MAX_ROW_ROUNDING = 3.0
"""Factor of :data:`MAX_ROUNDING` for a single row.

[Gemma 3 270M in Q4_K_M, widths, 16 texts: 3.5 to 9.5 tolerances for each of the spread in half of the rows, 4 to 20 in
the worst of a text.]
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """Decoding speeds, in tokens per second, of three runs made one after the other."""

    plain_before: float
    speculative: float
    plain_after: float

    @property
    def speedup(self) -> float:
        """Speculative speed over the mean of the plain speeds around it."""
        return 2 * self.speculative / (self.plain_before + self.plain_after)

    @property
    def noise(self) -> float:
        """The second plain run's speed over the first's: 1 on a quiet machine."""
        return self.plain_after / self.plain_before


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a series of trials showed.

    Attributes:
        plain: the answer of the first plain run, or of the first whose speculative run gave another.
        speculative: the answer of that speculative run.
        divergence: where and why the two differ; ``None`` if they are equal.
        repeatable: whether all plain runs gave one text, and all speculative runs gave one text.
        num_drafted: draft tokens that were verified, in all speculative runs.
    """

    trials: Sequence[Trial]
    plain: Generation
    speculative: Generation
    divergence: Divergence | None
    repeatable: bool
    num_drafted: int

    @property
    def speedup(self) -> float:
        """Median over the trials."""
        return statistics.median(trial.speedup for trial in self.trials)

    @property
    def equal(self) -> bool:
        """Whether both gave the same tokens."""
        return first_difference(self.plain.token_ids, self.speculative.token_ids) is None

    @property
    def verdict(self) -> str:
        """Which way is faster.

        One of ``"speculation is faster"``, ``"plain is faster"``, ``"no difference beyond the noise"``, and, where both
        ways were plain decoding, ``"nothing was drafted"``.
        """
        if self.num_drafted == 0:
            return "nothing was drafted"
        spread = max(abs(trial.noise - 1.0) for trial in self.trials)
        slowest = min(trial.speedup for trial in self.trials)
        fastest = max(trial.speedup for trial in self.trials)
        if slowest > 1.0 and self.speedup - 1.0 > spread / 2:
            return "speculation is faster"
        if fastest < 1.0 and 1.0 - self.speedup > spread / 2:
            return "plain is faster"
        return "no difference beyond the noise"


def run_trials(
    model: Model,
    prompt: str | Sequence[int],
    options: GenerateOptions,
    repeats: int,
    *,
    stopped: Stop = lambda: False,
) -> Iterator[tuple[Trial, Generation, Generation]]:
    """Yield each trial with its plain and its speculative answer, as they are made.

    ``options`` must hold a seed, so that all runs answer alike. Raises ``Stopped`` where the user wants no more; the
    trial at hand is lost.
    """
    before = answer(model, prompt, options, speculate=False, stopped=stopped)
    for _ in range(repeats):
        speculative = answer(model, prompt, options, speculate=True, stopped=stopped)
        after = answer(model, prompt, options, speculate=False, stopped=stopped)
        yield Trial(_speed(before), _speed(speculative), _speed(after)), after, speculative
        before = after


def summarise(
    model: Model,
    prompt: str | Sequence[int],
    options: GenerateOptions,
    runs: Sequence[tuple[Trial, Generation, Generation]],
    *,
    open_reader: OpenReader | None = None,
    stopped: Stop = lambda: False,
) -> Comparison:
    """Sum up trials, and find out why the texts differ if they do; see :func:`explain`."""
    _, plain, speculative = next((run for run in runs if _texts_differ(run[1], run[2])), runs[0])
    repeatable = all(
        first_difference(plain.token_ids, p.token_ids) is None
        and first_difference(speculative.token_ids, s.token_ids) is None
        for _, p, s in runs
    )
    return Comparison(
        trials=[trial for trial, _, _ in runs],
        plain=plain,
        speculative=speculative,
        divergence=explain(model, prompt, options, plain, speculative, open_reader=open_reader, stopped=stopped),
        repeatable=repeatable,
        num_drafted=sum(speculative.stats.num_drafted for _, _, speculative in runs),
    )


def _texts_differ(plain: Generation, speculative: Generation) -> bool:
    return first_difference(plain.token_ids, speculative.token_ids) is not None


def explain(
    model: Model,
    prompt: str | Sequence[int],
    options: GenerateOptions,
    plain: Generation,
    speculative: Generation,
    *,
    open_reader: OpenReader | None = None,
    stopped: Stop = lambda: False,
) -> Divergence | None:
    """Say why two answers to a prompt differ; ``None`` if they do not, or may (rejection keeps the distribution only).

    Both are made again, to see the rows that the diverging tokens were drawn from. A policy that plans by the clock may
    make other rounds then. Where its text parts from plain's elsewhere, that place is judged; where the two agree in
    all of :data:`MAX_REMAKES` tries, the difference is unrepeatable.

    ``open_reader`` is called where the model's engine holds one sequence only, which hides the effect of places in the
    cache. ``stopped`` is called between rounds of answers that are made again, and before every reading, of which there
    may be seventy.
    """
    if not _texts_differ(plain, speculative) or not model.repeats_text(options):
        return None
    try:
        reference = plain.token_ids
        for _ in range(MAX_REMAKES):
            theirs, made = _generate_again(model, prompt, options, reference, speculate=True, stopped=stopped)
            index = theirs.index
            if index is None or theirs.row is None or first_difference(reference, made.token_ids) is None:
                continue
            ours, again = _generate_again(model, prompt, options, reference[:index], speculate=False, stopped=stopped)
            said, before = again.token_ids[index : index + 1], reference[index : index + 1]
            if ours.index != index or ours.row is None or said != before:
                # Plain decoding does not repeat itself.
                reference = again.token_ids
                continue
            history = ours.history
            measure = functools.partial(
                measure_rounding,
                model.target,
                history,
                len(history) - index,
                enough=float(np.abs(ours.row.astype(np.float64) - theirs.row).max()) / 2,
                # In a chain the next token takes the cell of the dropped one: places do not change.
                open_reader=open_reader if theirs.branched else None,
                stopped=stopped,
            )

            def measured(measure: Callable[[], float] = measure) -> float:
                # An idle sequence may hold the engine's last handle.
                model.pool.make_room()
                return measure()

            rounding = model.worker.call(measured)
            return judge_divergence(
                index,
                ours.row,
                theirs.row,
                ours.sampler,
                history,
                rounding=rounding,
                tolerance=model.target.capabilities.logit_tolerance,
            )
    except Stopped:
        return Divergence.without_rows(plain.token_ids, speculative.token_ids, "not judged")
    return Divergence.without_rows(plain.token_ids, speculative.token_ids, "unrepeatable")


def measure_rounding(
    engine: Engine,
    token_ids: Sequence[int],
    num_prompt: int,
    enough: float = 0.0,
    *,
    open_reader: OpenReader | None = None,
    stopped: Stop = lambda: False,
) -> float:
    """Return by how much logits near the end of a text depend on how it is read: on widths and on places in the cache.

    The answer, behind ``num_prompt`` tokens, is read as plain decoding reads it, one token a pass; then in wider
    passes; then one token a pass again, with another sequence growing and closing beside it. Nothing is drafted, and
    the text takes nothing back. Where the effect is less than ``enough``, more places are tried.

    The engine needs a sequence to spare, and a second one for places; without it, ``open_reader`` is asked for an
    engine that has both.
    """
    # A short answer has too few tokens for a wide pass, which begins in its prompt then.
    text = _Text(token_ids, max(min(num_prompt, len(token_ids) - LAST_ROWS), 1), stopped)
    widest = min(engine.capabilities.max_rows, engine.capabilities.max_outputs)
    plain = list(text.rows(engine, 1))
    of_widths, of_places = _Effect(), _Effect()
    for width in (VERIFY_WIDTH, widest):
        of_widths.add(_differences(plain, text.rows(engine, min(width, widest))))
    readings = _iter_readings(engine, text, plain, open_reader)
    for number, differences in enumerate(readings, start=1):
        of_places.add(differences)
        if number >= NUM_PLACEMENTS and max(of_widths.largest, of_places.largest) >= enough:
            break
    readings.close()
    most = MAX_ROUNDING * engine.capabilities.logit_tolerance * max(1.0, _spread(plain))
    return max(effect.largest if effect.is_rounding(most) else 0.0 for effect in (of_widths, of_places))


@dataclass(slots=True)
class _Effect:
    """How much the logits of a text's rows change where it is read differently.

    Attributes:
        largest: change in any row.
        typical: change in half of the rows of the reading in which that is most.
    """

    largest: float = 0.0
    typical: float = 0.0

    def add(self, differences: Sequence[float]) -> None:
        """Count a reading, by the largest change in each of its rows."""
        self.largest = max(self.largest, *differences)
        self.typical = max(self.typical, statistics.median(differences))

    def is_rounding(self, most: float) -> bool:
        """Whether rounding explains as much, where it changes half of the rows by ``most``."""
        return self.typical <= most and self.largest <= MAX_ROW_ROUNDING * most


def _iter_readings(
    engine: Engine, text: _Text, plain: Sequence[FloatArray], open_reader: OpenReader | None
) -> Generator[list[float], None, None]:
    """Yield by how much each row of passes of one token differs where the tokens lie at other places in the cache.

    There are none where the engine has no second sequence and none can be loaded that has, or no cells for it.
    """
    loaded: Engine | None = None
    try:
        if engine.capabilities.max_sequences < 2:
            if open_reader is None:
                return
            loaded = engine = open_reader(len(text.token_ids))
            plain = list(text.rows(engine, 1))
        for seed in range(MAX_PLACEMENTS):
            neighbour = _Neighbour(engine, text.token_ids, seed)
            try:
                differences = _differences(plain, text.rows(engine, 1, neighbour))
            finally:
                neighbour.leave()
            yield differences
    except (CapabilityError, EngineError):
        pass
    finally:
        if loaded is not None:
            loaded.close()


def _spread(rows: Sequence[FloatArray]) -> float:
    """Return the spread of a row's logits: the mean of what would be their standard deviation if they were normal.

    Banned tokens, with huge negative logits, do not count.
    """
    return float(np.mean([np.subtract(*np.percentile(row, (84.1, 15.9))) / 2 for row in rows]))


def _differences(plain: Sequence[FloatArray], rows: Iterator[FloatArray]) -> list[float]:
    return [float(np.abs(ours - theirs).max()) for ours, theirs in zip(plain, rows, strict=True)]


@dataclass(frozen=True, slots=True)
class _Text:
    """Prompt and answer, to be read in several ways."""

    token_ids: Sequence[int]
    num_prompt: int
    stopped: Stop

    def rows(self, engine: Engine, width: int, neighbour: _Neighbour | None = None) -> Iterator[FloatArray]:
        """Return the rows ``[vocab]`` of the answer's last tokens, read ``width`` tokens a pass as they are asked for.

        A neighbour moves before every pass over the answer. Raises ``Stopped`` where the user wants no more.
        """
        if self.stopped():
            raise Stopped
        return read_rows(
            engine,
            self.token_ids,
            width,
            num_prompt=self.num_prompt,
            first_wanted=max(len(self.token_ids) - LAST_ROWS, self.num_prompt - 1),
            before_pass=None if neighbour is None else neighbour.move,
        )


class _Neighbour:
    """Another sequence in the cache: its cells come to lie between a text's, and closing it leaves gaps among them.

    Rejected drafts leave such gaps too. They are not used here, because a divergence may be the fault of taking them
    back: rows of the text's own sequence that were not dropped cleanly would pass for rounding. (Nor would they help in
    a chain: there the next token takes the place of the dropped one.)
    """

    def __init__(self, engine: Engine, token_ids: Sequence[int], seed: int) -> None:
        self._engine = engine
        self._token_ids = token_ids
        self._random = random.Random(seed)
        self._sequence = engine.open()

    def move(self) -> None:
        """Grow by some tokens, or by none, now and then starting over."""
        engine, capabilities = self._engine, self._engine.capabilities
        if self._random.random() < CHANCE_OF_LEAVING:
            self.leave()
            self._sequence = engine.open()
        room = capabilities.context_length - engine.length(self._sequence)
        count = self._random.randint(0, min(MAX_NEIGHBOUR_ROWS, capabilities.max_rows, room))
        if count > 0:
            token_ids = self._random.choices(self._token_ids, k=count)
            engine.forward([Step(self._sequence, token_ids, range(COMMITTED_END, count - 1), [])])
            engine.commit(self._sequence, range(count))

    def leave(self) -> None:
        self._engine.close_sequence(self._sequence)


class _RowRecordingVerifier:
    """Judges as another verifier does, and keeps the row that the first unexpected token was drawn from.

    Tokens after the ``expected`` ones are unexpected.

    Attributes:
        index: of the unexpected token in the answer; ``None`` while there is none.
        row: that it was drawn from.
        history: all tokens before it.
        branched: whether a tree had branches until then.
    """

    def __init__(self, inner: Verifier, expected: Sequence[int], num_prompt: int) -> None:
        self.name = inner.name
        self.sampler = inner.sampler
        self.judges_every_draw = inner.judges_every_draw
        self.index: int | None = None
        self.row: FloatArray | None = None
        self.history: Sequence[int] = ()
        self.branched = False
        self._inner = inner
        self._expected = expected
        self._num_prompt = num_prompt

    def propose(
        self, logits: FloatArray, position: int, history: Sequence[int], count: int, *, margins: bool = False
    ) -> list[Proposal]:
        return self._inner.propose(logits, position, history, count, margins=margins)

    def walk(self, tree: DraftTree, num_rows: int, row_logits: RowLogits, history: Sequence[int]) -> Walk:
        rows: dict[int, FloatArray] = {}

        def recorded(node: int) -> FloatArray:
            row = row_logits(node)
            if self.index is None:
                rows[tree.depths[node]] = row.copy()
            return row

        walk = self._inner.walk(tree, num_rows, recorded, history)
        if self.index is None:
            first = len(history) - self._num_prompt
            expected = self._expected[first : first + len(walk.token_ids)]
            depth = first_difference(expected, walk.token_ids)
            if depth is not None:
                self.index, self.row = first + depth, rows[depth]
                self.history = [*history, *walk.token_ids[:depth]]
            self.branched = self.branched or len(set(tree.parents)) < len(tree)
        return walk


def _generate_again(
    model: Model,
    prompt: str | Sequence[int],
    options: GenerateOptions,
    expected: Sequence[int],
    *,
    speculate: bool,
    stopped: Stop,
) -> tuple[_RowRecordingVerifier, Generation]:
    """Make an answer again; return the state where it parts from the expected tokens, and the answer."""
    made: list[_RowRecordingVerifier] = []

    def watch(verifier: Verifier, prompt_ids: Sequence[int]) -> Verifier:
        made.append(_RowRecordingVerifier(verifier, expected, len(prompt_ids)))
        return made[0]

    with _stream(model, prompt, options, speculate, wrap=watch) as stream:
        answered = finish(stream, stopped)
        return made[0], answered


def answer(
    model: Model,
    prompt: str | Sequence[int],
    options: GenerateOptions,
    *,
    speculate: bool,
    stopped: Stop = lambda: False,
) -> Generation:
    """Answer a prompt with or without speculation. Where the user wants no more, cancel it and raise ``Stopped``."""
    return finish(_stream(model, prompt, options, speculate), stopped)


def finish(stream: Stream, stopped: Stop) -> Generation:
    """Return a stream's answer.

    Where the user wants no more, cancel it and raise ``Stopped``, unless all of it was read.
    """
    rounds = stream.rounds()
    while not stopped() or stream.is_read:
        if next(rounds, None) is None:
            return stream.so_far()
    stream.close()
    raise Stopped


def _stream(
    model: Model,
    prompt: str | Sequence[int],
    options: GenerateOptions,
    speculate: bool,
    *,
    wrap: Wrap | None = None,
) -> Stream:
    chosen = options.copy()
    chosen["speculate"] = speculate
    # Rows that come from passes of other widths differ by rounding, so each answer begins with the same passes.
    chosen["cache_prompt"] = False
    return model._start(prompt, model.read_options(chosen), wrap=wrap)


def _speed(generation: Generation) -> float:
    speed = generation.stats.predicted_per_second
    if speed is None:
        raise InputError(
            f"the answer has {len(generation.token_ids)} token, and the first comes with the prompt: there is no "
            "decoding speed to compare; give `max_tokens=2` or more, or another prompt"
        )
    return speed
