"""Llamas of random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.options import ModelOptions
from paceline.lab.inflate import LlamaShape

Logits = npt.NDArray[np.float32]

SMALL = LlamaShape(2, 256, 512, heads=8, kv_heads=2, head_size=64, vocab_size=384, tied=True)
"""Heads that together are wider than the residual stream, and groups that fill one block of a K-quant."""

LARGE = LlamaShape(5, 1024, 768, heads=24, kv_heads=6, head_size=64, vocab_size=384, tied=True)
"""Four times the width of :data:`SMALL`: norms are exact."""


def byte_tokens() -> list[str]:
    """The characters that stand for bytes in a byte-level vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = (chr(256 + n) for n in range(256 - len(kept)))
    return [chr(byte) if byte in kept else next(shifted) for byte in range(256)]


def write_llama(
    path: Path,
    shape: LlamaShape = SMALL,
    rope_factors: bool = False,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a random F32 model; ``change`` may add to it before it is closed."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random")
    shape.add_to_gguf(writer)
    writer.add_context_length(256)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-2)  # so large that a wrong epsilon shows
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    words = [*byte_tokens(), "th"]
    words += [f"<|unused_{n}|>" for n in range(shape.vocab_size - len(words) - 1)]
    writer.add_token_list([*words, "<|endoftext|>"])
    writer.add_token_types([1] * 257 + [3] * (shape.vocab_size - 257))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(shape.vocab_size - 1)

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(name, rng.uniform(0.5, 1.5, shape.width).astype(np.float32))

    queries, values = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    matrix("token_embd.weight", shape.vocab_size, shape.width)
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm.weight")
        matrix(f"{block}.attn_q.weight", queries, shape.width)
        matrix(f"{block}.attn_k.weight", values, shape.width)
        matrix(f"{block}.attn_v.weight", values, shape.width)
        matrix(f"{block}.attn_output.weight", shape.width, queries)
        norm(f"{block}.ffn_norm.weight")
        matrix(f"{block}.ffn_gate.weight", shape.feed_forward, shape.width)
        matrix(f"{block}.ffn_up.weight", shape.feed_forward, shape.width)
        matrix(f"{block}.ffn_down.weight", shape.width, shape.feed_forward)
    norm("output_norm.weight")
    if not shape.tied:
        matrix("output.weight", shape.vocab_size, shape.width)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.geomspace(1, 8, shape.head_size // 2).astype(np.float32))
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(path: Path, num_tokens: int = 20) -> Logits:
    """Logits after every token of a fixed text, read in passes of several widths, ``[num_tokens, vocab]``."""
    token_ids = [int(token) for token in np.random.default_rng(3).integers(0, 256, num_tokens)]
    engine = LlamaCppEngine(ModelOptions(path, context_length=64, threads=1))
    try:
        sequence, rows, start = engine.open(), [], 0
        for width in (num_tokens - 4, 1, 3):
            tokens = token_ids[start : start + width]
            output = engine.forward([Step(sequence, tokens, [COMMITTED_END, *range(width - 1)], list(range(width)))])
            rows += [np.array(output.logits(0, row)) for row in range(width)]
            engine.commit(sequence, range(width))
            start += width
    finally:
        engine.close()
    return np.array(rows)
