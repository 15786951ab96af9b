"""Questions drawn at random, asked by any of the APIs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tests.serving.hosted import Hosted

Way = Literal["native", "completions", "chat", "messages", "responses"]

PATHS: Final[dict[Way, str]] = {
    "native": "/completion",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}

SPECULATION: Final[list[dict[str, Any]]] = [
    {},
    {"speculative": {"off": True}},
    {"speculative": {"draft_max": 1}},
    {"speculative": {"drafters": ["draft"]}},
    {"speculative": {"drafters": ["suffix", "lookup"]}},
    {"speculative": {"policy": "fixed", "draft_max": 8}},
]

CONSTRAINTS: Final[list[dict[str, Any]]] = [
    {"json_schema": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": [1, True]}}}},
    {"grammar": 'root ::= ("ab" | "中" [a-c]+ "; ")*'},
    {"guided_regex": "(abc|[d-h]{2}\\n)+"},
    {"response_format": {"type": "json_object"}},
]

BEGINNINGS: Final = ["", "abc " * 9, "文中 bad 😀 cafe\n" * 4]
"""Of prompts, so that some of what was read can be used again."""


@dataclass(frozen=True)
class Question:
    """A request, by any of the APIs; as a chat its prompt is what the template writes."""

    content: str
    fields: dict[str, Any]

    @classmethod
    def draw(cls, rng: random.Random, longest: int) -> Question:
        text = rng.choice(BEGINNINGS) + "".join(rng.choices("abcdefgh \n中😀", k=rng.randint(1, 20)))
        fields: dict[str, Any] = {
            "seed": rng.randrange(1000),
            "max_tokens": rng.randint(1, longest),
            "temperature": rng.choice((0.0, 0.7, 1.0, 1.5)),
        }
        if rng.random() < 0.3:
            fields |= {"repeat_penalty": 1.3, "presence_penalty": 0.5}
        if rng.random() < 0.3:
            fields["stop"] = ["".join(rng.choices("abcdefgh", k=2)), "中"]
        if rng.random() < 0.3:
            fields["logit_bias"] = {"257": 4.0, "100": -3.0}
        if rng.random() < 0.3:
            fields["samplers"] = rng.sample(["top_k", "top_p", "min_p", "temperature", "penalties"], 3)
        if rng.random() < 0.3:
            fields |= rng.choice(CONSTRAINTS)
        return cls(text, fields)

    def body(self, way: Way) -> dict[str, Any]:
        if way in ("chat", "messages"):
            return {**self.fields, "messages": [{"role": "user", "content": self.content}]}
        if way == "responses":
            return {**self.fields, "input": self.content}
        prompt = f"<|im_start|>user\n{self.content}<|im_end|>\n<|im_start|>assistant\n"
        return {**self.fields, "prompt": prompt}

    def ask(self, server: Hosted, way: Way, *, stream: bool, **fields: Any) -> Reply:
        """Return the answer."""
        body = {**self.body(way), **fields}
        if stream:
            return Reply.of(server.chunks(PATHS[way], body), way)
        return Reply.of([server.answer(PATHS[way], body)], way)


@dataclass(frozen=True)
class Reply:
    """What an answer said.

    Attributes:
        text: all of it.
        ended: whether it came to its own end.
        preemptions: how often it lost its place.
    """

    text: str
    ended: bool
    preemptions: int = field(default=0, compare=False)

    @classmethod
    def of(cls, parts: Sequence[dict[str, Any]], way: Way) -> Reply:
        """Return what a whole answer, or the parts of one, say."""
        if way == "responses":
            answer = parts[-1].get("response", parts[-1])
            return cls(
                "".join(map(response_text, parts)),
                answer["status"] == "completed",
                answer["speculative"]["preemptions"],
            )
        (preemptions,) = (part["speculative"]["preemptions"] for part in parts if "speculative" in part)
        if way == "native":
            return cls("".join(part["content"] for part in parts), parts[-1]["stop_type"] != "limit", preemptions)
        if way == "messages":
            reasons = [part.get("delta", part).get("stop_reason") for part in parts]
            return cls(
                "".join(map(message_text, parts)), bool({"end_turn", "stop_sequence"} & set(reasons)), preemptions
            )
        choices = [choice for part in parts for choice in part["choices"]]
        ended = any(choice["finish_reason"] == "stop" for choice in choices)
        return cls("".join(map(text_of, choices)), ended, preemptions)


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice, or of a part of one."""
    message = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or message.get("content") or ""


def message_text(part: dict[str, Any]) -> str:
    """Return the text of one of Anthropic's messages, or of an event of one."""
    return "".join(block.get("text", "") for block in part.get("content", [part.get("delta", {})]))


def response_text(part: dict[str, Any]) -> str:
    """Return the text of one of OpenAI's responses, or of an event of one."""
    if "output" not in part:
        return str(part["delta"]) if part["type"] == "response.output_text.delta" else ""
    return "".join(content["text"] for item in part["output"] for content in item["content"])


def asked_at_once(works: Sequence[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(16) as threads:
        for done in [threads.submit(work) for work in works]:
            done.result(120)
