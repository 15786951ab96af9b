"""What answers say of their time: llama-server's ``timings``, what speculation gave, and vLLM's ``metrics``.

The figures are those of ``RequestStats``; the tables here say what each is called.
"""

from __future__ import annotations

from typing import Any, Final

from paceline.core.params import SpeculationParams
from paceline.core.stats import OFF_REASONS, RequestStats

_TIMINGS: Final = {
    "cache_n": "cached_tokens",
    "prompt_n": "prompt_tokens",
    "prompt_ms": "prompt_s",
    "prompt_per_token_ms": "prompt_per_token_s",
    "prompt_per_second": "prompt_per_second",
    "predicted_n": "predicted_tokens",
    "predicted_ms": "decode_s",
    "predicted_per_token_ms": "predicted_per_token_s",
    "predicted_per_second": "predicted_per_second",
}
_DRAFTS: Final = {"draft_n": "num_drafted", "draft_n_accepted": "num_accepted"}


def timings_of(stats: RequestStats) -> dict[str, Any]:
    """Return llama-server's ``timings``, field for field.

    The first token comes with the prompt, so speeds are over the tokens after it.
    """
    known = {name: 0.0 if value is None else value for name, value in stats.as_dict(_TIMINGS).items()}
    return known | stats.as_dict(_DRAFTS) if stats.num_drafted else known


_SPECULATION: Final = {
    "drafted": "num_drafted",
    "accepted": "num_accepted",
    "rounds": "rounds",
    "tau": "acceptance_length",
    "acceptance_by_depth": "acceptance_by_depth",
    "queue_ms": "queue_s",
    "draft_ms": "phases.draft_s",
    "verify_ms": "phases.verify_s",
    "sampling_ms": "phases.sampling_s",
    "rest_ms": "phases.rest_s",
    "gain": "gain",
    "gain_low": "gain_low",
    "gain_high": "gain_high",
    "off_rounds": "off_rounds",
    "off_reason": "off_reason",
}


def speculation_of(stats: RequestStats, asked: SpeculationParams, policy: str) -> dict[str, Any]:
    """Return what speculation cost and gave in a finished answer; the policy decides where the request does not say."""
    return {
        "policy": (asked.policy or policy) if asked.speculate else "plain",
        "verify": asked.verify,
        "drafters": {
            name: {
                "drafted": stats.drafted_by_source[name],
                "accepted": stats.accepted_by_source[name],
                "draft_ms": stats.draft_s_by_source.get(name, 0.0) * 1e3,
            }
            for name in sorted({*stats.drafted_by_source, *stats.draft_s_by_source})
        },
        **stats.as_dict(_SPECULATION),
        "off_reason_text": None if stats.off_reason is None else OFF_REASONS[stats.off_reason],
        "preemptions": stats.preemptions,
    }


_VLLM: Final = {
    "time_to_first_token_ms": "first_token_s",
    "generation_time_ms": "decode_s",
    "queue_time_ms": "queue_s",
    "mean_itl_ms": "mean_inter_token_s",
    "tokens_per_second": "predicted_per_second",
}
_VLLM_DRAFTS: Final = {
    "mean_acceptance_length": "acceptance_length",
    "draft_acceptance_rate": "accept_share",
    "acceptance_histogram": "accepted_at_depths",
    "num_spec_steps": "rounds",
    "num_accepted_draft_tokens": "num_accepted",
    "num_draft_tokens": "num_drafted",
    "num_spec_tokens": "max_depth",
}


def metrics_of(stats: RequestStats) -> dict[str, Any]:
    """Return vLLM's ``metrics`` of a finished answer, which benchmarking clients read."""
    drafts = stats.as_dict(_VLLM_DRAFTS) if stats.num_drafted else None
    return {**stats.as_dict(_VLLM), "speculative_decoding": drafts}
