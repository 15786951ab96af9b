"""Policies set by hand: a fixed draft length, or none."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import SamplingError
from paceline.core.fields import Flag, Option, setting, take_values
from paceline.core.params import check_draft_min
from paceline.core.request import Request
from paceline.core.stats import OffReason
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.planning.base import PolicyBase, RoundRecord

MAX_DRAFT = 128
"""Longest draft that can be asked for."""

MAX_SIBLINGS = 16
"""Most alternatives for one position that can be asked for."""

# A policy is chosen when a model is loaded, by the command line or by code: the environment has no say, and what a
# request may set is in its SpeculationParams.
_SPECULATION = functools.partial(Flag, panel="Speculation")


@dataclass(frozen=True, slots=True)
class FixedPolicy(PolicyBase):
    """Always draft to the same limits.

    Attributes:
        draft_max: most tokens to draft along one path; 0 decodes plainly.
        draft_min: a path shorter than this is not verified at all.
        p_min: see :attr:`~paceline.drafters.base.DraftBudget.min_probability`. It applies to the first token too: a
            draft that starts below it is not verified.
        siblings: alternatives a draft model proposes for each position.
    """

    draft_max: int = setting(
        5,
        Option("whole", called="draft-max", low=0, high=MAX_DRAFT, way_out="0 drafts nothing", variable=None),
        _SPECULATION(
            "--draft-max --draft --spec-draft-n-max",
            "Maximum tokens to draft along one path; 0 turns speculation off. All --draft-* options "
            "belong to policy fixed.",
        ),
    )
    draft_min: int = setting(
        0,
        Option("whole", called="draft-min", variable=None),
        _SPECULATION("--draft-min --spec-draft-n-min", "Discard drafts shorter than this."),
    )
    p_min: float = setting(
        0.0,
        Option("real", called="draft-p-min", low=0.0, high=1.0, way_out="0 keeps all drafts", variable=None),
        _SPECULATION(
            "--draft-p-min --spec-draft-p-min",
            "Stop drafting, at the first token too, where the drafter's most likely token (at the "
            "temperature in use, 1 if greedy) is less likely than this.",
        ),
    )
    siblings: int = setting(
        1,
        Option(
            "whole",
            called="the number of draft siblings",
            counted="{} draft siblings",
            low=1,
            high=MAX_SIBLINGS,
            way_out="1 drafts a chain",
            variable=None,
        ),
        _SPECULATION("--draft-siblings", "Alternatives that the draft model proposes for each position."),
    )

    def __post_init__(self) -> None:
        take_values(self)
        check_draft_min(self.draft_min, self.draft_max)

    def check(self, request: Request) -> None:
        """Refuse to drop short drafts where that would bias the text."""
        check_unbiased(request, self.draft_min)

    def begin(self, request: Request) -> None:
        """All requests are alike."""

    @property
    def speculates(self) -> bool:
        return self.draft_max > 0

    @property
    def weighs_drafters(self) -> bool:
        """All that are asked draft to the same limits, whether or not that pays."""
        return False

    @property
    def draft_length(self) -> str:
        return str(self.draft_max)

    def most_branches(self, num_drafters: int) -> int:
        return self.draft_max * (self.siblings - 1) + max(num_drafters - 1, 0)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        """Return the same budget for every request."""
        if not self.speculates:
            return [None] * len(requests)
        return [DraftBudget(self.draft_max, self.siblings, self.p_min)] * len(requests)

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Take all the budget allows."""
        return list(jobs)

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Drop paths shorter than ``draft_min``."""
        for tree in trees:
            drop_short_paths(tree, self.draft_min)

    def off_reason(self, request: Request) -> OffReason:
        """Drop drafts for one reason alone."""
        return "draft_min"

    def observe(self, record: RoundRecord) -> None:
        """Learn nothing."""

    def end(self, request: Request) -> None:
        """Nothing is kept."""


def check_unbiased(request: Request, draft_min: int) -> None:
    """Refuse to drop short drafts under rejection, where that would bias the text.

    How long a drawn draft gets depends on the tokens drawn, so dropping it for its length would make whether a token is
    verified depend on that token.

    Raises:
        SamplingError: with the length and the way out.
    """
    verifier = request.verifier
    if verifier.name == "rejection" and not verifier.sampler.params.greedy and draft_min > 1:
        raise SamplingError(
            f"draft-min {draft_min} with rejection at temperature {verifier.sampler.params.temperature:g} "
            "would bias the text: use `verify='coupled'`, or a draft-min of 0 or 1",
            field="draft_min",
        )


def drop_short_paths(tree: DraftTree, draft_min: int) -> None:
    """Drop the paths of a tree that are shorter than ``draft_min``."""
    if draft_min <= 1:
        return
    keep: set[int] = set()
    for node in range(len(tree) - 1, ROOT, -1):
        if tree.depths[node] >= draft_min or node in keep:
            keep.update((node, tree.parents[node]))
    if len(keep | {ROOT}) < len(tree):
        tree.keep(keep)


NO_SPECULATION = FixedPolicy(draft_max=0)
"""Plain decoding: the same loop, every tree just its root."""
