"""What holds for the command as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.invoking import Invoke, spawn, without_stream
from tests.models.helpers import edited_gguf
from tests.tiers import some_long
from tests.timing import WAIT_S

HEAVY = ("llama_cpp", "torch", "transformers", "jinja2", "prompt_toolkit", "huggingface_hub")
CALL = f"""
import sys
from paceline.cli.main import main

sys.argv[0] = "paceline"
try:
    main()
except SystemExit as leaving:
    assert not leaving.code, leaving.code
print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


# All commands are imported to show the help of one.
@pytest.mark.parametrize("words", [["chat", "--help"], ["models"], ["models", "show", "target"]])
def test_nothing_heavy_is_imported_before_it_is_used(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    outcome = subprocess.run([sys.executable, "-c", CALL, *words], capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stderr) == (0, "[]\n")
    assert outcome.stdout


@pytest.mark.parametrize(
    "words",
    some_long(
        [["run", "--sample", "code"], ["inflate", "0.3b", "--type", "Q4_0"], ["bench", "--quick"], ["profile"]],
        quick=[["run", "--sample", "code"], ["inflate", "0.3b", "--type", "Q4_0"]],
    ),
)
def test_a_library_that_does_not_load_is_one_line_with_the_way_out(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "packages" / "llama_cpp"
    broken.mkdir(parents=True)
    # What the binding raises where its build left no library.
    (broken / "__init__.py").write_text(
        "raise FileNotFoundError('Shared library with base name \\'llama\\' not found')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    outcome = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", *words], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 2
    (line,) = outcome.stderr.splitlines()
    assert "base name 'llama' not found" in line
    assert "pip install --force-reinstall --no-cache-dir llama-cpp-python" in line


def test_what_models_are_warned_of_is_one_plain_line(tmp_path: Path) -> None:
    path = edited_gguf(tmp_path / "a\x1b[31m.gguf", {"tokenizer.ggml.pre": None})
    words = ["-m", str(path), "-md", str(path), "-p", "x", "-n", "2", "--temp", "0", "--draft-max", "2"]
    outcome = subprocess.run(
        [sys.executable, "-W", "error", "-m", "paceline", "run", *words], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    warned = [line for line in outcome.stderr.splitlines() if line.startswith("paceline: warning")]
    assert len(warned) == 1, "both models are the same file"
    assert warned[0].startswith(f"paceline: warning: {tmp_path}/a\\x1b[31m.gguf may write other text")
    assert "missing pre-tokenizer type" in warned[0]


@pytest.mark.parametrize(
    "words",
    some_long(
        [["models"], ["models", "path"], ["models", "show", "target"], ["--help"], ["--version"]],
        quick=[["models"], ["--help"]],
    ),
)
def test_a_full_output_is_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        outcome = subprocess.run(
            [sys.executable, "-m", "paceline", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (outcome.returncode, outcome.stderr) == (1, "paceline: [Errno 28] No space left on device\n")


def test_where_no_error_can_be_written_the_status_says_it() -> None:
    words = ("models", "show", "nowhere")
    outcome = subprocess.run(without_stream(2, *words), capture_output=True, check=False)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (2, b"", b"")
    with Path("/dev/full").open("wb") as full:
        assert spawn(*words, stdout=subprocess.DEVNULL, stderr=full).wait(WAIT_S) == 2


def test_an_error_cannot_write_to_the_terminal() -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "paceline", "models", "show", "\x1b[2J\nno\udcff"], capture_output=True, check=False
    )
    assert outcome.returncode == 2
    assert outcome.stderr.startswith(b"paceline: there is no file or model \\x1b[2J\\nno\\udcff: give")


def test_the_built_in_model_is_announced_where_none_is_named_and_there_alone(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (
        "no model is named (-m FILE), so the small built-in one answers: it only continues code, prose, JSON and logs"
    )
    command = ("run", "-p", "hi", "-n", "1")
    for more in ((), ("--json",)):
        outcome = invoke(*command, *more)
        assert outcome.err.splitlines()[0] == line
        assert "no model is named" not in outcome.out
    for words, status in ((("-m", "target"), 0), (("-hf", "nobody/nothing", "--offline"), 2)):
        outcome = invoke(*command, *words)
        assert (outcome.status, "no model is named" in outcome.err) == (status, False)
    monkeypatch.setenv("PACELINE_MODEL", "target")
    assert "no model is named" not in invoke(*command).err
