"""Rounds without a target: the test decides what is accepted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

from paceline.core.request import Request
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import Commit, DraftBudget, Drafter, DraftJob
from tests.helpers import say


def grow(drafter: Drafter, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
    """Let ``drafter`` grow one tree for each request until it has had enough, as the loop does."""
    jobs = [DraftJob(request, DraftTree(request.token_ids[-1]), budget) for request in requests]
    growing = jobs
    while growing:
        more = drafter.grow(growing)
        assert len(more) == len(growing)
        growing = [job for job, wants_more in zip(growing, more, strict=True) if wants_more]
    return [job.tree for job in jobs]


def settle(drafter: Drafter, request: Request, tree: DraftTree, path: Sequence[int], last_token: int) -> None:
    """Accept ``path``, emit ``last_token`` after it, and tell the drafter."""
    token_ids = [*(tree.token_ids[node] for node in path), last_token]
    say(request, *token_ids)
    drafter.observe(request, Commit(tree, path, token_ids, rows=cast(Any, None)))


def random_path(rng: random.Random, tree: DraftTree) -> list[int]:
    """Return a path from below the root to some node, or nothing."""
    node, path = rng.randrange(len(tree)), []
    while node != ROOT:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


def proposals(tree: DraftTree) -> list[tuple[list[int], str]]:
    """Return a tree's paths and sources in the order they were added."""
    return [(tree.path_tokens(node), tree.sources[node]) for node in range(len(tree))]
