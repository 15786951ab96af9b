"""One request of a client: what is sent, when what came back came, and what it says.

There are two readers of streams, llama-server's ``/completion`` and OpenAI's. While a stream is read nothing is parsed:
the times of its events are noted, and how many began in what came.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import httpx

from paceline.core.stats import percentile

PERCENTILES: Final = (0.5, 0.95, 0.99)
_EVENT: Final = b"\ndata:"
"""Begins an event. Inside of JSON there is no line's end."""
_DONE: Final = b"[DONE]"
_LONGEST_SHOWN: Final = 500
SILENT_S: Final = 600.0
"""Seconds of silence after which a request is lost."""

Event: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class Reply:
    """What a client read.

    Attributes:
        sent_s: when the request was sent; all times are of one clock.
        due_s: when it was to be sent.
        arrivals: when events came that bring text, and how many of them at once. While a stream is read they are all
            events.
        text: the answer.
        tokens: of the answer, as the server counts them.
        prompt_tokens: of the prompt, as the server counts them.
        cached_tokens: those of them that the server had read before; None where it does not say.
        status: of HTTP; 0 without an answer.
        errors: why the request was lost; more than one where the server says so more than once.
        last: the last event.
    """

    sent_s: float = 0.0
    due_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    status: int = 0
    errors: list[str] = field(default_factory=list)
    last: Event = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """Whether the server began to answer as it was asked to."""
        return 200 <= self.status < 300

    @property
    def first_s(self) -> float:
        return self.arrivals[0][0] - self.sent_s

    @property
    def stream_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between arrivals: what comes at once has no gap inside."""
        return [later - earlier for (earlier, _), (later, _) in itertools.pairwise(self.arrivals)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the middle of values and what few of them exceed, by names such as ``p95``."""
    return {f"p{100 * share:.0f}": percentile(values, share) for share in PERCENTILES}


@dataclass(frozen=True, slots=True)
class Api:
    """A way to ask a server for a stream.

    Attributes:
        path: of the request.
        asks: makes fields of its body: a prompt, and the most tokens of an answer.
        note: takes all events of a stream and fills a reply. It returns which of them brought text.
        ends: tells the last event of a whole stream; None where ``[DONE]`` follows it.
    """

    path: str
    asks: Callable[[str, int], dict[str, Any]]
    note: Callable[[Reply, Sequence[Event]], list[bool]]
    ends: Callable[[Event], bool] | None = None

    def read(self, reply: Reply, said: bytes) -> None:
        """Fill a reply with what the server said."""
        if not reply.begun:
            if reply.status:
                reply.errors.append(f"status {reply.status}: {_refusal(said)}")
            return
        lines = [line.removeprefix(b"data:").strip() for line in said.split(b"\n") if line.startswith(b"data:")]
        try:
            events: list[Event] = [json.loads(line) for line in lines if line != _DONE]
            brings = self.note(reply, events)
            reply.errors += [_message(event["error"]) for event in events if event.get("error")]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reply.errors.append(f"no event of a stream of {self.path} ({error!r}): {_shown(said)}")
            return
        over = _DONE in lines if self.ends is None else bool(events) and self.ends(events[-1])
        if not over and not reply.errors:
            reply.errors.append(f"the stream stopped before its end: {_shown(said)}")
        marks = iter(brings)
        counted = [(at_s, sum(itertools.islice(marks, count))) for at_s, count in reply.arrivals]
        reply.arrivals = [(at_s, count) for at_s, count in counted if count]
        reply.last = events[-1] if events else {}


