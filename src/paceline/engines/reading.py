"""Reading a known text in passes of a chosen width: for an exact engine the rows do not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from paceline.core.arrays import FloatArray
from paceline.engines.base import COMMITTED_END, Engine, Step


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
