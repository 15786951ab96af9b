"""A process that was forked after a pass: one clear error where its first pass would wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from tests.timing import WAIT_S

from paceline.core.errors import CapabilityError
from paceline.engines.process_forks import NativeThreads

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")


def in_child(threads: NativeThreads) -> str:
    """Return what a forked process is told when it wants to make a pass."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            threads.use()
            os.write(writing, b"fine")
        except CapabilityError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as file:
        return file.read()


def test_only_threads_that_were_used_are_lost() -> None:
    threads = NativeThreads()
    assert in_child(threads) == "fine"
    threads.use()
    assert "forked after a model had run" in in_child(threads)
    threads.use()


PROGRAM = """
    import os
    import paceline

    model = paceline.load(policy=paceline.FixedPolicy(3))
    before = model.generate("def f", max_tokens=5, temperature=0).text
    child = os.fork()
    if child == 0:
        for use in (lambda: model.generate("def f", max_tokens=5), lambda: paceline.load().generate("x")):
            try:
                use()
            except paceline.CapabilityError as error:
                print("get_context('spawn')" in str(error))
        model.close()
    else:
        os.waitpid(child, 0)
        print(model.generate("def f", max_tokens=5, temperature=0).text == before)
        model.close()
"""


def test_a_forked_process_is_told_so_and_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, check=False, timeout=WAIT_S
    )
    assert ended.stdout.split() == ["True"] * 3, ended.stderr
