"""An engine that is measured: passes as rounds make them, after as much context as is wanted."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.errors import ContextLengthError, NoRoomError
from paceline.core.params import SamplingParams
from paceline.core.sampling import RowSampler
from paceline.engines.base import COMMITTED_END, Engine, EngineCapabilities, Step
from paceline.planning.costs.meter import Meter
from paceline.planning.costs.profile import MAX_WIDTH

_GROWTH: Final = 64
"""Tokens by which the context may outgrow what it should be, where an engine cannot take them back."""

_SAMPLED_ROWS: Final = 9
_MIN_CONTEXT: Final = 4
_SHORTEST_ROW_S: Final = 1e-9


def widest_pass(capabilities: EngineCapabilities, *, verifies: bool) -> int:
    """Return the widest pass that is measured: half a context, so that there is one before it."""
    outputs = capabilities.max_outputs if verifies else capabilities.max_rows
    return min(capabilities.max_rows, outputs, capabilities.context_length // 2, MAX_WIDTH)


class Subject:
    """An engine that is measured, and one sequence on it whose cache holds ``context`` tokens before every pass.

    Args:
        meter: times every pass.
        rng: draws the tokens. Random ones make the experts of a mixture differ from row to row more than text does, so
            that wide passes are not promised too cheaply.
        verifies: passes are a target's rounds, with every row read and a part of the path committed. Else they are a
            draft's: the last row is read, and all is committed.
    """

    def __init__(self, engine: Engine, meter: Meter, rng: random.Random, *, verifies: bool) -> None:
        capabilities = engine.capabilities
        if capabilities.context_length < _MIN_CONTEXT:
            raise ContextLengthError(
                f"a context of {capabilities.context_length} tokens is too short to measure in: "
                f"give at least {_MIN_CONTEXT} (`context_length`, or `DraftOptions.context_length` for a draft model)"
            )
        self.engine = engine
        self.verifies = verifies
        self.context = 0
        self.sequence = engine.open()
        self.widest = widest_pass(capabilities, verifies=verifies)
        self._capabilities = capabilities
        self._meter = meter
        self._rng = rng
        self._row_s = math.inf
        self._row_logits: FloatArray = np.zeros(1)
        # Engines that can copy cells have a long context without reading it, at any speed of the machine.
        self._lengthen: Callable[[int, int], bool] = getattr(engine, "lengthen", lambda sequence, length: False)
        self._is_copying = False
        end_ids = engine.vocabulary.end_ids
        self._token_ids = [i for i in range(engine.vocabulary.size) if i not in end_ids] or [0]

    def tokens(self, count: int) -> list[int]:
        """Return tokens to feed."""
        return self._rng.choices(self._token_ids, k=count)

    def warm_up(self) -> None:
        """Make the first pass, which reads the model from the disk and builds what later ones use again."""
        self._append(1)
        self._is_copying = self._lengthen(self.sequence, self.context)

    def fill(self, length: int, share: float) -> None:
        """Put tokens into the cache until ``context`` is ``length``, as far as this share of the budget and room do."""
        self.fill_to(self.reachable(length, share))

    def fill_to(self, length: int) -> None:
        """Put tokens into the cache until ``context`` is ``length``, as far as there are cells."""
        if self._is_copying and length > self.context:
            if self._lengthen(self.sequence, length):
                self.context = length
                # In the next pass llama.cpp turns the copied keys to their places.
                self.time_pass(1)
                return
            self.context = self.engine.length(self.sequence)
        missing = length - self.context
        while missing > 0:
            rows = min(missing, self._capabilities.max_rows)
            try:
                self._append(rows)
            except NoRoomError:
                return
            missing -= rows

    def reachable(self, length: int, share: float) -> int:
        """Return the length, up to ``length``, that this share of the budget can give the context."""
        rows: float = min(length, self._capabilities.context_length - self.widest) - self.context
        if not self._is_copying:
            rows = min(
                rows,
                self._meter.passes_for(share) * self._capabilities.max_rows,
                self._meter.budget.max_s * share / self._row_s,
            )
        return self.context + max(0, int(rows))

    def rewind(self, context: int) -> None:
        """Make the context shorter."""
        self.context = context
        self._restore()

    def time_pass(self, rows: int) -> float:
        """Return the seconds of a pass of ``rows`` rows; the context is afterwards as it was before.

        Raises:
            NoRoomError: the cache has no free cells for them.
        """
        return self.time_round(rows, ())

    def time_round(self, rows: int, others: Sequence[int]) -> float:
        """Return the seconds of a pass of ``rows`` rows for this sequence and for each of ``others``.

        Afterwards their contexts are as they were before. Engines that cannot take tokens back let others grow.

        Raises:
            NoRoomError: the cache has no free cells for them.
        """
        outputs = range(rows) if self.verifies else range(rows - 1, rows)
        kept = (rows + 1) // 2 if self.verifies else rows
        if self._capabilities.max_rollback is not None:
            kept = max(kept, rows - self._capabilities.max_rollback)
        sequences = [self.sequence, *others]
        steps = [self._step(sequence, rows, outputs) for sequence in sequences]
        times_s: list[float] = []
        with self._meter.timing(times_s):
            output = self.engine.forward(steps)
            output.wait()
            for number in range(len(steps)):
                for index in range(len(outputs)):
                    int(output.logits(number, index).argmax())
            for sequence in sequences:
                self.engine.commit(sequence, range(kept))
        self._note(rows * len(steps), times_s[0])
        self._restore()
        if self._capabilities.max_rollback is None:
            for sequence in others:
                self.engine.trim(sequence, self.engine.length(sequence) - kept)
        return times_s[0]

    @contextlib.contextmanager
    def copies(self, count: int) -> Iterator[list[int]]:
        """Open sequences with the context of this one, in cells of their own, and close them afterwards.

        Raises:
            NoRoomError: the cache has no free cells for them.
            CapabilityError: the engine has not so many sequences, or cannot save this one.
        """
        others: list[int] = []
        try:
            saved = self.engine.save(self.sequence)
            while len(others) < count:
                others.append(self.engine.restore(saved))
            yield others
        finally:
            for sequence in others:
                self.engine.close_sequence(sequence)

    def sampling_row_s(self) -> float:
        """Return the seconds of sampling one row with the default settings."""
        sampler = RowSampler(SamplingParams())
        clock = self._meter.clock
        sampler.emit(self._row_logits, 0, ())
        times_s = []
        for position in range(_SAMPLED_ROWS):
            started_s = clock.now_s()
            sampler.emit(self._row_logits, position, ())
            times_s.append(clock.now_s() - started_s)
        return statistics.median(times_s)

    def close(self) -> None:
        """Forget the sequence."""
        self.engine.close_sequence(self.sequence)

    def _append(self, rows: int) -> None:
        """Feed and commit tokens that become context."""
        times_s: list[float] = []
        with self._meter.timing(times_s):
            output = self.engine.forward([self._step(self.sequence, rows, (rows - 1,))])
            self._row_logits = np.array(output.logits(0, 0))
            self.engine.commit(self.sequence, range(rows))
        self.context += rows
        self._note(rows, times_s[0])

    def _step(self, sequence: int, rows: int, outputs: Sequence[int]) -> Step:
        """Return a step of a chain. A head reads states of zeros: what it says means nothing, and takes as long."""
        width = self._capabilities.state_width if self._capabilities.reads_states else 0
        states = np.zeros((rows, width), np.float32) if width else None
        parents = range(COMMITTED_END, COMMITTED_END + rows)
        return Step(sequence, self.tokens(rows), parents, outputs, states)

    def _note(self, rows: int, took_s: float) -> None:
        """Keep what a row costs at best, which is in a wide pass: what filling a cache takes is foretold by it."""
        self._row_s = min(self._row_s, max(took_s / rows, _SHORTEST_ROW_S))

    def _restore(self) -> None:
        """Take back what passes committed."""
        if self._capabilities.max_rollback is None:
            self.engine.trim(self.sequence, self.context)
            return
        length = self.engine.length(self.sequence)
        if length > self.context + _GROWTH or length + self.widest > self._capabilities.context_length:
            self.engine.close_sequence(self.sequence)
            self.sequence = self.engine.open()
            missing, self.context = self.context, 0
            while missing > 0:
                rows = min(missing, self._capabilities.max_rows)
                self._append(rows)
                missing -= rows


@contextlib.contextmanager
def open_subject(engine: Engine, meter: Meter, rng: random.Random, *, verifies: bool) -> Iterator[Subject]:
    """Open a sequence to measure by, and close it afterwards; the arguments are those of :class:`Subject`."""
    subject = Subject(engine, meter, rng, verifies=verifies)
    try:
        yield subject
    finally:
        subject.close()
