"""The fields of a request: which are read, which may only be neutral, which change nothing, and which nobody knows.

Four kinds, told apart so that no field is parsed and then ignored without a word:

* the options (fields made by ``setting()``), and fields of this server's own, are read;
* a field that would change the answer in a way that is not built is refused, unless it has the value that changes
  nothing (:data:`NEUTRAL`);
* a field that changes nothing of the answer is taken (:data:`HARMLESS`);
* a name that nobody knows is taken, and named in the answer's ``warnings``; ``--strict-fields`` refuses it.

``null`` is the same as leaving a field out, as in llama-server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from paceline.core.numbers import shown
from paceline.serving.errors import FieldError


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that is known, and that is not built.

    Attributes:
        is_neutral: tells whether a value changes nothing.
        way_out: what to send instead.
    """

    is_neutral: Callable[[Any], bool]
    way_out: str


def _is(*values: object) -> Callable[[Any], bool]:
    def is_one(value: Any) -> bool:
        # 0 and False are equal to Python, and a client that sends one means the other.
        return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in values)

    return is_one


def _number(test: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and test(value)


def _empty(value: Any) -> bool:
    return value in ("", [], {}) or value is False


NEUTRAL: Final[Mapping[str, Neutral]] = {
    # samplers that are not built
    "mirostat": Neutral(_is(0), "0 switches it off; mirostat keeps a state that drafts would disturb"),
    "tfs_z": Neutral(_is(1), "1 switches it off"),
    "adaptive_target": Neutral(_number(lambda value: value < 0), "-1 switches it off"),
    "min_keep": Neutral(_is(0, 1), "leave it out"),
    # of OpenAI's and vLLM's APIs
    "best_of": Neutral(_is(1), "take n answers and choose among them"),
    "suffix": Neutral(_empty, "leave it out"),
    "use_beam_search": Neutral(_is(False), "leave it out"),
    "repetition_penalty": Neutral(_is(1), "send repeat_penalty"),
    "length_penalty": Neutral(_is(1), "leave it out"),
    "truncate_prompt_tokens": Neutral(_is(-1), "shorten the prompt"),
    "chat_template": Neutral(_empty, "start the server with `template`, or send a completion"),
    "bad_words": Neutral(_empty, "ban tokens with logit_bias"),
    "modalities": Neutral(_is(["text"]), "this server writes text"),
    "audio": Neutral(_empty, "this server writes text"),
    "functions": Neutral(_empty, "send tools"),
    "function_call": Neutral(_is("none", "auto"), "send tool_choice"),
    # of Anthropic's
    "mcp_servers": Neutral(_empty, "offer the tools of these servers in tools"),
    "web_search_options": Neutral(_empty, "this server looks nothing up"),
    "reasoning.exclude": Neutral(_is(False), "read the content of the answer alone"),
    "structured_outputs.disable_any_whitespace": Neutral(_is(False), "leave it out"),
    # of llama-server
    "lora": Neutral(_empty, "load a merged model"),
    "grammar_lazy": Neutral(_is(False), "leave it out"),
    "grammar_triggers": Neutral(_empty, "leave it out"),
    "chat_format": Neutral(_is(0), "leave it out"),
    "chat_parser": Neutral(_empty, "leave it out"),
    "multimodal_data": Neutral(_empty, "this server reads text"),
}
"""Known fields that are not built, and the values of them that change nothing."""

HARMLESS: Final[frozenset[str]] = frozenset(
    {
        # who asks, and for what purpose
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"),
        *("prompt_cache_retention", "prompt_cache_options", "priority", "verbosity", "client_metadata"),
        *("inference_geo", "speed", "user_profile_id", "workspace_id", "diagnostics", "billing_policy", "fallbacks"),
        *("fallback_credit_token", "betas", "anthropic_beta", "anthropic_version", "cache_control", "container"),
        # of tokenizers that put blanks between control tokens
        "spaces_between_special_tokens",
        # how it is computed
        *("backend_sampling", "id_slot", "n_cache_reuse", "message_delimiters", "t_max_prompt_ms"),
        # of samplers that are switched off
        *("mirostat_tau", "mirostat_eta", "adaptive_decay"),
        # of a context that is shifted, which this server does not do
        *("n_keep", "n_discard"),
        # of parsers of answers
        *("parse_tool_calls", "preserved_tokens", "stream_options.include_obfuscation"),
        # of summaries of reasoning, which is sent as it is
        *("reasoning.summary", "reasoning.generate_summary", "thinking.display"),
    }
)
"""Fields that change nothing of an answer."""


Known: TypeAlias = "Mapping[str, Known] | Sequence[Known] | None"
"""What is known within a field: of an object its fields, of a list what each part has; ``None`` for anything."""

_CALL: Final[Known] = {
    **dict.fromkeys(("id", "type", "index", "extra_content", "cache_control", "provider_specific_fields")),
    "function": {"name": None, "arguments": None},
    # Some templates read calls in which name and arguments stand alone.
    **dict.fromkeys(("name", "arguments")),
}
"""What is known within a call of a message."""

_WITHIN: Final[Mapping[str, Known]] = {
    "response_format": {
        **dict.fromkeys(("type", "schema")),
        "json_schema": dict.fromkeys(("name", "description", "schema", "strict")),
    },
    "prediction": {"type": None, "content": [dict.fromkeys(("type", "text", "cache_control"))]},
    "structured_outputs": dict.fromkeys(("json", "json_object", "regex", "choice", "grammar", "disable_fallback")),
    # llama.vim notes when it took a text.
    "input_extra": [dict.fromkeys(("text", "filename", "time"))],
    "tools": [
        {
            **dict.fromkeys(("type", "cache_control")),
            # Templates of some families describe what a function returns.
            "function": dict.fromkeys(
                (*("name", "description", "parameters", "strict", "response", "return", "returns"), "examples")
            ),
        }
    ],
    "tool_choice": {
        **dict.fromkeys(("type", "mode", "tools", "name", "allowed_tools", "disable_parallel_tool_use")),
        "function": {"name": None},
    },
    "messages": [
        {
            **dict.fromkeys(("role", "name", "id", "tool_call_id", "refusal", "annotations", "audio", "function_call")),
            **dict.fromkeys(("reasoning_content", "thinking", "reasoning", "reasoning_details", "thinking_blocks")),
            # what clients keep beside a message, and send back
            **dict.fromkeys(
                ("cache_control", "provider_specific_fields", "extra_content", "metadata", "prefix", "type")
            ),
            "content": [
                {
                    **dict.fromkeys(("type", "text", "annotations", "cache_control", "logprobs", "id")),
                    # Parts that are no text are refused by their type.
                    **dict.fromkeys(("image_url", "input_audio", "video_url", "file", "detail", "refusal")),
                }
            ],
            "tool_calls": [_CALL],
        }
    ],
}
"""Fields that hold others. ``speculative``, ``stream_options`` and settings of reasoning are looked at elsewhere."""

_BLOCK: Final[Mapping[str, Known]] = dict.fromkeys(
    (
        *("type", "text", "cache_control", "citations", "thinking", "signature", "data", "id", "name", "input"),
        *("caller", "toolset_name", "tool_use_id", "is_error", "source", "title", "context", "tool_name"),
    )
)
"""What is known within a block of Anthropic's messages."""

_PARTS: Final[Known] = [
    {
        **dict.fromkeys(("type", "text", "annotations", "logprobs", "refusal", "id", "prompt_cache_breakpoint")),
        # Parts that are no text are refused by their type.
        **dict.fromkeys(("image_url", "detail", "file_id", "file_data", "file_url", "filename", "input_audio")),
    }
]
"""What is known within the contents of items of the Responses API."""

_FUNCTION: Final = {
    **dict.fromkeys(("type", "name", "description", "parameters", "strict", "format", "function", "tools")),
    # of how OpenAI runs a function, or of tools that are left out and named
    **dict.fromkeys(("defer_loading", "output_schema", "allowed_callers", "async", "execution", "output_format")),
    **dict.fromkeys(("filters", "user_location", "search_context_size", "search_content_types", "vector_store_ids")),
    **dict.fromkeys(("external_web_access", "index_gated_web_access", "container", "max_num_results", "environment")),
    **dict.fromkeys(("server_label", "server_url", "server_description", "headers", "authorization", "connector_id")),
    **dict.fromkeys(("allowed_tools", "require_approval", "ranking_options", "size", "quality", "background")),
    **dict.fromkeys(("display_width", "display_height", "image_generation", "model", "action", "moderation")),
}
"""What is known within a tool of the Responses API."""

_WITHIN_OF: Final[Mapping[str, Mapping[str, Known]]] = {
    "messages": {
        "messages": [{"role": None, "content": [{**_BLOCK, "content": [_BLOCK]}]}],
        "system": [_BLOCK],
        "tools": [
            dict.fromkeys(
                (
                    *("type", "name", "description", "input_schema", "strict", "cache_control", "input_examples"),
                    *("eager_input_streaming", "allowed_callers", "defer_loading"),
                    # of tools that are left out
                    *("max_uses", "allowed_domains", "blocked_domains", "user_location", "max_characters"),
                    *("mcp_server_name", "default_config", "configs", "citations", "max_content_tokens"),
                )
            )
        ],
        "tool_choice": dict.fromkeys(("type", "name", "disable_parallel_tool_use")),
        "output_config": {"effort": None, "format": dict.fromkeys(("type", "schema", "name"))},
        "output_format": dict.fromkeys(("type", "schema", "name")),
    },
    "responses": {
        "input": [
            {
                **dict.fromkeys(("type", "role", "id", "status", "phase", "call_id", "name", "namespace", "arguments")),
                **dict.fromkeys(("input", "encrypted_content", "caller", "async", "created_by", "metadata")),
                # of items that are left out and named
                **dict.fromkeys(("action", "queries", "results", "code", "outputs", "container_id", "result", "error")),
                **dict.fromkeys(("server_label", "tools", "operation", "pending_safety_checks", "max_output_length")),
                **dict.fromkeys(("content", "output", "summary"), _PARTS),
            }
        ],
        "text": {
            "verbosity": None,
            "format": dict.fromkeys(("type", "name", "description", "schema", "strict", "json_schema")),
        },
        "tools": [_FUNCTION],
    },
}
"""As :data:`_WITHIN`, of APIs that have other fields, or that have other things in fields of these names."""

_NUMBER: Final = re.compile(r"\[\d+\]")


def unknown_within(given: Mapping[str, Any], api: str = "chat") -> dict[str, Any]:
    """Return what nobody knows of the fields that hold others, by names such as ``response_format.typ``.

    Of the parts of a list the first that has it is named.

    Args:
        given: fields of a request.
        api: whose fields it has.
    """
    found: dict[str, tuple[str, Any]] = {}
    for name, known in {**_WITHIN, **_WITHIN_OF.get(api, {})}.items():
        for place, inner in _unknown(given.get(name), known, name):
            found.setdefault(_NUMBER.sub("", place), (place, inner))
    return dict(found.values())


def _unknown(value: Any, known: Known, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list) and isinstance(known, list):
        for number, part in enumerate(value):
            yield from _unknown(part, known[0], f"{place}[{number}]")
    elif isinstance(value, dict) and isinstance(known, Mapping):
        for name, inner in value.items():
            if name not in known:
                yield f"{place}.{name}", inner
            elif known[name] is not None:
                yield from _unknown(inner, known[name], f"{place}.{name}")


def check_known(extra: Mapping[str, Any], *, strict: bool) -> list[str]:
    """Return the names that nobody knows, of the fields that are not read.

    Args:
        extra: fields of a request that nothing reads; those that are ``None`` count as left out.
        strict: refuse names that nobody knows.

    Raises:
        FieldError: a field would change the answer in a way that is not built; or ``strict``, and a name is unknown.
    """
    unknown = []
    for name, value in extra.items():
        if value is None or name in HARMLESS:
            continue
        if name in NEUTRAL:
            if not NEUTRAL[name].is_neutral(value):
                raise FieldError(
                    name,
                    f"{name} is {shown(value)}, which this server does not support, and ignoring "
                    "it would change the answer: "
                    f"{NEUTRAL[name].way_out}",
                )
        elif strict:
            raise FieldError(name, f"unknown field {name!r}: leave it out, or start the server without `strict_fields`")
        else:
            unknown.append(name)
    return unknown
