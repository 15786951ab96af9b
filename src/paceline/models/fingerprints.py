"""Fingerprints: telling models apart by what is in their files, without reading all of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from paceline.core.errors import ModelFileError
from paceline.models.files import check_is_file
from paceline.models.gguf_model import part_paths

_HEAD_BYTES: Final = 1 << 20
"""Bytes read from the head of a file."""
_BLOCK_BYTES: Final = 1 << 16
"""Bytes of each block that is read."""
_BLOCKS: Final = 64
"""Blocks read of a file besides its head: 5 MiB in all, so that 40 GB take as long as 40 MB."""

_WEIGHTS_AND_SETTINGS: Final = (".safetensors", ".bin", ".json", ".gguf")


def fingerprint(path: Path) -> str:
    """Return a hash that tells model files or folders apart, without reading 40 GB.

    It covers sizes, the head of each file, which says all of a GGUF file's shapes and types, and blocks spread over the
    rest. A folder's files count with their names, and so do the other parts of a split GGUF file.
    """
    digest = hashlib.sha256()
    try:
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS_AND_SETTINGS)
            for file in files:
                digest.update(os.fsencode(file.name) + b"\0")
                _hash_samples(file, digest)
        else:
            for file in part_paths(path):
                # A file may keep the name of a part when it is whole, and then no others are there.
                if file == path or file.is_file():
                    _hash_samples(file, digest)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def _hash_samples(path: Path, digest: hashlib._Hash) -> None:
    check_is_file(path)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(f"{size}\0".encode())
        file.seek(0)
        digest.update(file.read(_HEAD_BYTES))
        span = max(0, size - _HEAD_BYTES - _BLOCK_BYTES)  # from the first block's start to the last one's
        for block in range(_BLOCKS):
            file.seek(_HEAD_BYTES + span * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
