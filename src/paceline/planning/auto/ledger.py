"""The ledger: what speculation may cost before it has to have paid.

Debt is the time decoding took less what plain decoding would have taken for the same tokens. A round that could lose
runs only if debt plus its worst loss stays within an allowance: a few plain rounds to begin with, a small share of the
plain time, and what was invested knowingly (a draft model that reads the prompt). So an answer is never slower than
plain decoding by more than the allowance, whatever the estimates say; nor are answers that share rounds, all together.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from paceline.planning.report import LedgerEntry

ALLOWED_SHARE: Final = 0.007
"""Of plain time that may be lost in the long run. It is more than probes take, or what was lost could never be made up
for, and nothing that they find be tried."""


class Ledger:
    """Of one request, or of all together; ``history`` is how many entries are kept for reports."""

    def __init__(self, start_s: float, *, history: int = 0) -> None:
        self.tokens = 0
        self.plain_s = 0.0
        self.actual_s = 0.0
        self.history: deque[LedgerEntry] = deque(maxlen=history)
        self._granted_s = start_s

    @property
    def debt_s(self) -> float:
        """Seconds lost so far against plain decoding."""
        return self.actual_s - self.plain_s

    @property
    def allowance_s(self) -> float:
        """Seconds that may be lost by now."""
        return self._granted_s + ALLOWED_SHARE * self.plain_s

    @property
    def headroom_s(self) -> float:
        """Seconds that the next round may lose at worst."""
        return self.allowance_s - self.debt_s

    def grant(self, seconds: float) -> None:
        """Allow an investment that was decided by itself."""
        self._granted_s += seconds

    def book(self, tokens: int, actual_s: float, plain_s: float) -> None:
        """Enter a round that emitted so many tokens, for which plain decoding would have taken ``plain_s``."""
        self.tokens += tokens
        self.actual_s += actual_s
        self.plain_s += plain_s
        if self.history.maxlen:
            self.history.append(LedgerEntry(self.tokens, self.debt_s, self.allowance_s))
