"""Models larger than memory on the command line: what is said at load, and how far a first pass is."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from rich.console import Console

from paceline.cli import progress, report
from paceline.cli.progress import show_prompt_progress
from paceline.cli.report import memory_json, print_memory_plan
from paceline.engines.llama_cpp.streaming import LayerStream
from paceline.engines.memory import MemoryPlan
from tests.cli.invoking import FAST, Invoke
from tests.engines.streamed import exact_target, mostly_streamed

RUN = ("run", "-p", "def f(x):", "-c", "128", *FAST)

streams = pytest.mark.skipif(sys.platform != "linux", reason="weights are streamed on Linux alone")


@pytest.fixture
def target() -> Path:
    return exact_target()


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
    assert outcome.err.startswith("20M of memory are used by\n")
    for part in ("buffer for streamed layers", "KV cache and scratch", "Python"):
        assert re.search(rf"^{part} +[\d.]+ [MG]B$", outcome.err, re.M)
    assert re.search(
        r"^every pass reads [\d.]+ MB, at [\d.]+ [MG]B/s: [\d.e-]+ s for a token without drafts$", outcome.err, re.M
    )


@streams
def test_json_says_it_too(invoke: Invoke, target: Path) -> None:
    outcome = invoke(*RUN, "-m", str(target), "--memory", "20M", "--no-speculation", "--json")
    told = json.loads(outcome.out)["memory"]
    assert told["total_bytes"] == 20 << 20
    assert told["pass_bytes"] > told["ring_bytes"] > 0
    assert json.loads(invoke(*RUN, "-m", str(target), "--no-speculation", "--json").out)["memory"] is None


@streams
def test_its_own_copy_drafts_where_no_draft_is_named_and_that_is_said(invoke: Invoke, target: Path) -> None:
    plain = invoke(*RUN, "-m", str(target), "--memory", "40M", "--no-speculation")
    outcome = invoke(*RUN, "-m", str(target), "--memory", "40M")
    assert outcome.status == 0, outcome.err
    assert outcome.out == plain.out
    assert "target-f32.gguf does not fit into memory: its own copy in Q4_0 drafts (-md for another)\n" in outcome.err
    assert "draft model" in outcome.err
    named = invoke(*RUN, "-m", str(target), "--memory", "40M", "-md", "draft")
    assert named.out == plain.out
    assert "its own copy" not in named.err


@streams
def test_where_its_own_copy_cannot_be_made_it_is_done_without(
    invoke: Invoke, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = invoke(*RUN, "-m", str(target), "--memory", "40M", "--no-speculation")
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    outcome = invoke(*RUN, "-m", str(target), "--memory", "40M")
    assert outcome.status == 0, outcome.err
    assert outcome.out == plain.out
    assert outcome.err.count("warning: no draft of the target's own: ") == 1
    assert "set PACELINE_CACHE to another folder; name one (-md), or none (--drafters suffix)" in outcome.err


@streams
def test_what_is_not_streamed_after_all_is_said_and_nothing_else_is_promised(
    invoke: Invoke, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = invoke(*RUN, "-m", str(target), "--stream", "off", "--no-speculation")
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: target.stat().st_size - 1)
    with patch.object(LayerStream, "least_bytes", 1 << 40):
        outcome = invoke(*RUN, "-m", str(target))
    assert outcome.status == 0, outcome.err
    assert outcome.out == plain.out
    assert "every pass" not in outcome.err
    assert outcome.err.count("warning: ") == 2
    assert "warning: no draft of the target's own: " in outcome.err
    assert re.search(
        r"warning: layers are not streamed, and the file is left to the system: [\d.]+[MG] of memory \(--memory\) are "
        r"too little for target-f32\.gguf: ",
        outcome.err,
    )


@streams
def test_names_of_files_need_not_be_text(invoke: Invoke, target: Path, tmp_path: Path) -> None:
    copy = tmp_path / os.fsdecode(b"d\xff") / os.fsdecode(b"m\xff\n\x0b x .gguf")
    copy.parent.mkdir()
    shutil.copyfile(target, copy)
    for options in (("--memory", "40M"), ("--memory", "40M", "--no-speculation")):
        outcome = invoke(*RUN, "-m", str(copy), *options)
        assert outcome.status == 0, outcome.err
        assert "every pass reads" in outcome.err


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
    assert list(show_prompt_progress(rounds(), engine)) == [1, 2]
    file.truncate(0)
    assert list(show_prompt_progress(iter([1, 2]), engine, silent=True)) == [1, 2]
    assert list(show_prompt_progress(iter([1, 2]), SimpleNamespace())) == [1, 2]
    assert file.getvalue().strip("\0") == ""


def test_what_costs_more_than_it_need_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(report, "error_console", lambda: Console(file=file, width=240))
    plan = MemoryPlan(
        total_bytes=8 << 30,
        process_bytes=60_000_000,
        draft_bytes=0,
        prompts_bytes=0,
        working_bytes=500_000_000,
        others_bytes=0,
        resident_bytes=7_000_000_000,
        ring_bytes=70_000_000,
        spare_bytes=40_000_000,
        pass_bytes=8_000_000_000,
        bytes_per_s=5e8,
        is_direct=False,
        experts=64,
    )
    print_memory_plan(plan)
    said = file.getvalue()
    assert said.startswith("8.0G of memory are used by\n")
    assert "draft model" not in said
    assert said.endswith(
        "every pass reads 8.00 GB, all 64 experts of each layer among them, at 500 MB/s: 16 s for a token without "
        "drafts; this file system has no reads past the page cache, which costs some of it\n"
    )
    assert memory_json(plan)["pass_bytes"] == 8_000_000_000
