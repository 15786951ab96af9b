"""Parting answers: the same parts however the text was cut, and nothing lost but markers and whitespace."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.chat.reasoning import (
    KNOWN_MARKERS,
    AnswerPart,
    ReasoningFormat,
    ReasoningMarkers,
    ReasoningSplitter,
    build_budget,
    find_markers,
    opens_reasoning,
    preserved_ids,
)
from paceline.core.errors import InputError, SamplingError
from paceline.core.reasoning import ReasoningBudget
from paceline.core.text import TextSegment
from tests.chat.conversing import ControlledBytes, read_message, split_reasoning
from tests.tiers import by_tier

THINK = ReasoningMarkers("<think>", "</think>")
CHANNELS = KNOWN_MARKERS[0].markers
# Markers that overlap with each other and with what is left of others.
TIGHT = ReasoningMarkers("<a>", "<<b", dropped=("<c", "<<d>"))

SHARDS = ("<", "a", "b", "c", "d", ">", " ", "\n", "<a>", "<<b", "<c", "<<d>", "<think>", "</think>", "é", "x y")


@st.composite
def answers(draw: st.DrawFn) -> tuple[ReasoningMarkers | None, bool, str]:
    markers = draw(st.sampled_from((THINK, CHANNELS, TIGHT, None)))
    pieces = [*SHARDS]
    if markers is not None:
        pieces += 3 * [markers.start, markers.end, *markers.dropped]
    text = "".join(draw(st.lists(st.sampled_from(pieces), max_size=12)))
    return markers, draw(st.booleans()), text


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def joined(parts: Sequence[AnswerPart]) -> tuple[str, str]:
    reasoning = "".join(part.segment.text for part in parts if part.kind == "reasoning")
    return reasoning, "".join(part.segment.text for part in parts if part.kind == "content")


def once(markers: ReasoningMarkers | None, begun: bool, text: str) -> tuple[str, str]:
    """Part a whole text by a search for one marker after the other, which sees all that follows."""
    if markers is None:
        return "", text
    reasonings, contents, inside, border, strips = [], [""], begun, True, begun
    while text:
        if inside:
            said, _, text = text.partition(markers.end)
            reasonings.append(said.strip())
            contents.append("")
            inside, border, strips = False, True, True
            continue
        if strips:
            text = text.lstrip()
        if border and text.lstrip().startswith(markers.start):
            text, inside = text.lstrip()[len(markers.start) :], True
            continue
        found = re.search("|".join(map(re.escape, markers.dropped)) or "(?!)", text)
        said, text = (text[: found.start()], text[found.end() :]) if found else (text, "")
        contents[-1] += said
        strips, border = strips and not said, found is not None
    return "\n".join(filter(None, reasonings)), "\n".join(filter(None, contents))


@settings(max_examples=by_tier(2000, quick=300))
@given(answer=answers(), places=st.lists(st.integers(0, 300), max_size=40))
@example(answer=(TIGHT, False, " <a> x <<b <c y<<d> <a>z"), places=[*range(30)])
def test_the_split_is_that_of_the_whole_text(
    answer: tuple[ReasoningMarkers | None, bool, str], places: list[int]
) -> None:
    markers, begun, text = answer
    expected = once(markers, begun, text)
    splitter = ReasoningSplitter(markers, begun=begun)
    parts: list[AnswerPart] = []
    for piece in cut(text, places):
        parts += splitter.push([TextSegment(piece, "")])
        said = joined(parts)
        assert all(whole.startswith(part) for whole, part in zip(expected, said, strict=True)), "taken back"
    parts += splitter.finish()
    assert joined(parts) == expected
    assert all(part.segment.text for part in parts)
    assert splitter.finish() == []
    assert split_reasoning(text, markers, begun=begun) == (expected[0] or None, expected[1])


@settings(max_examples=by_tier(500, quick=150))
@given(answer=answers())
def test_nothing_is_lost_but_markers_and_whitespace(answer: tuple[ReasoningMarkers | None, bool, str]) -> None:
    """Each letter comes out in its place; what does not come out is markers and whitespace."""
    markers, begun, text = answer
    splitter = ReasoningSplitter(markers, begun=begun)
    # Every character is its own source, so that each can be told from its equals.
    parts = [*splitter.push([TextSegment(text[at], str(at)) for at in range(len(text))]), *splitter.finish()]
    kept = [int(part.segment.source) for part in parts]
    assert kept == sorted(kept)
    assert all(text[at] == part.segment.text for at, part in zip(kept, parts, strict=True) if part.segment.text != "\n")
    lost = "".join(text[at] if at not in kept else "\0" for at in range(len(text)))
    if markers is not None:
        for marker in (markers.start, markers.end, *markers.dropped):
            lost = lost.replace(marker, "")
    assert not lost.replace("\0", "").strip()


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "content"),
    [
        ("\n<think>\nHm. 2 + 2\n</think>\n\nFour.\n", False, "Hm. 2 + 2", "Four.\n"),
        ("Hm.\n</think>\n\nFour.", True, "Hm.", "Four."),
        ("  Four.", False, None, "  Four."),
        ("Write <think> and </think>.", False, None, "Write <think> and </think>."),
        ("<think>a</think>b <think>c</think>", False, "a", "b <think>c</think>"),
        ("<think>a</think>\n<think>b</think> c", False, "a\nb", "c"),
        ("<think>\n\n</think>\n\nFour.", False, None, "Four."),
        ("<think>cut off </thi", False, "cut off </thi", ""),
        ("<think", False, None, "<think"),
        ("", True, None, ""),
    ],
)
def test_answers(text: str, begun: bool, reasoning: str | None, content: str) -> None:
    assert split_reasoning(text, THINK, begun=begun) == (reasoning, content)


def test_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Rain.<|end|>"
        "<|start|>assistant<|channel|>final<|message|> It rains."
    )
    assert split_reasoning(text, CHANNELS) == ("Weather.\nRain.", "I look.\nIt rains.")
    assert split_reasoning("<|channel|>final<|message|>Four.", CHANNELS) == (None, "Four.")


def test_parts_keep_their_sources() -> None:
    splitter = ReasoningSplitter(THINK)
    said = [("<thi", "target"), ("nk>H", "draft"), ("m.</", "suffix"), ("x</think> F", "target"), ("our", "draft")]
    parts = [*splitter.push([TextSegment(*piece) for piece in said]), *splitter.finish()]
    assert [(part.kind, part.segment.text, part.segment.source) for part in parts] == [
        ("reasoning", "H", "draft"),
        ("reasoning", "m.</", "suffix"),
        ("reasoning", "x", "target"),
        ("content", "F", "target"),
        ("content", "our", "draft"),
    ]


def test_only_what_may_be_a_marker_is_withheld() -> None:
    splitter = ReasoningSplitter(THINK, begun=True)
    pushed = ["\n ", "a b", " ", "</thin", "g", " </", "think>", " \n", "<", "c", " </think>", " "]
    said = [joined(splitter.push([TextSegment(piece, "")])) for piece in pushed]
    assert said == [
        *(("", ""), ("a b", ""), ("", ""), ("", ""), (" </thing", ""), ("", ""), ("", ""), ("", "")),
        *(("", ""), ("", "<c"), ("", " </think>"), ("", " ")),
    ]
    assert splitter.finish() == []


@pytest.mark.parametrize("begun", [False, True])
def test_messages(begun: bool) -> None:
    text, whole = "a</think>\nb" if begun else "<think>a</think>\nb", "<think>a</think>\nb"
    messages: dict[ReasoningFormat, dict[str, str]] = {
        "none": {"content": whole},
        "auto": {"content": "b", "reasoning_content": "a"},
        "deepseek": {"content": "b", "reasoning_content": "a"},
        "deepseek-legacy": {"content": whole, "reasoning_content": "a"},
    }
    for kind, message in messages.items():
        assert read_message(text, THINK, begun=begun, reasoning_format=kind) == message
        assert read_message("b", THINK, reasoning_format=kind) == {"content": "b"}
        assert read_message("<think>", None, begun=begun, reasoning_format=kind) == {"content": "<think>"}


@pytest.mark.parametrize(
    ("template", "start"),
    [
        ("{{ '<think>' + reasoning + '</think>' }}", "<think>"),
        ("{% set content = content.split('</think>')[-1] %}", "<think>"),
        ("'[THINK]' + block + '[/THINK]'", "[THINK]"),
        ("<|START_THINKING|>{{ plan }}<|END_THINKING|>", "<|START_THINKING|>"),
        ("{% set begin = '<seed:think>' %}{% set end = '</seed:think>' %}", "<seed:think>"),
        ("'<|start|>assistant<|channel|>analysis<|message|>' + thinking", CHANNELS.start),
        (r"'<|channel>thought\n' + thinking + '\n<channel|>'", "<|channel>thought"),
        ("<|think|> is in the system prompt, nothing else", None),
        ("{{ message.content }}", None),
    ],
)
def test_markers_are_found_in_a_template(template: str, start: str | None) -> None:
    markers = find_markers(template)
    assert (None if markers is None else markers.start) == start


def test_every_known_entry_can_be_found() -> None:
    for known in KNOWN_MARKERS:
        assert find_markers(" ".join(known.signs)) == known.markers


@pytest.mark.parametrize(
    ("text", "is_open"),
    [("assistant\n", False), ("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("</think><think>Let me", True)],
)
def test_whether_a_prompt_ends_inside_of_reasoning(text: str, is_open: bool) -> None:
    assert opens_reasoning(text, THINK) == is_open


@pytest.mark.parametrize(
    ("start", "end", "dropped"),
    [("", "b", ()), ("a", "b\n", ()), ("a", "b", (" c",)), ("<a>", "b", ("<a>c",)), ("c", "b", ("d", "d"))],
)
def test_markers_that_cannot_be_told_apart(start: str, end: str, dropped: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"^marker of reasoning "):
        ReasoningMarkers(start, end, dropped=dropped)


VOCABULARY = ControlledBytes(["<o>", "</o>", "<x>"])
OPEN, CLOSE, OTHER = 256, 257, 258


def test_control_tokens_of_markers_are_preserved() -> None:
    assert preserved_ids(ReasoningMarkers("<o>s", "</o>", dropped=("a",)), VOCABULARY) == (OPEN, CLOSE)
    assert preserved_ids(ReasoningMarkers("s", "a", "a<x>"), VOCABULARY) == (OTHER,)


def test_a_budget_in_the_tokens_of_a_vocabulary() -> None:
    markers = ReasoningMarkers("<o>s", "</o>", "</o><o>a")
    for asked, tokens in ((-1, None), (5, 5)):
        budget = ReasoningBudget(tokens, (OPEN, *b"s"), (CLOSE,), True, (CLOSE, OPEN, *b"a"))
        assert build_budget(markers, VOCABULARY, asked, begun=True) == budget
    spoken = build_budget(ReasoningMarkers("<o>", "</o>"), VOCABULARY, 0, begun=False, message="a</o>")
    assert spoken.forced == (*b"a</o>", CLOSE), "a message names no control tokens"
    with pytest.raises(SamplingError):
        build_budget(markers, VOCABULARY, -2, begun=False)
