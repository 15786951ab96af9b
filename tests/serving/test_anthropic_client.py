"""Anthropic's own client, which checks every answer against Anthropic's types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import anthropic
import pytest
from anthropic import beta_tool
from pydantic import BaseModel

from paceline.core.arrays import Float64Array
from paceline.server_options import ServerOptions
from paceline.serving.conversations import encrypt_reasoning
from tests.chat.conversing import BEGUN
from tests.serving.calling import TEMPLATE, saying
from tests.serving.hosted import NAME, Hosted, hosted, scripted
from tests.serving.messages import said, streamed
from tests.serving.reasoning import ANSWER, thinking
from tests.serving.scripted import Turnstile, writing_model

PATH: Final = "/v1/messages"
ASKED: Final[dict[str, Any]] = {
    "model": NAME,
    "max_tokens": 60,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "Hello"}],
    "extra_body": {"seed": 1},
}
CHAT: Final[list[dict[str, Any]]] = [{"role": "system", "content": "Be brief."}, *ASKED["messages"]]
WEATHER: Final[Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL: Final = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REPORT: Final = "22 degrees"


def agent(tokens: Sequence[int]) -> Float64Array:
    """A model that asks for the weather, and says it once it has been told."""
    knows = REPORT.encode() in bytes(token for token in tokens if token < 256)
    return saying(f"It has {REPORT[:2]}." if knows else f"Let me see.\n{CALL}")(tokens)


@pytest.fixture
def client(server: Hosted) -> Iterator[anthropic.Anthropic]:
    with server.anthropic_client() as made:
        yield made


def test_a_message(server: Hosted, client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**ASKED)
    (choice,) = server.answer("/v1/chat/completions", {"messages": CHAT, "max_tokens": 60, "seed": 1})["choices"]
    assert said(answer) == [{"type": "text", "text": choice["message"]["content"]}]
    assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("max_tokens", None, NAME)
    assert answer.id.startswith("msg_")
    assert answer._request_id
    assert answer.usage.output_tokens == 60
    again = client.messages.create(**ASKED)
    assert again.usage.cache_read_input_tokens
    # Whoever asked the server before may have had it read some of this.
    prompt = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == prompt
    whole = streamed(client, **ASKED)
    assert said(whole) == said(answer)
    assert (whole.stop_reason, whole.usage.to_dict()) == ("max_tokens", again.usage.to_dict())


def test_tokens_are_counted_as_a_message_takes_them(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {name: ASKED[name] for name in ("model", "system", "messages")}
    asked |= {"tools": [WEATHER], "thinking": {"type": "adaptive"}}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_length_of_none_reads_the_prompt_alone(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**{**ASKED, "max_tokens": 0})
    assert (answer.content, answer.stop_reason, answer.usage.output_tokens) == ([], "max_tokens", 0)


async def test_asyncio(server: Hosted) -> None:
    async with server.async_anthropic_client() as client:
        answer = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            texts = [text async for text in stream.text_stream]
            message = await stream.get_final_message()
        assert said(message) == said(answer)
        assert len(texts) > 9
        assert said(answer) == [{"type": "text", "text": "".join(texts)}]
        assert [model.id async for model in client.models.list()] == [NAME]


def test_why_an_answer_ended(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**ASKED).content[0].to_dict()["text"]
    stop = text[20:22]
    for way in (client.messages.create, lambda **asked: streamed(client, **asked)):
        # Another route's name for them is taken beside.
        answer = way(**{**ASKED, "extra_body": {**ASKED["extra_body"], "stop": stop}}, stop_sequences=["never"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
        answer = way(**ASKED, stop_sequences=["never", stop])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
        assert answer.content[0].text == text[: text.index(stop)]
    with hosted(lambda: scripted(target=saying("Done."))) as server, server.anthropic_client() as other:
        assert other.messages.create(**ASKED).stop_reason == "end_turn"
    with hosted(lambda: scripted(context_length=64)) as server, server.anthropic_client() as other:
        assert other.messages.create(**{**ASKED, "max_tokens": 500}).stop_reason == "model_context_window_exceeded"


def test_an_answer_goes_on_with_what_an_assistant_began(server: Hosted, client: anthropic.Anthropic) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": [{"type": "text", "text": "abc"}]}]
    answer = client.messages.create(**{**ASKED, "messages": messages})
    prompt = f"{CHATML_BEGUN}abc"
    completed = server.answer("/completion", {"prompt": prompt, "n_predict": 60, "seed": 1})
    assert said(answer) == [{"type": "text", "text": completed["content"]}]


CHATML_BEGUN: Final = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
)


def test_thinking() -> None:
    with thinking() as server, server.anthropic_client() as client:
        lengths: set[int] = set()
        asked: dict[str, Any] = {"model": NAME, "max_tokens": 400, "messages": ASKED["messages"]}
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        answer = client.messages.create(**asked)
        assert said(answer) == [
            {"type": "thinking", "thinking": "h" * 20, "signature": ""},
            {"type": "text", "text": ANSWER},
        ]
        assert said(streamed(client, **asked)) == said(answer)
        assert answer.usage.output_tokens_details is not None
        assert answer.usage.output_tokens_details.thinking_tokens == pytest.approx(21, abs=1)
        short = client.messages.create(**{**asked, "thinking": {"type": "enabled", "budget_tokens": 5}})
        assert short.content[0].to_dict()["thinking"] == "h" * 5
        # Reasoning that is not shown goes with its signature, and comes back as what it was.
        asked["thinking"] = {"type": "adaptive", "display": "omitted"}
        hidden = client.messages.create(**asked)
        signature = encrypt_reasoning("h" * 20)
        assert said(hidden) == [
            {"type": "thinking", "thinking": "", "signature": signature},
            {"type": "text", "text": ANSWER},
        ]
        with client.messages.stream(**asked) as stream:
            deltas = [event.delta.type for event in stream if event.type == "content_block_delta"]
            assert deltas[0] == "signature_delta"
            assert set(deltas[1:]) == {"text_delta"}
            assert said(stream.get_final_message()) == said(hidden)
        question = {"role": "user", "content": "And?"}
        for thought in ({"thinking": "", "signature": signature}, {"thinking": "h" * 20, "signature": ""}):
            turn = {"role": "assistant", "content": [{"type": "thinking", **thought}, {"type": "text", "text": ANSWER}]}
            talk: Any = [*ASKED["messages"], turn, question]
            counted = client.messages.count_tokens(model=NAME, messages=talk)
            lengths.add(counted.input_tokens)
        assert len(lengths) == 1
    # A template that begins to reason where nobody says otherwise.
    with thinking(BEGUN) as server, server.anthropic_client() as client:
        off = client.messages.create(**{**asked, "thinking": {"type": "disabled"}})
        assert said(off) == [{"type": "text", "text": ANSWER}]


def test_a_tool_is_called_and_its_result_read() -> None:
    @beta_tool
    def weather(city: str) -> str:
        """Return the weather of a city."""
        assert city == "Rome"
        return REPORT

    asked: dict[str, Any] = {"model": NAME, "max_tokens": 200, "messages": ASKED["messages"]}
    asked["extra_body"] = {"temperature": 0}
    with (
        hosted(lambda: scripted(TEMPLATE, target=agent, drafts=False)) as server,
        server.anthropic_client() as client,
    ):
        for way in (client.messages.create, lambda **asked: streamed(client, **asked)):
            answer = way(**asked, tools=[WEATHER])
            assert said(answer) == [
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "", "name": "weather", "input": {"city": "Rome"}},
            ]
            assert answer.stop_reason == "tool_use"
        for stream in (False, True):
            runner: Any = client.beta.messages.tool_runner(**asked, tools=[weather], stream=stream)
            last = runner.until_done()
            assert [block.to_dict() for block in last.content] == [{"type": "text", "text": "It has 22."}]
        refused = client.messages.create(**asked, tools=[WEATHER], tool_choice={"type": "none"})
        assert refused.stop_reason == "end_turn"
        assert CALL in refused.content[0].to_dict()["text"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_has_to_be_called(writing: Hosted, choice: Any) -> None:
    tool: Any = {**WEATHER, "input_schema": {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}}}
    with writing.anthropic_client() as client:
        answer = client.messages.create(**{**ASKED, "max_tokens": 600}, tools=[tool], tool_choice=choice)
        (block,) = answer.content
        assert block.type == answer.stop_reason == "tool_use"
        assert block.name == "weather"


class Pick(BaseModel):
    letter: Literal["a", "b"]
    sure: bool


def test_an_answer_of_a_schema(writing: Hosted) -> None:
    with writing.anthropic_client() as client:
        answer = client.messages.parse(**{**ASKED, "max_tokens": 600}, output_format=Pick)
        assert isinstance(answer.parsed_output, Pick)
        older = client.beta.messages.create(
            **{**ASKED, "max_tokens": 600, "extra_body": {"output_format": {"type": "json_schema", "schema": {}}}},
            betas=["structured-outputs-2025-11-13"],
        )
        json.loads(older.content[0].to_dict()["text"])


def test_the_model(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.max_input_tokens) == (NAME, 4096)
    assert client.models.retrieve(NAME) == model
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'other' here"):
        client.models.retrieve("other")


FORM: Final = {"type": "json_schema", "schema": {"type": "string"}}


def error_of(raised: pytest.ExceptionInfo[anthropic.APIStatusError]) -> tuple[str, str]:
    """Return the type of an error and the field that it names."""
    body: Any = raised.value.body
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == raised.value.response.headers["request-id"]
    assert raised.value.type == body["error"]["type"]
    return body["error"]["type"], body["error"].get("param", "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": 5}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [str(number) for number in range(99)]}, "stop_sequences"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "hiccup"}}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema", "schema": {"type": "hiccup"}}}, "output_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tool_choice": {"type": "tool", "name": "weather"}}, "tool_choice"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools"),
        ({"mcp_servers": [{"type": "url", "url": "http://127.0.0.1", "name": "a"}]}, "mcp_servers"),
        ({"stop": ["a"] * 60, "stop_sequences": ["b"] * 5}, "stop_sequences"),
        ({"response_format": {"type": "json_object"}, "output_format": FORM}, "output_format"),
        ({"output_config": {"format": FORM}, "output_format": FORM}, "output_config.format"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"min_tokens": 70}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"n_probs": 2}, "n_probs"),
        ({"logprobs": 2}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(
    client: anthropic.Anthropic, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**{**ASKED, "extra_body": fields})
    assert error_of(raised) == ("invalid_request_error", param)


def test_errors_before_and_behind_the_routes() -> None:
    options = ServerOptions(api_key=("secret",), max_body=1, strict_fields=True)
    with hosted(lambda: scripted(context_length=64), options) as server:
        with server.anthropic_client(api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                client.messages.create(**ASKED)
            assert error_of(unknown) == ("authentication_error", "")
        for key in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            with server.anthropic_client(**key) as client:
                assert client.messages.create(**{**ASKED, "max_tokens": 3}).usage.output_tokens == 3
        with server.anthropic_client(api_key="secret") as client:
            with pytest.raises(anthropic.RequestTooLargeError) as large:
                client.messages.create(**{**ASKED, "system": "a" * (1 << 20)})
            assert error_of(large) == ("request_too_large", "")
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 64 maximum"):
                client.messages.create(**{**ASKED, "system": "a" * 100})
            with pytest.raises(anthropic.NotFoundError) as missing:
                client.messages.batches.list()
            assert error_of(missing) == ("not_found_error", "")
            with pytest.raises(anthropic.BadRequestError) as strict:
                client.messages.create(**{**ASKED, "extra_body": {"never_heard_of": 1}})
            assert error_of(strict) == ("invalid_request_error", "never_heard_of")
        refused = server.web.post(server.url + PATH, content=b"{", headers={"x-api-key": "secret"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_an_error_in_a_stream_ends_it() -> None:
    turnstile = Turnstile(writing_model())
    with hosted(lambda: scripted(target=turnstile, drafts=False)) as server, server.anthropic_client() as client:
        turnstile.let(ROWS)

        def read() -> None:
            for event in client.messages.create(**ASKED, stream=True):
                if event.type == "content_block_delta":
                    server.server.end_answers()
                    turnstile.open()

        with pytest.raises(anthropic.APIStatusError) as raised:
            read()
        error: Any = raised.value.body
        assert error["error"]["type"] == "overloaded_error"


ROWS: Final = 200


def test_a_silent_stream_is_kept_alive_by_pings() -> None:
    turnstile = Turnstile(writing_model())
    with hosted(lambda: scripted(target=turnstile, drafts=False)) as server:
        body = {**ASKED, "stream": True, "sse_ping_interval": 1}
        body |= body.pop("extra_body")
        with server.web.stream("POST", server.url + PATH, json=body) as response:
            lines = response.iter_lines()
            events = [next(line for line in lines if line.startswith("event: ")) for _ in range(3)]
            turnstile.open()
            rest = [line for line in lines if line.startswith("event: ")]
    # The second stands behind the beginning always.
    assert events == ["event: message_start", "event: ping", "event: ping"]
    assert rest[-1] == "event: message_stop"


def test_what_is_told_beside_an_answer(server: Hosted) -> None:
    body: dict[str, Any] = {"messages": ASKED["messages"], "max_tokens": 9, "seed": 1, "never_heard_of": 1}
    answer = server.answer(PATH, body)
    assert answer["warnings"] == ["unknown field 'never_heard_of' was ignored"]
    assert {"speculative", "metrics"} < set(answer)
    assert "timings" not in answer
    timed = server.chunks(PATH, {**body, "timings_per_token": True, "return_progress": True, "return_rounds": True})
    beside = [chunk for chunk in timed if {"timings", "prompt_progress", "round"} & set(chunk)]
    assert {chunk["type"] for chunk in beside} == {"ping", "message_delta"}
    assert sum("timings" in chunk for chunk in beside) > 3
    assert sum("prompt_progress" in chunk for chunk in beside) > 0
    assert sum("round" in chunk for chunk in beside) > 0
