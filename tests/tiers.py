"""How much is tested: everything, or with ``--quick`` what a person waits for.

A proof keeps its limits in both. Quickly it has fewer random scenes; enumerations stay complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

_quick: bool | None = None


def choose(*, quick: bool) -> None:
    """Say which it is, before tests are imported."""
    global _quick
    _quick = quick


def by_tier(number: int, *, quick: int) -> int:
    """Return how many random scenes a test has: ``number``, or ``quick`` where someone waits."""
    assert _quick is not None, "asked before it was chosen: by what a conftest.py of a folder imports"
    return quick if _quick else number


def some_long(values: Iterable[Any], *, quick: Collection[Any]) -> list[Any]:
    """Return a test's parameters, a tuple where there are several, of which all but ``quick`` are marked long."""
    values = list(values)
    unknown = [value for value in quick if value not in values]
    assert not unknown, f"{unknown} is none of {values}"
    return [
        value
        if value in quick
        else pytest.param(*value if isinstance(value, tuple) else [value], marks=pytest.mark.long)
        for value in values
    ]
