"""The draft's file: a folder that transformers trains, and back to a file of the draft's own type."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from paceline.atomic_output import atomic_file, atomic_folder, temporary_folder
from paceline.conversion.convert import exact_dtype, folder_to_gguf, gguf_to_folder
from paceline.conversion.convert.llama_settings import check_folder_can_hold, parse_config, read_gguf_settings
from paceline.conversion.llama import LlamaFile
from paceline.core.errors import CapabilityError, InputError
from paceline.engines.loading import is_head
from paceline.engines.options import ModelOptions
from paceline.models.description import ModelDescription, describe
from paceline.models.files import read_json

WEIGHT_TYPES: Final = ("F32", "F16", "BF16")
"""Types that a folder's weights may have, and a file's, without quantising."""
_QUANTISED_WITHOUT_MATRIX: Final = "Q8_0"
"""Type of what is made of a draft whose own type takes an importance matrix."""
_RECURRENT: Final = (
    "mamba",
    "rwkv",
    "jamba",
    "griffin",
    "xlstm",
    "bamba",
    "falcon_h1",
    "qwen3_next",
    "qwen3_5",
    "lfm2",
)
"""Parts of the names of architectures with recurrent layers."""

Report = Callable[[str, int, int], None]


def check_trainable(path: Path, made: Path) -> ModelDescription:
    """Return a draft's description; raise ``InputError``, which names the reason, for one that cannot be trained.

    Nor can one be whose result could not be written as ``made``.
    """
    if is_head(ModelOptions(path)):
        raise CapabilityError(
            f"{path} is a head, which is trained on its target's states and not on its text: distil a draft model"
        )
    what = describe(path)
    name = what.architecture or "unknown architecture"
    if any(part in name.lower().replace("-", "_") for part in _RECURRENT):
        raise CapabilityError(f"{path} ({name}) has recurrent layers, which cannot be distilled: take a transformer")
    if what.experts:
        raise CapabilityError(
            f"{path} ({name}) is a mixture of {what.experts} experts, whose router would need a loss of its own: "
            "take a dense draft"
        )
    if what.embeds:
        raise CapabilityError(f"{path} ({name}) was made for vectors of texts and writes none: take a draft model")
    if path.is_dir():
        config = read_json(path / "config.json")
        if config.get("quantization_config"):
            raise CapabilityError(
                f"{path} has quantised weights, which cannot be trained: give the folder it was quantised from"
            )
        if is_gguf(made):
            parse_config(config, str(path))
        return what
    try:
        file = LlamaFile(path)
        read_gguf_settings(file)
        check_folder_can_hold(file.shape)
    except InputError as error:
        raise CapabilityError(
            f"{error}; of other models give the Hugging Face folder, which is trained as it is"
        ) from None
    return what


def is_gguf(made: Path) -> bool:
    """Return whether what is made is a GGUF file, and no folder, by its name."""
    return made.suffix.lower() == ".gguf"


def choose_type(draft: ModelDescription, made: Path, asked: str | None) -> str:
    """Return the weights' type of what is made: as asked, or the draft's own where that can be written."""
    from paceline.conversion.quantize import file_types

    others = [name for name in file_types() if name not in WEIGHT_TYPES] if is_gguf(made) else []
    known = (*WEIGHT_TYPES, *others)
    if asked is not None:
        if asked.upper() not in known:
            raise InputError(f"{made} cannot have weights of type {asked} (--type): choose from {', '.join(known)}")
        return asked.upper()
    own = {"FLOAT32": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16"}.get(str(draft.file_type).upper(), draft.file_type)
    if own in WEIGHT_TYPES:
        return str(own)
    if not is_gguf(made):
        return "F16"
    if own not in known or str(own).startswith("IQ"):
        return _QUANTISED_WITHOUT_MATRIX
    return str(own)


def check_made(target: Path, draft: Path, made: Path, *, force: bool) -> None:
    """Raise ``InputError`` where the result cannot go, or something else is there."""
    for name, path in (("draft", draft), ("target", target)):
        if made.resolve() == path.resolve():
            raise InputError(f"{made} is the {name} itself, which is not written over: give another OUT")
    if made.exists() and not force:
        raise InputError(f"{made} exists; give another name, or replace it with --force")
    if made.is_dir() and (is_gguf(made) or not (made / "config.json").is_file()):
        raise InputError(f"{made} is a folder and no model, so it is not replaced; give another OUT")
    if made.is_file() and not is_gguf(made):
        raise InputError(f"{made} is a file, and a folder is made; give another OUT, or end it in .gguf")


def make_folder(draft: Path, folder: Path, report: Report) -> Path:
    """Return the folder to train of a draft, which is made of a GGUF file if it is not there."""
    if draft.is_dir():
        return draft
    if not folder.is_dir():
        gguf_to_folder(draft, folder, dtype="F32", report=functools.partial(report, "converting the draft"))
    return folder


def write_made(trained: Path, made: Path, file_type: str, name: str, report: Report) -> None:
    """Write what was trained, a folder, as a file or folder of a type; it appears when it is complete."""
    if not is_gguf(made):
        with atomic_folder(made) as partial:
            shutil.copytree(trained, partial, dirs_exist_ok=True)
        return
    writing = functools.partial(report, "writing the draft")
    if file_type in WEIGHT_TYPES:
        folder_to_gguf(trained, made, dtype=file_type, name=name, report=writing)
        return
    from paceline.conversion.quantize import quantize_into

    with temporary_folder(made) as folder, atomic_file(made) as partial_file:
        between = folder / "unquantised.gguf"
        folder_to_gguf(trained, between, dtype=exact_dtype(trained), name=name, report=writing)
        quantize_into(partial_file, between, file_type)
