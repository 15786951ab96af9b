"""``paceline convert``: a GGUF file into a Hugging Face folder, and the other way round."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.display import error_console
from paceline.cli.outputs import Outputs, json_option
from paceline.cli.progress import stage_progress
from paceline.core.errors import InputError
from paceline.models.registry import complete_model, resolve_model

EPILOG = """[bold]Examples[/bold]

paceline convert model.gguf ./model  [dim]# a folder that transformers loads[/dim]

paceline convert target ./target-hf --type BF16  [dim]# a model of paceline models, by its name[/dim]

paceline convert ./model model.gguf --type BF16

paceline convert ./model model-q4.gguf --type Q4_K_M

paceline convert model.gguf ./model --force --json
"""
"""Examples below the command's help."""

_WEIGHT_TYPES = ("F32", "F16", "BF16")


def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A Llama or Mistral model: a .gguf file, a Hugging Face folder, or a name from paceline models.",
            autocompletion=complete_model,
        ),
    ],
    to: Annotated[str, typer.Argument(metavar="DESTINATION", help="The folder, or the .gguf file, to make.")],
    file_type: Annotated[
        str,
        typer.Option(
            "--type",
            "--dtype",
            help="Type of the weights: F32, F16, BF16; for a GGUF file also Q8_0, Q4_K_M and the like.",
            metavar="TYPE",
        ),
    ] = "F16",
    name: Annotated[
        str | None, typer.Option("--name", help="Name to write into a GGUF file. [dim]\\[the folder's][/dim]")
    ] = None,
    description: Annotated[
        str | None, typer.Option("--description", help="Description to write into a GGUF file.")
    ] = None,
    license_name: Annotated[
        str | None, typer.Option("--license", help="License to write into a GGUF file, such as apache-2.0.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a destination that exists.")] = False,
    json_to: Annotated[str | None, json_option()] = None,
) -> None:
    """Convert a model, with its tokenizer, from a GGUF file to a Hugging Face folder or back.

    The destination appears when it is complete.
    """
    outputs = Outputs(json_to)
    outputs.check()
    file_type = file_type.upper()
    started = time.monotonic()
    if not to:
        # A Path of it would be the folder one is in, which would be replaced.
        raise InputError("the destination is empty: give the path of a folder, or of a .gguf file")
    destination = Path(to)
    source = resolve_model(model)
    if source.is_dir():
        _check_gguf_destination(destination, file_type, force=force)
        _to_gguf(source, destination, file_type, name=name, description=description, license_name=license_name)
    else:
        for option, value in (("--name", name), ("--description", description), ("--license", license_name)):
            if value is not None:
                raise InputError(f"{option} has no effect on a folder: it is for writing a GGUF file")
        _to_folder(source, destination, file_type, force=force)
    took_s = time.monotonic() - started
    files = [path for path in destination.iterdir() if path.is_file()] if destination.is_dir() else [destination]
    num_bytes = sum(path.stat().st_size for path in files)
    facts = {
        "source": str(source),
        "destination": str(destination),
        "file_type": file_type,
        "num_bytes": num_bytes,
        "took_s": took_s,
    }
    words = f"wrote {destination}: {num_bytes / 1e6:,.1f} MB, {file_type}, in {took_s:.1f} s"
    outputs.write(facts, lambda: error_console().print(words, markup=False))


def _to_folder(source: Path, destination: Path, file_type: str, *, force: bool) -> None:
    from paceline.conversion.convert import gguf_to_folder

    if file_type not in _WEIGHT_TYPES:
        raise InputError(
            f"a folder cannot hold weights of type {file_type} (--type); choose from {', '.join(_WEIGHT_TYPES)}"
        )
    if destination.suffix == ".gguf":
        raise InputError(
            f"a GGUF file is converted to a folder: {destination} is the name of a file; give another name"
        )
    with stage_progress() as report:
        converting = functools.partial(report, "converting")
        gguf_to_folder(source, destination, dtype=file_type, report=converting, force=force)


def _check_gguf_destination(destination: Path, file_type: str, *, force: bool) -> None:
    from paceline.conversion.quantize import file_types

    if file_type not in (*_WEIGHT_TYPES, *file_types()):
        raise InputError(f"file type {file_type!r} (--type) is unknown; choose from {', '.join(file_types())}")
    if destination.suffix != ".gguf" or destination.is_dir():
        raise InputError(f"a folder is converted to a .gguf file: end {destination} in .gguf")
    if destination.exists() and not force:
        raise InputError(f"{destination} exists; give another name, or replace it with --force")


def _to_gguf(
    source: Path,
    destination: Path,
    file_type: str,
    *,
    name: str | None,
    description: str | None,
    license_name: str | None,
) -> None:
    from paceline.atomic_output import check_parent, temporary_folder
    from paceline.conversion.convert import exact_dtype, folder_to_gguf
    from paceline.conversion.quantize import quantize_gguf

    def write(path: Path, dtype: str) -> None:
        with stage_progress() as report:
            folder_to_gguf(
                source,
                path,
                dtype=dtype,
                name=name,
                description=description,
                license=license_name,
                report=functools.partial(report, "converting"),
            )

    if file_type in _WEIGHT_TYPES:
        write(destination, file_type)
        return
    check_parent(destination)
    with temporary_folder(destination) as folder:
        between = folder / "unquantised.gguf"
        write(between, exact_dtype(source))
        with error_console().status(f"quantising to {file_type}"):
            quantize_gguf(between, destination, file_type)
