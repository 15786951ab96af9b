"""What a server says of its model, of itself and of requests: ``/v1/models``, ``/props``, ``generation_settings``."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from paceline import __version__
from paceline.chat.template import ChatTemplate
from paceline.constraints import Gbnf
from paceline.core.params import MAX_TOKENS, SamplingParams, StopRules, sampler_name
from paceline.server_options import ServerOptions
from paceline.serving.generation_request import GenerationRequest
from paceline.serving.model_host import BUILD, Served, ServedEmbedder, ServedModel, model_facts
from paceline.serving.prompts import token_piece


def list_models(served: Served, *, created: int) -> dict[str, Any]:
    """Return the list of models, in OpenAI's form and in Ollama's, as llama-server does.

    A model was created when the server began, in seconds since 1970.
    """
    return {
        "object": "list",
        "data": [
            {
                "id": served.id,
                "aliases": list(served.names),
                "tags": list(served.tags),
                "object": "model",
                "created": created,
                "owned_by": "paceline",
                "meta": model_facts(served),
            }
        ],
        "models": [
            {
                "name": served.id,
                "model": served.id,
                "modified_at": "",
                "size": "",
                "digest": "",
                "type": "model",
                "description": "",
                "tags": [""],
                "capabilities": [_capability(served)],
                "parameters": "",
                "details": {
                    "parent_model": "",
                    "format": "gguf",
                    "family": "",
                    "families": [""],
                    "parameter_size": "",
                    "quantization_level": "",
                },
            }
        ],
    }


def list_anthropic_models(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return models of :func:`list_models` in the form of Anthropic's API."""
    found = []
    for model in models:
        created = datetime.datetime.fromtimestamp(model["created"], datetime.UTC).isoformat().replace("+00:00", "Z")
        told = {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created}
        # Of one that was never loaded it is not known.
        length = model.get("meta", {}).get("n_ctx")
        found.append({**told, "lifecycle": "active", "max_input_tokens": length, "max_tokens": length})
    return {"data": found, "has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}


def _capability(served: Served) -> str:
    if isinstance(served, ServedModel):
        return "completion"
    return "rerank" if served.embedder.engine.pooling == "rank" else "embedding"


def server_props(served: Served, options: ServerOptions) -> dict[str, Any]:
    """Return what the server is and how it answers where a request says nothing."""
    if isinstance(served, ServedEmbedder):
        path = None if served.about is None else served.about.path
        return {
            "default_generation_settings": {"params": {}, "n_ctx": served.context_length},
            "pooling": served.embedder.engine.pooling,
            **_common_props(served, options, path),
            "chat_template": "",
            "chat_template_caps": {},
            "speculative": {"drafters": [], "policy": "plain", "verify": "coupled", "reason": "nothing is written"},
        }
    request = served.model.read_options(served.options)
    params = replace(request.params, seed=served.seed or 0)
    rules = StopRules(max_tokens=served.options.get("max_tokens") or MAX_TOKENS)
    settings = short_generation_settings(params, rules, None, served)
    if served.seed is None:
        # Each request draws one.
        settings["seed"] = -1
    vocabulary = served.model.target.vocabulary
    ends = sorted(vocabulary.end_ids)
    opening = vocabulary.tokenize("", add_special=True)
    target = served.model.target_options
    return {
        "default_generation_settings": {"params": settings, "n_ctx": served.context_length},
        **_common_props(served, options, None if target is None else Path(target.path)),
        "chat_template": "" if served.template is None else served.template.source,
        "chat_template_caps": template_capabilities(served.template),
        "bos_token": _spell(opening[0], served) if opening else "",
        "eos_token": _spell(ends[0], served) if ends else "",
        "speculative": {
            "drafters": list(served.drafters),
            "policy": served.policy,
            "verify": served.model.verify,
            "reason": None if served.drafters else "no drafters: the server was started without speculation",
        },
    }


def _common_props(served: Served, options: ServerOptions, path: Path | None) -> dict[str, Any]:
    """Return what is told of every model."""
    return {
        "total_slots": served.max_running,
        "model_alias": served.id,
        "model_ftype": model_facts(served)["ftype"],
        # The name alone: where files lie on this machine is nobody's business.
        "model_path": "" if path is None else path.name,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": "",
        "endpoint_slots": options.slots,
        "endpoint_props": False,
        "endpoint_metrics": options.metrics,
        "ui": options.ui,
        "ui_settings": {},
        "cors_proxy_enabled": False,
        "build_info": f"{BUILD}-{__version__}",
        "is_sleeping": False,
    }


def template_capabilities(template: ChatTemplate | None) -> dict[str, bool]:
    """Return what a chat template can write, under llama-server's names."""
    if template is None:
        return {}
    known = template.variables
    return {
        "supports_tools": template.reads_tools,
        "supports_tool_calls": "tool_calls" in template.source,
        "supports_system_role": template.reads_system,
        "supports_parallel_tool_calls": "tool_calls" in template.source,
        "supports_string_content": True,
        "supports_typed_content": template.reads_parts,
        "supports_object_arguments": False,
        "supports_preserve_reasoning": "reasoning_content" in template.source,
        "supports_reasoning_effort": "reasoning_effort" in known,
    }


def _spell(token_id: int, served: ServedModel) -> str:
    return token_piece(token_id, served.model.target.vocabulary).decode("utf-8", "replace")


_SWITCHED_OFF: Final[dict[str, Any]] = {
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


def generation_settings(
    params: SamplingParams, rules: StopRules, request: GenerationRequest, served: ServedModel
) -> dict[str, Any]:
    """Return how an answer was sampled, but for the biases, of which there may be many."""
    return {
        **short_generation_settings(params, rules, request, served),
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "stop": list(rules.stop),
        "logit_bias": [],
        "grammar": request.named.source.text if request.named and isinstance(request.named.source, Gbnf) else "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": list(rules.preserved_ids),
    }


def biases_as_json(biases: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """Return biases as ``generation_settings`` have them."""
    # JSON has no infinity.
    return [{"token": token_id, "bias": None if bias == -math.inf else bias} for token_id, bias in biases]


def short_generation_settings(
    params: SamplingParams, rules: StopRules, request: GenerationRequest | None, served: ServedModel
) -> dict[str, Any]:
    """Return how an answer is sampled, without what may be long or private; as ``/slots`` and ``/props`` have it."""
    length = -1 if rules.max_tokens == MAX_TOKENS else rules.max_tokens
    speculates = request is None or request.options.speculation.speculate
    named = (request and request.options.speculation.drafters) or served.drafters
    speculative = (",".join(named) if speculates else "") or "none"
    return {
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_n_sigma": params.top_n_sigma,
        "typical_p": params.typical_p,
        "dynatemp_range": params.dynatemp_range,
        "dynatemp_exponent": params.dynatemp_exponent,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
        "dry_multiplier": params.dry_multiplier,
        "dry_base": params.dry_base,
        "dry_allowed_length": params.dry_allowed_length,
        "dry_penalty_last_n": params.dry_penalty_last_n,
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
        "samplers": [sampler_name(step) for step in params.order if step != "logit_bias"],
        "speculative.types": speculative,
        "timings_per_token": request is not None and request.timings_per_token,
        "post_sampling_probs": request is not None and request.post_sampling,
    }
