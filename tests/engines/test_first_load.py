"""Files that llama.cpp ends its process over: they are told apart before, in another process, and that only once."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.tiny_models import write_model
from tests.models import damaged_gguf
from tests.models.damaged_gguf import Header, damage, set_key

pytest.importorskip("llama_cpp")

import llama_cpp.llama_cpp as api

from paceline.core.errors import ModelFileError, PacelineError
from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.llama_cpp import first_load, native
from paceline.engines.loading import open_engine
from paceline.engines.options import ModelOptions
from paceline.models.embedded import embedded_draft

TEXT = "Hello,  w\u00f6rd 123\n ok <s>\0"


def use(path: Path) -> list[str]:
    """Load a model, read a text and decode, as every command does; return how that went, in a word and a line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = open_engine(ModelOptions(path, threads=1))
    except PacelineError as error:
        return ["refused", str(error)]
    vocabulary = engine.vocabulary
    assert vocabulary.end_ids | vocabulary.control_ids | vocabulary.text_end_ids <= set(range(vocabulary.size))
    try:
        token_ids = vocabulary.tokenize(TEXT)[:8] or [1]
        vocabulary.tokenize(TEXT, parse_special=True)
    except PacelineError as error:
        token_ids, said = [1] * 8, str(error)
    else:
        said = ""
    for token_id in range(min(40, vocabulary.size)):
        vocabulary.token_spelling(token_id)
    rows = [COMMITTED_END, *range(len(token_ids) - 1)]
    engine.forward([Step(engine.open(), token_ids, rows, [len(token_ids) - 1])])
    engine.close()
    return ["loads", said]


def use_apart(paths: list[Path]) -> list[list[str]]:
    """Return what :func:`use` says of files, each by another process: one of them may end it."""
    program = "import sys, json\nfrom pathlib import Path\nfrom tests.engines.test_first_load import use\n"
    program += "for path in sys.argv[1:]: print('said', json.dumps(use(Path(path))), flush=True)"
    ended = subprocess.run(
        [sys.executable, "-c", program, *map(str, paths)], capture_output=True, text=True, check=False, timeout=600
    )
    said = [json.loads(line.removeprefix("said ")) for line in ended.stdout.splitlines() if line.startswith("said ")]
    assert len(said) == len(paths), (
        f"{paths[len(said)].name} ended the process ({ended.returncode}): {ended.stderr[-500:]}"
    )
    assert ended.returncode == 0
    return said


def _of(architecture: str, tokenizer: str | None, tmp_path: Path) -> Header:
    return damaged_gguf.read(
        write_model(tmp_path / f"{architecture}-{tokenizer}-sound.gguf", architecture, 0, tokenizer)
    )


def test_what_llama_cpp_ends_its_process_over_is_one_line(tmp_path: Path) -> None:
    kinds: dict[str, tuple[str, str, Any]] = {
        "rope sections": ("qwen35", "qwen35.rope.dimension_sections", [300, 3, 2, 0]),
        "rope dimensions": ("qwen35", "qwen35.rope.dimension_count", 4096),
        "experts": ("llama", "llama.expert_count", 2**32 - 7),
        "inner size": ("qwen35", "qwen35.ssm.inner_size", 31),
        "epsilon": ("gemma3", "gemma3.attention.layer_norm_rms_epsilon", -1.0),
        "layers": ("mamba", "mamba.block_count", 1 << 20),
        "scaling": ("lfm2", "lfm2.rope.scaling.type", "nonsense"),
        "predicting layers": ("gemma3", "gemma3.nextn_predict_layers", 31),
        "a long name": ("llama", "tokenizer.ggml.model", "y" * 100_000),
        "context": ("llama", "llama.context_length", 2**31),
        "two blanks in a text": ("llama", "tokenizer.ggml.pre", "whitespace"),
    }
    paths = []
    for name, (architecture, key, value) in kinds.items():
        header = _of(architecture, "gpt2", tmp_path)
        set_key(header, key, value)
        paths.append(header.write(tmp_path / f"{name}.gguf"))
    norm = _of("llama", "gpt2", tmp_path)
    next(tensor for tensor in norm.tensors if tensor.name == b"blk.0.ffn_norm.weight").kind = 26  # whole numbers
    paths.append(norm.write(tmp_path / "norm.gguf"))
    head = _of("qwen35", "gpt2", tmp_path)
    set_key(head, "qwen35.nextn_predict_layers", 1)
    head.tensors = [tensor for tensor in head.tensors if not tensor.name.startswith((b"blk.0.", b"blk.1.", b"blk.2."))]
    for tensor, start in zip(head.tensors, _starts(head), strict=True):
        tensor.offset = start
    paths.append(head.write(tmp_path / "mtp-head.gguf"))
    for path, (how, line) in zip(paths, use_apart(paths), strict=True):
        assert how == "refused", path.name
        assert str(path) in line
        assert "\n" not in line
        assert len(line) < 1000
        assert ";" in line, line  # the way out


