"""Forecasts how long a bench takes, from measured costs of passes, and fits it to a limit before anything runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from paceline.lab.bench.settings import BenchSettings
from paceline.lab.bench.workloads import (
    LONG_PROMPT_ANSWER,
    LONG_PROMPT_TOKENS,
    MIXED,
    PASSAGES_AS_LONG,
    WORKLOADS,
)
from paceline.lab.task import MIN_ANSWER
from paceline.lab.variants import (
    AUTO,
    SERVER_DRAFT_VARIANTS,
    SERVER_NGRAM_VARIANTS,
    STATIC,
    drafter_sets,
    static_variants,
)
from paceline.planning.costs.profile import CostProfile

QUICK_S = 120.0
"""Seconds that a quick run takes."""
QUICK_WORKLOADS = ("new-code", "structured-forced", "hard", "editing-forced")
"""Workloads of a quick run. Where the limit does not allow all of them, the last is dropped first."""

_TOKENS = (256, 192, 128, 96, 64, 48, 32)
_PROMPTS = (3, 2)

_LAST_CUTS: Final[Sequence[Mapping[str, Any]]] = (
    {"prompts": 1},
    {"prompt_tokens": 64, "depth": 8},
    {"laps": 2},
    {"with_plain": False},
    {"prompt_tokens": 32, "depth": 4},
    {"tokens": 24},
    {"laps": 1},
    {"variants": [AUTO]},
    {"prompt_tokens": 16, "tokens": MIN_ANSWER},
)
"""Cuts, the least missed first, for where one workload with the shortest answers is still too much.

What is left in the end is a pair of plain and ``auto``, some fifty passes.
"""

_GREEDY_TRIES, _SAMPLED_TRIES = 4.0, 1.2
"""Prompts tried for each that is kept; greedy answers of a small base model loop more often than not."""

_REPLAY_TOKEN_S = 4e-4
"""Seconds of replaying a token of a recording on a slow machine."""

_USABLE = 0.85
"""Share of a limit that is planned for; the rest is for what the forecast cannot know."""


class Forecast:
    """Forecasts the seconds of the parts of a bench."""

    def __init__(self, settings: BenchSettings, profile: CostProfile, context_length: int) -> None:
        self._settings = settings
        self._profile = profile
        self._context_length = context_length
        widest = profile.target.widest
        self._prompt_row_s = profile.round_s(widest) / widest

    def prompt_s(self, workload: str) -> float:
        """Return the seconds of reading a prompt; of ``mixed``, of all prompts of one lap."""
        if workload == MIXED:
            return sum(self.prompt_s(name) for name in WORKLOADS)
        return self._lengths(workload)[0] * self._prompt_row_s

    def answer_s(self, workload: str) -> float:
        """Return the seconds of a plain answer after its prompt; of ``mixed``, of all answers of one lap."""
        if workload == MIXED:
            return sum(self.answer_s(name) for name in WORKLOADS)
        prompt, tokens = self._lengths(workload)
        return tokens * self._profile.round_s(1, prompt)

    def run_s(self, workload: str) -> float:
        return self.prompt_s(workload) + self.answer_s(workload)

    def _lengths(self, workload: str) -> tuple[int, int]:
        tokens = self._settings.tokens
        if workload == "long-prompt":
            tokens = min(tokens, LONG_PROMPT_ANSWER)
            return min(LONG_PROMPT_TOKENS, self._context_length - tokens), tokens
        if workload.startswith("editing"):
            return tokens + tokens // 4, tokens
        prompt_tokens = self._settings.prompt_tokens
        return PASSAGES_AS_LONG * prompt_tokens if workload == "summary" else prompt_tokens, tokens

    def num_variants(self, workload: str) -> int:
        """Return how many variants run live, plain among them unless that is left out."""
        settings = self._settings
        count = settings.with_plain + sum(settings.num_static if name == STATIC else 1 for name in settings.variants)
        return count + self._num_servers(workload)

    def lap_s(self, workload: str) -> float:
        """Return the seconds of one lap, in which sessions share a prompt and servers read it for themselves."""
        readings = 1 + self._num_servers(workload)
        return readings * self.prompt_s(workload) + (2 * self.num_variants(workload) + 1) * self.answer_s(workload)

    def _num_servers(self, workload: str) -> int:
        if not self._asks_server(workload):
            return 0
        return 4 if "draft" in self._settings.drafters else 2

    def _asks_server(self, workload: str) -> bool:
        return self._settings.with_server and workload != MIXED and not WORKLOADS[workload].forced

    def prepare_s(self, workload: str) -> float:
        """Return the seconds of looking for tasks, recording and replaying."""
        settings = self._settings
        if workload == MIXED:
            # The other workloads' tasks, replayed once more; those that are not measured by themselves come first.
            others = [name for name in WORKLOADS if name not in settings.workloads]
            return sum(self.tasks_s(name) for name in others) + len(WORKLOADS) * self.replays_s
        tries = 0
        if self._asks_server(workload):
            tries = len(SERVER_NGRAM_VARIANTS)
            tries += len(SERVER_DRAFT_VARIANTS) if "draft" in settings.drafters else 0
        return self.tasks_s(workload) + tries * self.run_s(workload) + self.replays_s

    def tasks_s(self, workload: str) -> float:
        """Return the seconds of looking for one workload's tasks and recording them."""
        settings = self._settings
        record_s = 0.0
        if "draft" in settings.drafters and self._profile.draft is not None:
            record_s = settings.tokens * settings.depth * self._profile.draft_s()
        tries = _GREEDY_TRIES if settings.temperature == 0 else _SAMPLED_TRIES
        if WORKLOADS[workload].forced or workload == "hard":
            tries = 1.0
        return settings.prompts * (tries * self.run_s(workload) + record_s)

    @functools.cached_property
    def replays_s(self) -> float:
        """Seconds of replaying every setting on one workload's tasks."""
        settings = self._settings
        count = 0
        for name in settings.variants:
            if name == STATIC:
                count += sum(1 for _ in static_variants(settings.drafters, coarse=settings.coarse))
            else:
                count += 1 if name == AUTO else len(drafter_sets(settings.drafters))
        return count * settings.prompts * settings.tokens * _REPLAY_TOKEN_S

    @property
    def total_s(self) -> float:
        return sum(self.prepare_s(name) + self._settings.laps * self.lap_s(name) for name in self._settings.workloads)


