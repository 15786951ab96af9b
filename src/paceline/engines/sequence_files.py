"""Files of saved sequences: what a model has read, for the next process.

::

    magic │ length of the header │ header: JSON │ tokens: int32 │ state, as the engine wrote it
                                     says what made it, whose it is, how long all is, and a hash of tokens and state

A state is raw memory to an engine, so a file counts only where all of that is as it should be.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.atomic_output import atomic_file, check_room
from paceline.core.errors import InputError
from paceline.models.files import OF_DAMAGED_ENTRIES, check_is_file

_MAGIC: Final = b"PACELINE-SLOT\x00\x01\n"
_LENGTH: Final = struct.Struct("<I")
_MAX_HEADER: Final = 1 << 16
_TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class SequenceFile:
    """What a file holds.

    Attributes:
        made_by: what the state depends on, as the engine says it.
        owner: whose texts these are; nobody else may read or replace the file.
        token_ids: ``[tokens]`` that the state is of.
        floor: as :attr:`~paceline.engines.base.SavedSequence.floor`.
        state: as the engine wrote it.
    """

    made_by: Mapping[str, Any]
    owner: str
    token_ids: npt.NDArray[np.int32]
    floor: int
    state: npt.NDArray[np.uint8]

    def write(self, path: Path) -> int:
        """Write the file, whole or not at all, for this user alone; return its bytes."""
        parts = self.token_ids.astype("<i4").tobytes(), self.state.data
        header = json.dumps(
            {
                "made_by": self.made_by,
                "owner": self.owner,
                "tokens": len(self.token_ids),
                "state_bytes": len(self.state),
                "floor": self.floor,
                "sha256": _digest(*parts),
            }
        ).encode()
        head = _MAGIC + _LENGTH.pack(len(header)) + header
        num_bytes = len(head) + sum(len(part) for part in parts)
        check_room(path, num_bytes, way_out="delete slot files that nobody needs")
        with (
            atomic_file(path) as partial,
            open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file,
        ):
            for part in (head, *parts):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        return num_bytes


def no_such_file(path: Path) -> InputError:
    return InputError(f"there is no slot file {path.name}")


def read_owner(path: Path) -> str | None:
    """Return whose file it is; ``None`` where nothing of that name is one."""
    try:
        return str(_read_header(path)[0]["owner"])
    except InputError:
        return None


def read_sequence(path: Path, made_by: Mapping[str, Any], vocabulary_size: int) -> SequenceFile:
    """Read a file.

    Args:
        made_by: what a state depends on now.

    Raises:
        InputError: it is missing, damaged or no such file, or another model or setting made it.
    """
    header, start = _read_header(path)
    for what, now in made_by.items():
        if (then := header["made_by"].get(what)) != now:
            raise InputError(f"{path.name} was made with another {what}: {then!r} then, {now!r} now; it cannot be used")
    with _damage(path):
        num_tokens, state_bytes, floor = (_count(header[name]) for name in ("tokens", "state_bytes", "floor"))
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) != start + num_tokens * _TOKEN_BYTES + state_bytes:
                raise ValueError("it has not as many bytes as it says")
            file.seek(start)
            tokens = file.read(num_tokens * _TOKEN_BYTES)
            state = np.fromfile(file, np.uint8, state_bytes)
        if len(state) != state_bytes or _digest(tokens, state.data) != header["sha256"]:
            raise ValueError("its hash is not what it says")
        token_ids = np.frombuffer(tokens, "<i4").astype(np.int32)
        if num_tokens == 0 or floor > num_tokens or not 0 <= token_ids.min() <= token_ids.max() < vocabulary_size:
            raise ValueError("it has tokens that are none")
    return SequenceFile(header["made_by"], header["owner"], token_ids, floor, state)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return what the header says, and where the tokens begin."""
    if not path.exists():
        raise no_such_file(path)
    check_is_file(path)
    with _damage(path), path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it is no slot file of this version")
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        if length > _MAX_HEADER:
            raise ValueError(f"its header has {length} bytes")
        header = json.loads(file.read(length))
        if not isinstance(header["made_by"], dict) or not isinstance(header["owner"], str):
            raise TypeError("its header is none")
        return header, file.tell()


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path.name} cannot be read: {error.strerror or error}") from None
    except (ValueError, struct.error, *OF_DAMAGED_ENTRIES) as error:
        raise InputError(f"{path.name} is damaged, or no slot file: {error}; save it again") from None


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _digest(*parts: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
