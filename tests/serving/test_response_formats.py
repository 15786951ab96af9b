"""Chunks whose fixed parts are written once are byte for byte what the JSON of each would be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.chat.assembler import TokenEvent
from paceline.chat.reasoning import AnswerPart
from paceline.chat.tool_calls.base import ArgumentsDelta, CallStarted
from paceline.core.logprobs import TokenLogprob
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.request import Emission
from paceline.core.stats import RequestStats
from paceline.core.text import TextSegment
from paceline.options import read_options
from paceline.serving.answering import Ended, Event, Progress, Round
from paceline.serving.generation_request import Api, GenerationRequest
from paceline.serving.model_host import ServedModel
from paceline.serving.response_formats import FORMATTERS
from tests.serving.hosted import scripted
from tests.serving.parts import LOGPROBS, TEXTS
from tests.tiers import by_tier

WORDS: Final = st.builds(
    AnswerPart, st.sampled_from(["content", "content", "reasoning"]), st.builds(TextSegment, TEXTS, st.just("target"))
)
PARTS: Final = st.one_of(
    WORDS,
    st.builds(CallStarted, st.integers(0, 3), TEXTS, TEXTS),
    st.builds(ArgumentsDelta, st.integers(0, 3), TEXTS),
)
NAMES: Final = ["scripted", "one", 'a "b" ß😀', "a\udcff", "\\ud800"]
"""Of models. Command lines have names that are no UTF-8."""


@pytest.fixture(scope="module")
def served() -> Iterator[ServedModel]:
    made = scripted(drafts=False)
    with made.model:
        yield made


def a_choice(number: int) -> Any:
    request = SimpleNamespace(stats=RequestStats(cached_tokens=2, prompt_tokens=5, predicted_tokens=3))
    stream = SimpleNamespace(
        request=request, params=SamplingParams(), rules=StopRules(9), speculation=SpeculationParams()
    )
    return SimpleNamespace(
        number=number,
        prompt=SimpleNamespace(text="once \ud83d", token_ids=[1, 2]),
        prompt_logprobs=[TokenLogprob(2, -0.5, ((2, -0.5), (3, -1.0)))],
        stream=stream,
        stats=request.stats,
        num_prompt=7,
        assembler=SimpleNamespace(num_tokens=3, num_reasoning=1, num_calls=0),
        cached=2,
        slot=0,
        has_new_line=True,
        truncated=False,
        stop_type="eos",
        is_cut_off=False,
        stopping_word="",
    )


@st.composite
def rounds_of(
    draw: st.DrawFn, choices: Sequence[Any], *, logprobs: bool, rounds: bool
) -> list[tuple[Any, list[Event]]]:
    """Draw what rounds bring, each to one of the choices."""
    found: list[tuple[Any, list[Event]]] = [(draw(st.sampled_from(choices)), [])]
    kinds = ["said", "said", "said", "progress", *(["round"] if rounds else [])]
    for _ in range(draw(st.integers(2, 10))):
        if draw(st.booleans()):
            found.append((draw(st.sampled_from(choices)), []))
        choice, events = found[-1]
        kind = draw(st.sampled_from(kinds))
        token_ids = draw(st.lists(st.integers(0, 259), max_size=3))
        if kind == "progress":
            events.append(Progress(draw(st.integers(0, 7)), 1.5, is_first=draw(st.booleans())))
        elif kind == "round":
            emission = Emission(choice.stream.request, token_ids, ["target"] * len(token_ids), (), None)
            events.append(Round(emission))
        else:
            of_tokens = draw(st.lists(LOGPROBS, max_size=2)) if logprobs else ()
            sources = ["target"] * len(token_ids) if rounds else ()
            parts: Any = draw(st.lists(PARTS if draw(st.integers(0, 3)) == 3 else WORDS, max_size=2))
            events.append(TokenEvent(parts, token_ids, of_tokens, draw(st.integers(0, 10**6)), sources))
    ended: list[tuple[Any, list[Event]]] = [(choice, [Ended()]) for choice in choices if draw(st.booleans())]
    return found + ended


FLAGS: Final = (
    *("include_usage", "echo", "timings_per_token", "verbose", "reads_only", "post_sampling"),
    *("continuous_usage", "return_token_ids", "names_ids"),
)


@pytest.mark.parametrize("api", ["native", "completions", "chat", "messages"])
def test_a_chunk_in_its_frame_is_its_json(served: ServedModel, api: Api) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=by_tier(100, quick=70), deadline=None, database=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        num_choices = 1 if api == "messages" else data.draw(st.integers(1, 2))
        flag = data.draw(st.sampled_from([*FLAGS, *[""] * 12]))
        flags: dict[str, Any] = {flag: True} if flag else {}
        num_logprobs = data.draw(st.sampled_from([None, None, None, 2]))
        request = GenerationRequest(
            api, read_options({}), num_choices=num_choices, num_logprobs=num_logprobs, stream=True, **flags
        )
        choices = [a_choice(number) for number in range(num_choices)]
        name = data.draw(st.sampled_from([*[NAMES[0]] * 6, *NAMES]))
        answer: Any = SimpleNamespace(
            id="chatcmpl-a", created=1, choices=choices, request=request, served=replace(served, names=(name,))
        )
        rounds = data.draw(
            rounds_of(choices, logprobs=num_logprobs is not None, rounds=data.draw(st.integers(0, 7)) == 7)
        )
        # Made of the same answer; a formatter remembers what it has said.
        quick: Any = FORMATTERS[api](answer)
        slow: Any = FORMATTERS[api](answer)
        framed = quick._framed

        def noted(choice: Any, event: TokenEvent) -> bytes | None:
            written: bytes | None = framed(choice, event)
            seen["whole" if written is None else "framed"] += 1
            return written

        quick._framed = noted
        for choice, events in rounds:
            whole = slow.as_events([chunk for event in events for chunk in slow.chunks(choice, event)])
            assert quick.written(choice, events) == whole

    check()
    assert min(seen["framed"], seen["whole"]) >= by_tier(50, quick=25), seen
