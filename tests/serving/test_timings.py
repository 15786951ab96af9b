"""What answers say of their time."""

from __future__ import annotations

from collections import Counter

from paceline.core.params import SpeculationParams
from paceline.core.stats import RequestStats
from paceline.serving.response_formats.timings import speculation_of


def test_rounds_without_drafts_are_told_by_reason_also_where_others_drafted() -> None:
    stats = RequestStats(rounds=9, num_drafted=4, num_accepted=3, off_rounds=Counter({"prompts": 6, "no_gain": 1}))

    told = speculation_of(stats, SpeculationParams(), "auto")

    assert told["off_rounds"] == {"prompts": 6, "no_gain": 1}
    assert told["off_reason"] is None
