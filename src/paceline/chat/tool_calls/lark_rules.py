"""Writing a grammar in llguidance's Lark, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from paceline.constraints.compiler import CompilingLimits
from paceline.constraints.llguidance_grammars import write_schema
from paceline.constraints.sources import Whitespace
from paceline.core.errors import ConstraintError

ANY_TEXT: Final = r"/(.|\n)*/"
"""Lark terminal of any text, the empty one included."""

_MAX_CHARACTERS: Final = CompilingLimits().source_bytes
"""Of a grammar: one of more could not be compiled, and parts that many others refer to may come to gigabytes."""


class LarkRules:
    """The rules of a grammar, in the order in which they were added.

    Args:
        control_ids: token ids of marks that are control tokens, by spelling. Such a mark stands in the grammar as its
            token; the same letters as text are no mark.
    """

    def __init__(self, control_ids: Mapping[str, int]) -> None:
        self._ids = control_ids
        # Longer spellings first: one may begin with another.
        spellings = sorted(control_ids, key=len, reverse=True)
        self._spelled = re.compile(f"({'|'.join(map(re.escape, spellings))})") if spellings else None
        self._rules: dict[str, str] = {}
        self._num_characters = 0

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def add(self, name: str, expression: str) -> None:
        """Add a rule, or a terminal if the name is in capitals, unless the grammar is too large with it."""
        self._num_characters += len(name) + len(expression)
        if self._num_characters > _MAX_CHARACTERS:
            raise ConstraintError(
                f"the grammar of calls has more than {_MAX_CHARACTERS:,} characters: send fewer tools, or smaller "
                "parameters"
            )
        self._rules[name] = expression or '""'

    def add_until(self, name: str, text: str, before: str = ANY_TEXT) -> None:
        """Add a rule of text up to and with the first ``text``; what stands before keeps to the pattern ``before``."""
        first, *others = self._pieces(text)
        without = f"{before} & {exclude_text(first)}"
        if self._spelled is not None and first in self._ids:
            # Whoever reads the text sees no difference between the token and its letters.
            self.add(f"{name.upper()}_TEXT", without)
            self.add(name, f"{name.upper()}_TEXT {self.marks(text)}")
        elif before != ANY_TEXT:
            # A text that is too short could go on behind what ends it.
            self.add(f"{name.upper()}_TEXT", without)
            self.add(f"{name}_text[lazy]", f"{name.upper()}_TEXT {self.marks(first)}")
            self.add(name, f"{name}_text {self.marks(''.join(others))}")
        else:
            self.add(f"{name}_text[lazy]", f"{before} {self.marks(first)}")
            self.add(name, f"{name}_text {self.marks(''.join(others))}")

    def marks(self, text: str) -> str:
        """Return the expression of a text, in which marks may be control tokens; empty for no text."""
        return " ".join(
            f"<[{self._ids[piece]}]>" if piece in self._ids else as_string(piece) for piece in self._pieces(text)
        )

    def text(self) -> str:
        return "".join(f"{name}: {expression}\n" for name, expression in self._rules.items())

    def _pieces(self, text: str) -> list[str]:
        pieces = [text] if self._spelled is None else self._spelled.split(text)
        return [piece for piece in pieces if piece]


def exclude_text(text: str) -> str:
    """Return the expression of a terminal of any text in which a text does not stand."""
    return f"~/(.|\\n)*{_escape(text)}(.|\\n)*/"


def _escape(text: str) -> str:
    return "".join(one if one.isalnum() else f"\\x{ord(one):02x}" if one.isascii() else one for one in text)


def as_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def as_schema(schema: Mapping[str, Any] | bool, whitespace: Whitespace = "short", *, strict: bool) -> str:
    """Return the expression of a JSON value that a schema allows.

    Unless ``strict``, what nothing can keep a value to is left out of the schema; else it is refused.
    """
    return f"%json {write_schema(schema, whitespace, strict=strict)}"
