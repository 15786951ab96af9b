"""The pair reading given tokens, every row of logits side by side, and writing, with what the target judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.api import Model
from paceline.core.arrays import Float64Array, FloatArray
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.sampling import RowSampler, probabilities
from paceline.engines.base import Engine
from paceline.lab.agreement import coupled_acceptance, fit_width, read_predicting_rows
from paceline.runtime.loop import DecodingLoop


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


def read_paired_rows(
    target: Engine, draft: Engine, token_ids: Sequence[int], first: int = 1
) -> Iterator[tuple[int, FloatArray, FloatArray]]:
    """Yield (index, target's row, draft's row) for the tokens from ``first`` on; both rows are ``[target vocab]``."""
    width = target.vocabulary.size
    rows = zip(
        read_predicting_rows(target, token_ids, first), read_predicting_rows(draft, token_ids, first), strict=True
    )
    for index, (target_row, draft_row) in enumerate(rows, first):
        yield index, target_row, fit_width(draft_row, width)


def measure_loss(engine: Engine, token_ids: Sequence[int]) -> Loss:
    """Return an engine's loss on a text."""
    nats = 0.0
    for row, token_id in zip(read_predicting_rows(engine, token_ids), token_ids[1:], strict=True):
        largest = row.max()
        nats += float(np.log(np.exp(row - largest).sum(dtype=np.float64)) + largest - np.float64(row[token_id]))
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
    guesses = [int(row.argmax()) for row in read_predicting_rows(engine, token_ids, first=len(context))]
    return sum(guess == token_id for guess, token_id in zip(guesses, continuation, strict=True))


def _distribution(sampler: RowSampler, row: FloatArray) -> Float64Array:
    return probabilities(sampler.candidates(row, ()), len(row), greedy=False)


@dataclass(frozen=True, slots=True)
class LiveText:
    """What the pair wrote after a prompt.

    Attributes:
        prompt_ids: the prompt.
        token_ids: the answer. Ends of text are written over, so it has as many tokens as were asked for.
        verdicts: for each token of the answer whether the draft for its place was accepted; ``None`` where nothing
            was judged: the prompt's own token, and the one that follows a draft accepted to its end.
        tested_by_depth: see :class:`~paceline.core.stats.RequestStats`.
        accepted_by_depth: likewise.
        ended: whether an end-of-generation token is among the answer's.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    verdicts: Sequence[bool | None]
    tested_by_depth: Counter[int]
    accepted_by_depth: Counter[int]
    ended: bool


def write(model: Model, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int) -> LiveText:
    """Let ``model`` continue a prompt by exactly ``max_tokens`` tokens, which its context must have room for."""
    return model.worker.call(lambda: _write(model, prompt_ids, params, max_tokens))


def _write(model: Model, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int) -> LiveText:
    # In a loop of its own, as what every round judged can be read between its rounds.
    loop = DecodingLoop(model.target, model.drafters, model.policy)
    rules, speculation = StopRules(max_tokens, ignore_end=True), SpeculationParams(verify=model.verify)
    request = loop.add(prompt_ids, params, rules, speculation)
    stats, verdicts = request.stats, list[bool | None]()
    accepted = judged = 0
    while loop.active:
        loop.step()
        newly_accepted, newly_judged = stats.num_accepted - accepted, stats.num_judged - judged
        accepted, judged = stats.num_accepted, stats.num_judged
        verdicts += [True] * newly_accepted + [False] * (newly_judged - newly_accepted)
        verdicts += [None] * (request.num_output - len(verdicts))
    return LiveText(
        prompt_ids,
        request.output_ids,
        verdicts,
        stats.tested_by_depth,
        stats.accepted_by_depth,
        ended=not model.target.vocabulary.end_ids.isdisjoint(request.output_ids),
    )
