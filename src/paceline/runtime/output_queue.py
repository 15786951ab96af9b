"""What the consumer of one request gets from the thread that owns the engine: rounds in their order, and the end.

That thread only ever appends, and a consumer only reads, so neither needs a lock, and an interrupt in the consumer's
thread loses nothing::

    engine's thread     put(round) ... put(round) ... end(ending)
                              │            │             │ rings, where the consumer waits for so much
    consumer            wait(1)      wait(2)       wait(3)
"""

from __future__ import annotations

import copy
import math
import queue
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from paceline.core.request import Emission, FinishReason
from paceline.core.stats import RequestStats


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended.

    Attributes:
        stats: counts and times, which nobody changes any more.
        error: what consumers are to be told, if it ended by an error.
    """

    finish_reason: FinishReason
    stats: RequestStats
    error: BaseException | None = None

    def raise_error(self) -> None:
        """Raise a copy of the error that the request ended by, if it did.

        Several consumers may be told of one error, each in a thread of its own, and a consumer that raises an error
        becomes part of its traceback. A copy of its own keeps those tracebacks apart, and the queue, which holds the
        error, holds no consumer. An error that cannot be copied is raised itself.
        """
        if self.error is not None:
            raise _copy_error(self.error)


def _copy_error(error: BaseException) -> BaseException:
    """Return an error like another one: of its type, message, attributes, causes and traceback so far."""
    try:
        copied = copy.copy(error)
        # A type that builds its message from other arguments is copied into another message.
        is_like = type(copied) is type(error) and copied.args == error.args and str(copied) == str(error)
    except Exception:
        is_like = False
    if not is_like:
        return error
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    if hasattr(error, "__notes__"):
        copied.__notes__ = [*error.__notes__]
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


class OutputQueue(Protocol):
    """Takes what becomes of a request. Only the engine's thread calls it.

    What a method raises, as where an event loop is closed, cancels the request and is told to nobody.
    """

    def begin(self) -> None:
        """Take note that the loop took the request; called once, before anything is put."""
        ...

    def put(self, emission: Emission | None) -> None:
        """Take what a round added; ``None`` for a round in which the request ran and gained nothing.

        While a request reads its prompt it gains nothing. While it waits for its start nothing is put.
        """
        ...

    def end(self, ending: Ending, emission: Emission | None = None) -> None:
        """Take the last that was added, if anything was, and how the request ended. Called once."""
        ...


class OutputRecord(ABC):
    """All that became of a request so far. Only the engine's thread writes to it, and any thread may read.

    Attributes:
        rounds: what each round added; ``None`` where a round added nothing, and for several such rounds where nobody
            waited for them. It is complete once there is an ending.
        ending: ``None`` while the request runs.
        has_begun: whether the loop took the request.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.rounds: list[Emission | None] = []
        self.ending: Ending | None = None
        self._wanted = math.inf

    @property
    def is_over(self) -> bool:
        """Whether the request ended."""
        return self.ending is not None

    def has(self, rounds: float) -> bool:
        """Whether there are so many rounds, or all there will be."""
        return len(self.rounds) >= rounds or self.is_over

    def begin(self) -> None:
        """Note that the request was taken, which nobody in a thread waits for by itself."""
        self.has_begun = True

    def put(self, emission: Emission | None) -> None:
        """Add a round."""
        is_next = len(self.rounds) < self._wanted <= len(self.rounds) + 1
        if emission is None and self.rounds and self.rounds[-1] is None and not is_next:
            # A long prompt may be read in hundreds of rounds.
            return
        self.rounds.append(emission)
        if len(self.rounds) >= self._wanted:
            # Reset before ringing: a consumer that publishes a new count meanwhile is rung too, and checks again.
            self._wanted = math.inf
            self._ring()

    def end(self, ending: Ending, emission: Emission | None = None) -> None:
        """Add the last round, and the end."""
        if emission is not None:
            self.rounds.append(emission)
        self.ending = ending
        self._ring()

    @abstractmethod
    def _ring(self) -> None:
        """Wake whoever waits."""


class ThreadOutputQueue(OutputRecord):
    """An output queue for consumers in threads, one of which waits at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Reentrant, as a signal handler may wait in the middle of a wait.
        self._waiting = threading.RLock()
        self._is_waiting = False

    def wait(self, rounds: float) -> None:
        """Wait until there are so many rounds, or the end. An interrupt ends the wait, and nothing else."""
        with self._waiting:
            is_inner = self._is_waiting
            try:
                self._is_waiting = True
                while True:
                    # Published before the check: no lost wake-up.
                    self._wanted = rounds
                    if self.has(rounds):
                        break
                    self._bell.get()
            finally:
                self._is_waiting = is_inner
                if is_inner:
                    # This wait may have taken the bell of the wait around it, which has to check again.
                    self._bell.put(None)

    def _ring(self) -> None:
        self._bell.put(None)
