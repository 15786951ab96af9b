"""A known text read in passes of a chosen width: what its rows are must not depend on that."""

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
    """Yield copies of the rows ``[vocab]`` of a text, in a sequence that is closed afterwards.

    Args:
        engine: it must have a sequence to spare.
        token_ids: the text.
        width: rows of a pass; the last one may have fewer.
        num_prompt: tokens at the start that are read in passes as wide as the engine takes.
        first_wanted: index of the first token whose row is wanted.
        before_pass: called before every pass behind those.

    Raises:
        EngineError: a pass failed, or the cache has no room for it.
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
