"""Prompts, split before anything else, and the target's answers to them, which a draft is trained and judged on.

A draft counts only where all before it was accepted, and that is the target's own text: so it is trained on answers of
the target, at the temperature in use, and not on texts of others or its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from paceline.api import load
from paceline.core.errors import InputError
from paceline.core.vocabulary import Vocabulary
from paceline.engines.options import ModelOptions
from paceline.lab.comparison import Stop, finish
from paceline.lab.samples import Sample, cut_pieces, file_samples, heldout_samples, read_json_objects
from paceline.lab.task import Task, is_repetitive
from paceline.models.description import describe
from paceline.models.embedded import HELDOUT_KINDS, heldout
from paceline.planning.policies.fixed import NO_SPECULATION

Part: TypeAlias = Literal["train", "held", "other"]
"""What an answer is for: training, the verdict, or the verdict on a kind of text that was not trained on."""

MIN_PROMPTS: Final = 8
"""Fewest different prompts: some are held out, and the verdict rests on these."""
_MAX_HELD: Final = 32
"""Prompts that are held out at most, of every four one."""
_NUM_OTHER: Final = 12
"""Texts of kinds that are not trained on."""
_TEXT_PROMPT: Final = 64
"""Tokens of a prompt that is cut from a text."""
MAX_PROMPT: Final = 256
"""Most tokens of a prompt that is used as it is."""
MIN_ROOM: Final = 8
"""Fewest tokens that there must be room for in a prompt."""
_MIN_PROMPT: Final = 2
"""Tokens below which a prompt is no use."""
_MAX_DRAWS: Final = 8
"""Most answers to one prompt, with random numbers of their own."""
_PIECES: Final = 256
"""Prompts that are cut from one text of a user."""
_LETTERS: Final = 16
"""Letters of a text for each token of a prompt that is cut from it, at most."""
_AT_ONCE: Final = 4
"""Answers that are written together; more share one cache, which every row of a pass reads whole."""
_ANSWER_FIELDS: Final = ("answer", "completion", "response", "output")
"""Keys of an answer in a log; the first that is there counts."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer of the target, and what it is for."""

    part: Part
    task: Task
    token_ids: tuple[int, ...]

    @property
    def is_of_use(self) -> bool:
        """Whether it says anything: one that loops flatters every draft, and one that ends at once says little."""
        return not self.task.is_short(self.token_ids) and not is_repetitive(self.token_ids)

    def as_read(self, vocab_size: int, stand_in: int) -> KeptAnswer:
        """Return the answer as a draft with so many tokens reads it, with another in the place of those it lacks."""

        def known(token_ids: Sequence[int]) -> tuple[int, ...]:
            return tuple(token_id if token_id < vocab_size else stand_in for token_id in token_ids)

        task = dataclasses.replace(self.task, prompt_ids=known(self.task.prompt_ids))
        return KeptAnswer(self.part, task, known(self.token_ids))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts to begin with, by what they are for; no text is in two parts.

    Attributes:
        as_they_are: they are prompts, and not texts that prompts are cut from.
    """

    train: Sequence[Sample]
    held: Sequence[Sample]
    other: Sequence[Sample]
    as_they_are: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of text that are trained on."""
        return tuple(dict.fromkeys(sample.kind for sample in self.train))


def own_prompts(path: Path) -> Prompts:
    """Return a user's prompts (``.jsonl``), or pieces of a text. Paceline's own texts are the other kinds."""
    return split_prompts(
        file_samples(path, _PIECES), heldout_samples(), name=str(path), as_they_are=path.suffix == ".jsonl"
    )


def embedded_prompts() -> Prompts:
    """Return the texts that come with paceline; those of the last kind are the kind that is not trained on."""
    *kinds, other = HELDOUT_KINDS
    samples = [Sample(kind, f"{kind}:{number}", text) for kind in kinds for number, text in enumerate(heldout(kind), 1)]
    others = [Sample(other, f"{other}:{number}", text) for number, text in enumerate(heldout(other), 1)]
    return split_prompts(samples, others, name="paceline's own texts")


