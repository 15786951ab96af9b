"""Small vocabularies to read conversations by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.chat.assembler import AnswerAssembler
from paceline.chat.marked_text import MarkedText
from paceline.chat.prompts import ChatPrompt
from paceline.chat.reasoning import ReasoningFormat, ReasoningMarkers
from paceline.chat.tool_calls.base import ExpectedCalls
from paceline.core.vocabulary import Vocabulary


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
