"""The prompt: as it was typed, from a file, or from text that the embedded pair has not seen."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from paceline.core.errors import InputError
from paceline.models.embedded import heldout

DEMO_SAMPLE = "code:4"
"""What the embedded pair continues if nothing else is asked for."""


def read_prompt(prompt: str | None, file: Path | None, sample: str | None, escape: bool, *, embedded: bool) -> str:
    """Return the prompt that was given.

    Args:
        prompt: it.
        file: with it; ``-`` is standard input.
        sample: ``KIND`` or ``KIND:N`` of the held-out texts.
        escape: whether backslashes in ``prompt`` stand for other characters.
        embedded: whether the target is the embedded one, which has a text of its own if none is given.

    Raises:
        InputError: there is none, more than one, or it cannot be read.
    """
    given = [name for name, value in (("-p", prompt), ("-f", file), ("--sample", sample)) if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} both give a prompt: leave out one of them")
    if prompt is not None:
        text = unescape(prompt) if escape else prompt
    elif file is not None:
        text = _read_file(file)
    elif sample is not None or embedded:
        return _read_sample(sample or DEMO_SAMPLE)
    else:
        raise InputError("there is no prompt: give one with -p, a file with -f, or --sample code")
    if not text:
        raise InputError("the prompt is empty: give at least one character with -p or -f")
    return text


def _read_sample(name: str) -> str:
    """Return the first half of a held-out text, cut at the end of a line."""
    kind, _, number = name.partition(":")
    samples = heldout(kind)
    if not (number or "1").isdecimal() or not 1 <= int(number or 1) <= len(samples):
        raise InputError(f"there is no sample {name}: {kind} has {kind}:1 to {kind}:{len(samples)}")
    text = samples[int(number or 1) - 1]
    half = text[: len(text) // 2]
    return half[: half.rfind("\n") + 1] or half


def _read_file(file: Path) -> str:
    try:
        if str(file) != "-":
            data = file.read_bytes()
        elif sys.stdin is not None:
            data = sys.stdin.buffer.read()
        else:
            raise InputError("standard input is closed: give a file with -f, or the prompt with -p")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read the prompt file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"the prompt file {file} is not UTF-8: byte {error.start} is {data[error.start]:#04x}"
        ) from None
    # As llama.cpp does: the newline that ends a text file is not part of the prompt.
    return text.removesuffix("\n").removesuffix("\r")


_ESCAPE = re.compile(r"""\\(?:([nrt'"\\])|x([0-9a-fA-F]{2}))""")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def unescape(text: str) -> str:
    r"""Replace ``\n``, ``\t``, ``\xHH`` and the like; unknown escapes stay as they are."""
    return _ESCAPE.sub(lambda m: _ESCAPED[m[1]] if m[1] else chr(int(m[2], 16)), text)
