"""Tiny models of Hugging Face."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from paceline.engines.torch_hf.engine import TorchHFEngine

torch = pytest.importorskip("torch", reason="needs paceline[torch]")

transformers = pytest.importorskip("transformers", reason="needs paceline[torch]")

tokenizers = pytest.importorskip("tokenizers", reason="needs paceline[torch]")

VOCAB_SIZE = 300

WINDOW = 8
"""Of the models with sliding windows: far shorter than the sequences they are tested on."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

OLD_SHAPE = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}

ENDS = {"bos_token_id": 1, "eos_token_id": 2}

ONE_HEAD_FOR_EACH = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}

ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SHAPE),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", SHAPE | {"head_dim": 16}),
    "mixtral": ("MixtralConfig", SHAPE | {"num_local_experts": 4}),
    "gpt_neox": ("GPTNeoXConfig", ONE_HEAD_FOR_EACH),
    "gpt2, learned positions": ("GPT2Config", OLD_SHAPE | ENDS),
    "gptj, eager": ("GPTJConfig", OLD_SHAPE | ENDS | {"rotary_dim": 8}),
    "granite, scaled logits": ("GraniteConfig", SHAPE | {"logits_scaling": 3.0}),
    "mistral, all layers slide": ("MistralConfig", SHAPE | {"sliding_window": WINDOW}),
    "qwen2, one layer slides": (
        "Qwen2Config",
        SHAPE | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "gemma2, eager, one layer slides": ("Gemma2Config", SHAPE | {"head_dim": 16} | ALTERNATING),
    "gemma3, one layer slides": ("Gemma3TextConfig", SHAPE | {"head_dim": 16} | ALTERNATING),
}


def build(config_class: str, values: dict[str, Any]) -> Any:
    """A model with random weights, large enough that attention shows in the logits."""
    config = getattr(transformers, config_class)(**values)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.12, generator=generator)
    return model


@cache
def tiny(architecture: str = "llama") -> Any:
    return build(*ARCHITECTURES[architecture])


def byte_level_backend() -> Any:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def wrapped(backend: Any, **names: Any) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def tiny_tokenizer() -> Any:
    return wrapped(byte_level_backend())


def start(model: Any = None, **limits: Any) -> TorchHFEngine:
    return TorchHFEngine.from_model(
        model if model is not None else tiny(),
        tiny_tokenizer(),
        **{"context_length": 128, "max_sequences": 4, **limits},
    )
