"""``paceline run``: one prompt, the answer as it is decided, and what speculation gave."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.api import Model
from paceline.chat.messages import Message
from paceline.chat.params import ChatParams
from paceline.cli import exits
from paceline.cli.display import AnswerWriter, error_console
from paceline.cli.options import GivenOptions, ModelFlags, with_options
from paceline.cli.outputs import Outputs, json_option
from paceline.cli.progress import show_prompt_progress
from paceline.cli.prompt import (
    CHAT_PANEL,
    OF_CHATS,
    GrammarFile,
    GrammarText,
    JsonSchemaFile,
    JsonSchemaText,
    Strict,
    SystemPrompt,
    SystemPromptFile,
    check_can_chat,
    check_names_chat_model,
    read_prompt,
    read_source,
    read_text_file,
    read_typed_text,
    start_conversation,
    system_prompt,
)
from paceline.cli.report import comparison_json, comparison_report, generation_json, generation_report
from paceline.cli.setup import (
    SPECULATION_PANEL,
    PolicyName,
    Remember,
    announce_builtin_model,
    choose_setup,
    open_model,
    request_options,
)
from paceline.core.errors import InputError
from paceline.core.params import MAX_TOKENS, SamplingParams, SpeculationParams, StopRules
from paceline.drafters.lookup import PREDICTION
from paceline.engines.loading import check_prompt, reader_of
from paceline.engines.options import ModelOptions
from paceline.engines.threads import usable_cores
from paceline.environment import ModelChoice
from paceline.lab.comparison import Comparison, OpenReader, Stopped, Trial, answer, run_trials, summarise
from paceline.machine import machine
from paceline.models.embedded import HELDOUT_KINDS
from paceline.options import GenerateOptions
from paceline.planning.policies.fixed import FixedPolicy
from paceline.streams import Generation

_output = functools.partial(typer.Option, rich_help_panel="Prompt and output")
_chat = functools.partial(typer.Option, rich_help_panel=CHAT_PANEL)
_speculation = functools.partial(typer.Option, rich_help_panel=SPECULATION_PANEL)

_LONG_S = 120.0
"""Seconds of a comparison beyond which its length is said beforehand."""

EPILOG = """[bold]Examples[/bold]

paceline run  [dim]# the embedded pair on a text it has not seen[/dim]

paceline run --sample prose:3 --temp 0.8 --compare

paceline run -m big.gguf -md small.gguf -p "Once upon" -n 200

paceline run -hf ggml-org/gemma-3-1b-it-GGUF:Q8_0 -p "Once upon"  [dim]# fetched once, from the Hugging Face hub[/dim]

paceline run -m big.gguf -f draft.txt --drafters suffix,lookup --temp 0

paceline run -m big.gguf -md small.gguf -p "Once upon" --compare

paceline run -m instruct.gguf --chat -p "Who wrote Emma?" -j '{"type": "object"}'  [dim]# in JSON[/dim]

paceline run -m ./hf-model -md ./hf-draft -p "Once upon" --json
"""
"""Examples below the command's help."""


@with_options(
    together=(
        ("order", "model_defaults", "seed"),
        ("drafters", "policy", "draft_max", "draft_min", "p_min", "siblings", "verify", "speculate"),
        ("json_to", "verbose"),
    ),
    helps={
        "max_tokens": "Most tokens to generate; -1 fills the context. [dim]\\[256; -1 with --chat, a grammar or a "
        "schema][/dim]"
    },
)
def run(
    context: typer.Context,
    *,
    models: Annotated[ModelChoice, ModelFlags(also=("override_tensors", "model_defaults", "verbose"))],
    prompt: Annotated[str | None, _output("-p", "--prompt", help="The prompt.")] = None,
    file: Annotated[Path | None, _output("-f", "--file", help="File with the prompt; - is standard input.")] = None,
    as_chat: Annotated[
        bool | None,
        _chat(
            "--chat/--no-chat",
            help="Format the prompt as a user message by the model's chat template. [dim]\\[no chat][/dim]",
            show_default=False,
        ),
    ] = None,
    system: SystemPrompt = None,
    system_file: SystemPromptFile = None,
    conversation: ChatParams,
    json_schema: JsonSchemaText = None,
    json_schema_file: JsonSchemaFile = None,
    strict: Strict = True,
    grammar: GrammarText = None,
    grammar_file: GrammarFile = None,
    sample: Annotated[
        str | None,
        _output(
            "--sample",
            help=f"Take the prompt from text the embedded pair was not trained on: {', '.join(HELDOUT_KINDS)}; "
            "code:2 is the second piece of code.",
            metavar="KIND[:N]",
        ),
    ] = None,
    escape: Annotated[
        bool,
        _output("--escape/--no-escape", help="Read \\n, \\t and the like in -p, -sys and --stop; \\xHH is a byte."),
    ] = True,
    rules: StopRules,
    params: SamplingParams,
    speculation: SpeculationParams,
    given: GivenOptions,
    policy: PolicyName = None,
    fixed: FixedPolicy,
    compare: Annotated[
        bool,
        _speculation(
            "--compare",
            help="Run plain and speculative in turn and say which is faster, and whether the texts are equal.",
        ),
    ] = False,
    remember: Remember = True,
    prediction: Annotated[
        Path | None,
        _speculation(
            "--prediction",
            help="A file with a text that the answer repeats for the most part, such as one to be edited.",
        ),
    ] = None,
    repeats: Annotated[int, _speculation("--repeats", help="Pairs of runs under --compare.")] = 5,
    json_to: Annotated[str | None, json_option(rich_help_panel="Prompt and output")] = None,
) -> None:
    """Generate text from a prompt: the same text as without speculation, sooner.

    The text goes to standard output and the report to standard error. In a terminal, each token has the colour of the
    drafter that proposed it.
    """
    if context.args:
        raise InputError(f"unexpected argument {' '.join(context.args)!r}: give the prompt with -p, in quotes")
    outputs = Outputs(json_to)
    outputs.check()
    if repeats < 1:
        raise InputError(f"--repeats {repeats}: the least is 1")
    without_effect = {} if compare else {"repeats": "has no effect without --compare"}
    if not as_chat:
        without_effect |= dict.fromkeys(OF_CHATS, "has no effect without --chat: add that, or use paceline chat")
    source = read_source(json_schema, json_schema_file, grammar, grammar_file, strict=strict)
    setup = choose_setup(
        context, models, speculation, fixed, policy=policy, remember=remember, without_effect=without_effect
    )
    rules = replace(rules, stop=tuple(read_typed_text(text, "--stop", escape=escape) for text in rules.stop))
    text = read_prompt(prompt, file, sample, escape, embedded=models.target is None)
    predicted = None if prediction is None else read_text_file(prediction, "--prediction")
    messages: list[Message] = [
        *start_conversation(system_prompt(system, system_file, escape=escape)),
        {"role": "user", "content": text},
    ]
    found = setup.find()
    check_prompt(found.target, text)
    if (as_chat or source is not None) and "max_tokens" not in given.values:
        # A chat model ends its answers by itself, and so does a grammar.
        rules = replace(rules, max_tokens=MAX_TOKENS)
    if as_chat:
        check_names_chat_model(models, conversation.replaced_by)
        check_can_chat(Path(found.target.path), conversation.replaced_by)
    elif as_chat is None and not outputs.prints_json:
        _hint_at_template(found.target)
    with open_model(setup, found, silent=outputs.prints_json) as (loaded, interrupted):
        options = request_options(context, loaded, given, params, rules, speculation)
        if source is not None:
            options["constraint"] = loaded.compile(source)
        if predicted is not None:
            options["prediction"] = predicted
        if compare:
            asked: str | Sequence[int] = text
            if as_chat:
                written = loaded.chat_prompt(messages, chat=conversation, max_tokens=options.get("max_tokens"))
                asked, options = written.token_ids, {**written.options, **options}
            options_in_use = loaded.target_options or found.target
            open_reader = reader_of(options_in_use, is_streamed=loaded.memory_plan is not None)
            _compare(models, loaded, asked, options, repeats, outputs, interrupted, open_reader)
        else:
            _answer(models, loaded, text, messages if as_chat else None, conversation, options, outputs, interrupted)


