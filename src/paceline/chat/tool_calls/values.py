"""Finding the end of a JSON value while it arrives."""

from __future__ import annotations

import re
from typing import Final

_OPENING: Final = "{["
_CLOSING: Final = "}]"
_PYTHON_STRING: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


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


def with_escaped_lines(text: str) -> str:
    """Return calls in Python's notation in which no string has a line break: some models do not escape them."""

    def escaped(found: re.Match[str]) -> str:
        return found[0].replace("\n", "\\n").replace("\r", "\\r")

    return _PYTHON_STRING.sub(escaped, text)
