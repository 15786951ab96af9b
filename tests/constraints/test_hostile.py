"""Sources that are made to take long: each is refused in a line, or works, in bounded time.

What bounds them is not a clock: a test of one that is not bounded hangs.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from paceline.constraints import ConstraintCompiler, Gbnf, JsonSchema, Lark, Regex, Source
from paceline.core.constraint import Constraint
from paceline.core.errors import ConstraintError
from tests.constraints.helpers import BYTES, accepts
from tests.constraints.hostile_sources import hostile_source
from tests.tiers import by_tier, some_long

MAX_S = 60.0
"""Seconds of processor time for each; they take less than two."""

COMPILER = ConstraintCompiler(BYTES)

REFUSED = "the most is|takes too much time|too large to compile|make it smaller|nested"


def chain(length: int, link: Callable[[str], dict[str, Any]], end: object = True) -> dict[str, Any]:
    """Return a schema of definitions each of which refers to the next."""
    parts = {f"a{i}": link(f"#/$defs/a{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{length}": end}}


def rules(length: int, link: str, end: str, assign: str) -> str:
    lines = [f"r{i} {assign} " + link.replace("NEXT", f"r{i + 1}") for i in range(length)]
    return "\n".join([*lines, f"r{length} {assign} {end}"])


def either(index: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "properties": {f"{letter}{index}": {"type": "null"}}} for letter in "ab"]}


def nested(levels: int) -> str:
    return '{"items":' * levels + "true" + "}" * levels


SOURCES: dict[str, tuple[Callable[[], Source], str | None]] = {
    "nested 90": (lambda: JsonSchema(nested(90)), None),
    "nested 150": (lambda: JsonSchema(nested(150)), "nested more than 100 levels deep"),
    "nested 10000": (lambda: JsonSchema(nested(10_000)), "nested too deeply"),
    "enum of 50000": (lambda: JsonSchema({"enum": [f"v{i}" for i in range(50_000)]}), None),
    "enum of 10^6": (lambda: JsonSchema({"enum": list(range(10**6))}), "the most is 524,288"),
    "anyOf of 20000": (lambda: JsonSchema({"anyOf": [{"const": i} for i in range(20_000)]}), "more than 10,000 parts"),
    "allOf of anyOf": (
        lambda: JsonSchema({"allOf": [either(i) for i in range(9)]}),
        "#: allOf would join more than 256",
    ),
    "allOf of anyOf by $ref": (
        lambda: JsonSchema(
            {
                "items": {"description": "a", "allOf": [{"$ref": f"#/$defs/a{i}"} for i in range(9)]},
                "$defs": {f"a{i}": either(i) for i in range(9)},
            }
        ),
        "#/items: allOf would join more than 256",
    ),
    "allOf of a long anyOf": (
        lambda: JsonSchema({"allOf": [{"anyOf": [{"const": i} for i in range(500)]}, {"type": "integer"}]}),
        None,
    ),
    "anyOf of many": (lambda: JsonSchema({"allOf": [{"anyOf": [{"const": i} for i in range(500)]}]}), None),
    "allOf of patterns": (
        lambda: JsonSchema({"allOf": [{"type": "string", "pattern": f"^(.*{letter}.*)$"} for letter in "abcdefghij"]}),
        "takes too long to tell",
    ),
    "multipleOf": (lambda: JsonSchema({"type": "integer", "multipleOf": 1_000_003}), "#/multipleOf: .*100,000"),
    "multiples": (
        lambda: JsonSchema({"allOf": [{"type": "integer", "multipleOf": n} for n in (9_973, 9_967)]}),
        "#/allOf/0/multipleOf and #/allOf/1/multipleOf: numbers whose least common multiple",
    ),
    "multiples apart": (
        lambda: JsonSchema({"properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 25}}}),
        None,
    ),
    "many multiples": (
        lambda: JsonSchema({"properties": {f"p{i}": {"multipleOf": 900 + i} for i in range(300)}}),
        "#/properties/p105/multipleOf: with this number, all different ones come to more than 100,000 units",
    ),
    "as many multiples as there may be": (
        lambda: JsonSchema({"properties": {f"p{i}": {"type": "integer", "multipleOf": 900 + i} for i in range(100)}}),
        None,
    ),
    "many $id": (
        lambda: JsonSchema(
            {
                "items": {f"i{i}": {"$id": f"a{i}", "$ref": f"#/x/{i}"} for i in range(1_000)},
                "anyOf": [{"$id": f"b{i}", "$ref": f"#/y/{i}"} for i in range(1_000)],
            }
        ),
        r"2,000 different \$ref and 2,000 \$id, and the most is 20,000",
    ),
    "allOf of anyOf by odd $ref": (
        lambda: JsonSchema(
            {
                "items": {
                    "$id": "b",
                    "allOf": [{"$ref": f"#/%78/{i}"} for i in range(9)],
                    "x": list(map(either, range(9))),
                },
            }
        ),
        "#/items: allOf would join more than 256",
    ),
    "maxLength 10^9": (lambda: JsonSchema({"type": "string", "minLength": 10**9}), None),
    "minItems 10^9": (lambda: JsonSchema({"type": "array", "minItems": 10**9}), None),
    "minItems 10^9 of one text": (
        lambda: JsonSchema({"items": {"const": "x" * 1000}, "type": "array", "minItems": 10**9}, whitespace="none"),
        None,
    ),
    "minimum 1e300": (lambda: JsonSchema({"type": "integer", "minimum": 1e300}), "integer range"),
    "$ref in a circle": (lambda: JsonSchema(chain(2, lambda _: {"$ref": "#/$defs/a0"})), "allows no text at all"),
    "$ref of 4000": (
        lambda: JsonSchema(chain(4_000, lambda following: {"properties": {"x": {"$ref": following}}})),
        None,
    ),
    "$ref of 9000": (lambda: JsonSchema(chain(9_000, lambda following: {"$ref": following})), None),
    "$ref of 10^5": (lambda: JsonSchema(chain(100_000, lambda following: {"$ref": following})), "the most is 524,288"),
    "2^40 by $ref": (
        lambda: JsonSchema(chain(40, lambda following: {"allOf": [{"$ref": following}] * 2}, {"type": "string"})),
        None,
    ),
    "optional 1900": (lambda: JsonSchema({"type": "object", "properties": {f"p{i}": {} for i in range(1_900)}}), None),
    "optional 9000": (
        lambda: JsonSchema({"type": "object", "properties": {f"p{i}": {} for i in range(9_000)}}),
        "#: 9,000 optional properties, and the most is 2,000",
    ),
    "patternProperties": (
        lambda: JsonSchema({"type": "object", "patternProperties": {f"^v.{{{i}}}x$": {} for i in range(200)}}),
        "more than 100 patternProperties",
    ),
    "patterns": (
        lambda: JsonSchema({"anyOf": [{"pattern": "(a|b)?" * 1_000}] * 50}),
        "a pattern has more than 8,000 characters, or all",
    ),
    "const of 400000": (lambda: JsonSchema({"const": "a" * 400_000}), None),
    "regex (a|a)*": (lambda: Regex("(a|a)*"), None),
    "regex (a{1,1000}){1,1000}": (lambda: Regex("(a{1,1000}){1,1000}"), None),
    "regex (x+x+)+y": (lambda: Regex("(x+x+)+y"), None),
    "regex a{10^9}": (lambda: Regex("a{1000000000}"), None),
    "regex (a|b)?(a|b)?": (lambda: Regex("(a|b)?" * 1_000), None),
    "regex of 10^5": (lambda: Regex("a" * 100_000), "the most is 8,000"),
    "regex ((((": (lambda: Regex("(" * 1_000 + "a" + ")" * 1_000), "maximum number of nested"),
    "Lark alternation": (lambda: Lark("start: " + " | ".join(f'"v{i}"' for i in range(100_000))), REFUSED),
    "Lark ((((": (lambda: Lark("start: " + "(" * 1_000 + '"a"' + ")" * 1_000), "too deeply nested"),
    "Lark rules in a row": (lambda: Lark("start: r0\n" + rules(400, "NEXT", '"a"', ":")), None),
    "Lark rules": (lambda: Lark("start: r0\n" + rules(3_000, "NEXT", '"a"', ":")), "500"),
    "Lark terminals doubled": (lambda: Lark("start: R0\n" + rules(400, "NEXT NEXT", '"a"', ":").upper()), REFUSED),
    "Lark ambiguous": (lambda: Lark('start: start start start | "a" |'), None),
    "GBNF alternation": (lambda: Gbnf("root ::= " + " | ".join(f'"v{i}"' for i in range(2_000))), None),
    "GBNF alternation of 10^5": (
        lambda: Gbnf("root ::= " + "|".join(['"a"'] * 100_000)),
        "more than 20,000 characters",
    ),
    "GBNF ((((": (lambda: Gbnf("root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000), "nested more than 60 deep"),
    "GBNF rules in a row": (lambda: Gbnf("root ::= r0\n" + rules(1_900, '"a" NEXT', '"b"', "::=")), None),
    "GBNF rules doubled": (lambda: Gbnf("root ::= r0\n" + rules(1_900, "NEXT NEXT", '"b"', "::=")), None),
    "GBNF nothing doubled": (lambda: Gbnf('root ::= "a" r0\n' + rules(1_900, "NEXT NEXT", '""', "::=")), None),
    "GBNF rules": (lambda: Gbnf("root ::= r0\n" + rules(3_000, "NEXT", '"b"', "::=")), "3,002 rules, and the most is"),
    "GBNF counts": (lambda: Gbnf('root ::= (("a"{1,50}){1,50}){1,50}'), "more than 2,000 repetitions"),
    "GBNF nullable": (lambda: Gbnf('root ::= (x* y*)*\nx ::= y* | "x"?\ny ::= (x? "y"?)*'), None),
    "GBNF alike up to the end": (
        lambda: Gbnf("root ::= " + " | ".join(['[ab]* "a"' + " [ab]" * 10] * 300)),
        None,
    ),
    "GBNF nearly alike": (
        lambda: Gbnf("root ::= " + " | ".join(f'[ab]* "{i:b}" "a"' + " [ab]" * (i % 40) for i in range(300))),
        None,
    ),
    "GBNF of one large class": (
        lambda: Gbnf("root ::= " + "x " * 5_000 + f"\nx ::= [{''.join(chr(0x100 + 2 * i) for i in range(14_000))}]"),
        None,
    ),
    "GBNF rules of one rule": (
        lambda: Gbnf(
            f"root ::= ({' | '.join(f'r{i}' for i in range(1_900))})*\nw ::= {'[ab] ' * 1_900}\n"
            + "\n".join(f'r{i} ::= w "{i}" w' for i in range(1_900))
        ),
        None,
    ),
    "GBNF parts of nothing": (lambda: Gbnf("root ::= " + "|" * 200_000), "more than 100,000 groups and repetitions"),
    "GBNF a long name of a token": (lambda: Gbnf(f"root ::= <{'a' * 400_000}>"), "is no single token of this model"),
    "GBNF words": (lambda: Gbnf("root ::= (" + " | ".join(f'"{i:b}"' for i in range(1_000)) + ")* [01]"), None),
}


@pytest.mark.parametrize("name", some_long(SOURCES, quick=list(SOURCES)[::3]))
def test_a_hostile_source_takes_bounded_time(name: str) -> None:
    make, message = SOURCES[name]
    began_s = time.process_time()
    if message is None:
        state = COMPILER.compile(make())
        draws = np.random.default_rng(0)
        for _ in range(30):
            # What takes too much in the middle of an answer ends that answer, in a line too.
            try:
                token_id = int(draws.choice(np.flatnonzero(state.mask())))
                assert state.allows(list(state.forced())) == len(state.forced())
                state.advance(token_id)
            except ConstraintError as error:
                assert "takes too much time or memory at this place of the answer" in str(error)  # noqa: PT017
                break
            if token_id in BYTES.end_ids:
                break
    else:
        with pytest.raises(ConstraintError, match=message) as raised:
            COMPILER.compile(make())
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 400
    assert time.process_time() - began_s < MAX_S


def at_once(number: int, assign: str) -> str:
    """Return rules of which each may begin with any other, so that an answer is in all of them at once."""
    refers = ((7, 1), (3, 2), (5, 3))
    parts = [[f'("r{i}" | r{(by * i + add) % number}?)*' for by, add in refers] for i in range(number)]
    return "\n".join(f'r{i}{assign} {" ".join(part)} | "c"' for i, part in enumerate(parts))


@pytest.mark.parametrize(
    ("source", "honest"),
    [
        (Lark(f'start: r0 "end"\n{at_once(100, ":")}'), Lark(f'start: r0 "end"\n{at_once(30, ":")}')),
        (Gbnf(f'root ::= r0 "end"\n{at_once(100, " ::=")}'), Gbnf(f'root ::= r0 "end"\n{at_once(30, " ::=")}')),
    ],
)
def test_an_answer_that_is_in_very_many_rules_at_once_ends(source: Source, honest: Source) -> None:
    def write(state: Constraint) -> None:
        for token_id in b"r2cend":
            state.mask()
            state.advance(token_id)

    with pytest.raises(ConstraintError, match="takes too much time or memory at this place of the answer"):
        write(COMPILER.compile(source))
    state = COMPILER.compile(honest)
    write(state)
    assert np.flatnonzero(state.mask()).tolist() == [*BYTES.end_ids]


ILL = {"uniqueItems": True}
REASONS: tuple[tuple[dict[str, Any] | str, str], ...] = (
    # a schema, and where in it the error is, or what the error says where nothing tells that
    ({"properties": {"a": {"type": "hiccup"}}}, "#/properties/a/type: "),
    ({"items": {"type": "string", "format": "nonsense"}}, "#/items/format: "),
    ({"properties": {"a": ILL}}, "#/properties/a/uniqueItems: "),
    ({"type": "array", "prefixItems": [{}, {"type": "string", "pattern": "^(?!x)"}]}, "#/prefixItems/1/pattern: "),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?<!x)\d"}]}, "#/anyOf/1/pattern: "),
    ({"patternProperties": {r"\bid": {"type": "string"}}}, r"#/patternProperties/\bid: "),
    ({"type": "string", "pattern": r"^([(?=]\(?=)\1$"}, r"#/pattern: the pattern has a reference back to a group (\1)"),
    ({"properties": {"a": {"$ref": "#", "required": ["a"]}}}, "#/properties/a/$ref: "),
    ({"items": {"$ref": "https://a.b/c.json"}}, "#/items/$ref: "),
    ({"items": {"$ref": "#/$defs/none"}}, "#/items/$ref: "),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable schema: incompatible types"),
    ({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}, "is unsatisfiable"),
    ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "#/oneOf: "),
    ({"anyOf": [{"type": "null"}, {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}]}, "#/anyOf/1/oneOf: "),
    ({"items": {"type": "string", "pattern": "^a$", "minLength": 3}, "minItems": 1, "type": "array"}, "unsatisfiable"),
    ({"type": "string", "pattern": "^a$", "minLength": 3}, "#/pattern: no text matches all of these patterns"),
    (f'{{"multipleOf": 1{"0" * 400}}}', "#/multipleOf: a number of more than 300 digits"),
    (f'{{"type": "string", "minLength": 1{"0" * 400}}}', "number out of range"),
    ("[1]", "a JSON schema is an object, true or false"),
    ({"x-guidance": {"lenient": True}}, "x-guidance in a JSON schema is not supported"),
)


@pytest.mark.parametrize(("schema", "message"), REASONS)
def test_a_schema_that_cannot_be_used_is_told_where(schema: dict[str, Any] | str, message: str) -> None:
    with pytest.raises(ConstraintError) as raised:
        COMPILER.compile(JsonSchema(schema))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


UNSUPPORTED = (
    '{"not":{"type":"string"}}',
    '{"if":{"required":["a"]},"then":{"required":["b"]}}',
    '{"uniqueItems":true,"type":["array","null"],"maxItems":2}',
    '{"propertyNames":{"minLength":2}}',
    '{"dependentRequired":{"a":["b"]}}',
    '{"dependentSchemas":{"a":{}}}',
    '{"contains":{"type":"string"}}',
    '{"contains":{},"minContains":0,"maxContains":2}',
    '{"uniqueItems":true}',
    '{"unevaluatedItems":false}',
    '{"$dynamicRef":"#a"}',
    '{"dependencies":{"a":["b"]}}',
)


@pytest.mark.parametrize("schema", UNSUPPORTED)
def test_no_keyword_that_means_something_is_ignored(schema: str) -> None:
    with pytest.raises(ConstraintError, match=f"#/{re.escape(next(iter(json.loads(schema))))}: "):
        COMPILER.compile(JsonSchema(schema))


LARGE = {"type": "integer", "multipleOf": 600_001}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#/x/a", "x": {"a": LARGE}}, "#/x/a"),
        ({"$ref": "#/%78/a", "x": {"a": LARGE}}, "#/x/a"),
        ({"$ref": "#/x~1y/1", "x/y": [{}, LARGE]}, "#/x~1y/1"),
        ({"$ref": "#/default", "default": LARGE}, "#/default"),
        ({"$ref": "json-schema:///#/x", "x": LARGE}, "#/x"),
        ({"items": {"$id": "http://a/b", "properties": {"a": {"$ref": "#/x"}}, "x": LARGE}}, "#/items/x"),
        ({"items": {"$id": "http://a/b", "$ref": "b#/x", "x": LARGE}}, "#/items/x"),
        ({"$ref": "c", "contentSchema": {"$id": "c", **LARGE}}, "#/contentSchema"),
        ({"$ref": "#c", "$defs": {"x": {"$anchor": "c", **LARGE}}}, "#/$defs/x"),
    ],
)
def test_nothing_that_a_reference_leads_to_is_overlooked(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(f"{place}/multipleOf: 600001, and the most is")):
        COMPILER.compile(JsonSchema(schema))


@pytest.mark.parametrize("place", ["x-models", "default", "example"])
def test_what_a_reference_leads_to_may_stand_where_keywords_describe(place: str) -> None:
    schema = {"items": {"$ref": f"#/{place}/a"}, "type": "array", place: {"a": {"const": 1}}}
    state = COMPILER.compile(JsonSchema(schema, whitespace="none"))
    assert accepts(state, "[1,1]")
    assert not accepts(state, "[2]")


def test_a_place_is_that_of_a_definition_in_use() -> None:
    ill = {"items": {"uniqueItems": True}}
    schema = {"$ref": "#/$defs/b", "$defs": {"a": ill, "b": ill}}
    with pytest.raises(ConstraintError, match=r"#/\$defs/b/items/uniqueItems: "):
        COMPILER.compile(JsonSchema(schema))
    assert COMPILER.compile(JsonSchema({"$defs": {"a": ill}}))


MANY: dict[str, Any] = {"properties": {f"p{i}": {} for i in range(3_000)}}
EMBEDDED: tuple[tuple[str, str], ...] = (
    ('start: "a" %json {"multipleOf": 600001}', "line 1, column 12: #/multipleOf: 600001, "),
    ('start: a\na: %json\n\n{"multipleOf": 600001}', "line 2, column 4: #/multipleOf: 600001"),
    ('start: %json{"multipleOf": 600001}', "line 1, column 8: #/multipleOf: 600001"),
    ("start: " + " | ".join(f'%json {{"multipleOf": {20_000 + i}}}' for i in range(6)), "column 128: #/multipleOf: "),
    ('start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}', "line 1, column 8: x-guidance "),
    ('start: "{" a\na: "é" | %json {"items": {"uniqueItems": true}}', "line 2, column 4: #/items/uniqueItems: "),
    (f"start: %json {json.dumps(MANY)}", "line 1, column 8: #: 3,000 optional properties, "),
    ("start: %json " + nested(110), "line 1, column 8: the JSON schema is nested more than 100 levels"),
    ("start: %json " + nested(5_000), "line 1, column 8: the JSON schema is nested"),
    ("start: %json 3", "line 1, column 8: schema must be an object or boolean"),
    (
        f'start: %json {{"multipleOf": 1{"0" * 400}}}',
        "line 1, column 8: #/multipleOf: a number of more than 300",
    ),
    (f'start: %json {{"multipleOf": 1{"0" * 5_000}}}', "number out of range"),
    ('start: %json {"multipleOf": 1e999}', "number out of range"),
    ('start: %json {"a": NaN}', 'failed to parse "%json": expected value'),
    ("start: a\na: b", 'line 2, column 4: unknown name: "b"'),
)


@pytest.mark.parametrize(("text", "message"), EMBEDDED, ids=range(len(EMBEDDED)))
def test_a_schema_in_a_lark_grammar_is_checked_as_any_other(text: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(message)) as raised:
        COMPILER.compile(Lark(text))
    assert str(raised.value).startswith("the Lark grammar cannot be used: ")


@pytest.mark.parametrize(
    "text",
    [
        'start: "%json {"',
        'start: "a" // %json {',
        'start: "a" # %json {"a": 1',
        "start: /%json 3/",
        "start: %json true",
    ],
)
def test_what_is_no_schema_in_a_lark_grammar_is_taken(text: str) -> None:
    assert COMPILER.compile(Lark(text)).mask().any()


@pytest.mark.parametrize("letters", ["[", "\\\\", "(?", "[^]", "[\\\\"])
def test_a_long_pattern_is_looked_at_once(letters: str) -> None:
    # A length at which it has no end where every place begins the look anew.
    schema = JsonSchema({"type": "string", "pattern": letters * 100_000 + "(?!"}, strict=False)
    assert schema.unenforced in ((), ("#/pattern",))


UNENFORCED: tuple[tuple[str, str, str], ...] = (
    # a schema, what of it is left out, and an answer that would keep to all the rest
    ('{"type":"array","uniqueItems":true,"items":{"type":"integer"}}', "#/uniqueItems", "[1,1]"),
    ('{"type":"array","items":{"not":{"type":"null"},"contains":{}}}', "#/items/not #/items/contains", "[null]"),
    ('{"type":"string","format":"regex"}', "#/format", '"("'),
    ('{"type":"integer","format":"int32"}', "", "1"),
    ('{"type":"string","format":"ipv4"}', "", '"1.1.1.1"'),
    ('{"oneOf":[{"type":"integer"},{"type":"integer","minimum":3}]}', "#/oneOf", "4"),
    ('{"type":"object","properties":{"a":{},"b":{}},"minProperties":2}', "#/minProperties", "{}"),
    ('{"type":"object","properties":{"a":{}},"minProperties":1}', "", '{"a":1}'),
    ('{"properties":{"a":{},"b":{}},"maxProperties":1}', "", '{"b":1}'),
    ('{"properties":{"a":{},"b":{}},"maxProperties":1,"additionalProperties":{}}', "#/maxProperties", '{"a":1,"b":1}'),
    ('{"type":"object","properties":{"a":{}},"required":["a"],"minProperties":1}', "", '{"a":1}'),
    ('{"$ref":"#/$defs/b","$defs":{"a":{"not":{}},"b":{"if":{},"then":false}}}', "#/$defs/b/if #/$defs/b/then", "1"),
    ('{"type":"object","propertyNames":{"minLength":2}}', "#/propertyNames", '{"a":1}'),
    ('{"type":"object","propertyNames":{"pattern":"b"}}', "", '{"b":1}'),
    ('{"type":"string","pattern":"^(?!x)a"}', "#/pattern", '"b"'),
    ('{"anyOf":[{"type":"number"},{"type":"string","pattern":"^(?=a)"}]}', "#/anyOf/1/pattern", '"b"'),
    ('{"type":"object","patternProperties":{"^(?!x)a":{},"b":{}}}', "#/patternProperties/^(?!x)a", '{"c":1}'),
    ('{"type":"string","pattern":"[(?=]\\\\(?=?"}', "", '"="'),
    ('{"type":"string","pattern":"[](?=]"}', "", '"="'),
    ('{"type":"string","format":"byte"}', "", '"a"'),
    ('{"type":"array","uniqueItems":false,"x-y":1}', "", "[1,1]"),
)


@pytest.mark.parametrize(("schema", "left_out", "answer"), UNENFORCED)
def test_a_schema_that_is_not_strict_is_kept_to_but_for_what_is_told(schema: str, left_out: str, answer: str) -> None:
    lenient = JsonSchema(schema, whitespace="none", strict=False)
    assert lenient.unenforced == tuple(left_out.split())
    assert accepts(COMPILER.compile(lenient), answer)
    assert not accepts(COMPILER.compile(lenient), '"(')
    strict = JsonSchema(schema, whitespace="none")
    assert strict.unenforced == ()
    assert strict.digest != lenient.digest
    if left_out:
        with pytest.raises(ConstraintError):
            COMPILER.compile(strict)
    else:
        assert accepts(COMPILER.compile(strict), answer)


def test_what_is_no_schema_is_refused_whether_it_is_strict_or_not() -> None:
    for schema in ({"type": "hiccup"}, {"type": "string", "pattern": "("}, {"$ref": "#/nowhere"}):
        with pytest.raises(ConstraintError):
            COMPILER.compile(JsonSchema(schema, strict=False))


KEYWORDS = (
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "$id", "$anchor", "properties", "required"),
    *("additionalProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "minimum", "multipleOf"),
    *("pattern", "patternProperties", "minProperties", "format", "not", "if", "then", "contains", "minContains"),
    *("uniqueItems", "propertyNames", "dependentRequired", "unevaluatedItems", "$dynamicRef", "a", "b"),
)


def odd_value(draws: random.Random, depth: int = 0) -> Any:
    """Return JSON that has the keywords of schemas at any place, with values of any kind."""
    kind = draws.randrange(14 if depth < 4 else 9)
    if kind < 9:
        texts = ("a", "#", "#/$defs/a", "#/a/0", "object", "array", "string", "(", "uuid")
        return (None, True, False, draws.choice((0, 1, -3, 10**20)), 0.5, [], {}, "", draws.choice(texts))[kind]
    if kind < 11:
        return [odd_value(draws, depth + 1) for _ in range(draws.randrange(4))]
    return {draws.choice(KEYWORDS): odd_value(draws, depth + 1) for _ in range(draws.randrange(6))}


def refusal_of(make: Callable[[], Source]) -> str:
    """Return why a source is refused; empty if it is not."""
    try:
        source = make()
        COMPILER.compile(source)
    except ConstraintError as error:
        return str(error)
    assert not isinstance(source, JsonSchema) or all(place.startswith("#") for place in source.unenforced)
    return ""


def test_whatever_json_is_given_for_a_schema_it_is_one_or_is_refused_in_a_line() -> None:
    refusals = []
    for seed in range(by_tier(6_000, quick=1_000)):
        schema = json.dumps(odd_value(random.Random(seed)))
        refusals.append(refusal_of(partial(JsonSchema, schema)))
        refusals.append(refusal_of(partial(JsonSchema, schema, strict=False)))
        refusals.append(refusal_of(partial(Lark, f"start: %json {schema}")))
    assert not any("\n" in refusal for refusal in refusals)
    assert len(refusals) / 10 < refusals.count("") < len(refusals) * 9 / 10


IDLE = (
    '{"uniqueItems":false}',
    '{"uniqueItems":true,"maxItems":1}',
    '{"uniqueItems":true,"type":"string"}',
    '{"minContains":3,"maxContains":9}',
    '{"contains":{"type":"null"},"minContains":0}',
    '{"not":false}',
    '{"if":{"required":["a"]}}',
    '{"if":{"required":["a"]},"then":true,"else":{}}',
    '{"then":{"required":["a"]}}',
    '{"propertyNames":true,"unevaluatedProperties":{},"unevaluatedItems":true}',
    '{"propertyNames":{"pattern":"a"},"type":["array","null"]}',
    '{"dependentRequired":{},"dependentSchemas":{},"dependencies":{}}',
    '{"$dynamicAnchor":"a"}',
)


@pytest.mark.parametrize("schema", IDLE)
def test_a_keyword_that_refuses_nothing_is_taken(schema: str) -> None:
    # What a constant says is data.
    given = {"anyOf": [{"type": "array", "items": json.loads(schema)}, {"const": {"a": json.loads(schema)}}]}
    state = COMPILER.compile(JsonSchema(given, whitespace="none"))
    assert accepts(state, "[null]") == ("null" in schema or "type" not in schema)
    assert accepts(state, json.dumps({"a": json.loads(schema)}, separators=(",", ":")))


@pytest.mark.parametrize("part", range(4))
def test_sources_of_every_kind_that_take_long_come_to_an_end(part: int) -> None:
    kinds = set()
    for seed in range(part, by_tier(60, quick=24), 4):
        kind, make = hostile_source(seed)
        refusals = []
        for namespace in ("a", "b"):
            try:
                assert COMPILER.compile(make(), namespace=namespace).mask().any()
            except ConstraintError as error:
                assert "\n" not in str(error)  # noqa: PT017
                assert len(str(error)) < 500  # noqa: PT017
                refusals.append(str(error))
        # It gets equally far every time.
        assert len(refusals) in (0, 2)
        assert len(set(refusals)) < 2
        kinds.add(kind)
    assert len(kinds) > 2
