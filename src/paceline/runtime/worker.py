"""The thread that owns an engine: it alone loads, measures, decodes and frees, and everybody else asks it to.

::

    any thread     call(function) ──┐                                    ┌──> its result
    consumers      submit, cancel ──┤                                    ├──> outputs: rounds, ending
    collector      end of a stream ─┤                                    │
                                    v                                    │
    the worker       │ inbox, until it is empty │ a round of each loop that has requests │ inbox ...
                       (waits while there are none)

One thread for all of it, because native code keeps threads for each thread that calls it, and idle ones get in the way
of those at work. The inbox takes notes from anywhere: its ``put`` is one step, which finalizers and signal handlers may
interrupt and be interrupted in.

A consumer that computes in Python holds the interpreter for up to ``sys.getswitchinterval()``, 5 ms, each time the
thread comes back from native code. A program that has much of that to do, such as a server, sets less; a library that
did so would do it to everybody. [Rounds of 1.4 ms beside a thread that never waits: 11 ms, with 0.5 ms of switch
interval 3 to 4 ms.]
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from paceline.core.errors import BusyError, CapabilityError, ClosedError
from paceline.engines.waited_for import is_waited_for

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

CLOSED: Final = "this model is closed: load it again"
"""What a ``ClosedError`` says, wherever it is found out."""


class Rounds(Protocol):
    """What has rounds to be made, such as a decoding loop with requests."""

    def make_round(self) -> None:
        """Make a round, and hand out what came of it."""
        ...

    def cancel_all(self) -> None:
        """End all requests, as no round is made any more."""
        ...


class Note(Protocol):
    """What lies in an inbox. Neither method raises anything."""

    def run(self) -> None:
        """Do what is asked for, on the worker's thread."""
        ...

    def refuse(self) -> None:
        """Tell whoever asked that the worker has ended."""
        ...


class _Call(Generic[_T]):
    """A function to be called, and what comes of it."""

    _result: _T

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        self._done.put(None)

    def refuse(self) -> None:
        self._error = ClosedError(CLOSED)
        self._done.put(None)

    def wait(self) -> _T:
        """Return what the function returned, or raise what it raised."""
        self._done.get()
        error, self._error = self._error, None
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error  # else this frame and the error would keep each other


class _Post:
    """A function to be called, for which nobody waits."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def run(self) -> None:
        try:
            self._function()
        except BaseException:
            _log.exception("what the engine's thread was asked for failed, and nobody waits for it")

    def refuse(self) -> None:
        """Nobody waits."""


class OnCollect(weakref.ref[object]):
    """A weak reference to an owner, and what is to be done once nobody has the owner any more.

    Its callback is the inbox's ``put``, so nothing of ours runs while the owner is collected: neither a round nor an
    interrupt can come between.
    """

    __slots__ = ("then",)
    then: Callable[[], object]

    def run(self) -> None:
        try:
            self.then()
        except BaseException:
            _log.exception("what was left to be done after a collected owner failed")

    def refuse(self) -> None:
        """Nobody waits."""


def wake(loop: AbstractEventLoop, *calls: Callable[[], object]) -> None:
    """Have an event loop call something; from any thread. Nothing happens where the loop is closed."""

    def call_all() -> None:
        for call in calls:
            call()

    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call_all)


class _WorkerState:
    """State of the worker's thread; refers to neither ``Worker`` nor idle loops, so that both can be collected.

    Attributes:
        busy: loops with requests that are not over, in the order of their turns; of the thread alone.
        waking: what event loops are to call once this round or note is done with; of the thread alone.
        leaving: nothing more is begun.
        ended: nothing in the inbox is looked at any more.
        leave_on_collect: ends the thread once nobody has the worker.
    """

    leave_on_collect: OnCollect

    def __init__(self, name: str) -> None:
        self.inbox: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self.busy: dict[Rounds, None] = {}
        self.waking: dict[AbstractEventLoop, list[Callable[[], object]]] = {}
        self.leaving = False
        self.ended = False
        self.process = os.getpid()
        # Else the process could not end before somebody closed the model.
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)

    def ask(self, note: Note) -> None:
        self.inbox.put(note)
        if self.ended:
            # The note may have come after the thread had emptied the inbox for the last time.
            self._refuse_all()

    def leave(self) -> None:
        """Begin nothing more; on the thread."""
        self.leaving = True

    def _work(self) -> None:
        _here.state = self
        _states.add(self)
        try:
            while not self.leaving:
                while not self.leaving and not (self.busy and self.inbox.empty()):
                    self.inbox.get().run()
                    self._wake_loops()
                if not self.leaving:
                    self._make_rounds()
        finally:
            self._end()

    def _end(self) -> None:
        try:
            for driver in list(self.busy):
                driver.cancel_all()
        finally:
            self.busy.clear()
            self.ended = True
            self._wake_loops()
            self._refuse_all()
            _states.discard(self)

    def _make_rounds(self) -> None:
        # A frame of its own: the caller's would keep the last driver alive while it waits.
        for driver in list(self.busy):
            driver.make_round()
            self._wake_loops()

    def _wake_loops(self) -> None:
        """Wake each event loop once, however many of its consumers wait.

        One that is woken takes the interpreter as soon as this thread lets go of it, as it does to wake another one.
        """
        if self.waking:
            waking, self.waking = self.waking, {}
            for loop, calls in waking.items():
                wake(loop, *calls)

    def _refuse_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.inbox.get_nowait().refuse()


_states: Final[set[_WorkerState]] = set()
"""Of threads that have not ended."""

_here: Final = threading.local()
"""``state`` of the current thread, if it is a worker's. Thread ids would not do: they are reused."""


