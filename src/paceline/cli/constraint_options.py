"""Options of commands whose answers may be kept to a schema or a grammar, by llama.cpp's names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from paceline.cli.display import error_console
from paceline.cli.prompt import read_text_file
from paceline.constraints import Gbnf, JsonSchema, Source
from paceline.constraints.schema_preparation import list_places
from paceline.core.errors import InputError

_PANEL: Final = "What answers keep to"

JsonSchemaText: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "-j",
        "--json-schema",
        help="Answer in JSON that a schema describes; {} is any JSON.",
        metavar="SCHEMA",
        rich_help_panel=_PANEL,
    ),
]
JsonSchemaFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("-jf", "--json-schema-file", help="A file with the schema.", metavar="FILE", rich_help_panel=_PANEL),
]
Strict: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--strict/--no-strict",
        help="Refuse a schema with what nothing can keep answers to, or warn of that and keep to the rest.",
        rich_help_panel=_PANEL,
    ),
]
GrammarText: TypeAlias = Annotated[
    str | None,
    typer.Option("--grammar", help="Answer in texts of a grammar, in GBNF.", metavar="GRAMMAR", rich_help_panel=_PANEL),
]
GrammarFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--grammar-file", help="A file with the grammar.", metavar="FILE", rich_help_panel=_PANEL),
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
        raise InputError(f"{' and '.join(given)} both say what answers keep to: leave one of them out")
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
