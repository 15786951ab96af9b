"""llguidance, where it is installed."""

from __future__ import annotations

import importlib
from types import ModuleType

from paceline.core.errors import CapabilityError


def need_llguidance() -> ModuleType:
    """Import llguidance when it is first needed.

    Raises:
        CapabilityError: llguidance is not installed.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise CapabilityError(
            f"grammars and schemas need {error.name}, which comes with the extra: pip install 'paceline[constraints]'"
        ) from error
