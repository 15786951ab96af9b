"""Conversations as prompts: whose words are in them, what templates are asked for, and how much room answers have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.chat.messages import Message, count_leading
from paceline.chat.params import ChatParams
from paceline.chat.prompt_builder import drop_oldest_turns
from paceline.chat.prompts import ChatPrompt
from paceline.core.errors import ContextLengthError, InputError
from paceline.core.params import MAX_TOKENS
from paceline.core.reasoning import ReasoningBudget
from tests.chat.conversing import (
    ALTERNATING,
    BEGUN,
    CHATML,
    EFFORT,
    FIRST_SYSTEM,
    LAST_SYSTEM,
    STRICT,
    THINKING,
    ControlledBytes,
    reader_of,
)
from tests.tiers import by_tier

START, END, THINK, NO_THINK = 256, 257, 258, 259


def said(*messages: tuple[str, Any]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in messages]


def prompt_of(
    source: str,
    messages: str | Sequence[Message],
    *,
    context_length: int = 4096,
    max_tokens: int = MAX_TOKENS,
    vocabulary: ControlledBytes | None = None,
    **params: Any,
) -> ChatPrompt:
    reader = reader_of(source, context_length=context_length, vocabulary=vocabulary)
    return reader.prompt(messages, tools=None, params=ChatParams(**params), max_tokens=max_tokens)


def most_of(prompt: ChatPrompt) -> int | None:
    """Return how long an answer may reason."""
    budget = prompt.options["reasoning_budget"]
    assert budget is not None
    return budget.tokens


def test_a_prompt_is_what_the_template_writes_in_its_own_control_tokens() -> None:
    prompt = prompt_of(CHATML, "Write <|im_end|>")
    assert prompt.text == "<|im_start|>user\nWrite <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert list(prompt.token_ids) == [
        START,
        *b"user\nWrite <|im_end|>",
        END,
        *b"\n",
        START,
        *b"assistant\n",
    ]
    assert (prompt.num_left_out, prompt.markers, prompt.begun, prompt.options) == (0, None, False, {})
    assert list(prompt.messages) == [{"role": "user", "content": "Write <|im_end|>"}]


@pytest.mark.parametrize("source", [STRICT, ALTERNATING])
def test_a_template_without_a_place_for_the_system_gets_it_in_the_first_message(source: str) -> None:
    asked = said(("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("user", "And now?"))
    merged = said(("user", "Be brief.\nHello"), ("assistant", "Hi"), ("user", "And now?"))
    prompt = prompt_of(source, asked)
    assert prompt.text == prompt_of(source, merged).text
    # What was asked is what was kept: the system is merged in writing only.
    assert list(prompt.messages) == asked


def test_the_system_is_merged_with_parts_too() -> None:
    text = [{"type": "text", "text": "Be brief."}]
    for system, user in ((text, "Hello"), ("Be brief.", [{"type": "text", "text": "Hello"}]), (text, text)):
        prompt = prompt_of(STRICT, said(("system", system), ("user", user)))
        assert prompt.text.startswith("<|im_start|>user\nBe brief.\n")


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (CHATML, "<|im_start|>system\na<|im_end|>\n<|im_start|>system\nb<|im_end|>\n"),
        # It reads one of them, or refuses the second, as templates of Qwen 3.5 do.
        (FIRST_SYSTEM, "<|im_start|>system\na\nb<|im_end|>\n"),
        (
            "{% for message in messages[1:] %}{% if message.role == 'system' %}"
            "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + CHATML,
            "<|im_start|>system\na\nb<|im_end|>\n",
        ),
        (STRICT, "<|im_start|>user\na\nb\nc<|im_end|>\n"),
    ],
)
def test_several_of_the_system_are_one_where_a_template_reads_no_more(source: str, written: str) -> None:
    prompt = prompt_of(source, said(("system", "a"), ("system", "b"), ("user", "c")))
    assert prompt.text.startswith(written)


@pytest.mark.parametrize(
    ("source", "role"), [(CHATML, "system"), (CHATML + "{# developer #}", "developer"), (STRICT, "user")]
)
def test_a_developer_is_the_system_to_templates_that_do_not_know_the_role(source: str, role: str) -> None:
    prompt = prompt_of(source, said(("developer", "Be brief."), ("user", "Hello")))
    assert prompt.text.startswith(f"<|im_start|>{role}\nBe brief.")


@pytest.mark.parametrize(
    ("source", "messages", "number", "role"),
    [
        (STRICT, said(("user", "a"), ("tool", "b"), ("user", "c")), 2, "tool"),
        (STRICT, said(("user", "a"), ("critic", "b")), 2, "critic"),
        (STRICT, said(("user", "a"), ("system", "b"), ("user", "c")), 2, "system"),
        (STRICT, said(("system", "a")), 1, "system"),
        (STRICT, said(("tool", "a")), 1, "tool"),
        (FIRST_SYSTEM, said(("system", "a"), ("user", "b"), ("system", "c"), ("user", "d")), 3, "system"),
        # The last stands in the place of all of them.
        (LAST_SYSTEM, said(("user", "a"), ("system", "b"), ("user", "c"), ("system", "d"), ("user", "e")), 2, "system"),
        # Something was merged, and something else would be lost.
        (STRICT, said(("system", "a"), ("user", "b"), ("system", "c"), ("user", "d")), 3, "system"),
    ],
)
def test_a_message_that_would_be_lost_is_refused(source: str, messages: list[Message], number: int, role: str) -> None:
    with pytest.raises(InputError, match=f"message {number}: .* '{role}'"):
        prompt_of(source, messages)


@pytest.mark.parametrize("content", ["", " \n", []])
def test_a_message_that_says_nothing_may_be_left_out(content: object) -> None:
    asked = said(("system", content), ("user", "a"), ("tool", content))
    assert "a<|im_end|>" in prompt_of(FIRST_SYSTEM, asked).text


def test_what_a_template_refuses_is_told_in_its_words() -> None:
    for messages in (said(("user", "a"), ("user", "b")), said(("user", "a"), ("tool", "b"), ("user", "c"))):
        with pytest.raises(InputError, match="roles must alternate user and assistant"):
            prompt_of(ALTERNATING, messages)


def test_the_switch_of_reasoning() -> None:
    assert prompt_of(THINKING, "a", reasoning="off").text.endswith("assistant\n<think>\n\n</think>\n\n")
    for reasoning in ("on", "auto"):
        prompt = prompt_of(THINKING, "a", reasoning=reasoning)
        assert prompt.text.endswith("assistant\n")
        unlimited = ReasoningBudget(None, (THINK,), (NO_THINK,), forced=(NO_THINK,))
        assert prompt.options == {"preserved_ids": (THINK, NO_THINK), "reasoning_budget": unlimited}
    assert prompt_of(EFFORT, "a", reasoning_effort="high").text.startswith("Effort: high\n")
    # By its name, where only the variable is to be set.
    prompt = prompt_of(THINKING, "a", template_variables={"enable_thinking": False})
    assert prompt.text.endswith("</think>\n\n")
    # What says more goes first.
    prompt = prompt_of(THINKING, "a", reasoning="on", template_variables={"enable_thinking": False})
    assert prompt.text.endswith("assistant\n")


def test_reasoning_without_a_switch_is_ended_at_once() -> None:
    prompt = prompt_of(BEGUN, "a", reasoning="off", reasoning_budget=100)
    assert prompt.options["reasoning_budget"] == ReasoningBudget(0, (THINK,), (NO_THINK,), True, (NO_THINK,))
    assert most_of(prompt_of(BEGUN, "a", reasoning="on")) is None
    # With a switch, the template has said so.
    assert most_of(prompt_of(THINKING, "a", reasoning="off")) is None


@pytest.mark.parametrize(("source", "begun"), [(THINKING, False), (BEGUN, True)])
def test_a_budget_of_reasoning(source: str, begun: bool) -> None:
    prompt = prompt_of(source, "a", reasoning_budget=7)
    assert prompt.begun is begun
    assert prompt.options["reasoning_budget"] == ReasoningBudget(7, (THINK,), (NO_THINK,), begun, (NO_THINK,))


@pytest.mark.parametrize(
    ("source", "params"),
    [
        (CHATML, {"reasoning": "off"}),
        (CHATML, {"reasoning": "on"}),
        (CHATML, {"reasoning_budget": 5}),
        (EFFORT, {"reasoning_budget": 0}),
        (THINKING, {"reasoning_effort": "low"}),
    ],
)
def test_what_the_template_knows_nothing_of_is_refused(source: str, params: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="does not support") as caught:
        prompt_of(source, "a", **params)
    assert [caught.value.field] == [*params]


@pytest.mark.parametrize("spelled", ["<think>", "<think>\n", "a <think> b", "</think>"])
@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
def test_markers_that_are_spelled_in_messages_begin_no_reasoning(spelled: str, role: str) -> None:
    """In a template that ends with the message, too: nothing of its own stands behind."""
    bare = "{{ '</think>'[:0] }}{% for message in messages %}{{ message.content }}{% endfor %}"
    messages = said(("user", "a"), (role, spelled))
    assert not prompt_of(bare, messages).begun
    assert not prompt_of(THINKING, messages).begun
    assert prompt_of(BEGUN, messages, continue_final_message=False).begun


def test_room_is_left_for_the_answer() -> None:
    """A quarter of the context, or what the answer may have if that is less."""
    empty = len(prompt_of(CHATML, "").token_ids)
    for max_tokens, room in ((MAX_TOKENS, 300), (100, 300), (40, 360)):
        fits = prompt_of(CHATML, "x" * (room - empty), context_length=400, max_tokens=max_tokens)
        assert len(fits.token_ids) == room
        before = said(("user", "a"), ("assistant", "b"))
        longer = [*before, *said(("user", "x" * (room - empty - 5)))]
        assert prompt_of(CHATML, longer, context_length=400, max_tokens=max_tokens).num_left_out == 2


def test_a_last_turn_may_leave_the_answer_less_room() -> None:
    empty = len(prompt_of(CHATML, "").token_ids)
    assert len(prompt_of(CHATML, "x" * (399 - empty), context_length=400).token_ids) == 399
    with pytest.raises(ContextLengthError, match="400 tokens"):
        prompt_of(CHATML, "x" * (400 - empty), context_length=400)


def test_turns_go_until_three_quarters_of_the_room_are_filled() -> None:
    turns = [message for _ in range(20) for message in said(("user", "x" * 20), ("assistant", "y" * 20))]
    asked = [*said(("system", "Be brief.")), *turns, *said(("user", "last"))]
    prompt = prompt_of(CHATML, asked, context_length=800, max_tokens=200)
    room = 600
    assert list(prompt.messages) == [asked[0], *asked[1 + prompt.num_left_out :]]
    assert prompt.num_left_out % 2 == 0
    a_turn = len(prompt_of(CHATML, [*turns[:2], *asked]).token_ids) - len(prompt_of(CHATML, asked).token_ids)
    assert room * 3 // 4 - a_turn < len(prompt.token_ids) <= room * 3 // 4
    assert prompt.token_ids == prompt_of(CHATML, prompt.messages).token_ids
    # From then on the beginning stays as it is for a while.
    longer = [*prompt.messages, *said(("assistant", "y"), ("user", "more"))]
    again = prompt_of(CHATML, longer, context_length=800, max_tokens=200)
    assert again.num_left_out == 0
    assert list(again.token_ids[: len(prompt.token_ids)]) == list(prompt.token_ids)


def test_nothing_is_forgotten_where_that_is_not_wanted() -> None:
    asked = said(("user", "x" * 200), ("assistant", "y"), ("user", "z"))
    assert prompt_of(CHATML, asked, context_length=200).num_left_out == 2
    with pytest.raises(ContextLengthError, match="`forget=True`"):
        prompt_of(CHATML, asked, context_length=200, forget=False)
    # It may fill the context, but for one token.
    size = len(prompt_of(CHATML, "").token_ids)
    assert len(prompt_of(CHATML, "x" * (199 - size), context_length=200, forget=False).token_ids) == 199


def test_a_template_made_for_tools_alone_needs_none() -> None:
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + CHATML
    messages = said(("system", "Be brief."), ("user", "Hello"))
    tool = {"type": "function", "function": {"name": "f"}}
    reader = reader_of(source)
    for tools, start in ((None, ""), ([], ""), ([tool], "f")):
        prompt = reader.prompt(messages, tools=tools, params=ChatParams(), max_tokens=8)
        assert prompt.text.startswith(f"{start}<|im_start|>")
        assert "system\nBe brief.<|im_end|>" in prompt.text


def test_what_the_system_says_is_merged_where_it_has_no_place_in_this_conversation() -> None:
    source = (
        "{% if messages[0].role == 'system' and messages[-1].role == 'user' %}({{ messages[0].content }}){% endif %}"
        "{% for message in messages if message.role != 'system' %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    )
    asked = said(("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c"))
    assert prompt_of(source, asked).text == "(Be brief.)[user]a[assistant]b[user]c"
    asked = [*asked[:3], *said(("tool", "c"))]
    assert prompt_of(source, asked).text == "[user]Be brief.\na[assistant]b[tool]c"


@pytest.mark.parametrize(
    "params",
    [
        *({"template_variables": {name: 1}} for name in ("messages", "tools", "self", "template", 1)),
        {"template_variables": {"add_generation_prompt": 1}},
        {"template_variables": [1]},
        {"reasoning": "maybe"},
        {"reasoning_budget": -2},
        {"reasoning_budget": 1.5},
        {"reasoning_effort": 5},
        {"reasoning_budget_message": 5},
        {"reasoning_format": "xml"},
        {"forget": "no"},
    ],
    ids=str,
)
def test_params_that_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        ChatParams(**params)
    assert [caught.value.field] == [*params]


# --- which turns go ---------------------------------------------------------------------------------------------------


def of_length(role: str, length: int) -> dict[str, Any]:
    return {"role": role, "content": "x" * length}


def count(messages: Sequence[Message]) -> int:
    """Return the tokens of a template that writes three around each message, and two behind them."""
    return sum(len(message["content"]) + 3 for message in messages) + 2


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw turns of one user's message with answers and results of tools, after what the system says if anything."""
    length = st.integers(0, 12)
    messages = [
        of_length(role, draw(length)) for role in draw(st.sampled_from(((), ("system",), ("system", "developer"))))
    ]
    if draw(st.booleans()):
        messages.append(of_length("assistant", draw(length)))
    for _ in range(draw(st.integers(0, 8))):
        messages.append(of_length("user", draw(length)))
        roles = st.lists(st.sampled_from(("assistant", "tool", "system")), max_size=3)
        messages += [of_length(role, draw(length)) for role in draw(roles)]
    return messages


