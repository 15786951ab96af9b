"""Answers: one while it is written, for a consumer in a thread, and one that is finished."""

from __future__ import annotations

import contextlib
import math
import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from paceline.core.errors import ClosedError
from paceline.core.logprobs import TokenLogprob
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.request import Emission, FinishReason, Request
from paceline.core.stats import RequestStats
from paceline.core.text import TextSegment
from paceline.notebook import answer_html
from paceline.options import RequestOptions
from paceline.runtime.loop_driver import LoopDriver, RequestHandle
from paceline.runtime.output_queue import Ending, OutputRecord, ThreadOutputQueue
from paceline.runtime.worker import Worker


@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """A finished answer. A notebook shows it with its tokens coloured by who drafted them.

    Attributes:
        text: the answer, without the prompt.
        token_ids: tokens of the answer.
        sources: for each token the drafter it came from, or ``"target"``.
        finish_reason: why it ended; ``None`` if it has not yet.
        seed: the seed it was sampled with; the same seed gives the same text under ``coupled``.
        stats: counts and times.
        model_defaults: what the model's own defaults set of how it was sampled, by the fields of
            :class:`SamplingParams`.
        logprobs: for each token its log-probability; empty where none are asked for.
        prompt_logprobs: for each token of the prompt but the first its log-probability; empty where none are asked for.
        segments: the text in pieces, each with the drafter that it came from, or ``"target"``.
    """

    text: str
    token_ids: Sequence[int]
    sources: Sequence[str]
    finish_reason: FinishReason | None
    seed: int
    stats: RequestStats
    model_defaults: Mapping[str, Any] = field(default_factory=dict)
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()
    segments: Sequence[TextSegment] = ()

    @classmethod
    def of(
        cls, rounds: Sequence[Emission | None], ending: Ending | None, stats: RequestStats, submission: Submission
    ) -> Generation:
        """Return what rounds come to."""
        emissions = [emission for emission in rounds if emission is not None]
        segments = tuple(segment for emission in emissions for segment in emission.segments)
        return cls(
            text="".join(segment.text for segment in segments),
            token_ids=[token_id for emission in emissions for token_id in emission.token_ids],
            sources=[source for emission in emissions for source in emission.sources],
            finish_reason=None if ending is None else ending.finish_reason,
            seed=submission.options.params.seed,
            stats=stats,
            model_defaults=submission.options.model_defaults,
            logprobs=tuple(logprob for emission in emissions for logprob in emission.logprobs),
            # Complete with the first emission.
            prompt_logprobs=tuple(emissions[0].request.prompt_logprobs) if emissions else (),
            segments=segments,
        )

    def __repr__(self) -> str:
        return f"<Generation {reprlib.repr(self.text)}: {self.stats.summarize()}>"

    def _repr_html_(self) -> str:
        return answer_html(self.segments, self.stats.summarize())


@dataclass(frozen=True, slots=True)
class Submission:
    """What is asked of a model.

    Attributes:
        options: complete and checked.
        add: reads the prompt and adds the request to the loop; called on the engine's thread.
    """

    options: RequestOptions
    add: Callable[[], Request]


class BaseStream:
    """What streams share, for consumers in threads and in event loops.

    Args:
        worker: the thread that owns the engine.
        submission: what is asked for.
    """

    _handle: RequestHandle
    _outputs: OutputRecord

    def __init__(self, worker: Worker, submission: Submission) -> None:
        self._worker = worker
        self._submission = submission
        self._num_read = 0

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Tokens of the prompt; of an :class:`~paceline.AsyncStream` empty until the first wait is over."""
        return self._handle.prompt_ids

    @property
    def params(self) -> SamplingParams:
        """How the answer is sampled."""
        return self._submission.options.params

    @property
    def rules(self) -> StopRules:
        """When it ends."""
        return self._submission.options.rules

    @property
    def speculation(self) -> SpeculationParams:
        """How it is sped up."""
        return self._submission.options.speculation

    def __repr__(self) -> str:
        num_tokens = sum(len(emission.token_ids) for emission in self._outputs.rounds.copy() if emission)
        return f"<{type(self).__name__}: {num_tokens} tokens, {'over' if self._outputs.is_over else 'being written'}>"

    def _record(self) -> tuple[Sequence[Emission | None], Ending | None, RequestStats]:
        """Return what became of the request; while it runs on the engine's thread, so that all is of one moment."""
        ending = self._outputs.ending
        return self._outputs.rounds.copy(), ending, self._handle.stats() if ending is None else ending.stats

    def _raise_error(self) -> None:
        if self._outputs.ending is not None:
            self._outputs.ending.raise_error()


