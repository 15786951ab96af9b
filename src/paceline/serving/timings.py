"""What answers say of their time: llama-server's ``timings``, what speculation gave, and vLLM's ``metrics``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.core.params import SpeculationParams
from paceline.core.request import Emission
from paceline.core.stats import OFF_REASONS, RequestStats
from paceline.core.vocabulary import Vocabulary
from paceline.serving.prompts import token_piece

if TYPE_CHECKING:
    from paceline.serving.answering import Choice


def timings_of(stats: RequestStats) -> dict[str, Any]:
    """Return llama-server's ``timings``, field for field; times in milliseconds.

    The first token comes with the prompt, so speeds are over the tokens after it.
    """
    prompt_ms, predicted_ms = stats.prompt_s * 1e3, stats.decode_s * 1e3
    decoded = max(stats.predicted_tokens - 1, 0)
    timings: dict[str, Any] = {
        "cache_n": stats.cached_tokens,
        "prompt_n": stats.prompt_tokens,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / stats.prompt_tokens if stats.prompt_tokens else 0.0,
        "prompt_per_second": stats.prompt_per_second or 0.0,
        "predicted_n": stats.predicted_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / decoded if decoded else 0.0,
        "predicted_per_second": stats.predicted_per_second or 0.0,
    }
    if stats.num_drafted:
        timings["draft_n"] = stats.num_drafted
        timings["draft_n_accepted"] = stats.num_accepted
    return timings


def speculation_of(stats: RequestStats, asked: SpeculationParams, policy: str) -> dict[str, Any]:
    """Return what speculation cost and gave; times in milliseconds.

    Args:
        stats: of a finished answer.
        asked: how it was to be sped up.
        policy: what decides how much is drafted where the request does not say it.
    """
    phases = stats.phases
    names = sorted({*stats.drafted_by_source, *stats.draft_s_by_source})
    return {
        "policy": (asked.policy or policy) if asked.speculate else "plain",
        "verify": asked.verify,
        "drafters": {
            name: {
                "drafted": stats.drafted_by_source[name],
                "accepted": stats.accepted_by_source[name],
                "draft_ms": stats.draft_s_by_source.get(name, 0.0) * 1e3,
            }
            for name in names
        },
        "drafted": stats.num_drafted,
        "accepted": stats.num_accepted,
        "rounds": stats.rounds,
        "tau": stats.acceptance_length,
        "acceptance_by_depth": [
            stats.accepted_by_depth[depth] / stats.tested_by_depth[depth] for depth in sorted(stats.tested_by_depth)
        ],
        "queue_ms": (stats.queue_s or 0.0) * 1e3,
        "draft_ms": phases.draft_s * 1e3,
        "verify_ms": phases.verify_s * 1e3,
        "sampling_ms": phases.sampling_s * 1e3,
        "rest_ms": phases.rest_s * 1e3,
        "gain": stats.gain,
        "gain_low": stats.gain_low,
        "gain_high": stats.gain_high,
        "off_rounds": dict(stats.off_rounds),
        "off_reason": stats.off_reason,
        "off_reason_text": None if stats.off_reason is None else OFF_REASONS[stats.off_reason],
        "preemptions": stats.preemptions,
    }


def round_of(emission: Emission, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return what a round drafted and what it added.

    Args:
        emission: what the round added.
        vocabulary: spells the drafts.
    """
    drafts, stats = emission.drafts, emission.request.stats
    found: dict[str, Any] = {"sources": list(emission.sources), "drafts": []}
    if drafts is not None:
        accepted = set(drafts.accepted)
        found["drafts"] = [
            {
                "id": drafts.token_ids[node],
                "text": token_piece(drafts.token_ids[node], vocabulary).decode("utf-8", "replace"),
                # Node 0 is no draft, so the drafts count from 0 and those at the top are below none of them.
                "parent": drafts.parents[node] - 1,
                "source": drafts.sources[node],
                "accepted": node in accepted,
            }
            for node in range(1, len(drafts.token_ids))
        ]
    # So far; the engine may be ahead of what is told here.
    return {**found, "gain": stats.gain, "gain_low": stats.gain_low, "gain_high": stats.gain_high}


def metrics_of(stats: RequestStats) -> dict[str, Any]:
    """Return vLLM's ``metrics`` of a finished answer, which benchmarking clients read; times in milliseconds."""
    gaps = stats.inter_token_s()
    first_s = stats.arrivals_s[0] - stats.added_s if stats.arrivals_s else None
    longest = max(stats.tested_by_depth, default=-1) + 1
    speculative = {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.accept_share,
        "acceptance_histogram": [stats.accepted_by_depth[depth] for depth in range(longest)],
        "num_spec_steps": stats.rounds,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_drafted,
        "num_spec_tokens": longest,
    }
    return {
        "time_to_first_token_ms": None if first_s is None else first_s * 1e3,
        "generation_time_ms": stats.decode_s * 1e3,
        "queue_time_ms": (stats.queue_s or 0.0) * 1e3,
        "mean_itl_ms": sum(gaps) / len(gaps) * 1e3 if gaps else None,
        "tokens_per_second": stats.predicted_per_second,
        "speculative_decoding": speculative if stats.num_drafted else None,
    }


def usage_of(choices: Sequence[Choice], *, reads_only: bool) -> dict[str, Any]:
    """Return OpenAI's ``usage``. A prompt counts once, however many answers it has.

    Args:
        choices: all answers of a request, each of them over.
        reads_only: whether nothing was to be generated.
    """
    completion = 0 if reads_only else sum(choice.num_said for choice in choices)
    firsts = {id(choice.prompt): choice for choice in reversed(choices)}.values()
    prompt = sum(choice.num_prompt for choice in firsts)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": completion + prompt,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.num_reasoning for choice in choices)},
    }
