"""``paceline serve --models-dir``: a router before a process for each model, and the words that each is given."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, cast

import typer

from paceline.cli.display import error_console
from paceline.cli.llama_flags import VARIABLES, remarks_on, with_llama_variables
from paceline.cli.options import ModelFlags, in_flags, is_set, read_parts, refuse_given
from paceline.cli.setup import FoundModels, Setup, choose_setup, count_requests, size_models
from paceline.core.errors import InputError, PacelineError
from paceline.core.params import SpeculationParams
from paceline.engines.context_length import DEFAULT_CONTEXT_LENGTH, choose_context_length
from paceline.engines.loading import foreseen_bytes
from paceline.engines.memory import PROCESS_BYTES
from paceline.engines.options import memory_bytes
from paceline.environment import ModelChoice, variables_of_the_table
from paceline.models.description import ModelDescription, describe
from paceline.models.hub.reference import HubModel
from paceline.models.registry import resolve_model
from paceline.planning.policies.fixed import FixedPolicy
from paceline.server_options import ServerOptions

if TYPE_CHECKING:
    from paceline.serving.router.pool import Launch
    from paceline.serving.router.presets import Preset
    from paceline.serving.security import SecuritySettings

ServedModels: TypeAlias = Annotated[
    ModelChoice, ModelFlags(also=("override_tensors", "max_sequences", "model_defaults", "verbose"))
]
"""The models of a server, with the options that they have there."""

_PARTS: Final = {
    "models": ServedModels,
    "options": ServerOptions,
    "speculation": SpeculationParams,
    "fixed": FixedPolicy,
}

_ROUTERS: Final = (
    *("host", "port", "prefix", "ui", "api_key", "api_key_file", "cors_origins", "allowed_hosts"),
    *("ssl_key_file", "ssl_cert_file", "grace_s"),
    *("models_dir", "models_preset", "models_max", "models_memory", "models_autoload", "models_wait_s"),
)
"""Parameters that are the router's own."""

_OF_ONE_MODEL: Final = ("path", "hub_repo", "hub_file", "alias", "tags")
"""Parameters that say which model it is."""

_ROUTED: Final = ("--routed", "--host", "127.0.0.1", "--port", "0", "--no-ui", "--grace", "0")
"""Words of every process of a model."""

_VARIABLE: Final = re.compile(r"(LLAMA|PACELINE)_[A-Z0-9_]+")


def is_router(context: typer.Context, models: ModelChoice, options: ServerOptions) -> bool:
    """Return whether several models are to be served. What the command line names goes before the environment."""
    several = [name for name in ("models_dir", "models_preset") if getattr(options, name) is not None]
    if not several:
        return False
    names_one = any(is_set(context, name) for name in ("path", "hub_repo"))
    names_several = any(is_set(context, name) for name in several)
    if models.target is None or (names_several and not names_one):
        return True
    if names_one and not names_several:
        return False
    way_out = "leave out one of them" if names_one else "unset one of them"
    raise InputError(f"`{several[0]}` has several models, and another option names one: {way_out}")


