"""Bytes to tokens, only where the tokens spell these very bytes.

Tokenizers change texts: they compose characters, put a space before a text, lower its case. Whoever needs tokens of a
text that is there already can take none of that, so what comes back is compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from paceline.core.vocabulary import Vocabulary

_LONGEST_CHARACTER: Final = 4
"""Bytes of the longest character in UTF-8."""


class ExactTokenizer:
    """Turns bytes into the tokens of one vocabulary.

    Attributes:
        vocabulary: as given.
        adds_space: whether a text's first token has a space in front that the text has not, as SentencePiece's has.
        opening_ids: what the model wants before every text.
        joins_space: whether the last of several spaces is part of the word that follows, as most byte-level tokenizers
            have it. A text that ends with a space is none that such a model knows.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.adds_space = self._spelled(self._encode("a")).startswith(b" ")
        try:
            self.opening_ids: tuple[int, ...] = tuple(vocabulary.tokenize("", add_special=True))
        except PacelineError:
            self.opening_ids = ()
        indented = self.continuation(b"a\n  b") or [0]
        self.joins_space = vocabulary.token_bytes(indented[-1]) == b" b"

    def continuation(self, data: bytes) -> list[int] | None:
        """Return the tokens of bytes that follow a text; ``None`` where no tokens of these bytes are known."""
        text = _decoded(data)
        if text is None:
            return None
        if not self.adds_space:
            return self._checked(self._encode(text), data)
        # The space goes before a line break, which is taken off again; a word's own space may stand for it.
        after_break = self._without(self._encode("\n" + text), b" \n")
        checked = None if after_break is None else self._checked(after_break, data)
        if checked is None and text.startswith(" "):
            checked = self._checked(self._encode(text[1:]), data)
        return checked

    def opening(self, data: bytes) -> list[int] | None:
        """Return the tokens of bytes that begin a text, in front of which a tokenizer may put a space."""
        text = _decoded(data)
        if text is None:
            return None
        if not self.adds_space:
            return self._checked(self._encode(text), data)
        return self._checked(self._encode(text), b" " + data)

    def _encode(self, text: str) -> list[int]:
        try:
            return self.vocabulary.tokenize(text, add_special=False)
        except PacelineError:
            return []

    def _spelled(self, token_ids: list[int]) -> bytes:
        return b"".join(map(self.vocabulary.token_bytes, token_ids))

    def _checked(self, token_ids: list[int], data: bytes) -> list[int] | None:
        return token_ids if self._spelled(token_ids) == data else None

    def _without(self, token_ids: list[int], start: bytes) -> list[int] | None:
        """Return what follows the tokens that spell ``start``; ``None`` where no token ends with it."""
        spelled = b""
        for index, token_id in enumerate(token_ids):
            spelled += self.vocabulary.token_bytes(token_id)
            if spelled == start:
                return token_ids[index + 1 :]
            if not start.startswith(spelled):
                break
        return None


def whole_characters(data: bytes) -> bytes:
    """Return bytes without the beginning of a character at their end, if they end with one."""
    for size in range(1, min(_LONGEST_CHARACTER, len(data) + 1)):
        lead = data[-size]
        if lead & 0xC0 == 0x80:
            continue
        length = 2 if lead & 0xE0 == 0xC0 else 3 if lead & 0xF0 == 0xE0 else 4 if lead & 0xF8 == 0xF0 else 1
        return data[:-size] if length > size else data
    return data


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
