"""The metrics by name: what Prometheus calls a family is one name with its type, its meaning and its values.

* Under llama-server's names, as there, what concerns answers is added when they end, so that it is the sum of what
  their ``timings`` say; seconds are summed over requests, which share rounds.
* Under vLLM's, with its labels and its borders of histograms, tokens and drafts are counted by rounds, while answers
  are written; what a request took is counted when it ends.
* paceline's own say what neither counts: what speculation gained, by whom, and where the time went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, TypeAlias, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from paceline.core.request import FinishReason
from paceline.serving.metric_totals import AnswerTotals, Distribution, RoundTotals, ServerLoad

Value: TypeAlias = float | Mapping[tuple[str, ...], float] | Distribution
"""One number, numbers by the values of a family's labels, or a histogram."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """What families are read from: the totals at the moment of a scrape.

    Attributes:
        rounds: sums over rounds.
        answers: sums over choices that are over.
        refused: requests that were refused, by status and kind.
        load: what the server is busy with.
        read_per_second: prompt tokens for each second of reading, of choices that ended since the scrape before.
        written_per_second: tokens for each second of writing, of choices that ended since the scrape before.
        context_length: most tokens of one prompt and its answer.
        max_running: most choices that run at once.
        started_s: when the server started, in Unix seconds.
    """

    rounds: RoundTotals
    answers: AnswerTotals
    refused: Mapping[tuple[str, ...], int]
    load: ServerLoad
    read_per_second: float
    written_per_second: float
    context_length: int
    max_running: int
    started_s: float


@dataclass(frozen=True, slots=True)
class Family:
    """One name.

    Attributes:
        name: as the text format has it: that of a counter ends with ``_total``, with one exception.
        kind: type of the metric.
        meaning: the metric's HELP line.
        read: returns its value, which must be a copy: it is looked at after the totals have changed.
        labels: names of labels that tell values of the family apart.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    read: Callable[[Scrape], Value]
    labels: tuple[str, ...] = ()

    @property
    def is_bare_counter(self) -> bool:
        """Whether this is the exception: llama-server has a counter whose name says nothing of a total."""
        return self.kind == "counter" and not self.name.endswith("_total")


def to_prometheus(family: Family, value: Value, constants: Mapping[str, str]) -> Metric:
    """Return a family with its value, as prometheus_client writes it.

    Args:
        family: the family. A bare counter becomes a gauge, which is what it is to OpenMetrics.
        value: what it read.
        constants: labels, with their values, that all values of it have.
    """
    names, given = [*constants, *family.labels], list(constants.values())
    if isinstance(value, Distribution):
        histogram = HistogramMetricFamily(family.name, family.meaning, labels=names)
        borders = [*map(floatToGoString, value.borders), "+Inf"]
        buckets = list(zip(borders, accumulate(value.counts), strict=True))
        histogram.add_metric(given, buckets, value.total)
        return histogram
    is_counter = family.kind == "counter" and not family.is_bare_counter
    metric = (CounterMetricFamily if is_counter else GaugeMetricFamily)(family.name, family.meaning, labels=names)
    for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
        metric.add_metric([*given, *labels], number)
    return metric


def by_position(accepted_by_depth: Counter[int]) -> Mapping[tuple[str, ...], float]:
    """Return counts by depth as values by ``position``, from 0 to the deepest that was accepted."""
    deepest = max(accepted_by_depth, default=0)
    return {(str(depth),): accepted_by_depth[depth] for depth in range(deepest + 1)}


