"""Training a draft on the target's distributions, by transformers' ``Trainer`` with a loss of its own."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from paceline.atomic_output import atomic_folder
from paceline.core.errors import EngineError, InputError
from paceline.engines.options import ModelOptions
from paceline.engines.torch_hf.loading import file_errors, load_model, one_line, refuse_unsupported
from paceline.lab.comparison import Stop, Stopped
from paceline.lab.distil.answers import KeptAnswer
from paceline.lab.distil.objective import lk_loss_of_heads
from paceline.lab.distil.rows import Rows

BATCH_TOKENS: Final = 2560
"""Tokens of a step, about."""
_LOGITS_AT_ONCE: Final = 1 << 27
"""Logits that are computed at once: half a gigabyte, and as much again for each of what is made of them."""
_WARM_UP_STEPS: Final = 10
"""Steps in which the learning rate rises to its peak."""
_CHECKPOINT_S: Final = 60.0
"""Seconds between two checkpoints."""
_AVERAGED: Final = 20
"""Steps whose losses are averaged."""
_STATE: Final = "trainer_state.json"
"""What ``Trainer`` writes last of a checkpoint: one without it is torn."""
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


@dataclass(frozen=True, slots=True)
class Training:
    """What training came to.

    Attributes:
        first_loss: mean over the first steps, in nats.
        last_loss: mean over the last steps.
        ended_by: ``"epochs"`` or ``"time"``.
    """

    steps: int
    epochs: float
    texts: int
    tokens: int
    learning_rate: float
    first_loss: float | None
    last_loss: float | None
    ended_by: str


def check_architecture(folder: Path) -> None:
    """Raise ``InputError`` for an architecture that cannot be loaded or run, by a folder's configuration alone."""
    with _quiet(), file_errors(folder):
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    refuse_unsupported(config)


def default_learning_rate(num_parameters: int) -> float:
    """Return the peak rate for a model of so many parameters: 1e-3 up to 10 million, 1e-4 for a billion."""
    return max(1e-4, min(1e-3, 1e-3 * math.sqrt(1e7 / num_parameters)))


def train_draft(
    source: Path,
    checkpoints: Path,
    made: Path,
    answers: Sequence[KeptAnswer],
    rows: Sequence[Rows],
    *,
    dtype: str,
    learning_rate: float | None,
    epochs: int,
    lora: int | None = None,
    seed: int,
    threads: int | None,
    done_share: Callable[[], float],
    stopped: Stop,
    report: Callable[[int, int, float], None],
) -> Training:
    """Train the model of a folder, and write another folder with its weights, in ``dtype``; or go on with that.

    ``done_share`` says how much of the time is over: the learning rate falls with it to zero, and the training ends
    with it, if its epochs last longer. ``lora`` is the rank of low-rank matrices (arXiv 2106.09685) that are trained in
    place of the weights, and are merged into them at the end. ``report`` hears of each step: its number, of how many,
    and the loss.

    Raises:
        Stopped: the user wants no more; a checkpoint is left, from which the same call goes on.
        InputError: the model cannot be loaded, or the disk is full.
        EngineError: torch cannot go on, as where memory is short.
    """
    # torch releases the tiles of a processor with AMX, thread by thread, which llama.cpp counts on in the caller's.
    with ThreadPoolExecutor(1, "paceline-torch") as apart:
        return apart.submit(
            _train,
            source,
            checkpoints,
            made,
            _Texts(answers, rows),
            _Pace(done_share, stopped, report),
            dtype=_DTYPES[dtype],
            learning_rate=learning_rate,
            epochs=epochs,
            lora=lora,
            seed=seed,
            threads=threads,
        ).result()


