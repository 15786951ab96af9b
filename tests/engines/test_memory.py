"""What is free is what the system and every control group leave."""

from __future__ import annotations

from pathlib import Path

from paceline.engines.memory import available_memory

MIB = 1 << 20


def system(tmp_path: Path, groups: str, available_kb: int = 8 << 20) -> tuple[Path, Path]:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kb} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    return proc, tmp_path / "cgroup"


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_this_machine_says_it() -> None:
    found = available_memory()
    assert found is None or found > 0


def test_without_groups_it_is_what_the_system_says(tmp_path: Path) -> None:
    proc, groups = system(tmp_path, "")
    assert available_memory(proc, groups) == 8 << 30
    assert available_memory(tmp_path / "nowhere", groups) is None


def test_a_group_of_version_2_and_those_around_it(tmp_path: Path) -> None:
    proc, groups = system(tmp_path, "0::/user/mine\n")
    write(groups / "user/mine", memory__max="max", memory__current=10 * MIB, memory__stat="anon 5")
    assert available_memory(proc, groups) == 8 << 30
    stat = f"anon 5\nactive_file {20 * MIB}\ninactive_file {30 * MIB}"
    write(groups / "user", memory__max=500 * MIB, memory__current=200 * MIB, memory__stat=stat)
    assert available_memory(proc, groups) == 350 * MIB
    # More is taken than there is, for a moment.
    write(groups / "user/mine", memory__max=MIB, memory__current=2 * MIB, memory__stat="anon 5")
    assert available_memory(proc, groups) == 0


def test_a_group_of_version_1(tmp_path: Path) -> None:
    proc, groups = system(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n")
    stat = f"cache 1\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}"
    write(
        groups / "memory/box",
        memory__limit_in_bytes=100 * MIB,
        memory__usage_in_bytes=40 * MIB,
        memory__stat=stat,
    )
    assert available_memory(proc, groups) == 62 * MIB


def test_a_container_sees_its_group_as_the_outermost(tmp_path: Path) -> None:
    proc, groups = system(tmp_path, "0::/far/away/on/the/host\n")
    write(groups, memory__max=300 * MIB, memory__current=100 * MIB, memory__stat="anon 5")
    assert available_memory(proc, groups) == 200 * MIB
