"""One seed, one text: whatever drafts, whoever else asks, whatever was read before, however the answer is sent."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest

from tests import tiers
from tests.proofs import LINES
from tests.serving.hosted import Hosted, hosted, pair, scripted
from tests.serving.questions import (
    PATHS,
    SPECULATION,
    Question,
    Reply,
    Way,
    asked_at_once,
    message_text,
    response_text,
    text_of,
)


def compare(server: Hosted, questions: Sequence[Question], seed: int) -> int:
    """Hold answers among sixteen at once, however they are asked for, to those plainly and alone.

    Returns:
        How often one of them lost its place.
    """
    rng = random.Random(seed)
    plain = {"speculative": {"off": True}, "cache_prompt": False}
    expected = [each.ask(server, "native", stream=False, **plain) for each in questions]
    replies: dict[int, Reply] = {}

    def ask(number: int, way: Way, stream: bool, fields: dict[str, Any]) -> None:
        replies[number] = questions[number].ask(server, way, stream=stream, **fields)

    works: list[Callable[[], object]] = []
    for number in range(len(questions)):
        way = rng.choice(list(PATHS))
        fields = {**rng.choice(SPECULATION), "cache_prompt": rng.random() < 0.7}
        stream = rng.random() < 0.5
        works.append(functools.partial(ask, number, way, stream, fields))
    asked_at_once(works)
    for number, question in enumerate(questions):
        assert replies[number] == expected[number], question
    return sum(reply.preemptions for reply in replies.values())


@pytest.fixture(scope="module")
def crowded() -> Iterator[Hosted]:
    """A server whose cache has no room for all who are answered."""
    with hosted(lambda: scripted(cells=400)) as running:
        yield running


def test_a_seed_gives_one_text_whatever_else_goes_on(server: Hosted, crowded: Hosted) -> None:
    """With room for all, and without, so that answers lose their places and go on later."""
    count = tiers.by_tier(250, quick=32)
    rng = random.Random(1)
    assert compare(server, [Question.draw(rng, 60) for _ in range(count)], seed=2) == 0
    preemptions = compare(crowded, [Question.draw(rng, 250) for _ in range(count)], seed=3)
    assert preemptions >= count // 16
    LINES.append(
        f"serving: {2 * count} answers over HTTP, none other than that of plain decoding alone; places were lost "
        f"{preemptions} times"
    )


ONE_ANSWER: Final = [("messages", 3), ("responses", 3)]


@pytest.mark.parametrize(("way", "n"), [(way, n) for way in PATHS for n in (1, 3) if (way, n) not in ONE_ANSWER])
def test_a_stream_is_byte_for_byte_what_is_sent_at_once(server: Hosted, way: Way, n: int) -> None:
    """In characters of one to four bytes, each of them several tokens, and in bytes that are no character."""
    biases = {"240": 2.0, "228": 2.0, "195": 1.0}
    body = Question("文中", {"seed": 3, "max_tokens": 200, "n": n, "logit_bias": biases}).body(way)
    said = {"native": lambda part: part["content"], "messages": message_text, "responses": response_text}.get(
        way, text_of
    )
    whole = server.answer(PATHS[way], body)
    answers = whole if isinstance(whole, list) else whole.get("choices", [whole])
    texts = [said(each) for each in answers]
    streamed = [""] * n
    for chunk in server.chunks(PATHS[way], body):
        for part in chunk.get("choices", [chunk]):
            streamed[part.get("index", 0)] += said(part)
    assert [text.encode() for text in streamed] == [text.encode() for text in texts]
    assert {len(character.encode()) for character in texts[0]} == {1, 2, 3, 4}
    assert "\N{REPLACEMENT CHARACTER}" in "".join(texts)


def test_choices_are_those_of_their_number_among_others(server: Hosted) -> None:
    body = {"prompt": "abc", "seed": 4, "max_tokens": 40}
    few, many = (
        [choice["text"] for choice in server.answer("/v1/completions", {**body, "n": n})["choices"]] for n in (2, 8)
    )
    assert many[:2] == few
    off = server.answer("/v1/completions", {**body, "n": 8, "speculative": {"off": True}})
    assert [choice["text"] for choice in off["choices"]] == many


@pytest.mark.long
def test_the_embedded_pair_gives_one_text_too() -> None:
    """With arithmetic that is the same at every width, one after the other, cold; so that rounding decides nothing."""
    with hosted(lambda: pair(exact=True, max_sequences=1, flash_attention=None)) as running:
        for seed in range(12):
            question = Question(f"def f{seed}(x):", {"seed": seed, "max_tokens": 40, "temperature": 0.8})
            expected = question.ask(running, "native", stream=False, speculative={"off": True})
            for way in PATHS:
                assert question.ask(running, way, stream=seed % 2 == 0) == expected
