"""The options: what every way of setting a field has to know, told once, beside the field itself.

An option is a dataclass field made by :func:`setting`. All such fields together are "the table"; it is written down
nowhere else, and each dataclass with such fields is a part of it. :func:`take_values` checks its values, and
:func:`fields_of` lists its fields to whatever offers them: the command line, the environment, a request in JSON.
Nothing here knows how any of these work.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar

from paceline.core.errors import InputError
from paceline.core.numbers import real_number, shown, truth_value, whole_number

_T = TypeVar("_T")

Kind: TypeAlias = Literal["whole", "real", "truth", "choice", "texts", "other"]
"""What a field holds: a number, a truth value, one of the words it lists, several texts, or what its class checks."""

_METADATA: Final = "option"
_QUOTED: Final = r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_NAMED: Final = re.compile(rf"{_QUOTED}|`([A-Za-z_]+(?:\.[a-z_]+)?)(?:=([^`]{{1,80}}))?`")
_TRUTHS: Final[Mapping[str, object]] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@dataclass(frozen=True, slots=True)
class Flag:
    """How the command line has a field; without names it has no such option.

    Attributes:
        names: with blanks between them, the one that messages use first.
        help: one line of the command line's help.
        panel: the part of the help that lists it.
        negated: whether the flag switches the field off.
        repeated: whether the flag may be given several times.
        metavar: what the help shows for the value, where that is not its kind.
        shown_default: what the help shows as default, where that is not the field's.
    """

    names: str = ""
    help: str = ""
    panel: str = ""
    negated: bool = False
    repeated: bool = False
    metavar: str | None = None
    shown_default: int | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """What one field holds, and how it is set from outside.

    Attributes:
        kind: what the field holds.
        called: the field's name in messages; its own by default. A name in backticks is replaced by the flag or JSON
            field when shown.
        counted: words of a message that hold the value as ``{}``, such as ``{} tokens to predict``; by default it is
            ``called`` and the value.
        error: raised for a value that cannot be used.
        optional: whether ``None`` leaves the choice to others.
        low: least number; ``None`` where there is none.
        high: largest number; ``None`` where there is none.
        low_excluded: whether ``low`` itself is too low.
        way_out: what to do about a value out of range, to follow the option's name.
        words: values by the words that stand for them in a text.
        kilo: of a whole number, what a k behind it in a text stands for; 0 where none may be there.
        stand_ins: by number, what makes the value that it stands for in a text.
        separator: parts several texts that are given as one.
        parse: makes the value of several texts; raises :class:`InputError`.
        variable: its environment variable without prefix, where that is not the field's name; ``None`` where it has
            none.
        json: further names in a JSON request, beside the field's own.
    """

    kind: Kind
    _: dataclasses.KW_ONLY
    called: str = ""
    counted: str = ""
    error: type[InputError] = InputError
    optional: bool = False
    low: float | None = None
    high: float | None = None
    low_excluded: bool = False
    way_out: str = ""
    words: Mapping[str, object] = dataclasses.field(default_factory=dict)
    kilo: int = 0
    stand_ins: Mapping[int, Callable[[], int]] = dataclasses.field(default_factory=dict)
    separator: str = ""
    parse: Callable[[Sequence[str]], object] | None = None
    variable: str | None = ""
    json: tuple[str, ...] = ()


def same(words: Iterable[str]) -> dict[str, object]:
    """Return words that stand for themselves."""
    return {word: word for word in words}


_NO_FLAG: Final = Flag()


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the table; ``default`` is ``None`` where a value has to be given."""

    name: str
    default: object
    option: Option
    flag: Flag

    @property
    def called(self) -> str:
        return self.option.called or self.name

    @property
    def flags(self) -> tuple[str, ...]:
        """Names on the command line; none where it has no such option."""
        return tuple(self.flag.names.split())

    @property
    def json_names(self) -> tuple[str, ...]:
        return (self.name, *self.option.json)


def setting(default: _T, about: Option, flag: Flag = _NO_FLAG) -> _T:
    """Return a dataclass field with its part of the table. To type checkers it is its default."""
    return dataclasses.field(default=default, metadata=described(about, flag))


def described(about: Option, flag: Flag = _NO_FLAG) -> Mapping[str, tuple[Option, Flag]]:
    """Return the metadata of a dataclass field, for one with a factory or without a default."""
    return {_METADATA: (about, flag)}


def fields_of(owner: type) -> tuple[Field, ...]:
    """Return the part of the table that a dataclass is, in the order of its fields."""
    return _listed(owner)


@functools.cache
def _listed(owner: type) -> tuple[Field, ...]:
    found = []
    for field in dataclasses.fields(owner):
        about = field.metadata.get(_METADATA)
        if about is not None:
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            found.append(Field(field.name, None if default is dataclasses.MISSING else default, *about))
    return tuple(found)