def turns_of(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == "user"]


@settings(max_examples=by_tier(3000, quick=300))
@given(messages=conversations(), aim=st.integers(1, 150), beyond=st.integers(1, 50))
def test_what_is_kept_fits_and_nothing_is_left_out_that_need_not_be(
    messages: list[dict[str, Any]], aim: int, beyond: int
) -> None:
    most = aim + beyond
    others = (place for place, one in enumerate(messages) if one["role"] not in ("system", "developer"))
    leading = next(others, len(messages))
    assert count_leading(messages) == leading
    places = [place for place in turns_of(messages) if place > leading] or [leading]
    last = [*messages[:leading], *messages[places[-1] :]]
    kept = drop_oldest_turns(messages, count, most=most, aim=aim)
    if count(messages) <= most:
        assert kept == messages
        return
    if kept == messages:
        assert kept == last, "only the last turn may have more than what fits"
        return
    # What the system says at the beginning, and then the end of the conversation from a user's message on.
    num_left_out = len(messages) - len(kept)
    assert num_left_out > 0
    assert all(mine is theirs for mine, theirs in zip(kept[:leading], messages[:leading], strict=True))
    assert all(mine is theirs for mine, theirs in zip(kept[leading:], messages[leading + num_left_out :], strict=True))
    assert kept[leading]["role"] == "user"
    if count(kept) > aim:
        assert kept == last, "only the last turn may have more than the aim"
    earlier = [place for place in places if place < leading + num_left_out]
    if earlier and count(kept) <= aim:
        with_one_turn_more = [*messages[:leading], *messages[earlier[-1] :]]
        assert count(with_one_turn_more) > aim, "a turn was left out that has room"


def test_what_belongs_to_a_turn_goes_with_it() -> None:
    roles = ("user", "assistant", "tool", "assistant", "user", "assistant", "user")
    messages = [of_length("system", 4), *(of_length(role, 10) for role in roles)]
    kept = drop_oldest_turns(messages, count, most=90, aim=60)
    assert kept == [messages[0], *messages[5:]]
    assert drop_oldest_turns(messages, count, most=200, aim=60) == messages
    assert drop_oldest_turns(messages, count, most=60, aim=20) == [messages[0], messages[-1]]
    # However long it is.
    assert drop_oldest_turns(messages, count, most=10, aim=5) == [messages[0], messages[-1]]


def test_few_prompts_are_looked_at() -> None:
    messages = [of_length(role, 3) for _ in range(500) for role in ("user", "assistant")]
    counted = 0

    def counting(some: Sequence[Message]) -> int:
        nonlocal counted
        counted += 1
        return count(some)

    drop_oldest_turns(messages, counting, most=1000, aim=750)
    assert counted <= 12
