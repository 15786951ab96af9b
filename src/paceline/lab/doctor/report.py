"""What was found out about candidates, as a report: the best first, with advice and the flags of other programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.lab.charts import Group, Series, draw_plot, draw_ratios, draw_staircase, draw_survival
from paceline.lab.charts import Ratio as DrawnRatio
from paceline.lab.doctor.advice import give_advice
from paceline.lab.doctor.export import Export, Pair, Program, export
from paceline.lab.intervals import ALL, Interval
from paceline.lab.report import (
    NONE,
    Block,
    Charts,
    Code,
    Line,
    Report,
    Row,
    Section,
    Table,
    Tile,
    describe_size,
    format_percent,
    machine_fact,
)

if TYPE_CHECKING:
    from paceline.lab.doctor.candidates import Skipped
    from paceline.lab.doctor.examiner import Diagnosis
    from paceline.lab.doctor.prediction import Prediction, Speed
    from paceline.lab.vocabulary_fit import Alignment, VocabularyFit
    from paceline.models.description import ModelDescription

_DEPTHS: Final = 8
"""Deepest drafts whose survival is printed."""
_ABOUT_SPEEDS: Final = (
    "Decoding speed over plain's, by replaying recorded drafts in virtual time with the costs of this machine; the bar "
    "is the 95% interval over the texts. Right of the line is faster. Grey is auto without a draft model."
)
_ABOUT_INTERVALS: Final = (
    "in brackets: 95% over other texts of these kinds. Other work on this machine moves speeds further: measure when "
    "it is idle"
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate with its diagnosis, advice in sentences, and flags for other programs."""

    diagnosis: Diagnosis
    advice: Sequence[str]
    exports: Sequence[Export]

    @property
    def rank(self) -> tuple[int, float]:
        """Key of its rank: the fastest first, then those without prediction, by their alignment."""
        diagnosis = self.diagnosis
        if diagnosis.prediction is not None:
            return 0, -diagnosis.prediction.auto.tokens_per_s.value
        if diagnosis.fitting is None:
            return 2, 0.0
        alignment = diagnosis.fitting.alignment
        return 1, -(0.0 if alignment is None else alignment.one_share or 0.0)


def advise(
    diagnosis: Diagnosis,
    target: ModelDescription,
    programs: Sequence[Program],
    *,
    has_devices: bool = False,
    draft_on_cpu: bool = False,
) -> Candidate:
    """Return a candidate with advice, and with the flags of ``programs``.

    ``has_devices``: there is a GPU that layers can be put on. ``draft_on_cpu``: the draft was told to run on the CPU
    all the same.
    """
    static = None if diagnosis.prediction is None else diagnosis.prediction.static
    pair = Pair(
        target,
        diagnosis.what,
        None if diagnosis.fitting is None else diagnosis.fitting.relation,
        None if static is None else static.draft_max,
        0.0 if static is None or static.p_min is None else static.p_min,
        has_devices,
    )
    advice = give_advice(diagnosis, target, draft_on_cpu=draft_on_cpu)
    if diagnosis.is_head and programs:
        advice.append(
            "a head has other flags in each program, which are not written here: see the program's own manual"
        )
    exports = [] if diagnosis.is_head else [export(program, pair) for program in programs]
    if static is not None and static.gain.value < 1.0:
        slower = f"predicted {static.gain.value:.2f} of plain's speed with this draft length: leave the draft model out"
        exports = [dataclasses.replace(each, notes=(slower, *each.notes)) for each in exports]
    return Candidate(diagnosis, advice, exports)


