"""``paceline demo``: what speculation does, shown in a minute, and what to type next."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from paceline.api import Model
from paceline.cli import exits
from paceline.cli.display import error_console, output_console
from paceline.cli.inflate import large_target
from paceline.cli.outputs import Outputs, json_option
from paceline.cli.race_view import lane_lines, legend, play_race, verdict_line
from paceline.cli.setup import FoundModels, Setup, open_model
from paceline.engines.loading import reader_of
from paceline.engines.options import ModelOptions
from paceline.engines.threads import busy_seconds, count_cores, usable_cores
from paceline.environment import ModelChoice
from paceline.lab.comparison import Stop, Stopped, answer
from paceline.lab.inflate import find_file_type
from paceline.lab.race import LaneName, Race, run_race
from paceline.machine import machine
from paceline.models.embedded import embedded_draft, heldout
from paceline.options import GenerateOptions

EPILOG = """[bold]Examples[/bold]

paceline demo  [dim]# under a minute, and half a minute more the first time[/dim]

paceline demo | cat  [dim]# without pictures: the lines alone[/dim]

paceline demo --json > race.json  [dim]# every token with its time; docs/draw_race.py draws it[/dim]
"""
"""Examples below the command's help."""

FILE_TYPE: Final = "Q8_0"
"""Of the target's weights.

Drafts pay on more machines in Q8_0 than in Q4_0, where a pass over several tokens costs relatively more. By replay with
measured costs the demo's log runs at 1.94 times plain on two cores of an EPYC and at 1.74 on two of a Xeon; in Q4_0 at
1.47 and 2.80.
"""

_TRIES: Final = 3
"""Races of each scene: the median one is shown."""
_SLOWER: Final = 6.0
"""Times as long as planned that a scene's shortest plain answer may take before it becomes shorter than that."""
_MIN_TOKENS: Final = 16
"""Tokens of an answer, however slow the machine is."""
_RESTLESS: Final = 1.15
"""Times as long as the quickest that the slowest of several plain answers may take on a machine that is left alone."""
_BUSY_CORES: Final = 0.25
"""Cores that other programs may use before it is said that they do."""
_LOOK_S: Final = 0.5
"""Seconds for which other programs are watched before anything else is done."""
_SEED: Final = 1
"""Seed of both answers of a race."""
_WARM_UP_TOKENS: Final = 12
"""Tokens of the answer that warms the machine up; its prompt has twice as many."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One race of the demo.

    Attributes:
        about: what is to be seen, in a sentence.
        kind: of held-out text.
        number: of the text, from 1.
        prompt_tokens: how many of its first tokens are the prompt.
        options: how both answers are sampled.
        seconds: about how long a plain answer is to take.
        tokens: fewest and most of an answer.
        patience: times as long as planned that the shortest plain answer may take before one race of it has to do.
    """

    title: str
    about: str
    kind: str
    number: int
    prompt_tokens: int
    options: GenerateOptions
    seconds: float
    tokens: tuple[int, int]
    patience: float

    def prompt_ids(self, model: Model) -> list[int]:
        return model.target.vocabulary.tokenize(heldout(self.kind)[self.number - 1])[: self.prompt_tokens]


# What auto makes of them, by replay with measured costs: the log runs at 1.5 to 3.4 times plain on two cores of an EPYC
# (Q4_0 to F16) and at 1.7 to 2.8 on two of a Xeon, and at 2.3 with an 8B model on an H100.
SCENES: Final = (
    Scene(
        "A server log, whose next words are easily guessed",
        "Drafts are guesses at the next tokens. The target checks many of them in one pass, and keeps those that it "
        "would have said itself.",
        "logs",
        8,
        96,
        {"temperature": 0.4, "seed": _SEED},
        seconds=4.0,
        tokens=(64, 160),  # of fewer hardly any are drafted where the machine is busy
        patience=3.0,  # what it gains is told by a median, there too
    ),
    Scene(
        "Prose at temperature 1, which nobody can guess",
        "Drafts pay little here, or not at all. Where they do not pay, paceline makes none.",
        "prose",
        25,
        64,
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": _SEED},
        seconds=3.0,
        tokens=(32, 96),
        patience=1.0,
    ),
)
"""Races of the demo, in their order."""