def _train(
    source: Path,
    checkpoints: Path,
    made: Path,
    texts: _Texts,
    pace: _Pace,
    *,
    dtype: torch.dtype,
    learning_rate: float | None,
    epochs: int,
    lora: int | None,
    seed: int,
    threads: int | None,
) -> Training:
    is_cuda = torch.cuda.is_available()
    checkpoints.mkdir(exist_ok=True)
    latest = _find_checkpoint(checkpoints)
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(ModelOptions(source, dtype="float32", devices=("none",)))
    model = loaded.model
    model.config.use_cache = False
    rate = learning_rate or default_learning_rate(sum(weights.numel() for weights in model.parameters()))
    keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
    batch, accumulated = _batch_size(texts, model.config.get_text_config().vocab_size)
    if lora is not None:
        model = add_lora(model, lora)
    with _training_errors(checkpoints), _quiet():
        arguments = TrainingArguments(
            output_dir=str(checkpoints),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulated,
            num_train_epochs=epochs,
            learning_rate=rate,
            weight_decay=0.0,
            adam_beta2=0.98,
            max_grad_norm=1.0,
            # Weights and sums stay in float32.
            bf16=is_cuda or _multiplies_bfloat16(),
            use_cpu=not is_cuda,
            seed=seed,
            save_strategy="no",
            save_total_limit=2,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=is_cuda,
            remove_unused_columns=False,
        )
        trainer = _Distiller(
            model=model,
            args=arguments,
            train_dataset=texts,
            data_collator=_collate,
            callbacks=[pace],
            pace=pace,
            keeps_logits=keeps_logits,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=None if latest is None else str(latest))
        if pace.stopped():
            raise Stopped
        state = trainer.state
        trained = trainer.model if lora is None else trainer.model.merge_and_unload()
        _write_folder(trained, source, made, dtype)
    averaged = max(1, min(_AVERAGED, len(pace.losses) // 2))
    return Training(
        steps=state.global_step,
        epochs=round(float(state.epoch or 0.0), 2),
        texts=len(texts),
        tokens=texts.num_tokens,
        learning_rate=rate,
        first_loss=_mean(pace.losses[:averaged]),
        last_loss=_mean(pace.losses[-averaged:]),
        ended_by="time" if state.global_step < state.max_steps else "epochs",
    )


def _multiplies_bfloat16() -> bool:
    """Return whether the CPU has units for products in bfloat16; others take longer for these than for float32."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


def add_lora(model: Any, rank: int) -> Any:
    """Return a model with low-rank matrices beside all linear ones, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    with _quiet():
        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


class _Texts(torch.utils.data.Dataset):  # type: ignore[misc]
    """Answers behind their prompts, with the target's rows."""

    def __init__(self, answers: Sequence[KeptAnswer], rows: Sequence[Rows]) -> None:
        self._texts = list(zip(answers, rows, strict=False))
        self.longest = max((len(answer.token_ids) for answer, _ in self._texts), default=1)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        answer, rows = self._texts[index]
        # The last token of an answer predicts nothing that is known.
        token_ids = [*answer.task.prompt_ids, *answer.token_ids[:-1]]
        return {"input_ids": token_ids, "first": len(answer.task.prompt_ids) - 1, "rows": rows}

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.token_ids) for answer, _ in self._texts)

    @property
    def mean_length(self) -> float:
        lengths = [len(answer.task.prompt_ids) + len(answer.token_ids) for answer, _ in self._texts]
        return sum(lengths) / max(len(lengths), 1)


