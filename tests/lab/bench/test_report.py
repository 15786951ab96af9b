"""A bench's report: its page needs nothing else, says what was measured, and copes with whatever is missing."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import xml.etree.ElementTree as ElementTree
from io import StringIO
from typing import Any, Literal

import pytest
from rich.console import Console

from paceline.lab.bench import charts
from paceline.lab.bench.report import build_report, describe_unrest
from paceline.lab.bench.results import BenchResult
from paceline.lab.bench.runner import Runner
from paceline.lab.bench.settings import BenchSettings
from paceline.lab.report import Table, print_report, render_page
from tests.lab.scripted_pairs import constant_model, engines, profile

SNAPSHOT = {
    "calibration": {"draft": [(0.1, 0.15, 40), (0.9, 0.88, 300)], "suffix": [(0.5, 0.45, 20), (0.7, 0.0, 0)]},
    "ledger": [(0, 0.0, 0.02), (16, 0.01, 0.03), (32, -0.05, 0.04)],
}


@functools.cache
def measured(**changes: Any) -> BenchResult:
    values: dict[str, Any] = {
        "workloads": ("new-code", "structured-forced"),
        "variants": ("static", "accept-ratio"),
        "drafters": ("draft", "suffix"),
        "laps": 2,
        "tokens": 24,
        "prompts": 1,
    }
    target = changes.pop("target", None)
    return Runner(engines(target=target), profile(), BenchSettings(**{**values, **changes})).run()


def result(**changes: Any) -> BenchResult:
    """Return results that may be changed."""
    found = measured(**changes)
    return copy.deepcopy(found, {id(found.profile): found.profile})  # frozen, and compiled it cannot be copied


def render(found: BenchResult) -> str:
    return render_page(build_report(found))


@pytest.fixture(scope="module")
def whole() -> BenchResult:
    found = result()
    found.workloads[0].variants[-1].snapshot = SNAPSHOT
    return found


def test_the_page_needs_nothing_from_anywhere(whole: BenchResult) -> None:
    page = render(whole)
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\(|src=", page)
    assert "$" not in page
    assert "prefers-color-scheme: dark" in page


def test_every_chart_is_well_formed_and_says_what_it_shows(whole: BenchResult) -> None:
    figures = re.findall(r"<figure>(.*?)</figure>", render(whole), flags=re.DOTALL)
    assert len(figures) >= 6
    for figure in figures:
        root = ElementTree.fromstring(f"<figure>{figure}</figure>")
        assert root[-1].get("aria-label")
        assert "nan" not in figure
        assert "inf" not in figure


def test_the_figures_are_those_of_the_table(whole: BenchResult) -> None:
    page = render(whole)
    for workload in whole.workloads:
        for each in workload.variants:
            ratio = each.ratio()
            assert ratio is not None
            assert f"{ratio.median:.2f}×" in page
    assert "plain against plain" in page
    assert "the target is made to follow a text" in page
    assert "equal (forced)" in page


def test_what_a_policy_says_of_itself_is_drawn_if_it_does(whole: BenchResult) -> None:
    policy = whole.workloads[0].variants[-1]
    policy.variant = dataclasses.replace(policy.variant, kind="auto", name="auto")
    page = render(whole)
    assert "Predicted against actual" in page
    assert "The ledger" in page
    assert "Predicted against actual" not in render(result())


def test_names_are_escaped() -> None:
    found = result(workloads=("new-code",), variants=("static",))
    found.target = "<b>model & co</b>"
    found.notes.append("a < b")
    page = render(found)
    assert "<b>model" not in page
    assert "&lt;b&gt;model &amp; co" in page
    assert "a &lt; b" in page


def test_a_report_of_nothing_still_renders() -> None:
    page = render(result(target=constant_model(), workloads=("new-code",)))
    assert "nothing was measured here" in page
    assert "plain output loops" in page


def test_a_machine_that_was_not_quiet_is_told_of() -> None:
    found = result()
    assert found.noise == pytest.approx((1.0, 1.0))
    assert describe_unrest(found) is None
    (pair, *_) = found.workloads[1].variants[0].pairs
    slower = dataclasses.replace(pair.trial, speculative=0.8 * pair.trial.plain_before)
    found.workloads[1].variants[0].pairs[0] = dataclasses.replace(pair, trial=slower, seconds=pair.seconds / 0.8)
    assert found.noise == pytest.approx((0.8, 1.0))
    words = describe_unrest(found)
    assert words is not None
    assert "0.80 to 1.00 of its own speed" in words
    assert "(-t)" in words
    assert words in render(found)
    assert f"note: {words}" in printed(found)


def printed(found: BenchResult, *, colour: bool = False, width: int = 500) -> str:
    screen = StringIO()
    system: Literal["standard"] | None = "standard" if colour else None
    console = Console(file=screen, width=width, force_terminal=colour, color_system=system)
    print_report(console, build_report(found))
    return screen.getvalue()


@pytest.mark.parametrize("width", [80, 120, 160])
def test_every_width_has_room_for_the_names_and_the_verdict(whole: BenchResult, width: int) -> None:
    def rows(shown: str) -> list[list[str]]:
        return [re.split(r" {2,}", line.strip()) for line in shown.splitlines()]

    narrow = printed(whole, width=width)
    assert max(map(len, narrow.splitlines())) <= width
    headings, *_ = [cells for cells in rows(narrow) if cells[0] == "variant"]
    assert {"t/s", "of plain", "95%", "texts"} <= {*headings}
    wide = [cells for cells in rows(printed(whole)) if cells[-1].startswith("equal")]
    assert [(cells[0], cells[-1]) for cells in rows(narrow) if cells[-1].startswith("equal")] == [
        (cells[0], cells[-1]) for cells in wide
    ]
    (table, *_) = (
        block for section in build_report(whole).sections for block in section.blocks if isinstance(block, Table)
    )
    left_out = [column for column in table.columns if column not in headings]
    assert bool(left_out) is (f"not shown on {width} columns: {', '.join(left_out)}\n" in narrow)
    assert left_out or width > 80
    assert not left_out or width < 160


def test_what_drafted_nothing_is_not_marked_as_faster() -> None:
    found = result(variants=("static",))
    variants = found.workloads[0].variants
    assert "nothing drafted" not in render(found) + printed(found)
    for each in variants[1:]:
        each.pairs = [
            dataclasses.replace(pair, num_drafted=0, trial=dataclasses.replace(pair.trial, speculative=9.0))
            for pair in each.pairs
        ]
    for row in (line for line in printed(found, colour=True).splitlines() if "nothing drafted" in line):
        assert "\x1b[32m" not in row
    workload, *_ = printed(found).split(found.workloads[1].name)
    assert workload.count("nothing drafted") == len(variants) - 1
    assert f"{found.workloads[0].name}, nothing drafted" not in render(found)  # it gains least in the other one
    found.workloads = found.workloads[:1]
    assert f"best static setting of each workload: {found.workloads[0].name}, nothing drafted" in render(found)


def test_a_single_pair_has_no_interval_to_draw() -> None:
    page = render(result(laps=1))
    assert "nan" not in page


def test_calibration_and_ledger_are_read_leniently() -> None:
    assert charts.read_calibration(None) == {}
    assert charts.read_calibration({}) == {}
    assert charts.read_calibration(SNAPSHOT)["suffix"] == [(0.5, 0.45, 20.0)]
    assert charts.read_ledger({"ledger": None}) == []
