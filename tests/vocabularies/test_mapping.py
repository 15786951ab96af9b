from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InputError, VocabularyMismatchError
from paceline.engines.scripted import ScriptedVocabulary
from paceline.vocabularies.exact_tokens import ExactTokenizer
from paceline.vocabularies.mapping import TokenMapping, check_translation

TEXT = sorted({character.encode() for character in "The quick brown fox, 1234; na\u00efve.\n"})


class WithControl(ScriptedVocabulary):
    """Has control tokens that end nothing, beside those that do."""

    def __init__(self, pieces: Sequence[bytes], control: Sequence[bytes], ends: Sequence[bytes] = ()) -> None:
        every = [*pieces, *control, *ends]
        super().__init__(every, range(len(pieces), len(every)))
        self._control = self.end_ids
        self.end_ids = frozenset(range(len(pieces) + len(control), len(every)))

    @property
    def control_ids(self) -> frozenset[int]:
        return self._control


def mapped(target: Sequence[bytes], draft: Sequence[bytes]) -> TokenMapping:
    return TokenMapping(ScriptedVocabulary(target), ScriptedVocabulary(draft))


def test_a_token_is_one_of_the_targets_or_several_or_none() -> None:
    mapping = mapped([b"a", b"b", b"ab", b"c"], [b"ab", b"abc", b"ba", b"d", b"", b"cd"])
    assert [mapping.target_tokens(token_id) for token_id in range(6)] == [(2,), (2, 3), (1, 0), (), (), ()]
    assert mapping.num_shared == 1


def test_of_ids_with_the_same_bytes_it_is_the_one_that_the_tokenizer_says() -> None:
    class Second(ScriptedVocabulary):
        def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            return [{0: 2, 1: 3}.get(token_id, token_id) for token_id in super().tokenize(text)]

    mapping = TokenMapping(Second([b"1", b"\n", b"1", b"\n", b"x"]), ScriptedVocabulary([b"\n", b"1", b"x"]))
    assert [mapping.target_tokens(token_id) for token_id in range(3)] == [(3,), (2,), (4,)]
    # Where it says neither, any will do.
    assert mapped([b"1", b"1"], [b"1"]).target_tokens(0) in ((0,), (1,))


def test_a_row_weighs_first_tokens_by_the_sum_of_what_begins_with_them() -> None:
    mapping = mapped([b"a", b"b", b"ab", b"z"], [b"a", b"aa", b"b", b"ba", b"?"])
    row = mapping.project(np.log(np.array([0.2, 0.1, 0.25, 0.05, 0.4])))
    assert row is not None
    np.testing.assert_allclose(np.exp(row.logits), [0.3, 0.3, 0.0, 0.0], atol=1e-12)
    assert row.likeliest(0) == 0
    assert row.likeliest(1) == 2
    assert mapping.project(np.array([-30.0, -30.0, -30.0, -30.0, 0.0])) is None, "nothing likely is a token"
    # What is far behind is left out, however much of it there is.
    row = mapping.project(np.array([0.0, -9.0, -9.0, -9.0, -9.0]))
    assert row is not None
    assert list(row.logits) == [0.0, -np.inf, -np.inf, -np.inf]


def test_an_indentation_weighs_for_the_one_that_has_the_next_words_space_too() -> None:
    draft = [b"a", b"b", b"\n", b" ", b"  ", b" b"]
    # Its tokenizer leaves the last space to the word; scripted tokenizers take the longest token.
    mapping = mapped([b"a", b"b", b"\n", b" ", b"  ", b"   "], draft)
    mapping.draft.joins_space = True
    row = np.full(len(draft), -np.inf, dtype=np.float32)
    row[4] = 1.0
    projected = mapping.project(row)
    assert projected is not None
    assert int(projected.logits.argmax()) == 5
    # What it spells is as it was.
    assert mapping.target_tokens(4) == (4,)


