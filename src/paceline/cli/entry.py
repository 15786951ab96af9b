"""Where the program starts. Nothing here takes time to import, so that Ctrl-C is quiet from the first moment."""

from __future__ import annotations

import signal
import sys

from paceline.cli import exits


def main() -> None:
    """Run the command line, as the ``paceline`` script and ``python -m paceline`` do.

    Before a command begins and after it ended, Ctrl-C ends the process at once and without a word, as it ends one that
    knows nothing of interrupts: a shell reports status 130. Where interrupts were ignored from the start, they still
    are.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        # Half a second of imports would end in a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from paceline.cli.main import main as run_command

    try:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run_command()
    except KeyboardInterrupt:
        # While the command reports how it ended.
        sys.exit(exits.INTERRUPTED)
    finally:
        if heeded:
            # At exit nobody catches what Python would raise.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
