"""Settings that all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import paceline
from tests import tiers

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

SUMMARY_LINES = pytest.StashKey[list[str]]()

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
    parser.addoption("--real", metavar="FOLDER", help="where make test-real unpacked what the tests of tests/real read")


@pytest.fixture(autouse=True, scope="session")
def cache_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests measure and make out of the user's caches, and the user's caches and options out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("PACELINE_", "HF_", "HUGGINGFACE_"))]:
            patch.delenv(name)
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        yield


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SUMMARY_LINES] = []
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
    """Leave out what needs files that are downloaded, or a browser."""
    here = Path(__file__).parent
    needed = {here / "real": "--real", here / "page": "--page"}.get(collection_path)
    return True if needed is not None and not config.getoption(needed) else None


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
        output["summary_lines"] = session.config.stash[SUMMARY_LINES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[SUMMARY_LINES] += getattr(node, "workeroutput", {}).get("summary_lines", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what tests want to be known even when they pass, such as how many cases they compared."""
    for line in config.stash[SUMMARY_LINES]:
        terminalreporter.write_line(line)
