"""Names under which vLLM counts, with its labels and its borders of histograms.

Tokens and drafts are counted by rounds, while answers are written; what a request took is counted when it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from paceline.core.request import FinishReason
from paceline.serving.metrics.families import Family, Scrape, by_position

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
