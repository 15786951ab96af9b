"""Clients of a server: one that behaves, and many that do not.

Each returns a word for what became of it. What a client must never see is an error: a status of 500, an answer where
a refusal belongs, a stream without an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.server_soak.wire import Answer, Connection, Head, ask, post_bytes, request_bytes

CONTEXT_TOKENS: Final = 512
MAX_BODY_MIB: Final = 1
_LONG: Final = 400
_PROMPTS: Final = ("def add(a, b):\n    return", "INFO  server started\nINFO  server", "Once upon a time", "x = [")
_PATHS: Final = ("/completion", "/v1/completions")
_CONVERSATIONS: Final = {
    "/v1/chat/completions": ("messages", "max_tokens", b"[DONE]"),
    "/v1/responses": ("input", "max_output_tokens", b'"type":"response.'),
    "/v1/messages": ("messages", "max_tokens", b'"type":"message_stop"'),
}
"""Routes of conversations: fields of messages and length, and what the last event of a stream has."""
_PAUSE_S: Final = 0.005
_SLOW_S: Final = 2.0


class SoakError(Exception):
    """A client saw what no client may see."""


@dataclass(frozen=True, slots=True)
class Client:
    """Makes one request, or a few."""

    port: int
    rng: random.Random
    headers: Mapping[str, str] = field(default_factory=dict)

    async def plain(self) -> str:
        """Wait for a whole answer."""
        return _checked(await ask(self.port, self._post(self._body())), 200)

    async def streamed(self) -> str:
        """Read a stream to its end."""
        async with await Connection.open(self.port) as connection:
            await connection.send(self._post(self._body(stream=True)))
            return await _read_stream(connection)

    async def several(self) -> str:
        """Ask for several answers at once."""
        body = self._body(n=self.rng.randint(2, 4), stream=self.rng.random() < 0.5)
        async with await Connection.open(self.port) as connection:
            await connection.send(self._post(body))
            if body["stream"]:
                return await _read_stream(connection)
            answer = await connection.answer()
        if answer.status == 200:
            found = answer.json()
            if len(found if isinstance(found, list) else found["choices"]) != body["n"]:
                raise SoakError(f"{body['n']} answers were asked for: {answer.body[:200]!r}")
        return _checked(answer, 200)

    async def cancel_stream(self) -> str:
        """Leave after some chunks."""
        return await self._leave(reset=False)

    async def reset_stream(self) -> str:
        """Drop the socket after some chunks."""
        return await self._leave(reset=True)

    async def converse(self) -> str:
        """Say something by one of the APIs of conversations: wait for the answer, read its stream, or leave it."""
        path = self.rng.choice(list(_CONVERSATIONS))
        said, length, last = _CONVERSATIONS[path]
        text = f"{self.rng.randrange(1000)} {self.rng.choice(_PROMPTS)}"
        stream, leaves = self.rng.random() < 0.7, self.rng.random() < 0.4
        body = {
            "model": "any",
            said: [{"role": "user", "content": text}],
            length: _LONG if leaves else self.rng.randint(16, 32),
            "stream": stream,
        }
        async with await Connection.open(self.port) as connection:
            await connection.send(self._post_to(path, body))
            if leaves:
                await asyncio.sleep(self.rng.choice((0.0, _PAUSE_S, 10 * _PAUSE_S)))
                connection.reset()
                return "left"
            if not stream:
                return _checked(await connection.answer(), 200)
            head = await connection.head()
            if head.status != 200:
                return _checked_head(head, 200)
            events = b"".join([chunk async for chunk in connection.chunks(head)]).rstrip().rsplit(b"\n\n", 1)
        if last not in events[-1] or b'"error":{' in events[-1]:
            raise SoakError(f"a stream of {path} ended with {events[-1][:300]!r}")
        return "200"

    async def cancel_whole(self) -> str:
        """Leave while a whole answer is written, or waits for its start."""
        async with await Connection.open(self.port) as connection:
            await connection.send(self._post(self._body(n_predict=_LONG, ignore_eos=True)))
            await asyncio.sleep(self.rng.choice((0.0, _PAUSE_S, 10 * _PAUSE_S)))
            if self.rng.random() < 0.5:
                connection.reset()
        return "left"

    async def half_body(self) -> str:
        """Send half a body, and leave."""
        body = json.dumps(self._body()).encode()
        async with await Connection.open(self.port) as connection:
            await connection.send(self._request("POST", "/completion", body[: len(body) // 2], length=len(body)))
            await asyncio.sleep(self.rng.choice((0.0, _PAUSE_S)))
            if self.rng.random() < 0.5:
                connection.reset()
        return "left"

    async def slow_body(self) -> str:
        """Send a body in pieces."""
        body = json.dumps(self._body()).encode()
        step = max(1, len(body) // 8)
        async with await Connection.open(self.port) as connection:
            await connection.send(self._request("POST", "/v1/completions", length=len(body)))
            for start in range(0, len(body), step):
                await connection.send(body[start : start + step])
                await asyncio.sleep(_PAUSE_S)
            return _checked(await connection.answer(), 200)

    async def slow_reader(self) -> str:
        """Read a long stream a little at a time for a while, and drop it."""
        async with await Connection.open(self.port, receive_bytes=2048) as connection:
            await connection.send(self._post(self._body(stream=True, n_predict=100, ignore_eos=True, n_probs=20)))
            with contextlib.suppress(TimeoutError):
                # Into a buffer this small, the kernel sends less and less often.
                async with asyncio.timeout(self.rng.uniform(0.0, _SLOW_S)):
                    while await connection.reader.read(64):
                        await asyncio.sleep(_PAUSE_S)
            connection.reset()
        return "left"

    async def garbage(self) -> str:
        """Send what is no HTTP."""
        data = self.rng.choice(
            (
                self.rng.randbytes(200),
                b"GET / HTTP/9.9\r\n\r\n",
                b"POST /completion HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
                b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
                b"GET /health HTTP/1.1\r\n\r\n",
                b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            )
        )
        async with await Connection.open(self.port) as connection:
            await connection.send(data)
            connection.writer.write_eof()
            answer = await connection.reader.read(-1)
        if answer and not answer.startswith(b"HTTP/1.1 4"):
            raise SoakError(f"{data[:40]!r} was answered: {answer[:200]!r}")
        return "refused"

    async def too_large(self) -> str:
        """Send a body above the limit, announced or in chunks."""
        size = (MAX_BODY_MIB << 20) + 1
        async with await Connection.open(self.port) as connection:
            if self.rng.random() < 0.5:
                await connection.send(self._request("POST", "/completion", length=size))
            else:
                fields = {"Host": "localhost", "Transfer-Encoding": "chunked", **self.headers}
                lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
                head = f"POST /completion HTTP/1.1\r\n{lines}\r\n"
                await connection.send(f"{head}{size:x}\r\n".encode() + b" " * size + b"\r\n0\r\n\r\n")
            head_of = await connection.head()
        return _checked(Answer(head_of, b""), 413)

    async def wrong_json(self) -> str:
        """Send a body that is no JSON, or not what it has to be."""
        body = self.rng.choice(
            (
                b"",
                b"{",
                b"[1]",
                b'{"prompt": NaN}',
                b'{"prompt": "a", "prompt": "b"}',
                b"\xff\xfe",
                b"[" * 5000,
                b'{"prompt": "\\ud800"}',
                b'{"prompt": "a", "n_predict": "three"}',
                b'{"prompt": "a", "temperature": 1e400}',
                b'{"prompt": "a", "temperature": -1}',
                b'{"prompt": [[]]}',
                b'{"prompt": "a", "n": 1000}',
            )
        )
        return _checked(await ask(self.port, self._request("POST", self.rng.choice(_PATHS), body)), 400)

    async def no_such_route(self) -> str:
        """Ask for what is not there."""
        method, path, status = self.rng.choice(
            (("GET", "/nothing", 404), ("PUT", "/completion", 405), ("GET", "/v1/models/no", 404))
        )
        return _checked(await ask(self.port, self._request(method, path)), status)

    async def long_prompt(self) -> str:
        """Send a prompt that leaves little room."""
        prompt = [self.rng.randrange(10, 3000) for _ in range(CONTEXT_TOKENS - 20)]
        return _checked(await ask(self.port, self._post(self._body(prompt=prompt))), 200)

    async def too_long(self) -> str:
        """Send a prompt that leaves no room."""
        return _checked(await ask(self.port, self._post(self._body(prompt=[65] * (CONTEXT_TOKENS + 5)))), 400)

    async def keep_alive(self) -> str:
        """Make requests one after the other on one connection."""
        async with await Connection.open(self.port) as connection:
            for _ in range(3):
                await connection.send(self._post(self._body()))
                said = _checked(await connection.answer(), 200)
        return said

    async def pipelined(self) -> str:
        """Make requests at once on one connection; at times leave before they are answered."""
        async with await Connection.open(self.port) as connection:
            await connection.send(b"".join(self._post(self._body()) for _ in range(3)))
            if self.rng.random() < 0.3:
                connection.reset()
                return "left"
            for _ in range(3):
                said = _checked(await connection.answer(), 200)
        return said

    async def flood(self) -> str:
        """Ask for more at once than may wait."""
        requests = [ask(self.port, self._post(self._body(n_predict=24))) for _ in range(16)]
        said = [_checked(answer, 200) for answer in await asyncio.gather(*requests)]
        return f"200, {'some' if 'full' in said else 'none'} full"

    async def tokens(self) -> str:
        """Turn a text into tokens and back."""
        text = self.rng.choice(_PROMPTS) * self.rng.randint(1, 50)
        found = await ask(self.port, self._post_to("/tokenize", {"content": text}))
        _checked(found, 200)
        back = await ask(self.port, self._post_to("/detokenize", found.json()))
        if back.json()["content"] != text:
            raise SoakError(f"{text[:50]!r} came back as {back.body[:100]!r}")
        return "200"

    def _body(self, **fields: Any) -> dict[str, Any]:
        prompt = f"{self.rng.randrange(1000)} {self.rng.choice(_PROMPTS)}"
        return {"prompt": prompt, "n_predict": self.rng.randint(1, 24), "seed": self.rng.randrange(1 << 32), **fields}

    def _post(self, body: Mapping[str, Any]) -> bytes:
        return self._post_to(self.rng.choice(_PATHS), body)

    def _post_to(self, path: str, body: Mapping[str, Any]) -> bytes:
        return post_bytes(path, body, headers=self.headers)

    def _request(self, method: str, path: str, body: bytes = b"", *, length: int | None = None) -> bytes:
        return request_bytes(method, path, body, length=length, headers=self.headers)

    async def _leave(self, *, reset: bool) -> str:
        async with await Connection.open(self.port) as connection:
            await connection.send(self._post(self._body(stream=True, n_predict=_LONG, ignore_eos=True)))
            head = await connection.head()
            if head.status != 200:
                return _checked_head(head, 200)
            chunks, wanted = connection.chunks(head), self.rng.randrange(6)
            for _ in range(wanted):
                if await anext(chunks, None) is None:
                    break
            if reset:
                connection.reset()
        return "left"


Behaviour = Callable[[Client], Awaitable[str]]

BEHAVIOURS: Final[Sequence[tuple[int, Behaviour]]] = (
    (8, Client.plain),
    (8, Client.streamed),
    (4, Client.several),
    (4, Client.cancel_stream),
    (3, Client.reset_stream),
    (6, Client.cancel_whole),
    (8, Client.converse),
    (3, Client.half_body),
    (2, Client.slow_body),
    (2, Client.slow_reader),
    (3, Client.garbage),
    (2, Client.too_large),
    (3, Client.wrong_json),
    (2, Client.no_such_route),
    (3, Client.long_prompt),
    (2, Client.too_long),
    (2, Client.keep_alive),
    (2, Client.pipelined),
    (1, Client.flood),
    (2, Client.tokens),
)
"""All that clients do, by how often they do it."""


def _checked(answer: Answer, expected: int) -> str:
    """Return what an answer's status says: the expected one, or that the queue is full."""
    return _checked_head(answer.head, expected, answer.body)


def _checked_head(head: Head, expected: int, body: bytes = b"") -> str:
    if head.status == 429 and "retry-after" in head.headers:
        return "full"
    if head.status != expected:
        raise SoakError(f"status {head.status} in place of {expected}: {body[:300]!r}")
    return str(expected)


async def _read_stream(connection: Connection) -> str:
    """Read a stream to its end, and return what became of it."""
    head = await connection.head()
    if head.status != 200:
        return _checked_head(head, 200)
    body = b"".join([chunk async for chunk in connection.chunks(head)])
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    last = [json.loads(event) for event in events if event != b"[DONE]"][-1]
    if "error" in last or "timings" not in last:
        raise SoakError(f"the stream ended with {str(last)[:300]}")
    return "200"