def build_report(
    target: ModelDescription,
    ranked: Sequence[Candidate],
    skipped: Sequence[Skipped],
    *,
    temperature: float,
    machine: Mapping[str, str],
) -> Report:
    """Return the report. ``ranked`` has the best candidate first; answers were sampled at ``temperature``."""
    predicted = [(each.diagnosis, each.diagnosis.prediction) for each in ranked if each.diagnosis.prediction]
    sections = []
    if len(ranked) > 1:
        sections.append(Section("", [_ranking(ranked)]))
    if predicted:
        sections.append(Section("Predicted speed", [Charts([_draw_speeds(predicted)], wide=True)], _ABOUT_SPEEDS))
    sections += [
        Section(
            f"{each.diagnosis.name}: {describe_size(each.diagnosis.what)}", list(_candidate_blocks(each, temperature))
        )
        for each in ranked
    ]
    if skipped:
        sections.append(Section("Not tried", [Line(f"{each.name}: {each.why}", item=True) for each in skipped]))
    if predicted:
        sections.append(Section("", [Line(_ABOUT_INTERVALS, "soft")]))
    return Report(
        "paceline doctor",
        [f"target: {target.path}, {describe_size(target)}"],
        ["greedy" if temperature == 0 else f"temperature {temperature:g}", *machine_fact(machine)],
        sections,
        _tiles(ranked),
    )


def _tiles(ranked: Sequence[Candidate]) -> list[Tile]:
    """Put the answer first: the gain of the best candidate, its agreement, and the number of candidates."""
    best = next((each.diagnosis for each in ranked if each.diagnosis.prediction), None)
    tiles = []
    if best is not None and best.prediction is not None:
        prediction = best.prediction
        static = prediction.static
        tiles = [
            Tile(
                f"{prediction.auto.gain.value:.2f}×",
                f"auto with {Path(best.name).name}, of plain: {prediction.verdict}",
                "auto",
            ),
            Tile(
                f"{prediction.auto.tokens_per_s.value:.1f} t/s",
                f"predicted; plain {prediction.plain.tokens_per_s.value:.1f}",
                "auto",
            ),
            Tile(f"{static.gain.value:.2f}×", f"best fixed length, draft-max {static.draft_max}", "static"),
            Tile(f"{prediction.without_model.gain.value:.2f}×", "auto without a draft model"),
        ]
    fitting = sum(each.diagnosis.fitting is not None and each.diagnosis.fitting.fits for each in ranked)
    return [*tiles, Tile(f"{fitting} of {len(ranked)}", "candidates with the target's own tokens")]


def _ranking(ranked: Sequence[Candidate]) -> Table:
    rows = []
    for each in ranked:
        diagnosis, prediction = each.diagnosis, each.diagnosis.prediction
        cells = [NONE] * 3
        if prediction is not None:
            auto = prediction.auto
            cells = [f"{auto.tokens_per_s.value:.1f}", f"{auto.gain.value:.2f}", prediction.verdict]
        words = diagnosis.error if diagnosis.fitting is None else diagnosis.fitting.words
        wins = prediction is not None and prediction.pays is True
        rows.append(Row([diagnosis.name, *cells, words or ""], wins=wins))
    columns = ("draft", "t/s", "of plain", "verdict", "tokens")
    return Table(columns, rows, title="by predicted speed", wordy=("tokens",))


def _candidate_blocks(candidate: Candidate, temperature: float) -> Iterator[Block]:
    diagnosis, prediction = candidate.diagnosis, candidate.diagnosis.prediction
    if diagnosis.fitting is not None:
        yield Line(f"tokens: {diagnosis.fitting.words}")
        if diagnosis.fitting.alignment is not None:
            yield _alignment_table(diagnosis.fitting.alignment)
        for warning in diagnosis.fitting.warnings:
            yield Line(warning, "soft", item=True)
    if diagnosis.error is not None:
        yield Line(f"not drafted with: {diagnosis.error}", "bad")
    if prediction is not None:
        for line in _speed_lines(prediction):
            yield Line(line)
        yield _agreement_table(diagnosis, prediction, temperature)
    for sentence in candidate.advice:
        yield Line(sentence, item=True)
    yield Charts(_draw_charts(diagnosis))
    for each in candidate.exports:
        yield Code(each.program, each.command, [f"refused: {reason}" for reason in each.refuses])
        for note in each.notes:
            yield Line(f"note: {note}", "soft")


