"""The picture of a race: well-formed, without scripts, whole where nothing moves, and at the recorded times."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from paceline.lab.race import Lane, Piece, Race

DOCS = Path(__file__).parents[2] / "docs"
WORDS = ["def ", "f(x):\n", "\treturn ", "x < ", "1 & 2\n", "# a line that is longer than a lane and so goes on below"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def draw_race() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_race", DOCS / "draw_race.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["draw_race"] = module
    spec.loader.exec_module(module)
    return module


def race(speculative_s: float = 2.0) -> Race:
    def lane(seconds: float, sources: list[str]) -> list[Piece]:
        return [
            Piece(word, source, seconds * index / (len(WORDS) - 1))
            for index, (word, source) in enumerate(zip(WORDS, sources, strict=True))
        ]

    token_ids = tuple(range(len(WORDS)))
    drafted = Lane(
        token_ids, lane(speculative_s, ["target", *["draft"] * 4, "suffix"]), 5, 5, {"draft": 4, "suffix": 1}
    )
    return Race("", Lane(token_ids, lane(5.0, ["target"] * len(WORDS))), drafted)


def texts(svg: str) -> str:
    return "\n".join("".join(each.itertext()) for each in ElementTree.fromstring(svg).iter(f"{SVG}text"))


def test_the_picture_is_whole_without_motion(draw_race: ModuleType) -> None:
    svg = draw_race.drawn(race(), "a machine & its name")
    assert not re.search(r"<script|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", svg)
    shown = texts(svg)
    assert "same text, 2.5x" in shown
    assert "a machine & its name" in shown
    assert "draft 4, suffix 1" in shown
    assert shown.count("x < ") == 2
    # Nothing is hidden but by the animation, which only those get who want motion.
    still = re.sub(r"@media \(prefers-reduced-motion:no-preference\)\{.*?\}\}(?=</style>)", "", svg)
    assert "opacity" not in still
    assert "opacity" in svg


def test_tokens_appear_at_their_times(draw_race: ModuleType) -> None:
    svg = draw_race.drawn(race(), "")
    cycle_s = 5.0 + draw_race.HOLD_S
    last = re.search(r'<text class="(t\d+)"><tspan[^>]*># a line that is longer', svg)
    assert last is not None
    hidden = re.search(rf"@keyframes {last[1]}{{0%,([\d.]+)%{{opacity:0}}", svg)
    assert hidden is not None
    assert float(hidden[1]) / 100 * cycle_s == pytest.approx(5.0, abs=0.05)
    # What is there from the beginning has no rule.
    assert "@keyframes t0{" not in svg


def test_lines_are_broken_where_the_lane_ends(draw_race: ModuleType) -> None:
    runs = list(draw_race.laid_out(race().plain.pieces))
    assert all(run.column + len(run.text) <= draw_race.COLUMNS for run in runs)
    lines: dict[int, str] = {}
    for run in runs:
        assert run.column == len(lines.get(run.line, ""))
        lines[run.line] = lines.get(run.line, "") + run.text
    assert list(lines.values())[:3] == ["def f(x):", "    return x < 1 & 2", lines[2]]
    assert len(lines[2]) == draw_race.COLUMNS
    assert lines[2] + lines[3] == WORDS[-1]


def test_only_a_race_that_was_won_is_drawn(
    draw_race: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, output = tmp_path / "race.json", tmp_path / "race.svg"
    monkeypatch.setattr(sys, "argv", ["draw_race.py", str(recording), "--on", "here", "--output", str(output)])
    recording.write_text(json.dumps({"target": "a target", "races": [race(6.0).to_json()]}), encoding="utf-8")
    with pytest.raises(SystemExit, match="'slower'"):
        draw_race.main()
    assert not output.exists()
    recording.write_text(json.dumps({"target": "a target", "races": [race().to_json()]}), encoding="utf-8")
    draw_race.main()
    assert "a target, here" in texts(output.read_text(encoding="utf-8"))


def test_the_picture_in_the_documentation_is_one_of_these() -> None:
    svg = (DOCS / "race.svg").read_text(encoding="utf-8")
    assert re.search(r"same text, \d+\.\dx", texts(svg))
    assert len(svg) < 60_000
