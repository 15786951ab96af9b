from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.scripted import ScriptedVocabulary
from paceline.vocabularies.alignment import Alignment
from paceline.vocabularies.mapping import TokenMapping
from tests.drafters.segmentations import random_pieces, segment

WORDS = ("the ", "quick ", "fox", " jumps", "\n", "na\u00efve ", "\U0001f600")
LETTERS = sorted({character.encode() for word in WORDS for character in word})


def alignment_of(
    target: list[bytes], draft: list[bytes], *, ends: tuple[int, ...] = (), draft_ends: tuple[int, ...] = ()
) -> Alignment:
    return Alignment(TokenMapping(ScriptedVocabulary(target, ends), ScriptedVocabulary(draft, draft_ends)))


def spelled(alignment: Alignment) -> bytes:
    vocabulary = alignment._mapping.draft.vocabulary
    return b"".join(vocabulary.token_bytes(token_id) for token_id in alignment.draft_ids)


@given(seed=st.integers(0, 2**32), words=st.lists(st.sampled_from(WORDS), max_size=120))
def test_a_text_that_grows_is_read_as_it_is_at_once(seed: int, words: list[str]) -> None:
    """The end is tokenized anew only, and what is said to stand does."""
    rng = random.Random(seed)
    target = [*LETTERS, b"the quick", b"x jump", b"qui", b"fox"]
    draft = [*LETTERS, b"quick fox", b"ck ", b"fo", b" jumps", b"\nna", b"k fox j"]
    alignment, at_once = alignment_of(target, draft), alignment_of(target, draft)
    text = "".join(words).encode()
    token_ids = segment(text, ScriptedVocabulary(target))
    read = 0
    while read < len(token_ids):
        before = list(alignment.draft_ids)
        read += rng.randint(1, 9)
        stands = alignment.follow(token_ids[:read])
        assert alignment.draft_ids[:stands] == before[:stands]
        assert stands == len(before) or alignment.draft_ids[stands : stands + 1] != before[stands : stands + 1]
        assert alignment.is_ready
        said = b"".join(target[token_id] for token_id in token_ids[:read])
        assert spelled(alignment) == said
        assert len(alignment._tail) <= 64 + 256 + max(map(len, draft)) + 9 * max(map(len, target))
    at_once.follow(token_ids)
    assert alignment.draft_ids == at_once.draft_ids


@given(seed=st.integers(0, 2**32))
def test_whatever_is_said_the_draft_reads_a_part_of_it(seed: int) -> None:
    """Bytes that are no text, and those that the draft has no token for, are left out; nothing is made up."""
    rng = random.Random(seed)
    target, draft = random_pieces(rng, 12), random_pieces(rng, 12)
    alignment = alignment_of(target, draft, ends=(0,), draft_ends=(0,))
    token_ids: list[int] = []
    for _ in range(30):
        token_ids += rng.choices(range(len(target)), k=rng.randint(1, 5))
        before = list(alignment.draft_ids)
        stands = alignment.follow(token_ids)
        assert alignment.draft_ids[:stands] == before[:stands]
        said = b"".join(b"\0" if token_id == 0 else target[token_id] for token_id in token_ids)
        heard = spelled(alignment)
        rest = iter(said)
        assert all(byte in rest for byte in heard), "in the order in which it was said"
        word = alignment.cut_word()
        if word is not None:
            assert said.endswith(word.before + word.spelled)
            assert b"".join(target[token_id] for token_id in word.target_ids) == word.before + word.spelled
            assert token_ids[-len(word.target_ids) :] == list(word.target_ids)


def test_a_character_is_waited_for_and_what_is_none_is_not() -> None:
    alignment = alignment_of([b"a", b"\xc3", b"\xa9", b"\xff"], [b"a", "\u00e9".encode()])
    said = [0, 1, 2, 3, 0, 0]
    found = []
    for length in (2, 3, 4, 6):
        alignment.follow(said[:length])
        found.append((alignment.is_ready, list(alignment.draft_ids)))
    # Half a character; the whole of it; a byte of none, of which nothing can be read; and then it goes on.
    assert found == [(False, []), (True, [0, 1]), (False, [0, 1]), (True, [0, 1, 0, 0])]


def test_control_tokens_part_what_is_read() -> None:
    alignment = alignment_of([b"a", b"b", b"<end>", b""], [b"ab", b"a", b"b", b"<end>"], ends=(2,), draft_ends=(3,))
    alignment.follow([0, 2, 1, 3, 0, 1])
    assert alignment.draft_ids == [1, 3, 2, 0], "nothing is merged across them, and padding is nothing"


def test_a_cut_word_is_told_with_what_the_target_said_of_it() -> None:
    alignment = alignment_of([b"w", b"or", b"l", b"d", b" "], [b"wor", b"world", b"w", b"o", b"r", b"l", b"d", b" "])
    alignment.follow([4, 0, 1])
    word = alignment.cut_word()
    assert word is not None
    assert (word.spelled, word.before, list(word.target_ids)) == (b"wor", b"", [0, 1])
    # A token of the draft that begins within one of the target's is known from where that begins.
    alignment = alignment_of([b"ab", b"c"], [b"a", b"bc", b"b", b"c"])
    alignment.follow([0])
    word = alignment.cut_word()
    assert word is not None
    assert (word.spelled, word.before, list(word.target_ids)) == (b"b", b"a", [0])


class SpacePutting(ScriptedVocabulary):
    """Puts a space before every text, and a token before those that are asked for it."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        opening = [min(self.end_ids)] if add_special else []
        return opening + (super().tokenize(" " + text) if text else [])


@pytest.mark.parametrize("ours", [ScriptedVocabulary, SpacePutting])
@pytest.mark.parametrize("its", [ScriptedVocabulary, SpacePutting])
def test_the_space_and_the_token_before_a_text_are_each_ones_own(
    ours: type[ScriptedVocabulary], its: type[ScriptedVocabulary]
) -> None:
    pieces = [b"a", b" ", b" a", b"b", b"\n", b"<s>"]
    target, draft = ours(pieces, [5]), its(pieces, [5])
    alignment = Alignment(TokenMapping(target, draft))
    token_ids = target.tokenize("a" + "b" * 200)
    alignment.follow(token_ids[:-100])
    alignment.follow(token_ids)
    assert alignment.draft_ids == draft.tokenize("a" + "b" * 200)


def test_a_space_that_belongs_to_the_next_word_is_held_back() -> None:
    pieces = [b"a", b"b", b"\n", b" ", b" b", b"  "]
    alignment = alignment_of([b"a", b"b", b"\n", b" ", b"  "], pieces)
    assert alignment._mapping.draft.joins_space is False, "it has a token of two spaces, and takes that"
    alignment = alignment_of([b"a", b"b", b"\n", b" ", b"  "], pieces[:-1])
    alignment.follow([0, 2, 4])
    assert alignment.is_ready
    assert (alignment.draft_ids, alignment.held_back) == ([0, 2, 3], b" ")
    word = alignment.cut_word()
    assert word is not None
    assert word.draft_id is None
    assert (word.spelled, word.before, list(word.target_ids)) == (b" ", b" ", [4])
    assert alignment.follow([0, 2, 4, 1]) == 3
    assert (alignment.draft_ids, alignment.held_back) == ([0, 2, 3, 4], b"")
