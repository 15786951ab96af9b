"""Draws docs/race.svg, the race in the README: ``paceline demo --json | python docs/draw_race.py --on "two cores"``.

The picture is animated by CSS alone: every token appears at its recorded time, the ending stays for a while, and all
begins again. Where nothing is animated (printed, converted, or for readers who want less motion) it shows the ending.
"""

from __future__ import annotations

import argparse
import json
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from paceline.core.request import SOURCE_TARGET
from paceline.lab.charts import label, tag, tooltip
from paceline.lab.race import Lane, Piece, Race

COLUMNS: Final = 46
"""Characters of a line in a lane."""

CHARACTER: Final = 7.22
"""Pixels of a character, to which each line is fitted whatever font a reader has."""

LINE: Final = 17.0
SIZE: Final = 12.0
LANE: Final = COLUMNS * CHARACTER + 28
GAP: Final = 20.0
WIDTH: Final = 2 * LANE + GAP
TOP: Final = 46.0
FRAME_S: Final = 0.04
"""Seconds to which times are rounded, as each one needs a rule of its own: an eye sees no difference."""

HOLD_S: Final = 4.0
"""Seconds for which the ending stays before the race begins again."""

STYLE: Final = """
svg{--ink:#1b2430;--soft:#5b6776;--card:#fff;--line:#d5dbe2;
--draft:#00805d;--suffix:#0072b2;--lookup:#a8508a;--win:#c45200}
@media (prefers-color-scheme:dark){svg{--ink:#e8edf3;--soft:#9aa7b6;--card:#161c24;--line:#333f4d;
--draft:#3ec9a0;--suffix:#56b4e9;--lookup:#d99ac2;--win:#ff9d4d}}
text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:var(--ink);white-space:pre}
.soft,.prompt{fill:var(--soft)}.name{font-weight:700;font-size:13px}.verdict{font-weight:700;font-size:19px;fill:var(--win)}
.card{fill:var(--card);stroke:var(--line)}.bar{fill:var(--soft)}.bar.speculative{fill:var(--win)}.track{fill:var(--line)}
.draft{fill:var(--draft)}.suffix{fill:var(--suffix)}.lookup{fill:var(--lookup)}.draft,.suffix,.lookup{font-weight:700}
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Characters of one line that came at one time from one source."""

    line: int
    column: int
    text: str
    source: str
    at_s: float


