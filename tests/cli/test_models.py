"""``paceline models`` as its users call it, and names where ``paceline run`` takes models."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.models.embedded import embedded_draft, embedded_target
from tests.cli.invoking import FAST, Invoke
from tests.cli.terminal import CTRL_D, Terminal
from tests.engines.tiny_models import write_eagle_head, write_model
from tests.models.helpers import split_gguf, write_folder, write_gguf
from tests.tiers import some_long


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    made = tmp_path / "cache" / "models"
    made.mkdir(parents=True)
    return made


def fill(folder: Path) -> None:
    """Put one of each into the cache: a file made by paceline, a folder, a damaged file."""
    write_gguf(
        folder / "big.gguf",
        general__license="mit",
        general__description="A [big] one",
        llama__context_length=512,
        llama__block_count=1,
        paceline__inflate__layers=1,
        paceline__inflate__source_sha256=hashlib.sha256(embedded_draft().read_bytes()).hexdigest(),
    )
    write_folder(folder / "hf", num_hidden_layers=2, hidden_size=64)
    (folder / "cut.gguf").write_bytes(embedded_draft().read_bytes()[:200_000])


def test_the_list_says_what_there_is_and_what_is_wrong_with_the_rest(invoke: Invoke, folder: Path) -> None:
    fill(folder)
    status, out, err = invoke("models")
    assert (status, err) == (0, "")
    entry: dict[str, list[str]] = {}
    for line in out.splitlines():
        if line.startswith("  ") and line[2] != " ":
            name, _, first = line.strip().partition(" ")
            entry[name] = [first.strip()]
        elif line.startswith("   "):
            entry[name].append(line.strip())
    assert list(entry) == ["target", "draft", "big", "cut", "hf"]
    for name, path in (("target", embedded_target()), ("draft", embedded_draft())):
        assert entry[name][0].startswith(f"{path.name}, ")
        for words in (" MB, ", " parameters, Q8_0, context ", ", vocabulary ", ", licence "):
            assert words in entry[name][0]
        assert entry[name][1].startswith("llama: ")
        assert entry[name][-1] == f"card: {path.with_name('MODEL_CARD.md')}"
    size, _, figures = entry["big"][0].removeprefix("big.gguf, ").partition(", ")
    number, unit = size.split()
    exact = (folder / "big.gguf").stat().st_size
    assert float(number) * {"bytes": 1, "kB": 1000}[unit] == pytest.approx(exact, rel=0.01)
    assert figures == "104 parameters, F16, context 512, vocabulary 3, licence mit"
    assert entry["big"][1:] == [
        "llama: 1 layer",
        "A [big] one",
        "made by paceline inflate from draft",
        f"card: {embedded_draft().with_name('MODEL_CARD.md')}",
    ]
    assert len(entry["cut"]) == 1
    assert "cut.gguf is truncated or damaged" in entry["cut"][0]
    assert entry["hf"][0].startswith("hf/, ")
    assert entry["hf"][0].endswith("28 parameters, F32, licence apache-2.0")
    assert entry["hf"][1:] == [
        "llama: 2 layers of width 64",
        "A model that does nothing.",
        f"card: {folder / 'hf' / 'README.md'}",
    ]
    assert str(folder) in out


def test_an_empty_cache_is_said_to_be_empty(invoke: Invoke, folder: Path) -> None:
    assert "nothing yet" in invoke("models").out
    folder.rmdir()
    assert "nothing yet" in invoke("models").out


def test_the_list_for_scripts(invoke: Invoke, folder: Path) -> None:
    fill(folder)
    listed = json.loads(invoke("models", "--json").out)
    assert listed["folder"] == str(folder)
    by_name = {model["name"]: model for model in listed["models"]}
    assert list(by_name) == ["target", "draft", "big", "cut", "hf"]
    assert by_name["target"]["path"] == str(embedded_target())
    assert by_name["target"]["embedded"] is True
    assert by_name["target"]["fault"] is None
    assert by_name["target"]["num_bytes"] == embedded_target().stat().st_size
    assert by_name["big"]["provenance"]["inflate.layers"] == 1
    assert by_name["big"]["made_from"] == "draft"
    assert by_name["hf"]["made_from"] is None
    assert by_name["big"]["embedded"] is False
    assert by_name["cut"]["path"] == str(folder / "cut.gguf")
    assert "truncated" in by_name["cut"]["fault"]
    assert by_name["hf"]["card"] == str(folder / "hf" / "README.md")
    assert "metadata" not in by_name["target"]


def test_a_model_made_from_an_unknown_one_says_so(invoke: Invoke, folder: Path) -> None:
    write_gguf(folder / "old.gguf", paceline__inflate__source_sha256="0f" * 32)
    listed = invoke("models").out
    assert f"made by paceline inflate from a file with SHA-256 {'0f' * 32}\n" in listed
    assert listed.count("card: ") == 2
    assert "card: none; metadata:" in invoke("models", "show", "old").out


def test_show_prints_path_and_card_or_else_metadata(invoke: Invoke, folder: Path) -> None:
    fill(folder)
    target = invoke("models", "show", "target")
    assert target.status == 0
    assert str(embedded_target()) in target.out.splitlines()
    assert target.out.endswith(embedded_target().with_name("MODEL_CARD.md").read_text(encoding="utf-8"))
    big = invoke("models", "show", str(folder / "big.gguf"))
    assert "\ngeneral.description = A [big] one\n" in big.out
    assert f"card: {embedded_draft().with_name('MODEL_CARD.md')}; metadata:" in big.out
    assert "\ntokenizer.ggml.tokens = (3 items)\n" in big.out
    as_json = json.loads(invoke("models", "show", "hf", "--json").out)
    assert as_json["card_text"] == (folder / "hf" / "README.md").read_text()
    assert as_json["metadata"]["num_hidden_layers"] == 2
    assert as_json["num_parameters"] == 28


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show", "cut"), "truncated or damaged"),
        (("remove", "bgi", "--yes"), "no model named 'bgi' is cached: did you mean big? paceline models lists those"),
        (("remove", "big"), "add --yes"),
    ],
)
def test_bad_input_gets_one_clear_line_and_status_2(
    arguments: tuple[str, ...], words: str, invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(folder)
    monkeypatch.chdir(folder.parent)
    status, out, err = invoke("models", *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("paceline: ")
    assert words in err
    assert len(list(folder.iterdir())) == 3


def test_a_split_model_is_one_model(invoke: Invoke, folder: Path) -> None:
    parts = split_gguf(embedded_draft(), folder)
    name = parts[0].stem
    listed = json.loads(invoke("models", "--json").out)["models"]
    assert [model["name"] for model in listed] == ["target", "draft", name]
    assert listed[2]["num_parts"] == 3
    assert listed[2]["num_parameters"] == listed[1]["num_parameters"]
    shown = invoke("models", "show", name).out
    size = sum(part.stat().st_size for part in parts)
    assert shown.startswith(f"{size / 1e6:.2f} MB in 3 parts, ")
    status, _, err = invoke("models", "show", str(parts[1]))
    assert (status, err.count("\n")) == (2, 1)
    assert f"is part 2 of a split model; give the first part, {parts[0].name}" in err
    assert f"deleted {parts[0]} and 2 other parts" in invoke("models", "remove", name, "--yes").err
    assert list(folder.iterdir()) == []


OTHER_FORMATS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "big-endian": (lambda data: data[:4] + data[7:3:-1] + data[8:], "big-endian GGUF file"),
    "version 1": (lambda data: data[:4] + b"\1" + data[5:], "GGUF version 1, which llama.cpp no longer reads"),
    "version 99": (lambda data: data[:4] + b"\143" + data[5:], "GGUF version 99, and up to 3 can be read"),
    "empty": (lambda data: b"", "is not a GGUF file: it is empty"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_every_command_says_the_same_of_a_file_that_it_cannot_read(name: str, invoke: Invoke, tmp_path: Path) -> None:
    change, words = OTHER_FORMATS[name]
    path = tmp_path / "other.gguf"
    path.write_bytes(change(embedded_draft().read_bytes()))
    said = {
        invoke(*command)
        for command in (
            ("models", "show", str(path)),
            ("run", "-m", str(path), "-p", "x"),
            ("run", "-md", str(path), "-p", "x"),
            ("profile", "-m", str(path)),
            ("convert", str(path), str(tmp_path / "folder")),
            ("inflate", str(path), "1b", "--output", str(tmp_path / "inflated.gguf")),
        )
    }
    assert len(said) == 1, said
    (outcome,) = said
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert words in outcome.err
    assert [left.name for left in tmp_path.iterdir()] == ["other.gguf"]


def test_remove_deletes_what_it_names(invoke: Invoke, folder: Path) -> None:
    fill(folder)
    for name, left in (("hf", ["big.gguf", "cut.gguf"]), ("cut", ["big.gguf"])):
        status, out, err = invoke("models", "remove", name, "--yes")
        assert (status, out) == (0, "")
        assert f"deleted {folder / name}" in err
        assert sorted(path.name for path in folder.iterdir()) == left


@pytest.mark.parametrize(
    ("answer", "removed"),
    some_long([("y\r", True), ("\r", False), (CTRL_D, False)], quick=[("y\r", True), ("\r", False)]),
)
def test_remove_asks_on_a_terminal(answer: str, removed: bool, folder: Path) -> None:
    fill(folder)
    with Terminal(["models", "remove", "big"]) as terminal:
        terminal.wait_for(r"\[y/N\]")
        terminal.type(answer)
        assert (terminal.wait() == 0) is (answer != CTRL_D)
    assert str(folder / "big.gguf") in terminal.shown.replace("\r\n", "")
    assert (folder / "big.gguf").exists() is not removed


def test_path_prints_the_folder(invoke: Invoke, folder: Path) -> None:
    assert invoke("models", "path") == (0, f"{folder}\n", "")


def test_run_takes_names(invoke: Invoke, folder: Path) -> None:
    (folder / "mine.gguf").write_bytes(embedded_draft().read_bytes())
    # A planned draft length depends on how fast the machine is.
    fixed = ("--draft-max", "5")
    by_name = json.loads(invoke("run", "-m", "target", "-md", "mine", "-p", "def f(x):", *FAST, *fixed, "--json").out)
    by_default = json.loads(invoke("run", "-p", "def f(x):", *FAST, *fixed, "--json").out)
    assert by_name["text"] == by_default["text"]
    assert by_name["drafters"] == ["draft"]
    assert by_name["stats"]["draft_n_accepted"] == by_default["stats"]["draft_n_accepted"]


def test_a_model_cannot_write_to_the_terminal(invoke: Invoke, folder: Path) -> None:
    hostile = "\x1b[2J\x9b31m\nforged\x07"
    write_gguf(folder / "m.gguf", f"llama{hostile}", general__description=hostile, general__license=hostile)
    (folder / "m.md").write_text(f"# {hostile} card\n", encoding="utf-8")
    write_gguf(folder / "without-card.gguf", **{f"x{hostile}": hostile})
    for words in (["models"], ["models", "show", "m"], ["models", "show", "without-card"]):
        status, out, _ = invoke(*words)
        assert status == 0
        assert not {"\x1b", "\x9b", "\x07"} & set(out)
        assert "\\x1b[2J\\x9b31m" in out
    listed = invoke("models").out
    assert "licence \\x1b[2J\\x9b31m\\nforged\\x07" in listed
    assert json.loads(invoke("models", "show", "without-card", "--json").out)["metadata"][f"x{hostile}"] == hostile


def test_heads_are_listed_for_what_they_are(invoke: Invoke, folder: Path) -> None:
    write_eagle_head(folder / "eagle3-m.gguf", 32)
    for words in (["models"], ["models", "show", "eagle3-m"]):
        assert "eagle3: 1 layer of width 32" in invoke(*words).out


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("run -m ", ["target", "draft", "mine"]),
        ("run -md t", ["target"]),
        ("run -md s", ["self"]),
        ("run -m s", []),
        ("run -m ./t", []),
        ("models show m", ["mine"]),
        ("models remove ", ["mine"]),
        ("run --json x -md s", ["self"]),
    ],
)
def test_the_shell_completes_names(
    words: str, offered: list[str], invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(folder / "mine.gguf")
    line = f"paceline {words}"
    for name, value in (("WORDS", line), ("CWORD", str(len(line.split(" ")) - 1))):
        monkeypatch.setenv(f"COMP_{name}", value)
    monkeypatch.setenv("_PACELINE_COMPLETE", "complete_bash")
    monkeypatch.setattr(sys.modules["__main__"], "__package__", "")  # else it is the name of what runs the tests
    assert invoke().out.split() == offered


@pytest.mark.parametrize(("words", "encoding"), [(["models"], "ascii"), (["models", "--json"], "cp1252")])
def test_names_that_are_no_text_are_listed(words: list[str], encoding: str, folder: Path) -> None:
    write_gguf(folder / "plain.gguf").rename(folder / os.fsdecode(b"\xff\xe2\x82\xac.gguf"))
    outcome = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (outcome.returncode, outcome.stderr) == (0, b"")
    shown = outcome.stdout.decode(encoding)
    assert "\\udcff" in shown
    if "--json" in words:
        assert json.loads(shown)["models"][-1]["name"] == "\udcff€"


def test_memory_is_known_before_a_model_is_loaded(invoke: Invoke) -> None:
    status, out, err = invoke(
        "models", "show", "target", "-c", "2k", "-np", "4", "-md", "draft", "-ctk", "bf16", "--json"
    )
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert (told["requests"], told["target"]["context_length"], told["target"]["cells"]) == (4, 512, 2048)
    assert (
        told["target"]["weights_bytes"] < embedded_target().stat().st_size < told["target"]["weights_bytes"] + 200_000
    )
    parts = [told[model][f"{part}_bytes"] for model in ("target", "draft") for part in ("weights", "cache", "other")]
    assert told["start_bytes"] == told["process_bytes"] + sum(parts)
    scratch = sum(told[model]["compute_bytes"] for model in ("target", "draft"))
    assert told["most_bytes"] == told["start_bytes"] + scratch
    assert told["gpu_bytes"] == sum(
        told[model][f"{part}_bytes"] for model in ("target", "draft") for part in ("weights", "cache", "compute")
    )
    assert told["prompt_cache_bytes"] == 2 * (512 << 20)
    status, out, err = invoke("models", "show", "target", "-c", "2k", "--cache-ram", "1")
    assert (status, err) == (0, "")
    first, *_, fit = out.splitlines()
    assert first == "target-q8_0.gguf with a context of 2048 tokens, up to 2048 for each of 4 requests"
    assert fit.startswith("fits in memory: ")


def test_a_context_that_no_request_can_use_is_said(invoke: Invoke) -> None:
    _, out, err = invoke("models", "show", "target", "-c", "16k", "-np", "1")
    assert out.startswith("target-q8_0.gguf with a context of 4096 tokens\n")
    assert "\non a GPU with all layers (-ngl 99): " in out
    assert err == (
        "warning: -c 16384 is more than one request can use: target-q8_0.gguf was made for 4096 tokens, and gets no "
        "more; for longer texts take a model made for them\n"
    )
    assert invoke("models", "show", "target", "-c", "16k", "-np", "4").err == ""


def test_memory_of_drafts_that_are_made_of_the_target(invoke: Invoke, tmp_path: Path) -> None:
    path = write_model(tmp_path / "own.gguf", "llama", tokenizer="bytes")
    status, out, err = invoke("models", "show", str(path), "-c", "128", "-md", "mtp")
    assert (status, out) == (2, "")
    assert "own.gguf has no MTP layer that drafts here" in err
    with_mtp = write_model(tmp_path / "mtp.gguf", "qwen35", tokenizer="bytes", mtp=True)
    status, out, err = invoke("models", "show", str(with_mtp), "-c", "128", "-md", "mtp", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["draft"]["weights_bytes"] == 0  # they are among the target's


def test_memory_that_there_is_not(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.memory.available_memory", lambda: 300 << 20)
    arguments = ("models", "show", "target", "-c", "8k")
    *_, fit = invoke(*arguments).out.splitlines()
    assert fit.startswith("too much for memory: ")
    assert fit.endswith("lower -c or -np, or take smaller weights or cache types (-ctk q8_0 -ctv q8_0)")
    *_, fit = invoke(*arguments[:-1], "1k").out.splitlines()
    assert fit.startswith("fits in memory until the prompt cache is full: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-c", "2kk"), "-c '2kk' is no whole number: give one, such as 32k"),
        (("-ctkd", "q8_0"), "-ctkd has no effect without a draft model: name one with -md"),
        (("-c", "2", "-np", "3"), "-c 2 for 3 requests (-np) leaves none a token: raise -c or lower -np"),
    ],
)
def test_options_of_memory_that_cannot_be_used(invoke: Invoke, arguments: tuple[str, ...], message: str) -> None:
    assert invoke("models", "show", "target", *arguments) == (2, "", f"paceline: {message}\n")
