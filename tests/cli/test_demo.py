"""``paceline demo`` as its users call it, with the embedded pair as it is in place of the large target."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.cli import demo as command
from paceline.cli.race_view import STACKED_BELOW, draw_lanes, legend, play_race, verdict_line
from paceline.cli.setup import Setup
from paceline.lab.race import Lane, Piece, Race, run_race
from paceline.models.embedded import embedded_target, heldout
from paceline.planning.policies.fixed import FixedPolicy
from tests.cli.invoking import Invoke

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Invoke:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("paceline.cli.demo.large_target", lambda file_type: embedded_target())
    return Invoke(monkeypatch, capsys)


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft whatever passes take here, which would decide it otherwise."""

    def setup(*arguments: Any, **named: Any) -> Setup:
        return Setup(*arguments, **{**named, "policy": FixedPolicy(4)})

    monkeypatch.setattr("paceline.cli.demo.Setup", setup)


def test_a_pipe_gets_the_lines(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    outcome = invoke("demo")
    assert outcome.status == 0, outcome.err
    assert "\x1b" not in outcome.out + outcome.err
    assert "╭" not in outcome.out
    for scene in command.SCENES:
        assert scene.title in outcome.out
    assert len(re.findall(r"^plain  .* s .* tokens/s  160 tokens$", outcome.out, re.MULTILINE)) == 1
    assert re.search(r"^speculative .* drafts accepted \(.*\)$", outcome.out, re.MULTILINE)
    # Rounding may turn a near-tie of either text.
    assert len(re.findall(r"^same text, |^the texts differ from token ", outcome.out, re.MULTILINE)) == 2
    for words in ("paceline run -m", "paceline chat -hf", "paceline serve -m", "paceline.load("):
        assert words in outcome.out
    for words in ("warming up: ", "first plainly: ", "then speculatively, with the same seed: "):
        assert words in outcome.err


def test_where_nothing_is_drafted_that_is_what_it_says(invoke: Invoke) -> None:
    """Passes of the embedded target as it is are too short for any draft to pay."""
    outcome = invoke("demo")
    assert outcome.status == 0, outcome.err
    assert "same text, and both lanes are plain decoding, whatever their times" in outcome.out


def test_json_holds_races_that_can_be_drawn(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    outcome = invoke("demo", "--json")
    assert outcome.status == 0, outcome.err
    facts = json.loads(outcome.out)
    assert [each["title"] for each in facts["races"]] == [scene.title for scene in command.SCENES]
    for each in facts["races"]:
        race = Race.from_json(each)
        assert race.divergence in (None, "near-tie")
        assert len(each["speedups"]) == 3
        assert sorted(each["speedups"])[1] == pytest.approx(each["speedup"])
    assert facts["races"][0]["speculative"]["num_accepted"] > 20
    assert {"target", "machine"} <= facts.keys()


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["lines", "json"])
def test_an_interrupt_ends_it_quietly(
    options: tuple[str, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **named: Any) -> Race:
        signal.raise_signal(signal.SIGINT)
        return run_race(*arguments, **named)

    monkeypatch.setattr("paceline.cli.demo.run_race", interrupted)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = invoke("demo", *options)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert outcome.status == 130
    assert outcome.err.endswith("interrupted\n")
    assert "Traceback" not in outcome.err
    assert "model of your own" not in outcome.out


def race(*, accepted: int = 4, seconds: float = 2.0) -> Race:
    def lane(step_s: float, sources: list[str]) -> list[Piece]:
        return [
            Piece(f"{word} ", source, step_s * index)
            for index, (word, source) in enumerate(zip(WORDS, sources, strict=True))
        ]

    token_ids = tuple(range(len(WORDS)))
    sources = ["draft"] * accepted + ["target"] * (len(WORDS) - accepted)
    plain = Lane(token_ids, lane(4.0 / 7, ["target"] * len(WORDS)))
    return Race("Count:\n", plain, Lane(token_ids, lane(seconds / 7, sources), 5, accepted, {"draft": accepted}))


def console(*, columns: int = 100, lines: int = 30, **options: Any) -> Console:
    return Console(
        file=io.StringIO(), width=columns, height=lines, force_terminal=True, color_system="standard", **options
    )


def shown(screen: Console, at_s: float, raced: Race | None = None) -> str:
    with screen.capture() as captured:
        screen.print(draw_lanes(screen, raced or race(), at_s))
    return captured.get()


def plain_text(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_lanes_hold_what_was_there_by_then() -> None:
    half = plain_text(shown(console(), 1.0))
    assert half.count("one two") == 2
    assert half.count("four") == 1
    assert re.search(r"1\.0 s +1\.0 tokens/s +2 of 8 +1\.0 s +3\.0 tokens/s +4 of 8", half)
    end = plain_text(shown(console(), 99.0))
    assert end.count("eight") == 2
    assert re.search(r"4\.0 s +1\.8 tokens/s +8 of 8 +2\.0 s +3\.5 tokens/s +8 of 8", end)


def test_lanes_of_a_narrow_terminal_stand_one_above_the_other() -> None:
    beside = plain_text(shown(console(columns=STACKED_BELOW), 0.0)).splitlines()
    assert any("plain" in line and "speculative" in line for line in beside)
    above = plain_text(shown(console(columns=STACKED_BELOW - 1), 0.0)).splitlines()
    assert not any("plain" in line and "speculative" in line for line in above)
    assert all(len(line) <= STACKED_BELOW - 1 for line in above)


@pytest.mark.parametrize(("columns", "lines"), [(100, 30), (80, 24), (60, 24), (40, 16)])
def test_pictures_fit_the_terminal(columns: int, lines: int) -> None:
    raced = race()
    long = [Piece(f"line {index}\n", "target", float(index)) for index in range(100)]
    raced = Race("", Lane(range(100), long), Lane(range(100), long))
    rows = plain_text(shown(console(columns=columns, lines=lines), 99.0, raced)).splitlines()
    assert len(rows) <= lines
    assert max(len(row) for row in rows) <= columns
    assert any("line 99" in row for row in rows)
    assert not any("line 1 " in row for row in rows)


def test_tokens_have_the_colour_of_their_drafter() -> None:
    coloured = shown(console(), 99.0)
    assert re.search(r"\x1b\[32mone", coloured)
    # Without colours they are underlined.
    underlined = shown(console(no_color=True), 99.0)
    assert "\x1b[32m" not in underlined
    assert re.search(r"\x1b\[4mone", underlined)


def test_a_terminal_does_not_obey_the_text() -> None:
    hostile = [Piece("\x1b]0;title\x07", "target", 0.0), Piece("\x9b2J", "draft", 1.0)]
    screen = shown(console(), 9.0, Race("\x1b[2J", Lane((1, 2), hostile), Lane((1, 2), hostile)))
    assert "\x1b]" not in screen
    assert "\x07" not in screen
    assert "\x9b" not in screen
    assert "\x1b[2J" not in screen


def replayed(screen: Console, raced: Race, stopped: Callable[[], bool] = lambda: False) -> list[float]:
    """Replay a race in virtual time; return what was waited for."""
    waits: list[float] = []
    play_race(screen, raced, stopped=stopped, now_s=lambda: sum(waits), sleep=waits.append)
    return waits


def test_a_replay_takes_the_recorded_time_and_leaves_the_end() -> None:
    screen = console()
    assert sum(replayed(screen, race())) == pytest.approx(4.0, abs=0.1)
    assert screen.file.getvalue().count("eight") >= 2  # type: ignore[attr-defined]


def test_a_replay_ends_where_the_user_wants_no_more() -> None:
    polls = iter([False, False, True])
    assert len(replayed(console(), race(), lambda: next(polls))) == 2


@pytest.mark.parametrize(
    ("raced", "words"),
    [
        (race(), "same text, 2.0x"),
        (race(seconds=4.0), "same text, 1.00x: as fast as without drafts"),
        (race(seconds=5.0), "same text, 0.80x: on this machine drafts cost more than they brought here"),
        (race(accepted=1), "same text, 2.0x, by chance: its 1 accepted drafts bring 1.17x at most"),
    ],
)
def test_the_end_is_told_in_plain_words(raced: Race, words: str) -> None:
    assert verdict_line(raced).plain.startswith(words)


def test_the_race_that_is_shown_is_the_median() -> None:
    tries = [race(seconds=seconds) for seconds in (5.0, 2.0, 2.5)]
    assert command.median_race(tries) is tries[2]
    assert command.describe_spread(tries, 0.0) == "the median of 3 tries, of 0.80x to 2.00x"


def test_no_loss_is_left_unexplained() -> None:
    lost = race(seconds=5.0)
    slower = Lane(lost.plain.token_ids, [dataclasses.replace(each, at_s=1.5 * each.at_s) for each in lost.plain.pieces])
    restless = dataclasses.replace(lost, plain=slower)
    assert command.explain_loss(race(), [race()], 2.0) is None
    for tries, others, why in (
        ([lost], 0.5, "Other programs took more of the cores"),
        ([lost, restless], 0.0, "Plain decoding alone took 4.0 to 6.0 s"),
        ([lost, lost], 0.0, "4 of 5 guesses were right"),
    ):
        words = command.explain_loss(lost, tries, others)
        assert words is not None
        assert words.startswith(why)


@pytest.mark.parametrize(
    ("per_second", "tokens", "tries"),
    [
        (40.0, [160, 96], [3, 3]),
        (15.6, [64, 47], [3, 3]),
        (8.0, [64, 32], [3, 1]),
        (4.0, [64, 32], [1, 1]),
        (1.0, [24, 18], [1, 1]),
    ],
)
def test_a_slow_machine_has_shorter_answers_and_fewer_races_and_is_told(
    per_second: float, tokens: list[int], tries: list[int]
) -> None:
    planned = [command.plan_races(scene, per_second) for scene in command.SCENES]
    assert [length for length, _ in planned] == tokens
    assert [count for _, count in planned] == tries
    words = command.describe_slow(per_second)
    assert (words is None) == (tries == [3, 3])
    if words is not None:
        assert f"answers have {tokens[0]} and {tokens[1]} tokens, in {tries[0]} and {tries[1]} races" in words


def test_a_busy_machine_is_told_of() -> None:
    quick = race()
    slow = Lane(quick.plain.token_ids, [Piece(each.text, each.source, 1.5 * each.at_s) for each in quick.plain.pieces])
    said = command.describe_spread([quick, dataclasses.replace(quick, plain=slow), quick], 0.0)
    assert "plain decoding alone took 4.0 to 6.0 s" in said
    said = command.describe_spread([quick], 1.25)
    assert re.fullmatch(r"one try, so it says little; other programs used 1\.2 of \d+ cores meanwhile", said)
    assert command.describe_busy(0.1) is None
    assert (command.describe_busy(1.25) or "").startswith("other programs use 1.2 of ")


def test_other_programs_are_what_the_cores_did_beside_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    busy_s, own_s, now_s = iter([100.0, 106.0]), iter([10.0, 12.0]), iter([0.0, 4.0])
    monkeypatch.setattr("paceline.cli.demo.busy_seconds", lambda: next(busy_s))
    monkeypatch.setattr("paceline.cli.demo.time.process_time", lambda: next(own_s))
    monkeypatch.setattr("paceline.cli.demo.time.monotonic", lambda: next(now_s))
    assert command.OtherPrograms().cores() == pytest.approx(1.0)


def test_scenes_are_what_they_are_called() -> None:
    """A text that is called prose holds no markup and no code where the answer goes on from it."""
    (prose,) = [scene for scene in command.SCENES if scene.kind == "prose"]
    beginning = heldout("prose")[prose.number - 1][:600]
    assert len(re.findall(r"[`{}()=_<>*|;]", beginning)) == 0, beginning


def test_the_legend_names_drafters_whose_tokens_are_there() -> None:
    line = legend(console(), race())
    assert line is not None
    assert line.plain == "  4 of 5 guessed tokens were right: 4 from the draft model"
    assert legend(console(), Race("", race().plain, race().plain)) is None
