"""Several models behind one address: processes are played by a small program, and everything else is real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from paceline import __version__
from paceline.core.errors import InputError
from paceline.server_options import ServerOptions
from paceline.serving.app import create_app
from paceline.serving.deployment import bind, server_url
from paceline.serving.router import app as app_module
from paceline.serving.router.app import PoolHost, RouterHandlers, RouterServer
from paceline.serving.router.pool import Launch, ModelPool
from paceline.serving.router.presets import Preset
from paceline.serving.security import SecuritySettings
from tests.serving import played_model
from tests.serving.starting import in_this_loop
from tests.timing import WAIT_S

_PROGRAM = (sys.executable, "-I", "-S", str(Path(played_model.__file__)))


class Router:
    """A router that runs, and a client that asks it."""

    def __init__(self, url: str, pool: ModelPool) -> None:
        self.pool = pool
        self.web = httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False)

    async def ask(self, model: object, status: int = 200, path: str = "/v1/completions", **body: Any) -> Any:
        named = {} if model is None else {"model": model}
        response = await self.web.post(path, json={**named, **body})
        assert response.status_code == status, response.text
        return response.json()

    async def refusal(self, model: object, status: int, **body: Any) -> str:
        error: dict[str, Any] = (await self.ask(model, status, **body))["error"]
        assert error["code"] == status
        return str(error["message"])

    async def states(self) -> dict[str, Any]:
        listed = (await self.web.get("/v1/models")).json()["data"]
        return {model["id"]: model["status"]["value"] for model in listed}

    async def until(self, name: str, state: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await self.states())[name] != state:
                await asyncio.sleep(0.01)

    async def events(self, model: str, **body: Any) -> list[str]:
        async with self.web.stream("POST", "/v1/completions", json={"model": model, "stream": True, **body}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            return [line async for line in answer.aiter_lines() if line]


@asynccontextmanager
async def routed(
    options: ServerOptions | None = None,
    words: Mapping[str, tuple[str, ...]] | None = None,
    **presets: Mapping[str, Any],
) -> AsyncIterator[Router]:
    """Serve models a, b and c, played with these words."""
    options = options or ServerOptions(grace_s=0.0, metrics=True)
    words = words or {}

    def find() -> dict[str, tuple[Preset, Launch]]:
        return {
            name: (
                Preset(name, None, **presets.get(name, {})),
                Launch((*_PROGRAM, *words.get(name, ())), ("paceline", "serve"), {**os.environ}, 0),
            )
            for name in "abc"
        }

    pool = ModelPool(
        find,
        most=options.models_max,
        most_bytes=options.models_bytes,
        wait_s=options.models_wait_s,
        most_waiting=options.max_waiting,
    )
    ready = asyncio.Event()
    server = RouterServer(PoolHost(pool, on_ready=ready.set), options)
    security = SecuritySettings.from_options(options)
    (listener,) = bind(options.host, 0)
    app = create_app(server, security, RouterHandlers(server).routes())
    router = Router(server_url(listener, has_tls=False, prefix=options.prefix), pool)
    async with in_this_loop(app, server, security, listener, ready), router.web:
        yield router
    assert not [child for child in psutil.Process().children() if "played_model" in " ".join(child.cmdline())]


class Fifo:
    """What a played model waits for."""

    def __init__(self, folder: Path, name: str = "fifo") -> None:
        self.path = str(folder / name)
        os.mkfifo(self.path)

    async def open(self) -> None:
        """Let who waits go on; waits for it to do so."""
        await asyncio.to_thread(Path(self.path).write_text, "go")


async def test_requests_go_to_the_model_that_they_name() -> None:
    async with routed(b={"aliases": ("also b",), "tags": ("word",)}) as router:
        assert set((await router.states()).values()) == {"unloaded"}
        assert "a, b, c" in await router.refusal("nobody", 404)
        assert "a, b, c" in await router.refusal(None, 400)
        assert "name" in await router.refusal(17, 400)
        for name in ("a", "b", "also b"):
            said = await router.ask(name, prompt="é", path="/v1/completions?x=%2F")
            assert said["model"] == name[-1]
            assert said["path"] == "/v1/completions?x=%2F"
        assert await router.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        # What is polled has nothing loaded.
        for method in ("GET", "HEAD"):
            assert (await router.web.request(method, "/metrics?model=c")).status_code == 400
        assert (await router.states())["c"] == "unloaded"
        slots = await router.web.get("/slots?model=b")
        assert slots.json() == {"path": "/slots?model=b", "is": "b"}
        assert (await router.web.get("/slots")).status_code == 400
        await router.ask("a", path="/models/unload")
        await router.until("a", "unloaded")
        # With one that is loaded there is no doubt.
        assert (await router.ask(None))["model"] == "b"
        model = (await router.web.get("/v1/models/also b")).json()
        assert (model["id"], model["meta"], model["tags"]) == ("also b", {"n_ctx": 512}, ["word"])
        assert (await router.web.get("/v1/models/nobody")).status_code == 404
        # None of these is of one of the models.
        assert (await router.web.get("/version")).json() == {"version": __version__}
        assert (await router.web.get("/load")).json() == {"server_load": 0}
        assert "adapters" in (await router.web.get("/lora-adapters")).json()["error"]["message"]
        assert (await router.web.post("/props", json={})).status_code == 405
        assert (await router.web.get("/nothing")).status_code == 404
        assert (await router.web.post("/v1/completions", content=b'{"model": "a"')).status_code == 400
        refused = await router.web.post("/v1/completions", json={"model": "b", "status": 418})
        assert (refused.status_code, refused.json()["model"]) == (418, "b")


async def test_the_router_holds_the_keys_and_says_for_whom_it_asks() -> None:
    async with routed(options=ServerOptions(api_key=("one", "two"), grace_s=0.0)) as router:
        assert (await router.web.post("/v1/completions", json={"model": "a"})).status_code == 401
        for path in ("/v1/models", "/version", "/load", "/slots?model=a", "/tokenizer_info?model=a"):
            assert (await router.web.get(path)).status_code == 401
        for path in ("/health", "/v1/health", "/ping", "/ping?model=a"):
            assert (await router.web.get(path)).json() == {"status": "ok"}
        assert not router.pool.models["a"].counts
        seen = []
        for key in ("one", "two", "one"):
            headers = {
                "Authorization": f"Bearer {key}",
                "X-Paceline-Client": "somebody else",
                "Cookie": "c",
                "Origin": "http://elsewhere.example",
                "X-Request-Id": f"mine-{key}",
                "X-Other": "kept",
            }
            answer = await router.web.post("/v1/completions", json={"model": "a"}, headers=headers)
            for name in ("x-request-id", "request-id"):
                assert answer.headers.get_list(name) == [f"mine-{key}"]
            got = answer.json()["headers"]
            assert (got["x-other"], got["x-request-id"]) == ("kept", f"mine-{key}")
            assert not {"cookie", "origin", "x-api-key"} & got.keys()
            assert key not in got["authorization"].split()
            seen.append(got["x-paceline-client"])
        assert seen[0] == seen[2] != seen[1]
        assert "somebody else" not in seen


async def test_what_a_process_said_before_it_died_is_not_lost() -> None:
    body = {"model": "a", "stream": True, "chunks": 5, "die": 4, "size": 400_000}
    async with routed() as router, router.web.stream("POST", "/v1/completions", json=body) as answer:
        # More than the client's connection holds is still between the process and the router.
        await router.until("a", "unloaded")
        *said, last = [line async for line in answer.aiter_lines() if line]
    assert said == [f"data: {number} {'x' * 400_000}" for number in range(4)]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503


async def test_a_stream_comes_as_it_is_said_and_ends_with_an_error_where_the_process_dies() -> None:
    async with routed() as router:
        whole = [*(f"data: {number} " for number in range(3)), "data: [DONE]"]
        assert await router.events("a") == whole
        before = (await router.ask("a"))["pid"]
        *said, last = await router.events("a", die=2)
        assert said == whole[:2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503
        # What was said of the next event is not told.
        begun = "".join(f"{line}\n\n" for line in whole[:2])
        for path in ("/v1/completions", "/v1/messages"):
            body = {"model": "a", "stream": True, "die": 2, "half": 'data: {"text": "begun'}
            text = (await router.web.post(path, json=body)).text
            assert text.startswith(begun)
            assert '"error"' in text.removeprefix(begun)
            assert "begun" not in text
        # An event that is longer than what is held back breaks off, and the connection with it.
        with pytest.raises(httpx.RemoteProtocolError):
            await router.events("a", die=1, half="data: " + "x" * 100_000)
        # The next request has it loaded again.
        after = (await router.ask("a"))["pid"]
        assert after != before
        assert "ask again" in await router.refusal("a", 503, die=0)
        assert (await router.ask("a"))["pid"] != after
        pid = (await router.ask("a"))["pid"]
        assert await router.events("a") == whole
        os.kill(pid, signal.SIGKILL)
        await router.until("a", "unloaded")
        listed = (await router.web.get("/models")).json()["data"][0]["status"]
        assert (listed["failed"], listed["exit_code"]) == (True, -9)
        # Anthropic's clients hear it in the form that they know.
        body = {"model": "a", "stream": True, "chunks": 2, "die": 1}
        text = (await router.web.post("/v1/messages", json=body)).text
        assert text.split("\n\n")[1].startswith(
            'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"'
        )
        text = (await router.web.post("/v1/responses", json=body)).text
        assert text.split("\n\n")[1].startswith('event: error\ndata: {"type":"error","code":"unavailable_error"')
        error = (await router.web.post("/v1/messages", json={"model": "nobody"})).json()
        assert error["error"]["type"] == "not_found_error"
        listed = (await router.web.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
        assert [(model["id"], model["max_tokens"]) for model in listed["data"]] == [
            ("a", 512),
            ("b", None),
            ("c", None),
        ]


async def test_models_alternate_within_their_limit_and_nobody_is_lost() -> None:
    async with routed(options=ServerOptions(models_max=1, grace_s=0.0, metrics=True)) as router:

        async def client(number: int) -> None:
            for turn in range(4):
                name = "ab"[(number + turn) % 2]
                if turn % 2:
                    assert (await router.events(name))[-1] == "data: [DONE]"
                else:
                    assert (await router.ask(name))["model"] == name

        await asyncio.gather(*(client(number) for number in range(16)))
        loads = {name: router.pool.models[name].counts["loads"] for name in "ab"}
        # They come in turns: each load serves all who wait.
        assert loads["a"] + loads["b"] <= 12
        scraped = (await router.web.get("/metrics")).text
        assert 'paceline:model_requests_total{model_name="a"} 32.0' in scraped
        assert f'paceline:model_loads_total{{model_name="b"}} {loads["b"]}.0' in scraped


async def test_what_is_unloaded_answers_what_it_was_asked_first(tmp_path: Path) -> None:
    async with routed() as router:
        fifo = Fifo(tmp_path)
        await router.ask("a")
        streaming = asyncio.create_task(router.events("a", fifo=fifo.path, chunks=2))
        while not router.pool.models["a"].leases:
            await asyncio.sleep(0)
        assert await router.ask("a", path="/models/unload") == {"success": True}
        status = (await router.web.get("/models")).json()["data"][0]["status"]
        assert (status["value"], status["ending"]) == ("loaded", True)
        later = asyncio.create_task(router.ask("a"))
        await fifo.open()
        assert (await streaming)[-1] == "data: [DONE]"
        assert (await later)["model"] == "a"
        assert router.pool.models["a"].counts == {"loads": 2, "unloads": 1, "requests": 3}
        assert "not running" in await router.refusal("b", 400, path="/models/unload")
        assert "already" in await router.refusal("a", 400, path="/models/load")


async def test_a_stream_that_waits_for_its_model_is_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "_PING_S", 0.01)

    fifo = Fifo(tmp_path)
    async with routed(words={"a": ("--slow", fifo.path)}) as router:
        # What is no whole number is for the model to refuse.
        body = {"model": "a", "stream": True, "sse_ping_interval": 1e-9}
        async with router.web.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": "
            assert (await router.states())["a"] == "loading"
            await fifo.open()
            assert [line async for line in lines if line.startswith("data")][-1] == "data: [DONE]"
        # What is wrong with the request is then told in the stream.
        await router.ask("a", path="/models/unload")
        await router.until("a", "unloaded")
        async with router.web.stream("POST", "/v1/messages", json={**body, "refuse": 418}) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": "
            await fifo.open()
            told = [line async for line in lines if line and line != ": "]
        assert told[0] == "event: error"
        assert json.loads(told[1].removeprefix("data: "))["error"]["message"] == "played"


async def test_a_model_that_hangs_while_it_is_loaded_is_ended_by_hand(tmp_path: Path) -> None:
    fifo = Fifo(tmp_path)
    options = ServerOptions(models_max=1, grace_s=0.0)
    async with routed(options, {"a": ("--slow", fifo.path)}, a={"stop_s": 1e6}) as router:
        waiting = [asyncio.create_task(router.refusal("a", 503, stream=stream)) for stream in (True, False)]
        while len(router.pool.models["a"].waiting) < 2:
            await asyncio.sleep(0)
        other = asyncio.create_task(router.ask("b"))
        await router.until("a", "loading")
        assert await router.ask("a", path="/models/unload") == {"success": True}
        assert all(["unloaded before" in await each for each in waiting])
        # Others no longer wait for its place.
        assert (await other)["model"] == "b"
        assert router.pool.models["a"].counts == {"loads": 1, "unloads": 1}


async def test_a_key_stands_for_the_same_client_whenever_the_router_starts() -> None:
    seen: list[str] = []
    for keys in (("one", "two"), ("two", "one", "three"), ()):
        async with routed(ServerOptions(api_key=keys, grace_s=0.0)) as router:
            for key in ("one", "two"):
                answer = await router.web.post("/v1/completions", json={"model": "a"}, headers={"X-Api-Key": key})
                seen.append(answer.json()["headers"]["x-paceline-client"])
    assert seen[:2] == seen[2:4]
    assert seen[0] != seen[1]
    assert seen[4:] == ["", ""]


async def test_who_listens_to_what_becomes_of_models_does_not_hold_up_the_end() -> None:
    async with routed(options=ServerOptions(grace_s=10 * WAIT_S)) as router:
        async with router.web.stream("GET", "/models/sse") as answer:
            await router.ask("a")
            os.kill(os.getpid(), signal.SIGTERM)
            events = [line async for line in answer.aiter_lines() if line]
        assert len(events) == 2


async def test_why_a_model_cannot_be_loaded_is_told_in_one_line() -> None:
    async with routed(words={"a": ("--broken",)}) as router:
        for _ in range(2):
            message = await router.refusal("a", 503, stream=True)
            assert message == "the model could not be loaded: the file is damaged: fetch it again"
        status = (await router.web.get("/models")).json()["data"][0]["status"]
        assert (status["value"], status["failed"], status["exit_code"]) == ("unloaded", True, 1)
        assert status["error"] == "the file is damaged: fetch it again"


async def test_who_leaves_has_nothing_done_for_them(tmp_path: Path) -> None:
    async with routed() as router:
        fifo = Fifo(tmp_path)
        await router.ask("a")
        for stream in (True, False):
            asking = asyncio.create_task(router.ask("a", fifo=fifo.path, stream=stream))
            while not router.pool.models["a"].leases:
                await asyncio.sleep(0)
            asking.cancel()
            async with asyncio.timeout(WAIT_S):
                while router.pool.models["a"].leases:
                    await asyncio.sleep(0)
            await fifo.open()
        # One that reads nothing holds up its own answer alone.
        body: dict[str, Any] = {"model": "a", "stream": True, "chunks": 2000, "size": 50_000}
        async with router.web.stream("POST", "/v1/completions", json=body) as answer:
            assert (await router.ask("a"))["model"] == "a"
            assert answer.status_code == 200
        assert len((await router.ask("a", size=100_000))["text"]) == 100_000


async def test_what_becomes_of_models_is_told_as_it_happens() -> None:
    async with routed() as router:
        async with router.web.stream("GET", "/models/sse") as answer:
            await router.ask("b", path="/models/load")
            seen = []
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    seen.append((event["model"], event["data"]["status"]))
                    if seen[-1] == ("b", "loaded"):
                        await router.ask("b", path="/models/unload")
                    if seen[-1] == ("b", "unloaded"):
                        break
        assert seen == [("b", "loading"), ("b", "loaded"), ("b", "unloaded")]


async def test_models_are_loaded_by_themselves_only_where_that_is_wanted() -> None:
    options = ServerOptions(models_autoload=False, models_max=3, grace_s=0.0, prefix="/llm")
    async with routed(options=options, c={"loads_on_startup": True}) as router:
        await router.until("c", "loaded")
        assert "/models/load" in await router.refusal("a", 400)
        assert (await router.ask("a", path="/v1/completions?autoload=true"))["model"] == "a"
        await router.ask("b", path="/models/load")
        await router.until("b", "loaded")
        props = (await router.web.get("/props")).json()
        assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 3, False)
        assert (await router.web.get("/")).text.startswith("<!doctype html>")
        assert (await router.web.get("/props?model=b")).json()["is"] == "b"
        await router.ask("b", path="/models/unload")
        await router.until("b", "unloaded")
        assert (await router.web.get("/props?model=b&autoload=true")).json()["is"] == "b"
        routes = (await router.web.get("/openapi.json")).json()["paths"]
        assert {"/llm/models/load", "/llm/v1/chat/completions", "/llm/tokenize"} <= routes.keys()


async def test_a_list_that_cannot_be_read_again_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    async with routed() as router:

        def fail() -> dict[str, Any]:
            raise InputError("cannot read /secret/folder")

        monkeypatch.setattr(router.pool, "_find", fail)
        refused = await router.web.get("/models?reload=1")
        assert refused.status_code == 503
        assert "secret" not in refused.text
        assert [*await router.states()] == ["a", "b", "c"]
        monkeypatch.undo()
        assert (await router.web.get("/models?reload=1")).status_code == 200
        head = await router.web.head("/v1/models")
        assert (head.status_code, head.content) == (200, b"")


async def test_what_the_router_takes_is_bounded() -> None:
    async with routed(options=replace(ServerOptions(grace_s=0.0), max_body=1)) as router:
        assert (await router.web.post("/v1/completions", content=b" " * (2 << 20))).status_code == 413


async def test_no_process_outlives_its_router() -> None:
    """However the router ends, the end of its pipe ends what it started."""

    program = f"""
import asyncio, json, os, sys
from paceline.serving.router.process import ModelProcess
async def main():
    loaded = asyncio.Event()
    process = ModelProcess("a", lambda news: news["state"] == "loaded" and loaded.set())
    running = asyncio.create_task(process.run({list(_PROGRAM)!r}, dict(os.environ), []))
    await loaded.wait()
    print(process.pid, flush=True)
    await running
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    await asyncio.to_thread(child.wait, WAIT_S)
