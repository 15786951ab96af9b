"""The charts of reports, as SVG: speeds over plain's in rows, and plots. Colours come from the page's style.

No label lies inside a plot's frame, where lines run: names stand above it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from paceline.lab.intervals import ALL, Depth
from paceline.planning.costs.profile import PassCost

_TICKS_APART: Final = 15.0
"""Percent of a row's width that ticks are apart, at least: as much as a phone needs."""
_RATIO_TICKS: Final = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_WIDTH, _HEIGHT = 340.0, 254.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 322.0, 62.0, 208.0
_LETTER: Final = 6.4
"""Width of a letter in a legend, in pixels, with something to spare."""
_WIDEST_SHOWN: Final = 32
"""Rows of a pass up to which its time is drawn."""


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


def picture(width: float, height: float, body: str, about: str) -> str:
    """Return a whole picture, at most a quarter larger than it is drawn; ``about`` says in words what it shows."""
    box = f"0 0 {_number(width)} {_number(height)}"
    style = f"max-width: {1.25 * width:.0f}px"
    return tag("svg", body, class_="picture", viewBox=box, role="img", aria_label=about, style=style)


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


def _steps(low: float, high: float, base: int, parts: Sequence[int] = (1,)) -> list[float]:
    """Return the powers of a base within a range, and these times each of ``parts``."""
    exponents = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    values = [part * float(base) ** exponent for exponent in exponents for part in parts]
    return [value for value in values if low <= value <= high]


# --- speeds in rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """One way to decode in a chart of speeds, over plain's.

    Attributes:
        kind: ``plain``, ``server``, ``static``, ``policy`` or ``auto``, which have colours and marks of their own.
        ends: of the interval; ``None`` for none.
        replayed: what a replay says.
        words: shown behind the figure, in a few letters.
        tip: shown by a pointer on the row.
    """

    name: str
    kind: str
    value: float
    ends: tuple[float, float] | None = None
    replayed: float | None = None
    words: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Ways to decode that are compared with each other, under a name and a note on it."""

    name: str
    ratios: Sequence[Ratio]
    note: str = ""


def draw_ratios(groups: Sequence[Group], about: str) -> str:
    """Draw ratios as points with their intervals and, where there are replays, with these as rings.

    The rows are text beside small pictures, so that a phone shows a name above its bar.
    """
    values = [1.0]
    for ratio in (ratio for group in groups for ratio in group.ratios):
        values += [ratio.value, *(ratio.ends or ()), *([] if ratio.replayed is None else [ratio.replayed])]
    scale = Scale(0.93 * min(values), 1.07 * max(values), 8.0, 92.0, logarithmic=True)
    shown = [1.0]
    for value in _RATIO_TICKS:
        if scale.low <= value <= scale.high and all(abs(scale(value) - scale(one)) >= _TICKS_APART for one in shown):
            shown.append(value)
    lines = "".join(
        tag("line", x1=_percent(scale(value)), x2=_percent(scale(value)), y1=0, y2="100%", class_=kind)
        for value in shown
        for kind in ["unity" if value == 1.0 else "grid"]
    )
    names = "".join(
        tag("text", words, x=_percent(scale(value)), y=13, class_="tick", text_anchor="middle")
        for value in shown
        for words in ["plain" if value == 1.0 else f"{format_tick(value)}×"]
    )
    axis = tag("div", tag("svg", names, class_="track"), class_="ratio axis")
    parts = [axis]
    for group in groups:
        note = tag("span", escape(group.note), class_="note") if group.note else ""
        parts.append(tag("p", f"{escape(group.name)} {note}", class_="group"))
        parts += [_draw_ratio(ratio, scale, lines) for ratio in group.ratios]
    return tag("div", "".join([*parts, axis]), class_="ratios", role="group", aria_label=about)


def _draw_ratio(ratio: Ratio, scale: Scale, lines: str) -> str:
    body = lines
    if ratio.ends is not None:
        low, high = (_percent(scale(end)) for end in ratio.ends)
        body += tag("line", x1=low, x2=high, y1=12, y2=12, class_=f"bar {ratio.kind}")
        body += "".join(tag("line", x1=end, x2=end, y1=8, y2=16, class_=f"bar {ratio.kind}") for end in (low, high))
    if ratio.replayed is not None:
        body += tag("circle", cx=_percent(scale(ratio.replayed)), cy=12, r=6.5, class_="replay")
    body += tag("svg", draw_mark(ratio.kind, 0.0, 12.0), x=_percent(scale(ratio.value)), overflow="visible")
    cells = (
        tag("span", escape(ratio.name), class_="name"),
        tag("svg", body, class_="track", role="img", aria_label=ratio.tip),
        tag("span", f"{ratio.value:.2f}×", class_="figure"),
        tag("span", escape(ratio.words), class_="spread"),
    )
    return tag("div", "".join(cells), class_=f"ratio {ratio.kind}", title=ratio.tip)


