"""What a server says of its model and of itself: ``/v1/models`` and ``/props``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.chat.template import ChatTemplate
from paceline.core.params import MAX_TOKENS, SamplingParams, StopRules
from paceline.options import read_options
from paceline.serving.hosting import BUILD, ServedModel
from paceline.serving.request_settings import short_settings_of
from paceline.serving.settings import ServerOptions
from paceline.serving.token_texts import piece_of


def models_of(served: ServedModel, *, created: int) -> dict[str, Any]:
    """Return the list of models, in OpenAI's form and in Ollama's, as llama-server does.

    Args:
        served: the model.
        created: when the server began, in seconds since 1970.
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
                "meta": served.facts(),
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
                "capabilities": ["completion"],
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


def props_of(served: ServedModel, options: ServerOptions) -> dict[str, Any]:
    """Return what the server is and how it answers where a request says nothing.

    Args:
        served: the model.
        options: of the server.
    """
    given = {**served.options, **served.model.defaults.left_open(served.options)}
    request = read_options({name: value for name, value in given.items() if value is not None})
    params = SamplingParams(**{**_plain(request.params), "seed": served.seed or 0})
    rules = StopRules(max_tokens=given.get("max_tokens") or MAX_TOKENS)
    settings = short_settings_of(params, rules, None, served)
    if served.seed is None:
        # Each request draws one.
        settings["seed"] = -1
    vocabulary = served.model.target.vocabulary
    ends = sorted(vocabulary.end_ids)
    opening = vocabulary.tokenize("", add_special=True)
    target = served.model.target_options
    return {
        "default_generation_settings": {"params": settings, "n_ctx": served.context_length},
        "total_slots": served.max_running,
        "model_alias": served.id,
        "model_ftype": served.facts()["ftype"],
        # The name alone: where files lie on this machine is nobody's business.
        "model_path": "" if target is None else Path(target.path).name,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": "",
        "endpoint_slots": options.slots,
        "endpoint_props": False,
        "endpoint_metrics": options.metrics,
        "ui": options.ui,
        "ui_settings": {},
        "cors_proxy_enabled": False,
        "chat_template": "" if served.template is None else served.template.source,
        "chat_template_caps": caps_of(served.template),
        "bos_token": _spelled(opening[0], served) if opening else "",
        "eos_token": _spelled(ends[0], served) if ends else "",
        "build_info": f"{BUILD}-{__version__}",
        "is_sleeping": False,
        "speculative": {
            "drafters": list(served.drafters),
            "policy": served.policy,
            "verify": served.model.verify,
            "reason": None if served.drafters else "no drafters: the server was started without speculation",
        },
    }


def caps_of(template: ChatTemplate | None) -> dict[str, bool]:
    """Return what a chat template can write, under llama-server's names."""
    if template is None:
        return {}
    known = template.variables
    return {
        "supports_tools": "tools" in known,
        "supports_tool_calls": "tool_calls" in template.source,
        "supports_system_role": template.reads_system,
        "supports_parallel_tool_calls": "tool_calls" in template.source,
        "supports_string_content": True,
        "supports_typed_content": template.reads_parts,
        "supports_object_arguments": False,
        "supports_preserve_reasoning": "reasoning_content" in template.source,
        "supports_reasoning_effort": "reasoning_effort" in known,
    }


def _spelled(token_id: int, served: ServedModel) -> str:
    return piece_of(token_id, served.model.target.vocabulary).decode("utf-8", "replace")


def _plain(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}
