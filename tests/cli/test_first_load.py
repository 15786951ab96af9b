"""What a terminal shows where a command loads a model for the first time, so that what passes cost is measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.chat.conversing import CHATML
from tests.cli.terminal import CTRL_C, CTRL_D, ENTER, Terminal
from tests.tiers import some_long

# Measuring ends for lack of time, as with any model but the smallest: before the share that is told of reaches 1. The
# demo has the embedded target as it is, as its own would have to be made first.
PROGRAM: Final = """
import paceline.api
from paceline.cli import demo, entry
from paceline.models.embedded import embedded_target
from paceline.planning.costs.attention import MAX_S
from paceline.planning.costs.meter import ProfilingBudget
paceline.api.FIRST_LOAD = ProfilingBudget(MAX_S + 0.5, max_passes=None)
demo.large_target = lambda file_type: embedded_target()
entry.main()
"""


class Load(NamedTuple):
    """A command that loads a model.

    Attributes:
        arguments: of it.
        shows: a pattern for the last that it shows.
        acts: does what a person does in the end, if anything.
    """

    arguments: tuple[str, ...]
    shows: str
    acts: Callable[[Terminal], None] = lambda terminal: None


def talk(terminal: Terminal) -> None:
    terminal.type("Hello", ENTER)
    terminal.wait_for(r"\d+ tokens; [^\n]*\n")
    terminal.wait_for(r"\n>")
    terminal.type(CTRL_D)


# Several tokens a line, and some of other drafters, whose colours are not to be spelled out.
ANSWER: Final = ("-n", "60", "-t", "1", "--seed", "1", "--ignore-eos", "--temp", "0")
LOADS: Final = {
    "run": Load(("run", "-p", "1 2 3 1 2 3 1 2 3", *ANSWER), r"target  +="),
    "compare": Load(("run", "-p", "1 2 3 1 2 3", *ANSWER, "--compare", "--repeats", "1"), r"texts  +="),
    "chat": Load(("chat", "-m", "target", "--chat-template-file", "{template}", *ANSWER), r"\n>", acts=talk),
    "demo": Load(("demo",), r"print\(model.generate"),
    "bench": Load(
        ("bench", "-m", "target", "--workloads", "hard", "--variants", "auto", "--repeats", "1", "-n", "16"),
        r"took \d+ s",
    ),
    "doctor": Load(("doctor", "target", "draft", "--budget-s", "5"), r"in brackets: "),
    "own draft": Load(("doctor", "target", "self:Q4_0", "--budget-s", "5"), r"in brackets: "),
    "profile": Load(("profile", "--budget-s", "0.5"), r"kept at "),
    "serve": Load(("serve", "--port", "0"), r"requests at once", acts=lambda terminal: terminal.type(CTRL_C)),
}


@pytest.mark.parametrize(
    ("command", "columns"),
    some_long(
        [*((command, 80) for command in LOADS), *((command, 120) for command in ("run", "chat"))],
        quick=[("chat", 120)],
    ),
)
def test_nothing_of_the_status_is_left_and_no_colour_is_spelled_out(command: str, columns: int, tmp_path: Path) -> None:
    load = LOADS[command]
    template = tmp_path / "chatml.jinja"
    template.write_text(CHATML)
    arguments = [argument.format(template=template) for argument in load.arguments]
    cache = tmp_path / "cache"
    with Terminal(arguments, columns=columns, program=("-c", PROGRAM), PACELINE_CACHE=str(cache)) as terminal:
        terminal.wait_for(load.shows)
        load.acts(terminal)
        assert terminal.wait() in (0, 3)  # 3 is doctor's, where no draft pays
        shown, lines = terminal.shown, terminal.lines()
    assert list(cache.rglob("*.json")), "nothing was measured"
    left = [line for line in lines if re.search(r"measuring|\u2501|[\u280b\u2819\u2839]", line)]
    assert not left, "\n".join(lines)
    assert r"\x1b" not in shown
    if command in ("run", "chat", "demo"):
        assert "measuring what passes cost" in shown
