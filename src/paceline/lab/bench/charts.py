"""The charts of a bench, from its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from paceline.lab.bench.results import BenchResult, VariantResult, WorkloadResult
from paceline.lab.bench.workloads import MIXED
from paceline.lab.charts import Group, Ratio, Series, draw_marks, draw_plot, draw_ratios, label, picture, tag, tooltip
from paceline.lab.variants import VariantReplay

NOTHING_DRAFTED = "nothing drafted"
"""Shown where a ratio would pass for a gain."""
_DEEPEST = 16
"""Depth of drafts up to which acceptance is drawn."""
_FEWEST_TESTED = 3
"""Drafts at a depth below which their share is not drawn."""
_LEDGER_POINTS = 250
_CELL_WIDTH, _CELL_HEIGHT = 29.0, 19.0
_KINDS = {
    "plain": "plain against plain",
    "server": "llama-server",
    "static": "static settings",
    "policy": "other policies",
    "auto": "auto",
    "replay": "by replay",
}

Point: TypeAlias = tuple[float, float, float]
"""Predicted chance, share that came true, how many there were."""


def draw_speeds(result: BenchResult) -> str:
    """Draw every variant of every workload as a point with its interval, and what replay says of it as a ring."""
    groups = []
    for workload in result.workloads:
        ratios = [_ratio(each) for each in workload.variants if each.ratio() is not None]
        forced = "in part forced" if workload.name == MIXED else "the target is made to follow a text"
        if ratios:
            groups.append(Group(workload.name, ratios, forced if workload.forced else ""))
    if not groups:
        return ""
    kinds = {ratio.kind for group in groups for ratio in group.ratios} | {"replay"}
    marks = draw_marks([(kind, words) for kind, words in _KINDS.items() if kind in kinds])
    return marks + draw_ratios(groups, "Speed of every variant on every workload, over plain's")


def _ratio(each: VariantResult) -> Ratio:
    ratio, speed = each.ratio(), each.per_second()
    assert ratio is not None
    assert speed is not None
    tip = f"{each.title}: {ratio.median:.3f} times plain, 95% {ratio.interval}, {speed.median:.1f} tokens/s"
    if each.replayed is not None:
        tip += f"; by replay {each.replayed.ratio:.3f}"
    if each.drafted_nothing:
        tip += f"; {NOTHING_DRAFTED}"
    return Ratio(
        each.title,
        each.variant.kind,
        ratio.median,
        None if ratio.low is None or ratio.high is None else (ratio.low, ratio.high),
        None if each.replayed is None else each.replayed.ratio,
        "" if ratio.low is None else ratio.interval,
        tip,
    )


def draw_sweep(workload: WorkloadResult) -> str:
    """Draw the replayed static settings as a grid of draft lengths by drafters and thresholds."""
    settings = {
        (each.variant.drafters, each.variant.fixed.p_min, each.variant.fixed.draft_max): each
        for each in workload.static
        if each.variant.fixed is not None
    }
    if not settings:
        return ""
    lengths = sorted({length for _, _, length in settings})
    best = max(settings.values(), key=lambda each: each.ratio)
    left, y = 68.0, 40.0
    body = [label(0, 15, workload.name, class_="plot-title"), label(0, 36, "draft-max", class_="axis-label")]
    for index, length in enumerate(lengths):
        body.append(label(left + _CELL_WIDTH * (index + 0.5), 36, str(length), class_="tick", text_anchor="middle"))
    shown = None
    for drafters, p_min in dict.fromkeys((drafters, p_min) for drafters, p_min, _ in settings):
        if drafters != shown:
            shown = drafters
            y += _CELL_HEIGHT
            body.append(label(0, y - 4, "together" if len(drafters) > 1 else drafters[0], class_="name"))
        body.append(label(left - 6, y + 13, f"p-min {p_min:g}", class_="tick", text_anchor="end"))
        for column, length in enumerate(lengths):
            each = settings.get((drafters, p_min, length))
            if each is not None:
                body.append(_draw_cell(each, left + _CELL_WIDTH * column, y, chosen=each is best))
        y += _CELL_HEIGHT
    about = f"Replayed static settings on {workload.name}"
    return picture(left + _CELL_WIDTH * len(lengths) + 2, y + 6, "".join(body), about)


def _draw_cell(each: VariantReplay, x: float, y: float, *, chosen: bool) -> str:
    gain = each.ratio - 1.0
    strength = min(1.0, gain / 1.5 if gain >= 0 else -gain / 0.5)
    box = {"x": x + 1, "y": y + 1, "width": _CELL_WIDTH - 2, "height": _CELL_HEIGHT - 2, "rx": 3}
    body = tooltip(f"{each.variant.name}: {each.ratio:.3f} times plain")
    body += tag("rect", **box, class_="gain" if gain >= 0 else "loss", fill_opacity=0.05 + 0.6 * strength)
    if chosen:
        body += tag("rect", **box, class_="chosen")
    body += label(x + _CELL_WIDTH / 2, y + 13.5, f"{each.ratio:.2f}", class_="cell", text_anchor="middle")
    return tag("g", body)


def draw_acceptance(workload: WorkloadResult) -> str:
    """Draw the share of drafts accepted at each depth, of those whose predecessors all were."""
    series, deepest = [], 2
    for each in (workload.best("static"), workload.best("auto")):
        depths = [] if each is None else each.by_depth()[:_DEEPEST]
        found = {depth: pair for depth, pair in enumerate(depths, 1) if pair[1] >= _FEWEST_TESTED}
        if each is None or not depths:
            continue
        deepest = max(deepest, len(depths))
        tips = [
            f"{each.variant.name}, depth {depth}: {accepted / tested:.0%} of {tested}"
            for depth, (accepted, tested) in found.items()
        ]
        points = [(float(depth), accepted / tested) for depth, (accepted, tested) in found.items()]
        series.append(Series(_KINDS[each.variant.kind].replace("settings", "setting"), each.variant.kind, points, tips))
    if not series:
        return ""
    return draw_plot(
        workload.name,
        ("depth of the draft token", "accepted"),
        (0.5, deepest + 0.5),
        (0.0, 1.0),
        series,
        shares="y",
        about=f"Acceptance by depth on {workload.name}",
    )


def draw_reliability(title: str, by_drafter: Mapping[str, Sequence[Point]]) -> str:
    """Draw predicted chances against what came true; the larger a circle, the more there were."""
    most = max((count for points in by_drafter.values() for _, _, count in points), default=1.0)
    series = [
        Series(
            name,
            f"c{index % 4 + 1}",
            [(predicted, actual) for predicted, actual, _ in points],
            [
                f"{name}: predicted {predicted:.0%}, {actual:.0%} of {count:.0f} came true"
                for predicted, actual, count in points
            ],
            radii=[2.0 + 9.0 * (count / most) ** 0.5 for _, _, count in points],
        )
        for index, (name, points) in enumerate(by_drafter.items())
    ]
    return draw_plot(
        title,
        ("predicted chance", "came true"),
        (0.0, 1.0),
        (0.0, 1.0),
        series,
        unity=[(0.0, 0.0), (1.0, 1.0)],
        shares="xy",
        about=f"Predicted against actual: {title}",
    )


def draw_ledger(title: str, entries: Sequence[Point]) -> str:
    """Draw the time lost against plain over the tokens written, and what may be lost at most."""
    debts = [(tokens, 1e3 * debt_s) for tokens, debt_s, _ in entries]
    allowances = [(tokens, 1e3 * allowance_s) for tokens, _, allowance_s in entries]
    values = [0.0, *(value for _, value in (*debts, *allowances))]
    low, high = min(values), max(values)
    if not high > low:
        high = low + 1.0
    most = max(1.0, *(tokens for tokens, _ in debts))
    return draw_plot(
        title,
        ("tokens", "ms lost against plain"),
        (0.0, most),
        (low, high + 0.05 * (high - low)),
        [Series("lost", "c1", debts), Series("may be lost", "c2", allowances, dashed=True)],
        unity=[(0.0, 0.0), (most, 0.0)],
        about=f"Time lost against plain: {title}",
    )


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
