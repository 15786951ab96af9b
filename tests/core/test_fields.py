"""The table of options: checks, conversions and texts, for any dataclass whose fields are made by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import InputError, SamplingError
from paceline.core.fields import (
    Field,
    Flag,
    Option,
    fields_of,
    read_text,
    read_texts,
    same,
    setting,
    stood_for,
    take_values,
)
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.planning.policies.fixed import FixedPolicy

TABLE: tuple[type, ...] = (SamplingParams, StopRules, SpeculationParams, ModelOptions, DraftOptions, FixedPolicy)


def _sum_of(texts: Sequence[str]) -> int:
    return sum(map(int, texts))


@dataclass(frozen=True, slots=True)
class Machine:
    """A part of a table that is none of paceline's."""

    wheels: int = setting(
        4,
        Option("whole", counted="{} wheels", low=1, way_out="2 make a bicycle", stand_ins={-1: lambda: 3}),
        Flag("--wheels"),
    )
    weight: float | None = setting(None, Option("real", optional=True, low=0.0, high=9.5, low_excluded=True))
    parked: bool = setting(False, Option("truth"))
    colour: str = setting("red", Option("choice", error=SamplingError, words=same(("red", "blue"))))
    riders: tuple[str, ...] = setting((), Option("texts", separator=","))
    bags: object = setting(0, Option("other", parse=_sum_of, separator="+"))
    year: int = setting(1990, Option("whole", high=2026))
    number: int = 7

    def __post_init__(self) -> None:
        take_values(self)


FIELDS = {field.name: field for field in fields_of(Machine)}


def test_a_dataclass_is_a_part_of_the_table() -> None:
    assert list(FIELDS) == ["wheels", "weight", "parked", "colour", "riders", "bags", "year"]
    assert [field.default for field in FIELDS.values()] == [4, None, False, "red", (), 0, 1990]
    assert Machine() == Machine(4, None, False, "red", (), 0)


def test_values_become_pythons_own() -> None:
    given: dict[str, Any] = {"wheels": np.int8(2), "weight": np.float32(1.5), "parked": np.True_, "riders": "anna"}
    machine = Machine(**given)
    assert machine == Machine(2, 1.5, True, riders=("anna",))
    assert [type(value) for value in (machine.wheels, machine.weight, machine.parked)] == [int, float, bool]
    assert Machine(**{"riders": ["anna", "bo"]}).riders == ("anna", "bo")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"wheels": 0}, InputError, r"^0 wheels: the least is 1 \(`wheels`, 2 make a bicycle\)$"),
        ({"year": 2027}, InputError, r"^year 2027: the most is 2026 \(`year`\)$"),
        ({"wheels": 1.0}, InputError, r"^wheels is 1.0, which is not a whole number$"),
        ({"wheels": None}, InputError, r"^wheels is None, which is not a whole number$"),
        ({"weight": 0}, InputError, r"^weight 0.0 is out of range: give a value above 0.0 to 9.5 \(`weight`\)$"),
        ({"weight": 9.75}, InputError, r"^weight 9.75 is out of range"),
        ({"weight": math.nan}, InputError, r"^weight nan is out of range"),
        ({"weight": "heavy"}, InputError, r"^weight is 'heavy', which is not a number$"),
        ({"parked": 1}, InputError, r"^parked is 1; give True or False$"),
        ({"colour": "green"}, SamplingError, r"^unknown colour 'green': choose from red, blue$"),
        ({"riders": 5}, InputError, r"^riders is 5; give a text or a list of texts$"),
        ({"riders": ["anna", 5]}, InputError, r"^riders is \['anna', 5\]; give"),
    ],
)
def test_values_that_cannot_be_used(given: dict[str, Any], error: type[InputError], message: str) -> None:
    with pytest.raises(error, match=message):
        Machine(**given)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("wheels", "6", 6),
        ("wheels", "-1", 3),
        ("weight", "1e-1", 0.1),
        ("parked", "Yes", True),
        ("parked", "0", False),
        ("colour", "blue", "blue"),
        ("riders", "anna, bo,,", ("anna", "bo")),
        ("bags", "1+2", 3),
    ],
)
def test_texts_stand_for_values(name: str, text: str, value: object) -> None:
    assert read_text(FIELDS[name], text) == value


def test_texts_of_several_are_put_together() -> None:
    assert read_texts(FIELDS["riders"], ["anna", "bo,cy"]) == ("anna", "bo", "cy")
    assert stood_for(FIELDS["wheels"], 5) == 5


def test_thousands_of_a_whole_number_are_those_of_its_field() -> None:
    tokens = Field("tokens", 0, Option("whole", kilo=1024), Flag())
    assert [read_text(tokens, text) for text in ("32k", "2K", "7", "-1")] == [32768, 2048, 7, -1]
    for text in ("k", "1.5k", "2kk"):
        with pytest.raises(InputError, match=r"^give a whole number$"):
            read_text(tokens, text)
    with pytest.raises(InputError, match=r"^give a whole number$"):
        read_text(FIELDS["wheels"], "2k")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("wheels", "6.0", "^give a whole number$"),
        ("weight", "", "^give a number$"),
        ("parked", "maybe", "^give one of true, yes, on, 1, false, no, off, 0$"),
        ("colour", "green", "^give one of red, blue$"),
    ],
)
def test_texts_that_stand_for_nothing(name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_text(FIELDS[name], text)


@pytest.mark.parametrize("owner", TABLE, ids=lambda owner: owner.__name__)
def test_what_is_said_of_every_option_is_complete(owner: type) -> None:
    for field in fields_of(owner):
        about = field.option
        assert not field.flags or (field.flag.help and field.flag.panel), field.name
        assert about.kind != "choice" or about.words, field.name
        # Said of a flag that is repeated, and of a value that only a text can be.
        assert not field.flag.repeated or about.parse is not None or about.kind == "texts", field.name


def test_every_option_of_a_request_has_a_name_in_json_and_no_two_share_one() -> None:
    names = [
        name
        for owner in (SamplingParams, StopRules, SpeculationParams)
        for field in fields_of(owner)
        for name in field.json_names
    ]
    assert len(set(names)) == len(names)
    assert {"temperature", "max_tokens", "n_predict", "ignore_eos", "repeat_last_n", "speculate"} <= set(names)


@pytest.mark.parametrize("owner", [SamplingParams, StopRules, SpeculationParams])
def test_every_field_of_a_request_is_in_the_table(owner: type) -> None:
    assert [field.name for field in fields_of(owner)] == list(vars(owner)["__dataclass_fields__"])
