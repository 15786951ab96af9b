"""Two models behind one address that have room for one and a half: clients that alternate, an unload and a ``kill -9``.

What limits it is how often a model is loaded: each load serves all who wait for it, so a turn of the models answers as
many requests as there are clients. Answers are compared with those that each model gives alone, so the models are
served with ``--exact``.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Final

import httpx
import psutil
import typer

from benchmarks.server_soak.process import Serving
from benchmarks.server_soak.wire import HOST
from paceline.core.errors import CapabilityError, InputError
from paceline.core.stats import percentile
from paceline.machine import machine
from paceline.models.registry import resolve_model
from paceline.sizes import format_memory

EPILOG = """[bold]Examples[/bold]

python -m benchmarks alternating -m target -m instruct-q4_0.gguf

python -m benchmarks alternating -m a.gguf -m b.gguf --clients 16 --turns 6
"""

_PROMPTS: Final = (
    "Once upon a time there was a",
    "def fibonacci(n):\n",
    "The capital of France is",
    '{"name": "Ada", "born": ',
)
_SERVED: Final = ("--exact", "-np", "4", "-c", "2048", "--grace", "0")


def alternating(
    model: Annotated[list[str], typer.Option("-m", "--model", help="A GGUF file or a name; two of them.")],
    clients: Annotated[int, typer.Option("--clients", help="Clients.")] = 16,
    turns: Annotated[int, typer.Option("--turns", help="Requests of each client.")] = 6,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of each answer.")] = 24,
) -> None:
    """Alternate between two models that have room for one and a half, and check each answer."""
    if len(model) != 2 or clients < 2 or turns < 2 or tokens < 1:
        raise InputError("give two models, and at least two clients, two turns and one token")
    with tempfile.TemporaryDirectory() as folder:
        (models := Path(folder, "models")).mkdir()
        for name, path in zip("ab", model, strict=True):
            (models / f"{name}.gguf").symlink_to(Path(resolve_model(path)).absolute())
        figures = asyncio.run(_measure(Path(folder), clients, turns, tokens))
    for name, value in figures.items():
        print(f"{name:24} {value}")
    print(json.dumps({**figures, "machine": machine()}))
    if figures["lost"] or figures["wrong"] or figures["left processes"]:
        raise CapabilityError("answers were lost or wrong, or processes were left")


async def _measure(folder: Path, clients: int, turns: int, tokens: int) -> dict[str, Any]:
    expected: dict[tuple[str, str], str] = {}
    taken: dict[str, float] = {}
    async with _router(folder) as (web, _):
        for name in "ab":
            for prompt in _PROMPTS:
                expected[name, prompt] = await _ask(web, name, prompt, tokens, stream=False)
            taken |= await _gauge(web, "paceline:model_memory_bytes", name)
    limit = int(1.5 * max(taken.values()))
    scene = _Scene(expected, tokens)
    began_s = perf_counter()
    async with _router(folder, "--models-memory", format_memory(limit)) as (web, process):
        watching = asyncio.create_task(scene.watch(process))
        asking = [asyncio.create_task(scene.client(web, number, turns)) for number in range(clients)]
        total = clients * turns
        await scene.answered(total // 3)
        await scene.unload(web)
        await scene.answered(total * 2 // 3)
        scene.kill(process)
        await asyncio.gather(*asking)
        took_s = perf_counter() - began_s
        watching.cancel()
        loads = {name: (await _gauge(web, "paceline:model_loads_total", name))[name] for name in "ab"}
        children = process.children()
    left = [child for child in children if child.is_running()]
    return {
        "clients": clients,
        "answers": scene.done,
        "lost": total - scene.done,
        "wrong": scene.wrong,
        "asked again": scene.again,
        "loads": {name: int(count) for name, count in loads.items()},
        "limit": format_memory(limit),
        "each takes": {name: format_memory(int(count)) for name, count in taken.items()},
        "most at once": format_memory(scene.most_bytes),
        "seconds": round(took_s, 1),
        "wait p50 s": round(percentile(scene.waits_s, 0.5), 2),
        "wait max s": round(max(scene.waits_s), 2),
        "unloaded": scene.unloaded,
        "killed": scene.killed,
        "left processes": len(left),
    }


class _Scene:
    """What the clients ask, and what became of it."""

    def __init__(self, expected: dict[tuple[str, str], str], tokens: int) -> None:
        self.expected, self.tokens = expected, tokens
        self.done = self.wrong = self.again = self.most_bytes = self.killed = self.unloaded = 0
        self.waits_s: list[float] = []
        self._changed = asyncio.Event()

    async def client(self, web: httpx.AsyncClient, number: int, turns: int) -> None:
        for turn in range(turns):
            name, prompt = "ab"[(number + turn) % 2], _PROMPTS[(number + turn // 2) % len(_PROMPTS)]
            began_s = perf_counter()
            while True:
                try:
                    text = await _ask(web, name, prompt, self.tokens, stream=bool((number + turn // 2) % 2))
                except _CutOffError:
                    # As its clients do: the error says to ask again.
                    self.again += 1
                    continue
                break
            self.waits_s.append(perf_counter() - began_s)
            self.done += 1
            self.wrong += text != self.expected[name, prompt]
            self._changed.set()

    async def answered(self, number: int) -> None:
        while self.done < number:
            self._changed.clear()
            await self._changed.wait()

    async def unload(self, web: httpx.AsyncClient) -> None:
        """Unload whatever is loaded, while it answers."""
        for name in "ab":
            response = await web.post("/models/unload", json={"model": name})
            self.unloaded += response.is_success

    def kill(self, router: psutil.Process) -> None:
        for child in router.children():
            child.send_signal(signal.SIGKILL)
            self.killed += 1

    async def watch(self, router: psutil.Process) -> None:
        """Note the most memory that all models take."""
        while True:
            taken: Counter[int] = Counter()
            for child in router.children():
                try:
                    taken[child.pid] = child.memory_info().rss
                except psutil.Error:
                    continue
            self.most_bytes = max(self.most_bytes, taken.total())
            await asyncio.sleep(0.1)


class _CutOffError(Exception):
    """The answer broke off, and says to ask again."""


async def _ask(web: httpx.AsyncClient, name: str, prompt: str, tokens: int, *, stream: bool) -> str:
    body = {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
    if not stream:
        response = await web.post("/v1/completions", json=body)
        if response.status_code == 503:
            raise _CutOffError(response.text)
        return str(response.raise_for_status().json()["choices"][0]["text"])
    text = ""
    async with web.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code == 503:
            raise _CutOffError((await response.aread()).decode())
        async for line in response.raise_for_status().aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    break
                text += chunk["choices"][0]["text"]
    raise _CutOffError


async def _gauge(web: httpx.AsyncClient, family: str, name: str) -> dict[str, float]:
    line = f'{family}{{model_name="{name}"}} '
    scraped = (await web.get("/metrics")).text
    return {name: next(float(each.removeprefix(line)) for each in scraped.splitlines() if each.startswith(line))}


@asynccontextmanager
async def _router(folder: Path, *options: str) -> AsyncIterator[tuple[httpx.AsyncClient, psutil.Process]]:
    flags = ["--models-dir", str(folder / "models"), "--metrics", *_SERVED, *options]
    async with (
        Serving.start(flags, folder / "log") as serving,
        httpx.AsyncClient(base_url=f"http://{HOST}:{serving.port}", timeout=None, limits=httpx.Limits()) as web,
    ):
        yield web, psutil.Process(serving.pid)
        serving.terminate()
        await serving.ended()
