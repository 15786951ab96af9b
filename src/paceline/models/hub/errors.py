"""Why a model of the hub cannot be had, in one line with the way out."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from importlib import import_module
from typing import Final, cast

from huggingface_hub import get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from paceline.core.errors import ModelFileError
from paceline.models.hub.local_cache import hub_folder
from paceline.models.hub.reference import HubModel, endpoint, without_credentials

HTTP_ERROR: Final = cast("type[Exception]", HfHubHTTPError.__mro__[1])
"""Base of what the library's HTTP client raises. The library has changed its client before (httpx, httpx2)."""

_NO_CLIENT: Final = (
    ImportError,
    cast("type[Exception]", import_module(HTTP_ERROR.__module__.split(".")[0]).InvalidURL),
)
"""Errors where a variable such as ``HTTPS_PROXY`` is no address, or needs a package that is not installed."""

ERRORS: Final = (HTTP_ERROR, *_NO_CLIENT, OSError, EntryNotFoundError, ValueError)
"""What calls of the library raise: of HTTP, of files, of a cache that lacks something, of what a server answered."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a model cannot be had, and the way out, without names and passwords in addresses."""

    why: str
    way_out: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "why", without_credentials(self.why))
        object.__setattr__(self, "way_out", without_credentials(self.way_out))

    def error(self) -> ModelFileError:
        return ModelFileError(f"{self.why}: {self.way_out}")


def explain_error(error: Exception, reference: HubModel) -> Fault:
    """Return what an error of the library or of the system means for whoever asked for a model."""
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, GatedRepoError):
        token = _token(reference)
        return Fault(
            f"{reference.repo} is gated" + (f", and {token} has no access" if token else ""),
            f"accept its terms at {endpoint()}/{reference.repo}, then log in with hf auth login, or set HF_TOKEN",
        )
    if isinstance(error, HfHubHTTPError):
        return _explain_response(error, reference)
    if isinstance(error, OfflineModeIsEnabled):
        return not_cached_fault(reference)
    if isinstance(error, (HTTP_ERROR, *_NO_CLIENT)):
        return Fault(
            f"{endpoint()} cannot be reached ({_error_text(error)})",
            "check the network, HTTPS_PROXY and HF_ENDPOINT, and start again",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return _explain_os_error(error, reference)
    return Fault(
        f"{endpoint()} did not answer about {reference.repo} as a hub does ({_error_text(error)})",
        "check HF_ENDPOINT, and start again",
    )


def not_cached_fault(reference: HubModel) -> Fault:
    """Return the fault of a model that is not in the cache, where the hub is not to be asked."""
    return Fault(
        f"{reference} is not in the hub's cache {hub_folder()}, or not all of it, and the hub is not asked",
        "leave out `offline` (HF_HUB_OFFLINE), or choose one that paceline models lists",
    )


def _explain_response(error: HfHubHTTPError, reference: HubModel) -> Fault:
    status = error.response.status_code
    if isinstance(error, RepositoryNotFoundError) or (status == 404 and not isinstance(error, EntryNotFoundError)):
        token = _token(reference)
        return Fault(
            f"{endpoint()} has no model {reference.repo}, or a private one"
            + (f" that {token} does not open" if token else ""),
            "check the name, or log in with hf auth login, or set HF_TOKEN",
        )
    if isinstance(error, EntryNotFoundError):
        return Fault(f"{reference.repo} no longer has a file that it listed ({_error_text(error)})", "start again")
    if status == 401:
        return Fault(
            f"{endpoint()} does not accept {_token(reference) or 'requests without a token'}",
            "give another, log in with hf auth login, or leave it out where the model is open to all",
        )
    if status == 403:
        return Fault(
            f"{_token(reference) or 'nobody without a token'} may not read {reference.repo}",
            "give that token the right to, in your settings at the hub, or give another",
        )
    if status == 429:
        return Fault(f"{endpoint()} takes no more requests for now (429)", "wait, or set HF_TOKEN, which may ask more")
    return Fault(f"{endpoint()} answered {status} about {reference.repo}", "try again later")


def _explain_os_error(error: OSError, reference: HubModel) -> Fault:
    if error.errno in _FULL:
        return Fault(
            f"the disk of the hub's cache {hub_folder()} is full",
            f"free some room and start again, and the rest of {reference} is fetched; or set HF_HUB_CACHE to another "
            "disk",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Fault(
            f"the hub's cache {hub_folder()} cannot be written ({error.strerror})",
            "set HF_HUB_CACHE to a folder of your own",
        )
    where = f"{error.filename}: " if error.filename else ""
    return Fault(f"{reference} cannot be fetched ({where}{error.strerror})", "check the hub's cache, and start again")


def _token(reference: HubModel) -> str:
    if reference.token is not None:
        return "the token (`token`)"
    if os.environ.get("HF_TOKEN"):
        return "the token of HF_TOKEN"
    return "" if get_token() is None else "the token of hf auth login"


def _error_text(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return first[0].rstrip(".:") if first else type(error).__name__
