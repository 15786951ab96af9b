"""What a training was worth, as a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from paceline.lab.distil.verdict import LIVE_DRAFT, Outcome
from paceline.lab.intervals import ALL, Interval
from paceline.lab.report import NONE, Line, Report, Row, Section, Table, machine_fact
from paceline.sizes import format_count, format_seconds

if TYPE_CHECKING:
    from paceline.lab.distil.steps import Distilled
    from paceline.lab.distil.verdict import Change, KindVerdict, Live

_ABOUT: Final = (
    "share of first draft tokens that are accepted, on the target's own answers; in brackets 95% over texts, of the "
    "difference in pairs"
)


def build_report(
    found: Distilled, *, target: str, draft: str, temperature: float, took_s: float, machine: Mapping[str, str]
) -> Report:
    verdict, training = found.verdict, found.training
    overall = verdict.overall.accepted
    kinds = [kind for kind in verdict.kinds if kind.trained_on]
    shown = [*(kinds if len(kinds) > 1 else ()), verdict.overall, *(k for k in verdict.kinds if not k.trained_on)]
    rows = [_row(kind) for kind in shown]
    columns = ("held-out prompts of", "texts", "before", "after", "points", "1 - TV before", "1 - TV after")
    words = [Line(_sentence(verdict.outcome, overall), "" if verdict.outcome == "gain" else "bad")]
    if verdict.live is not None:
        words.append(Line(_live_sentence(verdict.live)))
        if verdict.live.after < verdict.live.plain:
            words.append(Line("decoding plainly is faster here all the same: paceline doctor tells why", "bad"))
    losses = [kind.kind for kind in verdict.kinds if not kind.trained_on and _is_below(kind.accepted.difference)]
    if losses:
        words.append(Line(f"it agrees less on what it was not trained on: {', '.join(losses)}", "bad"))
    about = (
        f"{training.steps} steps, {training.epochs:.1f} epochs of {training.texts} answers with "
        f"{format_count(training.tokens)} tokens, learning rate {training.learning_rate:.1e}"
    )
    if training.first_loss is not None and training.last_loss is not None:
        about += f", loss {training.first_loss:.3f} to {training.last_loss:.3f}"
    ended = ", ended by --time" if training.ended_by == "time" else ""
    return Report(
        "paceline distil",
        [f"{draft}, trained to agree with {target}"],
        [
            "greedy" if temperature == 0 else f"temperature {temperature:g}",
            f"{format_seconds(took_s)} in all",
            *machine_fact(machine),
        ],
        [
            Section("", words),
            Section("Accepted", [Table(columns, rows)], _ABOUT),
            Section("Training", [Line(about + ended)]),
        ],
    )


def _sentence(outcome: Outcome, change: Change) -> str:
    shares = f"{_percent(change.before.value)} accepted before, {_percent(change.after.value)} after"
    points = f"{_points(change.difference)} points"
    if outcome == "no gain":
        return f"no gain on held-out prompts: {shares}, {points}, and the interval contains zero"
    return f"{outcome} on held-out prompts: {shares}, {points}"


def _live_sentence(live: Live) -> str:
    low, high = live.gain.low, live.gain.high
    interval = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
    return (
        f"decoding in turns, {LIVE_DRAFT} tokens drafted a round: {live.after:.1f} t/s after, {live.before:.1f} "
        f"before, {live.gain.value:.2f}{interval} times; plainly {live.plain:.1f}"
    )


def _row(kind: KindVerdict) -> Row:
    name = "all that were trained on" if kind.kind == ALL else kind.kind
    name += "" if kind.trained_on else ", not trained on"
    accepted, overlap = kind.accepted, kind.overlap
    shares = [_percent(change.value) for change in (accepted.before, accepted.after)]
    overlaps = [_percent(change.value) for change in (overlap.before, overlap.after)]
    is_above = accepted.difference.low is not None and accepted.difference.low > 0
    return Row([name, str(kind.texts), *shares, _points(accepted.difference), *overlaps], wins=is_above)


def _is_below(interval: Interval) -> bool:
    return interval.high is not None and interval.high < 0


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def _points(interval: Interval) -> str:
    value = f"{100 * interval.value:+.1f}"
    if interval.low is None or interval.high is None:
        return value
    return f"{value} ({100 * interval.low:+.1f} to {100 * interval.high:+.1f})"
