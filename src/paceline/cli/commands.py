"""Commands that say what was meant where a name is misspelled, and whose help a terminal of 80 columns has room for.

Typer prints a list of names, in a box, and its help has a column for each spelling of an option.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Final

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption

from paceline.cli.outputs import OPTIONAL_VALUE, STANDARD_OUTPUT
from paceline.core.did_you_mean import nearest, no_such_option
from paceline.core.errors import InputError
from paceline.core.numbers import shown

_LONGEST_NAMES: Final = 28
"""Columns that the names of an option take in the help before they go on in the next line."""

_ONE_DASH: Final = re.compile(r"-[A-Za-z][A-Za-z-]+")

_FURTHER: Final = re.compile(r"(?:;|[.:](?= ))[^\[]*?(?:\.|(?=$))( \[.*)?$", re.DOTALL)
"""What follows the first part of an option's text, with the default in brackets behind it."""

_EXTRA_ARGUMENTS: Final = re.compile(r"^Got unexpected extra argument\(s\) \((.*)\)")

_EXAMPLE: Final = re.compile(r"\n+(?=paceline |curl )")

_DEFAULTS_NOTE: Final = (
    "[dim]Defaults of these options can be set in a file, paceline.toml (paceline help config says which), and by the "
    "environment: PACELINE_ and the option's name in the library, such as PACELINE_TEMPERATURE for --temp.[/dim]"
)
"""Stands at the end of the help that lists all of very many options."""

_HELP_ALL: Final = "paceline.help_all"
"""Where a context notes that its help lists all options."""


def show_help(ctx: typer.Context, *, everything: bool) -> None:
    """Print a command's help, with all of its options or with those that most people need."""
    ctx.meta[_HELP_ALL] = everything
    typer.echo(ctx.get_help(), color=ctx.color)


class Command(TyperCommand):
    """Answers an option that it does not have with the one that was meant.

    Attributes:
        short: first names of the options that ``--help`` lists, in this order; empty for all of them.
    """

    short: tuple[str, ...] = ()

    def __init__(self, name: str | None, **attributes: Any) -> None:
        super().__init__(name, **attributes)
        self.params = [*self.params, *_make_common_options()]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)  # reading takes them
        _refuse_one_dash(self, ctx, words)
        try:
            given = _with_values(self, ctx, words)
            _take_configuration(self, ctx, given, self.variables)
            return super().parse_args(ctx, given)
        except typer.TyperException as error:
            raise _explain(error, self, ctx, words) from None

    def variables(self) -> Mapping[str, str]:
        """Return the environment that sets what the command line does not."""
        return os.environ

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super(Command, _narrow_command(self, ctx)).format_help(ctx, formatter)


class Group(TyperGroup):
    """Answers an option or a command that it does not have with the one that was meant."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.params = [*self.params, *_make_common_options()]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        try:
            given = _with_values(self, ctx, words)
            _take_configuration(self, ctx, given)
            return super().parse_args(ctx, given)
        except typer.TyperException as error:
            raise _explain(error, self, ctx, words) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = nearest(name, self.list_commands(ctx), cutoff=0.65)
            hint = (
                f"did you mean {near}?"
                if near is not None
                else f"{command_name(ctx)} --help lists those that there are"
            )
            raise InputError(f"there is no command {name}: {hint}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super(Group, _narrow_command(self, ctx)).format_help(ctx, formatter)


def _take_configuration(
    command: Any, ctx: Any, words: list[str], variables: Callable[[], Mapping[str, str]] = lambda: os.environ
) -> None:
    """Make what a configuration file sets the defaults of a command's options; the program itself has none."""
    if ctx.resilient_parsing:
        return
    given: dict[str, Any] = command.make_parser(ctx).parse_args(list(words))[0]
    for name in ("config", "profile"):
        if name in given:
            ctx.meta[f"paceline.{name}"] = given[name]
    # A process of a router has been given what it is to know.
    if ctx.parent is None or any(given.get(name) for name in ("help", "help_all", "routed")):
        return
    from paceline.cli.config import read_settings

    named, profile = ctx.meta.get("paceline.config"), ctx.meta.get("paceline.profile")
    ctx.default_map = read_settings(ctx, given, named=named, profile=profile, variables=variables())


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        show_help(ctx, everything=True)
        raise typer.Exit


