"""llama-server's flags and environment variables: those that mean something here, and what becomes of the others.

Whoever starts this server in llama-server's place gives the flags that llama-server had. Flags of the same meaning have
the same names. The others are told apart: some change nothing here and are taken, with a word about it; the rest would
change what the server does, and are refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import InputError
from paceline.options import from_environment


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag of llama-server that this server does not read.

    Attributes:
        values: how many values follow it.
        why: what there is in its place.
        refused: whether it would change what the server does.
    """

    values: int
    why: str
    refused: bool = False


_PLANNED = "passes are as wide as pays here"
_ALWAYS = "always so here"
_LOGS = "the log has one line a request"

FOREIGN: Final[Mapping[str, ForeignFlag]] = {
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), ForeignFlag(1, _PLANNED)),
    **dict.fromkeys(("-cb", "--cont-batching", "--jinja"), ForeignFlag(0, _ALWAYS)),
    "--no-jinja": ForeignFlag(0, "templates are always rendered"),
    **dict.fromkeys(
        ("--mlock", "--no-mmap", "--mmap", "--no-warmup", "--warmup", "--swa-full", "--no-perf"),
        ForeignFlag(0, "decided by what was measured"),
    ),
    **dict.fromkeys(("--log-disable", "--log-colors", "--log-prefix", "--log-timestamps"), ForeignFlag(0, _LOGS)),
    **dict.fromkeys(("--log-file", "-lv", "--verbosity", "--log-verbosity"), ForeignFlag(1, _LOGS)),
    **dict.fromkeys(("--threads-http", "--prio", "--poll", "--numa"), ForeignFlag(1, "requests share one event loop")),
    **dict.fromkeys(("--backend-sampling", "--backend_sampling", "-bs"), ForeignFlag(0, "rows are sampled here")),
    **dict.fromkeys(("--cache-reuse", "-sps", "--slot-prompt-similarity"), ForeignFlag(1, "beginnings are reused")),
    **dict.fromkeys(("--no-cache-idle-slots", "--cache-idle-slots"), ForeignFlag(0, "beginnings are reused")),
    **dict.fromkeys(("--cors-methods", "--cors-headers"), ForeignFlag(1, "those that the routes need")),
    **dict.fromkeys(("--cors-credentials", "--no-cors-credentials"), ForeignFlag(0, "the server reads no cookies")),
    "--no-context-shift": ForeignFlag(0, _ALWAYS),
    "--keep": ForeignFlag(1, "the context is never shifted"),
    "--props": ForeignFlag(0, "properties cannot be changed while the server runs"),
    "--spec-type": ForeignFlag(1, "drafters are --drafters"),
    "--spec-default": ForeignFlag(0, "drafting is the default"),
    "--tools-runtime": ForeignFlag(1, "there are no tools"),
    # what would change the answers
    "--context-shift": ForeignFlag(0, "answers end where the context is full", refused=True),
    **dict.fromkeys(
        ("--lora", "--control-vector"), ForeignFlag(1, "merge adapters into the model", refused=True)
    ),
    "--lora-scaled": ForeignFlag(2, "merge adapters into the model", refused=True),
    **dict.fromkeys(("--mmproj", "--mmproj-url", "-mm"), ForeignFlag(1, "this server reads text", refused=True)),
    **dict.fromkeys(
        ("--embedding", "--embeddings", "--rerank", "--reranking"),
        ForeignFlag(0, "this server generates text", refused=True),
    ),
    **dict.fromkeys(("--grammar", "--grammar-file", "-j", "--json-schema"), ForeignFlag(1, "not yet", refused=True)),
    **dict.fromkeys(("--spec-synth-rates", "--spec-synth-len"), ForeignFlag(1, "acceptance is real", refused=True)),
    **dict.fromkeys(("--models-dir", "--models-preset"), ForeignFlag(1, "this server has one model", refused=True)),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"),
                    ForeignFlag(1, "the cache is F16", refused=True)),
    "--slot-save-path": ForeignFlag(1, "what was read is kept in memory (--cache-ram)", refused=True),
    "--sleep-idle-seconds": ForeignFlag(1, "the model stays loaded", refused=True),
    "--tools": ForeignFlag(1, "this server calls no tools", refused=True),
    "--path": ForeignFlag(1, "this server serves no files", refused=True),
}  # fmt: skip
"""By name."""

