"""llama-server's flags and environment variables: those that mean something here, and what becomes of the others.

Whoever starts this server in llama-server's place gives the flags that llama-server had. Flags of the same meaning have
the same names. The others are told apart: some change nothing here and are taken, with a word about it; the rest would
change what the server does, and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.did_you_mean import no_such_option
from paceline.core.errors import InputError
from paceline.environment import from_environment


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag of llama-server that this server does not read.

    Attributes:
        values: how many values follow it.
        why: what there is in its place.
        refused: whether it would change what the server does.
        neutral: values with which it changes nothing after all. Numbers are compared as such.
    """

    values: int
    why: str
    refused: bool = False
    neutral: tuple[str, ...] = ()

    def is_refused(self, values: Sequence[str]) -> bool:
        return self.refused and not (len(values) == 1 and _as_number(values[0]) in map(_as_number, self.neutral))


_ALWAYS: Final = "always so here"
_HISTORY: Final = "n-gram history is kept in memory"
_HUB: Final = "name the model with -m or -hf"
_LOGS: Final = "the log has one line a request"
_MEASURED: Final = "decided by what was measured"
_PLACED: Final = "place tensors with -ot"
_PLANNED: Final = "drafts are as long as pays here"
_POSITIONS: Final = "positions are as the model's file has them"
_REUSED: Final = "beginnings are reused"
_SAMPLER: Final = "there is no such sampler here"
_TEXT: Final = "this server reads and generates text"
_THREADS: Final = "the system places the threads"
_TOOLS: Final = "this server calls no tools"
_WIDE: Final = "passes are as wide as pays here"
_WITH_OTHERS: Final = "it acts with a flag that is not here"


def _taken(values: int, why: str, *names: str) -> dict[str, ForeignFlag]:
    return dict.fromkeys(names, ForeignFlag(values, why))


def _refused(values: int, why: str, *names: str, neutral: Sequence[str] = ()) -> dict[str, ForeignFlag]:
    return dict.fromkeys(names, ForeignFlag(values, why, refused=True, neutral=tuple(neutral)))


