"""Options of a call: what is left out or ``None`` has its default, and what cannot be used is one clear line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args, get_type_hints

import numpy as np
import pytest

from paceline.api import GenerateOptions
from paceline.core.errors import InputError
from paceline.core.params import TRANSFORMERS_ORDER, SamplingParams, SpeculationParams, StopRules
from paceline.engines.loading import ModelOptions
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.options import REQUEST_PARTS, ModelChoice, as_options, read_options


def test_every_option_may_be_left_out_or_none() -> None:
    nothing = dict.fromkeys(GenerateOptions.__annotations__)
    for options in ({}, nothing):
        params, rules, speculation = read_options(options)
        assert params == SamplingParams(seed=params.seed)
        assert (rules, speculation) == (StopRules(), SpeculationParams())
    assert len({read_options({}).params.seed for _ in range(5)}) > 1


def test_options_reach_the_part_they_belong_to() -> None:
    params, rules, speculation = read_options(
        {"temperature": np.float64(0.5), "seed": 3, "max_tokens": np.int16(9), "stop": "a", "speculate": False}
    )
    assert (params, rules) == (SamplingParams(temperature=0.5, seed=3), StopRules(9, ("a",)))
    assert speculation == SpeculationParams(speculate=False)
    assert read_options({"stop": ["a", "b"]}).rules.stop == ("a", "b")
    assert read_options({"order": list(TRANSFORMERS_ORDER)}).params.order == TRANSFORMERS_ORDER


def test_how_a_request_is_sped_up_is_its_own_to_say() -> None:
    there_are = ("suffix", "draft")
    options = {"drafters": ["draft"], "draft_max": np.int64(3), "verify": "coupled"}
    speculation = read_options(options, verify="rejection", drafters=there_are).speculation
    assert speculation == SpeculationParams(drafters=("draft",), draft_max=3, verify="coupled")
    assert read_options({"verify": None}, verify="rejection").speculation.verify == "rejection"
    with pytest.raises(InputError, match="unknown drafter 'lookup': choose from suffix, draft, or leave it out"):
        read_options({"drafters": ["lookup"]}, drafters=there_are)
    with pytest.raises(InputError, match="unknown drafter 'lookup': none is loaded"):
        read_options({"drafters": "lookup"}, drafters=())


def test_type_checkers_know_the_options_that_there_are() -> None:
    """Each is of its field's type, or ``None``; several texts may be any sequence of them."""
    spelled = get_type_hints(GenerateOptions)
    fields = {name: kind for part in REQUEST_PARTS for name, kind in get_type_hints(part).items()}
    assert spelled.keys() == fields.keys()
    for name, kind in fields.items():
        accepted = kind
        if tuple[str, ...] in (kind, *get_args(kind)):
            accepted = Sequence[str]
        assert spelled[name] == accepted | None, name


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
        ({"drafters": []}, "no drafter is named"),
        ({"draft_max": 0}, "draft-max 0: the least is 1"),
        ({"verify": "trust"}, "unknown verifier 'trust': choose from coupled, rejection"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_options(options)


def test_a_context_of_0_is_all_that_the_target_was_made_for() -> None:
    models = ModelChoice.of({"path": "target", "context_length": 0, "threads": 1}, {"path": "draft"})
    assert (models.target, models.draft.path) == ("target", "draft")
    target = models.target_options(embedded_target())
    trained = describe(embedded_target()).context_length
    assert target == ModelOptions(embedded_target(), context_length=trained, threads=1)
    draft = models.draft_options(target, embedded_draft())
    assert (draft.path, draft.threads, draft.context_may_shrink) == (embedded_draft(), 1, True)


def test_what_a_request_asks_for_can_be_asked_for_again() -> None:
    request = read_options({"temperature": 0.5, "stop": "a", "drafters": ["suffix"], "logit_bias": {3: 1.0}})
    assert read_options(as_options(*request)) == request
    assert as_options(request.rules) == {"max_tokens": 256, "stop": ("a",), "ignore_end": False}