def draw_mark(kind: str, x: float, y: float, tip: str = "") -> str:
    """Return a kind's mark: kinds differ in shape too, not in colour alone."""
    body, look = tooltip(tip) if tip else "", f"mark {kind}"
    if kind in ("auto", "server"):
        corners = ((0.0, -6.5), (6.5, 0.0), (0.0, 6.5), (-6.5, 0.0)) if kind == "auto" else ((-5, 4), (0, -5), (5, 4))
        points = " ".join(f"{x + right:.1f},{y + down:.1f}" for right, down in corners)
        return tag("polygon", body, points=points, class_=look)
    if kind == "policy":
        return tag("rect", body, x=x - 4, y=y - 4, width=8, height=8, class_=look)
    return tag("circle", body, cx=x, cy=y, r=3.5 if kind == "plain" else 4.5, class_=look)


def draw_marks(names: Sequence[tuple[str, str]]) -> str:
    """Draw which mark is what; kind ``replay`` is the ring."""
    parts = []
    for kind, words in names:
        ring = tag("circle", cx=8, cy=8, r=6.5, class_="replay")
        mark = ring if kind == "replay" else draw_mark(kind, 8.0, 8.0)
        parts.append(tag("span", tag("svg", mark, width=16, height=16, aria_hidden="true") + escape(words)))
    return tag("p", "".join(parts), class_="marks")


