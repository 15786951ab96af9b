"""Plain against speculative decoding of one prompt: which is faster, by how much, and whether the texts are equal.

The runs alternate, so that a machine that speeds up or slows down does so for both; every speculative run has a plain
one on either side, and plain is compared with plain as well, which shows how much of a ratio is noise.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from paceline.api import GenerateOptions, Generation, Model, Stream
from paceline.core.divergence import Divergence, first_difference, judge_divergence
from paceline.core.errors import CapabilityError, InputError, NoRoomError, PacelineError
from paceline.core.noise import Float64Array
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.core.verify import Proposal, RowLogits, Verifier, Walk
from paceline.engines.base import COMMITTED_END, Engine, FloatArray, Step

OpenReader: TypeAlias = Callable[[int], Engine]
"""Loads a target once more, for a text of so many tokens and another sequence beside it."""

MOST_REMAKES = 3
"""Times a speculative answer is made again until it differs from plain's where it did before."""

VERIFY_WIDTH = 6
"""Rows of a typical verifying pass."""

LAST_ROWS = 16
"""Rows at the end of a text in which the effect of rounding is looked for: in a single row it may be small."""

NUM_PLACEMENTS = 4
"""Readings with the text's tokens at other places in the cache: in a single one nothing may be rounded differently."""

MOST_PLACEMENTS = 64
"""Readings at other places while what they show does not explain the difference that was seen. With quantised weights
nothing differs but where a last bit turns the rounding of an activation, and then all that follows does. [One text in
Q8_0: 15 of 150 readings differ, by up to 0.104.]"""

MOST_NEIGHBOUR_ROWS = 4
"""Most tokens fed to another sequence between two passes over the text."""

CHANCE_OF_LEAVING = 0.2
"""How likely the other sequence is closed between two passes, which leaves gaps for the text's next tokens."""

