"""Runs a bench: tasks are prepared, variants chosen by replay, and pairs run lap by lap over all workloads.

::

    for each workload    tasks ── plain run: does it loop? ── record drafts ── replay all settings ── variants to run
    lap by lap, over all workloads in turn
                         plain  A  plain  B  plain  plain  plain ...        every variant between two plain runs

Laps go round all workloads before the next one begins, so whoever stops half-way has a little of everything. Each
variant keeps one session a workload: its policy learns from prompt to prompt as it would at a user's.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from paceline.core.divergence import first_difference
from paceline.core.errors import EngineError, PacelineError
from paceline.lab.bench.forecast import Forecast, needed_limit_s
from paceline.lab.bench.results import BenchResult, Judgement, Pair, VariantResult, WorkloadResult
from paceline.lab.bench.settings import BenchSettings
from paceline.lab.bench.tasks import PreparedTask, TaskFinder
from paceline.lab.bench.workloads import MIXED, MIXED_ABOUT, WORKLOADS
from paceline.lab.comparison import Stopped, Trial, explain
from paceline.lab.sessions import Answer, Contestant, Engines, Session
from paceline.lab.task import MIN_ANSWER, Task, is_repetitive
from paceline.lab.variants import (
    PLAIN,
    SERVER_DRAFT_VARIANTS,
    SERVER_NGRAM_VARIANTS,
    SERVER_PLAIN,
    STATIC,
    Kind,
    Variant,
    VariantReplay,
    pick_fastest,
    policy_variants,
    replay_all,
    server_draft_and_ngram,
    static_variants,
)
from paceline.planning.auto.learned import Learned
from paceline.planning.costs.profile import CostProfile
from paceline.planning.costs.profiling import has_long_context
from paceline.streams import Generation

_PREPARING_SHARE = 0.45
"""Share of a time limit that looking for prompts and recording them may take."""

_ORDER: Sequence[Kind] = ("plain", "server", "static", "policy", "auto")
"""Order of kinds in a report; where there is no time for all of a lap, the first are left out first."""

_DRAWS = 3
"""Plain answers that are drawn for a lap until one is informative; then the recorded one is taken."""

_CAUTION = 1.1
"""Factor of the time that runs took before, which must be left for more of them."""

Progress: TypeAlias = Callable[[str, float, float], None]
"""Called with what is being done, and how much is done of how much there is to do, in seconds as they were forecast."""


class Servers(Protocol):
    """Servers of one program that answer over HTTP, each with a setting of its own."""

    def contestant(self, variant: Variant) -> Contestant:
        """Return a contestant for a variant of kind ``"server"``."""
        ...


@dataclass(slots=True)
class _Contest:
    """A workload's variants while they run."""

    result: WorkloadResult
    tasks: list[PreparedTask]
    lap_tasks: int
    contestants: list[Contestant] = field(default_factory=list)
    # Indexes of the variants that run; there was no time for the others.
    running: list[int] = field(default_factory=list)
    # The first answers that differed from plain's, to be judged in the end, by variant and task.
    differing: dict[tuple[int, str], tuple[Task, int, Answer, Answer]] = field(default_factory=dict)

    def lap(self, index: int) -> list[PreparedTask]:
        """Return the tasks of a lap."""
        first = index * self.lap_tasks
        return [self.tasks[(first + place) % len(self.tasks)] for place in range(self.lap_tasks)]

    @property
    def lap_s(self) -> float:
        """Seconds of a lap if every variant is as slow as plain."""
        runs = 2 * len(self.running) + 1
        # Sessions share a prompt that was read; every server reads it for itself.
        readings = 1 + sum(self.result.variants[index].variant.kind == "server" for index in self.running)
        return sum(readings * each.prompt_s + runs * each.answer_s for each in self.lap(0))