# --- plots ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a plot, which are joined by a line.

    Attributes:
        name: in the legend; none where it is empty.
        kind: class of colours, and of marks.
        tips: what a pointer on each point shows; points without have no mark.
        spreads: lower and upper end of a bar at each point.
        radii: of circles, which no line joins.
        kinds: of single points that differ from the others.
    """

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    tips: Sequence[str] = ()
    spreads: Sequence[tuple[float, float]] = ()
    radii: Sequence[float] = ()
    kinds: Sequence[str] = ()
    dashed: bool = False


def draw_plot(
    title: str,
    axes: tuple[str, str],
    x: tuple[float, float],
    y: tuple[float, float],
    series: Sequence[Series],
    *,
    unity: Sequence[tuple[float, float]] = (),
    shares: str = "",
    whole: bool = True,
    logarithmic: bool = False,
    about: str,
) -> str:
    """Draw series between two axes.

    Args:
        axes: what they show, the horizontal one first.
        x: ends of the horizontal axis.
        y: ends of the vertical axis.
        unity: a dotted line through these points.
        shares: the axes whose values are shares, ``"y"`` or ``"xy"``.
        whole: mark only whole values on the horizontal axis.
        logarithmic: equal factors are equally far apart on both axes; the horizontal one marks powers of 2.
        about: says in words what is shown.
    """
    named = [each for each in series if each.name]
    top = _TOP if named else _TOP - 18
    across, up = Scale(*x, _LEFT, _RIGHT, logarithmic), Scale(*y, _BOTTOM, top, logarithmic)
    parts = [label(0, 15, title, class_="plot-title"), label(0, top - 9, axes[1], class_="axis-label")]
    place = 0.0
    for each in named:
        parts += [draw_mark(each.kind, place + 5, 31), label(place + 14, 35, each.name, class_="tick")]
        place += 26 + _LETTER * len(each.name)
    values_up, values_across = ticks(*y), ticks(math.ceil(x[0]) if whole else x[0], x[1], 6)
    if logarithmic:
        values_up, values_across = _steps(*y, 10, (1, 2, 5) if y[1] < 50 * y[0] else (1,)), _steps(*x, 2)
    for value in (0, 0.25, 0.5, 0.75, 1.0) if "y" in shares else values_up:
        words = f"{value:.0%}" if "y" in shares else format_tick(value)
        parts.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=up(value), y2=up(value), class_="grid"))
        parts.append(label(_LEFT - 6, up(value) + 4, words, class_="tick", text_anchor="end"))
    for value in (0, 0.25, 0.5, 0.75, 1.0) if "x" in shares else values_across:
        if not whole or value == int(value) or "x" in shares:
            words = f"{value:.0%}" if "x" in shares else format_tick(value)
            parts.append(label(across(value), _BOTTOM + 16, words, class_="tick", text_anchor="middle"))
    parts.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM, class_="axis"))
    middle = (_LEFT + _RIGHT) / 2
    parts.append(label(middle, _BOTTOM + 34, axes[0], class_="axis-label", text_anchor="middle"))
    if unity:
        parts.append(_path([(across(right), up(value)) for right, value in unity], "unity"))
    for each in series:
        parts.append(_draw_series(each, [(across(right), up(value)) for right, value in each.points], up))
    return picture(_WIDTH, _HEIGHT, "".join(parts), about)


def _draw_series(each: Series, places: Sequence[tuple[float, float]], up: Scale) -> str:
    parts = []
    for (right, _), (low, high) in zip(places, each.spreads, strict=False):
        parts.append(tag("line", x1=right, x2=right, y1=up(low), y2=up(high), class_=f"bar {each.kind}"))
    if not each.radii:
        parts.append(_path(places, f"line {each.kind}{' dashed' if each.dashed else ''}"))
    for index, tip in enumerate(each.tips):
        right, down = places[index]
        if each.radii:
            parts.append(
                tag("circle", tooltip(tip), cx=right, cy=down, r=each.radii[index], class_=f"bubble {each.kind}")
            )
        else:
            parts.append(draw_mark(each.kinds[index] if each.kinds else each.kind, right, down, tip))
    return "".join(parts)


def draw_staircase(cost: PassCost, title: str, x_label: str) -> str:
    """Draw what passes take by their rows: medians with quartiles, and the line of one row at a time."""
    widths = [step for step in cost.widths if step.rows <= _WIDEST_SHOWN]
    top = 1.12 * max(step.high_s for step in widths) * 1e3
    wide = max(step.rows for step in widths) + 1.0
    one_ms = widths[0].median_s * 1e3
    beyond = min(wide, top / one_ms)
    cheaper = cost.cheaper_rows()
    tips = [
        f"{step.rows} rows: {step.median_s * 1e3:.3g} ms, quartiles {step.low_s * 1e3:.3g} to {step.high_s * 1e3:.3g}"
        + ("; cheaper than a narrower pass" if step.rows in cheaper else "")
        for step in widths
    ]
    steps = Series(
        "",
        "c1",
        [(step.rows, step.median_s * 1e3) for step in widths],
        tips,
        [(step.low_s * 1e3, step.high_s * 1e3) for step in widths],
        kinds=["c2" if step.rows in cheaper else "c1" for step in widths],
    )
    return draw_plot(
        title,
        (x_label, "ms"),
        (0.0, wide),
        (0.0, top),
        [steps],
        unity=[(0.0, 0.0), (beyond, one_ms * beyond)],
        about=f"Time of a pass by its rows: {title}",
    )


def format_tick(value: float) -> str:
    return f"{value:.10g}" if abs(value) < 1e4 else f"{value:.0f}"


def _path(places: Sequence[tuple[float, float]], look: str) -> str:
    """Return a line through places."""
    steps = " ".join(f"{'L' if index else 'M'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(places))
    return tag("path", d=steps, fill="none", class_=look)


def _percent(value: float) -> str:
    return f"{_number(value)}%"


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def draw_survival(survival: Mapping[str, Sequence[Depth]]) -> str:
    """Draw how far a draft's chains follow the target's answers, by kind of text."""
    series = []
    kinds = [kind for kind in survival if kind != ALL] or [ALL]
    for index, kind in enumerate(kinds):
        points = [(depth.depth, depth.survival) for depth in survival[kind] if depth.survival is not None]
        tips = [f"{kind}: {share:.1%} are right down to depth {depth}" for depth, share in points]
        series.append(Series(kind, f"c{index % 4 + 1}", points, tips))
    deepest = max(2, *(len(depths) for depths in survival.values()))
    return draw_plot(
        "how far drafts follow the target's answers",
        ("depth of the draft token", "right so far"),
        (0.5, deepest + 0.5),
        (0.0, 1.0),
        series,
        shares="y",
        about="Share of drafts that are right down to each depth",
    )
