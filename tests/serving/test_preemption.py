"""Answers over HTTP whose places are lost at random rounds: nothing is said twice, nothing is missing, nothing differs.

Each request is asked alone first. All that comes back is compared, streams event by event, but for times, names that
are drawn, and what speculation did.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.proofs import LINES
from tests.runtime.squeezing import Squeeze, at_random
from tests.serving.calling import TEMPLATE, TOOLS
from tests.serving.hosted import Hosted, hosted, scripted
from tests.serving.questions import CONSTRAINTS, PATHS, SPECULATION, Question, Way, asked_at_once
from tests.tiers import by_tier

NUM_REQUESTS: Final = by_tier(200, quick=48)
ONE_OF_MANY: Final = ("native", "completions", "chat")
"""Ways in which several answers, log-probabilities and progress are asked for alike."""
VOLATILE: Final = (
    *("id", "created", "speculative", "metrics", "gain", "id_slot"),
    *("created_at", "completed_at", "item_id", "call_id"),
)
"""What differs between two answers to one request."""
COUNTS: Final = ("cache_n", "prompt_n", "predicted_n")
"""What ``timings`` say that is no time, and not of drafts."""
REASONING: Final = TEMPLATE + "{% if add_generation_prompt and enable_thinking %}<think>\n{% endif %}"


def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a route, and a body for it."""
    question = Question.draw(rng, 60)
    if rng.random() < 0.4:
        # Read in several passes.
        question = Question("abc " * rng.randint(150, 400) + question.content, question.fields)
    way: Way = rng.choice(list(PATHS))
    body = {**question.body(way), **rng.choice(SPECULATION), "cache_prompt": False}
    kind = rng.randrange(6)
    if kind == 0 and way in ONE_OF_MANY:
        body["n"] = rng.randint(2, 4)
    elif kind == 1 and way in ONE_OF_MANY:
        body |= {"n_probs": 3} if way == "native" else {"logprobs": 3 if way == "completions" else True}
    elif kind == 2 and way in ONE_OF_MANY:
        body |= {"return_progress": True, "stream_options": {"include_usage": True}}
    elif kind == 3 and way == "completions":
        body["echo"] = True
    elif way == "chat":
        for name in {name for constraint in CONSTRAINTS for name in constraint}:
            body.pop(name, None)
    if way == "chat" and kind == 3:
        body |= {"tools": TOOLS, "tool_choice": rng.choice(("required", "auto")), "max_tokens": 120}
    elif way == "chat" and kind > 3:
        # The grammar begins behind the reasoning, wherever a place is lost in it.
        thinking = {"enable_thinking": True}
        body |= {"reasoning_budget_tokens": rng.choice((0, 3, 15)), "chat_template_kwargs": thinking, "max_tokens": 90}
        body |= rng.choice(CONSTRAINTS) if rng.random() < 0.5 else {}
    return PATHS[way], {**body, "stream": rng.random() < 0.6}


def ask(server: Hosted, path: str, body: dict[str, Any]) -> list[Any]:
    """Return all that is said of an answer, as far as it is the same whenever it is asked for."""
    parts = server.chunks(path, body) if body["stream"] else [server.answer(path, body)]
    told = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    for choice in {progress.get("index", 0) for progress in told}:
        counts = [progress["processed"] for progress in told if progress.get("index", 0) == choice]
        assert counts == sorted(set(counts)), "what was read was told twice, or taken back"
        assert counts[-1] == told[0]["total"]
    steady = [_steady(part) for part in parts if "prompt_progress" not in part]
    # Several answers come in the order of their rounds.
    return steady if body.get("n", 1) == 1 else sorted(steady, key=lambda part: _index(part))


def _index(part: Any) -> int:
    if isinstance(part, list):
        return -1
    choices = part.get("choices")
    index: int = part.get("index", 0) if choices is None else choices[0]["index"] if choices else 99
    return index


def _steady(said: Any) -> Any:
    if isinstance(said, list):
        return [_steady(each) for each in said]
    if not isinstance(said, dict):
        return said
    found = {name: _steady(each) for name, each in said.items() if name not in VOLATILE and not name.endswith("_ms")}
    if "timings" in found:
        found["timings"] = {name: found["timings"][name] for name in COUNTS}
    return found


@pytest.fixture(scope="module")
def plain() -> Iterator[Hosted]:
    with hosted(lambda: scripted(REASONING)) as running:
        yield running


@pytest.fixture(scope="module")
def squeezed() -> Iterator[tuple[Hosted, Squeeze]]:
    squeeze = Squeeze(at_random(random.Random(1), 0.45))
    with hosted(lambda: scripted(REASONING)) as running:
        running.model.worker.call(lambda: squeeze.put_on(running.model.loop, running.model.target))
        yield running, squeeze


def test_answers_that_lose_their_places_are_those_of_others(plain: Hosted, squeezed: tuple[Hosted, Squeeze]) -> None:
    rng = random.Random(7)
    asked = [draw(rng) for _ in range(NUM_REQUESTS)]
    expected = [ask(plain, path, body) for path, body in asked]
    server, squeeze = squeezed
    found: dict[int, list[Any]] = {}

    def ask_again(number: int) -> None:
        found[number] = ask(server, *asked[number])

    asked_at_once([functools.partial(ask_again, number) for number in range(NUM_REQUESTS)])
    for number, one in enumerate(asked):
        assert found[number] == expected[number], one
    LINES.append(
        f"preempted over HTTP: {NUM_REQUESTS} answers like those alone, {squeeze.num_requests} lost their places; "
        f"{dict(squeeze.cases)}"
    )
    assert 2 * squeeze.num_requests > NUM_REQUESTS
    cases = ("in a prompt", "before it went on", "three times and more", "with text withheld")
    assert all(squeeze.cases[case] > 0 for case in cases)
