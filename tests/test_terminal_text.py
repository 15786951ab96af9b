"""Text that a terminal shows instead of obeying it."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.terminal_text import can_encode, json_text, printable, printable_line

DANGEROUS = "".join(map(chr, [*range(9), 11, 12, *range(14, 32), *range(127, 160), 0x202E, 0xDCFF, 0x2066, 0xD800]))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b31m \x7f", r"\x9b31m \x7f"),
        ("a\tb\r\nc\n", "a\tb\r\nc\n"),
        ("100 %\rdone", r"100 %\rdone"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("na\udcefve", r"na\udcefve"),
        ("日本 é 😀 שלום", "日本 é 😀 שלום"),
    ],
)
def test_control_characters_are_spelled_and_nothing_else(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_a_line_stays_one() -> None:
    assert printable_line("a\r\nb\tc\u2028d\x1b") == "a\\r\\nb\tc\\u2028d\\x1b"


@given(st.text(st.sampled_from("\x1b[]31m\x9b\x07\\P^_x;"), max_size=20), st.integers(0, 20))
def test_a_sequence_is_harmless_however_it_is_cut(text: str, place: int) -> None:
    shown = printable(text[:place]) + printable(text[place:])
    assert shown == printable(text)
    assert not any(unicodedata.category(character) == "Cc" for character in shown)


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "ascii", "shift_jis"])
@pytest.mark.parametrize("text", [DANGEROUS, 'é "日本" 😀\n', "plain"])
def test_json_is_the_same_data_in_any_encoding(text: str, encoding: str) -> None:
    facts = {text: [text, 1.5, None]}
    for indent in (None, 1):
        written = json_text(facts, encoding=encoding, indent=indent)
        assert json.loads(written.encode(encoding).decode(encoding)) == facts
        assert not set(DANGEROUS) & set(written)


def test_json_keeps_what_can_be_written() -> None:
    assert json_text({"é": 1}) == '{"é": 1}'
    assert json_text({"é": 1}, encoding="ascii") == '{"\\u00e9": 1}'


def test_an_encoding_that_is_unknown_has_nothing() -> None:
    assert can_encode("é", "cp1252")
    assert not can_encode("日", "cp1252")
    assert not can_encode("a", "abacus")
