"""``paceline bench`` as its users call it, on scripted engines in virtual time, and once on the embedded pair."""

from __future__ import annotations

import errno
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.options import ModelOptions
from paceline.engines.scripted import ScriptedEngine
from paceline.lab.bench.forecast import QUICK_WORKLOADS
from paceline.models.embedded import embedded_target
from paceline.planning.auto.learned import DrafterState, Learned, store_learned
from paceline.planning.costs.profile_cache import KeptProfile, find_or_measure
from tests.cli.invoking import Invoke, spawn
from tests.lab.scripted_pairs import scripted_pair
from tests.models.helpers import write_gguf
from tests.timing import WAIT_S

SMALL = ("--repeats", "2", "--tokens", "16", "--prompts", "1")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for the target at the cost of a large model, which would take a gigabyte."""
    path = tmp_path / "target-large.gguf"
    path.symlink_to(embedded_target())
    monkeypatch.setattr("paceline.cli.bench.large_target", lambda file_type: path)
    return path


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModelOptions]]:
    """Open scripted engines in place of models; yields what they were asked for."""
    # Milliseconds, as measuring what passes cost has ten seconds.
    pair = scripted_pair(pass_s=(0.01,), level_s=0.0025)
    opened: list[ModelOptions] = []

    def open_engine(options: ModelOptions) -> ScriptedEngine:
        opened.append(options)
        return pair[len(opened) - 1]

    for module in ("paceline.model_pair", "paceline.planning.costs.attention"):
        monkeypatch.setattr(f"{module}.open_engine", open_engine)
    monkeypatch.setattr("paceline.lab.sessions.WallClock", lambda: pair[0].clock)
    monkeypatch.setattr("paceline.planning.costs.profiling.WallClock", lambda: pair[0].clock)
    yield opened
    assert all(engine._closed for engine in pair[: len(opened)])


def test_the_table_says_what_was_measured_and_how(invoke: Invoke, scripted: list[ModelOptions]) -> None:
    outcome = invoke("bench", *SMALL, "--workloads", "new-code,structured-forced", "--variants", "static,accept-ratio")
    assert outcome.status == 0, outcome.err
    for words in (
        "plain against plain",
        "draft-max 16, draft",
        "accept-ratio, draft",
        "equal (forced)",
        "made to follow",
        "best static",
        "by replay",
        "1 prompt of 128 tokens, answers of 16",
    ):
        assert words in outcome.out
    assert "new-code: lap 2 of 2" in outcome.err
    assert "\x1b" not in outcome.out + outcome.err
    assert len(scripted) == 2
    assert scripted[1].context_may_shrink


REMEMBERING = ("bench", *SMALL, "--workloads", "new-code", "--variants", "auto", "--remember")


def test_what_was_learned_is_started_with_if_that_is_asked_for(
    invoke: Invoke, scripted: list[ModelOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = Learned({"draft": DrafterState.new("draft", is_model=True)})

    def find(*arguments: Any, **options: Any) -> KeptProfile:
        kept = find_or_measure(*arguments, **options)
        assert kept.key is not None
        store_learned(kept.key, learned)
        return kept

    monkeypatch.setattr("paceline.cli.bench.find_or_measure", find)
    outcome = invoke(*REMEMBERING)
    assert outcome.status == 0, outcome.err
    assert "auto starts with what earlier runs had learned of draft" in outcome.out


def test_where_nothing_was_learned_there_is_nothing_to_start_with(invoke: Invoke, scripted: list[ModelOptions]) -> None:
    outcome = invoke(*REMEMBERING)
    assert outcome.status == 2
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("paceline:")]
    assert "nothing has been learned about these models with these options yet: leave out --remember" in line


def test_a_long_pair_says_how_far_it_is(invoke: Invoke, scripted: list[ModelOptions]) -> None:
    outcome = invoke("bench", *SMALL, "--repeats", "1", "--workloads", "mixed", "--variants", "auto")
    lines = [line for line in outcome.err.splitlines() if line.startswith("mixed: lap 1 of 1")]
    shares = [int(line.partition("(")[2].partition("%")[0]) for line in lines]
    assert shares == sorted(shares)
    assert len(shares) > 3
    assert shares[-1] > 70


def test_figures_and_a_page_go_to_files_beside_the_table(
    invoke: Invoke, scripted: list[ModelOptions], tmp_path: Path
) -> None:
    path, page = tmp_path / "bench.json", tmp_path / "bench.html"
    chosen = ("--workloads", "hard", "--variants", "static")
    outcome = invoke("bench", *SMALL, *chosen, f"--json={path}", "--html", str(page))
    assert outcome.status == 0, outcome.err
    assert "plain against plain" in outcome.out
    assert f"to look at: {page}" in outcome.err
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "hard" in page.read_text(encoding="utf-8")
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert [workload["name"] for workload in facts["workloads"]] == ["hard"]
    assert facts["temperature"] == 0.0
    assert {"paceline", "numpy", "system", "processor"} <= set(facts["machine"])
    assert list(tmp_path.glob(".*partial")) == []


def test_a_reader_who_leaves_early_takes_no_figures_with_him(
    invoke: Invoke, scripted: list[ModelOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("paceline.cli.bench.print_report", leave)
    # The command gives up its standard output then.
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    figures, page = tmp_path / "bench.json", tmp_path / "bench.html"
    chosen = ("--workloads", "hard", "--variants", "auto")
    outcome = invoke("bench", *SMALL, *chosen, f"--json={figures}", "--html", str(page))
    assert outcome.status == 1
    assert [workload["name"] for workload in json.loads(figures.read_text(encoding="utf-8"))["workloads"]] == ["hard"]
    assert "</html>" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("full", ["--json", "--html"])
def test_a_disk_that_is_full_takes_no_figures_either(
    full: str, invoke: Invoke, scripted: list[ModelOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {"--json": tmp_path / "bench.json", "--html": tmp_path / "bench.html"}

    def write_text(path: Path, text: str, encoding: str) -> int:
        if paths[full].name in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return path.write_bytes(text.encode(encoding))

    monkeypatch.setattr(Path, "write_text", write_text)
    outputs = [f"{option}={path}" for option, path in paths.items()]
    outcome = invoke("bench", *SMALL, "--workloads", "hard", "--variants", "auto", *outputs)
    assert outcome.status == 2
    assert "plain against plain" in outcome.out
    assert f"paceline: {paths[full]} cannot be written: No space left on device" in outcome.err
    assert {option for option, path in paths.items() if path.exists()} == paths.keys() - {full}
    assert (f"all figures: {paths['--json']}" in outcome.err) == (full == "--html")


@pytest.mark.parametrize(("seed", "low", "high"), [("-5", 2**32 - 5, 2**32 - 5), ("-1", 0, 2**32 - 1)])
def test_all_variants_have_one_seed(
    invoke: Invoke, scripted: list[ModelOptions], seed: str, low: int, high: int
) -> None:
    outcome = invoke("bench", *SMALL, "--workloads", "hard", "--variants", "static", "--seed", seed, "--json")
    assert low <= json.loads(outcome.out)["seed"] <= high


def test_without_a_draft_model_the_others_draft(invoke: Invoke, scripted: list[ModelOptions], tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf")
    outcome = invoke(
        "bench", "-m", str(model), *SMALL, "--workloads", "editing-forced", "--variants", "static", "--json"
    )
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["drafters"] == ["suffix", "lookup"]
    assert len(scripted) == 1


def test_quick_chooses_its_workloads_and_fewer_variants(invoke: Invoke, scripted: list[ModelOptions]) -> None:
    outcome = invoke("bench", "--quick", "--tokens", "16", "--prompts", "1", "--repeats", "1", "--json")
    assert outcome.status == 0, outcome.err
    facts = json.loads(outcome.out)
    assert tuple(workload["name"] for workload in facts["workloads"]) == QUICK_WORKLOADS
    kinds = {variant["kind"] for workload in facts["workloads"] for variant in workload["variants"]}
    assert {"plain", "static"} <= kinds <= {"plain", "static", "auto"}
    assert facts["ended_by"] == "done"


@pytest.mark.parametrize(
    ("arguments", "is_large"),
    [(("--quick",), True), (("--quick", "-m", "target", "-md", "draft"), False), ((), False)],
)
def test_quick_measures_the_target_at_the_cost_of_a_large_model(
    arguments: tuple[str, ...], is_large: bool, invoke: Invoke, scripted: list[ModelOptions], large: Path
) -> None:
    outcome = invoke("bench", *arguments, *SMALL, "--workloads", "hard", "--variants", "static")
    assert outcome.status == 0, outcome.err
    assert Path(scripted[0].path) == (large if is_large else embedded_target())
    assert len(scripted) == 2


@pytest.mark.long
def test_control_c_keeps_what_is_done_on_the_embedded_pair(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    process = spawn(
        *("bench", "-t", "1", "--workloads", "structured-forced", "--variants", "static", "--drafters", "suffix"),
        *("--tokens", "24", "--prompts", "1", "--repeats", "100000", f"--json={path}"),
        # A test that waits in vain has an end.
        *("--time-limit", "120"),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if b"lap 2 of" in line:
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert b"plain against plain" in out
    assert b"ended by interrupt" in out
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert facts["ended_by"] == "interrupt"
    assert len(facts["workloads"][0]["variants"][0]["pairs"]) >= 1
