"""What can be set about the torch engine. Free of torch, so that a command line can read the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from paceline.engines.limits import check_range

TorchDType: TypeAlias = Literal["auto", "float32", "float16", "bfloat16"]
Attention: TypeAlias = Literal["auto", "sdpa", "eager"]

SMALLEST_CONTEXT = 4
"""Cells and context that the check made at load needs (see ``TorchHFEngine``)."""

_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True)
class TorchHFConfig:
    """Settings of :class:`~paceline.engines.torch_hf.engine.TorchHFEngine`.

    Attributes:
        path: folder with ``config.json`` and weights, or a ``.gguf`` file (its weights are dequantised on load).
        device: a torch device such as ``"cpu"`` or ``"cuda:1"``; ``"auto"`` is CUDA if there is any, else the CPU.
        dtype: of weights, cache and arithmetic; ``"auto"`` is the checkpoint's on CUDA and float32 on the CPU,
            where half precision is seldom faster and always less exact.
        attention: ``"auto"`` is sdpa, or eager for models without it (Gemma 2, gpt-oss).
        context_length: most tokens a sequence may hold; ``None`` is the model's, at most
            :data:`~paceline.engines.context.DEFAULT_CONTEXT_LENGTH`.
        context_may_shrink: take the model's own where ``context_length`` is more, instead of refusing it.
        max_rows: most rows in one forward pass.
        max_sequences: most sequences open at once.
        cells: tokens the pool of keys and values holds, over all sequences; ``None`` is room for
            ``max_sequences`` full contexts and one pass.
        local_files_only: never look on the network for a missing file.
        threads: of torch's CPU operations, for the whole process; ``None`` takes torch's own choice, and fewer while
            other processes use the cores (:mod:`paceline.engines.threads`).
        verbose: let transformers print what it has to say while loading.

    Raises:
        InputError: a number is out of range.
    """

    path: str | Path
    device: str = "auto"
    dtype: TorchDType = "auto"
    attention: Attention = "auto"
    context_length: int | None = None
    context_may_shrink: bool = False
    max_rows: int = 512
    max_sequences: int = 1
    cells: int | None = None
    local_files_only: bool = True
    threads: int | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        for name, lowest, highest in (
            ("context_length", SMALLEST_CONTEXT, _INT32_MAX),
            ("max_rows", 1, 1 << 16),
            ("max_sequences", 1, _INT32_MAX),
            ("cells", SMALLEST_CONTEXT, _INT32_MAX),
            ("threads", 1, 512),
        ):
            check_range(name, getattr(self, name), lowest, highest)
