"""Predicts the gain of drafting: recorded drafts are replayed through the decoding loop in virtual time.

::

    answers ──every drafter asked at every place──> recordings ──┐
    cost profile ──with what the live loop adds──> costs ────────┴── replay ──> seconds of each text ──> speeds

The replay is the loop itself and not a model of it. What it leaves out is what the loop takes beside passes: that is
measured by three short live answers and added to every pass and round.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.core.arrays import Float64Array
from paceline.lab.agreement import DRAFT
from paceline.lab.intervals import Interval, quotient
from paceline.lab.replaying.replay import ReplayResult, replay
from paceline.lab.sessions import Answer, Engines, Session
from paceline.lab.task import Task
from paceline.lab.variants import AUTO, DRAFT_LENGTHS
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.planning.registry import build_policy

if TYPE_CHECKING:
    from paceline.lab.answers import WrittenAnswer
    from paceline.lab.comparison import Stop
    from paceline.lab.intervals import Depth
    from paceline.lab.replaying.recording import Recording
    from paceline.planning.base import Policy
    from paceline.planning.costs.profile import CostProfile

LOOKUPS: Final = ("suffix", "lookup")
"""Names of the drafters without a model."""
ALL_DRAFTERS: Final = (*LOOKUPS, DRAFT)
"""Names of all drafters, in the order in which they are asked by default."""

_P_MINS: Final = (0.0, 0.4)
"""Least probabilities of a draft token, of the static settings that are replayed."""
CALIBRATION_TOKENS: Final = 32
"""Tokens of each of the live answers that measure what the loop takes beside passes."""
_CALIBRATION_LENGTH: Final = 3
"""Draft tokens of a round in the live answer that measures what the loop takes beside passes."""
_CLEAR_GAIN: Final = 1.02
"""A gain below which a draft model is not worth its memory, whatever the interval says."""
_FEWEST_TOKENS: Final = 64
"""Tokens below which a prediction says nothing: the first of each answer are spent on exploring."""
_LONG_ROUND: Final = 2.0
"""Median rounds beyond which something else ran on the machine during a round."""
_MAX_FACTOR: Final = 1.5
"""Largest factor between passes in live answers and measured passes, either way."""


@dataclass(frozen=True, slots=True)
class LiveCosts:
    """What passes cost in the live loop. See :class:`~paceline.planning.base.RoundCosts`.

    Attributes:
        profile: as measured.
        pass_factor: how many times as long the target's passes take now.
        level_s: seconds that a level of the draft takes more than its pass: noise, proposals, bookkeeping.
        round_own_s: seconds of a round beside passes and sampling, where nothing is drafted.
        drafting_own_s: seconds of a round beside passes and sampling, where something is drafted.
        sampling_s: seconds of sampling an emitted token.
    """

    profile: CostProfile
    pass_factor: float = 1.0
    level_s: float = 0.0
    round_own_s: float = 0.0
    drafting_own_s: float = 0.0
    sampling_s: float = 0.0

    @property
    def change_s(self) -> float:
        """Seconds that a round takes longer where the one before had another width."""
        return self.profile.change_s * self.pass_factor

    def round_s(self, rows: int, context: int = 0, requests: int = 1) -> float:
        """Return the seconds of a round without its drafting."""
        own_s = self.round_own_s if rows == requests else self.drafting_own_s
        return self.profile.round_s(rows, context, requests) * self.pass_factor + own_s

    def is_measured(self, rows: int) -> bool:
        """Return whether rounds of this width were measured."""
        return self.profile.is_measured(rows)

    def draft_s(self, rows: int = 1, context: int = 0) -> float:
        """Return the seconds of a level of the draft model with ``rows`` tokens, proposals included."""
        return self.profile.draft_s(rows, context) + self.level_s


@dataclass(frozen=True, slots=True)
class Speed:
    """One way to decode, as predicted.

    Attributes:
        tokens_per_s: tokens per second of decoding.
        gain: speed over plain decoding's.
        tokens_per_round: emitted in a round.
        accept_share: accepted / drafted; ``None`` if nothing was drafted.
        draft_max: most draft tokens of a round, where that is fixed.
        p_min: least probability of a draft token, where that is fixed.
    """

    name: str
    tokens_per_s: Interval
    gain: Interval
    tokens_per_round: float
    accept_share: float | None
    draft_max: int | None = None
    p_min: float | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a draft model is worth.

    Attributes:
        plain: nothing is drafted.
        without_model: ``auto`` with lookups in the text alone.
        auto: ``auto`` with the draft model too.
        static: the best fixed draft length with the draft model alone.
        lengths: the gain of every fixed length, without a least probability.
        gain_by_kind: of ``auto`` with the draft model over plain decoding, by kind of text.
        over_none: speed of ``auto`` with the draft model over the better of the other two ways to use ``auto``.
        draft_cost: seconds of a level of the draft over those of a plain round.
        break_even: seconds of a level over those of a plain round at which the best fixed length gains nothing;
            ``None`` where no draft could gain.
        closed_form: gain of the best fixed length by survival and costs alone, for comparison.
        texts: answers that it stands on.
        tokens: tokens of all answers after the first of each.
    """

    plain: Speed
    without_model: Speed
    auto: Speed
    static: Speed
    lengths: tuple[tuple[int, float], ...]
    gain_by_kind: dict[str, float]
    over_none: Interval
    draft_cost: float
    break_even: float | None
    closed_form: float
    texts: int
    tokens: int

    @property
    def price(self) -> str:
        """Say what a draft token costs, and what it may cost."""
        most = "" if self.break_even is None else f", and drafting may pay up to {self.break_even:.2f}"
        return (
            f"a draft token takes {self.draft_cost:.2f} times as long as a plain token of the target{most}; "
            f"predicted of {self.tokens:,} tokens of {self.texts} answers"
        )

    @property
    def verdict(self) -> str:
        """Say whether the draft model pays."""
        if self.has_too_few_tokens:
            return "too few tokens to tell"
        return {True: "pays", False: "does not pay", None: "too close to call"}[self.pays]

    @property
    def has_too_few_tokens(self) -> bool:
        """Whether the answers are too short for a prediction."""
        return self.tokens < _FEWEST_TOKENS

    @property
    def gains_by_static(self) -> bool:
        """Whether the best fixed length is faster than both ways without the draft model, whatever ``auto`` is."""
        none = max(self.plain, self.without_model, key=lambda speed: speed.tokens_per_s.value)
        low = self.static.gain.low
        return self.static.tokens_per_s.value >= _CLEAR_GAIN * none.tokens_per_s.value and (low is None or low > 1.0)

    @property
    def pays(self) -> bool | None:
        """Whether the draft model pays, on texts such as these; ``None`` where that is open.

        It is open where the interval has room for either, where ``auto`` gains nothing and a fixed length would, and
        where the answers are too short.
        """
        if self.has_too_few_tokens:
            return None
        low, high = self.over_none.low, self.over_none.high
        if low is None or high is None:
            low = high = self.over_none.value
        if low > 1.0:
            return True
        is_worthless = self.over_none.value < _CLEAR_GAIN or high < _CLEAR_GAIN
        return False if is_worthless and not self.gains_by_static else None


