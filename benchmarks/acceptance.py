"""Accepted tokens a round with shared noise, beside the usual practice, on the embedded pair's real logits.

Sharing the noise (arXiv 2408.07978) should accept much more than comparing a greedy draft with a sampled target, as
llama-server does at temperature. What limits both is how well the draft model fits its target, not the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from paceline.api import Model, load
from paceline.core.arrays import FloatArray
from paceline.core.params import SamplingParams, StopRules
from paceline.core.sampling import RowSampler
from paceline.core.verify import CoupledVerifier, Proposal
from paceline.models.embedded import heldout
from paceline.planning.policies.fixed import FixedPolicy
from paceline.runtime.loop import DecodingLoop

TEMPERATURE = 0.8
PROMPTS = 40
ANSWER_TOKENS = 128
UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class GreedyDraftVerifier(CoupledVerifier):
    """The usual practice, for comparison: the draft proposes its likeliest token, whatever the target will draw."""

    def propose(
        self, logits: FloatArray, position: int, history: Sequence[int], count: int, *, margins: bool = False
    ) -> list[Proposal]:
        """Return the draft's largest logit."""
        return [Proposal(int(logits.argmax()), None)]


def measure() -> dict[str, Any]:
    """Return accepted tokens a round with and without filters, beside the usual practice."""
    with load(policy=FixedPolicy(draft_max=5)) as model:
        return {
            name: model.worker.call(functools.partial(per_round, model, filters))
            for name, filters in (("temperature alone", UNFILTERED), ("default filters", {}))
        }


def per_round(model: Model, filters: dict[str, Any]) -> dict[str, float]:
    """Return accepted tokens a round with shared noise and with a greedy draft."""
    accepted = {"coupled": 0, "greedy draft": 0}
    rounds = {"coupled": 0, "greedy draft": 0}
    loop = DecodingLoop(model.target, model.drafters, model.policy)
    for seed, text in enumerate(heldout("code")[:PROMPTS]):
        prompt_ids = model.target.vocabulary.tokenize(text[:600])
        params = SamplingParams(temperature=TEMPERATURE, seed=seed, **filters)
        for name in accepted:
            verifier = GreedyDraftVerifier(RowSampler(params)) if name == "greedy draft" else None
            request = loop.add(prompt_ids, params, StopRules(ANSWER_TOKENS, ignore_end=True), verifier=verifier)
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
