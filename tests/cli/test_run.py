"""``paceline run`` as its users call it: output, reports, and one clear line for every bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline.lab.comparison
from paceline.lab.comparison import Comparison, OpenReader
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target, heldout
from tests.cli.invoking import FAST, Invoke, spawn, without_stream
from tests.cli.terminal import Terminal
from tests.models.helpers import edited_gguf, with_last_tokens
from tests.planning.helpers import allow_drafts
from tests.tiers import some_long
from tests.timing import WAIT_S


def test_what_earlier_runs_learned_is_started_with_unless_it_is_not_to_be(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    allow_drafts(monkeypatch)

    def remembered(*options: str) -> list[str]:
        outcome = invoke("run", "-p", "def f(x):", "-n", "40", "--ignore-eos", "-c", "256", "--json", *options)
        assert outcome.status == 0
        found = json.loads(outcome.out)["planner"]["remembered"]
        assert isinstance(found, list)
        return found

    assert remembered("--no-remember") == remembered() == []
    # On a busy machine a run may find that the draft model does not pay before it has tried it.
    assert any("draft" in remembered() for _ in range(3))
    assert remembered("--no-remember") == []


def test_the_text_goes_to_a_pipe_alone_and_the_report_to_stderr(invoke: Invoke) -> None:
    plain = invoke("run", "-p", "def f(x):", *FAST, "--no-speculation")
    speculative = invoke("run", "-p", "def f(x):", *FAST)
    assert (plain.status, speculative.status) == (0, 0)
    assert speculative.out == plain.out
    assert plain.out
    assert "\x1b" not in speculative.out
    for line in ("n_draft   = up to 16, as it pays", "n_predict = 24", "n_drafted = ", "n_accept  = ", "accept    = "):
        assert line in speculative.err
    for words in ("encoded ", "decoded ", "acceptance rate alpha", "acceptance length tau", "verify", "p50", "p99"):
        assert words in speculative.err
    assert "n_drafted" not in plain.err
    assert "defaults of the model" not in plain.err
    assert "\ndraft                   = draft" in speculative.err
    assert "\ndraft  " not in plain.err


def test_the_report_adds_up(invoke: Invoke) -> None:
    outcome = invoke("run", "-p", "def f(x):", *FAST, "--json", "--drafters", "draft,suffix,lookup")
    answer = json.loads(outcome.out)
    stats = answer["stats"]
    assert stats["predicted_n"] == 24 == len(answer["token_ids"]) == len(answer["sources"])
    # Each decoding round emits what it accepted and one token of the target's own; so does the prompt's last pass.
    assert stats["draft_n_accepted"] + stats["rounds"] + 1 == 24
    assert stats["draft_n_accepted"] == sum(source != "target" for source in answer["sources"])
    assert sum(stats["drafted_by_source"].values()) == stats["draft_n"]
    parts = stats["draft_ms"] + stats["verify_ms"] + stats["sampling_ms"] + stats["rest_ms"]
    assert parts == pytest.approx(stats["predicted_ms"])
    assert answer["drafters"] == ["draft", "suffix", "lookup"]
    assert 0 <= stats["queue_ms"] < stats["predicted_ms"]


def test_the_report_says_what_each_drafter_took_and_what_was_gained(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_drafts(monkeypatch)
    outcome = invoke("run", "-p", "def f(x):", "-n", "64", "--ignore-eos", "-t", "1", "--json")
    answer = json.loads(outcome.out)
    stats = answer["stats"]
    assert 0 < sum(stats["draft_ms_by_source"].values()) <= stats["draft_ms"]
    assert set(stats["draft_ms_by_source"]) <= set(answer["drafters"])
    assert 0 < stats["gain_low"] <= stats["gain"] <= stats["gain_high"]
    assert stats["gain"] * stats["predicted_ms"] == pytest.approx(answer["planner"]["plain_ms"])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            (),
            r"gain {20}= about \d+\.\d\d times plain  \(\d+\.\d\d to \d+\.\d\d by what plain rounds took\)",
        ),
        (("--draft-max", "3"), r"gain                    = not known: .*\(--compare does\)"),
        (("-n", "1"), "nothing was drafted     = the answer ended with its first token"),
    ],
)
def test_every_report_has_the_gain_or_the_reason_for_none(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], line: str
) -> None:
    allow_drafts(monkeypatch)
    report = invoke("run", "-p", "def f(x):", "-n", "64", "--ignore-eos", "-t", "1", "--seed", "1", *options).err
    assert re.search(f"^{line}$", report, re.MULTILINE), report


@pytest.mark.parametrize(
    ("options", "reason"), [(("--no-speculation",), "asked"), (("--draft-max", "3", "--draft-p-min", "1"), "no_match")]
)
def test_where_nothing_was_drafted_the_report_says_why(invoke: Invoke, options: tuple[str, ...], reason: str) -> None:
    stats = json.loads(invoke("run", "-p", "def f(x):", *FAST, "--json", *options).out)["stats"]
    assert (stats["draft_n"], stats["off_reason"]) == (0, reason)
    # All rounds are plain ones, and what drafting took is all that can be lost.
    plain_ms = stats["predicted_ms"] - stats["draft_ms"]
    assert stats["gain"] == stats["gain_low"] == stats["gain_high"] == pytest.approx(plain_ms / stats["predicted_ms"])


def test_a_seed_gives_the_same_text_with_any_drafter_and_none(invoke: Invoke) -> None:
    common = ("-p", "import os\n", "-n", "24", "-t", "1", "--temp", "0.8", "--seed", "7", "--json")
    answers = [
        json.loads(invoke("run", *common, *extra).out)
        for extra in (
            ("--no-speculation",),
            (),
            ("--drafters", "lookup,suffix"),
            ("--spec-draft-n-max", "3", "--draft-siblings", "2"),
            ("--draft-p-min", "0.4", "--draft-min", "2"),
        )
    ]
    assert {answer["text"] for answer in answers} == {answers[0]["text"]}
    assert {answer["seed"] for answer in answers} == {7}


def test_without_a_seed_the_report_names_one_that_repeats_the_text(invoke: Invoke) -> None:
    first = json.loads(invoke("run", "-p", "x", "-n", "16", "-t", "1", "--json").out)
    again = json.loads(invoke("run", "-p", "x", "-n", "16", "-t", "1", "--json", "--seed", str(first["seed"])).out)
    assert again["text"] == first["text"]


def test_compare_says_which_is_faster_and_whether_texts_are_equal(invoke: Invoke) -> None:
    outcome = invoke("run", "-p", "def f(x):", *FAST, "--compare", "--repeats", "2", "--draft-max", "3")
    assert outcome.status == 0
    assert outcome.out == ""
    assert re.search(
        r"(speculation is faster|plain is faster|no difference beyond the noise): speculative decoding runs at \d",
        outcome.err,
    )
    assert "plain against plain" in outcome.err
    assert "texts                   = equal, 24 tokens" in outcome.err
    as_json = json.loads(
        invoke("run", "-p", "def f(x):", *FAST, "--compare", "--repeats", "2", "--draft-max", "3", "--json").out
    )
    assert as_json["equal"] is True
    assert len(as_json["trials"]) == 2
    assert as_json["divergence"] is None


def test_compare_names_no_winner_where_nothing_was_drafted(invoke: Invoke) -> None:
    arguments = ("run", "-p", "def f(x):", *FAST, "--compare", "--repeats", "2", "--draft-p-min", "1")
    outcome = invoke(*arguments)
    assert outcome.status == 0
    assert re.search(r"\nnothing was drafted: both ways are plain decoding, so their ratio of \d", outcome.err)
    assert "faster" not in outcome.err
    as_json = json.loads(invoke(*arguments, "--json").out)
    assert (as_json["verdict"], as_json["num_drafted"]) == ("nothing was drafted", 0)


def test_compare_can_load_again_what_a_name_stands_for(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second copy of the target what rounding does is not known, and near-ties pass for bugs."""
    sequences = []

    def summarise(*arguments: Any, open_reader: OpenReader, **options: Any) -> Comparison:
        reader = open_reader(64)
        sequences.append(reader.capabilities.max_sequences)
        reader.close()
        return paceline.lab.comparison.summarise(*arguments, open_reader=open_reader, **options)

    monkeypatch.setattr("paceline.cli.run.summarise", summarise)
    outcome = invoke("run", "-m", "target", "-p", "def f(x):", *FAST, "--compare", "--repeats", "1")
    assert (outcome.status, sequences) == (0, [2])