def calibrate_costs(
    engines: Engines,
    profile: CostProfile,
    written: Sequence[WrittenAnswer],
    recordings: Sequence[Recording],
    temperature: float,
    stopped: Stop,
    *,
    most_tokens: int = CALIBRATION_TOKENS,
) -> LiveCosts:
    """Return what passes cost in the live loop, by three short answers: plain, with drafts, and by ``auto``.

    The first two make the same passes as their replays, so what they took more is what a replay leaves out. So do the
    target's answers that were written just now: a machine whose speed varies is seen for longer. The task of the last
    written answer is answered once more, as its prompt was read last; each answer has at most ``most_tokens``. Without
    a draft model there is no second answer.
    """
    num_tokens = min(most_tokens, len(recordings[-1].token_ids))
    task = dataclasses.replace(written[-1].task, max_tokens=num_tokens)
    recording = _cut_recording(recordings[-1], num_tokens)
    fixed = FixedPolicy(min(_CALIBRATION_LENGTH, recording.depth), p_min=0.0)
    names = ALL_DRAFTERS if engines.draft is not None else LOOKUPS
    plain = _answer(engines, (), NO_SPECULATION, task, temperature, stopped)
    drafting = None if engines.draft is None else _answer(engines, (DRAFT,), fixed, task, temperature, stopped)
    by_auto = _answer(engines, names, build_policy(AUTO, costs=profile), task, temperature, stopped)
    assert plain.spent is not None
    just_now = [each for each in zip(recordings, written, strict=True) if each[1].passes_s is not None]
    replayed = [recording, *(of_answer for of_answer, _ in just_now)]
    counted = _CountingCosts(profile)
    replay(replayed, NO_SPECULATION, counted, drafters=[])
    took_s = plain.spent.verify_s * _steadiness(plain) + sum(each.passes_s or 0.0 for _, each in just_now)
    more_s = 0.0
    if drafting is not None:
        assert drafting.spent is not None
        replayed.append(recording)
        replay([recording], fixed, counted, drafters=[DRAFT])
        took_s += drafting.spent.verify_s * _steadiness(drafting)
        more_s = drafting.spent.drafters_s * _steadiness(drafting) - counted.drafts_s
    # Prompts are read in the first round of each replay, and are no part of what was timed.
    expected_s = counted.rounds_s - sum(profile.round_s(each.num_prompt) for each in replayed)
    factor = took_s / expected_s if expected_s > 0 else 1.0
    return LiveCosts(
        profile,
        pass_factor=min(max(factor, 1 / _MAX_FACTOR), _MAX_FACTOR),
        level_s=max(more_s, 0.0) / max(counted.num_drafts, 1),
        round_own_s=_own_s(plain),
        drafting_own_s=max(_own_s(by_auto), _own_s(plain)),
        sampling_s=plain.spent.sampling_s * _steadiness(plain) / max(len(plain.token_ids) - 1, 1),
    )


