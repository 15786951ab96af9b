"""A pack at work: builds llama.cpp, makes the models, measures, and writes down each figure as it comes."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.gpu.building import BENCHMARK, LIBRARY, build
from benchmarks.gpu.report import results_of
from benchmarks.gpu.steps import FailedError, Figures, Step, ended_after, run_steps
from paceline.atomic_output import atomic_file
from paceline.core.clock import WallClock
from paceline.core.errors import InputError
from paceline.engines.threads import usable_cores
from paceline.machine import machine, processor
from paceline.models.embedded import embedded_draft

LLAMA, TORCH = "llama.cpp", "Hugging Face"
CUDA, CPU = "CUDA", "CPU"
SIZES: Final = ("1b", "8b")
SECONDS: Final = 570.0
"""For all of it: ten minutes, less what a machine takes to begin and to end."""
LINES, RESULTS, LOG = "lines.jsonl", "gpu.json", "log.txt"

_DRAFT_FOLDER: Final = "draft-bf16"
_SPEED_S, _SEVERAL_S, _OTHER_S, _CARD_S, _BENCH_S = 32.0, 45.0, 25.0, 25.0, 20.0
_MIN_S: Final = 12.0
"""Seconds below which no step is worth its beginning: loading, measuring what passes cost, and a lap or two."""
_BUILD_SHARE, _MIN_BUILD_S = 0.6, 60.0
_END_S: Final = 5.0
"""Seconds between the end of what a step is told and its being ended."""

_SHOWN: Final = ("planner", "llama-cpp-python", "torch", "transformers")

Plan = Sequence[tuple[str, str, str, Sequence[int]]]
"""Task, engine, model and numbers of requests of each step, the most important first."""


def plan_of(sizes: Sequence[str]) -> Plan:
    """Return what is measured, the most important first: single requests, drafts of others', several requests."""
    first = [(LLAMA, f"{size} in Q4_0") for size in sizes] + [(TORCH, f"{size} in BF16") for size in sizes[:1]]
    second = [(LLAMA, f"{size} in Q8_0") for size in reversed(sizes)] + [
        (TORCH, f"{size} in BF16") for size in sizes[1:]
    ]
    beside = {LLAMA: "llama_bench", TORCH: "generate"}
    steps: list[tuple[str, str, str, Sequence[int]]]
    steps = [(task, *which, (1,)) for which in first for task in (beside[which[0]], "speed")]
    steps += [("speed", *which, (4, 16)) for which in reversed(first)]
    steps += [(task, *which, (1,)) for which in second for task in (beside[which[0]], "speed")]
    steps += [("card_time", *which, (1,)) for which in reversed(first)]
    return steps + [("speed", *which, (4, 16)) for which in second]


