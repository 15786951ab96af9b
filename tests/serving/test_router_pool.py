"""Which models are loaded: processes are played, so that each step is the test's."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import QueueFullError
from paceline.serving.errors import RefusedError
from paceline.serving.router import pool as pool_module
from paceline.serving.router.pool import Launch, ModelPool, PooledModel, shown_state
from paceline.serving.router.presets import Preset
from tests.timing import WAIT_S

_GIB = 1 << 30


class Played:
    """A process that does what the test says; by default it loads at once, and ends when told to."""

    rss = 0

    def __init__(self, name: str, on_news: Callable[[Mapping[str, Any]], object]) -> None:
        self.name, self.on_news = name, on_news
        self.reason, self.web, self.stopped = "", None, False
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, *started_as: object) -> None:
        if not Scene.holds_loading:
            self.loaded()
        await asyncio.shield(self.ended)

    def loaded(self) -> None:
        self.on_news({"state": "loaded", "info": {}})

    async def stop(self, timeout_s: float) -> None:
        self.stopped = True
        if not Scene.holds_ending:
            self.end(0)

    def end(self, status: int, reason: str = "") -> None:
        self.reason = reason or f"status {status}"
        self.ended.set_result(status)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        yield

    def rss_bytes(self) -> int:
        return self.rss


class Scene:
    """A pool of models a, b and c, and what was started."""

    holds_loading = holds_ending = False

    def __init__(self, *, sizes: Mapping[str, int] | None = None, **limits: Any) -> None:
        Scene.holds_loading = Scene.holds_ending = False
        self.started: list[Played] = []
        self.sizes = sizes or dict.fromkeys("abc", _GIB)
        given = {"most": 0, "most_bytes": None, "wait_s": 60.0, "most_waiting": 100, **limits}
        self.pool = ModelPool(self._find, make_process=self._make, **given)

    def _find(self) -> dict[str, tuple[Preset, Launch]]:
        return {
            name: (Preset(name, Path(name), aliases=(name.upper(),)), Launch((), (), {}, size))
            for name, size in self.sizes.items()
        }

    def _make(self, name: str, on_news: Callable[[Mapping[str, Any]], object]) -> Any:
        self.started.append(Played(name, on_news))
        return self.started[-1]

    def __getitem__(self, name: str) -> PooledModel:
        return self.pool.models[name]

    @property
    def states(self) -> dict[str, str]:
        return {name: model.state for name, model in self.pool.models.items() if model.state != "unloaded"}

    async def lease(self, name: str, key: str = "k") -> AsyncExitStack:
        stack = AsyncExitStack()
        await stack.enter_async_context(self.pool.lease(self[name], key))
        return stack

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await asyncio.sleep(0)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_model_of_least_use_gives_way() -> None:
    scene = Scene(most=2)
    for name in "abab":
        await (await scene.lease(name)).aclose()
    await (await scene.lease("a")).aclose()
    assert [process.name for process in scene.started] == ["a", "b"]
    await (await scene.lease("c")).aclose()
    assert scene.states == {"a": "loaded", "c": "loaded"}
    assert scene["b"].counts == {"loads": 1, "unloads": 1, "requests": 2}


async def test_a_model_in_use_is_not_ended_and_those_who_wait_are_served_in_their_order() -> None:
    scene = Scene(most=1)
    held = await scene.lease("a")
    waiting: dict[str, list[asyncio.Task[AsyncExitStack]]] = {"b": [], "c": []}
    for name in "cbc":
        waiting[name].append(asyncio.create_task(scene.lease(name)))
        await settle()
    assert scene.states == {"a": "loaded"}
    # a is not given up to by others yet, so it still takes requests.
    await (await scene.lease("a")).aclose()
    await held.aclose()
    first, second = await asyncio.gather(*waiting["c"])
    assert scene.states == {"c": "loaded"}
    await first.aclose()
    await settle()
    assert not waiting["b"][0].done()
    await second.aclose()
    await (await waiting["b"][0]).aclose()
    assert [process.name for process in scene.started] == ["a", "c", "b"]


async def test_a_model_that_is_always_in_use_gives_way_after_its_time() -> None:
    scene = Scene(most=1, wait_s=0.05)
    ended = False

    async def use(name: str) -> None:
        while not ended:
            lease = await scene.lease(name)
            await asyncio.sleep(0.001)
            await lease.aclose()

    # Of three, one at least has a lease at any time.
    users = [asyncio.create_task(use("a")) for _ in range(3)]
    await scene.until(lambda: scene.states == {"a": "loaded"})
    for _ in range(3):
        async with asyncio.timeout(WAIT_S):
            lease = await scene.lease("b")
        await lease.aclose()
        await scene.until(lambda: scene.states == {"a": "loaded"})
    ended = True
    await asyncio.gather(*users)
    assert scene["a"].counts["loads"] == 4


async def test_memory_bounds_what_is_loaded_together() -> None:
    scene = Scene(sizes={"a": _GIB, "b": _GIB // 4, "c": _GIB, "d": 2 * _GIB}, most_bytes=_GIB * 3 // 2)
    await (await scene.lease("a")).aclose()
    await (await scene.lease("b")).aclose()
    assert scene.states == {"a": "loaded", "b": "loaded"}
    await (await scene.lease("c")).aclose()
    assert scene.states == {"b": "loaded", "c": "loaded"}
    with pytest.raises(RefusedError, match=r"2\.0G.*1\.5G.*models_memory"):
        await scene.lease("d")
    assert scene.states == {"b": "loaded", "c": "loaded"}
    # What was measured counts once it is known: c has grown, so that b has no room beside it any more.
    scene.started[2].rss = _GIB * 11 // 8
    assert scene["c"].take_bytes() == _GIB * 11 // 8
    scene.pool.unload(scene["c"])
    await (await scene.lease("c")).aclose()
    assert scene.states == {"c": "loaded"}
    # It may also be more than all may take: it was loaded, and is again.
    scene.started[3].rss = 2 * _GIB
    await (await scene.lease("a")).aclose()
    await (await scene.lease("c")).aclose()
    assert scene.states == {"c": "loaded"}


async def test_without_a_limit_it_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 3 * _GIB // 2
    monkeypatch.setattr(pool_module, "available_memory", lambda: free)

    scene = Scene(sizes={"a": _GIB, "b": _GIB, "c": 9 * _GIB})
    await (await scene.lease("a")).aclose()
    scene.started[0].rss, free = _GIB, free - _GIB
    scene["a"].take_bytes()
    free = _GIB // 2
    second = asyncio.create_task(scene.lease("b"))
    await scene.until(second.done)
    assert scene.states == {"b": "loaded"}
    await (await second).aclose()
    # One that never fits is tried all the same: its layers are read while they are used.
    await (await scene.lease("c")).aclose()
    assert scene.states == {"c": "loaded"}


async def test_what_is_unloaded_finishes_what_it_has_and_takes_nothing_new() -> None:
    scene = Scene()
    Scene.holds_ending = True
    held = await scene.lease("a")
    scene.pool.unload(scene["a"])
    later = asyncio.create_task(scene.lease("a"))
    await settle()
    assert (scene.states, later.done(), scene.started[0].stopped) == ({"a": "loaded"}, False, False)
    await held.aclose()
    await scene.until(lambda: scene.started[0].stopped)
    assert (scene.states, later.done()) == ({"a": "stopping"}, False)
    scene.started[0].end(0)
    await (await later).aclose()
    assert len(scene.started) == 2


async def test_a_model_is_unloaded_while_it_is_loaded() -> None:
    scene = Scene(most=1)
    Scene.holds_loading = Scene.holds_ending = True
    waiting = [asyncio.create_task(scene.lease("a")) for _ in range(3)]
    other = asyncio.create_task(scene.lease("b"))
    await scene.until(lambda: bool(scene.started))
    scene.pool.unload(scene["a"])
    for each in waiting:
        with pytest.raises(RefusedError, match="unloaded before"):
            await each
    # It may be there just then.
    scene.started[0].loaded()
    assert (scene.states, shown_state(scene["a"]), scene.started[0].stopped) == ({"a": "stopping"}, "loading", True)
    # Nothing is left to do.
    scene.pool.unload(scene["a"])
    Scene.holds_loading = False
    scene.started[0].end(0)
    await (await other).aclose()
    assert scene["a"].counts == {"loads": 1, "unloads": 1}


async def test_a_model_that_cannot_be_loaded_says_why_to_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    Scene.holds_loading = True
    waiting = [asyncio.create_task(scene.lease("a")) for _ in range(3)]
    await scene.until(lambda: bool(scene.started))
    scene.started[0].end(1, "a.gguf is not a model")
    for each in waiting:
        with pytest.raises(RefusedError, match=r"could not be loaded: a\.gguf is not a model"):
            await each
    # It is not tried again at once, unless somebody says so.
    with pytest.raises(RefusedError, match="not a model"):
        await scene.lease("a")
    assert len(scene.started) == 1
    Scene.holds_loading = False
    scene.pool.load(scene["a"])
    await scene.until(lambda: scene.states == {"a": "loaded"})
    assert scene["a"].failure == ""
    await (await scene.lease("a")).aclose()


async def test_a_process_that_dies_is_started_again_by_the_next_request() -> None:
    scene = Scene(most=1)
    held = await scene.lease("a")
    scene.started[0].end(-9)
    await settle()
    assert (scene.states, scene["a"].exit_status) == ({}, -9)
    second = await scene.lease("a")
    assert len(scene.started) == 2
    # The lease of the dead one is given back late.
    await held.aclose()
    assert scene["a"].leases == 1
    await second.aclose()
    await (await scene.lease("b")).aclose()
    assert scene.states == {"b": "loaded"}


async def test_who_leaves_while_waiting_costs_no_model_its_place() -> None:
    scene = Scene(most=1)
    held = await scene.lease("a")
    left = asyncio.create_task(scene.lease("b"))
    await settle()
    left.cancel()
    await settle()
    await held.aclose()
    await settle()
    assert scene.states == {"a": "loaded"}
    assert not scene["b"].waiting


async def test_only_so_many_requests_of_a_key_wait() -> None:
    scene = Scene(most=1, most_waiting=2)
    held = await scene.lease("a")
    waiting = [asyncio.create_task(scene.lease("b")) for _ in range(2)]
    await settle()
    with pytest.raises(QueueFullError, match="max_waiting"):
        await scene.lease("c")
    # The model that is there takes no place in the queue, and other keys have queues of their own.
    other = asyncio.create_task(scene.lease("c", "other"))
    await held.aclose()
    for each in waiting:
        await (await each).aclose()
    await (await other).aclose()


async def test_a_sleeping_model_keeps_its_room_and_gives_way_like_any_other() -> None:
    scene = Scene(most_bytes=_GIB * 3 // 2)
    await (await scene.lease("a")).aclose()
    scene.started[0].rss = _GIB
    scene["a"].take_bytes()
    scene.started[0].rss = 0
    scene.started[0].on_news({"state": "sleeping"})
    assert scene.states == {"a": "sleeping"}
    await (await scene.lease("b")).aclose()
    assert scene.states == {"b": "loaded"}


async def test_a_reload_ends_what_is_gone_and_what_has_other_options() -> None:
    scene = Scene()
    for name in "abc":
        await (await scene.lease(name)).aclose()
    held = await scene.lease("a")
    scene.sizes = {"a": 2 * _GIB, "b": _GIB, "d": _GIB}
    await scene.pool.reload()
    await settle()
    assert scene.states == {"a": "loaded", "b": "loaded"}
    assert [*scene.pool.models] == ["a", "b", "d"]
    await held.aclose()
    await (await scene.lease("a")).aclose()
    assert scene["a"].launch.estimate_bytes == 2 * _GIB
    assert scene["a"].counts["loads"] == 2


async def test_the_end_of_the_pool_is_the_end_of_all_processes() -> None:
    scene = Scene(most=2)
    held, other = await scene.lease("a"), await scene.lease("b")
    waiting = asyncio.create_task(scene.lease("c"))
    await settle()
    await scene.pool.close()
    assert all(process.stopped for process in scene.started)
    with pytest.raises(RefusedError, match="ending"):
        await waiting
    with pytest.raises(RefusedError, match="ending"):
        await scene.lease("a")
    await held.aclose()
    await other.aclose()


@pytest.mark.parametrize("seed", range(8))
async def test_nobody_is_lost_or_starves_whatever_happens(seed: int) -> None:
    """Clients ask, leave, and models die and are unloaded, at random; then all who wait are served."""

    chance = random.Random(seed)
    scene = Scene(most=chance.choice([1, 2]), most_bytes=_GIB * 5 // 2, wait_s=0.002)
    served, failed = 0, 0

    async def client() -> None:
        nonlocal served, failed
        for _ in range(20):
            task = asyncio.create_task(scene.lease(chance.choice("abc")))
            if chance.random() < 0.1:
                await asyncio.sleep(chance.random() * 0.001)
                task.cancel()
            try:
                lease = await task
            except asyncio.CancelledError:
                continue
            served += 1
            await asyncio.sleep(chance.random() * 0.001)
            await lease.aclose()

    async def trouble() -> None:
        while True:
            await asyncio.sleep(0.002)
            there = [model for model in scene.pool.models.values() if model.is_there]
            if there and chance.random() < 0.5:
                scene.pool.unload(chance.choice(there))
            elif there:
                process: Any = chance.choice(there).process
                process.end(-9)

    troubling = asyncio.create_task(trouble())
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(client() for _ in range(16)))
    troubling.cancel()
    await settle()
    assert served > 200
    assert all(model.leases == 0 and not model.waiting for model in scene.pool.models.values())
