r"""Text on a terminal: a terminal obeys control characters, so those of models, files and users are spelled out.

The answer into a pipe is the one output that keeps them; JSON escapes them by its own rules.

>>> printable("\x1b[31mred")
'\\x1b[31mred'
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

_UNPRINTABLE: Final = (
    "\x00-\x08\x0b\x0c\x0e-\x1f"  # C0 but tabs and the ends of lines
    "\x7f-\x9f"  # DEL and C1, of which U+009B begins what ESC [ does
    "\u202a-\u202e\u2066-\u2069"  # bidirectional embeddings, overrides and isolates, which show text in another order
    "\ud800-\udfff"  # half surrogate pairs: bytes of names that are not UTF-8
)
# Each is spelled by itself, so it does not matter how a sequence of them is cut into pieces.
_IN_TEXT: Final = re.compile(f"[{_UNPRINTABLE}]|\r(?!\n)")
_IN_LINE: Final = re.compile(f"[{_UNPRINTABLE}\r\n\u2028\u2029]")
_IN_JSON: Final = re.compile(f"[{_UNPRINTABLE}]")


def printable(text: str) -> str:
    r"""Return a text with its control characters spelled out, such as ``\x1b``; tabs and newlines stay."""
    return _IN_TEXT.sub(_escape, text)


def printable_line(text: str) -> str:
    r"""Return a text as one line: as :func:`printable`, and its newlines are spelled ``\n``."""
    return _IN_LINE.sub(_escape, text)


def json_text(facts: Any, *, encoding: str = "utf-8", indent: int | None = None) -> str:
    r"""Return plain data as JSON that any terminal can show and ``encoding`` can write.

    Where the encoding lacks a character, all that are not ASCII become ``\uXXXX``.
    """
    text = json.dumps(facts, ensure_ascii=False, indent=indent)
    # JSON has none of these characters outside of strings, where escapes are not allowed.
    text = _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text if can_encode(text, encoding) else json.dumps(facts, indent=indent)


def can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
