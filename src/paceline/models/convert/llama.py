"""A Llama-type model without its weights: its sizes, in the words of both formats, and the tensors it must have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np

from paceline.core.errors import InputError, ModelFileError
from paceline.models.convert.rope import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    config_of_rope,
    recover_llama3,
    rope_of_config,
)

if TYPE_CHECKING:
    from paceline.models.convert.dtypes import Floats
    from paceline.models.convert.gguf_file import GGUFFile

ARCHITECTURE: Final = "llama"
"""``general.architecture`` of the GGUF files."""

HF_ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM")

ROPE_DIVISORS: Final = "rope_freqs.weight"

_REFUSED_KEYS: Final = (
    "expert_count",
    "attention.scale",
    "attention.sliding_window",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
)
"""Keys under ``llama.`` that change what the model computes, and that a Hugging Face Llama has no word for."""


@dataclass(frozen=True)
class Weight:
    """A tensor, under its two names."""

    hf_name: str
    gguf_name: str
    shape: tuple[int, ...]
    rope_head_dim: int | None = None
    """Rows of one head where they are rotated, so that their order differs between the formats."""


@dataclass(frozen=True)
class LlamaShape:
    """Everything about a model but its weights and its tokenizer."""

    vocab_size: int
    context_length: int
    hidden_size: int
    num_layers: int
    feed_forward_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    tied: bool
    """Whether the output layer is the embedding again."""
    rope: Rope = field(default_factory=lambda: Rope(10000.0))

    def weights(self) -> list[Weight]:
        """Return the tensors that such a model has, all of them, in the order to write them."""
        hidden, wide = self.hidden_size, self.feed_forward_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights = [
            Weight("model.embed_tokens.weight", "token_embd.weight", (self.vocab_size, hidden)),
            Weight("model.norm.weight", "output_norm.weight", (hidden,)),
        ]
        if not self.tied:
            weights.insert(1, Weight("lm_head.weight", "output.weight", (self.vocab_size, hidden)))
        for layer in range(self.num_layers):
            hf, block = f"model.layers.{layer}.", f"blk.{layer}."
            weights += [
                Weight(f"{hf}input_layernorm.weight", f"{block}attn_norm.weight", (hidden,)),
                Weight(f"{hf}self_attn.q_proj.weight", f"{block}attn_q.weight", (queries, hidden), self.head_dim),
                Weight(f"{hf}self_attn.k_proj.weight", f"{block}attn_k.weight", (keys, hidden), self.head_dim),
                Weight(f"{hf}self_attn.v_proj.weight", f"{block}attn_v.weight", (keys, hidden)),
                Weight(f"{hf}self_attn.o_proj.weight", f"{block}attn_output.weight", (hidden, queries)),
                Weight(f"{hf}post_attention_layernorm.weight", f"{block}ffn_norm.weight", (hidden,)),
                Weight(f"{hf}mlp.gate_proj.weight", f"{block}ffn_gate.weight", (wide, hidden)),
                Weight(f"{hf}mlp.up_proj.weight", f"{block}ffn_up.weight", (wide, hidden)),
                Weight(f"{hf}mlp.down_proj.weight", f"{block}ffn_down.weight", (hidden, wide)),
            ]
        return weights

    def rope_divisors(self) -> Floats | None:
        """Return what the GGUF file needs as ``rope_freqs.weight``, ``[head_dim / 2]``, if anything."""
        if not isinstance(self.rope.scaling, Llama3Scaling):
            return None
        return self.rope.scaling.divisors(self.head_dim, self.rope.theta)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def shape_of_gguf(file: GGUFFile) -> LlamaShape:
    """Read the sizes from a GGUF file.

    Raises:
        InputError: it is of another architecture, or has something that a Hugging Face Llama has not.
        ModelFileError: a key is missing or does not fit the others.
    """
    architecture = file.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise InputError(
            f"{file.path} is of architecture {architecture!r}; {ARCHITECTURE!r} (Llama, Mistral and their like) "
            "can be converted"
        )
    for key in _REFUSED_KEYS:
        if file.get(f"llama.{key}"):
            raise InputError(f"{file.path} sets llama.{key}, which a Hugging Face Llama cannot have")
    hidden_size, num_heads = file.integer("llama.embedding_length"), file.integer("llama.attention.head_count")
    num_kv_heads = file.integer("llama.attention.head_count_kv", num_heads)
    head_dim = file.integer("llama.attention.key_length", hidden_size // max(1, num_heads))
    sizes = (hidden_size, num_heads, num_kv_heads, head_dim)
    if min(sizes) < 1 or num_heads % num_kv_heads or head_dim % 2:
        raise ModelFileError(
            f"{file.path} has impossible sizes: hidden {hidden_size}, {num_heads} heads, {num_kv_heads} for keys and "
            f"values, of {head_dim} dimensions"
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.integer(f"llama.{key}", head_dim) != head_dim:
            raise InputError(
                f"{file.path} sets llama.{key} to {file.get(f'llama.{key}')} and not to the {head_dim} of a key, "
                "which a Hugging Face Llama cannot have"
            )
    embedding = file.tensors.get("token_embd.weight")
    return LlamaShape(
        vocab_size=file.integer("llama.vocab_size", 0) if embedding is None else embedding.shape[0],
        context_length=file.integer("llama.context_length"),
        hidden_size=hidden_size,
        num_layers=file.integer("llama.block_count"),
        feed_forward_size=file.integer("llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_epsilon=file.number("llama.attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in file.tensors,
        rope=_rope_of_gguf(file, head_dim),
    )


def _rope_of_gguf(file: GGUFFile, head_dim: int) -> Rope:
    theta = file.number("llama.rope.freq_base", 10000.0)
    factor = file.number("llama.rope.scaling.factor", file.number("llama.rope.scale_linear", 0.0))
    kind = file.get("llama.rope.scaling.type") or ("linear" if factor else "none")
    divisors = file.tensors.get(ROPE_DIVISORS)
    if kind not in ("none", "linear"):
        raise InputError(f"{file.path} scales rope by {kind!r}; none, linear and rope_freqs.weight can be converted")
    linear = LinearScaling(factor) if kind == "linear" and factor not in (0.0, 1.0) else None
    if divisors is None:
        return Rope(theta, linear)
    llama3 = recover_llama3(divisors.rows(0, divisors.shape[0]), head_dim, theta, str(file.path))
    if linear is not None and llama3 is not None:
        raise InputError(f"{file.path} scales rope in two ways at once, which a Hugging Face Llama cannot")
    return Rope(theta, llama3 or linear)


def add_shape_to_gguf(shape: LlamaShape, writer: gguf.GGUFWriter) -> None:
    """Write the sizes as metadata."""
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.feed_forward_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    if shape.head_dim * shape.num_heads != shape.hidden_size:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope.theta)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    if isinstance(shape.rope.scaling, LinearScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.rope.scaling.factor)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def shape_of_config(config: dict[str, Any], name: str) -> LlamaShape:
    """Read the sizes from the content of ``config.json``; ``name`` is the folder's, for the errors.

    Raises:
        InputError: it is of another architecture, or has something that llama.cpp's ``llama`` has not.
        ModelFileError: a size is missing or impossible.
    """
    architectures = config.get("architectures") or [f"model type {config.get('model_type')}"]
    if list(architectures) not in [[known] for known in HF_ARCHITECTURES]:
        raise InputError(
            f"{name} is of architecture {', '.join(map(str, architectures))}; {' and '.join(HF_ARCHITECTURES)} "
            "can be converted"
        )
    refused = {
        "attention_bias": config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
        "quantization_config": config.get("quantization_config"),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "layer_types": set(config.get("layer_types") or ()) - {"full_attention"},
    }
    for key, given in refused.items():
        if given:
            raise InputError(f"{name} sets {key} to {config[key]!r}, which llama.cpp's llama cannot have")
    context_length = _size(config, "max_position_embeddings", name)
    if architectures[0] == "MistralForCausalLM":
        window = config.get("sliding_window", 4096)  # what transformers takes where nothing is said
        if window is not None and window < context_length:
            raise InputError(f"{name} has a sliding window of {window} tokens, which llama.cpp's llama cannot have")
    hidden_size, num_heads = _size(config, "hidden_size", name), _size(config, "num_attention_heads", name)
    shape = LlamaShape(
        vocab_size=_size(config, "vocab_size", name),
        context_length=context_length,
        hidden_size=hidden_size,
        num_layers=_size(config, "num_hidden_layers", name),
        feed_forward_size=_size(config, "intermediate_size", name),
        num_heads=num_heads,
        num_kv_heads=_size(config, "num_key_value_heads", name, num_heads),
        head_dim=_size(config, "head_dim", name, hidden_size // num_heads),
        norm_epsilon=_epsilon(config, name),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=rope_of_config(config, name),
    )
    if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
        raise ModelFileError(
            f"{name} has impossible sizes: {shape.num_heads} heads, {shape.num_kv_heads} for keys and values, of "
            f"{shape.head_dim} dimensions"
        )
    return shape


def _size(config: dict[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFileError(f"{name}: {key} in config.json is {value!r}, and must be a whole number above 0")
    return value


def _epsilon(config: dict[str, Any], name: str) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ModelFileError(f"{name}: rms_norm_eps in config.json is {value!r}, and must be a small number")
    return float(value)


def config_of_shape(shape: LlamaShape) -> dict[str, Any]:
    """Return the entries of ``config.json`` that say the sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.feed_forward_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": shape.norm_epsilon,
        **config_of_rope(shape.rope),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
    }


# --- rows of rotated heads --------------------------------------------------------------------------------------------


def to_gguf_rows(values: Floats, head_dim: int) -> Floats:
    """Reorder whole heads, ``[heads * head_dim, hidden]``: transformers rotates row i of a head with i + head_dim/2.

    llama.cpp's ``llama`` rotates 2i with 2i + 1.
    """
    halves = values.reshape(-1, 2, head_dim // 2, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def to_hf_rows(values: Floats, head_dim: int) -> Floats:
    """Undo :func:`to_gguf_rows`."""
    pairs = values.reshape(-1, head_dim // 2, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
