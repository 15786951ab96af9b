"""Parameters of commands are made from the options (fields made by ``setting()``), and values come back typed.

A command takes the dataclasses that have such fields as parameters, where its help shall list their options::

    @with_options
    def command(context: typer.Context, *, models: ModelChoice, params: SamplingParams, mine: Annotated[...] = None)

Typer sees a parameter for every option of these instead, called as the field is (``draft_`` before a draft model's);
the command gets them complete and checked. One that takes :class:`GivenOptions` learns which of them were set. What a
flag is called and what the help says of it is in the table; what only a terminal has (completion) is here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import typer

from paceline.chat.params import ChatParams
from paceline.cli.prompt import read_typed_text
from paceline.conversion.own_draft import complete_draft
from paceline.core.errors import InputError
from paceline.core.fields import Field, fields_of, read_texts, read_whole, rename_options, spell_flag, stood_for
from paceline.core.numbers import shown
from paceline.core.params import wrap_seed
from paceline.drafters.registry import DRAFTER_NAMES
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.environment import Environment, ModelChoice, from_environment
from paceline.models.hub.reference import HubOptions
from paceline.models.registry import complete_model
from paceline.options import REQUEST_PARTS, read_options
from paceline.planning.policies.fixed import FixedPolicy
from paceline.server_options import ServerOptions

_Command = TypeVar("_Command", bound=Callable[..., None])

_DRAFT: Final = "draft_"
_HUB: Final = "hub_"

NAMES_OF_THE_DRAFT_MODEL: Final = ("draft_path", "hub_draft_repo")
"""Parameters that name a draft model."""

OF_THE_DRAFT_MODEL: Final = tuple(_DRAFT + field.name for field in fields_of(DraftOptions) if field.name != "path")
"""Parameters that say how a draft model runs."""

_OF_DRAFTS_ALONE: Final = ("vocab", "token_map")
"""Options of a draft model that targets have nothing like."""

WITHOUT_DRAFT_MODEL: Final = "has no effect without a draft model: name one with -md or -hfd"
"""Why options of the draft model are refused where there is none."""

_NOT_EVERYWHERE: Final = ("override_tensors", "max_sequences", "model_defaults", "verbose")
"""Options of models that only some commands have."""

_TOGETHER: Final = (("threads", "threads_batch", "draft_threads", "draft_threads_batch"),)


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """What a command's models have otherwise than the table, in their ``Annotated``.

    Attributes:
        also: options that only some commands have, and this one has.
        target_help: what the help says of the target.
        draft_help: what the help says of the draft model.
    """

    also: tuple[str, ...] = ()
    target_help: str = ""
    draft_help: str = ""


@dataclass(frozen=True, slots=True)
class OnlyFlags:
    """The parameters that a command has of a part, in its ``Annotated``; by default it has all."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GivenOptions:
    """Options of a request that the command line or the environment set, by field of the parts.

    What the command gets as parts has paceline's own defaults for the others.
    """

    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Flag:
    """A parameter of the command line that a field of the table has."""

    name: str
    field: Field
    help: str

    def parameter(self, helps: Mapping[str, str | None]) -> inspect.Parameter:
        """Return the parameter as typer reads it; texts in ``helps`` replace the table's, and ``None`` hides it."""
        about = self.field.option
        text = helps.get(self.name, self.help)
        annotation = typer.Option(
            *self.field.flags,
            help=(text or self.help).replace("{drafters}", ", ".join(DRAFTER_NAMES)),
            hidden=text is None,
            metavar=self.field.flag.metavar,
            autocompletion=_COMPLETIONS.get(self.name),
            parser=self._read_kilo if about.kilo else None,
            rich_help_panel=self.field.flag.panel,
        )
        kind, default = _typer_type(self.field)
        if self.name in helps and about.kind in ("whole", "real"):
            # The text names the default.
            kind, default = kind | None, None
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, annotation]
        )

    def _read_kilo(self, text: str) -> int:
        try:
            return read_whole(self.field, str(text))
        except ValueError:
            raise InputError(f"{self.field.flags[0]} {shown(text)} is no whole number: give one, such as 32k") from None

    def value(self, given: Any) -> object:
        """Return the field's value for one that typer read."""
        about = self.field.option
        if about.words:
            return about.words[given]
        if about.kind == "truth":
            return given != self.field.flag.negated
        if about.kind in ("whole", "real"):
            return stood_for(self.field, given)
        if about.separator:
            texts = given if self.field.flag.repeated else [given]
            return read_texts(self.field, [read_typed_text(text, self.field.flags[0], escape=False) for text in texts])
        if self.field.flag.repeated:
            return read_texts(self.field, given)
        return given if about.parse is None else read_texts(self.field, [given])


