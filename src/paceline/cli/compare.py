"""``paceline compare``: where a draft model and its target part, token by token."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import exits
from paceline.cli.display import error_console
from paceline.cli.downloads import locate_model, make_draft
from paceline.cli.interrupts import hold_interrupts
from paceline.cli.options import (
    NAMED_BY_ARGUMENTS,
    NAMES_OF_MODELS,
    refuse_given,
    with_options,
)
from paceline.cli.outputs import HtmlFile, JsonTo, Outputs, report_console
from paceline.cli.progress import ProgressBar
from paceline.cli.prompt import text_option
from paceline.conversion.own_draft import OwnDraft, complete_draft
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams
from paceline.engines.threads import usable_cores
from paceline.environment import ModelChoice
from paceline.lab.comparison import Stopped
from paceline.lab.disagreement.comparer import AsItIs, OwnAnswers, compare_models
from paceline.lab.disagreement.report import build_report, disagreement_json
from paceline.lab.doctor.report import model_json
from paceline.lab.report import print_report, render_page
from paceline.lab.samples import file_samples, file_text, heldout_samples
from paceline.machine import machine
from paceline.models.description import describe
from paceline.models.registry import complete_model

EPILOG = """[bold]Examples[/bold]

paceline compare target.gguf draft.gguf --html disagreement.html

paceline compare model-Q8_0.gguf model-Q4_K_M.gguf --as-is --text wiki.test.raw  [dim]# as llama-perplexity[/dim]

paceline compare target.gguf draft.gguf --text prompts.jsonl --temp 0

paceline compare target draft --json=disagreement.json
"""
"""Examples below the command's help."""

_what = functools.partial(typer.Option, rich_help_panel="What is compared")
_MIN_WINDOW = 16


@with_options(helps=dict.fromkeys(NAMES_OF_MODELS))
def compare(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="The model to compare with: a GGUF file, a Hugging Face folder, or a name from paceline models.",
            autocompletion=complete_model,
        ),
    ],
    draft: Annotated[
        str,
        typer.Argument(
            metavar="DRAFT",
            help="The model that is compared: a draft model, a quantised or pruned copy, a head, or self, which is the "
            "target quantised smaller.",
            autocompletion=complete_draft,
        ),
    ],
    *,
    models: ModelChoice,
    text: Annotated[
        Path | None,
        text_option(rich_help_panel="What is compared"),
    ] = None,
    as_is: Annotated[
        bool,
        _what("--as-is", help="Compare on the text itself, as llama-perplexity does, not on the target's answers."),
    ] = False,
    window: Annotated[
        int, _what("--window", help="With --as-is, tokens that are read at once; the second half is compared.")
    ] = 512,
    answers: Annotated[int, _what("--answers", help="Answers of the target that are compared.")] = 12,
    tokens: Annotated[int, _what("-n", "--predict", help="Tokens of each answer, at most.")] = 64,
    temp: Annotated[
        float, _what("--temp", "--temperature", help="Sampling temperature; 0 is greedy.")
    ] = SamplingParams().temperature,
    seed: Annotated[int, _what("--seed", "-s", help="Random seed of the target's answers.")] = 1,
    json_to: JsonTo = None,
    html: HtmlFile = None,
) -> None:
    """Show where a draft model and its target disagree, token by token, and why.

    The target writes some answers, and both models read them. The report says how often a draft is accepted, for how
    many tokens it is right, how far the models diverge (measured as by llama-perplexity), and where they differ most.
    The page (--html) shades each token by how far apart the models are.
    """
    refuse_given(
        context,
        dict.fromkeys(
            NAMES_OF_MODELS,
            NAMED_BY_ARGUMENTS,
        ),
    )
    for option, value, least in (("--window", window, _MIN_WINDOW), ("--answers", answers, 1), ("-n", tokens, 1)):
        if value < least:
            raise InputError(f"{option} {value}: give at least {least}")
    if as_is and text is None:
        raise InputError("--as-is compares on a text: name one with --text FILE")
    seed = SamplingParams(temperature=temp, seed=seed).seed
    outputs = Outputs(json_to, html)
    outputs.check()
    source: OwnAnswers | AsItIs
    if as_is and text is not None:
        source = AsItIs(text.name, file_text(text), window)
    else:
        samples = heldout_samples() if text is None else file_samples(text)
        # What a user's own texts lead to is nobody else's.
        source = OwnAnswers(samples, answers, tokens, keep=text is None)
    target_options = models.target_options(locate_model(target))
    own = OwnDraft.parse(draft)
    path = locate_model(draft) if own is None else make_draft(own.of(Path(target_options.path)))
    draft_options = models.draft_options(target_options, path)
    described = describe(Path(target_options.path)), describe(Path(draft_options.path), may_be_head=True)
    with hold_interrupts() as interrupted, ProgressBar("", total=1.0) as progress:

        def tell(doing: str, share: float) -> None:
            progress.tell(doing, share, None)
            progress.tell_line(doing, new=doing)

        try:
            found = compare_models(
                target_options,
                draft_options,
                source,
                temperature=temp,
                seed=seed,
                stopped=interrupted.is_set,
                tell=tell,
            )
        except Stopped:
            error_console().print("interrupted before anything was compared", markup=False)
            raise typer.Exit(exits.INTERRUPTED) from None
    facts = {
        "target": model_json(described[0]),
        "draft": model_json(described[1]),
        "temperature": temp,
        "seed": seed,
        "text": None if text is None else str(text),
        "as_is": as_is,
        "machine": machine(target_options.threads or usable_cores()),
        **disagreement_json(found),
    }
    report = build_report(*described, found, temperature=temp, machine=facts["machine"])
    outputs.write(facts, lambda: print_report(report_console(), report), lambda: render_page(report))
    if not found.is_whole:
        error_console().print(f"interrupted after {len(found.texts)} texts: the figures are of these", markup=False)
        raise typer.Exit(exits.INTERRUPTED)
