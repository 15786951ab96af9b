"""Streams that say what each round drafted, and where each token came from."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import pytest

from tests.serving.hosted import Hosted

TEXT: Final[dict[str, Any]] = {"prompt": "abc abc abc", "n_predict": 80, "seed": 11, "ignore_eos": True}
CHAT: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 80, "seed": 11}
ROUTES: Final = [("/completion", TEXT), ("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]


def text_of(chunk: dict[str, Any]) -> str:
    if "choices" not in chunk:
        return str(chunk["content"])
    choice = chunk["choices"][0]
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


def judged(rounds: list[dict[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """Return drafts and accepted ones, by drafter."""
    drafts = [draft for each in rounds for draft in each["drafts"]]
    return (
        Counter(draft["source"] for draft in drafts),
        Counter(draft["source"] for draft in drafts if draft["accepted"]),
    )


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_rounds_add_up_to_what_the_answer_counts(server: Hosted, path: str, body: dict[str, Any]) -> None:
    chunks = server.chunks(path, {**body, "return_rounds": True})
    rounds = [chunk["round"] for chunk in chunks if "round" in chunk]
    told = next(chunk["speculative"] for chunk in chunks if "speculative" in chunk)
    drafted, accepted = judged(rounds)
    assert told["drafted"] > 0
    assert 0 < told["accepted"] < told["drafted"]
    assert drafted == Counter({name: each["drafted"] for name, each in told["drafters"].items() if each["drafted"]})
    assert accepted == Counter({name: each["accepted"] for name, each in told["drafters"].items() if each["accepted"]})
    # The first token comes with the prompt, and its round drafts nothing.
    assert len(rounds) == told["rounds"] + 1
    assert rounds[0]["drafts"] == []


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_sources_of_chunks_are_those_of_their_rounds(server: Hosted, path: str, body: dict[str, Any]) -> None:
    chunks = server.chunks(path, {**body, "return_rounds": True})
    of_rounds = [source for chunk in chunks if "round" in chunk for source in chunk["round"]["sources"]]
    of_chunks = [source for chunk in chunks for source in chunk.get("sources", ())]
    assert of_chunks == of_rounds
    assert {"target", "draft"} <= set(of_rounds)
    # A round stands before its tokens.
    assert "round" in next(chunk for chunk in chunks if "round" in chunk or "sources" in chunk)


def test_accepted_drafts_are_a_path_from_the_top_that_spells_the_answer(server: Hosted) -> None:
    chunks = server.chunks("/completion", {**TEXT, "return_rounds": True, "return_tokens": True})
    tokens: list[int] = [token_id for chunk in chunks for token_id in chunk["tokens"]]
    at = 0
    depths: set[int] = set()
    siblings = 0
    for each in (chunk["round"] for chunk in chunks if "round" in chunk):
        parent = -1
        for node, draft in enumerate(each["drafts"]):
            assert -1 <= draft["parent"] < node
            siblings += draft["parent"] in [other["parent"] for other in each["drafts"][:node]]
            if draft["accepted"]:
                assert draft["parent"] == parent
                depth = sum(other["accepted"] for other in each["drafts"][:node])
                assert draft["id"] == tokens[at + depth]
                assert draft["source"] == each["sources"][depth]
                depths.add(depth)
                parent = node
        at += len(each["sources"])
    assert at == len(tokens)
    assert depths >= {0, 1}
    assert siblings


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_who_does_not_ask_gets_the_same_text_and_nothing_of_rounds(
    server: Hosted, path: str, body: dict[str, Any]
) -> None:
    with_rounds = server.chunks(path, {**body, "return_rounds": True})
    without = server.chunks(path, body)
    assert not any("round" in chunk or "sources" in chunk for chunk in without)
    assert "".join(map(text_of, with_rounds)) == "".join(map(text_of, without))
    said = [chunk for chunk in with_rounds if "round" not in chunk]
    assert [text_of(chunk) for chunk in said if text_of(chunk)] == [
        text_of(chunk) for chunk in without if text_of(chunk)
    ]


def test_plain_decoding_has_rounds_without_drafts(server: Hosted) -> None:
    chunks = server.chunks("/completion", {**TEXT, "return_rounds": True, "speculative": {"off": True}})
    rounds = [chunk["round"] for chunk in chunks if "round" in chunk]
    assert len(rounds) == TEXT["n_predict"]
    assert all(each["drafts"] == [] and each["sources"] == ["target"] for each in rounds)


def test_tokens_before_a_round_are_counted(server: Hosted) -> None:
    chunks = server.chunks("/completion", {**TEXT, "return_rounds": True})
    said = 0
    for chunk in chunks[:-1]:
        if "round" in chunk:
            assert chunk["tokens_predicted"] == said
            said += len(chunk["round"]["sources"])


def test_rounds_and_progress_without_a_stream_are_warned_of(server: Hosted) -> None:
    answer = server.answer("/completion", {**TEXT, "return_rounds": True, "return_progress": True})
    assert answer["warnings"] == [
        "return_rounds changes nothing without stream",
        "return_progress changes nothing without stream",
    ]
    assert "round" not in answer
