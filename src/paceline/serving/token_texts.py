"""Token ids as text, as ``/detokenize`` and answers that repeat their prompt have it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Final

from paceline.core.numbers import shown
from paceline.engines.base import Vocabulary
from paceline.serving.fields import FieldError

_NONE: Final = object()

AT_ONCE: Final = 1 << 12
"""Tokens that are spelled or written at once: no other thread runs meanwhile, for about a millisecond."""


def text_of(token_ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """Return the text of tokens, control tokens spelled out; bytes that are no character become U+FFFD."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    texts = [
        decode(b"".join(piece_of(token_id, vocabulary) for token_id in token_ids[start : start + AT_ONCE]))
        for start in range(0, len(token_ids), AT_ONCE)
    ]
    return "".join([*texts, decode(b"", True)])


def piece_of(token_id: int, vocabulary: Vocabulary) -> bytes:
    """Return what a token adds to a text, or the name of a control token."""
    return vocabulary.token_bytes(token_id) or vocabulary.token_spelling(token_id) or b""


def read_ids(given: Any, name: str) -> list[int]:
    """Return token ids as a request has them, where 3.0 is 3: clients written in JavaScript have one kind of number.

    Args:
        given: a field of the request.
        name: of the field.

    Raises:
        FieldError: it is something else.
    """
    if not isinstance(given, list):
        raise FieldError(name, f"{name} is {shown(given)}: give a list of token ids")
    token_ids = [int(item) if isinstance(item, float) and item.is_integer() else item for item in given]
    wrong = next((item for item in token_ids if not isinstance(item, int) or isinstance(item, bool)), _NONE)
    if wrong is not _NONE:
        raise FieldError(name, f"{name} has {shown(wrong)}: give token ids alone")
    return token_ids


def check_ids(token_ids: Sequence[int], vocabulary: Vocabulary, name: str) -> None:
    """Refuse ids that the vocabulary does not have.

    Raises:
        FieldError: one of them is unknown.
    """
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary.size:
            raise FieldError(name, f"token id {shown(token_id)} is not in the vocabulary of {vocabulary.size}")
