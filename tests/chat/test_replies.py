"""Answers: their parts while they are written, and the message that they are in the end."""

from __future__ import annotations

import pytest

import paceline
from paceline.chat.assembler import AnswerEvent
from paceline.chat.reasoning import ReasoningFormat
from tests.chat.conversing import BEGUN, CHATML, THINKING
from tests.chat.replies import FORMATS, answering, text_of


@pytest.mark.parametrize(
    ("reasoning_format", "content", "reasoning"),
    [
        ("auto", "It is <b>4</b>.", "Hm. 2 + 2"),
        ("deepseek", "It is <b>4</b>.", "Hm. 2 + 2"),
        ("none", "<think>\nHm. 2 + 2\n</think>\n\nIt is <b>4</b>.", None),
        ("deepseek-legacy", "<think>\nHm. 2 + 2\n</think>\n\nIt is <b>4</b>.", "Hm. 2 + 2"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_where_reasoning_goes(
    reasoning_format: ReasoningFormat, content: str, reasoning: str | None, begun: bool
) -> None:
    answer = "\nHm. 2 + 2\n</think>\n\nIt is <b>4</b>."
    source, said = (BEGUN, answer) if begun else (THINKING, f"<think>{answer}")
    with answering(said, source, reasoning_format=reasoning_format) as stream:
        parts = list(stream)
        reply = stream.result()
    assert reply.prompt.begun is begun
    assert (reply.text, reply.reasoning) == (content, reasoning)
    assert reply.message["role"] == "assistant"
    assert reply.message["content"] == content
    assert reply.message.get("reasoning_content") == reasoning
    assert ("reasoning_content" in reply.message) == (reasoning is not None)
    assert reply.generation.text == said
    assert reply.generation.finish_reason == "end"
    if reasoning_format != "deepseek-legacy":  # which has in the message twice what is said once
        assert text_of(parts, "content") == content
    assert text_of(parts, "reasoning") == (reasoning or "")
    assert all(part.segment.text for part in parts)


@pytest.mark.parametrize("reasoning_format", FORMATS)
def test_a_model_that_does_not_reason_has_content_alone(reasoning_format: ReasoningFormat) -> None:
    with answering("<think is no marker", CHATML, reasoning_format=reasoning_format) as stream:
        parts = list(stream)
        reply = stream.result()
    assert text_of(parts, "content") == reply.text == "<think is no marker"
    assert reply.message == {"role": "assistant", "content": "<think is no marker"}


@pytest.mark.parametrize("reasoning_format", FORMATS)
def test_an_answer_closed_early_keeps_what_there_is(reasoning_format: ReasoningFormat) -> None:
    said = "<think>Hm. 2 + 2</think>It is 4, and so on."
    for num_rounds in range(3, 30, 4):
        with answering(said, THINKING, reasoning_format=reasoning_format) as stream:
            parts: list[AnswerEvent] = []
            for number, some in enumerate(stream.rounds()):
                parts += some
                if number == num_rounds:
                    break
            parts += stream.close()
            reply = stream.so_far()
        assert reply.generation.finish_reason in ("cancelled", "end")
        assert said.startswith(reply.generation.text)
        assert text_of(parts, "reasoning") == (reply.reasoning or "")
        if reasoning_format != "deepseek-legacy":
            assert text_of(parts, "content") == reply.text
        assert stream.close() == []


def test_an_answer_as_it_stands() -> None:
    with answering("<think>Hm. 2 + 2</think>It is 4.", THINKING) as stream:
        rounds = stream.rounds()
        seen = ""
        while "Hm" not in seen:
            seen += text_of(next(rounds), "reasoning")
        reply = stream.so_far()
        assert (reply.reasoning or "").startswith("Hm")
        for _ in rounds:
            pass
        assert stream.so_far() == stream.result()


def test_a_result_needs_no_iteration_and_ends_it() -> None:
    with answering("It is 4.", CHATML) as stream:
        assert stream.result().text == "It is 4."
        assert text_of(list(stream), "content") == ""


def test_leaving_the_block_ends_the_answer() -> None:
    with answering("It is 4." * 100, CHATML) as stream:
        with stream:
            next(stream.rounds())
        assert stream.so_far().generation.finish_reason in ("cancelled", "end")


def test_an_error_ends_the_iteration_and_leaves_what_was_said() -> None:
    with answering("It is 4.", CHATML, fails_after=5) as stream:
        parts: list[AnswerEvent] = []
        with pytest.raises(paceline.PacelineError):
            parts.extend(stream)
        with pytest.raises(paceline.PacelineError):
            stream.result()
        assert text_of(parts, "content") == stream.so_far().text == "It is"


def test_calls_are_apart_from_reasoning_and_content() -> None:
    source = '{# <tool_call>\n{"name": ..., "arguments": ...} #}' + THINKING
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    calls = [f'<tool_call>\n{{"name": "f", "arguments": {{"a": {number}}}}}\n</tool_call>' for number in range(2)]
    said = f"<think>\nHm. {calls[0]}\n</think>\n\n{calls[1]}\n{calls[1][:-14]}"
    with answering(said, source, tools=tools) as stream:
        reply = stream.result()
    assert [call["function"] for call in reply.tool_calls] == [{"name": "f", "arguments": '{"a": 1}'}]
    assert reply.reasoning == f"Hm. {calls[0]}"
    # One that is cut off is content.
    assert reply.text.strip() == calls[1][:-14].strip()
    with answering(calls[0], source, tools=tools) as stream:
        reply = stream.result()
    assert (reply.message["content"], reply.text, len(reply.tool_calls)) == (None, "", 1)
    with answering(calls[0], THINKING, tools=tools) as stream:
        # How this model writes calls is not known.
        reply = stream.result()
    assert (reply.text, reply.tool_calls) == (calls[0], ())
