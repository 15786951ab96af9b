"""Answers that keep to JSON schemas: whether they are valid, and what drafts gain where much of an answer is forced.

Schemas are those of JSONSchemaBench (Geng et al. 2025, arXiv 2501.10868), from a folder of folders: one of each group
of schemas, as the ``data`` of its repository is. As many of each group are drawn, by a seed. A schema that is refused
is counted, and the next one drawn in its place.

Every schema is asked twice here, without drafts and with them, and once of llama-server with its own grammar of the
same schema, where one is given. Sides take turns, schema by schema, and begin in turn. What is measured:

* Valid: answers that ended by themselves, judged by jsonschema, which shares no code with the grammars. An answer that
  ran out of its tokens is no document, and is counted.
* Equal: token by token, with drafts and without. As a wider pass rounds otherwise, near-ties turn unless ``--exact``.
* Forced: tokens that the grammar drafted as forced and the walks came to, and how many of them were kept. A model that
  would say something else spells what it has to say by other tokens, at times one letter at a time.
* Speed: tokens over the seconds from the first token to the last.

What limits the speed is the machine's memory, and what a wider pass costs: a forced token is nearly always right, but
its row is no cheaper for that. llama-server may say something else in a place where its grammar allows another space.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import httpx
import typer
from jsonschema.exceptions import ValidationError
from jsonschema.validators import validator_for

import paceline
from benchmarks.reporting import as_line, progress_bar
from benchmarks.server import Server
from paceline.chat.template_sources import has_template
from paceline.constraints import JsonSchema
from paceline.core.constraint import Constraint
from paceline.core.errors import ConstraintError, InputError
from paceline.core.params import MAX_TOKENS
from paceline.core.tree import ROOT
from paceline.drafters.grammar import NAME
from paceline.engines.options import ModelOptions
from paceline.engines.threads import PERIOD_S
from paceline.models.registry import resolve_model
from paceline.planning.base import RoundRecord

EPILOG = """[bold]Examples[/bold]

python -m benchmarks structured jsonschemabench/data -m instruct.gguf

python -m benchmarks structured jsonschemabench/data -m instruct.gguf --exact  [dim]# what they say, not how fast[/dim]

python -m benchmarks structured jsonschemabench/data -m target-1b-q8_0 -md draft --per-group 4

