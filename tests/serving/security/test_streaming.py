"""With Starlette's own answers over a socket, as the routes will use them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from paceline.serving.security import ApiKeys, CorsPolicy, SecuritySettings, namespace_of, read_json
from tests.serving.security.asking import serving
from tests.timing import WAIT_S

SETTINGS = SecuritySettings(keys=ApiKeys(["k"]), allowed_hosts=("127.0.0.1",), cors=CorsPolicy(("*",)))
HEADERS = {"X-Api-Key": "k", "Origin": "https://p.example"}


def test_a_stream_arrives_as_it_is_made() -> None:
    app, arrived = FastAPI(), threading.Event()
    made: list[int] = []

    async def parts() -> AsyncIterator[str]:
        for number in range(3):
            made.append(number)
            yield f"{number}"
            assert await asyncio.to_thread(arrived.wait, 30)
            arrived.clear()

    @app.post("/stream")
    async def stream(request: Request) -> StreamingResponse:
        assert read_json(await request.body()) == {"a": 1}
        return StreamingResponse(parts())

    url = "http://127.0.0.1:{}/stream"
    with (
        serving(app, SETTINGS) as port,
        httpx.stream("POST", url.format(port), json={"a": 1}, headers=HEADERS, timeout=WAIT_S) as answer,
    ):
        for number, part in enumerate(answer.iter_text()):
            assert (part, made) == (f"{number}", list(range(number + 1)))
            arrived.set()
    assert made == [0, 1, 2]
    assert answer.headers["x-request-id"]


def test_a_stream_ends_where_the_client_leaves() -> None:
    app, ended = FastAPI(), threading.Event()

    async def parts() -> AsyncIterator[str]:
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            ended.set()

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(parts())

    with serving(app, SETTINGS) as port:
        with httpx.stream("POST", f"http://127.0.0.1:{port}/stream", headers=HEADERS, timeout=WAIT_S) as answer:
            # Kept until the block ends: an iterator that is thrown away closes the connection.
            arriving = answer.iter_text()
            assert next(arriving) == "first"
            assert not ended.is_set()
        assert ended.wait(WAIT_S)


def test_routes_see_namespace_and_id() -> None:
    app = FastAPI()

    @app.get("/mine")
    async def mine(request: Request) -> dict[str, str]:
        return {
            "state": request.state.namespace,
            "salted": namespace_of(request.scope, "s"),
            "id": request.state.request_id,
        }

    with serving(app, SETTINGS) as port:
        answer = httpx.get(f"http://127.0.0.1:{port}/mine", headers=HEADERS, timeout=WAIT_S)
    facts = answer.json()
    assert facts["id"] == answer.headers["x-request-id"]
    assert facts["state"] == SETTINGS.keys.namespace(b"k") != facts["salted"]
