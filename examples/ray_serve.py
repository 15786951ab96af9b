"""paceline on Ray Serve, which starts, watches, drains and scales the replicas; docs/guides/ray-serve.md shows how.

::

                          the beginning of the prompt
    client ──HTTP──> Front ────────────────────────> Replica ──Unix socket──> paceline serve
                       └─────────────────────────> Replica ──Unix socket──> paceline serve

A replica runs ``paceline serve`` in a process of its own: flags, routes and the time that rounds take are those of a
server without Ray.
"""

import asyncio
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
from pydantic import BaseModel, Field
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

OF_ONE_CONNECTION: Final = {"connection", "host", "keep-alive", "transfer-encoding", "upgrade"}
"""Headers that are not handed on."""

ENDS_WITH_ITS_PARENT: Final = ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()
"""Of Linux: a process that is begun with it ends when Ray kills the replica, too."""

PROMPTS: Final = ("system", "instructions", "messages", "input", "prompt")
"""Fields of requests that prompts begin with, in the order in which they come in a prompt."""


class Arguments(BaseModel):
    """``args`` of the application in ray_serve.yaml."""

    flags: str = Field("", description="of paceline serve, such as: -m model.gguf -np 4")
    prefix: int = Field(256, ge=1, description="characters of prompts by which requests are kept together")


@serve.deployment(
    autoscaling_config={"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4},
    # More than it answers at once wait in it, and more than that go to the next replica.
    max_ongoing_requests=16,
    health_check_period_s=5,
    graceful_shutdown_timeout_s=120,
    request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
)
class Replica:
    """A server, from the start of its process to the end."""

    async def __init__(self, flags: str) -> None:  # type: ignore[misc]  # as Ray takes it
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
        path = str(Path(self._folder.name, "http.sock"))
        self._server = await asyncio.create_subprocess_exec(
            *ENDS_WITH_ITS_PARENT,
            *(sys.executable, "-m", "paceline", "serve", *shlex.split(flags), "--host", path),
        )
        transport = httpx.AsyncHTTPTransport(uds=path, limits=httpx.Limits(max_connections=None))
        # How long an answer may take is a matter of paceline's own limits.
        self._web = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)
        self._name = serve.get_replica_context().replica_id.unique_id
        while not await self._is_ready():
            try:
                status = await asyncio.wait_for(self._server.wait(), 0.2)
            except TimeoutError:
                continue
            raise RuntimeError(f"paceline serve {flags} ended with status {status}; the log of this replica says why")

    async def _is_ready(self) -> bool:
        try:
            return (await self._web.get("/health")).is_success
        except httpx.TransportError:
            return False

    async def check_health(self) -> None:
        """Raise if there is nobody to answer; Ray then puts another replica in place of this one."""
        (await self._web.get("/health", timeout=10)).raise_for_status()

    async def answer(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> AsyncIterator[tuple[int, dict[str, str]] | bytes]:
        """Yield the status and the headers of the answer, and then its bytes as they come."""
        async with self._web.stream(method, path, headers=headers, content=body) as response:
            yield response.status_code, {**_handed_on(response.headers), "x-replica": self._name}
            async for part in response.aiter_raw():
                yield part

    async def __del__(self) -> None:
        # Ray asks for this once nothing is under way here, or graceful_shutdown_timeout_s is over.
        if self._server.returncode is None:
            self._server.terminate()
            await self._server.wait()
        self._folder.cleanup()


@serve.deployment(max_ongoing_requests=1000)
class Front:
    """Takes requests, and hands each to the replica that prompts with such a beginning belong to."""

    def __init__(self, replicas: DeploymentHandle[Any], prefix: int) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._prefix = prefix

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        chosen = self._replicas.options(session_id=beginning(body, self._prefix))
        parts = chosen.remote(request.method, path, list(_handed_on(request.headers).items()), body)
        try:
            status, headers = await anext(parts)
        except RayError as error:
            return JSONResponse(_lost(error), 503)
        return StreamingResponse(_rest(parts, headers), status, headers)


async def _rest(parts: AsyncIterator[bytes], headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Iterate over the bytes of an answer; a stream of events whose replica is lost ends in one that says so."""
    try:
        async for part in parts:
            yield part
    except RayError as error:
        if not headers.get("content-type", "").startswith("text/event-stream"):
            raise
        yield f"data: {json.dumps(_lost(error))}\n\n".encode()


def _lost(error: RayError) -> dict[str, Any]:
    message = f"the replica that answered was lost ({type(error).__name__}): ask again"
    return {"error": {"message": message, "type": "unavailable_error", "code": 503}}


def _handed_on(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in OF_ONE_CONNECTION}


def beginning(body: bytes, length: int) -> str:
    """Return so many characters of a request's prompt; nothing where there is none, which any replica may answer."""
    try:
        asked = json.loads(body)
    except ValueError:
        return ""
    said = [asked[name] for name in PROMPTS if asked.get(name)] if isinstance(asked, dict) else []
    return json.dumps(said)[:length] if said else ""


def app(arguments: Arguments) -> Application:
    """Return the application that ray_serve.yaml names."""
    return Front.bind(Replica.bind(arguments.flags), arguments.prefix)  # type: ignore[attr-defined]
