"""Options that several commands have: which models to load, and how; and what to say of any that have no effect.

A command declares them as its parameters' types, in the order in which its help shall list them, each with the
default that leaves a choice open (``None``, ``-1``, ``""`` or ``"auto"``). Parameters are called as their options' long
names are, and :func:`options_for_target` and :func:`options_for_draft` find them by that, in ``context.params``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import typer

from paceline.cli.prompt import typed_text
from paceline.core.errors import CapabilityError, InputError
from paceline.engines.loading import DType, EngineName, ModelOptions, engine_for
from paceline.models.cache import complete_model
from paceline.models.description import describe
from paceline.output import check_parent

MODELS_PANEL = "Models"
"""The part of the help that these options are listed in."""


def _draft_model_option(description: str) -> Any:
    return typer.Option(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        metavar="MODEL",
        help=description,
        autocompletion=complete_model,
        rich_help_panel=MODELS_PANEL,
    )


TargetModel: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="MODEL",
        help="Target: a GGUF file, a Hugging Face folder, or a name from paceline models. [dim]\\[embedded pair][/dim]",
        autocompletion=complete_model,
        rich_help_panel=MODELS_PANEL,
    ),
]
DraftModel: TypeAlias = Annotated[str | None, _draft_model_option("Draft model with mostly the same tokens.")]
AnyDraftModel: TypeAlias = Annotated[str | None, _draft_model_option("Draft model.")]
"""A draft model that need not fit the target, because nothing it drafts is verified."""

EngineChoice: TypeAlias = Annotated[
    EngineName | None,
    typer.Option("--engine", help="Engine for both models. [dim]\\[by file][/dim]", rich_help_panel=MODELS_PANEL),
]
ContextSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx-size",
        help="Context of the target, in tokens; 0 is all of its own. [dim]\\[its own, at most 4096][/dim]",
        rich_help_panel=MODELS_PANEL,
    ),
]
DraftContextSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "-cd",
        "--ctx-size-draft",
        "--spec-draft-ctx-size",
        help="Context of the draft; 0 is all of its own. [dim]\\[as -c, or its own if that is less][/dim]",
        rich_help_panel=MODELS_PANEL,
    ),
]
GpuLayers: TypeAlias = Annotated[
    int,
    typer.Option(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        help="Target layers to put on GPUs; -1 for all.",
        rich_help_panel=MODELS_PANEL,
    ),
]
DraftGpuLayers: TypeAlias = Annotated[
    int,
    typer.Option(
        "-ngld",
        "--gpu-layers-draft",
        "--n-gpu-layers-draft",
        "--spec-draft-ngl",
        help="Draft layers to put on GPUs; -1 for all.",
        rich_help_panel=MODELS_PANEL,
    ),
]
Devices: TypeAlias = Annotated[
    str,
    typer.Option(
        "-dev",
        "--device",
        help="Devices for the target, with commas; 'none' is the CPU.",
        metavar="DEV[,...]",
        rich_help_panel=MODELS_PANEL,
    ),
]
DraftDevices: TypeAlias = Annotated[
    str,
    typer.Option(
        "-devd",
        "--device-draft",
        "--spec-draft-device",
        help="Devices for the draft.",
        metavar="DEV[,...]",
        rich_help_panel=MODELS_PANEL,
    ),
]
TensorOverrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "-ot",
        "--override-tensor",
        help="Place the target's tensors that match a pattern.",
        metavar="PATTERN=BUFFER[,...]",
        rich_help_panel=MODELS_PANEL,
    ),
]
Threads: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "-t",
        "--threads",
        help="CPU threads for passes of one token. [dim]\\[one for each core that other processes leave][/dim]",
        rich_help_panel=MODELS_PANEL,
    ),
]
BatchThreads: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "-tb",
        "--threads-batch",
        help="CPU threads for wider passes. [dim]\\[as -t][/dim]",
        rich_help_panel=MODELS_PANEL,
    ),
]
DraftThreads: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "-td",
        "--threads-draft",
        "--spec-draft-threads",
        help="CPU threads for the draft's passes of one token. [dim]\\[as -t][/dim]",
        rich_help_panel=MODELS_PANEL,
    ),
]
DraftBatchThreads: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "-tbd",
        "--threads-batch-draft",
        "--spec-draft-threads-batch",
        help="CPU threads for the draft's wider passes. [dim]\\[as -td, or -tb][/dim]",
        rich_help_panel=MODELS_PANEL,
    ),
]
OnOffAuto: TypeAlias = Literal["on", "off", "auto"]
FlashAttention: TypeAlias = Annotated[
    OnOffAuto,
    typer.Option(
        "-fa",
        "--flash-attn",
        help="Fused attention; on a CPU, auto measures which is faster when a model is first loaded.",
        rich_help_panel=MODELS_PANEL,
    ),
]
_FLASH_ATTENTION: Final[Mapping[OnOffAuto, bool | None]] = {"on": True, "off": False, "auto": None}
"""Values of :data:`FlashAttention` as :class:`~paceline.engines.loading.ModelOptions` has them."""

Exact: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Arithmetic that does not depend on how many tokens a pass verifies, so that no near-tie turns: the text "
        "is that of --exact without drafts. llama.cpp on a CPU, weights in Q4_0, Q8_0 and the like; drafts are chains.",
        rich_help_panel=MODELS_PANEL,
    ),
]

WeightsType: TypeAlias = Annotated[
    DType | None,
    typer.Option("--dtype", help="Weights' type under torch_hf.", rich_help_panel=MODELS_PANEL),
]


OF_THE_DRAFT_MODEL: Final = (
    "ctx_size_draft",
    "gpu_layers_draft",
    "device_draft",
    "threads_draft",
    "threads_batch_draft",
)
"""Parameters that say how a draft model runs."""

_LEAST_DRAFT_CONTEXT: Final = 2

WITHOUT_DRAFT_MODEL: Final = "has no effect without a draft model: name one with -md"
"""Why these are refused where there is none."""


def options_for_target(path: str | Path, given: Mapping[str, Any]) -> ModelOptions:
    """Return how to run the target.

    Args:
        path: of the model.
        given: the command's parameters by name. Not all commands have ``override_tensor``, ``parallel`` or ``verbose``.

    Raises:
        InputError: a tensor override is not ``PATTERN=BUFFER``, or a value is out of range.
        ModelFileError: all of the model's own context is asked for, and the model cannot be read.
    """
    return ModelOptions(
        path,
        engine=given["engine"],
        context_length=_context_length("-c", given["ctx_size"], path),
        gpu_layers=given["gpu_layers"],
        devices=_split_devices(given["device"]),
        override_tensors=_parse_overrides(given.get("override_tensor") or []),
        threads=given["threads"],
        threads_batch=given["threads_batch"],
        flash_attention=_FLASH_ATTENTION[given["flash_attn"]],
        exact=given["exact"],
        max_sequences=given.get("parallel", 1),
        dtype=given["dtype"],
        verbose=given.get("verbose", False),
    )


def options_for_draft(target: ModelOptions, path: str | Path, given: Mapping[str, Any]) -> ModelOptions:
    """Return how to run a draft model: as the target, but for what has an option of its own.

    On another engine, what is said of the target in terms of its own (``-fa``, ``-tb``, ``--dtype``) is left out.

    Args:
        target: how the target runs.
        path: the draft model.
        given: the command's parameters by name, those in :data:`OF_THE_DRAFT_MODEL` among them.

    Raises:
        CapabilityError: the draft's threads are given, and its engine has none of its own.
        InputError: the draft's context is too short to draft in.
        ModelFileError: there is no such model.
    """
    context_size = _context_length("-cd", given["ctx_size_draft"], path)
    if context_size is not None and context_size < _LEAST_DRAFT_CONTEXT:
        raise InputError(
            f"-cd {context_size}: the least is {_LEAST_DRAFT_CONTEXT}, a token that was said and one that is drafted "
            "after it; 0 takes the draft model's own context"
        )
    threads, threads_batch = given["threads_draft"], given["threads_batch_draft"]
    engine = target.engine or engine_for(Path(path))
    if (threads, threads_batch) != (None, None) and engine == "torch_hf":
        raise CapabilityError("threads of the draft (-td, -tbd) mean nothing to torch_hf: give those of both with -t")
    if engine != (target.engine or engine_for(Path(target.path))):
        target = replace(target, threads_batch=None, flash_attention=None, dtype=None)
    return replace(
        target,
        path=path,
        context_length=target.context_length if context_size is None else context_size,
        context_may_shrink=context_size is None,
        gpu_layers=given["gpu_layers_draft"],
        devices=_split_devices(given["device_draft"]),
        override_tensors=(),
        threads=target.threads if threads is None else threads,
        threads_batch=target.threads_batch if (threads, threads_batch) == (None, None) else threads_batch,
        # Whatever a draft model says, the text is the target's.
        exact=False,
        # The tree it grows is a chain to it.
        branches=0,
    )


def _context_length(option: str, size: int | None, path: str | Path) -> int | None:
    """Return a context in tokens: of 0, as in llama.cpp, all that the model was trained for.

    Raises:
        InputError: the model does not say what it was trained for.
        ModelFileError: the model cannot be read.
    """
    if size != 0:
        return size
    trained = describe(Path(path)).context_length
    if trained is None:
        raise InputError(f"{option} 0 is the model's own context, and {path} names none: give a number of tokens")
    return trained


def _split_devices(devices: str) -> tuple[str, ...]:
    """Return the names in the value of :data:`Devices` or :data:`DraftDevices`."""
    return tuple(name.strip() for name in devices.split(",") if name.strip())


def _parse_overrides(values: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the patterns and buffers in the value of :data:`TensorOverrides`.

    Raises:
        InputError: one of them is not ``PATTERN=BUFFER``, or not UTF-8.
    """
    overrides = []
    texts = (typed_text(value, "-ot", escape=False) for value in values)
    for value in (part for text in texts for part in text.split(",")):
        pattern, equals, buffer = value.rpartition("=")
        if not (pattern and equals and buffer):
            raise InputError(f"-ot {value!r} is not PATTERN=BUFFER, such as exps=CPU")
        overrides.append((pattern, buffer))
    return tuple(overrides)


def is_given(context: typer.Context, parameter: str) -> bool:
    """Return whether a parameter has a value from the command line, and not its default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def refuse_given(context: typer.Context, reasons: Mapping[str, str]) -> None:
    """Refuse parameters that were given and would do nothing.

    Args:
        context: of the command.
        reasons: by parameter, why it has no effect and what to do, as what follows the option's name.

    Raises:
        InputError: one of them was given.
    """
    for parameter in context.command.params:
        reason = reasons.get(parameter.name or "")
        if reason is not None and is_given(context, parameter.name or ""):
            raise InputError(f"{parameter.opts[0]} {reason}")


def check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Refuse files that cannot be written, before what they are for has taken long.

    Args:
        paths: by option; ``None`` where it was not given.

    Raises:
        InputError: one of them is a folder, or its own is not there or may not be written into; or two are the same.
    """
    options: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        if path.is_dir() or not path.name:
            raise InputError(f"{option} {path} is a folder: give the path of a file")
        check_parent(path)
        if not os.access(path.parent, os.W_OK):
            raise InputError(f"{option} {path} cannot be written: there is no permission to write into {path.parent}")
        other = options.setdefault(path.resolve(), option)
        if other != option:
            raise InputError(f"{other} and {option} are the same file, {path}: give two")
