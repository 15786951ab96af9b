"""The rules of what fits, as tables: starts, drafts, and the rows of a pass."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.core.errors import ContextLengthError
from paceline.core.request import Request
from paceline.engines.base import Step
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.engines.sequence_pool import SequencePool
from paceline.runtime.pass_budget import PassBudget
from paceline.runtime.prefill_budget import FIRST_ROWS, PrefillBudget
from tests.helpers import request_of


def budget_of(*, growth: int = 16, prompt_rounds: float = 8.0, **limits: Any) -> PassBudget:
    engine = ScriptedEngine(random_model(9, seed=1), ScriptedVocabulary.of_size(9), **limits)
    pool = SequencePool(engine, max_idle=0)
    return PassBudget(engine.capabilities, pool, PrefillBudget(prompt_rounds), growth=growth)


def running(*sizes: tuple[int, int]) -> list[Request]:
    """Requests that run: how many tokens each has, and how many of these the cache holds."""
    return [request_of([1] * length, cached=cached) for length, cached in sizes]


@pytest.mark.parametrize(
    ("num_tokens", "limits", "refused"),
    [
        (63, {"context_length": 64}, None),
        (64, {"context_length": 64}, "64"),
        (20, {"context_length": 64, "cells": 20}, None),
        (21, {"context_length": 64, "cells": 20}, "20"),
        (64, {"context_length": 64, "cells": 20}, "64"),
    ],
)
def test_a_prompt_fits_the_context_with_a_token_to_spare_and_the_cache(
    num_tokens: int, limits: dict[str, int], refused: str | None
) -> None:
    budget = budget_of(**limits)
    if refused is None:
        budget.check_prompt(num_tokens)
    else:
        with pytest.raises(ContextLengthError, match=refused):
            budget.check_prompt(num_tokens)


@pytest.mark.parametrize(
    ("length", "others", "growth", "least_cells"),
    [
        (10, [], 0, 10),
        (10, [], 16, 26),
        # What the others hold is the pool's to know: here nothing is open, so only what they have still to read counts.
        (10, [(30, 29)], 0, 11),
        (10, [(30, 5)], 0, 35),
        (10, [(30, 5), (8, 0)], 0, 43),
        (10, [(30, 29), (8, 7)], 16, 10 + 2 + 3 * 16),
    ],
)
def test_a_request_starts_with_cells_for_all_it_has_and_what_others_read_and_say(
    length: int, others: list[tuple[int, int]], growth: int, least_cells: int
) -> None:
    request, beside = request_of([2] * length), running(*others)
    assert budget_of(growth=growth, cells=least_cells).may_start(request, beside)
    assert not budget_of(growth=growth, cells=least_cells - 1).may_start(request, beside)
    assert budget_of(growth=growth, cells=None).may_start(request, beside)


@pytest.mark.parametrize(("cache_prompt", "least_cells"), [(True, 6 + 10 - 6), (False, 6 + 10)])
def test_cells_that_a_start_would_share_are_not_counted_twice(cache_prompt: bool, least_cells: int) -> None:
    for cells in (least_cells, least_cells - 1):
        engine = ScriptedEngine(random_model(9, seed=1), ScriptedVocabulary.of_size(9), cells=cells)
        pool = SequencePool(engine, max_idle=4, least_reuse=1)
        prefix = [1] * 6
        sequence = pool.open(prefix, most=0).sequence
        engine.forward([Step(sequence, prefix, range(-1, 5), [])])
        engine.commit(sequence, range(6))
        budget = PassBudget(engine.capabilities, pool, PrefillBudget(), growth=0)
        request = request_of([1] * 6 + [2] * 4, cache_prompt=cache_prompt)
        assert budget.may_start(request, []) == (cells == least_cells)


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_sharing", "limits", "most"),
    [
        (10, 1000, 1, {"context_length": 100, "max_rows": 64}, 63),
        # The target adds a token of its own.
        (10, 8, 1, {"context_length": 100, "max_rows": 64}, 7),
        (10, 1, 1, {"context_length": 100, "max_rows": 64}, 0),
        (97, 1000, 1, {"context_length": 100, "max_rows": 64}, 2),
        (99, 1000, 1, {"context_length": 100, "max_rows": 64}, 0),
        # Rows with logits are shared, not all rows.
        (10, 1000, 4, {"context_length": 100, "max_rows": 64}, 15),
        (10, 1000, 4, {"context_length": 100, "max_rows": 64, "max_outputs": 10}, 1),
        (10, 1000, 11, {"context_length": 100, "max_rows": 64, "max_outputs": 10}, -1),
        (10, 1000, 1, {"context_length": 100, "max_rows": 64, "trees": False, "max_rollback": 3}, 3),
    ],
)
def test_a_draft_is_as_long_as_answer_context_rows_and_rollback_allow(
    length: int, max_tokens: int, num_sharing: int, limits: dict[str, Any], most: int
) -> None:
    assert budget_of(**limits).max_draft(request_of([1] * length, max_tokens=max_tokens), num_sharing) == most


def test_a_draft_is_short_at_an_end_and_has_no_room_otherwise() -> None:
    budget = budget_of(context_length=100)
    ends = [(10, 1), (99, 1000), (10, 2), (98, 1000)]
    reasons = [budget.why_no_draft(request_of([1] * length, max_tokens=most)) for length, most in ends]
    assert reasons == ["short", "short", "no_room", "no_room"]


@pytest.mark.parametrize(
    ("prompt_rounds", "num_prompts", "drafts"),
    [(8.0, 0, True), (8.0, 1, False), (math.inf, 0, True), (math.inf, 1, True)],
)
def test_nothing_is_drafted_beside_prompts_whose_rows_are_bounded(
    prompt_rounds: float, num_prompts: int, drafts: bool
) -> None:
    assert budget_of(prompt_rounds=prompt_rounds).may_draft(num_prompts) == drafts


@pytest.mark.parametrize(
    ("sizes", "reads", "sparing", "rows"),
    [
        ([], True, False, []),
        ([3, 4], False, False, [3, 4]),
        # Later trees have a row each, and so has what is read.
        ([20, 4], False, False, [9, 1]),
        ([20, 4], True, False, [8, 1]),
        ([4, 20, 4], False, False, [4, 5, 1]),
        # Ten trees of ten rows: nothing is left for prompts, and an eleventh waits.
        ([2] * 10, True, False, [1] * 10),
        ([2] * 11, False, False, [1] * 10),
        # Where the cache was full.
        ([20, 4], True, True, [1, 1]),
    ],
)
def test_trees_share_the_rows_with_logits(sizes: list[int], reads: bool, sparing: bool, rows: list[int]) -> None:
    assert budget_of(max_rows=64, max_outputs=10).tree_rows(sizes, reads=reads, sparing=sparing) == rows


@pytest.mark.parametrize(
    ("num_decoding", "num_tree_rows", "prompt_rounds", "rows"),
    [(0, 0, 8.0, (64, 10)), (2, 5, math.inf, (59, 5)), (2, 5, 8.0, (FIRST_ROWS, 5)), (10, 10, math.inf, (54, 0))],
)
def test_prompts_have_the_rows_that_trees_leave_as_far_as_these_are_worth_it(
    num_decoding: int, num_tree_rows: int, prompt_rounds: float, rows: tuple[int, int]
) -> None:
    decoding = running(*[(30, 29)] * num_decoding)
    budget = budget_of(max_rows=64, max_outputs=10, prompt_rounds=prompt_rounds)
    assert budget.prompt_rows(decoding, num_tree_rows, left=300, prompts=1) == rows
