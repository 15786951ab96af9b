"""Cost profiles kept on this machine, so that a model is measured once and not at every load.

The key they are kept under does not know whether a laptop runs on its battery, or what else uses the memory's
bandwidth. So a few passes at every load say whether a profile still holds; where they take other than it says, it is
measured again. So is attention then, at the next load: what was measured on a busy machine is not kept for good.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.clock import Clock
from paceline.core.errors import ModelFileError
from paceline.engines.base import Engine
from paceline.engines.options import ModelOptions
from paceline.engines.slow_passes import slow_passes
from paceline.planning.costs.attention import drop_unless_holds
from paceline.planning.costs.meter import ProfilingBudget, Report
from paceline.planning.costs.profile import CostProfile
from paceline.planning.costs.profiling import (
    default_widths,
    has_long_context,
    measure_profile,
    spot_check,
    usable_widths,
)
from paceline.planning.disk_cache import PairKey, entry_path, load_entry, pair_key, store_entry

_CHANGED: Final = 1.25
"""How many times as long passes may take as was measured, or the other way round, before a profile is of no use. Less
than that the planner follows from round to round."""
_CHECKED_WIDTH: Final = 8
"""Widest pass that is checked, beside that of one row."""


@dataclass(frozen=True, slots=True)
class KeptProfile:
    """A profile, and how it was come by.

    Attributes:
        measured: the profile was measured just now, rather than found.
        path: where it is kept; ``None`` where it could not be, or was not to be.
        key: what it is kept under; ``None`` where the models' files cannot be read any more.
    """

    profile: CostProfile
    measured: bool
    path: Path | None
    key: PairKey | None


def find_or_measure(
    target: Engine,
    target_options: ModelOptions,
    draft: Engine | None = None,
    draft_options: ModelOptions | None = None,
    *,
    budget: ProfilingBudget | None = None,
    widths: Sequence[int] | None = None,
    long_context: bool = False,
    force: bool = False,
    keep_partial: bool = True,
    clock: Clock | None = None,
    report: Report | None = None,
) -> KeptProfile:
    """Return the profile of these engines: the one kept, if it still holds, or else one measured now and then kept.

    Args:
        target_options: what it was opened with; the path must be that of its file.
        draft_options: what the draft model was opened with.
        budget: when to stop measuring.
        widths: the target's widths that must be measured, those of them that it can take, before all that planning
            goes by; ``None`` is content with whatever is kept.
        long_context: what a longer context adds to the target's passes must be measured, where its context is long
            enough to tell; ``False`` is content without.
        force: measure even if there is one.
        keep_partial: keep it even if the budget was over before all widths were measured; later loads are then content
            with it.

    Raises:
        InputError: as :func:`~paceline.planning.costs.profiling.measure_profile` does.
        EngineError: likewise.
    """
    # What is kept is planned with, so it is never of these alone.
    wanted = tuple(dict.fromkeys((*(widths or ()), *default_widths(target))))
    try:
        key = pair_key(target, target_options, draft, draft_options)
    except ModelFileError:
        # A loaded model runs on, whatever became of its file.
        profile = measure_profile(target, draft, budget=budget, widths=wanted, clock=clock, report=report)
        return KeptProfile(profile, True, None, None)
    kept = None if force else load_entry("profiles", key, CostProfile.from_json)
    is_enough = (
        kept is not None
        and all(kept.target.is_measured(rows) for rows in usable_widths(target, widths or ()))
        and (kept.target.long_context is not None or not long_context or not has_long_context(target))
    )
    if kept is not None and is_enough and _still_holds(kept, target, target_options, clock):
        slow = slow_passes(target)
        if slow is not None:
            # Seen anew at every load, as disks are as fast as others let them be.
            kept = dataclasses.replace(kept, floor_s=slow.floor_s)
        return KeptProfile(kept, False, entry_path("profiles", key), key)
    profile = measure_profile(target, draft, budget=budget, widths=wanted, clock=clock, report=report)
    is_whole = all(profile.target.is_measured(rows) for rows in usable_widths(target, wanted))
    path = store_entry("profiles", key, profile.to_json()) if is_whole or keep_partial else None
    return KeptProfile(profile, True, path, key)


def _still_holds(kept: CostProfile, target: Engine, options: ModelOptions, clock: Clock | None) -> bool:
    """Return whether passes take now about what they took; where one check says no, a second one must agree.

    What is kept of attention is held to the same passes.
    """
    wide = max(width.rows for width in kept.target.widths if width.rows <= _CHECKED_WIDTH)
    least_s: dict[int, float] = {}
    is_same = False
    for _ in range(2):
        for rows, now_s in spot_check(target, sorted({1, wide}), clock=clock).items():
            least_s[rows] = min(now_s, least_s.get(rows, now_s))
        # The check takes turns between widths.
        is_same = all(_is_about(now_s, kept.target.seconds(rows) + kept.change_s) for rows, now_s in least_s.items())
        if is_same:
            break
    if 1 in least_s:
        drop_unless_holds(options, lambda then_s: _is_about(least_s[1], then_s + kept.change_s))
    return is_same


def _is_about(now_s: float, then_s: float) -> bool:
    return 1 / _CHANGED <= now_s / then_s <= _CHANGED
