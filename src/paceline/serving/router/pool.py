"""Which models are loaded: for whom there is room, who gives way, and who waits.

::

    unloaded ──a request, and room──> loading ──> loaded <──> sleeping
       ^                                 │           │ nobody asks, and another model has waited longest
       └──────────── stopping <──────────┴───────────┘

A request has a *lease* of a model from the moment it may be sent there to the end of its answer. Models without a lease
give way, the one that was of use longest ago first. Where all have leases, one that has had its time while another one
waits grants no more, and gives way after those that it has. So nobody waits for ever, no answer is cut off, and a model
that was loaded serves at least all who waited for it. All of it belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from paceline.core.errors import QueueFullError
from paceline.engines.memory import available_memory
from paceline.serving.errors import RefusedError
from paceline.serving.router.presets import Preset
from paceline.serving.router.process import ModelProcess
from paceline.serving.work import in_own_thread
from paceline.sizes import format_memory

_log = logging.getLogger("paceline.serving.router")

State: TypeAlias = Literal["unloaded", "loading", "loaded", "sleeping", "stopping"]

_AGAIN_S: Final = 3.0
"""Seconds after a failed load in which requests get its reason, and nothing is tried."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a model's process is started: its words, those that may be shown, its environment, and what it may take."""

    words: Sequence[str]
    shown: Sequence[str]
    environment: Mapping[str, str]
    estimate_bytes: int


@dataclass(eq=False)
class _Waiter:
    key: str
    since_s: float
    turn: asyncio.Future[ModelProcess]


@dataclass(eq=False)
class PooledModel:
    """A model, and what has become of it.

    Attributes:
        leases: requests that it answers.
        used_s: when it last got or lost a lease.
        loaded_s: when it was loaded; 0 before.
        grants: whether it takes more requests, as far as others are concerned.
        is_unloading: whether somebody asked for its end.
        is_removed: whether it is listed no more, and only ends.
        successor: its options from its next load on, where they are others.
        info: what its process says of it, since it was loaded first.
        failure: in one line why it could not be loaded, or ended unasked.
        exit_status: of its latest process; ``None`` where that was asked to end.
    """

    preset: Preset
    launch: Launch
    state: State = "unloaded"
    process: ModelProcess | None = None
    waiting: deque[_Waiter] = field(default_factory=deque)
    leases: int = 0
    used_s: float = 0.0
    loaded_s: float = 0.0
    failed_s: float | None = None
    grants: bool = True
    is_unloading: bool = False
    is_removed: bool = False
    successor: tuple[Preset, Launch] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    exit_status: int | None = None
    measured_bytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_there(self) -> bool:
        return self.state in ("loaded", "sleeping")

    @property
    def is_in_use(self) -> bool:
        return self.leases > 0 or (self.grants and bool(self.waiting))

    def take_bytes(self) -> int:
        """Return what the model's process takes, or will."""
        now = 0 if self.process is None else self.process.rss_bytes()
        if self.state == "loaded":
            self.measured_bytes = now
        # One that sleeps may wake at any moment.
        return max(now, self.measured_bytes or self.launch.estimate_bytes)