_NEXT: Final = (
    ("paceline run -m target.gguf -md draft.gguf -p 'Once upon a time' --compare", "two GGUF files of your own"),
    ("paceline run -m target.gguf -md self -p 'Once upon a time'", "no second file: a smaller copy of the first"),
    ("paceline chat -hf ggml-org/gemma-3-1b-it-GGUF", "a model of the Hugging Face hub, fetched once"),
    ("paceline serve -m target.gguf -md draft.gguf", "OpenAI's API at http://127.0.0.1:8080/v1"),
)
_PYTHON: Final = (
    "import paceline",
    'model = paceline.load("target.gguf", draft="draft.gguf")',
    'print(model.generate("Once upon a time").text)',
)


def demo(
    file_type: Annotated[
        str,
        typer.Option("--type", help="Type of the target's weights; paceline inflate --help lists all.", metavar="TYPE"),
    ] = FILE_TYPE,
    json_to: Annotated[str | None, json_option()] = None,
) -> None:
    """Show what speculative decoding gains: one prompt answered with and without it, side by side.

    The target is paceline's built-in model, made as slow as a model of a billion weights. The first run makes it, which
    takes 1.1 GB in the cache, and measures what its passes cost here.

    Both answers are generated one after the other, so that neither slows the other down, three times over. The median
    is replayed side by side at its speed. Then comes a text that is hard to predict, and what to type for a model of
    your own. A busy machine is reported first. On a slow machine, answers are shorter and races fewer.
    """
    outputs = Outputs(json_to)
    outputs.check()
    steps = error_console()
    weights = find_file_type(file_type)
    others = OtherPrograms()
    time.sleep(_LOOK_S)
    if (words := describe_busy(others.cores())) is not None:
        steps.print(words, style="yellow", markup=False)
    target = ModelOptions(large_target(weights))
    draft = ModelOptions(embedded_draft())
    # Nothing that an earlier demo has learned: each shows what a first answer is like.
    setup = Setup(
        ModelChoice.of({"path": target.path}, {}),
        draft=draft.path,
        drafters=None,
        policy="auto",
        verify="coupled",
        remember=False,
        may_draft=False,
    )
    if not steps.is_terminal:  # which shows how far that is
        steps.print("loading; what passes cost here is measured the first time, in some 10 s")
    with open_model(setup, FoundModels(target, draft), silent=outputs.prints_json) as (model, interrupted):
        console = output_console(soft_wrap=not sys.stdout.isatty())
        console.quiet = outputs.prints_json
        try:
            with show_step(steps, "warming up"):
                per_second = _plain_speed(model, interrupted.is_set)
            if (words := describe_slow(per_second)) is not None:
                steps.print(words, style="yellow", markup=False)
            _begin(console, model)
            races = []
            for number, scene in enumerate(SCENES, 1):
                console.print()
                console.print(Text(f"{number}. {scene.title}", "bold"))
                console.print(Text(scene.about, "dim"))
                tokens, count = plan_races(scene, per_second)
                others = OtherPrograms()
                tries = [
                    _race(model, target, scene, tokens, interrupted.is_set, steps, f"{one} of {count}")
                    for one in range(1, count + 1)
                ]
                race = median_race(tries)
                _show_race(console, race, tries, others.cores(), interrupted.is_set)
                races.append((scene, race, tries))
                if interrupted.is_set():
                    raise Stopped
        except Stopped:
            steps.print("interrupted", style="dim")
            raise typer.Exit(exits.INTERRUPTED) from None
        facts = {
            "target": model.target.description,
            "machine": machine(usable_cores()),
            "races": [
                {"title": scene.title, **race.to_json(), "speedups": [each.speedup for each in tries]}
                for scene, race, tries in races
            ],
        }
    outputs.write(facts, lambda: _end(console))
    if any(race.divergence == "bug" for _, race, _ in races):
        raise typer.Exit(exits.FAILURE)


