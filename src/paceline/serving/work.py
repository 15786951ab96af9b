"""What the clients of a server share: work in threads, by its kind and for each key in turn, and room.

::

    share.offload(kind, function) ──> waits:  key a: 1 2 3 4     ──the next key's first──> a thread of that kind
                                              key b: 1                                (a, b, a, a, a)

Each kind has threads and queues of its own: a prompt of a line waits for no grammar and for no text of megabytes. No
key has all threads of a kind, so that another one finds a thread at once, or after one piece of work.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from starlette.types import Scope

from paceline.core.errors import QueueFullError
from paceline.serving.security import get_namespace

_T = TypeVar("_T")


class Kind(enum.Enum):
    """What work is; its value is what it does, and how many threads it has."""

    SHORT = ("reading usual texts", 4)
    LONG = ("reading long texts", 4)
    BODIES = ("reading long bodies", 2)
    COMPILING = ("compiling grammars", 2)
    WRITING = ("writing long answers", 2)
    UPKEEP = ("telling of the server", 2)
    EMBEDDING = ("passes of texts", 1)


MAX_AT_ONCE: Final = 500
"""Items of a list that are read or written at once, in about 2 ms; of more a thread takes care."""

_SHORT_BYTES: Final = 1 << 15
_SHORT_ITEMS: Final = 64


def choose_reading_kind(num_bytes: int, num_items: int = 1) -> Kind:
    """Return of which kind it is to read a body of so many bytes, messages and tools: short ones take 20 ms at most."""
    return Kind.SHORT if num_bytes <= _SHORT_BYTES and num_items <= _SHORT_ITEMS else Kind.LONG


class Work:
    """The threads of a server, and who waits for them. All of it belongs to the event loop.

    A request waits for one piece of work at a time, and how many a key has under way is bounded before.
    """

    def __init__(self) -> None:
        self._queues = {kind: _Queue(kind) for kind in Kind}

    def share_for(self, scope: Scope) -> Share:
        """Return what does work for a request, in the turn of its key."""
        # Without the request's salt: whoever sends many salts has one turn.
        return Share(self._queues, get_namespace(scope))

    def close(self) -> None:
        """Start nothing more. What a thread has begun goes on to its end."""
        for queue in self._queues.values():
            queue.close()


@dataclass(frozen=True, slots=True)
class Share:
    """Does work for one key, which is its namespace."""

    _queues: dict[Kind, _Queue]
    key: str

    async def offload(self, kind: Kind, function: Callable[[], _T], *, num_items: int | None = None) -> _T:
        """Return what a function comes to.

        Whoever is cancelled while the work waits takes it out of the queue. Work that has begun goes on, and nobody
        hears of it. ``num_items`` are those of the lists that it reads or writes, where these decide whether it takes
        long: few are seen to at once, here.
        """
        if num_items is not None and num_items <= MAX_AT_ONCE:
            return function()
        return await self._queues[kind].offload(self.key, function)


class _Queue:
    """Work of one kind."""

    def __init__(self, kind: Kind) -> None:
        _, self._free = kind.value
        self._most_of_a_key = max(self._free - 1, 1)
        self._pool = ThreadPoolExecutor(self._free, f"paceline-{kind.name.lower()}")
        self._running: Counter[str] = Counter()
        # By key, that whose turn is next first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def offload(self, key: str, function: Callable[[], _T]) -> _T:
        await self._wait_for_turn(key)
        loop = asyncio.get_running_loop()
        done: Future[_T] = self._pool.submit(function)

        def leave(_: object) -> None:
            # The loop may have ended before the work.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._leave, key)

        # Whoever waits may be cancelled, and the thread is busy all the same.
        done.add_done_callback(leave)
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_turn(self, key: str) -> None:
        """Wait until a thread is free and it is this key's turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(key, turn)
            else:
                self._leave(key)
            raise

    def _give(self) -> None:
        """Let those begin whose turn it is."""
        while self._free:
            key = next((key for key in self._waiting if self._running[key] < self._most_of_a_key), None)
            if key is None:
                return
            turns = self._waiting.pop(key)
            turn = turns.popleft()
            if turns:
                # Behind all others.
                self._waiting[key] = turns
            if not turn.cancelled():
                self._running[key] += 1
                self._free -= 1
                turn.set_result(None)

    def _forget(self, key: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(key)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[key]

    def _leave(self, key: str) -> None:
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        self._free += 1
        self._give()


async def in_own_thread(function: Callable[[], _T]) -> _T:
    """Return what a function comes to that takes seconds and is called once, such as loading a model."""
    pool = ThreadPoolExecutor(1, "paceline-once")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, function)
    finally:
        pool.shutdown(wait=False)


class Shares:
    """Room of which each key may have half of what the other keys leave.

    So whoever comes next finds some, however much the others ask for. Where keys do not differ, as there are none, one
    client is as another, and all of them have all of the room. All of it belongs to the event loop.
    """

    def __init__(self, most: int, *, keys_differ: bool = True) -> None:
        self.most = most
        self._parts = 2 if keys_differ else 1
        self._held: Counter[str] = Counter()
        self._waiting: defaultdict[str, deque[object]] = defaultdict(deque)
        self._changed = asyncio.Event()

    def take(self, key: str, amount: int) -> bool:
        """Return whether a key may have so much more; if so, it has it."""
        others = self._held.total() - self._held[key]
        # Others may have come since this key took what it has, and it may go on with that.
        if amount and self._held[key] + amount > (self.most - others) // self._parts:
            return False
        self._held[key] += amount
        return True

    async def take_in_turn(self, key: str, amount: int, most_waiting: int) -> None:
        """Wait until a key may have so much more. Of a key, whoever came first is first, and only so many may wait."""
        waiting = self._waiting[key]
        if not waiting and self.take(key, amount):
            return
        if len(waiting) >= most_waiting:
            raise QueueFullError(f"{len(waiting)} requests of this client are waiting for room, which is the limit")
        turn = object()
        waiting.append(turn)
        try:
            while waiting[0] is not turn or not self.take(key, amount):
                await self._changed.wait()
        finally:
            waiting.remove(turn)
            self._tell()

    def give_back(self, key: str, amount: int) -> None:
        self._held[key] -= amount
        if not self._held[key]:
            del self._held[key]
        self._tell()

    def _tell(self) -> None:
        """Wake all that wait now."""
        self._changed.set()
        self._changed.clear()
