"""Replay against the live loop, on scripted engines: equal rounds, equal counts, equal virtual time."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Sequence

import pytest
from benchmarks.cost_tables import PASS_MS

from paceline.api import Model
from paceline.core.clock import VirtualClock
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.drafters.base import DraftBudget, Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.lookup import LookupDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, blended_model, random_model
from paceline.lab.replaying.recorder import record
from paceline.lab.replaying.recording import Recording
from paceline.lab.replaying.replay import ReplayResult, replay
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.base import Policy, RoundRecord
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.planning.registry import POLICY_NAMES, build_policy
from paceline.runtime.loop import DecodingLoop
from tests.helpers import MoodyPolicy, looping_model
from tests.planning.helpers import Curve, Skill, smooth, synthetic, table

SIZE = 12
BASE = random_model(SIZE, seed=11, order=2)
TARGET = looping_model(SIZE, BASE, period=5, pull=1.5)
DRAFT = blended_model(TARGET, random_model(SIZE, seed=12, order=2), 0.35)
DEPTH = 6

COSTS = Curve(
    # Cliffs both ways, and a price of context for both models.
    lambda rows: (1.0, 1.7, 2.6, 1.5, 2.4, 2.2)[min(rows, 6) - 1] + 0.01 * rows,
    lambda rows: 0.1 + 0.02 * rows,
    token_s=0.003,
)
PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 8, 5, 6], [0, 0, 0])


def engines(end_ids: Sequence[int]) -> tuple[ScriptedEngine, ScriptedEngine]:
    """Return target and draft on one clock."""
    vocabulary = ScriptedVocabulary.of_size(SIZE, end_ids)
    target = ScriptedEngine(TARGET, vocabulary, cost=COSTS.round_s)
    draft = ScriptedEngine(DRAFT, vocabulary, clock=target.clock, cost=COSTS.draft_s)
    return target, draft


def drafters_named(names: Sequence[str], draft: ScriptedEngine) -> list[Drafter]:
    makers: dict[str, Callable[[], Drafter]] = {
        "draft": lambda: DraftModelDrafter(draft, target_vocab_size=SIZE),
        "suffix": lambda: SuffixDrafter(1),
        "lookup": lambda: LookupDrafter(3, 1),
    }
    return [makers[name]() for name in names]


def recorded(
    names: Sequence[str], temperature: float, *, end_ids: Sequence[int] = (), tokens: int = 40
) -> Sequence[Recording]:
    return _recorded(tuple(names), temperature, tuple(end_ids), tokens)


@functools.cache
def _recorded(names: Sequence[str], temperature: float, end_ids: Sequence[int], tokens: int) -> Sequence[Recording]:
    target, draft = engines(end_ids)
    with Model(target, drafters_named(names, draft), NO_SPECULATION) as model:
        return [
            record(
                model,
                prompt,
                depth=DEPTH,
                siblings=3,
                max_tokens=tokens,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                seed=seed,
            )
            for seed, prompt in enumerate(PROMPTS)
        ]


def live(
    names: Sequence[str],
    policy: Policy,
    temperature: float,
    *,
    end_ids: Sequence[int] = (),
    concurrent: int = 1,
    tokens: int = 40,
) -> list[Request]:
    """Decode all prompts with the models themselves; ``concurrent`` at once."""
    target, draft = engines(end_ids)
    loop = DecodingLoop(target, drafters_named(names, draft), policy, clock=target.clock, prompt_rounds=math.inf)
    requests: list[Request] = []
    while len(requests) < len(PROMPTS) or loop.active:
        while len(requests) < len(PROMPTS) and len(loop.active) < concurrent:
            params = SamplingParams(temperature, 0, 1.0, 0.0, seed=len(requests))
            requests.append(loop.add(PROMPTS[len(requests)], params, StopRules(tokens)))
        loop.step()
    return requests


def check_equal(result: ReplayResult, requests: Sequence[Request]) -> None:
    for replayed, request in zip(result.requests, requests, strict=True):
        stats = request.stats
        assert replayed.num_tokens == request.num_output
        assert (replayed.rounds, replayed.num_drafted, replayed.num_accepted) == (
            stats.rounds,
            stats.num_drafted,
            stats.num_accepted,
        )
        assert replayed.decode_s == pytest.approx(stats.decode_s, rel=1e-12)


SETTINGS = [
    FixedPolicy(0),
    FixedPolicy(1),
    FixedPolicy(4),
    FixedPolicy(DEPTH, siblings=3),
    FixedPolicy(5, p_min=0.45),
    FixedPolicy(5, draft_min=3, p_min=0.3, siblings=2),
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("names", [["draft"], ["suffix", "draft"], ["draft", "lookup", "suffix"]])
def test_replay_has_the_rounds_of_the_live_loop(names: list[str], temperature: float) -> None:
    recordings = recorded(names, temperature)
    for policy in SETTINGS:
        result = replay(recordings, policy, COSTS)
        check_equal(result, live(names, policy, temperature))
        share = result.accept_share
        assert share is None if not policy.speculates else share is not None and 0.0 < share < 1.0


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_policies_that_learn_replay_as_they_run(name: str) -> None:
    """Evidence and records are the same, or these would decide otherwise; their state goes from prompt to prompt."""
    names = ["suffix", "draft"]
    recordings = recorded(names, 0.8)

    def policy() -> Policy:
        if name == "auto":
            return AutoPolicy(COSTS, draft_max=DEPTH)
        built = build_policy(name, costs=COSTS if name == "profile-ev" else None)
        return dataclasses.replace(built, draft_max=DEPTH, **({"start": 3} if hasattr(built, "start") else {}))  # type: ignore[type-var]

    check_equal(replay(recordings, policy(), COSTS), live(names, policy(), 0.8))


def test_end_tokens_end_replays_too() -> None:
    for temperature in (0.0, 0.8):
        recordings = recorded(["suffix", "draft"], temperature, end_ids=[9, 10])
        assert any(len(recording.token_ids) < 40 for recording in recordings)
        for policy in (FixedPolicy(5, siblings=2), FixedPolicy(3)):
            check_equal(
                replay(recordings, policy, COSTS), live(["suffix", "draft"], policy, temperature, end_ids=[9, 10])
            )


def test_pooled_requests_share_rounds_as_they_do_live() -> None:
    names = ["suffix", "draft"]
    recordings = recorded(names, 0.8)
    for concurrent in (2, 4):
        result = replay(recordings, FixedPolicy(4, siblings=2), COSTS, concurrent=concurrent)
        check_equal(result, live(names, FixedPolicy(4, siblings=2), 0.8, concurrent=concurrent))
        assert result.decode_s < sum(request.decode_s for request in result.requests)


class PausingPolicy(FixedPolicy):
    """Drafts in some rounds only, so that the draft's cache has to catch up."""

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        return [DraftBudget(4) if request.num_output % 7 < 3 else None for request in requests]


