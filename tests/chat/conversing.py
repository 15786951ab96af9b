"""Templates, vocabularies and model files for conversations, and models that say one thing."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import paceline
from paceline.chat.assembler import AnswerAssembler
from paceline.chat.marked_text import MarkedText
from paceline.chat.params import ChatParams
from paceline.chat.prompt_builder import ChatPromptBuilder
from paceline.chat.prompts import ChatPrompt
from paceline.chat.reasoning import ReasoningFormat, ReasoningMarkers
from paceline.chat.replies import AsyncReplyStream, ReplyStream
from paceline.chat.template import ChatTemplate
from paceline.chat.tool_calls.base import ExpectedCalls
from paceline.core.arrays import Float64Array
from paceline.core.vocabulary import Vocabulary
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary
from tests.models.helpers import edited_gguf

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes any role."""

STRICT = (
    "{% for message in messages %}{% if message.role in ('user', 'assistant') %}"
    "<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves every other role out without a word, the system's too."""

FIRST_SYSTEM = (
    "{% if messages and messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}" + STRICT
)
"""Reads what the system says at the beginning, and there alone."""

LAST_SYSTEM = (
    "{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message.role == 'system' %}{% set ns.system = message.content %}{% endif %}{% endfor %}"
    "<|im_start|>system\n{{ ns.system }}<|im_end|>\n" + STRICT
)
"""Reads what the system says last, and nothing else of it, as DeepSeek-R1's templates do."""

ALTERNATING = (
    "{% for message in messages %}{% if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}\n{% endfor %}[assistant]"
)
"""Takes users and assistants in turn, and has no place for the system."""

THINKING = (
    CHATML + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
"""Reasons, and has a switch for it."""

BEGUN = (
    CHATML.replace("message.content", "message.content.split('</think>')[-1]")
    + "{% if add_generation_prompt %}<think>\n{% endif %}"
)
"""Begins the reasoning of every answer, leaves out that of earlier ones, and has no switch."""

CALLING = '{# <tool_call>\n{"name": ..., "arguments": ...} #}' + THINKING
"""Reasons, and is of a family whose calls are known."""

EFFORT = "Effort: {{ reasoning_effort }}\n" + CHATML
"""Is told how much to reason, and names no markers."""

CONTROLS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


class ControlledBytes(ScriptedVocabulary):
    """Every byte is a token, and so is each of :data:`CONTROLS`, where the text is trusted."""

    def __init__(self, controls: Iterable[str] = CONTROLS) -> None:
        names = [name.encode() for name in controls]
        super().__init__([*(bytes([byte]) for byte in range(256)), *names], range(256, 256 + len(names)))
        self._ids = {name.decode(): token_id for token_id, name in enumerate(names, start=256)}
        self._control_ids = self.end_ids
        self.end_ids = frozenset(self._ids[name] for name in ("<|im_end|>",) if name in self._ids)

    @property
    def control_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        return self._control_ids

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the bytes of a text, and control tokens where they are to be parsed."""
        pieces = [text]
        if parse_special and self._ids:
            pieces = re.split("(" + "|".join(map(re.escape, self._ids)) + ")", text)
        token_ids: list[int] = []
        for piece in pieces:
            token_ids += [self._ids[piece]] if parse_special and piece in self._ids else piece.encode()
        return token_ids


def reader_of(
    source: str, *, context_length: int = 4096, vocabulary: ScriptedVocabulary | None = None
) -> ChatPromptBuilder:
    """Return what makes prompts by a template."""
    return ChatPromptBuilder(
        ChatTemplate(source, origin="a.gguf"),
        vocabulary or ControlledBytes(),
        context_length,
    )


def chat_gguf(
    destination: Path, template: str, source: Path | None = None, edits: Mapping[str, Any] | None = None
) -> Path:
    """Write a model with a chat template and other metadata, by default the embedded draft."""
    return edited_gguf(destination, {"tokenizer.chat_template": template, **(edits or {})}, source)


class _Talk(NamedTuple):
    """A model that says one thing, and what it is asked."""

    model: paceline.Model
    prompt: ChatPrompt
    params: ChatParams
    options: Any


@contextmanager
def _talk(
    answer: str, source: str, *, fails_after: int | None, messages: Any, tools: Any, params: Mapping[str, Any]
) -> Iterator[_Talk]:
    chat, reader, vocabulary = ChatParams(**params), reader_of(source), ControlledBytes()
    prompt = reader.reading_calls(reader.prompt(messages, tools=tools, params=chat, max_tokens=1000), tools)
    script = [*vocabulary.tokenize(answer, parse_special=True), *vocabulary.end_ids]

    def logits(tokens: Sequence[int]) -> Float64Array:
        said = min(max(len(tokens) - len(prompt.token_ids), 0), len(script) - 1)
        row = np.zeros(vocabulary.size)
        row[script[said]] = np.nan if said == fails_after else 1.0
        return row

    engine = ScriptedEngine(logits, vocabulary, max_sequences=2, context_length=1 << 17)
    with paceline.Model(engine, [], paceline.NO_SPECULATION) as model:
        yield _Talk(model, prompt, chat, prompt.options | {"max_tokens": 1 << 16, "temperature": 0.0})


@contextmanager
def answering(
    answer: str,
    source: str = THINKING,
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
    with _talk(answer, source, fails_after=fails_after, messages=messages, tools=tools, params=params) as talk:
        yield ReplyStream(talk.prompt, talk.model.stream(talk.prompt.token_ids, **talk.options), talk.params)


@asynccontextmanager
async def writing(
    answer: str, source: str = THINKING, *, tools: Any = None, **params: Any
) -> AsyncIterator[AsyncReplyStream]:
    """Yield such a stream for an event loop."""
    with _talk(answer, source, fails_after=None, messages="2 + 2?", tools=tools, params=params) as talk:
        yield AsyncReplyStream(talk.prompt, talk.model.astream(talk.prompt.token_ids, **talk.options), talk.params)


def written(*parts: tuple[str, bool]) -> MarkedText:
    """Return a text of parts, each with whether the template wrote it."""
    return MarkedText.joined(MarkedText.of_template(text) if ours else MarkedText(text) for text, ours in parts)


def spellings(vocabulary: Vocabulary, token_ids: list[int]) -> list[str]:
    return [(vocabulary.token_spelling(token_id) or b"").decode("utf-8", "replace") for token_id in token_ids]


def control_of(token_ids: list[int], vocabulary: Vocabulary) -> list[str]:
    """Return the texts of the control tokens among tokens."""
    return spellings(vocabulary, [token_id for token_id in token_ids if token_id in vocabulary.control_ids])


def prompt_with(
    markers: ReasoningMarkers | None,
    *,
    begun: bool = False,
    continued: bool = False,
    calls: ExpectedCalls | None = None,
) -> ChatPrompt:
    """Return a prompt of which nothing is known but how its answer is read."""
    return ChatPrompt("", [], [], 0, markers, begun, continued, {}, calls)


def read_message(
    text: str,
    markers: ReasoningMarkers | None,
    *,
    begun: bool = False,
    continued: bool = False,
    reasoning_format: ReasoningFormat = "auto",
) -> dict[str, Any]:
    """Return the message that an answer's text comes to."""
    return AnswerAssembler(prompt_with(markers, begun=begun, continued=continued), reasoning_format).read(text)


def split_reasoning(
    text: str, markers: ReasoningMarkers | None, *, begun: bool = False, continued: bool = False
) -> tuple[str | None, str]:
    """Return the reasoning of an answer, ``None`` where it has none, and its content."""
    message = read_message(text, markers, begun=begun, continued=continued)
    return message.get("reasoning_content"), message["content"]


@contextmanager
def vocabulary_alone(path: Path) -> Iterator[Vocabulary]:
    """Open a GGUF file that is a vocabulary and no model."""
    import llama_cpp.llama_cpp as api

    from paceline.engines.llama_cpp import native
    from paceline.engines.llama_cpp.vocabulary import GgufVocabulary

    model = native.load_without_weights(path)
    vocabulary = GgufVocabulary(model)
    try:
        yield vocabulary
    finally:
        vocabulary.invalidate()
        api.llama_model_free(model)


def write_sentencepiece(path: Path, tokens: Mapping[str, Any], **flags: bool) -> Path:
    """Write a GGUF file that is a vocabulary alone, in which any two tokens merge whose texts make a third.

    Args:
        path: of the file.
        tokens: kinds by text. Tokens of letters, spaces and bytes are added.
        flags: of the tokenizer, such as ``add_bos_token``.
    """
    import gguf

    kinds = gguf.TokenType
    every = {
        "<unk>": kinds.UNKNOWN,
        "<s>": kinds.CONTROL,
        "</s>": kinds.CONTROL,
        **{f"<0x{byte:02X}>": kinds.BYTE for byte in range(256)},
        **dict.fromkeys("▁<>/|_[]abcdefghijklmnopqrstuvwxyzPAD0123456789", kinds.NORMAL),
        **tokens,
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(every))
    writer.add_token_types([int(kind) for kind in every.values()])
    writer.add_token_scores([-float(number) for number in range(len(every))])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
