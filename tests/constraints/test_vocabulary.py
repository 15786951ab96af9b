from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("llama_cpp")

from paceline.constraints import Choice, ConstraintCompiler, JsonSchema
from paceline.constraints.vocabulary import TokenTable
from paceline.core.vocabulary import Vocabulary
from paceline.engines.llama_cpp.loading import open_vocabulary
from paceline.engines.options import ModelOptions
from paceline.models.embedded import embedded_draft
from tests.chat.conversing import vocabulary_alone, write_sentencepiece

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "city": {"const": "São  Paulo, in the south"},
        "level": {"enum": ["information", "warning"]},
        "count": {"type": "integer"},
    },
    "required": ["name", "city", "level", "count"],
    "additionalProperties": False,
}
ANSWER = {"name": 'Ada "L" 🙂', "city": "São  Paulo, in the south", "level": "warning", "count": 36}


def walk(vocabulary: Vocabulary, source: JsonSchema | Choice, text: str) -> tuple[int, int]:
    """Lead a text's own tokens through a constraint; return how many were forced, and how many of these were right."""
    state = ConstraintCompiler(vocabulary).compile(source)
    token_ids = TokenTable(vocabulary)(text)
    assert b"".join(map(vocabulary.token_bytes, token_ids)) == text.encode()
    assert state.allows(token_ids) == len(token_ids)
    forced = right = 0
    for i, token_id in enumerate(token_ids):
        told = list(state.forced())
        forced += len(told)
        right += sum(ours == theirs for ours, theirs in zip(told, token_ids[i:], strict=False))
        mask = state.mask()
        assert mask[token_id]
        assert not mask[list(vocabulary.control_ids - vocabulary.end_ids)].any()
        state.advance(token_id)
    assert set(np.flatnonzero(state.mask())) == set(vocabulary.end_ids)
    return forced, right


def test_the_embedded_model_would_write_what_is_forced() -> None:
    with open_vocabulary(embedded_draft()) as vocabulary:
        forced, right = walk(
            vocabulary, JsonSchema(SCHEMA, whitespace="single"), json.dumps(ANSWER, ensure_ascii=False)
        )
    assert forced == right
    assert forced > 50


def test_sentencepiece_adds_no_space_of_its_own(tmp_path: Path) -> None:
    """Every text begins with a space there, and what is forced goes on with another."""
    path = write_sentencepiece(tmp_path / "spm.gguf", {"▁abc": 1, "abc": 1, "▁a": 1, "bc": 1}, add_space_prefix=True)
    with vocabulary_alone(path) as vocabulary:
        assert b"".join(map(vocabulary.token_bytes, vocabulary.tokenize("abc", add_special=False))) == b" abc"
        assert TokenTable(vocabulary)("abc")
        forced, right = walk(vocabulary, Choice(["abc abc 12"]), "abc abc 12")
    assert forced == right > 0


def test_the_torch_engine_reads_the_same_vocabulary() -> None:
    pytest.importorskip("transformers")
    from paceline.engines.torch_hf import TorchHFEngine

    engine = TorchHFEngine(ModelOptions(embedded_draft(), context_length=64, threads=1))
    try:
        forced, right = walk(
            engine.vocabulary, JsonSchema(SCHEMA, whitespace="single"), json.dumps(ANSWER, ensure_ascii=False)
        )
    finally:
        engine.close()
    assert forced == right > 50
