"""Random models of a few layers, of architectures that no embedded model has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.helpers import finish

VOCABULARY_SIZE = 96
"""Of the models that :func:`write_model` makes."""

MEAN, RANK = 1, 4
"""GGUF's numbers of kinds of pooling."""

MASK_ID = 299
"""Token that masks others in blocks of :func:`write_block_head`."""

BYTE_VOCABULARY_SIZE = 300
"""Of those with a token for every byte."""


Shapes = dict[str, tuple[int, ...]]


def _write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    add_tokenizer: Callable[[Any], object],
) -> Path:
    """Write a file; the keys of the metadata get the architecture's name, but for those of the tokenizer."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in metadata.items():
        if value is not None:
            add[type(value)](key if key.startswith("tokenizer.") else f"{architecture}.{key}", value)
    add_tokenizer(writer)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    return finish(writer, path)


def _drawn(rng: np.random.Generator, shapes: Shapes, embedding: float | None = 0.5) -> dict[str, Any]:
    """Draw weights, of embeddings with that spread where one is given."""
    return {
        name: rng.normal(
            0, embedding if embedding and name.startswith("token_embd") else 1.5 / np.sqrt(shape[-1]), shape
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def _drawn_norms(rng: np.random.Generator, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {f"{name}.weight": (1 + 0.1 * rng.standard_normal(size)).astype(np.float32) for name, size in sizes.items()}


def _attention(layer: int, width: int, heads: int, kv_heads: int) -> Shapes:
    kv = width * kv_heads // heads
    shapes = {"attn_q": (width, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, width)}
    return {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def _feed_forward(layer: int, width: int, wide: int) -> Shapes:
    shapes = {"ffn_gate": (wide, width), "ffn_up": (wide, width), "ffn_down": (width, wide)}
    return {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def write_model(
    path: Path,
    architecture: str,
    seed: int = 0,
    tokenizer: str | None = None,
    pooling: int | None = None,
    mtp: bool = False,
    only_mtp: bool = False,
    heads: int = 2,
    layers: int = 2,
    **flags: bool,
) -> Path:
    """Write a random model of a few layers; weights large enough that every token matters.

    Args:
        path: of the file.
        architecture: llama.cpp's name of it.
        seed: of the weights.
        tokenizer: GGUF's name of a kind for :func:`add_tokenizer`, or ``"bytes"`` for one token a byte, with a
            vocabulary of :data:`BYTE_VOCABULARY_SIZE`; ``None`` for a model without one.
        pooling: GGUF's number of how an encoder's vectors become one: 1 is their mean, 4 a score.
        mtp: whether a model in the way of Qwen 3.5 has an MTP layer behind its others.
        only_mtp: leave out all layers but that one.
        heads: of attention, of 16 numbers each.
        layers: of architectures whose number of layers is not fixed here.
        flags: as ``add_eos_token``.
    """
    rng = np.random.default_rng(seed)
    size, width, wide = 16, 16 * heads, 48
    vocabulary_size = BYTE_VOCABULARY_SIZE if tokenizer == "bytes" else VOCABULARY_SIZE
    said: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": width,
        "feed_forward_length": wide,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
    }
    has_heads = {"attention.head_count": heads}
    has_sizes = {**has_heads, "attention.key_length": size, "attention.value_length": size}
    tensors: Shapes = {"token_embd.weight": (vocabulary_size, width)}
    norms: Shapes = {"output_norm.weight": (width,)}

    def has_norms(layer: int, *names: str, of: int = width) -> None:
        norms.update({f"blk.{layer}.{name}_norm.weight": (of,) for name in names})

    match architecture:
        case "llama" | "qwen3":
            said |= has_heads if architecture == "llama" else has_sizes | {"attention.head_count_kv": heads}
            for layer in range(layers):
                tensors |= _attention(layer, width, heads, heads) | _feed_forward(layer, width, wide)
                has_norms(layer, "attn", "ffn")
                if architecture == "qwen3":
                    has_norms(layer, "attn_q", "attn_k", of=size)
        case "gemma3":  # every layer but each sixth looks back 48 tokens
            layers = 6
            said |= has_sizes | {"attention.head_count_kv": 1, "attention.sliding_window": 48}
            for layer in range(layers):
                tensors |= _attention(layer, width, heads, 1) | _feed_forward(layer, width, wide)
                has_norms(layer, "attn", "post_attention", "ffn", "post_ffw")
                has_norms(layer, "attn_q", "attn_k", of=size)
        case "lfm2":  # a convolution, attention, a convolution: rolls back from snapshots
            layers = 3
            said |= has_heads | {"attention.head_count_kv": [0, 1, 0], "shortconv.l_cache": 3}
            norms = {"token_embd_norm.weight": (width,)}
            for layer in range(layers):
                tensors |= _feed_forward(layer, width, wide)
                has_norms(layer, "attn", "ffn")
                if layer == 1:
                    tensors |= _attention(layer, width, heads, 1)
                    has_norms(layer, "attn_q", "attn_k", of=size)
                else:
                    tensors[f"blk.{layer}.shortconv.conv.weight"] = (width, 3)
                    tensors[f"blk.{layer}.shortconv.in_proj.weight"] = (3 * width, width)
                    tensors[f"blk.{layer}.shortconv.out_proj.weight"] = (width, width)
        case "qwen35":  # a gated delta net and attention by turns: rolls back from snapshots
            layers = 4
            state, groups, values = 8, 2, 4
            said |= has_sizes | {
                "attention.head_count_kv": 1,
                "rope.dimension_count": size,
                "rope.dimension_sections": [3, 3, 2, 0],
                "full_attention_interval": 2,
                "ssm.conv_kernel": 4,
                "ssm.state_size": state,
                "ssm.group_count": groups,
                "ssm.time_step_rank": values,
                "ssm.inner_size": state * values,
            }
            tensors["output.weight"] = (vocabulary_size, width)
            mixed = state * groups * 2 + state * values
            if mtp:
                norms |= {f"blk.4.nextn.{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head_norm")}
                tensors["blk.4.nextn.eh_proj.weight"] = (width, 2 * width)
                said["nextn_predict_layers"] = 1
                layers += 1
            for layer in range(layers):
                tensors |= _feed_forward(layer, width, wide)
                has_norms(layer, "attn", "post_attention")
                if layer % 2 or layer == 4:
                    tensors |= _attention(layer, width, heads, 1)
                    tensors[f"blk.{layer}.attn_q.weight"] = (2 * width, width)  # each query with a gate
                    has_norms(layer, "attn_q", "attn_k", of=size)
                else:
                    norms |= {f"blk.{layer}.ssm_dt.bias": (values,), f"blk.{layer}.ssm_norm.weight": (state,)}
                    tensors |= {
                        f"blk.{layer}.attn_qkv.weight": (mixed, width),
                        f"blk.{layer}.attn_gate.weight": (state * values, width),
                        f"blk.{layer}.ssm_conv1d.weight": (mixed, 4),
                        f"blk.{layer}.ssm_a": (values,),
                        f"blk.{layer}.ssm_beta.weight": (values, width),
                        f"blk.{layer}.ssm_alpha.weight": (values, width),
                        f"blk.{layer}.ssm_out.weight": (width, state * values),
                    }
        case "mamba":  # recurrent, and without snapshots
            inner, state, rank = 2 * width, 8, 4
            said |= {"ssm.conv_kernel": 4, "ssm.inner_size": inner}
            said |= {"ssm.state_size": state, "ssm.time_step_rank": rank}
            for layer in range(layers):
                has_norms(layer, "attn")
                norms |= {f"blk.{layer}.{name}": (inner,) for name in ("ssm_d", "ssm_dt.bias", "ssm_conv1d.bias")}
                tensors |= {
                    f"blk.{layer}.ssm_in.weight": (2 * inner, width),
                    f"blk.{layer}.ssm_conv1d.weight": (inner, 4),
                    f"blk.{layer}.ssm_x.weight": (rank + 2 * state, inner),
                    f"blk.{layer}.ssm_dt.weight": (inner, rank),
                    f"blk.{layer}.ssm_a": (inner, state),
                    f"blk.{layer}.ssm_out.weight": (width, inner),
                }
        case "bert":  # an encoder
            said |= has_heads | {"attention.causal": False}
            tensors["token_types.weight"] = (2, width)
            tensors["position_embd.weight"] = (256, width)
            norms = {"token_embd_norm.weight": (width,), "token_embd_norm.bias": (width,)}
            for layer in range(layers):
                tensors |= _attention(layer, width, heads, heads) | _feed_forward(layer, width, wide)
                del tensors[f"blk.{layer}.ffn_gate.weight"]
                for name in ("attn_q", "attn_k", "attn_v", "ffn_up", "attn_output", "ffn_down"):
                    tensors[f"blk.{layer}.{name}.bias"] = (wide if name == "ffn_up" else width,)
                for name in ("attn_output_norm", "layer_output_norm"):
                    norms |= {f"blk.{layer}.{name}.{part}": (width,) for part in ("weight", "bias")}
            if pooling == RANK:
                tensors |= {"cls.weight": (width, width), "cls.bias": (width,)}
                tensors |= {"cls.output.weight": (1, width), "cls.output.bias": (1,)}
        case _:
            pass  # the architecture alone is the point
    weights = _drawn(rng, tensors)
    weights |= {name: -np.abs(weights[name]) for name in weights if name.endswith("ssm_a")}
    weights |= {name: np.ones(shape, np.float32) for name, shape in norms.items()}
    if only_mtp:
        mine = f"blk.{layers - 1}."
        weights = {name: each for name, each in weights.items() if name.startswith(mine) or not name.startswith("blk.")}

    def tokens(writer: Any) -> None:
        if architecture == "bert":
            writer.add_token_type_count(2)
        if tokenizer is None:
            writer.add_tokenizer_model("no_vocab")
            writer.add_vocab_size(VOCABULARY_SIZE)
        elif tokenizer == "bytes":
            add_byte_tokenizer(writer)
        else:
            add_tokenizer(writer, tokenizer, flags)

    said |= {"block_count": layers, "pooling_type": pooling}
    return _write(path, architecture, said, weights, tokens)


def write_eagle_head(
    path: Path,
    target_width: int,
    target_layers: tuple[int, ...] = (1, 2, 3),
    draft_ids: Sequence[int] | None = None,
    *,
    borrows: bool = False,
    seed: int = 7,
) -> Path:
    """Write a random EAGLE-3 head with the vocabulary of bytes.

    Args:
        path: of the file.
        target_width: numbers of a state of the target.
        target_layers: layers of the target whose states it reads.
        draft_ids: tokens that it knows, in any order; ``None`` for all.
        borrows: take embedding and output layer of the target, whose width it has then.
        seed: of the weights.
    """
    rng = np.random.default_rng(seed)
    width, heads, size, wide = target_width if borrows else 32, 2, 16, 48
    said = {
        "context_length": 256,
        "block_count": 1,
        "embedding_length": width,
        "feed_forward_length": wide,
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "target_layers": list(target_layers),
        "target_hidden_size": target_width,
        "norm_before_residual": False,
        "norm_before_fc": False,
    }
    known = BYTE_VOCABULARY_SIZE if draft_ids is None else len(draft_ids)
    tensors = {
        "fc.weight": (width, target_width * len(target_layers)),
        "blk.0.attn_q.weight": (size * heads, 2 * width),
        "blk.0.attn_k.weight": (size, 2 * width),
        "blk.0.attn_v.weight": (size, 2 * width),
        "blk.0.attn_output.weight": (width, size * heads),
        **_feed_forward(0, width, wide),
    }
    if not borrows:
        tensors |= {"token_embd.weight": (BYTE_VOCABULARY_SIZE, width), "output.weight": (known, width)}
    weights = _drawn(rng, tensors)
    names = ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm")
    weights |= _drawn_norms(rng, dict.fromkeys(names, width))
    if draft_ids is not None:
        weights["d2t"] = np.array(draft_ids, np.int64)
    return _write(path, "eagle3", said, weights, add_byte_tokenizer)


def write_block_head(
    path: Path,
    target_width: int,
    target_layers: tuple[int, ...] = (1, 2, 3),
    draft_ids: Sequence[int] | None = None,
    *,
    rank: int = 0,
    metadata: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    seed: int = 1,
) -> Path:
    """Write a random DFlash head with the vocabulary of bytes, whose blocks have 5 rows.

    Args:
        path: of the file.
        target_width: numbers of a state of a layer of the target, whose embedding and output layer it takes.
        target_layers: layers of the target whose states it reads.
        draft_ids: tokens that it knows, in any order; ``None`` for all. It has an output layer of its own then.
        rank: of what each token adds to the next of a block, as in DSpark, with confidences; 0 for DFlash.
        metadata: stands in the place of its own, or beside it; ``None`` leaves a key out.
        without: names of tensors to leave out.
        seed: of the weights.
    """
    rng = np.random.default_rng(seed)
    width, heads, size, wide, layers = target_width, 2, 16, 48, 2
    said: dict[str, Any] = {
        "block_count": layers,
        "context_length": 256,
        "embedding_length": width,
        "feed_forward_length": wide,
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "block_size": 5,
        "target_layers": list(target_layers),
        "tokenizer.ggml.mask_token_id": MASK_ID,
        **{key.removeprefix("dflash."): value for key, value in (metadata or {}).items()},
    }
    known = BYTE_VOCABULARY_SIZE if draft_ids is None else len(draft_ids)
    tensors: Shapes = {"fc.weight": (width, target_width * len(target_layers))}
    norms = {"enc.output_norm": width, "output_norm": width}
    if draft_ids is not None:
        tensors["output.weight"] = (known, width)
    if rank:
        tensors |= {"markov_w1.weight": (BYTE_VOCABULARY_SIZE, rank), "markov_w2.weight": (known, rank)}
        tensors |= {"conf_proj.weight": (1, width + rank)}
    for layer in range(layers):
        for name, shape in (("q", (size * heads, width)), ("k", (size, width)), ("v", (size, width))):
            tensors[f"blk.{layer}.attn_{name}.weight"] = shape
        tensors[f"blk.{layer}.attn_output.weight"] = (width, size * heads)
        tensors |= _feed_forward(layer, width, wide)
        norms |= {f"blk.{layer}.{name}": width for name in ("attn_norm", "ffn_norm")}
        norms |= {f"blk.{layer}.{name}": size for name in ("attn_q_norm", "attn_k_norm")}
    drawn = {name: shape for name, shape in tensors.items() if name not in without}
    weights = _drawn(rng, drawn, embedding=None) | _drawn_norms(rng, norms)
    if rank:
        weights["conf_proj.bias"] = np.full(1, 0.3, np.float32)
    if draft_ids is not None:
        weights["d2t"] = np.array(draft_ids, np.int64)
    return _write(path, "dflash", said, weights, add_byte_tokenizer)


def write_gemma4(path: Path, *, layers: int = 4, shared: int = 0, seed: int = 0) -> Path:
    """Write a random model in the way of Gemma 4, with the vocabulary of bytes.

    Its layers look back 16 tokens and everywhere by turns.

    Args:
        path: of the file.
        layers: an even number.
        shared: the last so many take the keys and values of those before.
        seed: of the weights.
    """
    return _write_gemma4(path, layers, seed, shared=shared)


def write_gemma4_assistant(
    path: Path, *, state_width: int = 32, seed: int = 1, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Write a random head for what :func:`write_gemma4` makes; ``metadata`` stands in the place of its own."""
    return _write_gemma4(path, 2, seed, state_width=state_width, metadata=metadata)


