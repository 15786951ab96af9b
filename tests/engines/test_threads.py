"""How many threads passes run on, by what others take of the cores: in made-up time."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import pytest

from paceline.engines.threads import PERIOD_S, PassThreads, SpareCores, busy_seconds, count_cores, usable_cores


class Machine:
    """Cores on which others and this process take a steady share."""

    def __init__(self, others: float = 0.0, own: float = 0.0) -> None:
        self.others, self.own = others, own
        self.now_s = 100.0
        self.busy_s = 1000.0
        self.own_s = 10.0
        self.looks = 0

    def run(self, seconds: float) -> None:
        self.now_s += seconds
        self.busy_s += (self.others + self.own) * seconds
        self.own_s += self.own * seconds

    def cores(self, most: int, cores: int | None = None) -> SpareCores:
        def busy_s() -> float:
            self.looks += 1
            return self.busy_s

        return SpareCores(most, cores or most, busy_s=busy_s, own_s=lambda: self.own_s, clock_s=lambda: self.now_s)


def threads_after(machine: Machine, spare: SpareCores, seconds: float) -> int:
    for _ in range(math.ceil(seconds / 0.01)):
        machine.run(0.01)
        spare.look()
    return spare.threads


@pytest.mark.parametrize(
    ("most", "cores", "others", "threads"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.3, 2),
        (2, 2, 0.7, 1),
        (2, 2, 1.0, 1),
        (2, 2, 2.0, 1),
        (8, 8, 1.0, 7),
        (8, 8, 3.4, 5),
        (8, 8, 20.0, 1),
        (4, 64, 20.0, 4),  # of a large machine a container may use four cores, and others use some of the rest
        (4, 64, 62.0, 2),
        (1, 2, 1.0, 1),
    ],
)
def test_others_leave_so_many_threads(most: int, cores: int, others: float, threads: int) -> None:
    machine = Machine(others=others, own=1.0)
    assert threads_after(machine, machine.cores(most, cores), 1.0) == threads


def test_it_follows_others_within_two_looks() -> None:
    machine = Machine(own=2.0)
    spare = machine.cores(2)
    assert threads_after(machine, spare, 1.0) == 2
    machine.others, machine.own = 1.0, 1.0
    assert threads_after(machine, spare, 2 * PERIOD_S + 0.01) == 1
    machine.others = 0.0
    assert threads_after(machine, spare, 2 * PERIOD_S + 0.01) == 2


def test_it_looks_now_and_then_only() -> None:
    machine = Machine()
    spare = machine.cores(2)
    threads_after(machine, spare, 10.0)
    assert machine.looks <= 10.0 / PERIOD_S + 3


def test_a_pause_is_not_taken_for_now() -> None:
    """After a minute without passes, in which others came, the next looks tell soon what is so now."""
    machine = Machine()
    spare = machine.cores(2)
    threads_after(machine, spare, 1.0)
    machine.others = 2.0
    machine.run(5.0)
    machine.others = 0.0
    machine.run(60.0)
    spare.look()
    machine.others = 1.0
    assert threads_after(machine, spare, 0.12) == 1


def test_where_the_system_does_not_say_all_cores_are_used() -> None:
    def unknown() -> float:
        raise OSError("no such file")

    spare = SpareCores(4, 4, busy_s=unknown)
    assert [spare.look(), spare.look()] == [4, 4]


def test_a_single_thread_needs_no_looks() -> None:
    machine = Machine()
    threads_after(machine, machine.cores(1), 1.0)
    assert machine.looks == 0


def test_busy_time_grows_with_work_and_leaves_idle_and_waiting_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first = busy_seconds()
    assert first > 0
    assert busy_seconds() >= first
    times = [psutil.cpu_times(percpu=True)[0]._replace(user=5.0, nice=0.0, system=2.0, idle=90.0)]
    times = [
        entry._replace(**dict.fromkeys(set(entry._fields) - {"user", "nice", "system", "idle"}, 0.0)) for entry in times
    ]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: times * 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 7}, raising=False)
    assert busy_seconds() == pytest.approx(14.0)


def test_a_sandbox_without_figures_is_an_error_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(percpu: bool) -> None:
        raise RuntimeError("line not found")

    monkeypatch.setattr(psutil, "cpu_times", fails)
    with pytest.raises(OSError, match="does not say how busy"):
        busy_seconds()


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpareCores, "look", lambda self: 1)
    most = usable_cores()
    assert 1 <= most <= count_cores()
    assert PassThreads(None, None).look() == (1, 1)
    assert PassThreads(None, None).most == (most, most)
    assert PassThreads(None, 7).look() == (1, 7)
    assert PassThreads(5, None).look() == (5, 5)
    assert PassThreads(5, 6).look() == (5, 6)


def quota(tmp_path: Path, said: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many cores may be kept busy of sixteen, where ``/proc/self/cgroup`` and control groups are so."""
    monkeypatch.setattr("paceline.engines.threads.count_cores", lambda: 16)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(said, encoding="utf-8")
    for name, content in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return usable_cores(tmp_path / "proc", tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("said", "files", "usable"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, 16),
        ("0::/\n", {"cpu.max": "400000 100000"}, 4),
        ("0::/\n", {"cpu.max": "150000 100000"}, 1),
        ("0::/\n", {"cpu.max": "20000 50000"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000"}, 16),
        # The least of the group and those around it, wherever it stands.
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000", "cpu.max": "800000 100000"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000", "a/cpu.max": "300000 100000"}, 2),
        # A container sees its own group as the outermost.
        ("0::/far/away\n", {"cpu.max": "200000 100000"}, 2),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        ("4:cpu,cpuacct:/x\n0::/\n", {"cpu/x/cpu.cfs_quota_us": "350000", "cpu/x/cpu.cfs_period_us": "100000"}, 3),
        (
            "4:cpuacct,cpu:/x/y\n0::/\n",
            {
                "cpu/x/y/cpu.cfs_quota_us": "-1",
                "cpu/x/y/cpu.cfs_period_us": "100000",
                "cpu/x/cpu.cfs_quota_us": "75000",
                "cpu/x/cpu.cfs_period_us": "50000",
            },
            1,
        ),
        # Of another controller, or no figures: nothing is known.
        ("4:cpuset:/x\n", {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"}, 16),
        ("0::/\n", {"cpu.max": "some 100000"}, 16),
        ("0::/\n", {"cpu.max": "100000 0"}, 16),
        ("", {}, 16),
        # A name may have any character but a slash and the end of a line.
        ("0::/a:\u2028b\n", {"a:\u2028b/cpu.max": "300000 100000"}, 3),
        ("no group\n\n0::/\n", {"cpu.max": "400000 100000"}, 4),
    ],
)
def test_a_quota_allows_so_many_whole_cores(
    said: str, files: dict[str, str], usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert quota(tmp_path, said, files, monkeypatch) == usable


def test_without_control_groups_no_quota_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engines.threads.count_cores", lambda: 16)
    assert usable_cores(tmp_path, tmp_path) == 16
