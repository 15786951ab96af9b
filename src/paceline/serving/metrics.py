"""What a server counts, as Prometheus reads it: under llama-server's names, vLLM's, and paceline's own.

::

    engine's thread   observe(record) ──> RoundTotals  ──┐
    HTTP side         request_over()  ──> AnswerTotals ──┤
                      refused()       ──> refused      ──┼──> FAMILIES ──> render()
                      load()          ──> ServerLoad   ──┘

Totals are plain numbers behind one lock, and a scrape reads all of them at one moment: counters of the three families
agree with each other. prometheus_client's own counters have a lock each; it writes what was read.

* Under llama-server's names, as there, what concerns answers is added when they end, so that it is the sum of what
  their ``timings`` say; seconds are summed over requests, which share rounds.
* Under vLLM's, with its labels and its borders of histograms, tokens and drafts are counted by rounds, while answers
  are written; what a request took is counted when it ends.
* paceline's own say what neither counts: what speculation gained, by whom, and where the time went.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Literal, TypeAlias, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.utils import floatToGoString

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

    running: int = 0
    waiting: int = 0
    tokens: int = 0
    cache_share: float = 0.0


class Histogram:
    """Counts values by size. A value on a border belongs below; the last bucket has no upper border."""

    __slots__ = ("_borders", "_counts", "_total")

    def __init__(self, borders: Sequence[float]) -> None:
        self._borders = borders
        self._counts = [0] * (len(borders) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._borders, value)] += 1
        self._total += value

    def copy(self) -> Histogram:
        copied = Histogram(self._borders)
        copied._counts, copied._total = self._counts.copy(), self._total
        return copied

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return how many values there are up to each border, as prometheus_client takes them, and their sum."""
        borders = [*map(floatToGoString, self._borders), "+Inf"]
        return list(zip(borders, accumulate(self._counts), strict=True)), self._total


class RoundTotals:
    """Sums over rounds, so that a long answer shows while it is written.

    Attributes:
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


_SUMMED: Final = (
    *("prompt_tokens", "cached_tokens", "prompt_s", "predicted_tokens", "decode_s"),
    *("num_drafted", "num_accepted", "preemptions"),
)
"""Figures of a choice that are added up as they are."""


class AnswerTotals:
    """Sums over choices that are over: what their ``timings`` said, added up.

    Attributes:
        sums: figures of :class:`~paceline.core.stats.RequestStats`, under their names there.
        num_prompt: tokens of prompts, those from the cache included.
        started: answers with at least one token.
        drafts: drafts that were verified.
        accepted_by_depth: draft tokens that were kept, by their depth in the draft, from 0.
        longest: tokens of the longest prompt and answer.
        compared_s: of the seconds of decoding, those of answers of which it is known what plain decoding would have
            taken.
        plain_s: seconds that plain decoding would have taken.
        token_s: for each token after the first.
        answer_s: from arrival to end.
        reading_s: from the start to the first token.
        writing_s: from the first token to the last.
        running_s: from the start to the last token.
    """

    def __init__(self, context_length: int) -> None:
        self.by_reason: Counter[FinishReason] = Counter()
        self.sums: dict[str, float] = dict.fromkeys(_SUMMED, 0)
        self.num_prompt = self.started = self.drafts = self.longest = 0
        self.accepted_by_depth: Counter[int] = Counter()
        self.compared_s = self.plain_s = 0.0
        self.phases = PhaseTimes()
        self.first_token_s = Histogram(_FIRST_TOKEN_S)
        self.token_s = Histogram(_TOKEN_S)
        self.answer_s, self.queue_s, self.reading_s, self.writing_s, self.running_s = (
            Histogram(_ANSWER_S) for _ in range(5)
        )
        lengths = _lengths(context_length)
        self.prompt_lengths, self.answer_lengths = Histogram(lengths), Histogram(lengths)

    def add(self, stats: RequestStats, finish_reason: FinishReason, num_prompt: int) -> None:
        self.by_reason[finish_reason] += 1
        for name in _SUMMED:
            self.sums[name] += getattr(stats, name)
        self.num_prompt += num_prompt
        phases = stats.phases
        self.phases.add(phases.draft_s, phases.verify_s, phases.sampling_s, phases.total_s)
        # Whatever was drafted, its first token was judged.
        self.drafts += stats.tested_by_depth[0]
        self.accepted_by_depth.update(stats.accepted_by_depth)
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
    return [
        float(10**power * step) for power in range(len(str(most))) for step in (1, 2, 5) if 10**power * step <= most
    ]


@dataclass(slots=True)
class Totals:
    """What families are read from.

    Attributes:
        context_length: most tokens of one prompt and its answer.
        max_running: most choices that run at once.
        started_s: when the server started, in Unix seconds.
        rounds: sums over rounds.
        answers: sums over choices that are over.
        refused: requests that were refused, by status and kind.
        load: what the server is busy with at the scrape.
        read_per_second: prompt tokens for each second of reading, of choices that ended since the scrape before.
        written_per_second: tokens for each second of writing, of choices that ended since the scrape before.
    """

    context_length: int
    max_running: int
    started_s: float
    answers: AnswerTotals
    rounds: RoundTotals = field(default_factory=RoundTotals)
    refused: Counter[tuple[str, ...]] = field(default_factory=Counter)
    load: ServerLoad = ServerLoad()
    read_per_second: float = 0.0
    written_per_second: float = 0.0


Value: TypeAlias = float | Mapping[tuple[str, ...], float] | Histogram
"""One number, numbers by the values of a family's labels, or a histogram."""


