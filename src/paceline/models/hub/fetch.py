"""Fetching a model of the hub: what the cache lacks is downloaded, and the path in the cache returned."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Final, TypeAlias

from paceline import __version__
from paceline.atomic_output import atomic_file
from paceline.core.errors import InputError, ModelFileError, ModelWarning
from paceline.models.hub.choice import ChosenFiles, choose_files, choose_head, model_parts
from paceline.models.hub.local_cache import (
    find_cached,
    find_cached_head,
    find_snapshot,
    find_snapshots,
    has_same_content,
    hub_folder,
    is_offline,
    repo_folder,
)
from paceline.models.hub.reference import HubModel, endpoint
from paceline.sizes import format_bytes

if TYPE_CHECKING:
    from paceline.models.hub.transfer import RemoteFile

FetchReport: TypeAlias = Callable[[str, int, int], None]
"""Called with the file that is being fetched, the bytes of the model that are there, and its size in bytes."""

_LOOK_S: Final = 3.0
"""Seconds to wait for the hub where the cache has the model."""

_FIRST_LOOK_S: Final = 10.0
"""Seconds to wait for the hub where the cache does not have the model."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
"""A commit's SHA-1."""
_DIGEST: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""A file's digest: SHA-1 of git, or SHA-256 of Git LFS."""
_MAX_BYTES: Final = 50_000_000_000
"""Bytes of the largest file that the hub gives by plain HTTP."""


