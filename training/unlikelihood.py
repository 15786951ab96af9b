"""Teaching a model that copies not to repeat itself: unlikelihood training on its own texts (arXiv 1908.04319).

What has learned to copy copies itself too, and loops: its own last tokens came before, as those of a passage did. So
the model writes texts of its own, and in those that repeat themselves most every token that completes a 4-gram once
more costs -log(1 - p). Cross-entropy on the corpus goes on beside it. Texts are written anew every `REWRITE_STEPS`,
since what loops moves. The loss on the corpus rises; weights most of the way from those before to those after
(arXiv 2109.01903) loop hardly more often, and lose less.
"""

import numpy as np
import torch
from transformers import LlamaForCausalLM

from paceline.lab.task import distinct_share
from training import paths
from training.copying import matches
from training.train import (
    LENGTH,
    Batches,
    Tokens,
    TrainConfig,
    autocast,
    corpus_batches,
    cross_entropy,
    forward,
    load_trained,
    read_checkpoint,
    run,
    with_repeats,
)

PROMPT_LENGTH = 64
NUM_TEXTS = 96  # written at a time
NUM_KEPT = 24  # of them, which repeat themselves most
TEXTS_A_BATCH = 4  # the last rows of a batch
REWRITE_STEPS = 50
# The default sampling of most users; what is drawn plainly strays before it loops.
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
REPEATED = 4  # tokens that came before together
WEIGHT = 1.0  # beside the cross-entropy
WAY = 0.85  # from the weights before to those after


def write_texts(model: LlamaForCausalLM, prompts: torch.Tensor) -> torch.Tensor:
    """Return `[batch, LENGTH + 1]` token ids: prompts `[batch, PROMPT_LENGTH]` and how the model goes on."""
    new_tokens = LENGTH + 1 - prompts.shape[1]
    model.eval()
    with torch.no_grad(), autocast():
        texts: torch.Tensor = model.generate(
            prompts.to(model.device),
            attention_mask=torch.ones_like(prompts, device=model.device),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            use_cache=True,
            **SAMPLING,
        )
    model.train()
    return texts.cpu()


def with_own_texts(batches: Batches, model: LlamaForCausalLM, config: TrainConfig) -> Batches:
    """Let the last `TEXTS_A_BATCH` rows be texts of the model's own.

    They depend on its weights: a run that was interrupted writes them anew when it goes on.
    """
    prompts = corpus_batches(np.load(paths.TRAIN_TOKENS, mmap_mode="r"), config.seed + 2)
    kept: list[torch.Tensor] = []

    def batch(step: int, number: int, length: int) -> torch.Tensor:
        if not kept or step % REWRITE_STEPS == 0:
            torch.manual_seed(config.seed + step)
            written = write_texts(model, prompts(step // REWRITE_STEPS, NUM_TEXTS, LENGTH)[:, :PROMPT_LENGTH])
            kept[:] = sorted(written, key=lambda text: distinct_share(text[PROMPT_LENGTH:].tolist()))[:NUM_KEPT]
        chosen = np.random.default_rng((config.seed, step)).choice(NUM_KEPT, TEXTS_A_BATCH, replace=False)
        return torch.cat([batches(step, number - TEXTS_A_BATCH, length), torch.stack([kept[i] for i in chosen])])

    return batch


def unlikelihood(model: LlamaForCausalLM, texts: torch.Tensor) -> torch.Tensor:
    """Return the mean over positions of -log(1 - p) of tokens, after the prompt, that complete a 4-gram once more."""
    repeated = matches(texts, REPEATED).tril(-1).any(dim=-1)[:, 1:]
    repeated[:, : PROMPT_LENGTH - 1] = False
    logprobs = forward(model, texts[:, :-1]).log_softmax(dim=-1).gather(-1, texts[:, 1:, None])[..., 0]
    # A probability of 1 would cost infinitely much.
    loss = -torch.log1p(-logprobs.exp().clamp(max=1 - 1e-4))
    return torch.where(repeated, loss, 0.0).mean()


def loss_of(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch whose last rows are the model's own texts."""
    corpus, texts = batch[:-TEXTS_A_BATCH], batch[-TEXTS_A_BATCH:]
    return cross_entropy(model, corpus) + WEIGHT * unlikelihood(model, texts)


def train_varied(config: TrainConfig) -> None:
    """Train the model that copies on, so that it repeats itself less."""
    tokens: Tokens = np.load(paths.TRAIN_TOKENS, mmap_mode="r")
    model = load_trained("copying").train().requires_grad_(True)
    batches = with_repeats(corpus_batches(tokens, config.seed + 3), config)
    run(config, with_own_texts(batches, model, config), loss_of, model)


def blend() -> None:
    """Write the target's checkpoint, `WAY` from the weights of "copying" to those of "varied"."""
    copying, varied = (read_checkpoint(paths.checkpoint(name)) for name in ("copying", "varied"))
    before, after = copying["model"], varied["model"]
    blended = {name: torch.lerp(before[name], after[name], WAY) for name in after}
    state = {**varied, "model": blended}
    paths.replace_atomically(paths.checkpoint("target"), lambda path: torch.save(state, path))
