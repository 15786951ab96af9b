"""The oracle: against every decision there is in tiny cases, and never beaten in larger ones."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence

import pytest
from benchmarks.cost_tables import PASS_MS

from paceline.core.errors import InputError
from paceline.core.request import Request
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.lab.replaying.oracle import oracle_s
from paceline.lab.replaying.recording import Recording
from paceline.lab.replaying.replay import Drift, replay
from paceline.planning.base import Policy
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.planning.registry import ADAPTIVE_POLICIES, build_policy
from tests.helpers import MoodyPolicy
from tests.planning.helpers import Curve, Skill, smooth, synthetic, table
from tests.tiers import by_tier


class EveryChoice(FixedPolicy):
    """Decides as told, and says how many ways there were: a path through the tree of all decisions."""

    def __init__(self, told: Sequence[int], depth: int, siblings: int) -> None:
        super().__init__(draft_max=depth, siblings=siblings)
        object.__setattr__(self, "told", list(told))
        object.__setattr__(self, "ways", [])

    told: list[int]
    ways: list[int]

    def pick(self, ways: int) -> int:
        self.ways.append(ways)
        return self.told[len(self.ways) - 1] if len(self.ways) <= len(self.told) else 0

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        return [DraftBudget(self.draft_max, self.siblings)] * len(requests)

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        return [job for job in jobs if self.pick(2)]

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        for tree in trees:
            kept = {ROOT}
            for node in range(1, len(tree)):
                if tree.parents[node] in kept and self.pick(2):
                    kept.add(node)
            tree.keep(kept)


def brute_force_s(recording: Recording, costs: Curve, *, drift: Drift | None = None, free_s: float = 0.0) -> float:
    """Return the least decoding time over every sequence of decisions, by the real loop."""
    best = math.inf
    told: list[int] = []
    while True:
        policy = EveryChoice(told, recording.depth, recording.siblings)
        best = min(best, replay([recording], policy, costs, drift=drift, free_s=free_s).decode_s)
        told = (told + [0] * len(policy.ways))[: len(policy.ways)]
        while told and told[-1] + 1 == policy.ways[len(told) - 1]:
            told.pop()
        if not told:
            return best
        told[-1] += 1


def jagged(seed: int, draft_s: float) -> Curve:
    """Return costs with cliffs in all directions."""
    rng = random.Random(seed)
    rows_s = [rng.uniform(0.8, 2.0) for _ in range(30)]
    draft = [draft_s * rng.uniform(0.5, 2.0) for _ in range(60)]
    return Curve(lambda rows: rows_s[rows], lambda rows: draft[rows], token_s=0.01)


SKILLS: Mapping[str, Mapping[str, Skill]] = {
    "model": {"draft": Skill(0.7)},
    "suffix": {"suffix": Skill(0.6, silent=0.2, is_model=False)},
    "both": {"suffix": Skill(0.5, silent=0.3, is_model=False), "draft": Skill(0.7)},
}


@pytest.mark.parametrize("name", SKILLS)
@pytest.mark.parametrize("seed", range(4))
def test_it_equals_the_best_of_all_decisions(name: str, seed: int) -> None:
    recording = synthetic(seed, SKILLS[name], num_tokens=4 if name == "both" else 5, depth=2, num_prompt=3)
    for draft_s in (0.05, 0.6):
        costs = jagged(seed, draft_s)
        assert oracle_s(recording, costs) == pytest.approx(brute_force_s(recording, costs), abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_siblings_and_prices_too(seed: int) -> None:
    recording = synthetic(seed, {"draft": Skill(0.5, sibling=0.8)}, num_tokens=4, depth=2, siblings=2)
    costs = jagged(seed, 0.1)
    assert oracle_s(recording, costs) == pytest.approx(brute_force_s(recording, costs), abs=1e-9)
    recording = synthetic(seed, SKILLS["suffix"], num_tokens=5, depth=3)
    for free_s in (0.02, 0.5):
        brute_s = brute_force_s(recording, costs, free_s=free_s)
        assert oracle_s(recording, costs, free_s=free_s) == pytest.approx(brute_s, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_drift_too(seed: int) -> None:
    recording = synthetic(seed, SKILLS["model"], num_tokens=5, depth=2)
    costs = jagged(seed, 0.3)

    def drift(now_s: float) -> float:
        return 1.0 + 0.3 * math.sin(now_s / 3)

    brute_s = brute_force_s(recording, costs, drift=drift)
    assert oracle_s(recording, costs, drift=drift) == pytest.approx(brute_s, abs=1e-9)
    assert brute_s != pytest.approx(brute_force_s(recording, costs), abs=1e-3)


def test_an_answer_that_ends_before_its_limit() -> None:
    """The last token is an end token: the draft may reach beyond it, as the loop does not know."""
    recording = synthetic(5, {"draft": Skill(0.9)}, num_tokens=5, depth=2, max_tokens=20)
    end_id = recording.token_ids[-1]
    assert end_id not in recording.token_ids[:-1]
    recording = dataclasses.replace(recording, ignore_end=False, end_ids=frozenset([end_id]))
    for seed in range(by_tier(3, quick=1)):
        costs = jagged(seed, 0.1)
        assert oracle_s(recording, costs) == pytest.approx(brute_force_s(recording, costs), abs=1e-9)


def policies() -> dict[str, Policy]:
    built: dict[str, Policy] = {name: build_policy(name, costs=table(PASS_MS["Q4_0"])) for name in ADAPTIVE_POLICIES}
    assert "auto" in built
    built |= {f"fixed {k}": FixedPolicy(k, siblings=s) for k, s in ((0, 1), (1, 1), (2, 2), (4, 1), (8, 2))}
    built |= {f"mood {seed}": MoodyPolicy(random.Random(seed)) for seed in range(4)}
    return built


@pytest.mark.parametrize("curve", PASS_MS)
def test_no_policy_beats_it(curve: str) -> None:
    costs = table(PASS_MS[curve])
    for seed in range(3):
        skills = {"suffix": Skill(0.7, silent=0.6, is_model=False), "draft": Skill(0.75, sibling=0.4)}
        recording = synthetic(seed, skills, num_tokens=60, siblings=2)
        best_s = oracle_s(recording, costs)
        for name, policy in policies().items():
            result = replay([recording], policy, costs)
            shares, share = result.oracle_shares([best_s])
            assert share == shares[0] <= 1.0 + 1e-9, name
            assert share > 0.1


def test_plain_decoding_is_the_best_without_a_right_draft() -> None:
    recording = synthetic(1, {"draft": Skill(0.0)}, siblings=1)
    costs = smooth(1.0, 0.2)
    assert oracle_s(recording, costs) == pytest.approx(replay([recording], NO_SPECULATION, costs).decode_s)


def test_a_perfect_draft_at_no_cost_is_drafted_to_the_full() -> None:
    """33 tokens after the first, in rounds of ten drafts and a bonus token: three rounds, whatever is known."""
    recording = synthetic(1, {"draft": Skill(1.0)}, num_tokens=34, depth=10)
    costs = Curve(lambda rows: 1.0, lambda rows: 0.0)
    assert oracle_s(recording, costs) == pytest.approx(3.0)
    assert replay([recording], FixedPolicy(10), costs).decode_s == pytest.approx(3.0)
    # One drafter less leaves plain decoding.
    assert oracle_s(recording, costs, drafters=[]) == pytest.approx(33.0)


def test_a_wider_pass_is_taken_where_it_is_cheaper() -> None:
    """Three rows cost less than one, and a wrong draft is enough to fill them."""
    recording = synthetic(1, {"suffix": Skill(0.0, is_model=False)}, num_tokens=11, depth=4)
    costs = Curve(lambda rows: 0.5 if rows == 3 else 1.0)
    # Nothing can be drafted where one token is left, and one draft only where two are.
    assert oracle_s(recording, costs) == pytest.approx(8 * 0.5 + 2 * 1.0)


def test_several_draft_models_are_refused() -> None:
    recording = synthetic(1, {"draft": Skill(0.5), "other": Skill(0.6)})
    with pytest.raises(InputError, match="follows one draft model, not 2"):
        oracle_s(recording, smooth(1.0, 0.1))
    assert oracle_s(recording, smooth(1.0, 0.1), drafters=["other"]) > 0
