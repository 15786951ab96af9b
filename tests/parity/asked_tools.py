"""Requests with tools, asked as pairs: what the prompt has of tools and calls, what an answer has, what is refused.

A small model seldom calls by itself. So a conversation in which it called three times has it call once more, and
of most templates the prompt alone is asked for.

Left out is what paceline answers differently on purpose: choices that name no tool, and log-probabilities of calls in a
stream, which llama-server refuses.
"""

from __future__ import annotations

import json
from typing import Any

from tests.parity.launcher import TEMPLATES, TEXT_MODELS
from tests.parity.pairs import Start, post

CHAT = "/v1/chat/completions"
# Templates of the families that llama.cpp's tests name, and of the best known of the others.
FAMILIES = (
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "GLM-4.6",
    "HuggingFaceTB-SmolLM3-3B",
    "LFM2-8B-A1B",
    "MiniMax-M2",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "Qwen3.5-4B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
    "google-gemma-4-31B-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "ibm-granite-granite-4.0",
    "meetkai-functionary-medium-v3.2",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "openai-gpt-oss-120b",
)
# Of these the first prompt alone: with DeepSeek's, llama-server opens an answer behind a call that it has not; Phi's
# leaves the results of tools out without a word, and Mistral's what the system says, which paceline does not.
TOLD_ALONE = (
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
)

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}
BARE: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
STRICT: dict[str, Any] = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
TOOLS = [WEATHER, NOW]
SYSTEM = {"role": "system", "content": "Call the functions."}
ASKED = {"role": "user", "content": "What is the weather in Paris?"}


def starts() -> list[Start]:
    """Return the servers to start and what to ask of each."""
    return [
        Start("asked: tools", [*_flags("Qwen-Qwen2.5-7B-Instruct")], [*_shapes(), *_calls(), *_refused()]),
        Start("asked: tools, no jinja", [*_flags(None), "--no-jinja"], [post(CHAT, **_request(), tools=TOOLS)]),
        *(Start(f"asked: tools of {name}", _flags(name), _prompts()) for name in FAMILIES),
        *(Start(f"asked: tools of {name}", _flags(name), _prompts()[:1]) for name in TOLD_ALONE),
    ]


def _flags(template: str | None) -> list[str]:
    flags = ["--port", "0", "--hf-repo", TEXT_MODELS[0], "--alias", "tools", "--seed", "42", "--temp", "0.8"]
    sizes = ["--ctx-size", "4096", "--parallel", "1", "--n-predict", "64", "--no-slots"]
    return [*flags, *sizes, *(["--jinja", "--chat-template-file", f"{TEMPLATES}/{template}.jinja"] if template else [])]


def _request(**more: Any) -> dict[str, Any]:
    return {"messages": [SYSTEM, ASKED], "max_tokens": 2, "temperature": 0, **more}


def _shapes() -> list[dict[str, Any]]:
    """Answers that say something: what stands in one is the same whatever the tools are."""
    fields: list[dict[str, Any]] = [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": None, "parallel_tool_calls": None},
        {"tools": TOOLS, "parallel_tool_calls": True},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"tools": [BARE]},
        {"tools": [STRICT]},
        {"tools": []},
        {"tools": None, "tool_choice": None},
        {"tools": [], "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": True},
        {"tools": TOOLS, "stream_options": {"include_usage": True}},
        {"tools": TOOLS, "parse_tool_calls": False},
    ]
    kept_to: list[dict[str, Any]] = [{"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}]
    return [
        *(post(CHAT, **_request(stream=stream, **more)) for more in fields for stream in (False, True)),
        *(post(CHAT, **_request(tools=TOOLS, **more)) for more in kept_to),
    ]


def _calls() -> list[dict[str, Any]]:
    """Answers that are calls."""
    fields: list[dict[str, Any]] = [
        {},
        {"tool_choice": "required"},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"tool_choice": "none"},
        {"stream_options": {"include_usage": True}},
    ]
    return [
        post(CHAT, **{**_request(stream=stream, tools=TOOLS, **more), "messages": _habit(), "max_tokens": 60})
        for more in fields
        for stream in (False, True)
    ]


def _habit() -> list[dict[str, Any]]:
    """Return a conversation in which every question so far was answered with a call."""
    turn = [ASKED, _called(_call("get_weather", {"city": "Paris"})), _result("Rain.")]
    return [SYSTEM, *turn, *turn, *turn, ASKED]


def _prompts() -> list[dict[str, Any]]:
    """Prompts of conversations with tools."""
    one = [SYSTEM, ASKED, _called(_call("get_weather", {"city": "Paris", "days": 3})), _result('Rain: 3 "days".')]
    two = [
        SYSTEM,
        ASKED,
        _called(_call("get_weather", {"city": "Paris"}, "call00001"), _call("now", {}, "call00002")),
        _result("Rain.", "call00001"),
        _result("Noon.", "call00002"),
    ]
    said = [ASKED, {**_called(_call("now", {})), "content": "Let me see."}, _result("Noon."), ASKED]
    return [
        *(post("/apply-template", messages=talk, tools=TOOLS) for talk in ([SYSTEM, ASKED], one, two, said)),
        post("/apply-template", messages=one),
    ]


def _refused() -> list[dict[str, Any]]:
    """Tools that cannot be had."""
    function = WEATHER["function"]
    tools: list[Any] = [
        "text",
        {"a": 1},
        [1],
        [{}],
        [{"type": "function"}],
        [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": 3}}],
        [{"type": "web_search"}],
        [{**WEATHER, "type": "web"}],
        [{"type": "function", "function": {**function, "parameters": "text"}}],
    ]
    ill = [{"type": "function", "function": {"name": "f", "parameters": {"type": "hiccup"}}}]
    calls: list[Any] = ["text", [1], [{}], [{"type": "function"}], [{"type": "function", "function": {"name": 1}}]]
    talks: list[Any] = [[ASKED, {"role": "assistant", "tool_calls": each}, ASKED] for each in calls]
    talks += [[ASKED, {"role": "tool", "tool_call_id": "a"}], [ASKED, {"role": "assistant"}, ASKED]]
    return [
        *(post(CHAT, **_request(tools=each)) for each in tools),
        post(CHAT, **_request(tools=ill, tool_choice="required")),
        post(CHAT, **_request(tools=TOOLS, tool_choice="often")),
        post(CHAT, **_request(tools=TOOLS, grammar='root ::= "a"')),
        *(post(CHAT, **{**_request(tools=TOOLS), "messages": talk}) for talk in talks),
    ]


def _call(name: str, arguments: dict[str, Any], call_id: str = "call00001") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _called(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [*calls]}


def _result(text: str, call_id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