def test_only_the_likeliest_tokens_of_a_wide_row_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.vocabularies.mapping._MAX_TRANSLATED", 3)
    mapping = mapped([b"a", b"b", b"c", b"d", b"e"], [b"a", b"b", b"c", b"d", b"e"])
    row = mapping.project(np.array([1.0, 3.0, 2.0, 4.0, 0.0]))
    assert row is not None
    assert list(np.flatnonzero(np.isfinite(row.logits))) == [1, 2, 3]


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=30),
    start=st.binary(max_size=3),
    ends_high=st.booleans(),
)
def test_extensions_are_the_longer_tokens_that_begin_so(pieces: list[bytes], start: bytes, ends_high: bool) -> None:
    if ends_high:
        pieces, start = [b"\xff" + piece for piece in pieces], b"\xff" + start
    mapping = mapped([b"a"], pieces)
    expected = [i for i, piece in enumerate(pieces) if piece.startswith(start) and len(piece) > len(start)]
    assert sorted(mapping.extensions(start)) == expected


def test_control_tokens_are_matched_by_text_then_by_role_and_else_by_ending() -> None:
    target = WithControl([b"a"], [b"<start_of_turn>", b"<tool>", b"<other>"], [b"<end_of_turn>", b"<eos>"])
    draft = WithControl([b"b", b"a"], [b"<|im_start|>", b"<tool>"], [b"<|endoftext|>", b"<|im_end|>"])
    mapping = TokenMapping(target, draft)
    assert {i: mapping.control_id(i) for i in sorted(target.control_ids)} == {1: 2, 2: 3, 3: None, 4: 5, 5: 4}
    # Drafts of them are the target's.
    assert [mapping.target_tokens(i) for i in (2, 3, 4, 5)] == [(1,), (2,), (5,), (4,)]


def test_what_a_user_asks_for_goes_first() -> None:
    target = WithControl([b"a"], [b"<start_of_turn>", b"<user>"])
    draft = WithControl([b"a"], [b"<|im_start|>", b"<|u|>"])
    mapping = TokenMapping(target, draft, [("<|u|>", "<start_of_turn>")])
    assert mapping.control_id(1) == 2
    assert mapping.target_tokens(2) == (1,)
    for pair, says in (
        (("<|no|>", "<user>"), "`DraftOptions.token_map` <|no|>=<user>: the draft has no token '<|no|>'"),
        (("<|u|>", "<no>"), "`DraftOptions.token_map` <|u|>=<no>: the target has no token '<no>'"),
        (("a", "a"), "`DraftOptions.token_map` a=a: both are text"),
    ):
        with pytest.raises(InputError, match=re.escape(says)):
            TokenMapping(target, draft, [pair])


def test_what_opens_a_text_stands_for_what_opens_one() -> None:
    class Opened(WithControl):
        def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            return ([1] if add_special else []) + super().tokenize(text)

    mapping = TokenMapping(Opened([b"a"], [b"<bos>"]), Opened([b"a"], [b"<s>"]))
    assert mapping.control_id(1) == 1


def test_what_cannot_be_translated_is_refused_in_one_line() -> None:
    class Lower(ScriptedVocabulary):
        def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            return super().tokenize(text.lower())

    pairs = [bytes([first]) + bytes([second]) for first in b"xy" for second in b"xy"]
    check_translation(mapped(TEXT, [*TEXT, b"qui"]))
    for target, draft, says in (
        (ScriptedVocabulary(TEXT), Lower(TEXT), "the draft's scripted tokenizer does not give a text back"),
        (Lower(TEXT), ScriptedVocabulary(TEXT), "the target's scripted tokenizer does not give a text back"),
    ):
        with pytest.raises(VocabularyMismatchError, match=says) as caught:
            check_translation(TokenMapping(target, draft))
        assert "\n" not in str(caught.value)
        assert "`drafters=['suffix']`" in str(caught.value)
    # Both give texts back, and no token of the one is a token of the other.
    whole = ScriptedVocabulary(["The quick brown fox, 1234; na\u00efve.\n".encode(), *pairs])
    mapping = TokenMapping(ScriptedVocabulary(TEXT), whole)
    assert ExactTokenizer(whole).continuation(whole.token_bytes(0)) == [0]
    with pytest.raises(VocabularyMismatchError, match="no token of the one spells"):
        check_translation(mapping)
