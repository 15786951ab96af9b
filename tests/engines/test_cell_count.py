"""Cells counted by lengths and forks, against sets of cells."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from tests.interrupting import LineTracer

from paceline.engines.cell_count import CellCount


def test_a_shared_prompt_counts_once() -> None:
    count = CellCount()
    lengths = {0: 100}
    for fork in (1, 2, 3):
        count.fork(0, fork, 100)
        lengths[fork] = 100
    assert count.used(lengths) == 100
    lengths |= {0: 110, 1: 120}
    assert count.used(lengths) == 130
    count.close(0)
    del lengths[0]
    assert count.used(lengths) == 120
    count.trim(1, 40)
    lengths[1] = 45
    assert count.used(lengths) == 105


def test_a_sequence_that_became_shorter_unheard_of_is_noticed() -> None:
    count = CellCount()
    count.fork(0, 1, 10)
    assert count.used({0: 10, 1: 4}) == 10
    assert count.used({0: 10, 1: 9}) == 15


@pytest.mark.parametrize("seed", range(30))
def test_any_history_counts_what_sets_of_cells_count(seed: int) -> None:
    rng = random.Random(seed)
    count, serials, handles = CellCount(), itertools.count(), itertools.count()
    cells: dict[int, list[int]] = {}
    shared = 0
    for _ in range(300):
        action = rng.random()
        if not cells or action < 0.1:
            cells[next(handles)] = []
            continue
        sequence = rng.choice(list(cells))
        if action < 0.3 and len(cells) < 8:
            fork = next(handles)
            count.fork(sequence, fork, len(cells[sequence]))
            cells[fork] = list(cells[sequence])
        elif action < 0.4:
            count.close(sequence)
            del cells[sequence]
        elif action < 0.55:
            length = rng.randint(0, len(cells[sequence]))
            count.trim(sequence, length)
            del cells[sequence][length:]
        else:
            cells[sequence] += itertools.islice(serials, rng.randint(1, 9))
        used = len(set().union(*cells.values()))
        assert count.used({handle: len(held) for handle, held in cells.items()}) == used
        shared += sum(map(len, cells.values())) > used
    assert shared > 50


def interrupted_at(line: int, function: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt before the ``line``-th line of the module that a call runs; return whether it had one."""
    try:
        with LineTracer(line, CellCount.__module__):
            function()
    except KeyboardInterrupt:
        return True
    return False


CHANGES: list[Callable[[CellCount], object]] = [
    lambda count: count.fork(1, 3, 120),
    lambda count: count.fork(0, 3, 80),
    lambda count: count.trim(1, 110),
    lambda count: count.trim(1, 50),
    lambda count: count.trim(2, 0),
    lambda count: count.close(1),
    lambda count: count.used({0: 100, 1: 20, 2: 130}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_interrupt_at_any_line_is_forgotten_once_the_sequences_are_closed(
    change: Callable[[CellCount], object],
) -> None:
    line, interrupted = 0, True
    while interrupted:
        line += 1
        count = CellCount()
        count.fork(0, 1, 100)
        count.fork(1, 2, 120)
        interrupted = interrupted_at(line, lambda count=count: change(count))  # type: ignore[misc]
        lengths = {0: 100, 1: 130, 2: 130, 3: 130}
        assert max(lengths.values()) <= count.used(lengths) <= sum(lengths.values())
        count.fork(1, 4, 130)
        lengths[4] = 130
        assert max(lengths.values()) <= count.used(lengths) <= sum(lengths.values())
        for sequence in (1, 2, 3, 4):
            count.close(sequence)
            del lengths[sequence]
            assert max(lengths.values()) <= count.used(lengths) <= sum(lengths.values())
        count.fork(0, 5, 100)
        assert count.used({0: 100, 5: 100}) == 100
    assert line > 3
