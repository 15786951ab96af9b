"""Room that the owners of keys share."""

from __future__ import annotations

from collections import Counter


class Shares:
    """Room of which each key may have half of what the other keys leave.

    So whoever comes next finds some, however much the others ask for.

    Args:
        most: all of the room.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: Counter[str] = Counter()

    def take(self, key: str, amount: int) -> bool:
        """Return whether a key may have so much more; if so, it has it."""
        others = self._held.total() - self._held[key]
        if self._held[key] + amount > (self.most - others) // 2:
            return False
        self._held[key] += amount
        return True

    def give_back(self, key: str, amount: int) -> None:
        """Take note that a key has so much less."""
        self._held[key] -= amount
        if not self._held[key]:
            del self._held[key]
