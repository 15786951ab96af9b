"""How an inflated file was made, in its metadata, so that the same one need not be made again."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Final

from paceline.conversion.llama import LlamaShape
from paceline.core.errors import ModelFileError
from paceline.models.gguf_header import read_gguf_header

PREFIX: Final = "paceline.inflate."
"""Beginning of the metadata keys that say how a file was inflated."""

VERSION: Final = 1
"""Version of the way of inflating; files of another version are made again."""


def recipe(source: Path, shape: LlamaShape, file_type: str) -> dict[str, int | str | bool]:
    """Return the metadata that decides an inflated file's content."""
    values: dict[str, int | str | bool] = {"version": VERSION, "source_sha256": _sha256(source), "file_type": file_type}
    return {PREFIX + key: value for key, value in (values | asdict(shape)).items()}


def is_up_to_date(destination: Path, source: Path, shape: LlamaShape, file_type: str) -> bool:
    """Return whether ``destination`` is a whole file that ``source`` was inflated to in just this way."""
    try:
        metadata = read_gguf_header(destination).metadata
    except ModelFileError:  # missing, damaged, or something else
        return False
    return all(metadata.get(key) == value for key, value in recipe(source, shape, file_type).items())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()
