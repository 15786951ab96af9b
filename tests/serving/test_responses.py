"""The Responses API: items in, items out, events in their order, and OpenAI's own client, which checks all of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, Any, Final, Literal, get_args

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field

from paceline.chat.assembler import AnswerAssembler, TokenEvent
from paceline.chat.reasoning import AnswerPart
from paceline.chat.tool_calls.base import ArgumentsDelta, CallStarted
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.stats import RequestStats
from paceline.core.text import TextSegment
from paceline.options import read_options
from paceline.server_options import ServerOptions
from paceline.serving.answering import Ended, Event, Progress
from paceline.serving.conversations import Conversation
from paceline.serving.generation_request import GenerationRequest
from paceline.serving.json_output import as_events
from paceline.serving.response_formats.responses import ResponsesFormatter
from paceline.serving.responses_request import read_response_request
from paceline.serving.schema import ResponsesBody
from tests.chat.conversing import CHATML
from tests.serving.calling import CALLED, TEMPLATE, WEATHER, saying
from tests.serving.hosted import NAME, Hosted, hosted, scripted
from tests.serving.parts import LOGPROBS, TEXTS
from tests.serving.reasoning import ANSWER, reasoning, thinking
from tests.tiers import by_tier

PATH: Final = "/v1/responses"
CHAT: Final = "/v1/chat/completions"
EVENTS: Final[dict[str, type[BaseModel]]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
"""OpenAI's types of events, by their names."""
FLAT: Final[dict[str, Any]] = {"type": "function", "strict": False, **WEATHER["function"]}
NOW: Final[dict[str, Any]] = {"type": "function", "name": "now", "parameters": {}, "strict": False}
SAMPLED: Final[dict[str, Any]] = {"seed": 3, "temperature": 1.0}


def events(server: Hosted, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which OpenAI's types know."""
    response = server.post(PATH, {**body, "stream": True})
    assert response.status_code == 200, response.text
    return read_events(response.content)


def read_events(written: bytes) -> list[dict[str, Any]]:
    """Return events, whose names, numbers and types are checked."""
    found = []
    for event in written.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(httpx.Response(200, text=data.removeprefix("data: ")).json())
        assert name == f"event: {found[-1]['type']}"
        EVENTS[found[-1]["type"]].model_validate(found[-1])
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


PART_EVENTS: Final = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}


