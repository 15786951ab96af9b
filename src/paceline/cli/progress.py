"""How far work has come, on standard error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from paceline.cli.display import error_console
from paceline.engines.base import Engine
from paceline.engines.slow_passes import SlowPasses, slow_passes

_T = TypeVar("_T")


class ProgressBar:
    """A bar on a terminal; elsewhere a line for every new thing that is done."""

    def __init__(self, doing: str, *columns: ProgressColumn, total: float | None = None, **fields: Any) -> None:
        self._console = error_console()
        shown = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), *columns)
        self._bar = Progress(*shown, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(doing, total=total, **fields)
        self._last: object = None

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def tell(self, doing: str, done: float, total: float | None, **fields: Any) -> None:
        self._bar.update(self._task, description=doing, completed=done, total=total, **fields)

    def tell_line(self, line: str, *, new: object) -> None:
        """Print a line where no bar is shown, unless the last one was for the same."""
        if new != self._last and not self._console.is_terminal:
            self._console.print(line, markup=False)
        self._last = new

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the bar away for as long as the block runs, which shows one of its own."""
        if self._bar.disable:  # what is not shown would still end a line
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()


@contextmanager
def stage_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield what is told of the stage and how much of how much is done; it shows that on a terminal, else nothing."""
    with ProgressBar("reading", TimeRemainingColumn()) as progress:
        yield progress.tell


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