def _complete_drafters(incomplete: str) -> list[str]:
    done, _, last = incomplete.rpartition(",")
    taken = done.split(",") if done else []
    return [",".join([*taken, name]) for name in DRAFTER_NAMES if name not in taken and name.startswith(last)]


_COMPLETIONS: Final[Mapping[str, Callable[[str], list[str]]]] = {
    "path": complete_model,
    "draft_path": complete_draft,
    "drafters": _complete_drafters,
}


def _typer_type(field: Field) -> tuple[Any, object]:
    """Return the type that typer checks, and the default that the help shows."""
    about, default = field.option, field.default
    if about.words:
        word = next((word for word, value in about.words.items() if value == default), None)
        kind: Any = Literal[tuple(about.words)]
        return (kind, word) if word is not None else (kind | None, None)
    if field.flag.repeated:
        return list[str] | None, None
    if about.kind == "truth":
        return bool, default if not field.flag.negated else not default
    if about.kind in ("whole", "real"):
        kind = int if about.kind == "whole" else float
        if field.flag.shown_default is not None:
            default = field.flag.shown_default
        return (kind, default) if default is not None else (kind | None, None)
    return (str, "") if default == () else (str | None, None)


def with_options(
    *,
    together: Sequence[Sequence[str]] = (),
    helps: Mapping[str, str | None] = MappingProxyType({}),
    variables: Callable[[], Mapping[str, str]] = lambda: os.environ,
) -> Callable[[_Command], Callable[..., None]]:
    """Return what makes a command of a function that takes dataclasses of the table.

    Args:
        together: runs of parameters to list in this order, where the last of them would stand.
        helps: what the help says of parameters that are something else for this command than what the table has, with
            the default in brackets; ``None`` hides one.
        variables: returns the environment that sets what the command line does not.
    """

    def decorate(command: _Command) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        parts: dict[str, Any] = {}
        for parameter in inspect.signature(command).parameters.values():
            hint = hints[parameter.name]
            part = _find_part(hint)
            if part is None:
                parameters.append(parameter.replace(annotation=hint))
                continue
            parts[parameter.name] = hint
            parameters += [flag.parameter(helps) for flag in _make_flags(part, hint)]

        def run(**values: Any) -> None:
            context: typer.Context = values["context"]
            own = {name: value for name, value in values.items() if name in hints}
            command(**own, **read_parts(context, values, parts, variables()))

        for run_of_names in (*_TOGETHER, *together):
            parameters = _list_together(parameters, run_of_names)
        # What typer reads of a function.
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        vars(run)["__signature__"] = inspect.Signature(parameters)
        return run

    return decorate


