"""``paceline distil``: a draft model trained to agree with its target, and whether that was of use."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TextColumn

from paceline.cli import exits
from paceline.cli.display import error_console, print_path
from paceline.cli.downloads import locate_model
from paceline.cli.interrupts import hold_interrupts
from paceline.cli.options import refuse_given, with_options
from paceline.cli.outputs import JsonTo, Outputs, report_console
from paceline.cli.progress import ProgressBar
from paceline.conversion.own_draft import OwnDraft
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams
from paceline.engines.threads import usable_cores
from paceline.environment import ModelChoice
from paceline.lab.comparison import Stopped
from paceline.lab.distil.answers import embedded_prompts, own_prompts
from paceline.lab.distil.draft_files import check_made, check_trainable, choose_type
from paceline.lab.distil.report import build_report
from paceline.lab.distil.steps import Settings, check_installed, check_loads, distil
from paceline.lab.distil.work import WorkFolder
from paceline.lab.report import print_report
from paceline.machine import machine
from paceline.models.fingerprints import fingerprint
from paceline.models.registry import complete_model
from paceline.sizes import format_seconds, parse_seconds

EPILOG = """[bold]Examples[/bold]

paceline distil target.gguf draft.gguf better.gguf --prompts prompts.jsonl --time 60m

paceline distil target.gguf draft.gguf better.gguf --answers log.jsonl  [dim]# of the target[/dim]

paceline distil target.gguf ./draft ./better --prompts mine.txt --temp 0  [dim]# Hugging Face folders[/dim]

paceline distil target draft better.gguf --time 10m  [dim]# the embedded pair, on its own kinds of text[/dim]
"""
"""Examples below the command's help."""

_MIN_TOKENS = 16
"""Least tokens of an answer that can be asked for: shorter ones are not judged by."""
_PIPE_WIDTH = 120
"""Columns of the report where standard output is no terminal."""
_NAMED_BY_ARGUMENTS = "has no effect here: the target is the first argument, and the draft model is the second"
"""Why options that name models are refused."""
_NAMES = ("path", "draft_path", "hub_repo", "hub_file", "hub_draft_repo", "hub_token", "hub_offline")

_OWN_TOKENS = ("draft_vocab", "draft_token_map")
_TRANSLATES_NOTHING = "has no effect here: only drafts with the target's own tokens are distilled"

_learns = functools.partial(typer.Option, rich_help_panel="What it learns from")
_trains = functools.partial(typer.Option, rich_help_panel="Training")
_output = functools.partial(typer.Option, rich_help_panel="Output")