def route(context: typer.Context, options: ServerOptions, security: SecuritySettings) -> None:
    """Serve the models of a folder and of an INI file, each by a process of its own while it is of use."""
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        from paceline.core.extras import missing

        raise missing("a server of several models", error.name, "serve") from None
    from paceline.serving.app import create_app
    from paceline.serving.deployment import listening, notify_service_manager, run, server_url
    from paceline.serving.logs import logging_to_stderr
    from paceline.serving.router.app import PoolHost, RouterHandlers, RouterServer
    from paceline.serving.router.pool import ModelPool
    from paceline.serving.router.presets import find_presets

    one = dict.fromkeys(_OF_ONE_MODEL, "applies to a single model: give it in a section of --models-preset")
    refuse_given(context, one)
    words = _common_words(context)
    folder, ini = (None if name is None else Path(name) for name in (options.models_dir, options.models_preset))

    def find() -> dict[str, tuple[Preset, Launch]]:
        return {name: (preset, _launch(context, preset, words)) for name, preset in find_presets(folder, ini).items()}

    pool = ModelPool(
        find,
        most=options.models_max,
        most_bytes=options.models_bytes,
        wait_s=options.models_wait_s,
        most_waiting=options.max_waiting,
    )
    console = error_console()
    with listening(options.host, options.port) as sockets:
        urls = [server_url(each, has_tls=options.has_tls, prefix=options.prefix) for each in sockets]
        for warning in security.warnings():
            console.print(f"warning: {in_flags(warning)}", style="yellow", markup=False)

        def on_ready() -> None:
            number = f"{len(pool.models)} models are" if len(pool.models) > 1 else "1 model is"
            for url in urls:
                console.print(f"{number} served at {url}", style="bold", markup=False)
            notify_service_manager("READY=1")

        server = RouterServer(PoolHost(pool, on_ready=on_ready), options)
        verbose = bool(context.params["verbose"])
        with logging_to_stderr(verbose=verbose):
            app = create_app(server, security, RouterHandlers(server).routes())
            run(app, server, security, sockets, files_each=2)


def _common_words(context: typer.Context) -> list[str]:
    """Return the words of this command that hold for each model."""
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if is_set(context, name) and name not in (*_ROUTERS, *_OF_ONE_MODEL):
            words += _spell(parameter, context.params[name])
    return words


def _spell(parameter: Any, value: Any) -> Iterator[str]:
    """Return the words that give a parameter this value."""
    if parameter.is_flag:
        yield (parameter.opts if value else parameter.secondary_opts)[0]
        return
    for each in value if isinstance(value, list | tuple) else [value]:
        # One word, as the value may begin with a dash.
        long = next((name for name in parameter.opts if name.startswith("--")), None)
        yield from [f"{long}={each}"] if long is not None else [parameter.opts[0], str(each)]


def _launch(context: typer.Context, preset: Preset, common: list[str]) -> Launch:
    from paceline.serving.router.pool import Launch

    words, variables = [*common], {}
    for key, value in preset.settings.items():
        if not _VARIABLE.fullmatch(key):
            words += _section_words(context, preset, key, value)
        elif key in _own_variables() and "_HF_" not in key:
            raise _not_of_a_section(preset, key)
        else:
            variables[key] = value
    if preset.path is not None:
        words += ["-m", str(preset.path)]
    environment = {name: value for name, value in os.environ.items() if name not in _own_variables()} | variables
    try:
        room, estimate = _foresee(context, preset, words, environment)
    except (InputError, typer.TyperException) as error:
        said = getattr(error, "message", "") or str(error)
        raise InputError(f"[{preset.name}]: {said}") from None
    if room is not None:
        words += ["-c", str(room)]
    shown = [Path(word).name if os.sep in word and Path(word).exists() else word for word in words]
    # No file of the folder that the server was started in is taken for a module, unless this process takes it for one.
    safely = [] if sys.path[0] in ("", str(Path.cwd())) else ["-P"]
    program = [sys.executable, *safely, "-m", "paceline", "serve"]
    return Launch([*program, *words, *_ROUTED], ["paceline", "serve", *shown], environment, estimate)


