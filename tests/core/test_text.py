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


def test_nothing_is_added_after_a_stop() -> None:
    stream = TextStream(["b"])
    assert joined(stream.push(b"ab", "")) == "a"
    assert stream.stopped
    assert stream.push(b"c", "") == []
    assert stream.flush() == []


def test_the_earliest_of_several_stops_wins() -> None:
    stream = TextStream(["d", "bc"])
    assert joined(stream.push(b"abcd", "")) == "a"


def test_a_withheld_beginning_is_released_when_it_comes_to_nothing() -> None:
    stream = TextStream(["aab"])
    assert joined(stream.push(b"a", "")) == ""
    assert joined(stream.push(b"a", "")) == ""
    # "aaa": the first is free, "aa" may still become "aab".
    assert joined(stream.push(b"a", "")) == "a"
    assert joined(stream.push(b"c", "")) == "aac"


@pytest.mark.parametrize(("broken", "text"), [(b"\xff", "\ufffd"), (b"\xc3a", "\ufffda"), (b"\xf0\x9f\x98", "\ufffd")])
def test_broken_bytes_become_replacement_characters(broken: bytes, text: str) -> None:
    stream = TextStream()
    assert joined([*stream.push(broken, ""), *stream.flush()]) == text


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
