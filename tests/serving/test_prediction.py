"""OpenAI's ``prediction``: the text stays the same, and what came of it is counted."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from tests.serving.hosted import Hosted, hosted, scripted

MESSAGES: Final = [{"role": "user", "content": "abc"}]
BODY: Final[dict[str, Any]] = {"messages": MESSAGES, "max_tokens": 60, "seed": 11, "ignore_eos": True}
ALONE: Final[dict[str, Any]] = {"speculative": {"drafters": ["prediction"]}}
CHAT: Final = "/v1/chat/completions"


def content(text: str) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


def details(answer: dict[str, Any]) -> tuple[int, int]:
    counts = answer["usage"]["completion_tokens_details"]
    return counts["accepted_prediction_tokens"], counts["rejected_prediction_tokens"]


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


@pytest.fixture(scope="module")
def plain(server: Hosted) -> str:
    answer = server.answer(CHAT, {**BODY, "speculative": {"off": True}})
    assert "accepted_prediction_tokens" not in answer["usage"]["completion_tokens_details"]
    return text_of(answer)


def counted(server: Hosted, body: dict[str, Any]) -> tuple[int, int]:
    """Return how many tokens of a prediction were accepted and refused, by what a stream says of each round."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_rounds": True}
    chunks = server.chunks(CHAT, body)
    rounds = [chunk["round"] for chunk in chunks if "round" in chunk]
    accepted = sum(one["sources"].count("prediction") for one in rounds)
    drafts = [draft for one in rounds for draft in one["drafts"] if draft["source"] == "prediction"]
    assert accepted == sum(draft["accepted"] for draft in drafts)
    assert details(chunks[-1]) == (accepted, len(drafts) - accepted)
    return accepted, len(drafts) - accepted


def test_tokens_of_a_prediction_are_counted(server: Hosted, plain: str) -> None:
    answer = server.answer(CHAT, {**BODY, **ALONE, **content(plain)})
    accepted, rejected = counted(server, {**BODY, **ALONE, **content(plain)})
    assert text_of(answer) == plain
    assert details(answer) == (accepted, rejected)
    assert accepted > 20
    assert answer["usage"]["completion_tokens"] == 60
    found = answer["speculative"]["drafters"]["prediction"]
    assert (found["drafted"], found["accepted"]) == (accepted + rejected, accepted)
    assert "warnings" not in answer

    # Half of it is another text.
    changed = plain[:20] + plain[:4] * 9 + plain[20:]
    answer = server.answer(CHAT, {**BODY, **ALONE, **content(changed)})
    assert text_of(answer) == plain
    assert details(answer) == counted(server, {**BODY, **ALONE, **content(changed)})
    assert min(details(answer)) > 0


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"speculative": {"verify": "rejection"}, "temperature": 0},
        {"grammar": 'root ::= "abc" ([a-f ] [g-h])*', "ignore_eos": False},
        {"speculative": {"policy": "fixed", "draft_max": 6, "drafters": ["prediction", "lookup"]}},
        {"cache_prompt": False, "stop": ["zz"], "logprobs": True},
    ],
)
def test_beside_other_drafters_the_text_is_the_same(server: Hosted, others: dict[str, Any]) -> None:
    body = {**BODY, **others}
    plain = text_of(server.answer(CHAT, {**body, "speculative": {"off": True}}))
    for text in (plain, plain[7:], f"```\n{plain}```", plain[:10] + plain[30:] + plain, "\x00\ud7ff" * 50):
        answer = server.answer(CHAT, {**body, **content(text)})
        found = answer["speculative"]["drafters"].get("prediction", {"drafted": 0, "accepted": 0})
        assert text_of(answer) == plain
        assert details(answer) == (found["accepted"], found["drafted"] - found["accepted"])


