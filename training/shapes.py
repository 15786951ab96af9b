"""The two models: Llama architecture, one vocabulary, the draft less than a tenth of the target."""

import math
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training.tokenizer import VOCAB_SIZE

CONTEXT = 4096  # what the files allow; training sequences are shorter, see `train.LONG_LENGTH`
ROPE_THETA = 10_000.0
NORM_EPSILON = 1e-5
HEAD_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of one model. `hidden` is `num_heads * HEAD_SIZE`."""

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    feed_forward: int
    tied: bool  # one matrix for the embedding and the output


# 512 = 2048 / 4: inflated to the width of a 1B model, norm gains are scaled by a power of two, which is exact.
# An embedding of its own costs the target no arithmetic; in the draft it would be half of the parameters.
TARGET = Shape("target", 512, num_layers=4, num_heads=8, num_kv_heads=2, feed_forward=1024, tied=False)
DRAFT = Shape("draft", 128, num_layers=3, num_heads=2, num_kv_heads=1, feed_forward=384, tied=True)
# Of the target's width it would be half of the target.
EAGLE = Shape("eagle", 192, num_layers=1, num_heads=3, num_kv_heads=1, feed_forward=384, tied=False)
# By what is trained: the target becomes one in four steps.
SHAPES = {"base": TARGET, "copying": TARGET, "varied": TARGET, "target": TARGET, "draft": DRAFT}


def build_model(shape: Shape, end_of_text: int = 0, vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """Return a randomly initialised model; seed torch before calling."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=shape.tied,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            # What is added to the residual stream starts small, so that its size does not grow with the depth.
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight /= math.sqrt(2 * shape.num_layers)
    return model


def num_parameters(model: torch.nn.Module) -> int:
    """Parameters, a tied embedding counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
