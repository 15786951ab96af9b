"""``python -m benchmarks rpc``: a model whose layers lie on two other machines, so far away, and what happens to them.

The other machines are network namespaces of this one, each with a ``paceline rpc-worker`` and a cable of its own; a
proxy before each delays what goes there and back. Distances take turns within one process where that can be. What is
measured:

* ``contract``: the suite that holds every engine to its contract, over the workers.
* ``passes``: what passes take, beside the sum of round trips and what the same pass takes without a distance. *Round
  trips* is what a pass takes longer, over the round trip to one worker: two workers make it 2.
* ``texts``: how many answers are those of the model on this machine, greedy and at 0.8, plainly and with drafts.
* ``speed``: tokens a second with ``auto``, which plans by a profile measured at that distance, beside plain decoding
  and a fixed draft of 16. They take turns at each prompt.
* ``losses``: a worker that is killed, stopped, cut off, or replaced by one of another version in the middle of an
  answer. *Seconds* are those until the one error, or until the next token where there is something to go on with: to
  load the model here, and to read what was said.

What limits the speed is the distance. Workers and the model's process share this machine's cores, so computing takes
longer than on machines of their own, and so do passes while other programs run.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, Final

import pytest
import typer

from benchmarks.reporting import JsonOption, as_line, console, numbers, split, table, write_figures
from benchmarks.rpc import measuring
from benchmarks.rpc.measuring import Models
from benchmarks.rpc.network import Network
from paceline.atomic_output import check_parent
from paceline.core.errors import InputError
from paceline.models.registry import CACHE_VARIABLE, resolve_model

EPILOG = """[bold]Examples[/bold]

python -m benchmarks rpc

python -m benchmarks rpc --parts passes,speed --round-trips 0,40 -m target -md draft

