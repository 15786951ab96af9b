"""Answers whose reasoning is ended while they are written: what follows depends on the text and that place alone.

Under coupled sampling a request is decoded speculatively, in the scenes of ``test_lossless.py``, and asked to end its
reasoning between some rounds. Plain decoding that is asked at the same places has to say the same. Under rejection
sampling the distribution of what follows is enumerated, as in ``test_rejection_reasoning.py``.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.core.errors import BusyError
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.reasoning import ReasoningBudget
from paceline.core.request import SOURCE_TARGET, Request
from paceline.drafters.base import DraftJob
from paceline.engines.scripted import LogitFunction, ScriptedEngine, ScriptedVocabulary, table_model
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime.loop import DecodingLoop
from tests.helpers import PLAIN_PARAMS, Answer, ForcedDrafter, decode, softmax
from tests.proofs import Tally
from tests.reasoning_machine import Machine
from tests.runtime.enumeration import (
    DRAFT_3,
    EXACT,
    TARGET_3,
    Chooser,
    Distribution,
    EnumeratedVerifier,
    draft_of,
    enumerate_outcomes,
)
from tests.runtime.scenes import (
    PIECES,
    Scene,
    Setup,
    SteepCosts,
    build_drafters,
    build_model,
    build_params,
    build_policy,
    play,
)
from tests.tiers import by_tier

MAX_STEPS = 1000
MIN_CASES = {
    "asked within": by_tier(1000, quick=250),
    "asked outside": by_tier(400, quick=80),
    "asked while it waits": by_tier(25, quick=4),
    "drafted end accepted": by_tier(250, quick=50),
    "end not drafted": by_tier(1000, quick=200),
    "preempted later": by_tier(30, quick=5),
}
"""Cases that the examples have to show."""


@dataclasses.dataclass
class Asked:
    """A request of a scene, and after how many tokens it was asked to end its reasoning, with what came of that."""

    answer: Answer
    ends: dict[int, bool] = dataclasses.field(default_factory=dict)
    preemptions: int = 0
    """Those there had been when it was asked first."""


def with_markers(rng: random.Random, engine: ScriptedEngine, plain: Answer) -> SamplingParams:
    """Return how a request is sampled whose reasoning can be told: by tokens that it says without."""

    def some(most: int) -> tuple[int, ...]:
        first = rng.randrange(len(plain.token_ids))
        return tuple(plain.token_ids[first : first + rng.randint(1, most)])

    def any_tokens(least: int) -> tuple[int, ...]:
        return tuple(rng.randrange(engine.vocabulary.size) for _ in range(rng.randint(least, 4)))

    budget = ReasoningBudget(
        rng.choice((None, None, None, 5, 12)),
        some(2),
        any_tokens(2),
        begun=rng.random() < 0.5,
        forced=any_tokens(0) if rng.random() < 0.3 else (),
    )
    return dataclasses.replace(plain.request.params, reasoning_budget=budget)


def decode_plainly(engine: ScriptedEngine, asked: Asked) -> Answer:
    """Decode a request alone and plainly, asked to end its reasoning where it was before."""
    request, ends = asked.answer.request, dict(asked.ends)
    loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock)
    plain = Answer(loop.add(asked.answer.prompt_ids, request.params, request.rules))
    while plain.finish_reason is None:
        expected = ends.pop(len(plain.request.token_ids), None)
        if expected is not None:
            assert loop.end_reasoning(plain.request) == expected
        for emission in loop.step():
            plain.take(emission)
    assert not ends, "it was asked after the answer's end"
    return plain


def test_reasoning_that_is_ended_is_plain() -> None:
    tally = Tally()

    def check(scene: Scene) -> None:
        end_reasoning_in(scene, tally)

    play("ending", by_tier(150, quick=40), check)
    tally.report("reasoning ended from outside", MIN_CASES)


def end_reasoning_in(scene: Scene, tally: Tally) -> None:
    tally["scenes"] += 1
    rng = random.Random(scene.seed)
    model = build_model(scene, rng)
    end_ids = rng.sample(range(scene.vocab_size), rng.randint(0, 2)) if scene.vocab_size > 4 else []
    vocabulary = ScriptedVocabulary([PIECES[i % len(PIECES)] for i in range(scene.vocab_size)], end_ids)
    context_length = 40 if scene.short_context else 4096
    engine = ScriptedEngine(model, vocabulary, context_length=context_length)
    plain = []
    for index in range(rng.randint(2, 4)):
        phrase = rng.choices(range(scene.vocab_size), k=rng.randint(1, 6))
        prompt = [*(phrase * 3)[: rng.randint(1, 14)], rng.randrange(scene.vocab_size)]
        rules = StopRules(max_tokens=rng.choice((20, 28)), ignore_end=rng.random() < 0.8)
        free = decode(engine, prompt, build_params(scene, rng, index), rules)
        plain.append(decode(engine, prompt, with_markers(rng, engine, free), rules))
    for setup in scene.setups[:2]:
        for asked in decode_together(scene, setup, model, vocabulary, context_length, plain, tally):
            expected = decode_plainly(engine, asked)
            assert asked.answer.token_ids == expected.token_ids
            assert asked.answer.text == expected.text
            assert asked.answer.finish_reason == expected.finish_reason
            count(asked, tally)
            tally["equal to plain decoding"] += 1


def decode_together(
    scene: Scene,
    setup: Setup,
    model: LogitFunction,
    vocabulary: ScriptedVocabulary,
    context_length: int,
    plain: Sequence[Answer],
    tally: Tally,
) -> list[Asked]:
    """Decode requests together and speculatively, and ask them to end their reasoning now and then."""
    rng = random.Random(setup.seed)
    longest = max(answer.request.num_prompt + answer.request.rules.max_tokens for answer in plain)
    costs = SteepCosts(rng.choice((0.0, 0.01, 0.3)), rng.choice((0.0, 0.001)), rng.choice((0.0, 0.01, 0.2)))
    engine = ScriptedEngine(
        model,
        vocabulary,
        cost=costs.round_s,
        context_length=context_length,
        max_rows=setup.max_rows,
        max_outputs=min(setup.max_outputs, setup.max_rows),
        max_sequences=len(plain),
        trees=setup.trees,
        cells=None if setup.cells == "plenty" else longest + rng.randint(0, 3),
    )
    drafters = list(build_drafters(scene, setup, rng, model, plain))
    loop = DecodingLoop(
        engine, drafters, build_policy(scene, setup, rng, costs), clock=engine.clock, growth=rng.choice((0, 3))
    )
    asked = []
    for answer in plain:
        request = answer.request
        asked.append(Asked(Answer(loop.add(answer.prompt_ids, request.params, request.rules))))
    by_request = {each.answer.request.id: each for each in asked}
    for _ in range(MAX_STEPS):
        for each in asked:
            request = each.answer.request
            if each.answer.finish_reason is None and rng.random() < 0.15:
                is_open = loop.end_reasoning(request)
                if not each.ends:
                    each.preemptions = request.stats.preemptions
                assert each.ends.setdefault(len(request.token_ids), is_open) == is_open
                tally["asked within" if is_open else "asked outside"] += 1
                tally["asked while it waits"] += is_open and request.sequence < 0 and request.num_output > 0
        for emission in loop.step():
            by_request[emission.request.id].answer.take(emission)
        if not loop.active:
            return asked
    pytest.fail(f"requests still run after {MAX_STEPS} steps")


def count(asked: Asked, tally: Tally) -> None:
    """Count how the ends of reasoning and drafts met in an answer."""
    answer = asked.answer
    budget = answer.request.params.reasoning_budget
    assert budget is not None
    machine = Machine(budget)
    for place, (token_id, source) in enumerate(zip(answer.token_ids, answer.sources, strict=True)):
        if answer.request.num_prompt + place in asked.ends:
            machine.end()
        if machine.forced is not None:
            tally["drafted end accepted"] += source != SOURCE_TARGET
            tally["end not drafted"] += source == SOURCE_TARGET and place > 0
        machine.tell(token_id)
    if any(asked.ends.values()):
        tally["preempted later"] += answer.request.stats.preemptions > asked.preemptions


# --- rejection sampling ----------------------------------------------------------------------------------------------

NUM_TOKENS = by_tier(5, quick=4)
"""Of an answer: all of them are enumerated, and one more takes eight times as long."""
BUDGETS = {
    "no limit": ReasoningBudget(None, (0,), (1, 2)),
    "a limit as well": ReasoningBudget(2, (0,), (1, 2)),
    "begun by the prompt": ReasoningBudget(None, (0,), (1, 0), begun=True),
}


def following(
    logits: Float64Array, budget: ReasoningBudget, last: int, before: Sequence[int]
) -> dict[tuple[int, ...], float]:
    """Return the distribution of a Markov model's text after ``before``, where its reasoning is to end."""
    probs = np.apply_along_axis(softmax, 1, logits)
    text: Distribution = {}
    for tokens in product(range(len(logits)), repeat=NUM_TOKENS - len(before)):
        machine, probability, latest = Machine(budget), 1.0, last
        for token_id in before:
            machine.tell(token_id)
            latest = token_id
        machine.end()
        for token_id in tokens:
            probability *= probs[latest, token_id] if machine.forced is None else float(machine.forced == token_id)
            machine.tell(token_id)
            latest = token_id
        if probability > 0.0:
            text[tokens] = probability
    return text


