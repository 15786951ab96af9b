"""What is asked of a server: the options (fields made by ``setting()``) of ``paceline serve``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final, get_args

from paceline.core.errors import InputError, blame
from paceline.core.fields import Flag, Option, same, setting, take_values
from paceline.embedder import MAX_NORM
from paceline.engines.base import Pooling
from paceline.sizes import parse_bytes

DEFAULT_PARALLEL: Final = 4
"""Requests that are answered at once where nobody says how many, as in llama-server."""

_SERVER = functools.partial(Flag, panel="Server")
_ACCESS = functools.partial(Flag, panel="Access")
_LIMITS = functools.partial(Flag, panel="Limits")
_SEVERAL = functools.partial(Flag, panel="Several models")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where a server listens, whom it answers, what it offers and what it bounds: each as its flag's help says.

    Attributes:
        prefix: path that stands before every route, such as ``"/llm"``.
        alias: names of the model; the first in the alphabet is its id.
        slot_save_path: ``None`` offers no saving.
        static_path: ``None`` is paceline's own page.
        api_key: none asks for none.
        cors_origins: ``"*"`` is any.
        infill_tokens: three quarters before the gap, a quarter behind; half of the context where that has no more.
        embedding: a model that was made for it turns texts into vectors in any case.
        pooling: ``None`` is what the model was made for.
        kv_unified: ``None`` is yes where the number of requests is not given.
        max_waiting: more requests of one API key are told to come again.
        request_s: seconds, the wait for the start included.
        models_dir: each model is loaded in a process of its own.
        models_memory: bytes, or a size such as ``"12G"``; ``None`` for what is free.
    """

    host: tuple[str, ...] = setting(
        ("127.0.0.1",),
        Option("texts", separator=","),
        _SERVER("--host", "Addresses to listen on, comma-separated. [dim]\\[127.0.0.1][/dim]", metavar="HOST[,...]"),
    )
    port: int = setting(
        8080,
        Option("whole", low=0, high=65535, way_out="0 takes a free one"),
        _SERVER("--port", "TCP port; 0 takes a free one."),
    )
    prefix: str = setting(
        "",
        Option("other", variable="API_PREFIX"),
        _SERVER("--api-prefix", "Path prefix of all routes.", metavar="PATH"),
    )
    alias: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _SERVER(
            "-a --alias",
            "Names of the model for clients, comma-separated. [dim]\\[that of its file][/dim]",
            metavar="NAME[,...]",
        ),
    )
    tags: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _SERVER("--tags", "Tags of the model for clients, comma-separated.", metavar="TAG[,...]"),
    )
    slots: bool = setting(True, Option("truth"), _SERVER("--slots/--no-slots", "Enable /slots."))
    slot_save_path: str | None = setting(
        None,
        Option("other", optional=True),
        _SERVER(
            "--slot-save-path",
            "Folder in which clients save and restore slots by /slots/0?action=save.",
            metavar="FOLDER",
        ),
    )
    metrics: bool = setting(False, Option("truth"), _SERVER("--metrics", "Enable /metrics, in Prometheus' format."))
    ui: bool = setting(True, Option("truth"), _SERVER("--ui/--no-ui --webui/--no-webui", "Serve the web page at /."))
    static_path: str | None = setting(
        None,
        Option("other", optional=True),
        _SERVER(
            "--path", "Folder of another web page to serve at /, such as llama.cpp's web interface.", metavar="FOLDER"
        ),
    )
    api_key: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _ACCESS("--api-key", "API keys, comma-separated; a request has to bring one of them.", metavar="KEY[,...]"),
    )
    api_key_file: str | None = setting(
        None,
        Option("other", optional=True),
        _ACCESS("--api-key-file", "File with API keys, one per line.", metavar="FILE"),
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _ACCESS(
            "--cors-origins",
            "Web origins whose pages may call the server, comma-separated; * for any, localhost for this machine's.",
            metavar="ORIGIN[,...]",
        ),
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _ACCESS(
            "--allowed-hosts",
            "Additional host names by which clients may reach the server, comma-separated.",
            metavar="NAME[,...]",
        ),
    )
    ssl_key_file: str | None = setting(
        None, Option("other", optional=True), _ACCESS("--ssl-key-file", "Private key for TLS, in PEM.", metavar="FILE")
    )
    ssl_cert_file: str | None = setting(
        None, Option("other", optional=True), _ACCESS("--ssl-cert-file", "Certificate for TLS, in PEM.", metavar="FILE")
    )
    infill_tokens: int = setting(
        2048,
        Option("whole", low=16),
        _SERVER("--infill-tokens", "Maximum tokens around a gap that /infill reads."),
    )
    spm_infill: bool = setting(
        False, Option("truth"), _SERVER("--spm-infill", "Put the suffix before the prefix in prompts of /infill.")
    )
    embedding: bool = setting(
        False,
        Option("truth"),
        _SERVER("--embedding --embeddings", "Serve embeddings; models made to generate text can do it, too."),
    )
    reranking: bool = setting(
        False,
        Option("truth"),
        _SERVER("--reranking --rerank", "Serve reranking: sort documents by how well they answer a query."),
    )
    pooling: Pooling | None = setting(
        None,
        Option("choice", optional=True, words=same(get_args(Pooling))),
        _SERVER("--pooling", "How token vectors are combined into one. [dim]\\[as the model was made][/dim]"),
    )
    embd_normalize: int = setting(
        2,
        Option("whole", low=-1, high=MAX_NORM, way_out="-1 leaves vectors as they are"),
        _SERVER("--embd-normalize", "Norm of embeddings: -1 none, 0 largest absolute number, 1 taxicab, 2 Euclidean."),
    )
    strict_fields: bool = setting(
        False,
        Option("truth"),
        _LIMITS("--strict-fields", "Reject unknown fields; by default they are listed under `warnings`."),
    )
    kv_unified: bool | None = setting(
        None,
        Option("truth", optional=True),
        _LIMITS(
            "--kv-unified/--no-kv-unified -kvu/-no-kvu",
            "Share one cache of -c tokens among all requests; otherwise each has an equal part. [dim]\\[on"
            " where -np is not given][/dim]",
        ),
    )
    max_waiting: int = setting(
        256,
        Option("whole", low=0),
        _LIMITS("--max-waiting", "Maximum queued requests of each API key."),
    )
    max_choices: int = setting(16, Option("whole", low=1), _LIMITS("--max-n", "Maximum answers of a request (n)."))
    max_stop: int = setting(64, Option("whole", low=0), _LIMITS("--max-stop", "Maximum stop texts of a request."))
    max_answer_logprobs: int = setting(
        6_000_000,
        Option("whole", low=1),
        _LIMITS("--max-answer-logprobs", "Maximum log-probabilities in the answers of a request."),
    )
    max_body: int = setting(16, Option("whole", low=1), _LIMITS("--max-body", "Maximum size of a request, in MiB."))
    request_s: float = setting(
        0.0,
        Option("real", low=0.0, way_out="0 is no limit"),
        _LIMITS("--max-seconds", "Time limit of an answer, in seconds; 0 for none."),
    )
    read_s: float = setting(
        600.0,
        Option("real", low=0.0, low_excluded=True),
        _LIMITS("--timeout -to", "Seconds in which a request has to arrive, and a client has to read what was sent."),
    )
    grace_s: float = setting(
        10.0,
        Option("real", low=0.0),
        _LIMITS("--grace", "Seconds that running answers have left once the server is told to stop."),
    )
    prompt_cache_mib: int = setting(
        512,
        Option("whole", low=0, way_out="0 keeps nothing"),
        _LIMITS("--cache-ram -cram", "Host memory for the prompt cache, in MiB; 0 turns it off."),
    )
    sleep_idle_s: float = setting(
        -1.0,
        Option("real", low=-1.0, way_out="-1 is never"),
        _LIMITS(
            "--sleep-idle-seconds",
            "Unload the model after this many seconds without a request; -1 for never.",
        ),
    )
    models_dir: str | None = setting(
        None,
        Option("other", optional=True),
        _SEVERAL("--models-dir", "Folder of models, each loaded when a request names it.", metavar="DIR"),
    )
    models_preset: str | None = setting(
        None,
        Option("other", optional=True),
        _SEVERAL("--models-preset", "INI file of models, with options for each.", metavar="FILE"),
    )
    models_max: int = setting(
        4,
        Option("whole", low=0, way_out="0 is no limit"),
        _SEVERAL("--models-max", "Maximum number of models loaded at once; 0 for no limit."),
    )
    models_memory: int | str | None = setting(
        None,
        Option("other", optional=True),
        _SEVERAL(
            "--models-memory",
            "Memory limit of all models together, such as 12G. [dim]\\[what is free][/dim]",
            metavar="SIZE",
        ),
    )
    models_autoload: bool = setting(
        True,
        Option("truth"),
        _SEVERAL(
            "--models-autoload/--no-models-autoload",
            "Load the model that a request names; otherwise POST /models/load does.",
        ),
    )
    models_wait_s: float = setting(
        30.0,
        Option("real", low=0.0),
        _SEVERAL("--models-wait", "Seconds that a request for another model may wait until a busy one makes room."),
    )

    def __post_init__(self) -> None:
        take_values(self)
        if self.reranking and self.pooling not in (None, "rank"):
            raise InputError(
                f"`pooling` {self.pooling} gives no scores, and `reranking` asks for them: leave out one of them",
                field="pooling",
            )
        if not self.host:
            raise InputError("no address to listen on: give one with `host`, such as 127.0.0.1", field="host")
        object.__setattr__(self, "prefix", self.prefix.rstrip("/"))
        if self.prefix and (not self.prefix.startswith("/") or set("{}?# ") & set(self.prefix)):
            raise InputError(
                f"`prefix` {self.prefix!r} is not a path: begin it with /, without {{}}?# and spaces", field="prefix"
            )
        if -1 < self.sleep_idle_s <= 0:
            raise InputError(
                f"`sleep_idle_s` is {self.sleep_idle_s:g}: give seconds above 0, or -1 for never", field="sleep_idle_s"
            )
        with blame("models_memory"):
            if self.models_bytes is not None and self.models_bytes < 1:
                raise InputError("`models_memory` is 0: give a size such as 12G, or leave it out")

    @property
    def models_bytes(self) -> int | None:
        """Bytes that all models may hold together."""
        return parse_bytes(self.models_memory) if isinstance(self.models_memory, str) else self.models_memory

    @property
    def has_tls(self) -> bool:
        """Whether clients speak TLS."""
        return self.ssl_key_file is not None