def _have_common_options(
    config: Annotated[
        str | None,
        typer.Option(
            "--config", help="Configuration file. [dim]\\[paceline.toml, where there is one][/dim]", metavar="FILE"
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", help="Profile of the configuration file to use.", metavar="NAME")
    ] = None,
    help_all: Annotated[
        bool, typer.Option("--help-all", help="Show all options and exit.", is_eager=True, callback=_show_all)
    ] = False,
) -> None:
    """Say what the options of every command are."""


def _make_common_options() -> list[TyperOption]:
    """Return the options that every command has."""
    app = typer.Typer(add_completion=False)
    app.command()(_have_common_options)
    options = [each for each in typer.main.get_command(app).params if isinstance(each, TyperOption)]
    for option in options:
        option.expose_value = False
    return options


def command_name(ctx: Any) -> str:
    """Return what one types for a command, however the program was started."""
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, ctx.info_name)
        ctx = ctx.parent
    return " ".join(["paceline", *names])


def _see_help(command: Any, ctx: Any) -> str:
    return f"see {command_name(ctx)} --help{'-all' if getattr(command, 'short', ()) else ''}"


def _options(command: Command | Group, ctx: Any) -> list[TyperOption]:
    there_are = command.get_params(ctx)
    return [option for option in there_are if isinstance(option, TyperOption) and not option.hidden]


def _names(options: Sequence[TyperOption]) -> list[str]:
    return [name for option in options for name in (*option.opts, *option.secondary_opts)]


def _refuse_one_dash(command: Command, ctx: Any, words: Sequence[str]) -> None:
    """Refuse an option such as ``-temp``, which would be read as ``-t`` with the value ``emp``."""
    options = _options(command, ctx)
    names, with_value = _names(options), _names([option for option in options if not option.is_flag])
    before = ""
    for word in words:
        if word == "--" or ctx.resilient_parsing:
            return
        name = word.partition("=")[0]
        is_slip = _ONE_DASH.fullmatch(name) and name not in names and f"-{name}" in names
        if is_slip and before not in with_value:
            raise InputError(no_such_option(name, names, _see_help(command, ctx)))
        before = word


def _with_values(command: Command | Group, ctx: Any, words: Sequence[str]) -> list[str]:
    """Return the words of a command line where an option whose value is optional has one, as typer knows no such."""
    options = _options(command, ctx)
    optional = _names([option for option in options if option.metavar == OPTIONAL_VALUE])
    with_value = set(_names([option for option in options if not option.is_flag])) - {*optional}
    takes_words = isinstance(command, Group) or len(options) < len(command.get_params(ctx))

    def is_path(word: str) -> bool:
        return not word.startswith("-") and (not takes_words or word.endswith(".json"))

    filled: list[str] = []
    rest = list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        if word in optional and not (filled and filled[-1] in with_value):
            # A path was a word of its own once.
            if rest[:1] == [STANDARD_OUTPUT]:
                del rest[0]
            elif rest and is_path(rest[0]) and not ctx.resilient_parsing:
                raise InputError(f"{word} {rest[0]}: write {word}={rest[0]}")
            word += f"={STANDARD_OUTPUT}"
        filled.append(word)
    return filled + rest


def _explain(error: typer.TyperException, command: Command | Group, ctx: Any, words: Sequence[str]) -> Exception:
    """Return what to raise instead of what typer says of a command line, in a box."""
    if not words and isinstance(command, Group):  # it says the help
        return error
    if not hasattr(error, "possibilities"):  # what the error of an unknown option has, and no other
        settings, option, message = ctx.default_map, getattr(error, "param", None), _explain_value(error)
        if message and option is not None and settings and option.name in settings:
            return InputError(f"{settings.file}: {message.replace(option.opts[0], settings.spelled[option.name], 1)}")
        message = message or str(getattr(error, "message", error)) or error.format_message()
        message = _EXTRA_ARGUMENTS.sub(r"unexpected argument \1", message)
        hint = "" if message.endswith("?") else f": {_see_help(command, ctx)}"
        return InputError(f"{message[:1].lower()}{message[1:].removesuffix('.')}{hint}")
    names = _names(_options(command, ctx))
    written = _find_written(getattr(error, "option_name", ""), words, names)
    return InputError(no_such_option(written, names, _see_help(command, ctx)))


