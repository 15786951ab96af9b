"""The routes of a router: its own, and those of a model, which are handed on to the process of the model that is named.

::

    request ──> which model? ──> a lease of it (pool.py) ──> its process ──> the answer, as it comes
                 body's or query's ``model``    waits              dies: status 503, or an error in the stream

An answer goes on as fast as its client reads, and ends in the process too where the client leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx
from fastapi import APIRouter, FastAPI
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope

from paceline import __version__
from paceline.core.errors import InputError, PacelineError
from paceline.server_options import ServerOptions
from paceline.serving.app import Handlers, Route
from paceline.serving.errors import (
    FieldError,
    NotFoundError,
    NotOfferedError,
    RefusedError,
    anthropic_body,
    shorten,
    speaks_anthropic,
    status_and_body,
)
from paceline.serving.event_stream import EventStream, cancel_on_disconnect
from paceline.serving.json_bodies import read_json
from paceline.serving.json_output import as_events, to_json
from paceline.serving.metrics import ServerLoad
from paceline.serving.model_host import BUILD, ModelHost
from paceline.serving.props import list_anthropic_models
from paceline.serving.router.pool import ModelPool, PooledModel, shown_state
from paceline.serving.router.process import ModelProcess
from paceline.serving.schema import ERROR_RESPONSES, openapi_document
from paceline.serving.security import CLIENT_HEADER, get_namespace, get_owner
from paceline.serving.server import Server
from paceline.serving.work import Kind, choose_reading_kind

_log = logging.getLogger(__name__)

_GET: Final = ("GET", "HEAD")
_POST: Final = ("POST",)

_PING_S: Final = 30.0
"""Seconds of silence after which a stream gets a comment where the request does not say it, as in llama-server."""
_PING: Final = b": \n\n"

_MAX_WHOLE: Final = 8 << 20
"""Bytes of an answer that is no stream up to which it is sent once all of it is there: a process that dies before that
leaves no half of it."""

_RESPONSES: Final = "/responses"
"""How the paths of the Responses API end."""

_SAID_HERE: Final = ("/version", "/load")
"""Routes of a model that the router answers as a model does."""

_MAX_HELD: Final = 1 << 16
"""Bytes of an event up to which it is sent once all of it is there: a process that dies leaves no half of it."""

_MAX_NAMES: Final = 20
"""Names of models that an error lists."""

_END_S: Final = 1.0
"""Seconds in which a process that takes no connection is found to have ended."""

_NOT_ASKED: Final = frozenset(
    (
        # of this connection
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "content-length", "expect"),
        # of the router: who asks, and from where
        *("authorization", "x-api-key", "cookie", "origin", "referer", CLIENT_HEADER, "x-request-id"),
    )
)
"""Headers of a request that the model's process does not get."""

_NOT_TOLD: Final = frozenset(
    (
        *("connection", "keep-alive", "transfer-encoding", "date"),
        # The router adds its own.
        *("x-request-id", "request-id", "x-content-type-options", "cross-origin-resource-policy"),
    )
)
"""Headers of an answer that the client does not get."""


class PoolHost(ModelHost):
    """The place of a model in a server that has several."""

    def __init__(self, pool: ModelPool, *, on_ready: Any) -> None:
        super().__init__(self._no_model)
        self.pool = pool
        self._when_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop_taking(self) -> None:
        super().stop_taking()
        if self._loop is not None:
            # A signal may call this.
            self._loop.call_soon_threadsafe(self.pool.end_listening)

    async def load(self) -> None:
        """Take requests from now on, and load what is to be there without being asked for."""
        self._loop = asyncio.get_running_loop()
        self.state = "ready"
        self._when_ready()
        for model in list(self.pool.models.values()):
            if model.preset.loads_on_startup:
                self.pool.load(model)

    async def close(self) -> None:
        self.stop_taking()
        await self.pool.close()

    @staticmethod
    def _no_model(report: object) -> Any:
        raise AssertionError("a router has no model")


class RouterServer(Server):
    """A server whose models have processes of their own."""

    def __init__(self, host: PoolHost, options: ServerOptions) -> None:
        # Each model sleeps by itself.
        super().__init__(host, replace(options, sleep_idle_s=-1.0))
        self.pool = host.pool

    def load(self) -> ServerLoad:
        models = self.pool.models.values()
        return ServerLoad(
            running=sum(model.leases for model in models), waiting=sum(len(model.waiting) for model in models)
        )

    def end_answers(self) -> None:
        self.pool.stop_all()


