"""Numbers of other libraries become Python's; what is no number is one clear error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import InputError, SamplingError
from paceline.core.numbers import real_number, shown, truth_value, whole_number
from paceline.core.params import SamplingParams, StopRules


@pytest.mark.parametrize("value", [3, np.int8(3), np.int64(3), np.uint16(3), np.array(3)])
def test_whole_numbers_become_ints(value: object) -> None:
    assert whole_number(value, "it") == 3
    assert type(whole_number(value, "it")) is int


@pytest.mark.parametrize("value", [3.0, np.float32(3), "3", True, np.True_, None, [3], 3j])
def test_what_is_no_whole_number(value: object) -> None:
    with pytest.raises(InputError, match=r"^it is .*, which is not a whole number$"):
        whole_number(value, "it")


@pytest.mark.parametrize("value", [0.5, np.float16(0.5), np.float32(0.5), np.float64(0.5), np.array(0.5)])
def test_numbers_become_floats(value: object) -> None:
    assert real_number(value, "it") == 0.5
    assert type(real_number(value, "it")) is float


def test_whole_numbers_are_numbers_and_so_are_infinities() -> None:
    assert real_number(2, "it") == real_number(np.int32(2), "it") == 2.0
    assert real_number(-math.inf, "it") == -math.inf
    assert math.isnan(real_number(math.nan, "it"))


@pytest.mark.parametrize("value", ["0.5", True, np.False_, None, [0.5], 1j, 10**400, np.array([0.5, 0.5])])
def test_what_is_no_number(value: object) -> None:
    with pytest.raises(SamplingError, match=r"^it is .*, which is not a number$") as caught:
        real_number(value, "it", SamplingError)
    assert "\n" not in str(caught.value)


def test_truth_values_are_not_guessed() -> None:
    assert truth_value(np.True_, "it") is True
    assert truth_value(False, "it") is False
    others: list[object] = [1, "false", None, []]
    for value in others:
        with pytest.raises(InputError, match="give True or False"):
            truth_value(value, "it")


def test_parameters_hold_numbers_of_their_own() -> None:
    values: dict[str, Any] = {
        "temperature": np.float32(0.5),
        "top_k": np.int64(7),
        "seed": np.uint64(2**64 - 1),
        "logit_bias": {np.int32(3): np.float32(-math.inf)},
    }
    params = SamplingParams(**values)
    assert params == SamplingParams(temperature=0.5, top_k=7, seed=2**64 - 1, logit_bias={3: -math.inf})
    assert {type(value) for value in (params.top_k, params.seed, *params.logit_bias)} == {int}
    assert {type(value) for value in (params.temperature, params.top_p, *params.logit_bias.values())} == {float}
    limit: Any = np.int64(4)
    assert type(StopRules(max_tokens=limit).max_tokens) is int


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', which is not a number"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": 1.5}, "top-k is 1.5, which is not a whole number"),
        ({"choice": False}, "choice is False"),
        ({"logit_bias": [1.0]}, r"logit bias is \[1.0\]: give a mapping"),
        ({"logit_bias": {"5": 1.0}}, "the token id of a logit bias is '5'"),
        ({"logit_bias": {5: None}}, "logit bias for token 5 is None"),
    ],
)
def test_parameters_that_are_no_numbers(values: dict[str, object], words: str) -> None:
    with pytest.raises(SamplingError, match=words):
        SamplingParams(**values)  # type: ignore[arg-type]


def test_long_values_are_shown_by_their_type_and_not_spelled_out_to_find_that_they_are_long() -> None:
    deep: object = 1
    for _ in range(100):
        deep = [deep]
    for value in (
        [1] * 10**7,
        np.zeros((3, 3)),
        {"a": "b" * 1000},
        [[["a" * 61]]],
        deep,
        10**5000,
        -(10**5000),
        b"a" * 100,
        {1: [2] * 70},
    ):
        assert shown(value) == f"of type {type(value).__name__}"
    shorts: tuple[object, ...] = ([1, [2, {"a": (3, None)}]], "a" * 50, 10**50, {1, 2}, b"ab", {}, 1.5, True)
    for short in shorts:
        assert shown(short) == repr(short)
