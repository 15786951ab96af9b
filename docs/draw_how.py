"""Draws the pictures of "How it works": ``python docs/draw_how.py``.

They are put into the page as they are, so their colours are those of the page's theme, light or dark.
``--check`` writes nothing, and ends with status 1 where a drawing would change.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.lab.charts import label, tag, tooltip
from paceline.planning.auto.ledger import ALLOWED_SHARE
from paceline.planning.auto.policy import START_ROUNDS

FOLDER = Path(__file__).parent / "drawings"
WIDTH = 360
"""Units of a drawing's width, so that its texts can be read on a phone."""

TARGET, DRAFT, REFUSED = "draw-target", "draw-draft", "draw-refused"

# Milliseconds of a pass of F16 by its rows, as in results/rows.json.
ONE_ROW_MS, FOUR_ROWS_MS, LEVEL_MS = 47.3, 64.7, 1.0


class Drawing:
    """An SVG that grows downwards."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", kind: str = "draw-text") -> None:
        """Write a line of text whose baseline is at ``y``."""
        self.parts.append(label(x, y, text, text_anchor=anchor, class_=kind))

    def box(self, x: float, y: float, width: float, height: float, kind: str, words: str = "") -> None:
        """Draw a box with words in its middle."""
        self.parts.append(tag("rect", x=x, y=y, width=width, height=height, rx=4, class_=kind))
        if words:
            self.text(x + width / 2, y + height / 2 + 4.5, words, anchor="middle", kind="draw-label")

    def line(self, points: list[tuple[float, float]], kind: str = "draw-line") -> None:
        """Draw a line through points."""
        self.parts.append(tag("polyline", points=" ".join(f"{x:g},{y:g}" for x, y in points), class_=kind))

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw an arrow that points down or to the right."""
        self.line([(x1, y1), (x2, y2)])
        if x1 == x2:
            self.line([(x2 - 4, y2 - 6), (x2, y2), (x2 + 4, y2 - 6)])
        else:
            self.line([(x2 - 6, y2 - 4), (x2, y2), (x2 - 6, y2 + 4)])

    def __str__(self) -> str:
        inside = "\n".join(["", tooltip(self.title), *self.parts, ""])
        box, space = f"0 0 {WIDTH} {self.height}", "http://www.w3.org/2000/svg"
        return tag("svg", inside, xmlns=space, viewBox=box, role="img", class_="drawing", aria_label=self.title) + "\n"


def one_round() -> Drawing:
    """Draw a round: draft, one pass, walk."""
    drawing = Drawing(
        "A round. The text so far ends in: France is. A drafter proposes four tokens: Paris, comma, a, town. "
        "One pass of the target checks all four. It keeps the first three, and says city where town was drafted.",
        308,
    )
    draft = ["Paris", ",", "a", "town"]
    said = ["Paris", ",", "a", "city"]
    columns = [126 + 58 * index for index in range(4)]
    drawing.text(4, 18, "the text so far")
    for index, token in enumerate(("France", "is")):
        drawing.box(4 + 58 * index, 28, 54, 28, TARGET, token)
    drawing.text(columns[0], 18, "1. a drafter proposes, cheaply")
    for x, token in zip(columns, draft, strict=True):
        drawing.box(x, 28, 54, 28, DRAFT, token)
        drawing.arrow(x + 27, 60, x + 27, 104)
    drawing.text(4, 86, "2. the target")
    drawing.box(4, 108, WIDTH - 10, 36, "draw-pass", "one pass over the large model's weights")
    for x in columns:
        drawing.arrow(x + 27, 148, x + 27, 192)
    drawing.text(4, 174, "3. what it says")
    for x, token, drafted in zip(columns, said, draft, strict=True):
        drawing.box(x, 196, 54, 28, DRAFT if token == drafted else TARGET, token)
        drawing.text(x + 27, 241, "accepted" if token == drafted else "recovered", anchor="middle", kind="draw-small")
    drawing.text(4, 276, "Four tokens from one pass. Plain decoding takes")
    drawing.text(4, 294, "four passes for the same four tokens.")
    return drawing


def two_clocks() -> Drawing:
    """Draw plain decoding beside a round of three drafted tokens, to scale."""
    drafted_ms = 3 * LEVEL_MS + FOUR_ROWS_MS
    plain_ms = 4 * ONE_ROW_MS
    scale = (WIDTH - 8) / plain_ms
    drawing = Drawing(
        f"Four tokens take {plain_ms:.0f} milliseconds plainly, in four passes, and {drafted_ms:.0f} milliseconds "
        "as one draft of three tokens and one wide pass, if all three are right.",
        204,
    )
    drawing.text(4, 18, f"plain: {plain_ms:.0f} ms for 4 tokens")
    for index in range(4):
        drawing.box(4 + index * ONE_ROW_MS * scale, 28, ONE_ROW_MS * scale - 3, 30, TARGET, f"{ONE_ROW_MS:g} ms")
    drawing.text(4, 88, f"speculative: {drafted_ms:.0f} ms for up to 4 tokens")
    for index in range(3):
        drawing.box(4 + index * LEVEL_MS * scale * 3, 98, LEVEL_MS * scale * 3 - 1, 30, DRAFT)
    drawing.box(4 + 9 * LEVEL_MS * scale, 98, FOUR_ROWS_MS * scale, 30, TARGET, f"{FOUR_ROWS_MS:g} ms, 4 rows")
    drawing.text(4, 156, f"All 3 drafted tokens right: {drafted_ms:.0f} ms instead of {plain_ms:.0f}.")
    drawing.text(4, 174, f"None right: {drafted_ms:.0f} ms for one token, instead of {ONE_ROW_MS:.0f}.")
    drawing.text(4, 196, "Drafting (green) is drawn three times as wide as it is.", kind="draw-small")
    return drawing