MOST_OF_PLACEMENT = 10.0
"""Most that the place in the cache may explain, in logit tolerances of the engine; sequences that differ by more when
another one is beside them are not kept apart. [Largest found: 6.4 in F16 (0.013), 1.8 in Q8_0 (0.107).]"""


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
        trials: the trials, in order.
        plain: the answer of the first plain run.
        speculative: the answer of the first speculative run.
        divergence: where and why the two differ; ``None`` if they are equal.
        repeatable: whether all plain runs gave one text, and all speculative runs gave one text.
    """

    trials: Sequence[Trial]
    plain: Generation
    speculative: Generation
    divergence: Divergence | None
    repeatable: bool

    @property
    def speedup(self) -> float:
        """Median speedup of the trials."""
        return statistics.median(trial.speedup for trial in self.trials)

    @property
    def equal(self) -> bool:
        """Whether both gave the same tokens."""
        return first_difference(self.plain.token_ids, self.speculative.token_ids) is None

    @property
    def verdict(self) -> str:
        """One of ``"speculation is faster"``, ``"plain is faster"`` and ``"no difference beyond the noise"``."""
        spread = max(abs(trial.noise - 1.0) for trial in self.trials)
        slowest = min(trial.speedup for trial in self.trials)
        fastest = max(trial.speedup for trial in self.trials)
        if slowest > 1.0 and self.speedup - 1.0 > spread / 2:
            return "speculation is faster"
        if fastest < 1.0 and 1.0 - self.speedup > spread / 2:
            return "plain is faster"
        return "no difference beyond the noise"


def run_trials(
    model: Model, prompt: str | Sequence[int], options: GenerateOptions, repeats: int
) -> Iterator[tuple[Trial, Generation, Generation]]:
    """Yield each trial with its plain and its speculative answer, as they are made.

    ``options`` must hold a seed, so that all runs answer alike.
    """
    before = answer(model, prompt, options, speculate=False)
    for _ in range(repeats):
        speculative = answer(model, prompt, options, speculate=True)
        after = answer(model, prompt, options, speculate=False)
        yield Trial(_speed(before), _speed(speculative), _speed(after)), after, speculative
        before = after


def summarise(
    model: Model,
    prompt: str | Sequence[int],
    options: GenerateOptions,
    runs: Sequence[tuple[Trial, Generation, Generation]],
    *,
    open_reader: OpenReader | None = None,
) -> Comparison:
    """Put trials together, and find out why the texts differ if they do; see :func:`explain`."""
    _, plain, speculative = runs[0]
    repeatable = all(
        first_difference(plain.token_ids, p.token_ids) is None
        and first_difference(speculative.token_ids, s.token_ids) is None
        for _, p, s in runs
    )
    return Comparison(
        trials=[trial for trial, _, _ in runs],
        plain=plain,
        speculative=speculative,
        divergence=explain(model, prompt, options, plain, speculative, open_reader=open_reader),
        repeatable=repeatable,
    )


def explain(
    model: Model,
    prompt: str | Sequence[int],
    options: GenerateOptions,
    plain: Generation,
    speculative: Generation,
    *,
    open_reader: OpenReader | None = None,
) -> Divergence | None:
    """Say why two answers to a prompt differ; ``None`` if they do not, or may (rejection keeps the distribution only).

    Both are made again, to see the rows that the diverging tokens were drawn from. A policy that plans by the clock may
    make other rounds then, and the texts agree: that is tried some times before they are called unrepeatable.

    Args:
        model: that gave the answers.
        prompt: as it was given then.
        options: likewise.
        plain: the answer without speculation.
        speculative: the other one.
        open_reader: asked where the model's engine holds one sequence only, which hides what places in the cache do.
    """
    index = first_difference(plain.token_ids, speculative.token_ids)
    if index is None or not model.repeats_text(options):
        return None
    plain_row, request = _row_at(model, prompt, options, index, speculate=False)
    for _ in range(MOST_REMAKES):
        speculative_row, again = _row_at(model, prompt, options, index, speculate=True)
        ours, theirs = (made.token_ids[made.num_prompt :] for made in (request, again))
        if first_difference(ours, theirs) == index:
            break
    else:
        return Divergence.unrepeatable(index, plain.token_ids, speculative.token_ids)
    if plain_row is None or speculative_row is None:
        return Divergence.unrepeatable(index, plain.token_ids, speculative.token_ids)
    history = request.token_ids[: request.num_prompt + index]
    with _reader(model.target, len(history), open_reader) as reader:
        rounding = measure_rounding(
            reader,
            history,
            request.num_prompt,
            enough=float(np.abs(plain_row.astype(np.float64) - speculative_row).max()) / 2,
        )
    return judge_divergence(
        index,
        plain_row,
        speculative_row,
        request.params,
        history,
        rounding=rounding,
        tolerance=model.target.capabilities.logit_tolerance,
    )


@contextmanager
def _reader(engine: Engine, num_tokens: int, open_reader: OpenReader | None) -> Iterator[Engine]:
    """Yield an engine with a second sequence if there is one or one can be loaded; the engine there is otherwise."""
    loaded: Engine | None = None
    if open_reader is not None and engine.capabilities.max_sequences < 2:
        with suppress(PacelineError):
            loaded = open_reader(num_tokens)
    try:
        yield loaded or engine
    finally:
        if loaded is not None:
            loaded.close()


def measure_rounding(engine: Engine, token_ids: Sequence[int], num_prompt: int, enough: float = 0.0) -> float:
    """Return by how much logits near the end of a text depend on how it is read: on widths and on places in the cache.

    The answer is read as plain decoding reads it, one token a pass; then in wider passes; then one token a pass again,
    with another sequence growing and closing beside it. Nothing is drafted, and the text takes nothing back.

    Args:
        engine: it must have a sequence to spare, and a second one for places in the cache to be measured.
        token_ids: prompt and answer.
        num_prompt: how many of them are the prompt.
        enough: a difference to be explained; where less is found, more places are tried.
    """
    widest = min(engine.capabilities.max_rows, engine.capabilities.max_outputs)
    plain = _last_rows(engine, token_ids, num_prompt, 1)
    by_width = [_last_rows(engine, token_ids, num_prompt, min(width, widest)) for width in (VERIFY_WIDTH, widest)]
    width_effect = max(float(np.abs(plain - rows).max()) for rows in by_width)
    place_effect = 0.0
    for number, rows in enumerate(_rows_at_other_places(engine, token_ids, num_prompt), start=1):
        place_effect = max(place_effect, float(np.abs(plain - rows).max()))
        if number >= NUM_PLACEMENTS and max(width_effect, place_effect) >= enough:
            break
    if place_effect > MOST_OF_PLACEMENT * engine.capabilities.logit_tolerance:
        return width_effect
    return max(width_effect, place_effect)


def _rows_at_other_places(engine: Engine, token_ids: Sequence[int], num_prompt: int) -> Iterator[Float64Array]:
    """Yield what :func:`_last_rows` returns in passes of one token, for `MOST_PLACEMENTS` placements in the cache.

    There are none where the engine has no second sequence, or no cells for it.
    """
    try:
        for seed in range(MOST_PLACEMENTS):
            neighbour = _Neighbour(engine, token_ids, seed)
            try:
                rows = _last_rows(engine, token_ids, num_prompt, 1, neighbour)
            finally:
                neighbour.leave()
            yield rows
    except (CapabilityError, NoRoomError):
        pass


class _Neighbour:
    """Another sequence in the cache: its cells come to lie between a text's, and its going leaves gaps among them.

    Rejected drafts leave such gaps too. They are not used here, because taking them back is what a divergence may be
    the fault of: rows of the text's own sequence that were not dropped cleanly would pass for rounding. (Nor would
    they do in a chain: there the next token takes the place of the dropped one.)
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
        count = self._random.randint(0, min(MOST_NEIGHBOUR_ROWS, capabilities.max_rows, room))
        if count > 0:
            token_ids = self._random.choices(self._token_ids, k=count)
            engine.forward([Step(self._sequence, token_ids, range(COMMITTED_END, count - 1), [])])
            engine.commit(self._sequence, range(count))

    def leave(self) -> None:
        """Free the cells."""
        self._engine.close_sequence(self._sequence)


