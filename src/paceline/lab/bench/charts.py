"""The pictures of the report, from results to SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, TypeAlias

from paceline.lab.bench.results import BenchResult, VariantResult, WorkloadResult
from paceline.lab.bench.table import NOTHING_DRAFTED, drafted_nothing, format_interval, variant_title
from paceline.lab.bench.workloads import MIXED
from paceline.lab.svg import Plot, Scale, diamond, format_tick, label, path, picture, tag, ticks, tooltip
from paceline.lab.variants import VariantReplay
from paceline.planning.costs.profile import PassCost

_WIDTH = 980.0
"""Width of the chart of speeds, in pixels."""
_LABELS = 300.0
"""Width that names take at the left of the chart of speeds, in pixels."""
_FIGURES = 190.0
"""Width that figures take at the right of the chart of speeds, in pixels."""
_ROW = 24.0
"""Height of a variant's row, in pixels."""
_GROUP = 38.0
"""Height of a workload's heading, in pixels."""
_DEEPEST = 16
"""Depth of drafts up to which acceptance is drawn."""
_FEWEST_TESTED = 3
"""Drafts at a depth below which their share is not drawn."""

_LEDGER_POINTS = 250

_RATIO_TICKS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)

_SMALL_WIDTH, _SMALL_HEIGHT = 310.0, 230.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 300.0, 56.0, 186.0

Point: TypeAlias = tuple[float, float, float]
"""Predicted chance, share that came true, how many there were."""


def draw_speeds(result: BenchResult) -> str:
    """Draw every variant of every workload as a point with its interval, and what replay says of it as a ring."""
    rows: list[tuple[WorkloadResult, VariantResult | None]] = []
    values = [1.0]
    for workload in result.workloads:
        ran = [each for each in workload.variants if each.ratio() is not None]
        if ran:
            rows.append((workload, None))
            rows += [(workload, each) for each in ran]
        for each in ran:
            ratio = each.ratio()
            assert ratio is not None
            values += [value for value in (ratio.median, ratio.low, ratio.high) if value is not None]
            if each.replayed is not None:
                values.append(each.replayed.ratio)
    if not rows:
        return ""
    height = 34.0 + sum(_GROUP if each is None else _ROW for _, each in rows) + 30.0
    scale = Scale(0.93 * min(values), 1.07 * max(values), _LABELS, _WIDTH - _FIGURES, logarithmic=True)
    body = []
    last_place = -100.0
    for value in _RATIO_TICKS:
        place = scale(value)
        # The mark at plain's speed is always there; others only where there is room.
        crowded = place - last_place < 34 or (value != 1.0 and abs(place - scale(1.0)) < 34)
        if scale.low <= value <= scale.high and not crowded:
            last_place = place
            kind = "unity" if value == 1.0 else "grid"
            body.append(tag("line", x1=place, x2=place, y1=26, y2=height - 26, class_=kind))
            words = "plain" if value == 1.0 else f"{format_tick(value)}×"
            body += [label(place, y, words, class_="tick", text_anchor="middle") for y in (18, height - 8)]
    y = 34.0
    for workload, variant in rows:
        if variant is None:
            y += _GROUP
            note = ""
            if workload.forced:
                words = "in part forced" if workload.name == MIXED else "the target is made to follow a text"
                note = tag("tspan", escape(words), class_="note", dx=10)
            body.append(tag("text", escape(workload.name) + note, x=0, y=y - 12, class_="group"))
            continue
        body.append(_draw_speed_row(variant, scale, y + _ROW / 2))
        y += _ROW
    return picture(_WIDTH, height, "".join(body), "Speed of every variant on every workload, over plain's")


