"""The draft model's cache: what is fed, when, and in how many passes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import ClosedError, InputError
from paceline.core.params import SamplingParams, StopRules, VerifierName
from paceline.core.reasoning import ReasoningBudget
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.drafters.base import DraftBudget, DraftJob
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.base import Step
from paceline.engines.scripted import (
    LogitFunction,
    ScriptedEngine,
    ScriptedOutput,
    ScriptedVocabulary,
    blended_model,
    random_model,
    table_model,
)
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime.loop import DecodingLoop
from tests.drafters.helpers import grow, proposals, settle
from tests.helpers import PLAIN_PARAMS, CountingPool, decode, drain, frozen, request_of, unsay

GREEDY = SamplingParams(0.0)
COUNTING = table_model(np.roll(np.eye(10), 1, axis=1))


class RecordingEngine(ScriptedEngine):
    """Keeps the rows of every pass: for each step its tokens."""

    def __init__(self, model: LogitFunction = COUNTING, **limits: Any) -> None:
        super().__init__(model, ScriptedVocabulary.of_size(10, limits.pop("end_ids", ())), **limits)
        self.passes: list[list[list[int]]] = []

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        output = super().forward(steps)
        self.passes.append([list(step.token_ids) for step in steps])
        return output

    def take_passes(self) -> list[list[list[int]]]:
        passes, self.passes = self.passes, []
        return passes


def drafter_for(engine: ScriptedEngine, **values: Any) -> DraftModelDrafter:
    return DraftModelDrafter(engine, target_vocab_size=10, **values)


def begun(drafter: DraftModelDrafter, *texts: Sequence[int], params: SamplingParams = GREEDY) -> list[Request]:
    requests = [request_of(text, params, request_id=index) for index, text in enumerate(texts)]
    for request in requests:
        drafter.begin(request)
    return requests


def accept(drafter: DraftModelDrafter, request: Request, tree: DraftTree, count: int, then: int) -> None:
    settle(drafter, request, tree, list(range(1, count + 1)), then)


def test_nothing_is_fed_while_speculation_is_off() -> None:
    engine = RecordingEngine()
    answer = decode(
        RecordingEngine(), [0], GREEDY, StopRules(20), drafters=[drafter_for(engine)], policy=NO_SPECULATION
    )
    assert answer.token_ids == [(k + 1) % 10 for k in range(20)]
    assert engine.passes == []
    assert engine.clock.now_s() == 0.0


def test_one_row_a_level_once_it_has_caught_up() -> None:
    engine = RecordingEngine()
    drafter = drafter_for(engine)
    (request,) = begun(drafter, [0, 1, 2])
    (tree,) = grow(drafter, [request], DraftBudget(3))
    assert tree.token_ids == [2, 3, 4, 5]
    # The first pass reads the prompt and gives the first draft; the deepest draft is never fed.
    assert engine.take_passes() == [[[0, 1, 2]], [[3]], [[4]]]
    accept(drafter, request, tree, 3, then=6)
    (tree,) = grow(drafter, [request], DraftBudget(2))
    assert tree.token_ids == [6, 7, 8]
    # After a full acceptance that draft and the bonus token are missing.
    assert engine.take_passes() == [[[5, 6]], [[7]]]
    accept(drafter, request, tree, 0, then=1)
    (tree,) = grow(drafter, [request], DraftBudget(1))
    # A draft that was turned down is gone; only the recovered token is fed.
    assert tree.token_ids == [1, 2]
    assert engine.take_passes() == [[[1]]]


def test_a_pause_is_caught_up_in_one_pass() -> None:
    engine = RecordingEngine()
    drafter = drafter_for(engine)
    (request,) = begun(drafter, [0, 1])
    (tree,) = grow(drafter, [request], DraftBudget(2))
    accept(drafter, request, tree, 1, then=3)
    engine.take_passes()
    for token_id in (4, 5, 6):  # rounds without drafts
        settle(drafter, request, DraftTree(request.token_ids[-1]), [], token_id)
    assert engine.passes == []
    (tree,) = grow(drafter, [request], DraftBudget(2))
    assert tree.token_ids == [6, 7, 8]
    assert engine.take_passes() == [[[3, 4, 5, 6]], [[7]]]


def test_a_round_that_was_never_decided_is_undone() -> None:
    """The target's pass failed or had no row for the request: the same text is drafted again."""
    engine = RecordingEngine()
    drafter = drafter_for(engine)
    (request,) = begun(drafter, [0, 1, 2])
    first = grow(drafter, [request], DraftBudget(3))[0]
    engine.take_passes()
    second = grow(drafter, [request], DraftBudget(3))[0]
    assert proposals(second) == proposals(first)
    assert engine.take_passes() == [[[2]], [[3]], [[4]]]