def _plain_speed(model: Model, stopped: Stop) -> float:
    """Return how many tokens a second plain decoding makes, after a warm-up with drafts."""
    scene = SCENES[0]
    options: GenerateOptions = {**scene.options, "max_tokens": _WARM_UP_TOKENS}
    prompt_ids = scene.prompt_ids(model)[: 2 * _WARM_UP_TOKENS]
    warm = answer(model, prompt_ids, options, speculate=True, stopped=stopped)
    per_second = warm.stats.predicted_per_second or 1.0
    if describe_slow(per_second) is not None:  # it is no faster plainly, and another answer would take long
        return per_second
    plain = answer(model, prompt_ids, options, speculate=False, stopped=stopped)
    return plain.stats.predicted_per_second or 1.0


def plan_races(scene: Scene, per_second: float) -> tuple[int, int]:
    """Return the tokens of a scene's answers and how many races of it there is time for, by the plain speed."""
    fewest, most = scene.tokens
    wanted = scene.seconds * per_second
    if fewest > _SLOWER * wanted:
        fewest = max(round(_SLOWER * wanted), _MIN_TOKENS)
    tokens = min(max(round(wanted), fewest), most)
    return tokens, _TRIES if tokens <= round(scene.patience * wanted) else 1


def describe_slow(per_second: float) -> str | None:
    """Say what a machine that decodes so many tokens a second leaves out; ``None`` where that is nothing."""
    planned = [plan_races(scene, per_second) for scene in SCENES]
    if all(tries == _TRIES for _, tries in planned):
        return None
    lengths = " and ".join(str(tokens) for tokens, _ in planned)
    races = " and ".join(str(tries) for _, tries in planned)
    return (
        f"some {per_second:.2g} tokens a second here, so answers have {lengths} tokens, in {races} races where faster "
        f"machines have {_TRIES} each: paceline run --compare takes the time to tell"
    )


class OtherPrograms:
    """What other programs use of the cores, from when it is made."""

    def __init__(self) -> None:
        self._begun = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        try:
            busy_s = busy_seconds()
        except OSError:  # the system does not say, so nothing is said of others
            busy_s = 0.0
        return busy_s, time.process_time(), time.monotonic()

    def cores(self) -> float:
        """How many cores they have kept busy on average."""
        busy_s, own_s, elapsed_s = (now - then for now, then in zip(self._now(), self._begun, strict=True))
        return max(busy_s - own_s, 0.0) / elapsed_s if elapsed_s > 0 else 0.0


def describe_busy(others: float) -> str | None:
    """Say that other programs use the cores, where they do."""
    if others < _BUSY_CORES:
        return None
    return (
        f"other programs use {others:.1f} of {count_cores()} cores, so this takes longer and gains less than it could: "
        "close them, or try again when they are done"
    )


