"""What llguidance says of a grammar, in a line for users."""

from __future__ import annotations

import re

LONGEST = 240
"""Characters of a reason."""

_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_WRAPPING = ("failed to compile JSON schema: ", "while processing json-schema:///")
_EXCERPT = re.compile(r"^ *\d+ \|")
_TOO_MUCH = (
    "too big",
    "too large",
    "too complex",
    "Too many items",
    "too many expressions",
    "Current row has",
    "fuel exhausted",
    "u16::MAX",
    "max_lexer_states",
    "too many states",
)


def is_excess(error: str) -> bool:
    """Return whether an error says that something takes too much time or memory."""
    return any(part in error for part in _TOO_MUCH)


def reason_of(error: str, *, with_place: bool = False) -> str:
    """Return an error of llguidance on one line of bounded length.

    Args:
        error: what llguidance said.
        with_place: say the line and column too; they are those of llguidance's own grammar.
    """
    if error.startswith("Unable to determine if regex is empty"):
        return "whether a text can match all of these patterns and lengths takes too long to tell: leave some out"
    if error.startswith("oneOf constraints"):
        return "oneOf is supported where no JSON could match two of its parts: say anyOf"
    if error.startswith("panic") or "<backtrace>" in error:
        return "the grammar library could not take it"
    text = error.split("\n<non-verbose/>")[0]
    place = _PLACE.match(text)
    lines = [line.strip() for line in text[place.end() if place else 0 :].splitlines() if not _EXCERPT.match(line)]
    lines = [line.removeprefix(_WRAPPING[0]) for line in lines if line.strip("^ ") and _WRAPPING[1] not in line]
    if place and "invalid regex" in lines[0]:
        lines[0] = "invalid regular expression"
    causes = [line for line in lines if line.startswith("error: ")]
    if causes:
        lines = [lines[0].split(" (in regex)")[0].removesuffix(" regex parse error:").rstrip(":"), causes[-1][7:]]
    said = ": ".join(lines[:1] + lines[1:] if causes else [" ".join(lines)])
    if place and with_place:
        said = f"line {place[1]}, column {place[2]}: {said}"
    return said if len(said) <= LONGEST else said[: LONGEST - 3] + "..."
