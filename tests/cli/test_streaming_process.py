"""Processes whose models are streamed, ended in the middle of a pass: by signals, by the disk, or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import paceline
from paceline.core.errors import EngineError
from paceline.engines.options import ModelOptions
from paceline.models.embedded import embedded_draft, embedded_target, heldout
from tests.cli.streamed_process import STREAMED, streamed_command
from tests.engines.streamed import ASKED_BYTES, mostly_streamed
from tests.serving.processes import UNMEASURED
from tests.timing import WAIT_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="weights are streamed on Linux alone")

PROMPT = "def fibonacci(n):\n"
PLAIN = ("--no-speculation", "-fa", "off", "-c", "1024", "-t", "1", "--temp", "0.8", "--seed", "1", "--ignore-eos")

PASSES = 20
"""Passes after which the disk holds the next: there is some text by then, and the answer is not over."""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a copy of the embedded target that a test may spoil."""
    path = tmp_path / "target.gguf"
    shutil.copyfile(embedded_target(), path)
    return path


def run_words(target: Path, tokens: int, *options: str) -> tuple[str, ...]:
    return ("run", "-m", str(target), "-p", PROMPT, "-n", str(tokens), *(options or PLAIN), *STREAMED)


def finished(*words: str) -> bytes:
    """Return what a command that nobody disturbs prints."""
    with streamed_command(*words) as (process, _):
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    return out


def wait_for_text(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    first = process.stdout.read(1)
    assert first, process.stderr.read() if process.stderr is not None else b""
    return first


@pytest.mark.long
def test_a_process_that_is_killed_in_a_pass_leaves_file_and_cache_as_they_were(target: Path, tmp_path: Path) -> None:
    speculative = ("-md", str(embedded_draft()), *PLAIN[3:])
    variables = {"PACELINE_CACHE": str(tmp_path / "cache")}
    before = hashlib.sha256(target.read_bytes()).digest()
    with streamed_command(*run_words(target, 400, *speculative), passes=PASSES, variables=variables) as (process, disk):
        first = wait_for_text(process)
        disk.wait_until_held()
        process.kill()
        assert process.wait(WAIT_S) == -signal.SIGKILL
    assert hashlib.sha256(target.read_bytes()).digest() == before
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    # What passes cost was measured before, and nothing is half-written.
    assert [path.parent.name for path in kept if path.parent.name == "profiles"] == ["profiles"]
    for path in kept:
        assert not path.name.startswith("."), path
        # That the model was loaded once is told by an empty file.
        assert path.parent.name == "loaded" or json.loads(path.read_text())["data"]
    with streamed_command(*run_words(target, 8, *speculative), variables=variables) as (process, _):
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert out.startswith(first)


def test_ctrl_c_in_a_pass_keeps_the_text_and_prints_the_report(target: Path) -> None:
    with streamed_command(*run_words(target, 60), passes=PASSES) as (process, disk):
        first = wait_for_text(process)
        disk.wait_until_held()
        process.send_signal(signal.SIGINT)
        disk.go_on()
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert b"ended by                = cancelled" in err
    assert b"Traceback" not in err + out
    said = (first + out).rstrip(b"\n")
    assert said
    assert finished(*run_words(target, 60)).startswith(said)


def test_a_file_that_is_cut_in_a_pass_is_one_clear_line(target: Path) -> None:
    with streamed_command(*run_words(target, 60), passes=PASSES) as (process, disk):
        wait_for_text(process)
        disk.wait_until_held()
        os.truncate(target, 1 << 20)
        disk.go_on()
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    (line,) = [line for line in err.splitlines() if line.startswith(b"paceline: ")]
    assert b"target.gguf " in line
    assert b"while its weights are streamed" in line
    assert b"Traceback" not in err + out


def test_a_model_whose_file_is_cut_in_a_pass_can_be_closed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mostly_streamed():
        options = ModelOptions(target, memory=ASKED_BYTES, context_length=256, threads=1)
        model = paceline.load(options, policy=paceline.NO_SPECULATION)
        expected = model.generate(PROMPT, max_tokens=4, temperature=0.0)
        stream = model.stream(PROMPT, max_tokens=100, temperature=0.0, ignore_end=True)
        segments = iter(stream)
        next(segments)
        layers = model.target._stream  # type: ignore[attr-defined]
        move_on = layers._move_on

        def cut(number: int) -> None:
            if number == 1:
                os.truncate(target, 1 << 20)
            move_on(number)

        monkeypatch.setattr(layers, "_move_on", cut)
        with pytest.raises(EngineError, match=r"target\.gguf .* while its weights are streamed"):
            for _ in segments:
                pass
        with pytest.raises(EngineError, match="while its weights are streamed"):
            model.generate(PROMPT, max_tokens=4, temperature=0.0)
        model.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "paceline-ring"]
        shutil.copyfile(embedded_target(), target)
        with paceline.load(options, policy=paceline.NO_SPECULATION) as again:
            assert again.generate(PROMPT, max_tokens=4, temperature=0.0).token_ids == expected.token_ids