def reassembled(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the response that a stream ends with, once its events were found to come to it, in their order."""
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] in ("completed", "incomplete")
    assert len({event["response"]["id"] for event in (found[0], found[1], found[-1])}) == 1
    response: dict[str, Any] = found[-1]["response"]
    rest = iter(event for event in found[2:-1] if event["type"] != "response.in_progress")
    for index, item in enumerate(response["output"]):
        events_of, field = PART_EVENTS[item["type"]]
        has_parts = item["type"] in ("message", "reasoning")
        added = next(rest)
        assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
        assert added["item"]["status"] == "in_progress"
        assert added["item"].get("content", []) == []
        assert added["item"].get(field, "") == ""
        if has_parts:
            begun = next(rest)
            assert begun["type"] == "response.content_part.added"
            assert begun["part"]["text"] == ""
        said, logprobs = "", []
        while (event := next(rest))["type"] == f"response.{events_of}.delta":
            assert (event["item_id"], event["output_index"]) == (item["id"], index)
            said += event["delta"]
            logprobs += event.get("logprobs", [])
        part = item["content"][0] if has_parts else item
        assert (event["type"], event[field]) == (f"response.{events_of}.done", whole_text(said))
        assert part[field] == whole_text(said)
        assert part.get("logprobs", []) == logprobs == event.get("logprobs", [])
        if has_parts:
            assert (next_part := next(rest))["type"] == "response.content_part.done"
            assert next_part["part"] == part
        done = next(rest)
        assert (done["type"], done["item"]) == ("response.output_item.done", item)
    assert list(rest) == []
    return response


def read_items(**fields: Any) -> Conversation:
    return read_response_request(ResponsesBody.model_validate(fields))


def whole_text(text: str) -> str:
    """Return a text in which halves of pairs that came one by one are characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def output_text(response: dict[str, Any]) -> str:
    return "".join(item["content"][0]["text"] for item in response["output"] if item["type"] == "message")


# Texts


@pytest.mark.parametrize("seed", range(3))
def test_a_text_is_that_of_a_chat(server: Hosted, seed: int) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    options = {"seed": seed, "temperature": 1.2, "top_k": 30}
    chat = server.answer(CHAT, {"messages": messages, "max_tokens": 40, **options})
    said = chat["choices"][0]["message"]["content"]
    asked: list[dict[str, Any]] = [
        {"input": messages},
        {"instructions": "Be brief.", "input": "Hello"},
        {
            "instructions": "Be brief.",
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        },
        {"input": messages, "speculative": {"off": True}},
    ]
    for fields in asked:
        body = {**fields, "max_output_tokens": 40, **options}
        whole, streamed = server.answer(PATH, body), reassembled(events(server, body))
        assert output_text(whole) == output_text(streamed) == said
        assert whole["status"] == streamed["status"] == "incomplete"
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
        assert whole["usage"]["total_tokens"] == chat["usage"]["total_tokens"]
        assert whole["usage"]["output_tokens"] == 40
        assert {**whole, **dict.fromkeys(DIFFERS)} == {**streamed, **dict.fromkeys(DIFFERS)}


DIFFERS: Final = ("id", "created_at", "completed_at", "output", "usage", "timings", "metrics", "speculative")
"""Of two answers to one request; of the output the ids."""


def test_an_answer_repeats_its_request(server: Hosted) -> None:
    body = {
        "input": "Hello",
        "instructions": "Be brief.",
        "max_output_tokens": 8,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "tools": [FLAT, {"type": "web_search"}],
        "store": True,
        "truncation": "auto",
        "temperature": 0.5,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "user": "me",
    }
    answer = server.answer(PATH, body)
    Response.model_validate(answer)
    same = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "reasoning", "user")
    assert {name: answer[name] for name in same} == {name: body[name] for name in same}
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (answer["store"], answer["truncation"], answer["tools"]) == (False, "auto", [FLAT])
    assert any("tools of type 'web_search' were left out" in warning for warning in answer["warnings"])


def test_nothing_generated_is_no_item(server: Hosted) -> None:
    body = {"input": "Hello", "max_output_tokens": 0}
    for answer in (server.answer(PATH, body), reassembled(events(server, body))):
        assert (answer["output"], answer["usage"]["output_tokens"]) == ([], 0)


def test_what_llama_server_sends_beside_a_stream(server: Hosted) -> None:
    body = {"input": "abc " * 30, "max_output_tokens": 6, "timings_per_token": True, "return_progress": True}
    found = events(server, body)
    progress = [event for event in found if "prompt_progress" in event]
    assert progress
    assert {event["type"] for event in progress} == {"response.in_progress"}
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert deltas
    assert all("predicted_per_second" in event["timings"] for event in deltas)
    # It ends whatever the reason is like this.
    assert found[-1]["type"] == "response.completed"
    assert found[-1]["response"]["status"] == "incomplete"
    assert found[-1]["timings"] == found[-1]["response"]["timings"]


# OpenAI's client


class Report(BaseModel):
    """What an answer is to be."""

    city: Literal["Paris", "Rome"]
    days: Annotated[int, Field(ge=0, le=9)]


def test_the_client_parses_and_streams(writing: Hosted) -> None:
    with writing.client() as client:
        parsed = client.responses.parse(model=NAME, input="abc", text_format=Report, extra_body=SAMPLED)
        assert isinstance(parsed.output_parsed, Report)
        with client.responses.stream(model=NAME, input="abc", text_format=Report, extra_body=SAMPLED) as stream:
            said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert said == final.output_text == parsed.output_text
        assert final.output_parsed == parsed.output_parsed
        tools: Any = [openai.pydantic_function_tool(Report)["function"] | {"type": "function"}]
        with client.responses.stream(
            model=NAME, input="abc", tools=tools, tool_choice="required", extra_body=SAMPLED
        ) as stream:
            arguments = "".join(
                event.delta for event in stream if event.type == "response.function_call_arguments.delta"
            )
            (call,) = stream.get_final_response().output
        assert call.type == "function_call"
        assert Report.model_validate_json(arguments) == Report.model_validate(call.parsed_arguments)
        counted = client.responses.input_tokens.count(model=NAME, input="abc")
        assert counted.input_tokens == parsed.usage.input_tokens if parsed.usage else False


