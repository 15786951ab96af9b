"""Cost profiles kept on this machine, so that a model is measured once and not at every load.

An entry is one JSON file, named by the hash of everything that the costs depend on. It repeats all of that in full, and
counts only if it is what was asked for. What cannot be read, is of another version or belongs to something else is
measured again and replaced; nothing here ever keeps a model from being run.

Nor does a key know whether a laptop runs on its battery, or what else uses the memory's bandwidth. So a few passes at
every load say whether a profile still holds; where they take other than it says, it is measured again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.core.clock import Clock
from paceline.core.errors import InputError, ModelFileError
from paceline.engines.base import Engine
from paceline.engines.loading import EngineName, ModelOptions, engine_for
from paceline.machine import processor
from paceline.models.cache import models_folder
from paceline.output import whole_file
from paceline.planning.costs.meter import ProfilingBudget, Report
from paceline.planning.costs.profile import PROFILE_VERSION, CostProfile
from paceline.planning.costs.profiling import TARGET_WIDTHS, measure_profile, spot_check, usable_widths

_HEAD_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 1 << 16
_BLOCKS: Final = 64
"""Blocks read of a file besides its head: 5 MiB in all, so that 40 GB take as long as 40 MB."""

_WEIGHTS_AND_SETTINGS: Final = (".safetensors", ".bin", ".json", ".gguf")
_CHANGED: Final = 1.25
"""How many times as long passes may take as was measured, or the other way round, before a profile is of no use. Less
than that the planner follows from round to round."""
_CHECKED_WIDTH: Final = 8
"""Widest pass that is checked, beside that of one row."""
_PART_OF_SEVERAL: Final = re.compile(r"(.*)-\d{5}(-of-\d{5}\.gguf)")


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What the costs of a target and draft depend on; equal keys mean equal costs, but for noise.

    Attributes:
        facts: plain data, for :func:`json.dumps`.
    """

    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the entry's file."""
        return f"{hashlib.sha256(_canonical(self.facts).encode()).hexdigest()[:32]}.json"


def profiles_folder() -> Path:
    """Return the folder of the profiles, whether or not it exists yet; ``PACELINE_CACHE`` moves it."""
    return models_folder().with_name("profiles")


def profile_key(
    target: Engine, target_options: ModelOptions, draft: Engine | None = None, draft_options: ModelOptions | None = None
) -> ProfileKey:
    """Return the key of what the engines, opened with these options, cost on this machine.

    Where a model lies and what its file is called are no part of it.

    Args:
        target: the model that verifies.
        target_options: what it was opened with; the path must be that of its file.
        draft: the model that drafts, if there is one.
        draft_options: likewise.

    Raises:
        ModelFileError: a model's file cannot be read.
    """
    return ProfileKey(
        {
            "version": PROFILE_VERSION,
            "machine": _machine(),
            "target": _model_facts(target, target_options),
            "draft": None if draft is None or draft_options is None else _model_facts(draft, draft_options),
        }
    )


@dataclass(frozen=True, slots=True)
class KeptProfile:
    """A profile, and how it was come by.

    Attributes:
        profile: it.
        measured: it was measured just now, rather than found.
        path: where it is kept; ``None`` where it could not be.
    """

    profile: CostProfile
    measured: bool
    path: Path | None


def find_or_measure(
    target: Engine,
    target_options: ModelOptions,
    draft: Engine | None = None,
    draft_options: ModelOptions | None = None,
    *,
    budget: ProfilingBudget | None = None,
    widths: Sequence[int] | None = None,
    force: bool = False,
    clock: Clock | None = None,
    report: Report | None = None,
) -> KeptProfile:
    """Return the profile of these engines: the one kept, if it still holds, or else one measured now and then kept.

    Args:
        target: the model that verifies.
        target_options: what it was opened with; the path must be that of its file.
        draft: the model that drafts, if there is one.
        draft_options: likewise.
        budget: when to stop measuring.
        widths: the target's widths that must be measured, those of them that it can take; ``None`` is content with
            whatever is kept.
        force: measure even if there is one.
        clock: where times come from.
        report: told about progress of measuring.

    Raises:
        InputError: as :func:`~paceline.planning.costs.profiling.measure_profile` does.
        EngineError: likewise.
    """
    wanted = TARGET_WIDTHS if widths is None else widths
    try:
        key = profile_key(target, target_options, draft, draft_options)
    except ModelFileError:
        # A loaded model runs on, whatever became of its file.
        profile = measure_profile(target, draft, budget=budget, widths=wanted, clock=clock, report=report)
        return KeptProfile(profile, True, None)
    kept = None if force else load_profile(key)
    is_enough = kept is not None and all(kept.target.is_measured(rows) for rows in usable_widths(target, widths or ()))
    if kept is not None and is_enough and _still_holds(kept, target, clock):
        return KeptProfile(kept, False, profiles_folder() / key.name)
    profile = measure_profile(target, draft, budget=budget, widths=wanted, clock=clock, report=report)
    return KeptProfile(profile, True, store_profile(key, profile))


