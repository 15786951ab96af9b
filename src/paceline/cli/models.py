"""``paceline models``: what there is to run, the embedded pair, the local cache, drafts made of targets, the hub's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli.commands import Command, Group
from paceline.cli.display import error_console, output_console, print_path
from paceline.cli.options import ModelFlags, OnlyFlags, is_given, with_options
from paceline.cli.outputs import Outputs, json_option
from paceline.core.errors import InputError, ModelFileError
from paceline.environment import ModelChoice
from paceline.models.description import ModelDescription, describe
from paceline.models.embedded import embedded_target
from paceline.models.gguf_model import part_paths
from paceline.models.hub.local_cache import display_name, hub_folder
from paceline.models.registry import (
    NamedModel,
    complete_model,
    drafts_folder,
    find_removable,
    models_folder,
    named_models,
    remove,
    resolve_model,
)
from paceline.server_options import DEFAULT_PARALLEL, ServerOptions
from paceline.sizes import format_bytes, format_count
from paceline.terminal_text import printable, printable_line

EPILOG = """[bold]Examples[/bold]

paceline models  [dim]# all that have names: use them with -m and -md[/dim]

paceline models show target

paceline models show ./big.gguf --json

paceline models show big.gguf -c 32k -np 4 -md small.gguf  [dim]# the memory that serving them takes[/dim]

paceline models remove target-1b-q4_0

paceline models remove big-0d5a5e3a5c5f-Q4_0  [dim]# made by -md self, and made again when asked for[/dim]
"""
"""Examples below the command's help."""

_MEMORY_FLAGS = (
    *("context_length", "max_sequences", "draft_path", "draft_context_length", "gpu_layers", "draft_gpu_layers"),
    *("devices", "draft_devices", "flash_attention", "cache_type_k", "cache_type_v", "draft_cache_type_k"),
    *("draft_cache_type_v", "exact", "dtype"),
)
_SERVER_MEMORY_FLAGS = ("kv_unified", "prompt_cache_mib")
_DRAFTED = ModelFlags(also=("max_sequences",), draft_help="Draft model; self or mtp as for paceline run.")

_SOURCE_DIGEST = "inflate.source_sha256"
_PRUNED_FROM = "pruned.source"


def _complete_cached(incomplete: str) -> list[str]:
    with contextlib.suppress(ModelFileError):
        return [model.name for model in named_models() if not model.embedded and model.name.startswith(incomplete)]
    return []


app = typer.Typer(cls=Group, invoke_without_command=True, add_completion=False, epilog=EPILOG)


@app.callback()
def list_models(context: typer.Context, json_to: Annotated[str | None, json_option()] = None) -> None:
    """List models by name, or show, remove and locate them."""
    if context.invoked_subcommand is not None:
        if json_to is not None:
            command = context.invoked_subcommand
            raise InputError(f"--json before {command} has no effect: put it after {command}, if that takes it")
        return
    outputs = Outputs(json_to)
    outputs.check()
    models = [(model, _try_describe(model.path)) for model in named_models()]
    listed = [
        {
            "name": model.name,
            "embedded": model.embedded,
            "of_hub": model.of_hub,
            "own_draft": model.own_draft,
            "path": str(model.path),
            **_model_json(what),
        }
        for model, what in models
    ]
    folders = {"folder": models_folder(), "drafts_folder": drafts_folder(), "hub_folder": hub_folder()}
    facts = {**{name: str(path) for name, path in folders.items()}, "models": listed}
    outputs.write(facts, lambda: _print_list(models))


