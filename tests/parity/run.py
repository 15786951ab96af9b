"""Run llama.cpp's server tests against several servers, and say what the first passes and the others do not."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.parity import asked, pairs, scope
from tests.parity.servers import Server, copied_tests, free_port

# Seconds until a case is one that hangs. The slowest of llama.cpp's takes about 20 on two cores.
CASE_TIMEOUT_S = 600

# How each case ended, by its name: ``outcome``, ``seconds``, and unless it passed ``why`` and ``line``.
Outcomes = dict[str, dict[str, Any]]


def run_tests(
    folder: Path,
    server: Server,
    model: Path,
    *,
    groups: Sequence[str],
    cases: Sequence[str] | None = None,
    record: Path | None = None,
) -> Outcomes:
    """Run cases of the tests in ``folder`` against ``server``.

    Args:
        folder: a copy of the tests.
        server: what they are run against.
        model: the GGUF that stands for every text model.
        groups: the groups of cases to run.
        cases: the names of the cases to run, whatever their group; all of the groups if None.
        record: gets what is asked. Then nothing is checked, so that every request of a case is made.

    Raises:
        SystemExit: pytest did not get as far as running them.
    """
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    environment = {
        **os.environ,
        **server.environment(model),
        "PARITY_GROUPS": ",".join(groups),
        "PARITY_RESULTS": str(results),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PORT": str(free_port()),
    }
    if cases is not None:
        (folder / "cases.txt").write_text("\n".join(cases))
        environment["PARITY_CASES"] = str(folder / "cases.txt")
    if record is not None:
        environment["PARITY_RECORD"] = str(record)
    # Nothing is checked where Python leaves assertions out and pytest does not put them back.
    python, asserts = ([sys.executable], []) if record is None else ([sys.executable, "-O"], ["--assert=plain"])
    plugins = ["-p", "no:cacheprovider", "-p", "tests.parity.plugin"]
    options = [*asserts, "--timeout", str(CASE_TIMEOUT_S), "--tb=short", "-q"]
    words = [*python, "-m", "pytest", *plugins, *options, "unit"]
    subprocess.run(words, cwd=folder, env=environment, check=False, stdout=sys.stderr)
    if not results.is_file():
        raise SystemExit(f"the tests did not run against {server.name}: see pytest's words above")
    outcomes: Outcomes = json.loads(results.read_text())
    return outcomes


def failed_by_text(outcomes: Outcomes) -> list[str]:
    """Return the cases that failed for what the model says alone."""
    failing = {case: how["line"] for case, how in outcomes.items() if how["outcome"] == "failed"}
    return [case for case, line in failing.items() if scope.fails_by_text(case, line)]


def report(outcomes: Mapping[str, Outcomes]) -> dict[str, Any]:
    """Return what the first server passes and others do not, and what fails at the first."""
    if not outcomes:
        return {"reference": None, "outcomes": {}, "by_text": [], "missing": {}}
    (reference, first), *others = outcomes.items()
    by_text = failed_by_text(first)
    failing = [case for case, how in first.items() if how["outcome"] not in ("passed", "skipped")]
    return {
        "reference": reference,
        "outcomes": dict(outcomes),
        "by_text": by_text,
        "fails_at_reference": [case for case in failing if case not in by_text],
        "fails_at_all": [case for case in failing if not any(_passes(run, [case]) for _, run in others)],
        "missing": {
            name: [case for case, how in first.items() if how["outcome"] == "passed" and not _passes(run, [case])]
            for name, run in others
        },
    }


def table(outcomes: Mapping[str, Outcomes]) -> str:
    """Return how many cases of each group each server passes, as lines of text."""
    first = next(iter(outcomes.values()))
    rows = [["group", "cases", *(f"{name} passes" for name in outcomes)]]
    for group in (scope.IN_SCOPE, *scope.WITH_OWN_MODELS):
        cases = [case for case in first if scope.group_of(case) == group]
        if cases:
            rows.append([group, str(len(cases)), *(str(_passes(run, cases)) for run in outcomes.values())])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 if every server passes what the first passes, and answers pairs of requests alike.
    """
    options = _parse(words)
    with copied_tests(options.tests, options.model) as folder:
        result = report({}) if options.asked else report(_outcomes(options, folder))
        if options.pairs and len(options.servers) > 1:
            starts = _to_ask(options, folder, result["by_text"])
            result["pairs"] = pairs.compare(starts, options.servers, options.model, folder)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    _print(result)
    differs = any(pair["differences"] for pair in result.get("pairs", []))
    return int(differs or any(result["missing"].values()))


