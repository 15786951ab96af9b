"""What is said of an option or a command that there is not, and how the help fits a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paceline.cli.main import app
from tests.cli.invoking import Invoke

COMMANDS = ("demo", "run", "chat", "serve", "profile", "bench", "inflate", "prune", "convert", "models", "models show")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run --temprature 0.8", "there is no option --temprature: did you mean --temperature?"),
        ("chat --temprature=0.8", "there is no option --temprature: did you mean --temperature?"),
        ("serve --temprature 0.8", "there is no option --temprature: did you mean --temperature?"),
        ("bench --qick", "there is no option --qick: did you mean --quick?"),
        ("demo --modle x", "there is no option --modle: see paceline demo --help"),
        ("profile --widhts 1", "there is no option --widhts: did you mean --widths?"),
        ("inflate 1b --tpye F16", "there is no option --tpye: did you mean --type?"),
        ("convert a b --froce", "there is no option --froce: did you mean --force?"),
        ("models --jsn", "there is no option --jsn: did you mean --json?"),
        ("models show target --jsn", "there is no option --jsn: did you mean --json?"),
        ("models remove x --eys", "there is no option --eys: did you mean --yes?"),
        ("models path --everything", "there is no option --everything: see paceline models path --help"),
        ("--versoin", "there is no option --versoin: did you mean --version?"),
        # One dash before a long name: -t with the value emp, and the like.
        ("run -temp 0.8", "there is no option -temp: did you mean --temp?"),
        ("run -model=big.gguf", "there is no option -model: did you mean --model?"),
        ("run -vrbose", "there is no option -vrbose: did you mean --verbose?"),
        ("run -x", "there is no option -x: see paceline run --help-all"),
        ("rnu", "there is no command rnu: did you mean run?"),
        ("memory", "there is no command memory: paceline --help lists those that there are"),
        ("serve --ctx 2048", "there is no option --ctx: did you mean --ctx-size?"),
        ("run --reasoning of", "--reasoning 'of' is not one of on, off, auto: did you mean off?"),
        ("models shwo", "there is no command shwo: did you mean show?"),
    ],
)
def test_what_there_is_not_is_one_line_with_what_was_meant(invoke: Invoke, words: str, says: str) -> None:
    assert invoke(*words.split()) == (2, "", f"paceline: {says}\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run --verify foo", "--verify 'foo' is not one of coupled, rejection: see paceline run --help-all"),
        ("run -p", "option '-p' requires an argument: see paceline run --help-all"),
        ("run --ignore-eos=yes", "option '--ignore-eos' does not take a value: see paceline run --help-all"),
        ("bench hard", "unexpected argument hard: see paceline bench --help-all"),
        ("models remove", "missing argument 'NAME': see paceline models remove --help"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line(invoke: Invoke, words: str, says: str) -> None:
    assert invoke(*words.split()) == (2, "", f"paceline: {says}\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("bench --json bench.json", "--json bench.json: write --json=bench.json"),
        ("profile --json profile", "--json profile: write --json=profile"),
        ("doctor target draft --json found.json", "--json found.json: write --json=found.json"),
        ("doctor --json", "missing argument 'TARGET': see paceline doctor --help-all"),
        ("doctor --json absent.gguf", "there is no file absent.gguf: give the path of a GGUF file"),
        ("doctor --json - absent.gguf", "there is no file absent.gguf: give the path of a GGUF file"),
        ("models --json=list.json show target", "--json before show has no effect: put it after show"),
        ("models show target --json=/nowhere/it.json", "/nowhere/it.json cannot be written: there is no directory"),
        ("chat --json=chat.json", "option '--json' does not take a value"),
        ("run -p --json --repeats 0", "--repeats 0: the least is 1"),
        ("run --json=/nowhere/it.json", "/nowhere/it.json cannot be written: there is no directory"),
        ("demo --json=/nowhere/it.json", "/nowhere/it.json cannot be written: there is no directory"),
        ("convert draft there --json=/nowhere/it.json", "/nowhere/it.json cannot be written"),
        ("inflate 1b --json=/nowhere/it.json", "/nowhere/it.json cannot be written"),
    ],
)
def test_json_goes_to_standard_output_or_behind_an_equals_sign(invoke: Invoke, words: str, says: str) -> None:
    outcome = invoke(*words.split())
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert outcome.err.startswith(f"paceline: {says}")


def test_json_goes_to_a_file_beside_what_is_printed(invoke: Invoke, tmp_path: Path) -> None:
    printed, both = invoke("models", "--json").out, invoke("models", f"--json={tmp_path / 'models.json'}")
    assert both == (0, invoke("models").out, f"all figures: {tmp_path / 'models.json'}\n")
    assert json.loads((tmp_path / "models.json").read_text()) == json.loads(printed)


@pytest.mark.parametrize("words", [("--stop", "-temp"), ("-p", "-model"), ("-p-model",)])
def test_a_value_that_looks_like_a_slip_is_a_value(invoke: Invoke, words: tuple[str, ...]) -> None:
    # What is refused comes after all options are read.
    outcome = invoke("run", *words, "--repeats", "0")
    assert outcome.err == "paceline: --repeats 0: the least is 1\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_no_name_of_an_option_is_cut_on_80_columns(
    invoke: Invoke,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Invoke, "COLUMNS", "80")
    status, out, err = invoke(*command.split(), "--help-all")
    assert (status, err) == (0, "")
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    found: Any = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]
    shown = set(re.findall(r"(?<![\w-])--?[\w-]+", out))
    assert len(found.params) > 0 or command == "models path"
    for option in found.params:
        if option.param_type_name == "option" and not option.hidden and option.opts != ["--help-all"]:
            assert {*option.opts, *option.secondary_opts} <= shown, option.opts
    # What an option does has half of the line, and more.
    columns = {
        line.index(second) for line in out.splitlines() for second in re.findall(r"^│ -.*?\S {2,}(\S.*?) *│$", line)
    }
    assert all(column <= 40 for column in columns)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_has_two_defaults(invoke: Invoke, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Invoke, "COLUMNS", "300")
    lines = invoke(*command.split(), "--help-all").out.splitlines()
    # What the help says of a default besides the one in brackets.
    assert not [line for line in lines if len(re.findall(r"by default|\[default: ", line)) > 1]


def test_help_shows_what_most_people_need_and_help_all_everything(invoke: Invoke) -> None:
    short, everything = (invoke("run", asked).out for asked in ("--help", "--help-all"))
    for option in ("--model", "--temp", "--no-speculation", "--help-all"):
        assert option in short
    assert "--xtc-threshold" not in short
    assert "--xtc-threshold" in everything
    # Of a text in several parts, the first.
    assert "Sampling temperature. [default: 0.8]" in short
    assert "Sampling temperature; 0 is greedy." in everything
    assert len([line for line in short.splitlines() if line.startswith("│")]) < 25


@pytest.mark.parametrize(
    ("words", "same"),
    [("help", "--help"), ("help run", "run --help"), ("help run --all", "run --help-all"), ("help models show", "")],
)
def test_help_of_a_command(invoke: Invoke, words: str, same: str) -> None:
    asked = invoke(*words.split())
    assert (asked.status, asked.err) == (0, "")
    assert asked.out == invoke(*(same or "models show --help").split()).out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("help rnu", "there is no command rnu: did you mean run?"),
        ("help run x", "paceline run has no commands of its own: leave out 'x'"),
    ],
)
def test_help_of_what_there_is_not(invoke: Invoke, words: str, says: str) -> None:
    assert invoke(*words.split()) == (2, "", f"paceline: {says}\n")
