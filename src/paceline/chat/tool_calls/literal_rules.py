"""Rules of values in the notations of Gemma and of Python's calls, which follow a schema all the way down."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from paceline.chat.tool_calls.lark_rules import ANY_TEXT, LarkRules, as_schema, as_string
from paceline.chat.tool_calls.parameter_schema import Parameter, ParameterSchema, Schema, choices, own_types
from paceline.chat.tool_calls.text_patterns import text_pattern
from paceline.constraints.schema_parts import as_list, is_number
from paceline.core.errors import ConstraintError

Notation = Literal["gemma", "python"]

GEMMA_QUOTE: Final = '<|"|>'
"""Stands before a text in Gemma's notation, and behind it."""

# The library that reads Gemma's strings refuses these two.
_GEMMA_TEXT: Final = r"/[^\x01\x02]*/"
_GEMMA_BARE: Final = re.compile(r'[^\s{}\[\],:"<>\x01\x02]+')
_GEMMA_KEY: Final = r"/[a-zA-Z_][a-zA-Z0-9_]*/"
# Spaces between a value and what separates it from the next.
_GAP: Final = "/[ ]?/"
_PYTHON_STRING: Final = (
    r"/\"([^\"\\\n\r\x00-\x1f]|\\[\\'\"\/bfnrt]|\\u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))*\""
    r"|'([^'\\\n\r\x00-\x1f]|\\[\\'\"\/bfnrt]|\\u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))*'/"
)
_INTEGER: Final = "/-?(0|[1-9][0-9]{0,14})/"
_NUMBER: Final = r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/"
_LARGEST: Final = 10**15 - 1
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TEXT: Final = ("minLength", "maxLength", "pattern", "format", "allOf")
_WORDS: Final[Mapping[Notation, Mapping[bool | None, str]]] = {
    "gemma": {True: "true", False: "false", None: "null"},
    "python": {True: "True", False: "False", None: "None"},
}

_MAX_RULES: Final = 4_000
_MAX_ITEMS: Final = 1_000


