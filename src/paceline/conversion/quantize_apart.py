"""Quantising in a process of its own, which can be watched, and ended at any moment with nothing left behind.

llama.cpp quantises in one call, which takes minutes for a large model and hears of no interrupt.

::

    this process                                the other one
    its start         ── source, type ──>       dry run
    enough room?      <── bytes it will have ──
                      ── "go" ──>               quantises into a hidden file
    looks at the file's size
    renames the file  <── exit status 0 ──

The other one ends, and takes its file away, as soon as nobody holds the pipe to it any more: a process that was killed
leaves nothing at work.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from paceline.atomic_output import atomic_file, check_parent
from paceline.core import errors
from paceline.core.errors import InputError, ModelFileError
from paceline.models.gguf_model import gguf_bytes

_LOOK_S: Final = 0.1
"""Seconds between two looks at the size of the file."""

_STDIN: Final = 0
"""File descriptor of standard input."""
_MARK: Final = b"paceline "
"""Beginning of the lines that are for this process."""

_PROGRAM: Final = """
import sys
sys.path[:] = sys.argv[4:]
from paceline.conversion.quantize_apart import quantize_as_told
quantize_as_told(*sys.argv[1:4])
"""


def quantize_apart(
    source: Path,
    destination: Path,
    file_type: str,
    *,
    begin: Callable[[int], None],
    report: Callable[[int, int], None],
) -> None:
    """Write ``source`` again with other weights, by another process; ``destination`` appears when it is complete.

    All parts of a split model become one file. ``begin`` is called, before anything is written, with the bytes of the
    file. ``report`` is called some times a second with the bytes that are done and their number in all, 0 of 0 until
    that is known. What either raises ends it.

    Raises ``InputError`` for an unknown type, one that takes an importance matrix, and where the destination cannot be
    written.
    """
    check_parent(destination)
    with atomic_file(destination) as partial, tempfile.TemporaryFile() as trouble:
        # Isolated (-I), as a file in the current folder may have the name of a module; and in a session of its own, as
        # Ctrl-C in the terminal would reach both processes.
        process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-c",
                _PROGRAM,
                str(source.absolute()),
                str(partial.absolute()),
                file_type,
                *sys.path,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=trouble,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            start_new_session=os.name == "posix",
        )
        try:
            num_bytes = _attend(process, source, partial, begin, report)
            status = process.wait()
            if status != 0:
                trouble.seek(0)
                raise _describe_end(source, status, trouble.read().decode("utf-8", errors="replace"))
            with partial.open("r+b") as file:
                os.fsync(file.fileno())
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
    report(num_bytes, num_bytes)


def _attend(
    process: subprocess.Popen[bytes],
    source: Path,
    partial: Path,
    begin: Callable[[int], None],
    report: Callable[[int, int], None],
) -> int:
    """Follow the other process to its end, and return how many bytes it was to write."""
    assert process.stdin is not None
    assert process.stdout is not None
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
    num_bytes = 0
    while True:
        try:
            line = lines.get(timeout=_LOOK_S)
        except queue.Empty:
            report(min(_size(partial), num_bytes), num_bytes)
            continue
        if not line:
            return num_bytes
        if not line.startswith(_MARK):
            continue  # printed by a library
        said = json.loads(line.removeprefix(_MARK))
        if "error" in said:
            raise getattr(errors, said["error"], ModelFileError)(said["message"])
        num_bytes = said["bytes"]
        begin(num_bytes)
        with contextlib.suppress(BrokenPipeError):  # the exit status says more
            process.stdin.write(b"go\n")
            process.stdin.flush()


def _describe_end(source: Path, status: int, trouble: str) -> ModelFileError:
    why = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    if status == -getattr(signal, "SIGKILL", 0):
        why += ", as the system does where memory is short"
    *_, last = trouble.strip().splitlines() or [""]
    said = f": {last}" if last else ""
    return ModelFileError(f"{source} could not be quantised: the process that did it ended {why}{said}")


def _read_lines(pipe: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Hand on the output of a process line by line, and an empty line at its end."""
    with contextlib.suppress(OSError, ValueError):
        for line in pipe:
            lines.put(line)
    lines.put(b"")


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


# --- the other process ------------------------------------------------------------------------------------------------


def quantize_as_told(source: str, partial: str, file_type: str) -> None:
    """Be the other process: say how large the file will be, wait for a word, write it."""
    from paceline.conversion.quantize import quantize_into, quantized_bytes

    written = Path(partial)
    try:
        # Where llama.cpp does not tell the size, the file is no larger than its source.
        num_bytes = quantized_bytes(Path(source), file_type) or gguf_bytes(Path(source))
        _say({"bytes": num_bytes})
        # Not sys.stdin, whose lock no thread may hold when the interpreter ends.
        if not os.read(_STDIN, 64):
            return
        threading.Thread(target=_end_with_parent, args=(written,), daemon=True).start()
        quantize_into(written, Path(source), file_type)
    except InputError as error:
        _say({"error": type(error).__name__, "message": str(error)})


def _say(what: dict[str, object]) -> None:
    print(_MARK.decode() + json.dumps(what), flush=True)


def _end_with_parent(written: Path) -> None:
    """Wait until the parent lets go of the pipe, and remove the file."""
    while os.read(_STDIN, 64):
        pass
    with contextlib.suppress(OSError):
        written.unlink()
    os._exit(1)
