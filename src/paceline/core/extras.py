"""The error of an optional package that is not installed."""

from __future__ import annotations

from typing import Literal, TypeAlias

from paceline.core.errors import CapabilityError

Extra: TypeAlias = Literal["serve", "constraints", "torch", "distil"]
"""An extra of the package, as pyproject.toml has it."""


def missing(what: str, package: str | None, extra: Extra, *, otherwise: str = "") -> CapabilityError:
    """Return the error of ``what`` needing a package that is not installed, and that ``extra`` brings."""
    way_out = f", or {otherwise}" if otherwise else ""
    return CapabilityError(
        f"{what} needs {package}, which is not installed: pip install '.[{extra}]' in a clone of paceline{way_out}"
    )