def from_hub(
    model: str | HubModel,
    *,
    file: str | None = None,
    token: str | None = None,
    offline: bool = False,
    report: FetchReport | None = None,
) -> Path:
    """Return where a model of the Hugging Face hub lies on this machine, for :func:`paceline.load`.

    What is not in the hub's cache is fetched first; an interrupted download is taken up where it ended. Where the hub
    cannot be reached and the cache has the model, that one is used, with a :class:`ModelWarning`.

    Args:
        model: ``user/repo`` or ``user/repo:quant``; the quant ``safetensors`` is the folder of a repository that has
            GGUF files too. Also what :attr:`paceline.Environment.models` has of one.
        file: a GGUF file of the repository, instead of a quant.
        token: of the hub; ``None`` for ``HF_TOKEN``, or that of ``hf auth login``.
        offline: take it from the cache, and ask nobody.
        report: hears which file is being fetched, how many bytes of the model are there, and how many it has.

    Returns:
        A GGUF file, of a split model its first part, or a folder.

    Raises:
        InputError: there is no such quant or file, or several; or the name is none.
        ModelFileError: the model cannot be had; the message says why, and the way out.
    """
    if not isinstance(model, HubModel):
        model = HubModel.parse(model, file=file, token=token, offline=offline)
    elif (file, token, offline) != (None, None, False):
        raise InputError(f"file, token and offline are for models given as text: {model} has its own")
    return fetch_model(model, report).path


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model of the hub on this machine.

    Attributes:
        listing: what its repository has; ``None`` where the hub was not asked.
    """

    path: Path
    listing: _Listing | None


def fetch_model(model: HubModel, report: FetchReport | None = None) -> FetchedModel:
    """Return where a model lies on this machine. Raises as :func:`from_hub` does."""
    if model.offline or is_offline():
        return FetchedModel(_find_cached(model), None)
    try:
        cached = find_cached(model)
    except InputError:
        cached = None  # the hub may have what the cache does not tell
    with _log_errors_only():
        listing = _look(model, cached)
        if listing is None:
            assert cached is not None
            return FetchedModel(cached, None)
        chosen = choose_files(model, listing.files)
        return FetchedModel(_fetch(model, listing, chosen, report, has_older=cached is not None), listing)


def fetch_head(
    model: HubModel, fetched: FetchedModel, kinds: Sequence[str], report: FetchReport | None = None
) -> Path | None:
    """Return where the head lies on this machine that is beside a model at the hub; ``None`` if there is none.

    What is chosen is said at :func:`choose_head`. Raises as :func:`from_hub` does.
    """
    if fetched.listing is None:
        return find_cached_head(fetched.path, kinds, model.quant)
    snapshot = find_snapshot(fetched.path)
    assert snapshot is not None
    name = fetched.path.relative_to(snapshot).as_posix()
    head = choose_head(name, fetched.listing.files, kinds, model.quant)
    if head is None:
        return None
    # A revision that had the head alone would seem to be without the model.
    parts = model_parts(name)
    own_bytes = sum(fetched.listing.files[part].num_bytes for part in parts)

    def heard(what: str, num_bytes: int, total: int) -> None:
        if report is not None:
            report(what, num_bytes - own_bytes, total - own_bytes)

    with _log_errors_only():
        return _fetch(model, fetched.listing, ChosenFiles((head, *parts), False), heard, has_older=False)


def _find_cached(reference: HubModel) -> Path:
    cached = find_cached(reference)
    if cached is None:
        from paceline.models.hub.errors import not_cached_fault

        raise not_cached_fault(reference).error()
    return cached


@dataclass(frozen=True, slots=True)
class _Listing:
    """The files of a repository by path, at its newest revision."""

    commit: str
    files: dict[str, RemoteFile]


def _look(reference: HubModel, cached: Path | None) -> _Listing | None:
    """Return what a repository has; ``None`` where the hub cannot be asked and the cache has the model."""
    address = endpoint()
    from paceline.models.hub.errors import ERRORS, explain_error

    try:
        return _list_repo(reference, address, _FIRST_LOOK_S if cached is None else _LOOK_S)
    except ERRORS as error:
        fault = explain_error(error, reference)
        if cached is None:
            raise fault.error() from None
        warnings.warn(
            f"{fault.why}: {reference} is used from the cache, without checking for a newer version",
            ModelWarning,
            stacklevel=4,
        )
        return None


def _fetch(
    reference: HubModel, listing: _Listing, chosen: ChosenFiles, report: FetchReport | None, *, has_older: bool
) -> Path:
    """Return where the chosen files lie on this machine, fetching what is not there."""
    from paceline.models.hub.errors import ERRORS, explain_error

    for number, snapshot in enumerate(find_snapshots(reference.repo)):
        if _is_there(snapshot, chosen, listing):
            if number:
                # An author took a change back: a later start without a network must find this revision, too.
                with contextlib.suppress(InputError, OSError):
                    _make_latest(snapshot)
            return _path(snapshot, chosen)
    files = [listing.files[path] for path in chosen.paths]
    snapshot = repo_folder(reference.repo) / "snapshots" / listing.commit
    try:
        _fetch_blobs(reference, files, snapshot, report or (lambda name, done, total: None))
        _name_blobs(snapshot, files)
        return _path(snapshot, chosen)
    except InputError:
        raise
    except ERRORS as error:
        fault = explain_error(error, reference)
        if has_older:
            fault = replace(fault, way_out=f"{fault.way_out}; the older one in the cache is used with `offline=True`")
        raise fault.error() from None


def _list_repo(reference: HubModel, address: str, timeout_s: float) -> _Listing:
    """Ask the hub, once, for the files of a repository.

    Raises ``ValueError`` where the answer is not that of a hub.
    """
    from huggingface_hub import HfApi, hf_hub_url

    from paceline.models.hub.transfer import RemoteFile

    api = HfApi(endpoint=address, token=reference.token, library_name="paceline", library_version=__version__)
    try:
        info = api.model_info(reference.repo, revision="main", files_metadata=True, timeout=timeout_s)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its answer lacks {error}") from None
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise ValueError(f"its revision is {commit!r}")
    files = {}
    for sibling in info.siblings or []:
        digest = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
        path, size = sibling.rfilename, sibling.size
        # Digests and paths become names of files.
        if size is None or digest is None or not _DIGEST.fullmatch(digest):
            raise ValueError(f"{path} has size {size} and digest {digest!r}")
        if PureWindowsPath(path).anchor or ".." in PureWindowsPath(path).parts:
            raise ValueError(f"{path!r} leads out of the repository")
        url = hf_hub_url(reference.repo, path, revision=commit, endpoint=address)
        files[path] = RemoteFile(path, url, size, digest)
    return _Listing(commit, files)


def _fetch_blobs(reference: HubModel, files: list[RemoteFile], snapshot: Path, report: FetchReport) -> None:
    from huggingface_hub.utils import build_hf_headers

    from paceline.models.hub.transfer import count_fetched, fetch_blob

    folder = repo_folder(reference.repo)
    blobs, locks = folder / "blobs", hub_folder() / ".locks" / folder.name
    nameless = [file for file in files if not (_has_name(snapshot, file) or _adopt_file(reference, snapshot, file))]
    there = {file.path: file.num_bytes for file in files} | {file.path: count_fetched(blobs, file) for file in nameless}
    total = sum(file.num_bytes for file in files)
    missing = [file for file in nameless if not (blobs / file.digest).is_file()]
    for file in missing:
        if file.num_bytes > _MAX_BYTES:
            raise ModelFileError(
                f"{file.path} has {format_bytes(file.num_bytes)}, and by HTTP the hub gives "
                f"{format_bytes(_MAX_BYTES)} at most: fetch it with hf download {reference.repo} {file.path}, and "
                "start again"
            )
    _check_room(reference, total - sum(there.values()))
    headers = build_hf_headers(token=reference.token, library_name="paceline", library_version=__version__)
    for file in missing:

        def heard(what: str, num_bytes: int, path: str = file.path) -> None:
            there[path] = num_bytes
            report(what, sum(there.values()), total)

        fetch_blob(blobs, locks / f"{file.digest}.lock", file, headers, report=heard)


def _check_room(reference: HubModel, needed_bytes: int) -> None:
    place = hub_folder().absolute()
    # No parent exists where Windows has no such drive; the error comes when the file is written.
    there = next((folder for folder in (place, *place.parents) if folder.is_dir()), None)
    if there is None:
        return
    disk = shutil.disk_usage(there)
    if needed_bytes > disk.free and disk.total:  # a place for no files has size 0; the error comes when it is written
        raise ModelFileError(
            f"{reference} needs {format_bytes(needed_bytes)} more, and {format_bytes(disk.free)} are free for the "
            f"hub's cache {hub_folder()}: free some, choose a smaller quant, or set HF_HUB_CACHE to another disk"
        )


def _is_there(snapshot: Path, chosen: ChosenFiles, listing: _Listing) -> bool:
    """Return whether a cached revision has a model as the hub has it now."""
    files = [listing.files[path] for path in chosen.paths]
    if has_same_content(snapshot, chosen, {file.path: file.digest for file in files}):
        return True
    # Without links, names do not tell which content a file has. But a revision never changes.
    return snapshot.name == listing.commit and all(_has_name(snapshot, file) for file in files)


def _has_name(snapshot: Path, file: RemoteFile) -> bool:
    """Return whether a revision has a whole file under its name; an unfinished copy of another program is shorter."""
    named = snapshot / file.path
    return named.is_file() and named.stat().st_size == file.num_bytes


def _adopt_file(reference: HubModel, snapshot: Path, file: RemoteFile) -> bool:
    """Copy a file from another revision, where links do not tell that it is the same; return whether there is one."""
    from paceline.models.hub.transfer import has_content

    named = snapshot / file.path
    for other in find_snapshots(reference.repo):
        there = other / file.path
        if other == snapshot or there.is_symlink() or not there.is_file() or not has_content(there, file):
            continue
        named.parent.mkdir(parents=True, exist_ok=True)
        named.unlink(missing_ok=True)
        try:
            named.hardlink_to(there)
        except OSError:  # some file systems have no hard links
            shutil.copyfile(there, named)
        return True
    return False


def _name_blobs(snapshot: Path, files: list[RemoteFile]) -> None:
    """Name the blobs of a model by their digests, and then the revision: it is found once it is whole.

    The hub is not asked again: its listing and the digests say all that is needed, and not all mirrors answer what
    ``hf_hub_download`` asks.
    """
    from huggingface_hub.constants import HF_HUB_DISABLE_SYMLINKS

    blobs = snapshot.parent.parent / "blobs"
    moved: dict[str, Path] = {}
    for file in files:
        if _has_name(snapshot, file):
            continue
        blob, named = blobs / file.digest, snapshot / file.path
        named.parent.mkdir(parents=True, exist_ok=True)
        named.unlink(missing_ok=True)
        try:
            if HF_HUB_DISABLE_SYMLINKS:
                raise OSError
            named.symlink_to(os.path.relpath(blob, named.parent))
        except FileExistsError:
            pass  # another process was faster
        except OSError:
            # Without links, a copy would take the room twice.
            if file.digest in moved or _is_linked(snapshot.parent, file.digest):
                shutil.copyfile(moved.get(file.digest, blob), named)
            else:
                moved[file.digest] = blob.replace(named)
    _make_latest(snapshot)


def _is_linked(revisions: Path, digest: str) -> bool:
    return any(named.is_symlink() and named.readlink().name == digest for named in revisions.rglob("*"))


def _make_latest(snapshot: Path) -> None:
    """Let a revision be the cache's latest of the main branch."""
    reference = snapshot.parent.parent / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(reference) as partial:
        partial.write_text(snapshot.name, encoding="ascii")


def _path(snapshot: Path, chosen: ChosenFiles) -> Path:
    return snapshot if chosen.is_folder else snapshot / chosen.paths[0]


@contextmanager
def _log_errors_only() -> Iterator[None]:
    """Keep ``huggingface_hub`` from printing what is said here in one line, or not at all."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
