"""Policies by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, get_args

from paceline.core.errors import InputError
from paceline.core.params import PolicyName, SpeculationParams
from paceline.engines.options import DEFAULT_BRANCHES
from paceline.planning.auto.learned import Learned
from paceline.planning.auto.policy import DEEPEST, AutoPolicy
from paceline.planning.base import Policy, RoundCosts, with_floor
from paceline.planning.policies.accept_ratio import AcceptRatioPolicy
from paceline.planning.policies.by_request import make_fixed
from paceline.planning.policies.fixed import MAX_DRAFT, FixedPolicy
from paceline.planning.policies.heuristic import HeuristicPolicy
from paceline.planning.policies.profile_ev import ProfileEvPolicy

POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
"""Every policy's name."""

ADAPTIVE_POLICIES: tuple[PolicyName, ...] = tuple(name for name in POLICY_NAMES if name != "fixed")
"""Those that find draft lengths by themselves."""
COST_POLICIES: tuple[PolicyName, ...] = ("auto", "profile-ev")
"""Those that plan by what passes cost."""

LONGEST_COPY: Final = 63
"""Deepest draft of a copy: the widest pass that profiles measure has room for no more."""

_COPIED: Final = 0.98
"""Share of a copy's tokens that are right, given those before."""

_LONG_CONTEXT: Final = 1024
"""Tokens in the cache: what a row costs beside them may hang on how wide the pass is."""

_CLASSES: Final[Mapping[PolicyName, type]] = {
    "auto": AutoPolicy,
    "fixed": FixedPolicy,
    "accept-ratio": AcceptRatioPolicy,
    "profile-ev": ProfileEvPolicy,
    "heuristic": HeuristicPolicy,
}


def check_policy_name(name: str) -> None:
    """Raise unless there is such a policy."""
    if name not in POLICY_NAMES:
        raise InputError(f"unknown policy {name!r}: choose from {', '.join(POLICY_NAMES)}", field="policy")


def build_policy(
    name: str,
    *,
    fixed: FixedPolicy | None = None,
    costs: RoundCosts | None = None,
    branches: int = DEFAULT_BRANCHES,
    learned: Learned | None = None,
) -> Policy:
    """Return a new policy.

    Args:
        name: among :data:`POLICY_NAMES`.
        fixed: the settings of ``fixed``; its own defaults if left out.
        costs: what passes take, for policies that plan by it.
        branches: that the target holds at once, over all requests.
        learned: what ``auto`` starts with; others start with nothing.

    Raises:
        InputError: an unknown name, settings that the policy does not have, or no costs where they are needed.
    """
    check_policy_name(name)
    if name == "fixed":
        return fixed or FixedPolicy()
    if fixed is not None:
        raise InputError(f"policy {name!r} chooses draft lengths itself: leave out `draft_max` and the like")
    if name == "accept-ratio":
        return AcceptRatioPolicy()
    if name == "heuristic":
        return HeuristicPolicy()
    if costs is None:
        raise InputError(f"policy {name!r} needs measured costs of passes: measure them with paceline profile")
    if name == "profile-ev":
        return ProfileEvPolicy(costs)
    draft_max = _deepest(costs)
    return AutoPolicy(
        costs, draft_max=draft_max, copy_max=_deepest_copy(costs, draft_max), branches=branches, learned=learned
    )


def _deepest(costs: RoundCosts) -> int:
    """Return how deep drafts of ``auto`` may be: where passes have a floor, as many rows as cost nothing beside it."""
    floored = with_floor(costs)
    if floored is None:
        return DEEPEST
    rows_s = floored.without_floor()
    free = (rows for rows in range(MAX_DRAFT, DEEPEST, -1) if rows_s.round_s(rows + 1) <= floored.floor_s)
    return next(free, DEEPEST)


def _deepest_copy(costs: RoundCosts, draft_max: int) -> int:
    """Return how deep drafts of a copy may be: as is fastest where hardly any of their tokens are wrong.

    Where every row costs, as on a CPU, that is no deeper than other drafts, even of a copy that has lasted long. Where
    it is not twice as deep, it is not worth planning for.
    """
    found = max(_fastest_copy(costs, context) for context in (0, _LONG_CONTEXT))
    return found if found >= 2 * draft_max else draft_max


def _fastest_copy(costs: RoundCosts, context: int) -> int:
    """Return the length of drafts at which most tokens a second are expected of a copy."""
    tokens, kept, best, length = 1.0, 1.0, 0.0, 0
    for drafted in range(LONGEST_COPY + 1):
        speed = tokens / costs.round_s(drafted + 1, context)
        if speed > best:
            best, length = speed, drafted
        kept *= _COPIED
        tokens += kept
    return length


def check_asked(speculation: SpeculationParams, loaded: Policy, drafters: Sequence[str]) -> None:
    """Raise unless a model offers the policy that a request asks for.

    Raises:
        InputError: with the policy, the model's own and the way out, or with a length that ``fixed`` does not take.
    """
    asked = speculation.policy
    if asked is None:
        return
    if asked == "fixed":
        if not drafters:
            raise InputError(
                "policy 'fixed' has nothing to draft with, as the model was loaded without drafters: leave policy out, "
                "or load the model with speculation",
                field="policy",
            )
        make_fixed(speculation)
        return
    name = next((name for name, kind in _CLASSES.items() if isinstance(loaded, kind)), None)
    if asked != name:
        is_costless = asked in COST_POLICIES and name not in COST_POLICIES
        raise InputError(
            f"policy {asked!r} is not available on a model loaded with policy {name or type(loaded).__name__!r}"
            f"{', without costs to plan by' if is_costless else ''}: leave policy out, give 'fixed', or load the model "
            f"with policy {asked!r} (--policy {asked})",
            field="policy",
        )