def _answer(
    models: ModelChoice,
    model: Model,
    prompt: str,
    messages: Sequence[Message] | None,
    conversation: ChatParams,
    options: GenerateOptions,
    outputs: Outputs,
    interrupted: threading.Event,
) -> None:
    """Answer messages, or go on with the prompt where there are none."""
    is_chat, silent = messages is not None, outputs.prints_json
    stream: Any = (
        model.stream(prompt, **options)
        if messages is None
        else model.chat_stream(messages, chat=conversation, **options)
    )
    rounds = show_prompt_progress(stream.rounds(), model.target, silent=silent)
    announce_builtin_model(models)
    sources = [name for name in model.drafter_names if name != PREDICTION or "prediction" in options]
    writer = AnswerWriter("" if is_chat else prompt, sources, silent=silent)
    write: Callable[[Any], None] = writer.write_parts if is_chat else writer.write
    for pieces in rounds:
        write(pieces)
        if interrupted.is_set():
            break
    write(stream.close())
    writer.finish()
    answered = stream.so_far()
    generation = answered.generation if is_chat else answered
    facts = {**generation_json(model, generation), "machine": _machine(model)}
    if is_chat:
        facts["message"] = answered.message
    outputs.write(facts, lambda: generation_report(error_console(), model, generation))
    if interrupted.is_set():
        raise typer.Exit(exits.INTERRUPTED)


def _machine(model: Model) -> dict[str, str]:
    options = model.target_options
    return machine((None if options is None else options.threads) or usable_cores())


def _hint_at_template(target: ModelOptions) -> None:
    """Say once that a model has a chat template which is not used."""
    from paceline.chat.template_sources import has_template  # jinja2 takes a while to import

    if has_template(Path(target.path)):
        error_console().print(
            "this model answers messages: add --chat, or use paceline chat (--no-chat: continue the text, as here)",
            style="dim",
            markup=False,
        )


def _compare(
    models: ModelChoice,
    model: Model,
    prompt: str | Sequence[int],
    options: GenerateOptions,
    repeats: int,
    outputs: Outputs,
    interrupted: threading.Event,
    open_reader: OpenReader,
) -> None:
    console = error_console()
    runs: list[tuple[Trial, Generation, Generation]] = []
    with console.status("warming up") as status, contextlib.suppress(Stopped):
        started_s = time.monotonic()
        answer(model, prompt, options, speculate=True, stopped=interrupted.is_set)
        about_s = (2 * repeats + 1) * (time.monotonic() - started_s)
        if about_s > _LONG_S:
            console.print(
                f"{repeats} pairs of such answers take some {about_s / 60:.0f} min here: fewer with --repeats, shorter "
                "ones with -n; an interrupt (Ctrl-C) shows those that are done",
                style="dim",
                markup=False,
            )
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
    announce_builtin_model(models)
    facts = {**comparison_json(model, comparison), "machine": _machine(model)}
    outputs.write(facts, lambda: comparison_report(console, model, comparison))
    if interrupted.is_set():
        raise typer.Exit(exits.INTERRUPTED)
    if comparison.divergence is not None and comparison.divergence.verdict == "bug":
        raise typer.Exit(exits.FAILURE)
