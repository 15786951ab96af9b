"""Loads: when requests come, and that their answers are pieces of what was recorded."""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np
import pytest

from paceline.core.errors import InputError
from paceline.lab.capacity.traffic import Traffic, make_arrivals
from tests.lab.capacity.scenes import RECORDINGS

TRAFFIC = Traffic(4.0, requests=4000, prompt_tokens=8, prefixes=4, prefix_tokens=5, answer_tokens=12)


@pytest.mark.parametrize("burstiness", [1.0, 0.25, 4.0])
def test_requests_come_at_the_rate_and_as_irregularly_as_asked(burstiness: float) -> None:
    arrivals = make_arrivals(dataclasses.replace(TRAFFIC, burstiness=burstiness), RECORDINGS)
    gaps_s = np.diff([0.0, *(arrival.at_s for arrival in arrivals)])
    variation = 1 / burstiness**0.5
    # Four standard errors: a false alarm in 16,000.
    assert statistics.fmean(gaps_s) == pytest.approx(1 / 4, rel=4 * variation / len(gaps_s) ** 0.5)
    assert np.std(gaps_s) / np.mean(gaps_s) == pytest.approx(variation, rel=0.15)


def test_bursty_and_poisson_loads_have_the_same_requests() -> None:
    poisson = make_arrivals(TRAFFIC, RECORDINGS)
    bursty = make_arrivals(dataclasses.replace(TRAFFIC, burstiness=0.25), RECORDINGS)
    for one, other in zip(poisson, bursty, strict=True):
        assert one.at_s != other.at_s
        assert dataclasses.replace(one, at_s=0.0) == dataclasses.replace(other, at_s=0.0)


def test_prompts_share_beginnings_and_nothing_else() -> None:
    arrivals = make_arrivals(dataclasses.replace(TRAFFIC, requests=200), RECORDINGS)
    by_prefix: dict[int, set[tuple[int, ...]]] = {}
    for arrival in arrivals:
        assert len(arrival.prompt_ids) == 8
        by_prefix.setdefault(arrival.prefix, set()).add(tuple(arrival.prompt_ids[:5]))
    assert sorted(by_prefix) == [0, 1, 2, 3]
    assert all(len(beginnings) == 1 for beginnings in by_prefix.values())
    assert len({tuple(arrival.prompt_ids[5:]) for arrival in arrivals}) > 190


def test_answers_are_pieces_of_the_recordings_with_what_was_drafted_there() -> None:
    places: dict[tuple[int, ...], set[object]] = {}
    for recording in RECORDINGS:
        for place, chain in enumerate(recording.traces[1].chains):
            # What is drafted behind two tokens; a text of random tokens seldom has the same two again.
            places.setdefault(recording.token_ids[place : place + 2], set()).add(chain)
    traffic = dataclasses.replace(TRAFFIC, requests=50, answer_tokens=100)
    arrivals = make_arrivals(traffic, RECORDINGS)
    lengths = [len(arrival.recording.token_ids) for arrival in arrivals]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert statistics.fmean(lengths) == pytest.approx(100, rel=0.2)
    known = silent = 0
    for arrival in arrivals:
        recording = arrival.recording
        chains = recording.traces[1].chains
        assert len(chains) == len(recording.token_ids) - 1
        for place, chain in enumerate(chains):
            pair = recording.token_ids[place : place + 2]
            if not chain:
                silent += 1
            elif chain in places.get(pair, ()):
                known += 1
    joins = sum(length // 40 + 1 for length in lengths)
    assert silent <= joins, "only where one text ends and another begins nothing was recorded"
    assert known == sum(length - 1 for length in lengths) - silent


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 0.0}, "`rate` is 0: give a finite number above 0"),
        ({"rate": float("inf")}, "`rate` is inf"),
        ({"burstiness": float("nan")}, "`burstiness` is nan"),
        ({"requests": 0}, "`requests` is 0: give 1 or more"),
        ({"prefixes": 0}, "`prefixes` is 0"),
        ({"answer_tokens": 0}, "`answer_tokens` is 0"),
        ({"prefix_tokens": 8}, "`prefix_tokens` is 8 and `prompt_tokens` 8: of a prompt at least the last token"),
        ({"prefix_tokens": -1}, "`prefix_tokens` is -1"),
    ],
)
def test_what_is_no_load(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(TRAFFIC, **changes)  # type: ignore[arg-type]
