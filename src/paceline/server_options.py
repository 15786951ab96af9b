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
        _SERVER("--host", "Addresses to listen on, with commas. [dim]\\[127.0.0.1][/dim]", metavar="HOST[,...]"),
    )
    port: int = setting(
        8080,
        Option("whole", low=0, high=65535, way_out="0 takes a free one"),
        _SERVER("--port", "TCP port; 0 takes a free one."),
    )
    prefix: str = setting(
        "",
        Option("other", variable="API_PREFIX"),
        _SERVER("--api-prefix", "Path that stands before every route.", metavar="PATH"),
    )
    alias: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _SERVER(
            "-a --alias",
            "Names of the model for clients, with commas. [dim]\\[that of its file][/dim]",
            metavar="NAME[,...]",
        ),
    )
    tags: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _SERVER("--tags", "Words about the model for clients, with commas.", metavar="TAG[,...]"),
    )
    slots: bool = setting(True, Option("truth"), _SERVER("--slots/--no-slots", "Offer /slots."))
    slot_save_path: str | None = setting(
        None,
        Option("other", optional=True),
        _SERVER(
            "--slot-save-path", "Folder for what clients save by /slots/0?action=save, and restore.", metavar="FOLDER"
        ),
    )
    metrics: bool = setting(False, Option("truth"), _SERVER("--metrics", "Offer /metrics, in Prometheus' format."))
    ui: bool = setting(True, Option("truth"), _SERVER("--ui/--no-ui --webui/--no-webui", "Show a page at /."))
    api_key: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _ACCESS("--api-key", "Keys, one of which a request has to bring, with commas.", metavar="KEY[,...]"),
    )
    api_key_file: str | None = setting(
        None,
        Option("other", optional=True),
        _ACCESS("--api-key-file", "A file with such keys, one a line.", metavar="FILE"),
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _ACCESS(
            "--cors-origins",
            "Web origins whose pages may ask, with commas; * is any, localhost is this machine's.",
            metavar="ORIGIN[,...]",
        ),
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _ACCESS(
            "--allowed-hosts", "Further names under which clients know this server, with commas.", metavar="NAME[,...]"
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
        _SERVER("--infill-tokens", "Most tokens around a gap that /infill has the model read."),
    )
    spm_infill: bool = setting(
        False, Option("truth"), _SERVER("--spm-infill", "Have /infill put what is behind a gap first.")
    )
    embedding: bool = setting(
        False,
        Option("truth"),
        _SERVER("--embedding --embeddings", "Turn texts into vectors, by a model that was made to write some, too."),
    )
    reranking: bool = setting(
        False, Option("truth"), _SERVER("--reranking --rerank", "Put documents in the order of what a query asks for.")
    )
    pooling: Pooling | None = setting(
        None,
        Option("choice", optional=True, words=same(get_args(Pooling))),
        _SERVER("--pooling", "How a text's vectors become one. [dim]\\[as the model was made][/dim]"),
    )
    embd_normalize: int = setting(
        2,
        Option("whole", low=-1, high=MAX_NORM, way_out="-1 leaves vectors as they are"),
        _SERVER("--embd-normalize", "Norm of vectors: -1 none, 0 largest number, 1 taxicab, 2 Euclidean."),
    )
    strict_fields: bool = setting(
        False,
        Option("truth"),
        _LIMITS(
            "--strict-fields", "Refuse requests with fields that nobody knows; else the answer's warnings name these."
        ),
    )
    kv_unified: bool | None = setting(
        None,
        Option("truth", optional=True),
        _LIMITS(
            "--kv-unified/--no-kv-unified -kvu/-no-kvu",
            "Let each request have the whole of -c, in room that all share; else each has its part. "
            "[dim]\\[on where -np is not given][/dim]",
        ),
    )
    max_waiting: int = setting(
        256,
        Option("whole", low=0),
        _LIMITS("--max-waiting", "Requests that may wait for their start, for each API key."),
    )
    max_choices: int = setting(16, Option("whole", low=1), _LIMITS("--max-n", "Answers that one request may ask for."))
    max_stop: int = setting(64, Option("whole", low=0), _LIMITS("--max-stop", "Stop texts of one request."))
    max_answer_logprobs: int = setting(
        6_000_000,
        Option("whole", low=1),
        _LIMITS("--max-answer-logprobs", "Log-probabilities that the answers of one request may come to."),
    )
    max_body: int = setting(16, Option("whole", low=1), _LIMITS("--max-body", "Size of a request, in MiB."))
    request_s: float = setting(
        0.0,
        Option("real", low=0.0, way_out="0 is no limit"),
        _LIMITS("--max-seconds", "Seconds after which an answer ends where it is; 0 is no limit."),
    )
    read_s: float = setting(
        600.0,
        Option("real", low=0.0, low_excluded=True),
        _LIMITS(
            "--timeout -to", "Seconds in which a request has to arrive, and a reader has to take what was written."
        ),
    )
    grace_s: float = setting(
        10.0,
        Option("real", low=0.0),
        _LIMITS("--grace", "Seconds that running answers have left once the server is told to stop."),
    )
    prompt_cache_mib: int = setting(
        512,
        Option("whole", low=0, way_out="0 keeps nothing"),
        _LIMITS("--cache-ram -cram", "Host memory for what was read and said, in MiB; 0 keeps nothing."),
    )
    sleep_idle_s: float = setting(
        -1.0,
        Option("real", low=-1.0, way_out="-1 is never"),
        _LIMITS(
            "--sleep-idle-seconds",
            "Seconds without a request after which the model is freed until the next one; -1 is never.",
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
        _SEVERAL("--models-preset", "INI file with such models, and options of each.", metavar="FILE"),
    )
    models_max: int = setting(
        4,
        Option("whole", low=0, way_out="0 is no limit"),
        _SEVERAL("--models-max", "Models that are loaded at once; 0 is no limit."),
    )
    models_memory: int | str | None = setting(
        None,
        Option("other", optional=True),
        _SEVERAL(
            "--models-memory",
            "Memory of all models together, such as 12G. [dim]\\[what is free][/dim]",
            metavar="SIZE",
        ),
    )
    models_autoload: bool = setting(
        True,
        Option("truth"),
        _SEVERAL(
            "--models-autoload/--no-models-autoload",
            "Load the model that a request names; else POST /models/load does.",
        ),
    )
    models_wait_s: float = setting(
        30.0,
        Option("real", low=0.0),
        _SEVERAL(
            "--models-wait", "Seconds for which a model in use may keep waiting what asks for one that has no room."
        ),
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
                f"`prefix` {self.prefix!r} is no path: begin it with /, without {{}}?# and spaces", field="prefix"
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
