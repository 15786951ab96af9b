"""Control tokens that a tokenizer made of plain text, spelled out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.errors import InputError
from paceline.vocabularies.spelling import single_characters, spell_out

SPELLINGS = {0: b"<unk>", 1: b"<s>", 2: "<é>".encode(), 3: "<a▁b>".encode(), 4: b"\xff", 5: b""}
SINGLES = {b"<": 10, b">": 11, b"s": 12, b"\xc3": 13, b"\xa9": 14, b"a": 15, b"b": 16, b" ": 17, b"u": 18, b"n": 19}
SINGLES[b"k"] = 20


def spelled_out(token_ids: Sequence[int], text: str) -> list[int]:
    return spell_out(token_ids, text, SPELLINGS, [0], SPELLINGS.__getitem__, lambda: SINGLES)


@pytest.mark.parametrize(
    ("token_ids", "text", "expected"),
    [
        ([], "", []),
        ([15, 16], "ab", [15, 16]),
        ([15, 1, 16], "a<s>b", [15, 10, 12, 11, 16]),
        ([1, 1], "<s><s>", [10, 12, 11] * 2),
        ([2], "<é>", [10, 13, 14, 11]),
        ([3], "<a b>", [10, 15, 17, 16, 11]),
        ([0], "日", [0]),
        ([0], "<unk>", [10, 18, 19, 20, 11]),
        ([1], "＜ｓ＞", [10, 12, 11]),
    ],
)
def test_control_tokens_are_spelled_out(token_ids: list[int], text: str, expected: list[int]) -> None:
    assert spelled_out(token_ids, text) == expected


def test_what_there_are_no_letters_for_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"'�' is a control token of this model, and .* no other way to spell it: leave it"
    ):
        spelled_out([4], "\ufffd")


def test_letters_are_looked_for_when_they_are_needed() -> None:
    def fail() -> dict[bytes, int]:
        raise AssertionError

    assert spell_out([15, 0], "a日", SPELLINGS, [0], SPELLINGS.__getitem__, fail) == [15, 0]


def test_single_characters_are_ordinary_and_the_first_of_several() -> None:
    pieces = {0: b"a", 1: b"a", 2: b"ab", 3: "é".encode(), 4: b"\xc3", 5: b"", 6: None, 7: b"x", 8: "日本".encode()}
    assert single_characters(list(pieces), pieces.__getitem__, [7]) == {b"a": 0, "é".encode(): 3, b"\xc3": 4}
    assert single_characters([1, 0], pieces.__getitem__, []) == {b"a": 1}
