"""Edits of code files: what a prediction gains, which is the text before the edit, or one that is like the answer.

Texts are held-out code, each with a change: a name is another one, lines are gone, there are more, or others. Cases:

* ``forced``: the model is made to write the changed text, as a better one would, at full cost. The prediction is the
  text before: the case that people have.
* ``reversed``: the model's own answer. The prediction is that answer with such a change.
* ``own``: the model's own answer. The prediction is the text before, whether or not the model repeats it.

The prompt has the text before and asks for the change, so lookups know it, too. Sides take turns, answer by answer,
each with a planner of its own. What is measured:

* Speed: tokens over the seconds from the first token to the last, over another side's in the same turn.
* Counts: tokens of the prediction that were accepted and refused. They are counted once more from the trees and paths
  of rounds, and it is an error if these are others.
* Equal: answers that are plain decoding's, token by token. As a wider pass rounds otherwise, near-ties turn.

With ``--costs`` the same answers are decoded once more in virtual time, with what passes cost as measured elsewhere;
what planning takes is not in that. What limits the live speed is what a wider pass costs on the machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import numpy as np
import typer

import paceline
from benchmarks.planner_ab.corpus import PROFILES, priced
from benchmarks.progress import progress_bar
from paceline.bench.forced_verifier import ForcedVerifier
from paceline.chat.template_sources import has_template
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.stats import RequestStats
from paceline.core.verify import Verifier
from paceline.drafters.base import Drafter
from paceline.drafters.lookup import PREDICTION, LookupDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.options import ModelOptions
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary
from paceline.intervals import estimate
from paceline.machine import machine
from paceline.models.embedded import heldout
from paceline.models.registry import resolve_model
from paceline.options import GenerateOptions
from paceline.planning.base import RoundRecord
from paceline.planning.costs.profile import CostProfile
from paceline.planning.registry import build_policy
from paceline.runtime.loop import DecodingLoop

EPILOG = """[bold]Examples[/bold]

python -m benchmarks edits -m instruct.gguf

