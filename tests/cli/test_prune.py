"""``paceline prune`` as its users call it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from paceline.cli import exits
from paceline.models.embedded import embedded_draft
from tests.cli.interrupted import interrupt_while_it_writes
from tests.cli.invoking import Invoke


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def test_a_smaller_model_is_made_and_said_to_be(invoke: Invoke, tmp_path: Path) -> None:
    out, facts_file, page = tmp_path / "out.gguf", tmp_path / "facts.json", tmp_path / "page.html"
    words = ("prune", "draft", str(out), "--vocab", "1k", "--no-measure")
    outcome = invoke(*words, f"--json={facts_file}", "--html", str(page))
    assert outcome.status == 0, outcome.err
    assert "expected: " in outcome.err
    assert re.search(r"1,024 of 4,096 tokens are left", outcome.out)
    assert re.search("texts come back byte for byte", outcome.out)
    facts = json.loads(facts_file.read_text())
    assert facts["num_bytes"] == out.stat().st_size < embedded_draft().stat().st_size
    assert facts["vocabulary"]["kept"] == 1024
    assert facts["passes"] is facts["acceptance"] is None
    assert "<script" not in page.read_text()
    assert "made by paceline prune from draft-q8_0.gguf" in invoke("models", "show", str(out)).out
    # A file that is there is kept.
    before = out.read_bytes()
    again = invoke(*words)
    assert (again.status, again.out) == (exits.BAD_INPUT, "")
    assert "--force" in again.err
    assert out.read_bytes() == before
    assert invoke(*words, "--force").status == 0


@pytest.mark.long
def test_all_that_it_measures_is_said(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    cuts = ("--layers", "1", "--width", "10%", "--type", "Q4_0", "--for", "target", "-t", "1")
    outcome = invoke("prune", "draft", str(out), *cuts, "--json")
    assert outcome.status == 0, outcome.err
    facts = json.loads(outcome.out)
    assert len(facts["layers"]["one_minus_tv_without"]) == facts["layers"]["before"] == 3
    assert facts["width"]["units_removed"] == 32
    assert facts["file_type"] == "Q4_0"
    assert 0 < facts["passes"]["ratio"]["median"] < 2
    for name in ("acceptance", "uncut_acceptance"):
        assert 0 < facts[name]["agreement"]["one_minus_tv"]["all"]["value"] < 1
        assert 0 < facts[name]["accepted_of_4"] < 4


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    status, err, seen = interrupt_while_it_writes(tmp_path, "prune", "draft", str(out), "--vocab", "1k")
    assert status == exits.INTERRUPTED, err
    assert b"nothing was written" in err
    assert seen
    assert "out.gguf" not in seen
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"]
