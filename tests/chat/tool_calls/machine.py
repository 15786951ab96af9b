"""A vocabulary of bytes and marks, and a matcher that walks a grammar over it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from paceline.chat.tool_calls.formats import FORMATS
from paceline.constraints import Calls, ConstraintCompiler
from paceline.engines.scripted import ScriptedVocabulary

# The marks that are control tokens in the vocabularies of models.
MARKS = sorted(
    {
        *("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>"),
        *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        *("<|tool_call_argument_begin|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    }
)
END = 256
CONTROL_IDS = {mark: END + 1 + number for number, mark in enumerate(MARKS)}
# What ends a text that has no quotes.
_ENDS = ("</parameter>", "</arg_value>", "</｜DSML｜parameter>", '<|"|>')
_SPELLINGS = {token_id: mark for mark, token_id in CONTROL_IDS.items()}
_SPLIT = re.compile(f"({'|'.join(map(re.escape, sorted(MARKS, key=len, reverse=True)))})")
assert len(FORMATS) > 10


class _Bytes:
    eos_token_id = END
    bos_token_id = None
    tokens: ClassVar = [
        *(bytes([one]) for one in range(256)),
        b"\xff<|end_of_answer|>",
        *(b"\xff" + one.encode() for one in MARKS),
    ]
    special_token_ids: ClassVar = [END, *CONTROL_IDS.values()]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


_TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))


def tokens_of(text: str, *, has_marks: bool) -> list[int]:
    """Return the tokens of a text, in which marks are control tokens if the vocabulary has them."""
    if not has_marks:
        return list(text.encode())
    return [
        token_id
        for piece in _SPLIT.split(text)
        for token_id in ([CONTROL_IDS[piece]] if piece in CONTROL_IDS else piece.encode())
    ]


def text_of(token_ids: Sequence[int]) -> str:
    """Return the text of tokens, control tokens spelled."""
    pieces = [_SPELLINGS[one].encode() if one in _SPELLINGS else bytes([one]) for one in token_ids]
    return b"".join(pieces).decode()


def matcher_of(grammar: str) -> LLMatcher:
    matcher = LLMatcher(_TOKENIZER, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def is_answer(grammar: str, token_ids: Sequence[int]) -> bool:
    """Return whether a grammar allows tokens, and an end behind them."""
    matcher = matcher_of(grammar)
    allowed = matcher.validate_tokens(list(token_ids)) == len(token_ids)
    return allowed and matcher.consume_tokens(list(token_ids)) and matcher.is_accepting()


class _Marked(ScriptedVocabulary):
    """All bytes, what ends an answer, and the marks as control tokens."""

    def __init__(self) -> None:
        super().__init__([*(bytes([one]) for one in range(256)), b"<end>", *(one.encode() for one in MARKS)], [END])

    @property
    def control_ids(self) -> frozenset[int]:
        return frozenset({*self.end_ids, *CONTROL_IDS.values()})


_COMPILER = ConstraintCompiler(_Marked())


def written_at_random(grammar: str, rng: random.Random, most: int) -> list[int] | None:
    """Return tokens that a grammar allows, drawn one after the other; ``None`` if there is no end within ``most``.

    The grammar is compiled within the limits that answers have.
    """
    state = _COMPILER.compile(Calls(grammar))
    # What closes strings, objects and marks; drawn more often, so that answers end.
    closing = {*b'"}])>/<,', *CONTROL_IDS.values()}
    ends = [tokens_of(end, has_marks=has_marks) for end in _ENDS for has_marks in (True, False)]
    written: list[int] = []
    while len(written) < most:
        end = rng.choice(ends)
        if rng.random() < 0.2 and state.allows(end) == len(end):
            for token_id in end:
                state.advance(token_id)
            written += end
        allowed = [int(token_id) for token_id in np.flatnonzero(state.mask())]
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.3):
            return written
        allowed = [token_id for token_id in allowed if token_id != END]
        preferred = [token_id for token_id in allowed if token_id in closing]
        drawn = rng.choice(preferred if preferred and rng.random() < 0.5 else allowed)
        state.advance(drawn)
        written.append(drawn)
    return None