@dataclass(frozen=True, slots=True)
class Family:
    """What Prometheus calls a family: one name with its type, its meaning and its values.

    Attributes:
        kind: type of the metric.
        name: as the text format has it: that of a counter ends with ``_total``, with one exception.
        read: returns the value.
        meaning: the metric's HELP line.
        labels: names of labels that tell values of the family apart.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    read: Callable[[Totals], Value]
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def is_bare_counter(self) -> bool:
        """Whether this is the exception: llama-server has a counter whose name says nothing of a total."""
        return self.kind == "counter" and not self.name.endswith("_total")

    def to_prometheus(self, value: Value, constants: Mapping[str, str]) -> Metric:
        """Return a value as prometheus_client writes it, with the labels that all values of the family have.

        A bare counter becomes a gauge, which is what it is to OpenMetrics.
        """
        names, given = [*constants, *self.labels], list(constants.values())
        if isinstance(value, Histogram):
            histogram = HistogramMetricFamily(self.name, self.meaning, labels=names)
            histogram.add_metric(given, *value.buckets())
            return histogram
        is_counter = self.kind == "counter" and not self.is_bare_counter
        metric = (CounterMetricFamily if is_counter else GaugeMetricFamily)(self.name, self.meaning, labels=names)
        for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
            metric.add_metric([*given, *labels], number)
        return metric


def _summed(name: str) -> Callable[[Totals], float]:
    return lambda t: t.answers.sums[name]


def _by_position(accepted_by_depth: Counter[int]) -> Mapping[tuple[str, ...], float]:
    """Return counts by depth as values by ``position``, from 0 to the deepest that was accepted."""
    deepest = max(accepted_by_depth, default=0)
    return {(str(depth),): accepted_by_depth[depth] for depth in range(deepest + 1)}


FINISHED_REASONS: Final[Mapping[FinishReason, str]] = {
    "stop": "stop",
    "end": "stop",
    "length": "length",
    "context": "length",
    "cancelled": "abort",
    "no_room": "error",
    "error": "error",
}
"""vLLM's word for why a request ended."""


def _by_finished_reason(t: Totals) -> Mapping[tuple[str, ...], float]:
    counts: Counter[tuple[str, ...]] = Counter()
    for reason, word in FINISHED_REASONS.items():
        counts[(word,)] += t.answers.by_reason[reason]
    return counts


def _by_phase(t: Totals) -> Mapping[tuple[str, ...], float]:
    return {(phase,): getattr(t.answers.phases, f"{phase}_s") for phase in ("draft", "verify", "sampling", "rest")}


