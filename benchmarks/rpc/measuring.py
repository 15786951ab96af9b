"""What is measured over workers: passes, texts, speed, and what becomes of an answer whose worker is lost."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import paceline
from benchmarks.rpc.network import Network
from benchmarks.rpc.stand_ins import StubWorker, status_of_another_version
from paceline.core.errors import EngineError, ModelWarning, PacelineError
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.loading import open_engine
from paceline.engines.options import LOCAL, ModelOptions
from paceline.engines.rpc.workers import ask_worker
from paceline.models.embedded import HELDOUT_KINDS, heldout

_ROOT: Final = Path(__file__).parents[2]
_CONTEXT: Final = 1024
_BEFORE: Final = 32
"""Tokens of context before a pass."""
PLAIN, AUTO = "plain", "auto"
_FIXED: Final = 16
"""Tokens that the fixed policy drafts, beside which ``auto`` is held."""
FIXED: Final = f"fixed {_FIXED}"


@dataclass(frozen=True, slots=True)
class Models:
    """The pair that is measured.

    Attributes:
        threads: of every model on this machine; workers have their own.
    """

    target: Path
    draft: Path
    threads: int

    def target_options(self, **changes: Any) -> ModelOptions:
        # As it is over RPC, where attention is never fused unless one says so.
        return ModelOptions(
            self.target, **{"context_length": _CONTEXT, "threads": self.threads, "flash_attention": False, **changes}
        )

    def draft_options(self) -> ModelOptions:
        return ModelOptions(self.draft, context_length=_CONTEXT, threads=self.threads)


def prompts(count: int, length: int) -> list[str]:
    """Return the beginnings of texts that the embedded pair was not trained on, of all kinds by turns."""
    by_kind = [heldout(kind) for kind in HELDOUT_KINDS]
    return [by_kind[number % len(by_kind)][number // len(by_kind)][:length] for number in range(count)]


# --- passes -----------------------------------------------------------------------------------------------------------


def measure_passes(
    network: Network, models: Models, round_trips_ms: Sequence[float], widths: Sequence[int], laps: int, repeats: int
) -> dict[str, Any]:
    """Return the seconds of passes, by the round trip to each worker and their rows.

    Distances take turns under one loaded model. A pass is what a plain round makes of it: its rows are read, and it is
    taken back.
    """
    times_s: dict[float, dict[int, list[float]]] = {each: defaultdict(list) for each in round_trips_ms}
    measured_s: dict[float, list[float]] = defaultdict(list)
    network.set_round_trip(0)
    engine = open_engine(models.target_options(rpc=network.endpoints))
    try:
        sequence = engine.open()
        _pass(engine, sequence, _BEFORE, kept=_BEFORE)
        for lap in range(laps):
            for round_trip_ms in round_trips_ms[:: -1 if lap % 2 else 1]:
                network.set_round_trip(round_trip_ms)
                measured_s[round_trip_ms].append(sum(ask_worker(each).round_trip_s for each in network.endpoints))
                for rows in widths:
                    _pass(engine, sequence, rows)  # one after a change of width has to send its graph
                    for _ in range(repeats):
                        started_s = time.perf_counter()
                        _pass(engine, sequence, rows)
                        times_s[round_trip_ms][rows].append(time.perf_counter() - started_s)
        description = engine.description
    finally:
        engine.close()
        network.set_round_trip(0)
    return {
        "engine": description,
        "measured_round_trips_s": {str(each): min(found_s) for each, found_s in measured_s.items()},
        "passes": summarize_passes(times_s, len(network.endpoints)),
    }


def summarize_passes(times_s: Mapping[float, Mapping[int, Sequence[float]]], workers: int) -> list[dict[str, Any]]:
    """Return what passes took beside what they should: the same pass without a distance, and a round trip a worker.

    The ratio is of medians. That of the least times leaves out what other programs took of the cores.

    Args:
        times_s: seconds of passes, by the milliseconds of a round trip and by rows; 0 ms is among them.
    """
    found = []
    for round_trip_ms, by_rows in times_s.items():
        for rows, each_s in by_rows.items():
            low_s, median_s, high_s = statistics.quantiles(each_s, n=4)
            compute_s = statistics.median(times_s[0][rows])
            distance_s = workers * round_trip_ms / 1e3
            expected_s = compute_s + distance_s
            found.append(
                {
                    "round_trip_ms": round_trip_ms,
                    "rows": rows,
                    "passes": len(each_s),
                    "low_s": low_s,
                    "median_s": median_s,
                    "high_s": high_s,
                    "least_s": min(each_s),
                    "expected_s": expected_s,
                    "ratio": median_s / expected_s,
                    "least_ratio": min(each_s) / (min(times_s[0][rows]) + distance_s),
                    "round_trips": (median_s - compute_s) / (round_trip_ms / 1e3) if round_trip_ms else None,
                }
            )
    return found


def _pass(engine: Engine, sequence: int, rows: int, *, kept: int = 0) -> None:
    step = Step(sequence, [1 + row % 100 for row in range(rows)], range(COMMITTED_END, rows - 1), range(rows))
    output = engine.forward([step])
    output.wait()
    for row in range(rows):
        output.logits(0, row).argmax()
    engine.commit(sequence, range(kept))


# --- texts ------------------------------------------------------------------------------------------------------------


def measure_texts(
    network: Network, models: Models, round_trips_ms: Sequence[float], count: int, tokens: int
) -> dict[str, Any]:
    """Return how many answers over workers are those of the model on this machine, plainly and with drafts."""
    asked = [(prompt, temperature) for prompt in prompts(count, 300) for temperature in (0.0, 0.8)]

    def answers(model: paceline.Model, variant: str) -> list[list[int]]:
        return [
            list(
                model.generate(
                    prompt, max_tokens=tokens, temperature=temperature, seed=number, **_speculation(variant)
                ).token_ids
            )
            for number, (prompt, temperature) in enumerate(asked)
        ]

    with paceline.load(models.target_options(), drafters=()) as model:
        expected = answers(model, PLAIN)
    found = []
    for round_trip_ms in round_trips_ms:
        network.set_round_trip(round_trip_ms)
        with _loaded(network, models) as model:
            for variant in (PLAIN, AUTO, FIXED):
                texts = answers(model, variant)
                equal = sum(ours == theirs for ours, theirs in zip(texts, expected, strict=True))
                found.append({"round_trip_ms": round_trip_ms, "variant": variant, "texts": len(asked), "equal": equal})
    network.set_round_trip(0)
    return {"tokens": sum(map(len, expected)), "texts": found}


# --- speed ------------------------------------------------------------------------------------------------------------


def measure_speed(
    network: Network, models: Models, round_trips_ms: Sequence[float], laps: int, count: int, tokens: int
) -> dict[str, Any]:
    """Return tokens a second with drafts and without, which take turns at every prompt.

    The profile that ``auto`` plans by is measured at that distance, when the model is loaded there.
    """
    found = []
    for round_trip_ms in round_trips_ms:
        network.set_round_trip(round_trip_ms)
        started_s = time.perf_counter()
        with _loaded(network, models) as model:
            load_s = time.perf_counter() - started_s
            told: dict[str, list[paceline.Generation]] = defaultdict(list)
            for lap in range(laps):
                for number, prompt in enumerate(prompts(count, 600)):
                    variants = (PLAIN, AUTO, FIXED)
                    for variant in variants[:: -1 if (lap + number) % 2 else 1]:
                        answer = model.generate(
                            prompt, max_tokens=tokens, temperature=0.0, ignore_end=True, **_speculation(variant)
                        )
                        told[variant].append(answer)
        found.append(
            {
                "round_trip_ms": round_trip_ms,
                "load_s": load_s,
                "texts": len(told[PLAIN]),
                "variants": {variant: _compare(told[variant], told[PLAIN], laps) for variant in told},
            }
        )
    network.set_round_trip(0)
    return {"laps": laps, "prompts": count, "tokens": tokens, "distances": found}


def _compare(answers: Sequence[paceline.Generation], plain: Sequence[paceline.Generation], laps: int) -> dict[str, Any]:
    """Return what is said of a variant's answers, beside plain ones to the same prompts."""
    each_lap = len(answers) // laps
    starts = range(0, len(answers), each_lap)
    speeds, others = ([_speed(each[start : start + each_lap]) for start in starts] for each in (answers, plain))
    rounds = sum(each.stats.rounds for each in answers)
    pairs = list(zip(answers, plain, strict=True))
    return {
        "tokens_per_s": statistics.median(speeds),
        "over_plain": statistics.median(ours / theirs for ours, theirs in zip(speeds, others, strict=True)),
        "laps_over_plain": [ours / theirs for ours, theirs in zip(speeds, others, strict=True)],
        "texts_over_plain": [_speed([ours]) / _speed([theirs]) for ours, theirs in pairs],
        "tokens_per_round": sum(len(each.token_ids) - 1 for each in answers) / rounds,
        "drafted_per_round": sum(each.stats.num_drafted for each in answers) / rounds,
        "equal_texts": sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs),
    }


