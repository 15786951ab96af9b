"""Bounds what a JSON schema may cost, before llguidance compiles it.

llguidance bounds most of what a schema may cost by itself. What is bounded here was measured to take it minutes, or
to take more stack than there is, which ends the process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from paceline.constraints.schema_parts import (
    Path,
    References,
    as_list,
    as_mapping,
    is_number,
    iter_subschemas,
    shorten_pointer,
)
from paceline.core.errors import ConstraintError

MAX_BYTES = 512 << 10
"""Bytes of a source, whatever it is."""

MAX_NESTED = 100
"""Levels of JSON; llguidance reads 120."""

MAX_SUBSCHEMAS = 10_000
"""Each may take 14 kB of stack where they refer to one another in a row (``core.deep_stack.STACK_BYTES``)."""

MAX_OPTIONAL = 2_000
"""Optional properties of one object: the time goes with their square, and is 0.3 s for so many."""

MAX_PATTERNS = 100
"""``patternProperties`` of all objects together: any two of an object are compared, in 0.25 s for so many."""

MAX_JOINED = 256
"""Alternatives that ``allOf`` and ``$ref`` make of those of ``anyOf`` in them: 1,024 take 2 s for one mask."""

_JOINED_DEEP = 10
"""Levels of ``allOf`` and ``$ref`` that are looked at for them."""

MAX_PATTERN = 8_000
"""Characters of a pattern: the memory goes with their square, and is 4 MB for so many."""

MAX_LETTERS = 128_000
"""Characters of all patterns."""

MAX_MULTIPLE = 100_000
"""All different ``multipleOf`` together, each as a number of its last digit's units: each of these is a state of an
automaton, 0.4 s for so many. Where they differ, twice as many take 1.5 s."""

_JOINING = ("allOf", "anyOf", "oneOf", "$ref")


class SchemaBudget:
    """How much the schemas of one source may take, together."""

    def __init__(self) -> None:
        self._num_parts = self._num_patterns = self._num_letters = 0
        self._multiples: set[Fraction] = set()

    def take(self, schema: Any) -> None:
        """Count a schema in; an error where they take too much with this one, or it is none."""
        check_size(schema, "the JSON schema")
        _check_nesting(schema)
        if not isinstance(schema, dict | bool):
            raise ConstraintError("a JSON schema is an object, true or false, and this is neither")
        if isinstance(schema, dict) and "x-guidance" in schema:
            raise ConstraintError("x-guidance in a JSON schema is not supported: leave it out")
        own: dict[Fraction, Path] = {}
        joining = False
        parts = self._count_parts(schema)
        for path, part in parts:
            self._take_patterns(path, part)
            properties = as_mapping(part.get("properties"))
            num_optional = len(properties) - len(as_list(part.get("required")))
            if num_optional > MAX_OPTIONAL:
                raise ConstraintError(
                    f"{shorten_pointer(path)}: {num_optional:,} optional properties, and the most is {MAX_OPTIONAL:,}: "
                    "list more under required"
                )
            multiple = part.get("multipleOf")
            if is_number(multiple):
                own.setdefault(Fraction(str(multiple)), path)
            joining = joining or any(key in part for key in _JOINING)
        alternatives = _AlternativeCounter(References(schema, parts))
        for path, part in parts:
            if alternatives.count_multiplied(part) > MAX_JOINED:
                raise ConstraintError(
                    f"{shorten_pointer(path)}: allOf would join more than {MAX_JOINED} alternatives of anyOf and "
                    "oneOf: write out those that are wanted"
                )
        if joining:
            _check_joined(own)
        self._take_multiples(own)

    def _count_parts(self, schema: Any) -> list[tuple[Path, dict[str, Any]]]:
        most = MAX_SUBSCHEMAS - self._num_parts
        parts = list(itertools.islice(iter_subschemas(schema), most + 1))
        if len(parts) > most:
            raise ConstraintError(f"the JSON schema has more than {MAX_SUBSCHEMAS:,} parts: make it smaller")
        self._num_parts += len(parts)
        return parts

    def _take_patterns(self, path: Path, part: dict[str, Any]) -> None:
        patterns = as_mapping(part.get("patternProperties"))
        self._num_patterns += len(patterns)
        if self._num_patterns > MAX_PATTERNS:
            raise ConstraintError(
                f"{shorten_pointer(path)}: the JSON schema has more than {MAX_PATTERNS} patternProperties: leave some "
                "out"
            )
        for pattern in (*patterns, part.get("pattern")):
            num_letters = len(pattern) if isinstance(pattern, str) else 0
            self._num_letters += num_letters
            if num_letters > MAX_PATTERN or self._num_letters > MAX_LETTERS:
                raise ConstraintError(
                    f"{shorten_pointer(path)}: a pattern has more than {MAX_PATTERN:,} characters, or all together "
                    f"more than {MAX_LETTERS:,}: leave some out"
                )

    def _take_multiples(self, own: dict[Fraction, Path]) -> None:
        for multiple, path in own.items():
            if abs(multiple) > MAX_MULTIPLE or abs(multiple.numerator) > MAX_MULTIPLE:
                raise ConstraintError(
                    f"{shorten_pointer((*path, 'multipleOf'))}: {_shorten_number(multiple)}, and the most is "
                    f"{MAX_MULTIPLE:,}: leave it out, or say it by a pattern"
                )
            self._multiples.add(multiple)
            if sum(abs(each.numerator) for each in self._multiples) > MAX_MULTIPLE:
                raise ConstraintError(
                    f"{shorten_pointer((*path, 'multipleOf'))}: with this number, all different ones come to more than "
                    f"{MAX_MULTIPLE:,} units of their last digits: leave some out"
                )


class _AlternativeCounter:
    """How many alternatives parts of a schema have once those of what they join are multiplied with one another."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._known: dict[tuple[int, int], tuple[int, bool]] = {}

    def count_multiplied(self, part: dict[str, Any]) -> int:
        """Return the alternatives of a part; 1 where none are multiplied with others."""
        number, is_product = self._count(part, 0)
        return number if is_product else 1

    def _count(self, part: Any, depth: int) -> tuple[int, bool]:
        if not isinstance(part, dict) or depth > _JOINED_DEEP:
            return 1, False
        key = id(part), depth
        if key not in self._known:
            joined = [self._count(other, depth + 1) for other in as_list(part.get("allOf"))]
            meant = [self._count(other, depth + 1) for other in self._references.targets(part.get("$ref"))]
            joined += [max(meant)] if meant else []
            own = [len(as_list(part.get(keyword))) for keyword in ("anyOf", "oneOf")]
            factors = [factor for factor in (*own, *(number for number, _ in joined)) if factor > 1]
            is_product = len(factors) > 1 or any(inner for _, inner in joined)
            self._known[key] = min(math.prod(factors), MAX_JOINED + 1), is_product
        return self._known[key]


