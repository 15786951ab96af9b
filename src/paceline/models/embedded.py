"""Where the embedded model pair lies: a small target and a smaller draft, so that paceline runs with nothing else."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from paceline.core.errors import InputError, ModelFileError

_FOLDER = Path(str(files("paceline.models"))) / "embedded"

HELDOUT_KINDS = ("code", "prose", "json", "logs")
"""Kinds of text of which there are samples that the embedded pair was not trained on."""


def embedded_target() -> Path:
    return _check_present(_FOLDER / "target-q8_0.gguf")


def embedded_draft() -> Path:
    return _check_present(_FOLDER / "draft-q8_0.gguf")


def heldout(kind: str) -> list[str]:
    """Return pieces of text that the embedded pair was not trained on, of one of :data:`HELDOUT_KINDS`."""
    if kind not in HELDOUT_KINDS:
        raise InputError(f"there is no held-out text of kind {kind!r}; choose from {', '.join(HELDOUT_KINDS)}")
    lines = _check_present(_FOLDER / "heldout" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def _check_present(path: Path) -> Path:
    if not path.is_file():
        raise ModelFileError(f"the embedded file {path.name} is missing from this installation: reinstall paceline")
    return path
