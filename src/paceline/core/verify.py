"""The two rules that judge a draft tree. Both leave the target's distribution exactly as it was.

Terms, used everywhere: *accepted* tokens were drafted and kept; the *recovered* token is the target's own choice where
a drafted one was not; the *bonus* token is the target's choice after a path accepted down to a leaf. A round emits its
accepted tokens and then one recovered or bonus token.

A verifier belongs to one request: it holds that request's randomness. It also draws the proposals of a draft model,
because how a proposal is drawn and how it is judged only make sense together: shared noise must never meet a ratio
test, and a ratio test needs the distribution that was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from paceline.core.arrays import Float64Array, FloatArray
from paceline.core.errors import PacelineError
from paceline.core.params import VerifierName
from paceline.core.sampling import RowSampler, probabilities
from paceline.core.tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class Proposal:
    """A token a draft model proposes.

    Attributes:
        token_id: the token.
        draft_probs: ``[vocab]`` the distribution it was drawn from, given the proposals before it were not taken;
            ``None`` if the verifier does not need it.
        margin: see :attr:`~paceline.core.tree.Evidence.margin`; ``None`` where proposals are drawn independently of
            what the target will choose.
    """

    token_id: int
    draft_probs: Float64Array | None
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Walk:
    """What a verifier decided about a tree.

    Attributes:
        path: accepted nodes, from below the root downwards.
        token_ids: ``[len(path) + 1]`` emitted tokens: those of the path, then the recovered or bonus token. In two rare
            cases the last one is a drafted token that was accepted instead: it is ``unread_node``, or nothing can be
            drawn from its row.
        reached_leaf: whether no draft was turned down where the walk ended: the last token is a bonus token, or
            ``unread_node``.
        unread_node: drafted node that is the last token: it was accepted, but its row was left out of the pass. What is
            drafted below it is still to be judged. ``None`` almost always.
    """

    path: list[int]
    token_ids: list[int]
    reached_leaf: bool
    unread_node: int | None = None


RowLogits: TypeAlias = Callable[[int], FloatArray]
"""Returns the target's logits ``[vocab]`` at a tree node: what follows that node."""


class Verifier(Protocol):
    """Judges the trees of one request and draws its draft model's proposals.

    Attributes:
        name: under which it is chosen.
        sampler: turns rows into distributions.
        judges_every_draw: whether every drawn proposal that the walk comes to must be judged, sooner or later. Where
            a pass has no room for a whole tree, what is left out depends on what was drawn; dropping it would bias
            the text unless the verdicts do not depend on the draws.
    """

    name: VerifierName
    sampler: RowSampler
    judges_every_draw: bool

    def propose(
        self, logits: FloatArray, position: int, history: Sequence[int], count: int, *, margins: bool = False
    ) -> list[Proposal]:
        """Draw up to ``count`` different proposals for one position from a draft model's row.

        Args:
            logits: ``[vocab]`` of the draft, cut to the target's vocabulary.
            position: absolute position of the proposed token.
            history: all tokens before it, drafted ancestors included (may be empty if ``sampler.reads_history`` is
                false).
            count: most proposals wanted, best first.
            margins: fill :attr:`Proposal.margin`, where there is such a thing.
        """
        ...

    def walk(self, tree: DraftTree, num_rows: int, row_logits: RowLogits, history: Sequence[int]) -> Walk:
        """Walk down ``tree`` by the target's rows and return what was accepted and emitted.

        Args:
            tree: the drafts; its root is the last token of ``history``.
            num_rows: how many of its first nodes were in the pass; fewer than all only under a verifier that judges
                every draw.
            row_logits: the target's rows; asked only where the walk goes.
            history: all tokens up to and including the root.
        """
        ...


Choose: TypeAlias = Callable[[FloatArray, int, Sequence[int]], int]
"""Returns the token that follows, given the row, its position and, for those who read it, the history.

The history grows with the walk: whoever keeps it copies it.
"""


def follow(
    tree: DraftTree, row_logits: RowLogits, history: Sequence[int], choose: Choose, *, reads_history: bool
) -> Walk:
    """Follow choices that do not depend on what was drafted through a tree, until one leaves it."""
    path: list[int] = []
    token_ids: list[int] = []
    position = len(history)
    # One copy a walk: a long text has many tokens, and a pass many rows.
    before = list(history) if reads_history else []
    node = ROOT
    while True:
        try:
            token_id = choose(row_logits(node), position, before)
        except PacelineError:
            if path:
                return _before(path, token_ids)
            raise
        token_ids.append(token_id)
        child = tree.child(node, token_id)
        if child is None:
            return Walk(path, token_ids, reached_leaf=not tree.candidates(node))
        path.append(child)
        node = child
        position += 1
        if reads_history:
            before.append(token_id)


def _before(path: Sequence[int], token_ids: Sequence[int]) -> Walk:
    """Return a walk that came to a row from which nothing can be drawn: what was accepted stands.

    The last accepted token is the root of the next pass, where the same row comes up again, as in plain decoding.
    """
    return Walk([*path[:-1]], [*token_ids], reached_leaf=False)


