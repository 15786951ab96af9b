"""A page that is open, and what went wrong in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

from playwright.sync_api import Browser, Page, expect

from tests.timing import WAIT_S

WIDE: Final = (1280, 800)
PHONE: Final = (360, 740)

Theme = Literal["light", "dark"]

WAIT_MS: Final = 1000 * WAIT_S
"""Only a page that hangs takes this long."""

expect.set_options(timeout=WAIT_MS)


@contextmanager
def visiting(
    browser: Browser,
    url: str,
    *,
    size: tuple[int, int] = WIDE,
    theme: Theme = "light",
    moves: bool = False,
    refusals: tuple[int, ...] = (),
    before: Callable[[Page], object] = bool,
) -> Iterator[Page]:
    """Open a page in a profile of its own. Nothing may be refused by its policy, fail or be written to the console.

    Args:
        browser: opens it.
        url: of the page.
        size: of the window.
        theme: that the reader prefers.
        moves: whether the reader lets things move.
        refusals: statuses that the server is expected to answer with, which the browser writes to the console.
        before: prepares the page that is not open yet.
    """
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=theme,
        reduced_motion="no-preference" if moves else "reduce",
    )
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    written: list[str] = []
    asked: set[str] = set()
    page.on("console", lambda message: written.append(message.text))
    page.on("pageerror", lambda error: written.append(str(error)))
    page.on("request", lambda request: asked.add(request.url))
    before(page)
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    unexpected = [line for line in written if not any(f"status of {status}" in line for status in refusals)]
    assert not unexpected, unexpected
    origin = "/".join(url.split("/")[:3])
    assert all(each.startswith(origin + "/") for each in asked)


def serious(page: Page, axe: str) -> list[str]:
    """Return what axe-core finds serious or critical. It is run by the debugger, as no page script may be added."""
    session = page.context.new_cdp_session(page)
    session.send("Runtime.evaluate", {"expression": axe})
    found: dict[str, Any] = session.send(
        "Runtime.evaluate",
        {"expression": "axe.run(document)", "awaitPromise": True, "returnByValue": True},
    )
    assert "exceptionDetails" not in found, found
    violations = found["result"]["value"]["violations"]
    found_serious = [each for each in violations if each["impact"] in ("serious", "critical")]
    return [
        f"{each['id']} at {len(each['nodes'])} places, first at {each['nodes'][0]['target']}: "
        f"{each['nodes'][0]['failureSummary']}"
        for each in found_serious
    ]