def test_many_requests_share_each_pass() -> None:
    engine = RecordingEngine()
    drafter = drafter_for(engine)
    requests = begun(drafter, [0], [5, 6], [2, 3, 4])
    trees = grow(drafter, requests, DraftBudget(3))
    assert [tree.token_ids for tree in trees] == [[0, 1, 2, 3], [6, 7, 8, 9], [4, 5, 6, 7]]
    assert engine.take_passes() == [[[0], [5, 6], [2, 3, 4]], [[1], [7], [5]], [[2], [8], [6]]]


def test_a_long_prompt_is_read_in_chunks_and_all_frontiers_meet_in_the_last() -> None:
    engine = RecordingEngine(max_rows=4)
    drafter = drafter_for(engine)
    requests = begun(drafter, [0, 1, 2, 3, 4, 5, 6], [3])
    trees = grow(drafter, requests, DraftBudget(2))
    assert [tree.token_ids for tree in trees] == [[6, 7, 8], [3, 4, 5]]
    # The last token of a request waits for the pass in which every request has one row left.
    assert engine.take_passes() == [[[0, 1, 2, 3]], [[4, 5, 6], [3]], [[7], [4]]]


def test_more_requests_than_rows() -> None:
    engine = RecordingEngine(max_rows=2)
    drafter = drafter_for(engine)
    requests = begun(drafter, [0], [1], [2])
    trees = grow(drafter, requests, DraftBudget(2))
    assert [tree.token_ids for tree in trees] == [[0, 1, 2], [1, 2, 3], [2]]
    for request, tree in zip(requests, trees, strict=True):
        accept(drafter, request, tree, 0, then=7)
    assert grow(drafter, requests[2:], DraftBudget(1))[0].token_ids == [7, 8]


@pytest.mark.parametrize(("limits", "together"), [({"max_sequences": 1}, True), ({"cells": 4}, False)])
def test_who_finds_no_room_drafts_nothing_until_there_is_some(limits: dict[str, Any], together: bool) -> None:
    drafter = drafter_for(RecordingEngine(**limits))
    requests = begun(drafter, [0, 1, 2], [5, 6, 7])
    if together:
        trees = grow(drafter, requests, DraftBudget(1))
    else:
        trees = [grow(drafter, [request], DraftBudget(1))[0] for request in requests]
    assert [tree.num_drafted for tree in trees] == [1, 0]
    drafter.end(requests[0])
    assert grow(drafter, requests[1:], DraftBudget(1))[0].token_ids == [7, 8]


@pytest.mark.parametrize("set_at", ["drafter", "engine"])
def test_an_overflowing_context_forgets_the_oldest_half(set_at: str) -> None:
    if set_at == "engine":
        engine = RecordingEngine(context_length=6)
        drafter = drafter_for(engine)
    else:
        engine = RecordingEngine()
        drafter = drafter_for(engine, context_length=6)
    (request,) = begun(drafter, [0, 1, 2, 3, 4])
    (tree,) = grow(drafter, [request], DraftBudget(4))
    # Five tokens and one draft fit: the second draft is proposed, but not fed.
    assert tree.token_ids == [4, 5, 6]
    accept(drafter, request, tree, 2, then=7)
    engine.take_passes()
    (tree,) = grow(drafter, [request], DraftBudget(9))
    assert tree.token_ids == [7, 8, 9, 0, 1]
    # Eight tokens do not fit, so the last three (half the context) start afresh.
    assert engine.take_passes() == [[[5, 6, 7]], [[8]], [[9]], [[0]]]


@pytest.mark.parametrize("context_length", [1, 5000])
def test_contexts_that_cannot_be(context_length: int) -> None:
    with pytest.raises(
        InputError, match=f"draft context of {context_length} tokens .*: give at least 2, and at most the 4096"
    ):
        drafter_for(RecordingEngine(), context_length=context_length)


def test_siblings_hang_beside_the_chain() -> None:
    engine = RecordingEngine(random_model(10, seed=3))
    drafter = drafter_for(engine)
    (request,) = begun(drafter, [0], params=PLAIN_PARAMS)
    (tree,) = grow(drafter, [request], DraftBudget(3, siblings=3))
    assert tree.depths == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert tree.parents == [-1, 0, 0, 0, 1, 1, 1, 4, 4, 4]
    assert [len(steps) for steps in engine.passes] == [1, 1, 1], "siblings cost no rows"


