"""Counterfactual credit: what a draft that could not be afforded would have brought.

A ledger that is used up stops speculation, also where a few unlucky rounds came before a stretch that pays. What was
drafted anyway is compared with what the target says in the plain rounds that follow, and entered as if it had been
verified. Gains shown that way, and only those, are reason to risk something again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from paceline.core.tree import ROOT
from paceline.planning.auto.survival import GrownTree


@dataclass(slots=True)
class CounterfactualRound:
    """A draft that was not verified, followed by what was said.

    Attributes:
        tree: all that was drafted.
        nodes: that would have been verified.
        extra_s: seconds by which the round would have been longer than a plain one.
    """

    tree: GrownTree
    nodes: Collection[int]
    extra_s: float
    accepted: int = 0
    _at: int = ROOT
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.nodes:
            self._children[self.tree.parents[node], self.tree.token_ids[node]] = node

    def follow(self, emitted: Sequence[int]) -> bool:
        """Compare with the next tokens; return whether it is decided how much would have been accepted."""
        for token_id in emitted:
            node = self._children.get((self._at, token_id))
            if node is None:
                return True
            self._at = node
            self.accepted += 1
        return False


@dataclass(slots=True)
class CounterfactualCredit:
    """One request's drafts that were held back, one at a time.

    Attributes:
        gained_s: seconds they would have won by now, losses set against gains.
        grants: how often they were reason to allow more.
    """

    gained_s: float = 0.0
    grants: int = 0
    _open: CounterfactualRound | None = None

    @property
    def idle(self) -> bool:
        """Whether no draft is being followed."""
        return self._open is None

    def open(self, held_back: CounterfactualRound) -> None:
        """Start following a draft."""
        self._open = held_back

    def follow(self, emitted: Sequence[int], token_s: float) -> None:
        """Take note of tokens said, each of which takes plain decoding ``token_s`` seconds."""
        held_back = self._open
        if held_back is not None and held_back.follow(emitted):
            self.gained_s += held_back.accepted * token_s - held_back.extra_s
            self._open = None

    def grant(self, least_s: float) -> bool:
        """Return whether gains of ``least_s`` were shown; they count once."""
        if self.gained_s < least_s:
            return False
        self.gained_s = 0.0
        self.grants += 1
        return True
