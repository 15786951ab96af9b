"""The two models: Llama architecture, one vocabulary, the draft about a twelfth of the target's size."""

from dataclasses import dataclass

from transformers import LlamaConfig, LlamaForCausalLM

from training.tokenizer import VOCAB_SIZE

CONTEXT = 4096  # what the files allow; training sequences are shorter, see `train.SEQUENCE_LENGTH`
ROPE_THETA = 10_000.0
NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of one model. `hidden` is `num_heads * 64`."""

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    feed_forward: int


TARGET = Shape("target", hidden=384, num_layers=6, num_heads=6, num_kv_heads=2, feed_forward=1024)
DRAFT = Shape("draft", hidden=128, num_layers=2, num_heads=2, num_kv_heads=1, feed_forward=384)
SHAPES = {shape.name: shape for shape in (TARGET, DRAFT)}


def build_model(shape: Shape, end_of_text: int = 0) -> LlamaForCausalLM:
    """Return a randomly initialised model; seed torch before calling."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def num_parameters(model: LlamaForCausalLM) -> int:
    """Parameters, the tied embedding counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
