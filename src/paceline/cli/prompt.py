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
    """Return the prompt that was given; the embedded target has one of its own if there is none."""
    given = [name for name, value in (("-p", prompt), ("-f", file), ("--sample", sample)) if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} both give a prompt: leave out one of them")
    if prompt is not None:
        text = read_typed_text(prompt, "-p", escape=escape)
    elif file is not None:
        text = read_text_file(file, "-f")
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


def read_text_file(file: Path, option: str) -> str:
    """Return the text of a file that an option names; ``-`` is standard input."""
    try:
        if str(file) != "-":
            data = file.read_bytes()
        elif sys.stdin is not None:
            data = sys.stdin.buffer.read()
        else:
            raise InputError(f"standard input is closed: give a file with {option}, or the text itself")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read the file {file} ({option}): {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"the file {file} ({option}) is not UTF-8: byte {error.start} is {data[error.start]:#04x}; save it as UTF-8"
        ) from None
    # As llama.cpp does: the newline that ends a text file is not part of the text.
    return text.removesuffix("\n").removesuffix("\r")


_ESCAPE = re.compile(rb"""\\(?:([nrt'"\\])|x([0-9a-fA-F]{2}))""")
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def read_typed_text(text: str, option: str, *, escape: bool) -> str:
    r"""Return a text of the command line, with ``\n``, ``\t``, ``\xHH`` and the like replaced if that is asked.

    Unknown escapes stay as they are. As in llama.cpp, ``\xHH`` is a byte and not a character: ``\xE2\x82\xAC`` is the
    euro sign. llama.cpp takes any bytes; the tokenizers here take text, so what is no UTF-8 is refused.
    """
    try:
        # Bytes of the command line that were no text to Python are in it as lone surrogates.
        data = text.encode("utf-8", "surrogateescape")
        return (_ESCAPE.sub(_unescape, data) if escape else data).decode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{option} has half a surrogate pair, {ord(text[error.start]):#06x}, at character {error.start}: "
            "give whole characters"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{option} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}; "
            + r"give all bytes of a character, such as \xE2\x82\xAC for the euro sign, or the character itself"
        ) from None


def _unescape(found: re.Match[bytes]) -> bytes:
    return _ESCAPED[found[1]] if found[1] else bytes.fromhex(found[2].decode("ascii"))