def fit_settings(
    settings: BenchSettings,
    profile: CostProfile,
    context_length: int,
    limit_s: float,
    *,
    given: Collection[str] = (),
) -> BenchSettings:
    """Return settings that are forecast to fit a limit: with fewer prompts, then shorter answers, then fewer workloads.

    Where one workload is still too much, prompts become shorter, laps and variants fewer. If nothing fits, the least is
    returned, and the runner ends when the time is over. ``given`` names the settings that the user set and that stay:
    ``workloads``, ``variants``, ``laps``, ``tokens``, ``prompts``.
    """

    def fits(smaller: BenchSettings) -> bool:
        return Forecast(smaller, profile, context_length).total_s <= _USABLE * limit_s

    smaller = settings
    for smaller in _iter_shorter(settings, given):
        if fits(smaller):
            return smaller
    for cut in ({}, *_LAST_CUTS):
        for name, value in cut.items():
            wanted = getattr(smaller, name)
            is_less = AUTO in wanted if name == "variants" else value < wanted
            if is_less and name not in given:
                smaller = dataclasses.replace(smaller, **{name: value})
        # Laps that the user asked for end when the time is over.
        if fits(dataclasses.replace(smaller, laps=1) if "laps" in given else smaller):
            break
    return smaller


def _iter_shorter(settings: BenchSettings, given: Collection[str]) -> Iterator[BenchSettings]:
    """Yield settings with fewer prompts, shorter answers and fewer workloads, the first as they are."""
    counts = [len(settings.workloads)] if "workloads" in given else range(len(settings.workloads), 0, -1)
    tokens = [settings.tokens] if "tokens" in given else [settings.tokens, *(n for n in _TOKENS if n < settings.tokens)]
    prompts = (
        [settings.prompts] if "prompts" in given else [settings.prompts, *(n for n in _PROMPTS if n < settings.prompts)]
    )
    for count, num_tokens, num_prompts in itertools.product(counts, tokens, prompts):
        workloads = _choose_first(settings.workloads, count)
        yield dataclasses.replace(settings, workloads=workloads, tokens=num_tokens, prompts=num_prompts)


def _choose_first(workloads: Sequence[str], count: int) -> list[str]:
    """Return so many of the workloads, a forced one among them if there is one: its answers never loop."""
    first, rest = list(workloads[:count]), workloads[count:]
    forced = [name for name in rest if name != MIXED and WORKLOADS[name].forced]
    if forced and not any(name != MIXED and WORKLOADS[name].forced for name in first):
        first[-1] = forced[0]
    return first


def explain_left_out(
    wanted: BenchSettings,
    chosen: BenchSettings,
    profile: CostProfile,
    context_length: int,
    limit_s: float,
    spent_s: float = 0.0,
) -> str | None:
    """Say what :func:`fit_settings` left out to fit a limit, and which limit has room for all; ``None`` for nothing.

    ``spent_s`` had gone to loading and measuring before, and counts.
    """
    parts = []
    without = [name for name in wanted.workloads if name not in chosen.workloads]
    if without:
        parts.append(f"{len(chosen.workloads)} of {len(wanted.workloads)} workloads (without {', '.join(without)})")
    for name, what in (
        ("tokens", "answers of {} tokens instead of {}"),
        ("prompt_tokens", "prompts of {} tokens instead of {}"),
        ("prompts", "{} prompts of each instead of {}"),
        ("laps", "{} laps instead of {}"),
        ("depth", "settings replayed with drafts of up to {} tokens instead of {}"),
    ):
        now, before = getattr(chosen, name), getattr(wanted, name)
        if now != before:
            text = what.format(now, before)
            parts.append(text.replace("prompts", "prompt").replace("laps", "lap") if now == 1 else text)
    dropped = [name for name in wanted.variants if name not in chosen.variants]
    if dropped:
        parts.append(f"no {', '.join(dropped)}")
    if wanted.with_plain and not chosen.with_plain:
        parts.append("no plain against plain")
    if not parts:
        return None
    enough_s = needed_limit_s(wanted, profile, context_length, spent_s)
    spent = f", after {spent_s:.0f} s of loading and measuring passes" if round(spent_s) else ""
    return f"to fit {limit_s:.0f} s{spent}: {', '.join(parts)}; --time-limit {enough_s} has room for all of it"


def needed_limit_s(settings: BenchSettings, profile: CostProfile, context_length: int, spent_s: float) -> int:
    """Return a limit in seconds that has room for the settings and what was spent, rounded up to two digits."""
    seconds = spent_s + Forecast(settings, profile, context_length).total_s / _USABLE
    unit: int = 10 ** max(math.floor(math.log10(max(seconds, 1.0))) - 1, 0)
    return math.ceil(seconds / unit) * unit
