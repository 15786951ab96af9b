"""What a round costs: measured staircases, how they are read, and how they follow a machine that changes.

::

    profiling.py ──measures──> CostProfile ──round_s, draft_s──> auto/online_costs.py ──> the planner
                                  │   ^                              ^
                                  v   │                              │ factor
                            profile_cache.py                   DriftTracker <──observed rounds

The time of a pass against its rows is a staircase with cliffs both ways: kernels change with the width, so that four
rows may cost less than three. Nothing here smooths that away. A measured width costs what was measured, its median; the
widths around it have no say in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.core.errors import InputError

PROFILE_VERSION: Final = 2
"""Raised whenever profiles are measured or read in another way, so that older ones are measured again."""

MAX_WIDTH: Final = 1 << 16
"""Most rows of a pass that a profile speaks of by measurement."""

_SHORTEST_S: Final = 1e-9
"""What a pass takes at least, whatever a coarse clock says: planners divide by it."""

_FORMAT: Final = "paceline-cost-profile"


@dataclass(frozen=True, slots=True)
class WidthCost:
    """The time of passes of one width.

    Attributes:
        rows: the width.
        samples: passes measured.
        median_s: their median time in seconds.
        low_s: first quartile of their times.
        high_s: third quartile.
    """

    rows: int
    samples: int
    median_s: float
    low_s: float
    high_s: float

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_WIDTH or self.samples < 1:
            raise ValueError(f"{self.samples} samples of {self.rows} rows: give 1 sample or more of 1 to {MAX_WIDTH}")
        if not (0 < self.low_s <= self.median_s <= self.high_s < math.inf):
            raise ValueError(
                f"{self.rows} rows take {self.low_s}, {self.median_s}, {self.high_s} s: "
                "quartiles are ascending, positive and finite"
            )

    @classmethod
    def of(cls, rows: int, times_s: Sequence[float]) -> WidthCost:
        """Summarise the times of passes of ``rows`` rows; of fewer than four, the quartiles lie between them."""
        ordered = sorted(max(time_s, _SHORTEST_S) for time_s in times_s)
        median_s = statistics.median(ordered)
        # Rounding must not put a quartile on the wrong side.
        low_s, high_s = min(_quantile(ordered, 0.25), median_s), max(_quantile(ordered, 0.75), median_s)
        return cls(rows, len(ordered), median_s, low_s, high_s)


@dataclass(frozen=True, slots=True)
class PassCost:
    """What whole passes of one engine cost.

    Attributes:
        widths: ascending by rows; the first is 1 row.
        context: tokens that were in the cache when ``widths`` were measured.
        token_s: seconds each further cached token adds to a pass, whatever its width.
        token_row_s: seconds each further cached token adds for every row of the pass.
        long_context: the other context, at which the two slopes were measured; ``None`` if they were not, and are 0.
    """

    widths: tuple[WidthCost, ...]
    context: int = 0
    token_s: float = 0.0
    token_row_s: float = 0.0
    long_context: int | None = None
    # Seconds of every width up to the widest measured, by rows: the planner asks for all of them every round.
    _by_rows: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = [width.rows for width in self.widths]
        if not rows or rows[0] != 1 or any(a >= b for a, b in itertools.pairwise(rows)):
            raise ValueError(f"widths {rows} are not ascending from 1")
        if self.context < 0 or not (0 <= self.token_s < math.inf and 0 <= self.token_row_s < math.inf):
            raise ValueError(f"a context of {self.context}, slopes {self.token_s} and {self.token_row_s}: all are >= 0")
        if self.long_context is not None and self.long_context <= self.context:
            raise ValueError(f"the long context of {self.long_context} is not longer than {self.context}")
        by_rows = [math.nan, self.widths[0].median_s]
        for before, width in itertools.pairwise(self.widths):
            between = max(before.median_s, width.median_s)
            by_rows += [between] * (width.rows - before.rows - 1) + [width.median_s]
        object.__setattr__(self, "_by_rows", tuple(by_rows))

    @property
    def widest(self) -> int:
        return len(self._by_rows) - 1

    def is_measured(self, rows: int) -> bool:
        return any(width.rows == rows for width in self.widths)

    def seconds(self, rows: int, context: int = 0) -> float:
        """Return the seconds of a pass of ``rows`` rows with ``context`` tokens in the cache.

        A width that was not measured is never promised to be cheap. Between two measured ones it costs as much as the
        dearer of the two: a cliff may lie anywhere between. Beyond the widest, every row costs as much as the rows of
        the widest do on average, which is more than a staircase with a fixed part would ask. Widths around count only
        where a width has no measurement of its own.

        Contexts shorter than the measured one are followed down to half the time, as the slopes are uncertain.
        """
        if rows < 1:
            raise ValueError(f"a pass of {rows} rows: the least is 1")
        by_rows = self._by_rows
        here_s = by_rows[rows] if rows < len(by_rows) else by_rows[-1] * rows / self.widest
        further = context - self.context
        return max(here_s + further * (self.token_s + rows * self.token_row_s), here_s / 2)

    def cheaper_rows(self) -> set[int]:
        """Return the widths that cost less than a narrower one, by more than their spread."""
        cheaper = set()
        dearest_s = 0.0
        for width in self.widths:
            if width.high_s < dearest_s:
                cheaper.add(width.rows)
            dearest_s = max(dearest_s, width.low_s)
        return cheaper

    def to_json(self) -> dict[str, Any]:
        plain = dataclasses.asdict(self)
        del plain["_by_rows"]
        return {**plain, "widths": list(plain["widths"])}


@dataclass(frozen=True, slots=True)
class CostProfile:
    """What rounds cost on one machine, for one target and draft model in one setting.

    Attributes:
        target: the target's rounds by rows: the pass, reading the best token of every row, committing part of the path;
            each after another of its width, as plain rounds follow each other.
        draft: the draft model's passes by the tokens fed, of which the last one's row is read: 1 is a level, 2 is the
            first level after a draft was accepted whole, many catch up. ``None`` without a draft model.
        request_s: seconds that each request beyond the first adds to a round of as many rows; ``None`` where the
            engine holds only one, or it was not measured: then it counts as 0.
        change_s: seconds that a round of the target takes longer where the one before had another width. Engines that
            replay what they recorded of the pass before (llama.cpp with CUDA graphs) have to do without.
        sampling_row_s: seconds it takes to sample a visited row at temperature, by the default settings; on top of the
            round, which contains greedy choices only.
        floor_s: seconds that a round of the target takes however little its rows do, as where weights are read from a
            disk meanwhile; 0 where its rows say all.
        num_passes: passes made to measure all of this.
        took_s: seconds it took.
    """

    target: PassCost
    draft: PassCost | None = None
    request_s: float | None = None
    change_s: float = 0.0
    sampling_row_s: float = 0.0
    floor_s: float = 0.0
    num_passes: int = 0
    took_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("request_s", "change_s", "sampling_row_s", "floor_s", "num_passes", "took_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}: it is at least 0")

    def round_s(self, rows: int, context: int = 0, requests: int = 1) -> float:
        """Return the seconds of a whole round of the target.

        Args:
            rows: of all trees together, roots included.
            context: tokens in the cache, of all requests together: attention runs over all of them.
            requests: whose trees share the pass.
        """
        others_s = (requests - 1) * (self.request_s or 0.0)
        return max(self.target.seconds(rows, context) + others_s, self.floor_s)

    def without_floor(self) -> CostProfile:
        return dataclasses.replace(self, floor_s=0.0)

    def is_measured(self, rows: int) -> bool:
        return self.target.is_measured(rows)

    def draft_s(self, rows: int = 1, context: int = 0) -> float:
        """Return the seconds of feeding ``rows`` tokens to the draft model and reading the last row.

        A level for several requests is a pass of as many rows. To catch up by more tokens than one pass takes costs
        as much as if one pass took them.

        Raises:
            ValueError: the profile is without a draft model.
        """
        if self.draft is None:
            raise ValueError("this profile is without a draft model")
        return self.draft.seconds(rows, context)

    def sampling_s(self, rows: int) -> float:
        """Return the seconds that sampling ``rows`` visited rows at temperature adds to a round."""
        return rows * self.sampling_row_s

    def to_json(self) -> dict[str, Any]:
        """Return plain data for :func:`json.dumps`; :meth:`from_json` gives back an equal profile."""
        figures = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        draft = None if self.draft is None else self.draft.to_json()
        return {
            "format": _FORMAT,
            "version": PROFILE_VERSION,
            **figures,
            "target": self.target.to_json(),
            "draft": draft,
        }

    @classmethod
    def from_json(cls, data: object) -> CostProfile:
        """Read what :meth:`to_json` wrote.

        Raises:
            InputError: it is something else, of another version, or its figures make no sense.
        """
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            raise InputError("this is not a cost profile: measure one with paceline profile")
        if data.get("version") != PROFILE_VERSION:
            raise InputError(
                f"this cost profile is of version {data.get('version')}, and only {PROFILE_VERSION} can be read: "
                "measure again with paceline profile --force"
            )
        try:
            draft = data["draft"]
            request_s = data["request_s"]
            return cls(
                target=_pass_cost(data["target"]),
                draft=None if draft is None else _pass_cost(draft),
                request_s=None if request_s is None else _number(request_s),
                change_s=_number(data["change_s"]),
                sampling_row_s=_number(data["sampling_row_s"]),
                # Not in profiles of engines that knew of none.
                floor_s=_number(data.get("floor_s", 0.0)),
                num_passes=_count(data["num_passes"]),
                took_s=_number(data["took_s"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"this cost profile is damaged ({type(error).__name__}: {error}): "
                "measure again with paceline profile --force"
            ) from None


class DriftTracker:
    """Follows a machine that becomes slower or faster than it was measured, by one factor for all passes.

    The factor is the median, over the latest rounds, of actual against predicted time. Half a window of rounds agreeing
    moves it all the way; fewer, whatever they took, move it no further than to what the others say. It starts as if a
    window of rounds had taken what was predicted.

    Args:
        window: rounds it looks back over; odd, so that the median is one of them.
    """

    def __init__(self, window: int = 9) -> None:
        if window < 3 or window % 2 == 0:
            raise ValueError(f"a window of {window} rounds: give an odd number from 3 on")
        self._ratios: deque[float] = deque([1.0] * window, maxlen=window)

    @property
    def factor(self) -> float:
        # The lower of two: what disturbs a round makes it longer. statistics.median does more than this needs.
        return sorted(self._ratios)[(len(self._ratios) - 1) // 2]

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Take note of a round.

        Args:
            predicted_s: what the profile says of the round.
            actual_s: what it took. A round too short for the clock, which takes no time, says nothing.
        """
        if not 0 < predicted_s < math.inf or not 0 <= actual_s < math.inf:
            raise ValueError(f"a round predicted to take {predicted_s} s took {actual_s} s")
        if actual_s > 0:
            self._ratios.append(actual_s / predicted_s)

    def restart(self, predicted_s: float, actual_s: float) -> None:
        """Take note of the first round on another machine: it alone counts, until others follow."""
        self.observe(predicted_s, actual_s)
        while len(self._ratios) > 1:
            self._ratios.popleft()


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation between the two values around it."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _pass_cost(data: object) -> PassCost:
    if not isinstance(data, Mapping) or not isinstance(data["widths"], list):
        raise TypeError("the widths are not a list")
    long_context = data["long_context"]
    return PassCost(
        tuple(_width_cost(width) for width in data["widths"]),
        context=_count(data["context"]),
        token_s=_number(data["token_s"]),
        token_row_s=_number(data["token_row_s"]),
        long_context=None if long_context is None else _count(long_context),
    )


def _width_cost(data: object) -> WidthCost:
    if not isinstance(data, Mapping):
        raise TypeError(f"a width is {data!r}")
    times_s = (_number(data[name]) for name in ("median_s", "low_s", "high_s"))
    return WidthCost(_count(data["rows"]), _count(data["samples"]), *times_s)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value
