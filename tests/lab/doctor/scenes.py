"""Pairs whose draft is right after so many of four tokens, with what the target answered and what was predicted."""

from __future__ import annotations

import functools

from paceline.core.params import StopRules
from paceline.engines.options import ModelOptions
from paceline.engines.scripted import LogitFunction
from paceline.lab.agreement import measure_survival
from paceline.lab.answers import Answers, WrittenAnswer
from paceline.lab.doctor.prediction import ALL_DRAFTERS, LiveCosts, Prediction, predict
from paceline.lab.intervals import ALL
from paceline.lab.replaying.recording import Recording
from paceline.lab.sessions import Engines, Session
from paceline.lab.task import Task
from paceline.planning.policies.fixed import NO_SPECULATION
from tests.lab.scripted_pairs import counting_model, engines, profile

TOKENS = 60
KINDS = ("code", "prose", "code", "logs")


def tasks() -> list[Task]:
    return [
        Task(kind, f"{kind}:{number}", tuple(range(number, number + 10)), TOKENS, number)
        for number, kind in enumerate(KINDS, 1)
    ]


def partly(right: int) -> LogitFunction:
    """Return a draft that is right after ``right`` of four tokens."""
    one, other = counting_model(), counting_model(9)
    return lambda tokens: (one if tokens[-1] % 4 < right else other)(tokens)


def written_by(found: Engines) -> list[WrittenAnswer]:
    answers = Answers(ModelOptions("absent.gguf"), 0.0, keep=False)
    return answers.write(found, tasks(), 9, stopped=lambda: False, in_time=lambda: True, report=lambda count: None)


def recorded(found: Engines, written: list[WrittenAnswer]) -> list[Recording]:
    params = Answers(ModelOptions("absent.gguf"), 0.0, keep=False).params
    with Session(found, ALL_DRAFTERS, NO_SPECULATION) as session:
        return [
            session.record(
                each.task.prompt_ids,
                each.token_ids,
                params=params(each.task),
                rules=StopRules(TOKENS),
                finish_reason=each.finish_reason,
                depth=16,
            )
            for each in written
        ]


@functools.cache
def recordings_of(right: int) -> list[Recording]:
    """Return the recordings of a draft that is right after ``right`` of four tokens: of any passes' times."""
    found = engines(draft=partly(right))
    return recorded(found, written_by(found))


@functools.cache
def predicted(right: int) -> tuple[Prediction, Engines]:
    """Return what is predicted of a draft that is right after ``right`` of four tokens."""
    recordings = recordings_of(right)
    survival = measure_survival(recordings, KINDS)
    return predict(recordings, KINDS, survival[ALL], LiveCosts(profile())), engines(draft=partly(right))