def read_parts(
    context: typer.Context, values: Mapping[str, Any], hints: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return dataclasses of the table as a command line and the environment make them, by name.

    Args:
        values: of the parameters, as typer read them.
        hints: what a command's parameters are to be.
    """
    parts = {name: cast("type", _find_part(hint)) for name, hint in hints.items()}
    flags = {part: _make_flags(part, hints[name]) for name, part in parts.items()}
    given = {
        flag.name: flag.value(values[flag.name])
        for of_part in flags.values()
        for flag in of_part
        if is_set(context, flag.name)
    }
    try:
        made = _build_parts(flags, given, from_environment(variables))
    except InputError as error:
        if is_of_file(context, error.field):
            raise InputError(f"{cast('Any', context.default_map).file}: {error}", field=error.field) from None
        raise
    return {name: made[part] for name, part in parts.items()}


def is_of_file(context: Any, name: str | None) -> bool:
    """Return whether a configuration file sets the parameter of a field, of the target's or of the draft model's."""
    settings = context.default_map or {}
    return name in settings or f"{_DRAFT}{name}" in settings


def _find_part(hint: Any) -> type | None:
    """Return the dataclass of the table that a parameter is to be, if it is to be one."""
    part = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    known = (ModelChoice, FixedPolicy, ChatParams, ServerOptions, GivenOptions, *REQUEST_PARTS)
    return part if part in known else None


def _make_flags(part: type, hint: Any) -> list[_Flag]:
    """Return the flags that a part of the table has on this command, in the order of its help."""
    only = [extra.names for extra in get_args(hint)[1:] if isinstance(extra, OnlyFlags)]
    return [flag for flag in _list_flags(part, hint) if not only or flag.name in only[0]]


def _list_flags(part: type, hint: Any) -> list[_Flag]:
    if part is not ModelChoice:
        return [_Flag(field.name, field, field.flag.help) for field in fields_of(part) if field.flags]
    (about,) = [extra for extra in get_args(hint)[1:] if isinstance(extra, ModelFlags)] or [ModelFlags()]
    drafts = {field.name: field for field in fields_of(DraftOptions)}
    flags = []
    for field in fields_of(ModelOptions):
        if field.name in _NOT_EVERYWHERE and field.name not in about.also:
            continue
        text = about.target_help if field.name == "path" and about.target_help else field.flag.help
        flags.append(_Flag(field.name, field, text))
        if field.name in drafts:
            draft = drafts[field.name]
            text = about.draft_help if field.name == "path" and about.draft_help else draft.flag.help
            flags.append(_Flag(_DRAFT + field.name, draft, text))
        if field.name == "path":
            flags += [_Flag(_DRAFT + name, drafts[name], drafts[name].flag.help) for name in _OF_DRAFTS_ALONE]
            flags += [_Flag(_HUB + option.name, option, option.flag.help) for option in fields_of(HubOptions)]
    return flags


def _build_parts(
    parts: Mapping[type, list[_Flag]], given: Mapping[str, Any], environment: Environment
) -> dict[type, object]:
    """Build the dataclasses of the table that a command takes, from its flags and what is given by parameter."""
    made: dict[type, object] = {}
    if ModelChoice in parts:
        there_are = {flag.name for flag in parts[ModelChoice]}
        target = {name: value for name, value in environment.target.items() if name in there_are}
        target |= {field.name: given[field.name] for field in fields_of(ModelOptions) if field.name in given}
        draft = {name: value for name, value in environment.draft.items() if _DRAFT + name in there_are}
        for field in fields_of(DraftOptions):
            if _DRAFT + field.name in given:
                draft[field.name] = given[_DRAFT + field.name]
        made[ModelChoice] = ModelChoice.of(target, draft, _read_hub(target, draft, given, environment))
    if ChatParams in parts:
        made[ChatParams] = dataclasses.replace(environment.chat, **_pick_given(parts[ChatParams], given))
    if ServerOptions in parts:
        made[ServerOptions] = ServerOptions(**{**environment.server, **_pick_given(parts[ServerOptions], given)})
    if FixedPolicy in parts:
        made[FixedPolicy] = FixedPolicy(**_pick_given(parts[FixedPolicy], given))
    if not parts.keys().isdisjoint(REQUEST_PARTS):
        request: dict[str, object] = {**environment.request}
        for part in REQUEST_PARTS:
            request |= _pick_given(parts.get(part, []), given)
        if wrap_seed(cast("int", request.get("seed", 0))) is None:
            # One that is to be drawn is none: a server draws it for every request.
            del request["seed"]
        made.update(zip(REQUEST_PARTS, read_options(request).parts, strict=True))
        made[GivenOptions] = GivenOptions(request)
    return made


def _read_hub(
    target: dict[str, Any], draft: dict[str, Any], given: Mapping[str, Any], environment: Environment
) -> dict[str, Any]:
    """Return what is asked of the hub: of the environment what the command line does not name otherwise."""
    hub = {field.name: given[_HUB + field.name] for field in fields_of(HubOptions) if _HUB + field.name in given}
    for model, repo, path in ((target, "repo", "path"), (draft, "draft_repo", "draft_path")):
        if repo in hub and path not in given:
            model.pop("path", None)
    named_otherwise = {repo for repo, path in (("repo", "path"), ("draft_repo", "draft_path")) if path in given}
    if "path" in given or "repo" in hub:
        named_otherwise.add("file")  # of another repository
    hub = {name: value for name, value in environment.hub.items() if name not in named_otherwise} | hub
    if "file" in hub and "repo" not in hub and _HUB + "file" in given:
        raise InputError("-hff has no effect without -hf: name the file's repository with -hf USER/REPO")
    if "token" in hub and not {"repo", "draft_repo"} & hub.keys():
        raise InputError("-hft has no effect without -hf or -hfd: name a model of the hub, or leave it out")
    return hub


def _pick_given(flags: Sequence[_Flag], given: Mapping[str, Any]) -> dict[str, Any]:
    return {flag.name: given[flag.name] for flag in flags if flag.name in given}


def _list_together(parameters: Sequence[inspect.Parameter], names: Sequence[str]) -> list[inspect.Parameter]:
    """Return the parameters with those of these names in their order, where the last of them stands."""
    moved = {parameter.name: parameter for parameter in parameters if parameter.name in names}
    if not moved:
        return list(parameters)
    *_, last = moved
    listed: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name == last:
            listed += [moved[name] for name in names if name in moved]
        elif parameter.name not in moved:
            listed.append(parameter)
    return listed


def names_draft_model(context: typer.Context) -> bool:
    return any(is_given(context, parameter) for parameter in NAMES_OF_THE_DRAFT_MODEL)


def is_given(context: typer.Context, parameter: str) -> bool:
    """Return whether a parameter has a value from the command line."""
    return _has_source(context, parameter, "COMMANDLINE")


def is_set(context: typer.Context, parameter: str) -> bool:
    """Return whether a parameter has a value from the command line or a configuration file, and not its default."""
    return _has_source(context, parameter, "COMMANDLINE", "DEFAULT_MAP")


def _has_source(context: typer.Context, parameter: str, *sources: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name in sources


def refuse_given(context: typer.Context, reasons: Mapping[str, str]) -> None:
    """Refuse parameters that were given and would do nothing; a reason follows the option's name."""
    for parameter in context.command.params:
        reason = reasons.get(parameter.name or "")
        if reason is not None and is_given(context, parameter.name or ""):
            raise InputError(f"{parameter.opts[0]} {reason}")


NAMES_OF_MODELS: Final = ("path", "draft_path", "hub_repo", "hub_file", "hub_draft_repo", "hub_token", "hub_offline")
"""Options that name models, which a command has no use for whose models are its arguments."""
NAMED_BY_ARGUMENTS: Final = "has no effect here: the target is the first argument, and its drafts are those after it"
"""Why such a command refuses them."""

_NO_FIELDS: Final[Mapping[str, str]] = {
    "policy": "--policy",
    "policy=NO_SPECULATION": "--no-speculation",
    "generate": "paceline run -p",
    "strict=False": "--no-strict",
    "force=True": "--force",
}
"""What else messages name, by how the command line calls it."""


def in_flags(message: str) -> str:
    """Return a message of the library in which options are called what the command line calls them."""
    return rename_options(message, _as_flag)


def _as_flag(name: str, value: str) -> str | None:
    field = _flagged().get(name)
    if field is not None:
        return spell_flag(field, value)
    return _NO_FIELDS.get(f"{name}={value}" if value else name, _NO_FIELDS.get(name))


def long_flags() -> list[str]:
    """Return the long names that options of the table have on the command line."""
    return [name for field in _flagged().values() for name in field.flags if name.startswith("--")]


@functools.cache
def _flagged() -> Mapping[str, Field]:
    """Return the fields that the command line has options for, by what messages call them."""
    parts = (ServerOptions, HubOptions, ModelOptions, ChatParams, FixedPolicy, *REQUEST_PARTS)
    found = {field.name: field for part in parts for field in fields_of(part) if field.flags}
    drafts = {field.name: field for field in fields_of(DraftOptions)}
    return found | {"draft": drafts["path"]} | {f"DraftOptions.{name}": field for name, field in drafts.items()}
