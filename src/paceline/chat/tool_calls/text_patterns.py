"""What a schema says of a text as a terminal of a grammar, for texts that stand without JSON's quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from paceline.chat.tool_calls.lark_rules import ANY_TEXT
from paceline.chat.tool_calls.parameter_schema import Schema
from paceline.constraints.schema_parts import as_list, as_mapping, is_number
from paceline.constraints.vocabulary import import_llguidance
from paceline.core.errors import ConstraintError
from paceline.core.numbers import shown

_MAX_LENGTH: Final = 4_096
"""Characters that are counted; a longer ``maxLength`` is no bound for an answer."""

# A class without end goes to the end, so that nothing is looked for twice.
_OF_PATTERN: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
_NOT_KEPT: Final = re.compile(r"\\[bBAZz1-9k]")
_OF_ASCII: Final = {
    r"\w": "[A-Za-z0-9_]",
    r"\W": "[^A-Za-z0-9_]",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\S": r"[^\s\x1c-\x1f]",
}
_DAY: Final = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_HEX: Final = "[0-9a-fA-F]"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL: Final = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_FORMATS: Final = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "duration": "P([0-9]{1,9}W|([0-9]{1,9}Y)?([0-9]{1,9}M)?[0-9]{1,9}D(T[0-9]{1,9}[HMS])?|T[0-9]{1,9}[HMS])",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": f"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,9}}",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL}){{1,9}}",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:[a-zA-Z0-9:\x2f?#@!$&'()*+,;=._~%-]+",
}


def text_pattern(schema: Schema, *, strict: bool) -> str:
    """Return the expression of the texts that a schema without references allows; :data:`ANY_TEXT` for all.

    Unless ``strict``, what nothing can keep a text to is left out; else it is refused.
    """
    parts = []
    least, most = (_length(schema.get(key)) for key in ("minLength", "maxLength"))
    if least or most is not None:
        parts.append(f"/(.|\\n){{{least or 0},{'' if most is None else most}}}/")
    kind = schema.get("format")
    patterns = [schema.get("pattern"), *(as_mapping(part).get("pattern") for part in as_list(schema.get("allOf")))]
    for pattern in (one for one in patterns if isinstance(one, str)):
        found = _anchor_pattern(pattern)
        if found is None and strict:
            raise ConstraintError(
                f"the pattern {shown(pattern)} says what nothing can keep a text to: leave it out, or say strict false"
            )
        parts += [] if found is None else [f"/{import_llguidance().regex_to_lark(found, '')}/"]
    if isinstance(kind, str) and kind in _FORMATS and not parts:
        parts.append(f"/{_FORMATS[kind]}/")
    return " & ".join(parts) or ANY_TEXT


def _length(value: Any) -> int | None:
    return int(value) if is_number(value) and value <= _MAX_LENGTH else None


def _anchor_pattern(pattern: str) -> str | None:
    """Return the pattern of whole texts in which a pattern is found; ``None`` where that cannot be said."""
    found = []
    for parts in _alternatives(pattern):
        start = bool(parts) and parts[0] == "^"
        end = len(parts) > start and parts[-1] == "$"
        inner = parts[start : len(parts) - end]
        if any(part in ("^", "$") or _NOT_KEPT.match(part) for part in inner):
            return None
        text = "".join(map(_restrict_to_ascii, inner))
        if re.search(r"(?<!\\)\(\?(?!:)", text):
            return None
        found.append(f"{'' if start else '(?s:.)*'}(?:{text}){'' if end else '(?s:.)*'}")
    return "|".join(found)


def _restrict_to_ascii(part: str) -> str:
    """Return a part of a pattern in which letters and digits are those of ASCII, as in the language of schemas.

    What is no space there is one for some who check it: the separators of ASCII.
    """
    if part.startswith("["):
        spaces = r"\s\x1c-\x1f" if part.startswith("[^") else r"\s"
        return part.replace(r"\w", "A-Za-z0-9_").replace(r"\d", "0-9").replace(r"\s", spaces)
    return _OF_ASCII.get(part, part)


def _alternatives(pattern: str) -> Iterator[list[str]]:
    """Yield the parts of each alternative at the top of a pattern."""
    parts: list[str] = []
    depth = 0
    for part in _OF_PATTERN.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            yield parts
            parts = []
        else:
            parts.append(part)
    yield parts
