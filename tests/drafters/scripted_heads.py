"""Scripted heads that know what a scripted target says, where the states that they are given are of its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.arrays import Float64Array, FloatArray
from paceline.drafters.head import BlockHeadDrafter, CacheHeadDrafter, HeadDrafter
from paceline.engines.base import Step
from paceline.engines.scripted import HeadRow, ScriptedEngine, ScriptedVocabulary, random_model
from tests.helpers import BlockHead, CacheHead

SIZE, ORDER = 30, 3

TARGET = random_model(SIZE, seed=3, order=ORDER)


def latest(tokens: Sequence[int]) -> FloatArray:
    """A state that says the latest tokens, so that a head can say what the target would."""
    return np.array([len(tokens), *([-1] * ORDER + list(tokens))[-ORDER:]], np.float32)


def said(rows: Sequence[HeadRow]) -> Float64Array:
    token_id, state = rows[-1]
    return TARGET(_seen(token_id, state))


def _seen(token_id: int, state: FloatArray) -> list[int]:
    return [*_tokens(state), token_id]


def _tokens(state: FloatArray) -> list[int]:
    return [int(each) for each in state[1:] if each >= 0]


def own(rows: Sequence[HeadRow]) -> FloatArray:
    token_id, state = rows[-1]
    return np.array([state[0] + 1, *([-1] * ORDER + _seen(token_id, state))[-ORDER:]], np.float32)


def target(**limits: Any) -> ScriptedEngine:
    return ScriptedEngine(TARGET, ScriptedVocabulary.of_size(SIZE), state_of=latest, state_width=1 + ORDER, **limits)


class Head(ScriptedEngine):
    """Keeps which tokens it was fed, and with the states after which."""

    def __init__(self, **limits: Any) -> None:
        vocabulary = ScriptedVocabulary.of_size(SIZE)
        super().__init__(said, vocabulary, state_of=own, state_width=1 + ORDER, reads_states=True, **limits)
        self.fed: list[list[tuple[int, int | None]]] = []

    def forward(self, steps: Sequence[Step]) -> Any:
        for step in steps:
            lengths = [None] * len(step.token_ids) if step.states is None else step.states[:, 0].astype(int).tolist()
            self.fed.append(list(zip(step.token_ids, lengths, strict=True)))
        return super().forward(steps)


def block_head(**limits: Any) -> BlockHead:
    """Return a head that knows what a target says, where the states that it is given are of its text."""

    def say_in_block(rows: Sequence[HeadRow], root: int, drafted: Sequence[int]) -> Float64Array:
        for token_id, state in rows:
            assert _tokens(state)[-1] == token_id
        return TARGET([*_tokens(rows[-1][1]), root, *drafted])

    return BlockHead(say_in_block, ScriptedVocabulary.of_size(SIZE), size=5, state_width=1 + ORDER, **limits)


def drafter_of(engine: ScriptedEngine, head: Head | CacheHead | BlockHead) -> HeadDrafter:
    if isinstance(head, BlockHead):
        return BlockHeadDrafter(head, target=engine.vocabulary)
    kind = CacheHeadDrafter if isinstance(head, CacheHead) else HeadDrafter
    return kind(head, target=engine.vocabulary)  # type: ignore[arg-type]