def _explain_value(error: typer.TyperException) -> str | None:
    """Return what is wrong with an option's value, which pydantic says in its own words; ``None`` of other errors."""
    option, faults = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if option is None or faults is None:
        return None
    fault = faults()[0]
    kind, choices = option.type_descriptor.annotation, option.type_descriptor.choices
    wanted = "a whole number" if fault["type"].startswith("int") else "a number"
    if choices:
        wanted = f"one of {', '.join(map(str, choices))}"
        near = nearest(str(fault["input"]), map(str, choices))
        wanted += "" if near is None else f": did you mean {near}?"
    elif not fault["type"].startswith(("int", "float")):
        wanted = f"a {getattr(kind, '__name__', kind)}"
    return f"{option.opts[0]} {shown(fault['input'])} is not {wanted}"


def _find_written(name: str, words: Sequence[str], names: Collection[str]) -> str:
    """Return the word that has an option in it: of ``-verbose`` it is ``-v`` that there is not."""
    if name.startswith("--"):
        return name
    written = [word.partition("=")[0] for word in words]
    has_it = (word for word in written if word[:1] == "-" != word[1:2] and name[1:] in word and word not in names)
    return next(has_it, name)


def _narrow_command(command: Any, ctx: Any) -> Any:
    """Return a command as typer's help has room for: an option's names and what its value is are one name."""
    short = () if ctx.meta.get(_HELP_ALL) else getattr(command, "short", ())
    shown = copy.copy(command)
    shown.params = [
        _narrow_option(each, ctx, is_short=bool(short)) if isinstance(each, TyperOption) else each
        for each in _choose_params(command, ctx, short)
    ]
    shown.add_help_option = False  # it is among them
    shown.epilog = _EXAMPLE.sub("\n", command.epilog or "")
    if getattr(command, "short", ()) and not short:
        shown.epilog += f"\n\n{_DEFAULTS_NOTE}"
    return shown


def _choose_params(command: Any, ctx: Any, short: Sequence[str]) -> list[Any]:
    """Return the parameters that the help lists: all of them, or those of its short form, in its order."""
    params = command.get_params(ctx)
    if not short:
        return [each for each in params if each.opts != ["--help-all"]]
    options = {each.opts[0]: each for each in params if isinstance(each, TyperOption)}
    arguments = [each for each in params if not isinstance(each, TyperOption)]
    (asks_help,) = (each for each in params if "--help" in each.opts)
    return [*arguments, *(options[name] for name in short), options["--help-all"], asks_help]


def _narrow_option(option: TyperOption, ctx: Any, *, is_short: bool) -> TyperOption:
    shown = copy.copy(option)
    if is_short:
        # One panel, and of several spellings a short and a long one.
        dashes = {name.startswith("--"): name for name in reversed(option.opts)}
        shown.opts, shown.rich_help_panel = [dashes[key] for key in sorted(dashes)], None
        shown.help = _FURTHER.sub(r".\1", option.help or "")
    names = sorted((*shown.opts, *option.secondary_opts), key=lambda name: name.startswith("--"))
    value = None if option.is_flag else option.display_type_rich(ctx)
    words = [*(f"{name}, " for name in names[:-1]), names[-1] if value == OPTIONAL_VALUE else f"{names[-1]} "]
    # A choice of many is broken between them.
    words += [] if value is None else [value] if len(value) <= _LONGEST_NAMES else re.findall(r"[^|]+\|?", value)
    lines = [""]
    for word in words:
        if lines[-1] and len((lines[-1] + word).rstrip()) > _LONGEST_NAMES:
            lines.append("")
        lines[-1] += word
    if option.is_flag and option.secondary_opts and option.show_default and option.default is not None:
        # Typer's own would be made of the names.
        chosen = (option.opts if option.default else option.secondary_opts)[0].lstrip("-")
        shown.help = f"{shown.help or ''} [dim]\\[default: {chosen}][/dim]"
        shown.show_default = False
    shown.opts, shown.secondary_opts, shown.metavar = ["\n".join(map(str.rstrip, lines))], [], ""
    return shown
