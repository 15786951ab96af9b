"""Options of a call: what is left out or ``None`` has its default, and what cannot be used is one clear line."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.api import GenerateOptions
from paceline.core.errors import InputError
from paceline.core.params import TRANSFORMERS_ORDER, SamplingParams, StopRules
from paceline.options import read_options


def test_every_option_may_be_left_out_or_none() -> None:
    nothing = dict.fromkeys(GenerateOptions.__annotations__)
    for options in ({}, nothing):
        params, rules, speculate = read_options(options)
        assert params == SamplingParams(seed=params.seed)
        assert (rules, speculate) == (StopRules(), True)
    assert len({read_options({}).params.seed for _ in range(5)}) > 1


def test_options_reach_the_part_they_belong_to() -> None:
    params, rules, speculate = read_options(
        {"temperature": np.float64(0.5), "seed": 3, "max_tokens": np.int16(9), "stop": "a", "speculate": False}
    )
    assert (params, rules, speculate) == (SamplingParams(temperature=0.5, seed=3), StopRules(9, ("a",)), False)
    assert read_options({"stop": ["a", "b"]}).rules.stop == ("a", "b")
    assert read_options({"order": list(TRANSFORMERS_ORDER)}).params.order == TRANSFORMERS_ORDER


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tempratur": None}, "unknown option 'tempratur'"),
        ({"max_tokens": "5"}, "the number of tokens to predict is '5'"),
        ({"stop": 5}, "stop is 5; give a text or a list of texts"),
        ({"stop": ["a", 5]}, "stop is .'a', 5.; give"),
        ({"stop": b"a"}, "stop is b'a'; give"),
        ({"speculate": "no"}, "speculate is 'no'; give True or False"),
        ({"ignore_end": 1}, "ignore_end is 1; give True or False"),
        ({"order": 5}, "order is 5"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_options(options)
