"""The settings of a Llama-type model in both formats: its sizes, and the names of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np

from paceline.conversion.convert.rope import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    parse_rope,
    recover_llama3,
    rope_to_config,
)
from paceline.conversion.llama import EMBEDDINGS, OUTPUT, OUTPUT_NORM, ROPE_DIVISORS, LlamaFile, LlamaShape
from paceline.core.errors import InputError, ModelFileError
from paceline.core.numbers import shown
from paceline.models.gguf_checks import LARGEST_VOCABULARY, MAX_LAYERS

if TYPE_CHECKING:
    from paceline.models.gguf_file import Floats

HF_ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM")
"""Architectures that can be converted, by transformers' names."""

_HF_NAMES: Final = {
    EMBEDDINGS: "model.embed_tokens.weight",
    OUTPUT_NORM: "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
_HF_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_LARGEST_SIZE: Final = 2**31 - 1
"""Largest size that GGUF can hold."""

_REFUSED_KEYS: Final = (
    "attention.scale",
    "attention.sliding_window",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
)
"""Keys under ``llama.`` that change what the model computes, and that a Hugging Face Llama has no key for."""


@dataclass(frozen=True)
class Weight:
    """A tensor, under its two names."""

    hf_name: str
    gguf_name: str
    shape: tuple[int, ...]
    rotated_head_size: int | None = None
    """Rows of one head where they are rotated, so that their order differs between the formats."""


@dataclass(frozen=True)
class LlamaSettings:
    """Everything about a model but its weights and its tokenizer."""

    shape: LlamaShape
    context_length: int
    norm_epsilon: float
    rope: Rope

    def weights(self) -> list[Weight]:
        """Return all tensors of such a model, in the order to write them."""
        return [
            Weight(_hf_name(name), name, dimensions, self.shape.head_size if _is_rotated(name) else None)
            for name, dimensions in self.shape.tensors().items()
        ]

    def rope_divisors(self) -> Floats | None:
        """Return ``rope_freqs.weight`` of the GGUF file, ``[head_dim / 2]``, if it needs one."""
        if not isinstance(self.rope.scaling, Llama3Scaling):
            return None
        return self.rope.scaling.divisors(self.shape.head_size, self.rope.theta)


def _hf_name(gguf_name: str) -> str:
    if gguf_name in _HF_NAMES:
        return _HF_NAMES[gguf_name]
    _, layer, name, _ = gguf_name.split(".")
    return f"model.layers.{layer}.{_HF_LAYER_NAMES[name]}.weight"


def _is_rotated(gguf_name: str) -> bool:
    return gguf_name.endswith((".attn_q.weight", ".attn_k.weight"))


def check_folder_can_hold(shape: LlamaShape) -> None:
    """Raise ``InputError`` if transformers does not load a model of this shape."""
    if shape.width % shape.heads:
        raise InputError(
            f"{shape.heads} heads do not divide the width {shape.width}, as transformers wants of a folder: "
            "take another number of heads, or stay with a .gguf file"
        )


# --- GGUF -------------------------------------------------------------------------------------------------------------


def read_gguf_settings(file: LlamaFile) -> LlamaSettings:
    """Read the settings from a GGUF file; raise ``InputError`` for what a Hugging Face Llama has not."""
    for key in _REFUSED_KEYS:
        if file.get(f"llama.{key}"):
            raise InputError(f"{file.path} sets llama.{key}, which a Hugging Face Llama cannot have")
    context_length = file.integer("llama.context_length")
    return LlamaSettings(file.shape, context_length, file.epsilon, _read_gguf_rope(file))


def _read_gguf_rope(file: LlamaFile) -> Rope:
    theta = file.number("llama.rope.freq_base", 10000.0)
    factor = file.number("llama.rope.scaling.factor", file.number("llama.rope.scale_linear", 0.0))
    kind = file.get("llama.rope.scaling.type") or ("linear" if factor else "none")
    divisors = file.tensors.get(ROPE_DIVISORS)
    if kind not in ("none", "linear"):
        raise InputError(f"{file.path} scales rope by {kind!r}; none, linear and rope_freqs.weight can be converted")
    linear = LinearScaling(factor) if kind == "linear" and factor not in (0.0, 1.0) else None
    if divisors is None:
        return Rope(theta, linear)
    llama3 = recover_llama3(divisors.floats(), file.shape.head_size, theta, str(file.path))
    if linear is not None and llama3 is not None:
        raise InputError(f"{file.path} scales rope in two ways at once, which a Hugging Face Llama cannot")
    return Rope(theta, llama3 or linear)


def add_settings_to_gguf(settings: LlamaSettings, writer: gguf.GGUFWriter) -> None:
    settings.shape.add_to_gguf(writer)
    writer.add_context_length(settings.context_length)
    writer.add_rope_freq_base(settings.rope.theta)
    writer.add_layer_norm_rms_eps(settings.norm_epsilon)
    if isinstance(settings.rope.scaling, LinearScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(settings.rope.scaling.factor)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def parse_config(config: dict[str, Any], name: str) -> LlamaSettings:
    """Read the settings from the content of ``config.json``; ``name`` is the folder's, for the errors.

    Raises ``InputError`` for another architecture, and for what llama.cpp's ``llama`` has not.
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
            raise InputError(f"{name} sets {key} to {shown(config[key])}, which llama.cpp's llama cannot have")
    context_length = _size(config, "max_position_embeddings", name)
    if architectures[0] == "MistralForCausalLM":
        window = config.get("sliding_window", 4096)  # transformers' default
        if window is not None and window < context_length:
            raise InputError(f"{name} has a sliding window of {window} tokens, which llama.cpp's llama cannot have")
    width, heads = _size(config, "hidden_size", name), _size(config, "num_attention_heads", name)
    shape = LlamaShape(
        layers=_size(config, "num_hidden_layers", name, most=MAX_LAYERS),
        width=width,
        feed_forward=_size(config, "intermediate_size", name),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", name, heads),
        head_size=_size(config, "head_dim", name, width // heads),
        vocab_size=_size(config, "vocab_size", name, most=LARGEST_VOCABULARY),
        tied=bool(config.get("tie_word_embeddings", False)),
    )
    if shape.heads % shape.kv_heads or shape.head_size % 2:
        raise ModelFileError(
            f"{name} has impossible sizes: {shape.heads} heads, {shape.kv_heads} for keys and values, of "
            f"{shape.head_size} dimensions"
        )
    return LlamaSettings(shape, context_length, _epsilon(config, name), parse_rope(config, name))


def _size(config: dict[str, Any], key: str, name: str, default: int | None = None, *, most: int = _LARGEST_SIZE) -> int:
    value = config.get(key)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelFileError(
            f"{name}: {key} in config.json is {shown(value)}, and must be a whole number from 1 to {most}"
        )
    return value


def _epsilon(config: dict[str, Any], name: str) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ModelFileError(f"{name}: rms_norm_eps in config.json is {shown(value)}, and must be a small number")
    return float(value)


def settings_to_config(settings: LlamaSettings) -> dict[str, Any]:
    shape = settings.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": settings.context_length,
        "rms_norm_eps": settings.norm_epsilon,
        **rope_to_config(settings.rope),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
    }


# --- rows of rotated heads --------------------------------------------------------------------------------------------


def to_gguf_rows(values: Floats, head_size: int) -> Floats:
    """Reorder whole heads, ``[heads * head_size, hidden]``: transformers rotates row i of a head with i + head_size/2.

    llama.cpp's ``llama`` rotates 2i with 2i + 1.
    """
    halves = values.reshape(-1, 2, head_size // 2, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def to_hf_rows(values: Floats, head_size: int) -> Floats:
    pairs = values.reshape(-1, head_size // 2, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