def _check_nesting(schema: Any) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_NESTED:
            raise ConstraintError(
                f"the JSON schema is nested more than {MAX_NESTED} levels deep: "
                "name its parts under $defs and refer to them"
            )
        below: list[Any] = []
        for value in level:
            below += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        level = below


def check_size(value: Any, name: str) -> None:
    """Refuse JSON that is plainly too large, before it is written out: no other thread runs meanwhile.

    Args:
        value: the JSON, or what is to be written as such.
        name: what it is, for messages.

    Raises:
        ConstraintError: it has more bytes than a source may have.
    """
    left = MAX_BYTES
    rest, known = [value], set[int]()
    while rest:
        one = rest.pop()
        is_mapping = not isinstance(one, str | int | float | None) and isinstance(one, Mapping)
        left -= len(one) if is_mapping or isinstance(one, str | list | tuple) else 1
        if left < 0:
            raise ConstraintError(f"{name} has too many bytes, and the most is {MAX_BYTES:,}: make it smaller")
        if (is_mapping or isinstance(one, list | tuple)) and id(one) not in known:
            # What holds itself is for those to find who write it out.
            known.add(id(one))
            rest += (*one, *one.values()) if is_mapping else one


def _shorten_number(number: Fraction) -> str:
    return f"{float(number):g}" if abs(number) < 10**300 else "a number of more than 300 digits"


def _check_joined(multiples: dict[Fraction, Path]) -> None:
    """Check the least common multiple of numbers that may be joined."""
    if len(multiples) < 2:
        return
    unit = math.lcm(*(multiple.denominator for multiple in multiples))
    whole = [int(abs(multiple) * unit) for multiple in multiples]
    if math.lcm(*whole) > MAX_MULTIPLE * math.gcd(*whole):
        places = " and ".join(shorten_pointer((*path, "multipleOf")) for path in list(multiples.values())[:2])
        raise ConstraintError(
            f"{places}: numbers whose least common multiple is more than {MAX_MULTIPLE:,} may be joined here: "
            "leave some out"
        )
