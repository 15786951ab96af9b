from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
    Whitespace,
)
from paceline.constraints.compiled_grammar import GrammarConstraint
from paceline.constraints.sources import Source
from paceline.core.constraint import Constraint
from paceline.core.errors import ConstraintError
from paceline.engines.scripted import ScriptedVocabulary
from tests.constraints.helpers import BYTES, END, accepts, allowed_texts, start_of

# Two ways to spell some texts, two ends, one token of another's bytes, and padding.
PIECES = [b"a", b"b", b"ab", b"ba", b"c", b"<end>", b"", b"a", b"</s>", b'"', b"\xff"]
VOCABULARY = ScriptedVocabulary(PIECES, end_ids=[5, 8])


def test_a_mask_has_every_token_that_may_follow() -> None:
    state = start_of(Regex("abc?"), VOCABULARY)
    assert np.flatnonzero(state.mask()).tolist() == [0, 2, 7]
    state.advance(0)
    assert np.flatnonzero(state.mask()).tolist() == [1]
    state.advance(1)
    # The answer may be over here, so the ends are among them.
    assert np.flatnonzero(state.mask()).tolist() == [4, 5, 8]
    state.advance(4)
    # It has to be.
    assert np.flatnonzero(state.mask()).tolist() == [5, 8]
    state.advance(8)
    assert np.flatnonzero(state.mask()).tolist() == [5, 8]


def test_a_mask_is_kept_and_cannot_be_written_to() -> None:
    state = start_of(Regex("abc?"), VOCABULARY)
    mask = state.mask()
    assert mask.shape == (VOCABULARY.size,)
    assert mask.dtype == np.bool_
    assert state.mask() is mask
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = False


def test_states_move_apart() -> None:
    start = start_of(Choice(["abc", "ba"]), VOCABULARY)
    first, second = start.fork(), start.fork()
    first.advance(0)
    second.advance(3)
    assert allowed_texts(first, VOCABULARY) == {b"b"}
    assert allowed_texts(second, VOCABULARY) == {b"<end>", b"</s>"}
    assert allowed_texts(start, VOCABULARY) == {b"a", b"ab", b"b", b"ba"}
    again = first.fork()
    again.advance(1)
    assert allowed_texts(first, VOCABULARY) == {b"b"}
    assert allowed_texts(again, VOCABULARY) == {b"c"}


def test_tokens_are_counted_and_the_state_stays() -> None:
    state = start_of(Regex("abc?"), VOCABULARY)
    for _ in range(2):
        assert state.allows([0, 1, 4, 5]) == 4
        assert state.allows([2, 4, 4]) == 2
        assert state.allows([7, 1, 8, 0]) == 3
        assert state.allows([1]) == 0
        assert state.allows([]) == 0
        # Padding, and what is no token at all.
        assert state.allows([6]) == 0
        assert state.allows([0, 11]) == 1
        assert state.allows([-1]) == 0
    assert allowed_texts(state, VOCABULARY) == {b"a", b"ab"}


@pytest.mark.parametrize("token_id", [4, 5, 6, 10, 11, -1])
@pytest.mark.parametrize("seen", [False, True])
def test_a_token_that_may_not_follow_is_refused(token_id: int, seen: bool) -> None:
    state = ConstraintCompiler(VOCABULARY).compile(Regex("xy|abc?"))
    state.advance(0)
    if seen:
        state.mask()
    with pytest.raises(ConstraintError, match=rf"^token {token_id} is not allowed here by the regular expression$"):
        state.advance(token_id)


def test_what_has_to_follow_is_told_and_is_not_all_that_may() -> None:
    vocabulary = ScriptedVocabulary([b"a", b"b", b"ab", b"abab", b"c", b"d", b"<end>"], end_ids=[6])
    state = start_of(Regex("ababab(c|d)"), vocabulary)
    forced = state.forced()
    assert b"".join(map(vocabulary.token_bytes, forced)) == b"ababab"
    assert state.allows(forced) == len(forced)
    assert allowed_texts(state, vocabulary) == {b"a", b"ab", b"abab"}
    state = start_of(Regex("ababab(c|d)"), vocabulary)
    state.advance(0)
    assert b"".join(map(vocabulary.token_bytes, state.forced())) == b"babab"
    for token_id in list(state.forced()):
        assert state.forced()[0] == token_id
        state.advance(token_id)
    assert list(state.forced()) == []
    assert allowed_texts(state, vocabulary) == {b"c", b"d"}


def test_a_model_that_spells_what_is_forced_by_other_tokens_is_not_told_for_a_while() -> None:
    vocabulary = ScriptedVocabulary([b"a", b"b", b"ab", b"<end>"], end_ids=[3])
    state = start_of(Regex("(ab){20}"), vocabulary)
    assert list(state.forced())[:3] == [2, 2, 2]
    state.advance(0)
    for token_id in (1, 0, 1, 0, 1, 0, 1, 2):
        assert list(state.fork().forced()) == []
        state.advance(token_id)
    assert list(state.forced())[:3] == [2, 2, 2]


