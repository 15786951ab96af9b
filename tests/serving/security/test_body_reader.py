from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from paceline.core.errors import InputError
from paceline.serving.security import ApiKeys, SecuritySettings, secured
from tests.serving.security.asking import Echo, Sent, Socket, answer, ask, body_part, call, http_scope, run, serving

SMALL = SecuritySettings(max_body_bytes=10)
HINT = "and the server takes at most 10: send less, or start the server with a larger --max-body"


def refused(status: int, message: str, kind: str = "invalid_request_error") -> dict[str, object]:
    return {"error": {"code": status, "message": message, "type": kind, "param": None}}


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("size", [0, 1, 10])
def test_a_body_within_the_limit_arrives_whole(size: int) -> None:
    routes = Echo()
    assert ask(SMALL, app=routes, content=b"x" * size).status_code == 200
    assert ask(SMALL, app=routes, content=pieces(*[b"x"] * size)).status_code == 200
    assert routes.bodies == [b"x" * size] * 2


def test_a_body_beyond_the_limit_is_refused_by_its_announced_size() -> None:
    routes = Echo()
    reply = ask(SMALL, app=routes, content=b"x" * 11)
    assert reply.status_code == 413
    assert reply.json() == refused(413, f"the body has 11 bytes, {HINT}")
    assert reply.headers["connection"] == "close"
    assert not routes.bodies


@pytest.mark.parametrize("parts", [(b"x" * 11,), (b"x" * 6, b"x" * 6), (b"x" * 12, b"x" * 1000, b"x")])
def test_a_body_of_unknown_size_is_refused_where_it_passes_the_limit(parts: tuple[bytes, ...]) -> None:
    routes = Echo()
    reply = ask(SMALL, app=routes, content=pieces(*parts))
    assert reply.status_code == 413
    assert reply.json()["error"]["message"] in (f"the body has {seen} bytes or more, {HINT}" for seen in (11, 12))
    assert not routes.bodies


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "²"])
def test_a_nonsensical_length_is_not_believed(length: str) -> None:
    scope = http_scope(content_length=length)
    for size, status in ((10, 200), (11, 413)):
        assert call(secured(Echo(), SMALL), scope, body_part(b"x" * size, more=False)).status == status


def test_a_body_that_takes_too_long_is_refused() -> None:
    routes = Echo()
    app = secured(routes, SecuritySettings(body_timeout_s=0.05))
    sent = call(app, http_scope(content_length="9"), body_part(b"ab", more=True))
    message = (
        "the body did not arrive within 0.05 s, 2 bytes of it did: send it faster, or start the server with a longer "
        "--timeout"
    )
    assert sent.status == 408
    assert json.loads(sent.text) == refused(408, message, "timeout_error")
    assert not routes.bodies


def test_a_client_that_leaves_within_its_body_gets_no_answer() -> None:
    routes = Echo()
    parts = [body_part(b"ab", more=True), {"type": "http.disconnect"}]
    assert not call(secured(routes, SMALL), http_scope(), *parts)
    assert not routes.bodies


def test_routes_hear_that_the_client_left() -> None:
    heard: list[Message] = []

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend([await receive(), await receive()])
        await answer(send, b"{}")

    parts = [body_part(b"a", more=True), body_part(b"b", more=False), {"type": "http.disconnect"}]
    call(secured(routes, SMALL), http_scope(), *parts)
    assert heard == [body_part(b"ab", more=False), {"type": "http.disconnect"}]


def test_the_rest_of_a_refused_body_is_read_before_the_end_of_the_answer() -> None:
    order: list[str] = []
    parts = iter([body_part(b"x" * 9, more=True), body_part(b"x" * 9, more=True), body_part(b"", more=False)])

    async def receive() -> Message:
        order.append("read")
        return next(parts)

    async def send(message: Message) -> None:
        order.append("end" if not message.get("more_body", True) else "answer")

    run(lambda: secured(Echo(), SMALL)(http_scope(content_length="18"), receive, send))
    assert order == ["answer", "answer", "read", "read", "read", "end"]


