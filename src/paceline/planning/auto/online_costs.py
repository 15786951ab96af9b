"""Costs as measured beforehand, corrected by the rounds as they go by."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

from paceline.planning.base import RoundCosts
from paceline.planning.costs.profile import DriftTracker

AS_MEASURED: Final = 0.1
"""Share by which plain rounds may take more or less than on a machine that is as it was."""

_PLAIN_WINDOW: Final = 5
"""Latest plain rounds by which it is judged how fast the machine is."""
_UNPROVEN: Final = 1.0 + AS_MEASURED
"""Factor by which plain rounds may differ from a single measurement."""

_ENTRY_SHARE: Final = 0.5
"""Of what a change of width costs, in the price of a round with drafts after a plain one: others will follow it."""

_SURPRISES: Final = 3
"""Latest wide rounds, an odd number, by whose median plain decoding is put in doubt."""
_DOUBTFUL_SHARE: Final = 0.15
"""Share by which that is more or less than was expected."""
_LONGEST_PATIENCE: Final = 48
"""Wide rounds in a row after which there may be doubts in any case, however often there was no reason for them."""

_SLOWEST_STEP: Final = 0.15
_LARGEST_SURPRISE: Final = 0.5
_ROWS_MEMORY: Final = 16.0
_ROWS_PRIOR: Final = 0.25
_DRAFT_STEP: Final = 0.1
_LARGEST_DRAFT_SURPRISE: Final = 4.0


class OnlineCosts:
    """A cost profile that follows the machine.

    Plain rounds say how fast the machine is now, and move the whole staircase. Wide rounds say how much of that is so
    for what rows add, which has a factor of its own: reading the weights and computing with them need not get slower
    together. The rest is what *that* width adds. A wide round tells nothing of plain ones: rounds whose width was
    measured too cheap would make plain decoding look slow, which is what speculation is judged by. But where most of
    the latest few take other than what was expected of them at the latest plain round, it may be the machine that
    became slower or faster, and plain decoding is in doubt (:attr:`is_doubtful`) until another plain round says which.
    If it is the machine, what earlier rounds told is forgotten; if not, it takes twice as many until the next doubt.

    The draft model has a factor of its own: its passes are made in Python's company, which the profile times less of.

    Where a change of width costs time, what rounds took after one is taken as if there had been none; for the next
    round it is part of the price of every width but the latest. A plain round that follows one such tells nothing: in
    it llama.cpp records the CUDA graph that those after it replay; nor are such wide rounds a reason for doubts.

    What a context adds to passes cannot be measured at first load where putting a long one into the cache takes too
    long. Then the passes that read a prompt tell it, each by what it took more than the first of them.

    Args:
        measured: such as a :class:`~paceline.planning.costs.profile.CostProfile`.
    """

    def __init__(self, measured: RoundCosts) -> None:
        self._measured = measured
        self._drift = DriftTracker(window=_PLAIN_WINDOW)
        self._factor = 1.0
        # The latest plain rounds' times over what was measured, for bounds; at first what one measurement leaves open.
        self._plain_ratios: deque[float] = deque((1.0 / _UNPROVEN, _UNPROVEN), maxlen=_PLAIN_WINDOW)
        self._plain_low, self._plain_high = 1.0 / _UNPROVEN, _UNPROVEN
        # Rows and requests of the latest round, ``None`` after a pass that read a prompt; and rounds that were like it.
        self._previous: tuple[int, int] | None = None
        self._alike = 0
        # Of the latest two plain rounds, actual over predicted time.
        self._latest: deque[float] = deque(maxlen=2)
        # What wide rounds told, on a machine as fast as this factor says.
        self._learned_at = 1.0
        self._rows_factor = _RowsFactor()
        # Logarithm of what a width costs over drift and profile, and rounds it was learned from, by (rows, requests).
        self._widths: dict[tuple[int, int], tuple[float, int]] = {}
        # Both as they were at the latest plain round, by which wide rounds since then are judged, and its requests.
        self._expected_rows = self._rows_factor.value
        self._expected_widths = dict(self._widths)
        self._expected_requests = 0
        self._doubts = _Doubts()
        self._draft_factor = 1.0
        # Seconds that every cached token adds for every row, where it was not measured, and the sums it is fitted from.
        self._token_row_s = 0.0
        self._first_of_prompt: tuple[int, int, float] | None = None
        self._is_warm = False
        self._longer_s = self._longer = 0.0

    @property
    def drift(self) -> float:
        """How many times as long plain rounds take now as when they were measured."""
        return self._factor

    @property
    def plain_bounds(self) -> tuple[float, float]:
        """Factors from what a plain round should take to what it takes at least, and at most.

        They are those of the fastest and the slowest of the latest plain rounds. While these are few, what was measured
        counts as one that was :data:`AS_MEASURED` faster and one that was as much slower; so does the first round that
        told of another machine.
        """
        return self._plain_low / self._factor, self._plain_high / self._factor

    @property
    def as_measured(self) -> bool:
        """Whether there were plain rounds, and the latest took what was measured."""
        return bool(self._latest) and all(abs(ratio - 1.0) <= AS_MEASURED for ratio in self._latest)

    @property
    def is_doubtful(self) -> bool:
        """Whether the machine may have become another since the latest plain round, which only the next one can say."""
        return self._doubts.surprise != 0.0

    def round_s(self, rows: int, context: int = 0, requests: int = 1) -> float:
        return self._rounds_s((rows,), context, requests)[0]

    def next_rounds_s(self, widths: range, context: int, requests: int) -> list[float]:
        """Return what the next round counts as, for each width, with what a change from the latest one costs."""
        rounds_s = self._rounds_s(widths, context, requests)
        if not self._measured.change_s:
            return rounds_s
        after_plain = self._previous is not None and self._previous[0] == self._previous[1]
        seconds = []
        for rows, round_s in zip(widths, rounds_s, strict=True):
            change_s = self.change_s(rows, requests)
            if after_plain and rows > requests:
                change_s *= _ENTRY_SHARE
            seconds.append(round_s + change_s)
        return seconds

    def change_s(self, rows: int, requests: int) -> float:
        """Return the seconds that the next round takes longer because the latest one was another."""
        return 0.0 if self._previous == (rows, requests) else self._measured.change_s * self._factor

    def is_settled(self, rows: int, requests: int) -> bool:
        """Return whether the next round takes what such rounds do in the long run: the first two may take longer."""
        return not self._measured.change_s or (self._previous == (rows, requests) and self._alike > 1)

    def draft_s(self, rows: int = 1, context: int = 0) -> float:
        return self._measured.draft_s(rows, context) * self._draft_factor

    @property
    def tells_plain(self) -> bool:
        """Whether rounds with drafts tell what plain ones take: here only plain ones do."""
        return False

    def observe_round(self, rows: int, context: int, requests: int, actual_s: float, waited_s: float = 0.0) -> None:
        """Learn from a round of the target that took ``actual_s``, drafting left out.

        Here its rows say all that it takes, so that it never waits.
        """
        predicted_s = self._undrifted_s(rows, context, requests)
        change_s = self.change_s(rows, requests)
        is_settled = self.is_settled(rows, requests)
        is_alike = self._previous == (rows, requests)
        self._alike = self._alike + 1 if is_alike else 1
        self._previous = rows, requests
        if actual_s <= 0 or predicted_s <= 0:
            return
        if rows == requests:
            if not is_alike:
                # The change is as much slower or faster as all else, which is what this round is to say.
                self._follow_plain(predicted_s + self._measured.change_s, actual_s, requests)
            elif is_settled:
                self._follow_plain(predicted_s, actual_s, requests)
            return
        actual_s -= min(change_s, actual_s / 2)
        plain_s = self._undrifted_s(requests, context, requests)
        followed_s = self._followed_s(predicted_s, plain_s, self._rows_factor.value)
        is_known = self._measured.is_measured(rows) or (rows, requests) in self._expected_widths
        if is_known and is_settled and requests == self._expected_requests:
            expected_s = self._followed_s(predicted_s, plain_s, self._expected_rows)
            expected_s *= _shrink_factor(self._expected_widths.get((rows, requests)))
            self._doubts.add(math.log(actual_s / expected_s))
        if self._measured.is_measured(rows):
            # Others are taken to cost what wider ones do, so that what they take says little about the machine.
            disturbed_s = math.exp(_LARGEST_SURPRISE) * followed_s
            plain_s *= self._factor
            added_s = predicted_s * self._factor - plain_s
            self._rows_factor.observe(plain_s, added_s, min(actual_s, disturbed_s))
        surplus, rounds = self._widths.get((rows, requests), (0.0, 0))
        surprise = math.log(actual_s / followed_s) - surplus
        # One round may have been disturbed: it moves a width by no more than this.
        surprise = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        surplus += surprise * max(1.0 / (rounds + 1), _SLOWEST_STEP)
        self._widths[rows, requests] = (surplus, rounds + 1)

    def observe_prompt(self, rows: int, context: int, actual_s: float, waited_s: float = 0.0) -> None:
        """Learn from a pass that read nothing but prompt, after ``context`` tokens that were in the cache before."""
        self.interrupt()
        if not self._is_warm:
            # The first pass of a process reads the model from the disk.
            self._is_warm = True
            return
        if rows == 1:
            # The rest was in the cache; what a context adds to a single row is lost in the machine's whims.
            return
        first = self._first_of_prompt
        if first is None or first[0] != rows or first[1] >= context:
            self._first_of_prompt = rows, context, actual_s
            return
        _, first_context, first_s = first
        if self._measured.round_s(rows, context) > self._measured.round_s(rows, first_context):
            # It was measured, in passes as rounds make them.
            return
        # Least squares, through the first pass of each prompt.
        longer = context - first_context
        self._longer_s += longer * (actual_s - first_s) / (rows * self._factor)
        self._longer += longer * longer
        self._token_row_s = max(self._longer_s / self._longer, 0.0)

    def interrupt(self) -> None:
        """Take note of a pass that was no round and tells nothing: the next round is of another width.

        Doubts are dropped: while every pass reads some prompt, there is no plain round that could resolve them.
        """
        self._previous, self._alike = None, 0
        self._doubts.drop()

    def observe_draft(self, predicted_s: float, actual_s: float) -> None:
        """Learn from passes of the draft model, of which :meth:`draft_s` said ``predicted_s``."""
        if predicted_s <= 0 or actual_s <= 0:
            return
        ratio = min(max(actual_s / predicted_s, 1 / _LARGEST_DRAFT_SURPRISE), _LARGEST_DRAFT_SURPRISE)
        self._draft_factor *= ratio**_DRAFT_STEP

    def _follow_plain(self, predicted_s: float, actual_s: float, requests: int) -> None:
        """Follow plain rounds; where they tell of another machine, forget what wide rounds told of the one before.

        Which of the latest wide rounds were made on which is not known: they may have seemed dear because it had become
        slow, or be cheap because it had not yet.
        """
        ratio = actual_s / predicted_s
        change = ratio / self._factor - 1.0
        # One plain round is enough where wide ones have told the same.
        is_confirmed = (
            requests == self._expected_requests and abs(change) > AS_MEASURED and change * self._doubts.surprise > 0
        )
        if is_confirmed:
            self._drift.restart(predicted_s, actual_s)
        else:
            self._drift.observe(predicted_s, actual_s)
        self._doubts.resolve(is_confirmed)
        self._latest.append(ratio)
        self._factor = self._drift.factor
        ratios = self._plain_ratios
        if is_confirmed:
            ratios.clear()
            ratios.extend((ratio / _UNPROVEN, ratio * _UNPROVEN))
        ratios.append(ratio)
        self._plain_low, self._plain_high = min(ratios), max(ratios)
        if is_confirmed or abs(self._factor / self._learned_at - 1.0) > AS_MEASURED:
            self._learned_at = self._factor
            self._rows_factor = _RowsFactor()
            self._widths.clear()
        self._expected_requests = requests
        self._expected_rows = self._rows_factor.value
        self._expected_widths = dict(self._widths)

    def _rounds_s(self, widths: Iterable[int], context: int, requests: int) -> list[float]:
        """Return the seconds of a round of each width, after one of the same."""
        # The planner asks for a whole staircase every round.
        plain_s = self._undrifted_s(requests, context, requests)
        rounds_s = []
        for rows in widths:
            seconds = self._undrifted_s(rows, context, requests) if rows != requests else plain_s
            seconds = self._followed_s(seconds, plain_s, self._rows_factor.value)
            rounds_s.append(seconds * _shrink_factor(self._widths.get((rows, requests))))
        return rounds_s

    def _followed_s(self, undrifted_s: float, plain_s: float, rows_factor: float) -> float:
        """Return the seconds of a round by what is known of rounds of all widths.

        ``undrifted_s`` is by :meth:`_undrifted_s`, ``plain_s`` of a plain round; ``rows_factor`` says how many times as
        long what rows add takes as it should.
        """
        followed_s = max(plain_s + (undrifted_s - plain_s) * rows_factor, undrifted_s / 2)
        return followed_s * self._factor

    def _undrifted_s(self, rows: int, context: int, requests: int) -> float:
        """Return the seconds of a round on a machine as fast as when it was measured."""
        return self._measured.round_s(rows, context, requests) + rows * context * self._token_row_s


def _shrink_factor(learned: tuple[float, int] | None) -> float:
    """Return the factor of a width, shrunk towards 1 while it was learned from few rounds."""
    if learned is None:
        return 1.0
    surplus, rounds = learned
    return math.exp(surplus * rounds / (rounds + 1))


class _Doubts:
    """Whether wide rounds say that the machine has become another since the latest plain one.

    Every doubt for which there was no reason, by the plain round that followed, makes the next one take twice as many
    wide rounds.
    """

    def __init__(self) -> None:
        self._surprises: deque[float] = deque(maxlen=_SURPRISES)
        self._rounds = 0
        self._patience = _SURPRISES

    @property
    def surprise(self) -> float:
        """The median of the latest surprises, where that is reason for a doubt; else 0."""
        if self._rounds < self._patience:
            return 0.0
        median = sorted(self._surprises)[_SURPRISES // 2]
        return median if abs(median) > math.log1p(_DOUBTFUL_SHARE) else 0.0

    def add(self, surprise: float) -> None:
        """Take note of a wide round: the logarithm of what it took over what was expected of it."""
        self._surprises.append(surprise)
        self._rounds += 1

    def drop(self) -> None:
        """Forget the wide rounds so far."""
        self._surprises.clear()
        self._rounds = 0

    def resolve(self, confirmed: bool) -> None:
        """Take note of a plain round, and whether it told what wide ones had."""
        if confirmed:
            self._patience = _SURPRISES
        elif self.surprise:
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        else:
            self._patience = max(self._patience // 2, _SURPRISES)
        self.drop()


class _RowsFactor:
    """How many times as long *what rows add* to a plain round takes as it should, learned from wide rounds.

    The slope of a line through what plain rounds take, fitted to the latest rounds by least squares. It starts at 1,
    which counts as much as a round whose rows add ``_ROWS_PRIOR`` of a plain round: rounds of rows that add next to
    nothing say next to nothing about it.
    """

    def __init__(self) -> None:
        self.value = 1.0
        """The factor; never below 0."""
        # Sums over rounds, the latest counting most, of the seconds their rows should add: squared, and times the
        # seconds they added.
        self._squared = self._with_actual = 0.0

    def observe(self, plain_s: float, added_s: float, actual_s: float) -> None:
        """Take note of a round: what it should have taken, without and for its rows, and what it took."""
        keep = 1.0 - 1.0 / _ROWS_MEMORY
        self._squared = self._squared * keep + added_s * added_s
        self._with_actual = self._with_actual * keep + added_s * (actual_s - plain_s)
        prior = (_ROWS_PRIOR * plain_s) ** 2
        self.value = max((self._with_actual + prior) / (self._squared + prior), 0.0)
