"""Charts: their scales, and where their labels lie."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from paceline.lab.charts import Group, Ratio, Scale, Series, draw_plot, draw_ratios, ticks


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.0, 1.0, 4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert all(3.1 <= value <= 47.9 for value in ticks(3.1, 47.9))


def test_scales_keep_what_is_outside_at_their_ends() -> None:
    scale = Scale(0.5, 2.0, 0.0, 100.0, logarithmic=True)
    assert (scale(0.5), scale(1.0), scale(2.0), scale(9.0)) == pytest.approx((0.0, 50.0, 100.0, 100.0))
    assert Scale(0.0, 4.0, 100.0, 0.0)(1.0) == pytest.approx(75.0)


def test_no_label_lies_where_lines_run() -> None:
    series = [Series("code", "c1", [(1, 0.0), (9, 1.0)], ["a", "b"]), Series("prose", "c2", [(1, 1.0), (9, 0.0)])]
    plot = draw_plot("title", ("x", "y"), (0, 9), (0, 1), series, shares="y", about="what")
    root = ElementTree.fromstring(plot)
    lines = [line for line in root.iter("line") if line.get("class") == "grid"]
    left, right = float(lines[0].get("x1", 0)), float(lines[0].get("x2", 0))
    rows = [float(line.get("y1", 0)) for line in lines]
    words = {label.text: (float(label.get("x", 0)), float(label.get("y", 0))) for label in root.iter("text")}
    assert {"title", "code", "prose", "x", "y", "0%", "100%", "2"} <= words.keys()
    for x, y in words.values():
        assert x < left or x > right or y < min(rows) or y > max(rows) + 8


def test_a_phone_has_room_for_the_marks_of_a_scale() -> None:
    page = draw_ratios([Group("a < b", [Ratio("auto", "auto", 1.07, (0.95, 3.9), 2.0)])], "what")
    root = ElementTree.fromstring(page)
    axis, *_ = root.iter("svg")
    places = sorted(float(label.get("x", "").removesuffix("%")) for label in axis.iter("text"))
    assert len(places) > 2
    assert all(after - before >= 15 for before, after in itertools.pairwise(places))
    assert "plain" in [label.text for label in axis.iter("text")]
    assert all(0 <= float(x) <= 100 for x in re.findall(r'x[12]?="([-\d.]+)%"', page))
