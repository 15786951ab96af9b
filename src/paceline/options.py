"""The options of a call, read into the parts that a request is made of."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from paceline.core.errors import InputError
from paceline.core.numbers import shown, truth_value
from paceline.core.params import SamplingParams, StopRules

_SAMPLING: Final = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_STOPPING: Final = frozenset(field.name for field in dataclasses.fields(StopRules))
_NAMES: Final = _SAMPLING | _STOPPING | {"speculate"}


class ReadOptions(NamedTuple):
    """The options of a call, complete and checked."""

    params: SamplingParams
    rules: StopRules
    speculate: bool


def read_options(options: Mapping[str, object]) -> ReadOptions:
    """Return what was set, with defaults for the rest; a seed that is not given is drawn.

    Args:
        options: by the names of :class:`~paceline.api.GenerateOptions`; ``None`` is the default.

    Raises:
        InputError: an option is unknown, or its value cannot be used.
    """
    unknown = next((name for name in options if name not in _NAMES), None)
    if unknown is not None:
        raise InputError(f"unknown option {unknown!r}: see SamplingParams and StopRules")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    given.setdefault("seed", secrets.randbits(32))
    for name in ("stop", "order"):
        if name in given:
            given[name] = _texts(given[name], name)
    return ReadOptions(
        SamplingParams(**{name: value for name, value in given.items() if name in _SAMPLING}),
        StopRules(**{name: value for name, value in given.items() if name in _STOPPING}),
        truth_value(given.get("speculate", True), "speculate"),
    )


def _texts(value: object, name: str) -> tuple[str, ...]:
    """Return one text or several as a tuple."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise InputError(f"{name} is {shown(value)}; give a text or a list of texts")
    return tuple(value)