python -m benchmarks structured jsonschemabench/data -m instruct.gguf --server ./llama-server --temp 0.8
"""

PLAIN, DRAFTED, SERVER = "plain", "drafted", "llama-server"
_SEED: Final = 1
_RUN_IN_S: Final = 2 * PERIOD_S
_SHORT: Final = 8
"""Tokens below which an answer is too short for a speed of its own."""


class _Answer(NamedTuple):
    """What a side said to one schema.

    Attributes:
        text: of the answer.
        token_ids: of the answer; empty of llama-server.
        ended: whether it ended by itself.
        tokens: but for the first, which comes with the prompt.
        seconds: from the first token to the last.
    """

    text: str
    token_ids: Sequence[int]
    ended: bool
    tokens: int
    seconds: float


@dataclass(slots=True)
class _Found:
    """What came of all schemas.

    Attributes:
        answers: of each schema that was answered, by side.
        groups: of each of these.
        refused: reasons, with how many schemas were refused for them.
        invalid: answers that ended by themselves and are not valid, with what is wrong.
        by_source: draft tokens verified, by drafter.
        kept: those of them that were kept.
        rounds: of the answers with drafts.
        forced: tokens that the grammar drafted as forced, and that the walks came to.
        forced_kept: those of them that were kept.
        rejected: by llama-server.
    """

    answers: list[dict[str, _Answer]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    invalid: list[str] = field(default_factory=list)
    by_source: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    forced: int = 0
    forced_kept: int = 0
    rejected: int = 0

    def observe(self, record: RoundRecord) -> None:
        """Count what was forced in a round."""
        for tree, path in zip(record.trees, record.paths, strict=True):
            for node in range(1, len(tree)):
                if tree.sources[node] != NAME or tree.evidence[node].probability is not None:
                    continue
                self.forced += tree.parents[node] == ROOT or tree.parents[node] in path
                self.forced_kept += node in path


def structured(
    folder: Annotated[Path, typer.Argument(help="JSONSchemaBench's data: a folder for each group.")],
    model: Annotated[str, typer.Option("-m", "--model", help="A GGUF file, or a name from paceline models.")],
    draft: Annotated[str | None, typer.Option("-md", "--model-draft", help="Draft model.")] = None,
    per_group: Annotated[int, typer.Option("--per-group", help="Schemas of each group.")] = 20,
    temp: Annotated[float, typer.Option("--temp", "--temperature", help="0 decodes greedily.")] = 0.0,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Most tokens of an answer.")] = 160,
    shown: Annotated[int, typer.Option("--shown", help="Most characters of a schema that the model reads.")] = 1200,
    server: Annotated[Path | None, typer.Option("--server", help="llama-server, to be measured beside.")] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Arithmetic that does not depend on a pass's width: answers are equal.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Draws the schemas.")] = _SEED,
) -> None:
    """Measure answers that keep to the schemas of JSONSchemaBench, and check them."""
    if per_group < 1 or tokens < 2 or shown < 0:
        raise InputError(f"{per_group} schemas of {shown} characters with {tokens} tokens: the least is 1 of 0 with 2")
    groups = {one.name: sorted(one.glob("*.json")) for one in sorted(folder.glob("*")) if one.is_dir()}
    groups = {name: files for name, files in groups.items() if files}
    if not groups:
        raise InputError(f"{folder} has no folder with schemas: give the data folder of JSONSchemaBench's repository")
    path, found = resolve_model(model), _Found()
    with ExitStack() as stack:
        options = ModelOptions(path, model_defaults=False, exact=exact)
        drafting = None if draft is None else ModelOptions(resolve_model(draft), model_defaults=False)
        ours = stack.enter_context(paceline.load(options, draft=drafting, remember=False))
        ours.add_observer(found)
        theirs = None
        if server is not None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory()), "server.log")
            theirs = stack.enter_context(Server.start(["-m", str(path)], log, program=[str(server.absolute())]))
        asking = _Asking(ours, theirs, path, temp, tokens, shown)
        with progress_bar() as bar:
            for name, files in groups.items():
                schemas = _drawn(files, random.Random(f"{seed} {name}"))
                for _ in bar.track(range(min(per_group, len(files))), description=name):
                    _answer_next(name, schemas, asking, found)
    _print(path, temp, found)
    print(as_line("structured", _facts(path, temp, found)))


@dataclass(slots=True)
class _Asking:
    """Asks both sides for a document."""

    ours: paceline.Model
    theirs: Server | None
    path: Path
    temp: float
    tokens: int
    shown: int

    def prompt(self, text: str) -> Sequence[int]:
        """Return what the model reads of a schema."""
        shown = text[: self.shown]
        if not has_template(self.path):
            return self.ours.target.vocabulary.tokenize(f"{shown}\n\n")
        asked = f"Write an example document in JSON that keeps to this JSON schema. Answer with it alone.\n\n{shown}"
        return self.ours.chat_prompt(asked, max_tokens=self.tokens).token_ids

    def here(
        self, prompt: Sequence[int], constraint: Constraint, *, speculate: bool
    ) -> tuple[_Answer, paceline.Generation]:
        if self.theirs is not None:
            self._run_in()
        said = self.ours.generate(
            list(prompt),
            constraint=constraint,
            temperature=self.temp,
            seed=_SEED,
            max_tokens=self.tokens,
            speculate=speculate,
        )
        stats = said.stats
        ended = said.finish_reason == "end"
        return _Answer(said.text, said.token_ids, ended, stats.predicted_tokens - 1, stats.decode_s), said

    def there(self, prompt: Sequence[int], schema: Any) -> _Answer | None:
        """Return llama-server's answer; ``None`` if it refuses the schema."""
        assert self.theirs is not None
        body = {"prompt": list(prompt), "json_schema": schema, "temperature": self.temp, "seed": _SEED}
        try:
            said = self.theirs.post("/completion", {**body, "n_predict": self.tokens})
        except httpx.HTTPStatusError:
            return None
        timings = said["timings"]
        ended = said["stop_type"] == "eos"
        return _Answer(said["content"], (), ended, timings["predicted_n"] - 1, timings["predicted_ms"] / 1e3)

    def _run_in(self) -> None:
        """Decode until the cores have been looked at without the other side at work."""
        give_up_s = time.perf_counter() + _RUN_IN_S
        with self.ours.stream(
            "The", max_tokens=MAX_TOKENS, ignore_end=True, speculate=False, cache_prompt=False
        ) as stream:
            for _ in stream.rounds():
                if time.perf_counter() > give_up_s:
                    break


