"""Both models reading given tokens: every row of logits side by side, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.arrays import Float64Array, FloatArray
from paceline.core.sampling import RowSampler, probabilities
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.pairs.measures import coupled_acceptance

MAX_CHUNK = 64
"""Rows read in one pass: few enough that those of a large vocabulary fit in memory."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss on a text.

    Attributes:
        nats: summed over the tokens after the first, which nothing predicts.
        tokens: how many those are.
        num_bytes: bytes of text that they stand for.
    """

    nats: float
    tokens: int
    num_bytes: int


def read_rows(engine: Engine, token_ids: Sequence[int], first: int = 1) -> Iterator[FloatArray]:
    """Read ``token_ids`` and yield the rows ``[chunk, vocab]`` that predict those from index ``first`` on.

    Args:
        engine: any engine with a sequence to spare.
        token_ids: a text.
        first: index of the first token whose row is wanted, at least 1.
    """
    size = min(MAX_CHUNK, engine.capabilities.max_rows, engine.capabilities.max_outputs)
    # The last token is predicted but predicts nothing here, so it is not fed.
    fed = len(token_ids) - 1
    sequence = engine.open()
    try:
        for start in range(0, fed, size):
            chunk = token_ids[start : min(start + size, fed)]
            wanted = range(max(0, first - 1 - start), len(chunk))
            parents = range(COMMITTED_END, COMMITTED_END + len(chunk))
            output = engine.forward([Step(sequence, chunk, parents, wanted)])
            # Rows are borrowed until the next pass.
            read = [output.logits(0, index).copy() for index in range(len(wanted))]
            engine.commit(sequence, range(len(chunk)))
            if read:
                yield np.stack(read)
    finally:
        engine.close_sequence(sequence)


def read_paired_rows(
    target: Engine, draft: Engine, token_ids: Sequence[int], first: int = 1
) -> Iterator[tuple[int, FloatArray, FloatArray]]:
    """Yield (index, target's row, draft's row) for the tokens from ``first`` on; both rows are ``[target vocab]``."""
    width = target.vocabulary.size
    index = first
    of_target, of_draft = read_rows(target, token_ids, first), read_rows(draft, token_ids, first)
    for target_row, draft_row in zip(_single(of_target), _single(of_draft), strict=True):
        yield index, target_row, fit_width(draft_row, width)
        index += 1


def fit_width(row: FloatArray, width: int) -> FloatArray:
    """Return a draft's row as long as the target's: a draft never proposes tokens that the target does not have."""
    if len(row) >= width:
        return row[:width]
    return np.concatenate((row, np.full(width - len(row), -np.inf, dtype=row.dtype)))


def measure_loss(engine: Engine, token_ids: Sequence[int]) -> Loss:
    """Return an engine's loss on a text."""
    nats, start = 0.0, 1
    for chunk in read_rows(engine, token_ids):
        following = np.asarray(token_ids[start : start + len(chunk)])
        chosen = chunk[np.arange(len(chunk)), following].astype(np.float64)
        largest = chunk.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(chunk - largest).sum(axis=1, dtype=np.float64)) + largest[:, 0]
        nats += float((log_sums - chosen).sum())
        start += len(chunk)
    spell = engine.vocabulary.token_bytes
    return Loss(nats, len(token_ids) - 1, sum(len(spell(token_id)) for token_id in token_ids[1:]))


def row_acceptance(target_row: FloatArray, draft_row: FloatArray, sampler: RowSampler) -> float:
    """Return the chance that the coupled verifier accepts the draft's proposal where these two rows stand.

    Of vocabularies too large for every token to draw noise of its own it leaves out what the shared tail changes.
    """
    if sampler.params.greedy:
        return float(target_row.argmax() == draft_row.argmax())
    target_probs, draft_probs = (_distribution(sampler, row) for row in (target_row, draft_row))
    return coupled_acceptance(target_probs, draft_probs)


def count_copied(engine: Engine, context: Sequence[int], continuation: Sequence[int]) -> int:
    """Return how many tokens of ``continuation`` are the largest logit after ``context`` and those before them."""
    token_ids = [*context, *continuation]
    guesses = [int(row.argmax()) for row in _single(read_rows(engine, token_ids, first=len(context)))]
    return sum(guess == token_id for guess, token_id in zip(guesses, continuation, strict=True))


def _distribution(sampler: RowSampler, row: FloatArray) -> Float64Array:
    return probabilities(sampler.candidates(row, ()), len(row), greedy=False)


def _single(chunks: Iterator[FloatArray]) -> Iterator[FloatArray]:
    for chunk in chunks:
        yield from chunk
