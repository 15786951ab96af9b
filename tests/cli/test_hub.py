"""Models of the hub on the command line: fetched, run, listed and removed, by a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from huggingface_hub.utils import close_session

import paceline
from paceline.core.errors import InputError
from paceline.models.embedded import embedded_draft
from paceline.models.hub import transfer
from paceline.models.hub.local_cache import hub_folder
from tests.cli.invoking import FAST, Invoke
from tests.cli.terminal import Terminal
from tests.engines.tiny_models import write_eagle_head, write_model
from tests.models.helpers import write_folder
from tests.models.hub_server import Hub, Repo, running_hub

DRAFT = embedded_draft().read_bytes()
QUANT = "tiny-Q8_0.gguf"
RUN = ("run", "-p", "def f(x):", *FAST)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setattr(transfer, "RETRY_WAITS_S", (0.0, 0.0))
    with running_hub(tiny=Repo({QUANT: DRAFT}), other=Repo({"other-Q8_0.gguf": DRAFT})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running
        close_session()


def test_run_fetches_both_models_once_and_then_starts_by_name_without_a_network(invoke: Invoke, hub: Hub) -> None:
    fetched = invoke(*RUN, "-hf", "user/tiny", "-hfd", "user/other:q8_0", "--draft-max", "5", "--json")
    assert fetched.status == 0
    assert fetched.err.splitlines() == [
        "fetching user/other:q8_0: 1.31 MB",
        next(line for line in fetched.err.splitlines() if line.startswith("fetched user/other:q8_0: 1.31 MB in ")),
        "fetching user/tiny: 1.31 MB",
        next(line for line in fetched.err.splitlines() if line.startswith("fetched user/tiny: 1.31 MB in ")),
    ]
    answer = json.loads(fetched.out)
    assert answer["drafters"] == ["draft"]
    hub.asked.clear()
    online = invoke(*RUN, "-hf", "user/tiny", "-hfd", "user/other", "--draft-max", "5", "--json")
    assert online.err == ""
    assert len(hub.looks()) == 2
    assert hub.bodies() == []
    hub.asked.clear()
    for arguments in (
        ("-hf", "user/tiny", "-hfd", "user/other", "--offline"),
        ("-m", "user/tiny:Q8_0", "-md", "user/other:Q8_0"),
        ("-m", "user/tiny", "-md", "user/other"),
    ):
        offline = invoke(*RUN, *arguments, "--draft-max", "5", "--json")
        assert (offline.status, offline.err) == (0, "")
        assert json.loads(offline.out)["text"] == answer["text"]
    assert hub.asked == []


def test_the_other_commands_take_models_of_the_hub_too(invoke: Invoke, hub: Hub) -> None:
    profiled = invoke("profile", "-hf", "user/tiny", "-hfd", "user/other", "--budget-s", "0.2", "--json")
    assert profiled.status == 0, profiled.err
    assert len(hub.bodies()) == 2
    assert invoke("bench", "-hf", "user/tiny", "--workloads", "none").status == 2
    for command in ("run", "bench", "profile"):
        shown = invoke(command, "--help-all").out
        assert all(flag in shown for flag in ("-hf, -hfr, ", "-hff, ", "-hfd, -hfrd,", "-hft, ", "--offline "))
        assert "Target from the Hugging Face Hub" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-hf", "user/nobody"), "has no model user/nobody, or a private one: check the name, or log in"),
        (("-hf", "user/tiny", "-hft", "hf_wrong"), "does not accept the token (-hft)"),
        (("-hf", "user/tiny:Q2_K"), "user/tiny has no Q2_K: choose from Q8_0"),
        (("-hf", "user/tiny", "-hff", "x.gguf"), "user/tiny has no GGUF file x.gguf (-hff): it has tiny-Q8_0.gguf"),
        (("-hf", "user/tiny", "-hfd", "user/nobody"), "has no model user/nobody"),
        (("-hf", "user/tiny", "-md", "nowhere.gguf"), "there is no file nowhere.gguf"),
        (("-m", "nowhere.gguf", "-hfd", "user/tiny"), "there is no file nowhere.gguf"),
        (("-hf", "user/tiny", "--offline"), "user/tiny is not in the hub's cache"),
        (("-m", "user/tiny"), "there is no file user/tiny: fetch it from the hub with -hf user/tiny, or give"),
        (("-hf", "user/tiny", "-td", "1"), "-td has no effect without a draft model: name one with -md or -hfd"),
        (("-hfd", "user/tiny", "--no-speculation"), "-hfd has no effect without speculation"),
    ],
)
def test_bad_input_gets_one_clear_line_and_status_2(
    arguments: tuple[str, ...], words: str, invoke: Invoke, hub: Hub
) -> None:
    status, out, err = invoke(*RUN, *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("paceline: ")
    assert words in err
    assert hub.bodies() == []


def test_a_hub_that_cannot_be_asked_is_one_line_of_warning(invoke: Invoke, hub: Hub) -> None:
    assert invoke(*RUN, "-hf", "user/tiny", "--json").status == 0
    hub.status = 503
    status, out, err = invoke(*RUN, "-hf", "user/tiny", "--json")
    assert status == 0
    assert json.loads(out)["text"]
    assert err == (
        f"paceline: warning: {hub.endpoint} answered 503 about user/tiny: user/tiny is used from the cache, "
        "without checking for a newer version\n"
    )


def test_the_list_shows_what_the_hubs_cache_has(invoke: Invoke, hub: Hub, tmp_path: Path) -> None:
    assert "Hugging Face hub" not in invoke("models").out
    folder = write_folder(tmp_path / "folder", architectures=["LlamaForCausalLM"])
    hub.repos["user/folder"] = Repo({path.name: path.read_bytes() for path in folder.iterdir()})
    for name in ("user/tiny", "user/folder"):
        paceline.from_hub(name)
    listed = invoke("models").out
    assert f"\nof the Hugging Face hub, {hub_folder()}\n  user/folder     " in listed
    assert "\n  user/tiny:Q8_0  tiny-Q8_0.gguf, 1.31 MB, " in listed
    entries = {model["name"]: model for model in json.loads(invoke("models", "--json").out)["models"]}
    assert entries["user/folder"]["license"] == "apache-2.0"
    assert [entries[name]["of_hub"] for name in ("target", "user/tiny:Q8_0", "user/folder")] == [False, True, True]
    shown = invoke("models", "show", "user/tiny:Q8_0")
    assert shown.status == 0
    assert str(hub_folder()) in shown.out
    status, _, err = invoke("models", "remove", "user/tiny:Q8_0")
    assert status == 2
    assert f"user/tiny:Q8_0, 1.31 MB in the hub's cache {hub_folder()} would be deleted" in err
    assert invoke("models", "remove", "user/tiny:Q8_0", "--yes").status == 0
    assert invoke("models", "remove", "user/folder", "--yes").status == 0
    assert "Hugging Face hub" not in invoke("models").out
    assert not (hub_folder() / "models--user--tiny").exists()


def test_names_of_the_hub_are_completed_and_listed_without_its_library(hub: Hub) -> None:
    paceline.from_hub("user/tiny")
    script = (
        "import sys; sys.argv = ['paceline', 'models']; from paceline.cli.main import main\n"
        "try: main()\n"
        "finally: print(sorted(name for name in sys.modules if name.startswith(('huggingface_', 'httpx'))))"
    )
    completing = {"_PACELINE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "paceline run -m user/t"}
    for more, words in (({}, "user/tiny:Q8_0"), (completing, "user/tiny")):
        outcome = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **more}, capture_output=True, text=True, check=False
        )
        assert words in outcome.stdout
        assert outcome.stdout.endswith("[]\n"), outcome.stderr


_INTERRUPTED = """
import signal
import paceline.models.hub.transfer as transfer
from paceline.cli.main import main