def _speed_lines(prediction: Prediction) -> Iterator[str]:
    auto, static = prediction.auto, prediction.static
    yield (
        f"{prediction.verdict}: {_format_speed(auto)} with auto, {_format_gain(auto)} of plain's "
        f"{prediction.plain.tokens_per_s.value:.1f}; without a draft model {_format_speed(prediction.without_model)}"
    )
    threshold = f", p-min {static.p_min:g}" if static.p_min else ""
    yield f"best fixed length: draft-max {static.draft_max}{threshold}, {_format_gain(static)} of plain"
    yield prediction.price


def _agreement_table(diagnosis: Diagnosis, prediction: Prediction, temperature: float) -> Table:
    agreement = diagnosis.agreement
    of_places = [] if agreement is None else [agreement.coupled, agreement.overlap, agreement.same_top]
    names = ["accepted", "1 - TV", "same top" if temperature > 0 else "same top (greedy)"]
    depths = [depth.depth for depth in diagnosis.survival[ALL][:_DEPTHS] if depth.survival is not None]
    deepest = max(depths, default=1)
    rows = []
    kinds = [kind for kind in diagnosis.survival if kind != ALL]
    for kind in (*(kinds if len(kinds) > 1 else ()), ALL):
        survival = [depth.survival for depth in diagnosis.survival[kind][:_DEPTHS] if depth.survival is not None]
        gain = prediction.auto.gain.value if kind == ALL else prediction.gain_by_kind[kind]
        shares = " ".join(f"{value:.0%}" for value in survival)
        rows.append(Row([kind, *(format_percent(ratios[kind]) for ratios in of_places), shares, f"{gain:.2f}"]))
    columns = ("agreement on", *names[: len(of_places)], f"right to depth 1 to {deepest}", "gain")
    return Table(columns, rows)


def _alignment_table(alignment: Alignment) -> Table:
    rows = []
    for kind, one in alignment.one.items():
        each = alignment.draft_tokens[kind].value
        ends = format_percent(alignment.ends[kind])
        rows.append(Row([kind, format_percent(one), ends, NONE if each is None else f"{each:.2f}"]))
    return Table(("on text", "one draft token", "ends meet", "draft tokens each"), rows)


# --- charts -----------------------------------------------------------------------------------------------------------


def _draw_speeds(predicted: Sequence[tuple[Diagnosis, Prediction]]) -> str:
    """Draw the predicted gain of each candidate, as points with their intervals."""
    groups = []
    for diagnosis, prediction in predicted:
        ways = (("auto", prediction.auto), ("static", prediction.static), ("plain", prediction.without_model))
        groups.append(Group(diagnosis.name, [_ratio(kind, speed) for kind, speed in ways]))
    return draw_ratios(groups, "Predicted speed of every candidate, over plain's")


def _ratio(kind: str, speed: Speed) -> DrawnRatio:
    name = speed.name if speed.draft_max is None else f"best fixed length: {speed.name}"
    gain, words = speed.gain, f"{speed.tokens_per_s.value:.1f} t/s"
    ends = None if gain.low is None or gain.high is None else (gain.low, gain.high)
    tip = f"{name}: {gain.value:.3f} times plain, {words}"
    return DrawnRatio(name, kind, gain.value, ends, words=words, tip=tip)


def _draw_charts(diagnosis: Diagnosis) -> list[str]:
    charts = []
    if diagnosis.prediction is not None:
        charts += [_draw_lengths(diagnosis.prediction), draw_survival(diagnosis.survival)]
    if diagnosis.profile is not None:
        charts.append(draw_staircase(diagnosis.profile.target, "target: a whole round", "rows verified in one pass"))
    return charts


