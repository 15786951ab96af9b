"""Options that ``paceline.toml`` sets: which file counts, what comes before it, and what is said of a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.commands import Command, Group
from paceline.cli.options import GivenOptions, with_options
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.environment import ModelChoice
from paceline.models.hub.reference import HubModel
from paceline.planning.policies.fixed import FixedPolicy
from tests.cli.invoking import Invoke

Got = dict[str, Any]
Call = Callable[..., Got]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, where nobody named a configuration file."""
    monkeypatch.delenv("PACELINE_CONFIG")
    monkeypatch.setattr(platformdirs, "user_config_path", lambda *_, **__: tmp_path / "user")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def call(folder: Path) -> Call:
    """Write a file, call a command of a program that has two, and return what the command gets."""
    got: list[Got] = []
    app = typer.Typer(cls=Group)

    @app.command("write", cls=Command)
    @with_options()
    def write(
        context: typer.Context,
        *,
        models: ModelChoice,
        rules: StopRules,
        params: SamplingParams,
        speculation: SpeculationParams,
        fixed: FixedPolicy,
        given: GivenOptions,
        policy: Annotated[str | None, typer.Option("--policy")] = None,
        escape: Annotated[bool, typer.Option("--escape/--no-escape")] = True,
    ) -> None:
        """Take options of the table, and others."""
        got.append({**locals(), "given": {*given.values}})

    @app.command("other", cls=Command)
    def other(context: typer.Context, port: Annotated[int, typer.Option("--port")] = 1) -> None:
        """Take one of its own."""
        got.append({"port": port})

    def run(text: str, *words: str) -> Got:
        (folder / "paceline.toml").write_text(text)
        outcome = CliRunner().invoke(app, words or ["write"], catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        return got.pop()

    return run


EVERYTHING = """
temp = 0.25
seed = 7
threads = 3
stop = ["a", "b"]
drafters = ["suffix", "lookup"]
port = 5
escape = false

[write]
ctx_size = 512
temp = 0.5

[other]
port = 6

[profiles.cold]
temp = 0
seed = 8

[profiles.cold.write]
seed = 9
"""


def test_options_of_a_file_are_defaults(call: Call) -> None:
    got = call(EVERYTHING)
    assert (got["params"].temperature, got["params"].seed, got["rules"].stop) == (0.5, 7, ("a", "b"))
    assert got["models"].settings.threads == 3
    assert got["models"].settings.context_length == 512
    assert got["speculation"].drafters == ("suffix", "lookup")
    assert got["escape"] is False
    # What the file says, somebody said.
    assert got["given"] == {"temperature", "seed", "stop", "drafters"}
    assert call(EVERYTHING, "other") == {"port": 6}
    assert call("port = 5", "other") == {"port": 5}


def test_a_profile_goes_before_the_rest_of_the_file(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["write", "--profile", "cold"], ["--profile=cold", "write"]):
        params = call(EVERYTHING, *words)["params"]
        assert (params.temperature, params.seed) == (0.0, 9)
    monkeypatch.setenv("PACELINE_PROFILE", "cold")
    assert call(EVERYTHING)["params"].seed == 9


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TEMPERATURE", "0.75")
    monkeypatch.setenv("PACELINE_THREADS", "4")
    got = call(EVERYTHING, "write", "-t", "5", "--stop", "c", "--escape")
    assert (got["params"].temperature, got["params"].seed) == (0.75, 7)
    assert (got["models"].settings.threads, got["rules"].stop, got["escape"]) == (5, ("c",), True)


def test_a_model_is_named_once(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'model = "~/big"\n[profiles.hub]\nhf-repo = "u/m"\nhf-file = "a.gguf"'
    assert call(text)["models"].target == str(Path("~/big").expanduser())
    assert call(text, "write", "--profile", "hub")["models"].target == HubModel("u/m", file="a.gguf")
    assert call(text, "write", "--profile", "hub", "-m", "other")["models"].target == "other"
    assert call(text, "write", "-hf", "u/other")["models"].target == HubModel("u/other")
    monkeypatch.setenv("PACELINE_HF_REPO", "u/env")
    assert call(text)["models"].target == HubModel("u/env")


def test_draft_lengths_and_a_policy_set_each_other_aside(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = "no-speculation = true\n[profiles.two]\ndraft-max = 2"
    assert not call(lengths)["speculation"].speculate
    got = call(lengths, "write", "--profile", "two")
    assert (got["speculation"].speculate, got["fixed"].draft_max) == (True, 2)
    got = call(lengths, "write", "--profile", "two", "--policy", "auto")
    assert (got["policy"], got["fixed"]) == ("auto", FixedPolicy())
    assert call('policy = "auto"', "write", "--draft-min", "1")["policy"] is None
    monkeypatch.setenv("PACELINE_DRAFT_MAX", "3")
    assert call("draft-max = 2")["fixed"] == FixedPolicy()


def test_a_switch_that_is_off_is_as_if_it_were_not_there(call: Call) -> None:
    assert call("no-speculation = false\nno-escape = true")["speculation"].speculate
    assert call("no-escape = true")["escape"] is False
    assert call("flash-attn = true")["models"].settings.flash_attention is True


def test_which_file_counts(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = folder / "named.toml"
    named.write_text("seed = 3")
    user = folder.parent / "user" / "paceline.toml"
    user.parent.mkdir()
    user.write_text("seed = 4")
    assert call("seed = 1")["params"].seed == 1
    assert call("seed = 1", "write", "--config", str(named))["params"].seed == 3
    monkeypatch.setenv("PACELINE_CONFIG", str(user))
    assert call("seed = 1")["params"].seed == 4
    assert call("seed = 1", "--config", str(named), "write")["params"].seed == 3


def test_the_users_file_counts_where_there_is_no_other(folder: Path, invoke: Invoke) -> None:
    asked = invoke("help", "config")
    assert asked.status == 0
    assert str(folder / "paceline.toml") in asked.out
    user = folder.parent / "user" / "paceline.toml"
    user.parent.mkdir()
    user.write_text('temp = 0.5\n[serve]\nport = 9\napi-key = "secret"\n[profiles.fast]\nthreads = 8\n')
    asked = invoke("help", "config")
    assert (asked.status, asked.err) == (0, "")
    for words in (f"In use: {user}", "  temp = 0.5\n", "  [serve] sets port, api-key\n", "PACELINE_PROFILE: fast\n"):
        assert words in asked.out
    assert "secret" not in asked.out


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("temp =", "write", " is not TOML: Invalid value (at end of document)"),
        ("tmep = 1", "write", ": no command has option tmep: did you mean temp?"),
        ("[write]\ntopk = 1", "write", ": write has no option topk: did you mean top-k?"),
        ("[other]\ntemp = 1", "other", ": other has no option temp: paceline other --help-all lists its options"),
        ("n = 1", "write", ": no command has option n: did you mean predict?"),
        ("[wriet]", "write", ": there is no command wriet for [wriet]: did you mean [write]?"),
        ("[profiles.a.wriet]", "write --profile a", ": there is no command wriet for [profiles.a.wriet]: did you mean"),
        ("[profiles.a]", "write --profile b", " has no profile b: it has a"),
        ("", "write --profile b", " has no profile b: it has none"),
        ('temp = "hot"', "write", ": temp 'hot' is not a number"),
        ("temp = -1", "write", ": temperature -1.0 is out of range: give a value from 0.0 to 100.0"),
        ("escape = 1", "write", ": escape is 1: give true or false"),
        ("seed = 1979-05-27", "write", ": seed is 1979-05-27: give a text, a number, true or false"),
        ("verify = 'some'", "write", ": verify 'some' is not one of coupled, rejection"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_that_names_it(call: Call, text: str, words: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        call(text, *words.split())
    line = str(caught.value).replace("paceline write", "write").replace(": paceline other has", ": other has")
    assert line.startswith(f"paceline.toml{says}")
    assert "\n" not in line


def test_a_file_that_is_not_there(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^there is no file nowhere \(--config\): give the path"):
        call("", "write", "--config", "nowhere")
    monkeypatch.setenv("PACELINE_CONFIG", "nowhere")
    with pytest.raises(InputError, match=r"^there is no file nowhere \(PACELINE_CONFIG\)"):
        call("")


def test_a_profile_where_there_is_no_file(folder: Path, invoke: Invoke) -> None:
    outcome = invoke("models", "path", "--profile", "a")
    assert outcome.status == 2
    assert "there is no configuration file to take profile a from" in outcome.err


def test_a_wrong_file_keeps_nobody_from_the_help(folder: Path, invoke: Invoke) -> None:
    (folder / "paceline.toml").write_text("temp =")
    assert invoke("run", "--help").status == invoke("run", "--help-all").status == 0


def test_a_line_says_what_a_file_sets(folder: Path, invoke: Invoke) -> None:
    (folder / "paceline.toml").write_text("seed = 3\n[profiles.few]\nrepeats = 0")
    outcome = invoke("run", "-p", "x", "--profile", "few")
    assert outcome.err == "paceline.toml, profile few, sets seed, repeats\npaceline: --repeats 0: the least is 1\n"
    assert invoke("models", "path").err == ""
