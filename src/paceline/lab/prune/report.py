"""What was cut, what that saves and what it costs, as a report and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.lab.intervals import ALL, Ratio
from paceline.lab.prune.measuring import DEPTH, Acceptance
from paceline.lab.prune.pruner import Forecast, Made, Verdict
from paceline.lab.report import NONE, Line, Report, Row, Section, Table, machine_fact
from paceline.models.description import ModelDescription
from paceline.sizes import format_bytes


def forecast_lines(forecast: Forecast) -> list[str]:
    """Say what is to be expected, a sentence each."""
    return [
        f"expected: {format_bytes(forecast.bytes_before)} to about {format_bytes(forecast.bytes_after)}; a pass reads "
        f"{forecast.pass_share:.0%} of the bytes it did",
        *(f"known: {sentence}" for sentence in forecast.known),
    ]


def build_report(
    source: ModelDescription,
    made: ModelDescription,
    target: ModelDescription | None,
    forecast: Forecast,
    cut: Made,
    verdict: Verdict | None,
    *,
    temperature: float,
    machine: Mapping[str, str],
) -> Report:
    """Return the report; ``verdict`` is ``None`` where nothing was measured, ``target`` where it is the source."""
    title = [f"{source.path.name} to {made.path.name}"]
    facts = [f"target: {source.path.name if target is None else target.path.name}, at temperature {temperature:g}"]
    sections = [
        Section("What was cut", list(_describe_cuts(cut))),
        Section("Size", [_size_table(forecast, cut, verdict)]),
    ]
    if cut.layers is not None:
        sections.append(_layer_section(cut))
    if verdict is not None:
        sections.append(_acceptance_section(verdict, of_itself=target is None))
    return Report("prune", title, [*facts, *machine_fact(machine)], sections)


def _describe_cuts(cut: Made) -> Iterator[Line]:
    if cut.tokens is not None:
        words = (
            f"vocabulary: {len(cut.tokens.token_ids):,} of {cut.tokens.before:,} tokens are left: "
            f"{cut.tokens.always:,} without which some texts could not be spelled, {cut.tokens.of_text:,} for the "
            "text, then the lowest ids"
        )
        yield Line(words, item=True)
        if cut.respelled is not None and cut.respelled.factor is not None:
            yield Line(
                f"{cut.respelled.texts} texts come back byte for byte, in {cut.respelled.factor:.2f} times as many "
                "tokens",
                item=True,
            )
    if cut.layers is not None:
        gone = ", ".join(map(str, cut.layers.removed))
        yield Line(f"layers: {len(cut.layers.removed)} of {cut.layers_before} are gone: {gone}", item=True)
    if cut.blocks is not None and cut.parts is not None:
        removed = cut.blocks.removed * cut.blocks.block_units
        yield Line(
            f"width: {removed} of {cut.parts.units} feed-forward units of each layer are gone, "
            f"{removed / cut.parts.units:.0%} of them with {cut.blocks.worth:.1%} of their worth by the weights",
            item=True,
        )
    if cut.file_type is not None:
        yield Line(f"type: {cut.file_type}", item=True)


def _size_table(forecast: Forecast, cut: Made, verdict: Verdict | None) -> Table:
    rows = [
        Row(
            (
                "file",
                format_bytes(forecast.bytes_before),
                format_bytes(forecast.bytes_after),
                format_bytes(cut.bytes_after),
            )
        ),
        Row(("bytes of a pass", "100%", f"{forecast.pass_share:.0%}", f"{cut.pass_share:.0%}")),
    ]
    if verdict is not None:
        times = verdict.times
        rows.append(Row(("time of a pass", f"{times.before_s * 1e3:.2f} ms", NONE, f"{times.after_s * 1e3:.2f} ms")))
        rows.append(Row(("of what it was", "1.00", NONE, f"{times.ratio.median:.2f} ({times.ratio.interval})")))
    return Table(("", "before", "expected", "after"), rows)


def _layer_section(cut: Made) -> Section:
    assert cut.layers is not None
    cheapest = sorted(cut.layers.alone, key=lambda layer: -cut.layers.alone[layer] if cut.layers else 0.0)
    rows = [
        Row((str(layer), f"{cut.layers.alone[layer]:.1%}", "gone" if layer in cut.layers.removed else ""))
        for layer in cheapest
    ]
    about = "What is accepted (1 - TV) of the model without one layer; texts are others than those below."
    if cut.by_itself:
        about += " The target has other tokens, so the uncut model stood for it."
    return Section("Layers", [Table(("layer", "accepted without it", ""), rows, wordy=("",))], about)


def _acceptance_section(verdict: Verdict, *, of_itself: bool) -> Section:
    if verdict.accepted is None:
        return Section("Acceptance", [Line(f"it does not draft for the target: {verdict.refusal}", look="bad")])
    named = [("cut", verdict.accepted), *([("uncut", verdict.uncut)] if verdict.uncut is not None else [])]
    columns = ("draft", "accepted", "1 - TV", "same top", f"of {DEPTH} drafted", "texts", "tokens")
    rows = [Row((name, *_acceptance_cells(found))) for name, found in named]
    about = f"As a draft of {'its uncut self' if of_itself else 'the target'}, on the target's own answers."
    blocks: list[Table | Line] = [Table(columns, rows)]
    if verdict.accepted.agreement is None:
        blocks.append(
            Line("its tokens are not the target's, so its drafts are translated, and only counted", look="soft")
        )
    return Section("Acceptance", blocks, about)


def _acceptance_cells(found: Acceptance) -> Iterator[str]:
    agreement = found.agreement
    if agreement is None:
        yield from (NONE, NONE, NONE)
    else:
        yield from (_format_percent(each[ALL]) for each in (agreement.coupled, agreement.overlap, agreement.same_top))
    yield from (f"{found.accepted:.2f}", str(found.texts), str(found.tokens))


def _format_percent(ratio: Ratio) -> str:
    if ratio.value is None:
        return NONE
    if ratio.standard_error is None:
        return f"{ratio.value:.1%}"
    return f"{ratio.value * 100:.1f} ± {ratio.standard_error * 100:.1f}%"


# --- JSON -------------------------------------------------------------------------------------------------------------


def report_json(forecast: Forecast, cut: Made, verdict: Verdict | None) -> dict[str, Any]:
    """Return all figures as plain data."""
    tokens = None
    if cut.tokens is not None:
        tokens = {
            "kept": len(cut.tokens.token_ids),
            "before": cut.tokens.before,
            "always_kept": cut.tokens.always,
            "kept_for_text": cut.tokens.of_text,
            "tokens_of_texts": None if cut.respelled is None else dataclasses.asdict(cut.respelled),
        }
    layers = None
    if cut.layers is not None:
        layers = {
            "before": cut.layers_before,
            "removed": list(cut.layers.removed),
            "one_minus_tv_without": {str(layer): value for layer, value in cut.layers.alone.items()},
            "by_itself": cut.by_itself,
        }
    width = None
    if cut.blocks is not None and cut.parts is not None:
        width = {
            "units_before": cut.parts.units,
            "units_removed": cut.blocks.removed * cut.blocks.block_units,
            "block_units": cut.blocks.block_units,
            "worth_removed": cut.blocks.worth,
        }
    return {
        "expected": {**dataclasses.asdict(forecast), "pass_share": forecast.pass_share},
        "num_bytes": cut.bytes_after,
        "pass_share": cut.pass_share,
        "vocabulary": tokens,
        "layers": layers,
        "width": width,
        "file_type": cut.file_type,
        "passes": None if verdict is None else dataclasses.asdict(verdict.times),
        "acceptance": None if verdict is None else _acceptance_json(verdict.accepted),
        "uncut_acceptance": None if verdict is None else _acceptance_json(verdict.uncut),
        "refusal": None if verdict is None else verdict.refusal,
    }


def _acceptance_json(found: Acceptance | None) -> dict[str, Any] | None:
    if found is None:
        return None
    agreement = None if found.agreement is None else dataclasses.asdict(found.agreement)
    if agreement is not None:
        agreement["one_minus_tv"] = agreement.pop("overlap")
    return {
        "agreement": agreement,
        "accepted_of_4": found.accepted,
        "survival": [{"depth": each.depth, "survival": each.survival} for each in found.survival],
        "translated": found.agreement is None,
        "texts": found.texts,
        "tokens": found.tokens,
    }