LLAMA_SERVER: Final = (
    Family(
        "llamacpp:prompt_tokens_total",
        "counter",
        "Prompt tokens that were read; those from the cache are not among them.",
        lambda scrape: scrape.answers.prompt_tokens,
    ),
    Family(
        "llamacpp:prompt_tokens_cached_total",
        "counter",
        "Prompt tokens that the cache held.",
        lambda scrape: scrape.answers.cached_tokens,
    ),
    Family(
        "llamacpp:prompt_seconds_total",
        "counter",
        "Seconds spent reading prompts, summed over requests.",
        lambda scrape: scrape.answers.prompt_s,
    ),
    Family(
        "llamacpp:tokens_predicted_total",
        "counter",
        "Tokens of answers that are over.",
        lambda scrape: scrape.answers.predicted_tokens,
    ),
    Family(
        "llamacpp:tokens_predicted_seconds_total",
        "counter",
        "Seconds spent writing answers after their first token, summed over requests.",
        lambda scrape: scrape.answers.decode_s,
    ),
    Family("llamacpp:n_decode_total", "counter", "Passes of the target.", lambda scrape: scrape.rounds.rounds),
    Family(
        "llamacpp:n_tokens_max",
        "counter",
        "Tokens of the longest prompt and answer so far.",
        lambda scrape: scrape.answers.longest,
    ),
    Family(
        "llamacpp:spec_decode_num_draft_tokens_total",
        "counter",
        "Draft tokens that the target verified.",
        lambda scrape: scrape.answers.drafted,
    ),
    Family(
        "llamacpp:spec_decode_num_accepted_tokens_total",
        "counter",
        "Draft tokens that the target accepted.",
        lambda scrape: scrape.answers.accepted,
    ),
    Family(
        "llamacpp:spec_decode_num_drafts_total",
        "counter",
        "Drafts that the target verified.",
        lambda scrape: scrape.answers.drafts,
    ),
    Family(
        "llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Draft tokens that were accepted, by their place in the draft, from 0.",
        lambda scrape: by_position(scrape.answers.accepted_by_depth),
        labels=("position",),
    ),
    Family(
        "llamacpp:prompt_tokens_seconds",
        "gauge",
        "Prompt tokens read per second, of requests that ended since the scrape before.",
        lambda scrape: scrape.read_per_second,
    ),
    Family(
        "llamacpp:predicted_tokens_seconds",
        "gauge",
        "Tokens written per second after the first, of requests that ended since the scrape before.",
        lambda scrape: scrape.written_per_second,
    ),
    Family(
        "llamacpp:requests_processing",
        "gauge",
        "Requests that run.",
        lambda scrape: scrape.load.running,
    ),
    Family(
        "llamacpp:requests_deferred",
        "gauge",
        "Requests that wait for their start.",
        lambda scrape: scrape.load.waiting,
    ),
    Family(
        "llamacpp:n_busy_slots_per_decode",
        "gauge",
        "Requests in a pass of the target, on average; all that read prompts in a pass count as one.",
        lambda scrape: scrape.rounds.busy / max(scrape.rounds.rounds, 1),
    ),
)
"""Metrics under llama-server's names."""


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


def _by_finished_reason(scrape: Scrape) -> Mapping[tuple[str, ...], float]:
    counts: Counter[tuple[str, ...]] = Counter()
    for reason, word in FINISHED_REASONS.items():
        counts[(word,)] += scrape.answers.by_reason[reason]
    return counts


VLLM: Final = (
    Family("vllm:num_requests_running", "gauge", "Requests that run.", lambda scrape: scrape.load.running),
    Family(
        "vllm:num_requests_waiting", "gauge", "Requests that wait for their start.", lambda scrape: scrape.load.waiting
    ),
    Family(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Share of the target's cache that is in use; 1 is all of it.",
        lambda scrape: scrape.load.cache_share,
    ),
    Family(
        "vllm:prefix_cache_queries_total",
        "counter",
        "Prompt tokens that were looked for in the cache.",
        lambda scrape: scrape.answers.num_prompt,
    ),
    Family(
        "vllm:prefix_cache_hits_total",
        "counter",
        "Prompt tokens that were found in the cache.",
        lambda scrape: scrape.answers.cached_tokens,
    ),
    Family(
        "vllm:num_preemptions_total",
        "counter",
        "Times that a request lost its place, in a full cache or to another client.",
        lambda scrape: scrape.answers.preemptions,
    ),
    Family(
        "vllm:prompt_tokens_total",
        "counter",
        "Tokens of prompts, those from the cache included.",
        lambda scrape: scrape.answers.num_prompt,
    ),
    Family(
        "vllm:generation_tokens_total",
        "counter",
        "Tokens of answers, counted while they are written; the first of each is added at its end.",
        lambda scrape: scrape.rounds.tokens + scrape.answers.started,
    ),
    Family(
        "vllm:request_success_total",
        "counter",
        "Requests that are over, by why: stop, length, abort or error.",
        _by_finished_reason,
        labels=("finished_reason",),
    ),
    Family(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "Seconds from a request's arrival to the first token of its answer.",
        lambda scrape: scrape.answers.first_token_s.read(),
    ),
    Family(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Seconds between two arrivals, as a reader sees them. The tokens of one round arrive together and count once.",
        lambda scrape: scrape.rounds.gaps.read(),
    ),
    Family(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "Seconds from the first token of an answer to its last, divided by the tokens after the first.",
        lambda scrape: scrape.answers.token_s.read(),
    ),
    Family(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "Seconds from a request's arrival to its end.",
        lambda scrape: scrape.answers.answer_s.read(),
    ),
    Family(
        "vllm:request_queue_time_seconds",
        "histogram",
        "Seconds that a request waited for its start.",
        lambda scrape: scrape.answers.queue_s.read(),
    ),
    Family(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "Seconds from a request's start to the first token of its answer.",
        lambda scrape: scrape.answers.reading_s.read(),
    ),
    Family(
        "vllm:request_decode_time_seconds",
        "histogram",
        "Seconds from the first token of an answer to its last.",
        lambda scrape: scrape.answers.writing_s.read(),
    ),
    Family(
        "vllm:request_inference_time_seconds",
        "histogram",
        "Seconds from a request's start to the last token of its answer.",
        lambda scrape: scrape.answers.running_s.read(),
    ),
    Family(
        "vllm:request_prompt_tokens",
        "histogram",
        "Tokens of a request's prompt.",
        lambda scrape: scrape.answers.prompt_lengths.read(),
    ),
    Family(
        "vllm:request_generation_tokens",
        "histogram",
        "Tokens of a request's answer.",
        lambda scrape: scrape.answers.answer_lengths.read(),
    ),
    Family(
        "vllm:spec_decode_num_drafts_total",
        "counter",
        "Drafts that the target verified.",
        lambda scrape: scrape.rounds.drafts.total(),
    ),
    Family(
        "vllm:spec_decode_num_draft_tokens_total",
        "counter",
        "Draft tokens that the target verified.",
        lambda scrape: scrape.rounds.drafted.total(),
    ),
    Family(
        "vllm:spec_decode_num_accepted_tokens_total",
        "counter",
        "Draft tokens that the target accepted.",
        lambda scrape: scrape.rounds.accepted.total(),
    ),
    Family(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Draft tokens that were accepted, by their place in the draft, from 0.",
        lambda scrape: by_position(scrape.rounds.accepted_by_depth),
        labels=("position",),
    ),
)
"""Metrics under vLLM's names."""


