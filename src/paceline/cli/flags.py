"""What the command line calls the options that the library's messages name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

from paceline.chat.params import ChatParams
from paceline.core.fields import Field, fields_of, rename_options, spell_flag
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.models.hub.reference import HubOptions
from paceline.options import REQUEST_PARTS
from paceline.planning.policies.fixed import FixedPolicy
from paceline.server_options import ServerOptions

_NO_FIELDS: Final[Mapping[str, str]] = {
    "policy": "--policy",
    "policy=NO_SPECULATION": "--no-speculation",
    "generate": "paceline run -p",
    "strict=False": "--no-strict",
    "force=True": "--force",
}
"""What else messages name, by how the command line calls it."""


def in_flags(message: str) -> str:
    """Return a message of the library in which options are called what the command line calls them."""
    return rename_options(message, _as_flag)


def _as_flag(name: str, value: str) -> str | None:
    field = _flagged().get(name)
    if field is not None:
        return spell_flag(field, value)
    return _NO_FIELDS.get(f"{name}={value}" if value else name, _NO_FIELDS.get(name))


@functools.cache
def _flagged() -> Mapping[str, Field]:
    """Return the fields that the command line has options for, by what messages call them."""
    parts = (ServerOptions, HubOptions, ModelOptions, ChatParams, FixedPolicy, *REQUEST_PARTS)
    found = {field.name: field for part in parts for field in fields_of(part) if field.flags}
    drafts = {field.name: field for field in fields_of(DraftOptions)}
    return found | {"draft": drafts["path"]} | {f"DraftOptions.{name}": field for name, field in drafts.items()}