def _end_all() -> None:
    """End every thread before the interpreter goes: after that none may come back from native code."""
    here = [state for state in list(_states) if state.process == os.getpid()]
    for state in here:
        state.ask(_Post(state.leave))
    for state in here:
        state.thread.join()


def _end_before_others() -> None:
    """Have threads end, at exit, before what was registered so far is freed: the last that is registered is first."""
    atexit.unregister(_end_all)
    atexit.register(_end_all)


class Worker:
    """Owns an engine, as the only thread that touches it. Any thread may call its methods, and any process but a fork.

    It ends when it is closed, when it is collected, or at the latest when the interpreter exits.

    Args:
        name: of the thread, for debuggers.
    """

    def __init__(self, name: str = "paceline") -> None:
        self._state = _WorkerState(name)
        self._state.leave_on_collect = self.on_collect(self, self._state.leave)
        _end_before_others()
        self._state.thread.start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_here(self) -> bool:
        """Whether this process has the thread: one that is forked has not."""
        return self._state.process == os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether this is the engine's thread, or one of its helpers that it waits for."""
        return is_waited_for() or getattr(_here, "state", None) is self._state

    def check(self) -> None:
        """Raise where waiting for the thread would take for ever.

        Raises:
            BusyError: this is the thread itself.
            CapabilityError: this process was forked from the one that has the thread.
        """
        # First of all: in a fork no other check would ever answer.
        if not self.is_here:
            raise CapabilityError(
                "this model belongs to the process that this one was forked from, and the thread that runs it stayed "
                "there: start processes with multiprocessing.get_context('spawn'), or load models after the fork only"
            )
        if self.is_current:
            raise BusyError(
                "a model was called within one of its own rounds, such as by a drafter, a policy or a "
                "finalizer: call it between rounds, from another thread"
            )

    def call(self, function: Callable[[], _T]) -> _T:
        """Run a function on the engine's thread, between rounds, and return what it returns or raise what it raises.

        An interrupt ends the wait; the function is run all the same.

        Raises:
            ClosedError: the worker has ended.
            BusyError: this is the engine's thread.
            CapabilityError: this process was forked from the worker's.
        """
        self.check()
        call = _Call(function)
        self._state.ask(call)
        return call.wait()

    def post(self, function: Callable[[], object]) -> None:
        """Run a function on the engine's thread, between rounds, without waiting; what it raises is logged.

        It may be called at any time, from a finalizer too. Nothing happens where the worker has ended, or in a fork.
        """
        self.ask(_Post(function))

    def ask(self, note: Note) -> None:
        """Put a note into the inbox, without waiting; one that comes too late is refused. In a fork nothing happens."""
        if self.is_here:
            self._state.ask(note)

    def on_collect(self, owner: object, then: Callable[[], object]) -> OnCollect:
        """Have something done on the engine's thread, between rounds, once ``owner`` was collected.

        Returns:
            What has to be kept for as long as that is wanted.
        """
        on_collect = OnCollect(owner, self._state.inbox.put)
        on_collect.then = then
        return on_collect

    def wake(self, loop: AbstractEventLoop, call: Callable[[], object]) -> None:
        """Have an event loop call something, without waiting; nothing happens where the loop is closed.

        The engine's thread has it called after the round or the note that it is at, together with all else that the
        loop is to call by then.
        """
        state = self._state
        if state.ended or getattr(_here, "state", None) is not state:
            wake(loop, call)
        else:
            state.waking.setdefault(loop, []).append(call)

    def start_rounds(self, driver: Rounds) -> None:
        """Make rounds of a loop until :meth:`stop_rounds`; on the engine's thread only."""
        self._state.busy[driver] = None

    def stop_rounds(self, driver: Rounds) -> None:
        """Make no more rounds of a loop; on the engine's thread only."""
        self._state.busy.pop(driver, None)

    def end_first(self) -> None:
        """At exit end before whatever was registered so far, such as what frees engines that were opened meanwhile."""
        _end_before_others()

    @contextlib.contextmanager
    def entered(self, manager: AbstractContextManager[_T]) -> Iterator[_T]:
        """Enter and leave another context on the engine's thread, such as one that opens engines and closes them."""
        values: list[_T] = []

        def leave(error: BaseException | None = None) -> bool | None:
            return manager.__exit__(type(error), error, error.__traceback__) if error else manager.__exit__(*[None] * 3)

        try:
            self.call(lambda: values.append(manager.__enter__()))
        except BaseException:
            # An interrupt ends the wait, and the manager may be entered all the same.
            self.post(lambda: leave() if values else None)
            raise
        try:
            yield values[0]
        except BaseException as error:
            # Not a closure: its variable would outlive ``error``, and this frame and the error would keep each other.
            if not self.call(functools.partial(leave, error)):
                raise
        else:
            self.call(leave)

    def leave(self) -> None:
        """End the thread once it has done what it was asked for before, without waiting."""
        self.post(self._state.leave)

    def close(self) -> None:
        """End the thread, and wait for that. Requests that are under way are cancelled. Idempotent.

        Raises:
            BusyError: this is the engine's thread.
        """
        if self.is_here:
            self.check()
            self.leave()
            self._state.thread.join()
