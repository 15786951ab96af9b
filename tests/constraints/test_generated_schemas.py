"""Schemas as generators write them: what such schemas are, and answers that keep to them."""

from __future__ import annotations

import json
import random

import pytest

pytest.importorskip("jsonschema")
pytest.importorskip("pydantic")

import jsonschema

from tests.constraints.generated_schemas import generated_schema
from tests.tiers import by_tier

NUMBER = by_tier(2_000, quick=200)


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
