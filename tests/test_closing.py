"""What a closed model leaves behind, load after load: no thread, no open file, and none of its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.conversion.convert import gguf_to_folder
from paceline.models.embedded import embedded_draft, embedded_target
from tests.engines.streamed import exact_target
from tests.models.helpers import edited_gguf, metadata
from tests.tiers import some_long

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read as Linux says it")

_SCRIPT = """
import contextlib, gc, json, os, sys, threading
import paceline
from pathlib import Path
from paceline.engines.memory import held_memory
from tests.engines.streamed import mostly_streamed

kind, target, draft, loads = sys.argv[1:]
gc.disable()  # what waits for the collector is held, too
closed = []
for _ in range(int(loads)):
    with mostly_streamed() if kind == "streamed" else contextlib.nullcontext():
        options = paceline.ModelOptions(Path(target), context_length=256, memory=1 if kind == "streamed" else None)
        model = paceline.load(
            options, draft=Path(draft) if draft else None, policy=paceline.FixedPolicy(3), verify="coupled"
        )
    answer = model.generate("def f(x):", max_tokens=8, temperature=0.0)
    assert answer.stats.num_drafted or not draft, answer.stats
    model.close()
    closed.append(model)
    print(json.dumps({
        "files": len(os.listdir("/proc/self/fd")),
        "python threads": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "held bytes": held_memory(),
    }))
"""
_LOADS = 20
_SETTLED = 5
"""Loads after which caches of the libraries are filled."""
_MAX_THREADS = 4
"""Threads of native code that may still be ending right after a close."""


def other_vocabulary(destination: Path) -> Path:
    """Write the embedded draft with the texts of its ordinary tokens in the opposite order."""
    content = metadata(embedded_draft())
    tokens, types = content["tokenizer.ggml.tokens"], content["tokenizer.ggml.token_type"]
    ordinary = [token_id for token_id, kind in enumerate(types) if kind == 1]
    for token_id, text in zip(ordinary, [tokens[token_id] for token_id in reversed(ordinary)], strict=True):
        tokens[token_id] = text
    return edited_gguf(destination, {"tokenizer.ggml.tokens": tokens})


@pytest.mark.parametrize("kind", some_long(["plain", "draft", "translated", "streamed", "torch"], quick=[]))
def test_a_closed_model_leaves_nothing(kind: str, tmp_path: Path) -> None:
    target = exact_target() if kind == "streamed" else embedded_target()
    draft = {"draft": str(embedded_draft()), "streamed": str(embedded_draft())}.get(kind, "")
    if kind == "translated":
        draft = str(other_vocabulary(tmp_path / "other.gguf"))
    num_loads = {"torch": _SETTLED + 3, "streamed": _SETTLED + 5}.get(kind, _LOADS)  # those take long, or leave more
    if kind == "torch":
        pytest.importorskip("torch")
        target = tmp_path / "folder"
        gguf_to_folder(embedded_target(), target)
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, kind, str(target), draft, str(num_loads)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 0, ended.stderr
    loads = [json.loads(line) for line in ended.stdout.splitlines()]
    settled, last = loads[_SETTLED - 1], loads[-1]
    assert len(loads) == num_loads
    assert {load["files"] for load in loads[_SETTLED - 1 :]} == {settled["files"]}
    assert {load["python threads"] for load in loads} == {1}
    assert last["threads"] <= settled["threads"] + _MAX_THREADS
    # Had each load left its weights, it would be 210 MB at least, and 260 where they are in F32.
    assert last["held bytes"] - settled["held bytes"] < 3 * exact_target().stat().st_size