@pytest.mark.parametrize("of_target", [{}, {"end_ids": [5]}], ids=["its own", "the target's"])
def test_nothing_follows_an_end_token_and_the_target_says_what_is_one(of_target: dict[str, Any]) -> None:
    drafter = drafter_for(RecordingEngine(end_ids=[3]), **of_target)
    (request,) = begun(drafter, [0, 1])
    (tree,) = grow(drafter, [request], DraftBudget(6))
    assert tree.token_ids == ([1, 2, 3, 4, 5] if of_target else [1, 2, 3])


def test_p_min_is_judged_before_a_token_is_drawn() -> None:
    """Under rejection the stop must depend on the distribution alone, so no number may be drawn for it."""
    engine = RecordingEngine(random_model(10, seed=3, spread=1.0))
    drafter = drafter_for(engine)
    request = request_of([0], PLAIN_PARAMS, verifier="rejection")
    drafter.begin(request)
    verifier: Any = request.verifier
    state = verifier._rng.bit_generator.state
    assert grow(drafter, [request], DraftBudget(3, min_probability=0.9))[0].num_drafted == 0
    assert verifier._rng.bit_generator.state == state


@pytest.mark.parametrize(("temperature", "drafted"), [(0.0, False), (0.5, True), (2.0, False)])
def test_p_min_is_judged_at_the_requests_temperature(temperature: float, drafted: bool) -> None:
    """Logits (1, 0, ..., 0) over ten tokens: 0.23 for the first as they are, 0.45 at a half and 0.15 at two."""
    engine = RecordingEngine(lambda tokens: np.eye(10)[0])
    drafter = drafter_for(engine)
    (request,) = begun(drafter, [0], params=SamplingParams(temperature, 0, 1.0, 0.0))
    (tree,) = grow(drafter, [request], DraftBudget(1, min_probability=0.3))
    assert (tree.num_drafted == 1) == drafted
    if drafted:
        assert tree.evidence[1].probability == pytest.approx(np.exp(2) / (np.exp(2) + 9))


def test_a_temperature_that_falls_to_nothing_leaves_one_token_certain() -> None:
    """The lower bound of a range may be 0, and a distribution sure enough to be there: no number was left of it."""
    engine = RecordingEngine(lambda tokens: 20.0 * np.eye(10)[0])
    drafter = drafter_for(engine)
    params = SamplingParams(0.5, 0, 1.0, 0.0, dynatemp_range=0.5, dynatemp_exponent=100.0)
    (request,) = begun(drafter, [0], params=params)
    (tree,) = grow(drafter, [request], DraftBudget(1, min_probability=0.5))
    assert tree.evidence[1].probability == 1.0


def test_its_own_vocabulary_is_cut_to_the_targets() -> None:
    engine = RecordingEngine(lambda tokens: np.arange(10.0))
    drafter = DraftModelDrafter(engine, target_vocab_size=4)
    (request,) = begun(drafter, [0])
    assert grow(drafter, [request], DraftBudget(2, siblings=2))[0].token_ids == [0, 3, 2, 3, 2]


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("unshared_ids", [[], [9], [3, 4], [0, 1, 5, 8, 9], range(1, 10)])
def test_what_the_target_does_not_share_is_never_proposed(
    unshared_ids: Sequence[int], temperature: float, verifier: VerifierName
) -> None:
    """The draft likes those ids best, and is asked for more siblings than it has others."""
    rows = frozen(lambda tokens: np.where(np.isin(np.arange(10), unshared_ids), 5.0, np.arange(10) / 10))
    drafter = drafter_for(RecordingEngine(rows), unshared_ids=unshared_ids)
    params = SamplingParams(temperature, 0, 1.0, 0.0)
    request = request_of([0], params, verifier=verifier)
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(3, siblings=10))
    shared = set(range(10)).difference(unshared_ids)
    assert tree.num_drafted > 0
    assert shared.issuperset(tree.token_ids[1:])
    candidates = tree.candidates(0)
    if verifier == "coupled" or temperature > 0:
        assert {candidate.token_id for candidate in candidates} == shared
    for candidate in candidates:
        assert (candidate.draft_probs is None) == (verifier == "coupled")
        if candidate.draft_probs is not None:
            assert candidate.draft_probs.sum() == pytest.approx(1.0)
            assert candidate.token_id in np.flatnonzero(candidate.draft_probs)
            assert shared.issuperset(np.flatnonzero(candidate.draft_probs))


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_says_what_the_reasoning_budget_forces(temperature: float, verifier: VerifierName) -> None:
    """Else it would be turned down there, and each time with all that was drafted after it."""
    params = SamplingParams(
        temperature, 1, 1.0, 0.0, logit_bias={7: -np.inf}, reasoning_budget=ReasoningBudget(2, (), (7, 3), begun=True)
    )
    drafter = drafter_for(RecordingEngine())
    request = request_of([5, 0], params, verifier=verifier)
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(5, min_probability=0.2, probability=True))
    assert tree.token_ids == [0, 1, 2, 7, 3, 4]
    assert [evidence.probability == 1.0 for evidence in tree.evidence[1:]] == [False, False, True, True, False]


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("lacking", [12, 4])
def test_a_draft_goes_no_further_than_a_forced_token_that_it_lacks(
    lacking: int, temperature: float, verifier: VerifierName
) -> None:
    budget = ReasoningBudget(1, (), (7, lacking), begun=True)
    drafter = DraftModelDrafter(RecordingEngine(), target_vocab_size=20, unshared_ids=[4])
    request = request_of([0], SamplingParams(temperature, 1, reasoning_budget=budget), verifier=verifier)
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(5))
    assert tree.token_ids == [0, 1, 7]


