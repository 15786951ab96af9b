from __future__ import annotations

import pytest

from paceline.core.errors import InputError
from paceline.engines.scripted import ScriptedVocabulary
from paceline.vocabularies.exact_tokens import ExactTokenizer, whole_characters

PIECES = [b"a", b"b", b"ab", b" ", b" a", b"\n", "\u00e9".encode(), b"\xc3", b"\xa9", b"\n\n"]


class SpacePutting(ScriptedVocabulary):
    """Puts a space before every text, as SentencePiece does, and one token before those that are asked for it."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        opening = [len(PIECES)] if add_special else []
        return opening + (super().tokenize(" " + text) if text else [])


class Composing(ScriptedVocabulary):
    """Changes texts: it writes lower case."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return super().tokenize(text.lower())


def test_a_text_comes_back_or_there_are_no_tokens() -> None:
    exact = ExactTokenizer(ScriptedVocabulary(PIECES))
    assert not exact.adds_space
    assert exact.opening_ids == ()
    assert exact.continuation(b"ab a") == exact.opening(b"ab a") == [2, 4]
    assert exact.continuation(b"") == []
    assert exact.continuation(b"abc") is None, "no token of this byte"
    assert exact.continuation(b"a\xc3") is None, "half a character"
    changed = ExactTokenizer(Composing(PIECES))
    assert changed.continuation(b"ab") == [2]
    assert changed.continuation(b"AB") is None


def test_a_space_before_texts_is_no_part_of_what_goes_on() -> None:
    exact = ExactTokenizer(SpacePutting([*PIECES, b""], [len(PIECES)]))
    assert exact.adds_space
    assert exact.opening_ids == (len(PIECES),)
    assert exact.opening(b"a") == [4]
    assert exact.continuation(b"a") == [0]
    assert exact.continuation(b" a") == [4]
    # The break that is put before it would be merged, so its own space has to do where there is one.
    assert exact.continuation(b"\na") is None


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (b"", b""),
        (b"ab", b"ab"),
        ("\u00e9".encode(), "\u00e9".encode()),
        (b"a\xc3", b"a"),
        ("\U0001f600".encode(), "\U0001f600".encode()),
        (b"a\xf0", b"a"),
        (b"a\xf0\x9f", b"a"),
        (b"a\xf0\x9f\x98", b"a"),
        (b"\xe2\x82", b""),
        (b"a\xa9", b"a\xa9"),
        (b"a\xff", b"a\xff"),
        (b"\xa9\xa9\xa9\xa9", b"\xa9\xa9\xa9\xa9"),
    ],
)
def test_the_beginning_of_a_character_is_told_from_what_is_none(data: bytes, whole: bytes) -> None:
    assert whole_characters(data) == whole


def test_a_vocabulary_without_a_tokenizer_has_no_tokens_of_anything() -> None:
    class Untold(ScriptedVocabulary):
        def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            raise InputError("there is none")

    exact = ExactTokenizer(Untold(PIECES))
    assert exact.opening_ids == ()
    assert exact.continuation(b"a") is None