def tree() -> Drawing:
    """Draw a tree of two drafters, and the path that was accepted."""
    drawing = Drawing(
        "A tree of drafts below the last token. The draft model's second choice and a lookup give it branches. "
        "The target walks it from the top, and one path is accepted.",
        196,
    )
    places = {
        "is": (4, 62, TARGET),
        "Paris": (78, 22, DRAFT),
        "the": (78, 108, REFUSED),
        "home": (152, 108, REFUSED),
        ",": (152, 22, DRAFT),
        ".": (152, 65, REFUSED),
        "a": (226, 22, DRAFT),
        "city": (300, 22, TARGET),
    }
    lines = ("is Paris", "is the", "Paris ,", "Paris .", ", a", "a city", "the home")
    for parent, child in (line.split(" ") for line in lines):
        (x1, y1, _), (x2, y2, _) = places[parent], places[child]
        drawing.line([(x1 + 54, y1 + 14), (x2, y2 + 14)])
    for token, (x, y, kind) in places.items():
        drawing.box(x, y, 54, 28, kind, token)
    for x, kind, words in ((4, DRAFT, "accepted"), (112, REFUSED, "refused"), (212, TARGET, "the target's own")):
        drawing.box(x, 168, 16, 16, kind)
        drawing.text(x + 22, 181, words)
    return drawing


def ledger() -> Drawing:
    """Draw what may be lost against plain decoding, and an answer whose drafts never pay."""
    tokens, most = 300, 8.0
    left, top, height = 30, 30, 150
    across, up = (WIDTH - left - 16) / tokens, height / most
    bottom = top + height
    drawing = Drawing(
        "The ledger of an answer of 300 tokens. The allowance begins at four plain rounds and grows to 6.1. "
        "The loss of an answer whose drafts never pay climbs towards it and never crosses it.",
        236,
    )
    drawing.text(4, 16, "plain rounds lost so far")
    for value in (0, 2, 4, 6, 8):
        y = bottom - value * up
        drawing.line([(left, y), (WIDTH - 16, y)], "draw-grid")
        drawing.text(left - 8, y + 4, str(value), anchor="end", kind="draw-small")
    for value in (0, 100, 200, 300):
        drawing.text(left + value * across, bottom + 18, str(value), anchor="middle", kind="draw-small")
    drawing.text(WIDTH - 8, bottom + 38, "tokens of the answer", anchor="end", kind="draw-small")

    def at(token: float, rounds: float) -> tuple[float, float]:
        return round(left + token * across, 1), round(bottom - rounds * up, 1)

    allowed = [(token, START_ROUNDS + ALLOWED_SHARE * token) for token in (0, tokens)]
    drawing.line([at(*point) for point in allowed], "draw-allowance")
    # Rounds that lose 1.6 plain rounds each, as often as a share of 0.7 of what is left allows them.
    lost, path = 0.0, [(0.0, 0.0)]
    for token in range(tokens):
        if 0.7 * (START_ROUNDS + ALLOWED_SHARE * token - lost) >= 1.6 and token % 6 == 0:
            path += [(float(token), lost), (float(token), lost + 1.6)]
            lost += 1.6
    path.append((float(tokens), lost))
    drawing.line([at(*point) for point in path], "draw-loss")
    drawing.text(left + 10, at(0, START_ROUNDS)[1] - 46, "what may be lost: 4, and 0.7 % of tokens")
    drawing.text(left + 118, at(0, 2.0)[1] + 16, "drafts that never paid")
    return drawing


DRAWINGS = {"round": one_round, "clocks": two_clocks, "tree": tree, "ledger": ledger}


def main(arguments: list[str]) -> int:
    """Write all drawings; return the exit status."""
    if arguments not in ([], ["--check"]):
        print(f"{' '.join(arguments)}: the only option is --check", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    stale = []
    for name, draw in DRAWINGS.items():
        path, new = FOLDER / f"{name}.svg", str(draw())
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            stale.append(path.name)
            if not arguments:
                path.write_text(new, encoding="utf-8")
    for name in stale:
        print(f"docs/drawings/{name}: {'is not' if arguments else 'now'} as it is drawn")
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
