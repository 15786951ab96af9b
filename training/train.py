"""The training loop of both models, and the target's loss.

A run is bounded by a number of tokens. Batches depend on the seed and the step only and the learning rate on the step,
so a run that was interrupted ends as one that was not. The learning rate stays at its peak until the last part of the
run (warm-up, stable, decay): a checkpoint from before the decay can be trained on to any greater number of tokens.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.nn import functional
from transformers import LlamaForCausalLM

from training import paths
from training.shapes import SHAPES, build_model, num_parameters

LENGTH = 512  # of a training sequence
LONG_LENGTH = 2048  # of one in the last part of the run, which teaches the model to look that far back
LOG_EVERY_S = 30.0  # without a terminal (a log file), one line this often instead of the progress bar
# Settings a run may be resumed with other values of: how long and how it runs, not what it learns from.
CHANGEABLE = {"tokens", "seconds", "num_threads", "compile", "checkpoint_every_s"}

Tokens = npt.NDArray[np.uint16]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]  # of the model, on a batch [batch, length + 1]
Batches = Callable[[int, int, int], torch.Tensor]  # (step, number of sequences, length) -> [number, length + 1]


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    name: str
    seed: int
    tokens: float  # of the whole run
    peak_lr: float
    seconds: float | None = None  # the run ends after them if its tokens last longer
    batch_tokens: int = 2048
    warmup_tokens: float = 0.5e6
    decay_share: float = 0.3  # the last share of the run, in which the learning rate falls linearly to zero
    long_share: float = 0.08  # the last share of the run, in sequences of LONG_LENGTH
    repeat_share: float = 0.3  # of sequences hold a passage of their own once more
    repeats_after_tokens: float = 0.0  # from then on they do
    weight_decay: float = 0.1
    checkpoint_every_s: float = 180.0
    num_threads: int = 2
    compile: bool = True


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def corpus_batches(tokens: Tokens, seed: int) -> Batches:
    """Pieces of the stream in random order.

    Every epoch cuts the stream at another offset and visits the pieces in another order, both drawn from
    (seed, epoch), so a resumed run sees what an uninterrupted one would have seen.
    """

    def batch(step: int, number: int, length: int) -> torch.Tensor:
        pieces_per_epoch = (len(tokens) - 1) // length - 1
        epoch, step_in_epoch = divmod(step, pieces_per_epoch // number)
        rng = np.random.default_rng((seed, epoch, length))
        offset = int(rng.integers(length))
        chosen = rng.permutation(pieces_per_epoch)[step_in_epoch * number : (step_in_epoch + 1) * number]
        rows = [tokens[start : start + length + 1] for start in offset + chosen * length]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    return batch


def with_repeats(batches: Batches, config: TrainConfig) -> Batches:
    """From `repeats_after_tokens` on, write a passage of some sequences once more, further on in them.

    A model learns to copy from its context only if what it copies is within one training sequence. Files that repeat
    themselves do so over longer stretches, and few do so closely.
    """

    def batch(step: int, number: int, length: int) -> torch.Tensor:
        rows = batches(step, number, length)
        if step * config.batch_tokens < config.repeats_after_tokens:
            return rows
        rng = np.random.default_rng((config.seed, step))
        for row in rows:
            if rng.random() < config.repeat_share:
                size = int(rng.integers(length // 16, length // 3))
                source = int(rng.integers(length + 1 - 2 * size))
                copy = int(rng.integers(source + size, length + 2 - size))
                row[copy : copy + size] = row[source : source + size].clone()
        return rows

    return batch


def done_share(config: TrainConfig, steps: int, seconds: float) -> float:
    """How much of the run is behind, of its tokens or of its time."""
    return max(steps * config.batch_tokens / config.tokens, seconds / config.seconds if config.seconds else 0.0)


def learning_rate(config: TrainConfig, done_tokens: float, done_share: float) -> float:
    """Linear warm-up, the peak, and a linear decay to zero."""
    warm = min(done_tokens / config.warmup_tokens, 1.0) if config.warmup_tokens else 1.0
    left = (1 - done_share) / config.decay_share
    return config.peak_lr * max(min(warm, left), 0.001)


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; only matrices are decayed, norm gains are not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    gains = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    # A long memory of the squared gradients: with few tokens a step a single gradient says little.
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=(0.9, 0.98), fused=True)


def autocast() -> torch.autocast:
    """Products in bfloat16, sums in float32."""
    return torch.autocast(device().type, torch.bfloat16)


def logits(model: LlamaForCausalLM, last_hidden_state: torch.Tensor) -> torch.Tensor:
    """Return `[batch, length, vocab]` float32 logits; call it under `autocast`."""
    rows: torch.Tensor = model.lm_head(last_hidden_state)
    return rows.float()


def forward(model: LlamaForCausalLM, token_ids: torch.Tensor) -> torch.Tensor:
    """Map `[batch, length]` token ids to `[batch, length, vocab]` float32 logits, multiplying in bfloat16."""
    with autocast():
        return logits(model, model.model(token_ids).last_hidden_state)


def cross_entropy(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next tokens."""
    return functional.cross_entropy(forward(model, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def load_trained(name: str) -> LlamaForCausalLM:
    """Return the model of the latest checkpoint, in evaluation mode."""
    path = paths.checkpoint(name)
    if not path.exists():
        raise SystemExit(f"there is no {path.name}; run `python -m training {name}` first")
    model = build_model(SHAPES[name])
    model.load_state_dict(read_checkpoint(path)["model"])
    model.requires_grad_(False)
    return model.to(device()).eval()


def read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        state["model"], state["optimizer"], state["config"], state["step"]
    except Exception as error:  # whatever a damaged file makes of the reader
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise SystemExit(f"{path.name} is damaged ({why}): delete it and train again") from None
    return state


@contextmanager
def progress_display(name: str, interactive: bool) -> Iterator[Callable[[float, str], None]]:
    """Show a bar on a terminal, lines every `LOG_EVERY_S` in a log; yields `report(share_done, text)`."""
    if not interactive:
        started = last = time.monotonic()

        def log(share: float, text: str) -> None:
            nonlocal last
            if (now := time.monotonic()) - last >= LOG_EVERY_S:
                print(f"{name} {share:6.1%} {now - started:6.0f} s {text}", flush=True)
                last = now

        yield log
        return
    text_column = TextColumn("{task.fields[text]}")
    times = (TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Progress("{task.description}", BarColumn(), text_column, *times) as progress:
        task = progress.add_task(name, total=1.0, text="")
        yield lambda share, text: progress.update(task, completed=share, text=text)


def run(config: TrainConfig, batches: Batches, loss_of: Loss, begin: torch.nn.Module | None = None) -> None:
    """Train, or go on training, the model `config.name` and write its checkpoint and its record.

    Args:
        config: of the run.
        batches: what it reads.
        loss_of: what it minimises.
        begin: the model as it is before the first step; ``None`` draws its weights.
    """
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    model = (begin or build_model(SHAPES[config.name])).to(device())
    optimizer = make_optimizer(model, config)
    step, elapsed_s = 0, 0.0
    checkpoint = paths.checkpoint(config.name)
    if checkpoint.exists():
        state = read_checkpoint(checkpoint)
        changed = {key for key, value in asdict(config).items() if state["config"].get(key) != value} - CHANGEABLE
        if changed:
            names = ", ".join(sorted(changed))
            raise SystemExit(f"{checkpoint.name} is of a run with other {names}; use --restart to begin again")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, elapsed_s = state["step"], state["elapsed_s"]
    # The whole loss is compiled, so that the softmax over the vocabulary is fused with the rows that it reads.
    compute_loss = torch.compile(loss_of) if config.compile else loss_of

    def save() -> None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "config": asdict(config),
            "step": step,
            "elapsed_s": elapsed_s,
        }
        paths.replace_atomically(checkpoint, lambda path: torch.save(state, path))

    # A run in the background inherits ignored interrupts; both signals end it with a checkpoint.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    average_loss: float | None = None
    saved_at = now = time.monotonic()
    try:
        with progress_display(config.name, Console().is_terminal) as report:
            while (share := done_share(config, step, elapsed_s)) < 1:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(config, step * config.batch_tokens, share)
                length = LONG_LENGTH if share >= 1 - config.long_share else LENGTH
                batch = batches(step, config.batch_tokens // length, length).to(device())
                loss = compute_loss(model, batch)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                step += 1
                before, now = now, time.monotonic()
                elapsed_s += now - before
                average_loss = loss.item() if average_loss is None else 0.99 * average_loss + 0.01 * loss.item()
                speed = config.batch_tokens / (now - before)
                report(share, f"step {step} loss {average_loss:.3f} {speed:.0f} tokens/s")
                if now - saved_at >= config.checkpoint_every_s:
                    save()
                    saved_at = now
    except KeyboardInterrupt:
        save()
        raise SystemExit(f"interrupted after {step} steps; the same command goes on from there") from None
    save()
    write_record(config, model, step, elapsed_s)


def write_record(config: TrainConfig, model: torch.nn.Module, step: int, elapsed_s: float) -> None:
    record = {
        "config": asdict(config),
        "device": device().type,
        "parameters": num_parameters(model),
        "steps": step,
        "minutes": round(elapsed_s / 60, 1),
        "tokens": step * config.batch_tokens,
    }
    text = json.dumps(record, indent=2) + "\n"
    paths.replace_atomically(paths.record(config.name), lambda path: path.write_text(text, encoding="utf-8"))
    print(text, end="")


def train_base(config: TrainConfig) -> None:
    """Train the base with cross-entropy."""
    tokens: Tokens = np.load(paths.TRAIN_TOKENS, mmap_mode="r")
    run(config, with_repeats(corpus_batches(tokens, config.seed), config), cross_entropy)
