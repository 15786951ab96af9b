"""How far a drafted tree is expected to be accepted: calibrated chances of every proposal, multiplied down the tree.

A tree holds proposals of several drafters; each drafter has its own calibration, and another for its runners-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from paceline.core.tree import ROOT, Candidate, DraftTree
from paceline.drafters.grammar import NAME as GRAMMAR
from paceline.planning.auto.calibration import (
    SOLO,
    Calibration,
    CoProposals,
    GrammarFeatures,
    MarginFeatures,
    MatchFeatures,
    SiblingFeatures,
)

NEGLIGIBLE: Final = 0.01
"""Chance of a token below which nothing behind it is asked for, counts if it was drafted, or teaches anything."""


@dataclass(slots=True)
class Verdict:
    """What became of a drafter's first choice.

    Attributes:
        source: the drafter.
        depth: 1 for the first token.
        before: chance of the token before it, in the tree; ``None`` at depth 1.
        chance: that was predicted.
        right: whether the target said it.
    """

    source: str
    depth: int
    before: float | None
    chance: float
    right: bool


@dataclass(slots=True)
class _Proposal:
    """One drafter's proposal, kept for when it is known what the target said.

    Attributes:
        candidate: what was proposed.
        first: whether it is that drafter's first choice there.
        co_proposals: what the others' first choices are there.
    """

    candidate: Candidate
    first: bool
    co_proposals: CoProposals


@dataclass(slots=True)
class _Fork:
    """What was proposed after one node.

    Attributes:
        parent: the node.
        proposals: of all drafters.
        chances: (node, chance given that the parent is right) of every token proposed.
    """

    parent: int
    proposals: Sequence[_Proposal]
    chances: Sequence[tuple[int, float]]


@dataclass(slots=True)
class GrownTree:
    """A tree as the drafters left it, before anything was dropped.

    Attributes:
        parents: ``[nodes]``.
        token_ids: ``[nodes]``.
        depths: ``[nodes]``.
        forks: nodes that something was proposed after; those below a node come after it.
        survivals: ``[nodes]`` chance that the node is accepted; 1 for the root.
    """

    parents: Sequence[int]
    token_ids: Sequence[int]
    depths: Sequence[int]
    forks: Sequence[_Fork]
    survivals: Sequence[float]

    def chance(self, node: int) -> float | None:
        """Return the chance of a node given that its parent is right; ``None`` for the root."""
        if node == ROOT:
            return None
        above = self.survivals[self.parents[node]]
        return self.survivals[node] / above if above > 0 else 0.0


@dataclass(slots=True)
class AcceptanceRate:
    """A decayed mean of verdicts, whatever the evidence was: the chance of tokens that were not drafted yet.

    Attributes:
        memory: verdicts until one counts ``1/e`` of a new one.
        prior_weight: verdicts that the prior counts for.
        prior: share accepted before anything was seen.
    """

    memory: float
    prior_weight: float
    prior: float
    accepted: float = 0.0
    seen: float = 0.0

    def add(self, accepted: bool) -> None:
        keep = 1.0 - 1.0 / self.memory
        self.accepted = self.accepted * keep + accepted
        self.seen = self.seen * keep + 1.0

    @property
    def mean(self) -> float:
        """Expected share accepted."""
        return (self.accepted + self.prior_weight * self.prior) / (self.seen + self.prior_weight)


# Not as tuples of floats: mypyc 2.4 takes such constants for unset.
_CHANCES: Final[Sequence[float]] = (0.5, 0.7, 0.85, 0.95)
"""Upper ends of the bins of a drafted token's chance."""

_FORECAST_PRIOR: Final[Sequence[float]] = (0.6, 0.7, 0.5, 0.65, 0.72, 0.77, 0.9)
_AFTER_WRONG: Final = 0
_AFTER_RIGHT: Final = 1
_FIRST_BIN: Final = 2


