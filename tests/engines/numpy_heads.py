"""Forwards of heads of GGUF models, written down once more in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
from tests.engines.tiny_models import BYTE_VOCABULARY_SIZE, MASK_ID

from paceline.core.arrays import FloatArray

BLOCK_ROWS = 5
"""Of what ``write_block_head`` writes."""

Weights: TypeAlias = Mapping[str, FloatArray]

Cache: TypeAlias = dict[bool, tuple[FloatArray, FloatArray]]
"""Keys and values of the last layer with a window (``True``) and of the last without, ``[tokens, 1, size]``."""


def read_weights(path: Path) -> Weights:
    return {
        tensor.name.removesuffix(".weight"): np.array(
            tensor.data, np.int64 if tensor.data.dtype == np.int64 else np.float64
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


def norm(values: FloatArray, scale: FloatArray | float = 1.0, epsilon: float = 1e-5) -> FloatArray:
    normed: FloatArray = values / np.sqrt((values * values).mean(-1, keepdims=True) + epsilon) * scale
    return normed


def turn(
    heads: FloatArray, places: Any, frequencies: FloatArray | None = None, *, neighbours: bool = False
) -> FloatArray:
    """Turn heads ``[rows, heads, size]`` by their places: pairs of neighbours, or a half with the other."""
    half = heads.shape[-1] // 2
    if frequencies is None:
        frequencies = 10000.0 ** (-np.arange(half) / half)
    angles = np.asarray(places)[:, None] * frequencies
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = (heads[..., 0::2], heads[..., 1::2]) if neighbours else (heads[..., :half], heads[..., half:])
    turned = first * cos - second * sin, first * sin + second * cos
    both: FloatArray = np.stack(turned, -1) if neighbours else np.concatenate(turned, -1)
    return both.reshape(heads.shape)


def attend(
    queries: FloatArray, keys: FloatArray, values: FloatArray, seen: Any = True, scale: float = 1.0
) -> FloatArray:
    """Return what rows ``[rows, heads, size]`` read of the keys and values ``[keys, fewer heads, size]`` they see."""
    keys, values = (np.repeat(each, queries.shape[1] // each.shape[1], 1) for each in (keys, values))
    scores = np.where(seen, np.einsum("ihd,jhd->hij", queries, keys) * scale, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed: FloatArray = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), values)
    return mixed.reshape(len(queries), -1)


def feed(normed: FloatArray, weights: Weights, layer: str) -> FloatArray:
    gate = normed @ weights[f"{layer}.ffn_gate"].T
    inner: FloatArray = gate / (1 + np.exp(-gate)) * (normed @ weights[f"{layer}.ffn_up"].T)
    return inner @ weights[f"{layer}.ffn_down"].T


def by_target_ids(logits: FloatArray, known: Sequence[int] | FloatArray | None) -> FloatArray:
    by_id = np.full((*logits.shape[:-1], BYTE_VOCABULARY_SIZE), -np.inf)
    by_id[..., slice(None) if known is None else known] = logits
    return by_id


def forward_mtp(path: Path, tokens: list[int], states: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return what the MTP layer of Qwen 3.5 makes of rows: its own states, and logits.

    Attention whose heads are gated, over the projection of embedding and state, both normed.
    """
    weights, rows, size, layer = read_weights(path), len(tokens), 16, "blk.4"
    places = range(rows)
    embedded = norm(weights["token_embd"][tokens], weights[f"{layer}.nextn.enorm"])
    both = np.concatenate([embedded, norm(states, weights[f"{layer}.nextn.hnorm"])], -1)
    hidden = both @ weights[f"{layer}.nextn.eh_proj"].T
    normed = norm(hidden, weights[f"{layer}.attn_norm"])
    queries = (normed @ weights[f"{layer}.attn_q"].T).reshape(rows, 2, 2 * size)
    gates = queries[..., size:].reshape(rows, -1)
    asked = turn(norm(queries[..., :size], weights[f"{layer}.attn_q_norm"]), places)
    keys: FloatArray
    keys, values = ((normed @ weights[f"{layer}.attn_{name}"].T).reshape(rows, 1, size) for name in "kv")
    keys = turn(norm(keys, weights[f"{layer}.attn_k_norm"]), places)
    mixed = attend(asked, keys, values, np.tri(rows, dtype=bool), size**-0.5)
    hidden = hidden + (mixed / (1 + np.exp(-gates))) @ weights[f"{layer}.attn_output"].T
    hidden = hidden + feed(norm(hidden, weights[f"{layer}.post_attention_norm"]), weights, layer)
    own = norm(hidden, weights[f"{layer}.nextn.shared_head_norm"])
    return own, own @ weights["output"].T