def test_rows_that_differ_in_padding_only_are_not_copied() -> None:
    """A copy of a row of 152,000 logits would cost more than many a token's proposal."""
    row = np.arange(10.0)
    row.setflags(write=False)
    drafter = drafter_for(RecordingEngine(), unshared_ids=[7, 8, 9, 11])
    assert np.shares_memory(drafter._proposable_logits(row), row)
    np.testing.assert_array_equal(drafter._proposable_logits(row), row[:7])


def test_tokens_that_the_draft_lacks_are_read_as_an_end_of_text() -> None:
    engine = RecordingEngine(end_ids=[4, 9])
    drafter = DraftModelDrafter(engine, target_vocab_size=20)
    (request,) = begun(drafter, [0, 12, 1, 19, 2, 15])
    (tree,) = grow(drafter, [request], DraftBudget(1))
    assert tree.token_ids == [15, 5]
    assert engine.take_passes() == [[[0, 4, 1, 4, 2, 4]]]
    engine = RecordingEngine(max_rows=2)
    drafter = DraftModelDrafter(engine, target_vocab_size=20)
    (request,) = begun(drafter, [12, 1, 19])
    grow(drafter, [request], DraftBudget(1))
    assert engine.take_passes() == [[[0, 1]], [[0]]], "without an end of text, as the first token"


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_biases_that_ban_all_that_the_draft_shares_leave_it_silent(temperature: float, verifier: VerifierName) -> None:
    drafter = drafter_for(RecordingEngine(), unshared_ids=range(5, 10))
    params = SamplingParams(temperature, 0, 1.0, 0.0, logit_bias=dict.fromkeys(range(5), -np.inf))
    request = request_of([0], params, verifier=verifier)
    drafter.begin(request)
    assert grow(drafter, [request], DraftBudget(3))[0].num_drafted == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_of_half_a_vocabulary_leaves_the_text_alone(temperature: float) -> None:
    model, params = random_model(10, seed=8), SamplingParams(temperature, 0, 1.0, 0.0, repeat_penalty=1.5, seed=4)
    plain = decode(RecordingEngine(model), [0, 1], params, StopRules(200))
    answer = decode(
        RecordingEngine(model),
        [0, 1],
        params,
        StopRules(200),
        drafters=[drafter_for(RecordingEngine(model), unshared_ids=[0, 2, 4, 6, 8])],
        policy=FixedPolicy(4, siblings=2),
    )
    assert answer.token_ids == plain.token_ids
    assert answer.request.stats.num_accepted > 20
    drafted = [token for token, source in zip(answer.token_ids, answer.sources, strict=True) if source == "draft"]
    assert all(token % 2 for token in drafted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_is_always_right(temperature: float) -> None:
    """Under coupled, so long as both see the same history, positions and penalties: every draft is accepted."""
    model = random_model(10, seed=8)
    params = SamplingParams(temperature, 0, 1.0, 0.0, repeat_penalty=1.5, frequency_penalty=0.5, seed=4)
    answer = decode(
        RecordingEngine(model),
        [0, 1],
        params,
        StopRules(50),
        drafters=[drafter_for(RecordingEngine(model))],
        policy=FixedPolicy(4),
    )
    assert answer.request.stats.num_drafted > 0
    assert answer.request.stats.acceptance_rate == 1.0


def test_in_the_loop_it_costs_a_pass_a_level_for_all_requests_together() -> None:
    """Draft and target share a clock on which a pass of either takes a second."""
    target = RecordingEngine()
    engine = RecordingEngine(clock=target.clock)
    loop = DecodingLoop(target, [drafter_for(engine)], FixedPolicy(3), clock=target.clock)
    requests = [loop.add([start], GREEDY, StopRules(9)) for start in range(4)]
    drain(loop)
    # One token with the prompt, then two rounds of three accepted drafts and a bonus token.
    assert [request.stats.rounds for request in requests] == [2] * 4
    assert [request.stats.num_accepted for request in requests] == [6] * 4
    assert (len(target.passes), len(engine.passes)) == (3, 6)
    assert target.clock.now_s() == 9.0
    assert requests[0].stats.phases.draft_s == 6.0
    assert requests[0].stats.phases.verify_s == 2.0


def test_closing_closes_the_engine() -> None:
    engine = RecordingEngine()
    drafter = drafter_for(engine)
    (request,) = begun(drafter, [0])
    job = DraftJob(request, DraftTree(0), DraftBudget(1))
    assert drafter.grow([job]) == [False]
    drafter.end(request)
    drafter.close()
    with pytest.raises(ClosedError):
        engine.open()


# --- what the cache holds already -------------------------------------------------------------------------------------


def pool_for(engine: ScriptedEngine, **limits: Any) -> CountingPool:
    return CountingPool(engine, **{"max_idle": 4, "max_saved_bytes": 1 << 20, "least_reuse": 3, **limits})


def test_a_prompt_that_was_read_is_not_read_again() -> None:
    engine = RecordingEngine(max_sequences=1)
    drafter = drafter_for(engine, pool=pool_for(engine))
    text = [0, 1, 2, 3, 4, 5]
    (request,) = begun(drafter, text)
    assert drafter.unread(request) == 6
    (tree,) = grow(drafter, [request], DraftBudget(2))
    accept(drafter, request, tree, 1, then=8)
    drafter.end(request)
    engine.take_passes()
    # The next turn of the same chat, and then the first once more.
    (request,) = begun(drafter, [*request.token_ids, 9])
    assert drafter.unread(request) == 2, "the last token of an answer is not fed"
    assert grow(drafter, [request], DraftBudget(2))[0].token_ids == [9, 0, 1]
    assert drafter.unread(request) == 0
    assert engine.take_passes() == [[[8, 9]], [[0]]]
    drafter.end(request)
    (request,) = begun(drafter, text)
    assert drafter.unread(request) == 1, "the last token is read for its row"
    assert grow(drafter, [request], DraftBudget(1))[0].token_ids == [5, 6]
    assert engine.take_passes() == [[[5]]]


def test_a_request_that_is_to_read_anew_starts_from_nothing() -> None:
    engine = RecordingEngine(max_sequences=1)
    drafter = drafter_for(engine, pool=pool_for(engine))
    text = [0, 1, 2, 3, 4, 5]
    (request,) = begun(drafter, text)
    grow(drafter, [request], DraftBudget(1))
    drafter.end(request)
    engine.take_passes()
    request = request_of(text, GREEDY, cache_prompt=False)
    drafter.begin(request)
    assert drafter.unread(request) == 6
    grow(drafter, [request], DraftBudget(1))
    assert engine.take_passes() == [[text]]


def test_an_interrupt_before_the_handle_is_known_leaves_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RecordingEngine()
    pool = pool_for(engine)
    drafter = drafter_for(engine, pool=pool)
    (request,) = begun(drafter, [0, 1, 2, 3])
    opened = pool.open

    def interrupted(*arguments: Any, **named: Any) -> Any:
        opened(*arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grow(drafter, [request], DraftBudget(1))
    drafter.end(request)
    assert not engine._sequences


def test_requests_at_once_share_what_the_first_has_read() -> None:
    engine = RecordingEngine()
    drafter = drafter_for(engine, pool=pool_for(engine))
    first, second = begun(drafter, [0, 1, 2, 3, 4], [0, 1, 2, 3, 9])
    grow(drafter, [first], DraftBudget(1))
    engine.take_passes()
    assert drafter.unread(second) == 1
    assert grow(drafter, [second], DraftBudget(1))[0].token_ids == [9, 0]
    assert engine.take_passes() == [[[9]]]
    assert drafter.pool.used_cells == 6
    # Both go on by themselves.
    assert [tree.token_ids for tree in grow(drafter, [first, second], DraftBudget(2))] == [[4, 5, 6], [9, 0, 1]]


def test_namespaces_are_kept_apart() -> None:
    engine = RecordingEngine()
    drafter = drafter_for(engine, pool=pool_for(engine))
    (request,) = begun(drafter, [0, 1, 2, 3, 4])
    grow(drafter, [request], DraftBudget(1))
    drafter.end(request)
    for namespace, unread in (("other", 5), ("", 1)):
        request = request_of([0, 1, 2, 3, 4], GREEDY, namespace=namespace)
        drafter.begin(request)
        assert drafter.unread(request) == unread
        drafter.end(request)


def test_a_text_whose_beginning_was_forgotten_is_not_kept() -> None:
    engine = RecordingEngine(context_length=8)
    drafter = drafter_for(engine, pool=pool_for(engine))
    (kept,) = begun(drafter, [0, 1, 2, 3])
    grow(drafter, [kept], DraftBudget(1))
    drafter.end(kept)
    # Longer than the draft's context from the start: its end is read, and the sequence that is kept is left alone.
    (request,) = begun(drafter, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert drafter.unread(request) == 8
    engine.take_passes()
    assert grow(drafter, [request], DraftBudget(1))[0].token_ids == [9, 0]
    assert engine.take_passes() == [[[6, 7, 8, 9]]]
    drafter.end(request)
    assert not engine._sequences
    (request,) = begun(drafter, [6, 7, 8, 9, 0])
    assert drafter.unread(request) == 5
    drafter.end(request)
    (request,) = begun(drafter, [0, 1, 2, 3, 4])
    assert drafter.unread(request) == 1


def test_a_request_that_is_begun_anew_reads_nothing_twice() -> None:
    """As after a round that was taken back: its answer is shorter than what the cache holds of it."""
    engine = RecordingEngine()
    drafter = drafter_for(engine, pool=pool_for(engine))
    (request,) = begun(drafter, [0, 1, 2, 3])
    (tree,) = grow(drafter, [request], DraftBudget(3))
    accept(drafter, request, tree, 2, then=9)
    unsay(request, 5)
    drafter.end(request)
    drafter.begin(request)
    engine.take_passes()
    assert drafter.unread(request) == 1
    assert grow(drafter, [request], DraftBudget(1))[0].token_ids == [4, 5]
    assert engine.take_passes() == [[[4]]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_reuses_proposes_what_one_proposes_that_reads_all(temperature: float) -> None:
    """A server's afternoon: turns of three chats that begin alike, several at once, in a cache that is too small."""
    model = random_model(10, seed=8)
    draft_model = blended_model(model, random_model(10, seed=9), 0.3)
    answers, rows, reused = [], [], []
    for max_idle in (4, 0):
        rng = random.Random(3)
        target = RecordingEngine(model)
        engine = RecordingEngine(draft_model, max_sequences=3, cells=400)
        pool = pool_for(engine, max_idle=max_idle, max_saved_bytes=1000, least_reuse=4)
        drafter = drafter_for(engine, pool=pool)
        loop = DecodingLoop(target, [drafter], FixedPolicy(3), clock=target.clock)
        chats = [[*[1, 2, 3] * 6, chat] for chat in range(3)]
        said = []
        for _ in range(12):
            chosen = rng.sample(range(3), rng.randint(1, 3))
            requests = {
                chat: loop.add(
                    chats[chat], SamplingParams(temperature, 0, 1.0, 0.0, seed=7), StopRules(rng.randint(3, 12))
                )
                for chat in chosen
            }
            drain(loop)
            for chat, request in requests.items():
                said.append((request.output_ids, request.sources, dict(request.stats.drafted_by_source)))
                chats[chat] = [*request.token_ids, rng.randrange(10)]
        answers.append(said)
        rows.append(sum(len(step) for steps in engine.passes for step in steps))
        reused.append(pool.reused_tokens)
    assert answers[0] == answers[1]
    assert rows[1] - rows[0] == reused[0] > 500
    assert reused[1] == 0
