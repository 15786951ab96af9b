"""The report's page: it needs nothing else, says what was measured, and copes with whatever is missing."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from io import StringIO
from typing import Any, Literal

import pytest
from rich.console import Console

from paceline.lab.bench import charts
from paceline.lab.bench.page import render
from paceline.lab.bench.results import BenchResult
from paceline.lab.bench.runner import Runner
from paceline.lab.bench.settings import BenchSettings
from paceline.lab.bench.table import FIGURES, print_result, unrest_words
from paceline.lab.svg import Scale, ticks
from tests.lab.scripted_pairs import constant_model, engines, profile

SNAPSHOT = {
    "calibration": {"draft": [(0.1, 0.15, 40), (0.9, 0.88, 300)], "suffix": [(0.5, 0.45, 20), (0.7, 0.0, 0)]},
    "ledger": [(0, 0.0, 0.02), (16, 0.01, 0.03), (32, -0.05, 0.04)],
}


def result(**changes: Any) -> BenchResult:
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


def test_every_picture_is_well_formed_and_says_what_it_shows(whole: BenchResult) -> None:
    pictures = re.findall(r"<svg.*?</svg>", render(whole), flags=re.DOTALL)
    assert len(pictures) >= 6
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("aria-label")
        assert "nan" not in picture
        assert "inf" not in picture


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
    assert "nothing measured" in page
    assert "plain output loops" in page


def test_a_machine_that_was_not_quiet_is_told_of() -> None:
    found = result()
    assert found.noise == pytest.approx((1.0, 1.0))
    assert unrest_words(found) is None
    (pair, *_) = found.workloads[1].variants[0].pairs
    slower = dataclasses.replace(pair.trial, speculative=0.8 * pair.trial.plain_before)
    found.workloads[1].variants[0].pairs[0] = dataclasses.replace(pair, trial=slower, seconds=pair.seconds / 0.8)
    assert found.noise == pytest.approx((0.8, 1.0))
    words = unrest_words(found)
    assert words is not None
    assert "0.80 to 1.00 of its own speed" in words
    assert "(-t)" in words
    assert words in render(found)
    console = Console(file=StringIO(), width=500)
    print_result(console, found)
    assert f"note: {words}" in console.file.getvalue()  # type: ignore[attr-defined]


def printed(found: BenchResult, *, colour: bool = False, width: int = 500) -> str:
    screen = StringIO()
    system: Literal["standard"] | None = "standard" if colour else None
    print_result(Console(file=screen, width=width, force_terminal=colour, color_system=system), found)
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
    left_out = [column for column in FIGURES if column not in headings]
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


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.0, 1.0, 4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert all(3.1 <= value <= 47.9 for value in ticks(3.1, 47.9))


def test_scales_keep_what_is_outside_at_their_ends() -> None:
    scale = Scale(0.5, 2.0, 0.0, 100.0, logarithmic=True)
    assert (scale(0.5), scale(1.0), scale(2.0), scale(9.0)) == pytest.approx((0.0, 50.0, 100.0, 100.0))
    assert Scale(0.0, 4.0, 100.0, 0.0)(1.0) == pytest.approx(75.0)
