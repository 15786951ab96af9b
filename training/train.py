"""Training loops: the target on the corpus, the draft on the corpus and then on the target's distribution.

A run is bounded by wall-clock minutes (convenient: it ends when it says) or by a number of steps (repeatable:
batches depend on the seed and the step only, and the learning rate on the step). Both can be interrupted and
started again; the checkpoint carries the step and the time already spent.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.nn import functional
from transformers import LlamaForCausalLM

from training import paths
from training.shapes import SHAPES, TARGET, build_model, num_parameters

SEQUENCE_LENGTH = 512
LOG_EVERY_S = 30.0  # without a terminal (a log file), one line this often instead of the progress bar
EVAL_BATCH = 8
# Settings a run may be resumed with other values of: how long and how it runs, not what it learns from.
CHANGEABLE = {"minutes", "steps", "num_threads", "compile", "checkpoint_every_s"}


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Exactly one of `minutes` and `steps` is set."""

    name: str
    seed: int
    minutes: float | None
    steps: int | None
    batch_size: int
    peak_lr: float
    final_lr_share: float = 0.03  # the cosine ends at this share of `peak_lr`
    warmup_share: float = 0.02
    weight_decay: float = 0.1
    distill_from: float = 1.0  # from this share of the run on, the loss is the distance to the target's rows
    checkpoint_every_s: float = 180.0
    num_threads: int = 2
    compile: bool = True

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("give either minutes or steps, not both and not neither")


def batch_at(tokens: npt.NDArray[np.uint16], seed: int, step: int, batch_size: int) -> torch.Tensor:
    """Batch number `step`: `[batch, SEQUENCE_LENGTH + 1]` token ids, the last column only a label.

    Every epoch cuts the stream at another offset and visits the pieces in another order, both drawn from
    (seed, epoch), so a resumed run sees what an uninterrupted one would have seen.
    """
    pieces_per_epoch = (len(tokens) - 1) // SEQUENCE_LENGTH - 1
    steps_per_epoch = pieces_per_epoch // batch_size
    epoch, step_in_epoch = divmod(step, steps_per_epoch)
    rng = np.random.default_rng((seed, epoch))
    offset = int(rng.integers(SEQUENCE_LENGTH))
    order = rng.permutation(pieces_per_epoch)
    chosen = order[step_in_epoch * batch_size : (step_in_epoch + 1) * batch_size]
    starts = offset + chosen * SEQUENCE_LENGTH
    rows = [tokens[start : start + SEQUENCE_LENGTH + 1] for start in starts]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def learning_rate(config: TrainConfig, progress: float) -> float:
    """Linear warm-up, then a cosine; `progress` runs from 0 to 1."""
    if progress < config.warmup_share:
        return config.peak_lr * max(progress / config.warmup_share, 0.01)
    angle = math.pi * (progress - config.warmup_share) / (1 - config.warmup_share)
    floor = config.final_lr_share
    return config.peak_lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(min(angle, math.pi))))


def make_optimizer(model: LlamaForCausalLM, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; only matrices are decayed, norm gains are not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    gains = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=(0.9, 0.95), fused=True)


def make_forward(model: LlamaForCausalLM, compiled: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Map `[batch, length]` token ids to `[batch, length, vocab]` float32 logits, multiplying in bfloat16."""
    backbone = torch.compile(model.model) if compiled else model.model

    def forward(token_ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits: torch.Tensor = model.lm_head(backbone(token_ids).last_hidden_state)
        return logits.float()

    return forward


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def distillation_loss(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Half KL(target || draft), half total variation, averaged over positions.

    Total variation is exactly the rejection rate of speculative sampling (arXiv 2211.17192, section 3.2;
    used as a loss in DistillSpec, arXiv 2310.08461), but its gradient vanishes where the two are far
    apart; KL keeps those rows moving. Both logits are `[batch, length, vocab]`.
    """
    draft_logprobs = functional.log_softmax(logits, dim=-1)
    target_logprobs = functional.log_softmax(target_logits, dim=-1)
    target_probs = target_logprobs.exp()
    divergence = (target_probs * (target_logprobs - draft_logprobs)).sum(dim=-1)
    variation = 0.5 * (target_probs - draft_logprobs.exp()).abs().sum(dim=-1)
    return (0.5 * divergence + 0.5 * variation).mean()


def load_trained(name: str) -> LlamaForCausalLM:
    """Return the model of the latest checkpoint, in evaluation mode."""
    path = paths.checkpoint(name)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path.name}; run `python -m training {name}` first")
    model = build_model(SHAPES[name])
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    model.requires_grad_(False)
    return model.eval()


