"""The simulations of a plan, each of which stands by itself: in as many processes as there are cores."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import PacelineError
from paceline.lab.capacity.measuring import ServedCosts
from paceline.lab.capacity.simulate import Outcome, ReplicaSettings, simulate
from paceline.lab.capacity.traffic import Arrival, Traffic, make_arrivals
from paceline.lab.comparison import Stopped
from paceline.planning.auto.learned import Learned
from paceline.planning.costs.profile import CostProfile

_POLL_S: Final = 0.2
"""Seconds after which it is asked again whether the user wants no more."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation.

    Attributes:
        load: name of the traffic.
    """

    load: str
    replicas: int
    speculative: bool
    affinity: bool


@dataclass(frozen=True, slots=True)
class Grid:
    """What is simulated: every load at every number of replicas, with and without speculation and affinity.

    Attributes:
        loads: traffic by its name.
        balance: see :func:`~paceline.lab.capacity.simulate.simulate`.
        seed: of the gateway.
    """

    loads: Mapping[str, Traffic]
    replicas: Sequence[int]
    settings: ReplicaSettings
    balance: int
    seed: int

    @property
    def cells(self) -> list[Cell]:
        """All simulations. Of one replica affinity is nothing."""
        return [
            Cell(load, count, speculative, affinity)
            for load in self.loads
            for count in self.replicas
            for affinity in ((False, True) if count > 1 else (False,))
            for speculative in (False, True)
        ]

    def run(
        self, processes: int, *, stopped: Callable[[], bool], advance: Callable[[Cell], None]
    ) -> dict[Cell, Outcome]:
        """Make all simulations.

        Args:
            processes: how many make them; 1 makes them in this one.
            stopped: asked again and again whether the user wants no more.
            advance: told of each that is made.

        Raises:
            Stopped: the user wants no more.
            PacelineError: a process was ended from outside.
        """
        found: dict[Cell, Outcome] = {}
        if processes == 1:
            run = _Run(self, stopped)
            for cell in self.cells:
                found[cell] = run(cell)
                advance(cell)
            return found
        # Engines have threads, which a forked process would not have.
        context = multiprocessing.get_context("spawn")
        stopping = context.Event()
        # The dear ones first, so that none is left for the end.
        cells = sorted(self.cells, key=lambda cell: (cell.speculative, cell.replicas), reverse=True)
        pool = concurrent.futures.ProcessPoolExecutor(
            min(processes, len(cells)), context, _start_process, (_Packed.of(self), stopping)
        )
        try:
            with _blocked_interrupts():
                waiting = {pool.submit(_run_here, cell): cell for cell in cells}
            while waiting:
                done, _ = concurrent.futures.wait(waiting, _POLL_S, concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    cell = waiting.pop(future)
                    found[cell] = future.result()
                    advance(cell)
                if stopped():
                    raise Stopped
        except BrokenProcessPool:
            raise PacelineError(
                "a process that simulates was ended, as where memory is short: simulate fewer requests, or free some"
            ) from None
        finally:
            stopping.set()
            pool.shutdown(cancel_futures=True)
        return {cell: found[cell] for cell in self.cells}


@contextlib.contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Hold interrupts back, in processes that the block starts for as long as they live.

    A terminal interrupts the processes of a command together; the one that asked says when these end.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Run:
    """Makes simulations of a grid, whose requests and planner are made once."""

    def __init__(self, grid: Grid, stopped: Callable[[], bool]) -> None:
        self._grid = grid
        self._stopped = stopped
        self._learned: Learned | None = grid.settings.learn()
        self._arrivals: Callable[[str], Sequence[Arrival]] = functools.cache(
            lambda load: make_arrivals(grid.loads[load], grid.settings.recordings)
        )

    def __call__(self, cell: Cell) -> Outcome:
        return simulate(
            self._arrivals(cell.load),
            self._grid.settings,
            cell.replicas,
            speculative=cell.speculative,
            affinity=cell.affinity,
            balance=self._grid.balance,
            learned=self._learned,
            seed=self._grid.seed,
            advance=self._advance,
        )

    def _advance(self, share: float) -> None:
        if self._stopped():
            raise Stopped


# --- in another process -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Packed:
    """A grid without what cannot cross to another process where it is compiled: the profile."""

    grid: Grid
    costs: Mapping[str, Any]
    profile: Mapping[str, Any]

    @classmethod
    def of(cls, grid: Grid) -> _Packed:
        costs = grid.settings.costs
        figures = {field.name: getattr(costs, field.name) for field in dataclasses.fields(costs)}
        profile = figures.pop("profile").to_json()
        # Typed as costs all the same: the process that unpacks it sets them before anything reads them.
        settings = dataclasses.replace(grid.settings, costs=None)  # type: ignore[arg-type]
        return cls(dataclasses.replace(grid, settings=settings), figures, profile)

    def unpack(self) -> Grid:
        costs = ServedCosts(profile=CostProfile.from_json(self.profile), **self.costs)
        return dataclasses.replace(self.grid, settings=dataclasses.replace(self.grid.settings, costs=costs))


_here: list[_Run] = []
"""Of a process that makes simulations for another: what makes them."""


def _start_process(packed: _Packed, stopping: Any) -> None:
    # Where they cannot be blocked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _here.append(_Run(packed.unpack(), stopping.is_set))


def _run_here(cell: Cell) -> Outcome:
    return _here[0](cell)
