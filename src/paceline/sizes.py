"""Counts, sizes and times as text, with a unit, and sizes and times read from text."""

from __future__ import annotations

import re
from typing import Final

from paceline.core.errors import InputError

_BYTES: Final = (" bytes", " kB", " MB", " GB")
_WRITTEN: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", re.IGNORECASE)
_TIME: Final = re.compile(r"(?:(\d+(?:\.\d+)?)h)? ?(?:(\d+(?:\.\d+)?)m(?:in)?)? ?(?:(\d+(?:\.\d+)?)s?)?", re.IGNORECASE)
_COUNTED: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KM]?)", re.IGNORECASE)
_THOUSANDS: Final = ("", " k", " M", " B")


def format_bytes(num_bytes: int) -> str:
    return _scaled(num_bytes, _BYTES)


def format_memory(num_bytes: int) -> str:
    """Return bytes of memory as :func:`parse_bytes` reads them, rounded up, such as ``760M`` or ``1.6G``."""
    if num_bytes < 1 << 30:
        return f"{max(-(-num_bytes // (1 << 20)), 0)}M"
    return f"{-(-num_bytes * 10 // (1 << 30)) / 10:.1f}G"


def parse_bytes(text: str) -> int:
    """Return the bytes that a size of memory stands for, such as ``12G``, ``800M`` or ``1.5 GiB``.

    As memory is sold, a K is 1,024 bytes, an M 1,024 K and so on, whether or not an ``i`` says so.
    """
    found = _WRITTEN.fullmatch(text.strip())
    if found is None:
        raise InputError(f"{text!r} is not a size: give a number and a unit, such as 12G or 800M")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def parse_seconds(text: str) -> float:
    """Return the seconds that a time stands for, such as ``60m``, ``1h30m`` or ``90s``; without a unit, of seconds."""
    found = _TIME.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        raise InputError(f"{text!r} is not a duration: give a number and a unit, such as 60m, 1h30m or 90s")
    hours, minutes, seconds = (float(part or 0.0) for part in found.groups())
    return 3600 * hours + 60 * minutes + seconds


def format_seconds(seconds: float) -> str:
    """Return a time as people say it, such as ``42 s``, ``12 min`` or ``1 h 30 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def parse_count(text: str) -> int:
    """Return the number that a count stands for, such as ``32000``, ``32k`` or ``1.5M``: a k is 1,000."""
    found = _COUNTED.fullmatch(text.strip())
    if found is None:
        raise InputError(f"{text!r} is not a count: give a whole number, such as 32000 or 32k")
    return int(float(found[1]) * {"": 1, "K": 1_000, "M": 1_000_000}[found[2].upper()])


def format_count(count: int) -> str:
    return _scaled(count, _THOUSANDS)


def _scaled(count: int, units: tuple[str, ...]) -> str:
    scaled, unit = float(count), 0
    while scaled >= 999.5 and unit < len(units) - 1:
        scaled, unit = scaled / 1000, unit + 1
    digits = 0 if unit == 0 or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:,.{digits}f}{units[unit]}"
