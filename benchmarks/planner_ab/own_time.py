"""What a policy takes to decide, measured once: as a constant, as figures must be the same whenever they are asked for.

Between slices of it the same fixed work is done, and what deciding takes is held against what that took. So a machine
that is slower or busier for a while, or another one, changes little.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from benchmarks.planner_ab.charging import OwnTimes
from benchmarks.planner_ab.scenes import ASKING_S, Build
from benchmarks.stopwatch import DROPPED, PLAIN, SILENT, VERIFIED, Stopwatch
from paceline.lab.replaying.recording import Recording
from paceline.lab.replaying.replay import replay
from paceline.planning.costs.profile import CostProfile

SLICES: Final = 9
REQUESTS: Final = (1, 2, 4, 8, 16)

REFERENCE_US: Final = 4_400.0
"""What the fixed work takes on a quiet core of an AMD EPYC: what this module calls a microsecond is one there."""

_MIN_ROUNDS: Final = 20
_DISTURBED: Final = 0.1
"""Of the rounds of a kind, those that took longest: something else ran in them."""
_KINDS: Final = (PLAIN, SILENT, DROPPED, VERIFIED)


def measure(build: Build, texts: Sequence[Recording], profiles: Sequence[CostProfile]) -> Iterator[OwnTimes]:
    """Yield what was found after every slice; the last one says what a policy's decisions take.

    Args:
        build: the policy.
        texts: to replay; enough for as many requests as there are at once.
        profiles: costs to replay them with, such that drafts pay with some and not with others.
    """
    slices: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(SLICES):
        for requests in REQUESTS:
            before_us = _reference_us()
            times_us = _times_us(build, texts, profiles, requests)
            scale = 2 * REFERENCE_US / (before_us + _reference_us())
            for kind, rounds_us in times_us.items():
                if len(rounds_us) >= _MIN_ROUNDS:
                    slices[kind, requests].append(scale * _undisturbed_mean(rounds_us))
        yield _table({key: statistics.median(values) for key, values in slices.items()})


def _times_us(
    build: Build, texts: Sequence[Recording], profiles: Sequence[CostProfile], requests: int
) -> Mapping[str, Sequence[float]]:
    times_us: dict[str, list[float]] = defaultdict(list)
    for profile in profiles:
        stopwatch = Stopwatch(build(profile, None))
        replay(texts, stopwatch, profile, concurrent=requests, free_s=ASKING_S)
        for kind, rounds_us in stopwatch.times_us.items():
            times_us[kind] += rounds_us
    return times_us


def _table(found: Mapping[tuple[str, int], float]) -> OwnTimes:
    """Fill the table: where a kind hardly came up, with what it took with other numbers of requests.

    A kind that never did takes what the one before takes; they are in the order of their work.
    """
    table: dict[str, dict[int, float]] = {}
    before = dict.fromkeys(REQUESTS, 0.0)
    for kind in _KINDS:
        known = [requests for requests in REQUESTS if (kind, requests) in found]
        for requests in REQUESTS if known else ():
            nearest = min(known, key=lambda other: abs(other - requests))
            before[requests] = float(f"{found[kind, nearest]:.2g}")
        table[kind] = dict(before)
    return table


def _undisturbed_mean(rounds_us: Sequence[float]) -> float:
    kept = sorted(rounds_us)[: max(round(len(rounds_us) * (1 - _DISTURBED)), 1)]
    return statistics.fmean(kept)


def _reference_us() -> float:
    """Return what the fixed work takes: floats, lists and dicts, as planning has them."""
    started_s = time.perf_counter()
    total, seen = 0.0, {}
    for number in range(30_000):
        weight = 1.0 / (1.0 + number % 17)
        total = 0.9 * total + weight * total * 1e-3
        seen[number % 257] = [weight, total]
    ordered = sorted(seen.items(), key=lambda item: -item[1][0])
    assert ordered
    return 1e6 * (time.perf_counter() - started_s)