@pytest.mark.parametrize(("clock", "is_told"), [("perf_counter", True), ("thread_time", False)])
def test_a_grammar_that_takes_long_is_not_asked_again_and_a_busy_machine_makes_none_slow(
    clock: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = start_of(Regex("abc[xy]def"))
    with monkeypatch.context() as patch:
        patch.setattr(time, clock, itertools.count(0, 0.06).__next__)
        assert bytes(state.forced()) == b"abc"
    for token_id in b"abcx":
        state.advance(token_id)
    assert bytes(state.forced()) == (b"def" if is_told else b"")


def test_no_more_is_forced_than_may_be_drafted() -> None:
    state = start_of(Lark('start: a{5000}\na: "b"'))
    assert list(state.forced()) == [ord("b")] * 128


class Recorded:
    """llguidance's state, which notes what it looked for while no other thread could run."""

    def __init__(self, matcher: Any, found: list[int]) -> None:
        self._matcher = matcher
        self._found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> Recorded:
        return Recorded(self._matcher.deep_copy(), self._found)

    def compute_ff_bytes(self) -> bytes:
        found: bytes = self._matcher.compute_ff_bytes()
        self._found.append(len(found))
        return found


@pytest.mark.parametrize(
    ("source", "forced"),
    [
        (Regex("ab[cd]"), b"ab"),
        (Regex("a{100}[bc]"), b"a" * 100),
        (Lark('start: a{5000}\na: "b"'), b"b" * 128),
        (JsonSchema({"items": {"const": "x" * 1_000}, "type": "array", "minItems": 10**9}, whitespace="none"), None),
    ],
)
def test_what_has_no_end_is_not_looked_for_at_once(source: Source, forced: bytes | None) -> None:
    state = start_of(source)
    assert isinstance(state, GrammarConstraint)
    looked: list[int] = []
    setattr(state, "_matcher", Recorded(state._matcher, looked))  # noqa: B010
    assert bytes(state.forced()) == (forced or b'["' + b"x" * 126)
    assert all(number <= 128 for number in looked)


def test_a_place_that_the_vocabulary_cannot_go_on_from_is_an_error() -> None:
    state = start_of(Regex("ab(ab)*x"), VOCABULARY)
    state.advance(2)
    assert allowed_texts(state, VOCABULARY) == {b"a", b"ab"}
    state = start_of(Regex("abx"), VOCABULARY)
    state.advance(2)
    with pytest.raises(ConstraintError, match=r"^no token of this model's vocabulary can go on with an answer"):
        state.mask()


@pytest.mark.parametrize(
    ("whitespace", "allowed"), [("any", [0, 1, 2, 3, 4]), ("short", [0, 1, 2, 3]), ("single", [1]), ("none", [0])]
)
def test_whitespace(whitespace: Whitespace, allowed: list[int]) -> None:
    value = {"a": [1, 2], "b": {}}
    texts = [
        json.dumps(value, separators=(",", ":")),
        json.dumps(value),
        json.dumps(value, indent=2),
        json.dumps(value, indent="\t"),
        '{  "a": [1,2],\n\n"b":{}}',
    ]
    for source in (JsonObject(whitespace=whitespace), JsonSchema({"type": "object"}, whitespace=whitespace)):
        state = start_of(source)
        assert [i for i, text in enumerate(texts) if accepts(state, text)] == allowed


def test_every_kind_of_source() -> None:
    assert accepts(JsonObject(), '{"a": [1, true, null, "\\n", -1.5e3]}')
    assert not accepts(JsonObject(), "[]")
    assert accepts(JsonSchema(True), "[]")
    assert accepts(JsonSchema({}), "1")
    assert accepts(Regex("a/b|[/]"), "a/b")
    assert accepts(Regex("a/b|[/]"), "/")
    assert not accepts(Regex("b"), "ab")
    choice = ['"', "a\n", "é\\", "ab", "abc", "🙂"]
    assert all(accepts(Choice(choice), text) for text in choice)
    assert not accepts(Choice(choice), "a")
    assert accepts(Lark('start: a "b"\na: "a"*'), "aab")
    assert accepts(Gbnf('root ::= "a"+'), "aa")


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ({"name": "Ada", "tags": []}, True),
        ({"name": "Ada", "age": 36, "tags": ["a", "b"], "next": {"name": "é🙂", "tags": ["b"]}}, True),
        ({"name": "Ada", "tags": ["a"], "next": None}, True),
        ({"name": "Adaaaa", "tags": []}, False),
        ({"name": "Ada"}, False),
        ({"name": "Ada", "age": 151, "tags": []}, False),
        ({"name": "Ada", "age": 1.5, "tags": []}, False),
        ({"name": "Ada", "tags": ["c"]}, False),
        ({"name": "Ada", "tags": ["a", "a", "a"]}, False),
        ({"name": "Ada", "tags": [], "more": 1}, False),
        ({"name": "Ada", "tags": [], "next": {"name": "x"}}, False),
        ([], False),
    ],
)
def test_answers_keep_to_a_schema(value: object, valid: bool) -> None:
    assert accepts(JsonSchema(SCHEMA), json.dumps(value, ensure_ascii=False)) == valid


