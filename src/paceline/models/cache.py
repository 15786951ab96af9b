"""Where models made on this machine lie."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

CACHE_VARIABLE = "PACELINE_CACHE"
"""Environment variable that names another folder for what paceline keeps on this machine."""


def models_folder() -> Path:
    """Return the folder of the models made on this machine, whether or not it exists yet.

    It is ``models`` in the user's cache folder, or in the folder that ``PACELINE_CACHE`` names.
    """
    override = os.environ.get(CACHE_VARIABLE)
    root = Path(override).expanduser() if override else user_cache_path("paceline", appauthor=False)
    return root / "models"