def predict(
    recordings: Sequence[Recording],
    kinds: Sequence[str],
    survival: Sequence[Depth],
    costs: LiveCosts,
    advance: Callable[[], None] = lambda: None,
) -> Prediction:
    """Replay every way to decode.

    Recordings have all drafters and two tokens or more; ``kinds`` are those of their texts. ``survival`` is of the
    draft model's chains by depth, over all kinds. ``advance`` is called after every replay, and may raise to end them.
    """
    runs = _Replays(recordings, costs, advance)
    plain = runs.run("plain", [], NO_SPECULATION)
    without_model = runs.run("auto, no draft model", LOOKUPS, build_policy(AUTO, costs=costs.profile))
    auto = runs.run("auto", ALL_DRAFTERS, build_policy(AUTO, costs=costs.profile))
    static: list[tuple[_Run, FixedPolicy]] = []
    for p_min in _P_MINS:
        for length in DRAFT_LENGTHS:
            if length <= recordings[0].depth:
                policy = FixedPolicy(length, p_min=p_min)
                static.append((runs.run(f"draft-max {length}", [DRAFT], policy), policy))
    best, policy = min(static, key=lambda pair: pair[0].total_s)
    draft_cost = costs.draft_s() / costs.round_s(1)
    ratios = _closed_form_gains(survival, costs, draft_cost)
    return Prediction(
        plain=runs.speed(plain, plain),
        without_model=runs.speed(without_model, plain),
        auto=runs.speed(auto, plain),
        static=dataclasses.replace(runs.speed(best, plain), draft_max=policy.draft_max, p_min=policy.p_min),
        lengths=tuple((policy.draft_max, plain.total_s / run.total_s) for run, policy in static if policy.p_min == 0.0),
        gain_by_kind={
            kind: float(plain.seconds[which].sum() / auto.seconds[which].sum())
            for kind in dict.fromkeys(kinds)
            for which in [np.array([each == kind for each in kinds])]
        },
        over_none=quotient(min((plain, without_model), key=lambda run: run.total_s).seconds, auto.seconds),
        draft_cost=draft_cost,
        break_even=_break_even(survival, costs),
        closed_form=max(ratios, default=1.0),
        texts=len(recordings),
        tokens=runs.tokens,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """A replay of all recordings, with the seconds of each, ``[texts]``."""

    name: str
    seconds: Float64Array
    outcome: ReplayResult

    @property
    def total_s(self) -> float:
        return float(self.seconds.sum())


class _Replays:
    """Replays recordings, and compares their times, text by text."""

    def __init__(self, recordings: Sequence[Recording], costs: LiveCosts, advance: Callable[[], None]) -> None:
        self._recordings = recordings
        self._costs = costs
        self._advance = advance
        self._token_counts = np.array([len(recording.token_ids) - 1 for recording in recordings], dtype=np.float64)

    @property
    def tokens(self) -> int:
        """Tokens of all answers after the first of each."""
        return int(self._token_counts.sum())

    def run(self, name: str, drafters: Sequence[str], policy: Policy) -> _Run:
        """Replay all recordings one after the other in one session."""
        outcome = replay(self._recordings, policy, self._costs, drafters=drafters)
        seconds = np.array([request.decode_s for request in outcome.requests])
        self._advance()
        return _Run(name, seconds + self._token_counts * self._costs.sampling_s, outcome)

    def speed(self, run: _Run, plain: _Run) -> Speed:
        rounds = sum(request.rounds for request in run.outcome.requests)
        return Speed(
            run.name,
            quotient(self._token_counts, run.seconds),
            quotient(plain.seconds, run.seconds),
            self.tokens / rounds if rounds else 1.0,
            run.outcome.accept_share,
        )


class _CountingCosts:
    """Costs that add up what the replay asks for."""

    def __init__(self, profile: CostProfile) -> None:
        self._profile = profile
        self.change_s = profile.change_s
        self.rounds_s = self.drafts_s = 0.0
        self.num_drafts = 0

    def round_s(self, rows: int, context: int = 0, requests: int = 1) -> float:
        seconds = self._profile.round_s(rows, context, requests)
        self.rounds_s += seconds
        return seconds

    def is_measured(self, rows: int) -> bool:
        return self._profile.is_measured(rows)

    def draft_s(self, rows: int = 1, context: int = 0) -> float:
        seconds = self._profile.draft_s(rows, context)
        self.drafts_s += seconds
        self.num_drafts += 1
        return seconds


def _closed_form_gains(survival: Sequence[Depth], costs: LiveCosts, draft_cost: float) -> list[float]:
    """Return the gain of every draft length ``k``: ``(1 + s_1 + ... + s_k) / (v(k + 1) + k c)``.

    Survival ``s_d`` is what was counted, not a power of the first; ``v`` is the time of a round by its rows and ``c``
    that of a level of the draft, both in plain rounds.
    """
    return [
        (1 + emitted) / (width + length * draft_cost)
        for length, (emitted, width) in enumerate(_iter_lengths(survival, costs), 1)
    ]


def _break_even(survival: Sequence[Depth], costs: LiveCosts) -> float | None:
    """Return the dearest level of a draft, in plain rounds, at which some length gains nothing and loses nothing."""
    dearest = max(
        ((1 + emitted - width) / length for length, (emitted, width) in enumerate(_iter_lengths(survival, costs), 1)),
        default=0.0,
    )
    return dearest if dearest > 0 else None


def _iter_lengths(survival: Sequence[Depth], costs: LiveCosts) -> Iterator[tuple[float, float]]:
    """Yield for each draft length the draft tokens that a round keeps, and its time in plain rounds."""
    emitted, plain_s = 0.0, costs.round_s(1)
    for length, at_depth in enumerate(survival, 1):
        if at_depth.survival is None:
            return
        emitted += at_depth.survival
        yield emitted, costs.round_s(length + 1) / plain_s


def _answer(
    engines: Engines, drafters: Sequence[str], policy: Policy, task: Task, temperature: float, stopped: Stop
) -> Answer:
    with Session(engines, drafters, policy) as session:
        return session.answer(task, temperature, stopped, speculate=bool(drafters))


def _own_s(answer: Answer) -> float:
    """Return the seconds of a round that are neither its passes' nor sampling."""
    if answer.spent is None or not answer.rounds:
        return 0.0
    return max(answer.seconds - answer.spent.total_s, 0.0) * _steadiness(answer) / answer.rounds


def _steadiness(answer: Answer) -> float:
    """Return an answer's time with long rounds cut to :data:`_LONG_ROUND` medians, over its time.

    Something else that runs for a moment makes a few rounds long, and these answers are short.
    """
    if answer.generation is None:
        return 1.0
    # Tokens of one round have one time.
    arrivals = sorted(set(answer.generation.stats.arrivals_s))
    rounds_s = [after - before for before, after in itertools.pairwise(arrivals)]
    if not rounds_s or not sum(rounds_s) > 0:
        return 1.0
    most_s = _LONG_ROUND * statistics.median(rounds_s)
    return sum(min(seconds, most_s) for seconds in rounds_s) / sum(rounds_s)


def _cut_recording(recording: Recording, num_tokens: int) -> Recording:
    return dataclasses.replace(
        recording,
        token_ids=recording.token_ids[:num_tokens],
        max_tokens=num_tokens,
        traces=tuple(dataclasses.replace(trace, chains=trace.chains[: num_tokens - 1]) for trace in recording.traces),
    )
