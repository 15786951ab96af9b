from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.serving import json_bodies as json_bodies
from paceline.serving.json_bodies import BodyError, read_json
from tests.timing import assert_grows_with_length_alone

TOO_LARGE = "the number is too large; the largest is about 1.8e308"
TOO_LONG = "an integer has to fit into 64 bits"
UNPAIRED = "half a surrogate pair is not a character; send both halves, or the character itself"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty: send a JSON object, such as {}"),
        (b" \n", "the body is empty: send a JSON object, such as {}"),
        (b"{\xff", "the body is not UTF-8: byte 2 of 2 cannot be read"),
        (b"[]", "the body is a JSON array: send an object, such as {}"),
        (b"null", "the body is a JSON null: send an object, such as {}"),
        (b"1.5", "the body is a JSON number: send an object, such as {}"),
        (b'"{}"', "the body is a JSON string: send an object, such as {}"),
        (b"true", "the body is a JSON boolean: send an object, such as {}"),
        (b'{"a":\n 1,}', "the body is not JSON: Illegal trailing comma before end of object (line 2, column 3)"),
        (b'{"a', "the body is not JSON: Unterminated string starting (line 1, column 2)"),
        (b'{"a":"\x01"}', "the body is not JSON: Invalid control character (line 1, column 7)"),
        (b'{"a":NaN}', "the body has NaN at line 1, column 6: JSON has no such number; leave the field out"),
        (
            b'{"NaN":"Infinity",\n"a":-Infinity}',
            "the body has -Infinity at line 2, column 5: JSON has no such number; leave the field out",
        ),
        (b'{"a":-1e999-', f"the body has -1e999 at line 1, column 6: {TOO_LARGE}"),
        (
            b'{"a":"18446744073709551616","b":18446744073709551616}',
            f"the body has 18446744073709551616 at line 1, column 33: {TOO_LONG}",
        ),
        (b'{"a":-9223372036854775809}', f"the body has -9223372036854775809 at line 1, column 6: {TOO_LONG}"),
        (b'{"a":{"b":1,"c":2,"b":3}}', 'the body gives the field "b" twice in one object: give it once'),
        (b'{"\\n":1,"\\n":1}', 'the body gives the field "\\n" twice in one object: give it once'),
        (b'{"a":"\\\\ud800 \\ud83d\\ude00 \\uDBff"}', f"the body has \\uDBff at line 1, column 28: {UNPAIRED}"),
        (b'{"\\ude00\\ud83d":1}', f"the body has \\ude00 at line 1, column 3: {UNPAIRED}"),
    ],
)  # fmt: skip
def test_each_refusal_is_one_line(body: bytes, message: str) -> None:
    with pytest.raises(BodyError) as refused:
        read_json(body)
    # Python 3.13 says more of a trailing comma.
    older = message.replace(
        "Illegal trailing comma before end of object (line 2, column 3)",
        "Expecting property name enclosed in double quotes (line 2, column 4)",
    )
    assert str(refused.value) in (message, older)
    assert isinstance(refused.value, InputError)


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000, b'{"x":"]]","a":' + b"[{}, " * 70 + b'{"b":[' * 70]
)
def test_deep_nesting_is_refused_with_its_place(body: bytes) -> None:
    with pytest.raises(BodyError, match=r"^the body is nested deeper than 128 levels at line 1, column \d+$"):
        read_json(body)


def test_levels_are_counted_one_within_another() -> None:
    wide = {"a": [[{}], "[" * 1000, '\\"['] * 1000}
    assert read_json(json.dumps(wide).encode()) == wide
    deepest = b'{"a":' + b"[" * 127 + b"]" * 127 + b"}"
    assert read_json(deepest) == json.loads(deepest)
    with pytest.raises(BodyError, match=r"at line 1, column 133$"):
        read_json(b'{"a":' + b"[" * 128 + b"]" * 128 + b"}")


def test_huge_integers_are_cut_in_the_line() -> None:
    with pytest.raises(BodyError) as refused:
        read_json(b'{"a":' + b"9" * 100_000 + b"}")
    assert str(refused.value) == f"the body has {'9' * 200}... at line 1, column 6: {TOO_LONG}"


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"\xef\xbb\xbf{}", {}),
        (b'{"a":18446744073709551615,"b":-9223372036854775808}', {"a": (1 << 64) - 1, "b": -(1 << 63)}),
        (b'{"a":1e308,"b":-0.0,"c":1e-999}', {"a": 1e308, "b": 0.0, "c": 0.0}),
        ('{"a":"\\ud83d\\ude00é😀\\u0000"}'.encode(), {"a": "😀é😀\0"}),
        (b'{"a":{"b":1},"c":{"b":2}}', {"a": {"b": 1}, "c": {"b": 2}}),
    ],
)
def test_what_is_read(body: bytes, value: object) -> None:
    assert read_json(body) == value


@pytest.mark.parametrize(
    ("body", "most"),
    [
        (lambda count: b'"' + b'\\"' * count, 500_000),
        (lambda count: b"[" + b"[]," * 130 + b'"' + b'\\"' * count, 500_000),
        (lambda count: b'{"a":"' + b"\\ud83d\\ude00" * count + b'"}', 80_000),
        (lambda count: b"{" + b",".join(b'"%d":1' % number for number in range(count)) + b',"0":1}', 200_000),
    ],
    ids=["quotes", "brackets and quotes", "pairs", "fields"],
)
def test_no_body_takes_long(body: Callable[[int], bytes], most: int) -> None:
    def read(count: int) -> None:
        with contextlib.suppress(BodyError):
            read_json(body(count))

    assert_grows_with_length_alone(read, most)