@pytest.mark.parametrize("asks_at", [1, 2, 3])
@pytest.mark.parametrize("max_outputs", [30, 2], ids=["whole trees", "trees in parts"])
@pytest.mark.parametrize("name", BUDGETS)
def test_what_follows_an_end_is_exact_under_rejection(name: str, max_outputs: int, asks_at: int) -> None:
    """Whatever was drafted by then, and of what was drafted before whatever is still to be judged."""
    params = dataclasses.replace(PLAIN_PARAMS, reasoning_budget=BUDGETS[name])
    prompt = (1, 0)
    kept = Counter[bool]()

    def run(chooser: Chooser) -> tuple[int, ...]:
        engine = ScriptedEngine(table_model(TARGET_3), ScriptedVocabulary.of_size(3), max_outputs=max_outputs)
        loop = DecodingLoop(engine, [draft_of(DRAFT_3)], FixedPolicy(2, siblings=2), clock=engine.clock)
        verifier = EnumeratedVerifier(params, len(prompt), chooser)
        request = loop.add(
            prompt,
            params,
            StopRules(NUM_TOKENS, ignore_end=True),
            SpeculationParams(verify="rejection"),
            verifier=verifier,
        )
        while request.num_output < asks_at:
            loop.step()
        place = request.num_output
        kept[bool(loop._drafting._unjudged)] += 1
        loop.end_reasoning(request)
        while request.finish_reason is None:
            loop.step()
        return (place, *request.output_ids)

    found: defaultdict[tuple[int, ...], Distribution] = defaultdict(dict)
    for (place, *tokens), probability in enumerate_outcomes(run).items():
        found[tuple(tokens[:place])][(place, *tokens[place:])] = probability
    for before, outcomes in found.items():
        mass = sum(outcomes.values())
        expected = following(TARGET_3, BUDGETS[name], prompt[-1], before)
        assert {tokens[1:] for tokens in outcomes} == set(expected)
        for (_, *tokens), probability in outcomes.items():
            assert abs(probability / mass - expected[tuple(tokens)]) < EXACT
    if max_outputs == 2 and asks_at > 1:
        assert kept[True] > 0, "nothing was still to be judged"


