"""Models larger than memory on the command line: what is said at load, and how far a first pass is."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from paceline.cli import progress
from paceline.cli.progress import after_first
from paceline.engines.llama_cpp import quantize_gguf
from paceline.models.embedded import embedded_target
from tests.cli.test_run import FAST, Invoke
from tests.engines.streamed import mostly_streamed

RUN = ("run", "-p", "def f(x):", "-c", "128", *FAST)

streams = pytest.mark.skipif(sys.platform != "linux", reason="weights are streamed on Linux alone")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target in F32: 52 MB."""
    path = tmp_path_factory.mktemp("models") / "target-f32.gguf"
    quantize_gguf(embedded_target(), path, "F32")
    return path


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Invoke]:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    with mostly_streamed():
        yield Invoke(monkeypatch, capsys)


@streams
def test_what_memory_goes_to_is_said_once(invoke: Invoke, target: Path) -> None:
    plain = invoke(*RUN, "-m", str(target), "--stream", "off", "--no-speculation")
    outcome = invoke(*RUN, "-m", str(target), "--memory", "20M", "--no-speculation")
    assert outcome.status == 0, outcome.err
    assert outcome.out == plain.out
    lines = outcome.err.splitlines()
    first = lines.index("20M of memory go to")
    table = {line.rsplit(maxsplit=2)[0].rstrip() for line in lines[first + 1 : first + 9]}
    assert table >= {"ring that the other layers go through", "text in the cache, and scratch", "Python"}
    assert re.search(
        r"^every pass reads [\d.]+ MB, at [\d.]+ [MG]B/s: [\d.e-]+ s for a token without drafts$", outcome.err, re.M
    )


@streams
def test_json_says_it_too(invoke: Invoke, target: Path) -> None:
    outcome = invoke(*RUN, "-m", str(target), "--memory", "20M", "--no-speculation", "--json")
    memory = json.loads(outcome.out)["memory"]
    assert memory["total_bytes"] == 20 << 20
    assert memory["pass_bytes"] > memory["ring_bytes"] > 0
    assert json.loads(invoke(*RUN, "-m", str(target), "--no-speculation", "--json").out)["memory"] is None


@streams
def test_its_own_copy_drafts_where_no_draft_is_named_and_that_is_said(invoke: Invoke, target: Path) -> None:
    plain = invoke(*RUN, "-m", str(target), "--memory", "40M", "--no-speculation")
    outcome = invoke(*RUN, "-m", str(target), "--memory", "40M")
    assert outcome.status == 0, outcome.err
    assert outcome.out == plain.out
    said = (
        "target-f32.gguf does not fit into memory: its layers are read for every pass, and its own copy in Q4_0 drafts"
    )
    assert f"{said} (-md for another)\n" in outcome.err
    assert "draft model" in outcome.err
    named = invoke(*RUN, "-m", str(target), "--memory", "40M", "-md", "draft")
    assert named.out == plain.out
    assert "its own copy" not in named.err


def test_a_terminal_shows_how_far_a_first_pass_is(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(progress, "error_console", lambda: Console(file=file, force_terminal=True, width=80))
    slow = SimpleNamespace(pass_share=0.0)

    def rounds() -> Iterator[int]:
        slow.pass_share = 0.43
        yield 1
        assert "first pass: " in file.getvalue()
        yield 2

    engine = SimpleNamespace(slow_passes=slow)
    assert list(after_first(rounds(), engine)) == [1, 2]
    file.truncate(0)
    assert list(after_first(iter([1, 2]), engine, silent=True)) == [1, 2]
    assert list(after_first(iter([1, 2]), SimpleNamespace())) == [1, 2]
    assert file.getvalue().strip("\0") == ""