_CUT_AT_FIRST = """
import os, sys
import paceline
from paceline.core.errors import EngineError
from paceline.engines.options import ModelOptions
from tests.engines.streamed import ASKED_BYTES, mostly_streamed

with mostly_streamed():
    options = ModelOptions(sys.argv[1], memory=ASKED_BYTES, context_length=256, threads=1)
    with paceline.load(options, policy=paceline.NO_SPECULATION) as model:
        layers = model.target._stream
        use = layers._use

        def cut(number):
            if number == 0:
                os.truncate(sys.argv[1], 1 << 20)
            use(number)

        layers._use = cut
        try:
            model.generate("x", max_tokens=4)
        except EngineError as error:
            print(error)
"""


def test_a_file_that_is_cut_while_a_pass_waits_for_its_first_layer_ends_no_process(target: Path) -> None:
    """A pass of a slow disk waits there for long. What is not in the file any more may not be read by its mapping."""
    command = [sys.executable, "-c", _CUT_AT_FIRST, str(target)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert b"while its weights are streamed" in ended.stdout


def test_two_streamed_models_in_one_process_say_what_one_does() -> None:
    prompts = [text[:200] for text in heldout("logs")[:2]]

    def answers(model: paceline.Model) -> list[list[int]]:
        return [
            list(model.generate(prompt, max_tokens=40, temperature=0.0, ignore_end=True).token_ids)
            for prompt in prompts
        ]

    with mostly_streamed():
        options = ModelOptions(embedded_target(), memory=ASKED_BYTES, context_length=512, threads=1)
        policy = paceline.FixedPolicy(4)
        with paceline.load(options, draft=embedded_draft(), policy=policy) as model:
            expected = answers(model)
        with (
            paceline.load(options, draft=embedded_draft(), policy=policy) as one,
            paceline.load(options, draft=embedded_draft(), policy=policy) as other,
            ThreadPoolExecutor(2) as pool,
        ):
            assert list(pool.map(answers, (one, other))) == [expected, expected]


@pytest.mark.long
def test_two_processes_on_one_file_say_what_one_does(target: Path) -> None:
    words = run_words(target, 60)
    expected = finished(*words)
    with (
        streamed_command(*words, passes=PASSES) as (one, disk),
        streamed_command(*words, passes=PASSES) as (other, other_disk),
    ):
        texts = [wait_for_text(one), wait_for_text(other)]
        # Both are in a pass at once.
        disk.wait_until_held()
        other_disk.wait_until_held()
        disk.go_on()
        other_disk.go_on()
        for number, process in enumerate((one, other)):
            out, err = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0, err
            texts[number] += out
    assert texts == [expected, expected]


@pytest.mark.parametrize("grace_s", ["60", "0"])
def test_a_server_that_is_told_to_end_in_a_pass_ends(grace_s: str) -> None:
    words = ("serve", *UNMEASURED, *STREAMED, "--port", "0", "--grace", grace_s, "-t", "1")
    body: dict[str, Any] = {"prompt": PROMPT, "ignore_eos": True, "seed": 1, "max_tokens": 60, "stream": True}
    with streamed_command(*words, passes=PASSES) as (process, disk):
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if b" is served at " in line:
                break
        url = said[-1].split(b" is served at ")[1].decode().strip()
        with (
            httpx.Client(base_url=url, timeout=WAIT_S) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
            assert json.loads(next(lines))["choices"]
            disk.wait_until_held()
            process.send_signal(signal.SIGTERM)
            disk.go_on()
            rest = list(lines)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert b"Traceback" not in b"".join(said) + err
    if grace_s == "0":
        assert json.loads(rest[-1])["error"]["code"] == 503
    else:
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["timings"]["predicted_n"] == 60