def _collate(texts: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch: tokens ``[texts, length]``, and what predicts the last ``kept`` places of it.

    Texts are filled up behind, where causal attention lets nothing see it.
    """
    length = max(len(text["input_ids"]) for text in texts)
    kept = length - min(text["first"] for text in texts)
    head = texts[0]["rows"]["ids"].shape[-1]
    input_ids = np.zeros((len(texts), length), np.int64)
    ids = np.zeros((len(texts), kept, head), np.int64)
    logprobs = np.full((len(texts), kept, head), -np.inf, np.float32)
    tail = np.zeros((len(texts), kept), np.float32)
    weights = np.zeros((len(texts), kept), np.float32)
    for index, text in enumerate(texts):
        rows, first = text["rows"], text["first"] - (length - kept)
        places = slice(first, first + len(rows))
        input_ids[index, : len(text["input_ids"])] = text["input_ids"]
        ids[index, places], logprobs[index, places] = rows["ids"], rows["logprobs"]
        tail[index, places], weights[index, places] = rows["tail"], 1.0
    arrays = {"input_ids": input_ids, "token_ids": ids, "logprobs": logprobs, "tail": tail, "weights": weights}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class _Distiller(Trainer):  # type: ignore[misc]
    """Minimises the LK loss; the learning rate falls with the time."""

    def __init__(self, *, pace: _Pace, keeps_logits: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._pace = pace
        # As with other losses of one's own, it is the mean of a batch.
        self.model_accepts_loss_kwargs = False
        self._keeps_logits = keeps_logits

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        kept = inputs["token_ids"].shape[1]
        extra = {"logits_to_keep": kept} if self._keeps_logits else {}
        logits = model(input_ids=inputs["input_ids"], **extra).logits[:, -kept:].float()
        losses = lk_loss_of_heads(logits, inputs["token_ids"], inputs["logprobs"], inputs["tail"])
        weights = inputs["weights"]
        loss = (losses * weights).sum() / weights.sum()
        self._pace.note(loss.detach())
        return (loss, {"logits": logits}) if return_outputs else loss

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        def rate(step: int) -> float:
            share = max(step / max(num_training_steps, 1), self._pace.done_share())
            return min((step + 1) / _WARM_UP_STEPS, 1.0) * max(1.0 - share, 0.0)

        self.lr_scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, rate)
        return self.lr_scheduler


class _Pace(TrainerCallback):  # type: ignore[misc]
    """Tells of steps, has checkpoints written, and ends the training with its time or at the user's wish."""

    def __init__(
        self, done_share: Callable[[], float], stopped: Stop, report: Callable[[int, int, float], None]
    ) -> None:
        self.done_share = done_share
        self.stopped = stopped
        self._report = report
        self._saved_s = time.monotonic()
        self._of_step: list[torch.Tensor] = []
        self.losses: list[float] = []

    def note(self, loss: torch.Tensor) -> None:
        self._of_step.append(loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.losses.append(float(torch.stack(self._of_step).mean()))
        self._of_step.clear()
        if not math.isfinite(self.losses[-1]):
            raise EngineError(
                f"the loss is not a number at step {state.global_step}: try a smaller learning rate (--lr)"
            )
        self._report(state.global_step, state.max_steps, _mean(self.losses[-_AVERAGED:]) or 0.0)
        ends = self.stopped() or self.done_share() >= 1.0
        control.should_training_stop = control.should_training_stop or ends
        if ends or time.monotonic() - self._saved_s > _CHECKPOINT_S:
            control.should_save = True
            self._saved_s = time.monotonic()


def _batch_size(texts: _Texts, vocab_size: int) -> tuple[int, int]:
    """Return texts that are computed at once, and how many times as many a step has."""
    wanted = max(1, round(BATCH_TOKENS / max(texts.mean_length, 1.0)))
    at_once = max(1, min(wanted, _LOGITS_AT_ONCE // (vocab_size * texts.longest)))
    return at_once, max(1, round(wanted / at_once))


def _find_checkpoint(folder: Path) -> Path | None:
    """Return the latest whole checkpoint; torn ones, of a process that was killed, are removed."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    while found:
        latest = found.pop()
        with contextlib.suppress(OSError, ValueError):
            json.loads((latest / _STATE).read_text(encoding="utf-8"))
            return latest
        shutil.rmtree(latest, ignore_errors=True)
    return None


def _write_folder(model: Any, source: Path, made: Path, dtype: torch.dtype) -> None:
    """Write the weights beside all that the source says of itself."""
    with atomic_folder(made) as partial:
        model.to("cpu", dtype).save_pretrained(partial)
        for path in source.iterdir():
            if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHTS):
                shutil.copy(path, partial / path.name)
        config = partial / "config.json"
        said = json.loads(config.read_text(encoding="utf-8-sig"))
        for key in ("dtype", "torch_dtype"):
            if key in said:
                said[key] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, but not standard error, where the progress is shown."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _training_errors(folder: Path) -> Iterator[None]:
    """Turn what torch and safetensors raise into one line. What was written before is kept."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(
            "training does not fit in the memory of the device: take shorter answers (--tokens)"
        ) from error
    except (Stopped, OSError, InputError, EngineError):
        raise
    except Exception as error:
        # The disk's errors come as RuntimeError from torch.save, and as safetensors' own.
        if "space left" in str(error) or shutil.disk_usage(folder).free < 1 << 20:
            raise InputError(
                f"{folder} has no room left for a checkpoint: free some, and the same command goes on where it stood"
            ) from error
        raise EngineError(f"training failed: {one_line(error)}") from error


def _mean(losses: Sequence[float]) -> float | None:
    return sum(losses) / len(losses) if losses else None
