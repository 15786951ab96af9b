"""Removing a model from the hub's cache, by the library whose cache that is."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from huggingface_hub.utils import DeleteCacheStrategy

from paceline.core.errors import InputError
from paceline.models.hub.choice import model_parts
from paceline.models.hub.local_cache import hub_folder


@dataclass(frozen=True, slots=True)
class Removal:
    """What removing a model of the hub does.

    Attributes:
        num_bytes: what it frees. Content that other models share stays, and does not count.
        strategy: the library's plan.
        paths: files that are gone then.
    """

    num_bytes: int
    strategy: DeleteCacheStrategy
    paths: tuple[Path, ...]

    def execute(self) -> None:
        try:
            self.strategy.execute()
        except OSError as error:
            raise InputError(f"{self.paths[0]} cannot be removed: {error.strerror or error}") from None
        # The library only logs what it could not delete.
        for path in self.paths:
            if os.path.lexists(path):
                raise InputError(f"{path} cannot be removed: look at its permissions and at those of its folder")


def plan_removal(path: Path) -> Removal:
    """Return what it takes to remove a model from the cache, from all revisions that have it.

    ``path`` lies in a revision's folder: a GGUF file, of a split model the first part, or that folder itself.
    """
    folder = hub_folder()
    name, _, _, *inner = path.relative_to(folder).parts
    parts = set(model_parts("/".join(inner))) if inner else None
    try:
        cache = scan_cache_dir(folder)
    except CacheNotFound:
        raise InputError(f"the hub's cache {folder} is gone: see paceline models") from None
    # A copy of a repository has the same commits, and the library would take one of the two for them.
    cache = dataclasses.replace(cache, repos=frozenset(repo for repo in cache.repos if repo.repo_path.name == name))
    revisions = [revision for repo in cache.repos for revision in repo.revisions]
    files = [
        (file, file.file_path.relative_to(revision.snapshot_path).as_posix())
        for revision in revisions
        for file in revision.files
    ]
    # The model of a folder is every file but the GGUF files, which are models by themselves.
    of_model = [file for file, path_in in files if (path_in in parts if parts else not path_in.endswith(".gguf"))]
    if not of_model:
        raise InputError(f"{path} is gone, or the library cannot read the cache around it: see hf cache ls")
    if len(of_model) == len(files):
        strategy = cache.delete_revisions(*(revision.commit_hash for revision in revisions))
    else:
        strategy = cache.delete_files(*of_model)
    return Removal(strategy.expected_freed_size, strategy, tuple(file.file_path for file in of_model))
