"""Whether an engine's logits depend on how many rows a pass has.

Where they do, drafts that are verified together round differently from the single rows of plain decoding, and a
near-tie may turn. With quantised weights a flipped last bit turns the rounding of some activation, and a few layers
later everything differs by some hundredths of what logits spread.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from paceline.core.errors import CapabilityError
from paceline.engines.base import Engine
from paceline.engines.reading import read_rows

EXACT_TO: Final = 1e-4
"""Most that logits may differ by. [Found where nothing before them does: 0, or 2e-6 where the last matrix is in Q6_K
and a pass has 8 rows or more; found otherwise: 0.006 or more.]"""

_TOKENS: Final = 16
_WIDTHS: Final = (2, 3, 4, 8, 16)
"""Kernels change at two rows, or at as many as are packed together: four, eight, sixteen."""


def check_exact(engine: Engine) -> None:
    """Refuse an engine whose logits depend on the width of the pass.

    It reads a text of sixteen tokens, which takes 37 passes.

    Raises:
        CapabilityError: they do.
    """
    size = engine.vocabulary.size
    # Any text will do, as long as its rows differ.
    token_ids = [7919 * place % size for place in range(1, min(_TOKENS, engine.capabilities.context_length) + 1)]
    plain = list(read_rows(engine, token_ids, 1))
    widest = min(engine.capabilities.max_rows, engine.capabilities.max_outputs)
    for width in _WIDTHS:
        wider = list(read_rows(engine, token_ids, min(width, widest)))
        if any(float(np.abs(ours - theirs).max()) > EXACT_TO for ours, theirs in zip(plain, wider, strict=True)):
            raise CapabilityError(
                f"{engine.description} rounds passes of {width} tokens differently from passes of one, so texts cannot "
                "be exact: take weights in Q4_0 or Q8_0 on a CPU, where they are, or leave out --exact"
            )
