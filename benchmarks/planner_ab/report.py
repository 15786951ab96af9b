"""What the gate found, in tables and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.planner_ab.verdict import LOW, Answer, Figures

_PIPE_WIDTH = 140


def console() -> Console:
    """Return where tables go; as wide as they need where nobody watches."""
    found = Console(highlight=False, emoji=False)
    if not found.is_terminal:
        found.width = _PIPE_WIDTH
    return found


def table(title: str, overall: Figures, groups: Mapping[str, Figures]) -> Table:
    """Return the figures of groups, those of all answers last."""
    made = Table(title=title, title_justify="left", box=None)
    made.add_column("")
    for column in (
        "texts",
        "answers",
        "new over old",
        "95 %",
        "old of plain",
        "new",
        f"old below {LOW:.2f}",
        "new",
        "old lowest",
        "new",
    ):
        made.add_column(column, justify="right")
    for name, row in {**groups, "all": overall}.items():
        made.add_row(
            name,
            str(row.texts),
            str(row.answers),
            f"{row.ratio:.4f}",
            f"{row.low:.4f} to {row.high:.4f}",
            f"{row.old_of_plain:.3f}",
            f"{row.new_of_plain:.3f}",
            str(row.old_low),
            str(row.new_low),
            f"{row.old_lowest:.3f}",
            f"{row.new_lowest:.3f}",
        )
    return made


def worst(answers: Sequence[Answer]) -> Table:
    """Return a table of answers that lost most."""
    made = Table(title="answers that lost most", title_justify="left", box=None)
    for column in ("costs", "temperature", "scene", "models", "half", "text"):
        made.add_column(column)
    for column in ("old of plain", "new"):
        made.add_column(column, justify="right")
    for answer in answers:
        made.add_row(
            answer.profile,
            answer.temperature,
            answer.scene,
            answer.models,
            answer.half,
            answer.text,
            f"{answer.plain_s / answer.old_s:.3f}",
            f"{answer.plain_s / answer.new_s:.3f}",
        )
    return made