class CoupledVerifier:
    """Accepts a drafted token when it is the one the target emits with the same keyed noise (arXiv 2408.07978).

    The emitted tokens are those of plain decoding, whatever was drafted. The first token of a draft model with
    distribution ``q`` is accepted with probability ``sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)``.
    """

    name: VerifierName = "coupled"
    judges_every_draw = False

    def __init__(self, sampler: RowSampler) -> None:
        self.sampler = sampler

    def propose(
        self, logits: FloatArray, position: int, history: Sequence[int], count: int, *, margins: bool = False
    ) -> list[Proposal]:
        """Rank the draft's tokens under the noise the target will use."""
        if count == 1:
            token_id, margin = self.sampler.best(logits, position, history, margin=margins)
            return [Proposal(token_id, None, margin if margins else None)]
        candidates = self.sampler.candidates(logits, history)
        if not margins:
            return [Proposal(token_id, None) for token_id in self.sampler.rank(candidates, position, count)]
        ranked = self.sampler.ranked_with_margins(candidates, position, count)
        return [Proposal(token_id, None, margin) for token_id, margin in ranked]

    def walk(self, tree: DraftTree, num_rows: int, row_logits: RowLogits, history: Sequence[int]) -> Walk:
        """Follow the target's own choices through the tree until one leaves it."""
        return follow(tree, row_logits, history, self.sampler.emit, reads_history=self.sampler.reads_history)


class RejectionVerifier:
    """Accepts ``x`` drawn from ``q`` with probability ``min(1, p(x) / q(x))``, else draws from ``norm(max(p - q, 0))``.

    The rule is that of arXiv 2211.17192 and 2302.01318, applied to candidate after candidate where a node has siblings
    (arXiv 2305.09781). A deterministic proposal is the case of a one-hot ``q``. The distribution of the text is the
    target's; the text of a seed depends on what was drafted, unlike under :class:`CoupledVerifier`.
    """

    name: VerifierName = "rejection"
    judges_every_draw = True

    def __init__(self, sampler: RowSampler) -> None:
        self.sampler = sampler
        # Every draw is fresh, so proposals and verdicts of different rounds are independent of each other.
        self._rng = np.random.Generator(np.random.PCG64((sampler.params.seed, sampler.params.choice)))

    def propose(
        self, logits: FloatArray, position: int, history: Sequence[int], count: int, *, margins: bool = False
    ) -> list[Proposal]:
        """Draw without replacement from the draft's distribution."""
        draft_probs = self._distribution(logits, history)
        proposals: list[Proposal] = []
        for _ in range(count):
            token_id = self._draw(draft_probs)
            proposals.append(Proposal(token_id, draft_probs))
            rest = draft_probs.copy()
            rest[token_id] = 0.0
            mass = rest.sum()
            if mass <= 0.0:
                break
            draft_probs = rest / mass
        return proposals

    def walk(self, tree: DraftTree, num_rows: int, row_logits: RowLogits, history: Sequence[int]) -> Walk:
        """Judge the candidates of each node in turn until none is accepted."""
        path: list[int] = []
        token_ids: list[int] = []
        before = list(history) if self.sampler.reads_history else []
        node = ROOT
        while True:
            try:
                target_probs = self._distribution(row_logits(node), before)
            except PacelineError:
                if path:
                    return _before(path, token_ids)
                raise
            accepted: int | None = None
            for candidate in tree.candidates(node):
                token_id, draft_probs = candidate.token_id, candidate.draft_probs
                own_prob = 1.0 if draft_probs is None else draft_probs[token_id]
                if self._rng.random() * own_prob < target_probs[token_id]:
                    accepted = candidate.node
                    break
                target_probs = _residual(target_probs, draft_probs, token_id)
            if accepted is None:
                token_ids.append(self._draw(target_probs))
                return Walk(path, token_ids, reached_leaf=not tree.candidates(node))
            token_id = tree.token_ids[accepted]
            token_ids.append(token_id)
            if accepted >= num_rows:
                return Walk(path, token_ids, reached_leaf=True, unread_node=accepted)
            path.append(accepted)
            node = accepted
            if self.sampler.reads_history:
                before.append(token_id)

    def _distribution(self, logits: FloatArray, history: Sequence[int]) -> Float64Array:
        candidates = self.sampler.candidates(logits, history)
        return probabilities(candidates, len(logits), greedy=self.sampler.params.greedy)

    def _draw(self, probs: Float64Array) -> int:
        mass = np.cumsum(probs)
        # side="right" never lands on an entry without mass, as uniforms are below 1 and may be 0.
        return int(np.searchsorted(mass, self._rng.random() * mass[-1], side="right"))


def _residual(target_probs: Float64Array, draft_probs: Float64Array | None, token_id: int) -> Float64Array:
    """Return ``norm(max(target - draft, 0))``, the distribution left after ``token_id`` was turned down."""
    if draft_probs is None:
        rest = target_probs.copy()
        rest[token_id] = 0.0
    else:
        rest = np.maximum(target_probs[: len(draft_probs)] - draft_probs[: len(target_probs)], 0.0)
        if len(target_probs) > len(rest):
            rest = np.concatenate((rest, target_probs[len(rest) :]))
    mass = rest.sum()
    if mass <= 0.0:
        # The distributions agree but for rounding: a rejection had probability about 1e-16. Any answer is exact to
        # that; without the rejected token it cannot be emitted and rejected at once.
        rest = target_probs.copy()
        rest[token_id] = 0.0
        mass = rest.sum()
        if mass <= 0.0:
            return target_probs
    normalised: Float64Array = rest / mass
    return normalised


def make_verifier(name: VerifierName, sampler: RowSampler) -> Verifier:
    """Return a new verifier for the request of a sampler."""
    return CoupledVerifier(sampler) if name == "coupled" else RejectionVerifier(sampler)
