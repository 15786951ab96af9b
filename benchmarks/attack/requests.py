"""Requests that cost more than they seem to, and those that are none: each function is one try on a server.

A try fails where an answer is an error of the server's own, where what may not be answered is, or where there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.constraints.hostile_sources import hostile_source, hostile_tools

from benchmarks.attack.bodies import Bodies
from benchmarks.attack.tries import AttackError
from benchmarks.server_soak.clients import Client, SoakError
from benchmarks.server_soak.wire import Answer, Connection, Head, ask, post_bytes, request_bytes
from paceline.constraints import Choice, Gbnf, JsonSchema, Lark, Regex
from paceline.core.errors import ConstraintError

_FAULT: Final = re.compile(b'"type":"(server|api)_error"')
"""In a body or an event: an error of the server's own."""
_HARMLESS: Final = (*range(200, 500), 501, 503)
_PAUSE_S: Final = 0.01
_LONG: Final = 1 << 20


@dataclass(slots=True)
class Target:
    """A server that is attacked.

    Attributes:
        port: where it listens.
        headers: with the attackers' key.
        tls: what its certificate is checked by, where it speaks TLS.
        statuses: of the answers so far; each is a line of the server's log.
        connections: made so far but for those.
    """

    port: int
    headers: Mapping[str, str]
    tls: ssl.SSLContext | None = None
    statuses: Counter[int] = field(default_factory=Counter)
    connections: int = 0

    async def post(self, path: str, body: Mapping[str, Any] | bytes) -> Answer:
        """Return the answer to a body."""
        if isinstance(body, bytes):
            request = request_bytes("POST", path, body, headers=self.headers)
        else:
            request = post_bytes(path, body, headers=self.headers)
        try:
            answer = await ask(self.port, request, tls=self.tls)
        except ConnectionError:
            # Who still sends what is refused may not come to read so.
            if len(request) < _LONG:
                raise
            return Answer(Head(413, {}), b"")
        self.statuses[answer.status] += 1
        if answer.status not in _HARMLESS or _FAULT.search(answer.body):
            raise AttackError(f"status {answer.status}: {answer.body[:200]!r} after {path} {str(body)[:500]}")
        return answer

    def client(self, rng: random.Random) -> Client:
        return Client(self.port, rng, self.headers)


async def bodies(target: Target, rng: random.Random) -> None:
    """Send a body that nobody would write."""
    answer = await target.post(*Bodies(rng).next())
    if "application/json" in answer.head.headers.get("content-type", ""):
        answer.json()


async def resets(target: Target, rng: random.Random) -> None:
    """Leave, with or without farewell, somewhere between the first byte and the answer's last."""
    if rng.random() < 0.1:
        await _half_closed(target)
        return
    leaving = (Client.cancel_stream, Client.reset_stream, Client.cancel_whole, Client.half_body, Client.pipelined)
    await _misbehave(target, rng, *leaving)


async def _half_closed(target: Target) -> None:
    """Say all that is to be said, and listen."""
    target.connections += 1
    body = {"prompt": "a", "n_predict": 2}
    async with await Connection.open(target.port) as connection:
        await connection.send(post_bytes("/completion", body, headers=target.headers))
        connection.writer.write_eof()
        answer = await connection.answer()
    if answer.status not in (200, 429):
        raise AttackError(f"status {answer.status} to a client that has closed its side after its request")


async def slow_readers(target: Target, rng: random.Random) -> None:
    """Hardly read streams."""
    await asyncio.gather(*(_misbehave(target, rng, Client.slow_reader) for _ in range(rng.randint(1, 4))))


async def slow_writers(target: Target, rng: random.Random) -> None:
    """Send a request in drops, or stop in the middle of it."""
    if rng.random() < 0.3:
        await _misbehave(target, rng, Client.slow_body)
        return
    request = post_bytes("/completion", {"prompt": "a" * 100, "n_predict": 2}, headers=target.headers)
    step, stops = rng.choice((1, 7, 50)), rng.random() < 0.5
    most = rng.randrange(len(request)) if stops else len(request)
    target.connections += 1
    async with await Connection.open(target.port) as connection:
        for start in range(0, most, step):
            await connection.send(request[start : min(start + step, most)])
            await asyncio.sleep(_PAUSE_S * rng.random())
        if not stops:
            answer = await connection.answer()
            if answer.status not in (200, 429):
                raise AttackError(f"status {answer.status} after a request in pieces of {step} bytes")


async def _misbehave(target: Target, rng: random.Random, *behaviours: Callable[[Client], Any]) -> None:
    target.connections += 3
    with contextlib.suppress(ConnectionError):
        try:
            await rng.choice(behaviours)(target.client(rng))
        except SoakError as error:
            raise AttackError(str(error)) from None


