"""What one lexeme of a grammar may be, and where a longer one would swallow what follows a shorter one.

llguidance cuts a text into lexemes, each as long as it can be, and parses these. A grammar of characters knows no such
thing: in ``[a-z]* "x"`` the last ``x`` belongs to the literal. So parts of a grammar are made lexemes where the two
cannot differ, as masks of lexemes cost a tenth of those of characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from paceline.constraints.gbnf_parser import Chars, Choice, Node, Ref, Repeat, Sequence, Token

MAX_PLACES = 2_000
"""Characters of a lexeme; what has more is taken apart."""

_MAX_EDGES = 100_000
"""Pairs of places of a lexeme of which one may come after the other."""
_EDGES = 10
"""Such pairs that are taken for one step."""
_MAX_STATES = 4_000
"""Pairs of sets of places that are compared to tell what one lexeme takes from another."""
COPIED = 8
"""Repetitions that are counted; more are taken for any number, which errs on the side of no lexeme."""


class BudgetExceededError(Exception):
    """The steps of a budget are used up."""


class Budget:
    """Steps for work whose extent no size of the source tells: it gets equally far on every machine.

    Args:
        steps: how many there are; each stands for a microsecond at most.
    """

    def __init__(self, steps: int) -> None:
        self._left = steps

    def take(self, steps: int) -> None:
        """Count steps, best before they are gone; raise where there are not so many left."""
        self._left -= steps
        if self._left < 0:
            raise BudgetExceededError


class TooLargeError(Exception):
    """A part of a grammar is too large for one lexeme."""


@dataclass(frozen=True)
class Lexeme:
    """An automaton whose states are the places of characters (Glushkov's).

    Attributes:
        masks: ``[places]`` characters that may stand there, as bits.
        first: places that a text may begin with.
        last: places that a text may end with.
        after: ``[places]`` places that may come next.
    """

    masks: tuple[int, ...]
    first: frozenset[int]
    last: frozenset[int]
    after: tuple[frozenset[int], ...]

    @cached_property
    def first_mask(self) -> int:
        """Characters that a text may begin with."""
        return self.union(self.first)

    @cached_property
    def further_mask(self) -> int:
        """Characters that a text may have behind its first."""
        return self.union(frozenset().union(*self.after))

    @cached_property
    def is_single(self) -> bool:
        return not any(self.after)

    def union(self, places: frozenset[int]) -> int:
        mask = 0
        for place in places:
            mask |= self.masks[place]
        return mask


def build_lexeme(node: Node, rules: dict[str, Node], mask_of: Callable[[Chars], int], budget: Budget) -> Lexeme:
    """Return the automaton of a part of at most :data:`MAX_PLACES` that refers to no rule in which it is itself.

    Args:
        mask_of: returns the characters of a class, as bits.

    Raises:
        TooLargeError: too many places may come after too many others.
        BudgetExceededError: the budget is used up.
    """
    return _Builder(rules, mask_of, budget).build(node)


def find_swallowed(shorter: Lexeme, longer: Lexeme, budget: Budget) -> int:
    """Return characters that, after a text of the one, may be taken for more of the other; all bits if unknown."""
    found = 0
    start = (shorter.first, longer.first)
    known, rest = {start}, [start]
    while rest:
        ours, theirs = rest.pop()
        for here, there in _walk_alike(shorter, ours, longer, theirs, budget):
            beyond = _places_after(longer, there, budget)
            if here & shorter.last:
                found |= longer.union(beyond)
            state = (_places_after(shorter, here, budget), beyond)
            if state not in known:
                known.add(state)
                rest.append(state)
                if len(known) > _MAX_STATES:
                    return -1
    return found


def _walk_alike(
    shorter: Lexeme, ours: frozenset[int], longer: Lexeme, theirs: frozenset[int], budget: Budget
) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Yield those of both places where the same characters may stand, for all characters that both have."""
    if len(ours) == len(theirs) == 1:
        budget.take(1)
        if shorter.union(ours) & longer.union(theirs):
            yield ours, theirs
        return
    masks = {shorter.masks[place] for place in ours} | {longer.masks[place] for place in theirs}
    for block in _partition(masks, budget):
        budget.take(len(ours) + len(theirs))
        here = frozenset(place for place in ours if shorter.masks[place] & block)
        there = frozenset(place for place in theirs if longer.masks[place] & block)
        if here and there:
            yield here, there


def _places_after(lexeme: Lexeme, places: frozenset[int], budget: Budget) -> frozenset[int]:
    if len(places) == 1:
        return lexeme.after[next(iter(places))]
    following = [lexeme.after[place] for place in places]
    budget.take(sum(map(len, following)))
    return frozenset().union(*following)


def _partition(masks: set[int], budget: Budget) -> list[int]:
    """Return the parts into which sets of characters cut one another."""
    blocks: list[int] = []
    for mask in masks:
        budget.take(len(blocks))
        cut = []
        for block in blocks:
            if block & mask:
                cut.append(block & mask)
            if block & ~mask:
                cut.append(block & ~mask)
            mask &= ~block
        blocks = [*cut, mask] if mask else cut
    return blocks


@dataclass(frozen=True, slots=True)
class _Part:
    nullable: bool
    first: frozenset[int]
    last: frozenset[int]


_NOTHING = _Part(True, frozenset(), frozenset())


class _Builder:
    def __init__(self, rules: dict[str, Node], mask_of: Callable[[Chars], int], budget: Budget) -> None:
        self._rules = rules
        self._mask_of = mask_of
        self._budget = budget
        self._masks: list[int] = []
        self._after: list[set[int]] = []
        self._num_edges = 0

    def build(self, node: Node) -> Lexeme:
        part = self._build_part(node)
        return Lexeme(tuple(self._masks), part.first, part.last, tuple(map(frozenset, self._after)))

    def _build_part(self, node: Node) -> _Part:
        self._budget.take(1)
        match node:
            case Chars():
                self._masks.append(self._mask_of(node))
                self._after.append(set())
                place = frozenset([len(self._masks) - 1])
                return _Part(False, place, place)
            case Ref():
                return self._build_part(self._rules[node.name])
            case Sequence():
                whole = _NOTHING
                for item in node.items:
                    whole = self._join(whole, self._build_part(item))
                return whole
            case Choice():
                parts = [self._build_part(option) for option in node.options]
                self._budget.take(sum(len(part.first) + len(part.last) for part in parts))
                return _Part(
                    any(part.nullable for part in parts),
                    frozenset().union(*(part.first for part in parts)),
                    frozenset().union(*(part.last for part in parts)),
                )
            case Repeat():
                return self._repeat(node)
            case Token():
                raise AssertionError("a token is not a character")

    def _repeat(self, node: Repeat) -> _Part:
        if node.most == 0:
            return _NOTHING
        if node.most is None or node.most > COPIED:
            part = self._build_part(node.item)
            self._link(part.last, part.first)
            return _Part(node.least == 0 or part.nullable, part.first, part.last)
        whole = _NOTHING
        for i in range(node.most):
            part = self._build_part(node.item)
            if i >= node.least:
                part = _Part(True, part.first, part.last)
            whole = self._join(whole, part)
        return whole

    def _join(self, left: _Part, right: _Part) -> _Part:
        self._link(left.last, right.first)
        self._budget.take(len(left.first) + len(left.last) if left.nullable or right.nullable else 0)
        return _Part(
            left.nullable and right.nullable,
            left.first | right.first if left.nullable else left.first,
            left.last | right.last if right.nullable else right.last,
        )

    def _link(self, places: frozenset[int], following: frozenset[int]) -> None:
        self._num_edges += len(places) * len(following)
        if self._num_edges > _MAX_EDGES:
            raise TooLargeError
        self._budget.take(len(places) * len(following) // _EDGES)
        for place in places:
            self._after[place] |= following