def _speed(answers: Sequence[paceline.Generation]) -> float:
    """Return tokens after the first over the seconds of decoding them."""
    return sum(len(each.token_ids) - 1 for each in answers) / sum(each.stats.decode_s for each in answers)


def _speculation(variant: str) -> dict[str, Any]:
    if variant == PLAIN:
        return {"speculate": False}
    return {"policy": "fixed", "draft_max": _FIXED} if variant == FIXED else {}


def _loaded(network: Network, models: Models) -> paceline.Model:
    return paceline.load(
        models.target_options(rpc=network.endpoints), draft=models.draft_options(), remember=False, prompt_cache_mib=0
    )


# --- losses -----------------------------------------------------------------------------------------------------------

KILLED, STOPPED, CUT_OFF, REPLACED = "killed", "stopped", "cable pulled", "another version in its place"


def _replace(network: Network) -> None:
    network.kill(1)
    network.start_another_version(1)


LOSSES: Final[dict[str, Callable[[Network], None]]] = {
    KILLED: lambda network: network.kill(1),
    STOPPED: lambda network: network.stop(1),
    CUT_OFF: lambda network: network.sites[1].plug(is_in=False),
    REPLACED: _replace,
}
"""What happens to the second of two workers in the middle of an answer."""


def measure_losses(
    network: Network, models: Models, round_trip_ms: float, tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Return what became of answers whose worker was lost, with and without something to go on with."""
    (prompt,) = prompts(1, 300)
    with paceline.load(models.target_options(), drafters=()) as model:
        expected = model.generate(prompt, max_tokens=tokens, seed=3, ignore_end=True).text
    network.set_round_trip(round_trip_ms)
    found = []
    with StubWorker(status_of_another_version()) as other:
        cases: list[tuple[str, tuple[str, ...]]]
        cases = [(loss, fallback) for loss in LOSSES for fallback in ((), LOCAL)]
        cases += [(KILLED, network.endpoints[:1]), (KILLED, (other.endpoint,))]
        names: dict[tuple[str, ...], str] = {(): "none", LOCAL: "local", network.endpoints[:1]: "the first worker"}
        for loss, fallback in cases * repeats:
            if loss == CUT_OFF and network.sites[1].cable is None:
                continue
            lost = _lose(network, models, prompt, tokens, LOSSES[loss], fallback)
            text = lost.pop("text")
            is_equal = expected.startswith(text) if lost["error"] else text == expected
            name = names.get(fallback, "one of another version")
            found.append({"loss": loss, "fallback": name, **lost, "text_is_equal": is_equal})
            if loss == REPLACED and not fallback:
                found.append({"loss": "another version, at load", "fallback": "none", **_refused(network, models)})
            network.sites[1].plug(is_in=True)
            network.kill(1)
            network.start(1)
    network.set_round_trip(0)
    return sorted(found, key=lambda each: (each["loss"], each["fallback"]))


def _lose(
    network: Network,
    models: Models,
    prompt: str,
    tokens: int,
    lose: Callable[[Network], None],
    fallback: tuple[str, ...],
) -> dict[str, Any]:
    options = models.target_options(rpc=network.endpoints, rpc_fallback=fallback)
    error, pieces, arrivals_s = None, [], []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with paceline.load(options, draft=models.draft_options(), policy="fixed", remember=False) as model:
            stream = model.stream(prompt, max_tokens=tokens, seed=3, ignore_end=True, draft_max=2)
            segments = iter(stream)
            pieces.append(next(segments).text)
            losing = threading.Thread(target=lose, args=(network,))
            lost_s = time.perf_counter()
            losing.start()
            try:
                for segment in segments:
                    pieces.append(segment.text)
                    arrivals_s.append(time.perf_counter())
            except EngineError as raised:
                error = str(raised)
                arrivals_s.append(time.perf_counter())
            losing.join()
    gaps_s = [after - before for before, after in zip([lost_s, *arrivals_s], arrivals_s, strict=False)]
    return {
        "seconds": max(gaps_s),
        "error": error,
        "warnings": [str(each.message) for each in warned if issubclass(each.category, ModelWarning)],
        "text": "".join(pieces),
    }


def _refused(network: Network, models: Models) -> dict[str, Any]:
    started_s = time.perf_counter()
    try:
        with paceline.load(models.target_options(rpc=network.endpoints), drafters=()):
            error = None
    except PacelineError as raised:
        error = str(raised)
    return {"seconds": time.perf_counter() - started_s, "error": error, "warnings": [], "text_is_equal": None}


# --- the contract -----------------------------------------------------------------------------------------------------

_CONTRACT: Final = (
    *(sys.executable, "-m", "pytest"),
    *("tests/engines/test_contract.py", "-k", "in_a_process or failed_over"),
    # All of them, with few random scenes, each of which has hundreds of passes.
    *("--quick", "-m", "long or not long", "-o", "faulthandler_timeout=1800"),
)


def run_contract(network: Network, round_trips_ms: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Run the suite that holds every engine to its contract over the workers, and yield what became of it."""
    for round_trip_ms in round_trips_ms:
        network.set_round_trip(round_trip_ms)
        with tempfile.NamedTemporaryFile(suffix=".xml") as report:
            command = [*_CONTRACT, "--rpc", ",".join(network.endpoints), "--junitxml", report.name]
            started_s = time.perf_counter()
            done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            took_s = time.perf_counter() - started_s
            if done.returncode:
                print(done.stdout, file=sys.stderr)
            try:
                (suite,) = ElementTree.parse(report.name).getroot().iter("testsuite")
            except (ElementTree.ParseError, ValueError):
                raise EngineError(f"the contract suite ended with status {done.returncode}, without a report") from None
        counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
        passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
        yield {"round_trip_ms": round_trip_ms, "passed": passed, **counts, "seconds": took_s}
    network.set_round_trip(0)
