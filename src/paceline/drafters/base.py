"""The drafter contract: something that proposes the next tokens of requests, cheaply.

In one round every drafter is asked to ``grow`` the trees, level by level, until it or the policy has had enough; then
the target verifies, and each drafter is told what became of every request with ``observe``. Nothing a drafter does can
change the text; it can only change the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.arrays import FloatArray
from paceline.core.request import Request
from paceline.core.tree import ROOT, DraftTree
from paceline.engines.base import ForwardOutput


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """How far one request's tree may grow this round. A drafter never exceeds it.

    Attributes:
        max_depth: deepest node below the root.
        siblings: most proposals for one position; 1 is a chain.
        min_probability: stop before a position whose most likely token, by the drafter's own distribution at the
            request's temperature (1 if greedy), is less likely than this. Judged before a token is drawn, so it is
            safe under rejection.
        probability: fill :attr:`~paceline.core.tree.Evidence.probability`. It costs a pass over the row, so a drafter
            that knows it otherwise only fills it where this or ``min_probability`` asks for it.
        margin: fill :attr:`~paceline.core.tree.Evidence.margin`, which costs another such pass.
    """

    max_depth: int
    siblings: int = 1
    min_probability: float = 0.0
    probability: bool = False
    margin: bool = False


@dataclass(frozen=True, slots=True)
class DraftJob:
    """One request's tree and how far it may grow. Drafters read the request and write the tree."""

    request: Request
    tree: DraftTree
    budget: DraftBudget


class TargetRows:
    """The target's rows of one request's tree in one pass.

    The first output of the request's step is the root's row, unless ``first`` others come before; drafted node ``n`` is
    ``n`` outputs further.
    """

    __slots__ = ("_first", "_output", "_step")

    def __init__(self, output: ForwardOutput, step: int, first: int = 0) -> None:
        self._output = output
        self._step = step
        self._first = first

    def logits(self, node: int) -> FloatArray:
        """Return the logits ``[vocab]`` that follow tree node ``node``: borrowed and read-only."""
        return self._output.logits(self._step, self._first + node - ROOT)


@dataclass(frozen=True, slots=True)
class Commit:
    """What became of one request's tree.

    Attributes:
        tree: the tree as it was verified: nodes the policy dropped are gone. Where a pass had too little room for it,
            a verifier that judges every draw keeps the rest for the next round, and the tree still holds them.
        path: accepted nodes, from below the root downwards.
        token_ids: ``[len(path) + 1]`` tokens emitted; they are at the end of ``request.token_ids`` by now.
        rows: the target's rows for the root and the accepted nodes, valid until ``observe`` returns.
    """

    tree: DraftTree
    path: Sequence[int]
    token_ids: Sequence[int]
    rows: TargetRows


class Drafter(Protocol):
    """A source of draft tokens for any number of requests."""

    @property
    def name(self) -> str:
        """Name under which its tokens are counted."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens below which it never proposes anything, as they end an answer; empty if it knows of none."""
        ...

    def begin(self, request: Request) -> None:
        """Take note of a new request; its prompt is in ``request.token_ids``.

        A request whose round was cut short is begun anew after :meth:`end`, with as much of the answer as stands.
        """
        ...

    def unread(self, request: Request) -> int | None:
        """Return how many tokens its model must read before it can draft; ``None`` if it drafts without a model."""
        ...

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Add proposals to the trees: one more level, or everything at once if drafting costs nothing.

        Returns:
            For each job whether calling again in this round may add more.
        """
        ...

    def observe(self, request: Request, commit: Commit) -> None:
        """Take note of what a round decided for ``request``."""
        ...

    def end(self, request: Request) -> None:
        """Forget a request that is over."""
        ...

    def close(self) -> None:
        """Free what the drafter holds. Idempotent."""
        ...
