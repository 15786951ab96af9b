"""Whether an engine's logits depend on how many rows a pass has.

Where they do, drafts that are verified together round differently from the single rows of plain decoding, and a
near-tie may turn. With quantised weights a flipped last bit turns the rounding of some activation, and a few layers
later everything differs by some hundredths of what logits spread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.slow_passes import slow_passes

EXACT_TO: Final = 1e-4
"""Most that logits may differ by. [Found where nothing before them does: 0, or 2e-6 where the last matrix is in Q6_K
and a pass has 8 rows or more; found otherwise: 0.006 or more.]"""

_TOKENS: Final = 16
"""Length of the text that is read, in tokens."""
_WIDTHS: Final = (2, 3, 4, 8, 16)
"""Rows of the passes that are compared: kernels change at two rows, or at as many as are packed together (four, eight,
sixteen)."""


def check_exact(engine: Engine) -> None:
    """Raise ``CapabilityError`` if an engine's logits depend on the width of the pass.

    It reads a text of sixteen tokens, which takes 37 passes. Where passes wait for a disk it reads the end of that text
    alone, which takes six.
    """
    size = engine.vocabulary.size
    # Any text will do, as long as its rows differ.
    token_ids = [7919 * place % size for place in range(1, min(_TOKENS, engine.capabilities.context_length) + 1)]
    widest = min(engine.capabilities.max_rows, engine.capabilities.max_outputs)
    rows_by_width = _by_their_ends if slow_passes(engine) is not None else _by_all_rows
    for width, ours, theirs in rows_by_width(engine, token_ids, widest):
        if float(np.abs(ours - theirs).max()) > EXACT_TO:
            raise CapabilityError(
                f"{engine.description} rounds passes of {width} tokens differently from passes of one, so texts cannot "
                "be exact: take weights in Q4_0 or Q8_0 on a CPU, where they are, or leave out `exact`"
            )


def _by_all_rows(engine: Engine, token_ids: Sequence[int], widest: int) -> Iterator[tuple[int, FloatArray, FloatArray]]:
    """Yield each width, with rows of passes of one and of that width, for all of the text."""
    plain = list(read_rows(engine, token_ids, 1))
    for width in _WIDTHS:
        for ours, theirs in zip(plain, read_rows(engine, token_ids, min(width, widest)), strict=True):
            yield width, ours, theirs


def _by_their_ends(
    engine: Engine, token_ids: Sequence[int], widest: int
) -> Iterator[tuple[int, FloatArray, FloatArray]]:
    """Yield each width, with rows of one pass and of a pass of that width, for the end of the text that it holds."""
    count = min(len(token_ids), widest)
    sequence = engine.open()
    try:
        whole: list[FloatArray] = []
        for width in sorted({count, *(min(width, count) for width in (1, *_WIDTHS))}, reverse=True):
            engine.trim(sequence, count - width if whole else 0)
            parents = range(COMMITTED_END, COMMITTED_END + width)
            step = Step(sequence, token_ids[count - width : count], parents, range(width))
            output = engine.forward([step])
            rows = [np.array(output.logits(0, row)) for row in range(width)]
            engine.commit(sequence, range(width))
            if not whole:
                whole = rows
            for row, ours in enumerate(rows):
                yield width if width > 1 else count, whole[count - width + row], ours
    finally:
        engine.close_sequence(sequence)


def read_rows(
    engine: Engine,
    token_ids: Sequence[int],
    width: int,
    *,
    num_prompt: int = 0,
    first_wanted: int = 0,
    before_pass: Callable[[], None] | None = None,
) -> Generator[FloatArray, None, None]:
    """Yield copies of the rows ``[vocab]`` of a text from index ``first_wanted`` on.

    The first ``num_prompt`` tokens are read in passes as wide as the engine takes, the others in passes of ``width``
    rows, before each of which ``before_pass`` is called. The engine needs a sequence to spare, which is closed
    afterwards.
    """
    sequence = engine.open()
    try:
        start = 0
        while start < len(token_ids):
            in_prompt = start < num_prompt
            if before_pass is not None and not in_prompt:
                before_pass()
            end = min(start + engine.capabilities.max_rows, num_prompt) if in_prompt else start + width
            chunk = token_ids[start:end]
            wanted = [row for row in range(len(chunk)) if start + row >= first_wanted]
            output = engine.forward([Step(sequence, chunk, range(COMMITTED_END, len(chunk) - 1), wanted)])
            yield from [output.logits(0, index).copy() for index in range(len(wanted))]
            engine.commit(sequence, range(len(chunk)))
            start += len(chunk)
    finally:
        engine.close_sequence(sequence)
