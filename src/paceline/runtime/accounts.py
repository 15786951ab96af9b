"""What a round took and gave: the statistics of its requests, and the record that observers hear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.request import Request
from paceline.planning.base import RoundRecord
from paceline.runtime.drafting import Drafts
from paceline.runtime.settle import Settled


@dataclass(slots=True)
class RoundTimes:
    """When the parts of a round were over, in seconds of the loop's clock.

    Attributes:
        learning_s: seconds that the policy took to learn from the round before; this one's requests waited for them.
        started_s: when the round began.
        drafted_s: when the trees were grown.
        verified_s: when the target's pass was over.
        sampled_s: when the rows were turned into tokens.
        ended_s: when the tokens stood.
    """

    learning_s: float
    started_s: float
    drafted_s: float = 0.0
    verified_s: float = 0.0
    sampled_s: float = 0.0
    ended_s: float = 0.0

    @property
    def draft_s(self) -> float:
        """Seconds of drafting and planning."""
        return self.drafted_s - self.started_s + self.learning_s

    @property
    def verify_s(self) -> float:
        """Seconds of the target's pass."""
        return self.verified_s - self.drafted_s

    @property
    def round_s(self) -> float:
        """Seconds of the whole round."""
        return self.ended_s - self.started_s + self.learning_s


def count(settled: Sequence[Settled], times: RoundTimes) -> None:
    """Add a round to the statistics of its requests."""
    for each in settled:
        request, stats = each.part.request, each.part.request.stats
        stats.rounds += each.part.decodes
        if each.part.decodes or (request.num_output and not each.part.emits):
            # What is read again after a preemption makes a reader wait for the next token, as rounds do.
            stats.decode_s += times.round_s
            stats.phases.add(times.draft_s, times.verify_s, times.sampled_s - times.verified_s, times.round_s)
        else:
            fed = stats.prompt_tokens + len(each.part.step.token_ids)
            stats.prompt_tokens = min(fed, request.num_prompt - stats.cached_tokens)
            stats.prompt_s += times.round_s
        if each.emission is not None and each.walk is not None:
            _count_tokens(each, times.ended_s)


def _count_tokens(settled: Settled, ended_s: float) -> None:
    part, walk, emission = settled.part, settled.walk, settled.emission
    assert walk is not None
    assert emission is not None
    stats, num_drafted, num_emitted = part.request.stats, part.num_rows - 1, len(emission.token_ids)
    stats.predicted_tokens += num_emitted
    stats.arrivals_s.extend([ended_s] * num_emitted)
    if not part.decodes or not num_drafted:
        return
    accepted = min(len(walk.path), num_emitted)
    stats.num_drafted += num_drafted
    stats.num_accepted += accepted
    # A walk that ends for the request's sake judged only what it accepted.
    turned_down = num_emitted == len(walk.token_ids) and not walk.reached_leaf
    stats.num_judged += accepted + turned_down
    stats.drafted_by_source.update(part.tree.sources[1 : part.num_rows])
    stats.accepted_by_source.update(emission.sources[:accepted])
    for depth in range(accepted):
        stats.tested_by_depth[depth] += 1
        stats.accepted_by_depth[depth] += 1
    if turned_down:
        stats.tested_by_depth[accepted] += 1


def record(settled: Sequence[Settled], drafts: Drafts, times: RoundTimes, prefill_context: int) -> RoundRecord:
    """Return what observers hear of a round."""
    requests: list[Request] = []
    trees, paths, emitted = [], [], []
    prefill_rows = 0
    for each in settled:
        if not each.part.decodes:
            prefill_rows += len(each.part.step.token_ids)
        elif each.walk is not None and each.emission is not None:
            requests.append(each.part.request)
            trees.append(each.part.tree)
            paths.append(each.walk.path)
            emitted.append(len(each.emission.token_ids))
    return RoundRecord(
        requests=requests,
        trees=trees,
        paths=paths,
        emitted=emitted,
        prefill_rows=prefill_rows,
        prefill_context=prefill_context,
        draft_s=times.draft_s,
        learning_s=times.learning_s,
        draft_seconds=drafts.seconds,
        verify_s=times.verify_s,
        round_s=times.round_s,
    )
