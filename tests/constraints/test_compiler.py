from __future__ import annotations

import json
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

pytest.importorskip("llguidance")

from paceline.constraints import (
    Choice,
    CompilingLimits,
    ConstraintCompiler,
    Gbnf,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    Source,
    compiler,
    llguidance_grammars,
)
from paceline.core.errors import CapabilityError, ConstraintError, QueueFullError
from paceline.core.vocabulary import Vocabulary
from paceline.engines.scripted import ScriptedVocabulary
from tests.constraints.helpers import BYTES, accepts, allowed_texts
from tests.timing import WAIT_S


def count_compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    compiled: list[str] = []
    grammar_of = llguidance_grammars.build_grammar

    def counted(source: object, vocabulary: object) -> str:
        compiled.append(source.text)  # type: ignore[attr-defined]
        return grammar_of(source, vocabulary)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler, "build_grammar", counted)
    return compiled


def test_a_source_is_compiled_once_and_each_answer_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compiled(monkeypatch)
    compiler = ConstraintCompiler(BYTES)
    first = compiler.compile(Regex("ab"))
    first.advance(ord("a"))
    assert allowed_texts(compiler.compile(Regex("ab")), BYTES) == {b"a"}
    assert compiled == ["ab"]


@pytest.mark.parametrize(
    ("limits", "texts", "expected"),
    [
        (CompilingLimits(kept=2), ["a", "b", "a", "c", "a", "b"], ["a", "b", "c", "b"]),
        (CompilingLimits(kept_bytes=10), ["aaaa", "bbbb", "cccc", "bbbb"], ["aaaa", "bbbb", "cccc"]),
        (CompilingLimits(kept_bytes=10), ["d" * 11, "d" * 11], ["d" * 11, "d" * 11]),
    ],
)
def test_those_used_last_are_kept(
    limits: CompilingLimits, texts: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = count_compiled(monkeypatch)
    compiler = ConstraintCompiler(BYTES, limits)
    for text in texts:
        compiler.compile(Regex(text))
    assert compiled == expected


def test_sources_in_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compiled(monkeypatch)
    compiler = ConstraintCompiler(BYTES)

    def work(i: int) -> bool:
        return accepts(compiler.compile(Regex(f"(a|b){{{i % 4}}}c")), "ab"[i % 2] * (i % 4) + "c")

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(work, range(16)))
    assert sorted(compiled) == [f"(a|b){{{i}}}c" for i in range(4)]


class Held:
    """Has sources of which the text begins with ``slow`` wait while they are compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.goes_on = threading.Semaphore(0)
        self._grammar_of = llguidance_grammars.build_grammar
        monkeypatch.setattr(compiler, "build_grammar", self._held)

    def _held(self, source: Source, vocabulary: Vocabulary) -> str:
        if source.text.startswith("slow"):
            self.begun.release()
            assert self.goes_on.acquire(timeout=WAIT_S)
        return self._grammar_of(source, vocabulary)


def test_what_one_namespace_compiles_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    compiler = ConstraintCompiler(BYTES, CompilingLimits(wait_s=0.2))
    kept = compiler.compile(Regex("kept"), namespace="a")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(lambda: compiler.compile(Regex("slow"), namespace="a"))
        assert held.begun.acquire(timeout=WAIT_S)
        with pytest.raises(QueueFullError, match="other grammars are still being compiled"):
            compiler.compile(Regex("next"), namespace="a")
        # What is compiled already waits for nothing, and nobody else does.
        assert allowed_texts(compiler.compile(Regex("kept"), namespace="a"), BYTES) == allowed_texts(kept, BYTES)
        assert accepts(compiler.compile(Regex("next"), namespace="b"), "next")
        assert accepts(compiler.compile(JsonObject(), namespace="a"), "{}")
        held.goes_on.release()
        assert accepts(slow.result(WAIT_S), "slow")
    assert accepts(compiler.compile(Regex("next"), namespace="a"), "next")


def test_when_a_source_is_answered_for_nothing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that nobody waits for goes on for as long as it likes."""
    begun = threading.active_count()
    compiler = ConstraintCompiler(BYTES)
    for source in (Regex("a"), Regex("[a"), Gbnf("root ::= " + " | ".join(['[ab]* "a"' + " [ab]" * 10] * 300))):
        with suppress(ConstraintError):
            compiler.compile(source)
        assert threading.active_count() == begun


def test_what_one_compiled_is_not_found_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compiled(monkeypatch)
    compiler = ConstraintCompiler(BYTES)
    schema = JsonSchema({"type": "integer"})
    for _ in range(2):
        for whose in ({"namespace": "a"}, {"namespace": "b"}, {"namespace": "a", "salt": "c"}, {"salt": "a"}, {}):
            assert accepts(compiler.compile(schema, **whose), "1")
    assert compiled == [schema.text] * 5
    # What no client wrote tells of none.
    for namespace in ("a", "b"):
        compiler.compile(JsonObject(), namespace=namespace)
    assert compiled == [*[schema.text] * 5, JsonObject().text]


