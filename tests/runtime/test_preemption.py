"""Requests that lose their places at any moment say what each says alone, whatever a text, a grammar or a draft is in.

A cache that runs full by itself preempts few requests, as it starts only those that fit. So here passes are refused at
random (``squeezing.py``), in the scenes of the other proofs: most requests lose their place, many of them several times
in a row.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections import Counter
from typing import Any

from paceline.core.logprobs import LogprobParams
from paceline.core.params import StopRules
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.base import Engine
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.engines.sequence_pool import SequencePool
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime.loop import DecodingLoop
from tests.helpers import PLAIN_PARAMS, Answer, drain
from tests.proofs import Tally
from tests.runtime.amended import with_budget, with_grammar
from tests.runtime.scenes import Asked, Scene, check_scene, play
from tests.runtime.shared_scenes import play_seed
from tests.runtime.squeezing import Squeeze, at_random
from tests.runtime.twins import Twins
from tests.tiers import by_tier

NUM_SCENES = by_tier(30, quick=24)
MIN_CASES = {
    "in all": 1.0,
    "with drafts": 0.2,
    "in a prompt": 0.1,
    "before it went on": 0.3,
    "three times and more": 0.1,
    "with text withheld": 0.03,
}
"""Places that are lost in each hard case, for each request. Half of the requests and more lose theirs."""


class Squeezes:
    """Puts a squeeze on each loop, and adds up what they did."""

    def __init__(self) -> None:
        self._all: list[Squeeze] = []

    def put_on(self, rng: random.Random, loop: DecodingLoop, engine: Engine) -> None:
        squeeze = Squeeze(at_random(rng, share=0.75))
        squeeze.put_on(loop, engine)
        self._all.append(squeeze)

    @property
    def cases(self) -> Counter[str]:
        """Places that were lost, by when."""
        return sum((squeeze.cases for squeeze in self._all), Counter())

    @property
    def num_requests(self) -> int:
        """How many requests lost their place."""
        return sum(squeeze.num_requests for squeeze in self._all)


def amend(rng: random.Random, answer: Answer, vocabulary: ScriptedVocabulary) -> Asked:
    """Ask for log-probabilities, and for a grammar, which may begin behind a reasoning, or for a reasoning's budget."""
    asked = Asked(answer.request.params, answer.request.rules)
    kind = rng.randrange(3)
    if kind:
        asked = (with_grammar if kind == 1 else with_budget)(rng, answer, vocabulary)
    return asked._replace(logprobs=LogprobParams(rng.choice((None, 0, 3)), rng.random() < 0.5))


def check(scene: Scene, tally: Tally, squeezes: Squeezes, **how: Any) -> None:
    """Hold a scene's answers, in a cache that is squeezed, to those of plain decoding."""
    prepare = functools.partial(squeezes.put_on, random.Random(scene.seed))
    # Of several requests, and not the shortest.
    check_scene(
        dataclasses.replace(scene, calm=True, short_context=False, setups=scene.setups[:2]),
        tally,
        amend=amend,
        prepare=prepare,
        **how,
    )


def test_what_a_prompt_has_read_itself_was_in_no_cache() -> None:
    """It was: 21 of 30 tokens, which it had read before it lost its place, were reported as reused."""
    engine = ScriptedEngine(random_model(9, seed=1), ScriptedVocabulary.of_size(9), max_rows=8)
    pool = SequencePool(engine, least_reuse=4)
    loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock, pool=pool, prompt_rounds=math.inf)
    Squeeze(itertools.chain([0, 0, 0, 0, 2], itertools.repeat(0))).put_on(loop, engine)
    first = loop.add([1, 2, 3], PLAIN_PARAMS, StopRules(20))
    loop.step()
    second = loop.add([4] * 5 + [5] * 25, PLAIN_PARAMS, StopRules(5))
    drain(loop)
    assert (first.stats.preemptions, second.stats.preemptions) == (0, 1)
    assert (second.stats.cached_tokens, second.stats.prompt_tokens) == (0, 30)


def test_who_has_to_read_again_waits_for_one_that_fills_the_cache_meanwhile() -> None:
    """Where passes are not shared, others grow between a start and its first pass: one that grew ended by no_room."""
    model, vocabulary = random_model(9, seed=1), ScriptedVocabulary.of_size(9)
    num_preempted = 0
    for squeezed, length in itertools.product(range(12), range(8, 20)):
        engine = ScriptedEngine(model, vocabulary, cells=40, shares_passes=False)
        drafter = DraftModelDrafter(ScriptedEngine(model, vocabulary), target_vocab_size=9)
        loop = DecodingLoop(engine, [drafter], FixedPolicy(4), clock=engine.clock, growth=0)
        Squeeze(itertools.chain([0] * squeezed, [2], itertools.repeat(0))).put_on(loop, engine)
        long, short = StopRules(26), StopRules(8)
        requests = [loop.add([1, 2, 3], PLAIN_PARAMS, long), loop.add([4] * length, PLAIN_PARAMS, short)]
        drain(loop)
        assert [request.finish_reason for request in requests] == ["length", "length"]
        num_preempted += requests[1].stats.preemptions
    assert num_preempted > 0


def report(what: str, tally: Tally, squeezes: Squeezes) -> None:
    """Fail unless most requests lost their places, and in each of the hard cases."""
    compared = tally["equal to plain decoding"]
    tally.update(squeezes.cases)
    tally["lost their places"] = squeezes.num_requests
    least = {case: share * compared for case, share in MIN_CASES.items()}
    tally.report(f"preempted, {what}", {"lost their places": compared / 2, **least})


def test_texts_grammars_and_reasoning() -> None:
    tally, squeezes = Tally(), Squeezes()

    play("preempted", NUM_SCENES, functools.partial(check, tally=tally, squeezes=squeezes))
    report("alone", tally, squeezes)


def test_a_recurrent_state(twins: Twins) -> None:
    """Each row of the real model is held to that of a reading from the beginning."""
    tally, squeezes = Tally(), Squeezes()

    how = {"make_model": twins.make_model, "make_engine": twins.make}
    play("recurrent preemption", NUM_SCENES // 4, lambda scene: check(twins.shaped(scene), tally, squeezes, **how))
    report("recurrent", tally, squeezes)


def test_beginnings_are_shared_and_what_was_read_is_kept() -> None:
    tally, squeezes = Tally(), Squeezes()
    for seed in range(NUM_SCENES // 4):
        play_seed(seed, tally, functools.partial(squeezes.put_on, random.Random(seed)))
    report("sharing", tally, squeezes)
