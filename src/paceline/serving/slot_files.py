"""Slot files: what was read and said in a place, kept on disk by clients, for a server that is started again.

What is saved of a place is what the cache keeps of its latest prompt and answer. What is restored goes back to the
cache, under the key that restored it: the next prompt that begins alike starts there, in whatever place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
from starlette.types import Scope

from paceline.core.errors import CapabilityError
from paceline.core.numbers import shown
from paceline.engines.base import Engine, SavedSequence
from paceline.engines.sequence_files import SequenceFile, no_such_file, read_owner, read_sequence
from paceline.serving.errors import FieldError, NotOfferedError, RefusedError
from paceline.serving.model_host import ServedModel
from paceline.serving.security import get_namespace, is_owner, mark_owner
from paceline.serving.server import SlotText

_MAX_NAME: Final = 200
"""Bytes of a file's name: what is written first has a longer one, and 255 are the most that file systems take."""


class _WritingEngine(Engine, Protocol):
    """An engine whose saved sequences another process can restore."""

    @property
    def made_by(self) -> Mapping[str, Any]: ...

    def export_state(self, saved: SavedSequence) -> npt.NDArray[np.uint8]: ...

    def import_state(self, data: npt.NDArray[np.uint8], length: int, floor: int) -> SavedSequence: ...


def slot_path(folder: str | None, filename: str) -> Path:
    """Return where a file of this name lies; refuses names of anything but a file in the folder."""
    if folder is None:
        raise NotOfferedError("this server keeps no slot files: start it with `slot_save_path`")
    is_plain = filename == Path(filename).name and "\\" not in filename and filename.isprintable()
    if not is_plain or filename.startswith(".") or not 0 < len(filename.encode("utf-8", "replace")) <= _MAX_NAME:
        raise FieldError(
            "filename",
            f"filename {shown(filename)} is no name of a slot file: give one without a path, of 1 to {_MAX_NAME} "
            "bytes, that does not begin with a dot",
        )
    return Path(folder) / filename


def save_slot(served: ServedModel, text: SlotText, path: Path, scope: Scope) -> dict[str, Any]:
    """Write what the cache keeps of a place's text; return what llama-server says of it."""
    engine, started_s = _writing_engine(served), time.perf_counter()
    mark = read_owner(path)
    if (mark is not None and not is_owner(scope, mark)) or (mark is None and path.exists()):
        raise RefusedError(403, "permission_error", f"{path.name} is another one's, or no slot file: give another name")
    pool = served.model.pool
    copied = served.model.worker.call(lambda: pool.copy_of(text.token_ids, namespace=text.namespace))
    if copied is None:
        raise RefusedError(
            400,
            "invalid_request_error",
            "the cache keeps nothing of this slot that could be saved: ask in it first, and save at once; a server "
            "without prompt cache (`prompt_cache_mib` 0, or `exact`) keeps nothing",
        )
    token_ids, saved = copied
    state = engine.export_state(saved)
    written = SequenceFile(engine.made_by, mark_owner(scope), token_ids, saved.floor, state).write(path)
    return {"n_saved": len(token_ids), "n_written": written, "timings": {"save_ms": _ms_since(started_s)}}


def restore_slot(served: ServedModel, path: Path, scope: Scope) -> tuple[dict[str, Any], SlotText]:
    """Give a file's text to the cache; return what llama-server says of it, and the text."""
    engine, started_s = _writing_engine(served), time.perf_counter()
    mark = read_owner(path)
    if mark is not None and not is_owner(scope, mark):
        # As where there is none.
        raise no_such_file(path)
    read = read_sequence(path, engine.made_by, engine.vocabulary.size)
    length, context_length = len(read.token_ids), served.context_length
    if length > context_length:
        raise CapabilityError(f"{path.name} holds {length} tokens, and the context {context_length}: it cannot be used")
    namespace = get_namespace(scope)
    saved = engine.import_state(read.state, length, read.floor)
    pool, token_ids = served.model.pool, read.token_ids.tolist()
    if not served.model.worker.call(lambda: pool.adopt(token_ids, saved, namespace=namespace)):
        raise CapabilityError(
            f"{path.name} takes {saved.num_bytes >> 20} MiB, which is more than the prompt cache holds: start the "
            "server with a larger `prompt_cache_mib`"
        )
    told = {"n_restored": length, "n_read": path.stat().st_size, "timings": {"restore_ms": _ms_since(started_s)}}
    return told, SlotText(namespace, namespace, token_ids)


def erase_slot(served: ServedModel, text: SlotText) -> dict[str, Any]:
    """Have the cache forget a place's text; return what llama-server says of it."""
    pool = served.model.pool
    served.model.worker.call(lambda: pool.forget(text.token_ids, namespace=text.namespace))
    return {"n_erased": len(text.token_ids)}


def _writing_engine(served: ServedModel) -> _WritingEngine:
    engine = served.model.target
    if not _writes(engine):
        raise NotOfferedError("slot files are of llama.cpp's engine, and this model runs on another")
    return engine


def _writes(engine: Engine) -> TypeGuard[_WritingEngine]:
    return hasattr(engine, "export_state")


def _ms_since(started_s: float) -> float:
    return 1000 * (time.perf_counter() - started_s)
