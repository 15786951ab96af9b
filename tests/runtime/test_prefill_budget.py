"""How much of prompts a pass reads, by what passes cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.core.request import Request
from paceline.planning.base import RoundRecord
from paceline.runtime.prefill_budget import FIRST_ROWS, MIN_ROWS, PrefillBudget

MEASURED = (1, 2, 3, 4, 6, 8, 12, 15, 16, 24, 32, 48, 64)


class Costs:
    """What passes cost by their rows; beyond the widest that was measured every row costs as much as there."""

    def __init__(self, pass_s: Callable[[int], float]) -> None:
        self._pass_s = pass_s

    def round_s(self, rows: int, context: int = 0, requests: int = 1) -> float:
        widest = MEASURED[-1]
        return self._pass_s(min(rows, widest)) * max(rows / widest, 1.0)

    def is_measured(self, rows: int) -> bool:
        return rows in MEASURED

    @property
    def change_s(self) -> float:
        return 0.0

    def draft_s(self, rows: int = 1, context: int = 0) -> float:
        raise AssertionError("no draft model reads prompts here")


def on_a_cpu(rows: int) -> float:
    """A 1b in Q4_0 on two cores: rows are cheap by blocks of sixteen."""
    return 0.018 if rows == 1 else 0.0079 * rows if rows % 16 == 0 else 0.012 * rows


def on_a_gpu(rows: int) -> float:
    return 0.010 + 2e-5 * rows


def decoding(number: int) -> Sequence[Request]:
    return [cast(Request, SimpleNamespace(cached=100))] * number


def rows_beside(number: int, budget: PrefillBudget, *, left: int = 300, prompts: int = 1, room: int = 512) -> int:
    return budget.max_rows(decoding(number), left, prompts, room)


def read(prefill_rows: int, verify_s: float, number: int = 0) -> RoundRecord:
    requests: Any = [SimpleNamespace(token_ids=[0] * 100)] * number
    record = SimpleNamespace(requests=requests, trees=[], prefill_rows=prefill_rows, verify_s=verify_s)
    return cast(RoundRecord, record)


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_a_chunk_fills_a_block_of_rows(number: int) -> None:
    assert number + rows_beside(number, PrefillBudget(costs=Costs(on_a_cpu))) == 16


def test_the_more_prompts_wait_the_more_is_read_at_once() -> None:
    rows = [rows_beside(12, PrefillBudget(costs=Costs(on_a_cpu)), prompts=prompts) for prompts in (1, 4, 16)]
    assert rows == sorted(rows)
    assert 12 + rows[0] == 16
    assert rows[-1] >= 36


def test_a_chunk_takes_a_few_rounds_at_most() -> None:
    for most in (3.0, 5.0, 8.0):
        rows = rows_beside(1, PrefillBudget(most, Costs(on_a_cpu)))
        assert rows == MIN_ROWS or on_a_cpu(1 + rows) <= most * on_a_cpu(1)


def test_however_long_it_takes_something_is_read() -> None:
    assert rows_beside(1, PrefillBudget(1.0, Costs(on_a_cpu))) == MIN_ROWS
    assert rows_beside(1, PrefillBudget(1.0, Costs(on_a_cpu)), room=3) == 3


def test_by_itself_a_prompt_is_read_to_its_end_and_others_where_that_makes_rows_cheaper() -> None:
    assert rows_beside(0, PrefillBudget(costs=Costs(on_a_cpu)), left=64) == 64
    assert rows_beside(0, PrefillBudget(costs=Costs(on_a_cpu)), left=5) == 16
    assert rows_beside(0, PrefillBudget(costs=Costs(on_a_gpu)), left=5) == 64


def test_wide_passes_tell_what_further_rows_take() -> None:
    budget = PrefillBudget(costs=Costs(on_a_gpu))
    assert 1 + rows_beside(1, budget) == 64, "nothing tells that wider ones are cheap"
    budget.observe(read(300, on_a_gpu(300)))
    assert 1 + rows_beside(1, budget) == 512
    assert rows_beside(0, budget, left=5) == 512
    slow = PrefillBudget(costs=Costs(on_a_cpu))
    slow.observe(read(304, on_a_cpu(304)))
    assert 1 + rows_beside(1, slow) == 16


def test_without_costs_rounds_tell() -> None:
    budget = PrefillBudget(3.0)
    assert rows_beside(2, budget) == FIRST_ROWS
    budget.observe(read(0, 1.0, 2))
    budget.observe(read(10, 2.0, 2))
    assert rows_beside(2, budget) == 16, "two further rounds of a tenth a row, with two leading bits"
    assert rows_beside(0, budget, left=5) == 512


def test_prompts_may_be_read_as_fast_as_can_be() -> None:
    assert rows_beside(4, PrefillBudget(math.inf, Costs(on_a_cpu))) == 512
