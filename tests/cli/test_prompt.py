"""What a request says: prompts and stop texts as they are typed, and what answers are asked to keep to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.prompt import read_source, read_typed_text
from paceline.constraints import Gbnf, JsonSchema
from paceline.core.errors import InputError
from tests.cli.invoking import FAST, Invoke

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
)
RUN = ("run", *FAST, "-p", "A pet: ")


def test_answers_keep_to_a_schema_or_a_grammar_typed_or_in_a_file(invoke: Invoke, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text(SCHEMA)
    grammar.write_text('root ::= "a" "b"+ "c"')
    for flags in (("-j", SCHEMA), ("-jf", str(schema)), ("--json-schema", SCHEMA, "--no-strict")):
        outcome = invoke(*RUN, *flags)
        assert outcome.status == 0, outcome.err
        assert json.loads(outcome.out)["kind"] in ("cat", "dog")
        assert "warning" not in outcome.err
    for flags in (("--grammar", 'root ::= "abc"'), ("--grammar-file", str(grammar))):
        outcome = invoke(*RUN, *flags)
        assert outcome.out.startswith("ab")


def test_what_nothing_can_keep_to_is_refused_or_warned_of(invoke: Invoke) -> None:
    schema = json.dumps({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True})
    refused = invoke(*RUN, "-j", schema)
    assert (refused.status, refused.out) == (2, "")
    assert '#/uniqueItems: "uniqueItems" is not supported' in refused.err
    assert "--no-strict" in refused.err
    taken = invoke(*RUN, "-j", schema, "--no-strict")
    assert taken.status == 0
    assert set(json.loads(taken.out)) <= {1, 2}
    assert "warning: nothing keeps answers to #/uniqueItems of the schema: check them" in taken.err


def test_the_sources_are_those_of_the_library() -> None:
    assert read_source(None, None, None, None) is None
    assert read_source(SCHEMA, None, None, None) == JsonSchema(SCHEMA)
    assert read_source(SCHEMA, None, None, None, strict=False) == JsonSchema(SCHEMA, strict=False)
    assert read_source(None, None, "root ::= [a]", None) == Gbnf("root ::= [a]")


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
