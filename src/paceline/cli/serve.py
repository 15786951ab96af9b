"""``paceline serve``: a model behind OpenAI's API and llama-server's."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.api import Model
from paceline.chat.params import ChatParams
from paceline.cli import exits
from paceline.cli.commands import Command
from paceline.cli.display import error_console
from paceline.cli.llama_flags import remarks_on, shielded, with_llama_variables
from paceline.cli.model_router import ServedModels, is_router, route
from paceline.cli.options import GivenOptions, in_flags, refuse_given, with_options
from paceline.cli.report import print_memory_plan
from paceline.cli.setup import (
    FoundModels,
    PolicyName,
    Remember,
    Setup,
    announce_builtin_model,
    choose_setup,
    request_options,
    size_models,
    tell_idle,
)
from paceline.core.errors import InputError, ModelFileError
from paceline.core.extras import missing
from paceline.core.params import MAX_TOKENS, SamplingParams, SpeculationParams, StopRules
from paceline.embedder import load_embedder
from paceline.engines.base import Pooling
from paceline.models.description import describe
from paceline.options import GenerateOptions
from paceline.planning.policies.fixed import FixedPolicy
from paceline.server_options import DEFAULT_PARALLEL, ServerOptions

if TYPE_CHECKING:
    from paceline.serving.model_host import Served, ServedEmbedder, ServedModel

EPILOG = """[bold]Examples[/bold]

paceline serve  [dim]# the embedded pair, at http://127.0.0.1:8080[/dim]

paceline serve -m instruct.gguf -md small.gguf -c 8192 -np 4

paceline serve -hf ggml-org/gemma-3-1b-it-GGUF --host 0.0.0.0 --api-key-file keys.txt

paceline serve --models-dir models --models-memory 12G  [dim]# each loaded when a request names it[/dim]

curl http://127.0.0.1:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'

[dim]llama-server's flags and LLAMA_ARG_... variables work here too. Those without effect are accepted, and named.[/dim]
"""
"""Examples below the command's help."""


class ServeCommand(Command):
    """A command that leaves llama-server's flags to :func:`~paceline.cli.llama_flags.remarks_on`."""

    def variables(self) -> Mapping[str, str]:
        return with_llama_variables(os.environ)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = [name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)]
        return super().parse_args(ctx, [shielded(word, known) for word in args])


@with_options(
    together=(("order", "model_defaults", "seed"),),
    helps={
        "max_sequences": f"Requests processed in parallel. [{DEFAULT_PARALLEL}]",
        "context_length": "Room of all requests together, in tokens: with -np N each has an equal part, else whatever "
        "the others leave; 0 is all of the model's own. [as much of its own as fits, which all share]",
        "max_tokens": "Maximum tokens to generate where a request does not say; -1 fills the context. [-1]",
        "verbose": "Show more of the server's and the engine's log on stderr.",
        "forget": None,
    },
    variables=lambda: with_llama_variables(os.environ),
)
def serve(
    context: typer.Context,
    *,
    models: ServedModels,
    options: ServerOptions,
    conversation: ChatParams,
    rules: StopRules,
    params: SamplingParams,
    speculation: SpeculationParams,
    given: GivenOptions,
    policy: PolicyName = None,
    fixed: FixedPolicy,
    remember: Remember = True,
    routed: Annotated[bool, typer.Option("--routed", hidden=True)] = False,
) -> None:
    """Serve a model over OpenAI's API and llama-server's: the same answers as without speculation, sooner.

    Several requests are answered at once, and each can set its own sampling and speculation. Options of sampling,
    prompt and output are the defaults for requests that do not set them. Without a model, the built-in pair is served.
    """
    try:
        import fastapi  # noqa: F401
    except ImportError as error:
        raise missing("a server", error.name, "serve") from None
    from paceline.serving.app import create_app
    from paceline.serving.deployment import listening, notify_service_manager, run, server_url
    from paceline.serving.logs import logging_to_stderr
    from paceline.serving.model_host import ModelHost, ServedEmbedder
    from paceline.serving.router.link import RouterLink
    from paceline.serving.security import SecuritySettings
    from paceline.serving.server import Server

    console = error_console()
    known = [name for parameter in context.command.params for name in parameter.opts]
    for remark in remarks_on(context.args, known):
        console.print(remark, style="dim", markup=False)
    refuse_given(context, {"forget": "applies to paceline chat only: HTTP clients send all messages each time"})
    if options.slot_save_path is not None and not Path(options.slot_save_path).is_dir():
        raise InputError(
            f"`slot_save_path` {options.slot_save_path} is no folder: make it first, or name another",
            field="slot_save_path",
        )
    setup = choose_setup(context, models, speculation, fixed, policy=policy, remember=remember)
    security = SecuritySettings.from_options(options)
    if is_router(context, models, options):
        route(context, options, security)
        return
    link = RouterLink() if routed else None
    if link is not None:
        options, security = link.taken_into(options, security)
    with listening(options.host, options.port) as sockets:
        urls = [server_url(each, has_tls=options.has_tls, prefix=options.prefix) for each in sockets]
        for warning in security.warnings():
            console.print(f"warning: {in_flags(warning)}", style="yellow", markup=False)
        embeds = options.embedding or options.reranking
        found = replace(setup, may_draft=setup.may_draft and not embeds).find()
        embeds = embeds or describe(Path(found.target.path)).embeds
        if not embeds:
            found = size_models(context, found, models, options)
        elif models.draft.path is not None or models.hub_draft is not None:
            raise InputError(
                f"{Path(found.target.path).name} is an embedding model, which uses no drafts: leave out -md"
            )
        chat = replace(conversation, forget=False)

        def load_here(report: Callable[[float], None]) -> Served:
            if embeds:
                return _load_embedder(found, options)
            model = setup.load(
                found, report, prompt_cache_mib=options.prompt_cache_mib, max_waiting=options.max_waiting
            )
            defaults = request_options(context, model, given, params, rules, speculation)
            if "seed" not in given.values:
                del defaults["seed"]
            if rules.max_tokens == MAX_TOKENS or "max_tokens" not in given.values:
                del defaults["max_tokens"]
            return _build_served(model, found, setup, options, chat, defaults)

        ready = threading.Event()

        def on_ready(served: Served) -> None:
            server.ready(served)
            # Nothing runs beside the garbage collector, which need not look at what stays for ever.
            gc.collect()
            gc.freeze()
            if link is not None:
                link.tell("loaded", info=server.list_models()["data"][0])
            if ready.is_set():
                # It slept.
                return
            ready.set()
            announce_builtin_model(models)
            if link is None:
                tell_idle(found.target)
                notify_service_manager("READY=1")
            for url in urls if link is None else ():
                console.print(f"{served.id} is served at {url}", style="bold", markup=False)
            if isinstance(served, ServedEmbedder):
                console.print(_describe_embedder(served), style="dim", markup=False)
                return
            console.print(_describe_speculation(served), style="dim", markup=False)
            if served.model.memory_plan is not None:
                print_memory_plan(served.model.memory_plan)

        def on_sleep() -> None:
            if link is not None:
                link.tell("sleeping")

        host = ModelHost(load_here, on_ready=on_ready, on_sleep=on_sleep)
        server = Server(host, options, verbose=bool(found.target.verbose))
        console.print(f"loading {Path(found.target.path).name}", style="dim", markup=False)
        with logging_to_stderr(verbose=bool(found.target.verbose), with_times=link is None):
            if link is not None:
                link.tell("listening", port=sockets[0].getsockname()[1])
            signals = run(create_app(server, security), server, security, sockets)
        if signals and not ready.is_set():
            raise typer.Exit(exits.INTERRUPTED)