async def handshakes(target: Target, rng: random.Random) -> None:
    """Connect by the hundred, where TLS is never spoken, begins, breaks off, or is followed by nothing."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(300)
    cut = hello[: rng.randrange(1, len(hello))]
    begun = rng.choice((b"", b"", cut, rng.randbytes(50), b"GET / HTTP/1.1\r\n\r\n", None))
    count = rng.choice((1, 30, 300, 1700))
    target.connections += count
    held: list[Connection] = []
    try:
        for _ in range(count if begun is not None else min(count, 30)):
            # A server that is full may refuse.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                connection = await Connection.open(target.port, tls=target.tls if begun is None else None)
                held.append(connection)
                if begun:
                    await connection.send(begun)
        await asyncio.sleep(rng.choice((0.0, 0.2, 2.0, 6.0)))
    finally:
        for connection in held:
            if rng.random() < 0.5:
                connection.reset()
            else:
                connection.close()


_SMUGGLED: Final = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_SILENT_S: Final = 3.0


async def smuggling(target: Target, rng: random.Random) -> None:
    """Send a request whose end two readers may see at different places, with another one behind it."""
    body = b'{"content": "a"}'
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    other = rng.choice((len(chunked), 0, 3, len(body) + len(_SMUGGLED)))
    fields, sent, answers = rng.choice(
        (
            # These are sound, and so is what follows.
            ([f"Content-Length: {len(body)}"], body, 2),
            (["Transfer-Encoding: chunked"], chunked, 2),
            ([f"Content-Length: {other}", "Transfer-Encoding: chunked"], chunked, 0),
            (["Transfer-Encoding: chunked", f"Content-Length: {len(body)}"], chunked, 0),
            ([f"Content-Length: {len(body)}", f"Content-Length: {other}"], body, 0),
            ([f"Content-Length: {len(body)}, {other}"], body, 0),
            ([f"Content-Length: +{len(body)}"], body, 0),
            ([f"Content-Length: {len(body)}_0"], body, 0),
            (["Content-Length: 0x10"], body, 0),
            ([f"Content-Length : {len(body)}"], body, 0),
            (["Transfer-Encoding: xchunked"], chunked, 0),
            (["Transfer-Encoding: chunked, identity"], chunked, 0),
            (["Transfer-Encoding: identity, chunked"], chunked, 0),
            (["Transfer-Encoding:\x0bchunked"], chunked, 0),
            (["Transfer-Encoding : chunked"], chunked, 0),
            (["Transfer-Encoding: chunked", "Transfer-Encoding: identity"], chunked, 0),
            (["Transfer-Encoding: chunked"], b"+10\r\n" + body + b"\r\n0\r\n\r\n", 0),
            (["Transfer-Encoding: chunked"], b"0x10\r\n" + body + b"\r\n0\r\n\r\n", 0),
            (["Transfer-Encoding: chunked"], b"1" + b"0" * 16 + b"10\r\n" + body + b"\r\n0\r\n\r\n", 0),
        )
    )
    headers = ["Host: localhost", *(f"{name}: {value}" for name, value in target.headers.items())]
    request = "\r\n".join(["POST /tokenize HTTP/1.1", *headers, *fields, "", ""]).encode() + sent + _SMUGGLED
    target.connections += 2
    said = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with await Connection.open(target.port) as connection:
            await connection.send(request)
            # A server that waits for more of a body has seen its end elsewhere: in what follows.
            async with asyncio.timeout(_SILENT_S):
                while piece := await connection.reader.read(1 << 16):
                    said += piece
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]
    target.statuses.update(found)
    if answers and found != [200] * answers:
        raise AttackError(f"{fields} is sound, and was answered by {found}")
    if not answers and (len(found) > 1 or not set(found) <= {*range(400, 500), 501}):
        raise AttackError(f"{fields} before {sent[:20]!r} was answered by {found}")


async def logprobs(target: Target, rng: random.Random) -> None:
    """Ask by a short request for an answer that is huge: several texts with the likeliest tokens at each place."""
    wide = rng.choice((20, 200, 1000))
    fields = {"max_tokens": rng.choice((50, 300, 900)), "n": rng.choice((1, 4, 16)), "ignore_eos": True}
    stream = rng.random() < 0.3
    path, more = rng.choice(
        (
            ("/completion", {"n_probs": wide, "post_sampling_probs": rng.random() < 0.3}),
            ("/v1/completions", {"logprobs": wide, "echo": rng.random() < 0.3}),
            ("/v1/chat/completions", {"logprobs": True, "top_logprobs": wide}),
        )
    )
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    await target.post(path, {**prompt, **fields, **more, "stream": stream, "seed": rng.randrange(1000)})


async def prompt_logprobs(target: Target, rng: random.Random) -> None:
    """Ask how likely the tokens of long prompts are, with the likeliest at each place; at times leave meanwhile."""
    wide = rng.choice((0, 5, 20, 200, 1000))
    text = rng.choice(("a", "word ", "😀", "def f(x):\n")) * rng.choice((1, 50, 400, 3000))
    path, more = rng.choice(
        (
            ("/v1/completions", {"echo": True, "logprobs": wide, "stream": rng.random() < 0.5}),
            ("/v1/completions", {"echo": True, "logprobs": 1, "prompt_logprobs": wide}),
            *((path, {"prompt_logprobs": wide}) for path in ("/completion", "/v1/chat/completions", "/v1/responses")),
        )
    )
    several = rng.choice((text, [text] * rng.choice((2, 8)), [rng.randrange(200) for _ in range(len(text))]))
    asked: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/responses": {"input": text},
    }
    body: dict[str, Any] = {**asked.get(path, {"prompt": several}), **more, "n_predict": rng.choice((0, 1, 50))}
    if path != "/v1/responses":
        body["n"] = rng.choice((1, 1, 4))
    # Who leaves has a line in the log, too.
    target.connections += 1
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(rng.choice((0.05, 0.5, None, None))):
            await target.post(path, body)


async def big_json(target: Target, rng: random.Random) -> None:
    """Send a body near the limit whose JSON is dear to read, and that is refused or nearly so."""
    size = int((1 << 20) * rng.choice((1, 4, 15)))
    pieces = rng.choice(
        (
            *(b"[],", b"{},", b"1,", b'"",', b"1.5e-3,", b"null,", b'"\\u0061",', b"[[[[]]]],", b'{"a":{}},'),
            *(b'{"a":1,"b":2},', b"9" * 18 + b",", b'"' + b"a" * 100 + b'",', b'"\xf0\x9f\x98\x80\\n",'),
        )
    )
    many = pieces * (size // len(pieces))
    if rng.random() < 0.2:
        many = b",".join(b'"%d":1' % number for number in range(size // 12))
        body = b'{"prompt": "a", "n_predict": 1, "x": {' + many + b"}}"
    else:
        name = rng.choice((b"prompt", b"stop", b"x", b"messages", b"tools", b"logit_bias", b"content"))
        body = b'{"n_predict": 1, "' + name + b'": [' + many[:-1] + rng.choice((b"]}", b"]", b""))
    await target.post(rng.choice(("/completion", "/v1/chat/completions", "/tokenize", "/apply-template")), body)


async def long_texts(target: Target, rng: random.Random) -> None:
    """Send a text of up to 14 MB to be made tokens of: alone, as a prompt, or as a chat's message."""
    code = "def f(x):\n    return x\n"
    unit = rng.choice((" ", "a", "word ", "\n", "😀", "e\u0301", "<|im_end|>", "0", code, "中文", "\x00"))
    unit = unit if rng.random() < 0.8 else "".join(rng.choices("abcdefgh \n.é中😀", k=1000))
    size = int(rng.choice((1e4, 3e5, 2e6, 1.4e7)))
    text = unit * (size // len(unit.encode()))
    path, body = rng.choice(
        (
            ("/tokenize", {"content": text, "with_pieces": rng.random() < 0.2}),
            ("/completion", {"prompt": text, "n_predict": 1}),
            ("/v1/completions", {"prompt": [text[:100], text], "n_predict": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
            ("/apply-template", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": text}]}),
        )
    )
    # Spelled as they are, or two bytes of a text would be six of JSON.
    await target.post(path, json.dumps(body, ensure_ascii=False).encode())


async def queue(target: Target, rng: random.Random) -> None:
    """Send thirty schemas at once, or a hundred requests: more of one key than there are places for."""
    if rng.random() < 0.5:
        found = [target.post("/completion", _with_schema(rng, number)) for number in range(30)]
    else:
        body = {"prompt": "a", "n_predict": 30, "ignore_eos": True}
        found = [target.post("/completion", {**body, "seed": number}) for number in range(100)]
    await asyncio.gather(*found)


def _with_schema(rng: random.Random, number: int) -> dict[str, Any]:
    names = [f"{rng.randrange(10**6)}-{number}-{place}" for place in range(rng.choice((5, 100)))]
    kinds: Sequence[dict[str, Any]] = ({"type": "string", "maxLength": 300}, {"type": "number"}, {"enum": names})
    properties = {name: rng.choice(kinds) for name in names}
    return {
        "prompt": "a",
        "n_predict": 4,
        "json_schema": {"type": "object", "properties": properties, "required": names},
    }


async def grammars(target: Target, rng: random.Random) -> None:
    """Send a grammar, a schema or a pattern, or tools, that are made to take long."""
    if rng.random() < 0.15:
        tools, message = hostile_tools(rng.getrandbits(32)), {"role": "user", "content": "a"}
        await target.post("/v1/chat/completions", {"messages": [message], "max_tokens": 4, "tools": tools})
        return
    _, make = hostile_source(rng.getrandbits(32))
    # What cannot be a source at all has been refused where it was made.
    with contextlib.suppress(ConstraintError):
        source = make()
        text = source.text
        constraint: dict[str, Any] = {_FIELDS[type(source)]: text if isinstance(source, _SPELLED) else json.loads(text)}
        await target.post("/completion", {"prompt": "a", "n_predict": 4, **constraint})


_SPELLED: Final = (Gbnf, Lark, Regex)
_FIELDS: Final[Mapping[type, str]] = {
    Gbnf: "grammar",
    Lark: "guided_grammar",
    Regex: "guided_regex",
    Choice: "guided_choice",
    JsonSchema: "json_schema",
}
