"""The models to try as drafts: those that were named, and those in named folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.conversion.own_draft import OwnDraft
from paceline.core.errors import InputError, ModelFileError
from paceline.models.description import ModelDescription, describe
from paceline.models.gguf_model import is_later_part
from paceline.models.registry import named_models, resolve_model
from paceline.sizes import format_bytes

_DEEPEST: Final = 4
"""Depth of folders that are searched: LM Studio's models lie two deep, those in the hub's cache four."""
_MAX_SHARE: Final = 0.9
"""Share of the target's size beyond which a model in a folder is not tried."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that may draft.

    Attributes:
        name: in reports: as it was named, or its path in the folder that was.
        path: where it lies; of a target's own draft, where it will.
        what: its description; ``None`` of a draft that is not made yet.
        own: asked for as the target's own draft.
    """

    name: str
    path: Path
    what: ModelDescription | None
    own: OwnDraft | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file in a folder that is not tried, and why, in a line."""

    name: str
    why: str


def find_candidates(names: Sequence[str], target: ModelDescription) -> tuple[list[Candidate], list[Skipped]]:
    """Return the models to try, in the order named, each once, and the files in folders that are not tried.

    ``names`` are paths of models or folders, names of ``paceline models``, or ``self``. Without any, all models are
    tried that have names, and those that lie beside the target. In folders, models as large as the target are left out,
    heads, which each draft for one model alone, and the target itself.
    """
    if not names:
        return _choose(_iter_named(target), target)
    candidates: list[Candidate] = []
    skipped: list[Skipped] = []
    for name in names:
        own = OwnDraft.parse(name)
        if own is not None:
            made = own.of(target.path)
            candidates.append(Candidate(made.name, made.path, None, own))
            continue
        folder = Path(name)
        if folder.is_dir() and not (folder / "config.json").is_file():
            inside = [(str(path.relative_to(folder)), path) for path in _iter_models(folder)]
            if not inside:
                raise InputError(f"{folder} holds no model: give a folder with GGUF files or Hugging Face folders")
            found, others = _choose(inside, target)
            candidates += found
            skipped += others
            continue
        path = resolve_model(name)
        candidates.append(Candidate(name, path, describe(path, may_be_head=True)))
    return _drop_duplicates(candidates), skipped


def _iter_named(target: ModelDescription) -> Iterator[tuple[str, Path]]:
    """Yield the models that have names, and those that lie beside a target, with these names."""
    yield from ((model.name, model.path) for model in named_models())
    folder = target.path.parent
    yield from ((str(path.relative_to(folder)), path) for path in _iter_models(folder, deepest=0))


def _choose(models: Iterable[tuple[str, Path]], target: ModelDescription) -> tuple[list[Candidate], list[Skipped]]:
    """Return the models that may draft, the smallest first, and why the others may not."""
    candidates: list[Candidate] = []
    skipped: list[Skipped] = []
    for name, path in models:
        if _identity(path) == _identity(target.path):
            continue
        try:
            what = describe(path)
        except ModelFileError as error:
            skipped.append(Skipped(name, _strip_path(str(error), path)))
            continue
        if what.num_parameters == 0:
            skipped.append(Skipped(name, "it holds a vocabulary and no weights"))
        elif what.num_bytes > _MAX_SHARE * target.num_bytes:
            sizes = f"{format_bytes(what.num_bytes)} beside the target's {format_bytes(target.num_bytes)}"
            skipped.append(Skipped(name, f"{sizes}: too large to draft (name it to try it all the same)"))
        else:
            candidates.append(Candidate(name, path, what))
    # The likeliest to pay come first, for a user who ends it early.
    candidates.sort(key=lambda candidate: candidate.what.num_bytes if candidate.what else 0)
    return _drop_duplicates(candidates), skipped


def _drop_duplicates(candidates: Sequence[Candidate]) -> list[Candidate]:
    found: dict[tuple[int, int] | Path, Candidate] = {}
    for candidate in candidates:
        found.setdefault(_identity(candidate.path), candidate)
    return list(found.values())


def _iter_models(folder: Path, *, deepest: int = _DEEPEST) -> Iterator[Path]:
    """Yield GGUF files, of split models the first parts, and folders with a configuration, in a folder's tree."""

    def fail(error: OSError) -> None:
        if error.filename is None or Path(error.filename) == folder:
            raise InputError(f"{folder} cannot be read: {error.strerror or error}")

    # Folders may be links, as to another disk. Links within this folder are skipped, as they may go in circles.
    known = [folder.resolve()]
    for root, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        here = Path(root)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in [name for name in folders if (here / name).is_symlink()]:
            leads_to = (here / name).resolve()
            if any(leads_to.is_relative_to(one) for one in known):
                folders.remove(name)
            else:
                known.append(leads_to)
        if len(here.relative_to(folder).parts) >= deepest:
            folders.clear()
        if "config.json" in files and any(name.endswith((".safetensors", ".bin")) for name in files):
            folders.clear()
            yield here
            continue
        for name in sorted(files):
            path = here / name
            if not name.startswith(".") and path.suffix.lower() == ".gguf" and not is_later_part(path):
                yield path


def _identity(path: Path) -> tuple[int, int] | Path:
    """Return a key that tells files apart, however many names they have."""
    try:
        found = path.stat()
    except OSError:
        return path
    return found.st_dev, found.st_ino


def _strip_path(text: str, path: Path) -> str:
    """Take the path away that an error begins with, as a line names it already."""
    for start in (f"{path} ", f"{path}: "):
        text = text.removeprefix(start)
    return text
