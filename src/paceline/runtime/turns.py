"""Whose turn it is to use an engine: one caller at a time, and nobody in the middle of a round.

Two kinds of callers come at a bad time. Other threads do: they wait. And so does Python itself, which collects garbage
wherever it likes, in the middle of a round too, and then runs finalizers and the ``finally`` blocks of generators on
the thread that makes the round. What these ask for is noted, and done before the next turn::

    thread A   │ round ............................. │ notes │ round ...
    thread B       waits ............................................... │ notes │ its turn
    collector        │ cancel: noted │
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from paceline.core.errors import BusyError

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Tie(weakref.ref[object]):
    """A weak reference to an owner, and what is to be done once nobody has the owner any more."""

    __slots__ = ("action",)
    action: Callable[[], object]


class Turns:
    """Hands out turns at one engine. All loops over an engine share one of these."""

    def __init__(self) -> None:
        # Reentrant, so that a thread that comes again in the middle of its own turn is told so and does not hang.
        self._lock = threading.RLock()
        self._taken = False
        self._notes: deque[Callable[[], object] | Tie] = deque()

    def note(self, action: Callable[[], object]) -> None:
        """Have something done before the next turn. It may be called at any time, by any thread, and does nothing yet.

        The action must be one that can be done twice: where an interrupt cuts it short, it is done again.
        """
        self._notes.append(action)

    def tie(self, owner: object, action: Callable[[], object]) -> Tie:
        """Have something done before the turn after ``owner`` was collected.

        Nothing of ours runs while it is collected, so that neither a round nor an interrupt can come between.

        Returns:
            What has to be kept for as long as the action is wanted.
        """
        tie = Tie(owner, self._notes.append)
        tie.action = action
        return tie

    def run(self, what: str, action: Callable[[], _T]) -> _T:
        """Wait for a turn, do what was noted, and then ``action``.

        A ``with`` block would read better, but an interrupt between its beginning and its body would keep the turn for
        as long as somebody keeps the error.

        Args:
            what: the caller wants, for the message.
            action: done while the turn is held; what it returns is returned.

        Raises:
            BusyError: this thread is in the middle of a turn already.
        """
        with self._lock:
            if self._taken:
                raise BusyError(
                    f"{what} was asked for from within a round of the same model, as by a drafter, a policy or a "
                    "finalizer: ask for it between rounds"
                )
            self._taken = True
            try:
                self._do_notes()
                return action()
            finally:
                self._taken = False

    def run_or_note(self, action: Callable[[], object]) -> None:
        """Do something in a turn of its own, or note it where this thread is in the middle of one; see :meth:`note`."""
        with self._lock:
            self.note(action)
            if self._taken:
                return
            self._taken = True
            try:
                self._do_notes()
            finally:
                self._taken = False

    def _do_notes(self) -> None:
        while self._notes:
            # Taken off when it is done, so that an interrupt loses nothing.
            note = self._notes[0]
            try:
                (note.action if isinstance(note, Tie) else note)()
            except Exception:
                # Whoever has the next turn is not to blame, and nobody else waits for this.
                _log.exception("what was left to be done between rounds failed")
            self._notes.popleft()