class ModelPool:
    """The models of a router.

    Args:
        find: returns all that there are, with how each is started; called again to look for others.
        most: models that are loaded at once; 0 for no limit.
        most_bytes: that all may take; ``None`` for what is free.
        wait_s: seconds that a model in use may keep others waiting.
        most_waiting: requests of one key that wait.
        make_process: makes what a model is started as.
    """

    def __init__(
        self,
        find: Callable[[], Mapping[str, tuple[Preset, Launch]]],
        *,
        most: int,
        most_bytes: int | None,
        wait_s: float,
        most_waiting: int,
        make_process: Callable[[str, Callable[[Mapping[str, Any]], object]], ModelProcess] = ModelProcess,
    ) -> None:
        self._find = find
        self._most = most
        self._most_bytes = most_bytes
        self._wait_s = wait_s
        self._most_waiting = most_waiting
        self._make_process = make_process
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listeners: set[asyncio.Queue[dict[str, Any] | None]] = set()
        self._is_closed = False
        self.models = {name: PooledModel(*each) for name, each in find().items()}

    async def reload(self) -> None:
        """Look for models again. One that is gone, or has other options, ends once its requests are answered.

        Raises:
            InputError: they cannot be read.
        """
        found = dict(await in_own_thread(self._find))
        for name, model in list(self.models.items()):
            now = found.pop(name, None)
            model.is_removed = now is None
            model.successor = now if now != (model.preset, model.launch) else None
            if model.process is None:
                self._renew(model)
        self.models |= {name: PooledModel(*each) for name, each in found.items()}
        self._tell("*", "models_reload", None)
        self._schedule()

    def find(self, name: str) -> PooledModel | None:
        """Return the model that has this name."""
        found = self.models.get(name)
        return found or next((each for each in self.models.values() if name in each.preset.aliases), None)

    @contextlib.asynccontextmanager
    async def lease(self, model: PooledModel, key: str) -> AsyncIterator[ModelProcess]:
        """Wait until the model may be asked, and keep it for as long as the block runs.

        Raises:
            QueueFullError: too many requests of this key wait.
            RefusedError: the model cannot be loaded, or the server ends.
        """
        process = await self._wait_for_turn(model, key)
        try:
            with process.reading():
                yield process
        finally:
            model.leases -= 1
            model.used_s = _now_s()
            self._schedule()

    def load(self, model: PooledModel) -> None:
        """Have a model loaded though nobody asks it anything."""
        model.failed_s = None

        async def load() -> None:
            with contextlib.suppress(RefusedError):
                async with self.lease(model, ""):
                    pass

        self._follow(load())

    def unload(self, model: PooledModel) -> None:
        """Have a model end once the requests that it has are answered; those that wait have it loaded again.

        One that is being loaded ends at once.
        """
        if model.state == "loading":
            self._fail_waiting(model, "the model was unloaded before it was there: ask again, and it is loaded anew")
            self._stop(model)
        elif model.state != "stopping":
            model.is_unloading = True
        self._schedule()

    def stop_all(self) -> None:
        """End all processes, and with them the answers that they write; nobody waits any longer."""
        self._is_closed = True
        for model in self.models.values():
            self._fail_waiting(model, "the server is ending: send the request to another one, or later")
            if model.process is not None and model.state != "stopping":
                self._stop(model)

    async def close(self) -> None:
        """End all processes, and wait for that."""
        self.stop_all()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    @contextlib.contextmanager
    def listen(self) -> Iterator[asyncio.Queue[dict[str, Any] | None]]:
        """Yield a queue that gets what becomes of models, and ``None`` at the end."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)

    def end_listening(self) -> None:
        for queue in self._listeners:
            queue.put_nowait(None)

    async def _wait_for_turn(self, model: PooledModel, key: str) -> ModelProcess:
        if self._is_closed:
            raise _unavailable("the server is ending: send the request to another one, or later")
        if model.failed_s is not None and model.state == "unloaded" and _now_s() < model.failed_s + _AGAIN_S:
            raise _unavailable(_failure(model))
        if key and sum(w.key == key for each in self.models.values() for w in each.waiting) >= self._most_waiting:
            raise QueueFullError(
                f"{self._most_waiting} requests of this client are waiting for a model, which "
                "is the limit: try again later, or "
                "start the server with a larger `max_waiting`"
            )
        waiter = _Waiter(key, _now_s(), asyncio.get_running_loop().create_future())
        model.waiting.append(waiter)
        self._schedule()
        try:
            return await waiter.turn
        except BaseException:
            if waiter in model.waiting:
                model.waiting.remove(waiter)
            elif waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                model.leases -= 1
            self._schedule()
            raise

    def _schedule(self) -> None:
        """Grant what may be granted, and make room for the model that is waited for longest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_closed:
            return
        models = list(self.models.values())
        for model in models:
            model.grants = not (model.is_unloading or model.is_removed or model.successor)
            if not model.grants and model.is_there and not model.leases:
                self._stop(model)
        waited_for = [model for model in models if model.waiting and model.state == "unloaded"]
        for model in sorted(waited_for, key=lambda model: model.waiting[0].since_s):
            if not self._make_room(model):
                break
            self._start(model)
        for model in models:
            if model.is_there and model.grants:
                self._grant(model)

    def _grant(self, model: PooledModel) -> None:
        """Give a lease to all who wait for a model that is there."""
        assert model.process is not None
        while model.waiting:
            waiter = model.waiting.popleft()
            if not waiter.turn.done():
                model.leases += 1
                model.used_s = _now_s()
                model.counts["requests"] += 1
                waiter.turn.set_result(model.process)

    def _make_room(self, wanted: PooledModel) -> bool:
        """Return whether a model may be loaded now; if not, have others give way as far as they have to."""
        holding = [model for model in self.models.values() if model.process is not None]
        if self._fits(wanted, holding):
            return True
        if self._most_bytes is not None and wanted.launch.estimate_bytes > self._most_bytes:
            self._fail_waiting(
                wanted,
                f"the model takes about {format_memory(wanted.launch.estimate_bytes)}, and all models may take "
                f"{format_memory(self._most_bytes)}: start the server with a larger `models_memory`",
            )
            return False
        left = [model for model in holding if model.state != "stopping"]
        giving: list[PooledModel] = []
        # Of those in use the one that was loaded first, which stays the first until it has gone.
        order = {m.preset.name: (True, m.loaded_s) if m.is_in_use else (False, m.used_s) for m in left}
        for model in sorted((m for m in left if m.is_there), key=lambda m: order[m.preset.name]):
            if self._fits(wanted, left):
                break
            left.remove(model)
            giving.append(model)
        now_s, nearest_s = _now_s(), float("inf")
        for model in giving:
            turn_s = max(model.loaded_s, wanted.waiting[0].since_s) + self._wait_s
            model.grants = model.grants and now_s < turn_s
            if model.grants:
                nearest_s = min(nearest_s, turn_s)
        if not any(model.is_in_use for model in giving):
            for model in giving:
                self._stop(model)
        elif nearest_s < float("inf"):
            self._timer = asyncio.get_running_loop().call_later(nearest_s - now_s, self._schedule)
        return False

    def _fits(self, wanted: PooledModel, beside: Sequence[PooledModel]) -> bool:
        """Return whether there would be room for a model beside these, if no others held any."""
        if self._most and len(beside) >= self._most:
            return False
        if self._most_bytes is not None:
            # By itself it may grow as it likes.
            takes = wanted.take_bytes() if beside else wanted.launch.estimate_bytes
            return takes + sum(model.take_bytes() for model in beside) <= self._most_bytes
        free = available_memory()
        if free is None or not beside:
            # Where it does not fit by itself, layers are read while they are used.
            return True
        holding = [model for model in self.models.values() if model.process is not None]
        to_come = sum(model.take_bytes() - model.process.rss_bytes() for model in beside if model.process is not None)
        freed = sum(model.process.rss_bytes() for model in holding if model not in beside and model.process)
        return wanted.take_bytes() + to_come <= free + freed

    def _start(self, model: PooledModel) -> None:
        model.state, model.loaded_s = "loading", 0.0
        model.process = process = self._make_process(model.preset.name, lambda news: self._hear(model, process, news))
        model.counts["loads"] += 1
        self._tell_state(model)
        launch = model.launch
        self._follow(process.run(launch.words, launch.environment, model.preset.tags))
        process.ended.add_done_callback(lambda ended: self._take_end(model, process, ended.result()))

    def _hear(self, model: PooledModel, process: ModelProcess, news: Mapping[str, Any]) -> None:
        state = news["state"]
        if model.process is not process or model.state == "stopping" or state not in ("loaded", "sleeping"):
            return
        if state == "loaded":
            if model.state == "loading":
                model.loaded_s = model.used_s = _now_s()
            model.info = news["info"]
            model.failure, model.failed_s, model.exit_status = "", None, None
        else:
            # What it takes awake is still to be counted.
            model.take_bytes()
        is_new, model.state = model.state == "loading", state
        self._tell_state(model)
        if is_new:
            # Before anybody is heard who has waited longer: nothing is loaded in vain.
            self._grant(model)
        self._schedule()

    def _take_end(self, model: PooledModel, process: ModelProcess, status: int) -> None:
        was_loading = model.state == "loading"
        if model.state == "stopping":
            model.counts["unloads"] += 1
        else:
            model.counts["failures"] += 1
            model.exit_status, model.failure = status, process.reason
            _log.error("%s ended: %s", model.preset.name, process.reason)
        model.state, model.process, model.is_unloading = "unloaded", None, False
        if was_loading:
            model.failed_s = _now_s()
            self._fail_waiting(model, _failure(model))
        self._renew(model)
        self._tell_state(model)
        self._schedule()

    def _renew(self, model: PooledModel) -> None:
        """Let what a reload said of a model take effect, now that it has no process."""
        if model.successor is not None:
            (model.preset, model.launch), model.successor = model.successor, None
            model.measured_bytes = 0
        if model.is_removed:
            self.models.pop(model.preset.name, None)
            self._fail_waiting(model, "the model is not here any more")

    def _stop(self, model: PooledModel) -> None:
        assert model.process is not None
        # While it is loaded there is nothing that could come to an end in good order, and loading may hang.
        stop_s = 0.0 if model.state == "loading" else model.preset.stop_s
        model.state, model.is_unloading = "stopping", False
        self._follow(model.process.stop(stop_s))

    def _fail_waiting(self, model: PooledModel, message: str) -> None:
        waiting, model.waiting = model.waiting, deque()
        for waiter in waiting:
            if not waiter.turn.done():
                waiter.turn.set_exception(_unavailable(message))

    def _tell_state(self, model: PooledModel) -> None:
        data: dict[str, Any] = {"status": shown_state(model)}
        if model.state == "loaded":
            data["info"] = model.info
        if model.exit_status is not None:
            data["exit_code"] = model.exit_status
        self._tell(model.preset.name, "model_status", data)

    def _tell(self, name: str, event: str, data: Mapping[str, Any] | None) -> None:
        for queue in self._listeners:
            queue.put_nowait({"model": name, "event": event, **({} if data is None else {"data": data})})

    def _follow(self, work: Any) -> None:
        # An event loop holds its tasks weakly.
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def shown_state(model: PooledModel) -> str:
    """Return the state as llama-server has it: one that ends is what it was until it has ended."""
    if model.state == "stopping":
        return "loaded" if model.loaded_s else "loading"
    return model.state


def _failure(model: PooledModel) -> str:
    return f"the model could not be loaded: {model.failure}"


def _unavailable(message: str) -> RefusedError:
    return RefusedError(503, "unavailable_error", message)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
