"""Counts and sizes as people read them: three digits that mean something, and a unit."""

from __future__ import annotations

from typing import Final

_BYTES: Final = (" bytes", " kB", " MB", " GB")
_THOUSANDS: Final = ("", " k", " M", " B")


def size_text(num_bytes: int) -> str:
    """Return a number of bytes, such as ``1.31 MB``."""
    return _scaled(num_bytes, _BYTES)


def count_text(count: int) -> str:
    """Return a count, such as ``1.12 M``."""
    return _scaled(count, _THOUSANDS)


def _scaled(count: int, units: tuple[str, ...]) -> str:
    scaled, unit = float(count), 0
    while scaled >= 999.5 and unit < len(units) - 1:
        scaled, unit = scaled / 1000, unit + 1
    digits = 0 if unit == 0 or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:,.{digits}f}{units[unit]}"
