"""Random models of a few layers, of architectures that no embedded model has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

VOCABULARY_SIZE = 96
"""Of the models that :func:`write_model` makes."""

MEAN, RANK = 1, 4
"""GGUF's numbers of kinds of pooling."""

MASK_ID = 299
"""Token that masks others in blocks of :func:`write_block_head`."""

BYTE_VOCABULARY_SIZE = 300
"""Of those with a token for every byte."""


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
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(seed)
    width, wide = 16 * heads, 48
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(wide)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    vocabulary_size = VOCABULARY_SIZE
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(VOCABULARY_SIZE)
    elif tokenizer == "bytes":
        vocabulary_size = BYTE_VOCABULARY_SIZE
        add_byte_tokenizer(writer)
    else:
        add_tokenizer(writer, tokenizer, flags)
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary_size, width)}
    norms = {"output_norm.weight": (width,)}

    def attention(layer: int, kv_heads: int) -> None:
        kv = width * kv_heads // heads
        tensors.update(
            {
                f"blk.{layer}.attn_q.weight": (width, width),
                f"blk.{layer}.attn_k.weight": (kv, width),
                f"blk.{layer}.attn_v.weight": (kv, width),
                f"blk.{layer}.attn_output.weight": (width, width),
            }
        )

    def feed_forward(layer: int) -> None:
        tensors.update(
            {
                f"blk.{layer}.ffn_gate.weight": (wide, width),
                f"blk.{layer}.ffn_up.weight": (wide, width),
                f"blk.{layer}.ffn_down.weight": (width, wide),
            }
        )

    match architecture:
        case "llama":
            writer.add_head_count(heads)
            for layer in range(layers):
                attention(layer, heads)
                feed_forward(layer)
                norms |= {f"blk.{layer}.{name}_norm.weight": (width,) for name in ("attn", "ffn")}
        case "qwen3":
            writer.add_head_count(heads)
            writer.add_head_count_kv(heads)
            writer.add_key_length(width // heads)
            writer.add_value_length(width // heads)
            for layer in range(layers):
                attention(layer, heads)
                feed_forward(layer)
                norms |= {f"blk.{layer}.{name}_norm.weight": (width,) for name in ("attn", "ffn")}
                norms |= {f"blk.{layer}.attn_{name}_norm.weight": (width // heads,) for name in ("q", "k")}
        case "gemma3":  # every layer but each sixth looks back 48 tokens
            layers = 6
            writer.add_head_count(heads)
            writer.add_head_count_kv(1)
            writer.add_key_length(width // heads)
            writer.add_value_length(width // heads)
            writer.add_sliding_window(48)
            for layer in range(layers):
                attention(layer, 1)
                feed_forward(layer)
                for name in ("attn", "post_attention", "ffn", "post_ffw"):
                    norms[f"blk.{layer}.{name}_norm.weight"] = (width,)
                for name in ("attn_q", "attn_k"):
                    norms[f"blk.{layer}.{name}_norm.weight"] = (width // heads,)
        case "lfm2":  # a convolution, attention, a convolution: rolls back from snapshots
            layers = 3
            writer.add_head_count(heads)
            writer.add_head_count_kv([0, 1, 0])
            writer.add_shortconv_l_cache(3)
            norms = {"token_embd_norm.weight": (width,)}
            for layer in range(layers):
                feed_forward(layer)
                norms |= {f"blk.{layer}.{name}_norm.weight": (width,) for name in ("attn", "ffn")}
                if layer == 1:
                    attention(layer, 1)
                    for name in ("attn_q", "attn_k"):
                        norms[f"blk.{layer}.{name}_norm.weight"] = (width // heads,)
                else:
                    tensors[f"blk.{layer}.shortconv.conv.weight"] = (width, 3)
                    tensors[f"blk.{layer}.shortconv.in_proj.weight"] = (3 * width, width)
                    tensors[f"blk.{layer}.shortconv.out_proj.weight"] = (width, width)
        case "qwen35":  # a gated delta net and attention by turns: rolls back from snapshots
            layers = 4
            head, state, groups, values = width // heads, 8, 2, 4
            writer.add_head_count(heads)
            writer.add_head_count_kv(1)
            writer.add_key_length(head)
            writer.add_value_length(head)
            writer.add_rope_dimension_count(head)
            writer.add_rope_dimension_sections([3, 3, 2, 0])
            writer.add_full_attention_interval(2)
            writer.add_ssm_conv_kernel(4)
            writer.add_ssm_state_size(state)
            writer.add_ssm_group_count(groups)
            writer.add_ssm_time_step_rank(values)
            writer.add_ssm_inner_size(state * values)
            tensors["output.weight"] = (vocabulary_size, width)
            mixed = state * groups * 2 + state * values
            if mtp:
                norms |= {
                    f"blk.{layers}.nextn.{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head_norm")
                }
                tensors[f"blk.{layers}.nextn.eh_proj.weight"] = (width, 2 * width)
                writer.add_nextn_predict_layers(1)
                layers += 1
            for layer in range(layers):
                feed_forward(layer)
                norms |= {f"blk.{layer}.{name}_norm.weight": (width,) for name in ("attn", "post_attention")}
                if layer % 2 or layer == 4:
                    attention(layer, 1)
                    tensors[f"blk.{layer}.attn_q.weight"] = (2 * width, width)  # each query with a gate
                    for name in ("attn_q", "attn_k"):
                        norms[f"blk.{layer}.{name}_norm.weight"] = (head,)
                else:
                    norms |= {
                        f"blk.{layer}.ssm_dt.bias": (values,),
                        f"blk.{layer}.ssm_norm.weight": (state,),
                    }
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
            writer.add_ssm_conv_kernel(4)
            writer.add_ssm_inner_size(inner)
            writer.add_ssm_state_size(state)
            writer.add_ssm_time_step_rank(rank)
            for layer in range(layers):
                norms[f"blk.{layer}.attn_norm.weight"] = (width,)
                norms[f"blk.{layer}.ssm_d"] = (inner,)
                norms[f"blk.{layer}.ssm_dt.bias"] = (inner,)
                norms[f"blk.{layer}.ssm_conv1d.bias"] = (inner,)
                tensors |= {
                    f"blk.{layer}.ssm_in.weight": (2 * inner, width),
                    f"blk.{layer}.ssm_conv1d.weight": (inner, 4),
                    f"blk.{layer}.ssm_x.weight": (rank + 2 * state, inner),
                    f"blk.{layer}.ssm_dt.weight": (inner, rank),
                    f"blk.{layer}.ssm_a": (inner, state),
                    f"blk.{layer}.ssm_out.weight": (width, inner),
                }
        case "bert":  # an encoder
            writer.add_head_count(heads)
            writer.add_causal_attention(False)
            writer.add_token_type_count(2)
            tensors["token_types.weight"] = (2, width)
            tensors["position_embd.weight"] = (256, width)
            norms = {"token_embd_norm.weight": (width,), "token_embd_norm.bias": (width,)}
            for layer in range(layers):
                attention(layer, heads)
                feed_forward(layer)
                del tensors[f"blk.{layer}.ffn_gate.weight"]
                for name, size in (("attn_q", width), ("attn_k", width), ("attn_v", width), ("ffn_up", wide)):
                    tensors[f"blk.{layer}.{name}.bias"] = (size,)
                for name in ("attn_output", "ffn_down"):
                    tensors[f"blk.{layer}.{name}.bias"] = (width,)
                for name in ("attn_output_norm", "layer_output_norm"):
                    norms |= {f"blk.{layer}.{name}.{part}": (width,) for part in ("weight", "bias")}
            if pooling == RANK:
                tensors |= {"cls.weight": (width, width), "cls.bias": (width,)}
                tensors |= {"cls.output.weight": (1, width), "cls.output.bias": (1,)}
        case _:
            pass  # the architecture alone is the point
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_block_count(layers)
    for name, shape in tensors.items():
        scale = 0.5 if name.startswith("token_embd") else 1.5 / np.sqrt(shape[-1])
        weights = rng.normal(0, scale, shape).astype(np.float32)
        if only_mtp and name.startswith("blk.") and not name.startswith(f"blk.{layers - 1}."):
            continue
        writer.add_tensor(name, -np.abs(weights) if name.endswith("ssm_a") else weights)
    for name, shape in norms.items():
        if not only_mtp or not name.startswith("blk.") or name.startswith(f"blk.{layers - 1}."):
            writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(seed)
    width, heads, size, wide = target_width if borrows else 32, 2, 16, 48
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_context_length(256)
    writer.add_block_count(1)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("eagle3.target_layers", list(target_layers))
    writer.add_uint32("eagle3.target_hidden_size", target_width)
    writer.add_bool("eagle3.norm_before_residual", False)
    writer.add_bool("eagle3.norm_before_fc", False)
    add_byte_tokenizer(writer)
    known = BYTE_VOCABULARY_SIZE if draft_ids is None else len(draft_ids)
    tensors = {
        "fc.weight": (width, target_width * len(target_layers)),
        "blk.0.attn_q.weight": (size * heads, 2 * width),
        "blk.0.attn_k.weight": (size, 2 * width),
        "blk.0.attn_v.weight": (size, 2 * width),
        "blk.0.attn_output.weight": (width, size * heads),
        "blk.0.ffn_gate.weight": (wide, width),
        "blk.0.ffn_up.weight": (wide, width),
        "blk.0.ffn_down.weight": (width, wide),
    }
    if not borrows:
        tensors |= {"token_embd.weight": (BYTE_VOCABULARY_SIZE, width), "output.weight": (known, width)}
    for name, shape in tensors.items():
        scale = 0.5 if name.startswith("token_embd") else 1.5 / np.sqrt(shape[-1])
        writer.add_tensor(name, rng.normal(0, scale, shape).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", (1 + 0.1 * rng.standard_normal(width)).astype(np.float32))
    if draft_ids is not None:
        writer.add_tensor("d2t", np.array(draft_ids, np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(seed)
    width, heads, size, wide, layers = target_width, 2, 16, 48, 2
    writer = gguf.GGUFWriter(path, "dflash")
    of_model: dict[str, Any] = {
        "dflash.block_count": layers,
        "dflash.context_length": 256,
        "dflash.embedding_length": width,
        "dflash.feed_forward_length": wide,
        "dflash.attention.head_count": heads,
        "dflash.attention.head_count_kv": 1,
        "dflash.attention.key_length": size,
        "dflash.attention.value_length": size,
        "dflash.attention.layer_norm_rms_epsilon": 1e-6,
        "dflash.rope.freq_base": 10000.0,
        "dflash.block_size": 5,
        "dflash.target_layers": list(target_layers),
        "tokenizer.ggml.mask_token_id": MASK_ID,
    }
    for key, value in {**of_model, **(metadata or {})}.items():
        if value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
            add[type(value)](key, value)
    add_byte_tokenizer(writer)
    known = BYTE_VOCABULARY_SIZE if draft_ids is None else len(draft_ids)
    tensors: dict[str, tuple[int, ...]] = {"fc.weight": (width, target_width * len(target_layers))}
    norms = {"enc.output_norm": width, "output_norm": width}
    if draft_ids is not None:
        tensors["output.weight"] = (known, width)
    if rank:
        tensors |= {"markov_w1.weight": (BYTE_VOCABULARY_SIZE, rank), "markov_w2.weight": (known, rank)}
        tensors |= {"conf_proj.weight": (1, width + rank)}
    for layer in range(layers):
        of_layer = {
            "attn_q": (size * heads, width),
            "attn_k": (size, width),
            "attn_v": (size, width),
            "attn_output": (width, size * heads),
            "ffn_gate": (wide, width),
            "ffn_up": (wide, width),
            "ffn_down": (width, wide),
        }
        tensors |= {f"blk.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
        norms |= {f"blk.{layer}.{name}": width for name in ("attn_norm", "ffn_norm")}
        norms |= {f"blk.{layer}.{name}": size for name in ("attn_q_norm", "attn_k_norm")}
    for name, shape in tensors.items():
        if name not in without:
            writer.add_tensor(name, rng.normal(0, 1.5 / np.sqrt(shape[-1]), shape).astype(np.float32))
    for name, length in norms.items():
        writer.add_tensor(f"{name}.weight", (1 + 0.1 * rng.standard_normal(length)).astype(np.float32))
    if rank:
        writer.add_tensor("conf_proj.bias", np.full(1, 0.3, np.float32))
    if draft_ids is not None:
        writer.add_tensor("d2t", np.array(draft_ids, np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(seed)
    width, heads, wide, sizes = 32 if state_width is None else 24, 2, 48, (16, 32)
    writer = gguf.GGUFWriter(path, "gemma4" if state_width is None else "gemma4-assistant")
    of_model: dict[str, Any] = {
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
        of_model |= {
            "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        }
    else:
        of_model |= {"nextn_predict_layers": layers, "embedding_length_out": state_width}
    for key, value in {**of_model, **(metadata or {})}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](f"{writer.arch}.{key}", value)
    add_byte_tokenizer(writer)
    norms = {"output_norm": width}
    tensors: dict[str, tuple[int, ...]] = {"token_embd": (BYTE_VOCABULARY_SIZE, width)}
    if state_width is None:
        tensors["output"] = (BYTE_VOCABULARY_SIZE, width)  # the embedding again would say each token once more
    else:
        tensors |= {"nextn.pre_projection": (width, 2 * state_width), "nextn.post_projection": (state_width, width)}
    for layer in range(layers):
        size = sizes[layer % 2]
        of_layer = {
            "attn_q": (size * heads, width),
            "attn_output": (width, size * heads),
            "ffn_gate": (wide, width),
            "ffn_up": (wide, width),
            "ffn_down": (width, wide),
        }
        names = {"attn_norm": width, "post_attention_norm": width, "ffn_norm": width, "post_ffw_norm": width}
        names |= {"attn_q_norm": size, "layer_output_scale": 1}
        if state_width is None and layer < layers - shared:
            of_layer |= {"attn_k": (size, width), "attn_v": (size, width)}
            names["attn_k_norm"] = size
        tensors |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
        norms |= {f"blk.{layer}.{name}": size for name, size in names.items()}
    for name, shape in tensors.items():
        scale = 0.05 if name == "token_embd" else 1.5 / np.sqrt(shape[-1])
        writer.add_tensor(f"{name}.weight", rng.normal(0, scale, shape).astype(np.float32))
    for name, length in norms.items():
        writer.add_tensor(f"{name}.weight", (1 + 0.1 * rng.standard_normal(length)).astype(np.float32))
    # A part of each head turns with the position.
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * 4 + [1e30] * (sizes[1] // 2 - 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
