"""From a folder or a GGUF file to a model and its tokenizer, or to one clear error."""

from __future__ import annotations

import contextlib
import inspect
import io
import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import transformers
from transformers.utils import logging as transformers_logging

from paceline.core.errors import CapabilityError, EngineError, InputError, ModelFileError
from paceline.core.extras import missing
from paceline.engines.options import ModelOptions
from paceline.engines.torch_hf.vocabulary import TokenizerVocabulary
from paceline.models.files import explain_damaged_entries
from paceline.models.gguf_model import read_gguf_model
from paceline.models.hub.local_cache import display_name
from paceline.models.weight_files import check_model_folder, weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator


_DEVICES: Final = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices on which models run under torch."""


class LoadedModel(NamedTuple):
    """A causal language model ready to run, its tokenizer, and its name for people."""

    model: Any
    tokenizer: Any
    name: str
    end_ids: frozenset[int] = frozenset()
    """End tokens besides those that model and tokenizer name: llama.cpp knows some in a GGUF file by their text."""


def load_model(options: ModelOptions) -> LoadedModel:
    """Load the model and the tokenizer that the options name."""
    path = Path(options.path)
    source = _source(path)
    named = _device_name(options.devices)
    device = _device(named)
    with contextlib.nullcontext() if options.verbose else quiet():
        with file_errors(path):
            config = transformers.AutoConfig.from_pretrained(**source)
        refuse_unsupported(config)
        with file_errors(path):
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                **source,
                config=config,
                dtype=_dtype(options.dtype or "auto", device),
                output_loading_info=True,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source, config=config)
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelFileError(f"{path} lacks {len(missing)} weights of the model, such as {missing[0]}; fetch it again")
    try:
        model = model.to(device)
    except torch.OutOfMemoryError as error:
        raise EngineError(f"the weights of {path} do not fit on {device}; set device or a smaller dtype") from error
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise CapabilityError(f"device {named!r} cannot be used: {one_line(error)}") from error
    return LoadedModel(
        model, tokenizer, display_name(path), _gguf_end_ids(path) if "gguf_file" in source else frozenset()
    )


def load_vocabulary(path: Path, *, verbose: bool = False) -> TokenizerVocabulary:
    """Load the tokenizer of a folder or a GGUF file, and no weights."""
    source = _source(path)
    with contextlib.nullcontext() if verbose else quiet(), file_errors(path):
        config = transformers.AutoConfig.from_pretrained(**source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source, config=config)
    with explain_damaged_entries(path):
        return TokenizerVocabulary(tokenizer, size=len(tokenizer))


def _source(path: Path) -> dict[str, Any]:
    """Return a folder or a GGUF file as arguments of transformers' ``from_pretrained``."""
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path),
        "local_files_only": True,
        "trust_remote_code": False,  # without it, a folder with code of its own asks on the terminal
    }
    if path.is_file() and path.suffix == ".gguf":
        _check_gguf(path)
        source |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    elif path.is_dir():
        # Both explain a missing file better than transformers does.
        check_model_folder(path)
        weight_files(path)
    else:
        problem = f"{path} is neither a folder nor a .gguf file" if path.exists() else f"there is no file {path}"
        raise ModelFileError(f"{problem}; give a model folder or a GGUF file")
    return source


def _device_name(devices: tuple[str, ...]) -> str:
    """Return torch's name of a device; ``none`` is the CPU to all engines, and none is CUDA if there is any."""
    if not devices:
        return "auto"
    device = "cpu" if devices[0] == "none" else devices[0]
    if device.partition(":")[0] not in _DEVICES:
        raise InputError(
            f"device {device!r} cannot run models under torch: choose from {', '.join(_DEVICES)} (`devices`)"
        )
    return device


def refuse_unsupported(config: Any, model: Any = None) -> None:
    """Raise ``CapabilityError`` for architectures known not to run as packed rows over a pool of cells.

    ``model`` is what ``config`` stands for, where it is loaded already; nothing is computed.
    """
    way_out = "use a GGUF file with the llama_cpp engine"
    if config.is_encoder_decoder:
        raise CapabilityError(f"{config.model_type} is an encoder-decoder model; the torch engine runs decoders only")
    try:
        model_class = type(model) if model is not None else transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ModelFileError(f"transformers has no causal language model for {config.model_type!r}") from None
    if getattr(model_class, "_is_stateful", False):
        raise CapabilityError(f"{config.model_type} has recurrent state, which cannot be rolled back here; {way_out}")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise CapabilityError(f"{config.model_type} takes no position_ids, so rows cannot be packed; {way_out}")


def longest_context(config: Any) -> int | None:
    """Return how many positions the model can place exactly, or ``None`` where it does not say."""
    longest: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for setting in [rope, *rope.values()]:
        # longrope turns every position differently once the longest one of a pass exceeds the original length:
        # what a row sees would depend on its neighbours, and cached keys would not match.
        if isinstance(setting, dict) and setting.get("rope_type") == "longrope":
            original = setting["original_max_position_embeddings"]
            longest = original if longest is None else min(longest, original)
    return longest


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CapabilityError(f"device {name!r}: {one_line(error)}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CapabilityError(f"device {name!r} is not there: this torch sees no CUDA; use 'cpu' (`devices`)")
    return device


def _dtype(name: str, device: torch.device) -> Any:
    if name == "auto":
        return "auto" if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def _check_gguf(path: Path) -> None:
    parts = len(read_gguf_model(path).paths)
    if parts > 1:
        raise ModelFileError(
            f"{path} is the first of {parts} parts of a split model, and torch_hf reads one file; use "
            f"`engine='llama_cpp'`, or join them with: llama-gguf-split --merge {path.name} WHOLE.gguf"
        )
    # transformers needs both to read GGUF, and says so in a ValueError that looks like a broken file.
    for package in ("gguf", "accelerate"):
        if not getattr(transformers.utils, f"is_{package}_available")():
            raise missing("reading GGUF files with torch", package, "torch")


def _gguf_end_ids(path: Path) -> frozenset[int]:
    """Return where llama.cpp ends an answer, as one file should end at the same tokens in both engines."""
    from paceline.engines.llama_cpp.ends import read_end_ids

    return read_end_ids(path)


@contextlib.contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn whatever transformers raises on a file into one line."""
    try:
        yield
    except ImportError as error:
        raise CapabilityError(f"{path} needs a package that is not installed: {one_line(error)}") from error
    except torch.OutOfMemoryError as error:
        raise EngineError(f"the weights of {path} do not fit in memory; set a smaller dtype") from error
    except pickle.UnpicklingError as error:
        # else torch's message says how to load a file with any code that it brings
        raise ModelFileError(
            f"{path} has pickled weights that cannot be read; copy or download them again, or get *.safetensors files"
        ) from error
    except Exception as error:
        # transformers, safetensors, tokenizers and json all raise their own types here, bare Exception included.
        raise ModelFileError(f"{path} cannot be loaded: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log, warnings and progress bars (which write to stderr), and restore them.

    All of these are the process's: what other threads write to stderr meanwhile is lost too.
    """
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
