"""Templates, a vocabulary and model files for conversations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.chat.prompt_builder import ChatPromptBuilder
from paceline.chat.template import ChatTemplate
from paceline.engines.scripted import ScriptedVocabulary
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
