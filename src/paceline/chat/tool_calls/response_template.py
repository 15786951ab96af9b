r"""The format that a model's own response template describes, for models of no known family.

Folders of Hugging Face may say in ``tokenizer_config.json`` how an answer is read. Of that, the fields ``tool_calls``
and ``content`` are taken: reasoning is parted from an answer before, and all else is content.

Patterns of such a template are tried at every character of an answer, and nobody looked at them. So what may repeat
without an end repeats :data:`MAX_REPEATED` times at most, and patterns whose parts repeat within each other are
refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any, Final

from paceline.chat.template import ChatTemplate
from paceline.chat.tool_calls.base import ToolCallFormat
from paceline.chat.tool_calls.formats import find_format
from paceline.core.errors import ModelFileError, ModelWarning

FIELD: Final = "tool_calls"
"""Field of a response template's answer that holds the calls."""

MAX_REPEATED: Final = 256
"""Characters that a part of an opening or a close may be."""

_MAX_PATTERN: Final = 500
"""Characters of a pattern."""
_MAX_REPEATS: Final = 3
"""Parts of a pattern that may be of any length."""

_OF_ONE_CHARACTER: Final = r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|."
_PARTS: Final = re.compile(rf"(?P<one>{_OF_ONE_CHARACTER})(?P<repeat>[*+]|\{{\d+(?:,\d*)?\}})?", re.DOTALL)


def find_call_format(template: ChatTemplate) -> ToolCallFormat | None:
    """Return how a model with a chat template writes calls; ``None`` where that is not known.

    A response template that cannot be used is warned of.
    """
    known = find_format(template.source)
    if known is not None or template.response_template is None:
        return known
    try:
        return parse_response_template(template.response_template, template.origin)
    except ModelFileError as error:
        warnings.warn(str(error), ModelWarning, stacklevel=2)
        return None


def parse_response_template(template: Any, origin: str) -> ToolCallFormat | None:
    """Return the format of calls that a response template describes; ``None`` where it says nothing of calls.

    Raises:
        ModelFileError: it is none, or has a pattern that could take long.
    """
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping):
        raise ModelFileError(
            f"the response template of {origin} cannot be used: it has no fields; leave it out, or correct it"
        )
    calls = fields.get(FIELD)
    if not isinstance(calls, Mapping):
        return None
    said = {FIELD: calls, "content": fields.get("content", {"content": "text"})}
    # Only what the model writes is read, so nothing stands before the beginning.
    return ToolCallFormat(origin, {"start_anchor": "\0\0", "fields": _bound_field("fields", said, origin)})


def _bound_field(name: str, value: Any, origin: str) -> Any:
    """Return a field's part with patterns that end soon."""
    if isinstance(value, Mapping):
        return {key: _bound_field(key, part, origin) for key, part in value.items()}
    if not name.endswith("_pattern") or not isinstance(value, str):
        return value
    # What stands between tags may be of any length, and is looked for once, in what was read already.
    bounded, repeats = _bound_pattern(value, bounds=name != "tag_pattern")
    if len(value) > _MAX_PATTERN or repeats > _MAX_REPEATS:
        raise ModelFileError(
            f"the response template of {origin} has the {name} {value[:80]!r}, which could take long: leave it out, or "
            f"write it in {_MAX_PATTERN} characters with {_MAX_REPEATS} parts that repeat, none within another"
        )
    return bounded


def _bound_pattern(pattern: str, *, bounds: bool) -> tuple[str, int]:
    """Return a pattern whose repeats are bounded, and how many there are; a repeat of a group counts as too many."""
    parts, repeats = [], 0
    for part in _PARTS.finditer(pattern):
        one, repeat = part["one"], part["repeat"]
        if repeat is None:
            parts.append(one)
            continue
        repeats += _MAX_REPEATS + 1 if one == ")" else 1
        least = {"*": "0", "+": "1"}.get(repeat, repeat.strip("{}").split(",")[0])
        is_open = repeat in "*+" or repeat.endswith(",}")
        parts.append(f"{one}{{{least},{max(MAX_REPEATED, int(least))}}}" if bounds and is_open else one + repeat)
    return "".join(parts), repeats