python -m benchmarks rpc --parts contract --loopback
"""

PARTS: Final = ("contract", "passes", "texts", "speed", "losses")
_NAME: Final = "rpc"


def rpc(
    model: Annotated[str, typer.Option("-m", "--model", help="The target, a GGUF file or a name.")] = "target",
    draft: Annotated[str, typer.Option("-md", "--model-draft", help="Its draft model.")] = "draft",
    parts: Annotated[str, typer.Option("--parts", help="What is measured.", metavar="PART[,...]")] = ",".join(PARTS),
    round_trips: Annotated[
        str, typer.Option("--round-trips", help="Milliseconds to each worker and back.", metavar="MS[,...]")
    ] = "0,10,40",
    rows: Annotated[str, typer.Option("--rows", help="Widths of passes.", metavar="N[,...]")] = "1,4,16,32",
    laps: Annotated[int, typer.Option("--laps", help="Times that all is measured again.", min=1)] = 3,
    repeats: Annotated[int, typer.Option("--repeats", help="Passes of a width in a lap.", min=2)] = 7,
    prompts: Annotated[int, typer.Option("--prompts", help="Prompts of texts and speed.", min=1)] = 4,
    tokens: Annotated[int, typer.Option("-n", "--predict", help="Tokens of an answer.", min=8)] = 96,
    loopback: Annotated[
        bool, typer.Option("--loopback", help="Have the workers on this machine's loopback: needs no root.")
    ] = False,
    threads: Annotated[int, typer.Option("-t", "--threads", help="CPU threads, of workers too.", min=1)] = 1,
    json_file: JsonOption = None,
) -> None:
    """Measure a model over two workers: its contract, passes, texts and speed, and workers that are lost.

    It needs root, to make network namespaces; without, give --loopback.
    """
    chosen = split(parts)
    for part in chosen:
        if part not in PARTS:
            raise InputError(f"--parts {part}: choose from {', '.join(PARTS)}")
    distances, widths = _milliseconds(round_trips), numbers(rows, "--rows")
    if "passes" in chosen and 0 not in distances:
        raise InputError(f"--round-trips {round_trips!r}: give 0, too, as what passes compute is measured there")
    if json_file is not None:
        check_parent(json_file)
    models = Models(resolve_model(model), resolve_model(draft), threads)
    report: dict[str, Any] = {
        "models": [models.target.name, models.draft.name],
        "in_namespaces": not loopback,
        "threads": threads,
        "load_before": os.getloadavg(),
    }
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(CACHE_VARIABLE, stack.enter_context(tempfile.TemporaryDirectory()))
        network = stack.enter_context(Network(2, in_namespaces=not loopback, threads=threads))
        if "contract" in chosen:
            report["contract"] = list(measuring.run_contract(network, distances))
            _print_contract(report["contract"])
        if "passes" in chosen:
            report["passes"] = measuring.measure_passes(network, models, distances, widths, laps, repeats)
            _print_passes(report["passes"])
        if "texts" in chosen:
            report["texts"] = measuring.measure_texts(network, models, distances, prompts, tokens)
            _print_texts(report["texts"])
        if "speed" in chosen:
            report["speed"] = measuring.measure_speed(network, models, distances, laps, prompts, tokens)
            _print_speed(report["speed"])
        if "losses" in chosen:
            report["losses"] = measuring.measure_losses(network, models, max(distances), tokens, laps)
            _print_losses(report["losses"])
    report["load_after"] = os.getloadavg()
    if json_file is None:
        print(as_line(_NAME, report))
    write_figures(_NAME, report, json_file)


def _milliseconds(text: str) -> list[float]:
    try:
        found = [float(part) for part in split(text)]
    except ValueError:
        found = []
    if not found or not all(0 <= each <= 1000 for each in found):
        raise InputError(f"--round-trips {text!r}: give milliseconds from 0 to 1000, such as 0,10,40")
    return found


def _print_contract(found: Sequence[Mapping[str, Any]]) -> None:
    made = table("the contract suite", "round trip, ms", "passed", "failed", "skipped", "seconds")
    for each in found:
        failed = each["failures"] + each["errors"]
        made.add_row(
            f"{each['round_trip_ms']:g}", *map(str, (each["passed"], failed, each["skipped"])), f"{each['seconds']:.0f}"
        )
    console().print(made)


def _print_passes(found: Mapping[str, Any]) -> None:
    console().print(found["engine"])
    columns = ("pass, ms", "quartiles", "expected, ms", "ratio", "of the least", "round trips")
    made = table("passes", "round trip, ms", "rows", *columns)
    for each in found["passes"]:
        low, median, high, expected = (1e3 * each[name] for name in ("low_s", "median_s", "high_s", "expected_s"))
        trips = each["round_trips"]
        made.add_row(
            f"{each['round_trip_ms']:g}",
            str(each["rows"]),
            f"{median:.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{expected:.1f}",
            f"{each['ratio']:.3f}",
            f"{each['least_ratio']:.3f}",
            "" if trips is None else f"{trips:.2f}",
        )
    console().print(made)


def _print_texts(found: Mapping[str, Any]) -> None:
    made = table(f"texts, {found['tokens']} tokens", "round trip, ms", "variant", "texts", "equal")
    for each in found["texts"]:
        made.add_row(f"{each['round_trip_ms']:g}", each["variant"], str(each["texts"]), str(each["equal"]))
    console().print(made)


def _print_speed(found: Mapping[str, Any]) -> None:
    columns = ("tokens/s", "of plain", "laps", "lowest text", "tokens a round", "drafted a round", "equal texts")
    made = table("speed", "round trip, ms", "variant", *columns)
    for distance in found["distances"]:
        for variant, each in distance["variants"].items():
            ratios = each["laps_over_plain"]
            made.add_row(
                f"{distance['round_trip_ms']:g}",
                variant,
                f"{each['tokens_per_s']:.1f}",
                f"{each['over_plain']:.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{min(each['texts_over_plain']):.2f}",
                f"{each['tokens_per_round']:.2f}",
                f"{each['drafted_per_round']:.2f}",
                f"{each['equal_texts']} of {distance['texts']}",
            )
    console().print(made)


def _print_losses(found: Sequence[Mapping[str, Any]]) -> None:
    made = table("losses", "loss", "fallback", "ends in", "times", "seconds", "most", "texts equal", names=3)
    by_case: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in found:
        by_case.setdefault((each["loss"], each["fallback"]), []).append(each)
    for case, all_of in by_case.items():
        seconds = [each["seconds"] for each in all_of]
        equal = [each["text_is_equal"] for each in all_of if each["text_is_equal"] is not None]
        figures = (f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", f"{sum(equal)} of {len(equal)}")
        end = "error" if all_of[0]["error"] else "next token"
        made.add_row(*case, end, str(len(all_of)), *figures)
    console().print(made)
    for (loss, fallback), (first, *_) in by_case.items():
        said = first["error"] or "; ".join(first["warnings"])
        console().print(f"{loss}, {fallback}: {said}", soft_wrap=True)