def _still_holds(kept: CostProfile, target: Engine, clock: Clock | None) -> bool:
    """Return whether passes take now about what they took; where one check says no, a second one must agree."""
    wide = max(width.rows for width in kept.target.widths if width.rows <= _CHECKED_WIDTH)
    least_s: dict[int, float] = {}
    for _ in range(2):
        for rows, now_s in spot_check(target, sorted({1, wide}), clock=clock).items():
            least_s[rows] = min(now_s, least_s.get(rows, now_s))
        # The check takes turns between widths.
        ratios = [now_s / (kept.target.seconds(rows) + kept.change_s) for rows, now_s in least_s.items()]
        if all(1 / _CHANGED <= ratio <= _CHANGED for ratio in ratios):
            return True
    return False


def load_profile(key: ProfileKey) -> CostProfile | None:
    """Return the profile kept under ``key``; ``None`` if there is none that can be trusted."""
    try:
        entry = json.loads((profiles_folder() / key.name).read_text(encoding="utf-8"))
        if entry["key"] != json.loads(_canonical(key.facts)):
            return None
        return CostProfile.from_json(entry["profile"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, InputError):
        return None


def store_profile(key: ProfileKey, profile: CostProfile) -> Path | None:
    """Keep a profile, in place of any that is there; return its path, or ``None`` if it cannot be written.

    Processes that store at once do not disturb each other: the last one's entry stays, and each is whole.
    """
    path = profiles_folder() / key.name
    entry = {"key": key.facts, "profile": profile.to_json()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            partial.write_text(json.dumps(entry, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except (OSError, InputError):
        return None
    return path


def fingerprint(path: Path) -> str:
    """Return a hash that tells model files or folders apart, without reading 40 GB.

    It covers sizes, the head of each file, which says all of a GGUF file's shapes and types, and blocks spread over the
    rest. A folder's files count with their names, and so do the other parts of a split GGUF file.

    Raises:
        ModelFileError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS_AND_SETTINGS)
            for file in files:
                digest.update(f"{file.name}\0".encode())
                _hash_samples(file, digest)
        else:
            for file in _parts(path):
                _hash_samples(file, digest)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def _parts(path: Path) -> list[Path]:
    """Return all parts of a split GGUF file, or the one file."""
    part = _PART_OF_SEVERAL.fullmatch(path.name)
    if part is None:
        return [path]
    others = ((file, _PART_OF_SEVERAL.fullmatch(file.name)) for file in path.parent.iterdir())
    return sorted(file for file, other in others if other and other.groups() == part.groups())


def _hash_samples(path: Path, digest: hashlib._Hash) -> None:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(f"{size}\0".encode())
        file.seek(0)
        digest.update(file.read(_HEAD_BYTES))
        span = max(0, size - _HEAD_BYTES - _BLOCK_BYTES)  # from the first block's start to the last one's
        for block in range(_BLOCKS):
            file.seek(_HEAD_BYTES + span * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))


def _model_facts(engine: Engine, options: ModelOptions) -> dict[str, Any]:
    path = Path(options.path)
    name = options.engine or engine_for(path)
    capabilities = dataclasses.asdict(engine.capabilities)
    # These come with other settings and cost nothing.
    for irrelevant in ("trees", "logit_tolerance", "hidden_states"):
        del capabilities[irrelevant]
    return {
        "file": fingerprint(path),
        "engine": name,
        "build": _build(name),
        # It says the device and the threads that an engine chose by itself.
        "description": engine.description.removeprefix(path.name),
        "threads": options.threads,
        "threads_batch": options.threads_batch,
        "flash_attention": options.flash_attention,
        "devices": list(options.devices),
        "gpu_layers": options.gpu_layers,
        "override_tensors": [list(pair) for pair in options.override_tensors],
        "dtype": options.dtype,
        "capabilities": capabilities,
    }


def _build(name: EngineName) -> str:
    if name == "llama_cpp":
        import llama_cpp

        features = llama_cpp.llama_print_system_info().decode("utf-8", errors="replace")
        return f"llama-cpp-python {llama_cpp.__version__}: {features}"
    import torch
    import transformers

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"torch {torch.__version__}, transformers {transformers.__version__}, GPUs {gpus}"


def _machine() -> dict[str, Any]:
    """Say which machine this is, as a cache may lie in a home folder that several share."""
    return {"system": platform.system(), "machine": platform.machine(), "cpu": processor(), "cores": os.cpu_count()}


def _canonical(facts: dict[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True, ensure_ascii=False)
