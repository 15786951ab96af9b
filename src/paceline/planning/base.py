"""The policy contract: decides what is drafted and what is verified, including nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from paceline.core.request import Request
from paceline.core.stats import OffReason, PlainTimes
from paceline.core.tree import DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.planning.report import PlannerReport


class Prior(Protocol):
    """What a policy has learned, for another one to start with, in a later process too."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for :func:`json.dumps`."""
        ...


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What one round cost and gave.

    Attributes:
        requests: the decoding requests of the round.
        trees: ``[requests]`` trees as verified.
        paths: ``[requests]`` accepted nodes of each.
        emitted: ``[requests]`` tokens each of them emitted: its accepted ones and one more, unless it ended before.
        prefill_rows: rows that were read in the pass, of prompts or again after a request had lost its place.
        prefill_context: tokens that the requests of these rows had in the cache before.
        draft_s: seconds spent growing the trees, the policy's own included.
        learning_s: part of ``draft_s`` that the policy took to learn from the round before.
        draft_seconds: seconds in each drafter that was asked, for all requests of the round together.
        verify_s: seconds of the target's pass.
        waited_s: part of ``verify_s`` in which the pass waited for something else than its rows, such as weights that
            come from a disk.
        round_s: seconds of the whole round, what its policy took to learn from the one before included.
    """

    requests: Sequence[Request]
    trees: Sequence[DraftTree]
    paths: Sequence[Sequence[int]]
    emitted: Sequence[int]
    prefill_rows: int
    prefill_context: int
    draft_s: float
    learning_s: float
    draft_seconds: Mapping[str, float]
    verify_s: float
    round_s: float
    waited_s: float = 0.0


class Observer(Protocol):
    """Hears of every round: policies that learn, meters, recorders."""

    def observe(self, record: RoundRecord) -> None:
        """Take note of a round that is over."""
        ...


class RoundCosts(Protocol):
    """Seconds of passes; a :class:`~paceline.planning.costs.profile.CostProfile` is one."""

    @property
    def change_s(self) -> float:
        """Seconds that a round takes longer where the one before had another width."""
        ...

    def round_s(self, rows: int, context: int = 0, requests: int = 1) -> float:
        """Return the seconds of a whole round of the target: ``rows`` of all trees, ``context`` cached tokens.

        It is one that follows another of its width, as plain rounds do.
        """
        ...

    def is_measured(self, rows: int) -> bool:
        """Return whether rounds of this width were measured, rather than read from those around them."""
        ...

    def draft_s(self, rows: int = 1, context: int = 0) -> float:
        """Return the seconds of feeding ``rows`` tokens to the draft model."""
        ...


@runtime_checkable
class FlooredRoundCosts(RoundCosts, Protocol):
    """Seconds of passes that wait for something else than their rows, such as weights that come from a disk."""

    @property
    def floor_s(self) -> float:
        """Seconds that a pass of the target takes however little its rows do; 0 where these say all."""
        ...

    def without_floor(self) -> RoundCosts:
        """Return what passes would take if they waited for nothing."""
        ...


def with_floor(costs: RoundCosts) -> FlooredRoundCosts | None:
    """Return costs as those of passes that wait; ``None`` if they do not."""
    return costs if isinstance(costs, FlooredRoundCosts) and costs.floor_s > 0 else None


class Policy(Observer, Protocol):
    """Decides round by round.

    Under ``coupled`` the text stays the same whatever it decides. Under ``rejection`` its decisions must not depend on
    tokens that were drawn (:attr:`~paceline.core.verify.Verifier.judges_every_draw`); :meth:`check` refuses requests
    for which they would.

    The first half says what a policy is, to whoever loads models for it and reports on it; :class:`PolicyBase` answers
    that for policies to which nothing of it applies. The other half is what the loop asks, round by round.
    """

    @property
    def speculates(self) -> bool:
        """Whether anything is ever drafted; if not, nothing is loaded for it."""
        ...

    @property
    def weighs_drafters(self) -> bool:
        """Whether it can tell which of several drafters pays; if not, only one is loaded unless more are named."""
        ...

    @property
    def draft_length(self) -> str:
        """How long drafts are, as a report says it."""
        ...

    def most_branches(self, num_drafters: int) -> int | None:
        """Return how many branches one request's tree can have beside its first path.

        Args:
            num_drafters: drafters that may propose.

        Returns:
            The number, or ``None`` where the policy keeps to what the engine holds.
        """
        ...

    def report(self) -> PlannerReport | None:
        """Return what was predicted, and what came of it; ``None`` of a policy that predicts nothing."""
        ...

    def learned(self) -> Prior | None:
        """Return what to keep for the next process with these models; ``None`` where nothing was learned."""
        ...

    def check(self, request: Request) -> None:
        """Raise if this policy would make ``request`` other than lossless.

        Raises:
            SamplingError: with the combination and the way out.
        """
        ...

    def begin(self, request: Request) -> None:
        """Take note of a new request; its prompt is in ``request.token_ids`` and not read yet.

        A request that loses its place in a full cache, and goes on later, is neither ended nor begun anew.
        """
        ...

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        """Return for each request how far its tree may grow this round; ``None`` decodes plainly.

        What a request asks for itself (:attr:`~paceline.core.request.Request.speculation`) limits what is returned: no
        drafts, some drafters, short ones.
        """
        ...

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Return those of the trees to which ``drafter`` should add a level, in their order.

        Asked before every level, the first included, with the trees that can grow: all that are chosen share a pass.
        """
        ...

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Drop from the grown trees what is not worth verifying."""
        ...

    def plain_round(self, record: RoundRecord) -> PlainTimes | None:
        """Return what a plain round of the requests of ``record`` takes; ``None`` if the policy cannot say.

        Asked once after :meth:`observe`, with the record of the same round. Prompts that were read in the pass are left
        out.
        """
        ...

    def off_reason(self, request: Request) -> OffReason:
        """Return why the policy has nothing drafted, or nothing verified, for a request in this round.

        Asked after the other questions of the round, where the reason lies with the policy.
        """
        ...

    def end(self, request: Request) -> None:
        """Forget a request that is over; its last round has been observed."""
        ...


class PolicyBase:
    """What a policy says of itself where it says nothing else: it drafts, learns for its own use, and reports nothing.

    A policy need not inherit from it; one that does has only the loop's questions about drafts left to answer.
    """

    __slots__ = ()

    @property
    def speculates(self) -> bool:
        """It drafts."""
        return True

    @property
    def weighs_drafters(self) -> bool:
        """All drafters that there are may be asked."""
        return True

    @property
    def draft_length(self) -> str:
        """Nothing can be said beforehand."""
        return "as the policy says"

    def most_branches(self, num_drafters: int) -> int | None:
        """Keep to what the engine holds."""
        return None

    def report(self) -> PlannerReport | None:
        """Report nothing."""
        return None

    def learned(self) -> Prior | None:
        """Keep nothing."""
        return None

    def plain_round(self, record: RoundRecord) -> PlainTimes | None:
        """Know no costs."""
        return None

    def off_reason(self, request: Request) -> OffReason:
        """Have drafted what is worth it."""
        return "no_gain"