def split_prompts(
    samples: Sequence[Sample], other: Sequence[Sample], *, name: str, as_they_are: bool = False
) -> Prompts:
    """Hold out one of four different texts, by their hash: the same are held out whatever else a file holds."""
    different = {_digest(sample.text): sample for sample in samples}
    if len(different) < MIN_PROMPTS:
        raise InputError(
            f"{name} has {len(different)} different prompts, and {MIN_PROMPTS} are the least: some are held out for "
            "the verdict, and the others trained on"
        )
    ordered = [different[digest] for digest in sorted(different)]
    num_held = min(_MAX_HELD, len(ordered) // 4)
    return Prompts(ordered[num_held:], ordered[:num_held], other[:_NUM_OTHER], as_they_are)


def make_tasks(
    prompts: Prompts, vocabulary: Vocabulary, *, max_prompt: int, tokens: int, temperature: float, seed: int
) -> Iterator[tuple[Part, Task]]:
    """Yield tasks in the order to answer them: some for the verdict among those to train on, so that time decides.

    Where answers are drawn, prompts are answered again, and texts from another place on. No prompt has more than
    ``max_prompt`` tokens.
    """

    def task(sample: Sample, draw: int, as_is: bool) -> Task | None:
        # Of one seed, all answers would have the same noise at the same place.
        own_seed = seed + number
        if as_is:
            prompt_ids = vocabulary.tokenize(sample.text[: _LETTERS * max_prompt])[:max_prompt]
        else:
            pieces = list(cut_pieces(sample.text, _MAX_DRAWS))
            piece = pieces[draw % len(pieces)][: _LETTERS * _TEXT_PROMPT]
            prompt_ids = vocabulary.tokenize(piece)[: min(_TEXT_PROMPT, max_prompt)]
        if len(prompt_ids) < _MIN_PROMPT:
            return None
        return Task(sample.kind, sample.name, tuple(prompt_ids), tokens, own_seed)

    number = 0
    held = deque([("held", sample, prompts.as_they_are) for sample in prompts.held])
    other = deque([("other", sample, False) for sample in prompts.other])
    draws = _MAX_DRAWS if temperature > 0 or not prompts.as_they_are else 1
    train = deque([("train", sample, draw) for draw in range(draws) for sample in prompts.train])
    while held or other or train:
        part: Part
        if held and (number < MIN_PROMPTS or number % 4 == 0 or not train):
            _, sample, as_is = held.popleft()
            part, made = "held", task(sample, 0, as_is)
        elif other and (number % 8 == 2 or not train):
            _, sample, as_is = other.popleft()
            part, made = "other", task(sample, 0, as_is)
        else:
            _, sample, draw = train.popleft()
            part, made = "train", task(sample, draw, prompts.as_they_are)
        number += 1
        if made is not None:
            yield part, made


class AnswerLog:
    """Answers, a line of JSON each, in a file that only grows; a last line that was torn is written over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.answers: list[KeptAnswer] = []
        self._keys: set[str] = set()
        whole = 0
        if path.is_file():
            for line in path.read_bytes().splitlines(keepends=True):
                answer = _parse_line(line)
                if answer is None:
                    break
                whole += len(line)
                self._note(answer)
        self._whole = whole

    def has(self, part: Part, task: Task) -> bool:
        return _key(part, task) in self._keys

    def of_use(self, part: Part) -> list[KeptAnswer]:
        return [answer for answer in self.answers if answer.part == part and answer.is_of_use]

    def add(self, answer: KeptAnswer) -> None:
        line = json.dumps(_to_json(answer)).encode() + b"\n"
        # What was torn lies behind the whole lines.
        with self._path.open("r+b" if self._path.exists() else "xb") as file:
            file.seek(self._whole)
            file.write(line)
            file.truncate()
        self._whole += len(line)
        self._note(answer)

    def _note(self, answer: KeptAnswer) -> None:
        self._keys.add(_key(answer.part, answer.task))
        self.answers.append(answer)


def write_answers(
    target: ModelOptions,
    tasks: Sequence[tuple[Part, Task]],
    log: AnswerLog,
    temperature: float,
    *,
    in_time: Callable[[], bool],
    stopped: Stop,
    report: Callable[[int], None],
) -> None:
    """Have the target answer what is not answered yet, some at once, while there is time; plainly, without a draft.

    Raises ``Stopped`` where the user wants no more; what was written is kept.
    """
    left = deque((part, task) for part, task in tasks if not log.has(part, task))
    if not left or not in_time():
        return
    with load(target, policy=NO_SPECULATION, drafters=[]) as model:
        running: deque[Any] = deque()
        while running or left:
            while left and len(running) < 2 * _AT_ONCE and in_time():
                part, task = left.popleft()
                running.append((part, task, model.stream(list(task.prompt_ids), **task.options(temperature))))
            if not running:
                break
            part, task, stream = running.popleft()
            generation = finish(stream, stopped)
            log.add(KeptAnswer(part, task, tuple(generation.token_ids)))
            report(len(log.answers))


def context_length(target: ModelOptions, tokens: int) -> int:
    """Return the context that prompts and answers take, no more than the target was made for or is given."""
    own = describe(Path(target.path)).context_length
    wanted = target.context_length or MAX_PROMPT + tokens + 1
    return wanted if own is None else min(wanted, own)


def longest_prompt(target: ModelOptions, tokens: int) -> int:
    """Return how many tokens a prompt may have; raise ``InputError`` where answers leave hardly any."""
    length = context_length(target, tokens)
    room = length - tokens - 1
    if room < MIN_ROOM:
        raise InputError(
            f"answers of {tokens} tokens leave {max(room, 0)} for prompts in a context of {length}: give a larger "
            "context (-c), or shorter answers (--tokens)"
        )
    return min(MAX_PROMPT, room)


def answer_options(target: ModelOptions, tokens: int) -> ModelOptions:
    """Return how the target runs to answer, and to read what it answered."""
    return dataclasses.replace(
        target, context_length=context_length(target, tokens), max_sequences=_AT_ONCE, model_defaults=False
    )


def read_log(
    path: Path, vocabulary: Vocabulary, *, max_prompt: int, tokens: int, seed: int
) -> tuple[list[KeptAnswer], Prompts]:
    """Return the answers in a log of JSON lines, each with a prompt and what the target answered, and their split.

    The prompts are those of the other kinds alone, for which the target has to be asked.
    """
    pairs: dict[str, list[tuple[str, str]]] = {}
    for number, said in read_json_objects(path):
        prompt, answer = said.get("prompt"), next((said[name] for name in _ANSWER_FIELDS if name in said), None)
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise InputError(
                f"{path}, line {number}: there is no text under prompt and under {', '.join(_ANSWER_FIELDS[:-1])} or "
                f"{_ANSWER_FIELDS[-1]}"
            )
        pairs.setdefault(_digest(prompt), []).append((prompt, answer))
    samples = [Sample("own", f"{path.name}:{number}", found[0][0]) for number, found in enumerate(pairs.values(), 1)]
    split = split_prompts(samples, heldout_samples(), name=str(path))
    answers = []
    for part, of_part in (("train", split.train), ("held", split.held)):
        for sample in of_part:
            for draw, (prompt, answer) in enumerate(pairs[_digest(sample.text)]):
                prompt_ids = tuple(vocabulary.tokenize(prompt))
                # Of a long prompt the end says what is answered.
                prompt_ids = prompt_ids[-max_prompt:]
                token_ids = tuple(vocabulary.tokenize(answer, add_special=False))[:tokens]
                if len(prompt_ids) >= 1 and token_ids:
                    task = Task(sample.kind, sample.name, prompt_ids, tokens, seed)
                    answers.append(KeptAnswer(part, task.drawn_again(draw) if draw else task, token_ids))  # type: ignore[arg-type]
    return answers, Prompts((), (), split.other)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _key(part: Part, task: Task) -> str:
    return json.dumps([part, task.seed, task.max_tokens, list(task.prompt_ids)])


def _to_json(answer: KeptAnswer) -> dict[str, Any]:
    task = answer.task
    return {
        "part": answer.part,
        "kind": task.workload,
        "name": task.name,
        "seed": task.seed,
        "max_tokens": task.max_tokens,
        "prompt_ids": task.prompt_ids,
        "token_ids": answer.token_ids,
    }


def _parse_line(line: bytes) -> KeptAnswer | None:
    """Return the answer of a line; ``None`` of one that is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        said: Mapping[str, Any] = json.loads(line)
        task = Task(
            said["kind"], said["name"], tuple(map(int, said["prompt_ids"])), int(said["max_tokens"]), int(said["seed"])
        )
        return KeptAnswer(said["part"], task, tuple(map(int, said["token_ids"])))
    except (ValueError, KeyError, TypeError):
        return None
