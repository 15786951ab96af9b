"""One caller at a time, and nobody in the middle of a round."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.core.errors import BusyError
from paceline.core.params import SamplingParams, StopRules
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.runtime.loop import DecodingLoop
from paceline.runtime.turns import Turns


def test_notes_are_done_before_the_next_turn_in_their_order() -> None:
    turns, done = Turns(), []
    turns.note(lambda: done.append("first"))
    turns.note(lambda: done.append("second"))
    assert done == []
    turns.run("a turn", lambda: done.append("turn"))
    assert done == ["first", "second", "turn"]


def test_what_comes_in_the_middle_of_a_turn_waits_for_its_end() -> None:
    turns, done = Turns(), []

    def turn() -> None:
        turns.run_or_note(lambda: done.append("noted"))
        done.append("turn")

    turns.run("a turn", turn)
    assert done == ["turn"]
    turns.run_or_note(lambda: done.append("at once"))
    assert done == ["turn", "noted", "at once"]


def test_a_turn_within_a_turn_is_a_clear_error_and_leaves_the_outer_one_intact() -> None:
    turns = Turns()

    def inner() -> None:
        with pytest.raises(BusyError, match="a round was asked for from within a round"):
            turns.run("a round", lambda: None)

    turns.run("a turn", inner)
    assert turns.run("a turn", lambda: 7) == 7


def test_an_error_gives_the_turn_back() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        turns.run("a turn", lambda: 1 // 0)
    assert turns.run("a turn", lambda: 7) == 7


def test_a_note_that_fails_is_logged_and_kept_from_whoever_is_next(caplog: pytest.LogCaptureFixture) -> None:
    turns, done = Turns(), []
    turns.note(lambda: 1 // 0)
    turns.note(lambda: done.append("second"))
    with caplog.at_level(logging.ERROR):
        assert turns.run("a turn", lambda: 7) == 7
    assert done == ["second"]
    assert "ZeroDivisionError" in caplog.text


def test_a_note_that_an_interrupt_cuts_short_is_done_again() -> None:
    turns, done = Turns(), []

    def note() -> None:
        done.append("tried")
        if len(done) == 1:
            raise KeyboardInterrupt

    turns.note(note)
    with pytest.raises(KeyboardInterrupt):
        turns.run("a turn", lambda: None)
    assert turns.run("a turn", lambda: 7) == 7
    assert done == ["tried", "tried"]


def test_threads_wait_for_each_other() -> None:
    turns = Turns()
    inside, most = 0, 0

    def turn() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        inside -= 1

    def caller() -> None:
        for _ in range(200):
            turns.run("a turn", turn)

    threads = [threading.Thread(target=caller) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


class Holder:
    """Part of a reference cycle: only the collector finds that it is dropped."""

    def __init__(self) -> None:
        self.cycle = self


def test_an_owner_collected_in_the_middle_of_a_round_ends_its_request_after_it() -> None:
    collected = threading.Event()

    def logits(tokens: Sequence[int]) -> Float64Array:
        if len(tokens) == 4:
            gc.collect()
        row: Float64Array = np.eye(10)[(tokens[-1] + 1) % 10]
        return row

    engine = ScriptedEngine(logits, ScriptedVocabulary.of_size(10))
    loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock)
    kept = loop.add([0, 1], SamplingParams(0.0), StopRules(6))
    owner = Holder()
    weakref.finalize(owner, collected.set)
    dropped = loop.add([5], SamplingParams(0.0), StopRules(50), owner=owner)
    del owner
    while loop.active:
        before = collected.is_set()
        loop.step()
        if collected.is_set() and not before:
            assert dropped.finish_reason is None, "the round that it was collected in was still made whole"
    assert collected.is_set()
    assert kept.output_ids == [2, 3, 4, 5, 6, 7]
    assert dropped.finish_reason == "cancelled"
    assert not engine._sequences
