"""The options of a call, read by the one table of options into the parts that a request is made of.

The table is the fields of :class:`~paceline.core.params.SamplingParams`, :class:`~paceline.core.params.StopRules` and
:class:`~paceline.core.params.SpeculationParams`; :class:`~paceline.api.GenerateOptions` spells them out for type
checkers, and a test holds it to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from paceline.core.errors import InputError
from paceline.core.fields import fields_of
from paceline.core.params import SamplingParams, SpeculationParams, StopRules, VerifierName, draw_seed

_T = TypeVar("_T")


class RequestOptions(NamedTuple):
    """What a request asks for, complete and checked."""

    params: SamplingParams
    rules: StopRules
    speculation: SpeculationParams


REQUEST_PARTS: tuple[type, ...] = (SamplingParams, StopRules, SpeculationParams)
"""The dataclasses whose fields a request may set."""


def read_options(
    options: Mapping[str, object], *, verify: VerifierName = "coupled", drafters: Sequence[str] | None = None
) -> RequestOptions:
    """Return what was set, with defaults for the rest; a seed that is not given is drawn.

    Args:
        options: by the names of :class:`~paceline.api.GenerateOptions`; ``None`` is the default.
        verify: how drafts are judged where that is not said.
        drafters: those there are, which ``drafters`` may choose from; ``None`` lets any name pass.

    Raises:
        InputError: an option is unknown, or its value cannot be used.
    """
    known = {field.name for part in REQUEST_PARTS for field in fields_of(part)}
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise InputError(f"unknown option {unknown!r}: see SamplingParams, StopRules and SpeculationParams")
    given = {name: value for name, value in options.items() if value is not None}
    given.setdefault("seed", draw_seed())
    given.setdefault("verify", verify)
    speculation = _made(SpeculationParams, given)
    if drafters is not None:
        for name in speculation.drafters or ():
            if name not in drafters:
                there_are = f"choose from {', '.join(drafters)}" if drafters else "none is loaded"
                raise InputError(f"unknown drafter {name!r}: {there_are}, or leave it out")
    return RequestOptions(_made(SamplingParams, given), _made(StopRules, given), speculation)


def _made(part: type[_T], given: Mapping[str, Any]) -> _T:
    """Build one dataclass of the table of what is given of its fields."""
    return part(**{field.name: given[field.name] for field in fields_of(part) if field.name in given})
