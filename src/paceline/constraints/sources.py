"""What an answer is to keep to, as users say it: a JSON schema, a grammar, a regular expression, a choice of texts.

A source is data and says nothing of a vocabulary. :class:`~paceline.constraints.compiler.ConstraintCompiler` makes a
constraint of it. Equal sources have equal digests, by which compiled ones are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias, get_args

from paceline.constraints.schema_limits import MAX_BYTES, check_size
from paceline.constraints.schema_preparation import prepare_schema
from paceline.core.errors import ConstraintError

_MAX_GIVEN = 4 * MAX_BYTES
"""Characters of a schema's own text, which may have space that says nothing."""

Whitespace: TypeAlias = Literal["any", "short", "single", "none"]
"""Where an answer in JSON may have space between its parts.

- ``any``: as JSON allows, as much as the model likes.
- ``short``: none, a space, or a new line and up to 20 spaces and tabs, as in llama.cpp's grammars.
- ``single``: one space after each ``,`` and ``:``, as ``json.dumps`` writes, and nowhere else.
- ``none``: nowhere.
"""


class _Source:
    """What all sources share: a digest of what they say."""

    name: ClassVar[str]
    text: str

    @cached_property
    def digest(self) -> str:
        """A name for what the source says, equal for equal sources."""
        parts = (type(self).__name__, *self._settings(), self.text)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())

    def _settings(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class JsonSchema(_Source):
    """JSON that a schema describes.

    Args:
        schema: the schema: a mapping, ``True`` for any JSON, or its own JSON text. The order of ``properties`` is the
            order of the answer.

    Attributes:
        text: the schema as JSON.
        whitespace: see :data:`Whitespace`.
        strict: refuse a schema that says what nothing can keep an answer to. Else the answer keeps to all but that, and
            has to be checked.

    Raises:
        ConstraintError: the schema is not JSON, or ``whitespace`` is none of those.
    """

    name: ClassVar[str] = "the JSON schema"

    schema: InitVar[Mapping[str, object] | bool | str]
    whitespace: Whitespace = "short"
    strict: bool = True
    text: str = field(init=False)

    def __post_init__(self, schema: Mapping[str, object] | bool | str) -> None:
        _check_whitespace(self.whitespace)
        object.__setattr__(self, "text", _json_text(schema, self.name))

    @cached_property
    def unenforced(self) -> tuple[str, ...]:
        """What of the schema nothing keeps the answer to, as JSON pointers; none of a strict one, which is refused."""
        if self.strict:
            return ()
        return prepare_schema(json.loads(self.text), strict=False).unenforced

    def _settings(self) -> tuple[str, ...]:
        return (self.whitespace, str(self.strict))


@dataclass(frozen=True)
class JsonObject(_Source):
    """Any JSON object.

    Attributes:
        whitespace: see :data:`Whitespace`.
    """

    name: ClassVar[str] = "the JSON object"

    whitespace: Whitespace = "short"
    text: str = field(init=False, default='{"type":"object"}')

    def __post_init__(self) -> None:
        _check_whitespace(self.whitespace)

    def _settings(self) -> tuple[str, ...]:
        return (self.whitespace,)


@dataclass(frozen=True)
class _Written(_Source):
    """A source that is a text by itself."""

    text: str

    def __post_init__(self) -> None:
        _check_text(self.text, self.name)


@dataclass(frozen=True)
class Gbnf(_Written):
    """Texts of a grammar in llama.cpp's notation, GBNF. Its first rule is the one named ``root``."""

    name: ClassVar[str] = "the grammar"


@dataclass(frozen=True)
class Lark(_Written):
    """Texts of a grammar in llguidance's variant of Lark's notation. Its first rule is the one named ``start``."""

    name: ClassVar[str] = "the Lark grammar"


@dataclass(frozen=True)
class Calls(Lark):
    """Calls of tools, as a grammar that was made of their schemas: longer than one by hand may be.

    Attributes:
        meanings: beginnings of the names of rules, each with what the rule says, for messages.
    """

    name: ClassVar[str] = "the grammar of the tools' calls"

    meanings: tuple[tuple[str, str], ...] = ()

    def meaning(self, line: int) -> str:
        """Return what the rule in a line says, counted from 1; empty where that is not known."""
        rule = self.text.split("\n")[line - 1].partition(":")[0]
        known = (said for name, said in self.meanings if rule == name or rule.startswith(f"{name}_"))
        return next(known, "")


@dataclass(frozen=True)
class Regex(_Written):
    """Texts that a regular expression matches from their beginning to their end, in the syntax of Rust's ``regex``."""

    name: ClassVar[str] = "the regular expression"


@dataclass(frozen=True)
class Choice(_Source):
    """One of several texts.

    Args:
        texts: the texts, one at least.

    Attributes:
        text: the texts as a JSON list.

    Raises:
        ConstraintError: there is no text.
    """

    name: ClassVar[str] = "the choice of texts"

    texts: InitVar[Iterable[str]]
    text: str = field(init=False)

    def __post_init__(self, texts: Iterable[str]) -> None:
        listed = list(dict.fromkeys(texts))
        check_size(listed, self.name)
        if not listed:
            raise ConstraintError(f"{self.name} has none: give one at least")
        object.__setattr__(self, "text", json.dumps(listed, ensure_ascii=False))
        _check_text(self.text, self.name)


Source: TypeAlias = JsonSchema | JsonObject | Gbnf | Lark | Regex | Choice
"""Whatever a constraint can be made of."""


def _json_text(schema: Mapping[str, object] | bool | str, name: str) -> str:
    """Return a schema as JSON on one line, which NaN and infinity are no part of."""
    if isinstance(schema, str) and len(schema) > _MAX_GIVEN:
        raise ConstraintError(
            f"{name} has {len(schema):,} characters as it was given, and the most is {_MAX_GIVEN:,}: make it smaller"
        )
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        check_size(value, name)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ConstraintError(f"{name} is nested too deeply: name its parts under $defs and refer to them") from None
    except json.JSONDecodeError as error:
        raise ConstraintError(f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except (ValueError, TypeError) as error:
        raise ConstraintError(f"{name} cannot be written as JSON: {error}") from None
    _check_text(text, name)
    return text


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConstraintError(f"{name} has half of a surrogate pair at character {error.start}: leave it out") from None


def _check_whitespace(whitespace: str) -> None:
    if whitespace not in get_args(Whitespace):
        raise ConstraintError(f"whitespace is {whitespace!r}: say one of {', '.join(get_args(Whitespace))}")
