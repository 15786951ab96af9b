"""Workloads: kinds of text from the held-out pieces that ship with the package, cut for any model's tokens.

A *forced* workload makes the target follow a given text at full cost (``ForcedVerifier``); its name says so. A
workload yields tasks for as long as there is text; a task whose plain answer loops is left out by the runner, and
counted.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from paceline.core.errors import InputError
from paceline.core.vocabulary import Vocabulary
from paceline.lab.task import Task
from paceline.models.embedded import heldout
from paceline.options import GenerateOptions

PROMPT_TOKENS: Final = 128
"""Most tokens of a prompt that is the beginning of a text."""
PASSAGES_AS_LONG: Final = 2
"""Factor of :data:`PROMPT_TOKENS` for a passage that is to be summed up."""
LONG_PROMPT_TOKENS: Final = 4096
"""Most tokens of a long prompt."""
LONG_PROMPT_ANSWER: Final = 64
"""Most tokens of the answer to a long prompt."""
_MIN_PROMPT: Final = 8

MIXED: Final = "mixed"
"""Name of the session through one task of every workload."""
FORCED_SUFFIX: Final = "-forced"
"""End of the names of workloads whose answer is a given text."""

_AFTER_FILE: Final = "\n\n# The same file after the changes:\n\n"
_AFTER_PASSAGE: Final = "\n\nIn summary, "
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")
_NUMBER: Final = re.compile(r"\b\d{1,4}\b")
_CHANGED_NUMBERS: Final = 0.25
_LINES_PER_COMMENT: Final = 12


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large tasks are, in tokens.

    Attributes:
        context_length: of the target; no prompt and answer are longer together.
        seed: of the order of the texts, of edits and of sampling.
        prompt_tokens: most of a prompt that is the beginning of a text; passages have twice as many.
    """

    tokens: int
    context_length: int
    seed: int = 0
    prompt_tokens: int = PROMPT_TOKENS

    def prompt_room(self, wanted: int, answer: int) -> int:
        """Return how many tokens of prompt fit before an answer; raise ``InputError`` for hardly any."""
        room = min(wanted, self.context_length - answer)
        if room < min(_MIN_PROMPT, wanted):
            raise InputError(
                f"answers of {answer} tokens leave {max(room, 0)} for prompts in a context of {self.context_length}: "
                "ask for fewer (--tokens) or give a larger context (-c)"
            )
        return room


