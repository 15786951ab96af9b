"""The draft: what the target says on its own (`sample`), and training the draft to agree with it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from transformers import LlamaForCausalLM

import paceline
from paceline.engines.options import ModelOptions
from paceline.lab.distil.objective import lk_loss
from training import paths
from training.copying import guided_forward
from training.export import SHIPPED, write_gguf
from training.train import (
    LENGTH,
    Batches,
    Tokens,
    TrainConfig,
    corpus_batches,
    forward,
    load_trained,
    run,
    with_repeats,
)

PROMPT_LENGTH = 64
# How the target's own texts are drawn, in turn: greedily, as most users do, and plainly.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
)
AT_ONCE = 4  # texts in one pass of the target; more share one cache, which every row of a pass reads whole


def sample(num_samples: int, seed: int) -> None:
    """Write the target's continuations of training text, `[num_samples, LENGTH + 1]` token ids.

    They are drawn from the file that ships, by paceline: what the draft will meet.
    """
    tokens: Tokens = np.load(paths.TRAIN_TOKENS, mmap_mode="r")
    prompts = corpus_batches(tokens, seed + 1)(0, num_samples, LENGTH)[:, :PROMPT_LENGTH].tolist()
    write_texts(paths.SAMPLED_TOKENS, write_gguf("target", SHIPPED), prompts, seed)


def write_texts(destination: Path, model_file: Path, prompts: list[list[int]], seed: int) -> None:
    """Write how a model goes on with prompts of `PROMPT_LENGTH` tokens, `[prompts, LENGTH + 1]` token ids."""
    options = ModelOptions(model_file, max_sequences=AT_ONCE, context_length=LENGTH + 1, threads=1)
    texts: list[list[int]] = []
    with paceline.load(options, policy=paceline.NO_SPECULATION) as model:
        for first in track(range(0, len(prompts), AT_ONCE), description="sampling the target"):
            some = prompts[first : first + AT_ONCE]
            streams = [
                model.stream(
                    prompt,
                    max_tokens=LENGTH + 1 - PROMPT_LENGTH,
                    seed=seed + number,
                    ignore_end=True,  # it goes on with another document, as the corpus does
                    **SETTINGS[number % len(SETTINGS)],
                )
                for number, prompt in enumerate(some, first)
            ]
            texts += [prompt + list(stream.result().token_ids) for prompt, stream in zip(some, streams, strict=True)]
    array = np.array(texts, dtype=np.min_scalar_type(max(map(max, texts))))

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, array)

    paths.replace_atomically(destination, write)
    print(f"{len(array)} samples of {LENGTH + 1} tokens")


def sample_batches(samples: Tokens, seed: int) -> Batches:
    """Texts of the target, in an order of their own in each epoch."""

    def batch(step: int, number: int, length: int) -> torch.Tensor:
        epoch, step_in_epoch = divmod(step, len(samples) // number)
        order = np.random.default_rng((seed, epoch)).permutation(len(samples))
        chosen = order[step_in_epoch * number : (step_in_epoch + 1) * number]
        return torch.from_numpy(samples[chosen].astype(np.int64))

    return batch


def mixed_batches(from_corpus: Batches, from_samples: Batches) -> Batches:
    """Text of the corpus and of the target in turn; only the corpus has sequences longer than `LENGTH`."""

    def batch(step: int, number: int, length: int) -> torch.Tensor:
        if step % 2 == 0 or length > LENGTH:
            return from_corpus(step, number, length)
        return from_samples(step // 2, number, length)

    return batch


def train_draft(config: TrainConfig) -> None:
    """Distil the target into the draft, and show its attention where to look too: else it copies late or never."""
    target = load_trained("target")

    def loss_of(draft: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = forward(target, batch[:, :-1])
        rows, guidance = guided_forward(draft, batch[:, :-1])
        return lk_loss(rows, wanted) + guidance

    tokens: Tokens = np.load(paths.TRAIN_TOKENS, mmap_mode="r")
    samples: Tokens = np.load(paths.SAMPLED_TOKENS)
    from_corpus = with_repeats(corpus_batches(tokens, config.seed), config)
    run(config, mixed_batches(from_corpus, sample_batches(samples, config.seed)), loss_of)
