"""What is kept on this machine about a pair of models, so that the next process need not find it out again.

An entry is one JSON file, named by the hash of everything that its figures depend on. It repeats all of that in full,
and counts only if it is what was asked for. What cannot be read, is of another version or belongs to something else is
no entry, and is replaced; nothing here ever keeps a model from being run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

from paceline.atomic_output import atomic_file
from paceline.core.errors import InputError
from paceline.engines.base import Engine
from paceline.engines.libraries import describe_library, offload_devices
from paceline.engines.options import ModelOptions, engine_for
from paceline.engines.threads import usable_cores
from paceline.machine import processor
from paceline.models.files import OF_DAMAGED_ENTRIES, read_text
from paceline.models.fingerprints import fingerprint
from paceline.models.registry import models_folder
from paceline.planning.shared_cache import fetch, put

EntryKind: TypeAlias = Literal["profiles", "learned", "attention", "answers"]
"""What kind of entry, and the folder they lie in."""

_SHARED: Final[tuple[EntryKind, ...]] = ("profiles", "learned", "attention")
"""Kinds that other machines are given: figures. Answers are texts, and stay here."""

_MAX_BYTES: Final = 64 << 20
"""Bytes of an entry that are read; the longest there are, of answers, take some MiB."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PairKey:
    """A model, or a target and its draft, on one machine in one setting; equal keys mean equal costs, but for noise.

    Attributes:
        facts: plain data, for :func:`json.dumps`.
    """

    facts: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{hashlib.sha256(_canonical(self.facts).encode()).hexdigest()[:32]}.json"


def pair_key(
    target: Engine, target_options: ModelOptions, draft: Engine | None = None, draft_options: ModelOptions | None = None
) -> PairKey:
    """Return the key of the engines, opened with these options, on this machine.

    Where a model lies and what its file is called are no part of it.

    Args:
        target_options: what it was opened with; the path must be that of its file.
        draft_options: what the draft was opened with.

    Raises:
        ModelFileError: a model's file cannot be read.
    """
    return PairKey(
        {
            "machine": _machine(),
            "target": _model_facts(target, target_options),
            "draft": None if draft is None or draft_options is None else _draft_facts(draft, draft_options),
        }
    )


def model_key(options: ModelOptions) -> PairKey:
    """Return the key of a model that is not open yet, with these options, on this machine.

    Raises:
        ModelFileError: the model's file cannot be read.
    """
    room = {"context_length": options.context_length, "max_sequences": options.max_sequences}
    # An engine that is open says these in its description.
    found = {"usable_cores": usable_cores(), "offload_devices": offload_devices(options)}
    return PairKey({"machine": _machine(), "model": {**_option_facts(options), **room, **found}})


def entry_path(kind: EntryKind, key: PairKey) -> Path:
    """Return where an entry lies, whether or not there is one; ``PACELINE_CACHE`` moves it."""
    return models_folder().with_name(kind) / key.name


def load_entry(kind: EntryKind, key: PairKey, read: Callable[[Any], _T]) -> _T | None:
    """Return what is kept under ``key``; ``None`` if there is nothing that can be trusted.

    Where nothing is kept on this machine, what others share is kept here from then on (``PACELINE_CACHE_SHARED``).

    Args:
        read: makes what is wanted of the plain data; raises ``InputError``, or whatever comes of data that are not as
            they should be.
    """
    try:
        path = entry_path(kind, key)
        if path.stat().st_size <= _MAX_BYTES:
            return read(_trusted(read_text(path), key))
    except (OSError, InputError, *OF_DAMAGED_ENTRIES):
        pass
    shared = fetch(f"{kind}/{key.name}", _MAX_BYTES) if kind in _SHARED else None
    if shared is None:
        return None
    try:
        text = shared.decode()
        found = read(_trusted(text, key))
    except (InputError, *OF_DAMAGED_ENTRIES):
        return None
    _write(kind, key, text)
    return found


def _trusted(text: str, key: PairKey) -> Any:
    """Return the data of an entry that is what was asked for."""
    entry = json.loads(text, parse_float=_finite, parse_constant=_finite)
    if entry["key"] != json.loads(_canonical(key.facts)):
        raise ValueError("this is an entry of something else")
    return entry["data"]


def _finite(spelling: str) -> float:
    """Read a number of an entry: none that is kept is infinite, and of one that is everything may come."""
    number = float(spelling)
    if not math.isfinite(number):
        raise ValueError(f"{spelling} is kept")
    return number


def store_entry(kind: EntryKind, key: PairKey, data: dict[str, Any]) -> Path | None:
    """Keep an entry, in place of any that is there; return its path, or ``None`` if it cannot be written.

    Processes that store at once do not disturb each other: the last one's entry stays, and each is whole. Others are
    given it too where ``PACELINE_CACHE_SHARED`` names a folder.
    """
    try:
        text = json.dumps({"key": key.facts, "data": data}, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    except ValueError:  # where a figure is infinite, it would not be read again
        return None
    if kind in _SHARED:
        put(f"{kind}/{key.name}", text)
    return _write(kind, key, text)


def _write(kind: EntryKind, key: PairKey, text: str) -> Path | None:
    path = entry_path(kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except (OSError, InputError, ValueError):  # a name that came as an option may not be one in Unicode
        return None
    return path


def _model_facts(engine: Engine, options: ModelOptions) -> dict[str, Any]:
    capabilities = dataclasses.asdict(engine.capabilities)
    # These come with other settings and cost nothing.
    for irrelevant in ("trees", "logit_tolerance", "state_width", "reads_states"):
        del capabilities[irrelevant]
    return {
        **_option_facts(options),
        # It says the device and the threads that an engine chose by itself.
        "description": engine.description.removeprefix(Path(options.path).name),
        "capabilities": capabilities,
    }


def _draft_facts(engine: Engine, options: ModelOptions) -> dict[str, Any]:
    facts = _model_facts(engine, options)
    # A draft's passes have one row to propose from, however many could be read.
    del facts["capabilities"]["max_outputs"]
    return facts


def _option_facts(options: ModelOptions) -> dict[str, Any]:
    path = Path(options.path)
    name = options.engine or engine_for(path)
    return {
        "file": fingerprint(path),
        "engine": name,
        "build": describe_library(name),
        "threads": options.threads,
        "threads_batch": options.threads_batch,
        "flash_attention": options.flash_attention,
        # Only where it is set, so that what was kept before there was such a thing is still found.
        **({"exact": True} if options.exact else {}),
        **({"cache_type_k": options.cache_type_k} if options.cache_type_k not in (None, "f16") else {}),
        **({"cache_type_v": options.cache_type_v} if options.cache_type_v not in (None, "f16") else {}),
        # What a draft is worth depends on how it is taken.
        **({"draft_vocab": options.draft_vocab} if options.draft_vocab != "auto" else {}),
        **({"draft_map": list(options.draft_map)} if options.draft_map else {}),
        **({"rpc": list(options.rpc)} if options.rpc else {}),
        "devices": list(options.devices),
        "gpu_layers": options.gpu_layers,
        "override_tensors": [list(pair) for pair in options.override_tensors],
        "dtype": options.dtype,
    }


def _machine() -> dict[str, Any]:
    """Say which machine this is, as a cache may lie in a home folder that several share."""
    return {"system": platform.system(), "machine": platform.machine(), "cpu": processor(), "cores": os.cpu_count()}


def _canonical(facts: dict[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True, ensure_ascii=False)
