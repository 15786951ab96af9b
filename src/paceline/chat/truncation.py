"""A conversation that is longer than the context: what is left out, the oldest turns first."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Final

from paceline.chat.messages import Message

LEADING_ROLES: Final = ("system", "developer")
"""Roles of what the system says."""


def count_leading(messages: Sequence[Message]) -> int:
    """Return how many messages at a conversation's beginning are what the system says, and stay."""
    return next((place for place, one in enumerate(messages) if one["role"] not in LEADING_ROLES), len(messages))


def drop_oldest_turns(
    messages: Sequence[Message], count_tokens: Callable[[Sequence[Message]], int], *, most: int, aim: int
) -> list[Message]:
    """Return the conversation without as many of its oldest turns as have to go.

    What the system says at the beginning stays, and so does the last turn, however long it is. A turn begins with a
    user's message.

    Args:
        messages: of the conversation.
        count_tokens: returns the tokens that messages come to.
        most: tokens that fit. A conversation with no more is returned whole.
        aim: tokens to come down to, fewer than ``most``: a beginning that changes with every turn would have to be read
            anew with every turn.
    """
    if count_tokens(messages) <= most:
        return list(messages)
    leading = count_leading(messages)
    turns = [place for place in range(leading, len(messages)) if messages[place]["role"] == "user"]
    later = [place for place in turns if place > leading]

    def without(first: int) -> list[Message]:
        return [*messages[:leading], *messages[first:]]

    # Fewer turns have fewer tokens, so the first that fits is found by halving.
    found = bisect.bisect_left(later, True, key=lambda first: count_tokens(without(first)) <= aim)
    return without(later[min(found, len(later) - 1)] if later else leading)
