"""What is said of two vocabularies."""

from __future__ import annotations

import pytest

from paceline.core.vocabulary import Vocabulary
from paceline.engines.scripted import ScriptedVocabulary
from paceline.lab.intervals import ALL
from paceline.lab.vocabulary_fit import align_tokenizers, compare_vocabularies, token_ends
from tests.lab.doctor.helpers import LETTERS, TEXTS


def test_one_vocabulary_fits_as_it_is() -> None:
    fitting = compare_vocabularies(ScriptedVocabulary(LETTERS), ScriptedVocabulary(LETTERS), TEXTS)
    assert (fitting.words, fitting.refusal, fitting.alignment) == ("fits as it is", None, None)
    assert fitting.fits
    assert not fitting.warnings


def test_unused_ids_are_counted() -> None:
    target = ScriptedVocabulary([*LETTERS, *(b"<unused%d>" % number for number in range(9))])
    draft = ScriptedVocabulary([*LETTERS, *(b"<unused%d>" % (number + 1) for number in range(9))])
    assert compare_vocabularies(target, draft, TEXTS).words == "fits but for 9 unused ids"


def test_ids_of_text_that_differ_are_counted() -> None:
    target = ScriptedVocabulary([*LETTERS, b"ab", b"<unused1>"])
    draft = ScriptedVocabulary([*LETTERS, b"cd", b"<unused2>"])
    assert compare_vocabularies(target, draft, TEXTS).words == "fits but for 2 ids, 1 of them of text"


def test_another_vocabulary_is_compared_on_text() -> None:
    fitting = compare_vocabularies(ScriptedVocabulary(LETTERS), ScriptedVocabulary(LETTERS[::-1]), TEXTS)
    assert fitting.words.startswith("another vocabulary: 100% of tokens are one of the draft's on text")
    assert fitting.refusal is not None
    assert not fitting.fits


def test_a_tokenizer_that_cannot_spell_the_texts_does_not_fit() -> None:
    fitting = compare_vocabularies(ScriptedVocabulary(LETTERS), ScriptedVocabulary([b"1", b"2"]), TEXTS)
    assert fitting.words == "does not fit: 3 of 3 texts do not come back from its tokenizer"


def test_ends_and_control_tokens_that_differ_are_warned_of() -> None:
    target = ScriptedVocabulary([*LETTERS, b"<|im_end|>", b"<|a|>"], end_ids=[27])
    draft = ScriptedVocabulary([*LETTERS, b"<|eot|>", b"<|a|>"], end_ids=[27, 28])
    fitting = compare_vocabularies(target, draft, TEXTS)
    assert fitting.fits
    assert fitting.warnings == (
        "token 27 is '<|im_end|>' to the target and '<|eot|>' to the draft: the draft takes one for the other",
        "answers end at '<|im_end|>' for the target and at '<|eot|>', '<|a|>' for the draft",
    )


def test_false_ends_are_named() -> None:
    class Vocabulary(ScriptedVocabulary):
        text_end_ids = frozenset([26])

    (warning,) = compare_vocabularies(Vocabulary(LETTERS), ScriptedVocabulary(LETTERS), TEXTS).warnings
    assert warning == "token 26, ' ', is text in the target's file, and llama.cpp ends answers at it"


# --- two tokenizers over one text ------------------------------------------------------------------------------------

SHORT = [bytes([letter]) for letter in b"abcdefgh "]


def of(*pieces: bytes) -> Vocabulary:
    return ScriptedVocabulary([*SHORT, *pieces])


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
        super().__init__(SHORT)
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
