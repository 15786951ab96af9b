"""``paceline distil`` as its users call it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs paceline[torch]")

from paceline.cli import exits
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target, heldout
from tests.cli.invoking import Invoke, spawn
from tests.engines.tiny_models import write_model
from tests.models.helpers import edited_gguf, metadata

QUICK = ("--tokens", "16", "-t", "1", "--epochs", "1")


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Invoke:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return Invoke(monkeypatch, capsys)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = [text[:200] for kind in ("code", "prose") for text in heldout(kind)[:12]]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("target", "draft", "out.gguf", "--time", "soon"), "60m"),
        (("target", "draft", "out.gguf", "--time", "0s"), "--time"),
        (("target", "draft", "out.gguf", "--tokens", "3"), "--tokens 3"),
        (("target", "draft", "out.gguf", "--lr", "7"), "--lr 7"),
        (("target", "draft", "out.gguf", "--prompts", "a", "--answers", "b"), "one of them"),
        (("target", "draft", "out.gguf", "--type", "Q9"), "Q9"),
        (("target", "draft", "out.gguf", "-md", "draft"), "second"),
        (("target", "draft", "out.gguf", "--draft-vocab", "translate"), "own tokens"),
        (("target", "draft", "out.gguf", "-c", "64"), "-c"),
        (("target", "self", "out.gguf"), "self"),
        (("target", "draft", str(embedded_draft())), "not written over"),
        (("target", "draft", str(embedded_target()), "--force"), "not written over"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: tuple[str, ...], said: str, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = invoke("distil", *words)
    assert outcome.status == exits.BAD_INPUT
    assert outcome.err.count("\n") == 1
    assert said in outcome.err
    assert not list(tmp_path.glob("out*"))


def test_a_model_that_cannot_be_trained_is_refused_by_name(invoke: Invoke, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft.gguf", "mamba")
    outcome = invoke("distil", "target", str(draft), str(tmp_path / "out.gguf"))
    assert outcome.status == exits.BAD_INPUT
    assert "mamba" in outcome.err
    assert "recurrent" in outcome.err


def test_another_vocabulary_is_refused_with_the_way_out(invoke: Invoke, tmp_path: Path) -> None:
    tokens = metadata(embedded_draft())["tokenizer.ggml.tokens"]
    other = edited_gguf(tmp_path / "other.gguf", {"tokenizer.ggml.tokens": tokens[::-1]})
    outcome = invoke("distil", "target", str(other), str(tmp_path / "out.gguf"))
    assert outcome.status == exits.BAD_INPUT
    assert "cannot be distilled yet" in outcome.err


def test_few_prompts_are_refused(invoke: Invoke, tmp_path: Path) -> None:
    prompts = tmp_path / "few.jsonl"
    prompts.write_text('{"prompt": "one"}\n')
    outcome = invoke("distil", "target", "draft", str(tmp_path / "out.gguf"), "--prompts", str(prompts))
    assert outcome.status == exits.BAD_INPUT
    assert "prompts" in outcome.err


@pytest.mark.long
def test_no_gain_is_said_and_nothing_written_unless_it_is_wanted(invoke: Invoke, prompts: Path, tmp_path: Path) -> None:
    """With a rate of nothing the draft stays what it is."""
    made = tmp_path / "out.gguf"
    words = (
        "distil",
        "target",
        "draft",
        str(made),
        "--prompts",
        str(prompts),
        *QUICK,
        "--time",
        "20s",
        "--lr",
        "1e-12",
    )
    outcome = invoke(*words, f"--json={tmp_path / 'found.json'}")
    assert outcome.status == exits.DOES_NOT_PAY, outcome.err
    assert "no gain on held-out prompts" in outcome.out
    assert "not written" in outcome.err
    assert not made.exists()
    facts: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    assert (facts["outcome"], facts["written"]) == ("no gain", False)
    kinds = {kind["kind"]: kind["trained_on"] for kind in facts["verdict"]["kinds"]}
    assert kinds["own"] is True
    assert False in kinds.values()
    assert facts["verdict"]["live"]["after"] > 0
    answers = (tmp_path / "out.gguf.distil" / "answers.jsonl").read_bytes()
    again = invoke(*words, "--keep-anyway", "--json")
    assert again.status == 0, again.err
    assert answers
    assert json.loads(again.out)["training"] == facts["training"]
    assert describe(made).file_type == "Q8_0"
    assert not (tmp_path / "out.gguf.distil").exists()
    # And now something is there.
    assert "--force" in invoke(*words).err


@pytest.mark.long
def test_an_interrupt_goes_on_where_it_stood(prompts: Path, tmp_path: Path, invoke: Invoke) -> None:
    made = tmp_path / "out.gguf"
    words = ("distil", "target", "draft", str(made), "--prompts", str(prompts), *QUICK, "--time", "30s")
    process = spawn(*words, env={**os.environ, "PACELINE_CACHE": str(tmp_path / "cache")})
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(b"reading what the target would say"):
            process.send_signal(signal.SIGINT)
            break
    said = process.communicate()[1].decode()
    assert process.returncode == exits.INTERRUPTED, said
    assert "the same command goes on from there" in said
    work = tmp_path / "out.gguf.distil"
    kept = (work / "answers.jsonl").read_bytes()
    assert not made.exists()
    outcome = invoke(*words, "--keep-anyway", "--json")
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["answers"]["texts"] <= kept.count(b"\n")
    assert made.is_file()
    assert not work.exists()


@pytest.mark.long
def test_a_draft_that_was_cut_gains_and_is_written(invoke: Invoke, tmp_path: Path) -> None:
    """The embedded target without its two middle layers, trained for some seconds."""
    from tests.lab.distil.helpers import write_cut_target

    cut = write_cut_target(tmp_path / "cut")
    outcome = invoke("distil", "target", str(cut), str(tmp_path / "out"), "--tokens", "32", "--time", "25s", "--json")
    assert outcome.status == 0, outcome.err
    facts = json.loads(outcome.out)
    assert facts["outcome"] == "gain"
    assert facts["verdict"]["overall"]["accepted"]["difference"]["low"] > 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
