"""The ``paceline`` command: its subcommands, and how errors leave it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import warnings
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import typer
import typer.main

from paceline import __version__
from paceline.cli import exits
from paceline.cli.commands import Command, Group
from paceline.cli.display import prepare_streams
from paceline.core.errors import InputError, ModelWarning, PacelineError
from paceline.terminal_text import printable_line

EPILOG = """[bold]Examples[/bold]

paceline demo  [dim]# with and without speculation, side by side[/dim]

paceline run -m big.gguf -md small.gguf -p "Once upon" --compare

paceline chat -hf ggml-org/gemma-3-1b-it-GGUF  [dim]# fetched once, from the Hugging Face hub[/dim]

[dim]paceline help COMMAND shows more examples and the main options, with --all every option.[/dim]
"""
"""Examples below the command's help."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a command is made.

    Attributes:
        module: its module, in this package.
        function: its function there, or a group of commands.
        kind: its class there, where that is another one.
        context_settings: how its words are read.
        short: first names of the options that its ``--help`` lists, in this order; those of all of them without.
    """

    module: str
    function: str
    kind: str | None = None
    context_settings: Mapping[str, bool] = field(default_factory=dict)
    short: str = ""


_COMMANDS: Final = {
    # In the order in which one comes to need them.
    "demo": _Source("demo", "demo"),
    "run": _Source(
        "run",
        "run",
        # It refuses further words itself, and says where a prompt goes.
        context_settings={"allow_extra_args": True},
        short="-m -md -hf -p -f -n --chat -sys -j --temp --seed -c -t -ngl --no-speculation --compare --json",
    ),
    "chat": _Source(
        "chat",
        "chat",
        short="-m -md -hf -sys -p -n --reasoning --temp --resume -c -t -ngl --no-speculation --markdown --json",
    ),
    "serve": _Source(
        "serve",
        "serve",
        "ServeCommand",
        # Flags of llama-server that are no options of ours come as words, and are told apart by the command.
        {"allow_extra_args": True, "ignore_unknown_options": True},
        short="-m -md -hf --host --port -a --api-key -c -np -n --temp -t -ngl --memory --models-dir --no-speculation",
    ),
    "rpc-worker": _Source("rpc_worker", "rpc_worker"),
    "models": _Source("models", "app"),
    "engine": _Source("engine", "engine"),
    "doctor": _Source("doctor", "doctor", short="--text --temp --seed --budget-s -c -t -ngl --json --html"),
    "compare": _Source(
        "compare", "compare", short="--text --answers --as-is --window -n --temp --seed -c -t -ngl --json --html"
    ),
    "distil": _Source(
        "distil",
        "distil_command",
        short="--prompts --answers --time --epochs --lora --type --temp --seed --force -c -t -ngl --json",
    ),
    "profile": _Source(
        "profile", "profile_command", short="-m -md -hf --widths --budget-s --force -t -ngl --json --html"
    ),
    "bench": _Source(
        "bench",
        "bench",
        short="-m -md -hf --quick --workloads --variants --against --temp -n --repeats --time-limit -c -t -ngl --json "
        "--html",
    ),
    "plan": _Source(
        "plan",
        "plan",
        short="-m -md -hf --rate --users --prompt-tokens --prefixes --prefix-tokens -n --replicas --target-ttft "
        "--target-tpot --text --temp -np -c -t -ngl --json --html",
    ),
    "inflate": _Source("inflate", "inflate_command"),
    "prune": _Source("prune", "prune"),
    "convert": _Source("convert", "convert"),
    "help": _Source("help", "help_command"),
}


class _Commands(UserDict[str, Any]):
    """The subcommands by name, each made when it is asked for: to import them all takes a second or two."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(_COMMANDS))

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            self.data[name] = _make_command(name, _COMMANDS[name])
        return self.data[name]


class _LazyGroup(Group):
    """Knows the names of its commands from the start, and the commands when they are asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


def _make_command(name: str, source: _Source) -> Any:
    """Return a subcommand whose help is its docstring, without the docstring's line breaks."""
    module = importlib.import_module(f"paceline.cli.{source.module}")
    function = getattr(module, source.function)
    if isinstance(function, typer.Typer):
        group = typer.main.get_command(function)
        group.name = name
        return group
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    alone.command(
        name,
        cls=Command if source.kind is None else getattr(module, source.kind),
        epilog=module.EPILOG,
        help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
        context_settings=dict(source.context_settings),
    )(function)
    command: Any = typer.main.get_command(alone)
    command.short = tuple(source.short.split())
    return command


app = typer.Typer(
    name="paceline",
    cls=_LazyGroup,
    help="Run language models faster with speculative decoding: the same text, sooner.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run language models faster with speculative decoding: the same text, sooner."""


def main() -> None:
    """Run the command line; errors become one line on stderr and an exit status."""
    try:
        prepare_streams()
        # A server writes nothing there.
        if sys.stdout is None and sys.argv[1:2] != ["serve"]:
            raise InputError("standard output is closed: the answer cannot be written")
        try:
            with _warnings_in_one_line():
                app()
        except SystemExit:
            # The interpreter flushes too, but has nobody to tell that it failed.
            if sys.stdout is not None:
                sys.stdout.flush()
            raise
    except InputError as error:
        _fail(error, exits.BAD_INPUT)
    except PacelineError as error:
        _fail(error, exits.FAILURE)
    except KeyboardInterrupt:
        sys.exit(exits.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output is gone (``paceline run | head``), and what is left to flush has nowhere to go.
        sys.stdout = None
        sys.exit(exits.FAILURE)
    except OSError as error:
        sys.stdout = None
        _fail(error, exits.FAILURE)


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print what models are warned of as errors are printed, each once, whatever filters are set."""
    shown = set()
    otherwise = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if not issubclass(category, ModelWarning):
            otherwise(message, category, filename, lineno, file, line)
        elif str(message) not in shown:
            shown.add(str(message))
            print(f"paceline: warning: {_in_flags(message)}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", ModelWarning)
        warnings.showwarning = show
        yield


def _fail(error: Exception, status: int) -> None:
    # Where standard error takes nothing, the status says what there is left to say.
    print(f"paceline: {_in_flags(error)}", file=sys.stderr)
    sys.exit(status)


def _in_flags(said: Exception | str) -> str:
    # The table of all options, which few commands that end well have to read.
    from paceline.cli.options import in_flags

    return printable_line(in_flags(str(said)))


if __name__ == "__main__":
    main()
