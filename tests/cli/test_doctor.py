"""``paceline doctor`` as its users call it: one examination of the embedded pair, and what bad input gets."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline.cli import exits
from paceline.models.embedded import embedded_draft, embedded_target
from tests.cli.invoking import Invoke, spawn
from tests.engines.tiny_models import write_block_head, write_eagle_head, write_model
from tests.models.helpers import edited_gguf, metadata

QUICK = ("--budget-s", "5", "-t", "1", "-c", "512")


class Examined(NamedTuple):
    """What one call left behind."""

    status: int
    out: str
    err: str
    facts: dict[str, Any]
    page: str
    folder: Path


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Examined:
    """The embedded pair in a folder with what is no model."""
    folder = tmp_path_factory.mktemp("doctor")
    models = folder / "models"
    models.mkdir()
    shutil.copy(embedded_draft(), models / "small.gguf")
    (models / "broken.gguf").write_bytes(b"nothing")
    found = subprocess.run(
        [
            *(sys.executable, "-m", "paceline", "doctor", "target", str(models), *QUICK),
            *("--export", "llama-server", f"--json={folder / 'found.json'}", "--html", str(folder / "found.html")),
        ],
        env={**os.environ, "PACELINE_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode in (0, exits.DOES_NOT_PAY), found.stderr
    facts = json.loads((folder / "found.json").read_text())
    page = (folder / "found.html").read_text()
    return Examined(found.returncode, found.stdout, found.stderr, facts, page, folder)


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Invoke:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return Invoke(monkeypatch, capsys)


def test_the_report_says_whether_it_pays(examined: Examined) -> None:
    (candidate,) = examined.facts["candidates"]
    pays = candidate["prediction"]["pays"]
    assert examined.status == (0 if pays else exits.DOES_NOT_PAY)
    assert "tokens: fits as it is" in examined.out
    verdicts = {True: "pays: ", False: "does not pay: ", None: "too (close to call|few tokens to tell): "}
    assert re.search(f"^{verdicts[pays]}", examined.out, re.MULTILINE)
    assert all("threads 1" in report for report in (examined.out, examined.page))
    assert "--spec-type draft-simple --spec-draft-n-max" in examined.out
    # On a busy machine its time may not reach every kind of text.
    kinds = candidate["agreement"]["coupled"]
    assert kinds.keys() <= {"code", "prose", "json", "logs", "all"}
    assert {"code", "all"} <= kinds.keys()
    for kind in kinds if len(kinds) > 2 else ["all"]:
        assert re.search(rf"^{kind} ", examined.out, re.MULTILINE), kind


def test_progress_and_what_was_not_tried_are_said_aside(examined: Examined) -> None:
    assert "not tried: broken.gguf: is not a GGUF file" in examined.err
    assert "small.gguf: measuring what passes cost" in examined.err
    assert "\x1b" not in examined.out + examined.err


def test_figures_hold_together(examined: Examined) -> None:
    (candidate,) = examined.facts["candidates"]
    prediction, agreement = candidate["prediction"], candidate["agreement"]
    for name in ("coupled", "one_minus_tv", "same_top"):
        assert 0.2 < agreement[name]["all"]["value"] < 0.95
    # Coupled acceptance lies between (1 - TV) / (1 + TV) and 1 - TV (arXiv 2408.07978).
    overlap = agreement["one_minus_tv"]["all"]["value"]
    assert overlap / (2 - overlap) - 1e-9 <= agreement["coupled"]["all"]["value"] <= overlap + 1e-9
    survival = [depth["survival"] for depth in candidate["survival"]["all"]]
    assert survival == sorted(survival, reverse=True)
    # Counted and in closed form, of the same places.
    assert survival[0] == pytest.approx(agreement["coupled"]["all"]["value"], abs=0.2)
    for way in ("plain", "auto", "static", "without_model"):
        speed = prediction[way]["tokens_per_s"]
        low, high = (speed["value"] if speed[end] is None else speed[end] for end in ("low", "high"))
        assert 0 < low <= speed["value"] <= high
        assert (speed["low"] is None) is (prediction["texts"] == 1)
    assert candidate["tokens"]["fit"] == "as is"
    assert examined.facts["skipped"][0]["name"] == "broken.gguf"
    assert examined.facts["ended_by"] == "done"


def test_the_page_needs_nothing_from_anywhere(examined: Examined) -> None:
    page = examined.page
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\(|src=", page)
    assert "prefers-color-scheme: dark" in page
    charts = re.findall(r"<figure>(.*?)</figure>", page, flags=re.DOTALL)
    assert len(charts) == 4
    for chart in charts:
        assert ElementTree.fromstring(chart).attrib["aria-label"]
    for words in ("small.gguf", "fits as it is", "broken.gguf", "--spec-type draft-simple"):
        assert words in page


def test_what_was_found_is_kept_for_the_next_run(examined: Examined) -> None:
    cache = examined.folder / "cache"
    assert len(list((cache / "answers").iterdir())) == 1
    (entry,) = (json.loads(path.read_text()) for path in (cache / "answers").iterdir())
    assert len(entry["data"]) >= examined.facts["candidates"][0]["prediction"]["texts"]


def test_a_draft_of_another_vocabulary_is_translated_and_predicted(invoke: Invoke, tmp_path: Path) -> None:
    tokens = metadata(embedded_draft())["tokenizer.ggml.tokens"]
    other = edited_gguf(tmp_path / "other.gguf", {"tokenizer.ggml.tokens": tokens[::-1]})
    outcome = invoke("doctor", "target", str(other), "--budget-s", "5", "--json")
    assert outcome.status in (0, exits.DOES_NOT_PAY), outcome.err
    (candidate,) = json.loads(outcome.out)["candidates"]
    assert candidate["tokens"]["fit"] == "none"
    assert candidate["tokens"]["refusal"] is None
    assert candidate["error"] is None
    assert candidate["prediction"] is not None


@pytest.mark.long
def test_an_interrupt_says_that_it_can_be_gone_on_with(tmp_path: Path) -> None:
    found = spawn(
        *("doctor", "target", str(embedded_draft()), "--budget-s", "60", f"--json={tmp_path / 'found.json'}"),
        env={**os.environ, "PACELINE_CACHE": str(tmp_path / "cache")},
    )
    assert found.stderr is not None
    lines = []
    for line in found.stderr:
        lines.append(line.decode())
        if "measuring what passes cost" in lines[-1]:
            found.send_signal(signal.SIGINT)
            break
    rest = found.communicate()[1].decode()
    assert found.returncode == exits.INTERRUPTED
    assert rest.splitlines()[-1].startswith("interrupted after 0 of 1 candidates: what was measured")
    assert json.loads((tmp_path / "found.json").read_text())["ended_by"] == "interrupt"


def test_the_target_is_no_candidate_of_its_own_folder(invoke: Invoke, tmp_path: Path) -> None:
    shutil.copy(embedded_target(), tmp_path / "model.gguf")
    outcome = invoke("doctor", str(tmp_path / "model.gguf"), str(tmp_path))
    assert outcome.status == exits.BAD_INPUT
    assert "there is no draft model to try" in outcome.err


def test_a_head_is_examined_as_a_draft_is(invoke: Invoke, tmp_path: Path) -> None:
    target = write_model(tmp_path / "target.gguf", "llama", tokenizer="bytes", layers=4)
    head = write_eagle_head(tmp_path / "head.gguf", 32)
    words = ["doctor", str(target), "--budget-s", "5", "-t", "1", "-c", "256", "--export", "llama-server"]
    outcome = invoke(*words, str(head), "--json")
    assert outcome.status in (0, exits.DOES_NOT_PAY), outcome.err
    (candidate,) = json.loads(outcome.out)["candidates"]
    assert candidate["tokens"] is None
    assert candidate["error"] is None
    assert candidate["prediction"] is not None
    assert candidate["exports"] == []
    assert "a head has other flags in each program" in " ".join(candidate["advice"])
    (tmp_path / "models").mkdir()
    head.rename(tmp_path / "models" / "head.gguf")
    assert "not tried: head.gguf: is not a model but a head" in invoke(*words, str(tmp_path / "models")).err


def test_a_head_of_blocks_is_not_examined(invoke: Invoke, tmp_path: Path) -> None:
    target = write_model(tmp_path / "target.gguf", "llama", tokenizer="bytes", layers=4)
    head = write_block_head(tmp_path / "head.gguf", 32)
    outcome = invoke("doctor", str(target), str(head), "--budget-s", "5", "-t", "1", "-c", "256", "--json")
    (candidate,) = json.loads(outcome.out)["candidates"]
    assert "drafts blocks, and what one costs is learned as it answers" in candidate["error"]