append = transfer._Content.append
def interrupted(content, chunk):
    append(content, chunk)
    signal.raise_signal(signal.SIGINT)

transfer._Content.append = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def test_an_interrupted_download_ends_quietly_and_is_taken_up_by_the_next_start(invoke: Invoke, hub: Hub) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, *RUN, "-hf", "user/tiny"], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout) == (130, "")
    assert process.stderr == "fetching user/tiny: 1.31 MB\n"
    (partial,) = hub_folder().rglob("*.incomplete")
    there = partial.stat().st_size
    assert 0 < there < len(DRAFT)
    assert partial.read_bytes() == DRAFT[:there]
    assert "user/tiny" not in invoke("models").out
    hub.asked.clear()
    resumed = invoke(*RUN, "-hf", "user/tiny")
    assert resumed.status == 0
    assert "fetching user/tiny: 1.31 MB, of which " in resumed.err
    assert [asked.range for asked in hub.bodies()] == [f"bytes={there}-"]


def test_a_terminal_sees_how_far_a_download_is(hub: Hub) -> None:
    hostile = "\x1b[2Jhuge"
    hub.repos["user/tiny"].files[f"{hostile}-Q4_K_M.gguf"] = b"x" * (1 << 20)
    hub.damages = True  # what follows a download is not looked at
    with Terminal([*RUN, "-hf", "user/tiny"], columns=100) as terminal:
        assert terminal.wait() == 2
    text = terminal.shown
    assert "fetching user/tiny: 1.05 MB\r\n" in text
    assert all(words in text for words in ("\\x1b[2Jhuge-Q4_K_M.gguf", "1.0/1.0 MB", "100%", "B/s"))
    assert text.endswith("start again to fetch it anew\r\n")
    assert "\x1b[38;5;" in text or "\x1b[32m" in text
    assert hostile not in text


