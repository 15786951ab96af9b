"""The tools of tests/parity, without a server: what is in scope, and when answers are alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parity import pairs, run, scope
from tests.parity.pairs import Answer, differences

COMPLETION = {
    "content": "one two",
    "tokens": [1, 2],
    "prompt": "Once",
    "truncated": False,
    "timings": {"prompt_n": 2, "prompt_ms": 1.5},
    "completion_probabilities": [{"id": 1, "top_logprobs": [{"id": 1}, {"id": 2}]}, {"id": 2, "top_logprobs": []}],
}


def as_json(body: object, status: int = 200) -> Answer:
    return Answer(status, "application/json", body)


def as_stream(*events: Any) -> Answer:
    return Answer(200, "text/event-stream", list(events))


def delta(**fields: Any) -> dict[str, Any]:
    finish = fields.pop("finish_reason", None)
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def progress(processed: int) -> dict[str, Any]:
    return delta(content=None) | {"prompt_progress": {"total": 9, "processed": processed}}


@pytest.mark.parametrize(
    "changed",
    [
        {"content": "another text, longer"},
        {"tokens": [7, 8, 9]},
        {"timings": {"prompt_n": 1, "prompt_ms": 2}},
        {"warnings": ["a field of ours"]},
        {"completion_probabilities": [{"id": 9, "top_logprobs": [{"id": 3}, {"id": 4}]}]},
    ],
)
def test_answers_that_differ_in_their_text_alone_are_alike(changed: dict[str, Any]) -> None:
    assert differences(as_json(COMPLETION), as_json(COMPLETION | changed)) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt": "Twice"}, "prompt: 'Once' became 'Twice'"),
        ({"truncated": None}, "truncated: boolean became null"),
        ({"truncated": 0}, "truncated: boolean became number"),
        ({"timings": {"prompt_n": 2}}, "timings.prompt_ms: missing"),
        (
            {"completion_probabilities": [{"id": 1, "top_logprobs": [{"id": 1}]}]},
            "completion_probabilities[0].top_logprobs: 2 items became 1",
        ),
    ],
)
def test_answers_that_a_client_could_tell_apart_are_not(changed: dict[str, Any], said: str) -> None:
    assert differences(as_json(COMPLETION), as_json(COMPLETION | changed)) == [said]


def test_a_missing_field_is_named_and_one_more_is_allowed() -> None:
    assert differences(as_json({"a": 1, "b": 2}), as_json({"a": 1, "c": 3})) == ["b: missing"]
    assert differences(as_json({"a": 1}), as_json({"a": 1, "c": 3})) == []


def test_another_status_says_all() -> None:
    assert differences(as_json(COMPLETION), as_json({"error": {}}, 400)) == ["status: 200 became 400"]


def test_streams_are_alike_whatever_the_number_of_words() -> None:
    short = [delta(role="assistant", content=None), delta(content="a"), delta(finish_reason="stop"), "[DONE]"]
    long = [short[0], *[delta(content="b")] * 5, *short[2:]]
    assert differences(as_stream(*short), as_stream(*long)) == []
    assert len(differences(as_stream(*short), as_stream(*short[:-1]))) == 1
    assert len(differences(as_stream(*short), as_stream(*short[1:]))) == 1


def test_events_that_tell_of_the_prompt_are_counted() -> None:
    end = delta(finish_reason="stop")
    said = differences(as_stream(progress(0), progress(9), end), as_stream(progress(0), progress(4), progress(9), end))
    assert said == ["events with prompt_progress: 2 became 3"]


def test_metrics_may_have_more_names() -> None:
    lines = ["# HELP a_total Words", "# TYPE a_total counter", "a_total 1"]
    more = [*lines, "# TYPE b gauge", "b 2"]
    kind = "text/plain"
    reference, other = (Answer(200, kind, "\n".join(text)) for text in (lines, more))
    assert differences(reference, other) == []
    assert differences(other, reference) == ["b: missing"]


def test_a_record_is_read_by_server(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    lines = [
        {"flags": ["--preset"]},  # started before the first case, and nothing asked of it
        {"case": "a"},
        {"flags": ["--port", "1"]},
        {"method": "GET", "path": "/props"},
        {"case": "b"},
        {"flags": ["--port", "1", "--slots"]},
        {"method": "GET", "path": "/slots"},
        {"method": "GET", "path": "/models"},
    ]
    record.write_text("\n".join(map(json.dumps, lines)))
    read = [(start.case, start.flags, [request["path"] for request in start.requests]) for start in pairs.read(record)]
    assert read == [
        ("a", ["--port", "1"], ["/props"]),
        ("b", ["--port", "1", "--slots"], ["/slots", "/models"]),
    ]


@pytest.mark.parametrize(
    ("case", "group"),
    [
        ("unit/test_basic.py::test_no_ui", scope.IN_SCOPE),
        ("unit/test_ctx_shift.py::test_ctx_shift_disabled_stream", scope.IN_SCOPE),
        ("unit/test_ctx_shift.py::test_ctx_shift_enabled", scope.OUT_OF_SCOPE),
        ("unit/test_chat_completion.py::test_completion_with_invalid_grammar", "in scope"),
        ("unit/test_compat_anthropic.py::test_anthropic_top_k", scope.IN_SCOPE),
        ("unit/test_compat_anthropic.py::test_anthropic_vision_format_accepted", scope.OUT_OF_SCOPE),
    ],
)
def test_each_case_has_a_group(case: str, group: str) -> None:
    assert scope.group_of(case) == group


def test_every_rule_names_a_group_that_exists() -> None:
    assert {rule.group for rule in scope.RULES} == {scope.OUT_OF_SCOPE, *scope.WITH_OWN_MODELS}


def test_the_report_parts_text_from_the_rest() -> None:
    reference = {
        "a": {"outcome": "passed"},
        "b": {"outcome": "failed", "line": 'assert match_regex(re_content, res.body["content"])'},
        "c": {"outcome": "failed", "line": "assert res.status_code == 200"},
        "d": {"outcome": "passed"},
    }
    ours = {"a": {"outcome": "passed"}, "c": {"outcome": "passed"}, "d": {"outcome": "failed", "line": ""}}
    report = run.report({"llama-server": reference, "paceline": ours})
    assert report["by_text"] == ["b"]
    assert report["fails_at_reference"] == ["c"]
    assert report["fails_at_all"] == ["b"]
    assert report["missing"] == {"paceline": ["d"]}
