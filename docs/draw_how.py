"""Draws the pictures of "How it works": ``python docs/draw_how.py``.

They are put into the page as they are, so their colours are those of the page's theme, light or dark.
``--check`` writes nothing, and ends with status 1 where a drawing would change.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from paceline.planning.auto.ledger import ALLOWED_SHARE
from paceline.planning.auto.policy import START_ROUNDS

FOLDER = Path(__file__).parent / "drawings"
WIDTH = 460

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
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, label: str = "") -> None:
        """Draw a box with a label in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'
        )
        if label:
            self.text(x + width / 2, y + height / 2 + 4.5, label, anchor="middle", kind="draw-label")

    def line(self, points: list[tuple[float, float]], kind: str = "draw-line") -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="{kind}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw an arrow that points down or to the right."""
        self.line([(x1, y1), (x2, y2)])
        if x1 == x2:
            self.line([(x2 - 4, y2 - 6), (x2, y2), (x2 + 4, y2 - 6)])
        else:
            self.line([(x2 - 6, y2 - 4), (x2, y2), (x2 - 6, y2 + 4)])

    def __str__(self) -> str:
        inside = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" class="drawing" '
            f'aria-label="{escape(self.title, quote=True)}">\n<title>{escape(self.title)}</title>\n{inside}\n</svg>\n'
        )


def one_round() -> Drawing:
    """A round: draft, one pass, walk."""
    drawing = Drawing(
        "A round. The text so far ends in: of France is. A drafter proposes four tokens: Paris, comma, a, town. "
        "One pass of the target checks all four. It keeps the first three, and says city where town was drafted.",
        286,
    )
    draft = ["Paris", ",", "a", "town"]
    said = ["Paris", ",", "a", "city"]
    columns = [168 + 74 * index for index in range(4)]
    drawing.text(8, 22, "the text so far")
    for index, token in enumerate(("France", "is")):
        drawing.box(8 + 66 * index, 32, 60, 28, TARGET, token)
    drawing.text(columns[0], 22, "1. a drafter proposes: cheap")
    for x, token in zip(columns, draft, strict=True):
        drawing.box(x, 32, 66, 28, DRAFT, token)
        drawing.arrow(x + 33, 64, x + 33, 92)
    drawing.text(8, 112, "2. the target")
    drawing.text(8, 129, "checks them")
    drawing.box(columns[0] - 4, 96, 74 * 4, 40, "draw-pass", "one pass over the large model's weights")
    for x in columns:
        drawing.arrow(x + 33, 140, x + 33, 168)
    drawing.text(8, 184, "3. what the")
    drawing.text(8, 201, "target says")
    for x, token, drafted in zip(columns, said, draft, strict=True):
        drawing.box(x, 172, 66, 28, DRAFT if token == drafted else TARGET, token)
        drawing.text(x + 33, 218, "accepted" if token == drafted else "recovered", anchor="middle", kind="draw-small")
    drawing.text(8, 254, "4 tokens from one pass. Plain decoding takes 4 passes for the same")
    drawing.text(8, 272, "4 tokens, since the target says the same either way.")
    return drawing


def two_clocks() -> Drawing:
    """Plain decoding beside a round of three drafted tokens, to scale."""
    drafted_ms = 3 * LEVEL_MS + FOUR_ROWS_MS
    plain_ms = 4 * ONE_ROW_MS
    scale = (WIDTH - 16) / plain_ms
    drawing = Drawing(
        f"Four tokens take {plain_ms:.0f} milliseconds plainly, in four passes, and {drafted_ms:.0f} milliseconds "
        "as one draft of three tokens and one wide pass, if all three are right.",
        196,
    )
    drawing.text(8, 20, f"plain: 4 passes, {plain_ms:.0f} ms for 4 tokens")
    for index in range(4):
        drawing.box(8 + index * ONE_ROW_MS * scale, 30, ONE_ROW_MS * scale - 3, 30, TARGET, f"{ONE_ROW_MS:g} ms")
    drawing.text(8, 90, f"speculative, all 3 drafted tokens right: {drafted_ms:.0f} ms for 4 tokens")
    for index in range(3):
        drawing.box(8 + index * LEVEL_MS * scale * 3, 100, LEVEL_MS * scale * 3 - 1, 30, DRAFT)
    start = 8 + 9 * LEVEL_MS * scale
    drawing.box(start, 100, FOUR_ROWS_MS * scale, 30, TARGET, f"{FOUR_ROWS_MS:g} ms, 4 rows")
    drawing.text(8, 160, f"none right: the same {drafted_ms:.0f} ms for 1 token, instead of {ONE_ROW_MS:.0f} ms.")
    drawing.text(8, 178, "So whether a draft pays depends on the text and on the machine.")
    drawing.text(8, 194, "Drafting is drawn three times as wide as it is.", kind="draw-small")
    return drawing


def tree() -> Drawing:
    """A tree of two drafters, and the path that was accepted."""
    drawing = Drawing(
        "A tree of drafts below the last token. The draft model's second choice and a lookup give it branches. "
        "The target walks it from the top, and one path is accepted.",
        214,
    )
    places = {
        "is": (20, 88, TARGET), "Paris": (116, 42, DRAFT), "the": (116, 134, REFUSED), "capital": (212, 134, REFUSED),
        ",": (212, 42, DRAFT), ".": (212, 88, REFUSED), "a": (308, 42, DRAFT), "city": (404, 42, TARGET),
    }
    for parent, child in (("is", "Paris"), ("is", "the"), ("Paris", ","), ("Paris", "."), (",", "a"), ("a", "city"),
                          ("the", "capital")):
        (x1, y1, _), (x2, y2, _) = places[parent], places[child]
        drawing.line([(x1 + 56, y1 + 14), (x2, y2 + 14)])
    for token, (x, y, kind) in places.items():
        drawing.box(x, y, 56 if token != "city" else 50, 28, kind, token)
    drawing.box(20, 182, 18, 18, DRAFT)
    drawing.text(44, 196, "accepted")
    drawing.box(150, 182, 18, 18, REFUSED)
    drawing.text(174, 196, "refused")
    drawing.box(270, 182, 18, 18, TARGET)
    drawing.text(294, 196, "the target's own")
    return drawing


def ledger() -> Drawing:
    """What may be lost against plain decoding, and an answer whose drafts never pay."""
    tokens, most = 300, 8.0
    left, top, height = 60, 30, 150
    across, up = (WIDTH - left - 20) / tokens, height / most
    bottom = top + height
    drawing = Drawing(
        "The ledger of an answer of 300 tokens. The allowance begins at four plain rounds and grows to 6.1. "
        "The loss of an answer whose drafts never pay climbs towards it and never crosses it.",
        236,
    )
    drawing.text(8, 16, "plain rounds lost so far")
    for value in (0, 2, 4, 6, 8):
        y = bottom - value * up
        drawing.line([(left, y), (WIDTH - 20, y)], "draw-grid")
        drawing.text(left - 8, y + 4, str(value), anchor="end", kind="draw-small")
    for value in (0, 100, 200, 300):
        drawing.text(left + value * across, bottom + 18, str(value), anchor="middle", kind="draw-small")
    drawing.text(WIDTH - 20, bottom + 36, "tokens of the answer", anchor="end", kind="draw-small")

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
    drawing.text(left + 12, at(0, START_ROUNDS)[1] - 14, "what may be lost: 4, and 0.7 % of the tokens")
    drawing.text(left + 108, at(0, 2.0)[1] + 20, "drafts that never paid")
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
