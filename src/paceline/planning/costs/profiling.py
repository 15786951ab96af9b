"""Measuring what rounds cost, through the engine contract alone and in seconds.

Passes are measured as rounds make them: rows that follow a context, the wait for them, the best token of every row, and
the commit of a part of the path. Changing widths makes an engine rebuild its graphs, and a draft model's passes come
between the target's; both are part of real rounds. So the passes of both models and all widths are mixed and shuffled,
which also keeps a machine that becomes slower from being taken for a wide pass that is dear::

    warm-up │ 1 1 1 1 │ 1 4 2 draft:1 8 │ 1 3 draft:1 6 2 │ ...   │ several requests │ long context │ ... the rest
                      └── batches, shuffled within; what tells most comes first and most often ──┘

Plain rounds follow each other, though, and an engine may be faster where nothing changes. So some are made in a row;
where they take clearly less than those among others do, the difference is what a change of width costs.

Where passes wait for something else than their rows, such as weights that come from a disk, the engine has seen at load
how long that is. Here they are made without the wait, and say from which width on it is the rows that take longer.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import CapabilityError, InputError, NoRoomError
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.slow_passes import dry, slow_passes
from paceline.planning.costs.meter import Meter, ProfilingBudget, Report
from paceline.planning.costs.profile import CostProfile, PassCost, WidthCost
from paceline.planning.costs.subject import Subject, open_subject, widest_pass

TARGET_WIDTHS: Final = (1, 2, 4, 8, 3, 6, 12, 16, 5, 10, 7, 9, 24, 14, 32, 11, 20, 13, 48, 15, 64)
"""The target's widths, the most informative first: powers of two, widths of short drafts, then what lies between."""

WAITING_WIDTHS: Final = (1, 32, 64, 16, 48, 8, 128, 4, 24, 96, 2, 12)
"""The target's where passes wait for something else than their rows: then wide ones say where rows begin to count."""

DRAFT_WIDTHS: Final = (1, 2, 16, 4, 64, 8, 256)
"""The draft model's: a level, the first level after a whole acceptance, catching up, and levels of several requests."""

_SPACING_PER_PLACE: Final = 0.25
"""How much more seldom each place in the list of widths is measured: the fifth is half as often as the first."""

_DRAFT_PLACE: Final = 2.5
"""Where the draft's first width stands among the target's; its others follow as the target's do."""

_BATCH: Final = 5
"""Passes that are shuffled together: few enough that what tells most still comes first."""

_MAX_REPEATS: Final = 60
"""Passes of the first width after which measuring is over, however much of the budget is left."""

_ENOUGH_SAMPLES: Final = 3
"""Passes whose median one disturbed pass does not move."""

_CLIFF: Final = 0.95
"""Of a narrower pass's time; wider passes that take more than this are no cliff to speak of."""

_SHORT_CONTEXT: Final = 32
"""Tokens of the short context."""

_LONG_CONTEXT: Final = 1024
"""Tokens of the long context, at most."""

_MIN_LEVER: Final = 480
"""Tokens by which the long context must be longer: what fewer add is lost in the machine's whims, and engines pad what
attention runs over to some 256. Less is not measured; of the target, prompts then tell it as they are read."""

# Shares of the budget after which measuring goes on to the next thing; those of the long context are for the target and
# for the draft model, and leave time to measure after filling.
_STEADY_SHARE: Final = 0.2
_SHORT_SHARE: Final = 0.5
_REQUESTS_SHARE: Final = 0.55
_LONG_SHARES: Final = (0.8, 0.88)
# Shares for putting a context into a cache; it is shorter where that does not do.
_SHORT_FILL_SHARE: Final = 0.1
_LONG_FILL_SHARES: Final = (0.2, 0.05)

_LONG_REPEATS: Final = 2
"""Passes of a width at the long context, of which the faster counts, as what disturbs a pass makes it longer;"""
_AROUND: Final = 3
"""passes at the short one, before and after, of which the median does."""
_WIDE: Final = 8
"""Widest pass of the target that is measured at the long context too. Of a draft model it is the widest of all: what a
context adds to narrow passes is lost in the noise, and it is prompts that it reads at once."""

_CHECK_S: Final = 1.0
"""Seconds of a check, at most."""

