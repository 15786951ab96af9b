"""Interrupts between any two lines."""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import FrameType
from typing import Any


class LineTracer:
    """Raises KeyboardInterrupt before the ``at``-th line that runs while it is active, and notes how many lines ran.

    Args:
        at: the line; 0 for none.
        module: whose lines count: those of one module, or of a package, whose name ends with a dot.
        left_out: functions whose lines do not count. Between the birth of a sequence's handle and its reaching who is
            to know of it, some hundred nanoseconds for each answer, an interrupt loses it.
    """

    def __init__(self, at: int, module: str = "paceline.", left_out: Collection[str] = ()) -> None:
        self.lines = 0
        self._at = at
        self._module = module
        self._left_out = left_out

    def __enter__(self) -> None:
        # What measures coverage traces, too.
        self._before = sys.gettrace()
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        counts = name.startswith(self._module) if self._module.endswith(".") else name == self._module
        return self._line if counts and frame.f_code.co_name not in self._left_out else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line