def median_race(tries: Sequence[Race]) -> Race:
    return sorted(tries, key=lambda race: race.speedup)[len(tries) // 2]


def describe_spread(tries: Sequence[Race], others: float) -> str:
    """Say how much tries differ, and whether the machine was left alone; ``others`` is the cores that others used."""
    speedups, plain_s = [race.speedup for race in tries], [race.plain.seconds for race in tries]
    words = f"the median of {len(tries)} tries, of {min(speedups):.2f}x to {max(speedups):.2f}x"
    if len(tries) == 1:
        words = "one try, so it says little"
    if others >= _BUSY_CORES:
        words += f"; other programs used {others:.1f} of {count_cores()} cores meanwhile"
    elif max(plain_s) > _RESTLESS * min(plain_s):
        words += (
            f"; plain decoding alone took {min(plain_s):.1f} to {max(plain_s):.1f} s, so something else kept this "
            "machine busy and these times say little"
        )
    return words


def explain_loss(race: Race, tries: Sequence[Race], others: float) -> str | None:
    """Say why a race was lost; ``None`` where it was not."""
    if race.verdict != "slower":
        return None
    plain_s = sorted(each.plain.seconds for each in tries)
    if others >= _BUSY_CORES:
        return (
            "Other programs took more of the cores from this answer than from the other: try again when they are done."
        )
    if plain_s[-1] - plain_s[0] > race.speculative.seconds - race.plain.seconds:
        return f"Plain decoding alone took {plain_s[0]:.1f} to {plain_s[-1]:.1f} s: so small a difference is chance."
    lane = race.speculative
    return (
        f"{lane.num_accepted} of {lane.num_drafted} guesses were right, and checking them took longer than that saved. "
        "That is bounded: where guesses do not pay, paceline soon stops making them."
    )


def _race(
    model: Model,
    target: ModelOptions,
    scene: Scene,
    tokens: int,
    stopped: Stop,
    steps: Console,
    which: str,
) -> Race:
    options: GenerateOptions = {**scene.options, "max_tokens": tokens}
    with contextlib.ExitStack() as running:

        def tell(lane: LaneName) -> None:
            running.close()
            order = "first plainly" if lane == "plain" else "then speculatively, with the same seed"
            running.enter_context(show_step(steps, f"prompt and {tokens} tokens, {which}: {order}"))

        open_reader = reader_of(model.target_options or target, is_streamed=model.memory_plan is not None)
        return run_race(model, scene.prompt_ids(model), options, open_reader=open_reader, stopped=stopped, tell=tell)


@contextlib.contextmanager
def show_step(console: Console, words: str) -> Iterator[None]:
    """Say on standard error what is being done, for as long as it takes; in a pipe as a line, with the time it took."""
    if console.is_terminal:
        # Four times a second: more would take time from what is measured.
        with console.status(words, refresh_per_second=4):
            yield
        return
    started_s = time.monotonic()
    yield
    console.print(f"{words}: {time.monotonic() - started_s:.1f} s", markup=False)


def _begin(console: Console, model: Model) -> None:
    console.print(Text("One prompt, one seed, decoded twice: plainly and speculatively.", "bold"))
    console.print(
        Text(
            "The target is the small model that travels with paceline, at the cost of a large one: "
            f"{model.target.description.removeprefix(' ').strip()}. What it says makes little sense; the time "
            "that it takes is a large model's.",
            "dim",
        )
    )


def _show_race(console: Console, race: Race, tries: Sequence[Race], others: float, stopped: Stop) -> None:
    """Show a race with lanes on a terminal, in lines into a pipe; how it ended, and how those like it did."""
    if console.is_terminal and not console.quiet:
        play_race(console, race, stopped=stopped)
        if (line := legend(console, race)) is not None:
            console.print(line)
    else:
        for words in lane_lines(race):
            console.print(words, markup=False)
    if not stopped():
        console.print(verdict_line(race))
        if race.differs_at is None and race.speculative.num_drafted:
            console.print(Text(describe_spread(tries, others), "dim"))
        if (why := explain_loss(race, tries, others)) is not None:
            console.print(Text(why))


def _end(console: Console) -> None:
    """Say what to type for a model of one's own."""
    console.print()
    console.print(
        Text("Short answers, on a machine that does other things too. paceline bench --quick measures.", "dim")
    )
    console.print()
    console.print(Text(f"{len(SCENES) + 1}. Now with a model of your own", "bold"))
    for command, about in _NEXT:
        console.print(Text(f"# {about}", "dim"))
        console.print(Padding(Text(command, "cyan"), (0, 0, 0, 2), expand=False))
    console.print(Text("# in Python", "dim"))
    for line in _PYTHON:
        console.print(Text(f"  {line}", "cyan"))
