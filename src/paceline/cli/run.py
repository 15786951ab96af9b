"""``paceline run``: one prompt, the answer as it is decided, and what speculation gave."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.status import Status

from paceline.api import GenerateOptions, Model, load
from paceline.cli import exits
from paceline.cli.display import AnswerWriter, error_console, print_json
from paceline.cli.downloads import located
from paceline.cli.interrupts import interrupts_held
from paceline.cli.options import (
    ENVIRONMENT_NOTE,
    NAMES_OF_THE_DRAFT_MODEL,
    OF_THE_DRAFT_MODEL,
    WITHOUT_DRAFT_MODEL,
    GivenOptions,
    ModelFlags,
    is_given,
    names_draft_model,
    refuse_given,
    with_options,
)
from paceline.cli.prompt import read_prompt, typed_text
from paceline.cli.report import comparison_json, comparison_report, generation_json, generation_report
from paceline.comparison import Comparison, OpenReader, Stopped, Trial, answer, run_trials, summarise
from paceline.core.errors import InputError
from paceline.core.fields import fields_of
from paceline.core.params import MAX_TOKENS, SamplingParams, SpeculationParams, StopRules
from paceline.engines.loading import check_prompt, reader_of
from paceline.models.embedded import HELDOUT_KINDS, embedded_draft, embedded_target
from paceline.options import ModelChoice, as_options
from paceline.planning.base import Policy
from paceline.planning.costs.meter import Report
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.planning.registry import POLICY_NAMES, check_policy_name
from paceline.streams import Generation

_SPECULATION, _OUTPUT = "Speculation", "Prompt and output"

EPILOG = f"""[bold]Examples[/bold]

paceline run  [dim]# the embedded pair on a text it has not seen[/dim]

paceline run --sample prose:3 --temp 0.8 --compare

paceline run -m big.gguf -md small.gguf -p "Once upon" -n 200

paceline run -hf ggml-org/gemma-3-1b-it-GGUF:Q8_0 -p "Once upon"  [dim]# fetched once, from the Hugging Face hub[/dim]

paceline run -m big.gguf -f draft.txt --drafters suffix,lookup --temp 0

paceline run -m big.gguf -md small.gguf -p "Once upon" --compare

paceline run -m ./hf-model -md ./hf-draft -p "Once upon" --json

