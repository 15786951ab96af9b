"""The diagnoses as one page that needs nothing else: inline SVG, inline style, no script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.lab.bench.charts import draw_staircase
from paceline.lab.bench.page import Tile, style, template
from paceline.lab.doctor.candidate_report import CandidateReport, verdict
from paceline.lab.doctor.measures import ALL
from paceline.lab.intervals import Ratio
from paceline.lab.svg import Plot, Scale, diamond, label, path, picture, tag, ticks, tooltip
from paceline.sizes import format_bytes, format_count

if TYPE_CHECKING:
    from paceline.lab.doctor.alignment import Alignment
    from paceline.lab.doctor.candidates import Skipped
    from paceline.lab.doctor.examiner import Diagnosis
    from paceline.lab.doctor.export import Export
    from paceline.lab.doctor.prediction import Prediction, Speed
    from paceline.models.description import ModelDescription

_WIDTH: Final = 980.0
"""Width of the chart of speeds, in pixels."""
_LABELS: Final = 330.0
"""Width of names at the left of the chart of speeds, in pixels."""
_FIGURES: Final = 190.0
"""Width of figures at the right of the chart of speeds, in pixels."""
_ROW: Final = 24.0
"""Height of a row of the chart of speeds, in pixels."""
_GROUP: Final = 38.0
"""Height of a candidate's heading in the chart of speeds, in pixels."""
_RATIO_TICKS: Final = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0)
_KINDS_OF_LINES: Final = ("c1", "c2", "c3", "c4")
_COLUMNS: Final = ("accepted", "1 - TV", "same top")
_ALIGNMENT_COLUMNS: Final = ("one draft token", "ends meet", "draft tokens each")


@dataclass(frozen=True, slots=True)
class Card:
    """One candidate on the page.

    Attributes:
        words: how its tokens fit, or why it is not drafted with.
        lines: further sentences: speeds, warnings, advice.
        pictures: as SVG.
        exports: flags of other programs.
    """

    name: str
    about: str
    words: str
    lines: tuple[str, ...]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    pictures: Sequence[str]
    exports: Sequence[Export]


def render(
    target: ModelDescription,
    reports: Sequence[CandidateReport],
    skipped: Sequence[Skipped],
    *,
    temperature: float,
    machine: Mapping[str, str],
) -> str:
    """Return the page. ``reports`` has the best candidate first; answers were sampled at ``temperature``."""
    predicted = [(each.diagnosis, each.diagnosis.prediction) for each in reports if each.diagnosis.prediction]
    sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return template("paceline.lab.doctor", "doctor.html").render(
        style=style(),
        target=_about(target),
        facts=" · ".join(
            [
                sampling,
                *(machine[name] for name in ("processor", "system") if name in machine),
                *(f"{threads} threads" for threads in (machine.get("threads"),) if threads is not None),
            ]
        ),
        tiles=_tiles(reports),
        speeds=_draw_speeds(predicted),
        cards=[_card(each) for each in reports],
        skipped=skipped,
    )


def _tiles(reports: Sequence[CandidateReport]) -> list[Tile]:
    """Put the answer first: the gain of the best candidate, its agreement, and the number of candidates."""
    best = next((each.diagnosis for each in reports if each.diagnosis.prediction), None)
    tiles = []
    if best is not None and best.prediction is not None:
        prediction = best.prediction
        tiles = [
            Tile(
                f"{prediction.auto.gain.value:.2f}×",
                f"auto with {Path(best.name).name}, of plain: {verdict(prediction)}",
                "auto",
            ),
            Tile(f"{prediction.auto.tokens_per_s.value:.1f} t/s", f"predicted; plain {_plain(prediction)}", "auto"),
            Tile(
                f"{prediction.static.gain.value:.2f}×",
                f"best fixed length, draft-max {prediction.static.draft_max}",
                "static",
            ),
            Tile(f"{prediction.without_model.gain.value:.2f}×", "auto without a draft model", "plain"),
        ]
    fitting = sum(each.diagnosis.fitting is not None and each.diagnosis.fitting.fits for each in reports)
    tiles.append(Tile(f"{fitting} of {len(reports)}", "candidates with the target's own tokens", "plain"))
    return tiles


def _plain(prediction: Prediction) -> str:
    return f"{prediction.plain.tokens_per_s.value:.1f}"


