"""Streams of a scripted model that answers one thing, a token each round."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np

import paceline
from paceline.async_streams import AsyncStream
from paceline.chat.assembler import AnswerEvent
from paceline.chat.params import ChatParams
from paceline.chat.reasoning import ReasoningFormat
from paceline.chat.replies import AsyncReplyStream, ReplyStream
from paceline.core.arrays import Float64Array
from paceline.engines.scripted import ScriptedEngine
from tests.chat.conversing import THINKING, ControlledBytes, reader_of

FORMATS: tuple[ReasoningFormat, ...] = ("auto", "deepseek", "none", "deepseek-legacy")

VOCABULARY = ControlledBytes()


@contextmanager
def answering(
    answer: str,
    source: str,
    *,
    fails_after: int | None = None,
    messages: Any = "2 + 2?",
    tools: Any = None,
    **params: Any,
) -> Iterator[ReplyStream]:
    """Yield the stream of a model that says one thing, a byte or control token each round, and then ends.

    Args:
        answer: what it says.
        source: its chat template.
        fails_after: tokens of the answer after which the model breaks; ``None`` for never.
        messages: that it answers.
        tools: that it may call.
        **params: of the conversation.
    """
    chat = ChatParams(**params)
    reader = reader_of(source)
    prompt = reader.reading_calls(reader.prompt(messages, tools=tools, params=chat, max_tokens=1000), tools)
    script = [*VOCABULARY.tokenize(answer, parse_special=True), 257]

    def logits(tokens: Sequence[int]) -> Float64Array:
        said = len(tokens) - len(prompt.token_ids)
        row = np.zeros(VOCABULARY.size)
        if 0 <= said < len(script):
            row[script[said]] = np.nan if said == fails_after else 1.0
        return row

    engine = ScriptedEngine(logits, VOCABULARY, max_sequences=2, context_length=1 << 17)
    with paceline.Model(engine, [], paceline.NO_SPECULATION) as model:
        stream = model.stream(prompt.token_ids, **prompt.options | {"max_tokens": 1 << 16, "temperature": 0.0})
        yield ReplyStream(prompt, stream, chat)


def text_of(parts: Sequence[AnswerEvent], kind: str) -> str:
    return "".join(part.segment.text for part in parts if part.kind == kind)


@asynccontextmanager
async def writing(
    answer: str, source: str = THINKING, tools: Any = None, **params: Any
) -> AsyncIterator[AsyncReplyStream]:
    """Yield the stream of a model that says one thing, a byte or control token each round, and then ends."""
    chat = ChatParams(**params)
    reader = reader_of(source)
    prompt = reader.reading_calls(reader.prompt("2 + 2?", tools=tools, params=chat, max_tokens=1000), tools)
    script = [*VOCABULARY.tokenize(answer, parse_special=True), 257]

    def logits(tokens: Sequence[int]) -> Float64Array:
        said = len(tokens) - len(prompt.token_ids)
        row = np.zeros(VOCABULARY.size)
        row[script[min(max(said, 0), len(script) - 1)]] = 1.0
        return row

    engine = ScriptedEngine(logits, VOCABULARY, max_sequences=2, context_length=1 << 17)
    with paceline.Model(engine, [], paceline.NO_SPECULATION) as model:
        options: Any = prompt.options | {"max_tokens": 1 << 16, "temperature": 0.0}
        stream = model.astream(prompt.token_ids, **options)
        assert isinstance(stream, AsyncStream)
        yield AsyncReplyStream(prompt, stream, chat)
