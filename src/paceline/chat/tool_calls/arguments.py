r"""Grammars of arguments, in each of the ways that families write them.

Where a family writes no JSON, a schema is followed as far as its ways reach: the names of properties, in the schema's
order, which of them are required, their types and enumerations. Lengths, patterns and what is within objects and
arrays is then left to the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from paceline.chat.tool_calls.base import ArgumentStyle
from paceline.chat.tool_calls.lark import LarkRules, as_schema, as_string
from paceline.core.errors import ConstraintError
from paceline.core.numbers import shown

_GEMMA_QUOTE: Final = '<|"|>'
# The library that reads Gemma's strings refuses these two.
_GEMMA_TEXT: Final = r"/[^\x01\x02]*/"
# What stands before a value, of its name and whether it is a text, and what stands behind.
_TAGS: Final[Mapping[ArgumentStyle, tuple[tuple[str, ...], str]]] = {
    "parameters": (("<parameter={}>",), "</parameter>"),
    "named": (('<parameter name="{}">',), "</parameter>"),
    "typed": (('<｜DSML｜parameter name="{}" string="{}">',), "</｜DSML｜parameter>"),
    "key-values": (("<arg_key>{}</arg_key>", "<arg_value>"), "</arg_value>"),
}
_LINE: Final = r"/\n?/"
# Spaces between a value and what separates it from the next.
_GAP: Final = "/[ ]?/"

_PYTHON_STRING: Final = (
    r"/\"([^\"\\\n\r\x00-\x1f]|\\[\\'\"\/bfnrt]|\\u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))*\""
    r"|'([^'\\\n\r\x00-\x1f]|\\[\\'\"\/bfnrt]|\\u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))*'/"
)
_INTEGER: Final = "/-?(0|[1-9][0-9]{0,14})/"
_NUMBER: Final = r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/"


# Where properties may be named besides ``properties``.
_ELSEWHERE: Final = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "patternProperties", "dependentSchemas", "dependencies"}
)


class _Property(NamedTuple):
    name: str
    schema: Mapping[str, Any]
    required: bool


class ArgumentRules:
    """Adds rules of arguments to a grammar.

    Args:
        rules: of the grammar.
    """

    def __init__(self, rules: LarkRules) -> None:
        self._rules = rules
        self._strict = True

    def add(self, name: str, style: ArgumentStyle, schema: Mapping[str, Any], *, strict: bool = True) -> None:
        """Add the rule of a tool's arguments.

        Args:
            name: of the rule.
            style: in which they are written.
            schema: of the tool's parameters.
            strict: refuse a schema that says what nothing can keep arguments to, instead of leaving that out.

        Raises:
            ConstraintError: it is no schema.
        """
        _check(schema, "#")
        self._strict = strict
        if style == "json":
            self._rules.add(name, as_schema({"type": "object", **_closed(schema), **schema}, strict=strict))
            return
        properties = _properties(schema)
        if style in _TAGS:
            self._add_tagged(name, properties, *_TAGS[style])
        elif style == "gemma":
            # As the family's templates sort them.
            properties = sorted(properties, key=lambda one: one.name.lower())
            self._add_list(f"{name}_list", properties, "{}:", ",", self._gemma_value)
            self._rules.add(name, f'"{{" {name}_list "}}"')
        else:
            self._add_list(name, properties, "{}=", ", ", self._python_value)

    def _add_tagged(self, name: str, properties: Sequence[_Property], before: Sequence[str], after: str) -> None:
        """Add arguments that each stand between tags, with line breaks where a model puts them."""
        parts: list[str] = []
        for one in properties:
            part = f"{name}_{len(parts)}"
            is_text = json.dumps(_is_raw(one.schema))
            start = f" {_LINE} ".join(self._rules.marks(text.format(one.name, is_text)) for text in before)
            self._rules.add(part, f"{start} {self._raw_value(part, one.schema, after)} {_LINE}")
            parts.append(part if one.required else f"{part}?")
        self._rules.add(name, f"{_LINE} {' '.join(parts)}")

    def _raw_value(self, name: str, schema: Mapping[str, Any], after: str) -> str:
        """Return the expression of a value that is written as it is if it is a text, with what follows it."""
        behind = f"{_LINE} {self._rules.marks(after)}"
        if values := _choices(schema):
            texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
            return f"{_LINE} ({' | '.join(map(as_string, texts))}) {behind}"
        if _may_be_text(schema):
            self._rules.add_until(f"{name}_value", after)
            return f"{name}_value"
        # Some models write Python's words.
        value = (
            '("true" | "false" | "True" | "False")'
            if _types(schema) == ["boolean"]
            else as_schema(schema, strict=self._strict)
        )
        return f"{_LINE} {value} {behind}"

    def _add_list(
        self,
        name: str,
        properties: Sequence[_Property],
        before: str,
        comma: str,
        value: Callable[[Mapping[str, Any]], str],
    ) -> None:
        """Add arguments with commas between: ``name_0`` has nothing before it, ``name_0c`` has."""
        for number, one in enumerate(properties):
            argument, first, behind = f"{name}_v{number}", f"{name}_{number}", f"{name}_{number + 1}"
            self._rules.add(argument, f"{self._rules.marks(before.format(one.name))} {value(one.schema)}")
            alone = "" if one.required else f" | {behind}"
            self._rules.add(first, f"{argument} {behind}c{alone}")
            follows = f"{as_string(comma)} {argument}"
            self._rules.add(f"{first}c", f"{follows} {behind}c" if one.required else f"({follows})? {behind}c")
        last = f"{name}_{len(properties)}"
        self._rules.add(last, "")
        self._rules.add(f"{last}c", "")
        self._rules.add(name, f"{name}_0")

    def _gemma_value(self, schema: Mapping[str, Any]) -> str:
        quote = self._rules.marks(_GEMMA_QUOTE)

        def text(value: str) -> str:
            return f"{quote} {as_string(value)} {quote}" if value else f"{quote} {quote}"

        if "gemma_value" not in self._rules:
            self._rules.add_until("gemma_rest", _GEMMA_QUOTE, _GEMMA_TEXT)
            self._rules.add("gemma_string", f"{quote} gemma_rest")
            self._rules.add("gemma_pair", '/[a-zA-Z_][a-zA-Z0-9_]*/ ":" gemma_value')
            self._rules.add("gemma_object", '"{" (gemma_pair ("," gemma_pair)*)? "}"')
            self._rules.add("gemma_array", '"[" (gemma_value ("," gemma_value)*)? "]"')
            self._rules.add(
                "gemma_value", f'gemma_string | {_NUMBER} | "true" | "false" | "null" | gemma_object | gemma_array'
            )
        kinds = {
            "string": "gemma_string",
            "integer": _INTEGER,
            "number": _NUMBER,
            "boolean": '("true" | "false")',
            "null": '"null"',
            "object": "gemma_object",
            "array": "gemma_array",
        }
        return _value(schema, kinds, "gemma_value", text, json.dumps)

    def _python_value(self, schema: Mapping[str, Any]) -> str:
        if "python_value" not in self._rules:
            self._rules.add("PYTHON_STRING", _PYTHON_STRING)
            self._rules.add("python_pair", f'PYTHON_STRING ":" {_GAP} python_value')
            self._rules.add("python_object", f'"{{" (python_pair ("," {_GAP} python_pair)*)? "}}"')
            self._rules.add("python_array", f'"[" (python_value ("," {_GAP} python_value)*)? "]"')
            self._rules.add(
                "python_value",
                f'PYTHON_STRING | {_NUMBER} | "True" | "False" | "None" | python_object | python_array',
            )
        kinds = {
            "string": "PYTHON_STRING",
            "integer": _INTEGER,
            "number": _NUMBER,
            "boolean": '("True" | "False")',
            "null": '"None"',
            "object": "python_object",
            "array": "python_array",
        }
        return _value(schema, kinds, "python_value", lambda value: as_string(as_string(value)), repr)


def _check(schema: Mapping[str, Any], place: str) -> None:
    """Refuse what is no schema, as far as schemas are read here; llguidance looks at the rest."""
    for keyword, (fits, what) in _FORMS.items():
        value = schema.get(keyword)
        if value is not None and not fits(value):
            raise ConstraintError(f"{place}/{keyword}: {shown(value)} is no {what}: give one, or leave the keyword out")
    parts = [(f"properties/{name}", part) for name, part in (schema.get("properties") or {}).items()]
    for union in ("anyOf", "oneOf"):
        parts += [(f"{union}/{number}", part) for number, part in enumerate(schema.get(union) or ())]
    for name, part in parts:
        if isinstance(part, Mapping):
            _check(part, f"{place}/{name}")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_FORMS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "properties": (lambda value: isinstance(value, Mapping), "object of schemas"),
    "required": (_is_texts, "list of names"),
    "type": (lambda value: isinstance(value, str) or _is_texts(value), "type or list of types"),
    "enum": (lambda value: isinstance(value, list), "list of values"),
    "anyOf": (lambda value: isinstance(value, list), "list of schemas"),
    "oneOf": (lambda value: isinstance(value, list), "list of schemas"),
}


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return what keeps a model from arguments that a function does not name, if its schema names them all.

    A schema alone allows any others, which weak models invent and programs do not expect.
    """
    names = schema.get("properties") or {}
    all_named = _ELSEWHERE.isdisjoint(schema) and all(name in names for name in schema.get("required") or ())
    return {"additionalProperties": False} if all_named else {}