def main() -> None:
    """Read a recording, and draw its first race."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", nargs="?", help="of paceline demo --json; standard input by default")
    parser.add_argument("--on", required=True, help="the machine, for the caption")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("race.svg"))
    given = parser.parse_args()
    text = Path(given.recording).read_text(encoding="utf-8") if given.recording else sys.stdin.read()
    facts = json.loads(text)
    race = Race.from_json(facts["races"][0])
    if race.verdict != "faster":
        raise SystemExit(f"this race ended {race.verdict!r}: record one that is worth a picture")
    given.output.write_text(drawn(race, f"{facts['target'].strip()}, {given.on}"), encoding="utf-8")


def drawn(race: Race, caption: str) -> str:
    """Return the picture."""
    lanes = (("plain", race.plain), ("speculative", race.speculative))
    runs = [list(laid_out(lane.pieces)) for _, lane in lanes]
    lines = 1 + max(run.line for each in runs for run in each)
    card = TOP + lines * LINE + 10
    height = card + 92
    cycle_s = race.seconds + HOLD_S
    times = sorted({run.at_s for each in runs for run in each} | {shown_at(lane.seconds) for _, lane in lanes})
    names = {at_s: f"t{index}" for index, at_s in enumerate(times)}
    body = [tooltip(about(race)), tag("style", STYLE + animation(names, lanes, cycle_s))]
    for index, (name, lane) in enumerate(lanes):
        x = index * (LANE + GAP)
        body.append(tag("rect", class_="card", x=x + 0.5, y=0.5, width=LANE - 1, height=card, rx=9))
        body.append(label(x + 14, 25, name, class_="name"))
        figures = f"{lane.seconds:.1f} s   {lane.per_second:.1f} tokens/s"
        body.append(label(x + LANE - 14, 25, figures, class_=names[shown_at(lane.seconds)], text_anchor="end"))
        for group in grouped(runs[index]):
            body.append(tag("text", "".join(spelled(run, x) for run in group), class_=names[group[0].at_s]))
        bar = {"x": x + 14, "y": card - 7, "width": LANE - 28, "height": 3, "rx": 1.5}
        body.append(tag("rect", **bar, class_="track"))
        body.append(tag("rect", **bar, class_=f"bar {name}", style=f"transform-origin:{x + 14:g}px 0"))
    ending = names[shown_at(race.seconds)]
    for words, kind, y in (
        (f"same text, {race.speedup:.1f}x", f"verdict {ending}", card + 33),
        (legend(race), "soft", card + 58),
        (escape(caption), "soft", card + 79),
    ):
        body.append(tag("text", words, class_=kind, x=WIDTH / 2, y=y, text_anchor="middle"))
    box, space = f"0 0 {WIDTH:g} {height:g}", "http://www.w3.org/2000/svg"
    inside = "\n".join(["", *body, ""])
    return tag("svg", inside, xmlns=space, viewBox=box, width=WIDTH, height=height, role="img") + "\n"


def about(race: Race) -> str:
    """Return in words what is to be seen."""
    return (
        f"One prompt decoded twice. Plain decoding takes {race.plain.seconds:.1f} seconds, speculative decoding "
        f"{race.speculative.seconds:.1f} seconds. Both give the same text."
    )


def animation(names: dict[float, str], lanes: Sequence[tuple[str, Lane]], cycle_s: float) -> str:
    """Return the animation: each class is hidden until its time; without motion everything is there at once."""
    rules = [f"@media (prefers-reduced-motion:no-preference){{text,.bar{{animation:{cycle_s:.2f}s linear infinite}}"]
    for at_s, name in names.items():
        share = 100 * at_s / cycle_s
        if share > 0:
            rules.append(f"@keyframes {name}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,to{{opacity:1}}}}")
            rules.append(f".{name}{{animation-name:{name}}}")
    for name, lane in lanes:
        share = 100 * lane.seconds / cycle_s
        rules.append(f"@keyframes {name}{{0%{{transform:scaleX(0)}}{share:.2f}%,to{{transform:none}}}}")
        rules.append(f".bar.{name}{{animation-name:{name}}}")
    return "".join([*rules, "}"])


def shown_at(at_s: float) -> float:
    """Return the time of the frame that shows what came at a time."""
    return round(at_s / FRAME_S) * FRAME_S


def laid_out(pieces: Sequence[Piece]) -> Iterator[Run]:
    """Yield the text in lines of :data:`COLUMNS` characters, in runs of one time and one source."""
    line = column = 0
    for piece in pieces:
        text, at_s = "", shown_at(piece.at_s)
        for character in piece.text.replace("\t", "    "):
            if character == "\n" or column + len(text) >= COLUMNS:
                if text:
                    yield Run(line, column, text, piece.source, at_s)
                line, column, text = line + 1, 0, ""
            if character != "\n":
                text += "\ufffd" if unicodedata.category(character)[0] == "C" else character
        if text:
            yield Run(line, column, text, piece.source, at_s)
            column += len(text)


def grouped(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Yield runs that came together."""
    group: list[Run] = []
    for run in runs:
        if group and group[0].at_s != run.at_s:
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def spelled(run: Run, left: float) -> str:
    """Return a run at its place, as wide as its characters are to be."""
    x = left + 14 + run.column * CHARACTER
    y = TOP + (run.line + 0.7) * LINE
    source = None if run.source == SOURCE_TARGET else run.source
    width = len(run.text) * CHARACTER if len(run.text) > 1 else None
    return tag("tspan", escape(run.text, quote=False), class_=source, x=round(x, 1), y=round(y, 1), textLength=width)


def legend(race: Race) -> str:
    """Return which colour is which drafter's."""
    counts = race.speculative.accepted_by_source
    parts = [f'<tspan class="{name}">{name} {count}</tspan>' for name, count in counts.items()]
    return f"tokens accepted from {', '.join(parts)}; the rest are the target’s own"


if __name__ == "__main__":
    main()
