"""The lines of a run as a table of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from benchmarks.gpu.steps import Figures

PACKING: Final = "python -m benchmarks gpu -o gpu.pyz"
COLUMNS: Final = (
    "model",
    "backend",
    "requests",
    "`llama-bench` or `generate`, t/s",
    "assisted generation, of `generate`",
    "plain, t/s",
    "`auto` of plain",
    "fixed drafts of plain",
    "their length",
    "own time a plain round, us",
    "own time a round of `auto`, us",
    "outside the card, a plain round, us",
    "outside the card, a round of `auto`, us",
)
NOTES: Final = (
    "At 0.8, answers of {tokens} tokens to held-out code, medians of laps in which variants take turns. Fixed drafts "
    "are the best of five lengths. With several requests t/s are of all of them, prompts included. Own time is "
    "sampling, planning and bookkeeping. The target is the embedded one, inflated.",
)


def results_of(lines: Iterable[Figures], date: str) -> dict[str, Any]:
    """Return the table of a run as ``docs/results`` has it, whatever has been measured of it."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    lines = list(lines)
    machine, command, tokens = "an unknown machine", "", 0
    measured = {line["step"] for line in lines if "model" in line}
    missing: dict[str, list[str]] = {"Not measured": [], "Cut short": []}
    for line in lines:
        if line["step"] == "machine":
            machine, command, tokens = line["machine"], line["command"], line["tokens"]
        if reason := line.get("failed") or line.get("left_out"):
            missing["Cut short" if line["step"] in measured else "Not measured"].append(f"{line['step']} ({reason})")
        if "model" not in line or reason:
            continue
        row = rows.setdefault((line["model"], line["backend"], line.get("requests", 1)), {})
        row |= _cells(line)
    notes = [note.format(tokens=tokens) for note in NOTES]
    notes += [f"{what}: {'; '.join(steps)}." for what, steps in missing.items() if steps]
    return {
        "machine": machine,
        "date": date,
        "commands": [PACKING, *filter(None, [command])],
        "notes": notes,
        "columns": list(COLUMNS),
        "rows": [[*key, *(cells.get(column) for column in COLUMNS[3:])] for key, cells in rows.items()],
    }


def _cells(line: Mapping[str, Any]) -> dict[str, str]:
    """Return what a line says of its row, by column."""
    task = line["task"]
    if task in ("llama_bench", "generate"):
        cells = {COLUMNS[3]: _speed(line["per_second"])}
        if "assisted_of_it" in line:
            cells[COLUMNS[4]] = f"{line['assisted_of_it']:.2f}"
        return cells
    if task == "card_time":
        return {COLUMNS[11 if line["variant"] == "plain" else 12]: f"{line['outside_us']:.0f}"}
    own_us = line["own_us"]
    values: Sequence[str] = (
        _speed(line["plain_per_second"]),
        f"{line['auto_of_plain']:.2f}",
        f"{line['best_fixed_of_plain']:.2f}",
        line["best_fixed"].removeprefix("draft of "),
        f"{own_us['plain']:.0f}",
        f"{own_us['auto']:.0f}",
    )
    return dict(zip(COLUMNS[5:11], values, strict=True))


def _speed(per_second: float) -> str:
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.1f}"
