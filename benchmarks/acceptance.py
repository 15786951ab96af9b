"""Acceptance under coupled verification on the embedded pair's real logits.

First-token acceptance has a closed form (arXiv 2408.07978), which the implementation has to meet; and sharing the noise
should accept much more than comparing a greedy draft with a sampled target, as llama-server does at temperature. What
limits both is how well the draft model fits its target, not the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.api import Model, load
from paceline.core.loop import DecodingLoop
from paceline.core.noise import Float64Array
from paceline.core.params import SamplingParams, StopRules
from paceline.core.sampling import RowSampler, probabilities
from paceline.core.verify import CoupledVerifier, Proposal
from paceline.engines.base import COMMITTED_END, Engine, FloatArray, Step
from paceline.models.embedded import heldout
from paceline.planning.fixed import FixedPolicy

TEMPERATURE = 0.8
CONTEXTS = 40
ROWS_PER_CONTEXT = 12
SEEDS = 64
PROMPTS = 40
ANSWER_TOKENS = 128
UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class GreedyDraftVerifier(CoupledVerifier):
    """The usual practice, for comparison: the draft proposes its likeliest token, whatever the target will draw."""

    def propose(self, logits: FloatArray, position: int, history: Sequence[int], count: int) -> list[Proposal]:
        """Return the draft's largest logit."""
        return [Proposal(int(logits.argmax()), None)]


def measure() -> dict[str, Any]:
    """Return first-token acceptance beside its closed form, and accepted tokens a round beside the usual practice."""
    with load(policy=FixedPolicy(draft_max=5)) as model:
        figures = {"first_token": first_token(model)}
        for name, filters in (("temperature alone", UNFILTERED), ("default filters", {})):
            figures[name] = per_round(model, filters)
    return figures


def first_token(model: Model) -> dict[str, float]:
    """Return measured and closed-form acceptance of the first draft token over many rows and seeds."""
    draft = model.drafters[0].engine  # type: ignore[attr-defined]
    hits, closed, squares = 0, 0.0, 0.0
    for text in heldout("code")[:CONTEXTS]:
        token_ids = model.target.vocabulary.tokenize(text)[:512]
        positions = np.linspace(8, len(token_ids) - 1, ROWS_PER_CONTEXT).astype(int)
        target_rows = rows_at(model.target, token_ids, positions)
        draft_rows = rows_at(draft, token_ids, positions)
        for position, target_row, draft_row in zip(positions, target_rows, draft_rows, strict=True):
            params = SamplingParams(temperature=TEMPERATURE, **UNFILTERED)  # type: ignore[arg-type]
            sampler = RowSampler(params)
            expected = closed_form(
                probabilities(sampler.candidates(target_row, ()), len(target_row), greedy=False),
                probabilities(sampler.candidates(draft_row, ()), len(draft_row), greedy=False),
            )
            for seed in range(SEEDS):
                verifier = CoupledVerifier(SamplingParams(temperature=TEMPERATURE, seed=seed, **UNFILTERED))  # type: ignore[arg-type]
                emitted = verifier.sampler.emit(target_row, int(position), ())
                hits += emitted == verifier.propose(draft_row, int(position), (), 1)[0].token_id
            closed += SEEDS * expected
            squares += SEEDS * expected * (1 - expected)
    trials = CONTEXTS * ROWS_PER_CONTEXT * SEEDS
    measured, expected, error = hits / trials, closed / trials, math.sqrt(squares) / trials
    print(
        f"first token at temperature {TEMPERATURE}: accepted {measured:.4f}, closed form {expected:.4f}, "
        f"{(measured - expected) / error:+.2f} standard errors ({trials} trials)"
    )
    return {"measured": measured, "closed_form": expected, "standard_error": error, "trials": trials}


def closed_form(target_probs: Float64Array, draft_probs: Float64Array) -> float:
    """Return ``sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)``, both ``[vocab]``."""
    total = 0.0
    for p_i, q_i in zip(target_probs, draft_probs, strict=True):
        # Terms below 1e-9 of probability add less than the sum's own rounding.
        if p_i > 1e-9 and q_i > 1e-9:
            total += 1.0 / float(np.maximum(target_probs / p_i, draft_probs / q_i).sum())
    return total


def rows_at(
    engine: Engine, token_ids: Sequence[int], positions: Sequence[int] | np.ndarray[Any, Any]
) -> list[FloatArray]:
    """Return the rows ``[vocab]`` that follow the first ``position`` tokens, for each position."""
    sequence = engine.open()
    outputs = [int(position) - 1 for position in positions]
    parents = range(COMMITTED_END, COMMITTED_END + len(token_ids))
    output = engine.forward([Step(sequence, token_ids, parents, outputs)])
    rows = [output.logits(0, index).copy() for index in range(len(outputs))]
    engine.close_sequence(sequence)
    return rows


def per_round(model: Model, filters: dict[str, Any]) -> dict[str, float]:
    """Return accepted tokens a round with shared noise and with a greedy draft."""
    accepted = {"coupled": 0, "greedy draft": 0}
    rounds = {"coupled": 0, "greedy draft": 0}
    loop = DecodingLoop(model.target, model.drafters, model.policy)
    for seed, text in enumerate(heldout("code")[:PROMPTS]):
        prompt_ids = model.target.vocabulary.tokenize(text[:600])
        params = SamplingParams(temperature=TEMPERATURE, seed=seed, **filters)
        for name in accepted:
            request = loop.add(prompt_ids, params, StopRules(ANSWER_TOKENS, ignore_end=True))
            if name == "greedy draft":
                request.verifier = GreedyDraftVerifier(params)
            while request.finish_reason is None:
                loop.step()
            accepted[name] += request.stats.num_accepted
            rounds[name] += request.stats.rounds
    coupled, greedy = (accepted[name] / rounds[name] for name in accepted)
    print(
        f"accepted a round at temperature {TEMPERATURE}, {'default filters' if not filters else 'no filters'}: "
        f"coupled {coupled:.3f}, greedy draft {greedy:.3f}, ratio {coupled / greedy:.2f}"
    )
    return {"coupled": coupled, "greedy_draft": greedy, "ratio": coupled / greedy}
