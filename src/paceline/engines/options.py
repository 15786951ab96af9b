"""What can be set about a model, whichever engine runs it: the options (fields made by ``setting()``) of models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypedDict, get_args

from paceline.core.errors import CapabilityError, InputError, ModelFileError, blame
from paceline.core.fields import Flag, Option, described, same, setting, take_values
from paceline.engines.memory import NO_OTHER_MEMORY, OtherMemory
from paceline.models.description import describe
from paceline.models.registry import MTP_DRAFT, names_own_draft
from paceline.models.weight_files import check_model_folder
from paceline.sizes import parse_bytes
from paceline.vocabularies.token_pairs import DRAFT_VOCABS, DraftVocab, check_pairs

DType: TypeAlias = Literal["float32", "float16", "bfloat16"]
EngineName: TypeAlias = Literal["llama_cpp", "torch_hf"]
ENGINE_NAMES: tuple[EngineName, ...] = get_args(EngineName)
"""Every :data:`EngineName`."""
DTYPES: tuple[DType, ...] = get_args(DType)
"""Every :data:`DType`."""
CacheType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
CACHE_TYPES: tuple[CacheType, ...] = get_args(CacheType)
"""Every :data:`CacheType`."""

DEFAULT_BRANCHES = 8
"""Tree branches of an engine whose policy does not say how many it may want."""

MAX_BRANCHES = 192
"""Most tree branches asked of an engine by default; llama.cpp has 256 sequence ids in all."""

_MIN_DRAFT_CONTEXT: Final = 2
_INT32_MAX: Final = 2**31 - 1

_MODELS = functools.partial(Flag, panel="Models")
_SAMPLING = functools.partial(Flag, panel="Sampling")
_OUTPUT = functools.partial(Flag, panel="Prompt and output")


_OPTIONS: Final[Mapping[str, str]] = {
    "context_length": "`context_length` (`DraftOptions.context_length` of a draft model)",
    "max_sequences": "`max_sequences`",
    "gpu_layers": "`gpu_layers` (`DraftOptions.gpu_layers` of a draft model)",
    "threads": "`threads` (`DraftOptions.threads` of a draft model)",
    "threads_batch": "`threads_batch` (`DraftOptions.threads_batch` of a draft model)",
}
_WAYS_OUT: Final[Mapping[str, str]] = {
    "context_length": (
        "give a number of tokens, or None for as much of the model's own as fits (0 on the command line for all of it)"
    ),
}


def check_range(name: str, value: int | None, lowest: int, highest: int) -> None:
    """Raise ``InputError`` if a setting is out of range, by the name of its option.

    ``None`` leaves the choice to the engine.
    """
    if value is None or lowest <= value <= highest:
        return
    setting = _OPTIONS.get(name, name)
    way_out = _WAYS_OUT.get(name, "choose a value in between")
    raise InputError(f"{setting} is {value}, but must be from {lowest} to {highest}; {way_out}", field=name)


def _parse_overrides(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    overrides = []
    for text in texts:
        pattern, equals, buffer = text.rpartition("=")
        if not (pattern and equals and buffer):
            raise InputError(f"`override_tensors` {text!r} is not PATTERN=BUFFER, such as exps=CPU")
        overrides.append((pattern, buffer))
    return tuple(overrides)


LOCAL: Final = ("local",)
"""Stands for this machine among the fallbacks of lost workers."""

OUTPUT_STATE: Final = -1
"""Stands among the numbers of layers for the output layer."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """A model and how to run it, in terms common to the engines.

    Attributes:
        path: a GGUF file or a Hugging Face folder; :func:`paceline.load` also takes the names of `paceline models`.
        engine: which engine runs it; ``None`` decides by ``path``.
        context_length: tokens of prompt and answer together; ``None`` takes the model's own, halved until keys and
            values take a third of the memory besides the weights. Under ``torch_hf`` it takes 4,096 at most.
        context_may_shrink: take what the model was made for where ``context_length`` is more, instead of refusing it;
            a draft model then sees the end of the text only, and the answer stays the same.
        gpu_layers: layers to put on GPUs; -1 for all. Only ``llama_cpp``.
        devices: devices to use, by the engine's names; empty for all there are.
        override_tensors: (pattern, buffer type) pairs that place single tensors. Only ``llama_cpp``.
        rpc: workers on other machines (``paceline rpc-worker``) to put layers on, each as ``"host:port"``. Only
            ``llama_cpp``.
        rpc_fallback: where to go on when a worker is lost: other workers, or ``("local",)`` for none; empty to end
            with an error.
        threads: CPU threads for passes of one row; ``None`` for one a core, and fewer while others use the cores.
        threads_batch: CPU threads for wider passes; ``None`` for the same. Only ``llama_cpp``.
        flash_attention: whether attention is one fused kernel; ``None`` is llama.cpp's choice on devices, and on a CPU
            what :func:`paceline.load` measures to be faster (:mod:`paceline.planning.costs.attention`). Only
            ``llama_cpp``.
        cache_type_k: type of the cache's keys; ``None`` is ``"f16"``. Quantised ones take fused attention. Only
            ``llama_cpp``.
        cache_type_v: type of the cache's values; ``None`` is ``"f16"``, and ``"bf16"`` where texts are exact. Quantised
            ones take fused attention. Only ``llama_cpp``.
        exact: arithmetic that does not depend on how many rows a pass has, so that rounding turns no near-ties and a
            request gets the text that it has by itself with plain decoding and the same; see there. Several at once
            have a whole context each, and passes of their own. Only ``llama_cpp``.
        max_sequences: requests the engine holds at once.
        cells: tokens that all of them may hold together; ``None`` for a whole context each, or where no
            ``context_length`` is given for one context, and 4,096 tokens each at least. Where they are fewer than
            requests hold, one may lose its place for a while, and goes on with the same text.
        branches: tree branches it holds at once, over all requests; ``None`` for what the policy can ask for. Only
            ``llama_cpp``; ``torch_hf`` has no limit.
        memory: bytes, or a size such as ``"12G"``, of all that the process holds: layers that do not fit are read while
            they are used (:mod:`paceline.engines.streaming`); ``None`` for what is free, where the weights alone are
            more than that. Only ``llama_cpp``, on a CPU under Linux.
        stream: ``False`` leaves it to the system to read weights that do not fit.
        rollback: whether tokens must be taken back, as verifying drafts needs; without, recurrent models run too.
        dtype: weights' type, such as ``"float32"``; ``None`` takes the model's own. Only ``torch_hf``.
        model_defaults: whether what the model says about how it is to be sampled stands where a request does not say it
            (:mod:`paceline.models.sampling_defaults`).
        hold_states: which states of the latest tokens are kept, for heads to draft from: what layers of these numbers
            read, and :data:`OUTPUT_STATE` for what the output layer does. Where that is among them, an MTP layer of the
            file is loaded, too. Under ``torch_hf`` the number of layers stands for what the last of them puts out.
        verbose: let the engine print what it has to say.
        other_memory: what else the process is to hold of ``memory``. Only ``llama_cpp``.
        rows_read: of a model that only drafts, most rows of a pass whose logits are read; passes are no wider than
            reading a prompt takes then. ``None`` is for a target. Only ``llama_cpp``, on a CPU.
        own_weights: weights are copied to memory of the process, from which nothing else can push them out. Under
            ``torch_hf`` they always are.
        repack: weights may be laid out anew for faster kernels, in memory of the process. Only ``llama_cpp``.
        draft_vocab: of a draft model, :attr:`DraftOptions.vocab`.
        draft_map: of a draft model, :attr:`DraftOptions.token_map`.
    """

    path: str | Path = field(
        metadata=described(
            Option("other", variable="MODEL"),
            _MODELS(
                "-m --model",
                "Target model: a GGUF file, a Hugging Face folder, or a name from paceline models. "
                "[dim]\\[embedded pair][/dim]",
                metavar="MODEL",
            ),
        )
    )
    engine: EngineName | None = setting(
        None,
        Option("choice", optional=True, words=same(ENGINE_NAMES)),
        _MODELS("--engine", "Engine for both models. [dim]\\[by file][/dim]"),
    )
    context_length: int | None = setting(
        None,
        Option("whole", optional=True, kilo=1024),
        _MODELS(
            "-c --ctx-size",
            "Context size of the target in tokens, such as 8192 or 32k; 0 for all it was made for. "
            "[dim]\\[as much of that as fits][/dim]",
        ),
    )
    context_may_shrink: bool = False
    gpu_layers: int = setting(
        -1,
        Option("whole"),
        _MODELS("-ngl --gpu-layers --n-gpu-layers", "Layers of the target to put on GPUs; -1 for all."),
    )
    devices: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _MODELS("-dev --device", "Devices for the target, comma-separated; 'none' is the CPU.", metavar="DEV[,...]"),
    )
    override_tensors: tuple[tuple[str, str], ...] = setting(
        (),
        Option("other", parse=_parse_overrides, separator=","),
        _MODELS(
            "-ot --override-tensor",
            "Put tensors of the target whose names match a pattern into a buffer type.",
            repeated=True,
            metavar="PATTERN=BUFFER[,...]",
        ),
    )
    rpc: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _MODELS(
            "--rpc",
            "Put layers of the target on other machines, each running paceline rpc-worker.",
            metavar="HOST:PORT[,...]",
        ),
    )
    rpc_fallback: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _MODELS(
            "--rpc-fallback",
            "Where to continue when a worker is lost: local, or other workers. [dim]\\[nowhere: an error][/dim]",
            metavar="local|HOST:PORT[,...]",
        ),
    )
    threads: int | None = setting(
        None,
        Option("whole", optional=True),
        _MODELS(
            "-t --threads",
            "CPU threads for single-token passes. [dim]\\[one for each core that other processes leave][/dim]",
        ),
    )
    threads_batch: int | None = setting(
        None,
        Option("whole", optional=True),
        _MODELS("-tb --threads-batch", "CPU threads for wider passes. [dim]\\[as -t][/dim]"),
    )
    flash_attention: bool | None = setting(
        None,
        Option("other", words={"on": True, "off": False, "auto": None}),
        _MODELS(
            "-fa --flash-attn", "Flash attention; on a CPU, auto measures which is faster when a model is first loaded."
        ),
    )
    cache_type_k: CacheType | None = setting(
        None,
        Option("choice", optional=True, words=same(CACHE_TYPES)),
        _MODELS(
            "-ctk --cache-type-k",
            f"KV cache type for keys: {', '.join(CACHE_TYPES)}; quantised types need -fa. [dim]\\[f16][/dim]",
            metavar="TYPE",
        ),
    )
    cache_type_v: CacheType | None = setting(
        None,
        Option("choice", optional=True, words=same(CACHE_TYPES)),
        _MODELS(
            "-ctv --cache-type-v",
            "KV cache type for values, as -ctk. [dim]\\[f16][/dim]",
            metavar="TYPE",
        ),
    )
    exact: bool = setting(
        False,
        Option("truth"),
        _MODELS(
            "--exact",
            "Arithmetic that does not depend on how many tokens a pass verifies: the text is exactly that"
            " of --exact without drafts. llama.cpp on a CPU only, weights in Q4_0, Q8_0 and the like; "
            "drafts are chains.",
        ),
    )
    memory: int | str | None = setting(
        None,
        Option("other", optional=True),
        _MODELS(
            "--memory",
            "Memory limit of the process, such as 12G: layers that don't fit are streamed from disk. "
            "[dim]\\[free memory, where the weights are larger][/dim]",
            metavar="SIZE",
        ),
    )
    stream: bool | None = setting(
        None,
        Option("choice", optional=True, words={"auto": None, "off": False}),
        _MODELS("--stream", "Whether weights that don't fit in memory are streamed; off leaves paging to the system."),
    )
    max_sequences: int = setting(
        1,
        Option("whole", counted="{} sequences", low=1),
        _MODELS("-np --parallel", "Requests processed in parallel."),
    )
    cells: int | None = None
    branches: int | None = None
    rollback: bool = True
    dtype: DType | None = setting(
        None,
        Option("choice", optional=True, words=same(DTYPES)),
        _MODELS("--dtype", "Data type of the weights under torch_hf."),
    )
    model_defaults: bool = setting(
        True,
        Option("truth"),
        _SAMPLING(
            "--no-model-defaults",
            "Ignore sampling defaults stored with the model, in GGUF metadata or generation_config.json.",
            negated=True,
        ),
    )
    hold_states: tuple[int, ...] = ()
    verbose: bool = setting(False, Option("truth"), _OUTPUT("-v --verbose", "Show the engine's log on stderr."))
    other_memory: OtherMemory = NO_OTHER_MEMORY
    rows_read: int | None = None
    own_weights: bool = False
    repack: bool = True
    draft_vocab: DraftVocab = "auto"
    draft_map: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        take_values(self)
        for name, lowest, highest in (
            ("context_length", 1, _INT32_MAX),
            ("cells", 1, _INT32_MAX),
            ("rows_read", 1, 1 << 16),
            ("gpu_layers", -1, _INT32_MAX),
            ("threads", 1, 512),
            ("threads_batch", 1, 512),
        ):
            check_range(name, getattr(self, name), lowest, highest)
        if self.memory is not None:
            with blame("memory"):
                check_range("memory", memory_bytes(self), 1, 2**63 - 1)
            if self.stream is False:
                raise InputError(
                    "`memory` is for weights that are streamed, and `stream=False` streams none: give one",
                    field="memory",
                )
        if self.rpc and self.memory is not None:
            raise InputError(
                "`memory` is for layers that are read on this machine, and `rpc` puts them on others: give one",
                field="memory",
            )
        if self.rpc_fallback and not self.rpc:
            raise InputError(
                "`rpc_fallback` is for layers on other machines: give `rpc`, too, or leave it out", field="rpc_fallback"
            )
        if self.draft_vocab not in DRAFT_VOCABS:
            there_are = ", ".join(DRAFT_VOCABS)
            raise InputError(f"unknown draft_vocab {self.draft_vocab!r}: choose from {there_are}", field="draft_vocab")
        with blame("draft_map"):
            check_pairs(self.draft_map, self.draft_vocab)
        if self.flash_attention not in (None, True, False):
            # "off", as the command line has it, would be taken for true.
            raise InputError(
                f"flash_attention is {self.flash_attention!r}: give True, False, or None for either",
                field="flash_attention",
            )
        for name, cache_type in (("cache_type_k", self.cache_type_k), ("cache_type_v", self.cache_type_v)):
            if self.flash_attention is False and is_quantized(cache_type):
                # With keys alone llama.cpp would go on, and compute nonsense where a head's size is no multiple of 32.
                raise InputError(
                    f"`{name}` {cache_type} needs fused attention: leave out `flash_attention=False`, or take f16, "
                    "bf16 or f32",
                    field=name,
                )


class LoadOptions(TypedDict, total=False):
    """Those of :class:`ModelOptions` that :func:`paceline.load` takes by name; ``None`` is the default."""

    engine: EngineName | None
    context_length: int | None
    gpu_layers: int | None
    devices: Sequence[str] | None
    override_tensors: tuple[tuple[str, str], ...] | None
    rpc: Sequence[str] | None
    rpc_fallback: Sequence[str] | None
    threads: int | None
    threads_batch: int | None
    flash_attention: bool | None
    cache_type_k: CacheType | None
    cache_type_v: CacheType | None
    exact: bool | None
    memory: int | str | None
    stream: bool | None
    max_sequences: int | None
    cells: int | None
    dtype: DType | None
    model_defaults: bool | None
    verbose: bool | None


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What a draft model may have otherwise than its target; it runs as its target does in all else.

    Attributes:
        path: a GGUF file, a Hugging Face folder, or a name of `paceline models`; ``None`` where none is named. The text
            ``"self"``, or ``"self:Q4_0"``, is the target quantised smaller (:mod:`paceline.conversion.own_draft`), and
            ``"mtp"`` the MTP layer in its own file, which it gets where none is named, or in an ``mtp-*.gguf`` beside
            it.
        context_length: tokens it sees; 0 is all that it was made for. ``None`` is the target's, twice that where its
            drafts are translated, and no more than it was made for.
        gpu_layers: layers to put on GPUs; -1 for all. Only ``llama_cpp``.
        devices: devices to use, by the engine's names; empty for all there are.
        rpc: workers on other machines to put its layers on, as :attr:`ModelOptions.rpc`; empty for this machine,
            wherever the target's are.
        threads: CPU threads for passes of one row; ``None`` as the target's. Only ``llama_cpp``.
        threads_batch: CPU threads for wider passes; ``None`` for ``threads``, or as the target's where that is not
            given either. Only ``llama_cpp``.
        cache_type_k: type of the keys in its cache; ``None`` is ``"f16"``, whatever the target's is: coarser ones cost
            acceptance. Only ``llama_cpp``, as ``cache_type_v``.
        cache_type_v: type of the values in its cache; ``None`` is ``"f16"``.
        vocab: whether its token ids are the target's (``same``), or what it says is put into the target's tokens
            (``translate``); ``auto`` is the first where the vocabularies fit, and else the second.
        token_map: tokens that stand for one another where drafts are translated, each as ``DRAFT=TARGET`` by their
            spellings, such as ``<|im_start|>=<start_of_turn>``. Most control tokens are found without.
    """

    path: str | Path | None = setting(
        None,
        Option("other", variable="MODEL"),
        _MODELS(
            "-md --model-draft --spec-draft-model",
            "Draft model with mostly the same tokens; self is the target quantised smaller, mtp the MTP "
            "layer in its file, or in mtp-*.gguf beside it. [dim]\\[mtp where there is one][/dim]",
            metavar="MODEL",
        ),
    )
    context_length: int | None = setting(
        None,
        Option("whole", called="`DraftOptions.context_length`", optional=True, kilo=1024),
        _MODELS(
            "-cd --ctx-size-draft --spec-draft-ctx-size",
            "Context size of the draft model; 0 for all it was made for. [dim]\\[as -c, twice that if "
            "translated, or its own if less][/dim]",
        ),
    )
    gpu_layers: int = setting(
        -1,
        Option("whole"),
        _MODELS(
            "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl",
            "Layers of the draft model to put on GPUs; -1 for all.",
        ),
    )
    devices: tuple[str, ...] = setting(
        (),
        Option("texts", separator=","),
        _MODELS("-devd --device-draft --spec-draft-device", "Devices for the draft model.", metavar="DEV[,...]"),
    )
    threads: int | None = setting(
        None,
        Option("whole", optional=True),
        _MODELS(
            "-td --threads-draft --spec-draft-threads",
            "CPU threads for the draft model's single-token passes. [dim]\\[as -t][/dim]",
        ),
    )
    threads_batch: int | None = setting(
        None,
        Option("whole", optional=True),
        _MODELS(
            "-tbd --threads-batch-draft --spec-draft-threads-batch",
            "CPU threads for the draft model's wider passes. [dim]\\[as -td, or -tb][/dim]",
        ),
    )
    cache_type_k: CacheType | None = setting(
        None,
        Option("choice", called="`DraftOptions.cache_type_k`", optional=True, words=same(CACHE_TYPES)),
        _MODELS(
            "-ctkd --cache-type-k-draft --spec-draft-type-k",
            "KV cache type of the draft model for keys, as -ctk. [dim]\\[f16][/dim]",
            metavar="TYPE",
        ),
    )
    cache_type_v: CacheType | None = setting(
        None,
        Option("choice", called="`DraftOptions.cache_type_v`", optional=True, words=same(CACHE_TYPES)),
        _MODELS(
            "-ctvd --cache-type-v-draft --spec-draft-type-v",
            "KV cache type of the draft model for values, as -ctv. [dim]\\[f16][/dim]",
            metavar="TYPE",
        ),
    )
    vocab: DraftVocab = setting(
        "auto",
        Option("choice", called="`DraftOptions.vocab`", words=same(DRAFT_VOCABS)),
        _MODELS(
            "--draft-vocab",
            "Whether the draft model has the target's tokens (same) or its text is translated; auto finds out.",
            metavar="|".join(DRAFT_VOCABS),
        ),
    )
    token_map: tuple[str, ...] = setting(
        (),
        Option("texts", called="`DraftOptions.token_map`", variable="MAP"),
        _MODELS(
            "--draft-map",
            "A control token of a translated draft model, and the token of the target it stands for.",
            repeated=True,
            metavar="DRAFT=TARGET",
        ),
    )
    rpc: tuple[str, ...] = setting(
        (),
        Option("texts", called="`DraftOptions.rpc`", separator=","),
        _MODELS("--rpc-draft", "Put layers of the draft model on other machines, as --rpc.", metavar="HOST:PORT[,...]"),
    )

    def __post_init__(self) -> None:
        take_values(self)
        with blame("token_map"):
            check_pairs(self.token_map, self.vocab)
        if self.context_length != 0:
            _check_draft_context(self.context_length)

    def beside(self, target: ModelOptions) -> ModelOptions:
        """Return how to run the draft model of a target.

        On another engine, what is said of the target in terms of its own (``flash_attention``, ``threads_batch``,
        ``dtype``) is left out.

        Raises:
            InputError: no model is named, or its own context is asked for, which it does not say or is too short to
                draft in.
            CapabilityError: the draft's threads are given, and its engine has none of its own.
            ModelFileError: there is no such model.
        """
        if self.path is None:
            raise InputError("no draft model is named: give one (`draft`)")
        # What is quantised smaller is all else that its target is.
        like = target.path if names_own_draft(self.path) or self.path == MTP_DRAFT else self.path
        context_length = self.context_length
        if context_length == 0:
            context_length = own_context(like, "`DraftOptions.context_length`")
            _check_draft_context(context_length)
        engine = target.engine or engine_for(Path(like))
        has_own_threads = (self.threads, self.threads_batch) != (None, None)
        if has_own_threads and engine == "torch_hf":
            raise CapabilityError(
                "threads of the draft (`DraftOptions.threads`) mean nothing to torch_hf: give those of both (`threads`)"
            )
        if engine != chosen_engine(target):
            target = dataclasses.replace(target, threads_batch=None, flash_attention=None, dtype=None)
        return dataclasses.replace(
            target,
            path=self.path,
            context_length=target.context_length if context_length is None else context_length,
            context_may_shrink=context_length is None,
            gpu_layers=self.gpu_layers,
            devices=self.devices,
            override_tensors=(),
            rpc=self.rpc,
            rpc_fallback=LOCAL if self.rpc else (),
            threads=target.threads if self.threads is None else self.threads,
            threads_batch=self.threads_batch if has_own_threads else target.threads_batch,
            cache_type_k=self.cache_type_k,
            cache_type_v=self.cache_type_v,
            flash_attention=None if has_quantized_cache(self) else target.flash_attention,
            # Whatever a draft model says, the text is the target's.
            exact=False,
            # The tree it grows is a chain to it.
            branches=0,
            # A draft model that ran out of room would draft nothing.
            cells=None,
            # It is made for memory: every level of a draft would read it again.
            memory=None,
            stream=False,
            draft_vocab=self.vocab,
            draft_map=self.token_map,
        )


