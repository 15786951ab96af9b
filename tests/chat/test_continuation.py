"""Going on with the last message: what the prompt ends with, whose words it is, and what cannot be continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.chat.messages import Message
from paceline.chat.params import ChatParams
from paceline.chat.prompts import ChatPrompt
from paceline.chat.reasoning import ReasoningFormat, ReasoningMarkers
from paceline.core.errors import InputError
from paceline.core.reasoning import ReasoningBudget
from tests.chat.conversing import (
    ALTERNATING,
    BEGUN,
    CHATML,
    STRICT,
    THINKING,
    ControlledBytes,
    answering,
    read_message,
    reader_of,
    split_reasoning,
)

THINK, NO_THINK = 258, 259
OPENING = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
CHANNELS = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    "{{ '<|channel|>analysis<|message|>'[:0] }}"
)
"""Names the channel of each message of an answer, as gpt-oss does."""


def prompt_of(source: str, *last: Message, **params: Any) -> ChatPrompt:
    messages: list[Message] = [{"role": "user", "content": "Who?"}, *last]
    return reader_of(source).prompt(messages, tools=None, params=ChatParams(**params), max_tokens=100)


def said(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("content", "ending"),
    [
        ("Whill", "Whill"),
        ([{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}], "Wh\n\nill"),
        (" A space before, and one behind ", " A space before, and one behind "),
        ("", ""),
    ],
)
def test_a_prompt_ends_with_the_message(content: Any, ending: str) -> None:
    """As it was given, in a template that trims contents as well, and in one that reads no parts."""
    for source in (CHATML, STRICT, THINKING):
        prompt = prompt_of(source, said(content))
        assert prompt.text == OPENING + ending
        assert (prompt.begun, prompt.continued) == (False, bool(ending))
        asked = {"continue_final_message": True, "add_generation_prompt": False}
        for params in (asked, {"continue_final_message": True}, {"add_generation_prompt": False}):
            assert prompt_of(source, said(content), **params) == prompt
    # One that takes turns is asked for the next.
    assert prompt_of(ALTERNATING, said(content)).text == f"[user]Who?\n[assistant]{ending}"


def test_control_tokens_that_are_spelled_in_the_message_stay_text() -> None:
    prompt = prompt_of(THINKING, said("<think>Hm</think><|im_end|>"))
    ids = list(prompt.token_ids)
    assert [ids.count(token_id) for token_id in (256, 257, THINK, NO_THINK)] == [2, 1, 0, 0]
    assert ids[-len("<think>Hm</think><|im_end|>") :] == [*b"<think>Hm</think><|im_end|>"]
    assert not prompt.begun


def test_another_answer_is_asked_for_or_not() -> None:
    closed = f"{OPENING}Whill<|im_end|>\n"
    for params in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        prompt = prompt_of(CHATML, said("Whill"), **params)
        assert prompt.text == f"{closed}<|im_start|>assistant\n"
        assert not prompt.continued
    neither = prompt_of(CHATML, said("Whill"), continue_final_message=False, add_generation_prompt=False)
    assert neither.text == closed
    assert prompt_of(CHATML, add_generation_prompt=False).text == "<|im_start|>user\nWho?<|im_end|>\n"
    two = prompt_of(CHATML, said("Whill"), said("b"), continue_final_message=False)
    assert two.text == f"{closed}<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("last", "params"),
    [
        ([], {"continue_final_message": True}),
        ([said("a"), said("b")], {}),
        ([said("a"), said("b")], {"continue_final_message": True}),
        ([said("a", tool_calls=[{"function": {"name": "f"}}])], {}),
        ([said("a", reasoning_content="b")], {}),
        ([said("a", reasoning_content=["b"])], {}),
        ([said("a")], {"continue_final_message": True, "add_generation_prompt": True}),
        ([said("a")], {"add_generation_prompt": "no"}),
    ],
)
def test_what_cannot_be_continued(last: list[Message], params: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refused:
        prompt_of(CHATML, *last, **params)
    assert "\n" not in str(refused.value)
    if not last:
        assert refused.value.field == "continue_final_message"


@pytest.mark.parametrize(
    ("source", "message", "ending", "begun"),
    [
        (THINKING, said("", reasoning_content="Hm."), "<think>Hm.", True),
        (THINKING, {"role": "assistant", "reasoning_content": "Hm. "}, "<think>Hm. ", True),
        (THINKING, said("It", reasoning_content="Hm."), "<think>Hm.</think>It", False),
        (BEGUN, said(""), "<think>\n", True),
        (BEGUN, said("", reasoning_content="Hm."), "<think>\nHm.", True),
        (BEGUN, said("It"), "<think>\n</think>It", False),
        (BEGUN, said("It", reasoning_content="Hm."), "<think>\nHm.</think>It", False),
    ],
)
def test_reasoning_is_continued_or_closed(source: str, message: Message, ending: str, begun: bool) -> None:
    prompt = prompt_of(source, message, reasoning_budget=7)
    assert prompt.text == OPENING + ending
    assert prompt.begun is begun
    assert prompt.options["reasoning_budget"] == ReasoningBudget(7, (THINK,), (NO_THINK,), begun, (NO_THINK,))
    assert list(prompt.token_ids).count(THINK) == ("<think>" in ending)
    assert list(prompt.token_ids).count(NO_THINK) == ("</think>" in ending)


def test_a_template_that_was_told_not_to_reason_goes_on_with_a_content() -> None:
    closed = prompt_of(THINKING, said("It"), reasoning="off")
    assert closed.text == f"{OPENING}<think>\n\n</think>\n\nIt"
    opened = prompt_of(THINKING, said("", reasoning_content="Hm."), reasoning="off")
    assert opened.text == f"{OPENING}<think>Hm."


def test_a_model_that_names_channels_has_its_content_in_the_last() -> None:
    analysis, final = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
    vocabulary = ControlledBytes(["<|start|>", "<|end|>", "<|channel|>", "<|message|>"])
    for message, ending in (
        (said("It"), f"{analysis}{final}It"),
        (said("It", reasoning_content="Hm."), f"{analysis}Hm.{final}It"),
        (said("", reasoning_content="Hm."), f"{analysis}Hm."),
        (said(""), ""),
    ):
        asked: list[Message] = [{"role": "user", "content": "Who?"}, message]
        reader = reader_of(CHANNELS, vocabulary=vocabulary)
        prompt = reader.prompt(asked, tools=None, params=ChatParams(), max_tokens=9)
        assert prompt.text == f"<|start|>user<|message|>Who?<|end|><|start|>assistant{ending}"


def test_the_oldest_turns_go_first() -> None:
    turns: list[Message] = []
    for _ in range(20):
        turns += [{"role": "user", "content": "x" * 20}, {"role": "assistant", "content": "y" * 20}]
    reader = reader_of(CHATML, context_length=400)
    prompt = reader.prompt(turns, tools=None, params=ChatParams(), max_tokens=100)
    assert prompt.num_left_out > 0
    assert prompt.text.endswith("<|im_start|>assistant\n" + "y" * 20)
    assert list(prompt.messages) == turns[prompt.num_left_out :]


MARKERS = ReasoningMarkers("<think>", "</think>")


def test_whitespace_counts_where_a_message_goes_on() -> None:
    assert split_reasoning(" + 2\n</think>\n\n4.", MARKERS, begun=True, continued=True) == (" + 2", "4.")
    assert split_reasoning(" + 2\n</think>\n\n4.", MARKERS, begun=True) == ("+ 2", "4.")
    assert split_reasoning("\n and so on", MARKERS, continued=True) == (None, "\n and so on")
    # No reasoning begins in the middle of a content.
    assert split_reasoning(" <think> is a marker", MARKERS, continued=True) == (None, " <think> is a marker")


def test_the_answer_is_what_was_added() -> None:
    text = " + 2</think>4."
    formats: tuple[ReasoningFormat, ...] = ("none", "deepseek-legacy")
    for reasoning_format in formats:
        message = read_message(text, MARKERS, begun=True, continued=True, reasoning_format=reasoning_format)
        assert message["content"] == text
    assert read_message(text, MARKERS, begun=True, continued=True) == {"content": "4.", "reasoning_content": " + 2"}


@pytest.mark.parametrize("reasoning_format", ["auto", "none"])
def test_a_stream_of_a_message_that_goes_on(reasoning_format: str) -> None:
    messages = [{"role": "user", "content": "2 + 2?"}, said("", reasoning_content="Hm. 2")]
    with answering(" + 2</think>It is 4.", THINKING, messages=messages, reasoning_format=reasoning_format) as stream:
        reply = stream.result()
    content = "It is 4." if reasoning_format == "auto" else " + 2</think>It is 4."
    assert (reply.text, reply.reasoning) == (content, " + 2" if reasoning_format == "auto" else None)


def test_a_model_goes_on_where_the_message_stands(tmp_path: Path) -> None:
    (tmp_path / "chatml.jinja").write_text(CHATML)
    chat = ChatParams(template_file=tmp_path / "chatml.jinja")
    question = {"role": "user", "content": "Write a function."}
    with paceline.load(policy=paceline.NO_SPECULATION, context_length=256) as model:
        options = paceline.GenerateOptions(max_tokens=12, temperature=0.0, ignore_end=True)
        continued = model.chat([question, said("def ")], chat=chat, **options)
        prompt = model.chat_prompt([question], chat=chat)
        text = model.generate(continued.prompt.token_ids, **options).text
        assert continued.prompt.text == f"{prompt.text}def "
        assert continued.text == text
        assert continued.message == {"role": "assistant", "content": text}