class AcceptanceForecast:
    """How likely a draft model's next token is to be right before it is drafted, by how it was doing up to there.

    Text has stretches that are easy and stretches that are not, so a chain that was certain goes on being nearly
    certain, and the chance at depth 8 is not that of depth 1 to the eighth power. Known of a token not drafted yet is
    the chance of the one before it, or at the start of a chain, whether the latest verdict was in favour.

    Args:
        memory: see :class:`AcceptanceRate`.
        shared: what is known of all requests, which a new one starts with.
    """

    def __init__(self, memory: float, shared: AcceptanceForecast | None = None) -> None:
        self._shared = shared
        self._bins = [AcceptanceRate(memory, 8.0, prior) for prior in _FORECAST_PRIOR]
        self._start = _AFTER_RIGHT

    def to_json(self) -> list[list[float]]:
        """Return the verdicts that count: of every bin, accepted and all."""
        return [[rate.accepted, rate.seen] for rate in self._bins]

    def resume(self, learned: Any) -> None:
        """Go on from what :meth:`to_json` returned, or raise; this forecast is of no use then."""
        for rate, (accepted, seen) in zip(self._bins, learned, strict=True):
            if not 0 <= accepted <= seen <= rate.memory:
                raise ValueError(f"{accepted} of {seen} verdicts accepted is no count")
            rate.accepted, rate.seen = float(accepted), float(seen)

    def add(self, before: float | None, right: bool) -> None:
        """Count a verdict; ``before`` is the chance of the token before on the chain, ``None`` for the first."""
        self._bins[self._start if before is None else _bin(before)].add(right)
        if self._shared is not None:
            # Where this request's chains start from is its own; what that means is learned from all.
            self._shared._start = self._start
            self._shared.add(before, right)
        self._start = _AFTER_RIGHT if right else _AFTER_WRONG

    def ahead(self, last: float | None, levels: int) -> list[float]:
        """Return the chances of the next tokens of a chain, each given that those before are right.

        ``last`` is the chance of the last token drafted; ``None`` if none was.
        """
        index = self._start if last is None else _bin(last)
        chances: list[float] = []
        while len(chances) < levels:
            chance = self._mean(index)
            chances.append(chance)
            before, index = index, _bin(chance)
            if index == before:
                # From here on it stays as it is.
                chances += [chance] * (levels - len(chances))
        return chances

    def _mean(self, index: int) -> float:
        own = self._bins[index]
        if self._shared is None:
            return own.mean
        return (own.accepted + own.prior_weight * self._shared._bins[index].mean) / (own.seen + own.prior_weight)


def _bin(chance: float) -> int:
    # As bisect.bisect_right, which takes longer for so few.
    index = _FIRST_BIN
    for end in _CHANCES:
        index += chance >= end
    return index


class Chances(NamedTuple):
    """What is believed of one drafter's proposals.

    Attributes:
        first: of its first choices.
        siblings: of its runners-up; ``None`` where it has none.
    """

    first: Calibration
    siblings: Calibration | None

    @classmethod
    def of(cls, name: str, *, says_margins: bool) -> Chances:
        """Return the prior of a drafter: of a model, which says margins, of what a grammar forces, or of a lookup."""
        if name == GRAMMAR:
            return cls(Calibration(GrammarFeatures()), None)
        if says_margins:
            return cls(Calibration(MarginFeatures()), Calibration(SiblingFeatures()))
        return cls(Calibration(MatchFeatures()), None)


