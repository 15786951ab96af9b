"""What ``deploy`` has names only metrics, options and variables that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from paceline.environment import variables_of_the_table
from paceline.serving.metrics import FAMILIES

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"

_NAME = re.compile(r"\b(?:vllm|llamacpp|paceline):\w+")
_LABELS = re.compile(r"\bby \(([^)]*)\)")


def dashboard_expressions() -> list[str]:
    panels: list[dict[str, Any]] = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def alert_expressions() -> list[str]:
    # One expression is the indented lines below its key.
    return re.findall(r"expr: >\n((?: {10}.*\n)+)", (DEPLOY / "alerts.yaml").read_text())


@pytest.mark.parametrize("expression", [*dashboard_expressions(), *alert_expressions()])
def test_expressions_name_metrics_and_labels_that_there_are(expression: str) -> None:
    families = {family.name: family for family in FAMILIES}
    names = {name.removesuffix("_bucket") for name in _NAME.findall(expression)}
    assert names
    assert names <= families.keys()
    labels = {label.strip() for found in _LABELS.findall(expression) for label in found.split(",")}
    own = {label for name in names for label in families[name].labels}
    assert labels <= own | {"instance", "le"}


def test_two_alerts_are_read() -> None:
    assert len(alert_expressions()) == 2


def test_variables_are_those_of_options() -> None:
    known = {*variables_of_the_table(), "PACELINE_CACHE"}
    texts = [(DEPLOY / name).read_text() for name in ("Dockerfile", "compose.yaml", "paceline.service")]
    named = set(re.findall(r"\bPACELINE_[A-Z_]+", "\n".join(texts)))
    assert {"PACELINE_HOST", "PACELINE_API_KEY", "PACELINE_MODEL"} <= named
    assert named <= known


def test_the_image_has_all_that_make_installs_from(tmp_path: Path) -> None:
    """A file that the build needs, and that is kept out of it, shows as a rule that ``make`` lacks."""
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    for name in kept:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    made = subprocess.run(
        ["make", "--dry-run", ".venv/.installed"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    # What a wheel is built from by hatchling is named in the project's file.
    project = (ROOT / "pyproject.toml").read_text()
    for name in re.findall(r'(?:readme = |license-files = \[|path = )"([^"]+)"', project):
        assert any(fnmatch(name, pattern) or name.startswith(f"{pattern}/") for pattern in kept), name
