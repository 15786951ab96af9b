"""An EAGLE-3 head (arXiv 2503.01840), which drafts from the states that enter three layers of a target.

Trained as it will draft (the paper's training-time test): each step after the first reads, in the place of the target's
states, what the step before it made of them ::

    step 0    (t1, g0)  (t2, g1)  (t3, g2)  ...    g: the target's three states, fused
    step 1    (t2, o0)  (t3, o1)  (t4, o2)  ...    o: the layer's own output in the step before, before its norm

Place i of a step attends to the places up to i of step 0, and of later steps to its own alone.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import paceline
from paceline.conversion.convert.llama_settings import to_gguf_rows
from paceline.engines.loading import open_vocabulary
from paceline.engines.options import ModelOptions
from paceline.lab.distil.objective import lk_loss
from paceline.models.gguf_file import GGUFFile
from training import corpus, paths, simulated_logs, sources
from training.distill import PROMPT_LENGTH, SETTINGS, sample_batches, write_texts
from training.shapes import CONTEXT, EAGLE, HEAD_SIZE, NORM_EPSILON, ROPE_THETA, build_model
from training.train import TrainConfig, autocast, device, logits, run

STEPS = 4
STEP_WEIGHT = 0.8  # of a step's loss beside the one before
JUDGED = 3  # one place in so many has a loss: rows of logits are dear beside the layer
LOG_BYTES = 1e6
PROMPT_BYTES = 1000  # have `PROMPT_LENGTH` tokens
OWN_JSON = 0.5  # share of beginnings of JSON that the target draws
JSON_OPENINGS = (
    '{\n  "version":"2.0",\n  "metadata":{\n    "apiVersion":"',
    '{\n  "version":"1.0",\n  "examples":{\n    "',
    '{\n  "pagination": {\n    "',
    '{\n  "version": 2,\n  "waiters": {\n    "',
    '[\n    {\n        "description": "',
    '{\n    "$schema": "https://json-schema.org/draft/2020-12/schema",\n    "',
    '{\n  "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",\n  "bomFormat": "',
    '{\n  "name": "',
)


class EagleHead(nn.Module):  # type: ignore[misc, unused-ignore]
    """One layer that reads an embedding beside a state, in a width of its own.

    Args:
        target: what it drafts for.
        draft_ids: the tokens it knows, in ascending order; `None` for all.
    """

    def __init__(self, target: LlamaForCausalLM, draft_ids: torch.Tensor | None = None) -> None:
        super().__init__()
        config = target.config
        if config.num_hidden_layers < 4:
            raise SystemExit(
                f"the target has {config.num_hidden_layers} layers, and a head reads the states of three: take 4"
            )
        self.layers = (1, config.num_hidden_layers // 2, config.num_hidden_layers - 1)
        self.draft_ids = draft_ids
        self.llama = build_model(EAGLE, vocab_size=config.vocab_size)
        if draft_ids is not None:
            self.llama.lm_head = _linear(EAGLE.hidden, len(draft_ids))
        attention = self.llama.model.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, _linear(2 * EAGLE.hidden, getattr(attention, name).out_features))
        self.fuse = _linear(len(self.layers) * config.hidden_size, EAGLE.hidden)
        self.state_norm = LlamaRMSNorm(EAGLE.hidden, NORM_EPSILON)
        with torch.no_grad():
            left, values, _ = torch.svd_lowrank(target.get_input_embeddings().weight, EAGLE.hidden)
            self.llama.model.embed_tokens.weight[:, : len(values)] = left * values

    def forward(
        self, token_ids: torch.Tensor, states: torch.Tensor, position: int, mask: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Return the layer's output for pairs of a token and a state, `[batch, length, width]`."""
        model, layer = self.llama.model, self.llama.model.layers[0]
        pairs = torch.cat((layer.input_layernorm(model.embed_tokens(token_ids)), self.state_norm(states)), -1)
        positions = torch.arange(position, position + token_ids.shape[1], device=pairs.device)[None]
        attended, _ = layer.self_attn(
            pairs, position_embeddings=model.rotary_emb(pairs, positions), attention_mask=mask[None, None], cache=cache
        )
        hidden: torch.Tensor = states + attended
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def unroll(self, token_ids: torch.Tensor, target_states: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Yield each step's output; place i of step j read tokens to i + 1 + j, and says the next.

        `token_ids` is `[batch, length]`, `target_states` `[batch, length, layers * width]`; an output has `steps`
        places less.
        """
        length = token_ids.shape[1] - steps
        states = self.fuse(target_states[:, :length]).float()  # what layers add to stays exact
        mask = torch.ones(length, length, dtype=torch.bool, device=token_ids.device).tril()
        own_place = torch.eye(length, dtype=torch.bool, device=token_ids.device)
        cache = DynamicCache()
        for step in range(steps):
            states = self(token_ids[:, 1 + step : 1 + step + length], states, step, mask, cache)
            yield states
            mask = torch.cat((mask, own_place), 1)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return `[..., draft vocabulary]` of outputs of the layer."""
        return logits(self.llama, self.llama.model.norm(outputs))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


def load_target(path: Path) -> LlamaForCausalLM:
    """Read a Llama in GGUF."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.requires_grad_(False).to(device()).eval()


def train_eagle(config: TrainConfig, target_file: Path, num_texts: int, num_draft_ids: int | None = None) -> EagleHead:
    """Train a head on what the target says, towards its distribution."""
    texts_file = paths.texts(target_file.stem, num_texts, config.seed)
    if not texts_file.exists():
        write_texts(texts_file, target_file, draw_prompts(target_file, num_texts, config.seed), config.seed)
    texts = np.load(texts_file)
    target = load_target(target_file)
    draft_ids = None
    if num_draft_ids is not None:
        common = Counter(texts.ravel().tolist()).most_common(num_draft_ids)
        draft_ids = torch.tensor(sorted(token_id for token_id, _ in common), device=device())
    torch.manual_seed(config.seed)
    head = EagleHead(target, draft_ids)

    def loss_of(head: EagleHead, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), autocast():
            read = target.model(batch, output_hidden_states=True)
            states = torch.cat([read.hidden_states[layer] for layer in head.layers], -1)
        loss = torch.zeros((), device=batch.device)
        with autocast():
            for step, outputs in enumerate(head.unroll(batch, states, STEPS)):
                judged = torch.randperm(outputs.shape[1], device=batch.device)[: outputs.shape[1] // JUDGED]
                with torch.no_grad():
                    wanted = logits(target, read.last_hidden_state[:, judged + step + 1])
                    if draft_ids is not None:
                        wanted = wanted[..., draft_ids]
                loss = loss + STEP_WEIGHT**step * lk_loss(head.logits(outputs[:, judged]), wanted)
        return loss

    run(config, sample_batches(texts, config.seed), loss_of, begin=head)
    return head


def draw_prompts(target_file: Path, number: int, seed: int) -> list[list[int]]:
    """Return beginnings for the target's texts: of each kind of text in turn, from what needs no download.

    Of JSON there is little, so that the target draws half of the beginnings itself. A kind comes as often in a row as
    there are settings to go on with, so that each setting has all kinds.
    """
    documents = [
        *sources.standard_library(),
        *sources.installed_packages(),
        *simulated_logs.documents(seed, LOG_BYTES),
    ]
    by_kind: dict[str, list[str]] = {kind: [] for kind in corpus.KINDS}
    for document in documents:
        if not corpus.is_heldout(document.name) and len(document.text) > PROMPT_BYTES:
            by_kind[document.kind].append(document.text)
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    own = iter(_begin_json(target_file, number // len(by_kind) + len(SETTINGS), seed))
    with open_vocabulary(ModelOptions(target_file)) as vocabulary:
        while len(prompts) < number:
            kind = corpus.KINDS[len(prompts) // len(SETTINGS) % len(corpus.KINDS)]
            if kind == "json" and (not by_kind[kind] or rng.random() < OWN_JSON):
                prompts.append(next(own))
                continue
            text = rng.choice(by_kind[kind])
            start = text.find("\n", rng.randrange(len(text) - PROMPT_BYTES)) + 1
            tokens = vocabulary.tokenize(text[start : start + PROMPT_BYTES], add_special=False)
            if len(tokens) >= PROMPT_LENGTH:
                prompts.append(tokens[:PROMPT_LENGTH])
    return prompts


def _begin_json(target_file: Path, number: int, seed: int) -> list[list[int]]:
    """Return beginnings of JSON, `PROMPT_LENGTH` tokens each, which the target draws: plainly it would leave JSON."""
    options = ModelOptions(target_file, context_length=PROMPT_LENGTH + 1, threads=1)
    prompts = []
    with paceline.load(options, policy=paceline.NO_SPECULATION) as model:
        for draw in range(number):
            opened = model.target.vocabulary.tokenize(JSON_OPENINGS[draw % len(JSON_OPENINGS)], add_special=False)
            more = PROMPT_LENGTH - len(opened)
            drawn = model.generate(opened, max_tokens=more, seed=seed + draw, ignore_end=True, **SETTINGS[1])
            prompts.append([*opened, *drawn.token_ids])
    return prompts


def write_head(head: EagleHead, target_file: Path, path: Path) -> None:
    """Write a head as llama.cpp reads it, in F32; the file appears whole or not at all."""
    weights = {name: tensor.detach().float().cpu().numpy() for name, tensor in head.state_dict().items()}
    layer = "llama.model.layers.0"
    named = {
        "token_embd": "llama.model.embed_tokens",
        "fc": "fuse",
        "blk.0.attn_norm": f"{layer}.input_layernorm",
        "blk.0.attn_norm_2": "state_norm",
        **{f"blk.0.attn_{name}": f"{layer}.self_attn.{name}_proj" for name in "qkv"},
        "blk.0.attn_output": f"{layer}.self_attn.o_proj",
        "blk.0.ffn_norm": f"{layer}.post_attention_layernorm",
        **{f"blk.0.ffn_{name}": f"{layer}.mlp.{name}_proj" for name in ("gate", "up", "down")},
        "output_norm": "llama.model.norm",
        "output": "llama.lm_head",
    }

    def write(partial: Path) -> None:
        writer = gguf.GGUFWriter(partial, "eagle3")
        for key, field in GGUFFile(target_file).fields.items():
            if key.startswith("tokenizer.") and field.data:
                writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
        writer.add_block_count(EAGLE.num_layers)
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(EAGLE.hidden)
        writer.add_feed_forward_length(EAGLE.feed_forward)
        writer.add_head_count(EAGLE.num_heads)
        writer.add_head_count_kv(EAGLE.num_kv_heads)
        writer.add_key_length(HEAD_SIZE)
        writer.add_value_length(HEAD_SIZE)
        writer.add_rope_dimension_count(HEAD_SIZE)
        writer.add_rope_freq_base(ROPE_THETA)
        writer.add_layer_norm_rms_eps(NORM_EPSILON)
        writer.add_array("eagle3.target_layers", list(head.layers))
        writer.add_uint32("eagle3.target_hidden_size", head.fuse.in_features // len(head.layers))
        writer.add_bool("eagle3.norm_before_residual", False)
        writer.add_bool("eagle3.norm_before_fc", False)
        for ours, its in named.items():
            rows = weights[f"{its}.weight"]
            writer.add_tensor(f"{ours}.weight", to_gguf_rows(rows, HEAD_SIZE) if ours[-2:] in ("_q", "_k") else rows)
        if head.draft_ids is not None:
            writer.add_tensor("d2t", head.draft_ids.cpu().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    paths.replace_atomically(path, write)