{ENVIRONMENT_NOTE}
"""


def _complete_policies(incomplete: str) -> list[str]:
    return [name for name in POLICY_NAMES if name.startswith(incomplete)]


@with_options(
    together=(
        ("order", "model_defaults", "seed"),
        ("drafters", "policy", "draft_max", "draft_min", "p_min", "siblings", "verify", "speculate"),
        ("as_json", "verbose"),
    )
)
def run(
    context: typer.Context,
    *,
    models: Annotated[ModelChoice, ModelFlags(also=("override_tensors", "model_defaults", "verbose"))],
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="The prompt.", rich_help_panel=_OUTPUT),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", help="A file with the prompt; - is standard input.", rich_help_panel=_OUTPUT),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            help=f"Take the prompt from text the embedded pair was not trained on: {', '.join(HELDOUT_KINDS)}; "
            "code:2 is the second piece of code.",
            metavar="KIND[:N]",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    escape: Annotated[
        bool,
        typer.Option(
            "--escape/--no-escape",
            help="Read \\n, \\t and the like in -p and --stop; \\xHH is a byte.",
            rich_help_panel=_OUTPUT,
        ),
    ] = True,
    rules: StopRules,
    params: SamplingParams,
    speculation: SpeculationParams,
    given: GivenOptions,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help=f"What decides how much is drafted: {', '.join(POLICY_NAMES)}. "
            "[dim]\\[auto; fixed where a draft length is given][/dim]",
            metavar="NAME",
            autocompletion=_complete_policies,
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    fixed: FixedPolicy,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run plain and speculative in turn and say which is faster, and whether the texts are equal.",
            rich_help_panel=_SPECULATION,
        ),
    ] = False,
    remember: Annotated[
        bool,
        typer.Option(
            "--remember/--no-remember",
            help="Of policy auto: start with what earlier runs learned of these models, and keep what this one learns. "
            "It is figures only, nothing of any text.",
            rich_help_panel=_SPECULATION,
        ),
    ] = True,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Pairs of runs under --compare.", rich_help_panel=_SPECULATION)
    ] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Generate text from a prompt, speculatively: the same text as without, sooner.

    The text goes to standard output, the report to standard error. On a terminal, tokens are coloured by the drafter
    they came from.
    """
    if context.args:
        raise InputError(f"{' '.join(context.args)!r} belongs to no option: give the prompt with -p, in quotes")
    if repeats < 1:
        raise InputError(f"--repeats {repeats}: the least is 1")
    names = speculation.drafters
    named_draft = models.named_draft
    if names is not None and "draft" not in names and not names_draft_model(context):
        named_draft = None
    uses_draft_model = named_draft is not None or (models.target is None and (names is None or "draft" in names))
    plain = not speculation.speculate or fixed.draft_max == 0
    _refuse_without_effect(context, fixed, plain=plain, compares=compare, uses_draft_model=uses_draft_model)
    if plain:
        # Of the environment: on the command line they are refused.
        names = named_draft = None
    rules = replace(rules, stop=tuple(typed_text(text, "--stop", escape=escape) for text in rules.stop))
    chosen = _policy(context, policy, plain, fixed)
    if remember and chosen != "auto":
        way_out = "is of policy auto, which is not the one in use: leave it out, or --policy and the --draft-* options"
        refuse_given(context, {"remember": way_out})
    text = read_prompt(prompt, file, sample, escape, embedded=models.target is None)
    target_options = models.target_options(embedded_target() if models.target is None else located(models.target))
    if named_draft is None and uses_draft_model and not plain:
        named_draft = embedded_draft()
    draft_options = None if named_draft is None else models.draft_options(target_options, located(named_draft))
    check_prompt(target_options, text)
    with (
        # The first interrupt ends measuring at its next step, and an answer at its next round, whose text is kept.
        interrupts_held() as interrupted,
        _measuring(interrupted) as report,
        load(
            target_options,
            draft=draft_options,
            drafters=names,
            policy=chosen,
            verify=speculation.verify,
            remember=remember,
            report=report,
        ) as loaded,
    ):
        if interrupted.is_set():
            raise typer.Exit(exits.INTERRUPTED)
        if rules.max_tokens == MAX_TOKENS:
            rules = replace(rules, max_tokens=loaded.target.capabilities.context_length)
        # The model may have defaults of its own for what was not set.
        options = as_options(params, only={*given.names, "seed"})
        options.update(as_options(rules))
        if speculation.draft_max is not None and not is_given(context, "draft_max"):
            options["draft_max"] = speculation.draft_max
        if compare:
            _compare(
                loaded, text, options, repeats, as_json, interrupted, reader_of(loaded.target_options or target_options)
            )
        else:
            _generate(loaded, text, options, as_json, interrupted)


def _generate(model: Model, prompt: str, options: GenerateOptions, as_json: bool, interrupted: threading.Event) -> None:
    stream = model.stream(prompt, **options)
    writer = AnswerWriter(prompt, [drafter.name for drafter in model.drafters], silent=as_json)
    for segments in stream.rounds():
        writer.write(segments)
        if interrupted.is_set():
            break
    writer.write(stream.close())
    writer.finish()
    generation = stream.so_far()
    if as_json:
        print_json(generation_json(model, generation))
    else:
        generation_report(error_console(), model, generation)
    if interrupted.is_set():
        raise typer.Exit(exits.INTERRUPTED)


