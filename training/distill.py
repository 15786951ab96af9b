"""The draft: what the target says on its own (`sample`), and training the draft to agree with it (`train_draft`)."""

import time
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch.nn import functional

from training import paths
from training.train import (
    LENGTH,
    Batches,
    Forward,
    Tokens,
    TrainConfig,
    corpus_batches,
    device,
    load_trained,
    make_forward,
    run,
)

PROMPT_LENGTH = 64
SAMPLE_BATCH = 100
# How the target's own texts are drawn, in turn: greedily, as most users do, and plainly.
SETTINGS = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"do_sample": True, "temperature": 0.8, "top_k": 0},
    {"do_sample": True, "temperature": 1.0, "top_k": 0},
)


def sample(num_samples: int, seed: int) -> None:
    """Write the target's continuations of training text, `[num_samples, LENGTH + 1]` token ids."""
    target = load_trained("target")
    target.generation_config.eos_token_id = None  # it goes on with another document, as the corpus does
    tokens: Tokens = np.load(paths.TRAIN_TOKENS, mmap_mode="r")
    batches = corpus_batches(tokens, seed + 1)
    torch.manual_seed(seed)
    samples = []
    started = time.monotonic()
    for number in track(range(-(-num_samples // SAMPLE_BATCH)), description="sampling the target"):
        prompts = batches(number, SAMPLE_BATCH, LENGTH)[:, :PROMPT_LENGTH].to(device())
        with torch.inference_mode(), torch.autocast(device().type, torch.bfloat16):
            texts = target.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=LENGTH + 1 - PROMPT_LENGTH,
                use_cache=True,
                pad_token_id=0,
                **SETTINGS[number % len(SETTINGS)],
            )
        samples.append(texts.cpu().numpy().astype(np.uint16))
    array = np.concatenate(samples)

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, array)

    paths.replace_atomically(paths.SAMPLED_TOKENS, write)
    print(f"{len(array)} samples of {LENGTH + 1} tokens in {time.monotonic() - started:.0f} s")


def lk_loss(draft_logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Return the adaptive LK loss (arXiv 2602.23881), lambda * KL(target || draft) + (1 - lambda) * total variation.

    1 - total variation is the acceptance rate of speculative sampling (arXiv 2211.17192, section 3.2), but its
    gradient vanishes where the two are far apart; lambda = exp(-3 * acceptance), held constant in the gradient, leaves
    those positions to KL. Both logits are `[..., vocab]`; the mean over positions is returned.
    """
    draft_logprobs = functional.log_softmax(draft_logits, dim=-1)
    target_logprobs = functional.log_softmax(target_logits, dim=-1)
    target_probs = target_logprobs.exp()
    divergence = (target_probs * (target_logprobs - draft_logprobs)).sum(dim=-1)
    variation = 0.5 * (target_probs - draft_logprobs.exp()).abs().sum(dim=-1)
    weight = torch.exp(-3 * (1 - variation.detach()))
    return (weight * divergence + (1 - weight) * variation).mean()


def mixed_batches(tokens: Tokens, samples: Tokens, seed: int) -> Batches:
    """Text of the corpus and of the target in turn; only the corpus has sequences longer than `LENGTH`."""
    from_corpus = corpus_batches(tokens, seed)

    def batch(step: int, number: int, length: int) -> torch.Tensor:
        if step % 2 == 0 or length > LENGTH:
            return from_corpus(step, number, length)
        epoch, step_in_epoch = divmod(step // 2, len(samples) // number)
        order = np.random.default_rng((seed, epoch)).permutation(len(samples))
        chosen = order[step_in_epoch * number : (step_in_epoch + 1) * number]
        return torch.from_numpy(samples[chosen].astype(np.int64))

    return batch


def train_draft(config: TrainConfig) -> None:
    tokens: Tokens = np.load(paths.TRAIN_TOKENS, mmap_mode="r")
    samples: Tokens = np.load(paths.SAMPLED_TOKENS)
    target = make_forward(load_trained("target"))

    def loss_of(draft: Forward, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target_logits = target(batch[:, :-1])
        return lk_loss(draft(batch[:, :-1]), target_logits)

    run(config, mixed_batches(tokens, samples, config.seed), loss_of)
