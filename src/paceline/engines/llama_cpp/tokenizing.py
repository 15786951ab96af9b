"""Texts that llama.cpp's tokenizers cannot take are cut into pieces that come to the same tokens, or refused.

They are made for prompts, and no call can be stopped. Measured with llama.cpp at 0c1e57098, on one core:

- **Special tokens** in a text are kept in a linked list that is walked from its beginning for each of them: 40,000 take
  2 s, those of 15 MB an hour. :class:`Marks` finds the ones that are tokens whatever stands around them.
- **std::regex** goes one call deeper for each character of a word. A word of 30,000 letters is more than the 8 MiB of a
  thread's stack, and the process ends. Most models have a splitter that is written out; the words of others are read on
  a deep stack, and are bounded.
- **SentencePiece** copies all tokens so far for each character that it has none for: 200,000 line breaks take 1.3 s.
  Such stretches are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import InputError
from paceline.vocabularies.spelling import Spellings

LONG: Final = 1 << 12
"""Characters up to which a text goes to llama.cpp as it is: at worst 2,000 special tokens, which take 6 ms."""

_BLOCK: Final = 1 << 10
"""Characters that are looked at together; stretches are measured in these."""
_MAX_IN_DEEP_WORD: Final = 100_000
"""Characters of a word that std::regex finds: 42 MB of the deep stack are used."""
_MAX_IN_WORD: Final = 1_000_000
"""Characters of a word of others: its merges take 1.5 s."""
_MAX_COPIED: Final = 1 << 35
"""Tokens that SentencePiece may copy, which takes 1.2 s."""
_MAX_UNSURE: Final = 10_000
"""Special tokens of one call: 0.14 s."""

_BLANKS: Final = " \t\n\v\f\r"
"""What C's ``isspace`` takes for blank."""

_WRITTEN_OUT: Final = frozenset((
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
    "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5", "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat",
    "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe",
    "mpt", "olmo", "jais", "trillion", "granite-docling", "starcoder", "refact", "command-r", "smollm", "codeshell",
    "exaone", "minerva-7b", "mellum2", "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez",
    "hunyuan", "solar-open", "qwen35", "grok-2", "gemma4", "granite-embed-multi-311m", "sarvam-moe", "kimi-k2",
))  # fmt: skip
"""Splitters (``tokenizer.ggml.pre``) that llama.cpp has written out, without std::regex but for single characters."""

_LINES: Final = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})
"""Splitters whose words are whole lines."""
_ALL_BUT_BLANKS: Final = frozenset({"bloom", "poro-chat", "gpt3-finnish", "viking", "whitespace", "superbpe"})
"""Splitters whose words are all that stands between blanks."""
_SPACED_LETTERS: Final = frozenset({"exaone-moe"})
"""Splitters whose words are letters and single spaces."""

_BETWEEN_KINDS: Final = (
    "[A-Za-z][0-9]|[0-9][A-Za-z]|[A-Za-z0-9\u4e00-\u9fa5][!-&(-/:-@\\[-`{-~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]"
)
"""Where words of all other splitters end: no two of letters, digits and punctuation (but ``'``) are in one."""


def splits_by_regex(kind: str, splitter: str) -> bool:
    """Return whether words are found by std::regex; ``splitter`` is the vocabulary's ``tokenizer.ggml.pre``."""
    return kind == "bpe" and splitter not in _WRITTEN_OUT


def check_words(text: str, splitter: str) -> None:
    """Raise ``InputError`` for a text with a word that is too long for BPE."""
    breaks = _find_breaks(splitter)
    # Some splitters have slashes and line breaks in one word.
    longest = _longest_stretch(text, lambda block: block.replace("/", " ").isspace() or not breaks.search(block))
    most = _MAX_IN_WORD if splitter in _WRITTEN_OUT else _MAX_IN_DEEP_WORD
    if longest > most:
        raise InputError(
            f"the text has about {longest} characters in a row that this model's tokenizer reads as one word, and it "
            f"reads at most {most}; break them up by spaces and line breaks"
        )


def _find_breaks(splitter: str) -> re.Pattern[str]:
    if splitter in _LINES:
        return re.compile(r"\n")
    if splitter in _ALL_BUT_BLANKS:
        return re.compile(f"[{_BLANKS}]")
    return re.compile(rf"{_BETWEEN_KINDS}|\n" if splitter in _SPACED_LETTERS else f"{_BETWEEN_KINDS}|[{_BLANKS}]")


