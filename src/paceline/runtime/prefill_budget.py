"""Chooses the prefill chunk of a pass, between time to first token and inter-token latency.

A pass over a prompt's rows takes as long as many rounds of decoding, and whoever reads an answer meanwhile sees it
stop. So beside answers a prompt is read in chunks. Small ones make everybody wait longer in the end: a pass costs
something for itself, and on a CPU kernels work on blocks of rows, so that a row beside few others costs up to half more
than one of sixteen. Where ``d`` requests decode and ``p`` have prompts to be read, each row of a chunk of ``c`` makes
readers wait for::

    (p T(d + c) + d (T(d + c) - T(d))) / c        T: seconds of a pass of so many rows

for those of prompts wait for all of the pass, and each other one for what the chunk adds to it. The smallest chunk
is taken that comes close to the least of that, within a few rounds. Where nobody decodes, one prompt is read to its
end, and others beside it as far as that makes rows cheaper: on a GPU they are, on a CPU the first is done sooner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from paceline.core.request import Request
from paceline.planning.base import RoundCosts, RoundRecord

PROMPT_ROUNDS: Final = 8.0
"""Plain rounds that a pass with a chunk of a prompt may take."""

MIN_ROWS: Final = 4
"""Rows of prompts in a pass, however long it takes: all prompts are read at last."""

FIRST_ROWS: Final = 16
"""Rows of prompts in a pass before it is known what they take."""

_CLOSE: Final = 1.05
"""Times the least wait that a smaller chunk may cost: the noise of a profile, for steadier answers."""

_PROFILED: Final = 256
"""Rows of a pass up to which it is asked what was measured."""

_FAR: Final = 1.5
"""A pass at least so many times as wide as the widest measured one is used to learn the cost of a further row."""

_CONTEXT_STEP: Final = 256
"""Tokens of context after which chunks are cut anew."""

_MEMORY: Final = 4.0
"""Rounds over which what they took is averaged."""


class PrefillBudget:
    """Bounds the rows of prompts by what passes cost, or by what they are seen to take.

    Args:
        prompt_rounds: plain rounds that a pass with a chunk of a prompt may take; infinity reads prompts as fast as can
            be.
        costs: what passes take; ``None`` if it was not measured. Then every row beyond those of a plain round is taken
            to cost the same, and a chunk is as large as may be.
    """

    def __init__(self, prompt_rounds: float = PROMPT_ROUNDS, costs: RoundCosts | None = None) -> None:
        self._prompt_rounds = prompt_rounds
        self._costs = costs
        self._widths = [] if costs is None else [rows for rows in range(1, _PROFILED + 1) if costs.is_measured(rows)]
        self._widest = self._widths[-1] if self._widths else 0
        # The latest question and its answer: the chunks of a prompt ask the same one again and again.
        self._asked: tuple[int, ...] = ()
        self._rows = 0
        # Where costs are not known, seconds of plain rounds by the number of requests; and seconds of a further row,
        # beyond plain rounds or beyond the widest pass that was measured.
        self._plain_s: dict[int, float] = {}
        self._row_s: float | None = None

    @property
    def bounds(self) -> bool:
        """Whether rounds beside prompts are bounded. Then they are plain ones.

        What a policy knows of costs is of passes without prompts, over the cells of those who decode; beside a long
        prompt each row of a draft costs more, and nothing tells how much.
        """
        return self._prompt_rounds < math.inf

    def max_rows(self, decoding: Sequence[Request], left: int, prompts: int, room: int) -> int:
        """Return how many of ``room`` rows prompts may have in a pass that they share with these requests.

        Args:
            decoding: requests with a row each.
            left: rows of the first prompt. Where nobody decodes all of them are read at once.
            prompts: how many are to be read.
            room: rows that a pass has room for.
        """
        if not self.bounds or room <= 1:
            return room
        if self._costs is None:
            return self._rows_as_seen(len(decoding), room) if decoding else room
        context = sum(request.cached for request in decoding) // _CONTEXT_STEP * _CONTEXT_STEP
        asked = (len(decoding), prompts, context, min(MIN_ROWS if decoding else left, room), room)
        if asked != self._asked:
            self._asked, self._rows = asked, self._chunk(self._costs, *asked)
        return self._rows

    def observe(self, record: RoundRecord) -> None:
        count = len(record.requests)
        further = record.prefill_rows + sum(tree.num_drafted for tree in record.trees)
        if self._costs is not None:
            self._observe_wide(self._costs, count + further, max(count, 1), record)
        elif count and not further:
            self._plain_s[count] = _average(self._plain_s.get(count), record.verify_s)
        elif record.prefill_rows and count in self._plain_s:
            self._learn(record.verify_s - self._plain_s[count], further)

    def _observe_wide(self, costs: RoundCosts, rows: int, requests: int, record: RoundRecord) -> None:
        """Take note of a pass that is wider than any that was measured."""
        if record.prefill_rows and rows >= _FAR * self._widest > 0:
            context = sum(len(request.token_ids) for request in record.requests)
            self._learn(record.verify_s - costs.round_s(self._widest, context, requests), rows - self._widest)
            self._asked = ()

    def _learn(self, seconds: float, rows: int) -> None:
        self._row_s = _average(self._row_s, max(seconds, 0.0) / rows)

    def _rows_as_seen(self, count: int, room: int) -> int:
        """Return rows for a few rounds, by what rounds took."""
        plain_s = self._plain_s.get(count)
        if plain_s is None or not self._row_s:
            return min(room, FIRST_ROWS)
        rows = (self._prompt_rounds - 1.0) * plain_s / self._row_s
        return min(room, _round_down(max(MIN_ROWS, int(rows))))

    def _chunk(self, costs: RoundCosts, count: int, prompts: int, context: int, least: int, room: int) -> int:
        """Return the smallest number of rows for which readers wait about as little as can be."""
        plain_s = costs.round_s(count, context, count) if count else 0.0
        most_s = self._prompt_rounds * plain_s if count else math.inf
        waits_s: dict[int, float] = {}
        for rows in self._numbers_of_rows(count, least, room):
            pass_s = self._pass_s(costs, count + rows, context, max(count, 1))
            if waits_s and pass_s > most_s:
                # A wider one may take less, where it fills a block.
                continue
            waits_s[rows] = (prompts * pass_s + count * max(pass_s - plain_s, 0.0)) / rows
        close_s = _CLOSE * min(waits_s.values())
        return next(rows for rows, wait_s in waits_s.items() if wait_s <= close_s)

    def _numbers_of_rows(self, count: int, least: int, room: int) -> list[int]:
        """Return numbers of rows to try beside so many others, the smallest first.

        Passes have widths that were measured, as what is read from neighbours knows nothing of blocks; beyond the
        widest they have few different ones, as changing the width costs time.
        """
        widths = [*self._widths]
        width = 2 * widths[-1] if widths else MIN_ROWS
        while width < count + room:
            widths += [width, width + width // 2]
            width *= 2
        return [least, *(width - count for width in widths if count + least < width < count + room), room]

    def _pass_s(self, costs: RoundCosts, rows: int, context: int, requests: int) -> float:
        if self._row_s is None or rows <= self._widest:
            return costs.round_s(rows, context, requests)
        return costs.round_s(self._widest, context, requests) + (rows - self._widest) * self._row_s


def _round_down(rows: int) -> int:
    """Return a number of rows with two leading bits: passes of few different widths, as changing it costs time."""
    unit = 1 << max(rows.bit_length() - 2, 0)
    return rows // unit * unit


def _average(average: float | None, value: float) -> float:
    return value if average is None else average + (value - average) / _MEMORY
