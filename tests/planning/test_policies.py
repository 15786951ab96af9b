"""The policies for comparison: their rules by hand, and live under both verifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from benchmarks.cost_tables import PASS_MS

from paceline.core.errors import InputError, SamplingError
from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import Request
from paceline.core.tree import ROOT, DraftTree, Evidence
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, blended_model, random_model
from paceline.lab.replaying.replay import replay
from paceline.planning.base import Policy, RoundRecord
from paceline.planning.policies.accept_ratio import AcceptRatioPolicy
from paceline.planning.policies.fixed import FixedPolicy
from paceline.planning.policies.heuristic import HeuristicPolicy
from paceline.planning.policies.profile_ev import ProfileEvPolicy
from paceline.planning.registry import COST_POLICIES, POLICY_NAMES, build_policy
from tests.helpers import PLAIN_PARAMS, decode, request_of
from tests.planning.helpers import Curve, Skill, smooth, synthetic, table

STAIRS = Curve(lambda rows: {1: 1.0, 2: 2.0, 3: 2.1, 4: 2.2, 5: 4.0, 6: 4.1}.get(rows, 1.0 * rows))


class _SharedFrom64(Curve):
    """Rows that cost the same, but for what a context adds to each in passes of fewer than 64."""

    def round_s(self, rows: int, context: int = 0, requests: int = 1) -> float:
        return 0.01 + 0.004 * rows + context * (1e-5 * rows if rows < 64 else 1e-4)


SHARED_FROM_64 = _SharedFrom64(float)


@pytest.mark.parametrize(
    ("name", "speculates", "weighs_drafters", "draft_length", "most_branches"),
    [
        ("auto", True, True, "up to 16, as it pays", None),
        ("fixed", True, False, "5", 1),
        ("accept-ratio", True, True, "as the policy says", None),
        ("profile-ev", True, True, "as the policy says", None),
        ("heuristic", True, True, "as the policy says", None),
    ],
)
def test_what_policies_say_of_themselves(
    name: str, speculates: bool, weighs_drafters: bool, draft_length: str, most_branches: int | None
) -> None:
    policy = build_policy(name, costs=STAIRS)
    assert (policy.speculates, policy.weighs_drafters, policy.draft_length) == (
        speculates,
        weighs_drafters,
        draft_length,
    )
    assert policy.most_branches(2) == most_branches
    assert policy.learned() is None
    assert (policy.report() is None) is (name != "auto")


@pytest.mark.parametrize(
    ("costs", "draft_length"),
    [
        # A CPU's, on which rows cost the same beyond 16, and one with room for half a copy more.
        (table({1: 6.8, 2: 13.8, 4: 21.0, 8: 34.4, 16: 64.2, 32: 126.5, 64: 239.6}), "up to 16, as it pays"),
        (smooth(0.02, 0.002), "up to 16, as it pays"),
        # A GPU's, and one on which rows share what a long context costs from 64 on.
        (table({1: 3.0, 8: 5.7, 16: 7.6, 32: 9.1, 64: 11.7}), "up to 16, of copies up to 63, as it pays"),
        (SHARED_FROM_64, "up to 16, of copies up to 63, as it pays"),
    ],
)
def test_copies_are_drafted_as_deep_as_rows_are_cheap(costs: Curve, draft_length: str) -> None:
    assert build_policy("auto", costs=costs).draft_length == draft_length


class NamedDrafter(SuffixDrafter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def chain(*probabilities: float, source: str = "draft") -> DraftTree:
    tree = DraftTree(0)
    node = ROOT
    for depth, probability in enumerate(probabilities):
        node = tree.add(node, depth + 1, source, Evidence(probability))
    return tree


def observe(policy: Policy, request: Request, drafted: int, accepted: int) -> None:
    tree = chain(*[0.5] * drafted)
    path = list(range(1, accepted + 1))
    policy.observe(RoundRecord([request], [tree], [path], [accepted + 1], 0, 0, 0.0, 0.0, {}, 1.0, 1.0))


def length(policy: Policy, request: Request) -> int:
    (budget,) = policy.budgets([request])
    assert budget is not None
    return budget.max_depth


def begun(policy: Policy, request_id: int = 0) -> Request:
    request = request_of([1, 2], request_id=request_id)
    policy.begin(request)
    return request


class TestAcceptRatio:
    def test_it_lengthens_and_shortens_by_the_share_accepted(self) -> None:
        policy = AcceptRatioPolicy(start=4, shorten_below=0.5, lengthen_from=0.8, draft_max=6)
        request = begun(policy)
        lengths = []
        for drafted, accepted in ((4, 4), (5, 4), (6, 6), (6, 4), (6, 3), (6, 2), (5, 0)):
            observe(policy, request, drafted, accepted)
            lengths.append(length(policy, request))
        # 1, 0.8: longer, and no longer than the longest; 0.67 and a half: as it is; a third and nothing: shorter.
        assert lengths == [5, 6, 6, 6, 6, 5, 4]
        for _ in range(9):
            observe(policy, request, 1, 0)
        assert length(policy, request) == 1

    def test_rounds_without_drafts_change_nothing_and_requests_have_lengths_of_their_own(self) -> None:
        policy = AcceptRatioPolicy(start=4)
        first, second = begun(policy), begun(policy, 1)
        observe(policy, first, 0, 0)
        observe(policy, second, 4, 0)
        assert (length(policy, first), length(policy, second)) == (4, 3)
        policy.end(first)
        assert length(policy, begun(policy)) == 4


class TestHeuristic:
    def test_two_longer_after_all_were_accepted_else_one_shorter(self) -> None:
        policy = HeuristicPolicy(start=3)
        request = begun(policy)
        lengths = []
        # A draft that its confidence cut short counts as whole if all of it was accepted.
        for drafted, accepted in ((3, 3), (5, 4), (2, 2), (6, 0), (0, 0)):
            observe(policy, request, drafted, accepted)
            lengths.append(length(policy, request))
        assert lengths == [5, 4, 6, 5, 5]
        for _ in range(9):
            observe(policy, request, 1, 0)
        assert length(policy, request) == 1

    def test_the_length_outlives_the_request(self) -> None:
        policy = HeuristicPolicy(start=3)
        request = begun(policy)
        observe(policy, request, 3, 3)
        policy.end(request)
        assert length(policy, begun(policy, 1)) == 5

    def test_a_token_it_was_not_sure_of_is_the_last(self) -> None:
        policy = HeuristicPolicy(confidence=0.4)
        request = begun(policy)
        budget = DraftBudget(9, probability=True)
        draft = NamedDrafter("draft")
        assert policy.budgets([request]) == [dataclasses.replace(budget, max_depth=20)]
        jobs = [DraftJob(request, chain(*probabilities), budget) for probabilities in ((), (0.9, 0.4), (0.9, 0.39))]
        assert policy.choose(draft, jobs) == jobs[:2]
        # What another drafter was not sure of says nothing of this one.
        assert policy.choose(NamedDrafter("other"), jobs) == jobs


class TestProfileEv:
    """On ``STAIRS`` a draft accepted whole gives 1, 1, 1.43, 1.82, 1.25 and 1.46 tokens a second, by its depth."""

    def wants(self, policy: ProfileEvPolicy, tree: DraftTree, max_depth: int = 5) -> bool:
        job = DraftJob(request_of([0]), tree, DraftBudget(max_depth, probability=True))
        return policy.choose(NamedDrafter("draft"), [job]) == [job]

    def test_it_goes_on_while_a_longer_draft_could_be_worth_more(self) -> None:
        policy = ProfileEvPolicy(STAIRS, look_ahead=5, draft_max=5)
        assert self.wants(policy, chain())
        # 0.6 of 1.82 beats plain decoding's 1; half of it does not.
        assert self.wants(policy, chain(0.6))
        assert not self.wants(policy, chain(0.5))
        # At the best step already, nothing behind it is better.
        assert not self.wants(policy, chain(1.0, 1.0, 1.0))

    def test_the_look_ahead_carries_it_across_a_step(self) -> None:
        assert not self.wants(ProfileEvPolicy(STAIRS, look_ahead=1), chain())
        assert self.wants(ProfileEvPolicy(STAIRS, look_ahead=2), chain())
        # What the budget does not allow is no prospect.
        assert not self.wants(ProfileEvPolicy(STAIRS, look_ahead=5), chain(0.6), max_depth=2)

    @pytest.mark.parametrize(
        ("probabilities", "depth"), [((0.9, 0.9, 0.9), 3), ((0.95, 0.9, 0.5), 2), ((0.6, 0.6, 0.6), 0), ((1.0,), 0)]
    )
    def test_what_is_worth_most_is_verified(self, probabilities: Sequence[float], depth: int) -> None:
        tree = chain(*probabilities)
        ProfileEvPolicy(STAIRS).select([request_of([0])], [tree])
        assert tree.num_drafted == depth

    def test_of_several_chains_the_better_one(self) -> None:
        tree = chain(0.6, 0.9, 0.9)
        node = ROOT
        for token_id in (7, 8, 9):
            node = tree.add(node, token_id, "suffix", Evidence(0.95))
        ProfileEvPolicy(STAIRS).select([request_of([0])], [tree])
        assert tree.token_ids[1:] == [7, 8, 9]

    def test_it_is_refused_where_it_would_bias_the_text(self) -> None:
        policy = ProfileEvPolicy(STAIRS)
        with pytest.raises(SamplingError, match="profile-ev with rejection at temperature 1"):
            policy.check(request_of([0], verifier="rejection"))
        policy.check(request_of([0], SamplingParams(0.0), verifier="rejection"))
        policy.check(request_of([0]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AcceptRatioPolicy(start=0), "drafts of 0 to 16"),
        (lambda: AcceptRatioPolicy(shorten_below=0.9), "shares of 0.9 to shorten and 0.8"),
        (lambda: HeuristicPolicy(start=200), "drafts of 200 to 128"),
        (lambda: HeuristicPolicy(confidence=1.1), "confidence of 1.1"),
        (lambda: ProfileEvPolicy(STAIRS, look_ahead=0), "look-ahead of 0"),
        (lambda: ProfileEvPolicy(STAIRS, draft_max=0), "up to 0 tokens"),
        (lambda: build_policy("best"), "unknown policy 'best': choose from"),
        (lambda: build_policy("profile-ev"), "needs measured costs of passes"),
        (lambda: build_policy("heuristic", fixed=FixedPolicy(3)), "chooses draft lengths itself"),
    ],
)
def test_bad_settings(build: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()  # type: ignore[operator]


def test_fixed_keeps_its_settings() -> None:
    assert build_policy("fixed", fixed=FixedPolicy(3)) == FixedPolicy(3)
    assert build_policy("fixed") == FixedPolicy()


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_plain_decoding(name: str, temperature: float) -> None:
    model = random_model(8, seed=1)
    draft = blended_model(model, random_model(8, seed=2), 0.3)
    vocabulary = ScriptedVocabulary.of_size(8)
    params = dataclasses.replace(PLAIN_PARAMS, temperature=temperature)
    plain = decode(ScriptedEngine(model, vocabulary), [1, 2], params, StopRules(60))
    drafters: list[Drafter] = [
        SuffixDrafter(1),
        DraftModelDrafter(ScriptedEngine(draft, vocabulary), target_vocab_size=8),
    ]
    policy = build_policy(name, costs=smooth(0.02, 0.001) if name in COST_POLICIES else None)
    answer = decode(ScriptedEngine(model, vocabulary), [1, 2], params, StopRules(60), drafters=drafters, policy=policy)
    assert answer.token_ids == plain.token_ids
    assert 0 < answer.request.stats.num_accepted <= answer.request.stats.num_drafted


def seconds(policy: Policy, right: float, curve: Curve) -> float:
    recordings = [synthetic(seed, {"draft": Skill(right)}, num_tokens=60, depth=16) for seed in range(4)]
    return replay(recordings, policy, curve).decode_s


def test_who_wins_where() -> None:
    """With a good draft long ones win, with a bad one short ones, and those that adapt are near the better of them."""
    curve = smooth(0.05, 0.002, draft_s=0.005)
    for right in (0.95, 0.1):
        long, short = (seconds(FixedPolicy(k), right, curve) for k in (12, 1))
        assert (long < short) == (right > 0.5)
        for name in ("accept-ratio", "heuristic", "profile-ev"):
            assert seconds(build_policy(name, costs=curve), right, curve) < max(long, short)


def test_only_the_one_with_costs_leaves_out_what_never_pays() -> None:
    """On Q8_0 a second row costs as much as a second pass: a bad draft is best not verified at all."""
    curve = table(PASS_MS["Q8_0"])
    plain = seconds(FixedPolicy(0), 0.1, curve)
    assert seconds(build_policy("profile-ev", costs=curve), 0.1, curve) < seconds(AcceptRatioPolicy(), 0.1, curve)
    assert seconds(AcceptRatioPolicy(), 0.1, curve) > 1.5 * plain
