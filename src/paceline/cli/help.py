"""``paceline help``: the help of any command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.cli.commands import command_name, show_help
from paceline.core.errors import InputError

EPILOG = """[bold]Examples[/bold]

paceline help serve  [dim]# the same as paceline serve --help[/dim]

paceline help serve --all  [dim]# every option[/dim]

paceline help models show
"""
"""Examples below the command's help."""


def help_command(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", help="The command; all without.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all options of the command.")] = False,
) -> None:
    """Show the help of a command."""
    of: Any = context.find_root()
    for word in words or ():
        if not hasattr(of.command, "resolve_command"):
            raise InputError(f"{command_name(of)} has no commands of its own: leave out {word!r}")
        name, command, _ = of.command.resolve_command(of, [word])
        of = type(of)(command, info_name=name, parent=of)
    show_help(of, everything=everything)
