"""How a request is sampled, under llama-server's names: ``generation_settings``, and the defaults of ``/props``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from paceline.constraints import Gbnf
from paceline.core.params import MAX_TOKENS, SamplingParams, StopRules
from paceline.serving.generation_request import GenerationRequest
from paceline.serving.hosting import ServedModel

_STEPS: Final = {
    "penalties": ("penalties", "dry", "top_n_sigma"),
    "top_k": ("top_k", "typ_p"),
    "top_p": ("top_p",),
    "min_p": ("min_p", "xtc"),
    "temperature": ("temperature",),
}
"""Where llama-server's chain has our steps, with those behind them that are switched off."""

_SWITCHED_OFF: Final[dict[str, Any]] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "backend_sampling": False,
    "lora": [],
}
"""Fields of what is not built, with the values by which it is switched off."""


def settings_of(
    params: SamplingParams, rules: StopRules, request: GenerationRequest, served: ServedModel
) -> dict[str, Any]:
    """Return how an answer was sampled, but for the biases, of which there may be many.

    Args:
        params: how tokens are sampled.
        rules: when the answer ends.
        request: the request.
        served: the model.
    """
    return {
        **short_settings_of(params, rules, request, served),
        "dry_sequence_breakers": ["\n", ":", '"', "*"],
        "stop": list(rules.stop),
        "logit_bias": [],
        "grammar": request.named.source.text if request.named and isinstance(request.named.source, Gbnf) else "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": list(rules.preserved_ids),
    }


def shown_biases(biases: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """Return biases as ``generation_settings`` have them."""
    # JSON has no infinity.
    return [{"token": token_id, "bias": None if bias == -math.inf else bias} for token_id, bias in biases]


def short_settings_of(
    params: SamplingParams, rules: StopRules, request: GenerationRequest | None, served: ServedModel
) -> dict[str, Any]:
    """Return how an answer is sampled, without what may be long or private; as ``/slots`` and ``/props`` have it."""
    length = -1 if rules.max_tokens == MAX_TOKENS else rules.max_tokens
    speculates = request is None or request.options.get("speculate") is not False
    named = served.drafters if request is None else request.options.get("drafters") or served.drafters
    speculative = (",".join(named) if speculates else "") or "none"
    return {
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_last_n": params.penalty_last_n,
        "repeat_penalty": params.repeat_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        **_SWITCHED_OFF,
        "max_tokens": length,
        "n_predict": length,
        "ignore_eos": rules.ignore_end,
        "stream": request is not None and request.stream,
        "n_probs": 0 if request is None else request.num_logprobs or 0,
        "chat_format": "Content-only",
        "reasoning_format": "none" if request is None else request.reasoning_format,
        "reasoning_in_content": False,
        "generation_prompt": "",
        "samplers": _chain_of(params) if request is None or request.samplers is None else list(request.samplers),
        "speculative.types": speculative,
        "timings_per_token": request is not None and request.timings_per_token,
        "post_sampling_probs": request is not None and request.post_sampling,
    }


def _chain_of(params: SamplingParams) -> list[str]:
    return [name for step in params.order for name in _STEPS.get(step, ())]
