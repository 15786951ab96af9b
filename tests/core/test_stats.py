from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections import Counter

import pytest

from paceline.core.stats import PhaseTimes, RequestStats, percentile


def test_the_three_measures_by_hand() -> None:
    """Two rounds after the prompt: 4 drafted, 2 accepted, the third turned down; then 3 drafted, all accepted."""
    stats = RequestStats(
        prompt_tokens=10,
        prompt_s=2.0,
        predicted_tokens=1 + 3 + 4,
        decode_s=3.5,
        rounds=2,
        num_drafted=7,
        num_accepted=5,
        num_judged=6,
    )
    assert stats.accept_share == 5 / 7
    assert stats.acceptance_rate == 5 / 6
    assert stats.acceptance_length == 7 / 2
    assert stats.prompt_per_second == 5.0
    assert stats.predicted_per_second == 2.0


def test_nothing_measured_is_none() -> None:
    stats = RequestStats()
    assert stats.accept_share is None
    assert stats.acceptance_rate is None
    assert stats.acceptance_length is None
    assert stats.prompt_per_second is None
    assert stats.predicted_per_second is None
    assert stats.inter_token_s() == []


def test_they_are_plain_data() -> None:
    stats = RequestStats(predicted_tokens=4, arrivals_s=[1.0, 2.0])
    stats.accepted_by_source.update(["draft", "draft", "suffix"])
    stats.off_rounds["no_gain"] += 2
    stats.tested_by_depth[3] += 1
    facts = json.loads(json.dumps(dataclasses.asdict(stats)))
    assert facts["accepted_by_source"] == {"draft": 2, "suffix": 1}
    assert facts["off_rounds"] == {"no_gain": 2}
    assert facts["tested_by_depth"] == {"3": 1}
    assert facts.keys() == {field.name for field in dataclasses.fields(RequestStats)}
    assert copy.deepcopy(stats) == pickle.loads(pickle.dumps(stats)) == stats
    assert stats.accepted_by_source["lookup"] == 0


def test_gaps_between_tokens_are_as_a_reader_sees_them() -> None:
    assert RequestStats(arrivals_s=[1.0, 1.0, 1.0, 3.5]).inter_token_s() == [0.0, 0.0, 2.5]


def test_phases_add_up() -> None:
    phases = PhaseTimes()
    phases.add(draft_s=1.0, verify_s=2.0, sampling_s=0.5, round_s=4.0)
    phases.add(draft_s=0.0, verify_s=1.0, sampling_s=0.0, round_s=1.0)
    assert (phases.draft_s, phases.verify_s, phases.sampling_s, phases.rest_s) == (1.0, 3.0, 0.5, 0.5)
    assert phases.total_s == 5.0


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.2, 1.0), (0.21, 2.0), (0.5, 3.0), (0.95, 5.0), (1.0, 5.0)])
def test_percentile_is_the_nearest_rank(share: float, value: float) -> None:
    assert percentile([5.0, 1.0, 3.0, 2.0, 4.0], share) == value


def test_figures_come_under_the_names_of_a_format_in_milliseconds_where_these_say_so() -> None:
    stats = RequestStats(prompt_s=2.0, draft_s_by_source={"suffix": 0.5}, off_rounds=Counter({"prompts": 1}))
    stats.phases.verify_s = 0.25
    names = {
        "prompt_ms": "prompt_s",
        "seconds": "prompt_s",
        "draft_ms_by_source": "draft_s_by_source",
        "verify_ms": "phases.verify_s",
        "queue_ms": "queue_s",
        "off": "off_rounds",
    }

    assert stats.to_dict(names) == {
        "prompt_ms": 2000.0,
        "seconds": 2.0,
        "draft_ms_by_source": {"suffix": 500.0},
        "verify_ms": 250.0,
        "queue_ms": None,
        "off": {"prompts": 1},
    }
    assert json.loads(json.dumps(stats.to_dict()))["prompt_ms"] == 2000.0
