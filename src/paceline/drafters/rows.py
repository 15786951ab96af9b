"""From a draft model's row over target ids to its proposals for one position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.errors import ConstraintError, SamplingError
from paceline.core.sampling import largest_probability
from paceline.core.verify import Proposal
from paceline.drafters.base import DraftJob

Choose: TypeAlias = Callable[[FloatArray, int, Sequence[int], int], list[Proposal]]
"""Returns up to so many proposals, best first, given the row, its position and the history before it."""


def read_row(
    job: DraftJob, frontier: int, logits: FloatArray, choose: Choose | None = None
) -> tuple[list[Proposal], float | None]:
    """Return what a row proposes below a node, best first, and its largest probability if the budget asks for it.

    There are no proposals where that probability is below the budget's, or where nothing may be proposed. A token that
    is forced has all of it.

    Args:
        job: whose tree grows.
        frontier: the node.
        logits: ``[vocab]`` of the draft by target id; ``-inf`` for what it cannot propose. It may be shorter than the
            target's rows.
        choose: chooses the proposals; by default the request's verifier.
    """
    request, tree, budget = job.request, job.tree, job.budget
    sampler = request.verifier.sampler
    drafted = tree.path_tokens(frontier) if sampler.reads_history else []
    history = [*request.token_ids, *drafted] if sampler.reads_history else ()
    forced = sampler.forced(history)
    if forced is not None and (forced >= len(logits) or logits[forced] == -np.inf):
        # The draft knows no such token.
        return [], None
    probability: float | None = None
    if budget.probability or budget.min_probability > 0.0:
        probability = 1.0
        if forced is None:
            try:
                allowed, temperature = sampler.mask(logits, history), sampler.temperature(logits, history)
            except (SamplingError, ConstraintError):
                return [], None
            probability = largest_probability(allowed if temperature == 1.0 else allowed / temperature)
        if probability < budget.min_probability:
            return [], probability
    position = len(request.token_ids) + tree.depths[frontier]
    try:
        if choose is not None:
            proposals = choose(logits, position, history, budget.siblings)
        else:
            proposals = request.verifier.propose(logits, position, history, budget.siblings, margins=budget.margin)
    except (SamplingError, ConstraintError):
        # The constraint forbids all that the draft can propose; the target can say more.
        proposals = []
    return proposals, probability