def test_all_forms_and_routes_take_it(server: Hosted, plain: str) -> None:
    expected = details(server.answer(CHAT, {**BODY, **ALONE, **content(plain)}))
    parts = [{"type": "text", "text": plain[:9]}, {"type": "text", "text": plain[9:]}]
    for prediction in ({"type": "content", "content": parts}, {"content": plain}, plain):
        answer = server.answer(CHAT, {**BODY, **ALONE, "prediction": prediction})
        assert (text_of(answer), details(answer)) == (plain, expected)
    chunks = server.chunks(
        CHAT, {**BODY, **ALONE, **content(plain), "stream": True, "stream_options": {"include_usage": True}}
    )
    assert details(chunks[-1]) == expected
    answer = server.answer(CHAT, {**BODY, **ALONE, **content(plain), "n": 2})
    drafted = [choice["speculative"]["drafters"]["prediction"] for choice in answer["choices"]]
    assert details(answer)[0] == sum(one["accepted"] for one in drafted)
    assert sum(details(answer)) == sum(one["drafted"] for one in drafted) > expected[0]

    body = {"prompt": "abc abc", "max_tokens": 40, "seed": 3, "ignore_eos": True, **ALONE}
    said = server.answer("/v1/completions", body)["choices"][0]["text"]
    answer = server.answer("/v1/completions", {**body, "prediction": said})
    assert answer["choices"][0]["text"] == said
    assert details(answer)[0] > 10
    native = server.answer("/completion", {**body, "prediction": said})
    assert native["content"] == said
    assert native["speculative"]["drafters"]["prediction"]["accepted"] == details(answer)[0]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_other_apis_count_it_among_the_tokens_of_their_output(server: Hosted, plain: str, path: str) -> None:
    asked = {name: value for name, value in BODY.items() if name != "messages"}
    body = {**asked, **ALONE, "input" if path == "/v1/responses" else "messages": MESSAGES}
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    expected = details(server.answer(CHAT, {**BODY, **ALONE, **content(plain)}))
    answer = server.answer(path, {**body, **content(plain)})
    counts = answer["usage"]["output_tokens_details"]
    assert tuple(counts[name] for name in names) == expected
    streamed = server.post(path, {**body, **content(plain), "stream": True}).text
    assert f'"output_tokens_details":{json.dumps(counts, separators=(",", ":"))}' in streamed
    assert not {*names} & server.answer(path, body)["usage"]["output_tokens_details"].keys()


def test_the_client_of_openai_reads_it(server: Hosted, plain: str) -> None:
    with server.client() as client:
        answer = client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "abc"}],
            max_tokens=60,
            seed=11,
            prediction={"type": "content", "content": [{"type": "text", "text": plain}]},
            extra_body={"ignore_eos": True, **ALONE},
        )
    assert answer.choices[0].message.content == plain
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    found = answer.usage.completion_tokens_details
    expected = details(server.answer(CHAT, {**BODY, **ALONE, **content(plain)}))
    assert (found.accepted_prediction_tokens, found.rejected_prediction_tokens) == expected


@pytest.mark.parametrize(
    ("speculative", "why"),
    [
        ({"off": True}, "plainly"),
        ({"drafters": ["suffix"]}, "does not name"),
        ({"policy": "fixed"}, "draft model alone"),
    ],
)
def test_a_prediction_that_changes_nothing_is_told(
    server: Hosted, plain: str, speculative: dict[str, Any], why: str
) -> None:
    answer = server.answer(CHAT, {**BODY, **content(plain), "speculative": speculative})
    assert text_of(answer) == plain
    assert details(answer) == (0, 0)
    (warning,) = answer["warnings"]
    assert "prediction changed nothing" in warning
    assert why in warning


def test_a_server_without_speculation_takes_it() -> None:
    with hosted(lambda: scripted(drafts=False)) as running:
        answer = running.answer(CHAT, {**BODY, **content("abc")})
        assert "without speculation" in answer["warnings"][0]
        assert running.get("/props").json()["speculative"]["drafters"] == []


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("", "prediction"),
        (5, "prediction"),
        (["abc"], "prediction"),
        ({"type": "content", "content": ""}, "prediction"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": ["abc"]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {}}]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content"),
        ({"type": "diff", "content": "abc"}, "prediction"),
        ("ab " * 100_000, "prediction"),
    ],
)
def test_a_prediction_that_cannot_be_used_is_refused(server: Hosted, prediction: Any, param: str) -> None:
    for path, asked in ((CHAT, {"messages": MESSAGES}), ("/completion", {"prompt": "abc"})):
        assert server.refusal(path, {**asked, "prediction": prediction})["param"] == param


def test_an_unknown_part_of_it_is_named(server: Hosted) -> None:
    body = {**BODY, "prediction": {"type": "content", "content": "abc", "mode": "fast"}}
    assert server.answer(CHAT, body)["warnings"] == ["unknown field 'prediction.mode' was ignored"]
