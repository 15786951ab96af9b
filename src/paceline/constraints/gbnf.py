"""llama.cpp's grammars as llguidance's, for the same texts.

llguidance has a converter of its own. That one makes lexemes of whatever needs no recursion, and so loses texts:
llama.cpp's own example for arithmetic could not end an answer. See :mod:`~paceline.constraints.lexemes`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import groupby

from paceline.constraints.gbnf_reader import (
    Chars,
    Choice,
    Node,
    Ref,
    Repeat,
    Sequence,
    Token,
    nodes_of,
    parts_of,
    read_gbnf,
)
from paceline.constraints.lexemes import COPIED, MOST_PLACES, Lexeme, TooLargeError, lexeme_of, swallowed
from paceline.core.errors import ConstraintError
from paceline.engines.base import Vocabulary

MOST_RULES = 2_000
"""Rules of a GBNF grammar."""

_LONGEST_RUN = 8
"""Parts of a sequence that are taken off a lexeme one by one, from its end; a longer one falls apart at once."""

_MOST_COMPARED = 100_000
"""Pairs of lexemes to compare; where there are more, all are characters."""

_MOST_DEPTH = 100
"""Parts in parts of one lexeme."""

_TOO_LARGE = 1 << 30

_DEEPEST = 6
"""Groups in groups that are written as such; what is deeper becomes a rule, as llguidance reads 30."""


def lark_of(text: str, vocabulary: Vocabulary) -> str:
    """Return llguidance's grammar for llama.cpp's.

    Args:
        text: the grammar in GBNF.
        vocabulary: the model's, for grammars that name tokens.

    Raises:
        ConstraintError: the text is no grammar, or one of its rules allows no text.
    """
    try:
        return _lark_of(text, vocabulary)
    except RecursionError:
        raise ConstraintError("the grammar is nested too deeply: write it with fewer rules in rules") from None


def _lark_of(text: str, vocabulary: Vocabulary) -> str:
    rules = _reachable(read_gbnf(text, lambda named: _token_of(named, vocabulary)))
    if len(rules) > MOST_RULES:
        raise ConstraintError(f"the grammar has {len(rules):,} rules, and the most is {MOST_RULES:,}: make it smaller")
    _check_ends(rules)
    rules = {name: _without_right_recursion(name, node) for name, node in rules.items()}
    return _Writer(rules, sorted(vocabulary.end_ids)).write()


def _token_of(named: str, vocabulary: Vocabulary) -> int:
    if named.startswith("<[") and named.endswith("]>"):
        number = named[2:-2]
        if not (number.isascii() and number.isdecimal() and int(number) < vocabulary.size):
            raise ConstraintError(f"{named[:40]} names no token: this model has those from 0 to {vocabulary.size - 1}")
        return int(number)
    found = vocabulary.tokenize(named, add_special=False, parse_special=True)
    spelled = [vocabulary.token_spelling(token_id) for token_id in found]
    if len(found) != 1 or spelled != [named.encode()]:
        raise ConstraintError(f"{named[:40]} is no single token of this model: put a text in quotes")
    return found[0]


def _references(node: Node) -> list[str]:
    return [each.name for each in nodes_of(node) if isinstance(each, Ref)]


def _reachable(rules: dict[str, Node]) -> dict[str, Node]:
    """Return the rules that the first refers to, in the order in which they are met."""
    found: dict[str, Node] = {}
    rest = ["root"]
    while rest:
        name = rest.pop()
        if name not in found:
            found[name] = rules[name]
            rest += reversed(_references(rules[name]))
    return found


def _check_ends(rules: dict[str, Node]) -> None:
    """Refuse a rule whose texts never end, as it needs itself."""
    ends: set[str] = set()
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, node in rules.items():
        for used in _references(node):
            users[used].append(name)
    rest = list(rules)
    while rest:
        name = rest.pop()
        if name not in ends and _can_end(rules[name], ends):
            ends.add(name)
            rest += users[name]
    for name in rules:
        if name not in ends:
            raise ConstraintError(
                f"the grammar cannot be used: a text of the rule {name[:60]} never ends, as the rule always needs "
                "itself: add an alternative that does not"
            )


def _can_end(node: Node, ends: Collection[str]) -> bool:
    match node:
        case Ref():
            return node.name in ends
        case Sequence():
            return all(_can_end(item, ends) for item in node.items)
        case Choice():
            return any(_can_end(option, ends) for option in node.options)
        case Repeat():
            return node.least == 0 or _can_end(node.item, ends)
        case _:
            return True


def _without_right_recursion(name: str, node: Node) -> Node:
    """Return ``(x)* y`` for ``rule ::= x rule | y``: the same texts, where each ``x`` would otherwise cost memory."""
    if not isinstance(node, Choice):
        return node
    again: list[Node] = []
    others: list[Node] = []
    for option in node.options:
        if isinstance(option, Sequence) and option.items and option.items[-1] == Ref(name):
            again.append(Sequence(option.items[:-1]))
        else:
            others.append(option)
    if not again or not others:
        return node
    return Sequence((Repeat(_choice(again), 0, None), _choice(others)))


def _choice(options: list[Node]) -> Node:
    return options[0] if len(options) == 1 else Choice(tuple(options))


@dataclass(frozen=True, slots=True)
class _Extent:
    """How many places and parts a part has, and how deep they are nested."""

    places: int
    depth: int


class _Writer:
    """Decides what becomes a lexeme, and writes the grammar.

    Parts that need no recursion begin as lexemes. One that could swallow what follows another is taken apart, until
    none could. Nodes are known by their identity, since where a part stands decides what may follow it.
    """

    def __init__(self, rules: dict[str, Node], end_ids: list[int]) -> None:
        self._rules = rules
        self._end_ids = end_ids
        self._mask_of = _masks(node for rule in rules.values() for node in nodes_of(rule))
        self._flat = self._flat_rules()
        self._nullable = self._nullable_rules()
        self._first = self._first_masks()
        self._follow = self._follow_masks()
        self._broken: set[int] = set()
        self._cuts: dict[int, tuple[Node, list[Node]]] = {}
        self._lexemes: dict[int, tuple[Node, Lexeme]] = {}

    def write(self) -> str:
        while found := self._swallowing():
            self._broken |= found
        self._names = {"root": "start"}
        self._pending: list[tuple[str, Node]] = [("start", self._rules["root"])]
        lines = []
        while self._pending:
            name, node = self._pending.pop()
            lines.append(f"{name}: {self._written(node, 0)}")
        return "\n".join(lines)

    # What may come first and next, in characters.

    def _flat_rules(self) -> dict[str, _Extent]:
        """Return the size of the rules that are in themselves nowhere, and have no tokens."""
        missing: dict[str, set[str]] = {}
        users: dict[str, list[str]] = {name: [] for name in self._rules}
        ready: list[str] = []
        for name, node in self._rules.items():
            if any(isinstance(each, Token) for each in nodes_of(node)):
                continue
            missing[name] = set(_references(node))
            for used in missing[name]:
                users[used].append(name)
            if not missing[name]:
                ready.append(name)
        self._flat = {}
        while ready:
            name = ready.pop()
            extent = self._extent(self._rules[name])
            if extent is None:
                continue
            self._flat[name] = extent
            for user in users[name]:
                if user in missing:
                    missing[user].discard(name)
                    if not missing[user]:
                        ready.append(user)
        return self._flat

    def _extent(self, node: Node) -> _Extent | None:
        """Return how large a part is with all that it refers to; ``None`` where that has no end, or is not known."""
        match node:
            case Chars():
                return _Extent(1, 1)
            case Ref():
                below = self._flat.get(node.name)
                return None if below is None else _Extent(below.places, below.depth + 1)
            case Token():
                return None
        parts = [self._extent(part) for part in parts_of(node)]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        times = node.most if isinstance(node, Repeat) and node.most is not None and node.most <= COPIED else 1
        # Parts that say nothing count too, as there may be ever so many.
        places = min(1 + max(times, 1) * sum(part.places for part in known), _TOO_LARGE)
        return _Extent(places, 1 + max((part.depth for part in known), default=0))

    def _nullable_rules(self) -> set[str]:
        found: set[str] = set()
        while more := {
            name for name, node in self._rules.items() if name not in found and self._is_nullable(node, found)
        }:
            found |= more
        return found

    def _is_nullable(self, node: Node, rules: Collection[str]) -> bool:
        match node:
            case Ref():
                return node.name in rules
            case Sequence():
                return all(self._is_nullable(item, rules) for item in node.items)
            case Choice():
                return any(self._is_nullable(option, rules) for option in node.options)
            case Repeat():
                return node.least == 0 or self._is_nullable(node.item, rules)
            case _:
                return False

    def _first_masks(self) -> dict[str, int]:
        self._first = dict.fromkeys(self._rules, 0)
        changed = True
        while changed:
            changed = False
            for name in reversed(self._rules):
                mask = self._first_of(self._rules[name])
                changed = changed or mask != self._first[name]
                self._first[name] = mask
        return self._first

    def _first_of(self, node: Node) -> int:
        mask = 0
        match node:
            case Chars():
                return self._mask_of[node]
            case Ref():
                return self._first[node.name]
            case Sequence():
                for item in node.items:
                    mask |= self._first_of(item)
                    if not self._is_nullable(item, self._nullable):
                        break
            case Choice():
                for option in node.options:
                    mask |= self._first_of(option)
            case Repeat():
                return self._first_of(node.item)
        return mask

    def _follow_masks(self) -> dict[str, int]:
        follow = dict.fromkeys(self._rules, 0)
        rest = dict.fromkeys(reversed(self._rules))
        while rest:
            name, _ = rest.popitem()
            stack = [(self._rules[name], follow[name])]
            while stack:
                node, after = stack.pop()
                if isinstance(node, Ref) and after & ~follow[node.name]:
                    follow[node.name] |= after
                    rest[node.name] = None
                stack += self._with_follow(node, after)
        return follow

    def _with_follow(self, node: Node, after: int) -> list[tuple[Node, int]]:
        """Return the parts of a node, each with the characters that may come after it."""
        match node:
            case Sequence():
                return self._sequence_with_follow(node.items, after)
            case Choice():
                return [(option, after) for option in node.options]
            case Repeat():
                return [(node.item, after if node.most == 1 else after | self._first_of(node.item))]
            case _:
                return []

    def _sequence_with_follow(self, items: Iterable[Node], after: int) -> list[tuple[Node, int]]:
        found = []
        for item in reversed(list(items)):
            found.append((item, after))
            after = self._first_of(item) | (after if self._is_nullable(item, self._nullable) else 0)
        return found

    # What is a lexeme.

    def _lexeme(self, node: Node) -> Lexeme | None:
        """Return the automaton of a part that is to be a lexeme."""
        if id(node) in self._broken:
            return None
        if id(node) not in self._lexemes:
            extent = self._extent(node)
            if extent is None:
                return None
            if extent.places > MOST_PLACES or extent.depth > _MOST_DEPTH:
                self._broken.add(id(node))
                return None
            try:
                # The node is kept too, so that nothing else has its identity.
                self._lexemes[id(node)] = node, lexeme_of(node, self._rules, self._mask_of)
            except TooLargeError:
                self._broken.add(id(node))
                return None
        return self._lexemes[id(node)][1]

    def _is_flat(self, node: Node) -> bool:
        return self._extent(node) is not None

    def _items(self, node: Sequence) -> list[Node]:
        """Return the parts of a sequence that is no lexeme, those side by side that may be one in one."""
        items: list[Node] = []
        rest = list(reversed(self._cut(node)))
        while rest:
            item = rest.pop()
            if isinstance(item, Sequence) and self._is_flat(item) and self._lexeme(item) is None:
                rest += reversed(self._cut(item))
            else:
                items.append(item)
        return items

    def _cut(self, node: Sequence) -> list[Node]:
        if id(node) not in self._cuts:
            # The node is kept too, so that nothing else has its identity.
            self._cuts[id(node)] = node, _runs(node.items, self._is_flat)
        return self._cuts[id(node)][1]

    def _swallowing(self) -> set[int]:
        """Return the nodes of lexemes that could swallow what follows another."""
        found: dict[int, tuple[Lexeme, int]] = {}
        seen: set[str] = {"root"}
        stack: list[tuple[Node, int]] = [(self._rules["root"], self._follow["root"])]
        while stack:
            node, after = stack.pop()
            lexeme = self._lexeme(node)
            if lexeme is not None:
                found[id(node)] = lexeme, after | (found[id(node)][1] if id(node) in found else 0)
            elif isinstance(node, Ref):
                if node.name not in seen:
                    seen.add(node.name)
                    stack.append((self._rules[node.name], self._follow[node.name]))
            elif isinstance(node, Sequence):
                stack += self._sequence_with_follow(self._items(node), after)
            else:
                stack += self._with_follow(node, after)
        return self._clashes(found)

    def _clashes(self, found: dict[int, tuple[Lexeme, int]]) -> set[int]:
        longer = {key: lexeme for key, (lexeme, _) in found.items() if not lexeme.is_single}
        if len(longer) * len(found) > _MOST_COMPARED:
            return set(longer)
        clashes: set[int] = set()
        for lexeme, after in found.values():
            for key, other in longer.items():
                if key not in clashes and lexeme.first_mask & other.first_mask and swallowed(lexeme, other) & after:
                    clashes.add(key)
        return clashes

    # How a grammar is written.

    def _written(self, node: Node, depth: int) -> str:
        lexeme = self._lexeme(node)
        if lexeme is not None:
            return f"/{_regex(node, self._rules)}/" if lexeme.masks else '""'
        if depth > _DEEPEST and not isinstance(node, Ref | Token):
            self._pending.append((f"g{len(self._pending)}_{id(node)}", node))
            return self._pending[-1][0]
        match node:
            case Ref():
                if node.name not in self._names:
                    self._names[node.name] = f"r{len(self._names)}"
                    self._pending.append((self._names[node.name], self._rules[node.name]))
                return self._names[node.name]
            case Token():
                # An end token ends the answer, whatever a grammar says of others.
                ids = sorted({*node.ids, *self._end_ids}) if node.negated else node.ids
                return f"<[{'^' if node.negated else ''}{','.join(map(str, ids))}]>"
            case Sequence():
                return " ".join(self._written(item, depth + 1) for item in self._items(node))
            case Choice():
                return f"({' | '.join(self._written(option, depth + 1) for option in node.options)})"
            case Repeat():
                return f"({self._written(node.item, depth + 1)}){_counts(node)}"
            case Chars():
                raise AssertionError("a character is always a lexeme")


def _runs(items: tuple[Node, ...], is_flat: Callable[[Node], bool]) -> list[Node]:
    """Return what a sequence is first taken apart into."""
    if all(map(is_flat, items)):
        return list(items) if len(items) > _LONGEST_RUN else [_sequence(items[:-1]), items[-1]]
    runs: list[Node] = []
    for flat, group in groupby(items, is_flat):
        part = tuple(group)
        runs += [_sequence(part)] if flat else part
    return runs


def _sequence(items: tuple[Node, ...]) -> Node:
    return items[0] if len(items) == 1 else Sequence(items)


def _masks(nodes: Iterable[Node]) -> dict[Chars, int]:
    """Return each class as bits, one for characters that all classes have or lack together."""
    classes = {node for node in nodes if isinstance(node, Chars)}
    bounds = sorted({bound for each in classes for first, last in each.ranges for bound in (first, last + 1)})
    masks = {}
    for each in classes:
        masks[each] = 0
        for first, last in each.ranges:
            masks[each] |= (1 << bisect_left(bounds, last + 1)) - (1 << bisect_left(bounds, first))
    return masks


def _counts(node: Repeat) -> str:
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _regex(node: Node, rules: dict[str, Node]) -> str:
    match node:
        case Chars():
            ranges = [_char(first) if first == last else f"{_char(first)}-{_char(last)}" for first, last in node.ranges]
            return ranges[0] if node.ranges[0][0] == node.ranges[-1][1] else f"[{''.join(ranges)}]"
        case Ref():
            return _regex(rules[node.name], rules)
        case Sequence():
            return "".join(_regex(item, rules) for item in node.items)
        case Choice():
            return f"(?:{'|'.join(_regex(option, rules) for option in node.options)})"
        case Repeat():
            return f"(?:{_regex(node.item, rules)}){_counts(node)}"
        case Token():
            raise AssertionError("a token is no part of a lexeme")


def _char(point: int) -> str:
    char = chr(point)
    return char if char.isascii() and char.isalnum() else f"\\x{{{point:x}}}"
