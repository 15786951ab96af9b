"""Models by name: the embedded pair, this machine's folder of models, and the hub's cache.

::

    name, as given to -m ──resolve──> path ──describe (models/description.py)──> what the file says about itself
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeGuard

from platformdirs import user_cache_path

from paceline.core.did_you_mean import nearest
from paceline.core.errors import InputError, ModelFileError
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.gguf_model import is_later_part, model_name, part_paths
from paceline.models.hub.choice import HEADS, choose_head
from paceline.models.hub.local_cache import find_cached, find_cached_head, find_snapshot, list_cached
from paceline.models.hub.reference import HubModel

_NEAR: Final = 0.6
"""Share of its characters by which a model's name is near another.

Less than for options: who leaves out the quantisation means the model that is there.
"""

CACHE_VARIABLE = "PACELINE_CACHE"
"""Environment variable that names another folder for what paceline keeps on this machine."""

OWN_DRAFT: Final = "self"
"""Name of a target's own draft where a draft model is named. A file of that name is ``./self``."""
MTP_DRAFT: Final = "mtp"
"""Name of a target's MTP layer, in its own file or beside it, where a draft model is named. A file of that name is
``./mtp``.
"""
MTP_FILES: Final = "mtp-"
"""Part of the names of files with an MTP layer alone."""


def models_folder() -> Path:
    """Return the folder of the models made on this machine; it may not exist.

    It is ``models`` in the user's cache folder, or in the folder that ``PACELINE_CACHE`` names.
    """
    override = os.environ.get(CACHE_VARIABLE)
    if not override:
        return user_cache_path("paceline", appauthor=False) / "models"
    try:
        return Path(override).expanduser() / "models"
    except RuntimeError:
        raise ModelFileError(
            f"{CACHE_VARIABLE} is {override}, and there is no home folder of that user: give another folder"
        ) from None


def drafts_folder() -> Path:
    """Return the folder of drafts that were made of targets, beside :func:`models_folder`; it may not exist."""
    return models_folder().with_name("drafts")


