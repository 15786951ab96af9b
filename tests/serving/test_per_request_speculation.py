"""How a request asks to be sped up, what of it shows in its timings, and that its text stays the same."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import pytest

from paceline.core.params import SpeculationParams
from paceline.core.stats import OFF_REASONS, RequestStats
from paceline.serving.response_formats.base import speculation_of
from tests.serving.hosted import Hosted, hosted, scripted

BODY: Final[dict[str, Any]] = {"prompt": "abc abc abc", "n_predict": 60, "seed": 11, "ignore_eos": True}
DRAFTERS: Final = ["draft", "lookup", "suffix"]

FIELDS: Final = {
    "policy",
    "verify",
    "drafters",
    "drafted",
    "accepted",
    "rounds",
    "tau",
    "acceptance_by_depth",
    "queue_ms",
    "draft_ms",
    "verify_ms",
    "sampling_ms",
    "rest_ms",
    "gain",
    "gain_low",
    "gain_high",
    "off_reason",
    "off_reason_text",
    "off_rounds",
    "preemptions",
}


@pytest.fixture(scope="module")
def plain(server: Hosted) -> dict[str, Any]:
    answer: dict[str, Any] = server.answer("/completion", {**BODY, "speculative": {"off": True}})
    return answer


@pytest.mark.parametrize(
    "fields",
    [
        {"speculative": {"off": True}},
        {"speculative": {"enabled": False}},
        {"speculative": {"draft_max": 0}},
        {"speculative": {"off": True, "draft_max": 4, "drafters": ["draft"]}},
        {"speculative.n_max": 0},
        {"speculative.type": "none"},
        {"speculative.type": "none", "speculative.n_max": 4},
    ],
)
def test_speculation_is_switched_off(server: Hosted, plain: dict[str, Any], fields: dict[str, Any]) -> None:
    answer = server.answer("/completion", {**BODY, **fields})
    assert answer["content"] == plain["content"]
    timings = answer["timings"]
    assert "draft_n" not in timings
    assert (answer["speculative"]["drafted"], answer["speculative"]["rounds"]) == (0, 59)
    assert answer["speculative"]["off_reason"] == "asked"
    assert answer["speculative"]["off_reason_text"] == OFF_REASONS["asked"]
    assert answer["metrics"]["speculative_decoding"] is None


@pytest.mark.parametrize(
    ("fields", "deepest"),
    [
        ({}, 3),
        ({"speculative": {}}, 3),
        ({"speculative": {"enabled": True, "off": False}}, 3),
        ({"speculative": {"draft_max": 1}}, 1),
        ({"speculative": {"draft_max": 2.0}}, 2),
        ({"speculative.n_max": 1}, 1),
        ({"speculative.n_max": 2.0}, 2),
        ({"speculative.n_max": 1, "speculative": {"draft_max": 2}}, 2),
        ({"speculative.type": "auto"}, 3),
        ({"speculative": {"policy": "fixed", "draft_max": 7, "drafters": "draft"}}, 7),
        ({"speculative": {"draft_min": 2}}, 3),
        ({"speculative": {"verify": "coupled"}}, 3),
    ],
)
def test_drafts_are_as_long_as_they_may_be(
    server: Hosted, plain: dict[str, Any], fields: dict[str, Any], deepest: int
) -> None:
    answer = server.answer("/completion", {**BODY, **fields})
    assert answer["content"] == plain["content"]
    timings = answer["timings"]
    speculative = answer["speculative"]
    assert timings["draft_n"] == speculative["drafted"] > timings["draft_n_accepted"] == speculative["accepted"] > 0
    assert len(speculative["acceptance_by_depth"]) == deepest
    assert speculative["rounds"] < 59
    assert speculative["policy"] == "fixed"
    assert answer["metrics"]["speculative_decoding"]["num_spec_tokens"] == deepest


@pytest.mark.parametrize("names", [["draft"], ["suffix"], ["lookup"], ["suffix", "lookup"], DRAFTERS])
def test_drafters_are_chosen(server: Hosted, plain: dict[str, Any], names: list[str]) -> None:
    body = {**BODY, "prompt": "abcdefgh abcdefgh abcdefgh"}
    for told in (names, ",".join(names)):
        answer = server.answer("/completion", {**body, "speculative": {"drafters": told}})
        asked = answer["speculative"]["drafters"]
        assert set(asked) <= set(names)
        assert sum(drafter["drafted"] for drafter in asked.values()) == answer["timings"]["draft_n"] > 0
        assert answer["content"] == server.answer("/completion", {**body, "speculative.type": "none"})["content"]


def test_unsure_drafts_are_left_out(server: Hosted, plain: dict[str, Any]) -> None:
    drafted = []
    for fields in ({}, {"speculative": {"p_min": 0.5}}, {"speculative.p_min": 0.999}):
        answer = server.answer("/completion", {**BODY, "speculative": {"drafters": ["draft"]}, **fields})
        assert answer["content"] == plain["content"]
        drafted.append(answer["speculative"]["drafted"])
    assert drafted == sorted(drafted, reverse=True)
    assert len(set(drafted)) == 3


def test_drafts_may_be_judged_by_rejection(server: Hosted) -> None:
    answer = server.answer("/completion", {**BODY, "speculative": {"verify": "rejection"}})
    assert answer["speculative"]["verify"] == "rejection"
    greedy = {**BODY, "temperature": 0}
    rejected, plain = (
        server.answer("/completion", {**greedy, "speculative": fields})
        for fields in ({"verify": "rejection"}, {"off": True})
    )
    assert rejected["content"] == plain["content"]
    assert rejected["timings"]["draft_n"] > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculative": {"n_max": 4}}, "speculative.n_max"),
        ({"speculative": {"speculate": False}}, "speculative.speculate"),
        ({"speculative": {"draft_max": -1}}, "speculative.draft_max"),
        ({"speculative": {"draft_max": "4"}}, "speculative.draft_max"),
        ({"speculative": {"draft_min": -1}}, "speculative.draft_min"),
        ({"speculative": {"draft_max": 2, "draft_min": 3}}, "speculative.draft_min"),
        ({"speculative": {"draft_max": 2}, "speculative.n_min": 3}, "speculative.n_min"),
        ({"speculative": {"p_min": 1.5}}, "speculative.p_min"),
        ({"speculative": {"verify": "trust"}}, "speculative.verify"),
        ({"speculative": {"drafters": ["oracle"]}}, "speculative.drafters"),
        ({"speculative": {"drafters": []}}, "speculative.drafters"),
        ({"speculative": {"drafters": 5}}, "speculative.drafters"),
        ({"speculative": {"policy": "auto"}}, "speculative.policy"),
        ({"speculative": {"policy": "bold"}}, "speculative.policy"),
        ({"speculative.n_max": -1}, "speculative.n_max"),
        ({"speculative.n_max": "4"}, "speculative.n_max"),
        ({"speculative.n_min": -1}, "speculative.n_min"),
        ({"speculative.p_min": 2}, "speculative.p_min"),
        ({"speculative.type": "draft-simple"}, "speculative.type"),
    ],
)
def test_what_cannot_be_had_names_its_field(server: Hosted, fields: dict[str, Any], param: str) -> None:
    for path in ("/completion", "/v1/chat/completions"):
        body = {**BODY, "messages": [{"role": "user", "content": "abc"}], **fields}
        assert server.refusal(path, body)["param"] == param


def test_a_server_without_drafters_says_so() -> None:
    with hosted(lambda: scripted(drafts=False)) as running:
        answer = running.answer("/completion", BODY)
        assert answer["speculative"]["off_reason"] == "asked"
        props = running.get("/props").json()["speculative"]
        assert props["drafters"] == []
        assert props["reason"]
        assert not any(slot["speculative"] for slot in running.get("/slots").json())
        error = running.refusal("/completion", {**BODY, "speculative": {"policy": "fixed"}})
        assert error["param"] == "speculative.policy"


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_what_speculation_gave_is_told_in_full(server: Hosted, path: str) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "abc"}]}
    whole, last = server.answer(path, body), server.chunks(path, body)[-1]
    for answer in (whole, last):
        timings, metrics = answer["timings"], answer["metrics"]
        speculative = answer["speculative"]
        assert set(speculative) == FIELDS
        assert list(speculative["drafters"]) == DRAFTERS
        for name in ("drafted", "accepted"):
            assert sum(drafter[name] for drafter in speculative["drafters"].values()) == speculative[name]
        assert timings["predicted_n"] == 60
        assert speculative["tau"] == pytest.approx(59 / speculative["rounds"])
        spent = sum(speculative[name] for name in ("draft_ms", "verify_ms", "sampling_ms", "rest_ms"))
        assert 0 < spent <= timings["predicted_ms"] * 1.001
        told = metrics["speculative_decoding"]
        assert told["mean_acceptance_length"] == speculative["tau"]
        assert told["draft_acceptance_rate"] == speculative["accepted"] / speculative["drafted"]
        assert sum(told["acceptance_histogram"]) == speculative["accepted"]
        assert (told["num_spec_steps"], told["num_spec_tokens"]) == (speculative["rounds"], 3)
        assert (told["num_accepted_draft_tokens"], told["num_draft_tokens"]) == (
            timings["draft_n_accepted"],
            timings["draft_n"],
        )
        assert metrics["time_to_first_token_ms"] > 0
        assert metrics["mean_itl_ms"] > 0


def test_the_embedded_pair_says_the_same_with_drafts_and_without(pair_server: Hosted) -> None:
    body = {"prompt": "def fibonacci(n):\n", "n_predict": 48, "temperature": 0}
    drafted = pair_server.answer("/completion", body)
    assert drafted["timings"]["draft_n_accepted"] > 0
    one = pair_server.answer("/completion", {**body, "speculative": {"draft_max": 1}})
    assert len(one["speculative"]["acceptance_by_depth"]) == 1
    plain = pair_server.answer("/completion", {**body, "speculative": {"off": True}})
    assert drafted["content"] == one["content"] == plain["content"]


def test_rounds_without_drafts_are_told_by_reason_also_where_others_drafted() -> None:
    stats = RequestStats(rounds=9, num_drafted=4, num_accepted=3, off_rounds=Counter({"prompts": 6, "no_gain": 1}))
    told = speculation_of(stats, SpeculationParams(), "auto")
    assert told["off_rounds"] == {"prompts": 6, "no_gain": 1}
    assert told["off_reason"] is None
