"""Synthetic recordings and cost curves, for planning in virtual time."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from paceline.core.request import Request
from paceline.core.stats import OffReason, PlainTimes
from paceline.core.tree import DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.engines.scripted import LogitFunction, ScriptedEngine, ScriptedVocabulary, random_model
from paceline.lab.replaying.recording import Chain, DrafterTrace, Level, Recording
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.base import PolicyBase, RoundRecord
from paceline.planning.costs.profile import CostProfile, PassCost, WidthCost
from paceline.planning.costs.profile_cache import KeptProfile, find_or_measure

VOCAB_SIZE = 50
TEXT_TOKENS = 40
"""Token ids below this are used in texts, the others only in drafts that are wrong."""


@dataclass(frozen=True)
class Curve:
    """Costs from a function of the rows, a slope over the context, and a price of further requests, in seconds.

    Widths count as measured if they are among ``measured``, or if that is ``None``.
    """

    target: Callable[[int], float]
    draft: Callable[[int], float] = lambda rows: 0.001
    token_s: float = 0.0
    request_s: float = 0.0
    measured: Collection[int] | None = None
    change_s: float = 0.0

    def is_measured(self, rows: int) -> bool:
        return self.measured is None or rows in self.measured

    def round_s(self, rows: int, context: int = 0, requests: int = 1) -> float:
        return self.target(rows) + context * self.token_s + (requests - 1) * self.request_s

    def draft_s(self, rows: int = 1, context: int = 0) -> float:
        return self.draft(rows) + context * self.token_s / 10


def engine_of(ms: float = 1.0, **options: Any) -> ScriptedEngine:
    """Return an engine whose passes take ``ms`` milliseconds and one more for each row."""
    model = random_model(8, seed=0)
    cost = lambda rows, context: (ms + rows) / 1e3  # noqa: E731
    return ScriptedEngine(model, ScriptedVocabulary.of_size(8), cost=cost, **options)


def table(milliseconds: Mapping[int, float], draft_ms: float = 2.0) -> Curve:
    """Return a staircase: widths between two measured ones cost what the wider does."""
    widths = sorted(milliseconds)

    def target(rows: int) -> float:
        width = next((width for width in widths if width >= rows), None)
        if width is None:
            return milliseconds[widths[-1]] / widths[-1] * rows / 1e3
        return milliseconds[width] / 1e3

    return Curve(target, lambda rows: draft_ms / 1e3, measured=widths)


def smooth(fixed_s: float, row_s: float, draft_s: float = 0.002) -> Curve:
    """Return a straight line."""
    return Curve(lambda rows: fixed_s + row_s * rows, lambda rows: draft_s * (0.8 + 0.2 * rows))


def allow_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every model that is loaded pass for one of 200 ms a token and free drafts, so that all drafters are asked.

    What the embedded pair may lose in its first rounds is a millisecond, which something else may have taken. What a
    model of 200 ms may lose is more than a busy machine lets a process wait.
    """
    widths = tuple(WidthCost.of(rows, [0.2]) for rows in (1, 64))
    profile = CostProfile(PassCost(widths), PassCost((WidthCost.of(1, [1e-5]),)))

    def find(*arguments: Any, **options: Any) -> KeptProfile:
        return replace(find_or_measure(*arguments, **options), profile=profile)

    monkeypatch.setattr("paceline.api.find_or_measure", find)


class AroundAuto(PolicyBase):
    """The planner, of which a test takes methods for its own: where it is compiled it cannot be inherited from."""

    def __init__(self, auto: AutoPolicy) -> None:
        self.auto = auto

    def check(self, request: Request) -> None:
        self.auto.check(request)

    def begin(self, request: Request) -> None:
        self.auto.begin(request)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        return self.auto.budgets(requests)

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        return self.auto.choose(drafter, jobs)

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        self.auto.select(requests, trees)

    def observe(self, record: RoundRecord) -> None:
        self.auto.observe(record)

    def plain_round(self, record: RoundRecord) -> PlainTimes | None:
        return self.auto.plain_round(record)

    def off_reason(self, request: Request) -> OffReason:
        return self.auto.off_reason(request)

    def end(self, request: Request) -> None:
        self.auto.end(request)