def replace_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path`, then rename, so that readers see the old file or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    temporary.replace(path)


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


def run(config: TrainConfig) -> None:
    """Train, or go on training, the model `config.name` and write its checkpoint and its record."""
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    tokens: npt.NDArray[np.uint16] = np.load(paths.TRAIN_TOKENS)
    model = build_model(SHAPES[config.name])
    optimizer = make_optimizer(model, config)
    step, elapsed_s = 0, 0.0
    checkpoint = paths.checkpoint(config.name)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        changed = {key for key, value in asdict(config).items() if state["config"].get(key) != value} - CHANGEABLE
        if changed:
            names = ", ".join(sorted(changed))
            raise ValueError(f"{checkpoint.name} is of a run with other {names}; use --restart to begin again")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, elapsed_s = state["step"], state["elapsed_s"]
    forward = make_forward(model, config.compile)
    target_forward, distance = None, distillation_loss
    if config.distill_from < 1:
        target_forward = make_forward(load_trained(TARGET.name), config.compile)
        distance = torch.compile(distillation_loss) if config.compile else distillation_loss

    def save() -> None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "config": asdict(config),
            "step": step,
            "elapsed_s": elapsed_s,
        }
        replace_atomically(checkpoint, lambda path: torch.save(state, path))

    def share_done() -> float:
        if config.steps is not None:
            return step / config.steps
        assert config.minutes is not None
        return elapsed_s / (60 * config.minutes)

    average_loss: float | None = None
    saved_at = now = time.monotonic()
    with progress_display(config.name, Console().is_terminal) as report:
        while (share := share_done()) < 1:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, share)
            batch = batch_at(tokens, config.seed, step, config.batch_size)
            logits = forward(batch[:, :-1])
            if target_forward is not None and share >= config.distill_from:
                with torch.no_grad():
                    target_logits = target_forward(batch[:, :-1])
                loss = distance(logits, target_logits)
            else:
                loss = cross_entropy(logits, batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            before, now = now, time.monotonic()
            elapsed_s += now - before
            average_loss = loss.item() if average_loss is None else 0.98 * average_loss + 0.02 * loss.item()
            report(share_done(), f"step {step} loss {average_loss:.3f}")
            if now - saved_at >= config.checkpoint_every_s:
                save()
                saved_at = now
    save()
    write_record(config, model, step, elapsed_s)


def write_record(config: TrainConfig, model: LlamaForCausalLM, step: int, elapsed_s: float) -> None:
    trained_tokens = step * config.batch_size * SEQUENCE_LENGTH
    record = {
        "config": asdict(config),
        "parameters": num_parameters(model),
        "steps": step,
        "minutes": round(elapsed_s / 60, 1),
        "tokens": trained_tokens,
        "epochs": round(trained_tokens / len(np.load(paths.TRAIN_TOKENS, mmap_mode="r")), 2),
    }
    text = json.dumps(record, indent=2) + "\n"
    replace_atomically(paths.record(config.name), lambda path: path.write_text(text, encoding="utf-8"))
    print(text, end="")


@dataclass(frozen=True)
class PairScore:
    """How the pair does on the held-out files, position by position under teacher forcing."""

    tokens: int
    target_loss: float  # nats per token
    draft_loss: float
    target_accuracy: float  # share of positions where the argmax is the text's next token
    draft_accuracy: float
    argmax_agreement: float  # greedy acceptance rate of a draft's first token
    sampling_acceptance: float  # 1 - total variation, at temperature 1


def heldout_batches() -> Iterator[torch.Tensor]:
    """Yield the whole held-out stream in order, as `[at most EVAL_BATCH, SEQUENCE_LENGTH + 1]`."""
    tokens: npt.NDArray[np.uint16] = np.load(paths.HELDOUT_TOKENS)
    starts = range(0, len(tokens) - SEQUENCE_LENGTH - 1, SEQUENCE_LENGTH)
    rows = [tokens[start : start + SEQUENCE_LENGTH + 1].astype(np.int64) for start in starts]
    for first in range(0, len(rows), EVAL_BATCH):
        yield torch.from_numpy(np.stack(rows[first : first + EVAL_BATCH]))


def score_pair(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> PairScore:
    """Losses and agreement over every held-out token, in float32."""
    sums = torch.zeros(6, dtype=torch.float64)
    count = 0
    with torch.inference_mode():
        for batch in heldout_batches():
            token_ids, labels = batch[:, :-1], batch[:, 1:]
            target_logits = target(token_ids).logits
            draft_logits = draft(token_ids).logits
            target_top, draft_top = target_logits.argmax(-1), draft_logits.argmax(-1)
            variation = 0.5 * (target_logits.softmax(-1) - draft_logits.softmax(-1)).abs().sum(-1)
            sums += torch.stack(
                [
                    cross_entropy(target_logits, labels) * labels.numel(),
                    cross_entropy(draft_logits, labels) * labels.numel(),
                    (target_top == labels).sum(),
                    (draft_top == labels).sum(),
                    (target_top == draft_top).sum(),
                    (1 - variation).sum(),
                ]
            ).double()
            count += labels.numel()
    return PairScore(count, *(round(value, 4) for value in (sums / count).tolist()))