class Runner:
    """Measures what the settings ask for. Every ``auto`` session starts with ``learned``.

    Of a limit, ``remaining_s`` is left, and ``spent_s`` had gone before.
    """

    def __init__(
        self,
        engines: Engines,
        profile: CostProfile,
        settings: BenchSettings,
        *,
        learned: Learned | None = None,
        servers: Servers | None = None,
        machine: Mapping[str, str] | None = None,
        remaining_s: Callable[[], float] = lambda: float("inf"),
        spent_s: float = 0.0,
        stopped: Callable[[], bool] = lambda: False,
        progress: Progress = lambda doing, done_s, total_s: None,
    ) -> None:
        self._engines = engines
        self._profile = profile
        self._settings = settings
        self._learned = learned
        self._servers = servers
        self._remaining_s = remaining_s
        self._spent_s = spent_s
        self._interrupted = stopped
        self._tell = progress
        context_length = engines.target.capabilities.context_length
        self._forecast = Forecast(settings, profile, context_length)
        self._done_s = 0.0
        self._limit_s = remaining_s()
        self._plain = Session(engines, [], PLAIN.build(profile))
        self._finder = TaskFinder(engines, settings, stopped=self._is_stopped, tell=self._progress)
        self._prepared: dict[str, list[PreparedTask]] = {}
        self._found: dict[str, WorkloadResult] = {}
        self.result = BenchResult(
            machine or {},
            engines.target.description,
            None if engines.draft is None else engines.draft.description,
            settings,
            profile,
        )
        if learned is not None:
            self.result.notes.append(f"auto starts with what earlier runs had learned of {', '.join(learned.drafters)}")
        if profile.target.long_context is None and has_long_context(engines.target):
            self.result.notes.append(
                "replays leave out what a longer context adds to passes: there was no time to measure that"
            )

    def run(self) -> BenchResult:
        """Measure everything, or as much as there is time for or the user lets it; return what was found.

        Raises ``PacelineError`` where a model failed before there was anything to report.
        """
        started_s = self._engines.clock.now_s()
        contests: list[_Contest] = []
        try:
            for name in self._settings.workloads:
                is_last_hope = not contests and name == self._settings.workloads[-1]
                contest = self._prepare_contest(name, is_last_hope=is_last_hope)
                if contest is not None:
                    contests.append(contest)
            self._run_laps(contests)
        except Stopped:
            self.result.ended_by = "interrupt" if self._interrupted() else "time limit"
        except PacelineError as error:
            # Hours of pairs are worth a report, whatever became of the last one.
            if not self.result.measured:
                raise
            self.result.ended_by = "error"
            self.result.notes.append(f"{type(error).__name__}: {error}")
        for contest in contests:
            for each, contestant in zip(contest.result.variants, contest.contestants, strict=True):
                # Taken now, as explaining differences has some of them answer once more.
                each.snapshot = _policy_snapshot(contestant)
        self._judge(contests)
        if self._interrupted() and self.result.ended_by == "done":
            self.result.ended_by = "interrupt"
        if not self.result.measured and self._limit_s < float("inf"):
            self._tell_speed()
        self.result.took_s = self._engines.clock.now_s() - started_s
        return self.result

    def _is_stopped(self) -> bool:
        """Return whether the user wants no more, or the time is over: one answer may take all of it."""
        return self._interrupted() or self._remaining_s() <= 0

    def _tell_speed(self) -> None:
        """Report what is known without a pair: how fast plain decoding is, and how long all of this takes."""
        round_s = self._profile.round_s(1)
        length = self._engines.target.capabilities.context_length
        enough_s = needed_limit_s(self._settings, self._profile, length, self._spent_s)
        self.result.notes.append(
            f"plain decoding: {1 / round_s:.3g} t/s, by the passes that were measured first, of {round_s:.3g} s each; "
            f"what was to be measured takes about --time-limit {enough_s}"
        )

    def _progress(self, doing: str, done_s: float = 0.0) -> None:
        self._done_s += done_s
        self._tell(doing, self._done_s, self._forecast.total_s)

    # --- preparing ----------------------------------------------------------------------------------------------------

    def _prepare_contest(self, name: str, *, is_last_hope: bool) -> _Contest | None:
        """Find a workload's tasks and the variants to run on them; ``None`` if there is nothing to run.

        With ``is_last_hope`` nothing else will be measured, so it is tried however long it is forecast to take.
        """
        result = self._workload(name)
        self.result.workloads.append(result)
        if not is_last_hope and self._remaining_s() < self._forecast.lap_s(name):
            self.result.notes.append(f"{name}: not measured, for lack of time")
            return None
        if name == MIXED:
            parts = [self._tasks(part) for part in WORKLOADS]
            parts = [part for part in parts if part]
            tasks = [part[lap % len(part)] for lap in range(max(map(len, parts), default=0)) for part in parts]
            lap_tasks = len(parts)
        else:
            tasks, lap_tasks = self._tasks(name), 1
        if not tasks:
            return None
        result.prompt_tokens = sorted(len(each.task.prompt_ids) for each in tasks)
        result.answer_tokens = sorted(len(each.recording.token_ids) for each in tasks)
        contest = _Contest(result, tasks, lap_tasks)
        for variant, replayed in self._choose(result, tasks, lap_tasks):
            result.variants.append(VariantResult(variant, lap_tasks, replayed))
            contest.contestants.append(self._contestant(variant))
            if variant.kind != "plain" or self._settings.with_plain:
                contest.running.append(len(result.variants) - 1)
        return contest

    def _contestant(self, variant: Variant) -> Contestant:
        if variant.kind == "server":
            assert self._servers is not None
            return self._servers.contestant(variant)
        return Session(self._engines, variant.drafters, variant.build(self._profile, self._learned))

    def _workload(self, name: str) -> WorkloadResult:
        if name not in self._found:
            if name == MIXED:
                self._found[name] = WorkloadResult(MIXED, MIXED_ABOUT, forced=True)
            else:
                workload = WORKLOADS[name]
                self._found[name] = WorkloadResult(name, workload.about, workload.forced)
        return self._found[name]

    def _tasks(self, name: str) -> list[PreparedTask]:
        """Return the tasks of a workload that is not mixed: found, recorded, and kept for later."""
        if name not in self._prepared:
            # Most of a limit is for the pairs, however long finding tasks takes.
            prepared = len(self._prepared) + 1
            wanted = max(len(self._settings.workloads), prepared)
            floor_s = self._limit_s * (1 - _PREPARING_SHARE * prepared / wanted)
            tasks = list(self._finder.find(self._workload(name), lambda: self._remaining_s() >= floor_s))
            if len(tasks) < self._settings.prompts and self._remaining_s() < floor_s:
                self.result.notes.append(f"{name}: {len(tasks)} of {self._settings.prompts} prompts, for lack of time")
            self._prepared[name] = tasks
            self._progress(f"{name}: replaying settings", self._forecast.tasks_s(name))
        return self._prepared[name]

    def _choose(
        self, result: WorkloadResult, tasks: Sequence[PreparedTask], lap_tasks: int
    ) -> list[tuple[Variant, VariantReplay | None]]:
        """Replay all settings; return the variants to run, plain first, with their replays."""
        settings = self._settings
        recordings = [each.recording for each in tasks]
        chosen: list[tuple[Variant, VariantReplay | None]] = [(PLAIN, None)]

        def advance() -> None:
            if self._is_stopped():
                raise Stopped

        for name in settings.variants:
            if name == STATIC:
                sweep = list(static_variants(settings.drafters, coarse=settings.coarse))
                result.static = replay_all(recordings, sweep, self._profile, lap_tasks=lap_tasks, advance=advance)
                fastest = pick_fastest(result.static, settings.num_static)
            else:
                candidates = list(policy_variants(name, settings.drafters))
                replayed_all = replay_all(
                    recordings,
                    candidates,
                    self._profile,
                    learned=self._learned,
                    lap_tasks=lap_tasks,
                    advance=advance,
                )
                fastest = pick_fastest(replayed_all, 1)
            chosen += [(replayed.variant, replayed) for replayed in fastest]
        if self._servers is not None:
            if result.forced:
                self.result.notes.append(f"{result.name}: no server ran, as none can be made to follow a text")
            else:
                chosen += [(variant, None) for variant in self._server_variants(self._servers, tasks)]
        chosen.sort(key=lambda pair: _ORDER.index(pair[0].kind))
        self._progress(f"{result.name}: settings chosen", self._forecast.replays_s)
        return chosen

    def _server_variants(self, servers: Servers, tasks: Sequence[PreparedTask]) -> Iterator[Variant]:
        """Yield the server's settings that run: plain, and the best with n-grams, with a draft model and with both."""
        yield SERVER_PLAIN
        ngram = self._fastest(servers, SERVER_NGRAM_VARIANTS, tasks[0])
        if ngram is not None:
            yield ngram
        if "draft" in self._settings.drafters:
            draft = self._fastest(servers, SERVER_DRAFT_VARIANTS, tasks[0])
            if draft is not None:
                yield draft
                if ngram is not None:
                    yield server_draft_and_ngram(draft, ngram)

    def _fastest(self, servers: Servers, variants: Sequence[Variant], prepared: PreparedTask) -> Variant | None:
        """Try a server's settings on a first prompt, as far as there is time; ``None`` if it takes none."""
        workload = prepared.task.workload
        fastest: Variant | None = None
        best_speed = 0.0
        for variant in variants:
            if self._remaining_s() < _CAUTION * self._forecast.lap_s(workload):
                self.result.notes.append(f"{workload}: not all settings of llama-server were tried, for lack of time")
                return fastest or variant
            doing = f"{workload}: trying settings of llama-server"
            self._progress(doing)
            try:
                answer = self._answer(servers.contestant(variant), prepared.task)
            except EngineError as error:
                # One of many settings: a model or a build that does not support it can still be measured in others.
                self.result.notes.append(f"{workload}: left out, as {error}")
                continue
            finally:
                self._progress(doing, self._forecast.run_s(workload))
            speed = answer.per_second if self._is_informative(answer) else 0.0
            if fastest is None or speed > best_speed:
                fastest, best_speed = variant, speed
        return fastest

    # --- running ------------------------------------------------------------------------------------------------------

    def _run_laps(self, contests: Sequence[_Contest]) -> None:
        settings = self._settings
        for lap in range(settings.laps):
            for contest in contests:
                if lap == 0:
                    self._narrow(contest)
                if self._remaining_s() < _CAUTION * contest.lap_s:
                    self.result.ended_by = "time limit"
                    continue
                self._run_lap(contest, lap)

    def _narrow(self, contest: _Contest) -> None:
        """Leave out the variants that there is no time for in a first lap, but for the most important one."""
        name, variants = contest.result.name, contest.result.variants
        words = "" if self._settings.tokens == MIN_ANSWER else ": with shorter answers it takes less"
        left_s, lap_s, dropped = self._remaining_s(), _CAUTION * contest.lap_s, []
        while left_s < _CAUTION * contest.lap_s and len(contest.running) > 1:
            # Of a kind the slowest by replay, which comes last.
            least = min(contest.running, key=lambda index: (_ORDER.index(variants[index].variant.kind), -index))
            contest.running.remove(least)
            dropped.append(variants[least].variant.name)
        if left_s < _CAUTION * contest.lap_s:
            pair_s = _CAUTION * contest.lap_s
            self.result.notes.append(f"{name}: a pair takes {pair_s:.0f} s, and {left_s:.0f} were left{words}")
        elif dropped:
            self.result.ended_by = "time limit"
            self.result.notes.append(
                f"{name}: without {', '.join(dropped)}, as a lap with all takes {lap_s:.0f} s, and {left_s:.0f} were "
                f"left{words}"
            )

    def _run_lap(self, contest: _Contest, lap: int) -> None:
        """Run every variant on every task of a lap, between plain runs."""
        settings = self._settings
        order = list(contest.running)
        # Not always in the same order, as what ran before leaves caches warm and a machine hot.
        random.Random(f"{settings.seed} {contest.result.name} {lap}").shuffle(order)
        for prepared in contest.lap(lap):
            place = f"{contest.result.name}: lap {lap + 1} of {settings.laps}"
            self._progress(place)
            task, before = self._draw(prepared.task, lap)
            self._progress(place, self._forecast.run_s(task.workload))
            bisect.insort(contest.result.answer_tokens, len(before.token_ids))
            for index in order:
                each = contest.result.variants[index]
                reading_s = prepared.prompt_s if each.variant.kind == "server" else 0.0
                if self._remaining_s() < _CAUTION * (reading_s + 2 * prepared.answer_s):
                    # The machine became slower than it was when the lap began.
                    self.result.ended_by = "time limit"
                    return
                doing = f"{place}, {each.variant.name}"
                self._progress(doing)
                answer = self._answer(contest.contestants[index], task)
                after = self._plain_answer(task)
                if not all(self._is_informative(one) for one in (before, answer, after)):
                    each.left_out += 1
                    before = after
                    continue
                pair = _make_pair(lap, task, before, answer, after)
                each.pairs.append(pair)
                if pair.differs_at is not None and answer.generation is not None:
                    key = (index, f"{task.workload} {task.name}")
                    contest.differing.setdefault(key, (task, pair.differs_at, after, answer))
                before = after
                self._progress(doing, 2 * self._forecast.answer_s(task.workload))

    def _draw(self, task: Task, lap: int) -> tuple[Task, Answer]:
        """Return a task with random numbers of this lap's own, and its plain answer.

        The settings were chosen on the answers that were recorded, and the best of a hundred on a text owes some of its
        lead to that text. So other answers to the same prompts are measured, wherever sampling leaves room for any:
        forced and greedy answers stay the same.
        """
        if task.reference_ids is None and task.options(self._settings.temperature).get("temperature"):
            for draw in range(lap * _DRAWS, (lap + 1) * _DRAWS):
                drawn = task.drawn_again(draw + 1)
                answer = self._plain_answer(drawn)
                if not drawn.is_short(answer.token_ids) and not is_repetitive(answer.token_ids):
                    return drawn, answer
        return task, self._plain_answer(task)

    @staticmethod
    def _is_informative(answer: Answer) -> bool:
        """Whether an answer is long enough to be timed and, where it is not plain's, does not loop."""
        if answer.generation is not None:
            # Plain's text, which was checked before; near-ties may end it at once.
            return len(answer.token_ids) >= 2
        return len(answer.token_ids) >= MIN_ANSWER and not is_repetitive(answer.token_ids)

    def _answer(self, contestant: Contestant, task: Task) -> Answer:
        return contestant.answer(task, self._settings.temperature, self._is_stopped)

    def _plain_answer(self, task: Task) -> Answer:
        return self._plain.answer(task, self._settings.temperature, self._is_stopped, speculate=False)

    # --- afterwards ---------------------------------------------------------------------------------------------------

    def _judge(self, contests: Sequence[_Contest]) -> None:
        """Find out why texts differ from plain's, as far as there is time."""
        for contest in contests:
            for (index, _), (task, first, plain, answer) in contest.differing.items():
                contestant = contest.contestants[index]
                # A server samples by noise of its own, and does not show what it drew from.
                if isinstance(contestant, Session) and plain.generation is not None and answer.generation is not None:
                    verdict = self._verdict(contestant, task, plain.generation, answer.generation)
                    contest.result.variants[index].judgements.append(Judgement(task.name, first, verdict))

    def _verdict(self, session: Session, task: Task, plain: Generation, speculative: Generation) -> str:
        # Both answers are made again, which may take some tries, and the text is read 7 to 70 times.
        needed_s = 10 * self._forecast.run_s(task.workload)
        if self.result.ended_by in ("interrupt", "error") or self._is_stopped() or self._remaining_s() < needed_s:
            return "not judged"
        self._progress(f"{task.workload}: explaining a difference")
        session.reference_ids = task.reference_ids
        options = task.options(self._settings.temperature)
        try:
            divergence = explain(
                session,
                task.prompt_ids,
                options,
                plain,
                speculative,
                open_reader=self._engines.open_reader,
                stopped=lambda: self._is_stopped() or self._remaining_s() <= 0,
            )
        except PacelineError as error:
            self.result.notes.append(f"{task.workload}: a difference is not judged, as {type(error).__name__}: {error}")
            return "not judged"
        return "not judged" if divergence is None else divergence.verdict


def _make_pair(lap: int, task: Task, before: Answer, answer: Answer, after: Answer) -> Pair:
    return Pair(
        lap=lap,
        task=task.name,
        workload=task.workload,
        trial=Trial(before.per_second, answer.per_second, after.per_second),
        tokens=len(answer.token_ids) - 1,
        rounds=answer.rounds,
        num_drafted=answer.num_drafted,
        num_accepted=answer.num_accepted,
        tested_by_depth=answer.tested_by_depth,
        accepted_by_depth=answer.accepted_by_depth,
        seconds=answer.seconds,
        spent=answer.spent,
        differs_at=first_difference(after.token_ids, answer.token_ids),
    )


def _policy_snapshot(contestant: Contestant) -> Mapping[str, Any] | None:
    """Return the predictions and the ledger of a policy that plans, as plain data; ``None`` for others."""
    told = contestant.policy.report() if isinstance(contestant, Session) else None
    if told is None:
        return None
    return {
        "calibration": {name: found.rows() for name, found in told.reliability.items()},
        "ledger": [(entry.tokens, entry.debt_s, entry.allowance_s) for entry in told.ledger],
        "remembered": list(told.remembered),
    }
