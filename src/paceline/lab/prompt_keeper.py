"""A target that keeps the prompt it read last: a bench asks all variants the same before it asks the next thing.

What is measured is decoding, and a long prompt takes longer to read than its answer to write: read anew for every run,
prompts would be most of a bench. Runs also start from the same rows, which come out slightly different in passes of
other widths.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.clock import Clock
from paceline.core.errors import CapabilityError
from paceline.core.vocabulary import Vocabulary
from paceline.engines.base import COMMITTED_END, Engine, EngineCapabilities, Step
from paceline.lab.comparison import Stop, Stopped


class PromptKeeper:
    """An engine that keeps one closed sequence, to start the next from. See :class:`~paceline.engines.base.Engine`.

    Sequences are empty when they are opened, unless a prompt was read for them before (:meth:`read`). Closing this
    closes the engine.

    Attributes:
        read_s: seconds that the prompt took which was read last, whether just now or before.
    """

    def __init__(self, engine: Engine, clock: Clock, stopped: Stop = lambda: False) -> None:
        self.read_s = 0.0
        self._engine = engine
        self._clock = clock
        self._stopped = stopped
        # The prompt that was read last, the sequence that begins with it while it is kept, and while it is in use.
        self._prompt: list[int] = []
        self._kept: int | None = None
        self._in_use: int | None = None
        # Whether it was read for the sequence that is opened next.
        self._is_awaited = False
        # Called in every round, so without a wrapper.
        self.forward = engine.forward
        self.commit = engine.commit
        self.length = engine.length
        self.states = engine.states
        self.first_state = engine.first_state
        self.fork = engine.fork
        self.trim = engine.trim
        self.saved_bytes = engine.saved_bytes
        self.save = engine.save
        self.restore = engine.restore

    @property
    def description(self) -> str:
        return self._engine.description

    @property
    def vocabulary(self) -> Vocabulary:
        return self._engine.vocabulary

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._engine.capabilities

    def read(self, prompt_ids: Sequence[int]) -> None:
        """Read a prompt for the sequence that is opened next: all but the last token, which is its first round's."""
        # A sequence that is still in use begins with another prompt: it will not be kept.
        self._in_use, self._is_awaited = None, False
        wanted = list(prompt_ids[:-1])
        sequence = self._kept = self._cut(len(wanted) if wanted == self._prompt else 0)
        self._prompt = wanted
        if self.length(sequence) == 0:
            self.read_s = 0.0
        rows = self.capabilities.max_rows
        while (first := self.length(sequence)) < len(wanted):
            if self._stopped():
                raise Stopped
            chunk = wanted[first : first + rows]
            started_s = self._clock.now_s()
            try:
                self.forward([Step(sequence, chunk, range(COMMITTED_END, COMMITTED_END + len(chunk)), [])]).wait()
                self.commit(sequence, range(len(chunk)))
            except BaseException:
                self.commit(sequence, [])
                raise
            self.read_s += self._clock.now_s() - started_s
        self._is_awaited = True

    def open(self) -> int:
        """Start a sequence, which holds what was read for it."""
        sequence, self._kept = self._kept, None
        if sequence is not None and not self._is_awaited:
            self._engine.close_sequence(sequence)
        if sequence is None or not self._is_awaited:
            return self._engine.open()
        self._is_awaited = False
        self._in_use = sequence
        return sequence

    def close_sequence(self, sequence: int) -> None:
        """Forget a sequence, but for the one that begins with the prompt that was read last."""
        if sequence == self._in_use:
            self._kept, self._in_use = sequence, None
        else:
            self._engine.close_sequence(sequence)

    def close(self) -> None:
        self._engine.close()

    def _cut(self, length: int) -> int:
        """Return the kept sequence, with so many of its tokens at most; an empty one if there is none."""
        if self._kept is not None:
            try:
                self.trim(self._kept, min(length, self.length(self._kept)))
                return self._kept
            except CapabilityError:
                # A recurrent model has the state after the answer only.
                self._engine.close_sequence(self._kept)
        self._kept = None
        return self._engine.open()
