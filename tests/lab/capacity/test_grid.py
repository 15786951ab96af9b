"""Grids: the same in this process and in others, and what is advised of them."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.lab.capacity.grid import Cell, Grid
from paceline.lab.capacity.report import Targets, advise, build_report, to_json
from paceline.lab.capacity.simulate import Outcome, ReplicaSettings
from paceline.lab.capacity.traffic import Traffic
from paceline.lab.comparison import Stopped
from paceline.lab.report import render_page
from tests.cli.invoking import heed_interrupts
from tests.lab.capacity.scenes import RECORDINGS, costs, found, memory_bound, outcome

SETTINGS = ReplicaSettings(costs(memory_bound, sampling_s=1e-4), RECORDINGS, slots=2)
POISSON = Traffic(4.0, requests=12, prompt_tokens=64, prefixes=2, prefix_tokens=48, answer_tokens=8)
LOADS = {"Poisson": POISSON, "bursty": dataclasses.replace(POISSON, burstiness=0.25)}
GRID = Grid(LOADS, [1, 2], SETTINGS, 2, seed=1)
TARGETS = Targets(ttft_s=0.5, tpot_s=0.1)


def never() -> bool:
    return False


@pytest.mark.long
def test_other_processes_find_the_same() -> None:
    told: list[Cell] = []
    here = GRID.run(1, stopped=never, advance=told.append)
    assert told == list(here) == GRID.cells
    assert len(here) == 2 * (2 + 4)
    assert GRID.run(2, stopped=never, advance=told.append) == here
    assert sorted(map(repr, told[12:])) == sorted(map(repr, GRID.cells))
    with pytest.raises(Stopped):
        GRID.run(2, stopped=lambda: True, advance=told.append)


@pytest.mark.long
def test_an_interrupt_from_a_terminal_leaves_it_to_who_asked_to_end_the_processes() -> None:
    """The signal comes to all processes of the group, those that are still starting included."""
    asks = (
        "import dataclasses, signal\n"
        "from paceline.cli.interrupts import hold_interrupts\n"
        "from tests.lab.capacity.test_grid import GRID, LOADS, Stopped\n"
        "loads = {name: dataclasses.replace(load, requests=300) for name, load in LOADS.items()}\n"
        "with hold_interrupts() as interrupted:\n"
        "    print('begins', flush=True)\n"
        "    try:\n"
        "        dataclasses.replace(GRID, loads=loads).run(2, stopped=interrupted.is_set, advance=print)\n"
        "    except Stopped:\n"
        "        print('ended')\n"
    )
    asking = subprocess.Popen(
        [sys.executable, "-c", asks],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    assert asking.stdout is not None
    assert asking.stdout.readline() == "begins\n"
    os.killpg(asking.pid, signal.SIGINT)
    assert asking.communicate(timeout=60) == ("ended\n", "")


def test_a_grid_can_be_stopped_within_a_simulation() -> None:
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        return asked > 5

    with pytest.raises(Stopped):
        GRID.run(1, stopped=stopped, advance=lambda cell: pytest.fail("none was made"))
    assert asked == 6


def test_advice_is_the_least_that_meets_the_targets() -> None:
    (advice,) = advise(found(), TARGETS)
    assert advice.replicas == {(False, False): None, (False, True): 4, (True, False): 4, (True, True): 2}
    assert advice.saving == (
        "Poisson: with speculation and 2 replicas 20% of the prompts' tokens are read with prefix affinity, 80% without"
    )


@pytest.mark.parametrize(
    ("one", "meets"),
    [
        (outcome(1, 0.5, tpot_s=0.1), True),
        (outcome(1, 0.51), False),
        (outcome(1, 0.1, tpot_s=0.11), False),
        # It is quick as long as the load lasts, and the queue grows.
        (outcome(1, 0.1, busy=0.99), False),
        (dataclasses.replace(outcome(1, 0.1), tpot_s=[]), True),
    ],
)
def test_targets(one: Outcome, *, meets: bool) -> None:
    assert TARGETS.are_met(one) is meets


def test_the_report_has_all_figures_and_escapes_names() -> None:
    report = build_report(
        found(),
        {"Poisson": POISSON},
        TARGETS,
        names=["target: <b>"],
        slots=2,
        machine={"processor": "one"},
        left_out=["2 of 4 answers"],
    )
    assert [tile.figure for tile in report.tiles] == ["2", "4"]
    page = render_page(report)
    assert "&lt;b&gt;" in page
    assert "<b>" not in page.split("<style>")[0] + page.split("</style>")[1].split('<div class="tiles">')[0]
    assert "&gt; 4" in page, "plain, without affinity"
    assert page.count("<svg") >= 3
    assert "There was no time for 2 of 4 answers." in page
    facts = to_json(found(), {"Poisson": POISSON}, TARGETS)
    assert len(facts["simulations"]) == 10
    first = facts["simulations"][0]
    assert (first["load"], first["replicas"], first["speculative"]) == ("Poisson", 1, False)
    assert first["ttft_s"] == {"p50": 2.4, "p99": 2.4}
    assert first["tokens_per_s"] == 10.0
    assert not first["meets_targets"]
    assert facts["advice"][0]["replicas"][3] == {"speculative": True, "affinity": True, "least": 2}
