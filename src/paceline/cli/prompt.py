"""What a request says: the prompt, what the system says, and what answers keep to, as typed or from files."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer

from paceline.chat.params import ChatParams
from paceline.cli.display import error_console
from paceline.constraints import Gbnf, JsonSchema, Source
from paceline.constraints.schema_preparation import list_places
from paceline.core.errors import InputError
from paceline.core.fields import fields_of
from paceline.environment import ModelChoice
from paceline.models.embedded import heldout

DEMO_SAMPLE = "code:4"
"""What the embedded pair continues if nothing else is asked for."""

text_option = functools.partial(
    typer.Option,
    "--text",
    help="Text of the kind that you generate, cut into prompts; or prompts, one a line (.jsonl with prompt or text). "
    "[dim]\\[code, prose, JSON and logs of paceline's own][/dim]",
    metavar="FILE",
)
"""Makes ``--text``, which is the same in all commands that measure by prompts."""


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


_constraint = functools.partial(typer.Option, rich_help_panel="Structured output")

JsonSchemaText: TypeAlias = Annotated[
    str | None,
    _constraint(
        "-j",
        "--json-schema",
        help="Constrain the answer to JSON that matches a schema; {} is any JSON.",
        metavar="SCHEMA",
    ),
]
JsonSchemaFile: TypeAlias = Annotated[
    Path | None, _constraint("-jf", "--json-schema-file", help="File with the JSON schema.", metavar="FILE")
]
Strict: TypeAlias = Annotated[
    bool,
    _constraint(
        "--strict/--no-strict",
        help="Reject schemas with keywords that cannot be enforced; otherwise warn and enforce the rest.",
    ),
]
GrammarText: TypeAlias = Annotated[
    str | None, _constraint("--grammar", help="Constrain the answer to a grammar, in GBNF.", metavar="GRAMMAR")
]
GrammarFile: TypeAlias = Annotated[
    Path | None, _constraint("--grammar-file", help="File with the grammar.", metavar="FILE")
]


def read_source(
    json_schema: str | None,
    json_schema_file: Path | None,
    grammar: str | None,
    grammar_file: Path | None,
    *,
    strict: bool = True,
) -> Source | None:
    """Return what answers are to keep to; ``None`` for nothing.

    Unless ``strict``, a warning says what of a schema nothing can keep answers to.
    """
    given = {
        flag: value
        for flag, value in (
            ("-j", json_schema),
            ("-jf", json_schema_file),
            ("--grammar", grammar),
            ("--grammar-file", grammar_file),
        )
        if value is not None
    }
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} both constrain the answer: leave out one of them")
    for flag, value in given.items():
        text = read_text_file(value, flag) if isinstance(value, Path) else value
        if flag not in ("-j", "-jf"):
            return Gbnf(text)
        schema = JsonSchema(text, strict=strict)
        if schema.unenforced:
            what = f"nothing keeps answers to {list_places(schema.unenforced)} of the schema: check them"
            error_console().print(f"warning: {what}", style="yellow", markup=False)
        return schema
    return None


CHAT_PANEL: Final = "Chat"
"""Heading of the options of conversations in ``--help``."""

_chat = functools.partial(typer.Option, rich_help_panel=CHAT_PANEL)

SystemPrompt: TypeAlias = Annotated[str | None, _chat("-sys", "--system-prompt", help="System prompt.", metavar="TEXT")]
SystemPromptFile: TypeAlias = Annotated[
    Path | None, _chat("-sysf", "--system-prompt-file", help="File with the system prompt.", metavar="FILE")
]

OF_CHATS: Final = ("system", "system_file", *(field.name for field in fields_of(ChatParams)))
"""Parameters that mean nothing where a prompt is taken as it is."""


def system_prompt(text: str | None, file: Path | None, *, escape: bool = True) -> str:
    if text is not None and file is not None:
        raise InputError("-sys and -sysf both give the system prompt: leave out one of them")
    if file is not None and str(file) == "-":
        raise InputError("-sysf - is standard input, which is for messages: give a file, or the text itself with -sys")
    if file is not None:
        return read_text_file(file, "-sysf")
    return "" if text is None else read_typed_text(text, "-sys", escape=escape)


def check_names_chat_model(models: ModelChoice, replaced_by: str | Path | None) -> None:
    """Refuse to chat where no model is named, unless a template makes one of the built-in one."""
    if models.target is None and replaced_by is None:
        raise InputError(
            "no model is named (-m FILE), and the small built-in one cannot chat: name one with -m, or have one "
            "fetched with -hf, such as -hf ggml-org/gemma-3-1b-it-GGUF"
        )


def check_can_chat(path: Path, replaced_by: str | Path | None) -> None:
    """Refuse a model without a chat template before it is loaded; ``replaced_by`` is a text, or the path of a file."""
    from paceline.chat.template_sources import check_is_chat_model  # jinja2 takes a while to import

    if isinstance(replaced_by, Path) and not replaced_by.is_file():
        raise InputError(f"there is no file {replaced_by} (--chat-template-file): give the path of a chat template")
    check_is_chat_model(path, replaced_by)


def start_conversation(system: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []
