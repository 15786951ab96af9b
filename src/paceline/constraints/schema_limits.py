"""What of a JSON schema is looked at before llguidance compiles it, and where in it an error is.

llguidance bounds most of what a schema may cost by itself. What is bounded here was measured to take it minutes, or
to take more stack than there is, which ends the process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, TypeAlias

from paceline.core.errors import ConstraintError

Path: TypeAlias = tuple[str, ...]
"""Keys from the whole schema to a part of it."""

MOST_NESTED = 100
"""Levels of JSON; llguidance reads 120."""

MOST_SUBSCHEMAS = 10_000
"""Each may take 14 kB of stack if they refer to one another in a row, of :data:`~.bounded.STACK_BYTES`."""

MOST_OPTIONAL = 2_000
"""Optional properties of one object: the time goes with their square, and is 0.3 s for so many."""

MOST_PATTERNS = 100
"""``patternProperties`` of all objects together: any two of an object are compared, in 0.25 s for so many."""

MOST_JOINED = 256
"""Alternatives that ``allOf`` and ``$ref`` make of those of ``anyOf`` in them: 1,024 take 2 s for one mask."""

_JOINED_DEEP = 10
"""Levels of ``allOf`` and ``$ref`` that are looked at for them."""

MOST_PATTERN = 8_000
"""Characters of a pattern: the memory goes with their square, and is 4 MB for so many."""

MOST_LETTERS = 128_000
"""Characters of all patterns."""

MOST_MULTIPLE = 100_000
"""``multipleOf`` as a number of its last digit's units: each is a state of an automaton, 0.25 s for so many."""

_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_JOINING = ("allOf", "anyOf", "oneOf", "$ref")

_WORDS = re.compile(r"[\w$./:#-]{2,}")


def check_schema(schema: Any) -> None:
    """Refuse what would take llguidance too long, or what it would take for more than a schema.

    Raises:
        ConstraintError: the schema is too large or too deep, or has a ``multipleOf`` that is too large.
    """
    _check_nesting(schema)
    if not isinstance(schema, dict | bool):
        raise ConstraintError("a JSON schema is an object, true or false, and this is neither")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ConstraintError("x-guidance in a JSON schema is not supported: leave it out")
    multiples: dict[Fraction, Path] = {}
    num_patterns = num_letters = 0
    alternatives = _Alternatives(schema)
    joining = False
    for i, (path, part) in enumerate(subschemas(schema)):
        if i >= MOST_SUBSCHEMAS:
            raise ConstraintError(f"the JSON schema has more than {MOST_SUBSCHEMAS:,} parts: make it smaller")
        num_patterns += len(_mapping(part.get("patternProperties")))
        if num_patterns > MOST_PATTERNS:
            raise ConstraintError(
                f"{said(path)}: the JSON schema has more than {MOST_PATTERNS} patternProperties: leave some out"
            )
        for pattern in (*_mapping(part.get("patternProperties")), part.get("pattern")):
            num_letters += len(pattern) if isinstance(pattern, str) else 0
            if num_letters > MOST_LETTERS or (isinstance(pattern, str) and len(pattern) > MOST_PATTERN):
                raise ConstraintError(
                    f"{said(path)}: a pattern has more than {MOST_PATTERN:,} characters, or all together more than "
                    f"{MOST_LETTERS:,}: leave some out"
                )
        properties, required = _mapping(part.get("properties")), part.get("required")
        num_required = len(required) if isinstance(required, list) else 0
        if len(properties) - num_required > MOST_OPTIONAL:
            raise ConstraintError(
                f"{said(path)}: {len(properties) - num_required:,} optional properties, and the most is "
                f"{MOST_OPTIONAL:,}: list more under required"
            )
        if isinstance(part.get("multipleOf"), int | float) and not isinstance(part["multipleOf"], bool):
            multiples.setdefault(Fraction(str(part["multipleOf"])), path)
        joining = joining or any(key in part for key in _JOINING)
        if alternatives.multiplied(part) > MOST_JOINED:
            raise ConstraintError(
                f"{said(path)}: allOf would join more than {MOST_JOINED} alternatives of anyOf and oneOf: "
                "write out those that are wanted"
            )
    _check_multiples(multiples, joining)


