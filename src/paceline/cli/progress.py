"""A bar for work in stages, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.cli.display import error_console


@contextmanager
def stage_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield what is told of the stage and how much of how much is done; it shows that on a terminal, else nothing."""
    console = error_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)
        yield lambda stage, done, total: progress.update(task, description=stage, completed=done, total=total)
