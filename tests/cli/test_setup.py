"""What is said of the models of a command before they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.setup import doubt_draft
from paceline.engines.options import ModelOptions
from tests.models.helpers import write_gguf


@pytest.mark.parametrize(
    ("draft", "file_type", "says"),
    [
        ("same.gguf", 7, "same.gguf drafts for itself (-md), at its own cost, so nothing is gained: name a smaller"),
        ("other.gguf", 15, None),
        ("self", 15, "same.gguf has 4 bits a weight, and its own copy (-md self) seldom pays there"),
        ("self", 7, None),
    ],
)
def test_a_draft_that_hardly_gains_is_said(tmp_path: Path, draft: str, file_type: int, says: str | None) -> None:
    target = write_gguf(tmp_path / "same.gguf", general__file_type=file_type)
    other = write_gguf(tmp_path / "other.gguf")
    said = doubt_draft(ModelOptions(target), target if draft == "same.gguf" else other, draft)
    assert said is None if says is None else (said or "").startswith(says)
