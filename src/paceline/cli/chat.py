"""``paceline chat``: a conversation in the terminal."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.chat.params import ChatParams
from paceline.cli import exits
from paceline.cli.chat_input import is_typed, iter_lines
from paceline.cli.chat_options import (
    SystemPrompt,
    SystemPromptFile,
    check_can_chat,
    check_names_chat_model,
    system_prompt,
)
from paceline.cli.chat_session import ChatSession
from paceline.cli.constraint_options import (
    GrammarFile,
    GrammarText,
    JsonSchemaFile,
    JsonSchemaText,
    Strict,
    read_source,
)
from paceline.cli.interrupts import allow_interrupts
from paceline.cli.options import ENVIRONMENT_NOTE, GivenOptions, ModelFlags, with_options
from paceline.cli.prompt import read_typed_text
from paceline.cli.setup import PolicyName, Remember, choose_setup, open_model, request_options
from paceline.core.params import MAX_TOKENS, SamplingParams, SpeculationParams, StopRules
from paceline.environment import ModelChoice
from paceline.planning.policies.fixed import FixedPolicy

_OUTPUT = "Prompt and output"
_TARGET_HELP = "Chat model: a GGUF file, a Hugging Face folder, or a name from paceline models."

EPILOG = f"""[bold]Examples[/bold]

paceline chat -hf ggml-org/gemma-3-1b-it-GGUF  [dim]# fetched once, from the Hugging Face hub[/dim]

paceline chat -m instruct.gguf -md small-instruct.gguf -sys "You answer in French."

paceline chat -m instruct.gguf --temp 0 < questions.txt > answers.txt  [dim]# one message a line[/dim]

[dim]In the chat, /help lists its commands. Ctrl-C ends an answer, Ctrl-D the chat.[/dim]

{ENVIRONMENT_NOTE}
"""
"""What ``paceline chat --help`` ends with."""


@with_options(
    together=(("order", "model_defaults", "seed"), ("as_json", "verbose")),
    helps={"max_tokens": "Most tokens of an answer; -1 fills the context. [dim]\\[-1][/dim]"},
)
def chat(
    context: typer.Context,
    *,
    models: Annotated[
        ModelChoice, ModelFlags(also=("override_tensors", "model_defaults", "verbose"), target_help=_TARGET_HELP)
    ],
    system: SystemPrompt = None,
    system_file: SystemPromptFile = None,
    conversation: ChatParams,
    json_schema: JsonSchemaText = None,
    json_schema_file: JsonSchemaFile = None,
    strict: Strict = True,
    grammar: GrammarText = None,
    grammar_file: GrammarFile = None,
    first: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="The first message; the chat goes on after it.", rich_help_panel=_OUTPUT),
    ] = None,
    rules: StopRules,
    params: SamplingParams,
    speculation: SpeculationParams,
    given: GivenOptions,
    policy: PolicyName = None,
    fixed: FixedPolicy,
    remember: Remember = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each answer instead.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Chat with a model, speculatively: the same answers as without, sooner.

    Messages are typed, or read from standard input, one a line. Answers go to standard output; what speculation gained
    stands after each, on standard error. Tokens are coloured by the drafter they came from, and reasoning is dimmed.
    """
    check_names_chat_model(models, None)
    setup = choose_setup(context, models, speculation, fixed, policy=policy, remember=remember)
    source = read_source(json_schema, json_schema_file, grammar, grammar_file, strict=strict)
    says = system_prompt(system, system_file)
    rules = replace(rules, stop=tuple(read_typed_text(text, "--stop", escape=True) for text in rules.stop))
    if "max_tokens" not in given.values:
        # A model ends its answers by itself.
        rules = replace(rules, max_tokens=MAX_TOKENS)
    found = setup.find()
    check_can_chat(Path(found.target.path), conversation.replaced_by)
    # A person ends a chat in other ways, and loses none to an interrupt that came as the answer ended.
    with open_model(setup, found) as (model, _), nullcontext() if is_typed() else allow_interrupts():
        options = request_options(context, model, given, params, rules, speculation)
        if source is not None:
            options["constraint"] = model.compile(source)
        session = ChatSession(model, options, conversation, system=says, as_json=as_json)
        session.begin()
        if first is not None:
            session.say(read_typed_text(first, "-p", escape=True))
        for line in iter_lines():
            if not session.take(line):
                break
    if session.has_failed and not is_typed():
        # A person has read it; a script reads this.
        raise typer.Exit(exits.FAILURE)
