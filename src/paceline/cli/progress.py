"""How far work has come, on standard error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from paceline.cli.display import error_console
from paceline.engines.base import Engine
from paceline.engines.slow_passes import SlowPasses, slow_passes

_T = TypeVar("_T")


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


def show_prompt_progress(rounds: Iterator[_T], target: Engine, *, silent: bool = False) -> Iterator[_T]:
    """Return what rounds bring; where passes wait, a terminal shows how far the first one is."""
    console, slow = error_console(), slow_passes(target)
    if silent or slow is None or not console.is_terminal:
        return rounds
    with console.status(_PassShare(slow)):
        first = list(itertools.islice(rounds, 1))
    return itertools.chain(first, rounds)


class _PassShare:
    """Says, whenever it is drawn, how much of a pass is done."""

    def __init__(self, slow: SlowPasses) -> None:
        self._slow = slow

    def __rich__(self) -> Text:
        return Text(f"first pass: {self._slow.pass_share:.0%} of the weights read")
