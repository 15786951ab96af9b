"""What is said of two vocabularies."""

from __future__ import annotations

from paceline.engines.scripted import ScriptedVocabulary
from paceline.lab.doctor.vocabulary_fit import compare_vocabularies
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