async def ask(web: httpx.AsyncClient, url: str, body: Mapping[str, Any], reply: Reply) -> bytes:
    """Send a request, note in a reply when events come, and return all that was said.

    What comes to nothing is an error of the reply, and nothing is raised.

    Args:
        web: sends it. A compressed stream would not be understood: let it ask for none.
        url: of the request.
        body: of the request.
        reply: is filled while events come, but for what they say.
    """
    said, tail = list[bytes](), b"\n"
    reply.sent_s = time.perf_counter()
    try:
        async with web.stream("POST", url, json=body) as response:
            reply.status = response.status_code
            async for data in response.aiter_raw():
                now_s = time.perf_counter()
                said.append(data)
                seen = tail + data
                if count := seen.count(_EVENT):
                    reply.arrivals.append((now_s, count))
                tail = seen[1 - len(_EVENT) :]
    except httpx.HTTPError as error:
        reply.errors.append(f"{type(error).__name__}: {error}".removesuffix(": "))
    return b"".join(said)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what comes of it.

    Attributes:
        server: the address that the API's path is added to.
        body: of the request.
        due_s: when it is sent, in seconds after the first could be.
        reply: is filled while it is answered.
    """

    server: str
    body: Mapping[str, Any]
    due_s: float = 0.0
    reply: Reply = field(default_factory=Reply)


async def ask_all(
    api: Api,
    requests: Sequence[Asked],
    *,
    clients: int | None = None,
    silent_s: float = SILENT_S,
    key: str = "",
    when_over: Callable[[Reply], object] = lambda _: None,
) -> float:
    """Send requests when they are due, and fill their replies; return the seconds until the last was over.

    Args:
        api: of all of them.
        requests: what is asked.
        clients: requests that are answered at once; further ones wait here. None has none wait.
        silent_s: seconds without a byte after which a request is lost.
        key: of the servers; empty sends none.
        when_over: is called with each reply, in the order in which they end.
    """
    free = asyncio.Semaphore(clients) if clients else contextlib.nullcontext()
    async with client(silent_s, key) as web:
        began_s = time.perf_counter()

        async def one(each: Asked) -> None:
            each.reply.due_s = began_s + each.due_s
            await asyncio.sleep(each.reply.due_s - time.perf_counter())
            async with free:
                said = await ask(web, each.server + api.path, each.body, each.reply)
            api.read(each.reply, said)
            when_over(each.reply)

        await asyncio.gather(*map(one, requests))
        return time.perf_counter() - began_s


def client(silent_s: float = SILENT_S, key: str = "") -> httpx.AsyncClient:
    """Return what asks. Each request has a connection of its own, as users have."""
    headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(headers=headers, limits=limits, timeout=silent_s, trust_env=False)


def _note_llama(reply: Reply, events: Sequence[Event]) -> list[bool]:
    reply.text = "".join(event.get("content", "") for event in events)
    if events and (last := events[-1]).get("stop"):
        reply.tokens = last["tokens_predicted"]
        if "timings" in last:
            read, reply.cached_tokens = last["timings"]["prompt_n"], last["timings"].get("cache_n")
            reply.prompt_tokens = read + (reply.cached_tokens or 0)
    # The last event brings no token. Others do, whatever they say: of a letter that takes two, the first says nothing.
    return ["content" in event and not event.get("stop") for event in events]


def _note_openai(reply: Reply, events: Sequence[Event]) -> list[bool]:
    parts = ["".join(map(_part, event.get("choices", ()))) for event in events]
    reply.text = "".join(parts)
    brings = list(map(bool, parts))
    reply.tokens = sum(brings)
    for event in events:
        if usage := event.get("usage"):
            reply.tokens, reply.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
            reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return brings


def _part(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice of an event, reasoning included."""
    delta = choice.get("delta") or choice
    return "".join(delta.get(name) or "" for name in ("reasoning_content", "reasoning", "content", "text"))


def _openai(path: str, prompt: Callable[[str], dict[str, Any]]) -> Api:
    def asks(text: str, tokens: int) -> dict[str, Any]:
        return {**prompt(text), "max_tokens": tokens, "stream_options": {"include_usage": True}}

    return Api(path, asks, _note_openai)


LLAMA: Final = Api(
    "/completion",
    lambda text, tokens: {"prompt": text, "n_predict": tokens},
    _note_llama,
    lambda event: bool(event.get("stop")),
)
APIS: Final[Mapping[str, Api]] = {
    "completions": _openai("/v1/completions", lambda text: {"prompt": text}),
    "chat": _openai("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    "llama": LLAMA,
}
"""OpenAI's completions and chats, and llama-server's completions."""


def _refusal(said: bytes) -> str:
    """Return what a refusal says, in JSON or not."""
    try:
        return _message(json.loads(said)["error"])
    except (ValueError, LookupError, TypeError):
        return _shown(said)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


def _shown(said: bytes) -> str:
    return said.decode("utf-8", "replace").strip()[-_LONGEST_SHOWN:] or "nothing was said"
