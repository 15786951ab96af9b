"""Prompts as callers give them, a text or token ids in one of many forms, read as a list of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from paceline.core.errors import InputError, blame
from paceline.core.numbers import shown, token_ids, whole_number
from paceline.core.vocabulary import Vocabulary
from paceline.vocabularies.length import most_tokens


class Array(Protocol):
    """A numpy array, a torch tensor, or another type that turns into nested lists of Python's numbers."""

    def tolist(self) -> Any:
        """Return the values as nested lists, or one number where there are no dimensions."""
        ...


Prompt: TypeAlias = str | Sequence[int] | Sequence[Sequence[int]] | Array
"""A text, token ids, or one row of token ids, ``[1, num_tokens]``, as the tokenizers of transformers return them."""


class Tokenizer(Protocol):
    """The part of a vocabulary that reads texts."""

    def tokenize(self, text: str) -> list[int]: ...


@blame("prompt")
def read_prompt(prompt: Prompt, vocabulary: Tokenizer) -> list[int]:
    """Return the token ids of a prompt: a text, or ids ``[num_tokens]`` or ``[1, num_tokens]`` in any container.

    Raises ``InputError`` for anything else, such as several rows, floats, texts in a list or bytes.
    """
    if isinstance(prompt, str):
        return vocabulary.tokenize(prompt)
    row = _only_row(_as_items(prompt))
    if any(map(_is_row, row)):
        raise InputError("the prompt has rows within rows; give token ids as [num_tokens] or [1, num_tokens]")
    return [whole_number(item, f"item {place} of the prompt") for place, item in enumerate(row)]


@blame("prediction")
def read_prediction(prediction: object, vocabulary: Vocabulary, context_length: int) -> tuple[int, ...]:
    """Return the token ids of what an answer is expected to repeat: a text, which has no control tokens, or ids.

    Raises ``InputError`` where there are none, or more than an answer can have.
    """
    is_least = False
    if not isinstance(prediction, str):
        found = token_ids(_as_lists(prediction), "the prediction")
        count = len(found)
    elif most_tokens(prediction) > context_length < (count := vocabulary.fewest_tokens(prediction)):
        # A text of megabytes would take seconds.
        is_least = True
    else:
        found = tuple(vocabulary.tokenize(prediction, add_special=False))
        count = len(found)
    if count > context_length:
        raise InputError(
            f"the prediction has {'at least ' if is_least else ''}{count} tokens, and no answer has more than the "
            f"{context_length} that the context holds: shorten it, or leave it out"
        )
    if not count:
        raise InputError("the prediction is empty: give what the answer is expected to repeat, or leave it out")
    return found


def _as_items(prompt: object) -> list[Any]:
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        raise InputError("the prompt is bytes; decode them into a text, or give token ids")
    if isinstance(prompt, Mapping):
        keys = ", ".join(map(str, list(prompt)[:3]))
        raise InputError(f"the prompt is a mapping of {keys}; give a text or token ids, such as its 'input_ids'")
    items = _as_lists(prompt)
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise InputError(f"the prompt is {shown(prompt)}; give a text or a sequence of token ids")
    return [_as_lists(item) for item in items]


def _only_row(items: list[Any]) -> list[Any]:
    """Return the row of token ids, which may be the only one in a batch."""
    if not items or not _is_row(items[0]):
        return items
    if len(items) > 1:
        raise InputError(f"the prompt has {len(items)} rows; give one row of token ids for each call")
    return [_as_lists(item) for item in items[0]]


def _is_row(item: object) -> bool:
    return isinstance(item, (list, tuple))


def _as_lists(value: Any) -> Any:
    """Return an array, a tensor or a number of either as Python's lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
