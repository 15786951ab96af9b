"""``paceline profile`` as its users call it, on engines whose costs are known."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.errors import EngineError
from paceline.engines.options import ModelOptions
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.planning.costs.profile import CostProfile
from tests.cli.invoking import Invoke
from tests.cli.terminal import CTRL_C, Terminal

# Milliseconds by rows, with a cliff down from 3 to 4.
STAIRCASE = {1: 16.0, 2: 26.0, 3: 37.0, 4: 24.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


class Engines:
    """Scripted engines in place of models, in virtual time; remembers what was opened and what is still open."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.opened: list[ModelOptions] = []
        self.made: list[ScriptedEngine] = []
        self.slower = 1.0

    def open(self, options: ModelOptions) -> ScriptedEngine:
        self.opened.append(options)
        is_target = len(self.opened) % 2 == 1

        def cost(rows: int, context: int) -> float:
            if is_target:
                return self.slower * STAIRCASE.get(rows, min(10.0 * rows, 160.0)) / 1e3 + 1e-6 * context
            return 2e-3 + 1e-5 * rows

        model, vocabulary = random_model(8, seed=1), ScriptedVocabulary.of_size(8)
        engine = ScriptedEngine(
            model, vocabulary, cost=cost, clock=self.clock, max_sequences=options.max_sequences, max_outputs=16
        )
        self.made.append(engine)
        return engine

    @property
    def all_closed(self) -> bool:
        return all(engine._closed for engine in self.made)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    engines = Engines()
    for module in ("paceline.model_pair", "paceline.planning.costs.attention"):
        monkeypatch.setattr(f"{module}.open_engine", engines.open)
    monkeypatch.setattr("paceline.planning.costs.profiling.WallClock", lambda: engines.clock)
    yield engines
    assert engines.all_closed


def rows_of(table: str) -> dict[int, list[str]]:
    """Return the figures of each line of the first table in a report."""
    lines = table.split("\ndraft:")[0].splitlines()
    words = [line.split() for line in lines]
    return {int(line[0]): line[1:] for line in words if line and line[0].isdigit() and len(line) > 5}


def test_the_staircase_is_printed_with_its_cliffs(invoke: Invoke, engines: Engines) -> None:
    outcome = invoke("profile", "--budget-s", "20")
    assert outcome.status == 0
    table = rows_of(outcome.out)
    # rows: median, quartiles, ms a row, tokens a second if all accepted, bar
    assert table[3][:6] == ["37.0", "37.0", "–", "37.0", "12.3", "81.0"]
    assert table[4][:5] == ["24.0", "24.0", "–", "24.0", "6.01"]
    assert table[4][-1] == "↓"
    assert table[3][-1] != "↓"
    lengths = {rows: len(line[6]) for rows, line in table.items()}
    assert lengths[16] == max(lengths.values())
    assert lengths[3] > lengths[4] > lengths[1]
    assert "↓ costs less than a narrower pass" in outcome.out
    assert "tokens fed" in outcome.out
    slope = "round: 1,000 more tokens of context add 1.00 ms, and 0.000 ms a row (measured from 32 to "
    assert slope in outcome.out
    assert "draft pass: 1,000 more tokens" in outcome.out
    assert "\x1b" not in outcome.out
    assert outcome.err.startswith("kept at ")
    assert [options.path for options in engines.opened] == [embedded_target(), embedded_draft()]


def test_it_is_measured_once_and_again_by_force(invoke: Invoke, engines: Engines, cache: Path) -> None:
    first = invoke("profile")
    engines.slower = 1.2
    second = invoke("profile")
    assert second.out == first.out
    assert "measured before" in second.err
    third = invoke("profile", "--force")
    assert rows_of(third.out)[3][0] == "44.4"
    assert len(list(cache.iterdir())) == 1
    assert rows_of(invoke("profile", "-t", "1").out)[3][0] == "44.4"
    assert len(list(cache.iterdir())) == 2


def test_it_is_measured_again_where_the_machine_has_changed(invoke: Invoke, engines: Engines) -> None:
    invoke("profile")
    engines.slower = 3.0
    again = invoke("profile")
    assert rows_of(again.out)[3][0] == "111"
    assert "measured before" not in again.err


def test_a_spoiled_entry_is_measured_again(invoke: Invoke, engines: Engines, cache: Path) -> None:
    invoke("profile")
    (entry,) = cache.iterdir()
    entry.write_text("{")
    outcome = invoke("profile")
    assert outcome.status == 0
    assert "kept at" in outcome.err
    assert json.loads(entry.read_text())["data"]["target"]


def test_json_goes_to_standard_output_or_a_file(invoke: Invoke, engines: Engines, tmp_path: Path, cache: Path) -> None:
    outcome = invoke("profile", "--json")
    facts = json.loads(outcome.out)
    profile = CostProfile.from_json(facts["profile"])
    assert profile.round_s(3, 32) == pytest.approx(0.037, rel=1e-2)
    assert profile.draft is not None
    assert facts["target"] == facts["draft"] == "scripted model in float64"
    assert facts["measured_now"] is True
    assert Path(facts["kept_at"]).parent == cache
    file = tmp_path / "profile.json"
    outcome = invoke("profile", f"--json={file}")
    assert "quartiles" in outcome.out
    written = json.loads(file.read_text())
    assert written["profile"] == facts["profile"]
    assert written["measured_now"] is False


