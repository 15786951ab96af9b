"""A scripted model that calls tools, and what its server answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from paceline.core.arrays import Float64Array
from paceline.engines.scripted import LogitFunction
from tests.serving.hosted import Hosted
from tests.serving.scripted import END, SIZE

CHAT: Final = "/v1/chat/completions"

TEMPLATE: Final = (
    "{% if tools %}<|im_start|>system\nCalls are <tool_call>\n"
    '{"name": name, "arguments": arguments}\n</tool_call>'
    "{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "maximum": 9, "minimum": 0},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}

NOW: Final[dict[str, Any]] = {"type": "function", "function": {"name": "now"}}

TOOLS: Final = [WEATHER, NOW]

SAID: Final = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)

CALLED: Final = [("weather", {"city": "Rome", "days": 3}), ("now", {})]


def saying(text: str) -> LogitFunction:
    """Return a model that says a text, and then that it is done."""
    said = text.encode().decode("latin-1")
    rows = 18.0 * np.eye(SIZE)[[*text.encode(), END]] - 9.0

    def logits(tokens: Sequence[int]) -> Float64Array:
        before = "".join(map(chr, tokens[-len(said) :]))
        row: Float64Array = rows[next(at for at in range(len(said), -1, -1) if before.endswith(said[:at]))]
        return row

    return logits


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 600, "seed": 3, "tools": TOOLS, **fields}


def whole(server: Hosted, asked: dict[str, Any]) -> tuple[str | None, list[tuple[str, Any]], str]:
    choice = server.answer(CHAT, asked)["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return message["content"], [_read(call["function"]) for call in calls], choice["finish_reason"]


def streamed(server: Hosted, asked: dict[str, Any]) -> tuple[str | None, list[tuple[str, Any]], str]:
    content, calls, reason = "", dict[int, dict[str, str]](), ""
    for chunk in server.chunks(CHAT, {**asked, "stream": True}):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
                for name, text in call["function"].items():
                    known[name] += text
            reason = choice["finish_reason"] or reason
    return content or (None if calls else ""), [_read(calls[index]) for index in sorted(calls)], reason


def _read(function: dict[str, str]) -> tuple[str, Any]:
    return function["name"], json.loads(function["arguments"])