def _foresee(
    context: typer.Context, preset: Preset, words: list[str], environment: Mapping[str, str]
) -> tuple[int | None, int]:
    """Return the room that a model's requests get where nobody says it, and about what its process takes."""
    with context.command.make_context("serve", ["--routed", *words], parent=context.parent) as made:
        parsed = cast("typer.Context", made)
        remarks_on(parsed.args, [name for parameter in context.command.params for name in parameter.opts])
        asked = read_parts(parsed, parsed.params, _PARTS, with_llama_variables(environment))
        models, options = asked["models"], asked["options"]
        policy, remember = parsed.params["policy"], parsed.params["remember"]
        setup = choose_setup(parsed, models, asked["speculation"], asked["fixed"], policy=policy, remember=remember)
        about = None
        with contextlib.suppress(PacelineError):
            about = None if preset.path is None else describe(preset.path)
        embeds = options.embedding or options.reranking or (about is not None and about.embeds)
        room = None
        if models.settings.context_length is None and not models.whole_context and not embeds:
            # By itself a model would take a share of all the memory that is free when it is loaded.
            room = count_requests(parsed, models, exact=models.settings.exact)[0] * DEFAULT_CONTEXT_LENGTH
            setup = replace(setup, models=replace(models, settings=replace(models.settings, context_length=room)))
        return room, _estimate_bytes(parsed, setup, options, about, embeds=embeds)


def _estimate_bytes(
    context: typer.Context, setup: Setup, options: ServerOptions, about: ModelDescription | None, *, embeds: bool
) -> int:
    """Return about what a model's process takes. What the file does not say is measured once it is loaded."""
    estimate, models = PROCESS_BYTES, setup.models
    # What is wrong with a file is told when it is to be loaded.
    with contextlib.suppress(PacelineError):
        if about is not None:
            target = models.target_options(about.path)
            if embeds:
                length = choose_context_length(target.context_length, about.context_length, model="", may_shrink=True)
                target = replace(target, context_length=length, max_sequences=1)
            else:
                target = size_models(context, FoundModels(target, None), models, options).target
            estimate += foreseen_bytes(target)
            if setup.draft is not None and not isinstance(setup.draft, HubModel):
                draft = models.draft_options(target, resolve_model(setup.draft))
                estimate += foreseen_bytes(replace(draft, cells=target.cells))
    limit = memory_bytes(models.settings)
    return estimate if limit is None else min(estimate, limit)


def _section_words(context: typer.Context, preset: Preset, key: str, value: str) -> list[str]:
    parameters = {name: each for each in context.command.params for name in (*each.opts, *each.secondary_opts)}
    names = [name for name in (f"--{key}", f"-{key}") if name in parameters]
    if not names:
        # llama-server's, perhaps.
        flag = f"--{key}" if len(key) > 3 else f"-{key}"
        return [flag] if value.lower() in ("", "true", "on") else [flag, value]
    parameter: Any = parameters[names[0]]
    if (parameter.name or "") in (*_ROUTERS, *_OF_ONE_MODEL, "routed"):
        if parameter.name in ("hub_repo", "hub_file"):
            return [names[0], value]
        raise _not_of_a_section(preset, key)
    if not parameter.is_flag:
        return [f"{names[0]}={value}"] if names[0].startswith("--") else [names[0], value]
    is_on = {**dict.fromkeys(("true", "1", "yes", "on", ""), True), **dict.fromkeys(("false", "0", "no", "off"), False)}
    if value.lower() not in is_on:
        raise InputError(f"`models_preset`: [{preset.name}] has {key} = {value}: give true or false")
    is_positive = (names[0] in parameter.opts) == is_on[value.lower()]
    spelled = parameter.opts if is_positive else parameter.secondary_opts
    # Off is also what it is unsaid.
    return [spelled[0]] if spelled else []


def _not_of_a_section(preset: Preset, key: str) -> InputError:
    return InputError(f"`models_preset`: [{preset.name}] has {key}, which is the server's own: leave it out there")


@functools.cache
def _own_variables() -> frozenset[str]:
    """Return the variables of the environment that are the router's, and not those of a model's process."""
    of_server = {field.name for field in dataclasses.fields(ServerOptions)} & {*_ROUTERS, *_OF_ONE_MODEL}
    fields = of_server | {"path", "repo", "file"}
    own = {
        name
        for name, field in variables_of_the_table().items()
        if field.name in fields and not name.startswith("PACELINE_DRAFT_")
    }
    return frozenset({*own, *(theirs for theirs, ours in VARIABLES.items() if ours in own)})
