"""A round cut short anywhere leaves the loop able to go on, with the same text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.arrays import Float64Array
from paceline.core.logprobs import LogprobParams
from paceline.core.params import SamplingParams, StopRules
from paceline.core.reasoning import BudgetKeeper, ReasoningBudget
from paceline.core.request import Request
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.lookup import LookupDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, blended_model, random_model
from paceline.engines.sequence_pool import SequencePool
from paceline.planning.policies.fixed import FixedPolicy
from paceline.runtime.loop import DecodingLoop
from tests.interrupting import LineTracer

VOCABULARY = ScriptedVocabulary.of_size(30)
TARGET = random_model(30, seed=1, order=2)
DRAFT = blended_model(TARGET, random_model(30, seed=2, order=2), 0.3)


OPENING = {"open", "fork", "restore", "_open", "_fork", "_restore"}


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
            continue
        if request.finish_reason is None:
            assert engine.length(request.sequence) == request.cached
    return request.output_ids, interrupts


@pytest.mark.parametrize("at", range(1, 26))
def test_going_on_after_an_interrupt_gives_the_same_text(at: int) -> None:
    undisturbed, _ = decode(Interruption(at=0))
    interrupted, interrupts = decode(Interruption(at))
    assert interrupts == 1
    assert interrupted == undisturbed


def text_of(request: Request) -> str:
    return "".join(segment.text for segment in request.segments)


def decode_several(tracer: LineTracer, *, cancel_after: int = 4) -> list[Request]:
    """Decode four requests that begin alike, the third of which is cancelled, and check that nothing is left of them.

    Three run at once. The fourth comes when the first is over, and starts from what was kept of that.
    """
    engine = ScriptedEngine(TARGET, VOCABULARY, max_sequences=3)
    kept = SequencePool(engine, max_idle=4, least_reuse=2)
    draft = ScriptedEngine(DRAFT, VOCABULARY, max_sequences=3)
    pool = SequencePool(draft, max_idle=2, max_saved_bytes=400, least_reuse=2)
    drafters: list[Drafter] = [
        DraftModelDrafter(draft, target_vocab_size=30, pool=pool),
        SuffixDrafter(),
        LookupDrafter(),
    ]
    loop = DecodingLoop(engine, drafters, FixedPolicy(3, siblings=2), clock=engine.clock, pool=kept)
    rules = (StopRules(5), StopRules(9, stop=("zz", "q")), StopRules(50), StopRules(6))
    prompts = ([1, 2, 3, 4] * 3, [1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 8, 8], [*[1, 2, 3, 4] * 3, 5])
    requests = [
        loop.add(
            prompt,
            SamplingParams(temperature=0.9, seed=at),
            rule,
            logprobs=LogprobParams(at, post_sampling_probs=at == 1),
        )
        for at, (prompt, rule) in enumerate(zip(prompts, rules, strict=True))
    ]
    rounds = 0
    while loop.active:
        try:
            with tracer:
                if requests[2].num_output >= cancel_after:
                    loop.cancel(requests[2])
                loop.step()
        except KeyboardInterrupt:
            pass
        rounds += 1
        assert rounds < 100
    for each, its_engine in ((kept, engine), (pool, draft)):
        each.drop_all()
        assert not its_engine._sequences
        assert each.used_cells == 0
    return requests


def test_an_interrupt_at_any_line_of_a_round_changes_no_answer_and_leaves_nothing_behind() -> None:
    uninterrupted = LineTracer(0, left_out=OPENING)
    undisturbed = decode_several(uninterrupted, cancel_after=50)
    assert uninterrupted.lines > 1000
    assert [request.stats.cached_tokens for request in undisturbed] == [0, 4, 4, 12], "forked, forked and restored"
    # Every line would take half an hour.
    for at in range(1, uninterrupted.lines, 601):
        decoded = decode_several(LineTracer(at, left_out=OPENING))
        cancelled = decoded[2]
        for request, expected in zip(decoded, undisturbed, strict=True):
            if request is cancelled:
                continue
            assert request.output_ids == expected.output_ids, f"interrupted before line {at}"
            assert text_of(request) == text_of(expected)
            assert request.logprobs == expected.logprobs
            assert request.finish_reason == expected.finish_reason
        assert cancelled.output_ids == undisturbed[2].output_ids[: cancelled.num_output]
        assert cancelled.logprobs == undisturbed[2].logprobs[: cancelled.num_output]
        assert cancelled.finish_reason == "cancelled"


def test_an_interrupt_at_any_line_leaves_a_reasoning_budget_what_it_was() -> None:
    texts = [
        [7, 1, 1],
        [7, 1, 1, 8, 9, 3, 7, 2, 2],
        [7, 1, 8, 9, 7, 1, 8],
        [1, 7, 1, 1, 8],
        [7, 1, 1, 8, 9, 3, 7, 2, 2, 8],
    ]

    def ask(tracer: LineTracer) -> list[int | None]:
        keeper, said = BudgetKeeper(ReasoningBudget(2, (7,), (8, 9)), 0), []
        for text in texts:
            try:
                with tracer:
                    said.append(keeper.forced(text))
            except KeyboardInterrupt:
                said.append(keeper.forced(text))
        return said

    uninterrupted = LineTracer(0, left_out=OPENING)
    undisturbed = ask(uninterrupted)
    assert undisturbed == [8, 8, 9, 9, 9]
    assert uninterrupted.lines > 200
    for at in range(1, uninterrupted.lines + 1):
        assert ask(LineTracer(at, left_out=OPENING)) == undisturbed, f"interrupted before line {at}"