def test_stop_texts_escapes_and_prompt_files(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text('a\t"b"\n\n', encoding="utf-8")
    from_file = json.loads(invoke("run", "-f", str(file), *FAST, "--ignore-eos", "--json").out)
    from_flag = json.loads(invoke("run", "-p", r"a\t\"b\"\n", *FAST, "--ignore-eos", "--json").out)
    assert from_file["text"] == from_flag["text"]
    middle = from_flag["text"][5:8]
    stopped = json.loads(invoke("run", "-p", r"a\t\"b\"\n", *FAST, "--ignore-eos", "--json", "--stop", middle).out)
    assert stopped["text"] == from_flag["text"][: from_flag["text"].index(middle)]
    assert stopped["finish_reason"] == "stop"


def test_a_context_of_0_is_all_of_the_models_own(invoke: Invoke) -> None:
    trained = describe(embedded_target()).context_length
    assert trained is not None
    answer = json.loads(invoke("run", "-p", "x", *FAST, "-c", "0", "-cd", "0", "--json").out)
    assert answer["finish_reason"] == "length"
    # One token more than there is room for.
    whole = invoke("run", "-p", "x y " * trained, *FAST, "-c", "0")
    assert f"the context holds {trained}" in whole.err


def test_a_prompt_that_is_too_long_is_refused_before_the_model_is_loaded(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object, **options: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("paceline.cli.setup.load", load)
    status, out, err = invoke("run", "-p", "x y " * 400, "-c", "64")
    assert (status, out) == (2, "")
    assert re.fullmatch(
        r"paceline: the prompt has \d+ tokens and the context holds 64, answer included: .*\(-c\)\n", err
    )


def test_the_loss_of_the_reader_is_no_traceback() -> None:
    process = spawn("run", "-p", "x", "-n", "200", "-t", "1")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    assert process.wait(WAIT_S) != 0


def test_ctrl_c_keeps_the_text_and_prints_the_report() -> None:
    process = spawn("run", "-p", "x", "-n", "3000", "-t", "1", "--ignore-eos")
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert first
    assert b"ended by                = cancelled" in err
    assert b"Traceback" not in err + out


def test_a_terminal_gets_colours() -> None:
    with Terminal(["run", "-p", "def f(x):", *FAST, "--drafters", "draft,suffix"]) as terminal:
        assert terminal.wait() == 0
    assert "\x1b[" in terminal.shown
    for shown in ("def f(x):", "tokens accepted from"):
        assert shown in terminal.rest()


def test_rejection_may_give_another_text_and_compare_says_so(invoke: Invoke) -> None:
    arguments = ("-p", "def f(x):", "-n", "24", "-t", "1", "--temp", "0.8", "--seed", "3", "--verify", "rejection")
    outcome = invoke("run", *arguments, "--compare", "--repeats", "1", "--draft-max", "5")
    assert outcome.status == 0
    assert "texts                   = differ, as they may" in outcome.err


def test_under_fused_attention_texts_differ_by_rounding_at_most(invoke: Invoke) -> None:
    arguments = ("-p", "def f(x):", "-n", "48", "-t", "1", "--temp", "0.8", "--seed", "3", "-fa", "on")
    outcome = invoke("run", *arguments, "--compare", "--repeats", "1", "--draft-max", "5")
    assert outcome.status == 0
    (texts,) = (line for line in outcome.err.splitlines() if line.startswith("texts"))
    assert "= equal" in texts or texts.endswith("near-tie")


@pytest.mark.parametrize(
    ("arguments", "n_draft"),
    [
        (["--policy", "auto"], "up to 16, as it pays"),
        (["--policy", "fixed"], "5"),
        (["--draft-max", "3"], "3"),
        (["--policy", "heuristic"], "as the policy says"),
    ],
)
def test_a_policy_by_name_or_by_its_settings(invoke: Invoke, arguments: list[str], n_draft: str) -> None:
    outcome = invoke("run", "-p", "def f(x):", *FAST, *arguments)
    assert outcome.status == 0
    assert f"n_draft   = {n_draft}\n" in outcome.err


def test_json_says_what_was_predicted_and_what_it_cost_where_costs_are_known(invoke: Invoke) -> None:
    told = json.loads(invoke("run", "-p", "def f(x):", *FAST, "--json").out)["planner"]
    assert set(told["calibration"]) <= {"suffix", "lookup", "draft"}
    assert told["plain_ms"] > 0
    fixed = json.loads(invoke("run", "-p", "def f(x):", *FAST, "--json", "--draft-max", "3").out)
    stats = fixed["stats"]
    assert stats["draft_n"] > 0
    assert (fixed["planner"], stats["gain"], stats["gain_low"], stats["gain_high"]) == (None, None, None, None)
    assert stats["off_reason"] is None


def test_the_environment_sets_defaults_of_a_run(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = invoke("run", "-p", "def f(x):", *FAST, "--no-speculation")
    settings = {"MAX_TOKENS": "24", "THREADS": "1", "TEMPERATURE": "0", "SEED": "1", "SPECULATE": "false"}
    for name, text in settings.items():
        monkeypatch.setenv(f"PACELINE_{name}", text)
    # What would draft is left aside.
    monkeypatch.setenv("PACELINE_DRAFT_MODEL", str(embedded_draft()))
    monkeypatch.setenv("PACELINE_DRAFTERS", "suffix,draft")
    assert invoke("run", "-p", "def f(x):").out == wanted.out
    assert "n_predict = 5" in invoke("run", "-p", "def f(x):", "-n", "5", "--ignore-eos").err
    status, out, err = invoke("run", "-p", "x", "--draft-siblings", "2")
    assert (status, out) == (2, "")
    assert "--draft-siblings has no effect without speculation: leave it out, or unset PACELINE_SPECULATE" in err
    monkeypatch.setenv("PACELINE_SPECULATE", "maybe")
    status, out, err = invoke("run", "-p", "x")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("paceline: PACELINE_SPECULATE is 'maybe': give one of true, yes")


def test_the_models_own_defaults_stand_where_nothing_else_is_said(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = {"general.sampling.temp": 0.6, "general.sampling.top_k": 4, "general.sampling.top_p": 0.9}
    model = edited_gguf(tmp_path / "model.gguf", said)
    common = ("run", "-m", str(model), "-p", "def f(x):", "-n", "16", "-t", "1", "--seed", "7", "--no-speculation")

    def defaults(*options: str) -> tuple[dict[str, Any], str]:
        """Return the model's defaults that counted, and the text."""
        told = json.loads(invoke(*common, "--json", *options).out)
        return told["model_defaults"], told["text"]

    outcome = invoke(*common)
    line = "defaults of the model   = temperature 0.6, top-k 4, top-p 0.9  (GGUF metadata)\n"
    assert (outcome.status, outcome.err.count(line)) == (0, 1)
    applied, text = defaults()
    assert applied == {"temperature": 0.6, "top_k": 4, "top_p": 0.9}
    assert (outcome.out.removesuffix("\n"), outcome.err.count("warning")) == (text.removesuffix("\n"), 0)
    # The command line, then the environment, then the model.
    monkeypatch.setenv("PACELINE_TOP_K", "3")
    assert defaults()[0] == {"temperature": 0.6, "top_p": 0.9}
    monkeypatch.setenv("PACELINE_TOP_K", "40")
    assert defaults("--top-k", "4", "--temp", "0.6") == ({"top_p": 0.9}, text)
    every = ("--top-k", "4", "--temp", "0.6", "--top-p", "0.9")
    assert defaults(*every) == ({}, text)
    assert "defaults of the model" not in invoke(*common, *every).err
    # Without them, the options above are all that there is.
    assert defaults("--no-model-defaults", *every) == ({}, text)
    assert defaults("--no-model-defaults")[0] == {}
    monkeypatch.setenv("PACELINE_MODEL_DEFAULTS", "false")
    assert defaults()[0] == {}


def test_compare_tells_the_models_own_defaults(invoke: Invoke, tmp_path: Path) -> None:
    model = edited_gguf(tmp_path / "model.gguf", {"general.sampling.temp": 0.0})
    common = ("run", "-m", str(model), "-p", "def f(x):", "-n", "8", "-t", "1", "--compare", "--repeats", "1")
    assert "defaults of the model   = temperature 0.0  (GGUF metadata)\n" in invoke(*common, "--draft-max", "3").err
    told = json.loads(invoke(*common, "--draft-max", "3", "--json", "--verify", "rejection").out)
    # Greedily, texts are equal under rejection, too.
    assert told["equal"]
    assert told["plain"]["model_defaults"] == told["speculative"]["model_defaults"] == {"temperature": 0.0}


def test_drafters_on_the_command_line_go_before_a_draft_model_of_the_environment(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DRAFT_MODEL", str(embedded_draft()))
    answer = json.loads(invoke("run", "-p", "def f(x):", *FAST, "--json", "--drafters", "suffix").out)
    assert answer["drafters"] == ["suffix"]


def test_draft_max_0_decodes_plainly(invoke: Invoke) -> None:
    zero = json.loads(invoke("run", "-p", "def f(x):", *FAST, "--json", "--draft-max", "0").out)
    plain = json.loads(invoke("run", "-p", "def f(x):", *FAST, "--json", "--no-speculation").out)
    assert zero["text"] == plain["text"]
    assert zero["drafters"] == []


def test_a_sample_is_the_first_half_of_a_held_out_text(invoke: Invoke, tmp_path: Path) -> None:
    text = heldout("logs")[1]
    file = tmp_path / "half.txt"
    file.write_text(text[: len(text) // 2].rpartition("\n")[0] + "\n\n", encoding="utf-8")
    wanted = ("-n", "4", "--temp", "0", "--json")
    from_sample = json.loads(invoke("run", "--sample", "logs:2", *wanted).out)
    from_file = json.loads(invoke("run", "-f", str(file), *wanted).out)
    assert from_sample["text"] == from_file["text"]
    assert from_sample["stats"]["prompt_n"] == from_file["stats"]["prompt_n"]


def test_a_prompt_file_of_another_system_is_the_same_prompt(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "unix.txt").write_bytes(b"x = 1\n")
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbfx = 1\r\n")
    answers = [
        json.loads(invoke("run", "-f", str(tmp_path / name), *FAST, "--json").out)
        for name in ("unix.txt", "windows.txt")
    ]
    assert answers[0]["stats"]["prompt_n"] == answers[1]["stats"]["prompt_n"]
    assert answers[0]["text"] == answers[1]["text"]


def test_a_closed_output_is_one_line() -> None:
    ended = subprocess.run(
        without_stream(1, "run", "-p", "x", *FAST), stderr=subprocess.PIPE, timeout=WAIT_S, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"paceline: standard output is closed")


def test_an_answer_needs_no_standard_error(invoke: Invoke) -> None:
    """What is said there, as of the built-in model, is dropped, and does not come to stand in the answer."""
    words = ("run", "-p", "x", *FAST)
    left, nowhere = os.pipe()
    os.close(left)
    answers = {invoke(*words).out.encode()}
    with os.fdopen(nowhere, "wb", 0) as unread:
        for redirected in ("2>/dev/full", "2>&-", ""):
            shell = ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-m", "paceline", *words]
            answers.add(subprocess.run(shell, stdout=subprocess.PIPE, stderr=unread, check=True).stdout)
    assert len(answers) == 1
    assert answers != {b""}


@pytest.mark.parametrize("encoding", some_long(["cp1252", "ascii"], quick=["cp1252"]))
def test_an_answer_reaches_a_stream_that_lacks_its_characters(encoding: str) -> None:
    """The stop text is what the model cannot help saying, so that the answer has a known character."""
    shown = []
    for extra in (["--json"], []):
        outcome = subprocess.run(
            [sys.executable, "-m", "paceline", "run", "-p", "€€€€€€€€€€€€", *FAST, "--no-speculation", *extra],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            check=False,
            timeout=WAIT_S,
        )
        assert outcome.returncode == 0
        assert b"Traceback" not in outcome.stderr
        shown.append(outcome.stdout.decode(encoding))
    text = json.loads(shown[0])["text"]
    assert shown[1] == text.encode(encoding, "backslashreplace").decode(encoding)
    assert shown[1] != text


def test_a_prompt_from_a_closed_input_is_one_line() -> None:
    ended = subprocess.run(without_stream(0, "run", "-f", "-", *FAST), capture_output=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"paceline: standard input is closed")
    assert ended.stderr.count(b"\n") == 1


def test_reasoning_whose_markers_are_control_tokens_is_told_from_the_answer(invoke: Invoke, tmp_path: Path) -> None:
    model = with_last_tokens(tmp_path / "reasons.gguf", ["<think>", "</think>"])
    template = tmp_path / "template.jinja"
    template.write_text("{% for one in messages %}{{ one.content }}\n{% endfor %}<think>\n{# </think> #}")
    chat = ("--chat", "--chat-template-file", str(template), "--reasoning-budget", "4")
    found = invoke("run", "-m", str(model), "-p", "def f(x):", *chat, *FAST, "--no-speculation", "--json")
    assert found.status == 0, found.err
    message = json.loads(found.out)["message"]
    assert message["reasoning_content"]
    assert message["content"]


def test_a_prediction_from_a_file(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "old.py"
    asked = ("run", "-p", "def f(x):", *FAST, "--temp", "0", "--json")
    plain = json.loads(invoke(*asked, "--no-speculation").out)
    file.write_text(plain["text"] + "\n", encoding="utf-8")
    answer = json.loads(invoke(*asked, "--drafters", "lookup", "--draft-max", "5", "--prediction", str(file)).out)
    assert answer["text"] == plain["text"]
    assert answer["sources"].count("prediction") > 10
    alone = json.loads(invoke(*asked, "--drafters", "prediction", "--draft-max", "5", "--prediction", str(file)).out)
    assert (alone["text"], alone["drafters"]) == (plain["text"], [])
    assert set(alone["stats"]["drafted_by_source"]) == {"prediction"}
    report = invoke("run", "-p", "def f(x):", *FAST, "--draft-max", "5", "--prediction", str(file)).err
    assert re.search(r"accepted from +=.*prediction \d+ of \d+", report)
    for written, message in (
        (b"", "the prediction is empty"),
        (b"\xff", "is not UTF-8"),
        (None, "cannot read the file"),
    ):
        if written is None:
            file.unlink()
        else:
            file.write_bytes(written)
        outcome = invoke(*asked, "--prediction", str(file))
        assert (outcome.status, outcome.err.count("\n")) == (2, 1)
        assert message in outcome.err
    outcome = invoke(*asked, "--no-speculation", "--prediction", str(file))
    assert outcome.status == 2
    assert "--prediction has no effect without speculation" in outcome.err