def _print_list(models: Sequence[tuple[NamedModel, ModelDescription | ModelFileError]]) -> None:
    console = output_console()
    console.print(f"embedded in paceline, {embedded_target().parent}", style="bold", markup=False)
    _print_models(console, {model.name: what for model, what in models if model.embedded})
    cached = {model.name: what for model, what in models if not (model.embedded or model.of_hub or model.own_draft)}
    console.print(f"\ncached on this machine, {models_folder()}", style="bold", markup=False)
    if cached:
        _print_models(console, cached)
    else:
        console.print("  nothing yet", style="dim")
    drafts = {model.name: what for model, what in models if model.own_draft}
    if drafts:
        console.print(f"\nmade of targets to be their drafts (-md self), {drafts_folder()}", style="bold", markup=False)
        _print_models(console, drafts)
    of_hub = {model.name: what for model, what in models if model.of_hub}
    if of_hub:
        console.print(f"\nof the Hugging Face hub, {hub_folder()}", style="bold", markup=False)
        _print_models(console, of_hub)
    console.print("\nUse a name with -m or -md; see its card with: paceline models show NAME", style="dim")


@app.command("show", cls=Command, epilog=EPILOG)
@with_options(helps={"max_sequences": f"Requests processed in parallel. [{DEFAULT_PARALLEL}]"})
def show(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name that paceline models lists, or the path of a GGUF file or Hugging Face folder.",
            autocompletion=complete_model,
        ),
    ],
    *,
    models: Annotated[ModelChoice, _DRAFTED, OnlyFlags(_MEMORY_FLAGS)],
    options: Annotated[ServerOptions, OnlyFlags(_SERVER_MEMORY_FLAGS)],
    json_to: Annotated[str | None, json_option()] = None,
) -> None:
    """Show a model: its figures, where it is, and its model card; without a card, its metadata.

    With any option of memory, such as -c, show instead how much memory serving it takes. No weights are loaded.
    """
    outputs = Outputs(json_to)
    outputs.check()
    path = resolve_model(model)
    if any(is_given(context, name) for name in (*_MEMORY_FLAGS, *_SERVER_MEMORY_FLAGS)):
        from paceline.cli.memory import show_memory  # imports what loads models

        show_memory(context, path, models, options, outputs)
        return
    what = describe(path, may_be_head=True)
    card_path = _find_card(what)
    card = None if card_path is None else card_path.read_text(encoding="utf-8-sig", errors="replace")
    outputs.write(
        {**_model_json(what), "card_text": card, "metadata": what.metadata}, lambda: _print_card(what, card_path, card)
    )


def _print_card(what: ModelDescription, path: Path | None, card: str | None) -> None:
    console = output_console()
    for line in (*_description_lines(what), str(what.path)):
        console.print(line, markup=False)
    if card is None or what.card is None:
        console.print(f"card: {path or 'none'}; metadata:\n", style="dim", markup=False)
        for key, value in what.metadata.items():
            console.print(f"{printable_line(key)} = {value}", markup=False)
    elif sys.stdout.isatty():
        from rich.markdown import Markdown  # takes as long to import as the rest of rich

        console.print(f"card: {path}\n", style="dim", markup=False)
        output_console(soft_wrap=False).print(Markdown(printable(card)))
    else:
        print(printable(f"card: {path}\n\n{card}"), end="")