VARIABLES: Final[Mapping[str, str]] = {
    "LLAMA_ARG_MODEL": "PACELINE_MODEL",
    "LLAMA_ARG_MODEL_DRAFT": "PACELINE_DRAFT_MODEL",
    "LLAMA_ARG_SPEC_DRAFT_MODEL": "PACELINE_DRAFT_MODEL",
    "LLAMA_ARG_HF_REPO": "PACELINE_HF_REPO",
    "LLAMA_ARG_HF_FILE": "PACELINE_HF_FILE",
    "LLAMA_ARG_CTX_SIZE": "PACELINE_CONTEXT_LENGTH",
    "LLAMA_ARG_CTX_SIZE_DRAFT": "PACELINE_DRAFT_CONTEXT_LENGTH",
    "LLAMA_ARG_N_PARALLEL": "PACELINE_MAX_SEQUENCES",
    "LLAMA_ARG_N_PREDICT": "PACELINE_MAX_TOKENS",
    "LLAMA_ARG_N_GPU_LAYERS": "PACELINE_GPU_LAYERS",
    "LLAMA_ARG_N_GPU_LAYERS_DRAFT": "PACELINE_DRAFT_GPU_LAYERS",
    "LLAMA_ARG_DEVICE": "PACELINE_DEVICES",
    "LLAMA_ARG_THREADS": "PACELINE_THREADS",
    "LLAMA_ARG_THREADS_BATCH": "PACELINE_THREADS_BATCH",
    "LLAMA_ARG_FLASH_ATTN": "PACELINE_FLASH_ATTENTION",
    "LLAMA_ARG_HOST": "PACELINE_HOST",
    "LLAMA_ARG_PORT": "PACELINE_PORT",
    "LLAMA_ARG_API_PREFIX": "PACELINE_API_PREFIX",
    "LLAMA_ARG_ALIAS": "PACELINE_ALIAS",
    "LLAMA_ARG_TAGS": "PACELINE_TAGS",
    "LLAMA_API_KEY": "PACELINE_API_KEY",
    "LLAMA_ARG_API_KEY_FILE": "PACELINE_API_KEY_FILE",
    "LLAMA_ARG_CORS_ORIGINS": "PACELINE_CORS_ORIGINS",
    "LLAMA_ARG_SSL_KEY_FILE": "PACELINE_SSL_KEY_FILE",
    "LLAMA_ARG_SSL_CERT_FILE": "PACELINE_SSL_CERT_FILE",
    "LLAMA_ARG_TIMEOUT": "PACELINE_READ_S",
    "LLAMA_ARG_ENDPOINT_SLOTS": "PACELINE_SLOTS",
    "LLAMA_ARG_ENDPOINT_METRICS": "PACELINE_METRICS",
    "LLAMA_ARG_UI": "PACELINE_UI",
    "LLAMA_ARG_KV_UNIFIED": "PACELINE_KV_UNIFIED",
    "LLAMA_ARG_CACHE_RAM": "PACELINE_PROMPT_CACHE_MIB",
    "LLAMA_ARG_CHAT_TEMPLATE": "PACELINE_CHAT_TEMPLATE",
    "LLAMA_ARG_CHAT_TEMPLATE_FILE": "PACELINE_CHAT_TEMPLATE_FILE",
    "LLAMA_CHAT_TEMPLATE_KWARGS": "PACELINE_CHAT_TEMPLATE_KWARGS",
    "LLAMA_ARG_REASONING": "PACELINE_REASONING",
    "LLAMA_ARG_REASONING_FORMAT": "PACELINE_REASONING_FORMAT",
    "LLAMA_ARG_THINK": "PACELINE_REASONING_FORMAT",
    "LLAMA_ARG_THINK_BUDGET": "PACELINE_REASONING_BUDGET",
}
"""llama-server's environment variables, by ours of the same meaning."""


def with_llama_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with llama-server's under our names, where ours do not say it.

    Raises:
        InputError: one of them cannot be used; the message names it as llama-server does.
    """
    found = dict(variables)
    for theirs, ours in VARIABLES.items():
        text = variables.get(theirs)
        if text and not found.get(ours):
            try:
                from_environment({ours: text})
            except InputError as error:
                raise InputError(str(error).replace(ours, theirs, 1)) from None
            found[ours] = text
    return found


_SHIELD: Final = "--"
"""Stands before a flag that would be taken for another one and its value; see :func:`shielded`."""

_SEVERAL_LETTERS: Final = re.compile(r"-[A-Za-z][A-Za-z_-]+")


def shielded(word: str, known: Collection[str]) -> str:
    """Return a word of a command line as one that no parser takes for a flag of one letter with its value.

    llama-server has flags such as ``-cb``, which others read as ``-c`` with the value ``b``.

    Args:
        word: of the command line.
        known: names of the options that there are.
    """
    name = word.partition("=")[0]
    return _SHIELD + word if _SEVERAL_LETTERS.fullmatch(name) and name not in known else word


def remarks_on(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Return what to say of the words of a command line that no option took.

    Args:
        arguments: those words, which may be :func:`shielded`.
        known: names of the options that there are, for hints at a slip.

    Raises:
        InputError: a word is no flag of llama-server either, or one that would change what the server does.
    """
    remarks = []
    words = [word.removeprefix(_SHIELD) if word.startswith(f"{_SHIELD}-") else word for word in arguments]
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        flag = FOREIGN.get(name)
        if flag is None:
            # Its own options first: who slips means one of those.
            near = [
                *difflib.get_close_matches(name, known, n=1, cutoff=0.8),
                *difflib.get_close_matches(name, FOREIGN, n=1, cutoff=0.8),
            ]
            hint = f"did you mean {near[0]}?" if near else "see paceline serve --help"
            what = f"there is no option {name}" if name.startswith("-") else f"{word!r} belongs to no option"
            raise InputError(f"{what}: {hint}")
        values = [] if equals else words[: flag.values]
        if not equals:
            del words[: flag.values]
        if flag.refused:
            raise InputError(f"{name} is not supported: {flag.why}; leave it out")
        remarks.append(f"{' '.join([word, *values])} changes nothing: {flag.why}")
    return remarks
