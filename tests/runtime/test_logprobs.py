"""Log-probabilities are the target's, the same with drafts and without, whatever becomes of a request on the way.

The scripted engine is exact, so each value has to be equal to the last bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.core.logprobs import LogprobParams, TokenLogprob
from paceline.core.params import VERIFIER_NAMES, SamplingParams, SpeculationParams, StopRules, VerifierName
from paceline.core.reasoning import ReasoningBudget
from paceline.core.sampling import RowSampler
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import (
    LogitFunction,
    ScriptedEngine,
    ScriptedVocabulary,
    blended_model,
    random_model,
    table_model,
)
from paceline.engines.sequence_pool import SequencePool
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime import postprocess
from paceline.runtime.loop import DecodingLoop
from tests.helpers import (
    PLAIN_PARAMS,
    Answer,
    ForcedDrafter,
    MoodyPolicy,
    ScribblingDrafter,
    decode,
    drain,
    frozen,
    softmax,
)
from tests.proofs import Tally
from tests.tiers import by_tier

NUM_SCENES = by_tier(300, quick=60)
MIN_PREEMPTIONS = by_tier(150, quick=20)
GREEDY = SamplingParams(0.0)
COUNTING = table_model(np.roll(np.eye(10), 1, axis=1))
"""Greedily counts up: 0 is followed by 1, ..., 9 by 0."""


def expected_of(
    model: LogitFunction, answer: Answer, params: SamplingParams, asked: LogprobParams
) -> list[TokenLogprob]:
    """Return what every token of an answer has to have, from the model and the tokens before it alone."""
    sampler = RowSampler(params, answer.request.num_prompt)
    expected = []
    for position in range(answer.request.num_prompt, len(answer.request.token_ids)):
        history, token_id = answer.request.token_ids[:position], answer.request.token_ids[position]
        row = model(history)
        probs = softmax(row.astype(np.float64))
        if asked.post_sampling_probs:
            candidates = sampler.candidates(row, history)
            ids = np.arange(len(row)) if candidates.ids is None else candidates.ids
            probs = np.zeros(len(row))
            probs[ids] = softmax(candidates.logits.astype(np.float64))
            if params.greedy:
                probs = np.eye(len(row))[probs.argmax()]
        likeliest = sorted(np.flatnonzero(probs).tolist(), key=lambda one: (-probs[one], one))[: asked.logprobs]
        top = tuple((one, math.log(probs[one])) for one in likeliest)
        expected.append(TokenLogprob(token_id, math.log(probs[token_id]), top))
    return expected


def assert_like(found: Sequence[TokenLogprob], expected: Sequence[TokenLogprob]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-9)


def params_of(rng: random.Random, verifier: VerifierName, size: int) -> SamplingParams:
    budget = ReasoningBudget(rng.randint(0, 4), (1,), (2, 3), begun=rng.random() < 0.5)
    return SamplingParams(
        rng.choice((0.0, 0.7, 1.3)),
        top_k=rng.choice((0, 5)),
        top_p=rng.choice((1.0, 0.9)),
        min_p=rng.choice((0.0, 0.05)),
        repeat_penalty=rng.choice((1.0, 1.2)),
        frequency_penalty=rng.choice((0.0, 0.2)),
        logit_bias=rng.choice(({}, {0: -math.inf, size - 1: 1.0})),
        seed=rng.getrandbits(32),
        choice=rng.randrange(2),
        reasoning_budget=rng.choice((None, budget)) if verifier == "coupled" else None,
    )


class Scene:
    """Five requests of mixed settings in one loop, most of which ask for log-probabilities, in a cramped cache."""

    def __init__(self, seed: int, verifier: VerifierName) -> None:
        self.rng = rng = random.Random(seed)
        self.verifier = verifier
        size = rng.choice((5, 12, 40))
        self.model = frozen(random_model(size, seed=seed, order=2, spread=rng.choice((1.0, 3.0))))
        self.vocabulary = ScriptedVocabulary.of_size(size, end_ids=[4] if rng.random() < 0.5 else [])
        self.plain = []
        for _ in range(5):
            prompt = [rng.randrange(size) for _ in range(rng.randint(1, 8))]
            rules = StopRules(rng.randint(1, 20), stop=rng.choice(((), ("#$", "%"))))
            asked = LogprobParams(rng.choice((None, 0, 1, 3, 50)), rng.random() < 0.5)
            params = params_of(rng, verifier, size)
            engine = ScriptedEngine(self.model, self.vocabulary)
            self.plain.append(decode(engine, prompt, params, rules, verifier=verifier, logprobs=asked))

    def decoded(self) -> list[Answer]:
        """Decode all of them together, with drafts."""
        rng, size, plain = self.rng, self.vocabulary.size, self.plain
        max_rows = rng.choice((6, 30, 200))
        longest = max(len(answer.request.token_ids) for answer in plain)
        engine = ScriptedEngine(
            self.model,
            self.vocabulary,
            max_rows=max_rows,
            max_outputs=min(max_rows, rng.choice((6, 200))),
            trees=rng.random() < 0.8,
            cells=rng.choice((longest + 4, longest + 30, None)),
        )
        blended = blended_model(self.model, random_model(size, seed=1), 0.3)
        draft = ScriptedEngine(frozen(blended), ScriptedVocabulary.of_size(size))
        drafters: list[Any] = [DraftModelDrafter(draft, target_vocab_size=size), SuffixDrafter(1)]
        policy: Any = FixedPolicy(rng.randint(1, 5), siblings=rng.randint(1, 3))
        if self.verifier == "coupled":
            futures: dict[tuple[int, ...], Sequence[int]] = {tuple(one.prompt_ids): one.token_ids for one in plain}
            branching = engine.capabilities.trees
            drafters.append(
                ScribblingDrafter(rng, size, futures, branching=branching, luck=rng.choice((0.5, 0.9)), most_nodes=9)
            )
            policy = rng.choice((policy, MoodyPolicy(rng)))
        pool = SequencePool(engine, least_reuse=2)
        # All start at once, so that some lose their place.
        loop = DecodingLoop(engine, drafters, policy, clock=engine.clock, pool=pool, growth=0)
        answers = [
            Answer(
                loop.add(
                    answer.prompt_ids,
                    answer.request.params,
                    answer.request.rules,
                    SpeculationParams(verify=self.verifier),
                    logprobs=answer.request.logprob_params,
                )
            )
            for answer in plain
        ]
        by_request = {answer.request.id: answer for answer in answers}
        while loop.active:
            for emission in loop.step():
                by_request[emission.request.id].take(emission)
        return answers


@pytest.mark.parametrize("verifier", VERIFIER_NAMES)
def test_the_same_with_drafts_and_without(verifier: VerifierName, request: pytest.FixtureRequest) -> None:
    seen = Tally()
    for seed in range(NUM_SCENES):
        scene = Scene(seed, verifier)
        for answer, plain in zip(scene.decoded(), scene.plain, strict=True):
            asked, params = plain.request.logprob_params, plain.request.params
            seen["preempted"] += answer.request.stats.preemptions
            seen["drafted"] += sum(source != "target" for source in answer.sources)
            seen[str(answer.finish_reason)] += 1
            if asked.logprobs is None:
                assert answer.logprobs == plain.logprobs == []
                continue
            assert_like(answer.logprobs, expected_of(scene.model, answer, params, asked))
            if verifier == "coupled" or params.greedy:
                assert answer.token_ids == plain.token_ids
                assert answer.logprobs == plain.logprobs
                seen["equal"] += len(answer.logprobs)
    cases = ("drafted", "equal", "end", "stop", "length")
    seen.report(
        f"log-probabilities, {verifier}", {"preempted": MIN_PREEMPTIONS, **dict.fromkeys(cases, NUM_SCENES // 2 + 1)}
    )


def counting(paths: Sequence[Sequence[int]], *, end_ids: Sequence[int] = (), **limits: Any) -> DecodingLoop:
    """Return a loop over a model that counts up, whose drafter proposes these paths in every round."""
    pieces = [str(digit).encode() for digit in range(10)]
    engine = ScriptedEngine(COUNTING, ScriptedVocabulary(pieces, end_ids), **limits)
    return DecodingLoop(engine, [ForcedDrafter(lambda request: paths)], FixedPolicy(5, siblings=3), clock=engine.clock)


class TestByHand:
    def test_each_token_has_the_row_of_the_node_before_it(self) -> None:
        """The row after token t has its one logit of 1 at t + 1; the others are 0."""
        loop = counting([[9, 1], [4, 5, 6], [4, 7]])
        loop.add([0, 1, 2], GREEDY, StopRules(50), logprobs=LogprobParams(2))
        likely, other = 1.0 - math.log(math.e + 9.0), -math.log(math.e + 9.0)
        (first,) = loop.step()
        assert_like(first.logprobs, [TokenLogprob(3, likely, ((3, likely), (0, other)))])
        (second,) = loop.step()
        assert second.token_ids == [4, 5, 6, 7]
        assert second.sources == ["forced", "forced", "forced", "target"]
        assert_like(second.logprobs, [TokenLogprob(one, likely, ((one, likely), (0, other))) for one in (4, 5, 6, 7)])

    def test_the_token_that_ends_an_answer_has_its_own_and_nothing_behind_it_has(self) -> None:
        loop = counting([[4, 5, 6]], end_ids=[5])
        request = loop.add([2], GREEDY, StopRules(50), logprobs=LogprobParams(0))
        loop.step()
        (last,) = loop.step()
        assert (last.token_ids, last.finish_reason) == ([4, 5], "end")
        assert [one.token_id for one in last.logprobs] == [4, 5]
        assert [one.token_id for one in request.logprobs] == [3, 4, 5]

    @pytest.mark.parametrize("rules", [StopRules(3), StopRules(50, stop=("5",))])
    def test_what_is_cut_off_an_accepted_draft_has_none(self, rules: StopRules) -> None:
        loop = counting([[4, 5, 6, 7]])
        request = loop.add([2], GREEDY, rules, logprobs=LogprobParams(0))
        drain(loop)
        assert [one.token_id for one in request.logprobs] == request.output_ids == [3, 4, 5]

    def test_what_is_cancelled_keeps_what_it_has_said(self) -> None:
        loop = counting([[4, 5]])
        request = loop.add([2], GREEDY, StopRules(50), logprobs=LogprobParams(1))
        loop.step()
        loop.step()
        last = loop.cancel(request)
        assert last is not None
        assert (last.token_ids, last.logprobs) == ([], ())
        assert [one.token_id for one in request.logprobs] == request.output_ids == [3, 4, 5, 6]


def test_a_round_that_is_cut_short_takes_its_log_probabilities_back() -> None:
    undisturbed, loop = (counting([[4, 5]]) for _ in range(2))
    engine: Any = loop._engine
    asked = LogprobParams(2)
    expected = undisturbed.add([2], GREEDY, StopRules(8), logprobs=asked)
    while undisturbed.active:
        undisturbed.step()
    request = loop.add([2], GREEDY, StopRules(8), logprobs=asked)
    loop.step()
    commit = engine.commit

    def fail(sequence: int, path: Sequence[int]) -> None:
        assert [one.token_id for one in request.logprobs] == [3, 4, 5, 6], "it was written"
        raise RuntimeError("once")

    engine.commit = fail
    with pytest.raises(RuntimeError, match="once"):
        loop.step()
    engine.commit = commit
    emissions = []
    while loop.active:
        emissions += loop.step()
    assert [one for emission in emissions for one in emission.logprobs] == expected.logprobs[1:]
    assert request.logprobs == expected.logprobs


def test_what_was_emitted_and_not_taken_goes_out_with_the_end() -> None:
    """A round may stand though an observer failed after it; a request that is cancelled then has its tokens."""

    class Clumsy:
        def observe(self, record: object) -> None:
            raise ValueError("not mine")

    engine = ScriptedEngine(COUNTING, ScriptedVocabulary.of_size(10))
    loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock, observers=[Clumsy()])
    request = loop.add([2], GREEDY, StopRules(8), logprobs=LogprobParams(0))
    with pytest.raises(ValueError, match="not mine"):
        loop.step()
    last = loop.cancel(request)
    assert last is not None
    assert (last.token_ids, [one.token_id for one in last.logprobs]) == ([3], [3])


def test_nothing_is_computed_for_those_who_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(token_id: int, *rest: Any) -> TokenLogprob:
        computed.append(token_id)
        return TokenLogprob(token_id, 0.0, ())

    monkeypatch.setattr(postprocess, "compute_logprob", counted)
    loop = counting([[4, 5]])
    silent = loop.add([2], GREEDY, StopRules(9), logprobs=LogprobParams(None, post_sampling_probs=True))
    asking = loop.add([7], GREEDY, StopRules(4), logprobs=LogprobParams(0))
    while loop.active:
        assert all(emission.logprobs == () for emission in loop.step() if emission.request is silent)
    assert computed == asking.output_ids
    assert len(silent.output_ids) == 9
    assert silent.logprobs == []


def test_under_rejection_an_accepted_draft_has_the_targets_probability() -> None:
    """Not the chance that the draft is accepted, nor its share of what was left after others were turned down."""
    table = np.log(np.array([[0.5, 0.25, 0.25]] * 3))
    engine = ScriptedEngine(table_model(table), ScriptedVocabulary.of_size(3))
    paths = [[2, 1], [1, 0], [0, 0]]
    answer = decode(
        engine,
        [0],
        PLAIN_PARAMS,
        StopRules(60),
        drafters=[ForcedDrafter(lambda request: paths)],
        policy=FixedPolicy(3, siblings=3),
        verifier="rejection",
        logprobs=LogprobParams(1, post_sampling_probs=True),
    )
    assert {"forced", "target"} == set(answer.sources)
    for token_id, one in zip(answer.token_ids, answer.logprobs, strict=True):
        assert one.logprob == pytest.approx(math.log((0.5, 0.25, 0.25)[token_id]))
        assert_like([one], [TokenLogprob(token_id, one.logprob, ((0, math.log(0.5)),))])


def test_rows_that_cannot_be_sampled_end_a_request_as_ever() -> None:
    def broken(tokens: Sequence[int]) -> Float64Array:
        return np.full(10, np.nan) if len(tokens) > 3 else COUNTING(tokens)

    engine = ScriptedEngine(broken, ScriptedVocabulary.of_size(10))
    loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock)
    request = loop.add([2], GREEDY, StopRules(8), logprobs=LogprobParams(1))
    emissions = []
    while loop.active:
        emissions += loop.step()
    assert [emission.finish_reason for emission in emissions] == [None, None, None, "error"]
    assert [one.token_id for one in request.logprobs] == request.output_ids == [3, 4, 5]
    assert "largest logit is nan" in str(request.error)
