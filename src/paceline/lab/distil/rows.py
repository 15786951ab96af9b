"""The target's distributions along its answers, as its own engine computes them from the file that runs.

Of each place the likeliest tokens are kept, and all others together as one: 0.3 KB a token, whatever the vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.atomic_output import atomic_file
from paceline.core.arrays import FloatArray
from paceline.engines.base import Engine
from paceline.lab.agreement import read_predicting_rows
from paceline.lab.comparison import Stop, Stopped
from paceline.lab.distil.answers import KeptAnswer

HEAD: Final = 64
"""Tokens of a place that are kept by themselves."""
_TEXTS: Final = 16
"""Answers whose rows are in one file."""

Rows: TypeAlias = npt.NDArray[np.void]
"""Rows ``[places]`` with fields ``ids`` and ``logprobs`` ``[head]``, and ``tail``; of log-probabilities, at 1."""


def row_type(vocab_size: int) -> np.dtype[Any]:
    head = min(HEAD, vocab_size)
    ids = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    return np.dtype([("ids", ids, (head,)), ("logprobs", np.float16, (head,)), ("tail", np.float16)])


def row_bytes(vocab_size: int) -> int:
    """Return the bytes that a token's row takes."""
    return row_type(vocab_size).itemsize


def write_rows(
    target: Engine,
    answers: Sequence[KeptAnswer],
    folder: Path,
    unshared_ids: Sequence[int],
    *,
    in_time: Callable[[], bool],
    stopped: Stop,
    report: Callable[[int], None],
) -> None:
    """Write the rows of answers, some answers a file, as far as there is time; files that are there are kept.

    ``unshared_ids`` are no tokens of the draft, and count among the others.
    """
    vocab_size = target.vocabulary.size
    kind = row_type(vocab_size)
    unshared = np.array([token_id for token_id in unshared_ids if token_id < vocab_size], dtype=np.int64)
    for first in range(0, len(answers), _TEXTS):
        some = answers[first : first + _TEXTS]
        path = _path(folder, first)
        if _load(path, kind, some) is None:
            rows = np.empty(sum(len(each.token_ids) for each in some), kind)
            filled = 0
            for each in some:
                if first and not in_time():
                    return
                token_ids = [*each.task.prompt_ids, *each.token_ids]
                for row in read_predicting_rows(target, token_ids, len(each.task.prompt_ids)):
                    if stopped():
                        raise Stopped
                    _keep_head(row, unshared, rows[filled : filled + 1])
                    filled += 1
            with atomic_file(path) as partial, partial.open("wb") as file:
                np.save(file, rows)
        report(first + len(some))


def load_rows(answers: Sequence[KeptAnswer], folder: Path, vocab_size: int) -> list[Rows]:
    """Return the rows of the first answers, as many as have some, without reading them into memory."""
    found: list[Rows] = []
    for first in range(0, len(answers), _TEXTS):
        some = answers[first : first + _TEXTS]
        rows = _load(_path(folder, first), row_type(vocab_size), some)
        if rows is None:
            break
        ends = list(itertools.accumulate(len(each.token_ids) for each in some))
        found += [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return found


def _keep_head(row: FloatArray, unshared: npt.NDArray[np.int64], kept: Rows) -> None:
    logits = row.astype(np.float32)
    largest = logits.max()
    total = np.exp(logits - largest, dtype=np.float64).sum()
    logprobs = logits - (largest + np.float32(np.log(total)))
    shared = logprobs
    if len(unshared):
        shared = logprobs.copy()
        shared[unshared] = -np.inf
    head = kept["ids"].shape[-1]
    ids = np.argpartition(shared, len(shared) - head)[len(shared) - head :]
    kept["ids"][0], kept["logprobs"][0] = ids, shared[ids]
    tail = 1.0 - np.exp(shared[ids], dtype=np.float64).sum()
    # What is left by rounding is nothing; where there is no tail its logarithm is that of nothing, too.
    kept["tail"][0] = np.log(tail) if tail > 1e-6 else -np.inf


def _path(folder: Path, first: int) -> Path:
    return folder / f"rows-{first:06}.npy"


def _load(path: Path, kind: np.dtype[Any], answers: Sequence[KeptAnswer]) -> Rows | None:
    """Return the rows of answers as a file has them; ``None`` where it has not."""
    try:
        rows: Rows = np.load(path, mmap_mode="r")
    except (OSError, ValueError):
        return None
    if rows.dtype != kind or rows.shape != (sum(len(each.token_ids) for each in answers),):
        return None
    return rows
