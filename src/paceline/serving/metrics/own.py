"""What neither llama-server nor vLLM counts: what speculation gained, by whom, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

from paceline.core.request import FinishReason
from paceline.serving.metrics.families import Family, Scrape


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
