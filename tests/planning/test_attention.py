"""Whether attention is fused, by what rounds cost, in virtual time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from typing import Final

import pytest

from paceline.core.clock import VirtualClock
from paceline.engines.options import ModelOptions
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.planning.costs.attention import MAX_S, like_target, measure_attention

Costs = Callable[[bool, int, int], float]
"""Seconds of a pass by fused, rows and the context of each row: that of its own request, or the cells of all."""

Table = Mapping[int, Mapping[int, tuple[float, float]]]
"""Milliseconds of a pass, fused and not, by context and rows."""

XEON: Final[Table] = {
    60: {1: (12.0, 13.3), 4: (24.7, 25.7), 16: (75, 70), 64: (236, 243)},
    240: {1: (14.9, 13.0), 4: (34.1, 26.1), 16: (109, 72), 64: (254, 270)},
    600: {1: (21.5, 15.5), 4: (53.6, 31.5), 16: (174, 81), 64: (292, 289)},
    1200: {1: (27.0, 17.0), 4: (83.8, 34.1), 16: (284, 92), 64: (344, 339)},
}
"""SmolLM2 in Q4_1 on two cores of a Xeon."""

EPYC: Final[Table] = {
    120: {1: (9.7, 10.2), 8: (34.6, 35.0), 64: (230, 238)},
    400: {1: (10.6, 11.0), 8: (42.1, 39.0), 64: (262, 270)},
    1400: {1: (12.8, 15.0), 8: (54.3, 53.0), 64: (352, 350)},
}
"""The same on two cores of an EPYC, by the ratios that were found there. It is no straight line."""

EPYC_1B: Final[Table] = {
    120: {1: (53.6, 57), 8: (111, 110), 64: (610, 620)},
    400: {1: (55.2, 60), 8: (127, 118), 64: (655, 660)},
    1400: {1: (67.9, 70), 8: (178, 150), 64: (800, 800)},
}
"""A 1b in Q4_0 there: plain rounds are faster fused, and drafts are not."""


class EitherEngine(ScriptedEngine):
    """Passes take other times with fused attention than without."""

    def __init__(
        self,
        costs: Costs,
        context_length: int = 4096,
        max_sequences: int = 1,
        *,
        copies: bool = True,
        cells: int | None = None,
    ) -> None:
        self.fused_attention = False
        self.turns: list[bool] = []
        self.passes: set[tuple[bool, int, int, int]] = set()
        self.copies = copies
        clock = VirtualClock()

        def cost(rows: int, cells: int) -> float:
            # The fused kernel passes over the cells of others, and all requests are equally long here.
            requests = len(self._sequences)
            context = cells // requests if self.fused_attention else cells
            self.passes.add((self.fused_attention, requests, rows, cells // requests))
            return costs(self.fused_attention, rows, context) * self.slowness(clock.now_s())

        super().__init__(
            random_model(20, seed=1, order=1),
            ScriptedVocabulary.of_size(20),
            context_length=context_length,
            max_sequences=max_sequences,
            cost=cost,
            clock=clock,
            cells=cells,
        )

    def slowness(self, now_s: float) -> float:
        return 1.0

    def fuse_attention(self, fused: bool) -> None:
        assert not self._sequences, "what is cached would be lost"
        self.fused_attention = fused
        self.turns.append(fused)

    def lengthen(self, sequence: int, length: int) -> bool:
        if not self.copies:
            return False
        committed = self._sequences[sequence].committed
        committed += committed[:1] * (length - len(committed))
        return True


def constant(ratio: float, row_s: float = 0.002) -> Costs:
    return lambda fused, rows, context: row_s * (0.5 + 0.5 * rows) * (ratio if fused else 1.0)


def lines(row_s: float, row_token_s: float, fused_s: float, fused_row_token_s: float, read_s: float = 0.004) -> Costs:
    """A pass that reads weights, and scores each row against the context."""

    def costs(fused: bool, rows: int, context: int) -> float:
        fixed_s = row_s * (1.0 + 0.1 * rows) + (fused_s if fused else 0.0)
        return max(fixed_s, read_s * rows / 2) + rows * context * (fused_row_token_s if fused else row_token_s)

    return costs


def of_table(table: Table) -> Costs:
    """Straight between the entries of a table, and on beyond them."""

    def costs(fused: bool, rows: int, context: int) -> float:
        by_rows = {
            wide: on([(tokens, row[wide][0 if fused else 1]) for tokens, row in table.items()], context)
            for wide in next(iter(table.values()))
        }
        return on(sorted(by_rows.items()), rows) / 1000

    return costs


def on(points: list[tuple[int, float]], at: int) -> float:
    (a, a_y), (b, b_y) = next((pair for pair in itertools.pairwise(points) if at <= pair[1][0]), points[-2:])
    return max(a_y + (at - a) * (b_y - a_y) / (b - a), min(a_y, b_y) / 2)


ANSWER: Final = 200
"""Tokens."""
NARROW: Final = (1,)
WIDE: Final = (4, 16)
WIDE_EACH: Final = (4,)


def seconds(costs: Costs, fused: bool, requests: int, rows: tuple[int, ...], after: int) -> float:
    """Mean seconds of rounds of an answer, where all requests have as many tokens before."""
    contexts = range(after, after + ANSWER, 20)
    times_s = [
        costs(fused, requests * each, context * (1 if fused else requests)) for each in rows for context in contexts
    ]
    return statistics.mean(times_s)


def losses(costs: Costs, fused: bool, requests: tuple[int, ...], wide_share: float) -> dict[str, float]:
    """Share of the time that a choice takes more than the better one of each case, of a mix of rounds."""
    found = {}
    for number, after in itertools.product(requests, (50, 1000)):
        mixed_s = {}
        for each in (False, True):
            shares = (NARROW, 1.0 - wide_share), (WIDE if number == 1 else WIDE_EACH, wide_share)
            # Shares are of the time of rounds that are not fused.
            mixed_s[each] = sum(
                share * seconds(costs, each, number, rows, after) / seconds(costs, False, number, rows, after)
                for rows, share in shares
            )
        found[f"{number} requests after {after}"] = mixed_s[fused] / mixed_s[not fused] - 1.0
    return found


MIXES: Final = {"plain": 0.0, "copies": 0.15, "drafts": 0.75, "drafts alone": 1.0}
"""Share of the time that goes to rounds with drafts."""


DISPUTED: Final = {
    ("a Xeon", "plain"),
    ("a Xeon", "copies"),
    ("a 1b on an EPYC", "drafts"),
    ("a 1b on an EPYC", "drafts alone"),
}
"""Where one request and four, or short and long answers, would have it otherwise by more than that."""


def shares_of(mix: str) -> float:
    """The share that the choice goes by."""
    return 0.75 if mix.startswith("drafts") else 0.15


def choice(engine: EitherEngine, wide_share: float = 0.15) -> bool:
    return measure_attention(engine, clock=engine.clock).is_fusing_faster(wide_share)


TABLES: Final[dict[str, Costs]] = {
    "a Xeon": of_table(XEON),
    "an EPYC": of_table(EPYC),
    "a 1b on an EPYC": of_table(EPYC_1B),
    "fused is faster everywhere": constant(0.9),
    "unfused is faster everywhere": constant(1.1),
    "fused lines are steeper": lines(0.012, 3e-6, 0.0, 1.3e-5),
    "fused lines are flatter": lines(0.012, 1.2e-5, 0.0, 4e-6),
    "a large model, fused lines are steeper": lines(0.4, 2e-5, -0.004, 9e-5, read_s=0.1),
    "fused passes cost more to start with, but not by the token": lines(0.01, 2e-5, 2e-4, 3e-6),
    "a small model": lines(4e-4, 1e-6, -2e-5, 4e-7, read_s=1e-4),
}


@pytest.mark.parametrize(
    ("table", "copies"),
    [*((table, True) for table in TABLES), *((table, False) for table in TABLES if "EPYC" not in table)],
)
def test_one_request_is_as_fast_as_with_the_better_choice(table: str, copies: bool) -> None:
    costs = TABLES[table]
    times = measure_attention(engine := EitherEngine(costs, copies=copies), clock=engine.clock)
    for mix, share in MIXES.items():
        lost = losses(costs, times.is_fusing_faster(shares_of(mix)), (1,), share)
        assert max(lost.values()) <= 0.03, (mix, lost)


@pytest.mark.parametrize("table", TABLES)
def test_one_request_and_four_are_as_fast_as_with_the_better_choice(table: str) -> None:
    costs = TABLES[table]
    times = measure_attention(engine := EitherEngine(costs, max_sequences=4), clock=engine.clock)
    for mix, share in MIXES.items():
        fused = times.is_fusing_faster(shares_of(mix))
        lost, other = (losses(costs, each, (1, 4), share) for each in (fused, not fused))
        assert max(lost.values()) <= (0.03 if (table, mix) not in DISPUTED else max(other.values()) / 3), (
            mix,
            lost,
            other,
        )


def test_cells_of_others_count_where_several_requests_share_rounds() -> None:
    # Alone the unfused lines are flatter; of four requests, each is scored against four times as many cells.
    costs = lines(0.012, 3e-6, 0.0, 5e-6)
    chosen = {}
    for requests in (1, 4):
        engine = EitherEngine(costs, max_sequences=requests)
        chosen[requests] = measure_attention(engine, clock=engine.clock).is_fusing_faster(0.0)
    assert chosen == {1: False, 4: True}


@pytest.mark.parametrize(("ratio", "fused"), [(0.93, True), (0.975, True), (0.985, False), (1.0, False), (1.1, False)])
@pytest.mark.parametrize("requests", [1, 4])
def test_attention_is_fused_where_rounds_gain_by_it(ratio: float, fused: bool, requests: int) -> None:
    engine = EitherEngine(constant(ratio), max_sequences=requests)
    assert choice(engine) is fused
    assert not engine._sequences


def test_what_drafts_decides_which_rounds_count() -> None:
    engine = EitherEngine(lambda fused, rows, context: 1e-3 * (0.95 if rows == 1 else 1.4) if fused else 1e-3)
    times = measure_attention(engine, clock=engine.clock)
    assert [times.is_fusing_faster(wide_share) for wide_share in (0.0, 0.15, 0.75)] == [True, False, False]


def test_contexts_count_up_to_the_one_asked_for() -> None:
    def costs(fused: bool, rows: int, context: int) -> float:
        return 2e-4 + 1e-7 * context * (3.0 if fused else 1.0) - (4e-5 if fused else 0.0)

    assert choice(EitherEngine(costs)) is False
    assert choice(EitherEngine(costs, context_length=200)) is True, "there is no long context to lose in"
    assert choice(EitherEngine(costs, context_length=100)) is True


class Drifting(EitherEngine):
    """A machine that becomes slower or faster."""

    per_second = 0.0

    def slowness(self, now_s: float) -> float:
        return 1.0 + self.per_second * now_s


@pytest.mark.parametrize("per_second", [0.2, -0.2])
@pytest.mark.parametrize("ratio", [0.97, 1.0])
@pytest.mark.parametrize("requests", [1, 4])
def test_a_machine_that_changes_meanwhile_decides_nothing(ratio: float, per_second: float, requests: int) -> None:
    engine = Drifting(constant(ratio), max_sequences=requests)
    engine.per_second = per_second
    assert choice(engine) is (ratio < 1.0)


@pytest.mark.parametrize("row_s", [1e-5, 1e-3, 0.005])
@pytest.mark.parametrize("requests", [1, 4])
def test_it_takes_so_many_seconds_and_the_first_passes(row_s: float, requests: int) -> None:
    engine = EitherEngine(constant(0.9, row_s), max_sequences=requests)
    assert choice(engine) is True
    assert engine.clock.now_s() <= MAX_S * 1.2 + 4 * row_s


@pytest.mark.parametrize("requests", [1, 4])
def test_on_a_slow_machine_each_way_has_one_turn_with_both_contexts(requests: int) -> None:
    engine = EitherEngine(lines(0.5, 2e-5, -0.02, 6e-5, read_s=0.2), max_sequences=requests)
    assert choice(engine, 0.0) is (requests == 4)
    assert engine.turns == [False, True]
    for fused in (False, True):
        for context in (32, 1024):
            assert {(fused, 1, 1, context), (fused, 1, 8, context)} <= engine.passes
            assert ((fused, 4, 4, context) in engine.passes) is (requests == 4)
    # As long as 32 tokens in each of four turns took to be read.
    assert engine.clock.now_s() <= 4 * (2 * 0.5 + 32 * 0.1)


@pytest.mark.parametrize("read_s", [0.004, 0.2])
def test_a_context_that_has_to_be_read_is_long_enough_to_tell_a_slope(read_s: float) -> None:
    engine = EitherEngine(lines(0.02, 2e-5, -0.002, 6e-5, read_s=read_s), copies=False)
    assert choice(engine, 0.0) is False
    contexts = {context for _, _, rows, context in engine.passes if rows == 8}
    assert len(contexts) == 2, "both ways are timed at the same contexts"
    assert max(contexts) - min(contexts) >= 256


def test_a_cache_without_room_for_several_is_timed_with_one() -> None:
    engine = EitherEngine(constant(0.9), max_sequences=4, cells=1500)
    times = measure_attention(engine, clock=engine.clock)
    assert {each.context for each in times.rounds if each.requests == 1} == {32, 1024}
    assert times.is_fusing_faster(0.15)
    assert not engine._sequences


def test_progress_is_told_to_its_end() -> None:
    for row_s, shares in ((0.0005, [0.25, 0.5, 0.75, 1.0]), (0.5, [0.25, 0.5])):
        told: list[float] = []
        engine = EitherEngine(constant(0.9, row_s))
        measure_attention(engine, clock=engine.clock, report=told.append)
        assert told == [*shares, 1.0]


def test_a_draft_takes_its_targets_attention() -> None:
    target = ModelOptions(embedded_target(), flash_attention=True)
    draft = ModelOptions(embedded_draft())
    assert like_target(draft, target).flash_attention is True
    assert like_target(ModelOptions(embedded_draft(), flash_attention=False), target).flash_attention is False
    assert like_target(draft, ModelOptions(embedded_target(), exact=True)).flash_attention is None
