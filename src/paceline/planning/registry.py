"""Policies by name."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from paceline.core.errors import InputError
from paceline.engines.loading import DEFAULT_BRANCHES
from paceline.planning.auto.learned import Learned
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.base import Policy, RoundCosts
from paceline.planning.policies.accept_ratio import AcceptRatioPolicy
from paceline.planning.policies.fixed import FixedPolicy
from paceline.planning.policies.heuristic import HeuristicPolicy
from paceline.planning.policies.profile_ev import ProfileEvPolicy

PolicyName: TypeAlias = Literal["auto", "fixed", "accept-ratio", "profile-ev", "heuristic"]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
ADAPTIVE_POLICIES: tuple[PolicyName, ...] = tuple(name for name in POLICY_NAMES if name != "fixed")
"""Those that find draft lengths by themselves."""
COST_POLICIES: tuple[PolicyName, ...] = ("auto", "profile-ev")
"""Those that plan by what passes cost."""


def check_policy_name(name: str) -> None:
    """Raise unless there is such a policy.

    Raises:
        InputError: with the name and the choices.
    """
    if name not in POLICY_NAMES:
        raise InputError(f"unknown policy {name!r}: choose from {', '.join(POLICY_NAMES)}")


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
        raise InputError(f"policy {name!r} finds draft lengths by itself: leave out --draft-max and the like")
    if name == "accept-ratio":
        return AcceptRatioPolicy()
    if name == "heuristic":
        return HeuristicPolicy()
    if costs is None:
        raise InputError(f"policy {name!r} needs to know what passes cost: measure it with paceline profile")
    return AutoPolicy(costs, branches=branches, learned=learned) if name == "auto" else ProfileEvPolicy(costs)
