"""What answers say of their time: llama-server's ``timings``, what speculation gave, and vLLM's ``metrics``.

The figures are those of ``RequestStats``; the tables here say what each is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from paceline.core.params import SpeculationParams
from paceline.core.request import Emission
from paceline.core.stats import OFF_REASONS, RequestStats
from paceline.core.vocabulary import Vocabulary
from paceline.serving.prompts import token_piece

if TYPE_CHECKING:
    from paceline.serving.answering import Choice

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
    """Return what speculation cost and gave.

    Args:
        stats: of a finished answer.
        asked: how it was to be sped up.
        policy: what decides how much is drafted where the request does not say it.
    """
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


def usage_of(choices: Sequence[Choice], *, reads_only: bool) -> dict[str, Any]:
    """Return OpenAI's ``usage``. A prompt counts once, however many answers it has.

    Args:
        choices: all answers of a request, each of them over.
        reads_only: whether nothing was to be generated.
    """
    completion = 0 if reads_only else sum(choice.assembler.num_tokens for choice in choices)
    firsts = {id(choice.prompt): choice for choice in reversed(choices)}.values()
    prompt = sum(choice.num_prompt for choice in firsts)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": completion + prompt,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.assembler.num_reasoning for choice in choices)},
    }