def is_quantized(cache_type: CacheType | None) -> bool:
    return cache_type not in (None, "f32", "f16", "bf16")


def cache_types(options: ModelOptions) -> tuple[CacheType, CacheType]:
    """Return the types that llama.cpp's cache has for keys and values."""
    return options.cache_type_k or "f16", options.cache_type_v or ("bf16" if options.exact else "f16")


def has_quantized_cache(options: ModelOptions | DraftOptions) -> bool:
    """Whether keys or values are quantised, which takes fused attention."""
    return is_quantized(options.cache_type_k) or is_quantized(options.cache_type_v)


def memory_bytes(options: ModelOptions) -> int | None:
    return parse_bytes(options.memory) if isinstance(options.memory, str) else options.memory


def own_context(path: str | Path, asked_by: str) -> int:
    """Return all the context that a model was made for.

    ``asked_by`` is the option that asks for it by a 0, for messages.
    """
    trained = describe(Path(path)).context_length
    if trained is None:
        raise InputError(f"{asked_by} 0 is the model's own context, and {path} names none: give a number of tokens")
    return trained


def _check_draft_context(length: int | None) -> None:
    if length is not None and length < _MIN_DRAFT_CONTEXT:
        raise InputError(
            f"`DraftOptions.context_length` {length}: the least is {_MIN_DRAFT_CONTEXT}, a token "
            "that was said and one that is drafted "
            "after it; 0 takes the draft model's own context",
            field="context_length",
        )


def engine_for(path: Path) -> EngineName:
    """Return the engine that runs a model file or folder."""
    if path.is_dir():
        check_model_folder(path, may_be_head=True)
        return "torch_hf"
    if not path.exists():
        raise ModelFileError(f"there is no file {path}: give the path of a GGUF file or a Hugging Face model folder")
    return "llama_cpp"


def chosen_engine(options: ModelOptions) -> EngineName:
    return options.engine or engine_for(Path(options.path))