@app.command("remove", cls=Command, epilog=EPILOG)
def remove_model(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name, as paceline models lists it.", autocompletion=_complete_cached)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a model from the local cache, or from the hub's. Files of the hub that other models share stay."""
    what = _describe_removal(find_removable(name))
    if not yes:
        if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
            raise InputError(f"{what} would be deleted, and there is no terminal to confirm it: add --yes")
        if not typer.confirm(printable_line(f"Delete {what}?"), err=True):
            return
    remove(name)
    error_console().print(f"deleted {what}", markup=False)


def _describe_removal(model: NamedModel) -> str:
    if model.of_hub:
        from paceline.models.hub.removal import plan_removal  # imports huggingface_hub

        return f"{model.name}, {format_bytes(plan_removal(model.path).num_bytes)} in the hub's cache {hub_folder()}"
    others = len(part_paths(model.path)) - 1
    return f"{model.path} and {_format_count(others, 'other part')}" if others else str(model.path)


@app.command("path", cls=Command, epilog=EPILOG)
def path() -> None:
    """Print the folder of the local cache. The environment variable PACELINE_CACHE names another one."""
    print_path(models_folder())


def _try_describe(path: Path) -> ModelDescription | ModelFileError:
    try:
        return describe(path, may_be_head=True)
    except ModelFileError as error:
        return error


def _print_models(console: Console, models: dict[str, ModelDescription | ModelFileError]) -> None:
    column = max(len(name) for name in models) + 4
    for name, what in models.items():
        if isinstance(what, ModelFileError):
            lines = [str(what)]
        else:
            first, *rest = _description_lines(what)
            ending = "/" if what.format == "huggingface" else ""
            card = _find_card(what)
            lines = [f"{display_name(what.path)}{ending}, {first}", *rest, *([] if card is None else [f"card: {card}"])]
        for number, line in enumerate(lines):
            label = f"  {name}" if number == 0 else ""
            style = "red" if isinstance(what, ModelFileError) else None if number == 0 else "dim"
            console.print(f"{label:{column}}{line}", style=style, markup=False)


def _description_lines(what: ModelDescription) -> list[str]:
    """Say what is known in a few lines: figures, shape, what it is for, how it was made."""
    parameters = "unknown number of" if what.num_parameters is None else format_count(what.num_parameters)
    parts = f" in {what.num_parts} parts" if what.num_parts > 1 else ""
    figures = [f"{format_bytes(what.num_bytes)}{parts}", f"{parameters} parameters"]
    if what.file_type is not None:
        figures.append(what.file_type)
    if what.context_length is not None:
        figures.append(f"context {what.context_length}")
    if what.vocabulary_size is not None:
        figures.append(f"vocabulary {what.vocabulary_size}")
    figures.append(f"licence {what.license}" if what.license is not None else "licence not stated")
    lines = [", ".join(figures), _format_shape(what)]
    if what.summary is not None:
        lines.append(what.summary)
    digest = what.provenance.get(_SOURCE_DIGEST)
    if digest is not None:
        origin = _find_origin(what)
        lines.append(f"made by paceline inflate from {origin.name if origin else f'a file with SHA-256 {digest}'}")
    pruned_from = what.provenance.get(_PRUNED_FROM)
    if pruned_from is not None:
        lines.append(f"made by paceline prune from {pruned_from}")
    # What a model says of itself must not look like further lines of paceline's own.
    return [printable_line(line) for line in lines]


def _find_origin(what: ModelDescription) -> NamedModel | None:
    """Return the embedded model that this one was made from, if it was."""
    digest = what.provenance.get(_SOURCE_DIGEST)
    if digest is None:
        return None
    return next((model for model in named_models() if model.embedded and _sha256(model.path) == digest), None)


@functools.cache
def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _find_card(what: ModelDescription) -> Path | None:
    """Return a model's card, or else that of the embedded model it computes the same as."""
    if what.card is not None:
        return what.card
    origin = _find_origin(what)
    return None if origin is None else describe(origin.path).card


def _format_shape(what: ModelDescription) -> str:
    parts = []
    if what.layers is not None:
        width = f" of width {what.width}" if what.width is not None else ""
        parts.append(f"{_format_count(what.layers, 'layer')}{width}")
    if what.heads is not None:
        size = f" of {what.head_size}" if what.head_size is not None else ""
        shared = f" ({what.kv_heads} for keys and values)" if what.kv_heads != what.heads else ""
        parts.append(f"{_format_count(what.heads, 'head')}{size}{shared}")
    if what.feed_forward is not None:
        experts = f", {what.experts} experts" if what.experts else ""
        parts.append(f"feed-forward {what.feed_forward}{experts}")
    return f"{what.architecture or 'unknown architecture'}: {', '.join(parts) or 'unknown shape'}"


def _format_count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _model_json(what: ModelDescription | ModelFileError) -> dict[str, Any]:
    if isinstance(what, ModelFileError):
        return {"fault": str(what)}
    plain = {f.name: getattr(what, f.name) for f in dataclasses.fields(what) if f.name != "metadata"}
    origin = _find_origin(what)
    return {
        **plain,
        "path": str(what.path),
        "card": None if (card := _find_card(what)) is None else str(card),
        "provenance": dict(what.provenance),
        "made_from": None if origin is None else origin.name,
        "fault": None,
    }
