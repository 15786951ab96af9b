"""Opening an engine by name, or by what the model file looks like. Engines are imported only here, and only then.

What can be refused before a model is loaded, which may take minutes, is refused by its header and vocabulary alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from paceline.core.errors import CapabilityError, ContextLengthError, InputError, ModelFileError
from paceline.engines.base import Engine, Vocabulary
from paceline.engines.context import choose_context_length
from paceline.engines.exactness import check_exact
from paceline.engines.limits import check_range
from paceline.models.description import describe
from paceline.models.weight_files import check_model_folder

DType: TypeAlias = Literal["float32", "float16", "bfloat16"]
EngineName: TypeAlias = Literal["llama_cpp", "torch_hf"]
ENGINE_NAMES: tuple[EngineName, ...] = get_args(EngineName)

DEFAULT_BRANCHES = 8
"""Tree branches of an engine whose policy does not say how many it may want."""

TORCH_DEVICES = ("cpu", "cuda", "mps", "xpu")

_MOST_SPECIAL_TOKENS = 8
"""Tokens that a tokenizer may put around a text, or take for the space that it puts before it."""

MAX_BRANCHES = 192
"""Most tree branches asked of an engine by default; llama.cpp has 256 sequence ids in all."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """A model and how to run it, in terms common to the engines.

    Attributes:
        path: a GGUF file or a Hugging Face folder; :func:`paceline.load` also takes the names of `paceline models`.
        engine: which engine runs it; ``None`` decides by ``path``.
        context_length: tokens of prompt and answer together; ``None`` takes the model's own, 4,096 at most.
        context_may_shrink: take what the model was made for where ``context_length`` is more, instead of refusing it;
            a draft model then sees the end of the text only, and the answer stays the same.
        gpu_layers: layers to put on GPUs; -1 for all. Only ``llama_cpp``.
        devices: devices to use, by the engine's names; empty for all there are.
        override_tensors: (pattern, buffer type) pairs that place single tensors. Only ``llama_cpp``.
        threads: CPU threads for passes of one row; ``None`` for one a core, and fewer while others use the cores.
        threads_batch: CPU threads for wider passes; ``None`` for the same. Only ``llama_cpp``.
        flash_attention: whether attention is one fused kernel; ``None`` is llama.cpp's choice on devices, and on a CPU
            what :func:`paceline.load` measures to be faster (:mod:`paceline.planning.costs.attention`). Only
            ``llama_cpp``.
        exact: arithmetic that does not depend on how many rows a pass has, so that rounding turns no near-ties and a
            request by itself gets the text of plain decoding with the same; see there. Only ``llama_cpp``.
        max_sequences: requests the engine holds at once.
        branches: tree branches it holds at once, over all requests; ``None`` for what the policy can ask for. Only
            ``llama_cpp``; ``torch_hf`` has no limit.
        rollback: whether tokens must be taken back, as verifying drafts needs; without, recurrent models run too.
        dtype: weights' type, such as ``"float32"``; ``None`` takes the model's own. Only ``torch_hf``.
        verbose: let the engine print what it has to say.
    """

    path: str | Path
    engine: EngineName | None = None
    context_length: int | None = None
    context_may_shrink: bool = False
    gpu_layers: int = -1
    devices: tuple[str, ...] = ()
    override_tensors: tuple[tuple[str, str], ...] = ()
    threads: int | None = None
    threads_batch: int | None = None
    flash_attention: bool | None = None
    exact: bool = False
    max_sequences: int = 1
    branches: int | None = None
    rollback: bool = True
    dtype: DType | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        check_range("context_length", self.context_length, 1, 2**31 - 1)
        if self.max_sequences < 1:
            raise InputError(f"{self.max_sequences} sequences: the least is 1 (-np)")
        if self.flash_attention not in (None, True, False):
            # "off", as the command line has it, would be taken for true.
            raise InputError(f"flash_attention is {self.flash_attention!r}: give True, False, or None for either")


def engine_for(path: Path) -> EngineName:
    """Return the engine that runs a model file or folder.

    Raises:
        ModelFileError: there is nothing at ``path``, or it is neither kind of model.
    """
    if path.is_dir():
        check_model_folder(path)
        return "torch_hf"
    if not path.exists():
        raise ModelFileError(f"{path} does not exist: give the path of a GGUF file or a Hugging Face model folder")
    return "llama_cpp"


def open_engine(options: ModelOptions) -> Engine:
    """Load a model.

    Raises:
        ModelFileError: the file is missing, damaged, or not a model the engine knows.
        CapabilityError: the engine's package is not installed, or an option means nothing to it or cannot be had with
            this model.
        InputError: an option is out of range.
    """
    name = options.engine or engine_for(Path(options.path))
    if name == "llama_cpp":
        engine = _open_llama_cpp(options)
        if options.exact:
            try:
                check_exact(engine)
            except BaseException:
                engine.close()
                raise
        return engine
    if name == "torch_hf":
        return _open_torch_hf(options)
    raise InputError(f"unknown engine {name}: choose one of {', '.join(ENGINE_NAMES)}")


def foreseen_context_length(options: ModelOptions) -> int:
    """Return the context that a model will be given, by its header alone.

    Raises:
        ContextLengthError: more is asked for than the model was made for.
        ModelFileError: the header cannot be read.
    """
    path = Path(options.path)
    return choose_context_length(
        options.context_length,
        describe(path).context_length,
        model=path.name,
        may_shrink=options.context_may_shrink,
    )


def check_prompt(options: ModelOptions, prompt: str) -> None:
    """Refuse a prompt that is too long for a model, before the model is loaded.

    No token but special ones is less than a byte, so only a prompt of about as many bytes as the context has tokens
    must be counted.

    Raises:
        ContextLengthError: the prompt leaves no room in the context for a token of answer; or more context is asked for
            than the model was made for.
        ModelFileError: the header or the vocabulary cannot be read.
        CapabilityError: the engine's package is not installed.
    """
    most_tokens = len(prompt.encode("utf-8", "surrogatepass")) + _MOST_SPECIAL_TOKENS
    if options.context_length is not None and most_tokens < options.context_length:
        return
    context_length = foreseen_context_length(options)
    if most_tokens < context_length:
        return
    with open_vocabulary(options) as vocabulary:
        num_tokens = len(vocabulary.tokenize(prompt))
    if num_tokens >= context_length:
        raise ContextLengthError.of_prompt(num_tokens, context_length)


@contextmanager
def open_vocabulary(options: ModelOptions) -> Iterator[Vocabulary]:
    """Load a model's vocabulary without its weights, for as long as the block runs.

    Raises:
        ModelFileError: the file is missing, damaged, or not a model the engine knows.
        CapabilityError: the engine's package is not installed, or does not know the vocabulary.
    """
    path = Path(options.path)
    if (options.engine or engine_for(path)) == "torch_hf":
        from paceline.engines.torch_hf import TorchHFConfig, load_vocabulary

        yield load_vocabulary(TorchHFConfig(path=path, verbose=options.verbose))
        return
    from paceline.engines.llama_cpp.loading import vocabulary_of

    with vocabulary_of(path) as vocabulary:
        yield vocabulary


def reader_of(options: ModelOptions) -> Callable[[int], Engine]:
    """Return what loads a model once more, to read a text of so many tokens with another sequence beside it."""

    def open_reader(num_tokens: int) -> Engine:
        return open_engine(dataclasses.replace(options, context_length=num_tokens, max_sequences=2, branches=0))

    return open_reader


def _open_llama_cpp(options: ModelOptions) -> Engine:
    from paceline.engines.llama_cpp import LlamaCppConfig, LlamaCppEngine

    if options.dtype is not None:
        raise CapabilityError(
            f"dtype {options.dtype} (--dtype) means nothing to llama_cpp, which runs a GGUF file in the types it was "
            "written in: leave it out"
        )
    return LlamaCppEngine(
        LlamaCppConfig(
            path=Path(options.path),
            context_length=options.context_length,
            context_may_shrink=options.context_may_shrink,
            n_gpu_layers=options.gpu_layers,
            devices=options.devices,
            override_tensors=options.override_tensors,
            threads=options.threads,
            threads_batch=options.threads_batch,
            flash_attention=options.flash_attention,
            exact=options.exact,
            max_sequences=options.max_sequences,
            rollback=options.rollback,
            branches=DEFAULT_BRANCHES if options.branches is None else options.branches,
            verbose=options.verbose,
        )
    )


def _open_torch_hf(options: ModelOptions) -> Engine:
    from paceline.engines.torch_hf import TorchHFConfig, TorchHFEngine

    unused = {
        "threads for batches (-tb)": options.threads_batch is not None,
        "fused attention (-fa)": options.flash_attention is not None,
        "exactness (--exact)": options.exact,
        "tensor overrides (-ot)": bool(options.override_tensors),
        "a number of GPU layers (-ngl)": options.gpu_layers != -1,
        "several devices": len(options.devices) > 1,
    }
    for option, given in unused.items():
        if given:
            raise CapabilityError(f"{option} means nothing to torch_hf: leave it out, or use --engine llama_cpp")
    return TorchHFEngine(
        TorchHFConfig(
            path=options.path,
            context_length=options.context_length,
            context_may_shrink=options.context_may_shrink,
            device=_torch_device(options.devices),
            dtype=options.dtype or "auto",
            threads=options.threads,
            max_sequences=options.max_sequences,
            verbose=options.verbose,
        )
    )


def _torch_device(devices: tuple[str, ...]) -> str:
    """Translate a device name; ``none`` is the CPU to both engines."""
    if not devices:
        return "auto"
    device = "cpu" if devices[0] == "none" else devices[0]
    if device.partition(":")[0] not in TORCH_DEVICES:
        raise InputError(
            f"device {device!r} cannot run models under torch: choose from {', '.join(TORCH_DEVICES)} (-dev)"
        )
    return device
