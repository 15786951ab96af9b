"""What tests may know of time: none passes or fails by how busy its machine is."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final

WAIT_S: Final = 240.0
"""Seconds until a test gives up on what hangs: longer than anything takes on a busy machine, and shorter than pytest's
``faulthandler_timeout``, so that a test says what it waited for."""

_TIMES: Final = 8
_MOST_GROWTH: Final = 3.0
_TRIES: Final = 3


def assert_grows_with_length_alone(run: Callable[[int], object], length: int) -> None:
    """Check that eight times the length takes about eight times the processor time.

    What is read again for each character takes 64 times as long; 24 times is allowed. Both are measured here and now,
    in time that other programs take nothing of, and the least of three counts: what disturbs only adds.

    Args:
        run: does the work for a text of a length.
        length: the longer one.
    """
    short = min(processor_s(lambda: run(length // _TIMES)) for _ in range(_TRIES))
    most = _MOST_GROWTH * _TIMES * short
    took = [processor_s(lambda: run(length))]
    while min(took) > most and len(took) < _TRIES:
        took.append(processor_s(lambda: run(length)))
    assert min(took) <= most, f"{length // _TIMES}: {short:.3g} s, and {length}: {min(took):.3g} s of processor time"


def processor_s(work: Callable[[], object]) -> float:
    """Return the seconds of processor time that this thread takes for something."""
    collects = gc.isenabled()
    # It would look at all that earlier tests left.
    gc.disable()
    try:
        began = time.thread_time()
        work()
        return time.thread_time() - began
    finally:
        if collects:
            gc.enable()