@pytest.mark.parametrize("limits", [CompilingLimits(kept=8), CompilingLimits(kept_bytes=32)])
def test_one_namespace_pushes_out_what_is_its_own(limits: CompilingLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = count_compiled(monkeypatch)
    compiler = ConstraintCompiler(BYTES, limits)
    mine = [Regex(f"mi{i}e") for i in range(3)]
    for source in mine:
        compiler.compile(source, namespace="a")
    for i in range(100, 140):
        compiler.compile(Regex(f"o{i}"), namespace="b", salt=str(i))
    compiled.clear()
    for source in mine:
        compiler.compile(source, namespace="a")
    assert not compiled
    compiler.compile(Regex("o139"), namespace="b", salt="139")
    assert not compiled
    compiler.compile(Regex("o130"), namespace="b", salt="130")
    assert compiled == ["o130"]


def test_an_error_leaves_the_compiler_as_it_was() -> None:
    compiler = ConstraintCompiler(BYTES)
    for _ in range(3):
        with pytest.raises(ConstraintError, match="unclosed character class"):
            compiler.compile(Regex("[a"))
    assert accepts(compiler.compile(Regex("a")), "a")


@pytest.mark.parametrize(
    ("source", "begins"),
    [
        (JsonSchema({"type": "object"}), "'{'"),
        (JsonSchema({"enum": ["a", {}]}), "'\"'"),
        (Regex("xy"), "'x'"),
        (Regex("x?"), "'x'"),
        (Gbnf('root ::= "é" | "ü"'), "the byte c3"),
    ],
)
def test_a_vocabulary_that_cannot_spell_a_grammar(source: Regex, begins: str) -> None:
    vocabulary = ScriptedVocabulary([b"a", b"b", b"}", b"<end>"], end_ids=[3])
    with pytest.raises(ConstraintError) as raised:
        ConstraintCompiler(vocabulary).compile(source)
    assert f"would begin with {begins}: " in str(raised.value)


@pytest.mark.parametrize(
    "source", [JsonSchema({"$ref": "#"}), JsonSchema(False), Lark('start: start "a"'), Lark("start: start")]
)
def test_a_source_that_allows_nothing(source: Lark) -> None:
    with pytest.raises(ConstraintError, match=f"^{source.name} .*allows no text at all, so it has no valid answer$"):
        ConstraintCompiler(BYTES).compile(source)


def test_an_answer_may_be_empty_if_nothing_else_is_said() -> None:
    assert accepts(Gbnf('root ::= ""'), "")
    assert accepts(Choice([""]), "")


@pytest.mark.parametrize("vocabulary", [ScriptedVocabulary([b"a"]), ScriptedVocabulary([b"", b"<end>"], end_ids=[1])])
def test_a_model_without_an_end_or_whose_tokens_tell_no_bytes_is_refused(vocabulary: ScriptedVocabulary) -> None:
    with pytest.raises(CapabilityError):
        ConstraintCompiler(vocabulary).compile(Regex("a"))


def test_without_the_library_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(CapabilityError, match=r"pip install '\.\[constraints\]'"):
        ConstraintCompiler(BYTES).compile(Regex("a"))


def random_value(draws: random.Random, depth: int = 0) -> object:
    kinds = ["null", "bool", "int", "float", "text"] + ["list", "object"] * (depth < 3)
    match draws.choice(kinds):
        case "null":
            return None
        case "bool":
            return draws.random() < 0.5
        case "int":
            return draws.randrange(-(10**6), 10**6)
        case "float":
            return round(draws.uniform(-1e3, 1e3), 3)
        case "text":
            return "".join(draws.choice('ab "\\\n\té🙂{}[]:,') for _ in range(draws.randrange(6)))
        case "list":
            return [random_value(draws, depth + 1) for _ in range(draws.randrange(4))]
        case _:
            return {f"k{i}": random_value(draws, depth + 1) for i in range(draws.randrange(4))}


def schema_of(value: object) -> dict[str, object]:
    """Return a schema that a value keeps to, and few others."""
    match value:
        case None:
            return {"type": "null"}
        case bool():
            return {"const": value}
        case int():
            return {"type": "integer", "minimum": value - 5, "maximum": value + 5}
        case float():
            return {"type": "number"}
        case str():
            return {"type": "string", "minLength": len(value), "maxLength": len(value)}
        case list():
            return {"type": "array", "prefixItems": [schema_of(item) for item in value], "items": False}
        case dict():
            return {
                "type": "object",
                "properties": {key: schema_of(each) for key, each in value.items()},
                "required": list(value),
                "additionalProperties": False,
            }
        case _:
            raise AssertionError(value)


def test_random_values_keep_to_their_own_schemas() -> None:
    compiler = ConstraintCompiler(BYTES)
    refused = 0
    for seed in range(60):
        draws = random.Random(seed)
        value, other = {"a": random_value(draws), "b": [random_value(draws)]}, random_value(draws)
        state = compiler.compile(JsonSchema(schema_of(value)))
        text = json.dumps(value, ensure_ascii=False, indent=draws.choice([None, 1]))
        assert accepts(state, text)
        assert not accepts(state, json.dumps(other, ensure_ascii=False))
        broken = text.replace(draws.choice('{}[]:"'), "", 1)
        assert not accepts(state, broken) or broken == text
        refused += broken != text
    assert refused > 40


def test_every_text_of_a_masked_walk_is_valid() -> None:
    compiler = ConstraintCompiler(BYTES)
    start = compiler.compile(
        JsonSchema({"type": "array", "items": {"enum": [1, "é", None, {"a": []}]}, "maxItems": 4}, whitespace="none")
    )
    lengths = set()
    for seed in range(100):
        draws = np.random.default_rng(seed)
        state, answer = start.fork(), bytearray()
        while True:
            token_id = int(draws.choice(np.flatnonzero(state.mask())))
            state.advance(token_id)
            if token_id in BYTES.end_ids:
                break
            answer.append(token_id)
        value = json.loads(answer.decode())
        assert all(item in (1, "é", None, {"a": []}) for item in value)
        lengths.add(len(value))
    assert lengths == {0, 1, 2, 3, 4}
