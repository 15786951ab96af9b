"""Functions with parameters as pydantic, zod and OpenAPI's tools write them, called in every family's way.

Each call is drawn from the grammar, token by token, and read back: its arguments are valid by the schema.
"""

from __future__ import annotations

import decimal
import json
import random
import re
from typing import Final

import pytest

pytest.importorskip("jsonschema")
pytest.importorskip("pydantic")

from paceline.chat.tool_calls.grammar import build_calls_source
from paceline.constraints import JsonSchema
from tests.chat.tool_calls.answers import BY_NAME, added, parser_of
from tests.chat.tool_calls.machine import CONTROL_IDS, text_of, written_at_random
from tests.constraints.generated_schemas import check, generated_schema, without_old_bounds
from tests.tiers import by_tier

NUMBER: Final = by_tier(2_000, quick=30)
"""Schemas. Each is called in a fifth of the families' ways, and every family has a fifth of them."""

# A number that is none for Python.
_TOO_LARGE: Final = re.compile(r"[0-9][eE]\+?[0-9]{3}")


@pytest.mark.parametrize("family", BY_NAME)
def test_a_call_of_any_function_keeps_to_its_schema(family: str) -> None:
    numbers = range(list(BY_NAME).index(family) % 5, NUMBER, 5)
    num_read = num_given = 0
    for number in numbers:
        schema = generated_schema(random.Random(number))
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        ids = CONTROL_IDS if number % 2 else {}
        grammar = build_calls_source(BY_NAME[family], tools, required=True, parallel=False, control_ids=ids).text
        token_ids = written_at_random(grammar, random.Random(f"{family} {number}"), 3_000)
        if token_ids is None or _TOO_LARGE.search(text := text_of(token_ids)):
            continue
        parser = parser_of(family, tools, required=True)
        message = added([*parser.push(text), *parser.finish()])
        assert (message.content, len(message.calls)) == ("", 1), (number, text)
        [(_, name, arguments)] = message.calls
        assert name == "f"
        value = json.loads(arguments, parse_float=decimal.Decimal)
        check(without_old_bounds(schema), value, JsonSchema(schema, strict=False).unenforced)
        num_read += 1
        num_given += bool(value)
    # The others go on and on: what is drawn at random seldom ends a text.
    assert num_read > len(numbers) // 2
    assert num_given > len(numbers) // 3