def _compare(
    model: Model,
    prompt: str,
    options: GenerateOptions,
    repeats: int,
    as_json: bool,
    interrupted: threading.Event,
    open_reader: OpenReader,
) -> None:
    console = error_console()
    runs: list[tuple[Trial, Generation, Generation]] = []
    with console.status("warming up") as status, contextlib.suppress(Stopped):
        answer(model, prompt, options, speculate=True, stopped=interrupted.is_set)
        for run in run_trials(model, prompt, options, repeats, stopped=interrupted.is_set):
            runs.append(run)
            trial, _, speculative = run
            found = f"speculative is {trial.speedup:.2f} times plain" if speculative.stats.num_drafted else "no drafts"
            status.update(f"{len(runs)} of {repeats} pairs: {found}")
    if interrupted.is_set():
        console.print(f"interrupted after {len(runs)} of {repeats} pairs of runs")
    if not runs:
        raise typer.Exit(exits.INTERRUPTED)
    with console.status("finding out why texts differ, if they do"):
        comparison: Comparison = summarise(
            model, prompt, options, runs, open_reader=open_reader, stopped=interrupted.is_set
        )
    if as_json:
        print_json(comparison_json(model, comparison))
    else:
        comparison_report(console, model, comparison)
    if interrupted.is_set():
        raise typer.Exit(exits.INTERRUPTED)
    if comparison.divergence is not None and comparison.divergence.verdict == "bug":
        raise typer.Exit(exits.FAILURE)


_OF_A_FIXED_POLICY = {field.name: field.option.flags[0] for field in fields_of(FixedPolicy)}
_OF_SPECULATION = ("drafters", "policy", "draft_min", "p_min", "siblings", "verify", "remember", "compare")
_OF_DRAFTING_BY_MODEL = (*NAMES_OF_THE_DRAFT_MODEL, *OF_THE_DRAFT_MODEL, "siblings")


def _policy(context: typer.Context, name: str | None, plain: bool, fixed: FixedPolicy) -> Policy | str:
    """Return the policy that was asked for: draft lengths set by hand ask for a fixed one."""
    by_hand = [flag for name, flag in _OF_A_FIXED_POLICY.items() if is_given(context, name)]
    if plain:
        return NO_SPECULATION
    if name is None:
        return fixed if by_hand else "auto"
    check_policy_name(name)
    if name != "fixed" and by_hand:
        raise InputError(
            f"{by_hand[0]} is of policy fixed, and {name} finds draft lengths by itself: leave out one of them"
        )
    return fixed if name == "fixed" else name


@contextlib.contextmanager
def _measuring(interrupted: threading.Event) -> Iterator[Report]:
    """Show on a terminal how far measuring has come, the first time a model is loaded; an interrupt ends it."""
    with contextlib.ExitStack() as stack:
        status: Status | None = None

        def report(share: float) -> None:
            nonlocal status
            if interrupted.is_set():
                raise KeyboardInterrupt
            if status is None:
                status = stack.enter_context(error_console().status(""))
            status.update(f"measuring what passes cost here, once for this model: {share:.0%}")
            if share >= 1:
                # Attention is measured first, and then all else.
                stack.close()
                status = None

        yield report


def _refuse_without_effect(
    context: typer.Context, fixed: FixedPolicy, *, plain: bool, compares: bool, uses_draft_model: bool
) -> None:
    """Refuse flags that were given and would do nothing."""
    without_effect: dict[str, str] = {}
    if not uses_draft_model:
        without_effect |= dict.fromkeys(_OF_DRAFTING_BY_MODEL, WITHOUT_DRAFT_MODEL)
    if plain:
        by_environment = fixed.draft_max != 0 and not is_given(context, "speculate")
        off = "leave out --no-speculation (or --draft-max 0)"
        if by_environment:
            off = "unset PACELINE_SPECULATE"
        way_out = f"has no effect without speculation: leave it out, or {off}"
        without_effect |= dict.fromkeys((*_OF_SPECULATION, *_OF_DRAFTING_BY_MODEL), way_out)
        if fixed.draft_max != 0:
            without_effect["draft_max"] = (
                way_out if by_environment else "has no effect with --no-speculation: leave out one of them"
            )
    if not compares:
        without_effect["repeats"] = "has no effect without --compare"
    refuse_given(context, without_effect)