FOREIGN: Final[Mapping[str, ForeignFlag]] = {
    # how passes are computed
    **_taken(1, _WIDE, "-b", "--batch-size", "-ub", "--ubatch-size"),
    **_taken(0, _ALWAYS, "-cb", "--cont-batching"),
    **_refused(0, "requests are always answered together", "-nocb", "--no-cont-batching"),
    **_taken(0, _MEASURED, "--mlock", "--no-mmap", "--mmap", "-dio", "--direct-io", "-ndio", "--no-direct-io"),
    **_taken(0, _MEASURED, "--warmup", "--no-warmup", "--swa-full", "--perf", "--no-perf", "--no-host"),
    **_taken(0, _MEASURED, "--repack", "-nr", "--no-repack", "--op-offload", "--no-op-offload", "--check-tensors"),
    **_taken(1, _MEASURED, "-lm", "--load-mode", "-lzm", "--lazy-mode", "-dt", "--defrag-thold"),
    **_taken(1, "memory is as -c and -ngl say", "-fit", "--fit", "-fitt", "--fit-target", "-fitc", "--fit-ctx"),
    **_taken(1, _THREADS, "--prio", "--poll", "--numa", "--prio-batch", "--poll-batch"),
    **_taken(1, _THREADS, "-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict"),
    **_taken(1, _THREADS, "-Cb", "--cpu-mask-batch", "-Crb", "--cpu-range-batch", "--cpu-strict-batch"),
    **_taken(1, _THREADS, "-Cd", "--cpu-mask-draft", "-Crd", "--cpu-range-draft", "--cpu-strict-draft"),
    **_taken(1, _THREADS, "-Cbd", "--cpu-mask-batch-draft", "--cpu-strict-batch-draft"),
    **_taken(1, _THREADS, "--prio-draft", "--poll-draft", "--prio-batch-draft", "--poll-batch-draft"),
    **_taken(1, _THREADS, "--spec-draft-cpu-mask", "--spec-draft-cpu-range", "--spec-draft-cpu-strict"),
    **_taken(1, _THREADS, "--spec-draft-cpu-mask-batch", "--spec-draft-cpu-strict-batch"),
    **_taken(1, _THREADS, "--spec-draft-prio", "--spec-draft-poll", "--spec-draft-prio-batch"),
    **_taken(1, _THREADS, "--spec-draft-poll-batch"),
    **_taken(0, _ALWAYS, "-kvo", "--kv-offload"),
    **_refused(0, "the cache lies where the layers do", "-nkvo", "--no-kv-offload"),
    **_refused(0, _PLACED, "-cmoe", "--cpu-moe"),
    **_refused(1, _PLACED, "-ncmoe", "--n-cpu-moe", "-ncffn", "--n-cpu-ffn", neutral=["0"]),
    **_refused(0, _PLACED, "--spec-draft-cpu-moe", "-cmoed", "--cpu-moe-draft"),
    **_refused(1, _PLACED, "--spec-draft-n-cpu-moe", "--spec-draft-ncmoe", "-ncmoed", "--n-cpu-moe-draft",
               neutral=["0"]),
    **_refused(1, "layers of a draft are placed by -ngld", "--spec-draft-override-tensor", "-otd",
               "--override-tensor-draft"),
    **_refused(1, "layers are dealt out whole", "-sm", "--split-mode", neutral=["layer"]),
    **_refused(1, "layers are dealt out by the room of each device", "-ts", "--tensor-split"),
    **_refused(1, "choose devices with -dev", "-mg", "--main-gpu", neutral=["0"]),
    # what the model is
    **_refused(1, _POSITIONS, "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx", neutral=["0"]),
    **_refused(1, _POSITIONS, "--yarn-ext-factor", "--yarn-attn-factor", "--yarn-beta-slow", "--yarn-beta-fast",
               neutral=["-1"]),
    **_refused(1, _POSITIONS, "--rope-scaling", "--rope-scale"),
    **_refused(1, "the model is what its file says", "--override-kv"),
    **_refused(1, "merge adapters into the model", "--lora", "--lora-scaled", "--control-vector",
               "--control-vector-scaled"),
    **_taken(0, _WITH_OTHERS, "--lora-init-without-apply"),
    **_taken(2, _WITH_OTHERS, "--control-vector-layer-range"),
    **_refused(1, "fetch the file and name it with -m", "-mu", "--model-url"),
    **_refused(1, _HUB, "-dr", "--docker-repo"),
    **_refused(0, _HUB, "--embd-gemma-default", "--fim-qwen-1.5b-default", "--fim-qwen-3b-default",
               "--fim-qwen-7b-default", "--fim-qwen-7b-spec", "--fim-qwen-14b-spec", "--fim-qwen-30b-default",
               "--gpt-oss-20b-default", "--gpt-oss-120b-default", "--vision-gemma-4b-default",
               "--vision-gemma-12b-default"),
    **_refused(1, _TEXT, "--mmproj", "--mmproj-url", "-mm", "-mmu", "--media-path"),
    **_taken(0, _TEXT, "--mmproj-auto", "--no-mmproj", "--no-mmproj-auto", "--mmproj-offload", "--no-mmproj-offload"),
    **_taken(1, _TEXT, "-mmdev", "--mmproj-device", "--image-min-tokens", "--image-max-tokens"),
    **_taken(1, _TEXT, "--mtmd-batch-max-tokens", "--video-fps", "--video-timestamp-interval", "--video-ffmpeg-dir"),
    # how answers are sampled
    **_taken(0, "rows are sampled here", "--backend-sampling", "--backend_sampling", "-bs"),
    **_taken(0, "rows are sampled here", "--spec-draft-backend-sampling", "--no-spec-draft-backend-sampling"),
    **_refused(1, _SAMPLER, "--mirostat", neutral=["0"]),
    **_refused(1, _SAMPLER, "--adaptive-target", neutral=["-1"]),
    **_taken(1, _WITH_OTHERS, "--mirostat-lr", "--mirostat-ent", "--adaptive-decay"),
    **_refused(1, "it is --logit-bias here", "-l"),
    **_refused(1, "it is --stop here", "-r", "--reverse-prompt"),
    **_refused(1, "a request says it by grammar", "--grammar", "--grammar-file"),
    **_refused(1, "a request says it by json_schema", "-j", "--json-schema", "-jf", "--json-schema-file"),
    **_refused(0, "control tokens are not part of an answer's text", "-sp", "--special"),
    **_taken(0, "requests bring their prompts", "-e", "--escape", "--no-escape"),
    **_taken(0, _ALWAYS, "--jinja", "--prefill-assistant", "--no-skip-chat-parsing", "--no-context-shift"),
    **_taken(0, "templates are always rendered", "--no-jinja"),
    **_refused(0, "a request says it by continue_final_message", "--no-prefill-assistant"),
    **_refused(0, "it is --reasoning-format none here", "--skip-chat-parsing"),
    **_refused(0, "the template decides what it shows of earlier reasoning", "--reasoning-preserve",
               "--no-reasoning-preserve"),
    **_refused(0, "answers end where the context is full", "--context-shift"),
    **_taken(1, "the context is never shifted", "--keep"),
    # how answers are sped up
    **_taken(1, "drafters are --drafters", "--spec-type"),
    **_taken(0, "drafting is the default", "--spec-default"),
    **_refused(1, "it is --draft-max here", "--draft-n"),
    **_refused(1, "it is --draft-min here", "--draft-n-min"),
    **_taken(1, _PLANNED, "--spec-draft-p-split", "--draft-p-split", "--spec-ngram-size-n", "--spec-ngram-size-m"),
    **_taken(1, _PLANNED, "--spec-ngram-min-hits", "--spec-ngram-mod-n-min", "--spec-ngram-mod-n-max"),
    **_taken(1, _PLANNED, "--spec-ngram-mod-n-match", "--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m"),
    **_taken(1, _PLANNED, "--spec-ngram-simple-min-hits", "--spec-ngram-map-k-size-n", "--spec-ngram-map-k-size-m"),
    **_taken(1, _PLANNED, "--spec-ngram-map-k-min-hits", "--spec-ngram-map-k4v-size-n"),
    **_taken(1, _PLANNED, "--spec-ngram-map-k4v-size-m", "--spec-ngram-map-k4v-min-hits"),
    **_taken(1, _HISTORY, "-lcs", "--lookup-cache-static", "-lcd", "--lookup-cache-dynamic"),
    **_refused(1, "acceptance is real", "--spec-synth-rates", "--spec-synth-len"),
    # what is kept of prompts
    **_taken(1, _REUSED, "-sps", "--slot-prompt-similarity", "-cms", "--checkpoint-min-step"),
    **_taken(1, "what stands behind a change was read after another text, and would change the answer: beginnings are "
             "reused, and the rest is read", "--cache-reuse"),
    **_taken(1, _REUSED, "-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"),
    **_taken(0, _REUSED, "--cache-prompt", "--no-cache-idle-slots", "--cache-idle-slots"),
    **_refused(0, "a request says it by cache_prompt", "--no-cache-prompt"),
    **_refused(1, "the room of each request is -c divided by -np", "--kv-unified-per-slot"),
    # the server
    **_taken(0, _LOGS, "--log-disable", "--log-verbose", "--log-jsonl", "--no-log-jsonl"),
    **_taken(0, _LOGS, "--log-prefix", "--no-log-prefix", "--log-timestamps", "--no-log-timestamps"),
    **_taken(1, _LOGS, "--log-file", "--log-colors", "-lv", "--verbosity", "--log-verbosity"),
    **_refused(1, "prompts are not logged", "--log-prompts-dir"),
    **_taken(1, "requests share one event loop", "--threads-http"),
    **_taken(1, "those that the routes need", "--cors-methods", "--cors-headers"),
    **_taken(0, "the server reads no cookies", "--cors-credentials", "--no-cors-credentials"),
    **_taken(0, "properties cannot be changed while the server runs", "--props"),
    **_refused(1, "a request says it by sse_ping_interval", "--sse-ping-interval", neutral=["30"]),
    **_refused(0, "a port has one server", "--reuse-port"),
    **_taken(1, "the page has no settings", "--ui-config", "--webui-config", "--ui-config-file",
             "--webui-config-file"),
    **_taken(0, _ALWAYS, "--no-ui-mcp-proxy", "--no-webui-mcp-proxy", "-no-ag", "--no-agent"),
    **_refused(0, _TOOLS, "--ui-mcp-proxy", "--webui-mcp-proxy", "-ag", "--agent"),
    **_refused(1, _TOOLS, "--tools", "--mcp-servers-config", "--mcp-servers-json"),
    **_taken(1, _TOOLS, "--tools-runtime"),
    # other commands
    **_refused(0, "paceline --version says it", "--version"),
    **_refused(0, "paceline models lists them", "-cl", "--cache-list"),
    **_refused(0, "paceline --show-completion prints it", "--completion-bash"),
    **_refused(0, "-dev with a name that is not there names those that are", "--list-devices"),
}  # fmt: skip
"""llama-server's flags that are no options of paceline, by name."""

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
    "LLAMA_ARG_CACHE_TYPE_K": "PACELINE_CACHE_TYPE_K",
    "LLAMA_ARG_CACHE_TYPE_V": "PACELINE_CACHE_TYPE_V",
    "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K": "PACELINE_DRAFT_CACHE_TYPE_K",
    "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V": "PACELINE_DRAFT_CACHE_TYPE_V",
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
    "LLAMA_ARG_STATIC_PATH": "PACELINE_STATIC_PATH",
    "LLAMA_ARG_MODELS_DIR": "PACELINE_MODELS_DIR",
    "LLAMA_ARG_MODELS_PRESET": "PACELINE_MODELS_PRESET",
    "LLAMA_ARG_MODELS_MAX": "PACELINE_MODELS_MAX",
    "LLAMA_ARG_MODELS_AUTOLOAD": "PACELINE_MODELS_AUTOLOAD",
    "LLAMA_ARG_EMBEDDINGS": "PACELINE_EMBEDDING",
    "LLAMA_ARG_RERANKING": "PACELINE_RERANKING",
    "LLAMA_ARG_POOLING": "PACELINE_POOLING",
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

    An error names the variable as llama-server does.
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
    """
    name = word.partition("=")[0]
    return _SHIELD + word if _SEVERAL_LETTERS.fullmatch(name) and name not in known else word


def _as_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text.lower()


def remarks_on(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Return what to say of the words of a command line that no option took, which may be :func:`shielded`.

    Refuses words that are no flag of llama-server either, and flags that would change what the server does.
    """
    remarks = []
    words = [word.removeprefix(_SHIELD) if word.startswith(f"{_SHIELD}-") else word for word in arguments]
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        flag = FOREIGN.get(name)
        if flag is None:
            way_out = "see paceline serve --help-all"
            if not name.startswith("-"):
                raise InputError(f"unexpected argument {word!r}: {way_out}")
            # Its own options first: who slips means one of those.
            raise InputError(no_such_option(name, known, way_out, others=FOREIGN))
        values = [] if equals else words[: flag.values]
        if not equals:
            del words[: flag.values]
        if flag.is_refused([word[len(name) + 1 :]] if equals else values):
            what = " ".join([word, *values]) if flag.neutral else name
            raise InputError(f"{what} is not supported: {flag.why}; leave it out")
        remarks.append(f"{' '.join([word, *values])} changes nothing: {flag.why}")
    return remarks
