"""Settings that all tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from hypothesis.internal.conjecture.engine import ConjectureRunner

import paceline
from tests import proofs, tiers

# The same examples on every machine; HYPOTHESIS_PROFILE=explore looks for new ones.
_EXPLORE = settings(
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("explore", _EXPLORE)
settings.register_profile("fixed", _EXPLORE, derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

KINDS = {
    "proof": (
        "runtime/test_lossless*",
        "runtime/test_rejection*",
        "runtime/test_ending_reasoning.py",
        "runtime/test_preemption.py",
        "runtime/test_sharing.py",
    ),
    "contract": ("*/test_contract.py", "serving/test_*_client.py"),
    "end_to_end": (
        "cli/*",
        "serving/*",
        "surface/*",
        "page/*",
        "clients/*",
        "gateway/*",
        "ray_serve/*",
        "manifests/*",
        "parity/*",
        "agents/*",
        "real/*",
        "test_*.py",
    ),
}
"""Which kind of test a file has. One that is of none of them is a property if hypothesis runs it, and a unit else."""

ENGINE_PACKAGES = ("llama_cpp", "torch", "transformers", "accelerate")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="make some random scenes only, and leave out tests that are marked long unless -m says which",
    )
    parser.addoption(
        "--without-engines", action="store_true", help="run as where none of the engines' packages is installed"
    )
    parser.addoption("--page", metavar="FOLDER", help="where make test-page unpacked what the tests of tests/page need")
    parser.addoption("--gateway", metavar="PROGRAM", help="the smg that make test-gateway installed")
    parser.addoption("--clients", metavar="FOLDER", help="where make test-clients installed other people's programs")
    parser.addoption("--ray", metavar="FOLDER", help="the environment with Ray that make test-ray installed")
    parser.addoption("--kubernetes", metavar="PROGRAM", help="kubernetes-validate, by make test-kubernetes")
    parser.addoption("--real", metavar="FOLDER", help="where make test-real unpacked what the tests of tests/real read")
    parser.addoption(
        "--rpc", metavar="HOST:PORT[,...]", help="workers to put layers on where an engine runs in a process of its own"
    )


@pytest.fixture(autouse=True, scope="session")
def cache_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests measure and make out of the user's caches, and the user's caches and options out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("PACELINE_", "HF_", "HUGGINGFACE_"))]:
            patch.delenv(name)
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PACELINE_CONFIG", os.devnull)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        yield


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every process that is started."""
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return started


@pytest.fixture(autouse=True, scope="module")
def kept_costs_hold(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take what passes were once measured to cost for what they cost, where tests are not about that.

    Beside other tests they often take longer than they did, and would be measured anew in each.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "planning" and request.path.name not in ("test_attention.py", "test_profile.py"):
            patch.setattr("paceline.planning.costs.profile_cache._still_holds", lambda *_: True)
        yield


def pytest_configure(config: pytest.Config) -> None:
    tiers.choose(quick=config.getoption("--quick"))
    if config.getoption("--quick"):
        config.option.markexpr = config.option.markexpr or "not long"
    if config.getoption("--without-engines"):
        _hide_engines()
    installed, sources = Path(paceline.__file__).parent, Path(__file__).parents[1] / "src" / "paceline"
    for source in sources.rglob("*.py"):
        copy = installed / source.relative_to(sources)
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            raise pytest.UsageError(
                f"the paceline that is installed is older than {source}: "
                "run make unit, or with PYTHONPATH=src the sources as they are"
            )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what needs files that are downloaded, a browser, a gateway, clients, Ray or kubectl."""
    here = Path(__file__).parent
    options = {"real": "--real", "page": "--page", "gateway": "--gateway", "ray_serve": "--ray"}
    options |= {"clients": "--clients", "manifests": "--kubernetes"}
    needed = {here / folder: option for folder, option in options.items()}.get(collection_path)
    return True if needed is not None and not config.getoption(needed) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(_kind_of(item))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files that have long tests: one of them at the end would be waited for alone."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


def _kind_of(item: pytest.Item) -> str:
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    for kind, patterns in KINDS.items():
        if any(fnmatch(path, pattern) for pattern in patterns):
            return kind
    return "property" if is_hypothesis_test(getattr(item, "obj", None)) else "unit"


def pytest_runtest_teardown(item: pytest.Item) -> None:
    proofs.COUNTS[f"tests: {_kind_of(item)}"] += 1


_run = ConjectureRunner.run


def _run_and_count(runner: ConjectureRunner) -> None:
    _run(runner)
    proofs.COUNTS["examples of hypothesis"] += getattr(runner, "valid_test_cases", runner.call_count)


ConjectureRunner.run = _run_and_count  # type: ignore[assignment]


class _NotInstalled(MetaPathFinder):
    """Finds none of the engines' packages. (A ``None`` in ``sys.modules`` says so too, but scipy looks in there.)"""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname.partition(".")[0] in ENGINE_PACKAGES:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _hide_engines() -> None:
    imported = [package for package in ENGINE_PACKAGES if package in sys.modules]
    assert not imported, f"{', '.join(imported)}: imported with paceline, which is to import engines when they are used"
    sys.meta_path.insert(0, _NotInstalled())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what is to be known to the process that prints it, where several share the tests."""
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["proofs"] = proofs.LINES, dict(proofs.COUNTS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    lines, counts = getattr(node, "workeroutput", {}).get("proofs", ((), {}))
    proofs.LINES.extend(lines)
    proofs.COUNTS.update(counts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests want to be known even when they pass, such as how many cases they compared."""
    for line in [*proofs.LINES, f"proved in all: {dict(sorted(proofs.COUNTS.items()))}"]:
        terminalreporter.write_line(line)
