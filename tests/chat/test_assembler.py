"""Answers from tokens: the same events joined however the answer was cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest

from paceline.chat.assembler import AnswerAssembler, AnswerEvent, TokenEvent
from paceline.chat.prompts import ChatPrompt
from paceline.chat.reasoning import AnswerPart, ReasoningFormat
from paceline.chat.tool_calls.base import ArgumentsDelta, CallStarted, ExpectedCalls
from paceline.core.logprobs import TokenLogprob
from paceline.core.request import Emission
from paceline.core.text import TextSegment
from tests.chat.conversing import prompt_with
from tests.chat.tool_calls.answers import ANSWERS, BY_NAME, THINK, TOOLS, Answer
from tests.tiers import by_tier

pytest.importorskip("transformers")

FORMATS: Final[tuple[ReasoningFormat, ...]] = ("auto", "none", "deepseek-legacy")


def prompt_of(answer: Answer, *, begun: bool = False, continued: bool = False, **expected: bool) -> ChatPrompt:
    calls = ExpectedCalls(BY_NAME[answer.family], TOOLS, **expected)
    return prompt_with(answer.markers, begun=begun, continued=continued, calls=calls)


def emissions_of(text: str, rng: random.Random) -> Iterator[Emission]:
    """Yield an answer cut at random: a round has several tokens, a token several pieces of text or none."""
    share = rng.choice((0.05, 0.3, 0.9))
    places = [0, *(place for place in range(1, len(text)) if rng.random() < share), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    token_ids = itertools.count()
    while pieces:
        count = rng.randint(1, 5)
        some, pieces = pieces[:count], pieces[count:]
        segments = [TextSegment(piece, f"drafter {number}") for number, piece in enumerate(some) if piece]
        ends_of = sorted(rng.randint(0, len(segments)) for _ in range(count))
        # What is withheld to the end comes with no token.
        ends_of = ends_of if not pieces else [*ends_of[:-1], len(segments)]
        ids = [next(token_ids) for _ in ends_of]
        logprobs = tuple(TokenLogprob(token_id, -1.0, ()) for token_id in ids)
        reason = None if pieces else "end"
        request: Any = SimpleNamespace()
        yield Emission(request, ids, [f"of {each}" for each in ids], segments, reason, ends_of, logprobs)  # type: ignore[arg-type]


def joined(events: Sequence[AnswerEvent]) -> dict[str, Any]:
    """Return the message that events add up to, as a client that knows nothing else reads them."""
    said = {"content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, AnswerPart):
            assert event.segment.text
            said[event.kind] += event.segment.text
        elif isinstance(event, CallStarted):
            assert (event.kind, event.index, event.segment.text) == ("call", len(calls), "")
            calls.append({"id": event.call_id, "type": "function", "function": {"name": event.name, "arguments": ""}})
        else:
            assert isinstance(event, ArgumentsDelta)
            assert (event.kind, event.segment.text) == ("arguments", event.text)
            assert event.index == len(calls) - 1
            calls[event.index]["function"]["arguments"] += event.text
    message: dict[str, Any] = {"content": said["content"] or (None if calls else "")}
    message |= {"reasoning_content": said["reasoning"]} if said["reasoning"] else {}
    return message | ({"tool_calls": calls} if calls else {})


def parts_of(events: Sequence[TokenEvent]) -> list[AnswerEvent]:
    return [part for event in events for part in event.parts]


@pytest.mark.parametrize("reasoning_format", FORMATS)
def test_any_cut_of_an_answer_comes_to_the_same_message(reasoning_format: ReasoningFormat) -> None:
    rng = random.Random(reasoning_format)
    num_calls = num_broken = 0
    for answer in ANSWERS:
        for _ in range(by_tier(6, quick=2)):
            text = answer.text if rng.random() < 0.7 else answer.text[: rng.randrange(len(answer.text) + 1)]
            prompt = prompt_of(
                answer, begun=rng.random() < 0.3, continued=rng.random() < 0.3, several=rng.random() < 0.8
            )
            call_ids: list[str] = []
            kept = AnswerAssembler(prompt, reasoning_format, keeps=True, with_sources=True, call_ids=call_ids)
            emissions = list(emissions_of(text, rng))
            events = [event for emission in emissions for event in kept.take(emission)]
            message = kept.message
            # A call that has no id got one, and keeps it.
            assert message == kept.read(text)
            told = joined(parts_of(events))
            if reasoning_format == "deepseek-legacy":  # which has in the message twice what is said once
                message = {**message, "content": told["content"]}
            assert told == message
            assert kept.written == text
            num_calls += (found := len(message.get("tool_calls", ())))
            num_broken += not found
            # Each token comes once, with all that is known of it, and so it is kept.
            token_ids = [token_id for emission in emissions for token_id in emission.token_ids]
            assert [token_id for event in events for token_id in event.token_ids] == token_ids == kept.token_ids
            assert [each.token_id for event in events for each in event.logprobs] == token_ids
            assert [each.token_id for each in kept.logprobs] == token_ids
            assert [source for event in events for source in event.sources] == [f"of {each}" for each in token_ids]
            assert [event.num_tokens for event in events] == [
                *itertools.accumulate(len(event.token_ids) for event in events)
            ]
            assert kept.num_tokens == len(token_ids)
            # A stream keeps nothing, and says the same.
            stream = AnswerAssembler(prompt, reasoning_format, call_ids=call_ids)
            pieces = [part for emission in emissions for part in stream.push(emission.segments)]
            assert joined([*pieces, *stream.finish()]) == message
            assert stream.finish() == []
            assert (stream.written, stream.token_ids, stream.logprobs) == ("", [], [])
    assert min(num_calls, num_broken) > 4


def test_a_completion_is_all_content() -> None:
    rng = random.Random(1)
    text = f"<think>Hm.</think>{ANSWERS[0].text}"
    assembler = AnswerAssembler(None, keeps=True)
    events = [event for emission in emissions_of(text, rng) for event in assembler.take(emission)]
    assert joined(parts_of(events)) == assembler.message == {"content": text}
    assert "".join(event.text for event in events) == text


def test_what_stands_before_an_answer() -> None:
    prefix = [AnswerPart("reasoning", TextSegment("Hm. ", "")), AnswerPart("content", TextSegment("It ", ""))]
    for reasoning_format in FORMATS:
        assembler = AnswerAssembler(prompt_with(THINK), reasoning_format, prefix=prefix, keeps=True)
        assert assembler.push([]) == []
        assert assembler.push([TextSegment("is 4.", "draft")]) == [
            *prefix,
            AnswerPart("content", TextSegment("is 4.", "draft")),
        ]
        assert assembler.finish() == []
        assert assembler.message == {"content": "It is 4.", "reasoning_content": "Hm. "}
        assert assembler.written == "is 4."


def test_reasoning_is_counted_by_tokens() -> None:
    assembler = AnswerAssembler(prompt_with(THINK, begun=True))
    request: Any = SimpleNamespace()
    pieces = ["Hm", ".", "</think>", "\n", "Four", "."]
    for piece in pieces:
        assembler.take(Emission(request, [1], ["target"], [TextSegment(piece, "target")], None, [1]))
    assert (assembler.num_tokens, assembler.num_reasoning) == (6, 2)
