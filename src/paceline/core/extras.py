"""What comes with paceline only where it is asked for."""

from __future__ import annotations

from typing import Literal, TypeAlias

from paceline.core.errors import CapabilityError

Extra: TypeAlias = Literal["serve", "constraints", "torch", "plots"]
"""An extra of the package, as pyproject.toml has it."""


def missing(what: str, package: str | None, extra: Extra, *, otherwise: str = "") -> CapabilityError:
    """Return the error of something that needs a package which is not installed.

    Args:
        what: needs it, in the plural or singular that goes with ``needs``.
        package: that is missing.
        extra: that brings it.
        otherwise: what else one can do, to follow "or".
    """
    way_out = f", or {otherwise}" if otherwise else ""
    return CapabilityError(
        f"{what} needs {package}, which is not installed: pip install '.[{extra}]' in a clone of paceline{way_out}"
    )