def forward_eagle(
    path: Path, tokens: list[int], states: FloatArray, fed_back: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Return what an EAGLE-3 head makes of rows: its own states, and logits by the target's ids.

    Source: https://arxiv.org/abs/2503.01840, section 3.
    """
    weights, rows, size, layer = read_weights(path), len(tokens), 16, "blk.0"
    fused = states.astype(np.float64) @ weights["fc"].T
    if fed_back is not None:
        fused = np.concatenate((fused, fed_back))
    embedded = norm(weights["token_embd"][tokens], weights[f"{layer}.attn_norm"])
    both = np.concatenate([embedded, norm(fused, weights[f"{layer}.attn_norm_2"])], -1)
    queries, keys, values = ((both @ weights[f"{layer}.attn_{name}"].T).reshape(rows, -1, size) for name in "qkv")
    # Pairs of neighbours are turned, as llama.cpp does for this architecture.
    queries, keys = (turn(each, range(rows), neighbours=True) for each in (queries, keys))
    mixed = attend(queries, keys, values, np.tri(rows, dtype=bool), size**-0.5)
    hidden = fused + mixed @ weights[f"{layer}.attn_output"].T
    own = hidden + feed(norm(hidden, weights[f"{layer}.ffn_norm"]), weights, layer)
    return own, by_target_ids(norm(own, weights["output_norm"]) @ weights["output"].T, weights.get("d2t"))


class NumpyBlock:
    """What a DFlash or DSpark head makes of states and a root.

    Source: https://arxiv.org/abs/2602.06036, section 4, and https://arxiv.org/abs/2607.05147, section 3.
    """

    def __init__(self, path: Path, target: Path, states: FloatArray, root: int) -> None:
        self.weights, of_target = weights, _ = read_weights(path), read_weights(target)
        size, length = 16, len(states)
        fused = norm(states.astype(np.float64) @ weights["fc"].T, weights["enc.output_norm"], 1e-6)
        hidden = of_target["token_embd"][[root, *[MASK_ID] * (BLOCK_ROWS - 1)]]
        places = range(length, length + BLOCK_ROWS)

        def heads(rows: FloatArray, name: str) -> FloatArray:
            found: FloatArray = (rows @ weights[name].T).reshape(len(rows), -1, size)
            return norm(found, weights[f"{name}_norm"], 1e-6) if f"{name}_norm" in weights else found

        for layer in ("blk.0", "blk.1"):
            normed = norm(hidden, weights[f"{layer}.attn_norm"], 1e-6)
            keys = np.concatenate(
                [turn(heads(fused, f"{layer}.attn_k"), range(length)), turn(heads(normed, f"{layer}.attn_k"), places)]
            )
            values = heads(np.concatenate([fused, normed]), f"{layer}.attn_v")
            mixed = attend(turn(heads(normed, f"{layer}.attn_q"), places), keys, values, scale=size**-0.5)
            hidden = hidden + mixed @ weights[f"{layer}.attn_output"].T
            hidden = hidden + feed(norm(hidden, weights[f"{layer}.ffn_norm"], 1e-6), weights, layer)
        self._hidden = norm(hidden, weights["output_norm"], 1e-6)
        output = weights.get("output", of_target.get("output", of_target["token_embd"]))
        self._logits = self._hidden @ output.T

    def row(self, row: int, before: list[int]) -> tuple[FloatArray, float | None]:
        """Return logits by the target's ids, and the confidence, behind a root and drafts."""
        logits, confidence = self._logits[row], None
        if "markov_w1" in self.weights:
            adds = self.weights["markov_w1"][before[-1]]
            logits = logits + self.weights["markov_w2"] @ adds
            log_odds = self.weights["conf_proj"][0] @ np.concatenate([self._hidden[row], adds]) + 0.3
            confidence = float(1 / (1 + np.exp(-log_odds)))
        return by_target_ids(logits, self.weights.get("d2t")), confidence


def forward_gemma4(path: Path, tokens: list[int]) -> tuple[FloatArray, Cache]:
    """Return the states that the tokens of a model leave, and what a head reads of its cache."""
    weights, places = read_weights(path), np.arange(len(tokens))
    hidden: FloatArray = weights["token_embd"][tokens] * np.sqrt(weights["token_embd"].shape[1])
    cache: Cache = {}
    for layer in range(1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blk."))):
        has_window = layer % 2 == 0
        if f"blk.{layer}.attn_k" in weights:
            normed = norm(hidden, weights[f"blk.{layer}.attn_norm"], 1e-6)
            one, other = ((normed @ weights[f"blk.{layer}.attn_{name}"].T)[:, None] for name in "kv")
            keys = norm(one, weights[f"blk.{layer}.attn_k_norm"], 1e-6)
            keys = turn(keys, places, None if has_window else _slowed(weights))
            cache[has_window] = keys, norm(other, epsilon=1e-6)
        hidden = _gemma4_layer(weights, layer, hidden, places, cache, has_window)
    return norm(hidden, weights["output_norm"], 1e-6), cache


def forward_gemma4_assistant(
    path: Path, target: Path, cache: Cache, tokens: list[int], states: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the head's own states and its logits of rows behind all that is cached, which do not see each other.

    Source: https://ai.google.dev/gemma/docs/mtp/overview.
    """
    weights, embedding = read_weights(path), read_weights(target)["token_embd"]
    places = np.full(len(tokens), len(cache[True][0]))
    both = np.concatenate([embedding[tokens] * np.sqrt(embedding.shape[1]), states], -1)
    hidden: FloatArray = both @ weights["nextn.pre_projection"].T
    for layer in (0, 1):
        hidden = _gemma4_layer(weights, layer, hidden, places, cache, layer == 0)
    hidden = norm(hidden, weights["output_norm"], 1e-6)
    return hidden @ weights["nextn.post_projection"].T, hidden @ weights["token_embd"].T


def _gemma4_layer(
    weights: Weights, number: int, hidden: FloatArray, places: Any, cache: Cache, has_window: bool
) -> FloatArray:
    layer = f"blk.{number}"
    keys, values = cache[has_window]
    queries: FloatArray = (norm(hidden, weights[f"{layer}.attn_norm"], 1e-6) @ weights[f"{layer}.attn_q"].T).reshape(
        len(hidden), 2, -1
    )
    queries = norm(queries, weights[f"{layer}.attn_q_norm"], 1e-6)
    queries = turn(queries, places, None if has_window else _slowed(weights))
    back = places[:, None] - np.arange(len(keys))
    mixed = attend(queries, keys, values, (back >= 0) & ((back < 16) | (not has_window)))
    mixed = norm(mixed @ weights[f"{layer}.attn_output"].T, weights[f"{layer}.post_attention_norm"], 1e-6)
    hidden = hidden + mixed
    normed = norm(hidden, weights[f"{layer}.ffn_norm"], 1e-6)
    gate = _as_half(normed @ weights[f"{layer}.ffn_gate"].T)  # what llama.cpp has a table of
    gate = _as_half(0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))))
    inner = (gate * (normed @ weights[f"{layer}.ffn_up"].T)) @ weights[f"{layer}.ffn_down"].T
    return (hidden + norm(inner, weights[f"{layer}.post_ffw_norm"], 1e-6)) * weights[f"{layer}.layer_output_scale"]


def _slowed(weights: Weights) -> FloatArray:
    divisors = weights["rope_freqs"]
    return 10000.0 ** (-np.arange(len(divisors)) / len(divisors)) / divisors


def _as_half(values: FloatArray) -> FloatArray:
    return values.astype(np.float16).astype(np.float64)
