"""Schemas as generators write them: what such schemas are, and answers that keep to them."""

from __future__ import annotations

import decimal
import itertools
import json
import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
pytest.importorskip("pydantic")

import jsonschema

from paceline.constraints import ConstraintCompiler, JsonSchema
from paceline.core.constraint import Constraint
from paceline.core.errors import ConstraintError
from paceline.serving.constraint_fields import read_constraint
from tests.constraints.generated_schemas import check, generated_schema, without_old_bounds
from tests.constraints.helpers import BYTES, END
from tests.tiers import by_tier

NUMBER = by_tier(2_000, quick=200)
SHORT = 300
"""Bytes after which a walk takes what ends soonest."""
REFUSALS = (
    r"(the JSON schema cannot be used: )?#\S*/(pattern|uniqueItems|propertyNames|oneOf|\$ref): "
    r".*(leave it out, or say `strict=False`|say anyOf)"
)


def test_they_are_schemas_of_objects_and_the_same_for_the_same_seed() -> None:
    written = set()
    for seed in range(NUMBER):
        schema = generated_schema(random.Random(seed))
        assert schema == generated_schema(random.Random(seed))
        # What has itself as a part stands among the definitions as a whole.
        whole = schema["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        assert whole["type"] == "object"
        if "$schema" in schema:
            jsonschema.validators.validator_for(schema).check_schema(schema)
        written.add(json.dumps(schema))
    assert len(written) > NUMBER * 0.99


class Walk:
    """A random answer, byte by byte, that comes to an end.

    Args:
        draws: of which it is made.
        patterns: what texts may have to look like, spelled over and over in those that go on for long.
    """

    def __init__(self, draws: random.Random, patterns: str) -> None:
        self._draws = draws
        self._spelled = itertools.cycle(patterns.encode())
        self.text = bytearray()
        self._in_string = self._is_escaped = False

    def next_of(self, allowed: list[int]) -> int:
        draws = self._draws
        soon = b'"' if self._in_string else b'}]",:n'
        closing: list[int] = [END, *soon]
        if len(self.text) > SHORT or draws.random() < 0.3:
            for token_id in closing:
                if token_id in allowed:
                    return token_id
        if self._in_string and len(self.text) > SHORT and (byte := next(self._spelled)) in allowed:
            return byte if draws.random() < 0.8 else draws.choice(allowed)
        plain = [token_id for token_id in allowed if 32 <= token_id < 127 or token_id == END]
        return draws.choice(plain or allowed)

    def add(self, byte: int) -> None:
        self.text.append(byte)
        if self._is_escaped:
            self._is_escaped = False
        elif byte == ord("\\"):
            self._is_escaped = self._in_string
        elif byte == ord('"'):
            self._in_string = not self._in_string


def random_answer(state: Constraint, draws: random.Random, schema: dict[str, Any]) -> Any:
    walk = Walk(draws, "".join(re.findall('"pattern": "([^"]*)"', json.dumps(schema))) or "@")
    while len(walk.text) < 20_000:
        token_id = walk.next_of(np.flatnonzero(state.mask()).tolist())
        state.advance(token_id)
        if token_id == END:
            return json.loads(walk.text, parse_float=decimal.Decimal)
        walk.add(token_id)
    raise AssertionError(f"no end: {walk.text[:2000]!r}")


def source_of(schema: dict[str, Any], *, strict: bool) -> JsonSchema:
    """Return what a request says whose answer is to keep to a schema."""
    described = {"name": "answer", "schema": schema, "strict": strict}
    named = read_constraint({"response_format": {"type": "json_schema", "json_schema": described}}, {})
    assert named is not None
    assert isinstance(named.source, JsonSchema)
    return named.source


def refusal_of(compiler: ConstraintCompiler, source: JsonSchema) -> str:
    """Return why a schema cannot be used; empty if it can."""
    try:
        compiler.compile(source)
    except ConstraintError as error:
        return str(error)
    return ""


def test_an_answer_keeps_to_a_schema_or_the_schema_is_refused_with_place_and_way_out() -> None:
    compiler = ConstraintCompiler(BYTES)
    refused: Counter[str] = Counter()
    for seed in range(NUMBER):
        schema = generated_schema(random.Random(seed))
        strict, lenient = (source_of(schema, strict=strict) for strict in (True, False))
        assert not refusal_of(compiler, lenient)
        if refusal := refusal_of(compiler, strict):
            found = re.match(REFUSALS, refusal)
            assert found, (seed, refusal)
            assert lenient.unenforced, (seed, refusal)
            refused[found[2]] += 1
        source = lenient if refusal else strict
        answer = random_answer(compiler.compile(source), random.Random(seed), schema)
        check(without_old_bounds(schema), answer, source.unenforced)
    assert sum(refused.values()) < NUMBER * 0.4, refused
    assert refused["oneOf"] < NUMBER * 0.03, refused