def names_own_draft(name: object) -> TypeGuard[str]:
    """Return whether the name of a draft model is that of the target's own, such as ``"self"`` or ``"self:Q4_0"``."""
    return isinstance(name, str) and name.partition(":")[0] == OWN_DRAFT


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that can be called by name instead of by path.

    Attributes:
        embedded: it travels with paceline.
        of_hub: it lies in the cache of the Hugging Face hub, which other programs share.
        own_draft: it was made of a target to be its draft, and lies in :func:`drafts_folder`.
    """

    name: str
    path: Path
    embedded: bool
    of_hub: bool = False
    own_draft: bool = False


def named_models() -> list[NamedModel]:
    """Return all models that have names: the embedded ones, and by name the cached ones, drafts and those of the hub.

    No weights are opened, so a model may turn out to be unreadable.
    """
    models = _list_cached()
    taken = {model.name for model in models}
    return [*models, *(model for model in _list_hub_models() if model.name not in taken)]


def _list_cached() -> list[NamedModel]:
    models = [NamedModel("target", embedded_target(), True), NamedModel("draft", embedded_draft(), True)]
    taken = {model.name for model in models}
    for path in _iter_cached_paths(models_folder()):
        # Of two models with one name, such as a file and a folder, the later one keeps its ending.
        name = path.stem if path.is_file() and path.stem not in taken else path.name
        name = f"{name}/" if name in taken else name
        taken.add(name)
        models.append(NamedModel(name, path, False))
    for path in _iter_cached_paths(drafts_folder()):
        if path.is_file():
            name = path.name if path.stem in taken else path.stem
            models.append(NamedModel(name, path, False, own_draft=True))
    return models


def _list_hub_models() -> list[NamedModel]:
    return [NamedModel(model.name, model.path, False, True) for model in list_cached()]


def resolve_model(model: str | Path) -> Path:
    """Return the path of a model given by path or by name.

    A path wins where a model lies at it. A folder that holds none, such as a build's ``target``, does not hide a name.
    Of the hub's models those in its cache have names, and the hub is not asked (:func:`paceline.from_hub` asks it).
    """
    if not str(model):
        # Path("") would be the current folder.
        raise ModelFileError("the name of the model is empty: give a path, or a name that paceline models lists")
    path = Path(model)
    try:
        if path.is_file() or (path / "config.json").is_file():
            return path
        # A text such as ./target is a path, and says so; a Path has forgotten how it was written.
        named = _find(str(model))
        if named is not None:
            return named.path
        if path.exists():
            return path  # its reader can say best what is wrong with it
    except OSError as error:
        raise ModelFileError(f"{model} cannot be read: {error.strerror or error}") from None
    asked = _find_hub_model(str(model))
    if asked is not None and (cached := find_cached(asked)) is not None:
        return cached
    is_named_by_path = os.sep in str(model) or path.suffix == ".gguf"
    what = f"there is no file {model}" if is_named_by_path else f"there is no file or model {model}"
    names = [known.name for known in named_models() if not known.own_draft]
    near = _suggest_path(path) or nearest(str(model), names, cutoff=_NEAR)
    if near is not None:
        way_out = f"did you mean {near}?"
    else:
        way_out = "give the path of a GGUF file or Hugging Face model folder;"
        if asked is not None and path.suffix != ".gguf" and not path.parent.is_dir():
            way_out = f"fetch it from the hub with `repo={str(model)!r}`, or {way_out}"
    raise ModelFileError(f"{what}: {way_out} paceline models lists the names that there are")


def find_head_beside(model: Path, kinds: Sequence[str]) -> Path | None:
    """Return the head in a model's folder, or of a model of the hub's cache in its repository, by their names.

    ``kinds`` are parts of names, the best kind first. What is chosen is said at :func:`choose_head`.
    """
    try:
        if find_snapshot(model) is not None:
            return find_cached_head(model, kinds)
        found = choose_head(model.name, [path.name for path in model.parent.iterdir()], kinds)
    except OSError as error:
        raise ModelFileError(f"{model.parent} cannot be read: {error.strerror or error}") from None
    return None if found is None else model.with_name(found)


def _suggest_path(path: Path) -> str | None:
    """Return the path of the model in a file's folder whose name is nearest to the file's, if one is near."""
    with contextlib.suppress(OSError):
        there_are = {
            model_name(beside) if beside.suffix == ".gguf" else beside.name: beside.name
            for beside in sorted(path.parent.iterdir())
            if (beside.suffix == ".gguf" and not is_later_part(beside)) or (beside / "config.json").is_file()
        }
        near = nearest(path.name.removesuffix(".gguf"), there_are, cutoff=_NEAR)
        return None if near is None else str(path.with_name(there_are[near]))
    return None


def _find_hub_model(name: str) -> HubModel | None:
    with contextlib.suppress(InputError):
        return dataclasses.replace(HubModel.parse(name), heads=HEADS)
    return None


def remove(name: str) -> Path:
    """Delete a cached model, and return where it lay.

    A folder disappears from the cache at once, even if deleting it is interrupted. Of a split model the later parts go
    first: while the first is there, the name still stands for what is left to be removed. Of a model of the hub, what
    others in its cache share stays. Embedded models cannot be removed (``InputError``).
    """
    model = find_removable(name)
    path = model.path
    if model.of_hub:
        from paceline.models.hub.removal import plan_removal

        plan_removal(path).execute()
        return path
    try:
        if path.is_dir() and not path.is_symlink():
            leaving = path.with_name(f".{path.name}.{os.getpid()}.removed")
            path.rename(leaving)
            shutil.rmtree(leaving)
        else:
            for part in reversed(part_paths(path)):
                part.unlink(missing_ok=part != path)
    except OSError as error:
        raise InputError(f"{path} cannot be removed: {error.strerror or error}") from None
    return path


def find_removable(name: str) -> NamedModel:
    """Return the cached model of this name. Raises as :func:`remove` does."""
    model = _find(name)
    if model is None:
        names = [known.name for known in named_models() if not known.embedded]
        near = nearest(name, names, cutoff=_NEAR)
        choice = f"there is none in {models_folder()}" if not names else "paceline models lists those that are"
        if near is not None:
            choice = f"did you mean {near}? {choice}"
        raise InputError(f"no model named {name!r} is cached: {choice}")
    if model.embedded:
        raise InputError(f"{name} is part of paceline and cannot be removed alone: uninstall paceline instead")
    return model


def complete_model(incomplete: str) -> list[str]:
    """Return the names that begin with ``incomplete``, for shell completion; none lets the shell complete paths."""
    with contextlib.suppress(ModelFileError):
        return [model.name for model in named_models() if model.name.startswith(incomplete)]
    return []


def _find(name: str) -> NamedModel | None:
    # The hub's cache may be large, and is looked through last.
    for models in (_list_cached, _list_hub_models):
        there_are = models()
        by_file = (model for model in there_are if not (model.embedded or model.of_hub) and model.path.name == name)
        found = next((model for model in there_are if model.name == name), None) or next(by_file, None)
        if found is not None:
            return found
    return None


def _iter_cached_paths(folder: Path) -> Iterator[Path]:
    """Yield the GGUF files (of split models the first part) and folders in a folder of the cache.

    Hidden ones are being written or deleted.
    """
    try:
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        yield from (
            path
            for path in paths
            if not path.name.startswith(".")
            and (path.is_dir() or (path.suffix.lower() == ".gguf" and not is_later_part(path)))
        )
    except OSError as error:
        raise ModelFileError(f"the models folder {folder} cannot be read: {error.strerror or error}") from None