async def test_the_asynchronous_client_streams(server: Hosted) -> None:
    async with server.async_client() as client:
        whole = await client.responses.create(model=NAME, input="abc", max_output_tokens=9, extra_body=SAMPLED)
        stream = await client.responses.create(
            model=NAME, input="abc", max_output_tokens=9, stream=True, extra_body=SAMPLED
        )
        said = [event async for event in stream]
        assert [event.sequence_number for event in said] == list(range(len(said)))
        deltas = [event.delta for event in said if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text != ""


def test_log_probabilities_are_sent_where_they_are_included(server: Hosted) -> None:
    include: list[Any] = ["message.output_text.logprobs"]
    with server.client() as client:
        asked: dict[str, Any] = {"model": NAME, "input": "abc", "max_output_tokens": 5, "top_logprobs": 2}
        answer = client.responses.create(**asked, include=include, extra_body=SAMPLED)
        (item,) = answer.output
        assert item.type == "message"
        assert item.content[0].type == "output_text"
        listed = item.content[0].logprobs
        assert listed is not None
        assert [len(each.top_logprobs) for each in listed] == [2] * len(listed)
        plain = client.responses.create(**asked, extra_body=SAMPLED)
        assert plain.output_text == answer.output_text
        assert plain.to_dict()["warnings"] == [
            "top_logprobs changed nothing: include does not name message.output_text.logprobs"
        ]
        alone = client.responses.create(**{**asked, "top_logprobs": None}, include=include, extra_body=SAMPLED)
        assert alone.to_dict()["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []
        assert "warnings" not in alone.to_dict()
    found = reassembled(events(server, {**asked, "include": include, **SAMPLED}))
    assert [each["logprob"] for each in found["output"][0]["content"][0]["logprobs"]] == [
        each.logprob for each in listed
    ]


def test_errors_name_the_field_of_the_length_that_this_api_has(server: Hosted) -> None:
    asked = {"input": "abc", "max_output_tokens": 900, "ignore_eos": True, "include": ["message.output_text.logprobs"]}
    with hosted(scripted, ServerOptions(max_answer_logprobs=1000)) as running:
        told = running.refusal(PATH, {**asked, "top_logprobs": 9})["message"]
        assert "set a smaller max_output_tokens" in told
    told = server.refusal(PATH, {"input": "abc", "min_tokens": 9, "max_output_tokens": 5})["message"]
    assert told == "at least 9 tokens of at most 5: lower min_tokens, or raise max_output_tokens"
    told = server.refusal(CHAT, {"messages": [{"role": "user", "content": "a"}], "min_tokens": 9, "n_predict": 5})
    assert told["message"].endswith("or raise n_predict")
    streamed = {"prompt_logprobs": 1, "stream": True}
    assert server.refusal(PATH, {"input": "a", **streamed})["message"].endswith("leave out stream")
    assert server.refusal("/v1/completions", {"prompt": "a", **streamed})["message"].endswith("or send echo")


def test_log_probabilities_of_the_prompt_stand_beside_the_answer(server: Hosted) -> None:
    message = {"role": "user", "content": "abc"}
    chat = server.answer(CHAT, {"messages": [message], "max_tokens": 3, "prompt_logprobs": 2})
    answer = server.answer(PATH, {"input": [message], "max_output_tokens": 3, "prompt_logprobs": 2})
    assert answer["prompt_logprobs"] == chat["prompt_logprobs"]
    assert len(answer["prompt_logprobs"]) == answer["usage"]["input_tokens"]


# Reasoning


def test_reasoning_is_an_item_and_comes_back_in_the_next_request() -> None:
    thought = "{% if message.role == 'assistant' %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    template = CHATML.replace("{{ message.content }}", thought + "{{ message.content }}")
    with thinking(template) as running:
        body = {"input": "2 + 2?", "temperature": 0.0, "max_output_tokens": 400}
        encrypted = {**body, "include": ["reasoning.encrypted_content"]}
        streamed = reassembled(events(running, encrypted))
        for answer in (running.answer(PATH, body), streamed):
            thought, said = answer["output"]
            assert (thought["type"], said["type"], answer["status"]) == ("reasoning", "message", "completed")
            assert set(thought["content"][0]["text"]) == {"h"}
            assert said["content"][0]["text"] == ANSWER
            assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 9
        thought, said = streamed["output"]
        # Codex and Copilot send the text back in this field alone.
        kept = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": thought["encrypted_content"]}
        summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": thought["content"][0]["text"]}]}
        foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABo"}
        prompts = []
        for item in (thought, kept, summed, foreign):
            items = [{"role": "user", "content": "2 + 2?"}, item, said, {"role": "user", "content": "Sure?"}]
            asked = {"input": items, "verbose": True, "max_output_tokens": 1}
            prompts.append(running.answer(PATH, asked)["__verbose"]["prompt"])
        assert prompts[0] == prompts[1] == prompts[2] != prompts[3]
        assert f"<think>{thought['content'][0]['text']}</think>{ANSWER}" in prompts[0]
        assert f"<think></think>{ANSWER}" in prompts[3]


def test_an_answer_that_ends_within_its_reasoning_has_no_message() -> None:
    with hosted(lambda: scripted(target=reasoning(30), template=CHATML + "{# <think></think> #}")) as running:
        body = {"input": "2 + 2?", "temperature": 0.0, "max_output_tokens": 10}
        for answer in (running.answer(PATH, body), reassembled(events(running, body))):
            (thought,) = answer["output"]
            assert (thought["type"], thought["status"], answer["status"]) == ("reasoning", "incomplete", "incomplete")


# Tools


def test_calls_are_items(calling: Hosted) -> None:
    body = {"input": "abc", "tools": [FLAT, NOW], "temperature": 0.0, "max_output_tokens": 600}
    for answer in (calling.answer(PATH, body), reassembled(events(calling, body))):
        said, *calls = answer["output"]
        assert output_text(answer) == said["content"][0]["text"] == "Let me see."
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLED
        assert [call["id"][:3] for call in calls] == ["fc_", "fc_"]
        assert len({call["call_id"] for call in calls}) == 2
        assert answer["status"] == "completed"


def test_tools_of_other_kinds_are_called_as_they_were_sent() -> None:
    said = (
        '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n\\"x\\""}}\n</tool_call>\n'
        '<tool_call>\n{"name": "mcp__a__weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
    )
    tools = [
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
        {"type": "namespace", "name": "mcp__a__", "description": "", "tools": [FLAT]},
        {"type": "local_shell"},
    ]
    with hosted(lambda: scripted(TEMPLATE, target=saying(said))) as running:
        body = {"input": "abc", "tools": tools, "temperature": 0.0, "max_output_tokens": 600, "verbose": True}
        answer = running.answer(PATH, body)
        streamed = reassembled(events(running, body))
        for patch, weather in (answer["output"], streamed["output"]):
            assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", '*** Begin\n"x"')
            assert (weather["name"], weather["namespace"]) == ("weather", "mcp__a__")
        assert "start: /x/" in answer["__verbose"]["prompt"]
        assert answer["warnings"] == ["tools of type 'local_shell' were left out: the model calls functions alone"]
        # What is asked for, and what was said before, is in the model's names.
        forced = {"tool_choice": {"type": "function", "name": "weather", "namespace": "mcp__a__"}, **body}
        assert [call["name"] for call in running.answer(PATH, forced)["output"]] == ["weather"]
        for call in answer["output"]:
            allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]}
            items = [
                {"role": "user", "content": "abc"},
                call,
                {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "done"},
            ]
            calls = read_items(input=items, tools=tools, tool_choice=allowed)
            (function,) = calls.messages[1]["tool_calls"]
            assert function["function"]["name"] in ("patch", "mcp__a__weather")
            assert json.loads(function["function"]["arguments"]) in ({"input": '*** Begin\n"x"'}, CALLED[0][1])
            assert calls.given["tool_choice"]["tools"] == [{"type": "function", "name": "patch"}]


