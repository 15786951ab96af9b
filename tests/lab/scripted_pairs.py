"""A target whose text never loops, drafts that are always or never right, and costs that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.arrays import Float64Array
from paceline.core.clock import VirtualClock
from paceline.engines.scripted import LogitFunction, ScriptedEngine, ScriptedVocabulary, table_model
from paceline.lab.prompt_keeper import PromptKeeper
from paceline.lab.sessions import Engines
from paceline.planning.costs.profile import CostProfile, PassCost, WidthCost

BYTES = 256
PASS_S = 1.0
LEVEL_S = 0.25


def bytes_vocabulary() -> ScriptedVocabulary:
    """Every byte is a token, so any text is."""
    return ScriptedVocabulary([bytes([value]) for value in range(BYTES)])


def counting_model(step: int = 7) -> LogitFunction:
    """After token ``t`` comes ``5 t + step`` modulo 256, almost surely: all 256 tokens, before one comes again."""
    table: Float64Array = np.zeros((BYTES, BYTES))
    table[np.arange(BYTES), (5 * np.arange(BYTES) + step) % BYTES] = 60.0
    return table_model(table)


def constant_model() -> LogitFunction:
    """Always the same token: text that loops."""
    row = np.zeros(BYTES)
    row[65] = 60.0
    return lambda tokens: row


def scripted_pair(
    target: LogitFunction | None = None,
    draft: LogitFunction | None = None,
    *,
    pass_s: Sequence[float] = (PASS_S,),
    level_s: float = LEVEL_S,
    context_length: int = 4096,
) -> tuple[ScriptedEngine, ScriptedEngine]:
    """Return a target and a draft on one virtual clock; passes of the target take ``pass_s``, again and again."""
    clock = VirtualClock()
    vocabulary = bytes_vocabulary()
    passes = 0

    def cost(rows: int, context: int) -> float:
        nonlocal passes
        passes += 1
        return pass_s[(passes - 1) % len(pass_s)]

    target_engine = ScriptedEngine(
        target or counting_model(), vocabulary, cost=cost, clock=clock, context_length=context_length
    )
    draft_engine = ScriptedEngine(
        draft or counting_model(), vocabulary, cost=lambda rows, context: level_s, clock=clock
    )
    return target_engine, draft_engine


def engines(target: LogitFunction | None = None, draft: LogitFunction | None = None, **options: Any) -> Engines:
    """Return what sessions share, of a :func:`scripted_pair`."""
    target_engine, draft_engine = scripted_pair(target, draft, **options)
    return Engines(PromptKeeper(target_engine, target_engine.clock), draft_engine, target_engine.clock)


def profile() -> CostProfile:
    """Return what the engines cost."""

    def flat(seconds: float) -> PassCost:
        return PassCost((WidthCost.of(1, [seconds]), WidthCost.of(512, [seconds])), long_context=1024)

    return CostProfile(flat(PASS_S), flat(LEVEL_S))
