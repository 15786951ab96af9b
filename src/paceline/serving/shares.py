"""Room that the owners of keys share."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque

from paceline.core.errors import QueueFullError


class Shares:
    """Room of which each key may have half of what the other keys leave.

    So whoever comes next finds some, however much the others ask for. All of it belongs to the event loop.

    Args:
        most: all of the room.
        keys_differ: whether there are keys; without, one client is as another, and all of them have all of the room.
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
        """Wait until a key may have so much more. Of a key, whoever came first is first.

        Args:
            key: who asks.
            amount: how much.
            most_waiting: of this key.

        Raises:
            QueueFullError: too many of this key wait.
        """
        waiting = self._waiting[key]
        if not waiting and self.take(key, amount):
            return
        if len(waiting) >= most_waiting:
            raise QueueFullError(f"{len(waiting)} requests of this client wait for room, and no more may")
        turn = object()
        waiting.append(turn)
        try:
            while waiting[0] is not turn or not self.take(key, amount):
                await self._changed.wait()
        finally:
            waiting.remove(turn)
            self._tell()

    def give_back(self, key: str, amount: int) -> None:
        """Take note that a key has so much less."""
        self._held[key] -= amount
        if not self._held[key]:
            del self._held[key]
        self._tell()

    def _tell(self) -> None:
        """Wake all that wait now."""
        self._changed.set()
        self._changed.clear()