class SurvivalModel:
    """What is known about the acceptance of each drafter's proposals."""

    def __init__(self) -> None:
        self._first: dict[str, Calibration] = {}
        self._siblings: dict[str, Calibration] = {}
        self._requests: set[int] = set()

    @property
    def calibrations(self) -> Mapping[str, Calibration]:
        """First choices' calibrations, by drafter."""
        return self._first

    def know(self, source: str, chances: Chances) -> None:
        """Take note of a drafter before its first proposal, and of what is believed of it."""
        self._first[source] = chances.first
        if chances.siblings is not None:
            self._siblings[source] = chances.siblings
        for request_id in self._requests:
            self._begin(request_id, source)

    def begin(self, request_id: int) -> None:
        self._requests.add(request_id)
        for source in self._first:
            self._begin(request_id, source)

    def end(self, request_id: int) -> None:
        self._requests.discard(request_id)
        for calibrations in (self._first, self._siblings):
            for calibration in calibrations.values():
                calibration.end(request_id)

    def score(self, request_id: int, tree: DraftTree, before: GrownTree | None = None) -> GrownTree:
        """Return a tree with the survival of every node.

        Args:
            before: what was returned of it earlier in the round; only what was added since is judged.
        """
        survivals = [0.0] * len(tree)
        survivals[ROOT] = 1.0
        forks: list[_Fork] = []
        known = {fork.parent: fork for fork in before.forks} if before is not None else {}
        for parent in range(len(tree)):
            candidates = tree.candidates(parent)
            if not candidates or survivals[parent] < NEGLIGIBLE:
                continue
            fork = known.get(parent)
            if fork is None or len(fork.proposals) != len(candidates):
                fork = self._judge(request_id, parent, tree.depths[parent] + 1, candidates)
            forks.append(fork)
            above = survivals[parent]
            for node, chance in fork.chances:
                survivals[node] = above * chance
        return GrownTree(tuple(tree.parents), tuple(tree.token_ids), tuple(tree.depths), forks, survivals)

    def _judge(self, request_id: int, parent: int, depth: int, candidates: Sequence[Candidate]) -> _Fork:
        if len(candidates) == 1:
            # So it is along most of a chain, and there is nothing to weigh it against.
            (candidate,) = candidates
            known = self._first.get(candidate.source)
            proposal = _Proposal(candidate, True, SOLO)
            if known is None:
                return _Fork(parent, [proposal], [])
            chance = known.chance(request_id, candidate.evidence, depth)
            return _Fork(parent, [proposal], [(candidate.node, chance)])
        # Every drafter's first choice; what it proposed after that are its runners-up.
        firsts: dict[str, int] = {}
        for candidate in candidates:
            firsts.setdefault(candidate.source, candidate.node)
        proposals = []
        opinions: dict[int, list[tuple[str, float]]] = {}
        runners_up: dict[int, float] = {}
        for candidate in candidates:
            source, node = candidate.source, candidate.node
            first = firsts[source] == node
            co_proposals = self._co_proposals(firsts, source) if first and len(firsts) > 1 else SOLO
            proposals.append(_Proposal(candidate, first, co_proposals))
            calibration = (self._first if first else self._siblings).get(source)
            if calibration is None:
                continue
            chance = calibration.chance(request_id, candidate.evidence, depth, co_proposals)
            if first:
                opinions.setdefault(node, []).append((source, chance))
            else:
                runners_up[node] = max(chance, runners_up.get(node, 0.0))
        first_choices = {node: self._combine(chances) for node, chances in opinions.items()}
        # One of them at most is what the target says.
        total = sum(first_choices.values())
        scale = max(total, 1.0)
        judged = [(node, chance / scale) for node, chance in first_choices.items()]
        left = max(1.0 - total, 0.0)
        for node, chance in runners_up.items():
            if node not in first_choices:
                judged.append((node, min(chance, left)))
                left -= min(chance, left)
        return _Fork(parent, proposals, judged)

    def learn(self, request_id: int, tree: GrownTree, emitted: Sequence[int]) -> list[Verdict]:
        """Learn from what the target said in place of a tree, whether its nodes were verified or not.

        Args:
            tree: all that was grown.
            emitted: tokens after the root.

        Returns:
            Of every drafter's first choices, those whose fate is known.
        """
        said = [False] * len(tree.parents)
        said[ROOT] = True
        verdicts = []
        for fork in tree.forks:
            depth = tree.depths[fork.parent]
            if not said[fork.parent] or depth >= len(emitted):
                continue
            before = tree.chance(fork.parent)
            for proposal in fork.proposals:
                candidate, first, co_proposals = proposal.candidate, proposal.first, proposal.co_proposals
                right = candidate.token_id == emitted[depth]
                said[candidate.node] = right
                calibration = (self._first if first else self._siblings).get(candidate.source)
                if calibration is not None:
                    calibration.observe(request_id, candidate.evidence, depth + 1, right, co_proposals)
                if first:
                    chance = tree.chance(candidate.node) or 0.0
                    verdicts.append(Verdict(candidate.source, depth + 1, before, chance, right))
        return verdicts

    def _co_proposals(self, firsts: Mapping[str, int], source: str) -> CoProposals:
        """Return whether others propose first what a drafter does, by kind."""
        agrees: list[bool | None] = [None, None]
        for name, node in firsts.items():
            # The grammar knows nothing of the text: that others agree with it is no sign of anything.
            if name != source and GRAMMAR not in (name, source):
                kind = name in self._siblings
                agrees[kind] = bool(agrees[kind]) or node == firsts[source]
        return CoProposals(*agrees)

    def _combine(self, opinions: Sequence[tuple[str, float]]) -> float:
        """Return the chance of a token that several propose first.

        Each opinion is right on the mean by itself, so the highest of several would be too high. Lookups know the same
        text: the lower of two knows of something in it that the other does not. What a grammar forces is not for others
        to judge.
        """
        if len(opinions) == 1:
            return opinions[0][1]
        for source, chance in opinions:
            if source == GRAMMAR:
                return chance
        of_models = [chance for source, chance in opinions if source in self._siblings]
        of_lookups = [chance for source, chance in opinions if source not in self._siblings]
        chances = of_models + ([min(of_lookups)] if of_lookups else [])
        return sum(chances) / len(chances)

    def _begin(self, request_id: int, source: str) -> None:
        self._first[source].begin(request_id)
        if source in self._siblings:
            self._siblings[source].begin(request_id)
