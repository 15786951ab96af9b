"""llama.cpp's grammars as llguidance's, for the same texts.

llguidance has a converter of its own. That one makes lexemes of whatever needs no recursion, and so loses texts:
llama.cpp's own example for arithmetic could not end an answer. See :mod:`~paceline.constraints.lexemes`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

from paceline.constraints.character_sets import CharacterSets, least_fixed_point
from paceline.constraints.gbnf_parser import (
    Chars,
    Choice,
    Node,
    Ref,
    Repeat,
    Sequence,
    Token,
    children,
    parse_gbnf,
    walk,
)
from paceline.constraints.lexemes import (
    COPIED,
    MAX_PLACES,
    Budget,
    BudgetExceededError,
    Lexeme,
    TooLargeError,
    build_lexeme,
    find_swallowed,
)
from paceline.core.errors import ConstraintError
from paceline.core.vocabulary import Vocabulary

MAX_RULES = 2_000
"""Rules of a GBNF grammar."""

_LONGEST_RUN = 8
"""Parts of a sequence that are taken off a lexeme one by one, from its end; a longer one falls apart at once."""

_MAX_STEPS = 700_000
"""Steps to tell what may be a lexeme; where that takes more, only characters are."""

_AT_A_GLANCE = 8
"""Pairs of lexemes that are told apart in one step, where one look at their characters does."""

_STEP_BITS = 1_000
"""Bits of a set that are taken for one step."""

_MAX_DEPTH = 100
"""Parts in parts of one lexeme."""

_TOO_LARGE = 1 << 30

_LONGEST_NAME = 256
"""Characters of the name of a token; a tokenizer may take long for a text that is longer."""

_DEEPEST = 6
"""Groups in groups that are written as such; what is deeper becomes a rule, as llguidance reads 30."""


def gbnf_to_lark(text: str, vocabulary: Vocabulary) -> str:
    """Return llguidance's grammar for llama.cpp's.

    Args:
        vocabulary: the model's, for grammars that name tokens.

    Raises:
        ConstraintError: the text is no grammar, or one of its rules allows no text.
    """
    try:
        return _convert(text, vocabulary)
    except RecursionError:
        raise ConstraintError("the grammar is nested too deeply: write it with fewer rules in rules") from None


def _convert(text: str, vocabulary: Vocabulary) -> str:
    token_of = cache(partial(_resolve_token, vocabulary=vocabulary))
    rules = _reachable_rules(parse_gbnf(text, token_of))
    if len(rules) > MAX_RULES:
        raise ConstraintError(f"the grammar has {len(rules):,} rules, and the most is {MAX_RULES:,}: make it smaller")
    _check_ends(rules)
    rules = {name: _without_right_recursion(name, node) for name, node in rules.items()}
    return _Writer(rules, sorted(vocabulary.end_ids)).write()


def _resolve_token(named: str, vocabulary: Vocabulary) -> int:
    if named.startswith("<[") and named.endswith("]>"):
        number = named[2:-2]
        if not (number.isascii() and number.isdecimal() and int(number) < vocabulary.size):
            raise ConstraintError(f"{named[:40]} is not a token of this model, which has 0 to {vocabulary.size - 1}")
        return int(number)
    found = vocabulary.tokenize(named, add_special=False, parse_special=True) if len(named) <= _LONGEST_NAME else []
    spelled = [vocabulary.token_spelling(token_id) for token_id in found]
    if len(found) != 1 or spelled != [named.encode()]:
        raise ConstraintError(f"{named[:40]} is not a single token of this model: put a text in quotes")
    return found[0]


def _references(node: Node) -> list[str]:
    return [each.name for each in walk(node) if isinstance(each, Ref)]


def _reachable_rules(rules: dict[str, Node]) -> dict[str, Node]:
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
    ends = least_fixed_point(rules, characters=True)
    for name, rule in rules.items():
        if id(rule) not in ends:
            raise ConstraintError(
                f"the grammar cannot be used: a text of the rule {name[:60]} never ends, as the rule always needs "
                "itself: add an alternative that does not"
            )


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
    return Sequence((Repeat(_make_choice(again), 0, None), _make_choice(others)))


def _make_choice(options: list[Node]) -> Node:
    return options[0] if len(options) == 1 else Choice(tuple(options))


class _Extent(NamedTuple):
    """How large a part is with all that it refers to.

    Attributes:
        places: characters, and parts that say nothing.
        depth: how deep parts are nested.
        ranges: of its classes of characters, as often as they are written.
    """

    places: int
    depth: int
    ranges: int


@dataclass(slots=True)
class _LexemeUse:
    """A lexeme, the parts that are it, and the characters that may follow one of them."""

    lexeme: Lexeme
    nodes: set[int] = field(default_factory=set)
    after: int = 0

    def add(self, node: Node, after: int) -> None:
        self.nodes.add(id(node))
        self.after |= after


class _Writer:
    """Decides what becomes a lexeme, and writes the grammar.

    Parts that need no recursion begin as lexemes. One that could swallow what follows another is taken apart, until
    none could. Nodes are known by their identity, since where a part stands decides what may follow it. Where it takes
    too long to tell, only characters are lexemes: the texts are the same, and masks cost more.
    """

    def __init__(self, rules: dict[str, Node], end_ids: list[int]) -> None:
        self._rules = rules
        self._end_ids = end_ids
        self._sets = CharacterSets(rules)
        self._extents: dict[int, _Extent | None] = {}
        self._flat: dict[str, _Extent] = {}
        self._find_flat()
        self._budget = Budget(_MAX_STEPS // (1 + self._sets.num_bits // _STEP_BITS))
        self._is_spent = False
        self._broken: set[int] = set()
        self._cuts: dict[int, tuple[Node, list[Node]]] = {}
        self._lexemes: dict[int, Lexeme | None] = {}
        self._alike: dict[Lexeme, Lexeme] = {}
        self._swallowed: dict[tuple[int, int], int] = {}

    def write(self) -> str:
        try:
            while found := self._find_swallowing():
                self._broken |= found
        except BudgetExceededError:
            self._is_spent = True
        self._names: dict[str | int, str] = {"root": "start"}
        self._pending: list[tuple[str, Node]] = [("start", self._rules["root"])]
        self._lines: list[str] = []
        while self._pending:
            name, node = self._pending.pop()
            self._lines.append(f"{name}: {self._write_node(node, 0)}")
        return "\n".join(self._lines)

    def _find_flat(self) -> None:
        """Find the size of the rules that are in themselves nowhere, and have no tokens."""
        missing: dict[str, set[str]] = {}
        users: dict[str, list[str]] = {name: [] for name in self._rules}
        ready: list[str] = []
        for name, node in self._rules.items():
            if any(isinstance(each, Token) for each in walk(node)):
                continue
            missing[name] = set(_references(node))
            for used in missing[name]:
                users[used].append(name)
            if not missing[name]:
                ready.append(name)
        while ready:
            name = ready.pop()
            extent = self._extent(self._rules[name])
            assert extent is not None, "a rule is ready when all that it refers to are known"
            self._flat[name] = extent
            for user in users[name]:
                if user in missing:
                    missing[user].discard(name)
                    if not missing[user]:
                        ready.append(user)

    def _extent(self, node: Node) -> _Extent | None:
        """Return how large a part is; ``None`` where that has no end."""
        if id(node) not in self._extents:
            self._extents[id(node)] = self._find_extent(node)
        return self._extents[id(node)]

    def _find_extent(self, node: Node) -> _Extent | None:
        match node:
            case Chars():
                return _Extent(1, 1, len(node.ranges))
            case Ref():
                below = self._flat.get(node.name)
                return None if below is None else below._replace(depth=below.depth + 1)
            case Token():
                return None
        parts = [self._extent(part) for part in children(node)]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        times = node.most if isinstance(node, Repeat) and node.most is not None and node.most <= COPIED else 1
        # Parts that say nothing count too, as there may be ever so many.
        places = min(1 + max(times, 1) * sum(part.places for part in known), _TOO_LARGE)
        ranges = min(sum(part.ranges for part in known), _TOO_LARGE)
        return _Extent(places, 1 + max((part.depth for part in known), default=0), ranges)

    # What is a lexeme.

    def _lexeme(self, node: Node) -> Lexeme | None:
        """Return the automaton of a part that is to be a lexeme."""
        if id(node) in self._broken or self._is_spent:
            return None
        # All that refer to a rule share its automaton.
        body = self._rules[node.name] if isinstance(node, Ref) else node
        if id(body) not in self._lexemes:
            self._lexemes[id(body)] = self._build(body)
        return self._lexemes[id(body)]

    def _build(self, node: Node) -> Lexeme | None:
        extent = self._extent(node)
        if extent is None or extent.places > MAX_PLACES or extent.depth > _MAX_DEPTH:
            return None
        self._budget.take(extent.ranges)
        try:
            lexeme = build_lexeme(node, self._rules, self._sets.first, self._budget)
        except TooLargeError:
            return None
        return self._alike.setdefault(lexeme, lexeme)

    def _is_flat(self, node: Node) -> bool:
        return self._extent(node) is not None

    def _items(self, node: Sequence) -> list[Node]:
        """Return the parts of a sequence that is no lexeme, those side by side that may be one in one."""
        items: list[Node] = []
        rest = list(reversed(self._split(node)))
        while rest:
            item = rest.pop()
            if isinstance(item, Sequence) and self._is_flat(item) and self._lexeme(item) is None:
                rest += reversed(self._split(item))
            else:
                items.append(item)
        return items

    def _split(self, node: Sequence) -> list[Node]:
        if self._is_spent:
            return list(node.items)
        if id(node) not in self._cuts:
            # The nodes are kept, so that nothing else has their identity.
            runs = _split_runs(node.items, self._is_flat)
            self._cuts[id(node)] = node, runs
            for run in runs:
                if isinstance(run, Sequence):
                    self._sets.add(run)
        return self._cuts[id(node)][1]

    def _find_swallowing(self) -> set[int]:
        """Return the nodes of lexemes that could swallow what follows another, within the budget."""
        found: dict[int, _LexemeUse] = {}
        seen: set[str] = {"root"}
        stack: list[tuple[Node, int]] = [(self._rules["root"], self._sets.follow["root"])]
        while stack:
            node, after = stack.pop()
            self._budget.take(1)
            lexeme = self._lexeme(node)
            if lexeme is not None:
                found.setdefault(id(lexeme), _LexemeUse(lexeme)).add(node, after)
            elif isinstance(node, Ref):
                if node.name not in seen:
                    seen.add(node.name)
                    stack.append((self._rules[node.name], self._sets.follow[node.name]))
            elif isinstance(node, Sequence):
                stack += self._sets.followed(self._items(node), after)
            elif isinstance(node, Repeat):
                stack.append((node.item, after if node.most == 1 else after | self._sets.first(node.item)))
            else:
                stack += [(option, after) for option in children(node)]
        return self._find_clashes(found.values())

    def _find_clashes(self, found: Collection[_LexemeUse]) -> set[int]:
        longer = [each for each in found if not each.lexeme.is_single]
        clashes: set[int] = set()
        for shorter in found:
            self._budget.take(1 + len(longer) // _AT_A_GLANCE)
            first, after = shorter.lexeme.first_mask, shorter.after
            for other in longer:
                # One look at their characters tells most of them apart.
                if not (other.lexeme.first_mask & first and other.lexeme.further_mask & after):
                    continue
                if other.nodes - clashes and self._takes(shorter.lexeme, other.lexeme) & after:
                    clashes |= other.nodes
        return clashes

    def _takes(self, shorter: Lexeme, longer: Lexeme) -> int:
        pair = id(shorter), id(longer)
        if pair not in self._swallowed:
            self._swallowed[pair] = find_swallowed(shorter, longer, self._budget)
        return self._swallowed[pair]

    # How a grammar is written.

    def _write_node(self, node: Node, depth: int) -> str:
        lexeme = self._lexeme(node)
        if lexeme is not None and not lexeme.masks:
            return '""'
        if isinstance(node, Ref):
            # Written once, however many parts refer to it.
            key = node.name if lexeme is None else id(lexeme)
            if key not in self._names:
                self._names[key] = f"{'r' if lexeme is None else 'L'}{len(self._names)}"
                if lexeme is None:
                    self._pending.append((self._names[key], self._rules[node.name]))
                else:
                    self._lines.append(f"{self._names[key]}: /{_write_regex(node, self._rules)}/")
            return self._names[key]
        if lexeme is not None or isinstance(node, Chars):
            return f"/{_write_regex(node, self._rules)}/"
        if depth > _DEEPEST and not isinstance(node, Token):
            self._pending.append((f"g{len(self._pending)}_{id(node)}", node))
            return self._pending[-1][0]
        match node:
            case Token():
                # An end token ends the answer, whatever a grammar says of others.
                ids = sorted({*node.ids, *self._end_ids}) if node.negated else node.ids
                return f"<[{'^' if node.negated else ''}{','.join(map(str, ids))}]>"
            case Sequence():
                return " ".join(self._write_node(item, depth + 1) for item in self._items(node)) or '""'
            case Choice():
                return f"({' | '.join(self._write_node(option, depth + 1) for option in node.options)})"
            case Repeat():
                return f"({self._write_node(node.item, depth + 1)}){_write_counts(node)}"


def _split_runs(items: tuple[Node, ...], is_flat: Callable[[Node], bool]) -> list[Node]:
    """Return what a sequence is first taken apart into."""
    if all(map(is_flat, items)):
        return list(items) if len(items) > _LONGEST_RUN else [_make_sequence(items[:-1]), items[-1]]
    runs: list[Node] = []
    for flat, group in groupby(items, is_flat):
        part = tuple(group)
        runs += [_make_sequence(part)] if flat else part
    return runs


def _make_sequence(items: tuple[Node, ...]) -> Node:
    return items[0] if len(items) == 1 else Sequence(items)


def _write_counts(node: Repeat) -> str:
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _write_regex(node: Node, rules: dict[str, Node]) -> str:
    match node:
        case Chars():
            ranges = [
                _write_char(first) if first == last else f"{_write_char(first)}-{_write_char(last)}"
                for first, last in node.ranges
            ]
            return ranges[0] if node.ranges[0][0] == node.ranges[-1][1] else f"[{''.join(ranges)}]"
        case Ref():
            return _write_regex(rules[node.name], rules)
        case Sequence():
            return "".join(_write_regex(item, rules) for item in node.items)
        case Choice():
            return f"(?:{'|'.join(_write_regex(option, rules) for option in node.options)})"
        case Repeat():
            return f"(?:{_write_regex(node.item, rules)}){_write_counts(node)}"
        case Token():
            raise AssertionError("a token is no part of a lexeme")


def _write_char(point: int) -> str:
    char = chr(point)
    return char if char.isascii() and char.isalnum() else f"\\x{{{point:x}}}"