def _draw_speed_row(each: VariantResult, scale: Scale, y: float) -> str:
    ratio, speed = each.ratio(), each.per_second()
    assert ratio is not None
    assert speed is not None
    kind = each.variant.kind
    name = variant_title(each)
    words = f"{name}: {ratio.median:.3f} times plain, 95% {format_interval(ratio)}, {speed.median:.1f} tokens/s"
    if each.replayed is not None:
        words += f"; by replay {each.replayed.ratio:.3f}"
    if drafted_nothing(each):
        words += f"; {NOTHING_DRAFTED}"
    parts = [tooltip(words), tag("rect", x=0, y=y - _ROW / 2, width=_WIDTH, height=_ROW, class_="row")]
    parts.append(label(14, y + 4, name, class_=f"name {kind}"))
    x = scale(ratio.median)
    if ratio.low is not None and ratio.high is not None:
        low, high = scale(ratio.low), scale(ratio.high)
        parts.append(tag("line", x1=low, x2=high, y1=y, y2=y, class_=f"bar {kind}"))
        parts += [tag("line", x1=end, x2=end, y1=y - 4, y2=y + 4, class_=f"bar {kind}") for end in (low, high)]
    if each.replayed is not None:
        parts.append(tag("circle", cx=scale(each.replayed.ratio), cy=y, r=6.5, class_="replay"))
    parts.append(_draw_marker(kind, x, y))
    parts.append(label(_WIDTH - _FIGURES + 20, y + 4, f"{ratio.median:.2f}×", class_=f"figure {kind}"))
    parts.append(label(_WIDTH - _FIGURES + 70, y + 4, format_interval(ratio).replace("-", ""), class_="tick"))
    return tag("g", "".join(parts), class_="speed")


def _draw_marker(kind: str, x: float, y: float) -> str:
    """Return a kind's mark: kinds differ in shape too, not in colour alone."""
    if kind == "auto":
        return diamond(x, y, 6.5, class_="mark auto")
    if kind == "server":
        return path([(x - 5, y + 4), (x, y - 5), (x + 5, y + 4), (x - 5, y + 4)], class_="mark server")
    if kind == "policy":
        return tag("rect", x=x - 4, y=y - 4, width=8, height=8, class_="mark policy")
    return tag("circle", cx=x, cy=y, r=4.5 if kind == "static" else 3.5, class_=f"mark {kind}")


def draw_legend(result: BenchResult) -> str:
    """Draw which mark is what, of the kinds that ran."""
    kinds = {each.variant.kind for workload in result.workloads for each in workload.variants}
    names = {
        "plain": "plain against plain",
        "server": "llama-server",
        "static": "static settings",
        "policy": "other policies",
        "auto": "auto",
    }
    parts, x = [], 8.0
    for kind, words in names.items():
        if kind in kinds:
            parts += [_draw_marker(kind, x, 12.0), label(x + 12, 16, words, class_="tick")]
            x += 40 + 6.6 * len(words)
    parts += [tag("circle", cx=x, cy=12.0, r=6.5, class_="replay"), label(x + 12, 16, "by replay", class_="tick")]
    return picture(_WIDTH, 24.0, "".join(parts), "Legend")


def draw_staircase(cost: PassCost, title: str, x_label: str) -> str:
    """Draw what passes take by their rows: medians with quartiles, and the line of one row at a time."""
    widths = [step for step in cost.widths if step.rows <= 32]
    top = 1.12 * max(step.high_s for step in widths) * 1e3
    wide = max(step.rows for step in widths)
    x = Scale(0.0, wide + 1.0, 52.0, 460.0)
    y = Scale(0.0, top, 260.0, 56.0)
    one_ms = widths[0].median_s * 1e3
    beyond = min(wide + 1.0, top / one_ms)
    body = [path([(x(0), y(0)), (x(beyond), y(one_ms * beyond))], class_="unity")]
    body.append(path([(x(step.rows), y(step.median_s * 1e3)) for step in widths], class_="line c1"))
    cheaper_rows = cost.cheaper_rows()
    for step in widths:
        place = x(step.rows)
        low, high = y(step.low_s * 1e3), y(step.high_s * 1e3)
        cheaper = step.rows in cheaper_rows
        spread = f"{step.low_s * 1e3:.3g} to {step.high_s * 1e3:.3g}"
        words = f"{step.rows} rows: {step.median_s * 1e3:.3g} ms, quartiles {spread}"
        note = "; cheaper than a narrower pass" if cheaper else ""
        body.append(tag("line", x1=place, x2=place, y1=low, y2=high, class_="bar c1"))
        mark = "mark c2" if cheaper else "mark c1"
        body.append(tag("circle", tooltip(words + note), cx=place, cy=y(step.median_s * 1e3), r=4.5, class_=mark))
    frame = Plot(x, y, [v for v in ticks(0, wide, 8) if v == int(v)], ticks(0, top, 5), x_label, "ms", title)
    return picture(470.0, 300.0, frame.draw("".join(body)), f"Time of a pass by its rows: {title}")