def _load_embedder(found: FoundModels, options: ServerOptions) -> ServedEmbedder:
    from paceline.serving.model_host import ServedEmbedder

    path = Path(found.target.path)
    pooling: Pooling | None = "rank" if options.reranking else options.pooling
    return ServedEmbedder(
        load_embedder(replace(found.target, context_may_shrink=True), pooling=pooling),
        describe(path),
        names=tuple(sorted(set(options.alias))) or (path.stem,),
        tags=options.tags,
    )


def _build_served(
    model: Model,
    found: FoundModels,
    setup: Setup,
    options: ServerOptions,
    chat: ChatParams,
    defaults: GenerateOptions,
) -> ServedModel:
    from paceline.chat.template_sources import find_template
    from paceline.serving.model_host import ServedModel

    path = Path(found.target.path)
    try:
        template = model.worker.call(lambda: find_template(path, model.target.vocabulary, replaced_by=chat.replaced_by))
    except (ModelFileError, InputError) as error:
        error_console().print(f"warning: chat is off: {in_flags(str(error))}", style="yellow", markup=False)
        template = None
    return ServedModel(
        model,
        describe(path),
        names=tuple(sorted(set(options.alias))) or (path.stem,),
        policy=setup.policy if isinstance(setup.policy, str) else _model_name(setup),
        template=template,
        tags=options.tags,
        options=defaults,
        chat=chat,
        seed=defaults.get("seed"),
    )


def _model_name(setup: Setup) -> str:
    return "fixed" if not isinstance(setup.policy, str) and setup.policy.speculates else "plain"


def _describe_embedder(served: ServedEmbedder) -> str:
    engine = served.embedder.engine
    what = "scores documents by a query" if engine.pooling == "rank" else f"vectors of {engine.width} numbers"
    return f"{what}, of texts of at most {engine.context_length} tokens; pooling {engine.pooling}"


def _describe_speculation(served: ServedModel) -> str:
    drafters = ", ".join(served.drafters)
    how = f"drafts: {drafters} (policy {served.policy})" if drafters else "no drafts: plain decoding"
    chats = "" if served.template is not None else "; the model has no chat template, so it answers completions alone"
    cells, each = served.model.target.capabilities.cells, served.context_length
    requests = f"up to {served.max_running} requests at once" if served.max_running > 1 else "one request at a time"
    room = f"each with a context of {each} tokens"
    if cells is not None and cells < served.max_running * each:
        room = f"which share a context of {cells} tokens" + (f", at most {each} for each" if each < cells else "")
    return f"{requests}, {room}; {how}{chats}"