_Maker: TypeAlias = Callable[[Vocabulary, Sizes], Iterator[Task]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of text, described in a few words for tables; ``make`` yields its tasks."""

    name: str
    about: str
    make: _Maker

    @property
    def forced(self) -> bool:
        """Whether the target is made to follow a text."""
        return self.name.endswith(FORCED_SUFFIX)


def _iter_texts(kind: str, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every held-out piece, in an order of the seed."""
    numbered = [(f"{kind}:{number}", text) for number, text in enumerate(heldout(kind), 1)]
    random.Random(f"{kind} {seed}").shuffle(numbered)
    yield from numbered


def _make_free(name: str, kinds: Sequence[str], sampling: GenerateOptions | None = None) -> _Maker:
    """Return a maker of tasks that go on from the beginnings of texts, kind after kind in turn."""

    def make(vocabulary: Vocabulary, sizes: Sizes) -> Iterator[Task]:
        room = sizes.prompt_room(sizes.prompt_tokens, sizes.tokens)
        turns = itertools.chain.from_iterable(
            itertools.zip_longest(*(_iter_texts(kind, sizes.seed) for kind in kinds), fillvalue=None)
        )
        for index, turn in enumerate(turn for turn in turns if turn is not None):
            prompt_ids = vocabulary.tokenize(turn[1])[:room]
            yield Task(
                name,
                turn[0],
                tuple(prompt_ids),
                sizes.tokens,
                sizes.seed + index,
                sampling=sampling or GenerateOptions(),
            )

    return make


def _iter_structured_forced(vocabulary: Vocabulary, sizes: Sizes) -> Iterator[Task]:
    room = sizes.prompt_room(sizes.prompt_tokens, sizes.tokens)
    pairs = zip(_iter_texts("json", sizes.seed), _iter_texts("logs", sizes.seed), strict=False)
    for index, (text_name, text) in enumerate(itertools.chain.from_iterable(pairs)):
        token_ids = vocabulary.tokenize(text)
        reference = token_ids[room : room + sizes.tokens]
        if len(reference) >= min(sizes.tokens, room):
            yield Task(
                "structured-forced",
                text_name,
                tuple(token_ids[:room]),
                len(reference),
                sizes.seed + index,
                tuple(reference),
            )


def _make_editing(name: str) -> _Maker:
    def make(vocabulary: Vocabulary, sizes: Sizes) -> Iterator[Task]:
        framing = vocabulary.tokenize(_AFTER_FILE, add_special=False)
        # A little more than the answer's limit, so that the answer does not end before it.
        wanted = sizes.tokens + sizes.tokens // 4
        room = sizes.prompt_room(wanted + len(framing), sizes.tokens) - len(framing)
        for index, (text_name, text) in enumerate(_iter_texts("code", sizes.seed)):
            file = _cut_to_lines(vocabulary, vocabulary.tokenize(text, add_special=False)[: max(room - 1, 1)])
            prompt_ids = vocabulary.tokenize(file)[: max(room, 1)] + framing
            edited = edit(file, random.Random(f"edit {text_name} {sizes.seed}"))
            reference = tuple(vocabulary.tokenize(edited, add_special=False)[: sizes.tokens])
            forced = name.endswith(FORCED_SUFFIX)
            yield Task(
                name,
                text_name,
                tuple(prompt_ids),
                len(reference) if forced else sizes.tokens,
                sizes.seed + index,
                reference if forced else None,
            )

    return make


def _iter_summaries(vocabulary: Vocabulary, sizes: Sizes) -> Iterator[Task]:
    lead = vocabulary.tokenize(_AFTER_PASSAGE, add_special=False)
    room = sizes.prompt_room(PASSAGES_AS_LONG * sizes.prompt_tokens + len(lead), sizes.tokens) - len(lead)
    for index, (text_name, text) in enumerate(_iter_texts("prose", sizes.seed)):
        prompt_ids = vocabulary.tokenize(text)[: max(room, 1)] + lead
        yield Task("summary", text_name, tuple(prompt_ids), sizes.tokens, sizes.seed + index)


def _iter_long_prompts(vocabulary: Vocabulary, sizes: Sizes) -> Iterator[Task]:
    answer = min(LONG_PROMPT_ANSWER, sizes.tokens)
    room = sizes.prompt_room(LONG_PROMPT_TOKENS, answer)
    token_ids: list[int] = []
    kinds = itertools.chain.from_iterable(
        zip(_iter_texts("prose", sizes.seed), _iter_texts("code", sizes.seed), strict=False)
    )
    index, first = 0, ""
    for text_name, text in kinds:
        first = first or text_name
        token_ids += vocabulary.tokenize(text, add_special=not token_ids)
        if len(token_ids) >= room:
            yield Task("long-prompt", f"from {first}", tuple(token_ids[:room]), answer, sizes.seed + index)
            index, first = index + 1, ""
            token_ids.clear()


_HARD: Final[GenerateOptions] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

WORKLOADS: Final[Mapping[str, Workload]] = {
    workload.name: workload
    for workload in (
        Workload("new-code", "the beginning of a file, for the target to go on with", _make_free("new-code", ["code"])),
        Workload(
            "editing",
            "a file, and the target goes on after 'the same file after the changes'",
            _make_editing("editing"),
        ),
        Workload(
            "editing-forced",
            "a file; the target is made to repeat it with a few changes, at full cost",
            _make_editing("editing-forced"),
        ),
        Workload("summary", "a passage of prose, and the target goes on after 'In summary,'", _iter_summaries),
        Workload(
            "structured",
            "beginnings of JSON and logs, for the target to go on with",
            _make_free("structured", ["json", "logs"]),
        ),
        Workload(
            "structured-forced",
            "beginnings of JSON and logs; the target is made to follow the real rest, at full cost",
            _iter_structured_forced,
        ),
        Workload(
            "hard",
            "prose sampled at temperature 1 from the whole distribution, whatever --temp says: high entropy",
            _make_free("hard", ["prose"], _HARD),
        ),
        Workload(
            "long-prompt",
            f"up to {LONG_PROMPT_TOKENS} tokens of prose and code, and an answer of {LONG_PROMPT_ANSWER}",
            _iter_long_prompts,
        ),
    )
}
"""The workloads but for :data:`MIXED`, which is one session through one task of each of them in turn."""

WORKLOAD_NAMES: Final = (*WORKLOADS, MIXED)
"""Names of all workloads, the session through all of them last."""
MIXED_ABOUT: Final = "one session through a task of each of the others in turn, forced ones included"
"""Description of the session through all workloads."""


def check_workload_names(names: Sequence[str]) -> None:
    if not names:
        raise InputError(f"no workload is named: choose from {', '.join(WORKLOAD_NAMES)}")
    for index, name in enumerate(names):
        if name not in WORKLOAD_NAMES:
            raise InputError(f"unknown workload {name!r}: choose from {', '.join(WORKLOAD_NAMES)}")
        if name in names[:index]:
            raise InputError(f"workload {name!r} is named twice: name each once")


def check_room(names: Sequence[str], sizes: Sizes) -> None:
    """Raise ``InputError`` for answers beside which hardly any prompt fits into the context."""
    for name in names:
        answer = min(LONG_PROMPT_ANSWER, sizes.tokens) if name == "long-prompt" else sizes.tokens
        sizes.prompt_room(_MIN_PROMPT, answer)


def edit(text: str, rng: random.Random) -> str:
    """Return ``text`` with small changes, as a programmer asks for them.

    One name that occurs more than once gets another everywhere, some numbers are counted up, and now and then a line
    gets a comment before it.
    """
    names = [name for name, count in Counter(_IDENTIFIER.findall(text)).most_common(8) if count > 1]
    if names:
        chosen = rng.choice(names)
        text = re.sub(rf"\b{chosen}\b", f"{chosen}_{rng.choice(('new', 'fast', 'checked', 'v2'))}", text)
    text = _NUMBER.sub(
        lambda match: str(int(match[0]) + 1) if rng.random() < _CHANGED_NUMBERS else match[0],
        text,
    )
    lines = []
    for line in text.splitlines(keepends=True):
        if line.strip() and rng.random() < 1 / _LINES_PER_COMMENT:
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}# {rng.choice(('changed', 'see above', 'checked', 'note'))}\n")
        lines.append(line)
    return "".join(lines)


def _cut_to_lines(vocabulary: Vocabulary, token_ids: Sequence[int]) -> str:
    """Return the text of tokens up to the end of its last whole line, or all of it if it is one line."""
    data = b"".join(vocabulary.token_bytes(token_id) for token_id in token_ids)
    text = data.decode("utf-8", errors="ignore")
    return text[: text.rfind("\n") + 1] or text
