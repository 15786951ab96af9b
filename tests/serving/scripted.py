"""Scripted models to serve: text in characters of one to four bytes, and rows that a test lets through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

import paceline
from paceline.core.arrays import Float64Array
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.lookup import LookupDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.options import ModelOptions
from paceline.engines.scripted import LogitFunction, ScriptedEngine, blended_model, random_model
from paceline.engines.sequence_pool import SequencePool
from paceline.models.embedded import embedded_draft
from paceline.planning.policies.fixed import NO_SPECULATION
from tests.chat.conversing import ControlledBytes
from tests.timing import WAIT_S

VOCABULARY: Final = ControlledBytes()
SIZE: Final = VOCABULARY.size
END: Final = 257
THINK: Final = 258
NO_THINK: Final = 259

_LETTERS: Final = "abcdefgh \nüß中文😀🎉"
_FOLLOWERS: Final = {
    encoded[:length]: frozenset(
        other[length] for other in map(str.encode, _LETTERS) if other[:length] == encoded[:length]
    )
    for encoded in map(str.encode, _LETTERS)
    for length in range(len(encoded))
}
"""Bytes that may follow an unfinished character, by its bytes so far; none of them are in the beginning of another."""


def writing_model(seed: int = 1, *, mistakes: float = -4.0, end: float = 1.0) -> LogitFunction:
    """Return a model of random text in characters of one to four bytes.

    Args:
        seed: models of different seeds write different texts.
        mistakes: logit of bytes that make no character.
        end: logit of the end of the answer.
    """
    base = random_model(SIZE, seed=seed, order=3, spread=3.0)
    rows = {}
    for begun, followers in _FOLLOWERS.items():
        row = np.full(SIZE, mistakes)
        row[list(followers)] = 6.0
        row[256:] = -30.0
        if not begun:
            row[END] = end
        rows[begun] = row

    def logits(tokens: Sequence[int]) -> Float64Array:
        begun = b""
        for token_id in tokens[-3:]:
            begun = begun + bytes([token_id]) if token_id < 256 else b""
            if begun not in rows:
                begun = b""
        row: Float64Array = base(tokens) + rows[begun]
        return row

    return logits


class Turnstile:
    """A model whose rows have to be let through one by one.

    Attributes:
        waiting: set while a row waits.
    """

    def __init__(self, model: LogitFunction) -> None:
        self.waiting = threading.Event()
        self._model = model
        self._free = threading.Semaphore(0)
        self._is_open = False

    def __call__(self, tokens: Sequence[int]) -> Float64Array:
        if not self._is_open and not self._free.acquire(blocking=False):
            self.waiting.set()
            assert self._free.acquire(timeout=WAIT_S)
            self.waiting.clear()
        return self._model(tokens)

    def let(self, rows: int) -> None:
        """Let so many rows through."""
        self._free.release(rows)

    def let_until(self, done: Callable[[], bool]) -> None:
        """Let rows through one by one until something has happened that waits for the end of a round."""
        while not done():
            if self.waiting.wait(0.05):
                self._free.release()

    def open(self) -> None:
        """Let all rows through from now on."""
        self._is_open = True
        self._free.release(1000)


def scripted_model(
    target: LogitFunction | None = None,
    *,
    drafts: bool = True,
    max_sequences: int = 16,
    cells: int | None = None,
    context_length: int = 4096,
    max_waiting: int | None = None,
) -> paceline.Model:
    """Return a model that drafts whether that pays or not, and keeps what it read.

    Args:
        target: the model's logits; by default those of :func:`writing_model`.
        drafts: whether it has drafters: a draft model that is often right, and lookups.
        max_sequences: most answers at once.
        cells: tokens of all sequences together; ``None`` for any number.
        context_length: tokens of one sequence.
        max_waiting: requests that may wait; ``None`` for any number.
    """
    limits: dict[str, Any] = {"context_length": context_length, "max_sequences": max_sequences}
    target = target or writing_model()
    engine = ScriptedEngine(target, VOCABULARY, cells=cells, **limits)
    drafters: list[Drafter] = []
    if drafts:
        draft = ScriptedEngine(blended_model(target, writing_model(2), 0.3), VOCABULARY, **limits)
        drafters = [DraftModelDrafter(draft, target_vocab_size=SIZE), SuffixDrafter(), LookupDrafter()]
    return paceline.Model(
        engine,
        drafters,
        paceline.FixedPolicy(3, siblings=2) if drafts else NO_SPECULATION,
        target_options=ModelOptions(embedded_draft(), context_length=context_length),
        pool=SequencePool(engine, max_saved_bytes=1 << 20),
        max_waiting=max_waiting,
    )
