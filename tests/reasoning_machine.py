"""What a reasoning budget means, said the other way round: one token after the other, and never looking back."""

from __future__ import annotations

from paceline.core.reasoning import ReasoningBudget


class Machine:
    """Counts and matches token by token: an answer that it was told has one state, whatever was asked before."""

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._closing = budget.forced or budget.end
        self._since: list[int] = []
        self._left: list[int] = []
        self.is_open = False
        if budget.begun:
            self._begin()

    def _begin(self) -> None:
        self.is_open, self._since, self._left = True, [], []
        self._spend()

    def _spend(self) -> None:
        if len(self._since) == self._budget.tokens:
            self._close()

    def end(self) -> bool:
        """End the reasoning that is open, if one is; return whether one is."""
        if self.is_open and not self._left:
            self._close()
        return self.is_open

    def _close(self) -> None:
        said = max(
            n for n in range(len(self._closing)) if self._since[len(self._since) - n :] == list(self._closing[:n])
        )
        self._left = list(self._closing[said:])

    def tell(self, token_id: int) -> None:
        if self._left:
            self._left.pop(0)
            if not self._left:
                self.is_open, self._since = False, []
            return
        self._since.append(token_id)
        marker = list(self._budget.end if self.is_open else self._budget.start)
        if marker and self._since[-len(marker) :] == marker:
            if self.is_open:
                self.is_open, self._since = False, []
            else:
                self._begin()
        elif self.is_open:
            self._spend()

    @property
    def forced(self) -> int | None:
        return self._left[0] if self._left else None