# A drafter of which nothing was accepted is in the list of accepted tokens too, or no rate would be drawn for it.
# fmt: off
FAMILIES: Final = (
    # llama-server's
    Family("counter", "llamacpp:prompt_tokens_total", _summed("prompt_tokens"),
           "Prompt tokens that were read; those from the cache are not among them."),
    Family("counter", "llamacpp:prompt_tokens_cached_total", _summed("cached_tokens"),
           "Prompt tokens that the cache held."),
    Family("counter", "llamacpp:prompt_seconds_total", _summed("prompt_s"),
           "Seconds spent reading prompts, summed over requests."),
    Family("counter", "llamacpp:tokens_predicted_total", _summed("predicted_tokens"),
           "Tokens of answers that are over."),
    Family("counter", "llamacpp:tokens_predicted_seconds_total", _summed("decode_s"),
           "Seconds spent writing answers after their first token, summed over requests."),
    Family("counter", "llamacpp:n_decode_total", lambda t: t.rounds.rounds,
           "Passes of the target."),
    Family("counter", "llamacpp:n_tokens_max", lambda t: t.answers.longest,
           "Tokens of the longest prompt and answer so far."),
    Family("counter", "llamacpp:spec_decode_num_draft_tokens_total", _summed("num_drafted"),
           "Draft tokens that the target verified."),
    Family("counter", "llamacpp:spec_decode_num_accepted_tokens_total", _summed("num_accepted"),
           "Draft tokens that the target accepted."),
    Family("counter", "llamacpp:spec_decode_num_drafts_total", lambda t: t.answers.drafts,
           "Drafts that the target verified."),
    Family("counter", "llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
           lambda t: _by_position(t.answers.accepted_by_depth),
           "Draft tokens that were accepted, by their place in the draft, from 0.", ("position",)),
    Family("gauge", "llamacpp:prompt_tokens_seconds", lambda t: t.read_per_second,
           "Prompt tokens read per second, of requests that ended since the scrape before."),
    Family("gauge", "llamacpp:predicted_tokens_seconds", lambda t: t.written_per_second,
           "Tokens written per second after the first, of requests that ended since the scrape before."),
    Family("gauge", "llamacpp:requests_processing", lambda t: t.load.running,
           "Requests that run."),
    Family("gauge", "llamacpp:requests_deferred", lambda t: t.load.waiting,
           "Requests that wait for their start."),
    Family("gauge", "llamacpp:n_busy_slots_per_decode", lambda t: t.rounds.busy / max(t.rounds.rounds, 1),
           "Requests in a pass of the target, on average; all that read prompts in a pass count as one."),
    # vLLM's
    Family("gauge", "vllm:num_requests_running", lambda t: t.load.running,
           "Requests that run."),
    Family("gauge", "vllm:num_requests_waiting", lambda t: t.load.waiting,
           "Requests that wait for their start."),
    Family("gauge", "vllm:kv_cache_usage_perc", lambda t: t.load.cache_share,
           "Share of the target's cache that is in use; 1 is all of it."),
    Family("counter", "vllm:prefix_cache_queries_total", lambda t: t.answers.num_prompt,
           "Prompt tokens that were looked for in the cache."),
    Family("counter", "vllm:prefix_cache_hits_total", _summed("cached_tokens"),
           "Prompt tokens that were found in the cache."),
    Family("counter", "vllm:num_preemptions_total", _summed("preemptions"),
           "Times that a request lost its place, in a full cache or to another client."),
    Family("counter", "vllm:prompt_tokens_total", lambda t: t.answers.num_prompt,
           "Tokens of prompts, those from the cache included."),
    Family("counter", "vllm:generation_tokens_total", lambda t: t.rounds.tokens + t.answers.started,
           "Tokens of answers, counted while they are written; the first of each is added at its end."),
    Family("counter", "vllm:request_success_total", _by_finished_reason,
           "Requests that are over, by why: stop, length, abort or error.", ("finished_reason",)),
    Family("histogram", "vllm:time_to_first_token_seconds", lambda t: t.answers.first_token_s,
           "Seconds from a request's arrival to the first token of its answer."),
    Family("histogram", "vllm:inter_token_latency_seconds",
           lambda t: t.rounds.gaps,
           "Seconds between two arrivals, as a reader sees them. "
           "The tokens of one round arrive together and count once."),
    Family("histogram", "vllm:request_time_per_output_token_seconds", lambda t: t.answers.token_s,
           "Seconds from the first token of an answer to its last, divided by the tokens after the first."),
    Family("histogram", "vllm:e2e_request_latency_seconds", lambda t: t.answers.answer_s,
           "Seconds from a request's arrival to its end."),
    Family("histogram", "vllm:request_queue_time_seconds", lambda t: t.answers.queue_s,
           "Seconds that a request waited for its start."),
    Family("histogram", "vllm:request_prefill_time_seconds", lambda t: t.answers.reading_s,
           "Seconds from a request's start to the first token of its answer."),
    Family("histogram", "vllm:request_decode_time_seconds", lambda t: t.answers.writing_s,
           "Seconds from the first token of an answer to its last."),
    Family("histogram", "vllm:request_inference_time_seconds", lambda t: t.answers.running_s,
           "Seconds from a request's start to the last token of its answer."),
    Family("histogram", "vllm:request_prompt_tokens", lambda t: t.answers.prompt_lengths,
           "Tokens of a request's prompt."),
    Family("histogram", "vllm:request_generation_tokens", lambda t: t.answers.answer_lengths,
           "Tokens of a request's answer."),
    Family("counter", "vllm:spec_decode_num_drafts_total", lambda t: t.rounds.drafts.total(),
           "Drafts that the target verified."),
    Family("counter", "vllm:spec_decode_num_draft_tokens_total", lambda t: t.rounds.drafted.total(),
           "Draft tokens that the target verified."),
    Family("counter", "vllm:spec_decode_num_accepted_tokens_total", lambda t: t.rounds.accepted.total(),
           "Draft tokens that the target accepted."),
    Family("counter", "vllm:spec_decode_num_accepted_tokens_per_pos_total",
           lambda t: _by_position(t.rounds.accepted_by_depth),
           "Draft tokens that were accepted, by their place in the draft, from 0.", ("position",)),
    # paceline's own
    Family("counter", "paceline:decode_seconds_total", lambda t: t.answers.compared_s,
           "Seconds spent writing answers of which the plain time is known, summed over requests."),
    Family("counter", "paceline:plain_decode_seconds_total", lambda t: t.answers.plain_s,
           "Seconds that plain decoding would have spent on the same answers, as the policy reckons."),
    Family("counter", "paceline:drafted_tokens_total",
           lambda t: {(drafter,): count for drafter, count in t.rounds.drafted.items()},
           "Draft tokens that the target verified, by drafter.", ("drafter",)),
    Family("counter", "paceline:accepted_tokens_total",
           lambda t: {(drafter,): t.rounds.accepted[drafter] for drafter in t.rounds.drafted},
           "Draft tokens that the target accepted, by drafter.", ("drafter",)),
    Family("counter", "paceline:phase_seconds_total", _by_phase,
           "Seconds spent writing answers, by what they went to, summed over requests.", ("phase",)),
    Family("counter", "paceline:rounds_total", lambda t: t.rounds.rounds,
           "Rounds."),
    Family("counter", "paceline:round_seconds_total", lambda t: t.rounds.seconds,
           "Seconds of all rounds; the rate is the share of time in which the engine is at work."),
    Family("counter", "paceline:requests_total",
           lambda t: {(reason,): t.answers.by_reason[reason] for reason in get_args(FinishReason)},
           "Requests that are over, by why.", ("finish_reason",)),
    Family("counter", "paceline:requests_refused_total", lambda t: {**t.refused},
           "Requests that were refused, by HTTP status and type of error.", ("status", "kind")),
    Family("gauge", "paceline:tokens_in_flight", lambda t: t.load.tokens,
           "Tokens of the prompts and answers of requests that run."),
    Family("gauge", "paceline:requests_running_max", lambda t: t.max_running,
           "Most requests that run at once."),
    Family("gauge", "paceline:context_length_tokens", lambda t: t.context_length,
           "Most tokens of a prompt and its answer."),
    Family("gauge", "paceline:start_time_seconds", lambda t: t.started_s,
           "When the server started, in seconds since 1970."),
)
"""All metrics, in the order in which they are written."""
# fmt: on