LARGE = "x" * 100 + "\\n" * 100


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"a":[' + "1,\n" * 30 + "]}", "the body is not JSON: Expecting value (line 31, column 1)"),
        ('{"a":[' + "1," * 30 + ",1]}", "the body is not JSON: Expecting value (line 1, column 67)"),
        ('{"a":{' + '"b":[1,2],' * 30 + "}}", 'the body gives the field "b" twice in one object: give it once'),
        ('{"a":[1,"LARGE"]} {}', "the body is not JSON: Extra data (line 1, column 314)"),
        ('{"a":"LARGE', "the body is not JSON: Unterminated string starting (line 1, column 6)"),
        ('{"a":"LARGE\1"}', "the body is not JSON: Invalid control character (line 1, column 307)"),
        ('{"a":"LARGE\\q"}', "the body is not JSON: Invalid \\escape (line 1, column 307)"),
        ('{"a":"LARGE\\ud83da"}', f"the body has \\ud83d at line 1, column 307: {UNPAIRED}"),
        ('{"a":"LARGE","b":1e999}', f"the body has 1e999 at line 1, column 313: {TOO_LARGE}"),
        ('{"a":[[1,"LARGE"}', "the body is not JSON: Expecting ',' delimiter (line 1, column 312)"),
        ('"LARGE"', "the body is a JSON string: send an object, such as {}"),
        ("[" + "1," * 90 + "1]", "the body is a JSON array: send an object, such as {}"),
        ('{"LARGE":1}', "the name of a field at line 1, column 2 has more than 16 bytes: send a shorter one"),
        ('{"a":' + " " * 900 + "1}", "the body has 256 characters and more from line 1, column 1 on without a comma or "
         "a value that is a text: send fewer blanks and shorter names"),
        ('{"LARGE', "the name of a field at line 1, column 2 has more than 16 bytes: send a shorter one"),
        ('{"too short', "the body is not JSON: Unterminated string starting (line 1, column 2)"),
        ('{"a":{"' + "name" * 4 + '":{"' + "name" * 3 + "\\q",
         "the body is not JSON: Invalid \\escape (line 1, column 40)"),
        ('{"a":[' + "[]," * 60 + "1]}", "the body has more than 50 lists and objects: send fewer"),
        ('{"a":[' + "1," * 110 + "1]}", "the body has more than 100 values: send fewer"),
        ('{"a":"\u20acLARGE\udcff"}', "the body is not UTF-8: byte 310 of 312 cannot be read"),
    ],
)  # fmt: skip
def test_refusals_of_bodies_that_are_read_piece_by_piece_have_their_places(
    body: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PIECE_BYTES": 16, "MAX_UNCUT": 256, "MAX_CONTAINERS": 50, "MAX_VALUES": 100}.items():
        monkeypatch.setattr(json_bodies, name, value)
    with pytest.raises(BodyError) as refused:
        read_json(body.replace("LARGE", LARGE).encode("utf-8", "surrogateescape"))
    assert str(refused.value) == message


LONGEST_NAME = 500
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NAMES = TEXTS.filter(lambda name: len(json.dumps(name)) - len('""') <= LONGEST_NAME)
"""Of fields. No other way to write a name takes more bytes than this one, where all but ASCII is escaped."""
NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
    max_leaves=8,
)


@given(st.dictionaries(NAMES, JSON), st.booleans())
def test_every_fit_object_is_read_as_it_is(value: dict[str, object], ascii_only: bool) -> None:
    assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.dictionaries(NAMES, JSON), st.booleans(), st.sampled_from([None, 1]), st.integers(LONGEST_NAME, 600))
def test_every_fit_object_is_read_piece_by_piece(
    value: dict[str, object], ascii_only: bool, indent: int | None, size: int
) -> None:
    long = {"a": value, "b": [[value, '\\"é😀\n' * 30], *range(300)], "c": {"d": value, "e": [], "f": [{}]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bodies, "PIECE_BYTES", size)
        assert read_json(json.dumps(long, ensure_ascii=ascii_only, indent=indent).encode()) == long


def test_names_as_long_as_they_may_be_are_read_wherever_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them is no comma, at which a piece could end."""
    monkeypatch.setattr(json_bodies, "PIECE_BYTES", 16)
    for names in (["n" * 16], ["n" * 16, "€" * 5], ["\\" * 8, "m", "n" * 15, '"' * 8, "a"]):
        for num_blanks in range(40):
            value: object = "text" * 9
            for name in names:
                value = {name: value}
            body = json.dumps(value, ensure_ascii=False).replace("{", "{" + " " * num_blanks)
            assert read_json(body.encode()) == value


@pytest.mark.parametrize("num_brackets", [200, 20_000])
def test_deep_nesting_behind_blanks_is_refused(num_brackets: int) -> None:
    """Where there was no place to cut, more is read before the next look, and the body may be over by then."""
    with pytest.raises(BodyError, match=r"^the body is nested deeper than 128 levels at line 1, column 70133$"):
        read_json(b'{"a":' + b" " * 70_000 + b"[" * num_brackets + b"]" * num_brackets + b"}")


@given(st.binary() | st.text(alphabet='{}[]",:\\ud8NaInfity-+0123456789eE. \n').map(str.encode))
def test_whatever_comes_is_read_or_refused(body: bytes) -> None:
    try:
        value: object = read_json(body)
    except BodyError as refused:
        value = {"message": str(refused)}
    assert isinstance(value, dict)
    assert "\n" not in value.get("message", "")
