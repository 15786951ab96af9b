from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.text import TextSegment, TextStream

# Few letters and a few characters of more than one byte: stop texts come up, partly or wholly, all the time.
TEXTS = st.text("abé\U0001f600", max_size=24)
STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


def pieces_of(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def joined(segments: Sequence[TextSegment]) -> str:
    return "".join(segment.text for segment in segments)


CUTS = st.lists(st.integers(0, 200), max_size=20)


@given(data=st.binary(max_size=40) | TEXTS.map(str.encode), cuts=CUTS)
def test_text_does_not_depend_on_where_tokens_end(data: bytes, cuts: list[int]) -> None:
    stream = TextStream()
    text = "".join(joined(stream.push(piece, "")) for piece in pieces_of(data, cuts))
    text += joined(stream.flush())
    assert text == data.decode("utf-8", errors="replace")
    assert not stream.stopped


@settings(max_examples=300)
@given(text=TEXTS, stops=STOPS, cuts=CUTS)
def test_stop_texts_end_the_text_where_they_begin(text: str, stops: list[str], cuts: list[int]) -> None:
    """The reference sees the whole text so far after each token, and looks for every stop text in it."""
    pieces = pieces_of(text.encode(), cuts)
    expected, seen = text, b""
    for piece in pieces:
        seen += piece
        whole = seen.decode(errors="ignore")
        starts = [whole.find(stop) for stop in stops if stop in whole]
        if starts:
            expected = whole[: min(starts)]
            break
    stream = TextStream(stops)
    said = ""
    for piece in pieces:
        said += joined(stream.push(piece, ""))
        assert expected.startswith(said), "text that was released cannot be taken back"
        if stream.stopped:
            break
    said += joined(stream.flush())
    assert said == expected


@given(text=TEXTS, stops=STOPS)
def test_no_more_is_withheld_than_may_become_a_stop_text(text: str, stops: list[str]) -> None:
    stream, said = TextStream(stops), ""
    for end, character in enumerate(text, start=1):
        said += joined(stream.push(character.encode(), ""))
        if stream.stopped:
            return
        withheld = text[len(said) : end]
        assert said + withheld == text[:end]
        assert not withheld or any(stop.startswith(withheld) for stop in stops)


# Control tokens are named by what ordinary text and stop texts have, too.
TOKENS = st.lists(st.tuples(st.booleans(), st.text("ab<é", min_size=1, max_size=4)), max_size=12)


@settings(max_examples=300)
@given(tokens=TOKENS, stops=st.lists(st.text("ab<é", min_size=1, max_size=4), max_size=3))
def test_stop_texts_are_found_in_the_text_with_its_control_tokens_spelled_out(
    tokens: list[tuple[bool, str]], stops: list[str]
) -> None:
    """The reference looks for every stop text in all that is spelled out after each token."""
    spelled_out, shown = "", ""
    shown_before = [0]  # how many characters of the answer stand before each that is spelled out
    stopped_after, expected = None, None
    for index, (is_control, text) in enumerate(tokens):
        spelled_out += text
        shown += "" if is_control else text
        shown_before += [shown_before[-1] + (0 if is_control else i + 1) for i in range(len(text))]
        starts = [spelled_out.find(stop) for stop in stops if stop in spelled_out]
        if starts:
            stopped_after, expected = index, shown[: shown_before[min(starts)]]
            break
    else:
        expected = shown
    stream, said = TextStream(stops), ""
    for index, (is_control, text) in enumerate(tokens):
        push = stream.push_control if is_control else stream.push
        said += joined(push(text.encode(), ""))
        assert expected.startswith(said), "text that was released cannot be taken back"
        assert stream.stopped == (index == stopped_after)
        if stream.stopped:
            break
    said += joined(stream.flush())
    assert said == expected


@given(tokens=TOKENS, cuts=CUTS)
def test_without_stop_texts_control_tokens_change_nothing(tokens: list[tuple[bool, str]], cuts: list[int]) -> None:
    stream, said = TextStream(), ""
    for is_control, text in tokens:
        if is_control:
            assert stream.push_control(text.encode(), "") == []
        else:
            said += "".join(joined(stream.push(piece, "")) for piece in pieces_of(text.encode(), cuts))
    assert said == "".join(text for is_control, text in tokens if not is_control)


@pytest.mark.parametrize(
    ("stop", "tokens", "text"),
    [
        ("<|end|>", ["ab", b"<|end|>", "c"], "ab"),
        ("\n<|end|>", ["ab\n", b"<|end|>", "c"], "ab"),
        ("\n<|end|>", ["ab\n", b"<|pad|>", b"<|end|>", "c"], "ab\nc"),
        ("<|end|>\n", ["ab", b"<|end|>", "\nc"], "ab"),
        ("<|end|>\n", ["ab", b"<|end|>", "c"], "abc"),
        ("<|end|>", ["ab<|e", "nd|>c"], "ab"),  # ordinary text
        ("<|end|>", ["ab<|e", b"nd|>", "c"], "ab"),  # half and half
        ("bc", ["ab", b"<|end|>", "c"], "abc"),  # not what the model wrote
        ("|>", [b"<|end|>", "c"], ""),
    ],
)
def test_stop_texts_with_control_tokens(stop: str, tokens: list[str | bytes], text: str) -> None:
    """Control tokens are given as bytes."""
    stream, said = TextStream([stop]), ""
    for token in tokens:
        segments = stream.push_control(token, "") if isinstance(token, bytes) else stream.push(token.encode(), "")
        said += joined(segments)
    assert said + joined(stream.flush()) == text


def test_a_control_token_does_not_part_the_bytes_of_a_character() -> None:
    stream = TextStream(["<|end|>!"])
    assert stream.push(b"a\xc3", "") == [TextSegment("a", "")]
    assert stream.push_control(b"<|end|>", "") == []
    assert joined(stream.push(b"\xa9", "")) == "é"
    assert joined(stream.push(b"!", "")) == "!"


def test_nothing_is_added_after_a_stop() -> None:
    stream = TextStream(["b"])
    assert joined(stream.push(b"ab", "")) == "a"
    assert stream.stopped
    assert stream.push(b"c", "") == []
    assert stream.flush() == []


def test_segments_carry_the_source_of_the_token_that_completed_them() -> None:
    stream = TextStream(["xyz"])
    assert stream.push(b"a\xc3", "draft") == [TextSegment("a", "draft")]
    assert stream.push(b"\xa9x", "target") == [TextSegment("é", "target")]
    assert stream.push(b"y", "draft") == []
    assert stream.push(b"!", "suffix") == [
        TextSegment("x", "target"),
        TextSegment("y", "draft"),
        TextSegment("!", "suffix"),
    ]


INDENTED = st.text(" \t\nab", max_size=30)


def cut_outdented(text: str, min_indent: int) -> str:
    """Return a text up to the first line, but for its first, that begins with too few blanks, and these blanks."""
    lines = text.split("\n")
    for number, line in enumerate(lines[1:], 1):
        rest = line.lstrip(" \t")
        is_begun = bool(rest) or number < len(lines) - 1
        if is_begun and len(line) - len(rest) < min_indent:
            return "\n".join([*lines[:number], line[: len(line) - len(rest)]])
    return text


@settings(max_examples=300)
@given(text=INDENTED, min_indent=st.integers(0, 3), cuts=CUTS)
def test_a_line_that_is_not_indented_ends_the_text_behind_its_blanks(
    text: str, min_indent: int, cuts: list[int]
) -> None:
    stream = TextStream(min_indent=min_indent)
    found = "".join(joined(stream.push(piece, "")) for piece in pieces_of(text.encode(), cuts))
    found += joined(stream.flush())
    assert found == cut_outdented(text, min_indent)
    assert stream.outdented == stream.stopped == (found != text)


@pytest.mark.parametrize(
    ("stop", "text", "outdented"),
    [
        ("b\n", "a\n", False),  # a stop text that begins there counts
        ("c", "a\n", True),
        ("a", "", False),
        ("\nb", "a", False),  # the stop text begins first
    ],
)
def test_a_stop_text_or_a_line_ends_the_text_whichever_begins_first(stop: str, text: str, outdented: bool) -> None:
    stream = TextStream([stop], min_indent=2)
    found = "".join(joined(stream.push(character.encode(), "")) for character in "a\nb\nc")
    found += joined(stream.flush())
    assert (found, stream.outdented, stream.stopped) == (text, outdented, True)
    assert stream.stop_text == ("" if outdented else stop)
