"""Prompts and stop texts as they are typed."""

from __future__ import annotations

import pytest

from paceline.cli.prompt import read_typed_text
from paceline.core.errors import InputError


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        (r"\xE2\x82\xAC 5", "€ 5"),
        (r"\x41\x0a\x00\x1B", "A\n\0\x1b"),
        (r"a\n\t\r\'\"\\n", "a\n\t\r'\"\\n"),
        (r"\q \xg1 \x4 \x", r"\q \xg1 \x4 \x"),
        ("é\\", "é\\"),
        ("\udcc3\\xA9", "é"),  # the first byte came as a byte of the command line
    ],
)
def test_escapes_are_those_of_llama_cpp(typed: str, text: str) -> None:
    assert read_typed_text(typed, "-p", escape=True) == text


def test_without_escapes_backslashes_are_text() -> None:
    assert read_typed_text(r"\xE2\n", "-p", escape=False) == r"\xE2\n"


@pytest.mark.parametrize(
    ("typed", "escape", "words"),
    [
        (r"ab\xE9", True, r"--stop is not UTF-8: byte 2 is 0xe9; give all bytes of a character, such as \xE2\x82\xAC"),
        ("\udcff", False, "--stop is not UTF-8: byte 0 is 0xff"),
        ("a\ud83d", True, "--stop has half a surrogate pair, 0xd83d, at character 1: give whole characters"),
    ],
)
def test_bytes_that_are_no_text_are_refused_by_the_options_name(typed: str, escape: bool, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read_typed_text(typed, "--stop", escape=escape)
    assert str(caught.value).startswith(words)
