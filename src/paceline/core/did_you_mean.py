"""Suggests the known name nearest to one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_LEAST_BEGINNING: Final = 2
"""Characters of a name from which on what begins with them may be meant."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.8) -> str | None:
    """Return the known name that is spelled most like this one, whatever the case; ``None`` where none is near.

    If none is, the shortest name that begins with this one. ``cutoff`` is the least share of characters that both have
    in order, 0 to 1.
    """
    # Of names that differ in their case alone, the first.
    spelled: dict[str, str] = {}
    for there_is in known:
        spelled.setdefault(there_is.lower(), there_is)
    found = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=cutoff)
    if not found and len(name.lstrip("-")) >= _LEAST_BEGINNING:
        found = sorted((each for each in spelled if each.startswith(name.lower())), key=len)
    return spelled[found[0]] if found else None


def no_such_option(name: str, known: Iterable[str], way_out: str, *, others: Iterable[str] = ()) -> str:
    """Return what to say of an option that there is not.

    Args:
        name: as it was written, without its value.
        known: options that there are.
        way_out: what to say where none of them is near.
        others: names that are taken, too, but less likely meant.
    """
    near = nearest(name, known) or nearest(name, others)
    return f"there is no option {name}: {way_out if near is None else f'did you mean {near}?'}"
