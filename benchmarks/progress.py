"""The bar that benchmarks show while they work."""

from __future__ import annotations

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from paceline.cli.display import error_console


def progress_bar() -> Progress:
    """Return a bar on the terminal's stderr, which disappears in the end."""
    console = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
