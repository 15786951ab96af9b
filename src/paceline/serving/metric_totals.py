"""What is counted while a server runs: by rounds as they are made, and by answers as they end."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.request import FinishReason
from paceline.core.stats import PhaseTimes, RequestStats
from paceline.planning.base import RoundRecord

# vLLM's borders, in seconds: a dashboard that compares servers needs the same ones.
_FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_ANSWER_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server is busy with at one moment.

    Attributes:
        running: choices that have started and are not over.
        waiting: choices that wait for their start.
        tokens: tokens of the prompts and answers of those that run.
        cache_share: share of the target's cache that is in use, 0 to 1.
    """

    running: int
    waiting: int
    tokens: int
    cache_share: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram at one moment.

    Attributes:
        borders: upper border of each bucket but the last, which has none.
        counts: ``[borders + 1]`` values in each bucket.
        total: sum of all values.
    """

    borders: Sequence[float]
    counts: Sequence[int]
    total: float


class Histogram:
    """Counts values by size.

    Args:
        borders: in rising order; a value on a border belongs below.
    """

    __slots__ = ("_borders", "_counts", "_total")

    def __init__(self, borders: Sequence[float]) -> None:
        self._borders = borders
        self._counts = [0] * (len(borders) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._borders, value)] += 1
        self._total += value

    def read(self) -> Distribution:
        """Return what was counted so far."""
        return Distribution(self._borders, list(self._counts), self._total)


class RoundTotals:
    """Sums over rounds, so that a long answer shows while it is written.

    Attributes:
        rounds: rounds, which are passes of the target.
        seconds: what they took.
        busy: requests that took part, summed over rounds; however many read prompts in a round count as one.
        tokens: emitted by requests that decode: all but the first of each answer, which its prompt's pass emits.
        drafted: draft tokens that were verified, by drafter.
        accepted: draft tokens that were kept, by drafter.
        drafts: drafts that were verified, of one request in one round each, by how many of their tokens were kept.
        gaps: seconds between arrivals; the tokens of one round arrive together.
    """

    __slots__ = ("accepted", "busy", "drafted", "drafts", "gaps", "rounds", "seconds", "tokens")

    def __init__(self) -> None:
        self.rounds = self.busy = self.tokens = 0
        self.seconds = 0.0
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.drafts: Counter[int] = Counter()
        self.gaps = Histogram(_TOKEN_S)

    @property
    def accepted_by_depth(self) -> Counter[int]:
        """Draft tokens that were kept, by their depth in the draft, from 0."""
        counts: Counter[int] = Counter()
        for length, drafts in self.drafts.items():
            for depth in range(length):
                counts[depth] += drafts
        return counts

    def add(self, record: RoundRecord) -> None:
        """Count a round."""
        self.rounds += 1
        self.seconds += record.round_s
        self.busy += len(record.requests) + (record.prefill_rows > 0)
        for request, tree, path, emitted in zip(
            record.requests, record.trees, record.paths, record.emitted, strict=True
        ):
            self.tokens += emitted
            arrivals_s = request.stats.arrivals_s
            if len(arrivals_s) > emitted:
                self.gaps.add(arrivals_s[-1] - arrivals_s[-1 - emitted])
            sources = tree.sources
            num_drafted = len(sources) - 1
            if not num_drafted:
                continue
            # An answer may end before the end of its path.
            kept = path if len(path) <= emitted else path[:emitted]
            self.drafts[len(kept)] += 1
            first = sources[1]
            if sources.count(first) == num_drafted:
                # Most drafts are of one drafter, and rounds of many requests have many drafts.
                self.drafted[first] += num_drafted
                self.accepted[first] += len(kept)
            else:
                self.drafted.update(sources[1:])
                self.accepted.update([sources[node] for node in kept])


class AnswerTotals:
    """Sums over choices that are over: what their ``timings`` said, added up.

    Attributes:
        by_reason: choices by why they ended.
        num_prompt: tokens of their prompts.
        prompt_tokens: tokens of the prompts that were read.
        cached_tokens: tokens of the prompts that the cache held.
        prompt_s: seconds of reading; those who share a round are each charged the whole round.
        started: answers with at least one token.
        predicted_tokens: tokens of the answers.
        decode_s: seconds of writing them, charged like those of reading.
        phases: what ``decode_s`` went to.
        drafts: drafts that were verified.
        drafted: draft tokens that were verified.
        accepted: draft tokens that were kept.
        accepted_by_depth: draft tokens that were kept, by their depth in the draft, from 0.
        preemptions: places that were lost in a full cache, or to another client.
        longest: tokens of the longest prompt and answer.
        compared_s: of ``decode_s``, seconds of answers of which it is known what plain decoding would have taken.
        plain_s: what it would have taken.
        first_token_s, token_s, answer_s, queue_s, reading_s, writing_s, running_s: histograms in seconds: to the first
            token, for each token after it, from arrival to end, before the start, from the start to the first token,
            from there to the last, and of both together.
        prompt_lengths, answer_lengths: histograms in tokens.
    """

    def __init__(self, context_length: int) -> None:
        self.by_reason: Counter[FinishReason] = Counter()
        self.num_prompt = self.prompt_tokens = self.cached_tokens = 0
        self.started = self.predicted_tokens = 0
        self.drafts = self.drafted = self.accepted = 0
        self.accepted_by_depth: Counter[int] = Counter()
        self.preemptions = self.longest = 0
        self.prompt_s = self.decode_s = self.compared_s = self.plain_s = 0.0
        self.phases = PhaseTimes()
        self.first_token_s = Histogram(_FIRST_TOKEN_S)
        self.token_s = Histogram(_TOKEN_S)
        self.answer_s = Histogram(_ANSWER_S)
        self.queue_s = Histogram(_ANSWER_S)
        self.reading_s = Histogram(_ANSWER_S)
        self.writing_s = Histogram(_ANSWER_S)
        self.running_s = Histogram(_ANSWER_S)
        lengths = _lengths(context_length)
        self.prompt_lengths = Histogram(lengths)
        self.answer_lengths = Histogram(lengths)

    def add(self, stats: RequestStats, finish_reason: FinishReason, num_prompt: int) -> None:
        """Count a choice.

        Args:
            stats: its counts and times, which change no more.
            finish_reason: why it ended.
            num_prompt: tokens of the whole prompt, those from the cache included.
        """
        self.by_reason[finish_reason] += 1
        self.num_prompt += num_prompt
        self.prompt_tokens += stats.prompt_tokens
        self.cached_tokens += stats.cached_tokens
        self.prompt_s += stats.prompt_s
        self.predicted_tokens += stats.predicted_tokens
        self.decode_s += stats.decode_s
        phases = stats.phases
        self.phases.add(phases.draft_s, phases.verify_s, phases.sampling_s, phases.total_s)
        # Whatever was drafted, its first token was judged.
        self.drafts += stats.tested_by_depth[0]
        self.drafted += stats.num_drafted
        self.accepted += stats.num_accepted
        self.accepted_by_depth.update(stats.accepted_by_depth)
        self.preemptions += stats.preemptions
        self.longest = max(self.longest, num_prompt + stats.predicted_tokens)
        if stats.plain is not None:
            self.compared_s += stats.decode_s
            self.plain_s += stats.plain.expected_s
        self.prompt_lengths.add(num_prompt)
        self.answer_lengths.add(stats.predicted_tokens)
        queue_s, added_s, arrivals_s = stats.queue_s or 0.0, stats.added_s, stats.arrivals_s
        self.queue_s.add(queue_s)
        self.answer_s.add(arrivals_s[-1] - added_s if arrivals_s else queue_s)
        if arrivals_s:
            self._add_times(added_s, added_s + queue_s, arrivals_s)

    def _add_times(self, added_s: float, started_s: float, arrivals_s: Sequence[float]) -> None:
        """Count the times of an answer by when its first and its last token came."""
        self.started += 1
        first_s, last_s, further = arrivals_s[0], arrivals_s[-1], len(arrivals_s) - 1
        self.first_token_s.add(first_s - added_s)
        self.reading_s.add(first_s - started_s)
        self.writing_s.add(last_s - first_s)
        self.running_s.add(last_s - started_s)
        if further > 0:
            self.token_s.add((last_s - first_s) / further)


def _lengths(most: int) -> Sequence[float]:
    """Return 1, 2, 5, 10, 20, 50 and so on up to ``most``."""
    lengths: list[float] = []
    unit = 1
    while unit <= most:
        lengths += [float(unit * step) for step in (1, 2, 5) if unit * step <= most]
        unit *= 10
    return lengths
