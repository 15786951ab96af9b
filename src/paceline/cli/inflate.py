"""``paceline inflate``: a small model at the cost of a large one."""

from __future__ import annotations

import functools
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.atomic_output import check_parent
from paceline.cli.display import error_console, print_path
from paceline.cli.outputs import JsonTo, Outputs
from paceline.cli.progress import stage_progress
from paceline.core.errors import InputError, ModelFileError
from paceline.engines.loading import open_vocabulary
from paceline.engines.options import ModelOptions
from paceline.lab.inflate import (
    FILE_TYPES,
    HEAD_TYPE,
    PRESETS,
    VOCABULARIES,
    LlamaShape,
    as_gguf,
    find_file_type,
    fit_shape,
    inflate,
    inflate_head,
    is_up_to_date,
    preset_shape,
)
from paceline.models.embedded import embedded_target
from paceline.models.registry import complete_model, models_folder, resolve_model
from paceline.sizes import format_bytes

EPILOG = """[bold]Examples[/bold]

paceline inflate 1b --type Q4_0  [dim]# the embedded target, into the local cache[/dim]

paceline run -m target-1b-q4_0 -md draft --sample code --compare  [dim]# and how fast it is[/dim]

paceline inflate draft 0.3b --type Q8_0

paceline inflate small.gguf 1b --head small-eagle3.gguf -o big.gguf  [dim]# and eagle3-big.gguf, to draft for it[/dim]

paceline inflate small.gguf 8b --type Q4_K_M --vocab 128k -o big.gguf

paceline inflate small.gguf --width 2048 --layers 24 --feed-forward 8192 -o big.gguf

paceline inflate 1b --type BF16 -o big-hf  [dim]# a Hugging Face folder[/dim]
"""
"""Examples below the command's help."""

LARGE_PRESET = "1b"
"""Shape of the target that demo and bench show: passes of the embedded one as it is are too short for drafts to pay."""

_shape = functools.partial(typer.Option, rich_help_panel="Shape")
_output = functools.partial(typer.Option, rich_help_panel="Output")


def _list_vocabularies() -> str:
    return ", ".join(f"{name} ({size})" for name, size in VOCABULARIES.items())


def _complete_words(incomplete: str) -> list[str]:
    return [name for name in PRESETS if name.startswith(incomplete)] + complete_model(incomplete)


def inflate_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE] [PRESET]",
            help=f"A Llama model by path or name, and the shape: {', '.join(PRESETS)}. "
            "[dim]\\[the embedded target][/dim]",
            show_default=False,
            autocompletion=_complete_words,
        ),
    ] = None,
    file_type: Annotated[str, _output("--type", help=f"Type of the weights: {', '.join(FILE_TYPES)}.")] = "F16",
    output: Annotated[
        Path | None,
        _output(
            "-o",
            "--output",
            help="A .gguf file, or else a Hugging Face folder. [dim]\\[SOURCE-PRESET-TYPE.gguf in the cache][/dim]",
        ),
    ] = None,
    vocab: Annotated[
        str, _shape("--vocab", help=f"Tokens, added ones never win: a number, keep, or {_list_vocabularies()}.")
    ] = "keep",
    layers: Annotated[int | None, _shape("--layers", help="Layers.")] = None,
    width: Annotated[int | None, _shape("--width", help="Hidden size.")] = None,
    feed_forward: Annotated[int | None, _shape("--feed-forward", help="Feed-forward size.")] = None,
    heads: Annotated[int | None, _shape("--heads", help="Attention heads.")] = None,
    kv_heads: Annotated[int | None, _shape("--kv-heads", help="Key-value heads.")] = None,
    head_size: Annotated[int | None, _shape("--head-size", help="Size of an attention head.")] = None,
    head: Annotated[
        Path | None,
        _output(
            "--head", help="An EAGLE-3 head of the source, to carry to the larger model, beside it: eagle3-NAME.gguf."
        ),
    ] = None,
    force: Annotated[bool, _output("--force", help="Overwrite files that exist.")] = False,
    json_to: JsonTo = None,
) -> None:
    """Make a model that writes like a small one and costs as much as a large one, for benchmarks.

    The weights of a Llama model are placed into a larger shape, and the rest is zero. So the text is that of the small
    model, and time, memory and file size are those of the larger one. Dimensions that are given replace the preset's,
    or the source's if there is no preset. The path goes to standard output.
    """
    started = time.perf_counter()
    outputs = Outputs(json_to)
    outputs.check()
    name, preset = _parse(words or [])
    dimensions = {"layers": layers, "width": width, "feed_forward": feed_forward, "heads": heads, "kv_heads": kv_heads}
    dimensions["head_size"] = head_size
    given: dict[str, Any] = {key: value for key, value in dimensions.items() if value is not None}
    if preset is None and not given and vocab == "keep":
        raise InputError(f"there is no shape to inflate to: name one of {', '.join(PRESETS)}, or give dimensions")
    file_type = find_file_type(file_type)
    vocab_size = _parse_vocab(vocab)
    source = resolve_model(name)
    in_cache = output is None
    if in_cache and (given or preset is None):
        raise InputError("a shape given by dimensions has no name in the cache: give a path with -o")
    destination = output or models_folder() / _cache_name(name, preset or "", vocab_size, file_type)
    if in_cache:
        _make_folder(destination.parent)
    check_parent(destination)
    if head is not None and destination.suffix.lower() != ".gguf":
        raise InputError(f"--head needs a model in GGUF to go with: end {destination} in .gguf")

    with as_gguf(source, destination.parent) as gguf_source:
        source_shape = LlamaShape.from_gguf(gguf_source)
        base = source_shape if preset is None else preset_shape(preset, source_shape)
        shape = fit_shape(source_shape, replace(base, **given), vocab_size)
        made_head = None if head is None else destination.with_name(f"eagle3-{destination.name}")

        def is_there(path: Path, made_of: Path, its_type: str) -> bool:
            if force or not path.exists():
                return False
            if not (same := is_up_to_date(path, made_of, shape, its_type)) and not in_cache:
                raise InputError(f"{path} exists and is another model: give another path, or replace it with --force")
            return same

        was_there = is_there(destination, gguf_source, file_type)
        if head is not None and made_head is not None and not is_there(made_head, head, HEAD_TYPE):
            inflate_head(head, made_head, source_shape, shape)
        if not was_there:
            with stage_progress() as report:
                inflate(gguf_source, destination, shape, file_type=file_type, report=report)
    took_s = None if was_there else time.perf_counter() - started
    files = [path for path in destination.iterdir() if path.is_file()] if destination.is_dir() else [destination]
    num_bytes = sum(path.stat().st_size for path in files)
    facts = {
        "path": str(destination),
        "head": None if made_head is None else str(made_head),
        "file_type": file_type,
        "num_parameters": shape.num_parameters,
        "num_bytes": num_bytes,
        "took_s": took_s,
        "already_there": was_there,
        "shape": asdict(shape),
        "source_shape": asdict(source_shape),
    }

    def tell() -> None:
        print_path(destination)
        if made_head is not None:
            print_path(made_head)
        when = "already there" if took_s is None else f"made in {took_s:.1f} s"
        size = f"{shape.num_parameters / 1e9:.2f} billion parameters, {num_bytes / 1e6:,.0f} MB of {file_type}"
        console = error_console()
        console.print(
            f"{size}, {when}: {shape.layers} layers of {shape.width}, feed-forward {shape.feed_forward}, "
            f"{shape.heads} heads and {shape.kv_heads} kv heads of {shape.head_size}, {shape.vocab_size} tokens",
            markup=False,
        )
        if shape.vocab_size > source_shape.vocab_size:
            console.print(f"ids from {source_shape.vocab_size} on never win", markup=False)

    outputs.write(facts, tell)