def test_catching_up_after_a_pause_is_charged() -> None:
    recordings = recorded(["draft"], 0.0)
    result = replay(recordings, PausingPolicy(4), COSTS)
    check_equal(result, live(["draft"], PausingPolicy(4), 0.0))
    assert any(request.num_drafted for request in result.requests)


def test_a_policy_sees_the_recorded_evidence_and_temperature() -> None:
    recording = synthetic(3, {"draft": Skill(0.8, 0.5)}, siblings=3)
    recording = dataclasses.replace(recording, temperature=0.8)
    seen = 0

    class Watching(FixedPolicy):
        def observe(self, record: RoundRecord) -> None:
            nonlocal seen
            for request, tree, path in zip(record.requests, record.trees, record.paths, strict=True):
                assert request.params.temperature == 0.8
                chain = recording.traces[0].chains[request.num_output - len(path) - 2]
                for node in range(1, len(tree)):
                    level = chain[tree.depths[node] - 1]
                    index = level.token_ids.index(tree.token_ids[node])
                    assert tree.evidence[node].margin == level.margins[index]
                    assert tree.evidence[node].probability is None, "nobody asked"
                    seen += 1

    result = replay([recording], Watching(3, siblings=3), smooth(0.01, 0.001))
    assert seen == result.requests[0].num_drafted > 50


