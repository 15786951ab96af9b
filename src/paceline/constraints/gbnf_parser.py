"""Grammars in llama.cpp's notation, GBNF: read as llama.cpp reads them.

Names may have underscores too. Left recursion, which llama.cpp refuses, is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from paceline.core.errors import ConstraintError

MAX_REPEATED = 2_000
"""Counted repetitions, also of groups in groups; llama.cpp takes more as no limit at all, and so does this."""

MAX_NESTED = 60
"""Groups in groups."""

MAX_ELEMENTS = 20_000
"""Characters of literals, classes and references of all rules."""

MAX_PARTS = 100_000
"""Groups, alternatives and repetitions of all rules, some of which may say nothing."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]*")

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points from and to, both included; ascending, and apart from one another."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a class."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a list, or one that is none of them."""

    ids: tuple[int, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Ref:
    """What another rule says."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One thing after the other; nothing at all if there are none."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several things."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A thing some times over; ``most`` is ``None`` for any number."""

    item: Node
    least: int
    most: int | None


Node: TypeAlias = Chars | Token | Ref | Sequence | Choice | Repeat


def parse_gbnf(text: str, token_of: Callable[[str], int]) -> dict[str, Node]:
    """Return the rules of a grammar by name.

    Args:
        token_of: returns the id of the token that a text such as ``<think>`` names, or raises ``ConstraintError``.

    Raises:
        ConstraintError: the text is no grammar; the message says the line.
    """
    reader = _Parser(text, token_of)
    rules = reader.rules()
    if "root" not in rules:
        raise ConstraintError("the grammar has no rule named root: add root ::= and what an answer is")
    for name, place in reader.references.items():
        if name not in rules:
            raise reader.error(f"there is no rule named {name}", place)
    return rules


