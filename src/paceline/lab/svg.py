"""The SVG that charts need: elements as text, scales, axes.

Colours come from the page's style, and follow its theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


def tag(name: str, content: str = "", /, **attributes: object) -> str:
    """Return an element; ``class_`` is its class, and underscores become hyphens. ``content`` is markup."""
    spelled = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{spelled}>{content}</{name}>"


def label(x: float, y: float, words: str, /, **attributes: object) -> str:
    return tag("text", escape(words), x=x, y=y, **attributes)


def tooltip(words: str) -> str:
    """Return the text that a pointer on an element shows."""
    return tag("title", escape(words))


def picture(width: float, height: float, body: str, about: str, widest: str | None = None) -> str:
    """Return a whole picture, as wide as its place or ``widest``; ``about`` says in words what it shows."""
    style = None if widest is None else f"max-width: {widest}"
    box = f"0 0 {_number(width)} {_number(height)}"
    return tag("svg", body, viewBox=box, role="img", aria_label=about, style=style)


def path(points: Sequence[tuple[float, float]], /, **attributes: object) -> str:
    """Return a line through points."""
    steps = " ".join(f"{'L' if index else 'M'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(points))
    return tag("path", d=steps, fill="none", **attributes)


def diamond(x: float, y: float, radius: float, content: str = "", /, **attributes: object) -> str:
    """Return a square on its corner."""
    points = f"{x:.1f},{y - radius:.1f} {x + radius:.1f},{y:.1f} {x:.1f},{y + radius:.1f} {x - radius:.1f},{y:.1f}"
    return tag("polygon", content, points=points, **attributes)


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places along an axis: ``low`` is at ``start`` and ``high`` at ``end``.

    Attributes:
        logarithmic: whether equal factors, rather than equal differences, are equally far apart.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return a value's place; a value outside is put at the nearer end."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round values within a range, about ``count`` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def format_tick(value: float) -> str:
    return f"{value:.10g}" if abs(value) < 1e4 else f"{value:.0f}"


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot's frame: two axes with ticks, and what is drawn between them.

    Attributes:
        percent: whether the vertical values are shares.
    """

    x: Scale
    y: Scale
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    x_label: str
    y_label: str
    title: str = ""
    percent: bool = False

    def draw(self, body: str) -> str:
        left, right, bottom, top = self.x.start, self.x.end, self.y.start, self.y.end
        parts = []
        for value in self.y_ticks:
            place = self.y(value)
            words = f"{value:.0%}" if self.percent else format_tick(value)
            parts.append(tag("line", x1=left, x2=right, y1=place, y2=place, class_="grid"))
            parts.append(label(left - 6, place + 4, words, class_="tick", text_anchor="end"))
        for value in self.x_ticks:
            parts.append(label(self.x(value), bottom + 16, format_tick(value), class_="tick", text_anchor="middle"))
        parts.append(tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
        parts.append(label((left + right) / 2, bottom + 33, self.x_label, class_="axis-label", text_anchor="middle"))
        # Above the axis rather than beside it, where it would be rotated.
        parts.append(label(left - 34, top - 10, self.y_label, class_="axis-label"))
        if self.title:
            parts.append(label(left - 34, top - 28, self.title, class_="plot-title"))
        return "".join(parts) + body


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
