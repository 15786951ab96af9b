"""Servers to ask over a socket: uvicorn in a thread, in front of a scripted model or of the embedded pair."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anthropic
import httpx
import openai

import paceline
from paceline.chat.params import ChatParams
from paceline.chat.template_sources import find_template
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.server_options import ServerOptions
from paceline.serving.answering import Answer
from paceline.serving.app import create_app
from paceline.serving.deployment import bind, server_url
from paceline.serving.model_host import ModelHost, Served, ServedModel
from paceline.serving.security import SecuritySettings
from paceline.serving.server import Server
from tests.chat.conversing import CHATML
from tests.serving.processes import poll
from tests.serving.scripted import scripted_model
from tests.serving.starting import in_thread
from tests.timing import WAIT_S

NAME: Final = "scripted"
"""Of scripted models."""

STRICT: Final[dict[str, Any]] = {
    "api_key": "none",
    "max_retries": 0,
    "timeout": WAIT_S,
    "_strict_response_validation": True,
}
"""Options of OpenAI's and Anthropic's own clients: each answer is checked, and nothing is asked again."""


@dataclass
class Hosted:
    """A server that runs, and what is behind it.

    Attributes:
        url: where it is, without ``/v1``.
        server: answers.
        host: has the model.
        taken: set whenever the engine is asked for an answer.
        over: set whenever nobody waits for an answer any more; the engine may be at work on it still.
        web: asks it.
    """

    url: str
    server: Server
    host: ModelHost
    taken: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    web: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=WAIT_S))

    @property
    def model(self) -> paceline.Model:
        return self.host.served.model

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def sequences(self) -> int:
        """Sequences and waiting requests that the engine has, told between two rounds."""
        return self.model.worker.call(lambda: len(self.model.loop.active))

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return self.web.post(self.url + path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.web.get(self.url + path, **options)

    def answer(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        """Return the JSON of an answer that is there to be had."""
        response = self.post(path, body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
        """Return the error of a request that is refused."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        assert error["code"] == status
        assert "\n" not in error["message"]
        return error

    def wait_for_nothing(self) -> None:
        """Wait until the engine has nothing left of any answer."""
        poll(lambda: not (self.server.board.answers or self.sequences))

    def chunks(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the JSON of all events of a stream; ``[DONE]`` is checked and left out."""
        events = events_of(self.post(path, {**body, "stream": True}))
        if path not in ("/completion", "/completions", "/v1/messages", "/v1/responses"):
            assert events.pop() == "[DONE]"
        return [json_of(event) for event in events]

    def anthropic_client(self, **options: Any) -> anthropic.Anthropic:
        """Return Anthropic's own client, as strict; to be closed."""
        return anthropic.Anthropic(base_url=self.url, **{**STRICT, **options})

    def async_anthropic_client(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, **{**STRICT, **options})

    def client(self, **options: Any) -> openai.OpenAI:
        """Return OpenAI's own client, as strict; to be closed."""
        return openai.OpenAI(base_url=f"{self.url}/v1", **{**STRICT, **options})

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **{**STRICT, **options})


def events_of(response: httpx.Response) -> list[str]:
    """Return what a stream of server-sent events says; a name is the type that an event has."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event for event in response.text.split("\n\n") if event and not event.startswith(":")]
    named = [event.partition("\n") if event.startswith("event: ") else ("", "", event) for event in events]
    for name, _, data in named:
        assert data.startswith("data: ")
        assert not name or json_of(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    return [data.removeprefix("data: ") for _, _, data in named]


def json_of(event: str) -> Any:
    return httpx.Response(200, text=event).json()


@contextmanager
def hosted(load: Callable[[], Served], options: ServerOptions | None = None, *, wait: bool = True) -> Iterator[Hosted]:
    """Serve a model on a free port of the loopback; everything is ended and freed afterwards.

    Args:
        load: loads the model, in a thread of its own.
        options: of the server.
        wait: until the model is there.
    """
    options = options or ServerOptions()
    server: Server
    running: Hosted
    ready = threading.Event()

    def on_ready(served: Served) -> None:
        server.ready(served)
        if isinstance(served, ServedModel):
            _note_answers(running)
        ready.set()

    host = ModelHost(lambda report: load(), on_ready=on_ready)
    server = Server(host, options)
    security = SecuritySettings.from_options(options)
    (listener,) = bind(["127.0.0.1"], 0)
    running = Hosted(server_url(listener, has_tls=options.has_tls, prefix=options.prefix), server, host)

    @asynccontextmanager
    async def loading_beside() -> AsyncIterator[None]:
        loading = asyncio.create_task(host.load())
        yield
        await loading
        await host.close()

    with in_thread(create_app(server, security), security, listener, loading_beside):
        try:
            if wait:
                assert ready.wait(WAIT_S)
            yield running
        finally:
            running.web.close()
            host.stop_taking()
            server.end_answers()


def _note_answers(running: Hosted) -> None:
    """Have what the server notes of answers set the events."""
    server, board = running.server, running.server.board
    add, over = board.add, server._over

    def note_taken(answer: Answer) -> None:
        add(answer)
        running.taken.set()

    def note_over(answer: Answer) -> None:
        over(answer)
        running.over.set()

    board.add, server._over = note_taken, note_over  # type: ignore[method-assign]


def scripted(template: str = CHATML, names: Sequence[str] = (NAME,), **model: Any) -> ServedModel:
    """Return a scripted model that is ready to be served; ``model`` as for :func:`scripted_model`."""
    return chatting(scripted_model(**model), template, names)


def chatting(model: paceline.Model, template: str = CHATML, names: Sequence[str] = (NAME,)) -> ServedModel:
    """Return a model that answers conversations as a template writes them."""
    chat = ChatParams(template=template, forget=False)
    found = find_template(embedded_draft(), model.target.vocabulary, replaced_by=template)
    policy = "fixed" if model.drafters else "plain"
    return ServedModel(model, None, tuple(sorted(names)), policy=policy, template=found, chat=chat)


def pair(template: str = CHATML, **options: Any) -> ServedModel:
    """Return the embedded pair, which drafts whether that pays or not; ``options`` as for both models."""
    target = embedded_target()
    # Which attention is faster is measured where that is not said.
    settings: dict[str, Any] = {"context_length": 512, "max_sequences": 4, "flash_attention": False, **options}
    model = paceline.load(
        paceline.ModelOptions(target, **settings),
        draft=paceline.ModelOptions(embedded_draft(), **settings),
        policy=paceline.FixedPolicy(4),
    )
    chat = ChatParams(template=template, forget=False)
    found = find_template(target, model.target.vocabulary, replaced_by=template)
    return ServedModel(model, describe(target), (target.stem,), policy="fixed", template=found, chat=chat)
