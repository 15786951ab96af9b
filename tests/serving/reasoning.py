"""A scripted model that reasons before it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from paceline.core.arrays import Float64Array
from paceline.engines.scripted import LogitFunction
from tests.chat.conversing import THINKING
from tests.serving.hosted import Hosted, hosted, scripted
from tests.serving.scripted import END, NO_THINK, SIZE, THINK

ANSWER: Final = "It is <b>4</b>."


def reasoning(thoughts: int) -> LogitFunction:
    """Return a model that reasons for so many tokens, or until it is told to stop, and then answers."""

    def written(tokens: Sequence[int], marker: int) -> int:
        # Templates write empty lines behind markers.
        return sum(token != ord("\n") for token in tokens[marker + 1 :])

    def logits(tokens: Sequence[int]) -> Float64Array:
        opened = max((place for place, token in enumerate(tokens) if token == THINK), default=None)
        closed = max((place for place, token in enumerate(tokens) if token == NO_THINK), default=None)
        if closed is not None:
            script = [*ANSWER.encode(), END]
            said = script[min(written(tokens, closed), len(script) - 1)]
        elif opened is not None:
            said = ord("h") if written(tokens, opened) < thoughts else NO_THINK
        else:
            said = THINK
        row: Float64Array = 50.0 * np.eye(SIZE)[said]
        return row

    return logits


@contextmanager
def thinking(template: str = THINKING, thoughts: int = 20) -> Iterator[Hosted]:
    with hosted(lambda: scripted(template, target=reasoning(thoughts))) as running:
        yield running
