"""Builds the rows of one pass: the trees of decoding requests first, then as much of prompts as the budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.engines.base import COMMITTED_END, Step
from paceline.runtime.drafting import Drafts
from paceline.runtime.pass_budget import PassBudget

_MOST_LISTED: Final = 32
"""Rows of prompts that are listed in a pass beside answers: some 20 ms at 152k tokens, during which nobody gets any."""


@dataclass(frozen=True, slots=True)
class BatchPart:
    """One request's part in one pass.

    Attributes:
        tree: what was drafted; of a prompt only its last token.
        num_rows: nodes of the tree that are in the pass.
        decodes: whether the rows are those of a tree; else they are read.
        emits: whether a token follows.
    """

    request: Request
    step: Step
    tree: DraftTree
    num_rows: int
    decodes: bool
    emits: bool

    @property
    def num_listed(self) -> int:
        """Outputs for log-probabilities of the prompt; they come before that of the tree's root."""
        return 0 if self.decodes else len(self.step.outputs) - self.emits


class BatchBuilder:
    """Builds passes within a budget."""

    def __init__(self, budget: PassBudget) -> None:
        self._budget = budget
        # Passes with rows of prompts so far.
        self._turn = 0

    def build(self, drafts: Drafts, prefilling: Sequence[Request], *, sparing: bool = False) -> list[BatchPart]:
        """Return the parts of one pass.

        Args:
            drafts: of the requests that decode; the last nodes of their trees stay out where room is short.
            sparing: take one row for each request that decodes, and nothing is read, unless nothing else is to do.
        """
        rows = self._budget.tree_rows([len(tree) for tree in drafts.trees], reads=bool(prefilling), sparing=sparing)
        # Where there are fewer rows than trees, the last ones are not in the pass.
        parts = [_tree(*each) for each in zip(drafts.requests, drafts.trees, rows, strict=False)]
        if not prefilling or (sparing and parts):
            return parts
        # The oldest and the shortest take turns at being first: a short one need not wait for the whole of a long one,
        # a long one is read however many short ones come, and of several alike the first is soon done.
        if self._turn % 2:
            prefilling = sorted(prefilling, key=_num_unread)
        self._turn += 1
        room, output_room = self._budget.prompt_rows(
            [part.request for part in parts], sum(rows), _num_unread(prefilling[0]), len(prefilling)
        )
        most_listed = _MOST_LISTED if parts else output_room
        for request in prefilling:
            if room == 0:
                break
            part = _chunk(request, room, output_room, most_listed)
            if part is None:
                continue
            room -= len(part.step.token_ids)
            most_listed -= part.num_listed
            output_room -= len(part.step.outputs)
            parts.append(part)
        return parts


def _tree(request: Request, tree: DraftTree, num_rows: int) -> BatchPart:
    """Return the first nodes of a tree, which are a tree of their own: parents come before their children."""
    if num_rows < len(tree) and not request.verifier.judges_every_draw:
        tree.keep(range(num_rows))
    step = Step(request.sequence, tree.token_ids[:num_rows], tree.parents[:num_rows], range(num_rows))
    return BatchPart(request, step, tree, num_rows, True, True)


def _num_unread(request: Request) -> int:
    """Return how many tokens of a request are not in the cache."""
    return len(request.token_ids) - request.cached


def _chunk(request: Request, room: int, output_room: int, most_listed: int) -> BatchPart | None:
    """Return at most ``room`` rows of what a request has to read, but for its last token where no output is left.

    A token follows the last one of a prompt. Of a request that had been preempted the last token stays unread: it is
    the root of its next tree, as between any rounds. Where log-probabilities of the prompt are wanted, at most
    ``most_listed`` rows are read, and all of them are outputs.
    """
    end = len(request.token_ids) - (request.num_output > 0 or output_room == 0)
    if request.lists_prompt:
        room = min(room, output_room, most_listed)
    if request.cached >= end or room == 0:
        return None
    chunk = request.token_ids[request.cached : min(end, request.cached + room)]
    emits = request.num_output == 0 and output_room > 0 and request.cached + len(chunk) == end
    first = len(chunk) - emits
    if request.lists_prompt:
        # A round that was cut short may have listed some already.
        first = max(len(request.prompt_logprobs) - request.cached, 0)
    parents = range(COMMITTED_END, COMMITTED_END + len(chunk))
    step = Step(request.sequence, chunk, parents, range(first, len(chunk)))
    return BatchPart(request, step, DraftTree(chunk[-1]), 1, False, emits)
