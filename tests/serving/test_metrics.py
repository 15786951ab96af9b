"""What a server counts, worked out by hand on the scripted engine and read back by Prometheus' own parsers."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import FinishReason, Request
from paceline.core.stats import PlainTimes, RequestStats
from paceline.drafters.base import Drafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, table_model
from paceline.planning.base import RoundRecord
from paceline.planning.policies.fixed import FixedPolicy
from paceline.runtime.loop import DecodingLoop
from paceline.serving.metrics import FAMILIES, FINISHED_REASONS, ServerLoad, ServerMetrics
from tests.helpers import ForcedDrafter
from tests.timing import WAIT_S

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "metrics.md"
GREEDY = SamplingParams(0.0)
COUNTING = table_model(np.roll(np.eye(10), 1, axis=1))
"""Greedily counts up: 0 is followed by 1, ..., 9 by 0."""

IDLE = ServerLoad(running=0, waiting=0, tokens=0, cache_share=0.0)
VLLM_LABELS = {"model_name": "target", "engine": "0"}


def metrics_of(load: Callable[[], ServerLoad] = lambda: IDLE, context_length: int = 100) -> ServerMetrics:
    return ServerMetrics(
        model_name="target", context_length=context_length, max_running=4, started_s=1764135823.25, load=load
    )


class Scraped:
    """A scrape, read back."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = list(families)
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in self.families:
            for sample in family.samples:
                # The parser of the text format gives every counter the ending that this one lacks.
                name = sample.name.replace("n_tokens_max_total", "n_tokens_max")
                key = name, frozenset(sample.labels.items())
                assert key not in self.samples, "a series is there twice"
                self.samples[key] = sample.value

    @classmethod
    def of(cls, metrics: ServerMetrics, *, openmetrics: bool = False) -> Scraped:
        body, _ = metrics.render(openmetrics)
        return cls((parse_openmetrics if openmetrics else parse_text)(body.decode()))

    def __call__(self, name: str, **labels: str) -> float:
        """Return the value of one series; vLLM's own labels need not be given."""
        constants = VLLM_LABELS if name.startswith("vllm:") else {}
        return self.samples[name, frozenset({**constants, **labels}.items())]

    def values(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a family by one label."""
        return {dict(labels)[label]: value for (sample, labels), value in self.samples.items() if sample == name}


def over(request: Request, **changes: object) -> tuple[RequestStats, FinishReason, int]:
    """Return what is counted of a request; nobody knows what plain decoding would have taken."""
    assert request.finish_reason is not None
    stats = replace(request.stats, **{"added_s": 0.0, "queue_s": 0.0, "plain": None, **changes})  # type: ignore[arg-type]
    return stats, request.finish_reason, request.num_prompt


def drafts_at(name: str, paths: Mapping[int, Sequence[int]]) -> ForcedDrafter:
    """Return a drafter that drafts after so many tokens of the answer, and nothing else."""
    return ForcedDrafter(lambda request: [paths[request.num_output]] if request.num_output in paths else [], name)


def counting_loop(metrics: ServerMetrics, drafters: Sequence[Drafter], **limits: Any) -> DecodingLoop:
    """Return a loop whose passes take 10 s and 1 s a row."""
    vocabulary = ScriptedVocabulary([str(digit).encode() for digit in range(10)])
    engine = ScriptedEngine(COUNTING, vocabulary, cost=lambda rows, context: 10.0 + rows, **limits)
    return DecodingLoop(engine, drafters, FixedPolicy(5), clock=engine.clock, observers=[metrics])


def drain(loop: DecodingLoop) -> None:
    while loop.active:
        loop.step()


@pytest.fixture
def counted() -> tuple[ServerMetrics, Request]:
    """Return what one answer of seven tokens gave.

    ======  ====  =======================  =======  ========
    pass    rows  drafted                  emitted  over at
    ======  ====  =======================  =======  ========
    prompt  3     nothing                  3        13 s
    1       4     4 9 9, of which 4 stays  4 5      27 s
    2       3     6 7, which stay          6 7 8    40 s
    3       1     nothing                  9        51 s
    ======  ====  =======================  =======  ========
    """
    metrics = metrics_of()
    loop = counting_loop(metrics, [drafts_at("suffix", {1: [4, 9, 9]}), drafts_at("lookup", {3: [6, 7]})])
    request = loop.add([0, 1, 2], GREEDY, StopRules(7))
    drain(loop)
    assert request.output_ids == [3, 4, 5, 6, 7, 8, 9]
    assert request.stats.arrivals_s == [13.0, 27.0, 27.0, 40.0, 40.0, 40.0, 51.0]
    return metrics, request


@pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])
def test_every_name_has_its_type_and_a_meaning_from_the_start(openmetrics: bool) -> None:
    """The names themselves stand in ``tests/surface/golden/metrics.txt``."""
    families = Scraped.of(metrics_of(), openmetrics=openmetrics).families
    # Parsers know a counter by its name without the ending.
    expected = {each.name.removesuffix("_total"): each.kind for each in FAMILIES}
    if openmetrics:
        expected["llamacpp:n_tokens_max"] = "gauge"
    assert {family.name: family.type for family in families} == expected
    assert all(family.documentation.endswith(".") for family in families)
    assert not [sample.name for family in families for sample in family.samples if sample.name.endswith("_created")]


def test_the_formats_say_the_same(counted: tuple[ServerMetrics, Request]) -> None:
    metrics, request = counted
    metrics.request_over(*over(request))
    metrics.render()
    text, openmetrics = Scraped.of(metrics), Scraped.of(metrics, openmetrics=True)
    assert text.samples == openmetrics.samples
    assert {family.name: family.documentation for family in text.families} == {
        family.name: family.documentation for family in openmetrics.families
    }


def test_content_types_name_the_formats() -> None:
    body, content_type = metrics_of().render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert not body.endswith(b"# EOF\n")
    body, content_type = metrics_of().render(openmetrics=True)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert body.endswith(b"# EOF\n")


def test_lines_of_llama_server_are_those_that_its_readers_take_apart(counted: tuple[ServerMetrics, Request]) -> None:
    metrics, request = counted
    metrics.request_over(*over(request))
    kinds, values = {}, {}
    for line in metrics.render()[0].decode().splitlines():
        if line.startswith("# TYPE llamacpp:"):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
        elif line.startswith("llamacpp:") and "{" not in line:
            name, value = line.split(" ")
            values[name] = (kinds[name], float(value))
    per_position = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    assert set(kinds) - set(values) == {per_position}
    assert kinds[per_position] == "counter"
    assert values["llamacpp:n_tokens_max"] == ("counter", 10.0)
    assert values["llamacpp:n_decode_total"] == ("counter", 4.0)
    assert values["llamacpp:requests_processing"] == ("gauge", 0.0)


def test_rounds_count_while_an_answer_is_written(counted: tuple[ServerMetrics, Request]) -> None:
    scraped = Scraped.of(counted[0])
    assert scraped("vllm:generation_tokens_total") == 6, "the first comes at the end"
    assert scraped("vllm:spec_decode_num_drafts_total") == 2
    assert scraped("vllm:spec_decode_num_draft_tokens_total") == 5
    assert scraped("vllm:spec_decode_num_accepted_tokens_total") == 3
    assert scraped.values("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position") == {"0": 2, "1": 1}
    assert scraped.values("paceline:drafted_tokens_total", "drafter") == {"suffix": 3, "lookup": 2}
    assert scraped.values("paceline:accepted_tokens_total", "drafter") == {"suffix": 1, "lookup": 2}
    assert scraped("paceline:rounds_total") == scraped("llamacpp:n_decode_total") == 4
    assert scraped("paceline:round_seconds_total") == 13 + 14 + 13 + 11
    assert scraped("llamacpp:n_busy_slots_per_decode") == 1
    # Tokens of a round arrive together: gaps of 14, 13 and 11 s.
    assert scraped("vllm:inter_token_latency_seconds_count") == 3
    assert scraped("vllm:inter_token_latency_seconds_sum") == 38
    buckets = scraped.values("vllm:inter_token_latency_seconds_bucket", "le")
    assert (buckets["10.0"], buckets["20.0"], buckets["+Inf"]) == (0, 3, 3)
    assert scraped("llamacpp:tokens_predicted_total") == scraped("llamacpp:prompt_tokens_total") == 0


def test_an_answer_counts_when_it_is_over(counted: tuple[ServerMetrics, Request]) -> None:
    metrics, request = counted
    metrics.request_over(*over(request, added_s=-2.0, queue_s=2.0, plain=PlainTimes(66.0, 60.0, 70.0)))
    scraped = Scraped.of(metrics)
    assert scraped("llamacpp:prompt_tokens_total") == 3
    assert scraped("llamacpp:prompt_tokens_cached_total") == 0
    assert scraped("llamacpp:prompt_seconds_total") == 13
    assert scraped("llamacpp:tokens_predicted_total") == scraped("vllm:generation_tokens_total") == 7
    assert scraped("llamacpp:tokens_predicted_seconds_total") == 38
    assert scraped("llamacpp:prompt_tokens_seconds") == 3 / 13
    assert scraped("llamacpp:predicted_tokens_seconds") == 6 / 38
    assert scraped("llamacpp:n_tokens_max") == 10
    assert scraped("llamacpp:spec_decode_num_drafts_total") == 2
    assert scraped("llamacpp:spec_decode_num_draft_tokens_total") == 5
    assert scraped("llamacpp:spec_decode_num_accepted_tokens_total") == 3
    assert scraped.values("llamacpp:spec_decode_num_accepted_tokens_per_pos_total", "position") == {"0": 2, "1": 1}
    assert scraped("paceline:decode_seconds_total") == 38
    assert scraped("paceline:plain_decode_seconds_total") == 66
    assert scraped.values("paceline:phase_seconds_total", "phase") == {
        "draft": 0,
        "verify": 38,
        "sampling": 0,
        "rest": 0,
    }
    seconds = {
        "vllm:time_to_first_token_seconds": 15,
        "vllm:request_queue_time_seconds": 2,
        "vllm:request_prefill_time_seconds": 13,
        "vllm:request_decode_time_seconds": 38,
        "vllm:request_inference_time_seconds": 51,
        "vllm:e2e_request_latency_seconds": 53,
        "vllm:request_time_per_output_token_seconds": 38 / 6,
    }
    assert {name: scraped(f"{name}_sum") for name in seconds} == pytest.approx(seconds)
    assert {scraped(f"{name}_count") for name in seconds} == {1}
    lengths = scraped.values("vllm:request_generation_tokens_bucket", "le")
    assert list(lengths) == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf"]
    assert (lengths["5.0"], lengths["10.0"]) == (0, 1)
    assert scraped("vllm:request_prompt_tokens_sum") == 3


def test_what_the_cache_held_is_counted_apart() -> None:
    metrics = metrics_of()
    stats = RequestStats(
        prompt_tokens=2, cached_tokens=6, preemptions=1, predicted_tokens=1, plain=None, arrivals_s=[1.0]
    )
    metrics.request_over(stats, "length", 8)
    scraped = Scraped.of(metrics)
    assert scraped("llamacpp:prompt_tokens_total") == 2
    assert scraped("llamacpp:prompt_tokens_cached_total") == scraped("vllm:prefix_cache_hits_total") == 6
    assert scraped("vllm:prompt_tokens_total") == scraped("vllm:prefix_cache_queries_total") == 8
    assert scraped("vllm:num_preemptions_total") == 1
    # Nothing came after the first token, and nobody knows what plain decoding would have taken.
    assert scraped("vllm:request_time_per_output_token_seconds_count") == 0
    assert scraped("paceline:decode_seconds_total") == scraped("paceline:plain_decode_seconds_total") == 0


def test_a_request_that_ends_before_its_first_token_has_no_time_to_it() -> None:
    metrics = metrics_of()
    metrics.request_over(RequestStats(added_s=10.0, queue_s=3.0), "cancelled", 8)
    scraped = Scraped.of(metrics)
    assert scraped("vllm:time_to_first_token_seconds_count") == 0
    assert scraped("vllm:request_decode_time_seconds_count") == 0
    assert scraped("vllm:request_queue_time_seconds_sum") == scraped("vllm:e2e_request_latency_seconds_sum") == 3
    assert scraped("vllm:generation_tokens_total") == 0


def test_ends_are_counted_by_reason_in_both_vocabularies() -> None:
    metrics = metrics_of()
    reasons: tuple[FinishReason, ...] = get_args(FinishReason)
    for times, reason in enumerate(reasons, 1):
        for _ in range(times):
            metrics.request_over(RequestStats(), reason, 1)
    scraped, own = Scraped.of(metrics), dict(zip(reasons, range(1, 99), strict=False))
    assert scraped.values("paceline:requests_total", "finish_reason") == own
    assert set(FINISHED_REASONS) == set(reasons)
    assert scraped.values("vllm:request_success_total", "finished_reason") == {
        "stop": own["stop"] + own["end"],
        "length": own["length"] + own["context"],
        "abort": own["cancelled"],
        "error": own["no_room"] + own["error"],
    }


def test_gauges_are_read_at_the_scrape() -> None:
    loads = [ServerLoad(running=2, waiting=3, tokens=70, cache_share=0.25), IDLE]
    metrics = metrics_of(lambda: loads.pop(0))
    scraped = Scraped.of(metrics)
    assert scraped("llamacpp:requests_processing") == scraped("vllm:num_requests_running") == 2
    assert scraped("llamacpp:requests_deferred") == scraped("vllm:num_requests_waiting") == 3
    assert scraped("vllm:kv_cache_usage_perc") == 0.25
    assert scraped("paceline:tokens_in_flight") == 70
    assert scraped("paceline:requests_running_max") == 4
    assert scraped("paceline:context_length_tokens") == 100
    assert scraped("paceline:start_time_seconds") == 1764135823.25
    assert metrics.process_start == "1764135823"
    scraped = Scraped.of(metrics)
    assert scraped("llamacpp:requests_processing") == scraped("vllm:num_requests_running") == 0


def test_speeds_are_of_what_ended_since_the_scrape_before(counted: tuple[ServerMetrics, Request]) -> None:
    metrics, request = counted
    metrics.request_over(*over(request))
    assert Scraped.of(metrics)("llamacpp:predicted_tokens_seconds") == 6 / 38
    idle = Scraped.of(metrics)
    assert idle("llamacpp:predicted_tokens_seconds") == idle("llamacpp:prompt_tokens_seconds") == 0
    stats = RequestStats(prompt_tokens=8, prompt_s=2.0, predicted_tokens=5, decode_s=2.0, arrivals_s=[2.0] * 5)
    metrics.request_over(stats, "length", 8)
    scraped = Scraped.of(metrics)
    assert scraped("llamacpp:prompt_tokens_seconds") == 4
    assert scraped("llamacpp:predicted_tokens_seconds") == 2


def test_a_name_that_needs_escaping_is_read_back_as_it_was() -> None:
    name = 'mod"el\\one\ntwo'
    metrics = ServerMetrics(model_name=name, context_length=10, max_running=1, started_s=0.0, load=lambda: IDLE)
    for openmetrics in (False, True):
        running = [
            sample
            for family in Scraped.of(metrics, openmetrics=openmetrics).families
            for sample in family.samples
            if sample.name == "vllm:num_requests_running"
        ]
        assert [sample.labels["model_name"] for sample in running] == [name]


def wild_paths(rng: random.Random) -> Callable[[Request], Sequence[Sequence[int]]]:
    """Return drafts of up to two paths, which go wrong somewhere or nowhere."""

    def paths(request: Request) -> list[list[int]]:
        last = request.token_ids[-1]
        right = [(last + 1 + depth) % 10 for depth in range(5)]
        return [[*right[: rng.randint(0, 4)], rng.randrange(10)] for _ in range(rng.randint(0, 2))]

    return paths


@pytest.mark.parametrize("seed", range(5))
def test_what_rounds_count_is_what_answers_count_once_all_are_over(seed: int) -> None:
    rng = random.Random(seed)
    metrics = metrics_of()
    drafters = [ForcedDrafter(wild_paths(rng), name) for name in ("suffix", "lookup")]
    # Passes are so narrow that some trees are cut.
    loop = counting_loop(metrics, drafters, max_outputs=12, max_sequences=4)
    requests = [loop.add([0] * rng.randint(1, 5), GREEDY, StopRules(rng.randint(1, 30))) for _ in range(12)]
    cancelled = requests[3]
    while loop.active:
        loop.step()
        if cancelled.num_output > 2:
            loop.cancel(cancelled)
    for request in requests:
        metrics.request_over(*over(request))
    scraped = Scraped.of(metrics)
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert scraped(f"llamacpp:spec_decode_{name}_total") == scraped(f"vllm:spec_decode_{name}_total") > 0
    positions = "spec_decode_num_accepted_tokens_per_pos_total"
    assert scraped.values(f"llamacpp:{positions}", "position") == scraped.values(f"vllm:{positions}", "position")
    predicted = sum(request.stats.predicted_tokens for request in requests)
    assert scraped("vllm:generation_tokens_total") == scraped("llamacpp:tokens_predicted_total") == predicted
    for label, counts in {
        "drafted": sum((request.stats.drafted_by_source for request in requests), Counter()),
        "accepted": sum((request.stats.accepted_by_source for request in requests), Counter()),
    }.items():
        assert scraped.values(f"paceline:{label}_tokens_total", "drafter") == counts
    assert scraped("llamacpp:n_busy_slots_per_decode") > 1


def test_scrapes_beside_rounds_find_figures_that_agree_and_lose_none() -> None:
    meetings, rounds_each, records = 20, 25, []

    class Recording:
        def observe(self, record: RoundRecord) -> None:
            records.append(record)

    vocabulary = ScriptedVocabulary([str(digit).encode() for digit in range(10)])
    engine = ScriptedEngine(COUNTING, vocabulary)
    drafter = ForcedDrafter(wild_paths(random.Random(1)), "suffix")
    loop = DecodingLoop(engine, [drafter], FixedPolicy(5), clock=engine.clock, observers=[Recording()])
    for _ in range(3):
        loop.add([0], GREEDY, StopRules(200))
    drain(loop)
    metrics, barrier = metrics_of(), threading.Barrier(2)

    def make_rounds() -> None:
        for _ in range(meetings):
            barrier.wait()
            for record in records[:rounds_each]:
                metrics.observe(record)

    thread = threading.Thread(target=make_rounds)
    thread.start()
    seen = -1.0
    for _ in range(meetings):
        barrier.wait()
        metrics.refused(429, "rate_limit_error")
        scraped = Scraped.of(metrics)
        assert seen <= scraped("paceline:rounds_total") == scraped("llamacpp:n_decode_total")
        seen = scraped("paceline:rounds_total")
        accepted = sum(scraped.values("paceline:accepted_tokens_total", "drafter").values())
        by_position = scraped.values("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
        assert accepted == scraped("vllm:spec_decode_num_accepted_tokens_total") == sum(by_position.values())
    thread.join()
    alone = metrics_of()
    for _ in range(meetings):
        for record in records[:rounds_each]:
            alone.observe(record)
    assert Scraped.of(metrics)("paceline:rounds_total") == meetings * rounds_each
    for name in ("generation_tokens_total", "spec_decode_num_draft_tokens_total", "inter_token_latency_seconds_sum"):
        assert Scraped.of(metrics)(f"vllm:{name}") == Scraped.of(alone)(f"vllm:{name}") > 0


def test_a_scrape_that_waits_for_its_gauges_holds_no_round_up() -> None:
    asked, answered = threading.Event(), threading.Event()

    def load() -> ServerLoad:
        asked.set()
        assert answered.wait(WAIT_S)
        return IDLE

    metrics = metrics_of(load)
    loop = counting_loop(metrics, [])
    loop.add([0], GREEDY, StopRules(3))
    scraped: list[Scraped] = []
    thread = threading.Thread(target=lambda: scraped.append(Scraped.of(metrics)))
    thread.start()
    try:
        assert asked.wait(WAIT_S)
        drain(loop)
    finally:
        answered.set()
        thread.join()
    assert scraped[0]("paceline:rounds_total") == 3


def test_the_guide_lists_every_name_with_its_type_labels_and_meaning() -> None:
    rows = re.findall(r"^\| `((?:llamacpp|vllm|paceline):.*) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [f"| `{row} |" for row in rows] == [
        f"| `{family.name}` | {family.kind} | {', '.join(f'`{label}`' for label in family.labels)} "
        f"| {family.meaning} |".replace("|  |", "| |")
        for family in FAMILIES
    ]


def test_the_queries_of_the_guide_name_series_that_are_there(counted: tuple[ServerMetrics, Request]) -> None:
    metrics, request = counted
    metrics.request_over(*over(request))
    names = {sample.name for family in Scraped.of(metrics).families for sample in family.samples}
    queries = re.findall(r"```promql\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(queries) >= 3
    for query in queries:
        named = re.findall(r"(?:llamacpp|vllm|paceline):\w+", query)
        assert named
        assert set(named) <= names, query
