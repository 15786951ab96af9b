"""A round cut short anywhere leaves the loop able to go on, with the same text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.loop import DecodingLoop
from paceline.core.noise import Float64Array
from paceline.core.params import SamplingParams, StopRules
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, blended_model, random_model
from paceline.planning.policies.fixed import FixedPolicy

VOCABULARY = ScriptedVocabulary.of_size(30)
TARGET = random_model(30, seed=1, order=2)
DRAFT = blended_model(TARGET, random_model(30, seed=2, order=2), 0.3)


class Interruption:
    """Raises KeyboardInterrupt at the ``at``-th row that the target's model is asked for."""

    def __init__(self, at: int) -> None:
        self.rows = 0
        self._at = at

    def __call__(self, tokens: Sequence[int]) -> Float64Array:
        self.rows += 1
        if self.rows == self._at:
            raise KeyboardInterrupt
        return TARGET(tokens)


def decode(interruption: Interruption) -> tuple[list[int], int]:
    """Return the answer's tokens and how often the round was cut short."""
    engine = ScriptedEngine(interruption, VOCABULARY)
    draft = DraftModelDrafter(ScriptedEngine(DRAFT, VOCABULARY), target_vocab_size=30)
    loop = DecodingLoop(engine, [draft, SuffixDrafter()], FixedPolicy(4, siblings=2), clock=engine.clock)
    request = loop.add([1, 2, 3], SamplingParams(temperature=0.9, seed=4, repeat_penalty=1.1), StopRules(25))
    interrupts = 0
    while loop.active:
        try:
            loop.step()
        except KeyboardInterrupt:
            interrupts += 1
        if request.finish_reason is None:
            assert engine.length(request.sequence) == request.cached
    return request.output_ids, interrupts


@pytest.mark.parametrize("at", range(1, 26))
def test_going_on_after_an_interrupt_gives_the_same_text(at: int) -> None:
    undisturbed, _ = decode(Interruption(at=0))
    interrupted, interrupts = decode(Interruption(at))
    assert interrupts == 1
    assert interrupted == undisturbed
