"""``paceline serve --models-dir``: which models there are, and how each is started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from paceline.cli.main import main
from paceline.engines.context_length import BYTES_OF_BOOKKEEPING
from paceline.engines.memory import PROCESS_BYTES
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft
from paceline.serving.router.pool import Launch, ModelPool
from paceline.serving.router.presets import Preset, find_presets
from tests.cli.invoking import Refused
from tests.serving.processes import BODY, served
from tests.timing import WAIT_S

Found = dict[str, tuple[Preset, Launch]]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Found]:
    """Return what the command would serve with some options."""

    def find(*options: str, **variables: str) -> Found:
        kept: list[Found] = []

        def keep(self: object, look: Callable[[], Found], **limits: object) -> None:
            kept.append(look())
            raise SystemExit(0)

        monkeypatch.setattr(ModelPool, "__init__", keep)
        monkeypatch.setattr(sys, "argv", ["paceline", "serve", "--port", "0", *options])
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            main()
        return kept[0]

    return find


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_folder_has_a_model_for_each_file_and_folder(tmp_path: Path) -> None:
    for name in (
        *("one.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj-one.gguf", "notes.txt", ".x.gguf"),
        *("seen/seen-Q4.gguf", "seen/mmproj-F16.gguf", "split/s-00001-of-00002.gguf", "split/s-00002-of-00002.gguf"),
        *("two/a.gguf", "two/b.gguf", "hf/config.json", "empty/readme.md", "both/config.json", "both/x.gguf"),
    ):
        _write(tmp_path / name, "")
    assert {name: str(preset.path.relative_to(tmp_path)) for name, preset in _presets(tmp_path).items()} == {
        "one": "one.gguf",
        "big": "big-00001-of-00002.gguf",
        "seen": "seen/seen-Q4.gguf",
        "split": "split/s-00001-of-00002.gguf",
        "two/a": "two/a.gguf",
        "two/b": "two/b.gguf",
        "hf": "hf",
        "both": "both/x.gguf",
    }


def _presets(folder: Path) -> dict[str, Any]:
    return dict(find_presets(folder, None))


def test_options_hold_for_each_model_and_those_of_a_section_for_its_own(
    found: Callable[..., Found], tmp_path: Path
) -> None:
    for name in ("one.gguf", "two.gguf"):
        shutil.copy(embedded_draft(), _write(tmp_path / "models" / name, ""))
    ini = _write(
        tmp_path / "models.ini",
        "version = 1\n\n[*]\nc = 1024\n; a comment\n[one]\nctx-size = 512\nno-slots = true\nb = 64\nalias = uno, 1\n"
        f"PACELINE_SEED = 7\nload-on-startup = yes\n[three]\nmodel = {tmp_path}/models/one.gguf\n"
        "no-speculation = true\nslots = false\nstop-timeout = 3\ntags = small\n[four]\nhf-repo = user/repo\n",
    )
    models = found(
        *("--models-dir", str(tmp_path / "models"), "--models-preset", str(ini), "-np", "2", "--temp", "-0.0"),
        *("--api-key", "secret", "--metrics", "--pooling", "mean", "--stop", "-x", "--stop", "y"),
        PACELINE_MODEL="elsewhere.gguf",
        PACELINE_API_KEY="also secret",
        LLAMA_ARG_MODELS_MAX="2",
        PACELINE_TOP_K="5",
    )
    assert [*models] == ["four", "one", "three", "two"]
    common = ["--parallel=2", "--temp=-0.0", "--metrics", "--pooling=mean", "--stop=-x", "--stop=y"]
    preset, launch = models["one"]
    assert (preset.aliases, preset.loads_on_startup, preset.stop_s) == (("uno", "1"), True, 10.0)
    words = list(launch.words[launch.words.index("serve") + 1 :])
    assert sorted(words[: len(common)]) == sorted(common)
    own = ["-c", "1024", "--ctx-size=512", "--no-slots", "-b", "64", "-m", f"{tmp_path}/models/one.gguf"]
    assert words[len(common) :][: len(own)] == own
    assert words[-2:] == ["--grace", "0"]
    assert launch.environment["PACELINE_SEED"] == "7"
    assert launch.environment["PACELINE_TOP_K"] == "5"
    assert not {"PACELINE_MODEL", "PACELINE_API_KEY", "LLAMA_ARG_MODELS_MAX"} & launch.environment.keys()
    assert "secret" not in " ".join(launch.words)
    assert not any(str(tmp_path) in word for word in launch.shown)
    preset, launch = models["three"]
    assert (preset.tags, preset.stop_s) == (("small",), 3.0)
    assert {"--no-speculation", "--no-slots"} <= {*launch.words}
    assert models["four"][1].estimate_bytes == PROCESS_BYTES


def test_a_model_has_room_for_usual_requests_where_nobody_says_it(found: Callable[..., Found], tmp_path: Path) -> None:
    shutil.copy(embedded_draft(), tmp_path / "one.gguf")
    for options, variables, room in (
        ([], {}, "16384"),
        (["-np", "2"], {}, "8192"),
        (["--exact"], {}, "4096"),
        (["-c", "0"], {}, None),
        ([], {"LLAMA_ARG_CTX_SIZE": "512"}, None),
    ):
        words = found("--models-dir", str(tmp_path), *options, **variables)["one"][1].words
        assert (words[words.index("-c") + 1] if "-c" in words else None) == room


def test_files_of_the_folder_are_no_modules_of_a_models_process(
    found: Callable[..., Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(embedded_draft(), tmp_path / "one.gguf")
    monkeypatch.chdir(tmp_path)
    # As of a command, and of `python -m`.
    for first, safely in (("/usr/bin", ["-P"]), (str(tmp_path), []), ("", [])):
        monkeypatch.syspath_prepend(first)
        words = found("--models-dir", str(tmp_path))["one"][1].words
        assert [*words[: words.index("serve")]] == [sys.executable, *safely, "-m", "paceline"]


@pytest.mark.parametrize(
    ("options", "cells", "head_bytes"),
    [
        # 32 values take 64 bytes in F16 and 34 in Q8_0; a head has 64 values, of keys and of values.
        ((), 4 * 4096, 256),
        (("-np", "2"), 2 * 4096, 256),
        (("-np", "2", "-c", "1024"), 1024, 256),
        (("-c", "1024"), 1024, 256),
        (("-np", "1", "-c", "0"), 4096, 256),
        (("--exact",), 4096, 256),
        (("-c", "1024", "-ctk", "q8_0", "-ctv", "q8_0"), 1024, 136),
        (("-c", "1024", "-ctk", "q8_0"), 1024, 196),
    ],
)
def test_memory_is_estimated_as_the_engine_takes_it(
    found: Callable[..., Found], tmp_path: Path, options: tuple[str, ...], cells: int, head_bytes: int
) -> None:
    shutil.copy(embedded_draft(), tmp_path / "one.gguf")
    about = describe(embedded_draft())
    assert (about.layers, about.kv_heads, about.head_size, about.context_length) == (3, 1, 64, 4096)

    def estimate(*more: str) -> int:
        launch = found("--models-dir", str(tmp_path), *options, *more)["one"][1]
        return launch.estimate_bytes - PROCESS_BYTES

    alone = about.num_bytes + cells * (BYTES_OF_BOOKKEEPING + 3 * head_bytes)
    assert estimate() == alone
    beside = about.num_bytes + cells * (BYTES_OF_BOOKKEEPING + 3 * 256)
    assert estimate("-md", str(embedded_draft())) == alone + beside
    assert estimate("--memory", "64M") == (64 << 20) - PROCESS_BYTES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[one]\nmodel = missing.gguf\n", "missing.gguf"),
        ("[one]\nc = 5\n", "[one] names no model"),
        ("[one]\nhf-repo = a/b\nfrobnicate = 1\n", "[one]"),
        ("[one]\nhf-repo = a/b\nlora = x\n", "--lora is not supported"),
        ("[one]\nhf-repo = a/b\nport = 80\n", "port"),
        ("[one]\nhf-repo = a/b\nmetrics = maybe\n", "true or false"),
        ("[one]\nhf-repo = a/b\nc = many\n", "[one]"),
        ("[one]\nhf-repo = a/b\n[one]\n", "line 3"),
        ("[one]\nhf-repo = a/b\nhf-repo = a/c\n", "line 3"),
        ("[one]\nhf-repo\n", "line 2"),
        ("[one]\nhf-repo = a/b\nstop-timeout = soon\n", "stop-timeout"),
        ("[one]\nhf-repo = a/b\nstop-timeout = nan\n", "stop-timeout"),
        ("[one]\nhf-repo = a/b\nstop-timeout = -1\n", "stop-timeout"),
        ("[one]\nhf-repo = a/b\nPACELINE_API_PREFIX = /x\n", "PACELINE_API_PREFIX, which is the server's own"),
        ("[one]\nhf-repo = a/b\nLLAMA_ARG_PORT = 1\n", "LLAMA_ARG_PORT, which is the server's own"),
        ("[one]\nhf-repo = a/b\nPACELINE_SEED = x\n", "[one]: PACELINE_SEED"),
        ("[one]\nhf-repo = a/b\nno-speculation = true\ndrafters = suffix\n", "[one]: --drafters has"),
        ("[one]\nLLAMA_ARG_MODEL = missing.gguf\n", "missing.gguf"),
        ("[one]\nhf-repo = a/b\nalias = two\n[two]\nhf-repo = a/c\n", "'two'"),
        ("", "no model"),
    ],
)
def test_what_a_file_of_models_cannot_have_is_told_in_one_line(
    refused: Refused,
    tmp_path: Path,
    text: str,
    said: str,
) -> None:
    ini = _write(tmp_path / "models.ini", text)
    assert said in refused("--port", "0", "--models-preset", str(ini))


def test_what_contradicts_itself_is_refused(
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = ["--models-dir", str(tmp_path)]
    assert "no model" in refused(*folder)
    assert "missing" in refused("--models-dir", str(tmp_path / "missing"))
    assert "--models-dir" in refused(*folder, "-m", "x.gguf")
    assert "-a applies to a single model" in refused(*folder, "--alias", "x")
    for name in ("x.gguf", "x/y.gguf"):
        _write(tmp_path / "same" / name, "")
    assert "'x' is a name of both" in refused("--models-dir", str(tmp_path / "same"))
    assert "--models-memory" in refused(*folder, "--models-memory", "0")
    assert "--sleep-idle-seconds" in refused("--sleep-idle-seconds", "0")
    assert "--routed" in refused("--routed", "-m", str(embedded_draft()))
    monkeypatch.setenv("PACELINE_MODELS_DIR", str(tmp_path))
    assert "missing.gguf" in refused("-m", "missing.gguf", "--port", "0")
    monkeypatch.setenv("PACELINE_MODEL", "x.gguf")
    assert "unset one" in refused()


def test_models_of_a_folder_are_served_by_name_and_end_with_their_server(tmp_path: Path) -> None:
    for name in ("one.gguf", "two.gguf"):
        shutil.copy(embedded_draft(), tmp_path / name)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    options = ("--models-dir", str(tmp_path), "--models-max", "1", "--api-key", "k", "--grace", "0")
    with (
        served(*options) as running,
        httpx.Client(base_url=running.url, timeout=WAIT_S, headers={"X-Api-Key": "k"}) as web,
    ):
        texts = []
        for name in ("two", "one"):
            answer = web.post("/v1/completions", json={**BODY, "model": name, "max_tokens": 8}).json()
            assert answer["model"] == name
            texts.append(answer["choices"][0]["text"])
        assert len({*texts}) == 1
        listed = {model["id"]: model for model in web.get("/v1/models").json()["data"]}
        assert [listed[name]["status"]["value"] for name in ("one", "two")] == ["loaded", "unloaded"]
        assert listed["one"]["meta"]["n_vocab"] > 0
        refusal = web.post("/v1/completions", json={**BODY, "model": "broken"})
        assert refusal.status_code == 503
        assert "broken.gguf" in refusal.json()["error"]["message"]
        assert web.get("/props?model=one&autoload=true").json()["model_alias"] == "one"
        assert web.post("/tokenize", json={"model": "one", "content": "a b"}).json()["tokens"]
        stream = {**BODY, "model": "one", "max_tokens": 3, "stream": True}
        events = [line[6:] for line in web.post("/v1/completions", json=stream).text.splitlines() if line]
        assert events[-1] == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) in texts[0]
        children = psutil.Process(running.process.pid).children()
        assert len(children) == 1
        os.kill(running.process.pid, signal.SIGKILL)
        psutil.wait_procs(children, WAIT_S)
        assert not any(child.is_running() for child in children)