@dataclass(frozen=True)
class Skill:
    """How often a synthetic drafter is right.

    Attributes:
        right: chance that the next token of its chain is right, given all before it were; by position in the text
            if it is a function.
        sibling: chance that a sibling is, where the chain is wrong.
        silent: chance that it proposes nothing; likewise.
        is_model: see :class:`DrafterTrace`.
        says_margins: whether it does, though it is no model.
        end_ids: see :class:`DrafterTrace`.
    """

    right: float | Callable[[int], float]
    sibling: float = 0.0
    silent: float | Callable[[int], float] = 0.0
    is_model: bool = True
    says_margins: bool = False
    end_ids: frozenset[int] = field(default_factory=frozenset)

    def chance(self, position: int) -> float:
        return self.right(position) if callable(self.right) else self.right

    def silence(self, position: int) -> float:
        return self.silent(position) if callable(self.silent) else self.silent


def synthetic(
    seed: int,
    skills: Mapping[str, Skill],
    *,
    num_tokens: int = 40,
    num_prompt: int = 5,
    depth: int = 8,
    siblings: int = 1,
    max_tokens: int | None = None,
) -> Recording:
    """Make up a text and drafters of a given skill; probabilities and margins tell right from wrong, with noise."""
    return _synthetic(seed, tuple(skills.items()), num_tokens, num_prompt, depth, siblings, max_tokens)


# Making a text takes as long as replaying it, and tests of several curves have the same ones.
@functools.lru_cache(maxsize=64)
def _synthetic(
    seed: int,
    skills: tuple[tuple[str, Skill], ...],
    num_tokens: int,
    num_prompt: int,
    depth: int,
    siblings: int,
    max_tokens: int | None,
) -> Recording:
    rng = random.Random(seed)
    text = [rng.randrange(TEXT_TOKENS) for _ in range(num_tokens)]
    traces = tuple(
        DrafterTrace(
            name,
            skill.is_model,
            skill.end_ids,
            tuple(_chain(rng, skill, text, done, depth, siblings) for done in range(1, num_tokens)),
        )
        for name, skill in skills
    )
    return Recording(
        name=f"synthetic {seed}",
        num_prompt=num_prompt,
        token_ids=tuple(text),
        max_tokens=num_tokens if max_tokens is None else max_tokens,
        ignore_end=True,
        end_ids=frozenset(),
        temperature=0.0,
        vocab_size=VOCAB_SIZE,
        depth=depth,
        siblings=siblings,
        traces=traces,
    )


def _chain(rng: random.Random, skill: Skill, text: Sequence[int], done: int, depth: int, siblings: int) -> Chain:
    if rng.random() < skill.silence(done):
        return ()
    levels = []
    on_text = True
    for place in range(done, done + depth):
        wrong = rng.sample(range(TEXT_TOKENS, VOCAB_SIZE), siblings)
        next_token = text[place] if place < len(text) else TEXT_TOKENS
        right = on_text and rng.random() < skill.chance(place)
        if right:
            token_ids = [next_token, *wrong[1:]]
        elif on_text and siblings > 1 and rng.random() < skill.sibling:
            token_ids = [wrong[0], next_token, *wrong[2:]]
        else:
            token_ids = wrong
        on_text = right
        probability = min(max(rng.gauss(0.8 if right else 0.4, 0.15), 0.01), 0.99)
        drawn = [rng.expovariate(0.3 if right else 1.0), *(-rng.expovariate(0.5) for _ in token_ids[1:])]
        margins = [margin if skill.is_model or skill.says_margins else None for margin in drawn]
        levels.append(Level(tuple(token_ids), tuple(margins), probability, match_length=None, count=None))
    return tuple(levels)


class WaitingEngine(ScriptedEngine):
    """An engine whose passes wait for something else than their rows, as for weights from a disk.

    Args:
        model: of its vocabulary's size.
        floor_s: seconds that passes take at least.
        compute_s: seconds that their rows take, by how many there are.
        **options: of a scripted engine.

    Attributes:
        passes: of the passes so far, whether they waited and how many rows they had.
    """

    def __init__(self, model: LogitFunction, floor_s: float, compute_s: Callable[[int], float], **options: Any) -> None:
        super().__init__(model, cost=self._seconds, **options)
        self.floor_s, self.compute_s = floor_s, compute_s
        self.is_dry, self.waited_s, self.pass_share = False, 0.0, 0.0
        self.passes: list[tuple[bool, int]] = []

    @property
    def slow_passes(self) -> WaitingEngine:
        """What it says of its passes."""
        return self

    def set_dry(self, is_dry: bool) -> None:
        """Wait no more, or wait again."""
        self.is_dry = is_dry

    def _seconds(self, rows: int, context: int) -> float:
        compute_s = self.compute_s(rows)
        self.passes.append((not self.is_dry, rows))
        wait_s = 0.0 if self.is_dry else max(self.floor_s - compute_s, 0.0)
        self.waited_s += wait_s
        return compute_s + wait_s
