"""The pair writing: an answer, and which of its tokens were drafts that the target judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.api import Model
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.runtime.loop import DecodingLoop


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