class Run:
    """One run of a pack; a step may take ``patience`` times as long as on a card."""

    def __init__(
        self, folder: Path, backend: str, tokens: int, jobs: int, lines: Path, results: Path, patience: float = 1.0
    ) -> None:
        self._folder, self._backend, self._tokens, self._jobs = folder, backend, tokens, jobs
        self._patience = patience
        self._lines_file, self._results_file = lines, results
        self._lines: list[Figures] = []
        self._log = folder / LOG
        self._models = folder / "models"
        self._models.mkdir(exist_ok=True)
        self._programs: Path | None = None
        self._making = threading.Lock()

    def build(self, sizes: Sequence[str], most_s: float) -> Step:
        """Return the step that everything of llama.cpp hangs on."""
        plan = plan_of(sizes)
        return Step("build", _MIN_BUILD_S, most_s, functools.partial(self._build, plan))

    def steps(self, sizes: Sequence[str]) -> Iterator[Step]:
        """Yield everything that is measured, the most important first."""
        for task, engine, model, requests in plan_of(sizes):
            if task == "card_time" and self._backend == CPU:
                continue
            many = f", {' and '.join(map(str, requests))} requests" if requests != (1,) else ""
            name = f"{task.replace('_', ' ')}, {engine}, {model}{many}"
            limits_s = {"speed": _SEVERAL_S if many else _SPEED_S, "llama_bench": _BENCH_S, "card_time": _CARD_S}
            job = {"task": task, "engine": engine, "model": model, "requests": list(requests)}
            most_s = self._patience * limits_s.get(task, _OTHER_S)
            yield Step(name, _MIN_S, most_s, functools.partial(self._measure, job))

    def write(self, line: Figures) -> None:
        """Write a line, and the table with it."""
        self._lines.append(line)
        text = json.dumps(line)
        print(text, flush=True)
        with self._lines_file.open("a", encoding="utf-8") as out:
            out.write(text + "\n")
            out.flush()
            os.fsync(out.fileno())
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        with atomic_file(self._results_file) as partial:
            partial.write_text(json.dumps(results_of(self._lines, date), indent=2) + "\n", encoding="utf-8")

    def _build(self, plan: Plan, most_s: float) -> Iterator[Figures]:
        """Build for the processor, which makes the models, then for the card while models are made."""
        until_s = WallClock.now_s() + most_s
        programs = self._built([LIBRARY], CPU, until_s)
        yield {"built": CPU, "jobs": self._jobs}
        if self._backend == CUDA:
            stopped = threading.Event()
            maker = threading.Thread(target=self._make_all, args=(plan, stopped))
            maker.start()
            try:
                programs = self._built([LIBRARY], CUDA, until_s)
            finally:
                stopped.set()
                maker.join()
            yield {"built": CUDA, "jobs": self._jobs}
        self._programs = programs
        # Last, and by itself: where there is no time for it, the library is measured all the same.
        self._built([BENCHMARK], self._backend, until_s)
        yield {"built": BENCHMARK, "jobs": self._jobs}

    def _built(self, targets: Sequence[str], backend: str, until_s: float) -> Path:
        return build(
            self._folder / "sources",
            self._folder / f"build-{backend.lower()}",
            targets,
            with_cuda=backend == CUDA,
            jobs=self._jobs,
            most_s=until_s - WallClock.now_s(),
            log=self._log,
        )

    def _make_all(self, plan: Plan, stopped: threading.Event) -> None:
        for _, engine, model, _ in plan:
            if stopped.is_set():
                return
            with contextlib.suppress(FailedError):  # whoever needs it is told
                self._model(engine, model)

    def _model(self, engine: str, name: str) -> tuple[Path, Path]:
        """Return a model and its draft, made if they are not there yet."""
        size, _, file_type = name.partition(" in ")
        with self._making:
            if engine == LLAMA:
                path, draft = self._models / f"{size}-{file_type.lower()}.gguf", embedded_draft()
            else:
                path, draft = self._models / f"{size}-{file_type.lower()}", self._models / _DRAFT_FOLDER
                if not draft.exists():
                    self._paceline("convert", "draft", str(draft), "--type", file_type)
            if not path.exists():
                self._paceline("inflate", size, "--type", file_type, "-o", str(path))
        return path, draft

    def _paceline(self, *arguments: str) -> None:
        ended = subprocess.run(
            [sys.executable, "-m", "paceline", *arguments],
            env=self._environment(self._folder / "build-cpu" / "bin"),
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise FailedError((ended.stderr.strip().splitlines() or ["no reason was given"])[-1])

    def _measure(self, job: Mapping[str, Any], most_s: float) -> Iterator[Figures]:
        clock = WallClock()
        began_s = clock.now_s()
        if job["engine"] == LLAMA and self._programs is None:
            raise FailedError(f"llama.cpp was not built for {self._backend}")
        path, draft = self._model(job["engine"], job["model"])
        left_s = most_s - (clock.now_s() - began_s)
        if left_s < _MIN_S - _END_S:
            raise FailedError(f"making the model left {left_s:.0f} s")
        facts = {"task": job["task"], "target": str(path), "draft": str(draft), "requests": job["requests"]}
        facts |= {"tokens": self._tokens, "seconds": left_s - _END_S}
        if job["task"] == "llama_bench":
            assert self._programs is not None
            program = self._programs / BENCHMARK
            if not program.is_file():
                raise FailedError(f"{BENCHMARK} was not built for {self._backend}")
            facts["program"] = str(program)
            facts["options"] = [] if self._backend == CUDA else ["-t", str(usable_cores())]
        known = {"task": job["task"], "engine": job["engine"], "model": f"{job['engine']}, {job['model']}"}
        for figures in self._process(facts, left_s):
            yield {**known, "backend": self._backend, **figures}

    def _process(self, job: Mapping[str, Any], most_s: float) -> Iterator[Figures]:
        """Yield the lines of a process, which is ended with all that it started where it takes too long."""
        with self._log.open("a+b") as errors:
            before = errors.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.measuring", json.dumps(job)],
                env=self._environment(self._programs or self._folder / "build-cpu" / "bin"),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            with ended_after(process, most_s):
                assert process.stdout is not None
                with process.stdout as lines:
                    for line in lines:
                        yield json.loads(line)
            if process.returncode:
                errors.seek(before)
                said = errors.read().decode(errors="replace").strip().splitlines()
                raise FailedError(said[-1] if said else f"ended with status {process.returncode}")

    def _environment(self, libraries: Path) -> dict[str, str]:
        own = {"LLAMA_CPP_LIB_PATH": str(libraries), "PACELINE_CACHE": str(self._folder / "cache")}
        own |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if self._backend == CPU:
            own["CUDA_VISIBLE_DEVICES"] = ""
        return {**os.environ, **own}


def card() -> str | None:
    """Return the names of the cards as their maker gives them, with the driver's version; ``None`` without any."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return "; ".join(said.splitlines()) or None


def run(
    folder: Annotated[Path, typer.Argument(help="The unpacked pack.")],
    seconds: Annotated[float, typer.Option("--seconds", help="For all of it, building among it.")] = SECONDS,
    backend: Annotated[str, typer.Option("--backend", help="cuda, or cpu where there is no card.")] = "cuda",
    models: Annotated[str, typer.Option("--models", help=f"Among {', '.join(SIZES)}.")] = ",".join(SIZES),
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Of an answer.")] = 128,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Compilers at once. \\[one a core]")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Folder for lines and table. \\[here]")] = None,
    typed: Annotated[str, typer.Option("--typed", help="The command that began it, for the table.")] = "",
) -> None:
    """Build llama.cpp for this card, measure, and write lines.jsonl and the table gpu.json."""
    until_s = WallClock.now_s() + seconds
    chosen, sizes = backend.upper(), [size.strip() for size in models.split(",")]
    if chosen not in (CUDA, CPU):
        raise InputError(f"--backend {backend}: choose cuda or cpu")
    if unknown := [size for size in sizes if size not in SIZES]:
        raise InputError(f"--models {','.join(unknown)}: choose from {', '.join(SIZES)}")
    output = output or Path.cwd()
    output.mkdir(parents=True, exist_ok=True)
    patience = max(seconds / SECONDS, 1.0)
    job = Run(folder, chosen, tokens, jobs or usable_cores(), output / LINES, output / RESULTS, patience)
    found = card() if chosen == CUDA else None
    where = found or f"no card: {processor()}, {usable_cores()} cores"
    versions = machine()
    where = f"{where}; {'; '.join(f'{name} {version}' for name, version in versions.items() if name in _SHOWN)}"
    begun = {"machine": where, "command": typed, "tokens": tokens, "backend": chosen, "versions": versions}
    job.write({"step": "machine", **begun})
    steps = (job.build(sizes, _BUILD_SHARE * seconds), *job.steps(sizes))
    run_steps(steps, until_s, WallClock(), job.write)


if __name__ == "__main__":
    try:
        typer.run(run)
    except InputError as error:
        print(f"gpu: {error}", file=sys.stderr)
        sys.exit(2)