python -m benchmarks edits -m target-1b-q4_0 --cases forced --temp 0.8 --costs h100-llama-8b-q4_0,q4_0-quiet
"""

CASES: Final = ("forced", "reversed", "own")
SIDES: Final[Mapping[str, Sequence[str] | None]] = {
    "plain": None,
    "suffix": ("suffix",),
    "lookups": ("suffix", "lookup"),
    PREDICTION: (PREDICTION,),
    "default": (PREDICTION, "suffix"),
    "all": (PREDICTION, "suffix", "lookup"),
}
"""Who may draft; ``default`` is what a model without a draft model has."""

HERE: Final = "here"
"""Where passes cost what they cost on this machine."""

_SEED: Final = 1
_SHORT: Final = 16
"""Tokens below which an answer is too short for a speed of its own."""


class Edit(NamedTuple):
    """A change of a text.

    Attributes:
        words: what is to be changed.
        text: with the change.
    """

    words: str
    text: str


def make_edit(text: str, number: int, rng: random.Random) -> Edit:
    """Return a text with a change of the kind that a number stands for, or the next kind that can be had of it."""
    kinds = (_rename, _delete, _insert, _replace)
    for kind in (*kinds[number % len(kinds) :], *kinds):
        edit = kind(text, rng)
        if edit is not None and edit.text != text:
            return edit
    raise InputError("a text of fewer than 4 lines has no room for an edit")


def _rename(text: str, rng: random.Random) -> Edit | None:
    names = re.findall(r"\b[a-z_][a-z0-9_]{3,}\b", text)
    often = sorted({name for name in names if 2 <= names.count(name) <= 8})
    if not often:
        return None
    old = rng.choice(often)
    new = rng.choice(("current", "previous", "shared", "checked")) + "_" + old.strip("_")
    return Edit(f"rename `{old}` to `{new}`", re.sub(rf"\b{old}\b", new, text))


def _lines(text: str, rng: random.Random) -> tuple[list[str], int, int] | None:
    """Return the lines of a text, and which of them are to be changed."""
    lines = text.splitlines(keepends=True)
    if len(lines) < 4:
        return None
    start = rng.randrange(1, len(lines) - 1)
    return lines, start, min(start + rng.choice((1, 2, 4)), len(lines) - 1)


def _delete(text: str, rng: random.Random) -> Edit | None:
    if (found := _lines(text, rng)) is None:
        return None
    lines, start, stop = found
    return Edit(f"delete lines {start + 1} to {stop}", "".join(lines[:start] + lines[stop:]))


def _insert(text: str, rng: random.Random) -> Edit | None:
    if (found := _lines(text, rng)) is None:
        return None
    lines, start, stop = found
    indent = re.match(r"\s*", lines[start])
    put_in = [f"{indent[0] if indent else ''}logger.debug('step %d of %d', {n}, total)\n" for n in range(start, stop)]
    return Edit(f"log before line {start + 1}", "".join(lines[:start] + put_in + lines[start:]))


def _replace(text: str, rng: random.Random) -> Edit | None:
    if (found := _lines(text, rng)) is None:
        return None
    lines, start, stop = found
    changed = [re.sub(r"\w+", lambda word: word[0][::-1] if len(word[0]) > 3 else word[0], lines[start])]
    return Edit(f"rewrite lines {start + 1} to {stop}", "".join(lines[:start] + changed + lines[stop:]))


@dataclass(frozen=True, slots=True)
class _Task:
    """An answer to be measured.

    Attributes:
        case: among :data:`CASES`.
        prompt_ids: the text before, and what is to be changed.
        prediction: token ids.
        reference_ids: what the model is made to say; ``None`` where it says what it likes.
    """

    case: str
    prompt_ids: Sequence[int]
    prediction: Sequence[int]
    reference_ids: Sequence[int] | None


@dataclass(slots=True)
class _Counts:
    """Counts tokens of predictions by the rounds, apart from the statistics of requests."""

    drafted: int = 0
    accepted: int = 0

    def observe(self, record: RoundRecord) -> None:
        for tree, path, emitted in zip(record.trees, record.paths, record.emitted, strict=True):
            self.drafted += tree.sources.count(PREDICTION)
            self.accepted += sum(tree.sources[node] == PREDICTION for node in path[:emitted])


@dataclass(slots=True)
class _Side:
    """What came of one side of a case.

    Attributes:
        speeds: tokens a second, text by text.
        drafted: tokens of predictions that took a row.
        accepted: those of them that the answers have.
        equal: answers that were plain decoding's.
    """

    speeds: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    equal: int = 0

    def add(self, stats: RequestStats, counts: _Counts, *, equal: bool) -> None:
        drafted, accepted = stats.drafted_by_source[PREDICTION], stats.accepted_by_source[PREDICTION]
        if (counts.drafted, counts.accepted) != (drafted, accepted):
            raise AssertionError(f"{drafted} tokens drafted and {accepted} accepted, and in rounds {counts}")
        counts.drafted = counts.accepted = 0
        self.drafted += drafted
        self.accepted += accepted
        self.equal += equal
        self.speeds.append((stats.predicted_tokens - 1) / (stats.arrivals_s[-1] - stats.arrivals_s[0]))


Sides: TypeAlias = dict[str, _Side]
Answered: TypeAlias = tuple[_Task, Sequence[int]]


def edits(
    model: Annotated[str, typer.Option("-m", "--model", help="A GGUF file, or a name from paceline models.")],
    cases: Annotated[str, typer.Option("--cases", help=f"Among {', '.join(CASES)}.")] = ",".join(CASES),
    sides: Annotated[str, typer.Option("--sides", help=f"Among {', '.join(SIDES)}; plain first.")] = ",".join(SIDES),
    temp: Annotated[float, typer.Option("--temp", "--temperature", help="0 decodes greedily.")] = 0.0,
    count: Annotated[int, typer.Option("--edits", help="How many.")] = 20,
    characters: Annotated[int, typer.Option("--characters", help="Of each text, cut at the end of a line.")] = 900,
    costs: Annotated[str, typer.Option("--costs", help=f"Among {', '.join(PROFILES)}.")] = "",
    live: Annotated[bool, typer.Option("--live/--no-live", help="Measure here, too.")] = True,
) -> None:
    """Measure predictions on edits of code files."""
    for named, known in ((cases, CASES), (sides, SIDES)):
        if unknown := [name for name in named.split(",") if name not in known]:
            raise InputError(f"unknown {unknown[0]!r}: choose from {', '.join(known)}")
    texts, names = heldout("code"), sides.split(",")
    if not 1 <= count <= len(texts) or characters < 200 or names[0] != "plain":
        raise InputError(f"{count} edits of {characters} characters: give 1 to {len(texts)} of 200 or more")
    profiles = {name: priced(name).costs for name in costs.split(",") if name}
    path, answered = resolve_model(model), {case: list[Answered]() for case in cases.split(",")}
    found = {
        case: {where: {side: _Side() for side in names} for where in (*([HERE] if live else []), *profiles)}
        for case in answered
    }
    with ExitStack() as stack:
        # Which attention is faster is measured where it is not said: it may be another one for each.
        options = ModelOptions(path, model_defaults=False, flash_attention=False)
        models = {
            side: stack.enter_context(paceline.load(options, drafters=["suffix", "lookup"], remember=False))
            for side in (names if live else names[:1])
        }
        counts = {side: _Counts() for side in models}
        for side, one in models.items():
            one.add_observer(counts[side])
        with progress_bar() as bar:
            for number in bar.track(range(count), description=path.name):
                text = texts[number][:characters]
                text = text[: text.rfind("\n") + 1]
                for task, answer in _tasks(text, number, list(answered), models["plain"], path, temp):
                    answered[task.case].append((task, answer))
                    if live:
                        _measure(task, answer, number, models, counts, temp, found[task.case][HERE])
    for case, where in found.items():
        for name, profile in profiles.items():
            for side in names:
                _decode_virtually(answered[case], side, profile, where[name][side])
    _print(path, temp, count, answered, found)
    facts = {"model": path.name, "temperature": temp, "edits": count, "cases": found}
    print(json.dumps({"machine": machine(), "edits": facts}, default=dataclasses.asdict))


def _tasks(
    text: str, number: int, cases: Sequence[str], model: paceline.Model, path: Path, temp: float
) -> Iterator[Answered]:
    """Yield what is to be answered, with plain decoding's answer."""
    vocabulary = model.target.vocabulary
    edit = make_edit(text, number, random.Random(f"{_SEED} {number}"))

    def read(plain: str) -> list[int]:
        return vocabulary.tokenize(plain, add_special=False)

    if has_template(path):
        asked = f"Rewrite this file with one change: {edit.words}. Answer with the file alone.\n\n{text}"
        prompt_ids = model.chat_prompt(asked, max_tokens=0).token_ids
    else:
        prompt_ids = tuple(vocabulary.tokenize(f"{text}\n# The same file, with one change: {edit.words}\n"))
    after = read(edit.text)
    if "forced" in cases:
        yield _Task("forced", prompt_ids, read(text), after), after
    if not {"reversed", "own"} & {*cases}:
        return
    own = model.generate(prompt_ids, temperature=temp, seed=_SEED, max_tokens=len(after), speculate=False)
    if len(own.token_ids) < _SHORT:
        return
    if "reversed" in cases and own.text.count("\n") >= 4:
        other = make_edit(own.text, number + 1, random.Random(f"{_SEED} {number} reversed"))
        yield _Task("reversed", prompt_ids, read(other.text), None), own.token_ids
    if "own" in cases:
        yield _Task("own", prompt_ids, read(text), None), own.token_ids