class LiteralRules:
    """Adds the rules of one function's values to a grammar.

    Args:
        rules: of the grammar.
        notation: in which values are written.
        known: the schema of the function's parameters.
        name: what the names of the rules begin with.
        strict: refuse what nothing can keep a value to, instead of leaving that out.
    """

    def __init__(
        self, rules: LarkRules, notation: Notation, known: ParameterSchema, name: str, *, strict: bool
    ) -> None:
        self._rules = rules
        self._notation: Notation = notation
        self._known = known
        self._name = name
        self._strict = strict
        self._named: dict[str, str] = {}
        self._words = _WORDS[notation]
        self._comma = '","' if notation == "gemma" else f'"," {_GAP}'
        self._any = self._add_any()

    def add_list(
        self,
        name: str,
        parameters: Sequence[Parameter],
        key: Callable[[str], str],
        comma: str,
        rest: str = "",
    ) -> None:
        """Add a list of named values with commas between: ``name_0`` has nothing before it, ``name_0c`` has.

        Args:
            name: of its rule.
            parameters: in their order.
            key: returns the expression of a name and what separates it from its value.
            comma: the expression of a comma.
            rest: the expression of one more, of any other name; empty where there are none.
        """
        for number, one in enumerate(parameters):
            value, first, behind = f"{name}_v{number}", f"{name}_{number}", f"{name}_{number + 1}"
            self._rules.add(value, f"{key(one.name)} {self.value(one.schema)}")
            alone = "" if one.required else f" | {behind}"
            self._rules.add(first, f"{value} {behind}c{alone}")
            follows = f"{comma} {value}"
            self._rules.add(f"{first}c", f"{follows} {behind}c" if one.required else f"({follows})? {behind}c")
        last = f"{name}_{len(parameters)}"
        self._rules.add(last, f"({rest} ({comma} {rest})*)?" if rest else "")
        self._rules.add(f"{last}c", f"({comma} {rest})*" if rest else "")
        self._rules.add(name, f"{name}_0")

    def key(self, name: str) -> str:
        """Return the expression of a name in an object, and what separates it from its value."""
        if self._notation == "python":
            return f'{as_string(as_string(name))} ":" {_GAP}'
        return f'{self._rules.marks(gemma_key(name))} ":"'

    def value(self, schema: Any) -> str:
        found = dict.fromkeys(one for branch in self._known.branches(schema) for one in self._kinds(branch))
        return f"({' | '.join(found)})" if found else self._any

    def ordered(self, parameters: Sequence[Parameter]) -> Sequence[Parameter]:
        """Return what an object names in the order in which models write it: Gemma's templates sort names."""
        if self._notation == "gemma":
            return sorted(parameters, key=lambda one: one.name.lower())
        return parameters

    def _kinds(self, branch: Schema) -> list[str]:
        types = own_types(branch)
        if values := choices(branch):
            return [self._literal(one) for one in values]
        if types is None:
            # Of any type, as far as the standard is asked; what is meant is plain.
            is_array = "items" in branch or "prefixItems" in branch
            types = ["object"] if "properties" in branch else ["array"] if is_array else ["any"]
        return [self._kind(branch, kind) for kind in types]

    def _kind(self, branch: Schema, kind: str) -> str:
        match kind:
            case "string":
                return self._text(branch)
            case "integer" | "number":
                return self._number(branch, kind)
            case "boolean":
                return f'"{self._words[True]}" | "{self._words[False]}"'
            case "null":
                return f'"{self._words[None]}"'
            case "object":
                return self._rule(branch, kind, self._object)
            case "array":
                return self._rule(branch, kind, self._array)
            case _:
                return self._any

    def _rule(self, branch: Schema, kind: str, add: Callable[[str, Schema], None]) -> str:
        """Return the name of the rule of an object or array; what has itself as a part has its rule as one."""
        said = f"{kind} {json.dumps(branch, sort_keys=True)}"
        if said not in self._named:
            if len(self._named) >= _MAX_RULES:
                raise ConstraintError(f"its parts come to more than {_MAX_RULES:,} objects and arrays: make it smaller")
            name = self._named[said] = f"{self._name}_p{len(self._named)}"
            add(name, branch)
        return self._named[said]

    def _number(self, branch: Schema, kind: str) -> str:
        bounds = {key: branch[key] for key in _BOUNDS if key in branch}
        if not bounds:
            return _INTEGER if kind == "integer" else _NUMBER
        # What is read back has no more digits than these.
        if not any(_above(bounds.get(key)) for key in ("minimum", "exclusiveMinimum")):
            bounds["maximum"] = min(_number(bounds.get("maximum"), _LARGEST), _LARGEST)
        if not any(_above(-_number(bounds.get(key), 0)) for key in ("maximum", "exclusiveMaximum")):
            bounds["minimum"] = max(_number(bounds.get("minimum"), -_LARGEST), -_LARGEST)
        return as_schema({"type": kind, **bounds}, "none", strict=self._strict)

    def _text(self, branch: Schema) -> str:
        said = {key: branch[key] for key in _OF_TEXT if key in branch}
        if "pattern" in said:
            # One that stands beside a format says the same, in a way that may not fit the other to the letter.
            said.pop("format", None)
        if self._notation == "python":
            return as_schema({"type": "string", **said}, "none", strict=self._strict) if said else "PYTHON_STRING"
        pattern = text_pattern(said, strict=self._strict)
        if pattern == ANY_TEXT:
            return "gemma_string"
        name = self._rule(
            said, "string", lambda name, _: self._rules.add_until(name, GEMMA_QUOTE, f"{_GEMMA_TEXT} & {pattern}")
        )
        return f"{self._rules.marks(GEMMA_QUOTE)} {name}"

    def _object(self, name: str, branch: Schema) -> None:
        parameters = self.ordered(self._known.parameters(branch))
        more = branch.get("additionalProperties", not parameters)
        if not parameters and more in (True, {}):
            self._rules.add(name, f"{self._notation}_object")
            return
        rest = "" if more is False else f"{self._other_key(name, parameters)} {self.value(more)}"
        if rest:
            self._rules.add(f"{name}_more", rest)
        self.add_list(f"{name}_list", parameters, self.key, self._comma, f"{name}_more" if rest else "")
        self._rules.add(name, f'"{{" {name}_list "}}"')

    def _other_key(self, name: str, parameters: Sequence[Parameter]) -> str:
        if self._notation == "python":
            return f'PYTHON_STRING ":" {_GAP}'
        taken = [one.name for one in parameters if re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", one.name)]
        if not taken:
            return f'{_GEMMA_KEY} ":"'
        terminal = f"{name.upper()}_KEY"
        self._rules.add(terminal, f"{_GEMMA_KEY} & ~/{'|'.join(taken)}/")
        return f'{terminal} ":"'

    def _array(self, name: str, branch: Schema) -> None:
        firsts = as_list(branch.get("prefixItems")) or as_list(branch.get("items"))
        others = branch.get("additionalItems") if isinstance(branch.get("items"), list) else branch.get("items")
        least, most = _count(branch.get("minItems"), 0), _count(branch.get("maxItems"), None)
        heads = [self.value(one) for one in firsts[:most]]
        other = "" if others is False or most == len(heads) else self.value({} if others is None else others)
        left = max(least - len(heads), 0), None if most is None else max(most - len(heads), 0)
        if heads:
            tail = _repeat(f"{self._comma} {other}", *left) if other else ""
            for number in range(len(heads) - 1, -1, -1):
                tail = f"{heads[number]} {tail}"
                tail = f"{self._comma} {tail}" if number else tail
                tail = tail if number < least else f"({tail})?"
        elif not other:
            tail = ""
        else:
            more = None if left[1] is None else left[1] - 1
            tail = f"{other} {_repeat(f'{self._comma} {other}', max(left[0] - 1, 0), more)}"
            tail = tail if least else f"({tail})?"
        self._rules.add(name, f'"[" {tail} "]"')

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            if self._notation == "python":
                return as_string(as_string(value))
            quote = self._rules.marks(GEMMA_QUOTE)
            return f"{quote} {as_string(value)} {quote}" if value else f"{quote} {quote}"
        if isinstance(value, bool) or value is None:
            return as_string(self._words[value])
        if isinstance(value, list):
            inner = f" {self._comma} ".join(map(self._literal, value))
            return f'("[" {inner} "]")'
        if isinstance(value, dict):
            inner = f" {self._comma} ".join(f"{self.key(key)} {self._literal(one)}" for key, one in value.items())
            return f'("{{" {inner} "}}")'
        return as_string(json.dumps(value))

    def _add_any(self) -> str:
        """Add the rules of values of which nothing is known, once for all functions, and return their name."""
        name, rules = f"{self._notation}_value", self._rules
        if name in rules:
            return name
        if self._notation == "gemma":
            rules.add_until("gemma_rest", GEMMA_QUOTE, _GEMMA_TEXT)
            rules.add("gemma_string", f"{rules.marks(GEMMA_QUOTE)} gemma_rest")
            text, pair = "gemma_string", f'{_GEMMA_KEY} ":" gemma_value'
        else:
            rules.add("PYTHON_STRING", _PYTHON_STRING)
            text, pair = "PYTHON_STRING", f'PYTHON_STRING ":" {_GAP} python_value'
        rules.add(f"{self._notation}_pair", pair)
        for kind, inner, (start, end) in (("object", f"{self._notation}_pair", "{}"), ("array", name, "[]")):
            rules.add(f"{self._notation}_{kind}", f'"{start}" ({inner} ({self._comma} {inner})*)? "{end}"')
        words = " | ".join(f'"{word}"' for word in self._words.values())
        rules.add(name, f"{text} | {_NUMBER} | {words} | {self._notation}_object | {self._notation}_array")
        return name


def gemma_key(name: str) -> str:
    """Return a name as Gemma's notation has it before a value: as it is, or in its quotes where it would not end."""
    return name if _GEMMA_BARE.fullmatch(name) else f"{GEMMA_QUOTE}{name}{GEMMA_QUOTE}"


def _repeat(expression: str, least: int, most: int | None) -> str:
    if least > _MAX_ITEMS or (most is not None and most > _MAX_ITEMS):
        least, most = min(least, _MAX_ITEMS), None
    if most is None:
        return f"({expression}){{{least},}}" if least else f"({expression})*"
    return f"({expression}){{{least},{most}}}" if most else ""


def _count(value: Any, default: Any) -> Any:
    return int(value) if is_number(value) and value >= 0 else default


def _number(value: Any, default: int) -> Any:
    return value if is_number(value) else default


def _above(value: Any) -> bool:
    return bool(_number(value, 0) > _LARGEST)
