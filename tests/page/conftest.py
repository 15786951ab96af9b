"""A browser, and servers for its pages. ``make test-page`` fetches what is needed beside Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from paceline.server_options import ServerOptions
from tests.serving.hosted import Hosted, hosted, pair, scripted
from tests.serving.scripted import Turnstile, writing_model

KEY: Final = "a-key-of-this-test"

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
# What a browser asks of its makers' servers is left out: a test speaks to its own server alone.
_FLAGS: Final = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium without a screen: that of ``CHROMIUM``, or the one that is installed."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        raise pytest.UsageError(
            f"there is none of {', '.join(_NAMES)}: install one (apt-get install chromium), or name it in CHROMIUM"
        )
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def axe(pytestconfig: pytest.Config) -> str:
    """axe-core, as a script."""
    return (Path(pytestconfig.getoption("--page")) / "package" / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def screenshots(pytestconfig: pytest.Config) -> Path:
    """A folder for what is to be looked at."""
    folder = Path(pytestconfig.getoption("--page")) / "screenshots"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def served_pair() -> Iterator[Hosted]:
    """The embedded pair, which drafts whether that pays or not."""
    with hosted(pair, ServerOptions(metrics=True)) as running:
        yield running


@pytest.fixture(scope="session")
def served_script() -> Iterator[Hosted]:
    """A scripted model whose trees have siblings, below a prefix."""
    with hosted(scripted, ServerOptions(metrics=True, prefix="/one")) as running:
        yield running


@dataclass(frozen=True)
class Halting:
    """A server whose answers have no end, and wait for each of their rounds.

    Attributes:
        server: has no drafters.
        gate: lets rounds through.
    """

    server: Hosted
    gate: Turnstile

    def write(self, page: Page, rounds: int) -> None:
        """Let rounds through until so many are shown."""
        self.gate.let_until(lambda: page.locator(".tokens .round").count() >= rounds)


@pytest.fixture
def halting() -> Iterator[Halting]:
    gate = Turnstile(writing_model(end=-30.0))
    with hosted(lambda: scripted(target=gate, drafts=False), ServerOptions(prefix="/one")) as running:
        yield Halting(running, gate)
        gate.open()


@pytest.fixture(scope="session")
def locked() -> Iterator[Hosted]:
    """A scripted model behind a key."""
    with hosted(scripted, ServerOptions(api_key=(KEY,))) as running:
        yield running
