from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.errors import CapabilityError, EngineError
from paceline.engines.base import Step
from paceline.engines.scripted import ScriptedEngine, ScriptedOutput
from paceline.lab.comparison import Stopped, finish
from paceline.lab.prompt_keeper import PromptKeeper
from paceline.lab.sessions import Engines, Session
from paceline.lab.task import Task
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from tests.lab.scripted_pairs import bytes_vocabulary, counting_model, engines

ROWS = 4
PROMPT = tuple(range(1, 12))
TASK = Task("new-code", "code:1", PROMPT, 20)


class Counting(ScriptedEngine):
    """Notes the rows of its passes; holds one sequence, and some passes fail."""

    def __init__(self, *, max_sequences: int = 1) -> None:
        super().__init__(counting_model(), bytes_vocabulary(), max_rows=ROWS, max_sequences=max_sequences)
        self.passes: list[list[int]] = []
        self.failing = False

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        self.passes.append([token_id for step in steps for token_id in step.token_ids])
        output = super().forward(steps)
        if self.failing:
            raise EngineError("the device is gone")
        return output


def test_a_prompt_is_read_once_and_again_after_another() -> None:
    engine = Counting()
    keeper = PromptKeeper(engine, engine.clock)
    for _ in range(3):
        keeper.read(PROMPT)
        sequence = keeper.open()
        assert keeper.length(sequence) == len(PROMPT) - 1
        keeper.forward([Step(sequence, [11, 200], [-1, 0], [0])])
        keeper.commit(sequence, [0])
        keeper.close_sequence(sequence)
    read = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert engine.passes == [*read, [11, 200], [11, 200], [11, 200]]
    keeper.read([1, 2, 3])
    assert keeper.length(keeper.open()) == 2
    assert engine.passes[-1] == [1, 2]


def test_who_reads_no_prompt_gets_an_empty_sequence() -> None:
    keeper = PromptKeeper(Counting(), VirtualClock())
    keeper.read(PROMPT)
    keeper.close_sequence(keeper.open())
    sequence = keeper.open()
    assert keeper.length(sequence) == 0
    with pytest.raises(CapabilityError, match="limit"):
        keeper.open()
    keeper.close_sequence(sequence)
    assert keeper.length(keeper.open()) == 0


def test_a_sequence_in_use_is_not_taken_for_one_of_the_next_prompt() -> None:
    engine = Counting(max_sequences=2)
    keeper = PromptKeeper(engine, engine.clock)
    keeper.read(PROMPT)
    first = keeper.open()
    keeper.read([100, 101, 102])
    keeper.close_sequence(first)
    assert keeper.length(keeper.open()) == 2


def test_answers_are_the_same_and_every_session_starts_from_the_prompt() -> None:
    engine = Counting()
    loaded = Engines(PromptKeeper(engine, engine.clock), engines().draft, engine.clock)
    plain = Session(loaded, [], NO_SPECULATION)
    drafting = Session(loaded, ["draft"], FixedPolicy(3))
    answers = [
        finish(session.start(TASK, 0.0, speculate=session is drafting), lambda: False)
        for session in (plain, drafting, plain)
    ]
    expected = [5 * PROMPT[-1] + 7]
    while len(expected) < 20:
        expected.append((5 * expected[-1] + 7) % 256)
    assert [list(answer.token_ids) for answer in answers] == [expected] * 3
    assert [row for row in engine.passes if row[0] in PROMPT[:-1]] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    # Three passes of a second, and the one of its last token: that they were made for another answer is no matter.
    assert [(answer.stats.prompt_tokens, answer.stats.prompt_s) for answer in answers] == [(len(PROMPT), 4.0)] * 3


def test_reading_stops_between_passes_when_the_user_wants_no_more() -> None:
    engine = Counting()
    keeper = PromptKeeper(engine, engine.clock, lambda: len(engine.passes) == 2)
    with pytest.raises(Stopped):
        keeper.read(PROMPT)
    assert engine.passes == [[1, 2, 3, 4], [5, 6, 7, 8]]
    # What was read is nobody's.
    assert keeper.length(keeper.open()) == 0


def test_a_pass_that_fails_leaves_what_was_read_before_it() -> None:
    engine = Counting()
    keeper = PromptKeeper(engine, engine.clock)
    keeper.read(PROMPT[:6])
    engine.failing = True
    with pytest.raises(EngineError):
        keeper.read(PROMPT)
    engine.failing = False
    keeper.read(PROMPT)
    sequence = keeper.open()
    assert keeper.length(sequence) == len(PROMPT) - 1
    keeper.close_sequence(sequence)


def test_a_model_that_cannot_step_back_reads_its_prompt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Counting()

    def refuse(sequence: int, length: int) -> None:
        raise CapabilityError("this recurrent model cannot step back")

    monkeypatch.setattr(engine, "trim", refuse)
    keeper = PromptKeeper(engine, engine.clock)
    for _ in range(2):
        keeper.read(PROMPT)
        sequence = keeper.open()
        assert keeper.length(sequence) == len(PROMPT) - 1
        keeper.close_sequence(sequence)
    assert len(engine.passes) == 6
