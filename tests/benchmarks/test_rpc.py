"""Workers in namespaces, cables that are pulled, and what is said of passes."""

from __future__ import annotations

import dataclasses
import queue
import sys
from collections.abc import Iterator

import pytest
from benchmarks.__main__ import main
from benchmarks.rpc.measuring import summarize_passes
from benchmarks.rpc.network import Process, Site, sites
from benchmarks.rpc.stand_ins import ANOTHER_VERSION

from paceline.core.errors import CapabilityError, EngineError
from paceline.engines.rpc.workers import Watch, ask_worker
from tests.proofs import LINES
from tests.timing import WAIT_S


@pytest.fixture
def site() -> Iterator[Site]:
    try:
        with sites(1, in_namespaces=True) as (site,):
            yield site
    except CapabilityError as error:
        LINES.append(f"nothing was tested in a network namespace: {error}")
        pytest.skip(str(error))


def stand_in(*words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.rpc.stand_ins", *words]


def test_a_worker_in_a_namespace_is_lost_with_its_cable(site: Site) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    worker = Process(site.command(stand_in("worker", site.endpoint)))
    proxy = Process(stand_in("delay", site.endpoint))
    try:
        worker.wait_for(site.host)
        endpoint = proxy.wait_for("127.0.0.1")
        proxy.tell("10")
        found = ask_worker(endpoint)
        assert found.versions["ggml"] == ANOTHER_VERSION
        assert found.round_trip_s >= 0.02
        watch = Watch([endpoint], told.put)
        site.plug(is_in=False)
        assert told.get(timeout=WAIT_S) == f"the RPC worker at {endpoint} has not answered for 1.5 s"
        watch.close()
        # This machine's loopback is another one than the worker's.
        site.plug(is_in=True)
        assert ask_worker(site.endpoint).clients == 0
    finally:
        worker.end()
        proxy.end()


def test_a_namespace_is_gone_afterwards(site: Site) -> None:
    with sites(1, in_namespaces=True) as (other,):
        assert other.host != site.host
    again = Process(other.command([sys.executable, "-c", ""]))
    with pytest.raises(EngineError, match="ended: "):
        again.wait_for("anything")
    again.end()


def test_where_no_namespace_can_be_made_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.rpc.network.shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "rpc", "--parts", "passes"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--loopback" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "tea"], "--parts tea: choose from contract, passes"),
        (["--round-trips", "10,40"], "give 0, too"),
        (["--round-trips", "far"], "'far': give milliseconds from 0 to 1000"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "rpc", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_passes_are_held_beside_round_trips_and_what_they_compute() -> None:
    times_s = {0.0: {1: [0.002, 0.001, 0.004], 8: [0.004] * 3}, 40.0: {1: [0.082, 0.09, 0.08], 8: [0.126] * 3}}
    near, near_wide, far, far_wide = summarize_passes(times_s, workers=2)
    assert (near["ratio"], near["round_trips"]) == (1.0, None)
    assert far["expected_s"] == pytest.approx(0.082)
    assert (far["ratio"], far["round_trips"]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert near_wide["rows"] == far_wide["rows"] == 8
    # One round trip too many shows.
    assert far_wide["ratio"] == pytest.approx(0.126 / 0.084)
    assert far_wide["round_trips"] == pytest.approx(3.05)


def test_a_command_on_loopback_is_as_it_is() -> None:
    with sites(2, in_namespaces=False) as (one, other):
        assert one.command(["true"]) == ["true"]
        assert (one.host, one.namespace) == ("127.0.0.1", None)
        assert dataclasses.replace(other, port=one.port) == one
        assert other.port != one.port