_TEXT: Final = "text/plain"
# By default prometheus_client 0.26 writes the colons of names as underscores in OpenMetrics' samples.
_OPENMETRICS: Final = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"


@dataclass(frozen=True, slots=True)
class _Collected:
    """Metrics as prometheus_client's writers take them."""

    metrics: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.metrics


class ServerMetrics:
    """Counts what a server does.

    Any thread may call any method. :meth:`observe` is called on the engine's thread after every round; the others are
    for the HTTP side. A scrape holds a round up only while the numbers are read, not while they are written out.

    Args:
        model_name: the name that the server gives its model; vLLM's names have it as a label.
        context_length: most tokens of one prompt and its answer.
        max_running: most choices that run at once.
        started_s: when the server started, in Unix seconds.
        load: tells what the server is busy with; asked once a scrape, on the thread that scrapes.
    """

    def __init__(
        self,
        *,
        model_name: str,
        context_length: int,
        max_running: int,
        started_s: float,
        load: Callable[[], ServerLoad],
    ) -> None:
        self._load = load
        # One server has one engine.
        self._vllm_labels = {"model_name": model_name, "engine": "0"}
        self._lock = threading.Lock()
        self._totals = Totals(context_length, max_running, started_s, AnswerTotals(context_length))
        # Prompt tokens and seconds of reading, tokens and seconds of writing.
        self._at_last_scrape = (0.0, 0.0, 0.0, 0.0)

    @property
    def process_start(self) -> str:
        """When the server started, in whole Unix seconds: llama-server's header ``Process-Start-Time-Unix``."""
        return str(int(self._totals.started_s))

    def observe(self, record: RoundRecord) -> None:
        """Count a round that is over."""
        with self._lock:
            self._totals.rounds.add(record)

    def request_over(self, stats: RequestStats, finish_reason: FinishReason, num_prompt: int) -> None:
        """Count a choice that is over: once each, before its end is sent, so that a client finds it counted.

        Its statistics change no more. ``num_prompt`` are the tokens of the whole prompt, those from the cache included.
        """
        with self._lock:
            self._totals.answers.add(stats, finish_reason, num_prompt)

    def texts_read(self, num_tokens: int, seconds: float) -> None:
        """Count a pass over texts that are embedded or ranked."""
        with self._lock:
            rounds, answers = self._totals.rounds, self._totals.answers
            rounds.rounds += 1
            rounds.busy += 1
            rounds.seconds += seconds
            answers.num_prompt += num_tokens
            answers.sums["prompt_tokens"] += num_tokens
            answers.sums["prompt_s"] += seconds

    def refused(self, status: int, kind: str) -> None:
        """Count a request that got an error in place of an answer.

        ``kind`` is the ``type`` of the error, one of a few: each is kept as a series of its own.
        """
        with self._lock:
            self._totals.refused[str(status), kind] += 1

    def render(self, openmetrics: bool = False) -> tuple[bytes, str]:
        """Return the body of a scrape, and its content type.

        llama-server's two gauges of speed are of what ended since the scrape before, whoever made that. OpenMetrics 1.0
        is written in place of Prometheus' text format 0.0.4 where that is asked for. There ``llamacpp:n_tokens_max`` is
        a gauge, as names of counters end with ``_total``.
        """
        values = self._read(self._load())
        written = [
            family.to_prometheus(value, self._vllm_labels if family.name.startswith("vllm:") else {})
            for family, value in values
            if openmetrics or not family.is_bare_counter
        ]
        encode, _ = choose_encoder(_OPENMETRICS if openmetrics else _TEXT)
        body = encode(_Collected(written))
        if openmetrics:
            return body, CONTENT_TYPE_LATEST
        for family, value in values:
            if family.is_bare_counter:
                # To its name prometheus_client would add ``_total``.
                name = family.name
                body += f"# HELP {name} {family.meaning}\n# TYPE {name} counter\n{name} {value}\n".encode()
        return body, CONTENT_TYPE_PLAIN_0_0_4

    def _read(self, load: ServerLoad) -> list[tuple[Family, Value]]:
        """Return the values of all families at one moment."""
        totals = self._totals
        with self._lock:
            sums = totals.answers.sums
            now = (
                sums["prompt_tokens"],
                sums["prompt_s"],
                sums["predicted_tokens"] - totals.answers.started,
                sums["decode_s"],
            )
            read, read_s, written, written_s = (a - b for a, b in zip(now, self._at_last_scrape, strict=True))
            self._at_last_scrape = now
            totals.load = load
            totals.read_per_second = read / read_s if read_s > 0 else 0.0
            totals.written_per_second = written / written_s if written_s > 0 else 0.0
            values = [(family, family.read(totals)) for family in FAMILIES]
            return [(family, value.copy() if isinstance(value, Histogram) else value) for family, value in values]
