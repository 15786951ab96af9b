"""Plain text that spells a control token, in vocabularies whose merges lead to that token.

A tokenizer that is told to read control tokens as plain text does not look for them. SentencePiece's merges look up
whatever two pieces spell together, though, and where ``<s`` is a token, ``<s`` and ``>`` make the token that begins
every text. Such a token is replaced by those of its characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from paceline.core.errors import InputError

_BEGINNING: Final = 3
"""Characters by which a spelling is looked for; few texts have them that have none."""
_WINDOW: Final = 1 << 15
"""Characters of a text that are searched at once: no other thread runs meanwhile, for about a millisecond."""


def spell_out(
    token_ids: Sequence[int],
    text: str,
    control_ids: Collection[int],
    unknown_ids: Collection[int],
    spelling_of: Callable[[int], bytes],
    single_ids: Callable[[], Mapping[bytes, int]],
) -> list[int]:
    """Return the tokens of a plain text with those of characters in the place of control tokens.

    Args:
        token_ids: of the text.
        text: the text.
        control_ids: tokens that are not to be there, or those of ``token_ids`` that are among them.
        unknown_ids: those of them that a tokenizer has for what it does not know. They are left, unless the text spells
            them.
        spelling_of: returns the text of a control token.
        single_ids: returns the ordinary tokens that are one character or one byte, by their bytes.

    Raises:
        InputError: the vocabulary has no other tokens for a control token's text.
    """
    spelled = {}
    for token_id in set(token_ids).intersection(control_ids):
        spelling = spelling_of(token_id).decode("utf-8", "replace")
        # SentencePiece reads a space as the first of these.
        with_spaces = spelling.replace("\u2581", " ")
        if spelling not in text and with_spaces in text:
            spelling = with_spaces
        if spelling in text or token_id not in unknown_ids:
            spelled[token_id] = _letters(spelling, single_ids())
    if not spelled:
        return list(token_ids)
    return [part for token_id in token_ids for part in spelled.get(token_id, (token_id,))]


def single_characters(
    token_ids: Collection[int], bytes_of: Callable[[int], bytes | None], control_ids: Collection[int]
) -> dict[bytes, int]:
    """Return the ordinary tokens that are one character or one byte, by their bytes: of several the first."""
    found: dict[bytes, int] = {}
    for token_id in token_ids:
        piece = bytes_of(token_id)
        if piece and len(piece) <= 4 and token_id not in control_ids and len(piece.decode("utf-8", "ignore")) <= 1:
            found.setdefault(piece, token_id)
    return found


def _letters(spelling: str, singles: Mapping[bytes, int]) -> list[int]:
    letters: list[int] = []
    for character in spelling:
        encoded = character.encode()
        whole = singles.get(encoded)
        parts = [whole] if whole is not None else [singles.get(bytes([byte])) for byte in encoded]
        if None in parts:
            raise InputError(
                f"{spelling!r} is a control token of this model, and its vocabulary has no "
                "other way to spell it: leave it out of the text"
            )
        letters += [part for part in parts if part is not None]
    return letters


class Spellings:
    """What tokens are spelled like, to be found in texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        beginnings: dict[str, set[str]] = {}
        for text in self._texts:
            beginnings.setdefault(text[0], set()).add(text[1:_BEGINNING])
        # Of what follows the first character nothing is used up: the next spelling may begin there.
        self._beginning = re.compile(
            "|".join(
                f"{re.escape(first)}(?={'|'.join(map(re.escape, sorted(rest)))})"
                for first, rest in sorted(beginnings.items())
            )
        )

    def in_text(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where the text has a spelling, overlapping ones too: by start, the longest first."""
        if not self._texts:
            return
        for window in range(0, len(text), _WINDOW):
            for match in self._beginning.finditer(text, window, window + _WINDOW + _BEGINNING):
                start = match.start()
                if start >= window + _WINDOW:
                    break
                for end in (start + length for length in self._lengths):
                    if end <= len(text) and text[start:end] in self._texts:
                        yield start, end