def _card(report: CandidateReport) -> Card:
    diagnosis = report.diagnosis
    fitting, prediction = diagnosis.fitting, diagnosis.prediction
    words = "" if fitting is None else fitting.words
    if diagnosis.error is not None:
        words += f"{'; ' if words else ''}not drafted with: {diagnosis.error}"
    lines = [*report.advice, *(() if fitting is None else fitting.warnings)]
    columns: tuple[str, ...] = ("text",)
    of_kinds: dict[str, list[str]] = {}
    if diagnosis.agreement is not None:
        columns += _COLUMNS
        ratios = (diagnosis.agreement.coupled, diagnosis.agreement.overlap, diagnosis.agreement.same_top)
        of_kinds = {kind: [_percent(each[kind]) for each in ratios] for kind in diagnosis.survival}
    elif fitting is not None and fitting.alignment is not None:
        columns += _ALIGNMENT_COLUMNS
        of_kinds = {kind: _alignment_cells(fitting.alignment, kind) for kind in fitting.alignment.one}
    if prediction is not None:
        lines.insert(0, prediction.price)
        gains = {**prediction.gain_by_kind, ALL: prediction.auto.gain.value}
        for kind in diagnosis.survival:
            # A kind that was aligned may have no answers.
            of_kinds.setdefault(kind, ["-"] * (len(columns) - 1)).append(f"{gains[kind]:.2f}×")
        columns += ("gain with auto",)
    rows = [[kind, *cells, *["-"] * (len(columns) - 1 - len(cells))] for kind, cells in of_kinds.items()]
    return Card(
        diagnosis.name,
        _about(diagnosis.what),
        words,
        tuple(lines),
        columns,
        rows,
        _pictures(diagnosis),
        report.exports,
    )


def _alignment_cells(alignment: Alignment, kind: str) -> list[str]:
    each = alignment.draft_tokens[kind].value
    return [_percent(alignment.one[kind]), _percent(alignment.ends[kind]), "-" if each is None else f"{each:.2f}"]


def _pictures(diagnosis: Diagnosis) -> list[str]:
    pictures = []
    if diagnosis.prediction is not None:
        pictures += [_draw_lengths(diagnosis.prediction), _draw_survival(diagnosis)]
    if diagnosis.profile is not None:
        pictures.append(draw_staircase(diagnosis.profile.target, "target: a whole round", "rows verified in one pass"))
    return pictures


def _draw_speeds(predicted: Sequence[tuple[Diagnosis, Prediction]]) -> str:
    """Draw the predicted gain of each candidate, as points with their intervals."""
    if not predicted:
        return ""
    speeds = [(diagnosis, _list_ways(prediction)) for diagnosis, prediction in predicted]
    ends = [1.0]
    for _, ways in speeds:
        for _, speed in ways:
            ends += [end for end in (speed.gain.value, speed.gain.low, speed.gain.high) if end is not None]
    height = 34.0 + sum(_GROUP + _ROW * len(ways) for _, ways in speeds) + 30.0
    scale = Scale(0.93 * min(ends), 1.07 * max(ends), _LABELS, _WIDTH - _FIGURES, logarithmic=True)
    body = []
    for value in _RATIO_TICKS:
        if scale.low <= value <= scale.high and (value == 1.0 or abs(scale(value) - scale(1.0)) >= 34):
            place, kind = scale(value), "unity" if value == 1.0 else "grid"
            body.append(tag("line", x1=place, x2=place, y1=26, y2=height - 26, class_=kind))
            words = "plain" if value == 1.0 else f"{value:g}×"
            body += [label(place, y, words, class_="tick", text_anchor="middle") for y in (18, height - 8)]
    y = 34.0
    for diagnosis, ways in speeds:
        y += _GROUP
        body.append(label(0, y - 12, diagnosis.name, class_="group"))
        for kind, speed in ways:
            body.append(_speed_row(kind, speed, scale, y + _ROW / 2))
            y += _ROW
    return picture(_WIDTH, height, "".join(body), "Predicted speed of every candidate, over plain's")


def _list_ways(prediction: Prediction) -> list[tuple[str, Speed]]:
    return [("auto", prediction.auto), ("static", prediction.static), ("plain", prediction.without_model)]