# --- one request ------------------------------------------------------------------------------------------------------

START, END = 7, (8, 9)


def thinking(tokens: Sequence[int]) -> Float64Array:
    """A model that opens a reasoning and never ends it, and counts on once it is closed."""
    row: Float64Array = np.eye(12)[START if tokens[-1] == 1 else 3 if tokens[-1] in (9, 3) and 9 in tokens else 2]
    return row


def one_request(
    *, drafted: Sequence[int] = (), budget: int | None = None, verify: str = "coupled"
) -> tuple[DecodingLoop, Request]:
    engine = ScriptedEngine(thinking, ScriptedVocabulary.of_size(12))
    drafter = ForcedDrafter(lambda request: [drafted])
    loop = DecodingLoop(engine, [drafter], FixedPolicy(8), clock=engine.clock)
    params = SamplingParams(0.0, reasoning_budget=ReasoningBudget(budget, (START,), END))
    speculation = SpeculationParams(verify=verify)  # type: ignore[arg-type]
    return loop, loop.add([1], params, StopRules(12, ignore_end=True), speculation)


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_the_end_comes_next_and_content_follows(verify: str) -> None:
    """Drafts that go on with the reasoning are turned down, and those of its end are taken."""
    for drafted in ((), (2, 2, 2), (8, 9, 3, 3), (8, 2)):
        loop, request = one_request(drafted=drafted, verify=verify)
        assert not loop.end_reasoning(request), "it has not begun"
        while request.num_output < 3:
            loop.step()
        said = request.output_ids
        assert loop.end_reasoning(request)
        while request.finish_reason is None:
            loop.step()
        assert request.output_ids == [*said, *END, *[3] * 12][:12]
        assert not loop.end_reasoning(request), "it is over"


def test_an_end_changes_nothing_once_the_reasoning_is_closed() -> None:
    loop, request = one_request(budget=1)
    while request.num_output < 5:
        loop.step()
    assert request.output_ids[:4] == [START, 2, *END]
    assert not loop.end_reasoning(request)
    while request.finish_reason is None:
        loop.step()
    assert set(request.output_ids[4:]) == {3}


def test_an_end_is_not_asked_for_from_within_a_round() -> None:
    refused: list[bool] = []

    class Asking(ForcedDrafter):
        def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
            with pytest.raises(BusyError, match="the end of a reasoning was requested within a round"):
                loop.end_reasoning(jobs[0].request)
            refused.append(True)
            return [False] * len(jobs)

    engine = ScriptedEngine(thinking, ScriptedVocabulary.of_size(12))
    loop = DecodingLoop(engine, [Asking(lambda request: [])], FixedPolicy(2), clock=engine.clock)
    params = SamplingParams(0.0, reasoning_budget=ReasoningBudget(None, (START,), END))
    request = loop.add([1], params, StopRules(4, ignore_end=True))
    while request.finish_reason is None:
        loop.step()
    assert refused


def test_a_round_that_was_cut_short_is_taken_back_before_the_end_is_noted() -> None:
    """What such a round wrote is no part of the text: the reasoning ends where the text stood before it."""
    loop, request = one_request()
    while request.num_output < 3:
        loop.step()
    stood = list(request.output_ids)

    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._engine, "commit", fail)
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    assert loop.end_reasoning(request)
    while request.finish_reason is None:
        loop.step()
    assert request.output_ids == [*stood, *END, *[3] * 12][:12]
