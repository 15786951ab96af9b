"""What the tests of all kinds of heads do: open a target that holds states, and have it answer with a head and without.

Answers may have three tokens alone, so that every number of a random head's drafts is accepted now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.helpers import Answer

from paceline.core.arrays import FloatArray
from paceline.core.params import SamplingParams, StopRules
from paceline.drafters.base import Drafter
from paceline.engines.base import Engine, Step
from paceline.engines.options import ModelOptions
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime.loop import DecodingLoop

if TYPE_CHECKING:
    from paceline.engines.llama_cpp import LlamaCppEngine

TOKENS: Final = (70, 71, 72)
"""Tokens that an answer may have."""


def open_target(path: Path, layers: Sequence[int], **options: Any) -> LlamaCppEngine:
    """Open a model for three requests, which have not all room to their end."""
    from paceline.engines.llama_cpp import LlamaCppEngine

    return LlamaCppEngine(
        ModelOptions(
            path,
            context_length=256,
            max_sequences=3,
            cells=300,
            threads=1,
            hold_states=tuple(layers),
            cache_type_k="f32",
            cache_type_v="f32",
            **options,
        )
    )


def answers(
    target: Engine, drafters: list[Drafter], depth: int, temperature: float, max_tokens: int = 70
) -> list[Answer]:
    """Decode three requests at once."""
    policy = FixedPolicy(depth) if drafters else NO_SPECULATION
    loop = DecodingLoop(target, drafters, policy)
    found = []
    for number in range(3):
        params = SamplingParams(temperature, seed=number, allowed_token_ids=TOKENS)
        prompt = [(37 * number + 11 * index) % 250 + 3 for index in range(10 + 30 * number)]
        found.append(Answer(loop.add(prompt, params, StopRules(max_tokens, ignore_end=True))))
    by_request = {answer.request: answer for answer in found}
    while loop.active:
        for emission in loop.step():
            by_request[emission.request].take(emission)
    return found


def check_answers(
    target: Engine,
    drafter: Drafter,
    depth: int,
    temperature: float,
    expected: Sequence[Answer] | None = None,
    what: str = "",
    *,
    max_tokens: int = 70,
) -> None:
    """Assert that answers with a head are those without, and that some of its drafts were accepted."""
    expected = answers(target, [], 0, temperature, max_tokens) if expected is None else expected
    actual = answers(target, [drafter], depth, temperature, max_tokens)
    drafter.close()
    for one, other in zip(actual, expected, strict=True):
        assert len(other.token_ids) == max_tokens
        assert one.token_ids == other.token_ids, what
    counts = [answer.request.stats for answer in actual]
    assert 0 < sum(each.num_accepted for each in counts) < sum(each.num_drafted for each in counts), what


def last_row(engine: Engine, steps: list[Step]) -> FloatArray:
    """Return the last logits that the first step of a pass asks for."""
    output = engine.forward(steps)
    found: FloatArray = output.logits(0, len(steps[0].outputs) - 1).copy()
    return found