def large_target(file_type: str) -> Path:
    """Return the path of the embedded target at the cost of a large model, in the cache, making it if need be.

    A terminal shows how far that is; what was made is said in a line on standard error.
    """
    source = embedded_target()
    destination = models_folder() / _cache_name("target", LARGE_PRESET, None, file_type)
    _make_folder(destination.parent)
    source_shape = LlamaShape.from_gguf(source)
    shape = fit_shape(source_shape, preset_shape(LARGE_PRESET, source_shape), None)
    if is_up_to_date(destination, source, shape, file_type):
        return destination
    with open_vocabulary(ModelOptions(source)):
        pass  # an engine that does not load is told of before a large file is written for it
    started_s = time.perf_counter()
    with stage_progress() as report:
        inflate(source, destination, shape, file_type=file_type, report=report)
    error_console().print(
        f"made {destination.name}, {format_bytes(destination.stat().st_size)}, once for this machine, "
        f"in {time.perf_counter() - started_s:.1f} s (paceline models remove {destination.stem} deletes it)",
        style="dim",
        markup=False,
    )
    return destination


def _parse(words: list[str]) -> tuple[str, str | None]:
    if len(words) > 2:
        raise InputError(f"{' '.join(words)!r}: give at most a source and a preset")
    if len(words) == 2:
        return words[0], words[1].lower()
    if not words:
        return "target", None
    if words[0].lower() in PRESETS:
        return "target", words[0].lower()
    try:
        resolve_model(words[0])
    except ModelFileError as error:
        raise InputError(f"{words[0]!r} is no preset ({', '.join(PRESETS)}), and as a source {error}") from None
    return words[0], None


def _parse_vocab(text: str) -> int | None:
    if text == "keep":
        return None
    if text.lower() in VOCABULARIES:
        return VOCABULARIES[text.lower()]
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--vocab {text!r} is neither a number nor keep, {_list_vocabularies()}") from None


def _cache_name(source: str, preset: str, vocab_size: int | None, file_type: str) -> str:
    name = Path(source).name
    if name in ("", ".."):  # a folder, given by where it lies
        name = Path(source).resolve().name
    stem = name.removesuffix(".gguf")
    vocabulary = "" if vocab_size is None else f"-v{vocab_size}"
    return f"{stem}-{preset}{vocabulary}-{file_type.lower()}.gguf"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror or error}; give another path with -o") from None
