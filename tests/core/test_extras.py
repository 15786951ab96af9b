"""What is said of a package that is not installed can be typed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

from paceline.core.errors import CapabilityError
from paceline.core.extras import Extra, missing

ROOT = Path(__file__).parents[2]


def test_every_extra_is_one_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*get_args(Extra)} <= project["optional-dependencies"].keys()
    error = missing("a server", "uvicorn", "serve", otherwise="do without")
    assert isinstance(error, CapabilityError)
    assert str(error) == (
        "a server needs uvicorn, which is not installed: pip install '.[serve]' in a clone of paceline, or do without"
    )


def test_nothing_names_a_package_that_no_registry_has() -> None:
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    naming = [path for path in texts if re.search(r"pip install .?paceline\b(?!-)", path.read_text(encoding="utf-8"))]
    assert not naming
