"""Caches that are full when a seed says so: any request but the last of those that hold cells may lose its place."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from paceline.core.errors import NoRoomError
from paceline.core.request import Emission
from paceline.engines.base import Engine, ForwardOutput, Step
from paceline.runtime.drafting import Drafts
from paceline.runtime.loop import DecodingLoop


def at_random(rng: random.Random, share: float = 0.6) -> Iterator[int]:
    """Yield refusals, in a share of the rounds, that cost up to three places."""
    while True:
        yield 1 + rng.randint(0, 3) if rng.random() < share else 0


class Squeeze:
    """Refuses passes of a loop's engine for want of cells, by a script, and counts what that did.

    Args:
        refusals: passes that are refused in each round, one after the other; after the first, which has drafts and
            prompts left out, each of them costs somebody a place.

    Attributes:
        cases: places that were lost, by when.
    """

    def __init__(self, refusals: Iterator[int]) -> None:
        self._script = refusals
        self._refusals: int | None = None
        # Whose drafts were in a pass that was refused.
        self._drafted: set[int] = set()
        self._lost: Counter[int] = Counter()
        self._said: dict[int, int] = {}
        self.cases: Counter[str] = Counter()

    @property
    def num_requests(self) -> int:
        """How many requests lost their place."""
        return len(self._lost)

    def put_on(self, loop: DecodingLoop, engine: Engine) -> None:
        """Have the loop's engine refuse passes from now on."""
        self._forward, self._make_room = engine.forward, loop._scheduler.make_room
        self._engine, self._loop = engine, loop
        engine.forward = self._squeezed  # type: ignore[method-assign]
        loop._scheduler.make_room = self._counted  # type: ignore[method-assign]

    def take_off(self) -> None:
        """Let everything pass again."""
        del self._engine.forward, self._loop._scheduler.make_room

    _engine: Engine
    _forward: Callable[[Sequence[Step]], ForwardOutput]
    _make_room: Callable[[Drafts], Emission | None]
    _loop: DecodingLoop

    def _squeezed(self, steps: Sequence[Step]) -> ForwardOutput:
        if self._refusals is None:
            self._refusals = next(self._script)
        # The last one is in nobody's way: it would be told that the cache has no room for it at all.
        if self._refusals and sum(request.cached > 0 for request in self._loop.active) > 1:
            self._refusals -= 1
            wide = {step.sequence for step in steps if len(step.token_ids) > 1}
            self._drafted |= {
                request.id for request in self._loop.active if request.decoding and request.sequence in wide
            }
            raise NoRoomError("this cache is full, as a seed says")
        self._refusals = None
        self._drafted.clear()
        return self._forward(steps)

    def _counted(self, drafts: Drafts) -> Emission | None:
        before = {request: request.stats.preemptions for request in self._loop.active}
        ended = self._make_room(drafts)
        for request, count in before.items():
            if request.stats.preemptions == count:
                continue
            cases, said = self.cases, self._said.get(request.id)
            cases["in all"] += 1
            cases["with drafts"] += request.id in self._drafted
            cases["in a prompt"] += request.num_output == 0
            cases["before it went on"] += said == request.num_output
            cases["three times and more"] += self._lost[request.id] == 2
            cases["with text withheld"] += bool(request.text._withheld or request.text._decoder.getstate()[0])
            self._lost[request.id] += 1
            self._said[request.id] = request.num_output
        return ended