@pytest.mark.parametrize(
    "name", ["max_body_bytes", "body_timeout_s", "header_timeout_s", "read_timeout_s", "max_connections"]
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_are_above_zero(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"^{name} is {value}: it has to be above 0$"):
        SecuritySettings(**{name: value})  # type: ignore[arg-type]


def test_nothing_is_waited_for_after_the_end_of_a_body() -> None:
    parts = iter([body_part(b"x" * 11, more=False)])
    sent = Sent()

    async def receive() -> Message:
        return next(parts)

    run(lambda: secured(Echo(), SMALL)(http_scope(transfer_encoding="chunked"), receive, sent))
    assert sent.status == 413
    assert not sent[-1]["more_body"]


def test_bodies_are_held_within_a_bound_of_all_and_of_each_key() -> None:
    settings = SecuritySettings(max_body_bytes=1000, keys=ApiKeys(["a", "b"]))
    going_on = asyncio.Event()

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await going_on.wait()
        await answer(send, b"{}")

    async def statuses() -> tuple[list[int], list[int], Sent]:
        app = secured(routes, settings)

        async def sent(key: str, body: bytes, more: bool = False) -> Sent:
            parts, heard = [body_part(body, more=more)], Sent()

            async def receive() -> Message:
                if not parts:
                    await asyncio.Event().wait()
                return parts.pop()

            await app(http_scope(authorization=f"Bearer {key}"), receive, heard)
            return heard

        # Half of one has not arrived; all of it that has is held.
        slow = asyncio.create_task(sent("a", b"," * 400, more=True))
        first = [asyncio.create_task(sent(key, b"," * 800)) for key in "aab"]
        while not first[1].done():
            await asyncio.sleep(0)
        refused = first.pop(1).result()
        going_on.set()
        again = [asyncio.create_task(sent("a", b"," * 900))]
        done = [(await one).status for one in first], [(await one).status for one in again]
        slow.cancel()
        return *done, refused

    first, again, refused = asyncio.run(statuses())
    assert first == [200, 200]
    assert again == [200]
    assert refused.status == 429
    assert (b"retry-after", b"1") in refused[0]["headers"]
    assert "of each key half of what others leave" in refused.text


@pytest.mark.parametrize("keys", [["a"], []])
def test_without_keys_all_bodies_have_all_of_the_memory(keys: list[str]) -> None:
    """With one there still are requests without it."""
    settings = SecuritySettings(max_body_bytes=1000, keys=ApiKeys(keys))
    statuses = asyncio.run(held_together(settings, [("a", [b"," * 1000])] * 4))
    assert statuses == ([200, 429, 429, 429] if keys else [200, 200, 200, 429])


def test_a_body_goes_on_with_the_memory_that_it_has() -> None:
    """However little others that came later leave."""
    settings = SecuritySettings(max_body_bytes=1000, keys=ApiKeys(["a", "b"]))
    sent = [("a", [b"," * 800, b""]), ("a", [b"," * 690]), ("b", [b"," * 600])]
    assert asyncio.run(held_together(settings, sent)) == [200, 200, 200]


async def held_together(settings: SecuritySettings, bodies: list[tuple[str, list[bytes]]]) -> list[int]:
    """Return the statuses of bodies by key and parts, of which all have begun before one is whole, and one is over."""
    whole, answered = asyncio.Event(), asyncio.Event()

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await answered.wait()
        await answer(send, b"{}")

    app = secured(routes, settings)

    async def status(key: str, parts: list[bytes]) -> int:
        left, heard = [body_part(part, more=True) for part in parts[:-1]] + [body_part(parts[-1], more=False)], Sent()

        async def receive() -> Message:
            if len(left) < len(parts):
                await whole.wait()
            return left.pop(0)

        await app(http_scope(authorization=f"Bearer {key}"), receive, heard)
        return heard.status

    tasks = [asyncio.create_task(status(key, parts)) for key, parts in bodies]
    for event in (whole, answered):
        for _ in range(20):
            await asyncio.sleep(0)
        event.set()
    return [await task for task in tasks]


# Over a socket


@pytest.mark.parametrize("settings", [SMALL, SecuritySettings(keys=ApiKeys(["k"]))], ids=["413", "401"])
def test_who_sends_much_still_gets_to_read_the_refusal(settings: SecuritySettings) -> None:
    body = b"x" * (8 << 20)
    with serving(Echo(), settings) as port, Socket(port) as client:
        client.send("POST / HTTP/1.1", "host: localhost", f"content-length: {len(body)}", "", body=body)
        reply = client.rest()
    assert reply.startswith(f"HTTP/1.1 {401 if settings.keys else 413}")
    assert reply.endswith('"param": null}}')


def test_a_chunked_body_beyond_the_limit_is_refused_over_a_socket() -> None:
    with serving(Echo(), SMALL) as port, Socket(port) as client:
        client.send("POST / HTTP/1.1", "host: localhost", "transfer-encoding: chunked", "", "8", "x" * 8, "8", "x" * 8)
        client.send("0", "")
        assert client.line().startswith("HTTP/1.1 413")


def test_a_body_that_stops_halfway_ends_the_connection() -> None:
    with serving(Echo(), SecuritySettings(body_timeout_s=0.1)) as port, Socket(port) as client:
        client.send("POST / HTTP/1.1", "host: localhost", "content-length: 100", "", body=b"half")
        reply = client.rest()
    assert reply.startswith("HTTP/1.1 408")
    assert "connection: close" in reply.lower()
    assert "the body did not arrive within 0.1 s, 4 bytes of it did" in reply


def test_a_client_that_drops_a_half_sent_body_reaches_no_route() -> None:
    routes = Echo()
    with serving(routes, SecuritySettings()) as port:
        with Socket(port) as dropped:
            dropped.send("POST / HTTP/1.1", "host: localhost", "content-length: 100", "", body=b"half")
        with Socket(port) as whole:
            whole.send("POST / HTTP/1.1", "host: localhost", "content-length: 4", "connection: close", "", body=b"full")
            assert '"bytes": 4' in whole.rest()
    assert routes.bodies == [b"full"]


def test_a_route_hears_of_a_dropped_connection() -> None:
    heard: list[str] = []

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        heard.append((await receive())["type"])

    with serving(routes, SecuritySettings()) as port, Socket(port) as client:
        client.send("GET / HTTP/1.1", "host: localhost", "")
        assert client.line() == "HTTP/1.1 200 OK"
        assert not heard
    assert heard == ["http.disconnect"]
