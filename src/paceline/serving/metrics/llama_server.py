"""Names under which llama-server counts.

Like there, what concerns answers is added when they end, so that it is the sum of what their ``timings`` say; seconds
are summed over requests, which share rounds.
"""

from __future__ import annotations

from typing import Final

from paceline.serving.metrics.families import Family, by_position

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