def _starts(header: Header) -> Iterator[int]:
    """Yield where tensors of F32 lie that follow one another."""
    start = 0
    for tensor in header.tensors:
        yield start
        num_weights = 1
        for length in tensor.shape:
            num_weights *= length
        start += -(-num_weights * 4 // 32) * 32


def test_what_a_vocabulary_cannot_spell_is_refused_and_nothing_ends(tmp_path: Path) -> None:
    """SentencePiece without tokens for bytes, and no tokenizer at all."""
    paths = [write_model(tmp_path / f"{kind}.gguf", "llama", 0, kind) for kind in ("llama", None)]
    (spells, said), (without, _) = use_apart(paths)
    assert (spells, without) == ("loads", "loads")
    assert "no token for" in said
    assert "leave it out of the text" in said


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["llama", "qwen35", "lfm2"])
def test_damaged_headers_end_no_process(architecture: str, tmp_path: Path) -> None:
    sources = [_of(architecture, tokenizer, tmp_path) for tokenizer in ("gpt2", "llama", "bytes", None)]
    paths, how = [], []
    for seed in range(20):
        header, what = damage(sources[seed % len(sources)], seed)
        paths.append(header.write(tmp_path / f"{seed}.gguf"))
        how.append(what)
    for path, what, (_, line) in zip(paths, how, use_apart(paths), strict=True):
        assert "\n" not in line, f"{path.name}: {what}"
        assert len(line) < 1000, f"{path.name}: {what}"


