"""Imports llguidance, an optional package, when it is first needed."""

from __future__ import annotations

import importlib
from types import ModuleType

from paceline.core.extras import missing


def import_llguidance() -> ModuleType:
    """Import llguidance when it is first needed."""
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise missing("keeping to a grammar or a schema", error.name, "constraints") from error