@pytest.fixture
def with_heads(hub: Hub, tmp_path: Path) -> Hub:
    """The hub with a model and a head beside it, one without that is of use to it, and a head alone."""
    model = write_model(tmp_path / "model.gguf", "llama", tokenizer="bytes", layers=4).read_bytes()
    head = write_eagle_head(tmp_path / "head.gguf", 32, draft_ids=range(3, 250)).read_bytes()
    hub.repos["user/llama"] = Repo({"llama-Q8_0.gguf": model, "eagle3-llama.gguf": head, "mtp-llama.gguf": b"other"})
    hub.repos["user/head"] = Repo({"eagle3-llama.gguf": head})
    return hub


OF_BYTES = ("run", "-p", "a text", "-c", "64", "-t", "1", "-n", "8", "--json")


def test_a_head_beside_a_model_is_fetched_where_it_drafts(invoke: Invoke, with_heads: Hub) -> None:
    without = invoke(*OF_BYTES, "-hf", "user/llama", "--drafters", "suffix", "--seed", "1")
    assert json.loads(without.out)["drafters"] == ["suffix"]
    assert not any("eagle3" in asked.path for asked in with_heads.bodies())
    fetched = invoke(*OF_BYTES, "-hf", "user/llama", "--draft-max", "2", "--seed", "1")
    assert fetched.err.splitlines()[0].startswith(
        "fetching a head of user/llama, which drafts for it (--drafters suffix goes without): "
    )
    answer = json.loads(fetched.out)
    assert (answer["drafters"], answer["text"]) == (["draft"], json.loads(without.out)["text"])
    assert [asked.path.rpartition("/")[2] for asked in with_heads.bodies()] == ["llama-Q8_0.gguf", "eagle3-llama.gguf"]
    with_heads.asked.clear()
    for arguments in (
        ("-hf", "user/llama", "--offline"),
        ("-m", "user/llama"),
        ("-m", "user/llama:Q8_0", "-md", "user/llama/eagle3-llama.gguf"),
    ):
        again = invoke(*OF_BYTES, *arguments, "--draft-max", "2", "--seed", "1")
        assert (again.err, json.loads(again.out)["drafters"]) == ("", ["draft"])
    assert with_heads.asked == []
    refused = invoke(*OF_BYTES, "-hf", "user/llama", "-md", "mtp")
    assert "llama-Q8_0.gguf has no MTP layer that drafts here (-md mtp)" in refused.err
    assert not any("mtp-" in asked.path for asked in with_heads.bodies())


def test_a_draft_of_the_hub_may_be_a_head(invoke: Invoke, with_heads: Hub) -> None:
    fetched = invoke(*OF_BYTES, "-hf", "user/llama", "-hfd", "user/head", "--draft-max", "2")
    assert json.loads(fetched.out)["drafters"] == ["draft"]
    offline = invoke(*OF_BYTES, "-m", "user/llama", "-md", "user/head", "--draft-max", "2")
    assert json.loads(offline.out)["drafters"] == ["draft"]
    assert "name their model, and this as its draft (-hfd)" in invoke(*OF_BYTES, "-hf", "user/head").err


def test_an_answer_comes_without_a_head_that_cannot_be_had(invoke: Invoke, with_heads: Hub) -> None:
    with_heads.breaks_after = [1 << 30, 0, 0, 0]
    fetched = invoke(*OF_BYTES, "-hf", "user/llama")
    assert fetched.status == 0
    assert "going on without the head of user/llama: " in fetched.err
    assert "cannot be reached" in fetched.err
    assert "draft" not in json.loads(fetched.out)["drafters"]


def test_a_server_of_vectors_fetches_no_head(invoke: Invoke, with_heads: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise InputError("enough")

    monkeypatch.setattr("paceline.cli.serve.load_embedder", refuse)
    ended = invoke("serve", "--embedding", "-hf", "user/llama", "--port", "0", "-c", "64", "-t", "1")
    assert (ended.status, ended.err.splitlines()[-1]) == (2, "paceline: enough")
    assert [asked.path.rpartition("/")[2] for asked in with_heads.bodies()] == ["llama-Q8_0.gguf"]