# --- once -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Have nothing noted, and list the processes that are started to load a file."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(first_load, "_checked", set())
    started: list[Any] = []
    run = subprocess.run

    def noted(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        return run(*arguments, **options)

    monkeypatch.setattr("paceline.engines.llama_cpp.first_load.subprocess.run", noted)
    return started


def check(path: Path) -> None:
    native.initialize()
    native.check_first_load(native.check_model_file(path))


def test_a_file_costs_it_once_wherever_it_lies(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", tokenizer="bytes")
    check(path)
    assert len(started) == 1
    check(path)
    monkeypatch.setattr(first_load, "_checked", set())  # as another process has it
    check(path.rename(tmp_path / "moved.gguf"))
    assert len(started) == 1
    monkeypatch.setattr(first_load, "_checked", set())
    monkeypatch.setattr("paceline.engines.llama_cpp.first_load.llama_cpp.__version__", "0.0.1")
    check(tmp_path / "moved.gguf")
    assert len(started) == 2
    check(write_model(tmp_path / "other.gguf", "gemma3", tokenizer="bytes"))
    assert len(started) == 3


def test_what_comes_with_paceline_costs_nothing(started: list[Any]) -> None:
    check(embedded_draft())
    assert started == []


def test_a_file_that_is_refused_is_not_noted(started: list[Any], tmp_path: Path) -> None:
    header = damaged_gguf.read(write_model(tmp_path / "sound.gguf", "qwen35", tokenizer="gpt2"))
    set_key(header, "qwen35.rope.dimension_count", 4096)
    path = header.write(tmp_path / "model.gguf")
    for tries in (1, 2):
        with pytest.raises(
            ModelFileError, match=r"llama.cpp ends its process over it, by SIG\w+; it said last: ops.cpp"
        ):
            check(path)
        assert len(started) == tries


@pytest.mark.parametrize("in_the_way", ["of a note", "of the folder", "of any file", "of a process"])
def test_where_nothing_can_be_noted_or_started_it_is_loaded_all_the_same(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_the_way: str
) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", tokenizer="bytes")
    programs: list[str] = []
    match in_the_way:
        case "of a note":
            noted = first_load._note(native.check_model_file(path))
            assert noted is not None
            noted.mkdir(parents=True)
        case "of the folder":
            (tmp_path / "cache").write_text("in the way")
        case "of any file":  # as in a container that may only read
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
            monkeypatch.setenv("PACELINE_CACHE", str(path / "no folder"))
        case _:
            programs = [str(tmp_path / "nothing"), ""]
    for program in programs:
        with monkeypatch.context() as patch:
            patch.setattr("paceline.engines.llama_cpp.first_load.sys.executable", program)
            check(path)
            first_load._checked.clear()
    check(path)
    # Nothing was noted of what could not be started.
    assert len(started) == (2 if programs else 1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere this is counted otherwise")
@pytest.mark.parametrize("has_room", [True, False])
def test_weights_that_no_token_is_decoded_with_are_not_read(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """To map a file reads all of it, which may take minutes."""
    path = write_model(tmp_path / "model.gguf", "llama", tokenizer="bytes")
    os.truncate(path, 512 << 20)
    if has_room:
        monkeypatch.setattr(first_load, "_MAX_DECODED_BYTES", 256 << 20)
    else:
        monkeypatch.setattr("paceline.engines.llama_cpp.first_load.available_memory", lambda: 512 << 20)
    check(path)
    ((arguments,),) = started
    # A process begins with the memory of the one that starts it, as the system counts, and that of the tests is large.
    measure = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stderr=subprocess.DEVNULL, check=True)"
    measure += "; print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    words = [sys.executable, "-I", "-S", "-c", measure, *arguments]
    used = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
    assert int(used) < 256 << 10  # KiB


@pytest.mark.skipif(sys.platform == "win32", reason="it has no limit to a process's time")
def test_a_load_that_does_not_end_is_ended(started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, resource, sys\n"
        "seconds = json.loads(sys.argv[1])['most_cpu_s']\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))\n"
        "while True: pass\n"
    )
    monkeypatch.setattr("paceline.engines.llama_cpp.first_load.first_load_program.__file__", str(program))
    monkeypatch.setattr(first_load, "_MAX_CPU_S", 1)
    path = write_model(tmp_path / "model.gguf", "llama", tokenizer="bytes")
    with pytest.raises(ModelFileError, match=r"llama\.cpp still computes after 1 s"):
        check(path)


@pytest.mark.skipif(sys.platform == "win32", reason="it has no signals")
def test_an_interrupt_ends_it_and_is_no_fault_of_the_file(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads are in threads, which no interrupt reaches. A terminal tells all processes of the command."""
    program = tmp_path / "program.py"
    monkeypatch.setattr("paceline.engines.llama_cpp.first_load.first_load_program.__file__", str(program))
    path = write_model(tmp_path / "model.gguf", "llama", tokenizer="bytes")
    for number in ("SIGINT", "SIGTERM", "SIGHUP"):
        program.write_text(
            "import os, signal\n"
            "assert os.getpgrp() == os.getpgid(os.getppid())\n"
            f"signal.signal(signal.{number}, signal.SIG_DFL)\n"
            f"os.kill(os.getpid(), signal.{number})\n"
        )
        with pytest.raises(ModelFileError, match=r"model\.gguf is not loaded: its first load was interrupted"):
            check(path)


def test_the_log_is_read_in_no_time() -> None:
    """llama.cpp logs the file's own texts, and a search of them was quadratic."""
    log = native.NativeLog()
    for text in (b"y" * 1_000_000, b"y " * 500_000, b" " * 1_000_000):
        log.receive(2, text, None)
    assert log.buffers == {}
    log.receive(2, b"load_tensors:          CPU model buffer size =    12.50 MiB\n", None)
    assert log.buffers == {"model": int(12.5 * (1 << 20))}


def test_the_sizes_of_what_is_passed_by_value_are_known() -> None:
    """The other process knows no more of llama.cpp's structures than how many words they have."""
    for kind in (
        api.llama_model_params,
        api.llama_context_params,
        api.llama_batch,
    ):
        assert ctypes.sizeof(kind) % 8 == 0
        assert ctypes.sizeof(kind) > 16  # smaller ones are passed in registers, by the types of their fields