def _measure(
    task: _Task,
    plain: Sequence[int],
    number: int,
    models: Mapping[str, paceline.Model],
    counts: Mapping[str, _Counts],
    temp: float,
    found: Sides,
) -> None:
    """Have all sides answer, the first of them another one each time."""
    first = number % len(models)
    for side in [*models][first:] + [*models][:first]:
        options = GenerateOptions(temperature=temp, seed=_SEED, max_tokens=len(plain))
        named = SIDES[side]
        if named is None:
            options["speculate"] = False
        else:
            options["drafters"] = named
            if PREDICTION in named:
                options["prediction"] = task.prediction
        generation = _answer(models[side], task, options)
        if generation.stats.predicted_tokens > 1:
            found[side].add(generation.stats, counts[side], equal=list(generation.token_ids) == list(plain))


def _answer(model: paceline.Model, task: _Task, options: GenerateOptions) -> paceline.Generation:
    reference = task.reference_ids
    if reference is None:
        return model.generate(task.prompt_ids, **options)

    def forced(verifier: Verifier, prompt_ids: Sequence[int]) -> Verifier:
        return ForcedVerifier(verifier, reference, len(prompt_ids))

    with model._start(task.prompt_ids, model.read_options(options), wrap=forced) as stream:
        return stream.result()


