"""Passes made at load on a GPU, so that the first ones of a width are not taken for what the width costs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

import numpy as np

from paceline.core.errors import NoRoomError
from paceline.engines.base import COMMITTED_END, Engine, Step

ROUND_WIDTHS: Final = (*range(1, 17), *range(24, 65, 8))
"""Rows of rounds. On CUDA llama.cpp has a kernel for each number of them up to 8, and then for each eight more."""

_MAX_S: Final = 1.5
"""Seconds after which no further pass is made: layers that were left to the CPU can take long."""


def warm_up(engine: Engine, widths: Iterable[int] = ROUND_WIDTHS) -> None:
    """Make a pass of each width, every row of it read, in the order given and as far as there is room and time.

    A GPU's kernels are picked by the rows of a pass and loaded when they are first used, which takes as long as several
    passes do. A profile of few passes would take that for the price of the width, and a ledger would charge it to the
    drafts. The engine needs a sequence to spare and is left as it was.
    """
    limits = engine.capabilities
    widest = min(limits.max_rows, limits.max_outputs, limits.context_length)
    started_s = time.perf_counter()
    for rows in (rows for rows in widths if rows <= widest):
        if time.perf_counter() - started_s > _MAX_S:
            return
        sequence = engine.open()
        try:
            parents = range(COMMITTED_END, COMMITTED_END + rows)
            states = np.zeros((rows, limits.state_width), np.float32) if limits.reads_states else None
            engine.forward([Step(sequence, [0] * rows, parents, range(rows), states)]).wait()
        except NoRoomError:
            return
        finally:
            engine.close_sequence(sequence)
