"""Token ids as text, as ``/detokenize`` and answers that repeat their prompt have it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.numbers import shown
from paceline.engines.base import Vocabulary
from paceline.serving.fields import FieldError


def text_of(token_ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """Return the text of tokens, control tokens spelled out; bytes that are no character become U+FFFD."""
    return b"".join(piece_of(token_id, vocabulary) for token_id in token_ids).decode("utf-8", "replace")


def piece_of(token_id: int, vocabulary: Vocabulary) -> bytes:
    """Return what a token adds to a text, or the name of a control token."""
    return vocabulary.token_bytes(token_id) or vocabulary.token_spelling(token_id) or b""


def check_ids(token_ids: Sequence[int], vocabulary: Vocabulary, name: str) -> None:
    """Refuse ids that the vocabulary does not have.

    Raises:
        FieldError: one of them is unknown.
    """
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary.size:
            raise FieldError(name, f"token id {shown(token_id)} is not in the vocabulary of {vocabulary.size}")
