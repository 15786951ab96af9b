"""What ``paceline run`` and ``chat`` are asked to keep answers to."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.constraints import Gbnf, JsonSchema
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
    from paceline.cli.prompt import read_source

    assert read_source(None, None, None, None) is None
    assert read_source(SCHEMA, None, None, None) == JsonSchema(SCHEMA)
    assert read_source(SCHEMA, None, None, None, strict=False) == JsonSchema(SCHEMA, strict=False)
    assert read_source(None, None, "root ::= [a]", None) == Gbnf("root ::= [a]")
