"""Engine for Hugging Face models on PyTorch. Importing this package needs neither torch nor transformers.

One forward pass, file by file::

    engine.py   checks the steps, picks cells, runs the model, hands out logits
    cells.py    which cell of the pool holds which token; what each row may see
    masks.py    that as the additive mask (or masks) the model takes
    pool.py     the cache the model writes its keys and values into
    states.py   what layers read, kept for heads
    heads.py    heads, which draft from that: a pass the same way, of tokens with states
    head_files.py  what a folder says of its head
    assistants.py  heads that read the target's pool
    loading.py  a folder or GGUF file becomes a model and a tokenizer, or one clear error
    vocabulary.py  the tokenizer as token ids and bytes
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.core.extras import missing

if TYPE_CHECKING:
    from paceline.engines.torch_hf.assistants import TorchAssistant
    from paceline.engines.torch_hf.engine import TorchHFEngine
    from paceline.engines.torch_hf.heads import TorchHead
    from paceline.engines.torch_hf.loading import load_vocabulary

__all__ = ["TorchAssistant", "TorchHFEngine", "TorchHead", "describe_library", "load_vocabulary"]

_NEEDS_TORCH = {
    "TorchAssistant": "assistants",
    "TorchHFEngine": "engine",
    "TorchHead": "heads",
    "load_vocabulary": "loading",
}


def describe_library() -> str:
    """Return the versions of torch and transformers, and the cards that torch finds."""
    import torch
    import transformers

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"torch {torch.__version__}, transformers {transformers.__version__}, GPUs {gpus}"


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in {"torch", "transformers", "tokenizers"}:
            raise
        raise missing("the torch engine", error.name, "torch") from error