def _draw_lengths(prediction: Prediction) -> str:
    """Draw the gain of every fixed draft length, and that of auto as a line across."""
    auto, lengths = prediction.auto.gain.value, prediction.lengths
    gains = [gain for _, gain in lengths]
    wide = max(length for length, _ in lengths) + 1.0
    tips = [f"draft-max {length}: {gain:.3f} times plain" for length, gain in lengths]
    return draw_plot(
        "speed by fixed draft length",
        ("draft-max", "of plain"),
        (0.0, wide),
        (min(0.9, auto, *gains) * 0.95, max(1.1, auto, *gains) * 1.05),
        [Series("fixed length", "static", lengths, tips), Series("auto", "auto", [(0.0, auto), (wide, auto)])],
        unity=[(0.0, 1.0), (wide, 1.0)],
        about="Predicted speed by fixed draft length",
    )


# --- figures in words -------------------------------------------------------------------------------------------------


def _format_speed(speed: Speed) -> str:
    return f"{speed.tokens_per_s.value:.1f} t/s{_format_interval(speed.tokens_per_s, 1)}"


def _format_gain(speed: Speed) -> str:
    return f"{speed.gain.value:.2f}{_format_interval(speed.gain, 2)}"


def _format_interval(interval: Interval, digits: int) -> str:
    if interval.low is None or interval.high is None:
        return ""
    low, high = f"{interval.low:.{digits}f}", f"{interval.high:.{digits}f}"
    # Texts that are all decoded plainly differ in nothing.
    return "" if low == high else f" ({low} to {high})"


# --- JSON -------------------------------------------------------------------------------------------------------------


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """Return all figures of a candidate as plain data."""
    diagnosis = candidate.diagnosis
    agreement, prediction, fitting = diagnosis.agreement, diagnosis.prediction, diagnosis.fitting
    agreed = prices = None
    if agreement is not None:
        agreed = dataclasses.asdict(agreement)
        agreed["one_minus_tv"] = agreed.pop("overlap")
    if prediction is not None:
        lengths = [{"draft_max": length, "gain": gain} for length, gain in prediction.lengths]
        prices = {**dataclasses.asdict(prediction), "lengths": lengths, "pays": prediction.pays}
    return {
        "name": diagnosis.name,
        **model_json(diagnosis.what),
        "error": diagnosis.error,
        "tokens": None if fitting is None else _fit_json(fitting),
        "agreement": agreed,
        "survival": {
            kind: [{"depth": each.depth, "survival": each.survival, "error": each.survival_error} for each in depths]
            for kind, depths in diagnosis.survival.items()
        },
        "prediction": prices,
        "profile": None if diagnosis.profile is None else diagnosis.profile.to_json(),
        "advice": list(candidate.advice),
        "exports": [dataclasses.asdict(each) for each in candidate.exports],
        "took_s": diagnosis.took_s,
    }


def model_json(what: ModelDescription) -> dict[str, Any]:
    """Return what matters here of a model's description."""
    names = ("num_bytes", "num_parameters", "file_type", "architecture", "vocabulary_size")
    return {"path": str(what.path), **{name: getattr(what, name) for name in names}}


def _fit_json(fitting: VocabularyFit) -> dict[str, Any]:
    relation = fitting.relation
    names = ("num_same", "num_differing", "num_unused", "num_target_only", "num_draft_only")
    return {
        "fit": relation.fit,
        "words": fitting.words,
        "refusal": fitting.refusal,
        "warnings": list(fitting.warnings),
        **{name: getattr(relation, name) for name in names},
        "examples": [
            {
                "id": each.token_id,
                "target": each.target.decode("utf-8", "backslashreplace"),
                "draft": each.draft.decode("utf-8", "backslashreplace"),
            }
            for each in relation.examples
        ],
        "alignment": None if fitting.alignment is None else dataclasses.asdict(fitting.alignment),
    }
