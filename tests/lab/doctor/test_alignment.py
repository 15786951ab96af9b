"""Two tokenizers over one text."""

from __future__ import annotations

import pytest

from paceline.core.vocabulary import Vocabulary
from paceline.engines.scripted import ScriptedVocabulary
from paceline.lab.doctor.alignment import align_tokenizers, token_ends
from paceline.lab.doctor.measures import ALL

LETTERS = [bytes([letter]) for letter in b"abcdefgh "]


def of(*pieces: bytes) -> Vocabulary:
    return ScriptedVocabulary([*LETTERS, *pieces])


def test_by_hand() -> None:
    """``ab|cd|e|f`` beside ``abc|d|ef``: no token is one of the other's, and ends meet after ``d`` and at the end."""
    alignment = align_tokenizers(of(b"ab", b"cd"), of(b"abc", b"ef"), {"code": ["abcdef"]})
    assert token_ends(of(b"ab", b"cd"), "abcdef") == [2, 4, 5, 6]
    assert alignment.one["code"].value == 0.0
    assert alignment.ends["code"].value == 2 / 4
    assert alignment.draft_tokens["code"].value == 3 / 4


def test_kinds_are_pooled_by_tokens() -> None:
    alignment = align_tokenizers(of(b"ab"), of(), {"code": ["abab", "ab"], "logs": ["c" * 9]})
    assert alignment.one["code"].value == 0.0
    assert alignment.one["logs"].value == 1.0
    assert alignment.one_share == pytest.approx(9 / 12)
    assert alignment.ends[ALL].value == 1.0
    assert (alignment.texts, alignment.left_out) == (3, 0)


def test_one_tokenizer_lines_up_with_itself() -> None:
    alignment = align_tokenizers(of(b"ab"), of(b"ab"), {"code": ["abc ab"]})
    assert (alignment.one_share, alignment.ends[ALL].value) == (1.0, 1.0)


class Changed(ScriptedVocabulary):
    """A tokenizer that puts a space before a text, or reads one letter as another."""

    def __init__(self, read: str, written: str) -> None:
        super().__init__(LETTERS)
        self._read, self._written = read, written

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return super().tokenize(text.replace(self._read, self._written) if self._read else self._written + text)


def test_the_space_before_a_text_is_no_part_of_it() -> None:
    assert token_ends(Changed("", " "), "abc") == [1, 2, 3]
    assert align_tokenizers(of(), Changed("", " "), {"code": ["abc"]}).one_share == 1.0


def test_texts_that_do_not_come_back_are_left_out() -> None:
    assert token_ends(Changed("a", "b"), "abc") is None
    assert token_ends(of(), "xyz") is None, "it cannot spell it"
    alignment = align_tokenizers(of(), Changed("a", "b"), {"code": ["abc", "cde"]})
    assert (alignment.left_out, alignment.texts, alignment.one["code"].trials) == (1, 2, 3)
    assert align_tokenizers(of(), of(), {"code": ["xyz"]}).one_share is None