def check_unknown(text: str, num_bytes: int, is_known: Callable[[str], bool]) -> None:
    """Raise ``InputError`` for a text for which SentencePiece would copy its tokens for seconds.

    A text has at most ``num_bytes`` tokens. ``is_known`` returns whether a character has a token of its own.
    """
    known: dict[str, bool] = {}

    def is_unknown(block: str) -> bool:
        for character in set(block):
            if character not in known:
                known[character] = is_known(character)
            if known[character]:
                return False
        return True

    longest = _longest_stretch(text, is_unknown)
    if longest * num_bytes > _MAX_COPIED:
        raise InputError(
            f"the text has about {longest} characters in a row that this model has no tokens for, and may have "
            f"{_MAX_COPIED // num_bytes} in {num_bytes} bytes: leave them out, or send a shorter text"
        )


def _longest_stretch(text: str, is_within: Callable[[str], bool]) -> int:
    """Return about how long, in characters, the longest stretch of one kind is; 0 for less than a block."""
    longest = at = 0
    for start in range(0, len(text), _BLOCK):
        block = text[start : start + _BLOCK]
        at = at + len(block) if is_within(block) else 0
        longest = max(longest, at)
    return longest


@dataclass(frozen=True, slots=True)
class Mark:
    """A token that llama.cpp looks for in a text before it reads the rest; blanks beside it may be left out."""

    token_id: int
    strips_left: bool = False
    strips_right: bool = False


class Marks:
    """The tokens that llama.cpp looks for in a text before it reads the rest: longest first, each from left to right.

    A token that no other overlaps, unless that is within it, is found whatever stands around it. What is on its left
    and what is on its right are then read apart from each other, as llama.cpp reads them. ``marks`` has the tokens by
    text; ``None`` where several tokens have one text.
    """

    def __init__(self, marks: Mapping[str, Mark | None]) -> None:
        self._marks = marks
        self._spellings = Spellings(marks)
        self._any_strips = any(mark is not None and (mark.strips_left or mark.strips_right) for mark in marks.values())

    def split(self, text: str) -> Iterator[tuple[str, bool] | int]:
        """Yield the tokens that are certain, and the texts between them with whether a mark is spelled there.

        Raises ``InputError`` where there are too many that are not certain.
        """
        at = num_unsure = 0
        for first, reach, count in self._overlapping(text):
            mark = self._certain(text, first, reach)
            if mark is None:
                num_unsure += count
                _check_unsure(num_unsure)
                continue
            if at < first[0]:
                yield text[at : first[0]], num_unsure > 0
            yield mark.token_id
            at, num_unsure = first[1], 0
        if at < len(text):
            yield text[at:], num_unsure > 0

    def _overlapping(self, text: str) -> Iterator[tuple[tuple[int, int], int, int]]:
        """Yield marks that overlap: where the first one is, where the last ends, and how many are side by side."""
        first, reach, passed, count = (0, 0), 0, 0, 0
        for start, end in self._spellings.in_text(text):
            if start >= reach:
                if count:
                    yield first, reach, count
                first, reach, passed, count = (start, end), end, end, 1
                continue
            reach = max(reach, end)
            if start >= passed:
                passed, count = end, count + 1
                _check_unsure(count)
        if count:
            yield first, reach, count

    def _certain(self, text: str, first: tuple[int, int], reach: int) -> Mark | None:
        """Return the token that the first of marks that overlap is in any case."""
        start, end = first
        mark = self._marks.get(text[start:end])
        if mark is None or end < reach:
            return None
        if mark.strips_left and start > 0 and text[start - 1] in _BLANKS:
            return None
        if mark.strips_right and text[end : end + 1] in _BLANKS and end < len(text):
            return None
        # Its own blanks may be left out beside another mark.
        if self._any_strips and (text[start] in _BLANKS or text[end - 1] in _BLANKS):
            return None
        return mark


def _check_unsure(count: int) -> None:
    if count > _MAX_UNSURE:
        raise InputError(f"the text has more than {_MAX_UNSURE} special tokens that run into each other: shorten it")
