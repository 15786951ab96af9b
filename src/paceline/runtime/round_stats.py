"""Counts a round: the statistics of its requests, and the record that policy and observers hear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.request import Request
from paceline.core.stats import PlainTimes
from paceline.planning.base import RoundRecord
from paceline.runtime.drafting import Drafts
from paceline.runtime.postprocess import PartResult


@dataclass(slots=True)
class RoundTimes:
    """When the parts of a round were over, in seconds of the loop's clock.

    Attributes:
        learning_s: seconds that the policy took to learn from the round before; this one's requests waited for them.
        drafted_s: when the trees were grown.
        verified_s: when the target's pass was over.
        sampled_s: when the rows were turned into tokens.
        ended_s: when the tokens stood.
        waited_s: seconds of the pass in which it waited for something else than its rows.
    """

    learning_s: float
    started_s: float
    drafted_s: float = 0.0
    verified_s: float = 0.0
    sampled_s: float = 0.0
    ended_s: float = 0.0
    waited_s: float = 0.0

    @property
    def draft_s(self) -> float:
        """Seconds of drafting and planning."""
        return self.drafted_s - self.started_s + self.learning_s

    @property
    def verify_s(self) -> float:
        return self.verified_s - self.drafted_s

    @property
    def round_s(self) -> float:
        return self.ended_s - self.started_s + self.learning_s


def count(results: Sequence[PartResult], drafts: Drafts, times: RoundTimes) -> None:
    for each in results:
        request, stats = each.part.request, each.part.request.stats
        if each.part.decodes:
            stats.rounds += 1
            if each.part.num_rows == 1:
                # A draft that is not in the pass found no room there.
                stats.off_rounds[drafts.off.get(request.id, "no_room")] += 1
        if each.part.decodes or _is_read_again(each):
            # What is read again after a preemption makes a reader wait for the next token, as rounds do.
            stats.decode_s += times.round_s
            for source, seconds in drafts.seconds.items():
                stats.draft_s_by_source[source] = stats.draft_s_by_source.get(source, 0.0) + seconds
            stats.phases.add(times.draft_s, times.verify_s, times.sampled_s - times.verified_s, times.round_s)
        else:
            fed = stats.prompt_tokens + len(each.part.step.token_ids)
            stats.prompt_tokens = min(fed, request.num_prompt - stats.cached_tokens)
            stats.prompt_s += times.round_s
        if each.emission is not None and each.walk is not None:
            _count_tokens(each, times.ended_s)


def count_outside(requests: Sequence[Request], times: RoundTimes) -> None:
    """Add a round to the time of requests that decode and waited for it, as passes are not shared."""
    for request in requests:
        stats, round_s = request.stats, times.round_s
        stats.decode_s += round_s
        stats.phases.add(0.0, 0.0, 0.0, round_s)
        if stats.plain is not None:
            # In plain decoding they would have waited for others' rounds, too.
            stats.plain.add(round_s, round_s, round_s)


def _count_tokens(result: PartResult, ended_s: float) -> None:
    part, walk, emission = result.part, result.walk, result.emission
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


def count_plain(results: Sequence[PartResult], record: RoundRecord, plain: PlainTimes | None) -> None:
    """Add to the statistics of a round's requests what plain decoding would have taken; see :class:`PlainTimes`.

    Args:
        plain: what a plain round of those that decode takes by the policy; ``None`` if it cannot say.
    """
    first = plain if plain is not None and not record.prefill_rows else _first_token(results, record, plain)
    for each in results:
        part, stats = each.part, each.part.request.stats
        if stats.plain is None:
            continue
        if part.decodes:
            if first is None:
                stats.plain = None
            elif each.emission is not None and each.emission.token_ids:
                more = len(each.emission.token_ids) - 1
                stats.plain.add(first.expected_s, first.low_s, first.high_s)
                if more and plain is not None:
                    stats.plain.add(more * plain.expected_s, more * plain.low_s, more * plain.high_s)
        elif _is_read_again(each):
            stats.plain.add(record.round_s, record.round_s, record.round_s)


def _first_token(results: Sequence[PartResult], record: RoundRecord, plain: PlainTimes | None) -> PlainTimes | None:
    """Return what plain decoding would have taken for each request's first token; ``None`` if unknown."""
    taken_s, count, drafted = record.round_s - record.draft_s, 0, 0
    for each in results:
        if each.part.decodes:
            count += 1
            drafted += each.part.num_rows - 1
    if not drafted:
        return PlainTimes(taken_s, taken_s, taken_s)
    if plain is None:
        return None
    undrafted = count + record.prefill_rows
    expected_s = max(taken_s * undrafted / (undrafted + drafted), plain.expected_s)
    return PlainTimes(expected_s, min(plain.low_s, expected_s), max(taken_s, expected_s))


def _is_read_again(result: PartResult) -> bool:
    """Return whether a request's rows were read that were in the cache once."""
    part = result.part
    return not part.decodes and not part.emits and part.request.num_output > 0


def make_record(results: Sequence[PartResult], drafts: Drafts, times: RoundTimes, prefill_context: int) -> RoundRecord:
    requests: list[Request] = []
    trees, paths, emitted = [], [], []
    prefill_rows = 0
    for each in results:
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
        waited_s=times.waited_s,
    )
