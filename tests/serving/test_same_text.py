"""One seed, one text: whatever drafts, whoever else asks, whatever was read before, however the answer is sent."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import pytest

from tests import tiers
from tests.conftest import SUMMARY_LINES
from tests.serving.hosted import Hosted, hosted, pair, scripted

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


def compare(server: Hosted, questions: Sequence[Question], seed: int) -> int:
    """Hold answers among sixteen at once, however they are asked for, to those plainly and alone.

    Returns:
        How often one of them lost its place.
    """
    rng = random.Random(seed)
    plain = {"speculative": {"off": True}, "cache_prompt": False}
    expected = [each.ask(server, "native", stream=False, **plain) for each in questions]
    replies: dict[int, Reply] = {}

    def ask(number: int, way: Way, stream: bool, fields: dict[str, Any]) -> None:
        replies[number] = questions[number].ask(server, way, stream=stream, **fields)

    works: list[Callable[[], object]] = []
    for number in range(len(questions)):
        way = rng.choice(list(PATHS))
        fields = {**rng.choice(SPECULATION), "cache_prompt": rng.random() < 0.7}
        stream = rng.random() < 0.5
        works.append(functools.partial(ask, number, way, stream, fields))
    asked_at_once(works)
    for number, question in enumerate(questions):
        assert replies[number] == expected[number], question
    return sum(reply.preemptions for reply in replies.values())


@pytest.fixture(scope="module")
def crowded() -> Iterator[Hosted]:
    """A server whose cache has no room for all who are answered."""
    with hosted(lambda: scripted(cells=400)) as running:
        yield running


def test_a_seed_gives_one_text_whatever_else_goes_on(
    server: Hosted, crowded: Hosted, request: pytest.FixtureRequest
) -> None:
    """With room for all, and without, so that answers lose their places and go on later."""
    count = tiers.by_tier(250, quick=32)
    rng = random.Random(1)
    assert compare(server, [Question.draw(rng, 60) for _ in range(count)], seed=2) == 0
    preemptions = compare(crowded, [Question.draw(rng, 250) for _ in range(count)], seed=3)
    assert preemptions >= count // 16
    request.config.stash[SUMMARY_LINES].append(
        f"serving: {2 * count} answers over HTTP, none other than that of plain decoding alone; places were lost "
        f"{preemptions} times"
    )


ONE_ANSWER: Final = [("messages", 3), ("responses", 3)]


@pytest.mark.parametrize(("way", "n"), [(way, n) for way in PATHS for n in (1, 3) if (way, n) not in ONE_ANSWER])
def test_a_stream_is_byte_for_byte_what_is_sent_at_once(server: Hosted, way: Way, n: int) -> None:
    """In characters of one to four bytes, each of them several tokens, and in bytes that are no character."""
    biases = {"240": 2.0, "228": 2.0, "195": 1.0}
    body = Question("文中", {"seed": 3, "max_tokens": 200, "n": n, "logit_bias": biases}).body(way)
    said = {"native": lambda part: part["content"], "messages": message_text, "responses": response_text}.get(
        way, text_of
    )
    whole = server.answer(PATHS[way], body)
    answers = whole if isinstance(whole, list) else whole.get("choices", [whole])
    texts = [said(each) for each in answers]
    streamed = [""] * n
    for chunk in server.chunks(PATHS[way], body):
        for part in chunk.get("choices", [chunk]):
            streamed[part.get("index", 0)] += said(part)
    assert [text.encode() for text in streamed] == [text.encode() for text in texts]
    assert {len(character.encode()) for character in texts[0]} == {1, 2, 3, 4}
    assert "\N{REPLACEMENT CHARACTER}" in "".join(texts)


def test_choices_are_those_of_their_number_among_others(server: Hosted) -> None:
    body = {"prompt": "abc", "seed": 4, "max_tokens": 40}
    few, many = (
        [choice["text"] for choice in server.answer("/v1/completions", {**body, "n": n})["choices"]] for n in (2, 8)
    )
    assert many[:2] == few
    off = server.answer("/v1/completions", {**body, "n": 8, "speculative": {"off": True}})
    assert [choice["text"] for choice in off["choices"]] == many


@pytest.mark.long
def test_the_embedded_pair_gives_one_text_too() -> None:
    """With arithmetic that is the same at every width, one after the other, cold; so that rounding decides nothing."""
    with hosted(lambda: pair(exact=True, max_sequences=1, flash_attention=None)) as running:
        for seed in range(12):
            question = Question(f"def f{seed}(x):", {"seed": seed, "max_tokens": 40, "temperature": 0.8})
            expected = question.ask(running, "native", stream=False, speculative={"off": True})
            for way in PATHS:
                assert question.ask(running, way, stream=seed % 2 == 0) == expected
