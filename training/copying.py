"""Teaching a model to copy from its context: some attention heads are shown where to look.

A model that copies has an induction head (arXiv 2209.11895): where the last tokens came once before, it attends to what
followed them. On small data such a head does not form by itself: after 8 million tokens of sequences that repeat a
passage the target had none. It did have heads that attend to the previous token, in the layer before the last, so all
that was missing was the attention itself. So a quarter of the last layer's heads begin anew, attending everywhere
alike, and their attention gets a loss of its own: the negative logarithm of what falls on the tokens it should. What
they read there, and what becomes of it, the model learns from the loss of its predictions, as ever.

What comes of it copies, and repeats itself: `unlikelihood` takes that away again.
"""

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from training import paths
from training.train import Tokens, TrainConfig, autocast, corpus_batches, load_trained, logits, run, with_repeats

LAYER = -1
GUIDED_SHARE = 0.25  # of the last layer's heads, one at least; all of one group, which shares keys
MATCHED = 2  # tokens that must have come before
WEIGHT = 0.3  # of the attention's loss, beside the cross-entropy
FRESH_SCALE = 0.002  # standard deviation of new weights: keys are large by now


def num_guided(model: LlamaForCausalLM) -> int:
    """How many heads are guided, the last ones of the layer."""
    return max(1, int(GUIDED_SHARE * model.config.num_attention_heads))


def begin_anew(model: LlamaForCausalLM) -> None:
    """Let the guided heads attend everywhere nearly alike, by drawing their queries' weights anew."""
    weight = model.model.layers[LAYER].self_attn.q_proj.weight
    with torch.no_grad():
        weight[-num_guided(model) * model.config.head_dim :].normal_(std=FRESH_SCALE)


def matches(token_ids: torch.Tensor, size: int) -> torch.Tensor:
    """Return `[batch, length, length]`: whether the `size` tokens that end at a row's place and at a column's agree."""
    same = token_ids[:, :, None] == token_ids[:, None, :]
    matching = same
    for back in range(1, size):
        matching = matching & functional.pad(same[:, :-back, :-back], (back, 0, back, 0))
    return matching


def followers(token_ids: torch.Tensor) -> torch.Tensor:
    """Say what came after the last tokens where they came before.

    Args:
        token_ids: `[batch, length]`.

    Returns:
        `[batch, length, length]`: whether the `MATCHED` tokens that end at a row's position also end just before a
        column's.
    """
    length = token_ids.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=token_ids.device).tril()
    return functional.pad(matches(token_ids, MATCHED)[:, :, :-1], (1, 0)) & earlier


def log_attention(model: LlamaForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the guided heads' attention, `[batch, heads, length, length]`, from the layer's input."""
    layer, size, heads = model.model.layers[LAYER], model.config.head_dim, num_guided(model)
    normed = layer.input_layernorm(hidden)
    queries = functional.linear(normed, layer.self_attn.q_proj.weight[-heads * size :])
    keys = functional.linear(normed, layer.self_attn.k_proj.weight[-size:])
    length = hidden.shape[1]
    cosines, sines = model.model.rotary_emb(hidden, torch.arange(length, device=hidden.device)[None])
    queries, keys = apply_rotary_pos_emb(
        queries.unflatten(-1, (heads, size)).transpose(1, 2), keys[:, None], cosines, sines
    )
    scores = (queries @ keys.transpose(2, 3)).float() * layer.self_attn.scaling
    later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
    return scores.masked_fill(later, -torch.inf).log_softmax(dim=-1)


def attention_loss(model: LlamaForCausalLM, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the mean, over heads and over positions whose last tokens came before, of their attention's loss."""
    wanted = followers(token_ids)
    has_any = wanted.any(dim=-1)
    # Not minus infinity: a row without any would have gradients that are not numbers.
    on_wanted = log_attention(model, hidden).masked_fill(~wanted[:, None], -1e9).logsumexp(dim=-1).mean(dim=1)
    return -torch.where(has_any, on_wanted, 0.0).sum() / has_any.sum().clamp(min=1)


def guided_forward(model: LlamaForCausalLM, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits `[batch, length, vocab]` of `[batch, length]` token ids, and what guidance adds to the loss."""
    with autocast():
        output = model.model(token_ids, output_hidden_states=True)
        # The last hidden state is the output; the one before it is what the last layer reads.
        guidance = attention_loss(model, output.hidden_states[LAYER - 1], token_ids)
        return logits(model, output.last_hidden_state), WEIGHT * guidance


def guided_cross_entropy(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next tokens of a batch `[batch, length + 1]`, and that of the guided attention."""
    rows, guidance = guided_forward(model, batch[:, :-1])
    return functional.cross_entropy(rows.flatten(0, 1), batch[:, 1:].flatten()) + guidance


def train_copying(config: TrainConfig) -> None:
    """Train the base on, to copy."""
    tokens: Tokens = np.load(paths.TRAIN_TOKENS, mmap_mode="r")
    model = load_trained("base").train().requires_grad_(True)
    torch.manual_seed(config.seed)
    begin_anew(model)
    # Another order of the corpus than the base read.
    batches = with_repeats(corpus_batches(tokens, config.seed + 1), config)
    run(config, batches, guided_cross_entropy, model)
