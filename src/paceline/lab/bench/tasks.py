"""Finding a workload's tasks: texts whose plain answer is informative, each recorded so that it can be replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.lab.bench.results import WorkloadResult
from paceline.lab.bench.settings import BenchSettings
from paceline.lab.bench.workloads import WORKLOADS, Sizes
from paceline.lab.comparison import Stop, finish
from paceline.lab.replaying.recording import Recording
from paceline.lab.sessions import Engines, Session
from paceline.lab.task import Task, is_repetitive
from paceline.planning.policies.fixed import NO_SPECULATION

_TRIES_PER_TASK = 6
"""Tasks looked at for each that is wanted, at most: greedy answers of small models mostly loop."""


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """A task that is worth measuring.

    Attributes:
        recording: its plain answer, and what every drafter would propose at each position.
        prompt_s: seconds that its prompt took to read.
        answer_s: seconds that the plain answer took after it.
    """

    task: Task
    recording: Recording
    prompt_s: float
    answer_s: float


class TaskFinder:
    """Looks for tasks by answering them plainly."""

    def __init__(
        self,
        engines: Engines,
        settings: BenchSettings,
        *,
        stopped: Stop = lambda: False,
        tell: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self._engines = engines
        self._settings = settings
        self._stopped = stopped
        self._tell = tell
        self._plain = Session(engines, [], NO_SPECULATION)
        context_length = engines.target.capabilities.context_length
        self._sizes = Sizes(settings.tokens, context_length, settings.seed, settings.prompt_tokens)

    def find(self, found: WorkloadResult, in_time: Callable[[], bool] = lambda: True) -> Iterator[PreparedTask]:
        """Yield the tasks of a workload that is not mixed; what is tried and left out is counted in ``found``."""
        settings, name = self._settings, found.name
        kept = 0
        for task in WORKLOADS[name].make(self._engines.target.vocabulary, self._sizes):
            if kept == settings.prompts or found.tried == _TRIES_PER_TASK * settings.prompts or not in_time():
                return
            self._tell(f"{name}: looking for prompts, {found.tried} tried")
            found.tried += 1
            started_s = self._engines.clock.now_s()
            self._plain.read(task.prompt_ids)
            read_s = self._engines.clock.now_s()
            stream = self._plain.start(task, settings.temperature, speculate=False)
            answer = finish(stream, self._stopped)
            answered_s = self._engines.clock.now_s()
            if task.is_short(answer.token_ids):
                found.ended_early += 1
            elif not found.forced and is_repetitive(answer.token_ids):
                found.looped += 1
            else:
                kept += 1
                self._tell(f"{name}: recording drafts of prompt {kept}")
                with Session(self._engines, settings.drafters, NO_SPECULATION) as session:
                    recording = session.record(
                        stream.prompt_ids,
                        answer.token_ids,
                        params=stream.params,
                        rules=stream.rules,
                        finish_reason=answer.finish_reason,
                        name=f"{task.workload} {task.name}",
                        depth=settings.depth,
                        stopped=self._stopped,
                    )
                yield PreparedTask(task, recording, read_s - started_s, answered_s - read_s)
