"""Constraints out of sources, for one vocabulary: each is compiled once and kept for a while.

::

    Source ──check──> llguidance's grammar ──thread with much stack──> start state ──kept by namespace──> forks

Users send sources, so that one may be made to take long. Its size is bounded, what llguidance does is counted in its
own units, what is done before is counted (:mod:`~paceline.constraints.lexemes`) or looked for
(:mod:`~paceline.constraints.schema_limits`). So each comes to its end in a second or two, and the same source is
refused on every machine. Sources of one namespace are compiled one after the other: what they take, they take once.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.constraints.compiled_grammar import CompiledGrammar
from paceline.constraints.llguidance_errors import (
    explain_schema_error,
    find_error_pointer,
    is_resource_error,
    is_unenforced_warning,
    one_line_reason,
    strip_excerpt,
)
from paceline.constraints.llguidance_grammars import (
    build_grammar,
    build_open_grammar,
    locate_in_embedded,
    max_source_bytes,
)
from paceline.constraints.schema_limits import MAX_BYTES
from paceline.constraints.sources import Calls, JsonObject, JsonSchema, Lark, Source
from paceline.constraints.vocabulary import build_tokenizer, import_llguidance
from paceline.core.arrays import BoolArray
from paceline.core.constraint import Constraint
from paceline.core.deep_stack import with_deep_stack
from paceline.core.errors import ConstraintError, QueueFullError
from paceline.core.text import spelled_bytes
from paceline.core.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True, slots=True)
class CompilingLimits:
    """How much a source may take.

    Attributes:
        source_bytes: size of its text.
        wait_s: seconds that a source waits for others of its namespace.
        kept: number of compiled sources that are kept. Where there are more, the namespace that has most gives one up.
        kept_bytes: size of their texts, together.
        row_items: places in a schema's rules that an answer may be at once at one of its bytes. What each takes grows
            with all of them.
        other_row_items: places in the rules of other sources, where less is honest.
        step_items: places in a schema's rules that are visited for one mask.
        other_step_items: places in the rules of other sources.
        start_fuel: parts of a schema's automata when they are made.
        other_start_fuel: parts of other sources' automata when they are made; these can say more in fewer bytes.
        step_fuel: parts of automata that are made for one mask.
        lexer_states: states of automata, over all answers that keep to the grammar: 1 to 2 kB each.
    """

    source_bytes: int = MAX_BYTES
    wait_s: float = 5.0
    kept: int = 64
    kept_bytes: int = 8 << 20
    row_items: int = 10_000
    other_row_items: int = 5_000
    step_items: int = 50_000
    other_step_items: int = 20_000
    start_fuel: int = 1_000_000
    other_start_fuel: int = 300_000
    step_fuel: int = 50_000
    lexer_states: int = 25_000


@dataclass(slots=True)
class _Namespace:
    """What one client had compiled, the last used at the end, and the turn of what it has compiled now."""

    kept: OrderedDict[str, tuple[int, CompiledGrammar]] = field(default_factory=OrderedDict)
    num_bytes: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)


class ConstraintCompiler:
    """Compiles sources for one vocabulary. Any thread may use it.

    Args:
        vocabulary: the target's.
        limits: how much a source may take.
    """

    def __init__(self, vocabulary: Vocabulary, limits: CompilingLimits | None = None) -> None:
        self._vocabulary = vocabulary
        self._limits = limits or CompilingLimits()
        self._tokenizer: LLTokenizer | None = None
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._namespaces: defaultdict[str | None, _Namespace] = defaultdict(_Namespace)

    def compile(self, source: Source, *, namespace: str = "", salt: str = "") -> Constraint:
        """Return the state in which an answer begins.

        Args:
            source: what the answer keeps to.
            namespace: whose it is. What one has compiled is not found by another, who could tell by the time it takes.
            salt: parts one namespace further.

        Raises:
            ConstraintError: the source cannot be used; the message says why, and where in it.
            CapabilityError: llguidance is not installed, or no answer in this vocabulary could keep to a grammar.
            QueueFullError: sources before this one take long.
        """
        # That somebody asked for any JSON says nothing of anybody.
        whose = None if isinstance(source, JsonObject) else namespace
        key = f"{source.digest} {salt}"
        with self._lock:
            mine = self._namespaces[whose]
        if (found := self._find(mine, key)) is not None:
            return found
        most = min(self._limits.source_bytes, max_source_bytes(source))
        if source.num_bytes > most:
            raise ConstraintError(
                f"{source.name} has {source.num_bytes:,} bytes, and the most is {most:,}: make it smaller"
            )
        if not mine.turn.acquire(timeout=self._limits.wait_s):
            raise QueueFullError("other grammars are still being compiled: try again later")
        try:
            if (found := self._find(mine, key)) is not None:
                return found
            compiled = with_deep_stack(lambda: self._build(source))
            self._keep(mine, key, source.num_bytes, compiled)
        finally:
            mine.turn.release()
        return compiled.start()

    def _find(self, mine: _Namespace, key: str) -> Constraint | None:
        with self._lock:
            if key not in mine.kept:
                return None
            mine.kept.move_to_end(key)
            _, compiled = mine.kept[key]
        # Where answers spoiled it, it is compiled anew, in the turn of this namespace.
        return None if compiled.is_spoiled else compiled.start()

    def _keep(self, mine: _Namespace, key: str, num_bytes: int, compiled: CompiledGrammar) -> None:
        limits = self._limits
        with self._lock:
            before, _ = mine.kept.pop(key, (0, None))
            mine.kept[key] = num_bytes, compiled
            mine.num_bytes += num_bytes - before
            while True:
                spaces = self._namespaces.values()
                if sum(len(each.kept) for each in spaces) > limits.kept:
                    largest = max(spaces, key=lambda each: len(each.kept))
                elif sum(each.num_bytes for each in spaces) > limits.kept_bytes:
                    largest = max(spaces, key=lambda each: each.num_bytes)
                else:
                    return
                _, (num_bytes, _) = largest.kept.popitem(last=False)
                largest.num_bytes -= num_bytes

    def _build(self, source: Source) -> CompiledGrammar:
        with self._reading:
            if self._tokenizer is None:
                self._tokenizer = build_tokenizer(self._vocabulary)
        tokenizer = self._tokenizer
        if grammar := build_open_grammar(source):
            self._start_matcher(source, tokenizer, grammar)
        grammar = build_grammar(source, self._vocabulary)
        compiled = CompiledGrammar(
            source.name,
            self._vocabulary,
            tokenizer.tokenize_bytes,
            lambda: self._start_matcher(source, tokenizer, grammar),
        )
        self._check_start(source, grammar, compiled)
        return compiled

    def _start_matcher(self, source: Source, tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        llguidance = import_llguidance()
        limits = self._limits
        # Calls have schemas, and rules that no client wrote.
        has_rules = not isinstance(source, JsonSchema | JsonObject | Calls)
        has_expressions = not isinstance(source, JsonSchema | JsonObject)
        matcher: LLMatcher = llguidance.LLMatcher(
            tokenizer,
            grammar,
            log_level=0,
            limits=llguidance.LLParserLimits(
                max_items_in_row=limits.other_row_items if has_rules else limits.row_items,
                step_max_items=limits.other_step_items if has_rules else limits.step_items,
                initial_lexer_fuel=limits.other_start_fuel if has_expressions else limits.start_fuel,
                step_lexer_fuel=limits.step_fuel,
                max_lexer_states=limits.lexer_states,
                verbose_errors=False,
            ),
        )
        problems = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        for problem in problems:
            # What is left out of a schema is a warning where that was asked for, and an error elsewhere.
            if matcher.is_error() or not is_unenforced_warning(problem):
                raise ConstraintError(_describe_refusal(source, problem))
        return matcher

    def _check_start(self, source: Source, grammar: str, compiled: CompiledGrammar) -> None:
        """Refuse a grammar that allows nothing, or that this vocabulary has no tokens for."""
        start = compiled.start()
        try:
            allowed = start.mask()
            if allowed.sum() > allowed[list(self._vocabulary.end_ids)].sum():
                # What is certain to follow is tried too: an object is wide once it has begun.
                for token_id in start.forced():
                    start.advance(token_id)
                start.mask()
                return
        except ConstraintError as error:
            if "too much" in str(error):
                raise
        first = self._first_bytes(source, grammar)
        if first.any():
            begins = bytes([int(first.argmax())])
            raise ConstraintError(
                f"the vocabulary of this model cannot spell {source.name}: no token may come first, "
                f"and a text would begin with {spelled_bytes(begins)}: use another model, or leave the grammar out"
            )

    def _first_bytes(self, source: Source, grammar: str) -> BoolArray:
        """Return ``[256]`` which bytes a text may begin with, whatever this model can spell; an error without any."""
        try:
            matcher = self._start_matcher(source, _build_byte_tokenizer(), grammar)
        except ConstraintError:
            raise _empty_grammar_error(source) from None
        may_follow = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").view(np.bool_)
        if matcher.is_error() or not may_follow.any():
            raise _empty_grammar_error(source)
        return may_follow[:256]


def _empty_grammar_error(source: Source) -> ConstraintError:
    return ConstraintError(f"{source.name} allows no text at all, so it has no valid answer")


def _build_byte_tokenizer() -> Any:
    llguidance = import_llguidance()

    class Table:
        eos_token_id = 256
        bos_token_id = None
        special_token_ids = (256,)
        tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>")

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Table()))


def _describe_refusal(source: Source, problem: str) -> str:
    if is_resource_error(problem):
        return (
            f"{source.name} is too large to compile: give one with fewer alternatives, optional parts and "
            "counted repetitions"
        )
    reason = explain_schema_error(one_line_reason(problem, with_place=isinstance(source, Lark)))
    problem = strip_excerpt(problem)
    if isinstance(source, JsonSchema) and (place := find_error_pointer(problem, json.loads(source.text))):
        reason = f"{place}: {reason}"
    elif isinstance(source, Lark) and (place := locate_in_embedded(source.text, problem)):
        line, _, reason = reason.partition(": ")
        number = re.match(r"line (\d+)", line)
        meaning = source.meaning(int(number[1])) if isinstance(source, Calls) and number else ""
        reason = f"{meaning or line}: {place}: {reason}"
    return f"{source.name} cannot be used: {reason}"
