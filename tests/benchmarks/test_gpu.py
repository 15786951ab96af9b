"""The pack for a machine with a card: what is in it, how its time is spent, and what is said of its figures."""

from __future__ import annotations

import io
import json
import os
import platform
import shlex
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import measuring, packing, running, start
from benchmarks.gpu.kernels import cut_kernels
from benchmarks.gpu.measuring import Run, covered, speed, speed_figures
from benchmarks.gpu.packing import make_pack
from benchmarks.gpu.report import COLUMNS, results_of
from benchmarks.gpu.running import CPU, CUDA, LLAMA, TORCH, plan_of
from benchmarks.gpu.running import Run as PackRun
from benchmarks.gpu.steps import FailedError, Figures, Step, ended_after, run_steps

from paceline.core.clock import VirtualClock
from paceline.core.errors import EngineError, InputError
from paceline.models.embedded import embedded_draft, embedded_target
from tests.docs.scripts import script

# --- time -------------------------------------------------------------------------------------------------------------


class Steps:
    """Steps that take virtual time; what each was allowed is kept."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.lines: list[Figures] = []
        self.allowed: dict[str, float] = {}

    def step(
        self, name: str, takes_s: float, *, least_s: float = 1.0, most_s: float = 30.0, fails: bool = False
    ) -> Step:
        def run(allowed_s: float) -> Iterator[Figures]:
            self.allowed[name] = allowed_s
            self.clock.advance(min(takes_s, allowed_s) / 2)
            yield {"part": 1}
            self.clock.advance(min(takes_s, allowed_s) / 2)
            if fails or takes_s > allowed_s:
                raise FailedError("it broke")
            yield {"part": 2}

        return Step(name, least_s, most_s, run)

    def run(self, *steps: Step, until_s: float) -> None:
        run_steps(steps, until_s, self.clock, self.lines.append)


def test_a_step_that_fails_is_kept_with_what_it_had_and_the_next_one_goes_on() -> None:
    steps = Steps()
    steps.run(steps.step("a", 10.0, fails=True), steps.step("b", 4.0), until_s=100.0)
    assert steps.lines == [
        {"step": "a", "took_s": 5.0, "part": 1},
        {"step": "a", "took_s": 10.0, "failed": "FailedError: it broke"},
        {"step": "b", "took_s": 2.0, "part": 1},
        {"step": "b", "took_s": 4.0, "part": 2},
    ]


def test_time_goes_to_the_first_and_what_has_none_is_said_to_be_left_out() -> None:
    steps = Steps()
    steps.run(
        steps.step("a", 25.0),
        steps.step("b", 100.0, most_s=20.0),  # ended at its own limit
        steps.step("c", 100.0, most_s=60.0, least_s=50.0),
        steps.step("d", 100.0, most_s=60.0),  # ended at the end of all
        steps.step("e", 0.5),
        until_s=80.0,
    )
    assert steps.allowed == {"a": 30.0, "b": 20.0, "d": 35.0}
    assert steps.clock.now_s() == 80.0
    assert [line["step"] for line in steps.lines if "failed" in line] == ["b", "d"]
    assert {line["step"]: line["left_out"] for line in steps.lines if "left_out" in line} == {
        "c": "35 s were left, and it takes 50",
        "e": "0 s were left, and it takes 1",
    }


def test_single_requests_come_first_each_after_what_it_is_beside() -> None:
    plan = plan_of(("1b", "8b"))
    assert len(set(plan)) == len(plan)
    assert plan[:6] == [
        ("llama_bench", LLAMA, "1b in Q4_0", (1,)),
        ("speed", LLAMA, "1b in Q4_0", (1,)),
        ("llama_bench", LLAMA, "8b in Q4_0", (1,)),
        ("speed", LLAMA, "8b in Q4_0", (1,)),
        ("generate", TORCH, "1b in BF16", (1,)),
        ("speed", TORCH, "1b in BF16", (1,)),
    ]
    singles = {step[1:3] for step in plan if step[0] == "speed" and step[3] == (1,)}
    assert singles == {step[1:3] for step in plan if step[3] == (4, 16)}
    assert singles == {(LLAMA, f"{size} in {kind}") for size in ("1b", "8b") for kind in ("Q4_0", "Q8_0")} | {
        (TORCH, "1b in BF16"),
        (TORCH, "8b in BF16"),
    }
    assert plan_of(("1b",)) == [step for step in plan_of(("1b",)) if "1b" in step[2]]


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_are_medians_of_ratios_within_a_lap() -> None:
    def lap(plain: float, again: float, auto: float, two: float, four: float) -> dict[str, Run]:
        speeds = {"plain": plain, "plain again": again, "auto": auto, "draft of 2": two, "draft of 4": four}
        return {name: Run(value, 10 * value, [[1, 2, 3]]) for name, value in speeds.items()}

    laps = [lap(10, 11, 20, 15, 12), lap(20, 18, 30, 32, 12), lap(40, 40, 100, 36, 120)]
    laps[1]["auto"] = Run(30, 300, [[1, 2, 4]])
    assert speed_figures(laps) == {
        "laps": 3,
        "plain_per_second": 20,
        "plain_again": [0.9, 1.1],
        "auto_of_plain": 2.0,
        "fixed_of_plain": {"draft of 2": 1.5, "draft of 4": 1.2},
        "best_fixed": "draft of 2",
        "best_fixed_of_plain": 1.5,
        "own_us": {"plain": 200, "auto": 300, "draft of 2": 320},
        "texts": 12,
        "texts_equal": 11,
    }


def test_spans_count_once_where_they_overlap() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.8)]) == 4.0


@pytest.mark.long
def test_speed_of_the_embedded_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    job = {"target": str(embedded_target()), "draft": str(embedded_draft()), "tokens": 8, "seconds": 0.0}
    found = list(speed({**job, "requests": [1, 2]}))
    assert [each["requests"] for each in found] == [1, 2]
    for each in found:
        assert each["laps"] == 1
        assert each["plain_per_second"] > 0
        assert min(each["own_us"].values()) > 0
        assert each["texts_equal"] <= each["texts"] == 7 * each["requests"]


@pytest.mark.parametrize(("lap_s", "counted"), [(1.0, 9), (3.0, 2), (4.0, 1), (6.0, 1), (20.0, 1)])
def test_a_lap_is_begun_only_where_it_will_end_in_time_and_there_is_always_one(
    monkeypatch: pytest.MonkeyPatch, lap_s: float, counted: int
) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(time, "monotonic", clock.now_s)
    variants = 3 + len(measuring.LENGTHS)

    def run(*_: object) -> Run:
        clock.advance(lap_s / variants)
        return Run(10.0, 1.0, [[1]])

    monkeypatch.setattr(measuring, "_run", run)
    laps = list(measuring._laps(None, 1, 8, 10.0 + 1e-6))  # type: ignore[arg-type]
    assert len(laps) == counted
    assert clock.now_s() <= max(10.0, lap_s) + 1e-6


LINES: list[dict[str, Any]] = [
    {"step": "machine", "machine": "A card", "command": "python3 gpu.pyz --backend cpu", "tokens": 48},
    {"step": "build", "took_s": 9.0, "built": CUDA},
    {"step": "1", "task": "llama_bench", "model": "llama.cpp, 1b", "backend": CUDA, "per_second": 812.3},
    {
        **{"step": "2", "task": "speed", "model": "llama.cpp, 1b", "backend": CUDA, "requests": 1},
        **{"plain_per_second": 801.0, "auto_of_plain": 1.5, "best_fixed": "draft of 4", "best_fixed_of_plain": 1.25},
        "own_us": {"plain": 51.4, "auto": 120.0, "draft of 4": 30.0},
    },
    {"step": "3", "took_s": 2.0, "failed": "FailedError: no torch"},
    {"step": "4", "task": "card_time", "model": "llama.cpp, 1b", "backend": CUDA, "variant": "auto", "outside_us": 9.6},
    {"step": "5", "task": "generate", "model": "HF", "backend": CPU, "per_second": 4.26, "assisted_of_it": 0.9},
    {"step": "6", "left_out": "no time"},
    {"step": "2", "failed": "too late"},
]


def test_a_table_can_be_made_of_whatever_was_measured(tmp_path: Path) -> None:
    tables = script("make_tables")
    for count in range(len(LINES) + 1):
        path = tmp_path / "gpu.json"
        path.write_text(json.dumps(results_of(LINES[:count], "2026-11-28")), encoding="utf-8")
        tables.markdown(tables.read(path))
    results = tables.read(path)
    assert results.rows == [
        ["llama.cpp, 1b", CUDA, 1, "812", None, "801", "1.50", "1.25", "4", "51", "120", None, "10"],
        ["HF", CPU, 1, "4.3", "0.90", *[None] * 8],
    ]
    assert results.columns == list(COLUMNS)
    assert results.machine == "A card"
    assert list(results.commands)[1:] == ["python3 gpu.pyz --backend cpu"]
    assert "answers of 48 tokens" in results.notes[0]
    assert results.notes[1:] == ["Not measured: 3 (FailedError: no torch); 6 (no time).", "Cut short: 2 (too late)."]


# --- the run ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pack_run(tmp_path: Path) -> PackRun:
    return PackRun(tmp_path, CPU, 8, 1, tmp_path / "lines.jsonl", tmp_path / "gpu.json")


def test_a_line_is_on_the_disk_with_its_table_as_soon_as_it_is_written(pack_run: PackRun, tmp_path: Path) -> None:
    for count, line in enumerate(LINES, start=1):
        pack_run.write(line)
        written = [json.loads(text) for text in (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()]
        assert written == LINES[:count]
        results = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
        assert results == results_of(LINES[:count], results["date"])


def test_a_process_that_fails_or_takes_too_long_is_a_failed_step(pack_run: PackRun) -> None:
    with pytest.raises(FailedError, match="KeyError: 'nothing'"):
        list(pack_run._process({"task": "nothing"}, 60.0))
    with pytest.raises(FailedError, match="not done within 0 s"):
        list(pack_run._process({"task": "nothing"}, 0.01))


def test_a_process_is_ended_with_all_that_it_started() -> None:
    reading, writing = os.pipe()
    command = ["sh", "-c", "sh -c 'sleep 1000; :'; :"]
    with os.fdopen(reading, "rb") as pipe:
        process = subprocess.Popen(command, stdout=writing, start_new_session=True)
        os.close(writing)
        with pytest.raises(FailedError, match="not done within 0 s"), ended_after(process, 0.05):
            pass
        assert pipe.read() == b""  # nobody has the other end any more


def test_what_needs_a_build_says_so_without_one(pack_run: PackRun) -> None:
    steps = [step for step in pack_run.steps(["1b"]) if "llama.cpp" in step.name]
    lines: list[Figures] = []
    run_steps(steps, 1000.0, VirtualClock(), lines.append)
    assert [line["failed"] for line in lines] == ["FailedError: llama.cpp was not built for CPU"] * len(steps)
    assert len(steps) == 6


def test_the_library_is_measured_where_there_was_no_time_for_the_benchmark(
    pack_run: PackRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(sources: Path, folder: Path, targets: list[str], **options: object) -> Path:
        if "llama-bench" in targets:
            raise FailedError("not done within 9 s")
        return folder

    monkeypatch.setattr(running, "build", build)
    monkeypatch.setattr(pack_run, "_model", lambda engine, model: (tmp_path / "target", tmp_path / "draft"))
    monkeypatch.setattr(pack_run, "_process", lambda job, most_s: iter([{"plain_per_second": 1.0}]))
    lines: list[Figures] = []
    steps = [step for step in pack_run.steps(["1b"]) if step.name.endswith("llama.cpp, 1b in Q4_0")]
    run_steps([pack_run.build(["1b"], 1000.0), *steps], 1000.0, VirtualClock(), lines.append)
    assert [line.get("built") or line.get("failed") or line["plain_per_second"] for line in lines] == [
        CPU,
        "FailedError: not done within 9 s",
        "FailedError: llama-bench was not built for CPU",
        1.0,
    ]


# --- the pack ---------------------------------------------------------------------------------------------------------


def test_kernels_that_are_left_out_end_the_process_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "ggml" / "src" / "ggml-cuda" / "template-instances"
    folder.mkdir(parents=True)
    mma = "DECL_FATTN_MMA_F16_CASE({size}, {size}, 8, 4);\n"
    texts = {
        "mmq-instance-q4_0.cu": "DECL_MMQ_CASE(GGML_TYPE_Q4_0);\n",
        "mmq-instance-iq4_xs.cu": "DECL_MMQ_CASE(GGML_TYPE_IQ4_XS);\n",
        "mmq-instance-mxfp4.cu": "DECL_MMQ_CASE(GGML_TYPE_MXFP4);\nDECL_MMQ_CASE_W4A4(GGML_TYPE_MXFP4);\n",
        "fattn-mma-f16-instance-1.cu": mma.format(size=64) + mma.format(size=80),
        "fattn-tile-instance-64.cu": "DECL_FATTN_TILE_CASE( 64,  64);\n",
        "fattn-tile-instance-640.cu": "DECL_FATTN_TILE_CASE(640, 640);\n",
        "mmf-instance-ncols_1.cu": "DECL_MMF_CASE(1);\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(f'#include "x.cuh"\n{text}', encoding="utf-8")
    names = cut_kernels(tmp_path)
    assert names == [
        "mul_mat_q_case<GGML_TYPE_IQ4_XS, GGML_PREC_Q8>",
        "mul_mat_q_case<GGML_TYPE_MXFP4, GGML_PREC_Q8>",
        "mul_mat_q_case<GGML_TYPE_MXFP4, GGML_PREC_Q4>",
        "ggml_cuda_flash_attn_ext_mma_f16_case<80, 80, 8, 4>",
        "ggml_cuda_flash_attn_ext_tile_case<640, 640>",
    ]
    stubs = (folder.parent / "left-out.cu").read_text(encoding="utf-8")
    assert all(f'GGML_ABORT("left out: {name}");' in stubs for name in names)
    assert {path.name for path in folder.iterdir()} == {
        "mmq-instance-q4_0.cu",
        "fattn-mma-f16-instance-1.cu",
        "fattn-tile-instance-64.cu",
        "mmf-instance-ncols_1.cu",
    }
    assert "(80" not in (folder / "fattn-mma-f16-instance-1.cu").read_text(encoding="utf-8")
    with pytest.raises(EngineError, match="has no DECL_MMQ_CASE"):
        cut_kernels(tmp_path / "elsewhere")


def test_a_pack_is_asked_for_in_terms_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--python 3: give a version such as 3\.12"):
        make_pack(tmp_path / "gpu.pyz", python="3")
    with pytest.raises(InputError, match=r"--there nonsense: choose from .*cmake.*numpy.*transformers"):
        make_pack(tmp_path / "gpu.pyz", python="3.12", there=["numpy", "nonsense"])
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wheel", "planner"),
    [("paceline-1-cp311-cp311-linux_x86_64.whl", "compiled"), ("paceline-1-py3-none-any.whl", "interpreted")],
)
def test_the_planner_is_compiled_for_the_python_there_where_it_is_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: str, planner: str
) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    asked: list[str] = []

    def pip(*arguments: str, **variables: str) -> None:
        asked.extend(arguments)
        (folder,) = (Path(each.partition("=")[2]) for each in arguments if each.startswith("--wheel-dir="))
        folder.mkdir()
        with zipfile.ZipFile(folder / wheel, "w") as built:
            built.writestr("paceline/core/tree.so", "machine code")

    monkeypatch.setattr(packing, "_pip", pip)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert packing._add_paceline(tmp_path / "site", tmp_path, python) == planner
    assert asked[:2] == [f"--python={sys.executable}", "wheel"]
    assert (tmp_path / "site" / "paceline" / "core" / "tree.so").is_file()
    assert (tmp_path / "site" / "benchmarks" / "gpu" / "running.py").is_file()


def test_a_pack_for_a_python_that_is_not_here_has_the_planner_s_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert packing._add_paceline(tmp_path / "site", tmp_path, "3.99") == "interpreted"
    assert (tmp_path / "site" / "paceline" / "core" / "tree.py").is_file()


def test_a_pack_unpacks_itself_and_goes_on_with_what_it_brings(tmp_path: Path) -> None:
    pack = tmp_path / "gpu.pyz"
    content = tmp_path / "content"
    (content / "site" / "benchmarks" / "gpu").mkdir(parents=True)
    (content / "sources").mkdir()
    program = "import sys; print(__file__, *sys.argv[1:], sep='\\n')"
    (content / "site" / "benchmarks" / "gpu" / "running.py").write_text(program, encoding="utf-8")
    manifest = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    (content / packing.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    packing._write(pack, content)
    command = [sys.executable, str(pack), "--folder", str(tmp_path / "there"), "--seconds", "50", "--backend", "cpu"]
    for _ in range(2):  # what is unpacked already stays
        ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        name, folder, option, left_s, *others = ran.stdout.splitlines()
        assert name == str(tmp_path / "there" / "site" / "benchmarks" / "gpu" / "running.py")
        assert (folder, option) == (str(tmp_path / "there"), "--seconds")
        assert others == ["--backend", "cpu", "--typed", shlex.join(["python3", "gpu.pyz", *command[2:]])]
        assert 0 < float(left_s) <= 50


def test_a_pack_for_another_python_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as payload:
        for name, text in {"manifest.json": b'{"python": "2.7"}', "site/x.py": b""}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            payload.addfile(entry, io.BytesIO(text))
    with zipfile.ZipFile(tmp_path / "gpu.pyz", "w") as pack:
        pack.writestr(packing.PAYLOAD, packed.getvalue())
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "gpu.pyz")])
    assert start.main(["--folder", str(tmp_path / "there")]) == 2
    assert "the pack is for Python 2.7, and this is 3." in capsys.readouterr().err
