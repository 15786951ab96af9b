"""The texts that a pair is examined on: held-out ones of several kinds, or the user's own file, cut into prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import InputError
from paceline.core.vocabulary import Vocabulary
from paceline.lab.task import Task
from paceline.models.embedded import HELDOUT_KINDS, heldout

HELDOUT_TEXTS: Final = 12
"""Texts of each kind that tokenizers are compared on, and that prompts are cut from."""
OWN_KIND: Final = "own"
"""Kind of the texts of a user's file."""

PROMPT_TOKENS: Final = 48
"""Most tokens of a prompt: a slow target reads it in a second, and a text has a subject by then."""

_PIECES: Final = 24
"""Prompts that are cut from one text of a user."""
_MAX_BYTES: Final = 4 << 20
"""Bytes of a user's file that are read."""
_MIN_PROMPT: Final = 8
"""Tokens below which a prompt is no use."""
_MAX_LETTERS: Final = 32
"""Letters of a text for each token of a prompt that is cut from it."""
_FIELDS: Final = ("prompt", "text", "content")
"""Keys of a line's text in a JSON-lines file; the first that is there counts."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A text of some kind, and its name."""

    kind: str
    name: str
    text: str


def heldout_samples() -> list[Sample]:
    by_kind = [
        [Sample(kind, f"{kind}:{number}", text) for number, text in enumerate(heldout(kind)[:HELDOUT_TEXTS], 1)]
        for kind in HELDOUT_KINDS
    ]
    return [sample for turn in zip(*by_kind, strict=True) for sample in turn]


def file_samples(path: Path, pieces: int = _PIECES) -> list[Sample]:
    """Return the texts in a user's file: of its lines where it is JSON lines, else ``pieces`` from all over it."""
    content = file_text(path)
    texts = list(_read_json_lines(path, content)) if path.suffix == ".jsonl" else list(cut_pieces(content, pieces))
    if not texts:
        raise InputError(f"{path} holds no text: give a file of the text you generate, or prompts as JSON lines")
    return [Sample(OWN_KIND, f"{path.name}:{number}", text) for number, text in enumerate(texts, 1)]


def file_text(path: Path) -> str:
    """Return the text in a user's file, or the first 4 MiB of it."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    content = data[:_MAX_BYTES].decode("utf-8-sig", "ignore")
    if len(data) > _MAX_BYTES and path.suffix == ".jsonl":
        content = content.rpartition("\n")[0]  # of its last line there is only the beginning
    return content


def _read_json_lines(path: Path, content: str) -> Iterator[str]:
    for number, said in _parse_json_lines(path, content):
        text = next((said[name] for name in _FIELDS if name in said), None) if isinstance(said, dict) else said
        if not isinstance(text, str):
            raise InputError(
                f"{path}, line {number}: there is no text under {', '.join(_FIELDS[:-1])} or {_FIELDS[-1]}"
            )
        if text.strip():
            yield text


def read_json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects in a file of JSON lines, with the numbers of their lines."""
    try:
        content = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    for number, said in _parse_json_lines(path, content):
        if not isinstance(said, dict):
            raise InputError(f"{path}, line {number}: this is not a JSON object")
        yield number, said


def _parse_json_lines(path: Path, content: str) -> Iterator[tuple[int, Any]]:
    # Texts in JSON may have characters that Python's splitlines takes for ends of lines.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{path}, line {number}: this is not JSON; rename the file if it is plain text") from None


def cut_pieces(content: str, count: int) -> Iterator[str]:
    """Yield pieces that begin at lines all over a text, each with all that follows it up to the next."""
    if not content.strip():
        return
    starts = [0]
    for number in range(1, count):
        line = content.find("\n", number * len(content) // count) + 1
        if line > starts[-1]:
            starts.append(line)
    for start, end in zip(starts, [*starts[1:], len(content)], strict=True):
        # A short text is one prompt after the other, each with what comes after it.
        piece = content[start : max(end, start + 8 * PROMPT_TOKENS)]
        if piece.strip():
            yield piece


def make_tasks(
    samples: Sequence[Sample], vocabulary: Vocabulary, *, tokens: int, context_length: int, seed: int
) -> list[Task]:
    """Return the samples as beginnings for the target to go on with; the answers have seeds from ``seed`` on."""
    room = min(PROMPT_TOKENS, context_length - tokens)
    if room < _MIN_PROMPT:
        raise InputError(
            f"answers of {tokens} tokens leave {max(room, 0)} for prompts in a context of {context_length}: give a "
            "larger context (-c)"
        )
    tasks = []
    for number, sample in enumerate(samples):
        # A beginning needs only the first part of a long text as tokens.
        prompt_ids = tuple(vocabulary.tokenize(sample.text[: _MAX_LETTERS * room])[:room])
        if len(prompt_ids) >= _MIN_PROMPT:
            tasks.append(Task(sample.kind, sample.name, prompt_ids, tokens, seed + number))
    if not tasks:
        raise InputError(f"no text is as long as {_MIN_PROMPT} tokens: give a longer one with --text")
    return tasks


def split_samples(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Return two halves of the samples, each with every other text of each kind.

    What was chosen by some texts has to be measured on others. Of a kind with one text both halves have it.
    """
    halves: tuple[list[Sample], list[Sample]] = ([], [])
    by_kind: dict[str, list[Sample]] = {}
    for sample in samples:
        of_kind = by_kind.setdefault(sample.kind, [])
        halves[len(of_kind) % 2].append(sample)
        of_kind.append(sample)
    halves[1].extend(texts[0] for texts in by_kind.values() if len(texts) == 1)
    return halves
