"""How much memory serving a model takes, before it is loaded: what ``paceline models show -c`` prints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

import typer
from rich.table import Table

from paceline.cli.display import output_console
from paceline.cli.options import OF_THE_DRAFT_MODEL, refuse_given
from paceline.cli.outputs import Outputs
from paceline.cli.setup import FoundModels, size_models
from paceline.conversion.own_draft import OwnDraft
from paceline.engines.loading import free_device_memory
from paceline.engines.memory import available_memory
from paceline.engines.options import DraftOptions
from paceline.environment import ModelChoice
from paceline.model_pair import PairNeed, foresee_pair
from paceline.models.registry import MTP_DRAFT, resolve_model
from paceline.server_options import ServerOptions
from paceline.sizes import format_bytes

_WITHOUT_DRAFT: Final = "has no effect without a draft model: name one with -md"


def show_memory(
    context: typer.Context, path: Path, models: ModelChoice, options: ServerOptions, outputs: Outputs
) -> None:
    target, draft = models.target_options(path), None
    if models.draft.path is None:
        refuse_given(context, dict.fromkeys(OF_THE_DRAFT_MODEL, _WITHOUT_DRAFT))
    else:
        named = models.draft.path
        is_made_of_target = OwnDraft.parse(named) is not None or named == MTP_DRAFT
        draft = models.draft_options(target, named if is_made_of_target else resolve_model(named))
    found = size_models(context, FoundModels(target, draft), models, options)
    assert not isinstance(found.draft, DraftOptions)
    need = foresee_pair(found.target, found.draft, kept_bytes=options.prompt_cache_mib << 20)
    memory_free, device_free = available_memory(), free_device_memory(need.target.devices)
    facts = {
        "path": str(path),
        "requests": found.target.max_sequences,
        "target": dataclasses.asdict(need.target),
        "draft": None if need.draft is None else dataclasses.asdict(need.draft),
        "process_bytes": need.process_bytes,
        "start_bytes": need.start_bytes,
        "most_bytes": need.most_bytes,
        "device_bytes": need.device_bytes,
        "gpu_bytes": need.gpu_bytes,
        "prompt_cache_bytes": need.prompts_bytes,
        "available_bytes": memory_free,
        "device_available_bytes": device_free,
    }
    outputs.write(facts, lambda: _print_memory(found, need, memory_free, device_free))


def _print_memory(found: FoundModels, need: PairNeed, memory_free: int | None, device_free: int | None) -> None:
    console = output_console()
    requests, target = found.target.max_sequences, need.target
    each = "" if requests == 1 else f", up to {target.context_length} for each of {requests} requests"
    console.print(f"{Path(found.target.path).name} with a context of {target.cells} tokens{each}", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("model", "draft model")[: len(need.models)]:
        table.add_column(name, justify="right")
    for name, sizes in (
        ("weights", [each.weights_bytes for each in need.models]),
        ("KV cache", [each.cache_bytes for each in need.models]),
        ("vocabulary and tables", [each.other_bytes for each in need.models]),
        ("compute buffers, at most", [each.compute_bytes for each in need.models]),
    ):
        table.add_row(name, *("unknown" if size is None else format_bytes(size) for size in sizes))
    console.print(table)
    console.print(f"Python and its libraries: {format_bytes(need.process_bytes)}", markup=False)
    console.print(
        f"together: {format_bytes(need.start_bytes)} when loaded, {format_bytes(need.most_bytes)} at most",
        style="bold",
        markup=False,
    )
    if need.prompts_bytes:
        console.print(
            f"prompt cache: up to {format_bytes(need.prompts_bytes)} more, as requests come (--cache-ram)", markup=False
        )
    if not target.devices:
        console.print(
            f"on a GPU with all layers (-ngl 99): {format_bytes(need.gpu_bytes)} of its memory, for weights, KV cache "
            "and compute buffers",
            markup=False,
        )
    host_bytes = need.most_bytes - need.device_bytes
    wants = [("memory", host_bytes, memory_free)]
    if target.devices:
        wants.append((", ".join(target.devices), need.device_bytes, device_free))
    for where, wanted, free in wants:
        if free is None:
            console.print(f"how much of {where} is free is unknown here", markup=False)
        elif wanted > free:
            console.print(
                f"too much for {where}: {format_bytes(wanted)} of the {format_bytes(free)} that are free; lower -c or "
                "-np, or take smaller weights or cache types (-ctk q8_0 -ctv q8_0)",
                style="yellow",
                markup=False,
            )
        elif where == "memory" and wanted + need.prompts_bytes > free:
            console.print(
                f"fits in {where} until the prompt cache is full: {format_bytes(free)} are free; lower --cache-ram",
                style="yellow",
                markup=False,
            )
        else:
            console.print(f"fits in {where}: {format_bytes(free)} are free", style="green", markup=False)