def draw_sweep(workload: WorkloadResult) -> str:
    """Draw the replayed static settings as a grid of draft lengths by drafters and thresholds."""
    settings = [each for each in workload.static if each.variant.fixed is not None]
    if not settings:
        return ""
    lengths = sorted({_length(each) for each in settings})
    rows = list(dict.fromkeys((each.variant.drafters, _p_min(each)) for each in settings))
    found = {(each.variant.drafters, _p_min(each), _length(each)): each for each in settings}
    best = max(settings, key=lambda each: each.ratio)
    left, top, cell_w, cell_h = 178.0, 48.0, 34.0, 19.0
    width = left + cell_w * len(lengths) + 4
    height = top + cell_h * len(rows) + 8
    body = [label(0, 16, workload.name, class_="plot-title"), label(left, 40 - 12, "draft-max", class_="axis-label")]
    body += [
        label(left + cell_w * (index + 0.5), 43, str(length), class_="tick", text_anchor="middle")
        for index, length in enumerate(lengths)
    ]
    shown = None
    for index, (drafters, p_min) in enumerate(rows):
        y = top + cell_h * index
        if drafters != shown:
            shown = drafters
            body.append(label(0, y + 13, "together" if len(drafters) > 1 else drafters[0], class_="name"))
        body.append(label(left - 8, y + 13, f"p-min {p_min:g}", class_="tick", text_anchor="end"))
        for column, length in enumerate(lengths):
            each = found.get((drafters, p_min, length))
            if each is not None:
                body.append(_draw_cell(each, left + cell_w * column, y, cell_w, cell_h, chosen=each is best))
    about = f"Replayed static settings on {workload.name}"
    return picture(width, height, "".join(body), about, widest=f"{width:.0f}px")


def _draw_cell(each: VariantReplay, x: float, y: float, width: float, height: float, *, chosen: bool) -> str:
    gain = each.ratio - 1.0
    kind = "gain" if gain >= 0 else "loss"
    strength = min(1.0, gain / 1.5 if gain >= 0 else -gain / 0.5)
    words = f"{each.variant.name}: {each.ratio:.3f} times plain"
    body = tooltip(words) + tag(
        "rect",
        x=x + 1,
        y=y + 1,
        width=width - 2,
        height=height - 2,
        rx=3,
        class_=kind,
        fill_opacity=0.05 + 0.6 * strength,
    )
    if chosen:
        body += tag("rect", x=x + 1, y=y + 1, width=width - 2, height=height - 2, rx=3, class_="chosen")
    body += label(x + width / 2, y + 13.5, f"{each.ratio:.2f}", class_="cell", text_anchor="middle")
    return tag("g", body)


def draw_acceptance(workload: WorkloadResult, variants: Sequence[VariantResult]) -> str:
    """Draw the share of drafts accepted at each depth, of those whose predecessors all were."""
    lines = [(each, each.by_depth()[:_DEEPEST]) for each in variants]
    lines = [(each, depths) for each, depths in lines if depths]
    if not lines:
        return ""
    deepest = max(len(depths) for _, depths in lines)
    x = Scale(0.5, max(deepest, 2) + 0.5, _LEFT, _RIGHT)
    y = Scale(0.0, 1.0, _BOTTOM, _TOP)
    body = []
    for each, depths in lines:
        kind = each.variant.kind
        points = [
            (depth + 1, accepted / tested, tested)
            for depth, (accepted, tested) in enumerate(depths)
            if tested >= _FEWEST_TESTED
        ]
        body.append(path([(x(depth), y(share)) for depth, share, _ in points], class_=f"line {kind}"))
        for depth, share, tested in points:
            words = f"{each.variant.name}, depth {depth}: {share:.0%} of {tested}"
            body.append(tag("g", tooltip(words) + _draw_marker(kind, x(depth), y(share))))
    frame = Plot(
        x,
        y,
        [value for value in ticks(1, max(deepest, 2), 6) if value == int(value)],
        (0, 0.25, 0.5, 0.75, 1.0),
        "depth of the draft token",
        "accepted",
        workload.name,
        percent=True,
    )
    return picture(_SMALL_WIDTH, _SMALL_HEIGHT, frame.draw("".join(body)), f"Acceptance by depth on {workload.name}")


