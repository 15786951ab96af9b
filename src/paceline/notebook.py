"""What a notebook shows: an answer with its tokens coloured by who drafted them, and how far a load is."""

from __future__ import annotations

import html
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from paceline.core.request import SOURCE_TARGET
from paceline.core.text import TextSegment

# As on the server's page, of colours that are read on a light ground and on a dark one. Shapes differ, too.
_STYLES: Final = {
    "draft": ("#5a9e3f", "solid 2px"),
    "suffix": ("#3b86d8", "dashed 2px"),
    "lookup": ("#a55fc2", "dotted 3px"),
    "prediction": ("#1f9c95", "double 4px"),
}
_OTHER: Final = ("#c7538a", "wavy 2px")


def answer_html(segments: Sequence[TextSegment], line: str) -> str:
    """Return an answer as HTML: tokens that a drafter proposed stand out, and a line below says what was gained."""
    sources = sorted({segment.source for segment in segments} - {SOURCE_TARGET})
    shown = "".join(
        _mark(source, "".join(segment.text for segment in group))
        for source, group in itertools.groupby(segments, key=lambda segment: segment.source)
    )
    legend = "".join(f"{_mark(source, source)} " for source in sources)
    return (
        '<div style="white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace">'
        f"{shown}</div>"
        f'<div style="opacity: 0.75; font-size: smaller; margin-top: 0.5em">{legend}{html.escape(line)}</div>'
    )


def _mark(source: str, text: str) -> str:
    if source == SOURCE_TARGET:
        return html.escape(text)
    colour, line = _STYLES.get(source, _OTHER)
    style = f"background: {colour}26; text-decoration: underline {line} {colour}; text-underline-offset: 4px"
    return f'<span style="{style}" title="drafted by {html.escape(source)}">{html.escape(text)}</span>'


def loading_report() -> Callable[[float], None] | None:
    """Return what shows in a notebook how far a load is; ``None`` elsewhere.

    Only a kernel is meant: the terminal that IPython runs in has no place that could be written again.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return _Loading() if getattr(shell, "kernel", None) is not None else None


class _Loading:
    """Shows the share that is done, from the first that it is told on: most loads have nothing to measure."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, share: float) -> None:
        from IPython.display import display

        words = "measuring what passes cost on this machine" if share < 1 else "measured what passes cost"
        shown = {
            "text/plain": f"{words}: {share:.0%}",
            "text/html": f'<progress max="1" value="{share:.3f}"></progress> {words}: {share:.0%}',
        }
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
