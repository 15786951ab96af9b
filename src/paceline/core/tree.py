"""The draft tree of one request in one round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from paceline.core.arrays import Float64Array

ROOT: Final = 0
"""The request's last token: the node every draft hangs below. It is fed with the drafts and is never judged."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a drafter knew when it proposed a token; each field may be unknown.

    Attributes:
        probability: largest probability of the distribution the token was proposed from (not the token's own: under
            rejection, whether a token is verified must not depend on which one was drawn). A draft model fills it
            only where the budget needs it.
        match_length: tokens of context that matched, for drafters that look text up.
        count: how often that continuation was seen.
        margin: under coupled, how far the token's score in the draft's row, ``log q + g`` (greedy: the logit), is
            above the best of the others: the winning margin of the first proposal, at most 0 for its siblings,
            ``inf`` without any other candidate. Unlike ``q`` it says how sure the choice is, not the distribution.
        resumed: whether the match is near where a longer copy broke off.
    """

    probability: float | None = None
    match_length: int | None = None
    count: int | None = None
    margin: float | None = None
    resumed: bool = False


NO_EVIDENCE: Final = Evidence()
"""What a drafter knew that says nothing about its proposals."""


class Candidate(NamedTuple):
    """One proposal for the token after a node, in the order proposals are judged.

    Attributes:
        token_id: the proposed token.
        node: the tree node that holds it; several candidates may share one.
        draft_probs: ``[vocab]`` distribution it was drawn from given that the earlier candidates of this node were
            not taken, or ``None`` for a deterministic proposal (all mass on ``token_id``).
        source: name of the drafter that made it.
        evidence: what that drafter knew.
    """

    token_id: int
    node: int
    draft_probs: Float64Array | None
    source: str = ""
    evidence: Evidence = NO_EVIDENCE


class DraftTree:
    """Drafted tokens below a request's last token, written by any number of drafters.

    Node :data:`ROOT` is the last token itself. The others are numbered as they are added, so parents come first, and
    a token stands at most once below a parent: a second proposal of it is recorded with the same node.

    Attributes:
        token_ids: ``[nodes]`` token of each node.
        parents: ``[nodes]`` parent of each node; -1 for the root.
        depths: ``[nodes]`` 0 for the root.
        sources: ``[nodes]`` name of the drafter that added the node first; empty for the root.
        evidence: ``[nodes]`` what that drafter knew.
        num_proposals: proposals made; several may be of one node.
        num_prunings: times that nodes were dropped and the others renumbered.
    """

    __slots__ = (
        "_candidates",
        "_children",
        "depths",
        "evidence",
        "num_proposals",
        "num_prunings",
        "parents",
        "sources",
        "token_ids",
    )

    def __init__(self, last_token: int) -> None:
        self.token_ids = [last_token]
        self.parents = [-1]
        self.depths = [0]
        self.sources = [""]
        self.evidence = [NO_EVIDENCE]
        self.num_proposals = 0
        self.num_prunings = 0
        self._children: dict[tuple[int, int], int] = {}
        self._candidates: dict[int, list[Candidate]] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_drafted(self) -> int:
        """Number of drafted tokens."""
        return len(self.token_ids) - 1

    def add(
        self,
        parent: int,
        token_id: int,
        source: str,
        evidence: Evidence = NO_EVIDENCE,
        draft_probs: Float64Array | None = None,
    ) -> int:
        """Propose ``token_id`` after ``parent`` and return its node, which may exist already."""
        node = self._children.get((parent, token_id))
        if node is None:
            node = len(self.token_ids)
            self._children[parent, token_id] = node
            self.token_ids.append(token_id)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.sources.append(source)
            self.evidence.append(evidence)
        self.num_proposals += 1
        self._candidates.setdefault(parent, []).append(Candidate(token_id, node, draft_probs, source, evidence))
        return node

    def child(self, parent: int, token_id: int) -> int | None:
        """Return the node of ``token_id`` below ``parent``, if it was drafted."""
        return self._children.get((parent, token_id))

    def candidates(self, node: int) -> Sequence[Candidate]:
        """Return the proposals for the token after ``node``, in the order they were made."""
        return self._candidates.get(node, ())

    def path_tokens(self, node: int) -> list[int]:
        """Return the drafted tokens from below the root down to ``node``; empty for the root."""
        tokens = []
        while node != ROOT:
            tokens.append(self.token_ids[node])
            node = self.parents[node]
        tokens.reverse()
        return tokens

    def below(self, node: int) -> DraftTree:
        """Return what was drafted below ``node`` as a tree of its own, with ``node`` as the root."""
        tree = DraftTree(self.token_ids[node])
        copies = {node: ROOT}
        # The list grows while it is walked, so parents are copied before their children.
        waiting = [node]
        for parent in waiting:
            for candidate in self.candidates(parent):
                old = candidate.node
                if old not in copies:
                    waiting.append(old)
                copies[old] = tree.add(
                    copies[parent], candidate.token_id, candidate.source, candidate.evidence, candidate.draft_probs
                )
        return tree

    def withdraw(self, parent: int, source: str) -> None:
        """Take back what a drafter proposed below a node, and renumber what is left.

        A node stays that another drafter proposed too. What others proposed below a node that goes, goes with it.
        """
        kept = set(range(len(self)))
        below = {parent}
        for node in range(parent + 1, len(self)):
            if self.parents[node] not in below:
                continue
            below.add(node)
            kept.discard(node)
        for node in sorted(below):
            if node not in kept:
                continue
            left: list[Candidate] = [one for one in self.candidates(node) if one.source != source]
            self._candidates[node] = left
            for candidate in left[::-1]:
                child = candidate.node
                kept.add(child)
                if self.sources[child] == source:
                    self.sources[child], self.evidence[child] = candidate.source, candidate.evidence
        self.keep(kept)

    def keep(self, nodes: Iterable[int]) -> None:
        """Drop every node that is not in ``nodes`` (with the root implied) and renumber the rest.

        Raises:
            ValueError: a kept node's parent is not kept.
        """
        self.num_prunings += 1
        kept = sorted({ROOT, *nodes})
        renumbered = {old: new for new, old in enumerate(kept)}
        for node in kept[1:]:
            if self.parents[node] not in renumbered:
                raise ValueError(f"node {node} is kept without its parent {self.parents[node]}")
        self._candidates = {
            renumbered[parent]: [c._replace(node=renumbered[c.node]) for c in candidates if c.node in renumbered]
            for parent, candidates in self._candidates.items()
            if parent in renumbered
        }
        self.num_proposals = sum(map(len, self._candidates.values()))
        self._children = {
            (renumbered[parent], token): renumbered[node]
            for (parent, token), node in self._children.items()
            if node in renumbered
        }
        self.parents = [-1, *(renumbered[self.parents[node]] for node in kept[1:])]
        self.token_ids = [self.token_ids[node] for node in kept]
        self.depths = [self.depths[node] for node in kept]
        self.sources = [self.sources[node] for node in kept]
        self.evidence = [self.evidence[node] for node in kept]