def _properties(schema: Mapping[str, Any]) -> list[_Property]:
    """Return a schema's properties, each with the definitions that it may refer to."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    required = schema.get("required") or ()
    properties = schema.get("properties") or {}
    return [
        _Property(name, {**shared, **(one if isinstance(one, Mapping) else {})}, name in required)
        for name, one in properties.items()
    ]


def _types(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the types that a schema allows; ``None`` for any."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return [declared]
    if isinstance(declared, list) and declared:
        return [str(one) for one in declared]
    for union in ("anyOf", "oneOf"):
        choices = [_types(one) if isinstance(one, Mapping) else None for one in schema.get(union) or ()]
        if choices:
            found = [one for one in choices if one is not None]
            return [kind for one in found for kind in one] if len(found) == len(choices) else None
    return None


def _choices(schema: Mapping[str, Any]) -> Sequence[Any]:
    """Return the values that a schema lists; none where it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum") or ()


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Return whether a value may be a text, which then needs no quotes."""
    types = _types(schema)
    # What a reference stands for is not looked up: llguidance does that.
    return "string" in types if types is not None else "$ref" not in schema


def _is_raw(schema: Mapping[str, Any]) -> bool:
    """Return whether all values are texts, or may be."""
    values = _choices(schema)
    return all(isinstance(value, str) for value in values) if values else _may_be_text(schema)


def _value(
    schema: Mapping[str, Any],
    kinds: Mapping[str, str],
    any_kind: str,
    text: Callable[[str], str],
    scalar: Callable[[Any], str],
) -> str:
    """Return the expression of a value in a way of writing that has an expression for each type."""
    if values := _choices(schema):
        return f"({' | '.join(text(one) if isinstance(one, str) else as_string(scalar(one)) for one in values)})"
    types = _types(schema)
    if types is None or any(one not in kinds for one in types):
        return any_kind
    return f"({' | '.join(kinds[one] for one in dict.fromkeys(types))})"