def test_states_of_one_grammar_in_many_threads() -> None:
    """What grows while states are used is shared among them, within the library."""
    start = start_of(Regex("((a|b)*a(a|b){6}c)*"))
    texts = ["".join("ab"[(seed * i + i // 3) % 2] for i in range(400)) for seed in range(8)]
    expected = [walk(start_of(Regex("((a|b)*a(a|b){6}c)*")), text) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: walk(start.fork(), text), texts)) == expected


def walk(state: Constraint, text: str) -> list[int]:
    sums = []
    for token_id in text.encode():
        sums.append(int(state.mask().sum()))
        state.advance(token_id)
    return sums


def write(state: Constraint, text: str) -> None:
    for token_id in text.encode():
        state.mask()
        state.advance(token_id)


def count_built(compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    built: list[object] = []
    checked = compiler._start_matcher

    def counted(*args: Any) -> Any:
        built.append(args)
        return checked(*args)

    monkeypatch.setattr(compiler, "_start_matcher", counted)
    return built


GREEDY = Regex("((a{1,50}){1,50}){1,50}|(bc)*")
"""Takes more for an ``a`` than a mask may with little fuel."""


def test_an_answer_pays_for_what_its_masks_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time, as the library counts nothing: it ends the answer, its forks too, and no other one."""
    compiler = ConstraintCompiler(BYTES)
    state, other = (compiler.compile(Regex("a*")) for _ in range(2))
    fork = state.fork()
    with monkeypatch.context() as patch:
        patch.setattr(time, "thread_time", itertools.count(0, 0.1).__next__)
        with pytest.raises(ConstraintError, match="takes too much"):
            write(state, "a" * 100)
    for each in (fork, fork.fork()):
        with pytest.raises(ConstraintError, match="takes too much"):
            each.mask()
        assert list(each.forced()) == []
    write(other, "a" * 100)
    # As much as a state is due is taken from no answer, however long.
    monkeypatch.setattr(time, "thread_time", itertools.count(0, 1e-3).__next__)
    write(compiler.compile(Regex("a*")), "a" * 2_000)


def test_making_automata_anew_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = ConstraintCompiler(BYTES, CompilingLimits(step_fuel=5_000))
    built = count_built(compiler, monkeypatch)
    other = compiler.compile(GREEDY)
    write(other, "bcb")
    compiled = len(built)
    monkeypatch.setattr(time, "thread_time", itertools.count(0, 0.05).__next__)
    for _ in range(100):
        # No matter whose answer spoils them: here one that nobody else asked for.
        other._grammar.spoil(other._grammar._generation)  # type: ignore[attr-defined]
        try:
            write(other, "cb")
        except ConstraintError as error:
            assert "takes too much time or memory" in str(error)  # noqa: PT017
            break
    else:
        pytest.fail("a small grammar is made again without an end")
    assert 1 <= len(built) - compiled < 12


def test_automata_that_were_spoiled_are_not_made_anew_for_a_new_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is compiled again, by whom that keeps waiting; answers there are go on with their own."""
    compiler = ConstraintCompiler(BYTES, CompilingLimits(step_fuel=5_000))
    greedy, other = (compiler.compile(GREEDY) for _ in range(2))
    with pytest.raises(ConstraintError, match="takes too much"):
        write(greedy, "a" * 1_000)
    again = compiler.compile(GREEDY)
    assert again._grammar is not other._grammar  # type: ignore[attr-defined]
    assert accepts(again, "bc")
    assert accepts(other, "bc")


def test_an_answer_that_takes_too_much_ends_no_other() -> None:
    """The library refuses every state of a grammar once one of them took too much of its automata."""
    compiler = ConstraintCompiler(BYTES, CompilingLimits(step_fuel=5_000))
    greedy, other, forced, fresh = (compiler.compile(GREEDY) for _ in range(4))
    write(other, "bcb")
    write(forced, "bcb")
    with pytest.raises(ConstraintError, match="takes too much"):
        write(greedy, "a" * 1_000)
    assert other.allows([*b"cbc", END]) == 4
    assert list(forced.forced()) in ([ord("c")], [])
    assert forced.mask()[ord("c")]
    write(other, "cbc")
    assert allowed_texts(other, BYTES) == {b"b", b"<end>"}
    assert accepts(fresh, "bc")
    assert accepts(compiler.compile(GREEDY), "bcbc")
    assert not accepts(other, "a")
    # Whoever takes too much does so with new automata too.
    with pytest.raises(ConstraintError, match="takes too much"):
        write(compiler.compile(GREEDY), "a" * 1_000)
    assert accepts(other, "bc")