def _speed_row(kind: str, speed: Speed, scale: Scale, y: float) -> str:
    name = speed.name if speed.draft_max is None else f"best fixed length: {speed.name}"
    gain = speed.gain
    words = f"{name}: {gain.value:.3f} times plain, {speed.tokens_per_s.value:.1f} tokens/s"
    parts = [
        tooltip(words),
        tag("rect", x=0, y=y - _ROW / 2, width=_WIDTH, height=_ROW, class_="row"),
        label(14, y + 4, name, class_=f"name {kind}"),
    ]
    if gain.low is not None and gain.high is not None:
        low, high = scale(gain.low), scale(gain.high)
        parts.append(tag("line", x1=low, x2=high, y1=y, y2=y, class_=f"bar {kind}"))
        parts += [tag("line", x1=end, x2=end, y1=y - 4, y2=y + 4, class_=f"bar {kind}") for end in (low, high)]
    place = scale(gain.value)
    if kind == "auto":
        parts.append(diamond(place, y, 6.5, class_="mark auto"))
    else:
        parts.append(tag("circle", cx=place, cy=y, r=4.5 if kind == "static" else 3.5, class_=f"mark {kind}"))
    parts.append(label(_WIDTH - _FIGURES + 20, y + 4, f"{gain.value:.2f}×", class_=f"figure {kind}"))
    parts.append(label(_WIDTH - _FIGURES + 70, y + 4, f"{speed.tokens_per_s.value:.1f} t/s", class_="tick"))
    return tag("g", "".join(parts), class_="speed")


def _draw_lengths(prediction: Prediction) -> str:
    """Draw the gain of every fixed draft length, and that of auto as a line across."""
    gains = [gain for _, gain in prediction.lengths]
    high = max(1.1, prediction.auto.gain.value, *gains) * 1.05
    low = min(0.9, *gains) * 0.95
    deepest = max(length for length, _ in prediction.lengths)
    x, y = Scale(0.0, deepest + 1.0, 52.0, 460.0), Scale(low, high, 260.0, 56.0)
    body = [
        tag("line", x1=x.start, x2=x.end, y1=y(1.0), y2=y(1.0), class_="unity"),
        tag(
            "line",
            tooltip(f"auto: {prediction.auto.gain.value:.3f} times plain"),
            x1=x.start,
            x2=x.end,
            y1=y(prediction.auto.gain.value),
            y2=y(prediction.auto.gain.value),
            class_="bar auto",
        ),
        label(x.end, y(prediction.auto.gain.value) - 6, "auto", class_="name auto", text_anchor="end"),
        path([(x(length), y(gain)) for length, gain in prediction.lengths], class_="line static"),
    ]
    for length, gain in prediction.lengths:
        words = tooltip(f"draft-max {length}: {gain:.3f} times plain")
        body.append(tag("circle", words, cx=x(length), cy=y(gain), r=4.5, class_="mark static"))
    frame = Plot(
        x,
        y,
        [value for value in ticks(0, deepest, 8) if value == int(value)],
        ticks(low, high, 5),
        "draft-max",
        "of plain",
        "speed by fixed draft length",
    )
    return picture(470.0, 300.0, frame.draw("".join(body)), "Predicted speed by fixed draft length")


def _draw_survival(diagnosis: Diagnosis) -> str:
    """Draw how far chains follow the answers, by kind of text."""
    deepest = max(len(depths) for depths in diagnosis.survival.values())
    x, y = Scale(0.5, max(deepest, 2) + 0.5, 52.0, 460.0), Scale(0.0, 1.0, 260.0, 56.0)
    body = []
    kinds = [kind for kind in diagnosis.survival if kind != ALL] or [ALL]
    for index, kind in enumerate(kinds):
        line = _KINDS_OF_LINES[index % len(_KINDS_OF_LINES)]
        points = [(depth.depth, depth.survival) for depth in diagnosis.survival[kind] if depth.survival is not None]
        body.append(path([(x(depth), y(share)) for depth, share in points], class_=f"line {line}"))
        for depth, share in points:
            words = tooltip(f"{kind}: {share:.1%} are right down to depth {depth}")
            body.append(tag("circle", words, cx=x(depth), cy=y(share), r=3.5, class_=f"mark {line}"))
        body.append(label(300, 74 + 16 * index, kind, class_=f"name {line}"))
    frame = Plot(
        x,
        y,
        [value for value in ticks(1, max(deepest, 2), 6) if value == int(value)],
        (0, 0.25, 0.5, 0.75, 1.0),
        "depth of the draft token",
        "right so far",
        "how far drafts follow the target's answers",
        percent=True,
    )
    return picture(470.0, 300.0, frame.draw("".join(body)), "Share of drafts that are right down to each depth")


def _percent(ratio: Ratio) -> str:
    if ratio.value is None:
        return "-"
    if ratio.standard_error is None:
        return f"{ratio.value:.1%}"
    return f"{ratio.value * 100:.1f} ± {ratio.standard_error * 100:.1f} %"


def _about(what: ModelDescription) -> str:
    parameters = "unknown number of" if what.num_parameters is None else format_count(what.num_parameters)
    parts = [what.path.name, format_bytes(what.num_bytes), f"{parameters} parameters", what.file_type]
    return ", ".join(part for part in parts if part is not None)