def test_widths_can_be_chosen(invoke: Invoke, engines: Engines) -> None:
    assert set(rows_of(invoke("profile", "--widths", "3-5,9").out)) >= {1, 3, 4, 5, 9}
    assert "measured before" in invoke("profile", "--widths", "9").err


def test_widths_there_was_no_time_for_are_named(invoke: Invoke, engines: Engines) -> None:
    outcome = invoke("profile", "--widths", "1-16", "--budget-s", "0.2")
    assert outcome.status == 0
    assert "not measured for lack of time: " in outcome.err
    assert "16 rows; raise --budget-s" in outcome.err


def test_a_width_that_the_target_cannot_take_is_refused(invoke: Invoke, engines: Engines, cache: Path) -> None:
    said = "a round of 17 rows (--widths) cannot be measured: this target takes 16 rows in a round"
    status, out, err = invoke("profile", "--widths", "17")
    assert (status, out, err.startswith(f"paceline: {said}")) == (2, "", True)
    assert not cache.exists()


def test_the_budget_is_kept(invoke: Invoke, engines: Engines) -> None:
    invoke("profile", "--budget-s", "3")
    assert engines.clock.now_s() < 3.3


def test_a_target_alone_and_several_requests(invoke: Invoke, engines: Engines, tmp_path: Path) -> None:
    outcome = invoke("profile", "-m", "target", "-np", "4")
    assert outcome.status == 0
    assert "draft" not in outcome.out.replace("accepted", "")
    assert "each further request in a round adds 0.00" in outcome.out
    (options,) = engines.opened
    assert options.max_sequences == 4


def test_a_context_that_there_was_no_time_for_says_what_it_takes(invoke: Invoke, engines: Engines) -> None:
    outcome = invoke("profile")
    assert outcome.status == 0
    assert "round: what more context than 32 tokens adds was not measured: it takes a larger --budget-s" in outcome.out


@pytest.mark.parametrize(
    ("threads", "of_the_draft"),
    [((), (3, 2)), (("-td", "1"), (1, None)), (("-tbd", "4"), (3, 4)), (("-td", "1", "-tbd", "4"), (1, 4))],
)
def test_settings_reach_the_engines(
    invoke: Invoke, engines: Engines, threads: tuple[str, ...], of_the_draft: tuple[int, int | None]
) -> None:
    outcome = invoke(
        *("profile", "-m", "target", "-md", "draft", "-t", "3", "-tb", "2", "-c", "512", "-cd", "64", "-ngl", "1"),
        *("-ngld", "2", "-dev", "none", "-devd", "a,b", "-fa", "on", *threads),
    )
    assert outcome.status == 0
    target, draft = engines.opened
    assert (target.threads, target.threads_batch, target.context_length) == (3, 2, 512)
    assert (target.gpu_layers, target.devices, target.context_may_shrink) == (1, ("none",), False)
    assert (target.flash_attention, draft.flash_attention) == (True, True)
    assert (draft.context_length, draft.gpu_layers, draft.devices) == (64, 2, ("a", "b"))
    assert (draft.threads, draft.threads_batch) == of_the_draft
    assert (draft.branches, draft.context_may_shrink) == (0, False)


def test_an_encoding_without_blocks_gets_plain_characters(
    invoke: Invoke, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cli.profile.can_encode", lambda text, encoding: False)
    out = invoke("profile").out
    assert out.isascii()
    assert rows_of(out)[4][-1] == "<"
    assert "####" in out


def test_a_page_to_look_at(invoke: Invoke, engines: Engines, tmp_path: Path) -> None:
    path = tmp_path / "profile.html"
    assert invoke("profile", "--html", str(path)).status == 0
    page = path.read_text(encoding="utf-8")
    target, draft = map(ElementTree.fromstring, re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert len(target.findall(".//circle")) == 16
    assert "3 rows: 37 ms, quartiles 37 to 37" in {title.text for title in target.iter("title")}
    assert draft.attrib["aria-label"] == "Time of a pass by its rows: draft"
    assert re.search(r"threads \d+", page)
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\(|src=", page)


def test_an_engine_that_fails_is_no_bad_input(
    invoke: Invoke, engines: Engines, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def fail(self: ScriptedEngine, steps: object) -> None:
        raise EngineError("the pass failed")

    monkeypatch.setattr(ScriptedEngine, "forward", fail)
    outcome = invoke("profile")
    assert (outcome.status, outcome.out, outcome.err) == (1, "", "paceline: the pass failed\n")
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_said_and_not_fatal(invoke: Invoke, engines: Engines, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    outcome = invoke("profile")
    assert outcome.status == 0
    assert rows_of(outcome.out)[3][0] == "37.0"
    assert "could not be kept" in outcome.err


def test_the_embedded_pair_is_measured(invoke: Invoke) -> None:
    outcome = invoke("profile", "-t", "1", "--budget-s", "0.3", "--json")
    assert outcome.status == 0
    facts = json.loads(outcome.out)
    profile = CostProfile.from_json(facts["profile"])
    assert profile.draft is not None
    assert "target-q8_0.gguf" in facts["target"]
    assert "draft-q8_0.gguf" in facts["draft"]
    assert profile.round_s(1) > 1e-5
    assert profile.sampling_row_s > 0


def test_ctrl_c_ends_it_with_nothing_kept(cache: Path) -> None:
    """Once the progress shows that measuring has begun."""
    with Terminal(["profile", "-t", "1", "--budget-s", "600", "--widths", "1-256"]) as terminal:
        terminal.wait_for("measuring")
        terminal.type(CTRL_C)
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.shown
    assert not cache.exists()