class RouterHandlers:
    """Answers the requests of all routes."""

    def __init__(self, server: RouterServer) -> None:
        self._server = server
        self._pool = server.pool
        self._endings: set[asyncio.Task[None]] = set()
        # Of each key whom it stands for in other processes, by its namespace.
        self._clients: dict[str, bytes] = {}
        self._openapi: bytes | None = None

    def routes(self) -> list[Route]:
        """Return the table. FastAPI takes the first line that fits."""
        # Without a summary is what every model refuses.
        handed_on = (
            replace(route, handler=self.proxy, is_public=False)
            if route.summary and route.paths[0] not in _SAID_HERE
            else route
            for route in self._routes_of_a_model()
        )
        return [*self._own_routes(), *handed_on]

    def _own_routes(self) -> list[Route]:
        # fmt: off
        return [
            Route(_GET, ("/health", "/v1/health", "/ping"), self.health, "Whether the server is there",
                  is_public=True, is_polled=True),
            Route(_GET, ("/models/sse",), self.events, "What becomes of models, as it happens"),
            Route(_GET, ("/v1/models", "/models"), self.models, "The models and their states", is_polled=True),
            Route(_GET, ("/v1/models/{name:path}",), self.model, "A model, by one of its names"),
            Route(_POST, ("/models/load",), self.load, "Load a model"),
            Route(_POST, ("/models/unload",), self.unload, "End a model, once its answers have ended"),
            Route(("POST", "DELETE"), ("/models",), self.no_downloads),
            Route(_GET, ("/props",), self.props, "What the server is; of a model where one is named", is_polled=True),
            Route(_GET, ("/metrics",), self.metrics, "Counts, for Prometheus; of a model where one is named",
                  is_polled=True),
            Route(_GET, ("/openapi.json",), self.openapi),
        ]
        # fmt: on

    def _routes_of_a_model(self) -> list[Route]:
        """Return those that are no routes of the router, as a model's process has them."""
        mine = {(route.methods[0], path) for route in self._own_routes() for path in route.paths}
        found = []
        for route in Handlers(self._server).routes():
            paths = tuple(path for path in route.paths if (route.methods[0], path) not in mine)
            if paths:
                found.append(replace(route, paths=paths))
        return found

    async def health(self) -> dict[str, str]:
        self._check()
        return {"status": "ok"}

    async def models(self, request: Request) -> dict[str, Any]:
        if request.query_params.get("reload", "0") not in ("", "0", "false"):
            try:
                await self._pool.reload()
            except InputError as error:
                # It names files of this machine.
                _log.error("the models cannot be listed again: %s", error)
                message = "the models cannot be listed again, and stay as they were; the server's log says why"
                raise RefusedError(503, "unavailable_error", message) from None
        listed = [self._describe(model) for model in self._pool.models.values()]
        return list_anthropic_models(listed) if speaks_anthropic(request.scope) else {"object": "list", "data": listed}

    async def model(self, request: Request, name: str) -> dict[str, Any]:
        model = self._pool.find(name)
        if model is None:
            raise self._no_such_model(name)
        described = self._describe(model)
        if speaks_anthropic(request.scope):
            described = list_anthropic_models([described])["data"][0]
        return {**described, "id": name}

    async def load(self, request: Request) -> dict[str, bool]:
        model = await self._read_named(request)
        if model.process is not None or model.waiting:
            raise FieldError("model", f"{model.preset.name} is {shown_state(model)} already")
        self._pool.load(model)
        return {"success": True}

    async def unload(self, request: Request) -> dict[str, bool]:
        model = await self._read_named(request)
        if model.process is None:
            raise FieldError("model", f"{model.preset.name} is not running")
        self._pool.unload(model)
        return {"success": True}

    async def no_downloads(self) -> None:
        raise NotFoundError("this server fetches and deletes no models: change its folder, and ask /models?reload=1")

    async def events(self) -> Response:
        self._check()
        return EventStream(self._events(), over=lambda: None, ping_s=_PING_S, ping=_PING, begins_at_once=True)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        with self._pool.listen() as queue:
            while (event := await queue.get()) is not None:
                yield as_events([event])

    async def props(self, request: Request) -> Any:
        if "model" in request.query_params:
            return await self.proxy(request)
        self._check()
        options = self._server.options
        return {
            "role": "router",
            "max_instances": options.models_max,
            "models_autoload": options.models_autoload,
            "model_alias": "paceline",
            "model_path": "none",
            "default_generation_settings": {"params": None, "n_ctx": 0},
            "ui_settings": {},
            "build_info": f"{BUILD}-{__version__}",
            "cors_proxy_enabled": False,
            "endpoint_metrics": options.metrics,
            "ui": options.ui,
        }

    async def metrics(self, request: Request) -> Response:
        if "model" in request.query_params:
            return await self.proxy(request)
        if not self._server.options.metrics:
            raise NotOfferedError("this server has no metrics: start it with `metrics=True`")
        body = generate_latest(_Collected(list(self._pool.models.values())))
        return PlainTextResponse(body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def openapi(self, request: Request) -> Response:
        if self._openapi is None:
            share = self._server.work.share_for(request.scope)
            self._openapi = await share.offload(Kind.UPKEEP, self._write_openapi)
        return Response(self._openapi, media_type="application/json")

    def _write_openapi(self) -> bytes:
        described = FastAPI(openapi_url=None)
        router = APIRouter(prefix=self._server.options.prefix, responses=ERROR_RESPONSES)
        for route in (*self._own_routes(), *self._routes_of_a_model()):
            route.add_to(router)
        described.include_router(router)
        return to_json(openapi_document(described))

    async def proxy(self, request: Request) -> Response:
        """Hand a request on to the model that it names, and its answer back."""
        self._check()
        body = await request.body()
        asked = await self._read_json(request, body) if request.method not in _GET and body else {}
        model = self._choose(request, asked)
        ping_s = None
        if asked.get("stream") is True:
            given = asked.get("sse_ping_interval")
            # What is no whole number is refused by the model.
            ping_s = _PING_S if type(given) is not int else float(given) if given > 0 else None
        stack = contextlib.AsyncExitStack()
        opening = asyncio.create_task(self._open(request, body, model, stack))
        try:
            await cancel_on_disconnect(request, asyncio.wait([opening], timeout=ping_s))
            if not opening.done():
                # Whoever waits for a model to be loaded is to see that the connection lives.
                content = self._late_events(opening, request.scope)
                return EventStream(content, over=lambda: self._end(opening, stack), ping_s=ping_s or 0.0, ping=_PING)
            upstream = opening.result()
            whole = await cancel_on_disconnect(request, upstream.whole()) if upstream.is_short else None
        except BaseException:
            self._end(opening, stack)
            raise
        if whole is None:
            return _Relay(upstream, request.scope, over=lambda: self._end(opening, stack))
        self._end(opening, stack)
        return whole

    async def _open(
        self, request: Request, body: bytes, model: PooledModel, stack: contextlib.AsyncExitStack
    ) -> _Upstream:
        """Return the beginning of the model's answer, once the model is there."""
        namespace = get_namespace(request.scope)
        if (client := self._clients.get(namespace)) is None:
            share = self._server.work.share_for(request.scope)
            client = await share.offload(Kind.UPKEEP, lambda: get_owner(request.scope))
            self._clients[namespace] = client
        for is_last in (False, True):
            process = await stack.enter_async_context(self._pool.lease(model, namespace))
            assert process.web is not None
            asking = _asked_request(request, body, process, client)
            try:
                upstream = _Upstream(process, await process.web.send(asking, stream=True))
            except httpx.HTTPError as error:
                cut_off = await _cut_off(process)
                if is_last or not isinstance(error, httpx.ConnectError):
                    raise cut_off from None
                # Nothing was asked of it.
                await stack.aclose()
                continue
            stack.push_async_callback(upstream.response.aclose)
            return upstream
        raise AssertionError

    async def _late_events(self, opening: asyncio.Task[_Upstream], scope: Scope) -> AsyncGenerator[bytes, None]:
        """Iterate over what a stream says that was begun before the model was there."""
        try:
            upstream = await asyncio.shield(opening)
            if upstream.response.status_code != 200:
                raise await upstream.error()
        except PacelineError as error:
            yield _error_event(error, scope)
            return
        async for part in upstream.parts(scope):
            yield part

    def _end(self, opening: asyncio.Task[_Upstream], stack: contextlib.AsyncExitStack) -> None:
        """Give back what a request has of a model, whatever has become of it."""

        async def end() -> None:
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled():
                # Looked at, so that nobody misses it.
                opening.exception()
            await stack.aclose()

        task = asyncio.create_task(end())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    def _check(self) -> None:
        if self._server.host.state != "ready":
            _ = self._server.host.served

    def _choose(self, request: Request, asked: Mapping[str, Any]) -> PooledModel:
        name = asked.get("model")
        if name is None:
            name = request.query_params.get("model")
        if name is not None and not isinstance(name, str):
            raise FieldError("model", f"model has to be a name: {self._names()}")
        if name:
            model = self._pool.find(name)
            if model is None:
                raise self._no_such_model(name)
        else:
            there = [model for model in self._pool.models.values() if model.is_there]
            several = there if len(self._pool.models) > 1 else list(self._pool.models.values())
            if len(several) != 1:
                raise FieldError("model", f"this server has several models, so name one as `model`: {self._names()}")
            model = several[0]
        given = request.query_params.get("autoload")
        # What polls, or a page of another site shows as an image, has nothing loaded.
        is_usual = self._server.options.models_autoload and request.method not in _GET
        loads = is_usual if given is None else given in ("1", "true")
        if not loads and model.process is None:
            raise FieldError("model", f"{model.preset.name} is not loaded: load it by POST /models/load")
        return model

    async def _read_named(self, request: Request) -> PooledModel:
        self._check()
        name = (await self._read_json(request, await request.body())).get("model")
        if not isinstance(name, str):
            raise FieldError("model", f"name a model as `model`: {self._names()}")
        model = self._pool.find(name)
        if model is None:
            raise self._no_such_model(name)
        return model

    async def _read_json(self, request: Request, body: bytes) -> dict[str, Any]:
        share = self._server.work.share_for(request.scope)
        return await share.offload(choose_reading_kind(len(body)), lambda: read_json(body), num_items=len(body) // 100)

    def _no_such_model(self, name: str) -> RefusedError:
        return RefusedError(404, "not_found_error", f"there is no model {shorten(name)!r} here: {self._names()}")

    def _names(self) -> str:
        names = list(self._pool.models)
        more = f" and {len(names) - _MAX_NAMES} more, which /v1/models lists" if len(names) > _MAX_NAMES else ""
        return f"there are {', '.join(names[:_MAX_NAMES])}{more}"

    def _describe(self, model: PooledModel) -> dict[str, Any]:
        status: dict[str, Any] = {"value": shown_state(model)}
        if model.process is not None or model.failure:
            status["args"] = list(model.launch.shown)
        if model.failure and model.process is None:
            status |= {"failed": True, "exit_code": model.exit_status, "error": model.failure}
        if model.state == "stopping" or model.is_unloading:
            status["ending"] = True
        return {
            "tags": [],
            "object": "model",
            "created": int(self._server.host.started_s),
            "owned_by": "paceline",
            **model.info,
            "id": model.preset.name,
            "aliases": [model.preset.name, *model.preset.aliases],
            "status": status,
        }


@dataclass(frozen=True, slots=True)
class _Upstream:
    """An answer of a model's process, of which the headers are there."""

    process: ModelProcess
    response: httpx.Response

    @property
    def is_short(self) -> bool:
        return int(self.response.headers.get("content-length", _MAX_WHOLE + 1)) <= _MAX_WHOLE

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        named = ((name.lower(), value) for name, value in self.response.headers.raw)
        return [(name, value) for name, value in named if name.decode("latin-1") not in _NOT_TOLD]

    async def whole(self) -> Response:
        try:
            body = b"".join([part async for part in self.response.aiter_raw()])
        except httpx.HTTPError:
            raise await _cut_off(self.process) from None
        answer = Response(body, self.response.status_code)
        answer.raw_headers = self.headers
        return answer

    async def error(self) -> RefusedError:
        """Return what the answer says, which is an error."""
        try:
            told = json.loads(await self.response.aread())["error"]
        except httpx.HTTPError:
            return await _cut_off(self.process)
        return RefusedError(self.response.status_code, told["type"], told["message"])

    async def parts(self, scope: Scope) -> AsyncGenerator[bytes, None]:
        has_events = self.response.headers.get("content-type", "").startswith("text/event-stream")
        held, is_between = bytearray(), has_events
        try:
            async for part in self.response.aiter_raw():
                held += part
                end = held.rfind(b"\n\n") + 2 if has_events else len(held)
                if has_events and end < 2:
                    if len(held) <= _MAX_HELD:
                        continue
                    end = len(held)
                is_between = has_events and held.endswith(b"\n\n", 0, end)
                yield bytes(held[:end])
                del held[:end]
        except httpx.HTTPError:
            cut_off = await _cut_off(self.process)
            if not is_between:
                # What was sent is no whole answer, and the connection says so by its end.
                raise ConnectionError(str(cut_off)) from None
            yield _error_event(cut_off, scope)
            return
        if held:
            yield bytes(held)


def _error_event(error: PacelineError, scope: Scope) -> bytes:
    """Return what a stream ends with that an error ends, as the API of its request has it."""
    if speaks_anthropic(scope):
        return as_events([anthropic_body(error)[1]], named=True)
    body = status_and_body(error)[1]
    if scope["path"].endswith(_RESPONSES):
        said = body["error"]
        told = {"type": "error", "code": said["type"], "message": said["message"], "param": said["param"]}
        return as_events([{**told, "sequence_number": 0}], named=True)
    return as_events([body])


class _Relay(EventStream):
    """An answer that is handed on while it comes."""

    def __init__(self, upstream: _Upstream, scope: Scope, *, over: Any) -> None:
        # The process sends what keeps its stream alive.
        super().__init__(upstream.parts(scope), over=over, ping_s=0.0, ping=b"")
        self.status_code = upstream.response.status_code
        self.raw_headers = upstream.headers


async def _cut_off(process: ModelProcess) -> RefusedError:
    """Return the error of a request whose process broke off, once the pool knows: whoever asks again is served."""
    await asyncio.wait([process.ended], timeout=_END_S)
    return RefusedError(
        503,
        "unavailable_error",
        "the model's process ended before its answer was complete: ask again, and the model is loaded anew",
    )


def _asked_request(request: Request, body: bytes, process: ModelProcess, client: bytes) -> httpx.Request:
    assert process.web is not None
    scope = request.scope
    target = scope["raw_path"][len(scope["app"].state.prefix) :]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    headers = [(name, value) for name, value in scope["headers"] if name.lower().decode("latin-1") not in _NOT_ASKED]
    headers += [
        (b"authorization", b"Bearer " + process.key.encode()),
        (CLIENT_HEADER.encode(), client),
        (b"x-request-id", scope["state"]["request_id"].encode()),
    ]
    return httpx.Request(request.method, process.web.base_url.copy_with(raw_path=target), headers=headers, content=body)


class _Collected:
    """What a router counts, as prometheus_client's writer takes it."""

    def __init__(self, models: Sequence[PooledModel]) -> None:
        self._models = models

    def collect(self) -> list[Metric]:
        # fmt: off
        counted = (
            ("requests", "Requests that were handed on."),
            ("loads", "Times that the model was loaded, or was to be."),
            ("unloads", "Times that it ended to give way, or was asked to."),
            ("failures", "Times that its process ended unasked."),
        )
        gauges = (
            ("loaded", "1 where the model is loaded, else 0.", lambda m: float(m.state in ("loaded", "stopping"))),
            ("sleeping", "1 where the model sleeps, else 0.", lambda m: float(m.state == "sleeping")),
            ("requests_running", "Requests that it answers.", lambda m: m.leases),
            ("requests_waiting", "Requests that wait for it.", lambda m: len(m.waiting)),
            ("memory_bytes", "Memory of its process.", lambda m: m.process.rss_bytes() if m.process else 0),
        )
        # fmt: on
        found: list[Metric] = []
        for name, meaning in counted:
            counter = CounterMetricFamily(f"paceline:model_{name}", meaning, labels=["model_name"])
            for model in self._models:
                counter.add_metric([model.preset.name], model.counts[name])
            found.append(counter)
        for name, meaning, read in gauges:
            gauge = GaugeMetricFamily(f"paceline:model_{name}", meaning, labels=["model_name"])
            for model in self._models:
                gauge.add_metric([model.preset.name], read(model))
            found.append(gauge)
        return found
