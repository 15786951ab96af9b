"""``paceline help``: the help of any command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.cli import config
from paceline.cli.commands import command_name, show_help
from paceline.cli.display import output_console
from paceline.core.errors import InputError

EPILOG = """[bold]Examples[/bold]

paceline help serve  [dim]# the same as paceline serve --help[/dim]

paceline help serve --all  [dim]# every option[/dim]

paceline help models show

paceline help config  [dim]# which configuration file is in use, and what it sets[/dim]
"""
"""Examples below the command's help."""


def help_command(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", help="The command; all without.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all options of the command.")] = False,
) -> None:
    """Show the help of a command, or which configuration file is in use."""
    if words == ["config"]:
        show_configuration()
        return
    of: Any = context.find_root()
    for word in words or ():
        if not hasattr(of.command, "resolve_command"):
            raise InputError(f"{command_name(of)} has no commands of its own: leave out {word!r}")
        name, command, _ = of.command.resolve_command(of, [word])
        of = type(of)(command, info_name=name, parent=of)
    show_help(of, everything=everything)


def show_configuration() -> None:
    """Say where options may be set besides the command line, and what a configuration file sets."""
    console = output_console()
    file = config.find_file(None)
    console.print("Options are set by the command line, the environment (PACELINE_...), and a configuration file.")
    console.print("The first of these that sets an option counts.\n")
    if file is None:
        console.print("No configuration file is in use. One of these would be, the first that exists:")
        for path in config.candidates():
            console.print(f"  {path.absolute()}", markup=False)
        console.print(f"Another one is named by {config.FILE_VARIABLE} or --config.")
        return
    document = config.read_file(file)
    console.print(f"In use: {file.absolute()}", markup=False)
    profiles = document.pop(config.PROFILES, {})
    for name, value in document.items():
        keys = ", ".join(value) if isinstance(value, dict) else value
        console.print(f"  [{name}] sets {keys}" if isinstance(value, dict) else f"  {name} = {keys!r}", markup=False)
    if profiles:
        console.print(f"Profiles for --profile or {config.PROFILE_VARIABLE}: {', '.join(profiles)}", markup=False)