def _last_rows(
    engine: Engine, token_ids: Sequence[int], num_prompt: int, width: int, neighbour: _Neighbour | None = None
) -> Float64Array:
    """Return the rows ``[LAST_ROWS, vocab]`` of a text's last tokens, the answer read ``width`` tokens a pass.

    A neighbour moves before every pass over the answer.
    """
    sequence = engine.open()
    first_wanted = max(len(token_ids) - LAST_ROWS, 0)
    rows = []
    try:
        start = 0
        while start < len(token_ids):
            in_prompt = start < num_prompt
            if neighbour is not None and not in_prompt:
                neighbour.move()
            end = min(start + engine.capabilities.max_rows, num_prompt) if in_prompt else start + width
            chunk = token_ids[start:end]
            wanted = [row for row in range(len(chunk)) if start + row >= first_wanted]
            output = engine.forward([Step(sequence, chunk, range(COMMITTED_END, len(chunk) - 1), wanted)])
            rows += [output.logits(0, index).astype(np.float64) for index in range(len(wanted))]
            engine.commit(sequence, range(len(chunk)))
            start += len(chunk)
    finally:
        engine.close_sequence(sequence)
    return np.stack(rows)


class _RecordingVerifier:
    """Judges as another verifier does, and keeps a copy of the row that one position's token is drawn from."""

    def __init__(self, inner: Verifier, position: int) -> None:
        self.name = inner.name
        self.sampler = inner.sampler
        self.judges_every_draw = inner.judges_every_draw
        self.row: FloatArray | None = None
        self._inner = inner
        self._position = position

    def propose(
        self, logits: FloatArray, position: int, history: Sequence[int], count: int, *, margins: bool = False
    ) -> list[Proposal]:
        return self._inner.propose(logits, position, history, count, margins=margins)

    def walk(self, tree: DraftTree, num_rows: int, row_logits: RowLogits, history: Sequence[int]) -> Walk:
        def recorded(node: int) -> FloatArray:
            row = row_logits(node)
            if len(history) + tree.depths[node] == self._position:
                self.row = row.copy()
            return row

        return self._inner.walk(tree, num_rows, recorded, history)


def _row_at(
    model: Model, prompt: str | Sequence[int], options: GenerateOptions, index: int, *, speculate: bool
) -> tuple[FloatArray | None, Request]:
    """Return the row from which token ``index`` of the answer is drawn, and the finished request.

    There is no row if the answer, made again, ends before it.
    """
    with _stream(model, prompt, options, speculate) as stream:
        request = stream.request
        verifier = _RecordingVerifier(request.verifier, request.num_prompt + index)
        request.verifier = verifier
        stream.result()
    return verifier.row, request


def answer(model: Model, prompt: str | Sequence[int], options: GenerateOptions, *, speculate: bool) -> Generation:
    """Answer a prompt with or without speculation."""
    return _stream(model, prompt, options, speculate).result()


def _stream(model: Model, prompt: str | Sequence[int], options: GenerateOptions, speculate: bool) -> Stream:
    chosen = options.copy()
    chosen["speculate"] = speculate
    return model.stream(prompt, **chosen)


def _speed(generation: Generation) -> float:
    speed = generation.stats.predicted_per_second
    if speed is None:
        raise InputError(
            f"the answer has {len(generation.token_ids)} token, and the first comes with the prompt: there is no "
            "decoding speed to compare; give -n 2 or more, or another prompt"
        )
    return speed
