"""The ``paceline`` command: its subcommands, and how errors leave it."""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from paceline import __version__
from paceline.cli import (
    bench,
    chat,
    compare,
    convert,
    demo,
    distil,
    doctor,
    exits,
    inflate,
    models,
    profile,
    prune,
    rpc_worker,
    run,
    serve,
)
from paceline.cli.commands import Command, Group
from paceline.cli.display import prepare_streams
from paceline.cli.options import in_flags
from paceline.core.errors import InputError, ModelWarning, PacelineError
from paceline.terminal_text import printable_line

EPILOG = """[bold]Examples[/bold]

paceline demo  [dim]# with and without speculation, side by side[/dim]

paceline run -m big.gguf -md small.gguf -p "Once upon" --compare

paceline chat -hf ggml-org/gemma-3-1b-it-GGUF  [dim]# fetched once, from the Hugging Face hub[/dim]

[dim]paceline COMMAND --help has more of them, and every option.[/dim]
"""
"""Examples below the command's help."""

app = typer.Typer(
    name="paceline",
    cls=Group,
    help="Speculative decoding one switches on and forgets: the same text as without speculation, faster.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add_command(
    name: str,
    function: Callable[..., None],
    epilog: str,
    *,
    kind: type[Command] = Command,
    **context_settings: bool,
) -> None:
    """Add a subcommand whose help is its docstring, without the docstring's line breaks."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(name, cls=kind, epilog=epilog, help=text, context_settings=context_settings)(function)


# In the order in which one comes to need them.
_add_command("demo", demo.demo, demo.EPILOG)
_add_command("run", run.run, run.EPILOG, allow_extra_args=True)  # it refuses them itself, and says where a prompt goes
_add_command("chat", chat.chat, chat.EPILOG)
# Flags of llama-server that are no options of ours come as words, and are told apart by the command.
_add_command(
    "serve", serve.serve, serve.EPILOG, kind=serve.ServeCommand, allow_extra_args=True, ignore_unknown_options=True
)
_add_command("rpc-worker", rpc_worker.rpc_worker, rpc_worker.EPILOG)
app.add_typer(models.app, name="models")
_add_command("doctor", doctor.doctor, doctor.EPILOG)
_add_command("compare", compare.compare, compare.EPILOG)
_add_command("distil", distil.distil_command, distil.EPILOG)
_add_command("profile", profile.profile_command, profile.EPILOG)
_add_command("bench", bench.bench, bench.EPILOG)
_add_command("inflate", inflate.inflate_command, inflate.EPILOG)
_add_command("prune", prune.prune, prune.EPILOG)
_add_command("convert", convert.convert, convert.EPILOG)


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
    """Speculative decoding one switches on and forgets: the same text as without speculation, faster."""


def main() -> None:
    """Run the command line; errors become one line on stderr and an exit status."""
    try:
        prepare_streams()
        # A server writes nothing there.
        if sys.stdout is None and sys.argv[1:2] != ["serve"]:
            raise InputError("standard output is closed: there is nowhere to write the answer to")
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
            print(f"paceline: warning: {printable_line(in_flags(str(message)))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", ModelWarning)
        warnings.showwarning = show
        yield


def _fail(error: Exception, status: int) -> None:
    # Where standard error takes nothing, the status says what there is left to say.
    print(f"paceline: {printable_line(in_flags(str(error)))}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
