"""Tokens that close a turn of a conversation, in models whose configuration does not name them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

END_OF_TURN: Final = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})
"""Control tokens whose text says that a turn ends."""

_ENDS_MESSAGES: Final = "<|end|>"
"""In gpt-oss and Solar Open, an answer is several messages, each closed by it: alone it is no proof."""


def unnamed_turn_ends(templates: Iterable[str], control: Mapping[str, int], named: Collection[str]) -> list[int]:
    """Return the control tokens that close turns in chat templates where no named end token does.

    A model that was tuned for conversations after its configuration was written closes turns by such a token, and would
    go on to write the user's next turn. Where a template has a named end token, turns are closed by that one.

    Args:
        templates: the model's chat templates, as texts.
        control: ids of the control tokens, by their text.
        named: texts of the end tokens that the configuration names.
    """
    text = "\n".join(templates)
    if "eos_token" in text or any(end in text for end in named):
        return []
    closing = END_OF_TURN - {_ENDS_MESSAGES}
    return [token_id for token, token_id in control.items() if token in closing and token in text]
