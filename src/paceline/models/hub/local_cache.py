"""The hub's cache on this machine, read from its files: neither the network nor ``huggingface_hub`` is used.

::

    models--user--repo/refs/main                  the commit that was fetched last
    models--user--repo/snapshots/COMMIT/FILE      a link to the blob that is the file's content
    models--user--repo/blobs/DIGEST               the content; DIGEST.incomplete while it is being fetched

Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import InputError, ModelFileError
from paceline.models.files import read_json
from paceline.models.hub.choice import (
    ChosenFiles,
    choose_files,
    choose_head,
    gguf_heads,
    gguf_models,
    is_ambiguous,
    model_parts,
    parse_quant,
)
from paceline.models.hub.reference import SAFETENSORS, HubModel
from paceline.models.weight_files import weight_files

_PREFIX: Final = "models--"
"""Beginning of the names of models' folders in the cache."""
_TRUE: Final = ("1", "ON", "YES", "TRUE")
"""Values by which an environment variable says yes."""
_WRITES_TEXT: Final = ("CausalLM", "LMHead", "ConditionalGeneration")
"""Parts of the names of transformers' classes that generate text."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A whole model in the hub's cache, or a head.

    Attributes:
        name: ``user/repo:QUANT``, ``user/repo/FILE`` where its quant is not its own, or ``user/repo`` of a folder.
        path: the GGUF file, or the folder.
    """

    name: str
    path: Path


def hub_folder() -> Path:
    """Return the folder of the hub's cache, by the variables of ``huggingface_hub``; it may not exist."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not named:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")  # noqa: PTH118 -- ~ is expanded below
        named = os.path.join(os.environ.get("HF_HOME") or os.path.join(caches, "huggingface"), "hub")  # noqa: PTH118
    return Path(os.path.expandvars(os.path.expanduser(named)))  # noqa: PTH111 -- a Path of an unknown user raises


def is_offline() -> bool:
    """Return whether the environment forbids a look at the hub."""
    return any((os.environ.get(name) or "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def repo_folder(repo: str) -> Path:
    """Return where the cache keeps a repository; it may not exist."""
    return hub_folder() / (_PREFIX + repo.replace("/", "--"))


def find_cached(reference: HubModel) -> Path | None:
    """Return the path of a model if the cache has all of it, of the newest revision that was fetched."""
    for snapshot in find_snapshots(reference.repo):
        paths = _list_whole_files(snapshot)
        if not paths:
            continue
        try:
            chosen = choose_files(reference, paths)
        except InputError:
            if is_ambiguous(reference, paths):
                raise
            continue
        if not chosen.is_folder:
            return snapshot / chosen.paths[0]
        if _is_whole_folder(snapshot):
            return snapshot
    return None


def find_snapshot(path: Path) -> Path | None:
    """Return the cached revision that a path lies in; ``None`` for one of elsewhere."""
    for each in path.parents:
        if each.parent.name == "snapshots" and each.parent.parent.name.startswith(_PREFIX):
            return each
    return None


def find_cached_head(model: Path, kinds: Sequence[str], quant: str = "") -> Path | None:
    """Return the head that the cache has beside a model in it, as :func:`choose_head` does."""
    snapshot = find_snapshot(model)
    if snapshot is None:
        return None
    name = model.relative_to(snapshot).as_posix()
    for each in (snapshot, *_list_snapshots(snapshot.parent.parent)):
        if (found := choose_head(name, _list_whole_files(each), kinds, quant)) is not None:
            return each / found
    return None


def find_snapshots(repo: str) -> list[Path]:
    """Return the cached revisions of a repository: the one that was fetched last, then the newest."""
    return _list_snapshots(repo_folder(repo))


def list_cached() -> list[CachedModel]:
    """Return the whole models in the cache, by name; of several revisions the newest.

    Other programs share the cache. What cannot be read is skipped.
    """
    models: dict[str, CachedModel] = {}
    with contextlib.suppress(OSError):
        for path in sorted(hub_folder().glob(f"{_PREFIX}*")):
            repo = path.name.removeprefix(_PREFIX).replace("--", "/", 1)
            with contextlib.suppress(OSError, ModelFileError):
                for snapshot in _list_snapshots(path):
                    for model in _list_models(repo, snapshot):
                        models.setdefault(model.name, model)
    return sorted(models.values(), key=lambda model: model.name)


def display_name(path: Path) -> str:
    """Return the name by which people know a model's file or folder: of a folder of the hub's cache, the repository."""
    repo = path.parent.parent.name
    if path.parent.name == "snapshots" and repo.startswith(_PREFIX):
        return repo.removeprefix(_PREFIX).replace("--", "/", 1)
    return path.name


def has_same_content(snapshot: Path, chosen: ChosenFiles, digests: dict[str, str]) -> bool:
    """Return whether a cached revision has the files of a model with the digests that they have at the hub."""
    # Without links, names do not tell which content a file has.
    return all(
        (snapshot / path).is_symlink()
        and (snapshot / path).is_file()
        and os.path.basename(os.readlink(snapshot / path)) == digests[path]  # noqa: PTH115, PTH119
        for path in chosen.paths
    )


def _list_snapshots(repo: Path) -> list[Path]:
    try:
        found = [path for path in (repo / "snapshots").iterdir() if path.is_dir()]
        reference = repo / "refs" / "main"
        latest = reference.read_text(encoding="utf-8").strip() if reference.is_file() else ""
        return sorted(found, key=lambda path: (path.name == latest, path.stat().st_mtime), reverse=True)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFileError(
            f"the hub's cache {repo} cannot be read: {reason}; look at its permissions, or set HF_HUB_CACHE to another "
            "folder"
        ) from None


def _list_models(repo: str, snapshot: Path) -> Iterator[CachedModel]:
    paths = _list_whole_files(snapshot)
    models = gguf_models(paths)
    for path in models:
        quant = parse_quant(path)
        by_quant = bool(quant) and _matches(HubModel(repo, quant), path, paths)
        yield CachedModel(f"{repo}:{quant}" if by_quant else f"{repo}/{path}", snapshot / path)
    for path in gguf_heads(paths):
        yield CachedModel(f"{repo}/{path}", snapshot / path)
    if "config.json" in paths and _is_whole_folder(snapshot):
        yield CachedModel(f"{repo}:{SAFETENSORS}" if models else repo, snapshot)


def _matches(reference: HubModel, path: str, paths: list[str]) -> bool:
    return not is_ambiguous(reference, paths) and choose_files(reference, paths).paths[0] == path


def _list_whole_files(snapshot: Path) -> list[str]:
    """Return the files of a revision by their paths in it; of split models only those that are whole."""
    paths = sorted(
        path.relative_to(snapshot).as_posix()
        for path in snapshot.rglob("*")
        if path.is_file()  # not a link whose blob is gone
    )
    return [path for path in paths if not path.endswith(".gguf") or set(model_parts(path)) <= set(paths)]


def _is_whole_folder(snapshot: Path) -> bool:
    try:
        classes = read_json(snapshot / "config.json").get("architectures")
        writes_text = not classes or any(word in str(classes) for word in _WRITES_TEXT)
        return writes_text and bool(weight_files(snapshot))
    except ModelFileError:
        return False