_CHECK_REPEATS: Final = 2
"""Passes of a width in a check, at least: caches have to warm up."""

_CHECK_SHARE: Final = 0.1
"""Of the seconds of a check, for which passes of a width are repeated where they are short."""

_STEADY_AFTER: Final = 1
"""Plain passes after the first in a row before one is as plain decoding makes them: CUDA graphs are recorded in it."""

_STEADY_REPEATS: Final = 4
"""Plain passes in a row that are timed."""

_MIN_CHANGE: Final = 0.05
"""Of a plain pass; what a change of width costs less than this is lost in the noise."""

_SEVERAL_REQUESTS: Final = 4
_REQUESTS_REPEATS: Final = 3


def measure_profile(
    target: Engine,
    draft: Engine | None = None,
    *,
    budget: ProfilingBudget | None = None,
    widths: Sequence[int] | None = None,
    clock: Clock | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> CostProfile:
    """Measure what rounds cost on these engines, which are left as they were.

    Each engine must have a sequence to spare. However small the budget, one row of each model is measured.

    Args:
        budget: when to stop.
        widths: the target's widths, the most informative first; ``None`` for :func:`default_widths`. One row is always
            among them; what the engine cannot take is left out.
        seed: of the shuffling and of the tokens that are fed.

    Raises:
        InputError: a width is below 1, or a context is too short to measure in.
        CapabilityError: all sequences of an engine are in use.
        EngineError: a pass failed, or there is no room for one of one row.
    """
    target_widths = usable_widths(target, (1, *(default_widths(target) if widths is None else widths)))
    budget = ProfilingBudget() if budget is None else budget
    meter = Meter(clock or WallClock(), budget, report or (lambda share: None))
    shuffling = random.Random(seed)
    slow = slow_passes(target)
    with contextlib.ExitStack() as stack:
        subjects = []
        items = []
        roles = ((target, True, target_widths, 0.0), (draft, False, DRAFT_WIDTHS, _DRAFT_PLACE))
        for engine, verifies, wanted, first_place in roles:
            if engine is None:
                continue
            subject = stack.enter_context(open_subject(engine, meter, random.Random(seed), verifies=verifies))
            subjects.append(subject)
            usable = (rows for rows in wanted if rows <= subject.widest)
            items += [_Item(subject, rows, first_place + place) for place, rows in enumerate(usable)]
        stack.enter_context(dry(target))
        for subject in subjects:
            subject.warm_up()
        meter.start()
        for subject in subjects:
            subject.fill(_SHORT_CONTEXT, _SHORT_FILL_SHARE)
        # The target's first width: one row.
        plain = items[0]
        _measure_steady(plain, meter)
        queue = _Queue(items, shuffling)
        queue.run(_SHORT_SHARE, meter)
        sampling_row_s = subjects[0].sampling_row_s()
        several = _measure_requests(subjects[0], meter)
        longs = [
            _measure_long(subject, items, fill_share, share, meter)
            for subject, fill_share, share in zip(subjects, _LONG_FILL_SHARES, _LONG_SHARES, strict=False)
        ]
        queue.run(1.0, meter)
        for item in items:
            if item.rows == 1 and not item.times_s:
                item.measure()
        meter.stop()
    # As they were timed, so before steady passes join the others.
    slopes = [None if long is None else long.slope() for long in longs]
    change_s = _separate_change(plain)
    costs = [
        _pass_cost(subject, items, slope, change_s if subject is subjects[0] else 0.0)
        for subject, slope in zip(subjects, slopes, strict=True)
    ]
    return CostProfile(
        target=costs[0],
        draft=costs[1] if len(costs) > 1 else None,
        request_s=None if several is None else several.request_s(costs[0]),
        change_s=change_s,
        sampling_row_s=sampling_row_s,
        floor_s=0.0 if slow is None else slow.floor_s,
        num_passes=meter.passes,
        took_s=meter.took_s,
    )


def spot_check(target: Engine, widths: Sequence[int], *, clock: Clock | None = None) -> dict[int, float]:
    """Return what passes take now, by rows, the least of a few of each: whether a profile still holds.

    It takes about a second at most, unless one pass of each width does, and leaves the engine as it was. What passes
    wait for is left out.

    Args:
        target: the model that verifies; it must have a sequence to spare.
        widths: those that are looked at; what there is no room for is left out.

    Raises:
        CapabilityError: all sequences of the engine are in use.
        EngineError: a pass failed.
    """
    meter = Meter(clock or WallClock(), ProfilingBudget(_CHECK_S, None), lambda share: None)
    times_s: dict[int, list[float]] = {rows: [] for rows in widths}
    with dry(target), open_subject(target, meter, random.Random(0), verifies=True) as subject:
        subject.warm_up()
        meter.start()
        with contextlib.suppress(NoRoomError):
            for repeat in range(_MAX_REPEATS):
                if repeat >= _CHECK_REPEATS and not meter.allows(_CHECK_SHARE):
                    break
                for rows, times in times_s.items():
                    if repeat == 0 or meter.allows(1.0):
                        times.append(subject.time_pass(rows))
    return {rows: min(times) for rows, times in times_s.items() if times}


def default_widths(target: Engine) -> tuple[int, ...]:
    return TARGET_WIDTHS if slow_passes(target) is None else WAITING_WIDTHS


def usable_widths(target: Engine, widths: Sequence[int]) -> list[int]:
    """Return the widths that rounds of this target can have, in the order given, each once."""
    for rows in widths:
        if rows < 1:
            raise InputError(f"a pass of {rows} rows cannot be measured: the least is 1")
    widest = widest_pass(target.capabilities, verifies=True)
    return list(dict.fromkeys(rows for rows in widths if rows <= widest))


@dataclass(slots=True)
class _Item:
    """One width of one engine, and the times it took.

    Attributes:
        subject: the engine.
        rows: the width.
        place: in the list of what is measured first; widths of later places are measured more seldom, too.
        times_s: seconds of each pass among others.
        steady_s: seconds of each pass that followed several of its kind.
    """

    subject: Subject
    rows: int
    place: float
    times_s: list[float] = field(default_factory=list)
    steady_s: list[float] = field(default_factory=list)

    @property
    def due(self) -> float:
        """When its next pass comes, on the scale of the queue."""
        made = len(self.times_s) + len(self.steady_s) / 2
        return (made + 1) * (1.0 + self.place * _SPACING_PER_PLACE)

    def measure(self) -> None:
        self.times_s.append(self.subject.time_pass(self.rows))


class _Queue:
    """Weighted fair queueing of widths: first visits in the order of places, repeats where they tell most.

    A wider pass that seems cheaper than the next narrower one is a cliff, which planning makes for, or one of the two
    was disturbed. Few measurements cannot tell, so both are repeated twice as soon until there are enough.
    """

    def __init__(self, items: Sequence[_Item], rng: random.Random) -> None:
        self._rng = rng
        self._waiting = list(items)

    def run(self, share: float, meter: Meter) -> None:
        """Measure until this share of the budget is spent."""
        while self._waiting:
            doubtful = self._doubtful()
            due = {id(item): item.due / 2 if id(item) in doubtful else item.due for item in self._waiting}
            batch = sorted(self._waiting, key=lambda item: due[id(item)])[:_BATCH]
            if due[id(batch[0])] > _MAX_REPEATS:
                return
            self._rng.shuffle(batch)
            for item in batch:
                if not meter.allows(share):
                    return
                try:
                    item.measure()
                except NoRoomError:
                    self._waiting.remove(item)

    def _doubtful(self) -> set[int]:
        """Return the ids of items that seem to make a cliff, and were measured too seldom to believe it."""
        measured = [item for item in self._waiting if item.times_s]
        measured.sort(key=lambda item: (item.subject.verifies, item.rows))
        doubtful = set()
        for narrow, wide in itertools.pairwise(measured):
            if narrow.subject is not wide.subject:
                continue
            if statistics.median(wide.times_s) < _CLIFF * statistics.median(narrow.times_s):
                doubtful |= {id(item) for item in (narrow, wide) if len(item.times_s) < _ENOUGH_SAMPLES}
        return doubtful


def _measure_steady(plain: _Item, meter: Meter) -> None:
    """Make plain passes in a row, as far as this share of the budget does: the first of them is after a change."""
    for number in range(1 + _STEADY_AFTER + _STEADY_REPEATS):
        if not meter.allows(_STEADY_SHARE):
            return
        time_s = plain.subject.time_pass(plain.rows)
        if number == 0:
            plain.times_s.append(time_s)
        elif number > _STEADY_AFTER:
            plain.steady_s.append(time_s)


def _separate_change(plain: _Item) -> float:
    """Return what a change of width adds; the steady passes join the others as if they had come after one.

    It is nothing where the two kinds of passes overlap, or where the one right before the steady ones took no longer
    than they: then it is the machine that has changed since.
    """
    change_s = 0.0
    if len(plain.times_s) > 1 and len(plain.steady_s) > 1:
        among_others, in_a_row = WidthCost.of(1, plain.times_s), WidthCost.of(1, plain.steady_s)
        if min(among_others.low_s, plain.times_s[0]) > in_a_row.high_s * (1.0 + _MIN_CHANGE):
            change_s = among_others.median_s - in_a_row.median_s
    plain.times_s += [time_s + change_s for time_s in plain.steady_s]
    return change_s


@dataclass(frozen=True, slots=True)
class _Several:
    """Rounds of several requests with one row each.

    Attributes:
        context: tokens in the cache before, of all of them.
        median_s: the seconds.
    """

    requests: int
    context: int
    median_s: float

    def request_s(self, alone: PassCost) -> float:
        """Return what each request adds to as many rows of one."""
        return max(0.0, self.median_s - alone.seconds(self.requests, self.context)) / (self.requests - 1)


def _measure_requests(subject: Subject, meter: Meter) -> _Several | None:
    """Time rounds of several requests; ``None`` where there is no room for them, or no time."""
    engine = subject.engine
    requests = min(_SEVERAL_REQUESTS, engine.capabilities.max_sequences, subject.widest)
    if requests < 2 or not meter.allows(_REQUESTS_SHARE):
        return None
    others: list[int] = []
    times_s: list[float] = []
    try:
        with contextlib.suppress(NoRoomError, CapabilityError):
            while len(others) < requests - 1:
                others.append(engine.open())
            _feed_each(engine, others, subject, meter, [])
            sequences = [subject.sequence, *others]
            lengths = [engine.length(sequence) for sequence in sequences]
            while len(times_s) < _REQUESTS_REPEATS and meter.allows(_REQUESTS_SHARE):
                _feed_each(engine, sequences, subject, meter, times_s)
                if engine.capabilities.max_rollback is None:
                    for sequence, length in zip(sequences, lengths, strict=True):
                        engine.trim(sequence, length)
    finally:
        for sequence in others:
            engine.close_sequence(sequence)
    if not times_s:
        return None
    return _Several(requests, subject.context + len(others), statistics.median(times_s))


def _feed_each(engine: Engine, sequences: Sequence[int], subject: Subject, meter: Meter, times_s: list[float]) -> None:
    """Feed one token to each sequence, in one round."""
    steps = [Step(sequence, subject.tokens(1), (COMMITTED_END,), (0,)) for sequence in sequences]
    with meter.timing(times_s):
        output = engine.forward(steps)
        output.wait()
        for index in range(len(steps)):
            int(output.logits(index, 0).argmax())
        for sequence in sequences:
            engine.commit(sequence, (0,))


@dataclass(frozen=True, slots=True)
class _Slope:
    """What a longer context adds.

    Attributes:
        long_context: tokens up to which it was measured.
        token_s: seconds a token adds to a pass.
        token_row_s: seconds a token adds for every row.
    """

    long_context: int
    token_s: float
    token_row_s: float


@dataclass(frozen=True, slots=True)
class _LongPasses:
    """Passes of one width at the longer context, between others at the short one.

    Attributes:
        item: the width.
        before: passes it had at the short context until then; those after are the further ones.
        times_s: seconds of each pass at the longer context.
    """

    item: _Item
    before: int
    times_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Long:
    """Passes at a longer context.

    Attributes:
        short_context: tokens of the other one.
        context: tokens of the longer.
        widths: passes of each width.
    """

    short_context: int
    context: int
    widths: Sequence[_LongPasses]

    def slope(self) -> _Slope | None:
        """Return what a token of context adds; ``None`` if one row was not measured.

        Machines become slower and faster by the minute, by more than a context adds. So these passes are compared with
        those around them only, with the slower of right before and right after: what is left to the machine is noticed
        round by round, while what is put down to the context would be believed in every long one.
        """
        measured = [width for width in self.widths if width.times_s]
        if not any(width.item.rows == 1 for width in measured):
            return None
        before = [width.item.times_s[: width.before][-_AROUND:] for width in measured]
        after = [width.item.times_s[width.before :][:_AROUND] for width in measured]
        # Taken for one width only, the machine's speed would pass for what the rows of the other add.
        around = [before, after] if all(after) else [before]
        more_s = {}
        for width, *short in zip(measured, *around, strict=True):
            more_s[width.item.rows] = min(width.times_s) - max(map(statistics.median, short))
        lever = self.context - self.short_context
        token_s, token_row_s = _slopes(more_s)
        return _Slope(self.context, token_s / lever, token_row_s / lever)


def has_long_context(engine: Engine) -> bool:
    """Return whether a target's context is long enough to measure what a longer one adds to passes."""
    capabilities = engine.capabilities
    room = capabilities.context_length - widest_pass(capabilities, verifies=True)
    return room - _SHORT_CONTEXT >= _MIN_LEVER


def _measure_long(
    subject: Subject, items: Sequence[_Item], fill_share: float, share: float, meter: Meter
) -> _Long | None:
    """Time one row and a wide pass at a longer context; ``None`` if this share of the budget does not do for it."""
    short = subject.context
    measured = {item.rows: item for item in items if item.subject is subject and item.times_s}
    if 1 not in measured or not meter.allows(share):
        return None
    if subject.reachable(_LONG_CONTEXT, fill_share) - short < _MIN_LEVER:
        return None
    wide = max(rows for rows in measured if rows <= _WIDE or not subject.verifies)
    widths = [_LongPasses(measured[rows], len(measured[rows].times_s)) for rows in sorted({1, wide})]

    def allows(width: _LongPasses) -> bool:
        # The latest pass may have been hundreds of rows that filled the cache.
        return meter.allows(share, statistics.median(width.item.times_s))

    subject.fill(_LONG_CONTEXT, fill_share)
    long = subject.context
    if long - short >= _MIN_LEVER:
        with contextlib.suppress(NoRoomError):
            # By turns, so that each follows another width, as passes around do.
            for width in widths * _LONG_REPEATS:
                if allows(width):
                    width.times_s.append(subject.time_pass(width.item.rows))
    subject.rewind(short)
    for width in widths:
        # Others follow if there is time, but few may.
        if width.times_s and allows(width):
            width.item.measure()
    return _Long(short, long, widths)


def _pass_cost(subject: Subject, items: Sequence[_Item], slope: _Slope | None, change_s: float) -> PassCost:
    """Summarise passes that were made among others, each ``change_s`` longer than after one of its own width."""
    widths = tuple(
        sorted(
            (
                # Of a pass that others made much longer, half is left: what a change adds is known of plain ones alone.
                WidthCost.of(item.rows, [max(time_s - change_s, time_s / 2) for time_s in item.times_s])
                for item in items
                if item.subject is subject and item.times_s
            ),
            key=lambda width: width.rows,
        )
    )
    if slope is None:
        return PassCost(widths, subject.context)
    return PassCost(widths, subject.context, slope.token_s, slope.token_row_s, slope.long_context)


def _slopes(more_s: dict[int, float]) -> tuple[float, float]:
    """Split what a longer context adds to passes of one or two widths into a fixed part and one for every row.

    Neither is below 0: no cache makes a pass faster, but noise can make it look so.
    """
    if len(more_s) == 1:
        return max(0.0, more_s[1]), 0.0
    wide = max(more_s)
    each_s = (more_s[wide] - more_s[1]) / (wide - 1)
    if each_s <= 0:
        return max(0.0, statistics.mean(more_s.values())), 0.0
    if more_s[1] < each_s:
        # Least squares of a line through the origin.
        each_s = sum(rows * s for rows, s in more_s.items()) / sum(rows * rows for rows in more_s)
        return 0.0, max(0.0, each_s)
    return more_s[1] - each_s, each_s