class Stream(BaseStream):
    """An answer while it is written: iterate for its text, as it becomes final.

    It is written in the thread that owns the engine, whether somebody reads it or not. Closing it early (``close()``,
    leaving its ``with`` block, or dropping it) cancels the request and keeps what there is. An interrupt or error while
    it is waited for cancels it too. It may be closed from any thread; of several that iterate, each gets a share.

    Args:
        driver: where the answer is decoded.
        submission: what is asked for.

    Raises:
        PacelineError: the request was refused.
    """

    _outputs: ThreadOutputQueue

    def __init__(self, driver: LoopDriver, submission: Submission) -> None:
        super().__init__(driver.worker, submission)
        # Reentrant, as a signal handler may read in the middle of a read.
        self._reading = threading.RLock()
        self._outputs = ThreadOutputQueue()
        self._handle = driver.submit(submission.add, self._outputs, self)

    def __iter__(self) -> Iterator[TextSegment]:
        for segments in self.rounds():
            yield from segments

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_read(self) -> bool:
        """Whether the answer is over, and all of its text was read."""
        # In this order: once it is over, all rounds are there.
        return self._outputs.is_over and self._num_read >= len(self._outputs.rounds)

    def rounds(self) -> Iterator[list[TextSegment]]:
        """Iterate round by round: the text each made final, which may be none (while a long prompt is read).

        Rounds count from the request's start: nothing is yielded while the request waits for others to end. A signal
        handler runs in that wait too, and an exception of the handler ends the wait.

        Raises:
            PacelineError: the request ended by an error.
            BusyError: this is the engine's thread, which would wait for itself.
            CapabilityError: this process was forked from the one that writes the answer.
        """
        while True:
            self._wait(self._num_read + 1)
            if self.is_read:
                break
            yield self._read(1)
        self._raise_error()

    def close(self) -> list[TextSegment]:
        """Cancel the request if it still runs, and wait for that; return text that was not read yet."""
        if not self._outputs.is_over:
            self._handle.cancel()
        return self._read()

    def end_reasoning(self) -> bool:
        """Have the answer close the reasoning that it is in, between two rounds.

        Its next tokens are those that close the reasoning, by ``reasoning_budget``, and content follows. Without one
        nothing tells where reasoning begins and ends. With ``tokens=None`` it sets no limit of its own.

        Returns:
            Whether the answer is in a reasoning; else nothing happens.

        Raises:
            BusyError: this is the engine's thread, which would wait for itself.
            CapabilityError: this process was forked from the one that writes the answer.
        """
        with contextlib.suppress(ClosedError):  # then it is over
            return self._worker.call(self._handle.end_reasoning)
        return False

    def result(self) -> Generation:
        """Return the answer, once it is there.

        Raises:
            PacelineError: the request ended by an error; else as :meth:`rounds`.
        """
        self._wait()
        self._read()
        self._raise_error()
        return self.so_far()

    def so_far(self) -> Generation:
        """Return the answer as it stands, read or not; ``finish_reason`` is ``None`` while it runs."""
        if not self._outputs.is_over:
            with contextlib.suppress(ClosedError):  # then it ended meanwhile
                return Generation.of(*self._worker.call(self._record), self._submission)
        return Generation.of(*self._record(), self._submission)

    def _wait(self, rounds: float = math.inf) -> None:
        """Wait for so many rounds, or the end."""
        outputs = self._outputs
        try:
            if not outputs.has(rounds):
                self._worker.check()
                outputs.wait(rounds)
        except BaseException:
            self._handle.cancel_soon()
            raise

    def _read(self, most: int | None = None) -> list[TextSegment]:
        """Return the text of rounds that are there and were not read yet, of so many at most."""
        rounds = self._outputs.rounds
        with self._reading:
            first = self._num_read
            end = len(rounds) if most is None else min(first + most, len(rounds))
            # In one line without a call: what a signal handler read before it is not read again.
            first, self._num_read = self._num_read, end if end > self._num_read else self._num_read
        return [segment for emission in rounds[first:end] if emission for segment in emission.segments]
