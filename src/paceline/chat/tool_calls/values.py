"""The values of calls: where one in JSON ends, how libraries can read others, and what a text stands for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from paceline.chat.tool_calls.parameter_schema import ParameterSchema, Schema, choices, has_type, own_types
from paceline.constraints.schema_parts import is_number

_OPENING: Final = "{["
_CLOSING: Final = "}]"

NAME_MARK: Final = "paceline_parameter_"
"""Stands before the number of a name that is none in Python."""

# A text without end goes to the end, so that nothing is looked for twice.
_PYTHON_PART: Final = re.compile(
    r"""'(?:[^'\\]|\\.)*'?|"(?:[^"\\]|\\.)*"?|(?P<before>[(,]\s*)(?P<name>[^\s=,()\[\]{}'":]+)\s*=""", re.DOTALL
)
_PYTHON_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:[-.][A-Za-z0-9_]+)*")
_GEMMA_PART: Final = re.compile(
    r"""<\|"\|>.*?<\|"\|>|"(?:[^"\\]|\\.)*"?|(?P<before>(?:\A|(?<=[{,]))\s*)(?P<key>[^\s{}\[\],:"<>]+)\s*:""", re.DOTALL
)
_WORDS: Final = {"True": True, "False": False, "None": None}
_COMPARED: Final[Mapping[str, Callable[[Fraction, Fraction], bool]]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
    "multipleOf": lambda value, bound: not bound or value % bound == 0,
}


class JsonValue:
    r"""The text of a JSON object or array, as far as it came.

    What is within its strings is spelled so that no marker of a format, and no line break, stands there:
    ``"</tool_call>"`` becomes ``"\u003c\u002ftool_call\u003e"``, the same string to every reader of JSON.

    Attributes:
        is_complete: whether the last bracket has closed.
        is_refused: whether the text begins with something else than an object or array.
    """

    __slots__ = ("_depth", "_escaped", "_pieces", "_within", "is_complete", "is_refused")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._depth = 0
        self._within = False
        self._escaped = False
        self.is_complete = False
        self.is_refused = False

    def take(self) -> str:
        """Return the text that was not taken yet, with whitespace before the value."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def push(self, character: str) -> None:
        """Add the next character; none after the value is complete or refused."""
        if self._within:
            self._pieces.append(self._in_string(character))
            return
        self._pieces.append(character)
        if character == '"':
            self._within = True
        elif character in _OPENING:
            self._depth += 1
        elif character in _CLOSING:
            self._depth -= 1
            self.is_complete = self._depth == 0
        self.is_refused = self._depth <= 0 and not self.is_complete and not character.isspace()

    def _in_string(self, character: str) -> str:
        if self._escaped:
            self._escaped = False
            return character
        if character == "\\":
            self._escaped = True
            return character
        if character == '"':
            self._within = False
            return character
        return character if character.isalnum() or character == " " or character > "~" else f"\\u{ord(character):04x}"


def make_calls_readable(text: str, names: list[str]) -> str:
    """Return calls in Python's notation as the library reads it.

    Some models do not escape line breaks in strings, and a parameter may have a name that is none in Python: a number
    with :data:`NAME_MARK` before it stands for that.

    Args:
        text: of the calls.
        names: of parameters that numbers stand for; those that are found are added.
    """

    def readable(found: re.Match[str]) -> str:
        if (name := found["name"]) is None:
            return found[0].replace("\n", "\\n").replace("\r", "\\r")
        if _PYTHON_NAME.fullmatch(name):
            return found[0]
        names.append(name)
        return f"{found['before']}{NAME_MARK}{len(names) - 1}="

    return _PYTHON_PART.sub(readable, text)


def restore_names(arguments: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return arguments with the names that :func:`make_calls_readable` replaced."""

    def name(key: str) -> str:
        number = key.removeprefix(NAME_MARK)
        is_marked = number != key and number.isdecimal() and int(number) < len(names)
        return names[int(number)] if is_marked else key

    return {name(key): value for key, value in arguments.items()} if names else arguments


def quote_keys(text: str) -> str:
    """Return values in Gemma's notation in which a key that is no word of letters has JSON's quotes."""

    def quoted(found: re.Match[str]) -> str:
        key = found["key"]
        return found[0] if key is None else f"{found['before']}{json.dumps(key)}:"

    return _GEMMA_PART.sub(quoted, text)


def parse_value(text: str, known: ParameterSchema, schema: Any, *, is_text: bool | None = None) -> Any:
    """Return what a text stands for that a model wrote as the value of a parameter.

    Where a schema allows texts and more, it is what it spells if that is allowed: 5 is a number, and five a text. What
    spells nothing that the schema allows stays a text.

    Args:
        text: of the value, without the marks around it.
        known: the schema of the function's parameters.
        schema: of the parameter.
        is_text: whether the model said that it is one; ``None`` where nothing says so.
    """
    branches = known.branches(schema)
    texts = [value for branch in branches for value in choices(branch) if isinstance(value, str)]
    for one in (text, text.strip()):
        if is_text is not False and one in texts:
            return one
    types = known.types(schema)
    if is_text or (is_text is None and types is None):
        return text
    spelled = _parse_spellings(text.strip(), loosely=types is None or "string" not in types)
    kept = [one for one in spelled if types is None or any(_matches_branch(one, branch) for branch in branches)]
    if not kept and types is not None and "string" not in types:
        # It is no text, whatever else the schema says.
        kept = [one for one in spelled if has_type(one, types)]
    if not kept:
        return text
    is_whole = isinstance(kept[0], float) and types is not None and "number" not in types
    return int(kept[0]) if is_whole else kept[0]


def _parse_spellings(text: str, *, loosely: bool) -> list[Any]:
    """Return what a text may spell, besides itself.

    What can be no text is read ``loosely``, in ways that JSON lacks: 007 is 7, and 1 is true.
    """
    found = []
    try:
        found.append(json.loads(text, parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        if text in _WORDS:
            found.append(_WORDS[text])
        elif loosely:
            found += _parse_numbers(text)
    if loosely and text in ("0", "1"):
        found.append(text == "1")
    return [one for one in found if not (isinstance(one, float) and not math.isfinite(one))]


def _parse_numbers(text: str) -> list[Any]:
    for kind in (int, float):
        try:
            return [kind(text)]
        except ValueError:
            continue
    return []


def _refuse_constant(constant: str) -> Any:
    raise ValueError(constant)


def _matches_branch(value: Any, branch: Schema) -> bool:
    """Return whether a value that is no text is one that a schema without references allows, as far as it says so."""
    types = own_types(branch)
    if value is None and branch.get("nullable"):
        return True
    if types is None or isinstance(value, str) or not has_type(value, types):
        return False
    if listed := choices(branch):
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in listed)
    if not is_number(value):
        return True
    bounds = {key: Fraction(str(branch[key])) for key in _COMPARED if is_number(branch.get(key))}
    number = Fraction(str(value))
    return all(_COMPARED[key](number, bound) for key, bound in bounds.items())