def take_values(instance: object) -> None:
    """Check every field of a dataclass that is being built, and make numbers of other libraries Python's.

    What is raised names the field, and is what its option has as ``error``.
    """
    for field in fields_of(type(instance)):
        try:
            value = _taken(field, getattr(instance, field.name))
        except InputError as error:
            error.field = field.name
            raise
        object.__setattr__(instance, field.name, value)


def read_text(field: Field, text: str) -> object:
    """Return the value that a text stands for, as an environment variable has it. Its range is not checked.

    An error says what to give, and not the text.
    """
    about = field.option
    if about.words:
        return _word(about, about.words, text)
    if about.kind == "truth":
        return _word(about, _TRUTHS, text)
    if about.kind in ("whole", "real"):
        try:
            return stood_for(field, read_whole(field, text) if about.kind == "whole" else float(text))
        except ValueError:
            number = "whole number" if about.kind == "whole" else "number"
            raise about.error(f"give a {number}") from None
    return read_texts(field, [text]) if about.kind == "texts" or about.parse is not None else text


def read_whole(field: Field, text: str) -> int:
    """Return the whole number that a text stands for, such as ``32k`` where the field has ``kilo``, or ValueError."""
    about, number = field.option, text.strip()
    if about.kilo and number[-1:] in ("k", "K"):
        return int(number[:-1]) * about.kilo
    return int(number)


def read_texts(field: Field, texts: Sequence[str]) -> object:
    """Return the value that several texts make up, as an option of the command line has them that may be repeated."""
    about = field.option
    if about.separator:
        texts = [part.strip() for text in texts for part in text.split(about.separator) if part.strip()]
    return tuple(texts) if about.parse is None else about.parse(texts)


def rename_options(message: str, rename: Callable[[str, str], str | None]) -> str:
    """Return a message of the library in which options have other names.

    Args:
        message: names options in backticks, some with a value: `temperature`, `speculate=False`. In quotes it is what a
            user wrote.
        rename: returns what an option with a value is called, both as the message has them; ``None`` for the same.
    """

    def renamed(named: re.Match[str]) -> str:
        if named[1] is None:
            return named[0]
        return rename(named[1], named[2] or "") or named[0].strip("`")

    return _NAMED.sub(renamed, message)


def spell_flag(field: Field, value: str) -> str:
    """Return how the command line says an option with a value that a message spells; empty for the option alone."""
    flag = field.flags[0].partition("/")[0]
    if not value:
        return flag
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        # What a user wrote may be quoted in a message, and look like an option.
        found = value
    if field.option.kind == "truth":
        return flag if found is not field.flag.negated else f"without {flag}"
    word = next((word for word, stands_for in field.option.words.items() if stands_for is found), None)
    if word is None:
        word = ",".join(map(str, found)) if isinstance(found, list) else str(found)
    return f"{flag} {word}"


def stood_for(field: Field, number: float) -> float:
    """Return the number that one stands for in a text: of -1 tokens to predict, as many as fit; else itself."""
    stand_in = field.option.stand_ins.get(int(number)) if field.option.stand_ins else None
    return number if stand_in is None else stand_in()


def _word(about: Option, words: Mapping[str, object], text: str) -> object:
    if text.lower() not in words:
        raise about.error(f"give one of {', '.join(words)}")
    return words[text.lower()]


def _taken(field: Field, value: object) -> object:
    about = field.option
    if value is None and about.optional:
        return None
    if about.kind == "truth":
        return truth_value(value, field.called, about.error)
    if about.kind == "texts":
        return _texts(field, value)
    if about.kind == "choice" and value not in about.words.values():
        raise about.error(f"unknown {field.called} {value!r}: choose from {', '.join(about.words)}")
    if about.kind in ("whole", "real"):
        as_number = whole_number if about.kind == "whole" else real_number
        number = as_number(value, field.called, about.error)
        _check_range(field, number)
        return number
    return value


def _texts(field: Field, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise field.option.error(f"{field.called} is {shown(value)}; give a text or a list of texts")
    return tuple(value)


def _check_range(field: Field, value: float) -> None:
    about, low, high = field.option, field.option.low, field.option.high
    # "Not at least" and not "less than": of what is no number neither holds.
    fits = low is None or (value > low if about.low_excluded else value >= low)
    if fits and (high is None or value <= high):
        return
    judged = (about.counted or f"{field.called} {{}}").format(value)
    hint = f"`{field.name}`, {about.way_out}" if about.way_out else f"`{field.name}`"
    if high is None:
        raise about.error(f"{judged}: the least is {low} ({hint})")
    if low is None:
        raise about.error(f"{judged}: the most is {high} ({hint})")
    verb, bound = "are" if about.counted else "is", "above" if about.low_excluded else "from"
    raise about.error(f"{judged} {verb} out of range: give a value {bound} {low} to {high} ({hint})")
