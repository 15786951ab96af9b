"""Sessions over shared engines: weights are loaded once, and each variant has its own drafters and policy over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from paceline.api import GenerateOptions, Generation, Model, Stream
from paceline.bench.forcing import ForcedVerifier
from paceline.bench.workloads import Task
from paceline.core.clock import Clock, WallClock
from paceline.core.loop import DecodingLoop
from paceline.drafters.registry import build_drafters
from paceline.engines.base import Engine
from paceline.planning.base import Policy, RoundRecord
from paceline.planning.fixed import NO_SPECULATION

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True)
class Engines:
    """What all sessions share.

    Attributes:
        target: runs the target.
        draft: runs the draft model, if there is one.
        clock: by which runs are timed.
    """

    target: Engine
    draft: Engine | None
    clock: Clock


class _Metered:
    """A policy, and the seconds that drafters took under it; the loop tells them to policies alone."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.drafters_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def observe(self, record: RoundRecord) -> None:
        """Add up, and pass on."""
        self.drafters_s += sum(record.draft_seconds.values())
        self._policy.observe(record)


class Session(Model):
    """What a user has after loading a model: drafters, and a policy that keeps what it learns from prompt to prompt.

    Closing it leaves the engines open, which other sessions use too.

    Attributes:
        reference_ids: tokens that the target is made to say, for the streams that are started next; ``None`` lets it
            speak.
    """

    def __init__(self, engines: Engines, drafters: Sequence[str], policy: Policy) -> None:
        draft = engines.draft if "draft" in drafters else None
        built = build_drafters(drafters, target=engines.target, draft=draft)
        super().__init__(engines.target, built, policy, clock=engines.clock)
        self._metered = _Metered(policy)
        self.loop = DecodingLoop(engines.target, built, cast(Policy, self._metered), clock=engines.clock)
        self.reference_ids: Sequence[int] | None = None

    def __enter__(self) -> Session:
        return self

    @property
    def drafters_s(self) -> float:
        """Seconds that drafters took so far, planning aside."""
        return self._metered.drafters_s

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Stream:
        """Start an answer, forced if there is a reference."""
        stream = super().stream(prompt, **options)
        if self.reference_ids is not None:
            request = stream.request
            request.verifier = ForcedVerifier(request.verifier, self.reference_ids, request.num_prompt)
        return stream

    def close(self) -> None:
        """Cancel what still runs."""
        for request in self.loop.active:
            self.loop.cancel(request)


class Answered(Session):
    """A session whose plain answer is there already, so that recording it does not decode it a second time."""

    def __init__(self, engines: Engines, drafters: Sequence[str], stream: Stream) -> None:
        super().__init__(engines, drafters, NO_SPECULATION)
        self._stream = stream

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Stream:
        """Return the finished answer."""
        return self._stream


class Stopped(Exception):  # noqa: N818 - the user's wish is no error
    """The user wants no more runs."""


def start(session: Session, task: Task, temperature: float, *, speculate: bool) -> Stream:
    """Start a task's answer."""
    session.reference_ids = task.reference_ids
    options = task.options(temperature)
    options["speculate"] = speculate
    return session.stream(task.prompt_ids, **options)


def finish(stream: Stream, stopped: Callable[[], bool]) -> Generation:
    """Return a stream's answer.

    Raises:
        Stopped: the user wants no more; the request is cancelled.
    """
    for _ in stream.rounds():
        if stopped():
            stream.close()
            raise Stopped
    return stream.so_far()


def wall_engines(target: Engine, draft: Engine | None) -> Engines:
    """Return engines timed by the machine's clock."""
    return Engines(target, draft, WallClock())