def _outcomes(options: argparse.Namespace, folder: Path) -> dict[str, Outcomes]:
    """Return how the cases ended at each server, from an earlier report where the options say so."""
    groups = [scope.IN_SCOPE, *options.groups]
    outcomes: dict[str, Outcomes] = {}
    for server in options.servers:
        if server.name in options.reuse:
            earlier = json.loads(Path(options.reuse[server.name]).read_text())["outcomes"][server.name]
            wanted = options.cases or [case for case in earlier if scope.group_of(case) in groups]
            outcomes[server.name] = {case: earlier[case] for case in wanted if case in earlier}
        else:
            outcomes[server.name] = run_tests(folder, server, options.model, groups=groups, cases=options.cases)
    return outcomes


def _to_ask(options: argparse.Namespace, folder: Path, by_text: Sequence[str]) -> list[pairs.Start]:
    """Return what to ask as pairs: what cases ask that fail by text, and our own requests unless cases were named."""
    cases = options.pair_cases or by_text
    starts = [] if options.cases or options.pair_cases else asked.starts()
    if cases:
        record = folder / "record.jsonl"
        run_tests(folder, options.servers[0], options.model, groups=[], cases=cases, record=record)
        starts += pairs.read(record)
    return starts


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--tests", type=Path, required=True, help="llama.cpp's folder tools/server/tests")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF of a chat model")
    parser.add_argument("--embedder", type=Path, help="a GGUF of an embedding model: its cases run too")
    parser.add_argument("--reranker", type=Path, help="a GGUF of a reranker: its cases run too")
    parser.add_argument(
        "--server",
        dest="servers",
        action="append",
        type=Server.parse,
        required=True,
        metavar="NAME=PATH",
        help="llama-server=PATH or paceline=PYTHON; others are compared with the first",
    )
    parser.add_argument("--case", dest="cases", action="append", help="run this case alone; repeat for more")
    parser.add_argument("--asked", action="store_true", help="ask requests of our own as pairs, and run no case")
    parser.add_argument("--no-pairs", dest="pairs", action="store_false", help="leave pairs of requests out")
    parser.add_argument("--pair-case", dest="pair_cases", action="append", help="a case to ask as pairs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the file that gets the report")
    parser.add_argument(
        "--reuse",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="take what a server passes from an earlier report",
    )
    options = parser.parse_args(words)
    options.reuse = dict(word.split("=", 1) for word in options.reuse)
    if not (options.tests / "unit").is_dir():
        parser.error(f"{options.tests} has no folder unit; --tests is llama.cpp's tools/server/tests")
    if not options.model.is_file():
        parser.error(f"{options.model} is no file; --model is a GGUF")
    options.groups = []
    for group, model, variable in (
        (scope.EMBEDDINGS, options.embedder, "PARITY_EMBEDDER"),
        (scope.RERANK, options.reranker, "PARITY_RERANKER"),
    ):
        if model is not None:
            options.groups.append(group)
            # For the launcher, whatever starts it.
            os.environ[variable] = str(model.absolute())
    return options


def _print(result: Mapping[str, Any]) -> None:
    if result["outcomes"]:
        reference = result["reference"]
        print(table(result["outcomes"]))
        _print_cases(f"{reference} fails by text", result["by_text"])
        _print_cases(f"{reference} fails otherwise", result["fails_at_reference"])
        for name, cases in result["missing"].items():
            _print_cases(f"{reference} passes, {name} does not", cases)
    if "pairs" in result:
        print(f"\n{pairs.summary(result['pairs'])}")


def _print_cases(title: str, cases: Sequence[str]) -> None:
    print(f"\n{title}: {len(cases)}")
    for case in cases:
        print(f"  {case}")


def _passes(run: Outcomes, cases: Sequence[str]) -> int:
    return sum(case in run and run[case]["outcome"] == "passed" for case in cases)


if __name__ == "__main__":
    raise SystemExit(main())
