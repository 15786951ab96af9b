r"""Grammars of arguments, in each of the ways that families write them.

Where a family writes no JSON, a schema is followed as far as its ways reach: the names of properties, in the schema's
order, which of them are required, their types, enumerations, bounds, lengths and patterns. Keywords that llguidance
keeps to and that are not followed there are ``patternProperties``, and what ``minProperties`` counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paceline.chat.tool_calls.base import ArgumentStyle
from paceline.chat.tool_calls.lark_rules import ANY_TEXT, LarkRules, as_schema, as_string, exclude_text
from paceline.chat.tool_calls.literal_rules import GEMMA_QUOTE, LiteralRules, gemma_key
from paceline.chat.tool_calls.parameter_schema import Parameter, ParameterSchema, Schema, choices, own_types
from paceline.chat.tool_calls.text_patterns import text_pattern
from paceline.constraints.schema_parts import iter_standard_subschemas, shorten_pointer
from paceline.constraints.schema_preparation import list_places, prepare_schema
from paceline.core.errors import ConstraintError
from paceline.core.numbers import shown

TAGS: Final[Mapping[ArgumentStyle, tuple[tuple[str, ...], str]]] = {
    "parameters": (("<parameter={}>",), "</parameter>"),
    "named": (('<parameter name="{}">',), "</parameter>"),
    "typed": (('<｜DSML｜parameter name="{}" string="{}">',), "</｜DSML｜parameter>"),
    "key-values": (("<arg_key>{}</arg_key>", "<arg_value>"), "</arg_value>"),
}
"""What stands before a value, of its name and whether it is a text, and what stands behind."""

_LINE: Final = r"/\n?/"
# Some models write Python's words.
_BOOLEAN: Final = '("true" | "false" | "True" | "False")'

# Where properties may be named besides ``properties``.
_ELSEWHERE: Final = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "patternProperties", "dependentSchemas", "dependencies"}
)


class ArgumentRules:
    """Adds rules of arguments to a grammar."""

    def __init__(self, rules: LarkRules) -> None:
        self._rules = rules

    def add(self, name: str, style: ArgumentStyle, schema: Schema, *, strict: bool = True) -> Sequence[str]:
        """Add the rule of a tool's arguments, and return the names of those that stand in no JSON.

        Unless ``strict``, what nothing can keep arguments to is left out of the schema; else it is refused.
        """
        _check(schema)
        if style == "json":
            self._rules.add(name, as_schema({"type": "object", **_close_schema(schema), **schema}, strict=strict))
            return ()
        ready = prepare_schema(json.loads(json.dumps(schema)), strict=strict)
        if strict and style not in TAGS:
            _check_enforceable(schema)
        known = ParameterSchema(ready.schema)
        variants = known.variants or [[]]
        names: dict[str, None] = {}
        rules = [name] if len(variants) == 1 else [f"{name}_o{number}" for number in range(len(variants))]
        for rule, parameters in zip(rules, variants, strict=True):
            names.update((one.name, None) for one in parameters)
            if style in TAGS:
                self._add_tagged(rule, style, known, parameters, strict=strict)
                continue
            literals = LiteralRules(
                self._rules, "gemma" if style == "gemma" else "python", known, f"{rule}_l", strict=strict
            )
            ordered = literals.ordered(parameters)
            if style == "gemma":
                literals.add_list(f"{rule}_list", ordered, literals.key, '","')
                self._rules.add(rule, f'"{{" {rule}_list "}}"')
            else:
                literals.add_list(rule, ordered, lambda one: as_string(f"{one}="), '", "')
        if len(rules) > 1:
            self._rules.add(name, " | ".join(rules))
        return list(names)

    def _add_tagged(
        self, name: str, style: ArgumentStyle, known: ParameterSchema, parameters: Sequence[Parameter], *, strict: bool
    ) -> None:
        """Add arguments that each stand between tags, with line breaks where a model puts them."""
        before, after = TAGS[style]
        parts: list[str] = []
        for one in parameters:
            part = f"{name}_{len(parts)}"
            values = _TaggedValue(self._rules, part, known, after, has_lines=style == "parameters", strict=strict)
            found = []
            for is_text, value in values.of(one.schema, apart=style == "typed"):
                tags = [self._rules.marks(text.format(one.name, json.dumps(is_text))) for text in before]
                found.append(f"{f' {_LINE} '.join(tags)} {value}")
            self._rules.add(part, f"{found[0] if len(found) == 1 else '(' + ' | '.join(found) + ')'} {_LINE}")
            parts.append(part if one.required else f"{part}?")
        self._rules.add(name, f"{_LINE} {' '.join(parts)}")


def write_arguments(style: ArgumentStyle, arguments: Mapping[str, str]) -> str:
    """Return arguments that are texts as a model writes them."""
    if style in TAGS:
        before, after = TAGS[style]
        tags = {name: "".join(text.format(name, "true") for text in before) for name in arguments}
        return "".join(f"{tags[name]}{value}{after}" for name, value in arguments.items())
    if style == "gemma":
        pairs = (f"{gemma_key(name)}:{GEMMA_QUOTE}{value}{GEMMA_QUOTE}" for name, value in arguments.items())
        return f"{{{','.join(pairs)}}}"
    if style == "python":
        return ", ".join(f"{name}={as_string(value)}" for name, value in arguments.items())
    return json.dumps(arguments)


class _TaggedValue:
    """Adds the rules of a value between tags, with what ends it: texts stand as they are, all else as JSON.

    Args:
        rules: of the grammar.
        name: what the names of the rules begin with.
        known: the schema of the function's parameters.
        after: what ends the value.
        has_lines: whether a line break before a value, and one behind it, are no part of it.
        strict: refuse what nothing can keep a value to, instead of leaving that out.
    """

    def __init__(
        self, rules: LarkRules, name: str, known: ParameterSchema, after: str, *, has_lines: bool, strict: bool
    ) -> None:
        self._rules = rules
        self._name = name
        self._known = known
        self._after = after
        self._has_lines = has_lines
        self._strict = strict

    def of(self, schema: Any, *, apart: bool) -> list[tuple[bool, str]]:
        """Return expressions of values that a schema allows, each with whether they are texts.

        They are one expression unless texts are ``apart``: the tag tells them from all else.
        """
        branches = self._known.branches(schema)
        texts = [branch for branch in branches if _may_be_text(branch)]
        others = [branch for branch in branches if _may_be_other(branch, apart=apart)]
        written = []
        if texts:
            written.append((True, self._text(texts)))
        if others and not (texts and not apart and self._is_any(texts)):
            whole = [schema] if len(others) == len(branches) and not texts else [_without_text(one) for one in others]
            written.append((False, self._json(whole[0] if len(whole) == 1 else {"anyOf": whole})))
        if apart or len(written) < 2:
            return written or [(False, self._json(schema))]
        return [(True, f"({' | '.join(value for _, value in written)})")]

    def _is_any(self, texts: Sequence[Schema]) -> bool:
        return any(not choices(one) and self._pattern(one) == ANY_TEXT for one in texts)

    def _pattern(self, branch: Schema) -> str:
        return text_pattern(branch, strict=self._strict)

    def _text(self, branches: Sequence[Schema]) -> str:
        if self._is_any(branches):
            self._rules.add_until(f"{self._name}_value", self._after)
            return f"{self._name}_value"
        found = []
        for number, branch in enumerate(branches):
            if values := [value for value in choices(branch) if isinstance(value, str)]:
                found.append(self._between_lines(f"({' | '.join(map(as_string, values))})"))
                continue
            name = f"{self._name}_t{number}"
            pattern = self._pattern(branch)
            if not self._has_lines:
                self._rules.add_until(name, self._after, pattern)
                found.append(name)
                continue
            self._rules.add_until(f"{name}_lines", f"\n{self._after}", f"{pattern} & {exclude_text(self._after)}")
            self._rules.add_until(name, self._after, rf"{pattern} & ~/\n(.|\n)*/")
            found += [rf'"\n" {name}_lines', name]
        return f"({' | '.join(found)})"

    def _json(self, schema: Any) -> str:
        is_boolean = all(own_types(one) == ["boolean"] and not choices(one) for one in self._known.branches(schema))
        value = _BOOLEAN if is_boolean else as_schema(self._known.alone(schema), strict=self._strict)
        return f"{_LINE} {value} {_LINE} {self._rules.marks(self._after)}"

    def _between_lines(self, value: str) -> str:
        """Return the expression of a text alone, or in a line of its own where that is no part of it."""
        end = self._rules.marks(self._after)
        return rf'("\n" {value} "\n" | {value}) {end}' if self._has_lines else f"{value} {end}"


def _check(schema: Schema) -> None:
    """Refuse what is no schema, as far as schemas are read here; llguidance looks at the rest."""
    for path, part in iter_standard_subschemas(schema):
        for keyword, (fits, what) in _FORMS.items():
            value = part.get(keyword)
            if value is not None and not fits(value):
                raise ConstraintError(
                    f"{shorten_pointer((*path, keyword))}: {shown(value)} is no {what}: give one, or leave the "
                    "keyword out"
                )


def _check_enforceable(schema: Schema) -> None:
    """Refuse what nothing can keep a value to that stands in no JSON, which llguidance sees nothing of."""
    left_out = prepare_schema(json.loads(json.dumps(schema)), strict=False).unenforced
    # One of several parts that can be told apart is kept to.
    if places := [place for place in left_out if not place.endswith("/oneOf")]:
        raise ConstraintError(
            f"{list_places(places)}: nothing can keep an answer to that: leave it out, or say strict false and check "
            "calls for it"
        )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_FORMS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "properties": (lambda value: isinstance(value, Mapping), "object of schemas"),
    "required": (_is_texts, "list of names"),
    "type": (lambda value: isinstance(value, str) or _is_texts(value), "type or list of types"),
    "enum": (lambda value: isinstance(value, list), "list of values"),
    "anyOf": (lambda value: isinstance(value, list), "list of schemas"),
    "oneOf": (lambda value: isinstance(value, list), "list of schemas"),
    "allOf": (lambda value: isinstance(value, list), "list of schemas"),
}


def _close_schema(schema: Schema) -> dict[str, Any]:
    """Return what keeps a model from arguments that a function does not name, if its schema names them all.

    A schema alone allows any others, which weak models invent and programs do not expect.
    """
    names = schema.get("properties") or {}
    all_named = _ELSEWHERE.isdisjoint(schema) and all(name in names for name in schema.get("required") or ())
    return {"additionalProperties": False} if all_named else {}


def _may_be_text(branch: Schema) -> bool:
    """Return whether a value may be a text, which then needs no quotes."""
    if values := choices(branch):
        return any(isinstance(value, str) for value in values)
    types = own_types(branch)
    # A reference that leads nowhere is refused by llguidance.
    return "string" in types if types is not None else not _is_structured(branch) and "$ref" not in branch


def _may_be_other(branch: Schema, *, apart: bool) -> bool:
    """Return whether a value may be something else than a text."""
    if values := choices(branch):
        return any(not isinstance(value, str) for value in values)
    types = own_types(branch)
    return types != ["string"] if types is not None else apart or _is_structured(branch) or "$ref" in branch


def _is_structured(branch: Schema) -> bool:
    """Return whether a schema that says no type is plainly meant for an object or array."""
    return any(key in branch for key in ("properties", "items", "prefixItems"))


def _without_text(branch: Schema) -> Schema:
    if values := choices(branch):
        return {"enum": [value for value in values if not isinstance(value, str)]}
    types = own_types(branch)
    if types is None:
        return branch if _is_structured(branch) else {"type": ["number", "boolean", "null", "object", "array"]}
    return {**branch, "type": [one for one in types if one != "string"]}
