"""What an answer is to keep to, in the fields of OpenAI's API, llama-server's and vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from paceline.constraints import Choice, Gbnf, JsonObject, JsonSchema, Lark, Regex, Source
from paceline.core.errors import ConstraintError
from paceline.core.numbers import shown
from paceline.serving.errors import FieldError


class Named(NamedTuple):
    """What an answer is to keep to, and the field that says it."""

    field: str
    source: Source


def read_constraint(given: Mapping[str, Any], forms: Mapping[str, Mapping[str, Any]]) -> Named | None:
    """Return what the answer to a request is to keep to, if to anything.

    Args:
        given: fields of the request that are not ``None``.
        forms: what else says it in the form of ``response_format``, by its field.

    Raises:
        FieldError: a field cannot be used, or several say it.
    """
    found = list(_find_constraints(given, forms))
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise FieldError(second, f"{first} and {second} both constrain the answer: leave one of them out")
    return found[0] if found else None


def _find_constraints(given: Mapping[str, Any], forms: Mapping[str, Mapping[str, Any]]) -> Iterator[Named]:
    for name, described in {"response_format": given.get("response_format"), **forms}.items():
        source = _response_format(described, name) if described is not None else None
        if source is not None:
            yield Named(name, source)
    for name, make in _FIELDS.items():
        if name in given and given[name] != "":
            yield Named(name, _make_source(name, make, given[name]))
    outputs = given.get("structured_outputs", {})
    for key, make in _OUTPUTS.items():
        if outputs.get(key) not in (None, False, ""):
            field = f"structured_outputs.{key}"
            yield Named(field, _make_source(field, make, outputs[key]))


def _response_format(given: Mapping[str, Any], field: str) -> Source | None:
    has_schema = any(given.get(name) is not None for name in ("schema", "json_schema"))
    kind = given.get("type", "text")
    # A schema that is not read is not what the client thinks.
    if has_schema and (kind in ("text", None) or (kind == "json_object" and given.get("schema") is None)):
        has = f"type {shown(kind)}" if "type" in given else "no type"
        raise FieldError(field, f'{field} has {has} and a schema: give it the type "json_schema"')
    if kind in ("text", None):
        return None
    schema, strict = given.get("schema"), True
    if kind == "json_schema":
        described = given.get("json_schema")
        if isinstance(described, dict):
            schema = described.get("schema", schema)
            # OpenAI's API promises nothing of a schema that is not strict. Only who says so is taken at that word.
            strict = described.get("strict") is not False
        if schema is None:
            place = "json_schema.schema" if field == "response_format" else "schema"
            raise FieldError(field, f'{field} of type "json_schema" has no schema: put it in {field}.{place}')
    elif kind != "json_object":
        raise FieldError(field, f'{field} has type {shown(kind)}: give "text", "json_object" or "json_schema"')
    return JsonObject() if schema is None else _make_source(field, partial(JsonSchema, strict=strict), schema)


def _make_source(field: str, make: Callable[[Any], Source], value: Any) -> Source:
    try:
        return make(value)
    except ConstraintError as error:
        raise FieldError(field, str(error)) from None


def _read_schema(value: Any) -> Source:
    if not isinstance(value, dict | bool | str):
        raise ConstraintError(f"the JSON schema is {shown(value)}: give an object")
    return JsonSchema(value)


def _text_reader(make: Callable[[str], Source]) -> Callable[[Any], Source]:
    def made(value: Any) -> Source:
        if not isinstance(value, str):
            raise ConstraintError(f"{shown(value)} is not a text: give one")
        return make(value)

    return made


def _read_choice(value: Any) -> Source:
    if not (isinstance(value, list) and value and all(isinstance(text, str) for text in value)):
        raise ConstraintError(f"{shown(value)} is not a list of texts: give one text or more")
    return Choice(value)


def _read_grammar(value: Any) -> Source:
    """Read a grammar in either notation, as vLLM does: Lark's rules have a colon, and GBNF's ``::=``."""
    return _text_reader(Gbnf if isinstance(value, str) and "::=" in value else Lark)(value)


_FIELDS: Final[Mapping[str, Callable[[Any], Source]]] = {
    "json_schema": _read_schema,
    "grammar": _text_reader(Gbnf),
    "guided_json": _read_schema,
    "guided_regex": _text_reader(Regex),
    "guided_choice": _read_choice,
    "guided_grammar": _read_grammar,
}
_OUTPUTS: Final[Mapping[str, Callable[[Any], Source]]] = {
    "json": _read_schema,
    "json_object": lambda value: JsonObject(),
    "regex": _text_reader(Regex),
    "choice": _read_choice,
    "grammar": _read_grammar,
}
