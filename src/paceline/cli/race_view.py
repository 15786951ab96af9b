"""A race on a terminal: two lanes in which the same text grows at two speeds, or the lines that say how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from paceline.cli.display import SOURCE_STYLES
from paceline.core.stats import OFF_REASONS
from paceline.lab.comparison import Stop
from paceline.lab.race import Lane, LaneName, Piece, Race
from paceline.terminal_text import printable

FRAME_S: Final = 1 / 20
"""Seconds between two pictures of a replay."""

STACKED_BELOW: Final = 76
"""Columns of a terminal below which the lanes stand one above the other."""

_AROUND: Final = 9
"""Lines of a terminal that a replay leaves free: frames, figures, and what stands above and below it."""

_MAX_LINES: Final = 14
_FEWEST_LINES: Final = 3

_GUESSED_BY: Final = {
    "draft": "the draft model",
    "suffix": "earlier text (suffix)",
    "lookup": "earlier text (lookup)",
}
"""Where a drafter's guesses are from."""

_VERDICT_STYLES: Final = {"faster": "bold green", "slower": "bold yellow", "texts differ": "bold yellow"}


def play_race(
    console: Console,
    race: Race,
    *,
    stopped: Stop = lambda: False,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Replay a race on a terminal at the recorded times; its last picture stays."""
    begun_s = now_s()
    with Live(draw_lanes(console, race, 0.0), console=console, auto_refresh=False) as live:
        while not stopped():
            at_s = now_s() - begun_s
            live.update(draw_lanes(console, race, at_s), refresh=True)
            if at_s >= race.seconds:
                return
            sleep(FRAME_S)


def draw_lanes(console: Console, race: Race, at_s: float) -> RenderableType:
    """Return both lanes as they were after so many seconds."""
    lanes: tuple[tuple[LaneName, Lane], ...] = (("plain", race.plain), ("speculative", race.speculative))
    width, room = console.width, console.height - _AROUND
    if width < STACKED_BELOW:
        height = min(max(room // 2 - 2, _FEWEST_LINES), _MAX_LINES)
        return Group(*(_draw_lane(console, name, lane, race.prompt, at_s, width, height) for name, lane in lanes))
    height = min(max(room, _FEWEST_LINES), _MAX_LINES)
    grid = Table.grid(padding=0)
    half = width // 2
    grid.add_row(*(_draw_lane(console, name, lane, race.prompt, at_s, half, height) for name, lane in lanes))
    return grid


def _draw_lane(
    console: Console, name: LaneName, lane: Lane, prompt: str, at_s: float, width: int, height: int
) -> RenderableType:
    pieces = lane.until(at_s)
    lines = _lane_text(console, prompt, pieces).wrap(console, width - 4, overflow="fold")
    height = min(height, len(_lane_text(console, prompt, lane.pieces).wrap(console, width - 4, overflow="fold")))
    is_done = at_s >= lane.seconds
    frame = "dim" if not is_done else "green" if name == "speculative" else "default"
    panel = Panel(
        Group(*lines[-height:]), title=name, title_align="left", width=width, height=height + 2, border_style=frame
    )
    spent_s = min(at_s, lane.seconds)
    rate = f"{(len(pieces) - 1) / spent_s:6.1f} tokens/s" if spent_s > 0 else " " * 15
    figures = Text(f"  {spent_s:5.1f} s {rate}  {len(pieces):3d} of {len(lane.pieces)}", "bold" if is_done else "")
    return Group(panel, figures)


def _lane_text(console: Console, prompt: str, pieces: Sequence[Piece]) -> Text:
    """Return what there is of an answer, after the last line of its prompt, which says what the answer goes on with."""
    text = Text(tab_size=4)
    text.append(printable(prompt[prompt[:-1].rfind("\n") + 1 :]), Style(dim=True))
    for piece in pieces:
        text.append(printable(piece.text), source_style(console, piece.source))
    text.expand_tabs()
    return text


def source_style(console: Console, source: str) -> Style:
    """Return how tokens of a drafter look; without colours those of any drafter are underlined."""
    style = SOURCE_STYLES.get(source, Style())
    return Style(underline=True) if style and console.no_color else style


def legend(console: Console, race: Race) -> Text | None:
    """Return which drafter has which look, of those whose tokens are there; ``None`` where there are none."""
    counts = race.speculative.accepted_by_source
    if not counts:
        return None
    drafted = race.speculative
    line = Text(f"  {drafted.num_accepted} of {drafted.num_drafted} guessed tokens were right: ", "dim")
    for index, (name, count) in enumerate(counts.items()):
        line.append(", " if index else "", "dim")
        line.append(f"{count} from {_GUESSED_BY.get(name, name)}", source_style(console, name))
    return line


def lane_lines(race: Race) -> list[str]:
    """Return what both lanes took, for a pipe."""
    lines = [
        f"{name:11}  {lane.seconds:6.2f} s  {lane.per_second:7.1f} tokens/s  {len(lane.pieces)} tokens"
        for name, lane in (("plain", race.plain), ("speculative", race.speculative))
    ]
    drafted = race.speculative
    if drafted.num_drafted:
        kept = ", ".join(f"{name} {count}" for name, count in drafted.accepted_by_source.items()) or "none"
        lines[-1] += f", {drafted.num_accepted} of {drafted.num_drafted} drafts accepted ({kept})"
    return lines


def verdict_line(race: Race) -> Text:
    return Text(_verdict(race), _VERDICT_STYLES.get(race.verdict, "bold"))


def _verdict(race: Race) -> str:
    speedup = f"{race.speedup:.1f}x" if race.speedup >= 1.05 else f"{race.speedup:.2f}x"
    if race.verdict == "texts differ":
        why = {
            "near-tie": "two tokens were so near to each other that rounding decided",
            "bug": "rounding does not explain it, so this is a bug: please report it",
            "unrepeatable": "made again they did not, so there is no telling why",
        }.get(race.divergence or "", "why was not found out")
        return f"the texts differ from token {race.differs_at} on: {why}"
    if race.verdict == "nothing drafted":
        reason = race.speculative.off_reason
        if reason == "losing":
            why = "earlier drafts had cost as much time as paceline allows itself, so no more were made"
        elif reason in (None, "no_gain"):
            why = "nothing to gain here, so nothing was drafted"
        else:
            why = f"nothing was drafted ({OFF_REASONS[reason]})"
        return f"{why}: same text, and both lanes are plain decoding, whatever their times"
    if race.verdict == "faster":
        return f"same text, {speedup}"
    if race.verdict == "unexplained":
        few = f"its {race.speculative.num_accepted} accepted drafts bring {race.most_speedup:.2f}x at most"
        return f"same text, {speedup}, by chance: {few}, and something else kept this machine busy"
    if race.verdict == "level":
        return f"same text, {speedup}: as fast as without drafts"
    return f"same text, {speedup}: on this machine drafts cost more than they brought here"
