"""What the loop promises every policy: whom it hears of, in which order, and what a round's record says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.core.errors import InputError
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.request import Request
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model, table_model
from paceline.planning.base import RoundRecord
from paceline.planning.policies.fixed import FixedPolicy
from paceline.runtime.loop import DecodingLoop
from tests.helpers import PLAIN_PARAMS, ForcedDrafter

GREEDY = SamplingParams(0.0)
COUNTING = table_model(np.roll(np.eye(10), 1, axis=1))


@dataclass(frozen=True)
class Diary(FixedPolicy):
    """Writes down what it is told, and takes at most two levels of the draft model."""

    draft_max: int = 4
    told: list[tuple[str, int]] = field(default_factory=list)
    records: list[RoundRecord] = field(default_factory=list)

    def begin(self, request: Request) -> None:
        self.told.append(("begin", request.id))

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        return [job for job in jobs if drafter.name != "draft" or max(job.tree.depths) < 2]

    def observe(self, record: RoundRecord) -> None:
        self.records.append(record)
        self.told.extend(("observe", request.id) for request in record.requests)

    def end(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.told.append(("end", request.id))


def scene() -> tuple[DecodingLoop, Diary]:
    """A pass of the target takes 10 s, one of the draft 1 s, on one clock; the other drafter knows nothing."""
    target = ScriptedEngine(COUNTING, ScriptedVocabulary.of_size(10), cost=lambda rows, context: 10.0)
    draft = ScriptedEngine(COUNTING, ScriptedVocabulary.of_size(10), cost=lambda rows, context: 1.0, clock=target.clock)
    policy = Diary()
    drafters: list[Drafter] = [ForcedDrafter(lambda request: []), DraftModelDrafter(draft, target_vocab_size=10)]
    return DecodingLoop(target, drafters, policy, clock=target.clock), policy


def test_a_request_begins_is_observed_and_ends_in_that_order() -> None:
    loop, policy = scene()
    request = loop.add([0, 1], GREEDY, StopRules(8))
    while request.finish_reason is None:
        loop.step()
    # One token with the prompt, three in each of two rounds, and the last.
    assert policy.told == [(what, request.id) for what in ("begin", "observe", "observe", "observe", "end")]


def test_every_request_that_began_ends_once() -> None:
    loop, policy = scene()
    cancelled = loop.add([0], GREEDY, StopRules(50))
    loop.step()
    loop.step()
    loop.cancel(cancelled)
    loop.cancel(cancelled)
    with pytest.raises(InputError, match="the prompt is empty"):
        loop.add([], GREEDY, StopRules(50))
    assert policy.told == [(what, cancelled.id) for what in ("begin", "observe", "end")]


def test_a_record_says_what_was_asked_and_what_it_took() -> None:
    loop, policy = scene()
    requests = [loop.add(prompt, GREEDY, StopRules(50)) for prompt in ([0, 1], [5])]
    for _ in range(2):
        loop.step()
    record = policy.records[-1]
    assert record.requests == requests
    assert list(record.emitted) == [3, 3]
    # A level is one pass for both requests.
    assert record.draft_seconds == {"forced": 0.0, "draft": 2.0}
    assert (record.draft_s, record.verify_s, record.round_s) == (2.0, 10.0, 12.0)


def test_what_was_accepted_beyond_the_end_was_not_emitted() -> None:
    target = ScriptedEngine(COUNTING, ScriptedVocabulary([str(digit).encode() for digit in range(10)], {5}))
    policy = Diary()
    loop = DecodingLoop(target, [ForcedDrafter(lambda request: [[4, 5, 6, 7]])], policy, clock=target.clock)
    request = loop.add([0, 1, 2], GREEDY, StopRules(50))
    while request.finish_reason is None:
        loop.step()
    assert request.output_ids == [3, 4, 5]
    (record,) = [record for record in policy.records if record.requests]
    assert [len(path) for path in record.paths] == [4]
    assert list(record.emitted) == [2]


def test_nothing_asked_is_nothing_in_the_record() -> None:
    loop, policy = scene()
    request = loop.add([0], GREEDY, StopRules(2))
    while request.finish_reason is None:
        loop.step()
    # Of two tokens the first comes with the prompt, and the second leaves nothing to draft.
    assert list(policy.records[-1].emitted) == [1]
    assert policy.records[-1].draft_seconds == {}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_margins_reach_the_policy(temperature: float) -> None:
    """The margin is that of the scores by which the proposals were ranked; of siblings what they lack."""
    params = SamplingParams(temperature, 0, 1.0, 0.0, seed=3)
    model = random_model(10, seed=5)
    target = ScriptedEngine(model, ScriptedVocabulary.of_size(10))
    draft = DraftModelDrafter(ScriptedEngine(model, ScriptedVocabulary.of_size(10)), target_vocab_size=10)

    class Watching(FixedPolicy):
        def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
            return [DraftBudget(2, siblings=3, margin=True)] * len(requests)

        def observe(self, record: RoundRecord) -> None:
            for request, tree in zip(record.requests, record.trees, strict=True):
                history = request.token_ids[: len(request.token_ids) - len(record.paths[0]) - 1]
                sampler = request.verifier.sampler
                row = model(history)
                scores = row if not temperature else row / temperature
                if temperature:
                    scores = scores + sampler.noise.gumbel(len(history), np.arange(10))
                best, second, third = np.sort(scores)[::-1][:3]
                margins = [tree.evidence[tree.candidates(0)[i].node].margin for i in range(3)]
                assert margins == pytest.approx([best - second, second - best, third - best])
                checked.append(request.id)

    checked: list[int] = []
    loop = DecodingLoop(target, [draft], Watching(2, siblings=3), clock=target.clock)
    request = loop.add([0, 1], params, StopRules(12))
    while request.num_output < 10:
        loop.step()
    assert len(checked) >= 2


def test_rejection_has_no_margins() -> None:
    """Its proposals are drawn; how far one is ahead of the others says nothing."""
    model = random_model(10, seed=5)
    target = ScriptedEngine(model, ScriptedVocabulary.of_size(10))
    draft = DraftModelDrafter(ScriptedEngine(model, ScriptedVocabulary.of_size(10)), target_vocab_size=10)
    policy = Diary()
    loop = DecodingLoop(target, [draft], policy, clock=target.clock)
    loop.add([0, 1], PLAIN_PARAMS, StopRules(12), SpeculationParams(verify="rejection"))
    loop.step()
    loop.step()
    tree = policy.records[-1].trees[0]
    assert tree.num_drafted == 2
    assert [evidence.margin for evidence in tree.evidence[1:]] == [None, None]