class _Parser:
    def __init__(self, text: str, token_of: Callable[[str], int]) -> None:
        # As a C string ends.
        self._text = text.split("\0")[0]
        self._token_of = token_of
        self._at = 0
        self._num_elements = self._num_parts = 0
        # By identity, of the rule that is being read: its parts are held by those that they are put into.
        self._repeated: dict[int, int] = {}
        self.references: dict[str, int] = {}

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip_space(newlines=True)
        while self._next():
            name = self._name()
            self._skip_space(newlines=False)
            self._expect("::=", f"::= after the name {name[:40]}")
            self._skip_space(newlines=True)
            self._repeated.clear()
            rules[name] = self._choice(0)
            if self._next() and self._next() not in "\r\n":
                raise self.error(f"{self._next()!r} is not expected here")
            self._skip_space(newlines=True)
        return rules

    def error(self, problem: str, place: int | None = None) -> ConstraintError:
        before = self._text[: self._at if place is None else place]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        return ConstraintError(f"the grammar cannot be used: line {line}, column {column}: {problem}")

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip_space(self, *, newlines: bool) -> None:
        self._skip(_SPACE_AND_LINES if newlines else _SPACE)

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Go on behind what a pattern matches, and return that."""
        found = pattern.match(self._text, self._at)
        assert found is not None, "every pattern matches no text at all too"
        self._at = found.end()
        return found[0]

    def _expect(self, wanted: str, said: str) -> None:
        if not self._text.startswith(wanted, self._at):
            raise self.error(f"expected {said}")
        self._at += len(wanted)

    def _name(self) -> str:
        name = self._skip(_NAME)
        if not name:
            raise self.error("expected the name of a rule")
        return name

    def _count(self) -> None:
        self._num_elements += 1
        if self._num_elements > MAX_ELEMENTS:
            raise self.error(f"the grammar has more than {MAX_ELEMENTS:,} characters and names: make it smaller")

    def _count_part(self, node: Node, repeated: int = 1) -> Node:
        """Count a part, and note how often what it has in it is repeated at most."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise self.error(f"the grammar has more than {MAX_PARTS:,} groups and repetitions: make it smaller")
        self._repeated[id(node)] = repeated * max(map(self._max_repeats, children(node)), default=1)
        return node

    def _max_repeats(self, node: Node) -> int:
        # Characters, tokens and names are not noted.
        return self._repeated.get(id(node), 1)

    def _choice(self, depth: int) -> Node:
        if depth > MAX_NESTED:
            raise self.error(f"groups are nested more than {MAX_NESTED} deep: give parts names")
        options = [self._sequence(depth)]
        while self._next() == "|":
            self._at += 1
            self._skip_space(newlines=True)
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else self._count_part(Choice(tuple(options)))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while self._next():
            found = self._item(depth)
            if found is not None:
                items.append(found)
            elif (counts := self._repeat_counts()) is not None:
                if not items:
                    raise self.error("nothing comes before this that could be repeated")
                least, most = counts
                items[-1] = self._count_part(Repeat(items[-1], least, most), most or max(least, 1))
                if self._max_repeats(items[-1]) > MAX_REPEATED:
                    raise self.error(f"more than {MAX_REPEATED:,} repetitions, those of groups in groups multiplied")
            else:
                break
            self._skip_space(newlines=depth > 0)
        return items[0] if len(items) == 1 else self._count_part(Sequence(tuple(items)))

    def _item(self, depth: int) -> Node | None:
        following = self._next()
        if following == '"':
            return self._literal()
        if following == "[":
            return self._class()
        if following and following in "<!":
            return self._token()
        if following == ".":
            self._at += 1
            self._count()
            return Chars(_drop_surrogates([(0, _LAST)]))
        if following == "(":
            self._at += 1
            self._skip_space(newlines=True)
            inside = self._choice(depth + 1)
            self._expect(")", "a closing parenthesis")
            return inside
        if _is_word(following):
            place = self._at
            name = self._name()
            self.references.setdefault(name, place)
            self._count()
            return Ref(name)
        return None

    def _literal(self) -> Node:
        self._at += 1
        chars: list[Node] = []
        while self._next() != '"':
            self._count()
            point = self._char()
            chars.append(Chars(((point, point),)))
        self._at += 1
        return chars[0] if len(chars) == 1 else self._count_part(Sequence(tuple(chars)))

    def _class(self) -> Node:
        place = self._at
        self._at += 1
        negated = self._next() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._next() != "]":
            self._count()
            first = last = self._char(surrogates=True)
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._char(surrogates=True)
            if last < first:
                raise self.error(f"the range from {chr(first)!r} to {chr(last)!r} is empty", place)
            ranges.append((first, last))
        self._at += 1
        found = _drop_surrogates(_negate(ranges) if negated else ranges)
        if not ranges or not found:
            raise self.error("no character is in this class", place)
        return Chars(found)

    def _char(self, *, surrogates: bool = False) -> int:
        place = self._at
        char = self._next()
        if not char:
            raise self.error("the grammar ends within quotes or brackets")
        self._at += 1
        if char != "\\":
            return ord(char)
        escape = self._next()
        self._at += 1
        if escape in _HEX_DIGITS:
            digits = self._text[self._at : self._at + _HEX_DIGITS[escape]]
            self._at += len(digits)
            if len(digits) < _HEX_DIGITS[escape] or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
                raise self.error(f"expected {_HEX_DIGITS[escape]} hexadecimal digits after \\{escape}", place)
            point = int(digits, 16)
            if point > _LAST or (not surrogates and _SURROGATES[0] <= point <= _SURROGATES[1]):
                raise self.error(f"\\{escape}{digits} is not a character", place)
            return point
        if not escape or escape not in _ESCAPES:
            raise self.error(f"\\{escape} is not known: write a character as it is, or as \\xXX or \\uXXXX", place)
        return ord(_ESCAPES[escape])

    def _token(self) -> Node:
        place = self._at
        negated = self._next() == "!"
        self._at += negated
        end = self._text.find(">", self._at)
        if self._next() != "<" or end < 0:
            raise self.error("expected a token in angle brackets", place)
        named = self._text[self._at : end + 1]
        self._at = end + 1
        self._count()
        try:
            return Token((self._token_of(named),), negated)
        except ConstraintError as error:
            raise self.error(str(error), place) from None

    def _repeat_counts(self) -> tuple[int, int | None] | None:
        place = self._at
        following = self._next()
        known: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if following in known:
            self._at += 1
            return known[following]
        if following != "{":
            return None
        end = self._text.find("}", self._at, self._at + 100)
        low, comma, high = (part.strip() for part in self._text[self._at + 1 : max(end, 0)].partition(","))
        if end < 0 or not low.isdecimal() or not low.isascii() or (high and not (high.isdecimal() and high.isascii())):
            raise self.error("expected {m}, {m,} or {m,n}", place)
        self._at = end + 1
        least, most = int(low), int(high) if high else None if comma else int(low)
        if least > MAX_REPEATED:
            raise self.error(f"{least:,} repetitions, and the most is {MAX_REPEATED:,}", place)
        if most is not None and most < least:
            raise self.error(f"from {least} to {most} repetitions is not a range", place)
        return least, most if most is None or most <= MAX_REPEATED else None


def _is_word(char: str) -> bool:
    return bool(char) and char.isascii() and (char.isalnum() or char in "-_")


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Sequence():
            return node.items
        case Choice():
            return node.options
        case Repeat():
            return (node.item,)
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all in it."""
    rest = [node]
    while rest:
        found = rest.pop()
        yield found
        rest += children(found)


def _negate(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found, start = [], 0
    for first, last in sorted(ranges):
        if start < first:
            found.append((start, first - 1))
        start = max(start, last + 1)
    return [*found, (start, _LAST)] if start <= _LAST else found


def _drop_surrogates(ranges: list[tuple[int, int]]) -> Ranges:
    return tuple(_negate([*_negate(ranges), _SURROGATES]))
