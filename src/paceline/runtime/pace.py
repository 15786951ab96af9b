"""How much of prompts may share a pass with requests that decode, so that their readers do not wait long.

A pass over a prompt's rows takes as long as many rounds of decoding, and whoever reads an answer meanwhile sees it
stop. So prompts are read in chunks bounded by time: as many rows as make the pass a few rounds long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from paceline.core.request import Request
from paceline.planning.base import RoundCosts, RoundRecord

PROMPT_ROUNDS: Final = 2.0
"""Plain rounds that a pass with a chunk of a prompt may take, drafts aside."""

LEAST_ROWS: Final = 4
"""Rows of prompts in a pass, however long it takes: all prompts are read at last."""

FIRST_ROWS: Final = 16
"""Rows of prompts in a pass before it is known what they take."""

_MEMORY: Final = 4.0
"""Rounds over which what they took is averaged."""


class PromptPace:
    """Learns what rounds and further rows take, and bounds the rows of prompts by it.

    A pass takes what a plain round does, and some time for each row beyond: of drafts or of prompts.

    Args:
        prompt_rounds: plain rounds that a pass with a chunk of a prompt may take, drafts aside; infinity reads prompts
            as fast as can be.
        costs: what passes take, for numbers of requests whose plain rounds were not seen yet; ``None`` if it was not
            measured.
    """

    def __init__(self, prompt_rounds: float = PROMPT_ROUNDS, costs: RoundCosts | None = None) -> None:
        self._prompt_rounds = prompt_rounds
        self._costs = costs
        # Seconds of plain rounds, by the number of requests.
        self._plain_s: dict[int, float] = {}
        # Seconds of a further row, in passes that are shared and in passes of prompts alone.
        self._shared_row_s: float | None = None
        self._lone_row_s: float | None = None

    @property
    def bounds(self) -> bool:
        """Whether rounds beside prompts are bounded. Then they are plain ones.

        What a policy knows of costs is of passes without prompts, over the cells of those who decode; beside a long
        prompt each row of a draft costs more, and nothing tells how much.
        """
        return self._prompt_rounds < math.inf

    def most_rows(self, decoding: Sequence[Request], room: int) -> int:
        """Return how many of ``room`` rows prompts may have in a pass that they share with these requests."""
        if not self.bounds:
            return room
        plain_s = self._round_s(len(decoding), sum(request.cached for request in decoding))
        row_s = self._row_s
        if plain_s is None or not row_s:
            return min(room, FIRST_ROWS)
        rows = (self._prompt_rounds - 1.0) * plain_s / row_s
        return min(room, _rounded_down(max(LEAST_ROWS, int(rows))))

    def observe(self, record: RoundRecord) -> None:
        """Take note of what a round took."""
        count = len(record.requests)
        if count == 0:
            if record.prefill_rows:
                self._lone_row_s = _averaged(self._lone_row_s, record.verify_s / record.prefill_rows)
            return
        further = record.prefill_rows + sum(tree.num_drafted for tree in record.trees)
        known_s = self._round_s(count, sum(len(request.token_ids) for request in record.requests))
        if further == 0 or known_s is None:
            plain_s = max(record.verify_s - further * (self._row_s or 0.0), 0.0)
            self._plain_s[count] = _averaged(self._plain_s.get(count), plain_s)
        elif record.prefill_rows:
            self._shared_row_s = _averaged(self._shared_row_s, max(record.verify_s - known_s, 0.0) / further)

    @property
    def _row_s(self) -> float | None:
        return self._lone_row_s if self._shared_row_s is None else self._shared_row_s

    def _round_s(self, count: int, context: int) -> float | None:
        """Return the seconds of a plain round."""
        seen_s = self._plain_s.get(count)
        return self._costs.round_s(count, context, count) if seen_s is None and self._costs is not None else seen_s


def _rounded_down(rows: int) -> int:
    """Return a number of rows with two leading bits: passes of few different widths, as changing it costs time."""
    unit = 1 << max(rows.bit_length() - 2, 0)
    return rows // unit * unit


def _averaged(average: float | None, value: float) -> float:
    return value if average is None else average + (value - average) / _MEMORY
