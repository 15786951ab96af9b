"""Marked texts are texts in all they do, and each character keeps its mark wherever it goes.

In these tests a character says itself who wrote it: the letters, separators and spaces of the template are others than
those of everybody else. So whatever an operation returns, its marks can be told from its characters.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.chat.marked_text import MarkedText, template_marks
from paceline.chat.template_limits import LimitError
from tests.tiers import by_tier

OURS = "AB<| \tẞ\n\x1c"
THEIRS = "ab>_\u2003\rßﬁİ\u2028🙂"
EXAMPLES = by_tier(1000, quick=80)


def marked(text: str) -> MarkedText:
    return MarkedText(text, bytes(character in OURS for character in text))


def own(text: str) -> str:
    """Return a text without marks: all of it is somebody's, so none of it is of the template's characters."""
    return "".join(character for character in text if character not in OURS)


def outcome(compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except Exception as error:
        return type(error)


def texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [text for item in value for text in texts_in(item)] if isinstance(value, (list, tuple)) else []


def assert_same(result: Any, expected: Any) -> None:
    """Check that a result is what plain texts give, with the marks of its characters."""
    assert result == expected
    assert type(result) is type(expected) or isinstance(result, MarkedText)
    for text in texts_in(result):
        assert isinstance(text, MarkedText)
        assert template_marks(text) == bytes(character in OURS for character in text)


def assert_nothing_gained(result: str) -> None:
    """Check that marks may be lost, but that nobody's character became the template's."""
    for character, mark in zip(result, template_marks(result), strict=True):
        assert not mark or character in OURS


any_text = st.text(OURS + THEIRS, max_size=12)
short = st.text(OURS + THEIRS, max_size=2)
separators = st.none() | short
counts = st.integers(-3, 6)
places = st.none() | st.integers(-15, 15)
# Either with marks, or without, and then of somebody's characters.
others = short.map(marked) | short.map(own)

ARGUMENTS: dict[str, st.SearchStrategy[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "strip": st.tuples(st.tuples(separators) | st.just(()), st.just({})),
    "lstrip": st.tuples(st.tuples(separators) | st.just(()), st.just({})),
    "rstrip": st.tuples(st.tuples(separators) | st.just(()), st.just({})),
    "removeprefix": st.tuples(st.tuples(short), st.just({})),
    "removesuffix": st.tuples(st.tuples(short), st.just({})),
    "split": st.tuples(st.tuples(separators, counts), st.just({}))
    | st.tuples(st.just(()), st.fixed_dictionaries({}, optional={"sep": separators, "maxsplit": counts})),
    "rsplit": st.tuples(st.tuples(separators, counts), st.just({}))
    | st.tuples(st.just(()), st.fixed_dictionaries({}, optional={"sep": separators, "maxsplit": counts})),
    "splitlines": st.tuples(st.just(()), st.fixed_dictionaries({}, optional={"keepends": st.booleans()})),
    "partition": st.tuples(st.tuples(short), st.just({})),
    "rpartition": st.tuples(st.tuples(short), st.just({})),
    "replace": st.tuples(st.tuples(short, others) | st.tuples(short, others, counts), st.just({})),
    "join": st.tuples(st.tuples(st.lists(others, max_size=4) | short.map(marked)), st.just({})),
    "__add__": st.tuples(st.tuples(others), st.just({})),
    "__mul__": st.tuples(st.tuples(counts), st.just({})),
    "__rmul__": st.tuples(st.tuples(counts), st.just({})),
    "__getitem__": st.tuples(
        st.tuples(st.integers(-15, 15) | st.builds(slice, places, places, places)),
        st.just({}),
    ),
    "__str__": st.just(((), {})),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_every_operation_does_as_texts_do_and_keeps_marks(name: str, data: st.DataObject) -> None:
    text = data.draw(any_text)
    arguments, named = data.draw(ARGUMENTS[name])
    expected = outcome(lambda: getattr(text, name)(*arguments, **named))
    assert_same(outcome(lambda: getattr(marked(text), name)(*arguments, **named)), expected)


@settings(max_examples=EXAMPLES)
@given(any_text, st.lists(st.tuples(st.sampled_from(sorted(ARGUMENTS)), st.data()), min_size=2, max_size=4))
def test_operations_one_after_the_other(text: str, steps: list[tuple[str, st.DataObject]]) -> None:
    values: tuple[Any, Any] = (text, marked(text))
    for name, data in steps:
        arguments, named = data.draw(ARGUMENTS[name])
        plain, kept = (outcome(partial(getattr(value, name), *arguments, **named)) for value in values)
        assert_same(kept, plain)
        if isinstance(plain, (list, tuple)) and plain:
            plain, kept = plain[0], kept[0]
        if not isinstance(plain, str):
            break
        values = (plain, kept)


@given(any_text, others)
def test_sums_keep_marks_in_both_orders(text: str, other: str) -> None:
    assert_same(marked(text) + other, text + other)
    assert_same(other + marked(text), other + text)


@given(any_text)
def test_characters_and_walks_keep_marks(text: str) -> None:
    assert_same(list(marked(text)), list(text))
    assert_same(list(reversed(marked(text))), list(reversed(text)))
    assert_same(sorted(marked(text)), sorted(text))
    assert marked(text) == text
    assert hash(marked(text)) == hash(text)
    assert {text: 1}.get(marked(text)) == 1


@pytest.mark.parametrize("name", ["upper", "lower", "capitalize", "title"])
@given(text=any_text)
def test_changed_letters_keep_marks_unless_one_becomes_several(name: str, text: str) -> None:
    changed = getattr(marked(text), name)()
    assert changed == getattr(text, name)()
    assert template_marks(changed) == (
        template_marks(marked(text)) if len(changed) == len(text) else bytes(len(changed))
    )


def test_letters_that_become_several_are_in_the_texts_above() -> None:
    assert len("ß".upper()) == len("ﬁ".title()) == len("İ".lower()) == 2


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("center", (9,)), ("ljust", (9, "A")), ("rjust", (9,)), ("zfill", (9,)), ("swapcase", ()), ("casefold", ()),
        ("expandtabs", ()), ("translate", ({97: "A"},)), ("format", ()), ("format_map", ({},)), ("__format__", ("5",)),
        ("__mod__", ((),)),
    ],
)  # fmt: skip
@given(text=any_text)
def test_what_is_left_to_python_gains_nothing(name: str, arguments: tuple[Any, ...], text: str) -> None:
    result = getattr(marked(text), name)(*arguments)
    assert result == getattr(text, name)(*arguments)
    assert_nothing_gained(result)


@given(any_text, others)
def test_texts_put_into_others_by_python_gain_nothing(text: str, other: str) -> None:
    for result in (
        operator.mod("%s", marked(text)),
        operator.mod("%sA", marked(text)),
        f"{marked(text)}",
        f"A{marked(text)}",
        repr(marked(text)),
    ):
        assert_nothing_gained(result)
    assert_nothing_gained("<|".join([marked(text), other]))


def test_who_wrote_what() -> None:
    assert template_marks(MarkedText("ab")) == b"\0\0"
    assert template_marks(MarkedText.of_template("ab")) == b"\1\1"
    assert template_marks("ab") == b"\0\0"
    assert template_marks(MarkedText(marked("Aa"))) == b"\1\0"
    assert template_marks(MarkedText.joined([MarkedText.of_template("a"), 12, None, "b"])) == b"\1" + bytes(7)


def test_marks_are_not_lost_by_accident_nor_changed() -> None:
    text = marked("Aa")
    with pytest.raises(AssertionError):
        MarkedText("abc", b"\1")
    with pytest.raises(AttributeError):
        text.other = 1  # type: ignore[attr-defined]
    assert not any(template_marks(str(pickle.loads(pickle.dumps(str.__str__(text))))))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda text: text * 1.5, TypeError),
        (lambda text: text + 1, TypeError),
        (lambda text: 1 + text, TypeError),
        (lambda text: text["a"], TypeError),
        (lambda text: text[99], IndexError),
        (lambda text: text.split(""), ValueError),
        (lambda text: text.partition(""), ValueError),
        (lambda text: text.rpartition(""), ValueError),
        (lambda text: text.replace("a", 1), TypeError),
        (lambda text: text.replace("a", ["b"]), TypeError),
        (lambda text: text.join([1]), TypeError),
        (lambda text: text.strip(1), TypeError),
        (lambda text: text.removeprefix(1), TypeError),
    ],
)
def test_what_texts_refuse_is_refused(make: Callable[[Any], Any], error: type[Exception]) -> None:
    for text in ("abc", marked("abc")):
        with pytest.raises(error):
            make(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda text: text * 10_000_000,
        lambda text: 10_000_000 * text,
        lambda text: (text * 2_000).replace("", text * 2_000),
        lambda text: text.replace("a", text * 4_000_000),
        lambda text: text.join([text * 1_000_000] * 3),
        lambda text: (text * 2_000_000) + (text * 2_000_000),
        lambda text: "a" * 4_194_304 + text,
    ],
)
def test_texts_that_are_too_long_are_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(LimitError, match=r"makes a text of \d+ characters, and the most are 4194304"):
        make(marked("aA"))
