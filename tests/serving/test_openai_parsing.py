"""OpenAI's own client where it makes schemas of classes, and reads answers and calls back into them."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any, Final, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.serving.calling import TEMPLATE
from tests.serving.hosted import Hosted, hosted, pair
from tests.tiers import by_tier, some_long

pytest.importorskip("llguidance")
pytest.importorskip("llama_cpp")

MESSAGES: Final[list[Any]] = [{"role": "user", "content": "Once upon a time, Lily went to the park."}]
OPTIONS: Final[dict[str, Any]] = {"model": "any", "messages": MESSAGES, "max_tokens": 900, "temperature": 0.8}


class Mood(enum.Enum):
    GLAD = "glad"
    SAD = "sad"


class Toy(BaseModel):
    kind: Literal["toy"]
    colour: Literal["red", "blue"]


class Animal(BaseModel):
    kind: Literal["animal"]
    legs: int = Field(ge=0, le=8)
    name: str | None = Field(max_length=12)


class Place(BaseModel):
    """Where somebody is."""

    name: str = Field(max_length=16)
    things: list[Toy | Animal] = Field(min_length=1, max_length=3)


class Story(BaseModel):
    title: str = Field(max_length=24)
    mood: Mood
    place: Place
    next_place: Place | None
    is_true: bool
    weights: list[float] = Field(max_length=2)


class Node(BaseModel):
    """Holds others of its kind."""

    value: int = Field(ge=0, le=9)
    children: list[Node] = Field(max_length=2)


class GoTo(BaseModel):
    """Go somewhere."""

    place: Literal["park", "home"]
    mood: Mood
    hours: int = Field(ge=0, le=99)


class Tell(BaseModel):
    """Tell somebody something."""

    names: list[str] = Field(min_length=1, max_length=2)
    toy: Toy


Tell.model_rebuild()
TOOLS: Final[list[Any]] = [openai.pydantic_function_tool(GoTo), openai.pydantic_function_tool(Tell, name="tell_all")]

MODELS: Final[dict[str, type[BaseModel]]] = {"GoTo": GoTo, "tell_all": Tell}


@pytest.fixture(scope="module")
def server() -> Iterator[Hosted]:
    with hosted(lambda: pair(TEMPLATE, context_length=1024)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Hosted) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


@pytest.mark.parametrize("seed", some_long(range(3), quick=[0]))
def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(**OPTIONS, seed=seed, response_format=Story)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Story)
    assert 1 <= len(choice.message.parsed.place.things) <= 3
    assert choice.message.parsed == Story.model_validate_json(choice.message.content or "")
    plain = client.beta.chat.completions.parse(
        **OPTIONS, seed=seed, response_format=Story, extra_body={"speculative": {"off": True}}
    )
    assert plain.choices[0].message.parsed == choice.message.parsed


def test_a_model_that_holds_its_own_kind_is_parsed(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(**OPTIONS, seed=1, response_format=Node).choices[0].message.parsed
    assert isinstance(parsed, Node)


def test_an_answer_that_is_cut_off_raises_as_it_does_with_openai(client: openai.OpenAI) -> None:
    options = {**OPTIONS, "max_tokens": 5}
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**options, response_format=Story)


def test_a_streamed_answer_is_parsed_while_it_comes(client: openai.OpenAI) -> None:
    whole = client.chat.completions.parse(**OPTIONS, seed=2, response_format=Story).choices[0].message
    text, partial = "", 0
    with client.chat.completions.stream(**OPTIONS, seed=2, response_format=Story) as stream:
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
                assert event.snapshot == text
                partial += event.parsed is not None
            elif event.type == "content.done":
                assert event.parsed == whole.parsed
        final = stream.get_final_completion().choices[0].message
    assert text == whole.content
    assert partial > 3
    assert final.parsed == whole.parsed


@pytest.mark.parametrize("seed", some_long(range(3), quick=[0]))
def test_calls_are_parsed_into_the_models_of_their_functions(client: openai.OpenAI, seed: int) -> None:
    options: dict[str, Any] = {**OPTIONS, "seed": seed, "tools": TOOLS, "tool_choice": "required"}
    options["parallel_tool_calls"] = False
    whole = client.chat.completions.parse(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert isinstance(call.function.parsed_arguments, MODELS[call.function.name])
    arguments, done = "", []
    with client.chat.completions.stream(**options) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                arguments += event.arguments_delta
                assert (event.index, event.name) == (0, call.function.name)
                assert event.arguments == arguments
            elif event.type == "tool_calls.function.arguments.done":
                done.append((event.index, event.name, event.arguments, event.parsed_arguments))
        final = stream.get_final_completion().choices[0]
    assert arguments == call.function.arguments
    assert done == [(0, call.function.name, call.function.arguments, call.function.parsed_arguments)]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function == call.function


def test_several_calls_are_parsed_in_their_order(server: Hosted, client: openai.OpenAI) -> None:
    only = {"type": "function", "function": {"name": "GoTo"}}
    options: dict[str, Any] = {
        **OPTIONS,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": True,
        "temperature": 1.3,
        "max_tokens": 300,
    }
    # A model that says anything goes on calling for as long as it may.
    options["logit_bias"] = {str(end): 6 for end in server.model.target.vocabulary.end_ids}
    numbers = []
    for seed in range(by_tier(8, quick=4)):
        with contextlib.suppress(openai.LengthFinishReasonError):
            numbers.append(_num_calls(client, {**options, "seed": seed}))
    assert max(numbers) > 1
    named = client.chat.completions.parse(**{**options, "tool_choice": only}, seed=1).choices[0].message.tool_calls
    assert named is not None
    assert [call.function.name for call in named] == ["GoTo"]


def _num_calls(client: openai.OpenAI, options: dict[str, Any]) -> int:
    """Return how many calls a streamed answer has, each of which was told once and in its turn."""
    names: list[str] = []
    with client.chat.completions.stream(**options) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                assert event.index == len(names)
                assert isinstance(event.parsed_arguments, MODELS[event.name])
                names.append(event.name)
        final = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in final.tool_calls or []] == names
    return len(names)