def _by_phase(scrape: Scrape) -> Mapping[tuple[str, ...], float]:
    phases = scrape.answers.phases
    return {
        ("draft",): phases.draft_s,
        ("verify",): phases.verify_s,
        ("sampling",): phases.sampling_s,
        ("rest",): phases.rest_s,
    }


OWN: Final = (
    Family(
        "paceline:decode_seconds_total",
        "counter",
        "Seconds spent writing answers of which the plain time is known, summed over requests.",
        lambda scrape: scrape.answers.compared_s,
    ),
    Family(
        "paceline:plain_decode_seconds_total",
        "counter",
        "Seconds that plain decoding would have spent on the same answers, as the policy reckons.",
        lambda scrape: scrape.answers.plain_s,
    ),
    Family(
        "paceline:drafted_tokens_total",
        "counter",
        "Draft tokens that the target verified, by drafter.",
        lambda scrape: {(drafter,): count for drafter, count in scrape.rounds.drafted.items()},
        labels=("drafter",),
    ),
    Family(
        "paceline:accepted_tokens_total",
        "counter",
        "Draft tokens that the target accepted, by drafter.",
        # A drafter of which nothing was accepted is in the list too, or no rate would be drawn for it.
        lambda scrape: {(drafter,): scrape.rounds.accepted[drafter] for drafter in scrape.rounds.drafted},
        labels=("drafter",),
    ),
    Family(
        "paceline:phase_seconds_total",
        "counter",
        "Seconds spent writing answers, by what they went to, summed over requests.",
        _by_phase,
        labels=("phase",),
    ),
    Family("paceline:rounds_total", "counter", "Rounds.", lambda scrape: scrape.rounds.rounds),
    Family(
        "paceline:round_seconds_total",
        "counter",
        "Seconds of all rounds; the rate is the share of time in which the engine is at work.",
        lambda scrape: scrape.rounds.seconds,
    ),
    Family(
        "paceline:requests_total",
        "counter",
        "Requests that are over, by why.",
        lambda scrape: {(reason,): scrape.answers.by_reason[reason] for reason in get_args(FinishReason)},
        labels=("finish_reason",),
    ),
    Family(
        "paceline:requests_refused_total",
        "counter",
        "Requests that were refused, by HTTP status and type of error.",
        lambda scrape: {**scrape.refused},
        labels=("status", "kind"),
    ),
    Family(
        "paceline:tokens_in_flight",
        "gauge",
        "Tokens of the prompts and answers of requests that run.",
        lambda scrape: scrape.load.tokens,
    ),
    Family(
        "paceline:requests_running_max", "gauge", "Most requests that run at once.", lambda scrape: scrape.max_running
    ),
    Family(
        "paceline:context_length_tokens",
        "gauge",
        "Most tokens of a prompt and its answer.",
        lambda scrape: scrape.context_length,
    ),
    Family(
        "paceline:start_time_seconds",
        "gauge",
        "When the server started, in seconds since 1970.",
        lambda scrape: scrape.started_s,
    ),
)
"""Metrics that only paceline has."""