def _decode_virtually(answered: Sequence[Answered], side: str, costs: CostProfile, found: _Side) -> None:
    """Decode the same answers where passes cost what a profile says."""
    named, counts = SIDES[side] or (), _Counts()
    policy = build_policy("auto", costs=costs) if named else paceline.NO_SPECULATION
    made: Mapping[str, Callable[[], Drafter]] = {"suffix": SuffixDrafter, "lookup": LookupDrafter}
    drafters = [made[name]() for name in named if name in made]
    for task, answer in answered:
        # Few tokens are in these texts.
        ids = {token: index for index, token in enumerate({*task.prompt_ids, *task.prediction, *answer})}
        prompt, prediction, said = (
            [ids[token] for token in part] for part in (task.prompt_ids, task.prediction, answer)
        )

        def say(
            tokens: Sequence[int], size: int = len(ids), said: Sequence[int] = said, start: int = len(prompt)
        ) -> Any:
            row = np.zeros(size)
            place = len(tokens) - start
            row[said[place] if 0 <= place < len(said) else 0] = 1.0
            return row

        engine = ScriptedEngine(say, ScriptedVocabulary.of_size(len(ids)), cost=costs.round_s)
        loop = DecodingLoop(engine, drafters, policy, clock=engine.clock, observers=[counts])
        speculation = SpeculationParams(prediction=tuple(prediction) if PREDICTION in named else ())
        rules = StopRules(len(said), ignore_end=True)
        request = loop.add(prompt, SamplingParams(0.0), rules, speculation)
        while request.finish_reason is None:
            loop.step()
        found.add(request.stats, counts, equal=request.output_ids == said)


def _print(
    path: Path,
    temp: float,
    count: int,
    answered: Mapping[str, Sequence[Answered]],
    found: Mapping[str, Mapping[str, Sides]],
) -> None:
    print(f"{path.name}, temperature {temp:g}, {count} edits; speeds over others: median and 95% interval of the texts")
    for case, of_case in found.items():
        print(f"{case}: {len(answered[case])} answers, {sum(len(answer) for _, answer in answered[case])} tokens")
        for where, sides in of_case.items():
            print(f"  {where}")
            for side, one in sides.items():
                if not one.speeds:
                    continue
                line = f"    {side:11}{statistics.median(one.speeds):8.1f} t/s"
                for below in ("plain", "suffix", "lookups"):
                    if below in sides and below != side:
                        line += f"  {_ratio(one.speeds, sides[below].speeds)} over {below}"
                refused = one.drafted - one.accepted
                print(f"{line}  accepted {one.accepted}, refused {refused}, equal {one.equal}")


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    found = estimate([one / other for one, other in zip(ours, theirs, strict=True)])
    return f"{found.median:.3f} ({found.low or math.nan:.3f} to {found.high or math.nan:.3f})"
