"""GGUF export: what llama.cpp calls architecture `llama`, plus the tokenizer, plus the model card."""

import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from training import corpus, paths, tokenizer
from training.shapes import CONTEXT, NORM_EPSILON, ROPE_THETA, SHAPES, Shape
from training.train import SEQUENCE_LENGTH, PairScore, load_trained, replace_atomically

if TYPE_CHECKING:
    from collections.abc import Callable

QUANTIZATIONS = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
SUFFIXES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def gguf_tensor_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outer:
        return outer[name]
    _, _, layer, suffix = name.split(".", 3)
    return f"blk.{layer}.{SUFFIXES[suffix]}"


def interleave_rope(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Reorder the output rows of a q or k projection, `[num_heads * head_dim, hidden]`.

    transformers rotates dimension i together with i + head_dim/2, llama.cpp's `llama` rotates 2i with 2i + 1.
    """
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    interleaved: npt.NDArray[np.float32] = halves.swapaxes(1, 2).reshape(weight.shape)
    return interleaved


def add_tokenizer(writer: gguf.GGUFWriter, trained: Tokenizer) -> None:
    """Vocabulary in id order, merges in rank order."""
    vocabulary = trained.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {tokenizer.END_OF_TEXT}
    types = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    merges = [" ".join(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    end_of_text = vocabulary[tokenizer.END_OF_TEXT]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(end_of_text)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def add_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_vocab_size(tokenizer.VOCAB_SIZE)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_dimension_count(shape.hidden // shape.num_heads)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)


def write_gguf(name: str, quantization: str) -> Path:
    """Export the latest checkpoint of `name`; the file appears whole or not at all."""
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    tensor_type, file_type = QUANTIZATIONS[quantization]
    shape = SHAPES[name]
    state = load_trained(name).state_dict()

    def write(path: Path) -> None:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name(f"paceline embedded {name}")
        writer.add_description("Small Python code model trained on the Python standard library")
        writer.add_license("PSF-2.0")
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_shape(writer, shape)
        add_tokenizer(writer, tokenizer.load())
        for full_name, tensor in state.items():
            if full_name == "lm_head.weight":
                continue  # tied: llama.cpp uses token_embd where there is no output.weight
            weight = tensor.to(torch.float32).numpy()
            if full_name.endswith("q_proj.weight"):
                weight = interleave_rope(weight, shape.num_heads)
            elif full_name.endswith("k_proj.weight"):
                weight = interleave_rope(weight, shape.num_kv_heads)
            kept_type = tensor_type if weight.ndim == 2 else gguf.GGMLQuantizationType.F32  # norms stay exact
            data = gguf.quants.quantize(weight, kept_type)
            writer.add_tensor(gguf_tensor_name(full_name), data, raw_dtype=kept_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    path = paths.gguf(name, quantization)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_atomically(path, write)
    return path


def card_rows(score: PairScore, runs: dict[str, dict[str, Any]]) -> str:
    """Return the table of the card, one row per property and one column per model."""
    losses = {"target": score.target_loss, "draft": score.draft_loss}
    accuracies = {"target": score.target_accuracy, "draft": score.draft_accuracy}
    properties: dict[str, Callable[[str], str]] = {
        "parameters": lambda name: f"{runs[name]['parameters'] / 1e6:.2f} M",
        "layers": lambda name: f"{SHAPES[name].num_layers}",
        "hidden size": lambda name: f"{SHAPES[name].hidden}",
        "heads / KV heads": lambda name: f"{SHAPES[name].num_heads} / {SHAPES[name].num_kv_heads}",
        "feed-forward size": lambda name: f"{SHAPES[name].feed_forward}",
        "file": lambda name: f"{paths.gguf(name, 'q8_0').stat().st_size / 1e6:.2f} MB",
        "tokens trained on": lambda name: f"{runs[name]['tokens'] / 1e6:.2f} M",
        "epochs": lambda name: f"{runs[name]['epochs']:.2f}",
        "training time": lambda name: f"{runs[name]['minutes']:.0f} minutes",
        "held-out loss": lambda name: f"{losses[name]:.3f}",
        "held-out accuracy": lambda name: f"{accuracies[name]:.1%}",
    }
    return "\n".join(f"| {label} | {of('target')} | {of('draft')} |" for label, of in properties.items())


def write_model_card(score: PairScore) -> None:
    """Fill in the card's template from the records of both runs and the held-out score."""
    runs = {name: json.loads(paths.record(name).read_text(encoding="utf-8")) for name in SHAPES}
    target, draft = runs["target"]["config"], runs["draft"]["config"]
    card = (paths.ROOT / "model_card.md").read_text(encoding="utf-8")
    card = card.format(
        rows=card_rows(score, runs),
        score=score,
        rope_theta=ROPE_THETA,
        context=CONTEXT,
        sequence_length=SEQUENCE_LENGTH,
        vocab_size=tokenizer.VOCAB_SIZE,
        end_of_text=tokenizer.END_OF_TEXT,
        python_version=platform.python_version(),
        train_tokens=len(np.load(paths.TRAIN_TOKENS, mmap_mode="r")) / 1e6,
        near_repeat_share=corpus.NEAR_REPEAT_SHARE,
        heldout_below=corpus.HELDOUT_BELOW,
        heldout_share=corpus.HELDOUT_BELOW / 256,
        heldout_files=len(corpus.read_documents(paths.HELDOUT_DOCUMENTS)),
        num_snippets=len(paths.HELDOUT_SNIPPETS.read_text(encoding="utf-8").splitlines()),
        target_lr=target["peak_lr"],
        target_batch=target["batch_size"],
        target_epochs=runs["target"]["epochs"],
        loss_gap=score.draft_loss - score.target_loss,
        draft_lr=draft["peak_lr"],
        distill_from=draft["distill_from"],
        seed=target["seed"],
        copyright=sys.copyright.splitlines()[0].rstrip("."),
    )
    replace_atomically(paths.MODEL_CARD, lambda path: path.write_text(card, encoding="utf-8"))
