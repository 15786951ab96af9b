"""Going on elsewhere: whichever call an engine is lost in, rows and texts are the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence

import numpy as np
import pytest

import paceline
from paceline.core.arrays import FloatArray
from paceline.core.errors import EngineError, InputError, ModelWarning
from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.llama_cpp import rpc
from paceline.engines.options import LOCAL, ModelOptions
from paceline.engines.rpc.failover import FailoverEngine
from paceline.engines.scripted import ScriptedEngine, ScriptedOutput, ScriptedVocabulary, random_model
from paceline.models.embedded import embedded_target

CALLS = 9


class LostEngine(ScriptedEngine):
    """A scripted engine that is lost in one of its calls."""

    def __init__(self, lost_in: int) -> None:
        super().__init__(
            random_model(50, seed=5, order=4),
            ScriptedVocabulary.of_size(50, end_ids=[0]),
            context_length=64,
            max_rows=4,
        )
        self.trouble: str | None = None
        self._left = lost_in

    def _count(self) -> None:
        if self._left == 0:
            self.trouble = "a worker was lost"
        self._left -= 1
        if self.trouble is not None:
            raise EngineError(self.trouble)

    def open(self) -> int:
        self._count()
        return super().open()

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        self._count()
        return super().forward(steps)

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        self._count()
        super().commit(sequence, path)

    def trim(self, sequence: int, length: int) -> None:
        self._count()
        super().trim(sequence, length)


def never_lost() -> LostEngine:
    return LostEngine(-1)


def rows_of_a_tree(engine: FailoverEngine) -> list[FloatArray]:
    """Read, branch, decide, take back and branch again, in as many calls as ``CALLS`` says."""
    sequence = engine.open()
    engine.forward([Step(sequence, [1, 2, 3, 4], range(-1, 3), [])])
    engine.commit(sequence, range(4))
    engine.forward([Step(sequence, [5], [COMMITTED_END], [])])
    outputs = [engine.forward([Step(sequence, [6, 7, 8], [0, 0, 2], [0, 2])])]
    rows = [outputs[0].logits(0, row).copy() for row in range(2)]
    engine.commit(sequence, [0, 2])
    engine.trim(sequence, 5)
    assert engine.length(sequence) == 5
    engine.forward([Step(sequence, [9, 10], [COMMITTED_END, COMMITTED_END], [])])
    output = engine.forward([Step(sequence, [11], [1], [0])])
    return [*rows, output.logits(0, 0).copy()]


@pytest.mark.parametrize("lost_in", range(CALLS))
def test_rows_are_the_same_whichever_call_it_is_lost_in(lost_in: int) -> None:
    expected = rows_of_a_tree(FailoverEngine(never_lost(), never_lost))
    engine = FailoverEngine(LostEngine(lost_in), never_lost)
    with pytest.warns(ModelWarning, match="a worker was lost: going on with"):
        rows = rows_of_a_tree(engine)
    np.testing.assert_array_equal(rows, expected)


def test_where_nothing_can_go_on_both_reasons_are_said() -> None:
    def refuse() -> ScriptedEngine:
        raise InputError("there is no memory")

    with pytest.raises(EngineError, match=r"a worker was lost; and what .* cannot be opened: there is no memory"):
        FailoverEngine(LostEngine(0), refuse).open()


@pytest.mark.skipif(not rpc.has_rpc(), reason="llama-cpp-python was built without RPC")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_goes_on_here_when_its_worker_is_lost(how: signal.Signals) -> None:
    program = [sys.executable, "-m", "paceline", "rpc-worker", "--port", "0", "-t", "1"]
    local = ModelOptions(embedded_target(), context_length=256, threads=1, flash_attention=False)
    with paceline.load(local) as model:
        expected = model.generate("def f(x):", max_tokens=24, seed=3).text
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as worker:
        try:
            assert worker.stdout is not None
            ready = next(line for line in worker.stdout if line.startswith("serving "))
            address = next(word for word in ready.replace(",", " ").split() if word.startswith("127.0.0.1:"))
            options = ModelOptions(embedded_target(), context_length=256, threads=1, rpc=(address,), rpc_fallback=LOCAL)
            with warnings.catch_warnings(record=True) as said, paceline.load(options) as model:
                warnings.simplefilter("always")
                stream = model.stream("def f(x):", max_tokens=24, seed=3)
                next(iter(stream))
                os.kill(worker.pid, how)
                assert stream.result().text == expected
        finally:
            worker.kill()
    assert [str(each.message) for each in said if "going on with" in str(each.message)]
