"""Naming a model of the hub: a repository, which of its models, the options that say so, and which hub is asked."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from paceline.core.errors import InputError
from paceline.core.fields import Flag, Option, described, setting, take_values
from paceline.core.numbers import shown
from paceline.terminal_text import printable_line

SAFETENSORS: Final = "safetensors"
"""In place of a quant: the safetensors folder of a repository that has GGUF files too."""

_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REFERENCE: Final = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<quant>[A-Za-z0-9._-]+))?")
_TOKEN: Final = re.compile(r"[!-~]+")
_DEFAULT_ENDPOINT: Final = "https://huggingface.co"
_CREDENTIALS: Final = re.compile(r"(?<=//)[^/@\s]*@")

_MODELS = functools.partial(Flag, panel="Models")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model as it is asked of the hub.

    Attributes:
        repo: the repository, ``user/repo``.
        quant: which of its models, such as ``Q8_0`` in any case, or ``safetensors``; empty for the usual one.
        file: a GGUF file of the repository instead of a quant, by its path in there.
        token: of the hub; ``None`` for the one that this machine knows.
        offline: take what the cache has, and ask nobody.
        heads: parts of names of heads, the best kind first, one of which is as good where there is no model.
    """

    repo: str
    quant: str = ""
    file: str | None = None
    token: str | None = field(default=None, repr=False)
    offline: bool = False
    heads: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls, reference: str, *, file: str | None = None, token: str | None = None, offline: bool = False
    ) -> HubModel:
        """Return the model that ``user/repo[:quant]`` names; raise ``InputError`` for bad or contradicting names."""
        found = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
        if found is None or "--" in reference or ".." in reference:
            raise InputError(
                f"{shown(reference)} is not a model of the hub: give user/repo or user/repo:quant (`repo`), such as "
                "ggml-org/gemma-3-1b-it-GGUF:Q8_0"
            )
        quant = found["quant"] or ""
        if quant and file is not None:
            raise InputError(f"{reference} names a quant and `file` {file} names a file: leave out one of them")
        if file is not None and not isinstance(file, str):
            raise InputError(f"the file (`file`) is {shown(file)}: give its path in the repository as a text")
        if token is not None and not isinstance(token, str):
            raise InputError("the token (`token`) is not a text: give it as huggingface.co shows it")
        if token is not None and not _TOKEN.fullmatch(token):
            # The token must not be seen in a terminal or a log.
            raise InputError("the token (`token`) is empty or has spaces in it: give it as huggingface.co shows it")
        return cls(found["repo"], quant, file, token, offline)

    def __str__(self) -> str:
        if self.file is not None:
            return f"{self.repo}/{self.file}"
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True, slots=True)
class HubOptions:
    """Models that are named by where the hub has them, instead of by path or name.

    Attributes:
        repo: the target, as ``user/repo[:quant]``.
        file: the target's file in there, instead of a quant.
        draft_repo: the draft model, as ``user/repo[:quant]``.
        token: of the hub; ``None`` for the one that this machine knows.
        offline: take what the cache has, and ask nobody.
    """

    repo: str | None = setting(
        None,
        Option("other", variable="HF_REPO"),
        _MODELS(
            "-hf -hfr --hf-repo",
            "Target from the Hugging Face Hub, downloaded once: the GGUF file of QUANT, or Q4_K_M, Q8_0 "
            "or the first; without GGUF files, or with :safetensors, the whole repository.",
            metavar="USER/REPO[:QUANT]",
        ),
    )
    file: str | None = setting(
        None,
        Option("other", variable="HF_FILE"),
        _MODELS("-hff --hf-file", "GGUF file of -hf, instead of a quant.", metavar="FILE"),
    )
    draft_repo: str | None = setting(
        None,
        Option("other", variable="DRAFT_HF_REPO"),
        _MODELS("-hfd -hfrd --hf-repo-draft --spec-draft-hf", "Draft model from the Hub.", metavar="USER/REPO[:QUANT]"),
    )
    token: str | None = field(
        default=None,
        repr=False,
        metadata=described(
            Option("other", variable=None),
            _MODELS(
                "-hft --hf-token",
                "Access token for the Hub. [dim]\\[HF_TOKEN, or that of hf auth login][/dim]",
                metavar="TOKEN",
            ),
        ),
    )
    offline: bool = setting(
        False,
        Option("truth"),
        _MODELS("--offline", "Use downloaded models only, without asking the network."),
    )

    def __post_init__(self) -> None:
        take_values(self)

    def target(self) -> HubModel | None:
        """Return the target, if one is asked for; raises as :meth:`HubModel.parse` does."""
        if self.repo is None:
            return None
        return HubModel.parse(self.repo, file=self.file, token=self.token, offline=self.offline)

    def draft(self) -> HubModel | None:
        """Return the draft model, if one is asked for; raises as :meth:`HubModel.parse` does."""
        if self.draft_repo is None:
            return None
        return HubModel.parse(self.draft_repo, token=self.token, offline=self.offline)


def endpoint() -> str:
    """Return the address of the hub; raise ``InputError`` where ``HF_ENDPOINT`` is no address.

    Called before ``huggingface_hub`` is imported, which raises errors of its own there.
    """
    # Files written elsewhere leave blanks and carriage returns at the ends of lines.
    address = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or _DEFAULT_ENDPOINT
    if not _is_address(address):
        shown_address = without_credentials(printable_line(address))
        raise InputError(f"HF_ENDPOINT is {shown_address}: give an address that begins with https://, or unset it")
    return address


def without_credentials(text: str) -> str:
    """Return a text without the names and passwords of addresses in it."""
    return _CREDENTIALS.sub("", text)


def _is_address(text: str) -> bool:
    if not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # bad brackets, or a bad port
        return False