def test_drafters_can_be_left_out_and_reordered() -> None:
    names = ["suffix", "draft"]
    recordings = recorded(names, 0.0)
    for chosen in (["draft"], ["suffix"], ["draft", "suffix"], []):
        result = replay(recordings, FixedPolicy(4), COSTS, drafters=chosen)
        check_equal(result, live(chosen, FixedPolicy(4), 0.0))


def test_asking_a_free_drafter_can_have_a_price() -> None:
    recording = synthetic(1, {"suffix": Skill(0.7, is_model=False)})
    cheap = replay([recording], FixedPolicy(3), smooth(0.01, 0.001))
    dear = replay([recording], FixedPolicy(3), smooth(0.01, 0.001), free_s=0.5)
    # The last round has nothing left to draft if one token is left.
    asked = round((dear.decode_s - cheap.decode_s) / 0.5)
    assert cheap.rounds - 1 <= asked <= cheap.rounds


def test_drift_follows_the_virtual_clock() -> None:
    recording = synthetic(1, {}, num_tokens=11, num_prompt=1)
    result = replay([recording], NO_SPECULATION, smooth(1.0, 0.0), drift=lambda now_s: 1.0 if now_s < 4.5 else 2.0)
    # The prompt's pass and four rounds start in the first 4.5 s, six rounds after.
    assert result.decode_s == 4.0 + 6 * 2.0
    assert result.tokens_per_second == pytest.approx(10 / 16)


def test_a_policy_that_takes_time_moves_the_clock_itself() -> None:
    recording = synthetic(1, {"draft": Skill(0.6)})
    clock = VirtualClock()
    clock.advance(100.0)

    class Slow(FixedPolicy):
        def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
            clock.advance(0.5)

    quick = replay([recording], FixedPolicy(3), smooth(0.01, 0.001))
    slow = replay([recording], Slow(3), smooth(0.01, 0.001), clock=clock)
    assert slow.rounds == quick.rounds
    # Nothing is drafted where one token is left.
    asked = round((slow.decode_s - quick.decode_s) / 0.5)
    assert quick.rounds - 1 <= asked <= quick.rounds
    assert slow.decode_s == pytest.approx(quick.decode_s + 0.5 * asked)
    assert slow.total_s == pytest.approx(quick.total_s + 0.5 * asked), "counted from where the clock stood"


def test_policies_cannot_draft_deeper_than_was_recorded() -> None:
    recording = synthetic(1, {"draft": Skill(1.0)}, depth=3)
    result = replay([recording], FixedPolicy(100), smooth(1.0, 0.0))
    assert result.accept_share == 1.0
    # Rounds of three drafts and a bonus token.
    assert result.rounds == -(-39 // 4)


@pytest.mark.parametrize("curve", PASS_MS)
def test_moods_change_time_but_never_text(curve: str) -> None:
    recordings = [
        synthetic(seed, {"suffix": Skill(0.6, silent=0.5, is_model=False), "draft": Skill(0.7, 0.3)}, siblings=2)
        for seed in range(4)
    ]
    result = replay(recordings, MoodyPolicy(random.Random(curve)), table(PASS_MS[curve]), concurrent=2)
    assert [request.num_tokens for request in result.requests] == [40] * 4


def test_what_cannot_be_replayed() -> None:
    one = synthetic(1, {"draft": Skill(0.5)})
    with pytest.raises(InputError, match="no recordings to replay"):
        replay([], NO_SPECULATION, COSTS)
    with pytest.raises(InputError, match="drafter 'suffix' was not recorded: there are draft"):
        replay([one], NO_SPECULATION, COSTS, drafters=["suffix"])
    with pytest.raises(InputError, match="different models, drafters or depths"):
        replay([one, synthetic(1, {"draft": Skill(0.5)}, depth=9)], NO_SPECULATION, COSTS)
    with pytest.raises(InputError, match="replay of 0 requests"):
        replay([one], NO_SPECULATION, COSTS, concurrent=0)
