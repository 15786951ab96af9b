"""What is asked of real replicas is what was simulated: the same beginnings shared, and lengths."""

from __future__ import annotations

from benchmarks.capacity import _figures, _Texts

from paceline.lab.capacity.traffic import Traffic, make_arrivals
from tests.lab.capacity.scenes import RECORDINGS, run
from tests.lab.capacity.test_simulate import GPU

TRAFFIC = Traffic(2.0, requests=12, prompt_tokens=12, prefixes=3, prefix_tokens=8, answer_tokens=4)


def test_prompts_of_text_share_the_beginnings_of_those_simulated() -> None:
    arrivals = make_arrivals(TRAFFIC, RECORDINGS)
    asked = _Texts(range(5000), []).with_prompts(arrivals, TRAFFIC)
    beginnings: dict[int, set[tuple[int, ...]]] = {}
    for before, after in zip(arrivals, asked, strict=True):
        assert len(after.prompt_ids) == len(before.prompt_ids)
        assert (after.at_s, after.prefix, after.recording) == (before.at_s, before.prefix, before.recording)
        # A piece of the text, and another one behind it.
        assert list(after.prompt_ids[:8]) == list(range(after.prompt_ids[0], after.prompt_ids[0] + 8))
        beginnings.setdefault(after.prefix, set()).add(tuple(after.prompt_ids[:8]))
    assert all(len(one) == 1 for one in beginnings.values())
    assert len(set.union(*beginnings.values())) == len(beginnings)


def test_figures_of_a_simulation_and_of_servers_have_the_same_names() -> None:
    outcome = run(TRAFFIC, GPU, 2, affinity=True)
    figures = _figures(outcome)
    assert figures["ttft_ms"] >= 1e3 * min(outcome.ttft_s)
    assert figures["read"] == outcome.read_tokens / outcome.prompt_tokens
    assert len(outcome.sent_to) == 12
    assert set(outcome.sent_to) == {0, 1}
