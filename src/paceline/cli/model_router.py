"""``paceline serve --models-dir``: a router before a process for each model, and the words that each is given."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from paceline.cli.display import error_console
from paceline.cli.flags import in_flags
from paceline.cli.llama_flags import VARIABLES, remarks_on, with_llama_variables
from paceline.cli.options import is_given, refuse_given
from paceline.core.errors import InputError
from paceline.engines.context_length import DEFAULT_CONTEXT_LENGTH
from paceline.environment import ModelChoice, from_environment, variables_of_the_table
from paceline.server_options import DEFAULT_PARALLEL, ServerOptions

if TYPE_CHECKING:
    from paceline.serving.router.pool import Launch
    from paceline.serving.router.presets import Preset
    from paceline.serving.security import SecuritySettings

_ROUTERS: Final = (
    *("host", "port", "prefix", "ui", "api_key", "api_key_file", "cors_origins", "allowed_hosts"),
    *("ssl_key_file", "ssl_cert_file", "grace_s"),
    *("models_dir", "models_preset", "models_max", "models_memory", "models_autoload", "models_wait_s"),
)
"""Parameters that are the router's own."""

_OF_ONE_MODEL: Final = ("path", "hub_repo", "hub_file", "alias", "tags")
"""Parameters that say which model it is."""

_PROGRAM: Final = (sys.executable, "-m", "paceline", "serve")

_ROUTED: Final = ("--routed", "--host", "127.0.0.1", "--port", "0", "--no-ui", "--grace", "0")
"""Words of every process of a model."""

_VARIABLE: Final = re.compile(r"(LLAMA|PACELINE)_[A-Z0-9_]+")


def is_router(context: typer.Context, models: ModelChoice, options: ServerOptions) -> bool:
    """Return whether several models are to be served. What the command line names goes before the environment."""
    several = [name for name in ("models_dir", "models_preset") if getattr(options, name) is not None]
    if not several:
        return False
    names_one = any(is_given(context, name) for name in ("path", "hub_repo"))
    names_several = any(is_given(context, name) for name in several)
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
    from paceline.serving.deployment import listening, run, server_url
    from paceline.serving.logs import logging_to_stderr
    from paceline.serving.router.app import PoolHost, RouterHandlers, RouterServer
    from paceline.serving.router.pool import ModelPool
    from paceline.serving.router.presets import find_presets

    one = dict.fromkeys(_OF_ONE_MODEL, "is of one model: give it in a section of --models-preset")
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
        if is_given(context, name) and name not in (*_ROUTERS, *_OF_ONE_MODEL):
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
    from paceline.serving.router.presets import estimate_bytes

    words, variables = [*common], {}
    for key, value in preset.settings.items():
        if _VARIABLE.fullmatch(key):
            variables[key] = value
        else:
            words += _section_words(context, preset, key, value)
    if preset.path is not None:
        words += ["-m", str(preset.path)]
    given = _check(context, preset, words)
    told = from_environment(with_llama_variables({**os.environ, **variables})).target
    room = told.get("context_length") if given["context_length"] is None else given["context_length"]
    if room is None:
        # By itself a model would take a share of all the memory that is free when it is loaded.
        parallel = given["max_sequences"] or told.get("max_sequences") or (1 if given["exact"] else DEFAULT_PARALLEL)
        room = parallel * DEFAULT_CONTEXT_LENGTH
        words += ["-c", str(room)]
    draft = given["draft_path"]
    paths = [path for path in (preset.path, draft and Path(draft)) if path is not None and path.exists()]
    estimate = estimate_bytes(paths, room or DEFAULT_PARALLEL * DEFAULT_CONTEXT_LENGTH)
    shown = [Path(word).name if os.sep in word and Path(word).exists() else word for word in words]
    return Launch([*_PROGRAM, *words, *_ROUTED], ["paceline", "serve", *shown], _environment(variables), estimate)


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
        raise InputError(f"`models_preset`: [{preset.name}] has {key}, which is the server's own: leave it out there")
    if not parameter.is_flag:
        return [f"{names[0]}={value}"] if names[0].startswith("--") else [names[0], value]
    is_on = {**dict.fromkeys(("true", "1", "yes", "on", ""), True), **dict.fromkeys(("false", "0", "no", "off"), False)}
    if value.lower() not in is_on:
        raise InputError(f"`models_preset`: [{preset.name}] has {key} = {value}: give true or false")
    is_positive = (names[0] in parameter.opts) == is_on[value.lower()]
    spelled = parameter.opts if is_positive else parameter.secondary_opts
    # Off is also what it is unsaid.
    return [spelled[0]] if spelled else []


def _check(context: typer.Context, preset: Preset, words: list[str]) -> Mapping[str, Any]:
    """Return the parameters that words come to; an error names the section."""
    try:
        with context.command.make_context("serve", [*words], parent=context.parent) as parsed:
            known = [name for parameter in context.command.params for name in parameter.opts]
            remarks_on(parsed.args, known)
            return {**parsed.params}
    except (InputError, typer.TyperException) as error:
        said = getattr(error, "message", "") or str(error)
        raise InputError(f"[{preset.name}]: {said}") from None


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a model's process: this one's, without what is the router's."""
    own = {name for name, field in variables_of_the_table().items() if field.name in _not_handed_on()}
    own |= {theirs for theirs, ours in VARIABLES.items() if ours in own}
    return {**{name: value for name, value in os.environ.items() if name not in own}, **variables}


def _not_handed_on() -> Collection[str]:
    of_server = {field.name for field in dataclasses.fields(ServerOptions)} & {*_ROUTERS, *_OF_ONE_MODEL}
    return of_server | {"path", "repo", "file"}
