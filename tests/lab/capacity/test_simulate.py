"""Simulations against queueing theory where it has an answer, and against what must hold where it has none."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.core.errors import InputError
from paceline.lab.capacity.simulate import Gateway, Outcome, Replica, ReplicaSettings, percentiles
from paceline.lab.capacity.traffic import Arrival, Traffic, make_arrivals
from tests.lab.capacity.scenes import RECORDINGS, costs, memory_bound, run

GPU = ReplicaSettings(costs(memory_bound), RECORDINGS)
LOAD = Traffic(1.0, requests=30, prompt_tokens=96, prefixes=4, prefix_tokens=64, answer_tokens=24)


def lindley_waits(gaps_s: Sequence[float], service_s: float) -> list[float]:
    """Return the waits of a queue with one server (D. V. Lindley, 1952): each is what is left of the one before."""
    waits_s = [0.0]
    for gap_s in gaps_s[1:]:
        waits_s.append(max(waits_s[-1] + service_s - gap_s, 0.0))
    return waits_s


@pytest.mark.parametrize("utilisation", [0.3, 0.7])
def test_one_request_at_a_time_waits_as_in_an_m_d_1_queue(utilisation: float) -> None:
    """Each wait is that of the recursion, whose mean is rho s / 2 (1 - rho) (Pollaczek and Khinchine)."""
    service_s = 0.5
    settings = dataclasses.replace(GPU, costs=costs(lambda rows: service_s), slots=1)
    # An answer of one token is the pass that reads the prompt, so every service takes as long.
    rate = utilisation / service_s
    traffic = Traffic(rate, requests=300, prompt_tokens=3, prefix_tokens=0, answer_tokens=1, spread=0.0)
    outcome = run(traffic, settings)
    waits_s = [ttft_s - service_s for ttft_s in outcome.ttft_s]
    assert waits_s == pytest.approx(lindley_waits(traffic.draw_gaps_s(), service_s), abs=1e-9)
    assert outcome.busy == pytest.approx(utilisation, rel=0.2)
    batches = np.reshape(
        lindley_waits(dataclasses.replace(traffic, requests=60_000).draw_gaps_s(), service_s), (20, -1)
    )
    means_s = batches.mean(axis=1)
    # Student's t of 19 degrees of freedom at 99.9%: a false alarm in 1,000.
    error_s = 3.88 * means_s.std(ddof=1) / math.sqrt(len(means_s))
    expected_s = utilisation * service_s / (2 * (1 - utilisation))
    assert abs(means_s.mean() - expected_s) < error_s < 0.15 * expected_s


def test_an_idle_replica_takes_as_long_as_its_passes() -> None:
    traffic = Traffic(1e-3, requests=5, prompt_tokens=64, prefix_tokens=0, answer_tokens=10, spread=0.0)
    outcome = run(traffic, GPU)
    assert outcome.ttft_s == pytest.approx([memory_bound(64)] * 5)
    assert outcome.tpot_s == pytest.approx([memory_bound(1)] * 5)
    assert outcome.gaps_s == pytest.approx([memory_bound(1)] * 5 * 9)


def test_own_time_and_sampling_are_charged() -> None:
    slow = costs(memory_bound, pass_factor=2.0, round_own_s=0.01, sampling_s=0.003)
    traffic = Traffic(1e-3, requests=2, prompt_tokens=1, prefix_tokens=0, answer_tokens=5, spread=0.0)
    outcome = run(traffic, dataclasses.replace(GPU, costs=slow))
    assert outcome.tpot_s == pytest.approx([2 * memory_bound(1) + 0.01 + 0.003] * 2)


def test_wide_passes_cost_what_a_prompt_was_seen_to_take() -> None:
    read = costs(memory_bound, prompt_rows=512, prompt_s=0.12)
    assert read.round_s(64) == pytest.approx(memory_bound(64))
    assert read.round_s(512) == pytest.approx(0.12)
    assert read.round_s(288) == pytest.approx((0.12 + memory_bound(64)) / 2)
    # What a profile alone says: as much for each row as in its widest pass.
    assert costs(memory_bound).round_s(512) == pytest.approx(8 * memory_bound(64))


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("affinity", [False, True])
def test_every_token_of_every_request_is_served(replicas: int, *, speculative: bool, affinity: bool) -> None:
    traffic = dataclasses.replace(LOAD, rate=3.0, burstiness=0.25)
    outcome = run(traffic, GPU, replicas, speculative=speculative, affinity=affinity)
    answers = [arrival.recording.token_ids for arrival in make_arrivals(traffic, RECORDINGS)]
    assert outcome.answer_tokens == sum(map(len, answers))
    assert len(outcome.ttft_s) == len(answers)
    assert all(seconds > 0 for seconds in outcome.ttft_s)
    assert outcome.prompt_tokens == 96 * len(answers)
    # Each reads tokens of its own, a few of which others happen to have, and the first of each beginning reads that.
    assert 0.98 * (32 * len(answers) + 4 * 64) <= outcome.read_tokens <= outcome.prompt_tokens
    assert 0 < outcome.busy <= 1


def test_a_seed_makes_the_same_simulation_again() -> None:
    learned = GPU.learn()

    def once(seed: int) -> Outcome:
        return run(dataclasses.replace(LOAD, seed=seed), GPU, 3, speculative=True, affinity=True, learned=learned)

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_more_replicas_wait_less_on_average() -> None:
    traffic = dataclasses.replace(LOAD, rate=6.0, requests=30)
    for speculative, seeds in ((False, 3), (True, 1)):
        tails_s = []
        for replicas in (1, 2, 4):
            outcomes = [
                run(dataclasses.replace(traffic, seed=seed), GPU, replicas, speculative=speculative)
                for seed in range(seeds)
            ]
            tails_s.append(statistics.fmean(percentiles(outcome.ttft_s)["p99"] for outcome in outcomes))  # type: ignore[index]
        assert tails_s == sorted(tails_s, reverse=True)


def test_speculation_serves_more_where_rows_are_cheap_and_the_draft_is_good() -> None:
    """One request at a time: the gain is that of the replay, and shorter answers leave shorter queues."""
    settings = dataclasses.replace(GPU, slots=1)
    traffic = dataclasses.replace(LOAD, rate=0.8)
    plain = run(traffic, settings)
    drafted = run(traffic, settings, speculative=True, learned=settings.learn())
    assert statistics.fmean(drafted.tpot_s) < 0.6 * statistics.fmean(plain.tpot_s)
    assert statistics.fmean(drafted.ttft_s) < statistics.fmean(plain.ttft_s)
    assert drafted.busy < plain.busy
    assert plain.keeps_up or drafted.keeps_up


def test_affinity_reads_less() -> None:
    traffic = dataclasses.replace(LOAD, rate=2.0, prefixes=8)
    without, with_it = (run(traffic, GPU, 4, affinity=affinity) for affinity in (False, True))
    least = 32 * traffic.requests + 8 * 64
    assert 0.98 * least <= with_it.read_tokens < 1.3 * least
    assert with_it.read_tokens < 0.8 * without.read_tokens
    assert statistics.fmean(with_it.ttft_s) < statistics.fmean(without.ttft_s)


def test_without_shared_beginnings_affinity_is_nothing() -> None:
    traffic = dataclasses.replace(LOAD, prefix_tokens=0, prefixes=1000)
    without, with_it = (run(traffic, GPU, 2, affinity=affinity) for affinity in (False, True))
    assert with_it.read_tokens == without.read_tokens == without.prompt_tokens


def arrival(at_s: float, prefix: int, recording: int = 0) -> Arrival:
    return Arrival(at_s, prefix, [prefix] * 40 + [recording], RECORDINGS[recording])


def test_affinity_gives_way_where_one_replica_has_too_much() -> None:
    replicas = [Replica(GPU, speculative=False, learned=None) for _ in range(2)]
    gateway = Gateway(replicas, affinity=True, balance=2, seed=1)
    counts = []
    for number in range(6):
        gateway.send(arrival(0.001 * number, 7))
        counts.append(sorted(replica.count(0.001 * number) for replica in replicas))
    # The fourth finds three more there than at the other one; then both have read the beginning, and share.
    assert counts == [[0, 1], [0, 2], [0, 3], [1, 3], [2, 3], [3, 3]]


def test_a_new_beginning_goes_to_the_least_loaded_and_stays_there() -> None:
    replicas = [Replica(GPU, speculative=False, learned=None) for _ in range(3)]
    gateway = Gateway(replicas, affinity=True, balance=10, seed=1)
    sent = [gateway.send(arrival(0.001 * number, number % 3, number % 4))[0] for number in range(9)]
    assert sorted(sent[:3]) == [0, 1, 2]
    assert sent == sent[:3] * 3


def test_a_request_is_counted_until_its_last_token_and_waits_for_the_round_that_runs() -> None:
    replica = Replica(GPU, speculative=False, learned=None)
    first = replica.take(arrival(0.0, 1))
    replica.run_until(0.01)
    assert replica.now_s == pytest.approx(GPU.costs.round_s(41)), "a round is made whole"
    second = replica.take(arrival(0.01, 2))
    replica.finish()
    assert second.stats.added_s == pytest.approx(GPU.costs.round_s(41))
    ends_s = first.stats.arrivals_s[-1]
    assert replica.count(np.nextafter(ends_s, 0.0)) == 2
    assert replica.count(ends_s) == 1


def test_percentiles_of_nothing() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p99": 3.0}


def test_prompts_longer_than_a_pass_are_read_in_several() -> None:
    settings = dataclasses.replace(GPU, max_rows=32)
    traffic = Traffic(1e-3, requests=2, prompt_tokens=96, prefix_tokens=0, answer_tokens=2, spread=0.0)
    assert run(traffic, settings).ttft_s == pytest.approx([3 * memory_bound(32)] * 2)


def test_recordings_without_drafters_cannot_be_drafted_with() -> None:
    bare = [dataclasses.replace(recording, traces=()) for recording in RECORDINGS]
    settings = dataclasses.replace(GPU, recordings=bare)
    plain, drafted = (run(LOAD, settings, speculative=speculative) for speculative in (False, True))
    assert plain.tpot_s == drafted.tpot_s
    with pytest.raises(InputError, match="no recordings"):
        dataclasses.replace(settings, recordings=[]).learn()
