"""llguidance, and a model's vocabulary handed to it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from paceline.core.errors import CapabilityError, InputError
from paceline.core.extras import missing
from paceline.core.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_SPECIAL = b"\xff"
"""What llguidance has before the name of a token that is no text; no UTF-8 has the byte."""

_LONGEST = 2_000
"""Characters that are tokenized at once."""

_OPENINGS = ("\x02", "\n", ".", "a")
"""Texts to put before another, so that a tokenizer adds a space to these and not to the other."""


def import_llguidance() -> ModuleType:
    """Import an optional package when it is first needed."""
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise missing("keeping to a grammar or a schema", error.name, "constraints") from error


class TokenTable:
    """What llguidance asks of a tokenizer: the bytes of each token, and the tokens of a text.

    Raises:
        CapabilityError: the model has no end-of-generation token, or its tokenizer tells no bytes.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.end_ids:
            raise CapabilityError(
                "this model has no end-of-generation token, so an answer under a grammar could not end: "
                "leave the grammar out, or use a model that has one"
            )
        self.eos_token_id = min(vocabulary.end_ids)
        self.bos_token_id = None
        no_text = vocabulary.control_ids | vocabulary.end_ids
        self.special_token_ids = sorted(no_text)
        self.tokens = [_token_bytes(vocabulary, token_id, token_id in no_text) for token_id in range(vocabulary.size)]
        if all(piece.startswith(_SPECIAL) for piece in self.tokens):
            raise CapabilityError("the tokenizer of this model does not tell what its tokens spell: leave grammars out")
        self._vocabulary = vocabulary
        self._opening = _find_opening(vocabulary)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that goes on: none for a space that the tokenizer puts before texts."""
        # The rest of a longer one could be no draft soon.
        text = text[:_LONGEST]
        try:
            if not self._opening:
                return self._vocabulary.tokenize(text, add_special=False)
            before = self._vocabulary.tokenize(self._opening, add_special=False)
            both = self._vocabulary.tokenize(self._opening + text, add_special=False)
        except InputError:
            return []
        return both[len(before) :] if both[: len(before)] == before else []


def build_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Return llguidance's form of a vocabulary, which takes 0.1 s for 50,000 tokens.

    Raises:
        CapabilityError: llguidance is not installed, or no answer in this vocabulary could keep to a grammar.
    """
    llguidance = import_llguidance()
    table = TokenTable(vocabulary)
    tokenizer: LLTokenizer = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(table), eos_token=sorted(vocabulary.end_ids)
    )
    return tokenizer


def _token_bytes(vocabulary: Vocabulary, token_id: int, no_text: bool) -> bytes:
    piece = b"" if no_text else vocabulary.token_bytes(token_id)
    if piece:
        return piece
    return _SPECIAL + ((vocabulary.token_spelling(token_id) or b"") or b"<unused %d>" % token_id)


def _find_opening(vocabulary: Vocabulary) -> str:
    """Return what to put before a text, so that it begins without a space of the tokenizer's own."""
    spelled = _make_speller(vocabulary)
    if spelled("a") == b"a":
        return ""
    for opening in _OPENINGS:
        before = vocabulary.tokenize(opening, add_special=False)
        both = vocabulary.tokenize(opening + "a", add_special=False)
        if both[: len(before)] == before and b"".join(map(vocabulary.token_bytes, both[len(before) :])) == b"a":
            return opening
    return ""


def _make_speller(vocabulary: Vocabulary) -> Callable[[str], bytes]:
    def spelled(text: str) -> bytes:
        try:
            return b"".join(map(vocabulary.token_bytes, vocabulary.tokenize(text, add_special=False)))
        except InputError:
            return text.encode()

    return spelled