@with_options(helps=dict.fromkeys((*_NAMES, *_OWN_TOKENS)))
def distil_command(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="The model to speed up: a GGUF file, a Hugging Face folder, or a name from paceline models.",
            autocompletion=complete_model,
        ),
    ],
    draft: Annotated[
        str,
        typer.Argument(
            metavar="DRAFT",
            help="The draft model to train, with the target's tokens: a Llama in GGUF, or a Hugging Face folder.",
            autocompletion=complete_model,
        ),
    ],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Where to write it: a .gguf file, or else a Hugging Face folder.")
    ],
    *,
    models: ModelChoice,
    prompts: Annotated[
        Path | None,
        _learns(
            "--prompts",
            help="Prompts of the kind that you use, one a line (.jsonl with prompt or text); or a text, which is cut "
            "into prompts. [dim]\\[code, prose and JSON of paceline's own][/dim]",
            metavar="FILE",
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        _learns(
            "--answers",
            help="What the target has answered already, one a line (.jsonl with prompt, and answer, completion, "
            "response or output). Take only answers of this very model.",
            metavar="FILE",
        ),
    ] = None,
    temp: Annotated[
        float,
        _learns("--temp", "--temperature", help="Sampling temperature of the answers and of the verdict; 0 is greedy."),
    ] = SamplingParams().temperature,
    tokens: Annotated[
        int, _learns("-n", "--tokens", "--predict", "--n-predict", help="Maximum tokens of an answer.")
    ] = 256,
    seed: Annotated[int, _learns("--seed", "-s", help="Random seed of the answers and of the training.")] = 1,
    time: Annotated[
        str, _trains("--time", help="Time limit for everything: 60m, 1h30m, 90s. Another run with more of it goes on.")
    ] = "60m",
    epochs: Annotated[int, _trains("--epochs", help="Times that each answer is read, at most.", min=1)] = 3,
    rate: Annotated[
        float | None,
        _trains("--lr", help="Peak learning rate. [dim]\\[1e-3 to 1e-4, by the draft's size][/dim]"),
    ] = None,
    lora: Annotated[
        int | None,
        _trains(
            "--lora",
            help="Train low-rank matrices of this rank in place of the weights, which takes less memory. Needs peft.",
            metavar="RANK",
            min=1,
        ),
    ] = None,
    file_type: Annotated[
        str | None, _output("--type", help="Of the weights of OUT. [dim]\\[the draft's][/dim]", metavar="TYPE")
    ] = None,
    keep_anyway: Annotated[
        bool, _output("--keep-anyway", help="Write OUT even without a gain on held-out prompts.")
    ] = False,
    force: Annotated[bool, _output("--force", help="Overwrite an OUT that exists.")] = False,
    json_to: JsonTo = None,
) -> None:
    """Train a draft model on its target's answers, and test whether that made it better.

    The target answers your prompts, and its probabilities at each position are stored. The draft is trained on them. A
    quarter of the prompts is held out: on their answers, the old and the new draft are compared text by text, and
    decode in turns. Where the difference may be zero there is no gain, and OUT is not written.

    Steps are kept in a folder beside OUT, OUT.distil: after an interruption, the same command continues. The exit
    status is 0 if OUT is written, 3 if there is no gain, and 2 if the command cannot be carried out.
    """
    refuse_given(context, dict.fromkeys(_NAMES, _NAMED_BY_ARGUMENTS) | dict.fromkeys(_OWN_TOKENS, _TRANSLATES_NOTHING))
    check_installed(lora=lora is not None)
    outputs = Outputs(json_to)
    outputs.check()
    total_s = parse_seconds(time)
    if not total_s > 0:
        raise InputError(f"--time {time}: give a time above 0")
    if tokens < _MIN_TOKENS:
        raise InputError(f"--tokens {tokens}: {_MIN_TOKENS} is the least, as shorter answers say little of drafting")
    if rate is not None and not 0 < rate < 1:
        raise InputError(f"--lr {rate:g}: give a rate between 0 and 1, such as 3e-4")
    if prompts is not None and answers is not None:
        raise InputError("--prompts and --answers exclude each other: leave out one of them")
    # All answers have theirs of the same one, though it be drawn.
    seed = SamplingParams(temperature=temp, seed=seed).seed
    if OwnDraft.parse(draft) is not None:
        raise InputError(f"{draft} is the target itself, quantised smaller, and needs no training: name a draft model")
    target_options = models.target_options(locate_model(target))
    draft_path = locate_model(draft)
    made = Path(out)
    if not made.name:
        raise InputError(f"OUT {out!r} has no name: give the path of a .gguf file or a folder to write")
    check_made(Path(target_options.path), draft_path, made, force=force)
    what = check_trainable(draft_path, made)
    if draft_path.is_dir():
        check_loads(draft_path)
    chosen_type = choose_type(what, made, file_type)
    draft_options = models.draft_options(target_options, draft_path)
    given = own_prompts(prompts) if prompts is not None else None if answers is not None else embedded_prompts()
    settings = Settings(
        target=target_options,
        draft=draft_options,
        made=made,
        prompts=given,
        answers=answers,
        temperature=temp,
        tokens=tokens,
        seed=seed,
        epochs=epochs,
        file_type=chosen_type,
        num_parameters=what.num_parameters or 0,
        learning_rate=rate,
        lora=lora,
    )
    text_file = prompts or answers
    key = {
        "target": fingerprint(Path(target_options.path)),
        "draft": fingerprint(draft_path),
        "--prompts or --answers": None if text_file is None else hashlib.sha256(text_file.read_bytes()).hexdigest(),
        "--temp": temp,
        "--tokens": tokens,
        "--seed": seed,
        "--epochs": epochs,
        "--lr": rate,
        "--lora": lora,
        "--type": chosen_type,
    }
    work = WorkFolder.beside(made, key, total_s)
    with hold_interrupts() as interrupted, work.held():
        try:
            with ProgressBar("", TextColumn("{task.fields[left]}"), total=total_s, left="") as progress:

                def tell(doing: str) -> None:
                    left_s = max(total_s - work.spent_s, 0.0)
                    progress.tell(doing, min(work.spent_s, total_s), total_s, left=f"{format_seconds(left_s)} left")
                    step = doing.partition(":")[0]
                    progress.tell_line(f"{step}, {format_seconds(left_s)} left", new=step)

                found = distil(
                    settings,
                    work,
                    functools.partial(models.draft_options, target_options),
                    stopped=interrupted.is_set,
                    tell=tell,
                )
        except Stopped:
            error_console().print(
                f"interrupted: what was done is kept in {work.path}, and the same command goes on from there",
                markup=False,
            )
            raise typer.Exit(exits.INTERRUPTED) from None
        is_written = keep_anyway or found.verdict.outcome == "gain"
        if is_written:
            _move(found.path, made)
            work.remove()
        took_s = work.spent_s
    facts: dict[str, Any] = {
        "target": str(target_options.path),
        "draft": str(draft_path),
        "out": str(made),
        "written": is_written,
        "outcome": found.verdict.outcome,
        "file_type": chosen_type,
        "temperature": temp,
        "seed": seed,
        "text": None if text_file is None else str(text_file),
        "answers": {"texts": found.answers, "tokens": found.answer_tokens},
        "training": dataclasses.asdict(found.training),
        "verdict": dataclasses.asdict(found.verdict),
        "took_s": took_s,
        "machine": machine(target_options.threads or usable_cores()),
    }
    report = build_report(found, target=target, draft=draft, temperature=temp, took_s=took_s, machine=facts["machine"])

    def show() -> None:
        print_report(report_console(_PIPE_WIDTH), report)
        if is_written:
            print_path(made)
        else:
            error_console().print(
                f"{found.verdict.outcome}: {made} was not written. What was made is kept in "
                f"{work.path}: the same command with --keep-anyway writes it, and one with more --time trains on",
                markup=False,
            )

    outputs.write(facts, show)
    if not is_written:
        raise typer.Exit(exits.DOES_NOT_PAY)


def _move(path: Path, made: Path) -> None:
    """Give what was made its name; it lies on the same disk. A folder that is there goes only once it has its place."""
    if made.is_dir():
        former = made.with_name(f".{made.name}.former")
        made.replace(former)
        path.replace(made)
        shutil.rmtree(former, ignore_errors=True)
    else:
        path.replace(made)