def draw_reliability(title: str, by_drafter: Mapping[str, Sequence[Point]]) -> str:
    """Draw predicted chances against what came true; the larger a circle, the more there were."""
    x, y = Scale(0.0, 1.0, _LEFT, _RIGHT), Scale(0.0, 1.0, _BOTTOM, _TOP)
    most = max((count for points in by_drafter.values() for _, _, count in points), default=1.0)
    body = [path([(x(0), y(0)), (x(1), y(1))], class_="unity")]
    for index, (name, points) in enumerate(by_drafter.items()):
        for predicted, actual, count in points:
            words = f"{name}: predicted {predicted:.0%}, {actual:.0%} of {count:.0f} came true"
            radius = 2.0 + 9.0 * (count / most) ** 0.5
            body.append(
                tag(
                    "circle",
                    tooltip(words),
                    cx=x(predicted),
                    cy=y(actual),
                    r=radius,
                    class_=f"bubble c{index % 4 + 1}",
                )
            )
        body.append(label(_LEFT + 52 + 62 * index, _TOP - 10, name, class_=f"name c{index % 4 + 1}"))
    marks = (0, 0.25, 0.5, 0.75, 1.0)
    frame = Plot(x, y, marks, marks, "predicted chance", "came true", title, percent=True)
    return picture(_SMALL_WIDTH, _SMALL_HEIGHT, frame.draw("".join(body)), f"Predicted against actual: {title}")


def draw_ledger(title: str, entries: Sequence[Point]) -> str:
    """Draw the time lost against plain over the tokens written, and what may be lost at most."""
    debts = [1e3 * debt_s for _, debt_s, _ in entries]
    allowances = [1e3 * allowance_s for _, _, allowance_s in entries]
    low, high = min(0.0, *debts), max(0.0, *debts, *allowances)
    if not high > low:
        high = low + 1.0
    x = Scale(0.0, max(1.0, *(tokens for tokens, _, _ in entries)), _LEFT + 8, _RIGHT)
    y = Scale(low, high + 0.05 * (high - low), _BOTTOM, _TOP)
    places = [x(tokens) for tokens, _, _ in entries]
    body = [
        tag("line", x1=x.start, x2=x.end, y1=y(0), y2=y(0), class_="unity"),
        path([(place, y(value)) for place, value in zip(places, allowances, strict=True)], class_="line c2 dashed"),
        path([(place, y(value)) for place, value in zip(places, debts, strict=True)], class_="line c1"),
    ]
    frame = Plot(x, y, ticks(0, x.high, 4), ticks(low, high, 5), "tokens", "ms lost against plain", title)
    return picture(_SMALL_WIDTH, _SMALL_HEIGHT, frame.draw("".join(body)), f"Time lost against plain: {title}")


def read_calibration(snapshot: Mapping[str, Any] | None) -> dict[str, list[Point]]:
    """Read a policy's calibration: by drafter, (predicted, actual, count)."""
    told = (snapshot or {}).get("calibration") or {}
    found = {str(name): [_parse_point(point) for point in points if point[2] > 0] for name, points in told.items()}
    return {name: points for name, points in found.items() if points}


def read_ledger(snapshot: Mapping[str, Any] | None) -> list[Point]:
    """Read a policy's ledger: (tokens, seconds lost, seconds that may be lost)."""
    entries = (snapshot or {}).get("ledger") or []
    # More points than pixels only make the page large; the last one is where it ended.
    step = max(1, len(entries) // _LEDGER_POINTS)
    return [_parse_point(entry) for entry in [*entries[:-1:step], *entries[-1:]]]


def _parse_point(values: Sequence[float]) -> Point:
    first, second, third = values
    return float(first), float(second), float(third)


def _length(each: VariantReplay) -> int:
    assert each.variant.fixed is not None
    return each.variant.fixed.draft_max


def _p_min(each: VariantReplay) -> float:
    assert each.variant.fixed is not None
    return each.variant.fixed.p_min
