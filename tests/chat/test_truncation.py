"""Conversations that are too long: the oldest turns go, no more of them than have to, and nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.chat.messages import Message, count_leading
from paceline.chat.prompt_builder import drop_oldest_turns
from tests.tiers import by_tier


def said(role: str, length: int) -> dict[str, Any]:
    return {"role": role, "content": "x" * length}


def count(messages: Sequence[Message]) -> int:
    """Return the tokens of a template that writes three around each message, and two behind them."""
    return sum(len(message["content"]) + 3 for message in messages) + 2


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw turns of one user's message with answers and results of tools, after what the system says if anything."""
    length = st.integers(0, 12)
    messages = [said(role, draw(length)) for role in draw(st.sampled_from(((), ("system",), ("system", "developer"))))]
    if draw(st.booleans()):
        messages.append(said("assistant", draw(length)))
    for _ in range(draw(st.integers(0, 8))):
        messages.append(said("user", draw(length)))
        roles = st.lists(st.sampled_from(("assistant", "tool", "system")), max_size=3)
        messages += [said(role, draw(length)) for role in draw(roles)]
    return messages


def turns_of(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == "user"]


@settings(max_examples=by_tier(3000, quick=300))
@given(messages=conversations(), aim=st.integers(1, 150), beyond=st.integers(1, 50))
def test_what_is_kept_fits_and_nothing_is_left_out_that_need_not_be(
    messages: list[dict[str, Any]], aim: int, beyond: int
) -> None:
    most = aim + beyond
    leading = count_leading(messages)
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
    messages = [
        said("system", 4),
        said("user", 10),
        said("assistant", 10),
        said("tool", 10),
        said("assistant", 10),
        said("user", 10),
        said("assistant", 10),
        said("user", 10),
    ]
    kept = drop_oldest_turns(messages, count, most=90, aim=60)
    assert kept == [messages[0], *messages[5:]]
    assert drop_oldest_turns(messages, count, most=200, aim=60) == messages
    assert drop_oldest_turns(messages, count, most=60, aim=20) == [messages[0], messages[-1]]


def test_a_last_turn_stays_however_long_it_is() -> None:
    messages = [said("user", 5), said("assistant", 5), said("user", 100)]
    assert drop_oldest_turns(messages, count, most=50, aim=30) == messages[-1:]


def test_few_prompts_are_looked_at() -> None:
    messages = [said(role, 3) for _ in range(500) for role in ("user", "assistant")]
    counted = 0

    def counting(some: Sequence[Message]) -> int:
        nonlocal counted
        counted += 1
        return count(some)

    drop_oldest_turns(messages, counting, most=1000, aim=750)
    assert counted <= 12