def subschemas(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a schema and all in it that are schemas themselves, each with where it is."""
    rest: list[tuple[Path, Any]] = [((), schema)]
    while rest:
        path, part = rest.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        inner: list[tuple[Path, Any]] = [((*path, key), part[key]) for key in _ONE if key in part]
        for key in _LISTS:
            if isinstance(part.get(key), list):
                inner += [((*path, key, str(i)), each) for i, each in enumerate(part[key])]
        for key in _MAPPINGS:
            inner += [((*path, key, name), each) for name, each in _mapping(part.get(key)).items()]
        rest += reversed(inner)


def place_of(reason: str, schema: Any) -> str:
    """Return where in a schema what an error names stands, as a JSON pointer; empty where nothing does."""
    words = set(_WORDS.findall(reason))
    for path, part in subschemas(schema):
        for key, value in part.items():
            named = value in words if isinstance(value, str) else False
            if (named and key in ("type", "format", "$ref", "pattern")) or (key in words and key not in _MAPPINGS):
                return said((*path, key))
            if (
                isinstance(value, str)
                and key in ("pattern", "$ref")
                and value.lstrip("#")
                and value.lstrip("#") in reason
            ):
                return said((*path, key))
            if key == "required" and isinstance(value, list) and any(f"'{name}'" in reason for name in value):
                return said((*path, key))
            if value == [] and f"{key} is empty" in reason:
                return said((*path, key))
    return ""


def said(path: Path) -> str:
    """Return a JSON pointer of at most 80 characters."""
    pointer = "#" + "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in path)
    return pointer if len(pointer) <= 80 else f"{pointer[:40]}...{pointer[-37:]}"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


class _Alternatives:
    """How many alternatives parts of a schema have once those of what they join are multiplied with one another."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._known: dict[tuple[int, int], tuple[int, bool]] = {}

    def multiplied(self, part: dict[str, Any]) -> int:
        """Return the alternatives of a part; 1 where none are multiplied with others."""
        number, is_product = self._of(part, 0)
        return number if is_product else 1

    def _of(self, part: Any, depth: int) -> tuple[int, bool]:
        if not isinstance(part, dict) or depth > _JOINED_DEEP:
            return 1, False
        key = id(part), depth
        if key not in self._known:
            others = (*_listed(part.get("allOf")), self._target(part.get("$ref")))
            joined = [self._of(other, depth + 1) for other in others]
            own = [len(_listed(part.get(keyword))) for keyword in ("anyOf", "oneOf")]
            factors = [factor for factor in (*own, *(number for number, _ in joined)) if factor > 1]
            is_product = len(factors) > 1 or any(inner for _, inner in joined)
            self._known[key] = min(math.prod(factors), MOST_JOINED + 1), is_product
        return self._known[key]

    def _target(self, ref: Any) -> Any:
        if not isinstance(ref, str) or not ref.startswith("#/"):
            return None
        found = self._schema
        for key in ref[2:].split("/"):
            if not isinstance(found, dict):
                return None
            found = found.get(key.replace("~1", "/").replace("~0", "~"))
        return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _check_nesting(schema: Any) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MOST_NESTED:
            raise ConstraintError(
                f"the JSON schema is nested more than {MOST_NESTED} levels deep: "
                "name its parts under $defs and refer to them"
            )
        below: list[Any] = []
        for value in level:
            below += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        level = below


def _check_multiples(multiples: dict[Fraction, Path], joining: bool) -> None:
    """Check each number, and where parts may be joined their least common multiple too."""
    for multiple, path in multiples.items():
        if abs(multiple) > MOST_MULTIPLE or multiple.numerator > MOST_MULTIPLE:
            raise ConstraintError(
                f"{said((*path, 'multipleOf'))}: {float(multiple):g}, and the most is {MOST_MULTIPLE:,}: "
                "leave it out, or say it by a pattern"
            )
    if joining and len(multiples) > 1:
        unit = math.lcm(*(multiple.denominator for multiple in multiples))
        whole = [int(abs(multiple) * unit) for multiple in multiples]
        if math.lcm(*whole) > MOST_MULTIPLE * math.gcd(*whole):
            places = " and ".join(said((*path, "multipleOf")) for path in list(multiples.values())[:2])
            raise ConstraintError(
                f"{places}: numbers whose least common multiple is more than {MOST_MULTIPLE:,} may be joined here: "
                "leave some out"
            )