def test_items_come_to_the_messages_of_a_chat() -> None:
    text: dict[str, Any] = {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [text]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"x": 1}'},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": []},
        {"type": "message", "role": "developer", "content": "Be brief."},
    ]
    read = read_items(instructions="I", input=items)

    def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert read.messages == [
        {"role": "system", "content": "I"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Let me see.",
            "tool_calls": [call("c1", "f", "{}"), call("c2", "g", '{"x": 1}')],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": "No."},
        {"role": "developer", "content": "Be brief."},
    ]
    assert read.warnings == ("input[5] was left out: this server has no items of type web_search_call",)


# What is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": "mesage"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
        ({"top_logprobs": 5000, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"truncation": "some"}, "truncation"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "hiccup"}}}}, "text.format"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}}, "text.format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}, "tools": [FLAT]}, "tool_choice"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(server: Hosted, fields: dict[str, Any], param: str) -> None:
    response = server.post(PATH, {"input": "abc", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param in error["message"] or "hiccup" in error["message"]
    # By this word Copilot knows to send the conversation.
    is_id = param == "previous_response_id"
    assert error["code"] == ("previous_response_not_found" if is_id else 400)


def test_the_oldest_turns_are_left_out_where_truncation_is_auto(server: Hosted) -> None:
    turns = [
        item
        for number in range(server.host.served.context_length // 20)
        for item in ({"role": "user", "content": f"{number} " * 9}, {"role": "assistant", "content": "ok"})
    ]
    body = {"input": [*turns, {"role": "user", "content": "last"}], "max_output_tokens": 4, "verbose": True}
    assert server.refusal(PATH, body)["type"] == "exceed_context_size_error"
    prompt = server.answer(PATH, {**body, "truncation": "auto"})["__verbose"]["prompt"]
    assert "last" in prompt
    assert " 0 0 0" not in prompt.replace("<|im_start|>user\n", " ")


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
def test_nothing_is_stored(server: Hosted, method: str) -> None:
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/cancel"):
        response = server.web.request(method, server.url + path)
        assert response.status_code == (405 if method == "DELETE" else 404)
        assert method == "DELETE" or "nothing is stored" in response.json()["error"]["message"]


# Events, of any answer


@st.composite
def answers(draw: st.DrawFn, *, logprobs: bool) -> list[TokenEvent]:
    """Draw what tokens bring: texts of both kinds in any order, and calls, whose arguments come at once or not."""
    found: list[TokenEvent] = []
    num_calls = 0
    for number in range(draw(st.integers(0, 14))):
        parts: list[Any] = []
        for _ in range(draw(st.integers(0, 2))):
            kind = draw(st.sampled_from(["content", "content", "content", "reasoning", "call"]))
            if kind == "call":
                name = draw(st.sampled_from(["f", "patch", "ns__g", "unknown"]))
                parts.append(CallStarted(num_calls, f"call_{num_calls}", name))
                texts = draw(st.sampled_from([[], ["{}"], ['{"input": ', '"a"}'], ["not JSON"], ['{"input": 5}']]))
                parts += [ArgumentsDelta(num_calls, text) for text in texts]
                num_calls += 1
            else:
                parts.append(AnswerPart(kind, TextSegment(draw(TEXTS), "target")))  # type: ignore[arg-type]
        of_tokens = draw(st.lists(LOGPROBS, min_size=1, max_size=2)) if logprobs else ()
        found.append(TokenEvent(parts, [number], of_tokens, number))
    return found


def a_formatter(
    assembler: AnswerAssembler, request: GenerationRequest, served: Any, *, is_cut_off: bool = False
) -> tuple[Any, Any]:
    stats = RequestStats(cached_tokens=2, prompt_tokens=5, predicted_tokens=3)
    stream = SimpleNamespace(
        request=SimpleNamespace(stats=stats),
        params=SamplingParams(),
        rules=StopRules(9),
        speculation=SpeculationParams(),
    )
    choice: Any = SimpleNamespace(
        number=0, stream=stream, stats=stats, num_prompt=7, cached=2, is_cut_off=is_cut_off, assembler=assembler
    )
    answer: Any = SimpleNamespace(id="resp_a", created=1, choices=[choice], request=request, served=served)
    return ResponsesFormatter(answer), choice


def test_the_events_of_any_answer_come_to_it() -> None:
    seen = {"framed": 0, "items": 0, "calls": 0}
    tools = [
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "ns", "description": "", "tools": [{**NOW, "name": "g"}]},
    ]
    made = scripted(drafts=False)

    @settings(max_examples=by_tier(200, quick=30), deadline=None, database=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        num_logprobs = data.draw(st.sampled_from([None, None, 2]))
        include = data.draw(st.sampled_from([[], ["reasoning.encrypted_content"]]))
        request = GenerationRequest(
            "responses",
            read_options({}),
            num_logprobs=num_logprobs,
            stream=True,
            timings_per_token=data.draw(st.integers(0, 9)) == 9,
            conversation=read_items(input="a", tools=tools, include=include),
        )
        said = data.draw(answers(logprobs=num_logprobs is not None))
        assembler = AnswerAssembler(None, keeps=True)
        quick, choice = a_formatter(assembler, request, made)
        slow, _ = a_formatter(assembler, request, made)
        framed = quick._framed

        def noted(choice: Any, event: TokenEvent) -> bytes | None:
            written: bytes | None = framed(choice, event)
            seen["framed"] += written is not None
            return written

        quick._framed = noted
        written = quick.as_events(quick.opening())
        assert written == slow.as_events(slow.opening())
        choice.is_cut_off = data.draw(st.booleans())
        start = 0
        while start <= len(said):
            # A round has several tokens, and the assembler has all of them before one is written.
            end = start + data.draw(st.integers(1, 4))
            events: list[Event] = list(said[start:end])
            for event in said[start:end]:
                assembler._unsent_logprobs = list(event.logprobs)
                assembler._keep([], event.parts)
            if data.draw(st.integers(0, 6)) == 6:
                events.append(Progress(3, 1.5))
            if end > len(said):
                events.append(Ended())
            found = quick.written(choice, events)
            assert found == as_events([one for event in events for one in slow.chunks(choice, event)], named=True)
            written += found
            start = end
        response = reassembled(read_events(written))
        whole = {
            **a_formatter(assembler, request, made, is_cut_off=choice.is_cut_off)[0].whole(),
            "completed_at": response.get("completed_at"),
        }
        expected = httpx.Response(200, content=as_events([whole]).removeprefix(b"data: ")).json()
        assert {**response, "completed_at": response.get("completed_at")} == expected
        Response.model_validate(response)
        assert response["status"] == ("incomplete" if choice.is_cut_off else "completed")
        assert {item["status"] for item in response["output"][:-1]} <= {"completed"}
        assert whole_text(output_text(response)) == whole_text(assembler.message["content"] or "")
        seen["items"] += len(response["output"])
        seen["calls"] += sum(item["type"].endswith("call") for item in response["output"])

    with made.model:
        check()
    assert min(seen.values()) >= by_tier(100, quick=12), seen


def test_an_error_in_a_stream_is_told_twice() -> None:
    # OpenAI's API has an event of the error, and one of the response that it ended.
    conversation = read_items(input="a")
    request = GenerationRequest("responses", read_options({}), stream=True, conversation=conversation)
    made = scripted(drafts=False)
    with made.model:
        assembler = AnswerAssembler(None, keeps=True)
        formatter, choice = a_formatter(assembler, request, made)
        part = AnswerPart("content", TextSegment("abc", "target"))
        assembler._keep([], [part])
        written = formatter.as_events(formatter.opening())
        written += formatter.written(choice, [TokenEvent([part], [1], (), 1)])
        written += formatter.as_events(formatter.failed(RuntimeError("a secret")))
    *_, error, failed = read_events(written)
    assert (error["type"], error["code"]) == ("error", "server_error")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert output_text(failed["response"]) == "abc"
    assert b"secret" not in written