def _drawn(files: Sequence[Path], chance: random.Random) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas of a group in a drawn order."""
    for file in chance.sample(files, len(files)):
        yield file, json.loads(file.read_bytes())


def _answer_next(group: str, schemas: Iterator[tuple[Path, Any]], asking: _Asking, found: _Found) -> None:
    """Have the next schema that can be compiled answered by all sides."""
    for file, schema in schemas:
        try:
            constraint = asking.ours.compile(JsonSchema(schema))
        except ConstraintError as error:
            found.refused[_kind(str(error))] += 1
            continue
        prompt = asking.prompt(file.read_text())
        answers: dict[str, _Answer] = {}
        sides = [PLAIN, DRAFTED] + ([] if asking.theirs is None else [SERVER])
        first = len(found.answers) % len(sides)
        for side in sides[first:] + sides[:first]:
            if side == SERVER:
                theirs = asking.there(prompt, schema)
                found.rejected += theirs is None
                if theirs is not None:
                    answers[side] = theirs
                continue
            answers[side], said = asking.here(prompt, constraint, speculate=side == DRAFTED)
            if side == DRAFTED:
                found.by_source += said.stats.drafted_by_source
                found.kept += said.stats.accepted_by_source
                found.rounds += said.stats.rounds
        for side in (PLAIN, DRAFTED):
            wrong = _fault(schema, answers[side]) if answers[side].ended else None
            if wrong is not None:
                found.invalid.append(f"{group}/{file.name} {side}: {wrong}")
        found.answers.append(answers)
        found.groups.append(group)
        return


def _kind(reason: str) -> str:
    """Return the beginning of a reason without what is of one schema alone: its place."""
    return re.sub(r"^.*?#\S*: ", "", reason)[:50]


def _fault(schema: Any, answer: _Answer) -> str | None:
    """Return what is wrong with a document; ``None`` if nothing is."""
    try:
        validator_for(schema)(schema).validate(json.loads(answer.text))
    except ValidationError as error:
        return str(error.message)[:200]
    except ValueError as error:
        return f"no JSON: {error}"
    return None


def _print(path: Path, temp: float, found: _Found) -> None:
    answers = found.answers
    ended = sum(one[DRAFTED].ended for one in answers)
    equal = sum(one[PLAIN].token_ids == one[DRAFTED].token_ids for one in answers)
    print(f"{path.name}, temperature {temp:g}: {len(answers)} schemas of {len(set(found.groups))} groups")
    print(f"refused before: {found.refused.total()}")
    for reason, count in found.refused.most_common():
        print(f"  {count:4}  {reason}")
    print(f"ended by itself: {ended} of {len(answers)}; invalid of those, both sides: {len(found.invalid)}")
    for line in found.invalid:
        print(f"  {line}")
    print(f"equal with and without drafts: {equal} of {len(answers)}")
    print(f"drafts kept: {_shares(found)}; {found.rounds} rounds")
    if found.forced:
        share = found.forced_kept / found.forced
        print(f"forced, of those that the walks came to: {found.forced_kept} of {found.forced} kept ({share:.1%})")
    print("tokens a second, all tokens over all seconds; ratios by answer, median and quartiles")
    for side in (PLAIN, DRAFTED, SERVER):
        given = [one[side] for one in answers if side in one]
        if given:
            print(f"  {side:14}{sum(one.tokens for one in given) / sum(one.seconds for one in given):8.1f}")
    if found.rejected:
        print(f"llama-server refused {found.rejected}")
    for above, below in ((DRAFTED, PLAIN), (DRAFTED, SERVER), (PLAIN, SERVER)):
        ratios = _ratios(answers, above, below)
        if len(ratios) > 1:
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"  {above} over {below}: {middle:.2f} ({low:.2f} to {high:.2f} in {len(ratios)})")
    for name in sorted(set(found.groups)):
        of_group = [one for one, group in zip(answers, found.groups, strict=True) if group == name]
        ratios = _ratios(of_group, DRAFTED, PLAIN)
        if ratios:
            print(f"    {name:18}{statistics.median(ratios):6.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def _shares(found: _Found) -> str:
    shares = [
        f"{name} {found.kept[name]} of {count} ({found.kept[name] / count:.1%})"
        for name, count in found.by_source.most_common()
    ]
    return ", ".join(shares) or "none"


def _ratios(answers: Sequence[dict[str, _Answer]], above: str, below: str) -> list[float]:
    """Return ratios of speeds, of the answers that both sides gave, of some length."""
    both = [(one[above], one[below]) for one in answers if above in one and below in one]
    return [a.tokens / a.seconds * b.seconds / b.tokens for a, b in both if min(a.tokens, b.tokens) >= _SHORT]


def _facts(path: Path, temp: float, found: _Found) -> dict[str, Any]:
    return {
        "model": path.name,
        "temperature": temp,
        "schemas": len(found.answers),
        "refused": dict(found.refused),
        "invalid": found.invalid,
        "drafted": dict(found.by_source),
        "accepted": dict(found.kept),
        "forced": [found.forced, found.forced_kept],
        "answers": [
            {side: {"tokens": one.tokens, "seconds": one.seconds, "ended": one.ended} for side, one in answers.items()}
            for answers in found.answers
        ],
    }