def _write_gemma4(
    path: Path,
    layers: int,
    seed: int,
    *,
    shared: int = 0,
    state_width: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    rng = np.random.default_rng(seed)
    width, heads, wide, sizes = 32 if state_width is None else 24, 2, 48, (16, 32)
    said: dict[str, Any] = {
        "block_count": layers,
        "context_length": 256,
        "embedding_length": width,
        "feed_forward_length": wide,
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "attention.key_length": sizes[1],
        "attention.value_length": sizes[1],
        "attention.key_length_swa": sizes[0],
        "attention.value_length_swa": sizes[0],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [layer % 2 == 0 for layer in range(layers)],
        "rope.freq_base": 10000.0,
        "rope.freq_base_swa": 10000.0,
        "rope.dimension_count": sizes[1],
        "rope.dimension_count_swa": sizes[0],
    }
    if state_width is None:
        said |= {
            "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        }
    else:
        said |= {"nextn_predict_layers": layers, "embedding_length_out": state_width}
    norms = {"output_norm": width}
    tensors: Shapes = {"token_embd.weight": (BYTE_VOCABULARY_SIZE, width)}
    if state_width is None:
        tensors["output.weight"] = (BYTE_VOCABULARY_SIZE, width)  # the embedding again would say each token once more
    else:
        tensors |= {"nextn.pre_projection.weight": (width, 2 * state_width)}
        tensors |= {"nextn.post_projection.weight": (state_width, width)}
    for layer in range(layers):
        size = sizes[layer % 2]
        tensors[f"blk.{layer}.attn_q.weight"] = (size * heads, width)
        tensors[f"blk.{layer}.attn_output.weight"] = (width, size * heads)
        tensors |= _feed_forward(layer, width, wide)
        names = {"attn_norm": width, "post_attention_norm": width, "ffn_norm": width, "post_ffw_norm": width}
        names |= {"attn_q_norm": size, "layer_output_scale": 1}
        if state_width is None and layer < layers - shared:
            tensors |= {f"blk.{layer}.attn_{name}.weight": (size, width) for name in "kv"}
            names["attn_k_norm"] = size
        norms |= {f"blk.{layer}.{name}": size for name, size in names.items()}
    weights = _drawn(rng, tensors, embedding=0.05) | _drawn_norms(rng, norms)
    # A part of each head turns with the position.
    weights["rope_freqs.weight"] = np.array([1.0] * 4 + [1e30] * (sizes[1] // 2 - 4), np.float32)
    architecture = "gemma4" if state_width is None else "gemma4-assistant"
    return _write(path, architecture, {**said, **(metadata or {})}, weights, add_byte_tokenizer)


def add_tokenizer(writer: Any, kind: str, flags: dict[str, bool]) -> None:
    """Add a tokenizer of letters, with tokens that open and close texts and all that fills the rest of a vocabulary."""
    types = pytest.importorskip("gguf").TokenType
    begins_word = {"gpt2": "Ġ", "bert": "▁", "llama": "▁", "t5": "▁"}[kind]
    tokens = {
        "<unk>": types.UNKNOWN,
        "<s>": types.CONTROL,
        "</s>": types.CONTROL,
        "<turn>": types.CONTROL,
        "<tool>": types.USER_DEFINED,
        **dict.fromkeys("abcdefghijklmnopqrstuvwxyz", types.NORMAL),
        begins_word: types.NORMAL,
        **{begins_word + letter: types.NORMAL for letter in "ah"},
        "[PAD1]": types.NORMAL,  # a word, whatever it looks like
        "[PAD34]": types.USER_DEFINED,
        "[PAD35]": types.UNKNOWN,
    }
    tokens |= {f"<reserved{i}>": types.UNUSED for i in range(VOCABULARY_SIZE - len(tokens))}
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(tokens))
    writer.add_token_types([int(kind) for kind in tokens.values()])
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_merges([f"{begins_word} a", f"{begins_word} h"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_sep_token_id(2)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)


def add_byte_tokenizer(writer: Any) -> None:
    """Add a tokenizer with a token for every byte, behind three control tokens, and letters that fill the rest."""
    types = pytest.importorskip("gguf").TokenType
    tokens = {"<unk>": types.UNKNOWN, "<s>": types.CONTROL, "</s>": types.CONTROL}
    tokens |= {f"<0x{byte:02X}>": types.BYTE for byte in range(256)}
    tokens |= {chr(0x4E00 + i): types.NORMAL for i in range(BYTE_VOCABULARY_SIZE - len(tokens))}
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(tokens))
    writer.add_token_types([int(kind) for kind in tokens.values()])
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
