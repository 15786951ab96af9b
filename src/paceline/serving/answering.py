"""Answers of one request while they are written: every prompt, every choice, token by token.

::

    prompts ──> one AsyncStream for each choice ──> rounds of all of them, as they come ──> pieces, progress, ends
                                                                                            (response_formats)

A round of the engine may bring several tokens. Each becomes a piece of its own, as clients of llama-server know it:
they count chunks as tokens. All pieces of a round are handed on together, and cost one write.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from paceline.async_streams import AsyncStream
from paceline.chat.assembler import AnswerAssembler, TokenEvent
from paceline.chat.continuation import split_beginning
from paceline.chat.prompts import ChatPrompt
from paceline.chat.reasoning import AnswerPart, ReasoningFormat
from paceline.core.logprobs import TokenLogprob
from paceline.core.request import Emission
from paceline.core.stats import RequestStats
from paceline.options import GenerateOptions
from paceline.serving.generation_request import GenerationRequest
from paceline.serving.model_host import ServedModel

StopType: TypeAlias = Literal["none", "eos", "word", "limit"]
"""Why an answer ended, in llama-server's words."""

_CHARACTERS_AN_ITEM: Final = 100
_CHARACTERS_AN_ID: Final = 6

_STOP_TYPES: Final[dict[str, StopType]] = {"end": "eos", "stop": "word"}


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt that is ready to be answered.

    Attributes:
        token_ids: tokens of the prompt.
        text: control tokens spelled out.
        options: of the call, beside those of the request.
        chat: what a conversation came to; ``None`` of a completion.
        reasoning_format: where an answer has its reasoning.
        warnings: what the client ought to know of how the prompt was made.
    """

    token_ids: Sequence[int]
    text: str
    options: GenerateOptions = field(default_factory=lambda: GenerateOptions())
    chat: ChatPrompt | None = None
    reasoning_format: ReasoningFormat = "none"
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is read.

    Attributes:
        processed: tokens that are in the cache.
        time_ms: since the request was taken, in milliseconds.
        is_first: whether nothing was read yet.
    """

    processed: int
    time_ms: float
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """A round added tokens; it comes before what they say, and only where rounds were asked for."""

    emission: Emission

    @property
    def num_listed(self) -> int:
        drafts = self.emission.drafts
        return len(self.emission.token_ids) + (0 if drafts is None else len(drafts.token_ids))


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer is over."""


Event: TypeAlias = TokenEvent | Progress | Round | Ended


class Choice:
    """One answer of a request: what its assembler makes of rounds, and its place, its progress and its time.

    Attributes:
        number: among all answers of the request.
        prompt: what is answered.
        stream: the answer, as the engine writes it.
        assembler: makes events; of most streams it keeps nothing that was sent.
        slot: number of the place that it has while it runs; -1 before.
        has_new_line: whether a line ended.
        timed_out: whether it was ended because it took too long.
        stats: counts and times, once it is over.
        finish_reason: why it ended; empty while it runs.
        is_counted: whether the server's metrics know that it is over.
    """

    def __init__(
        self,
        number: int,
        prompt: PreparedPrompt,
        stream: AsyncStream,
        generation: GenerationRequest,
        *,
        keeps: bool,
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.stream = stream
        self.assembler = AnswerAssembler(
            prompt.chat,
            prompt.reasoning_format,
            prefix=_find_prefix(prompt, generation),
            keeps=keeps and not generation.reads_only,
            with_sources=generation.return_rounds,
        )
        self.slot = -1
        self.has_new_line = False
        self.timed_out = False
        self.stats: RequestStats | None = None
        self.finish_reason = ""
        self.is_counted = False
        self._generation = generation
        self._began_s = time.monotonic()
        self._first_s: float | None = None
        self._processed: int | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_listed(self) -> int:
        """Items of what is written of it at its end: probabilities and biases, and texts by the hundred characters."""
        answer = self.assembler
        listed = sum(1 + each.num_top for each in answer.logprobs) + len(self.stream.params.logit_bias)
        listed += self.num_listed_prompt
        texts = (self.prompt.text, *self.stream.rules.stop, answer.written)
        num_characters = sum(map(len, texts)) + len(answer.token_ids) * _CHARACTERS_AN_ID
        return listed + num_characters // _CHARACTERS_AN_ITEM

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob]:
        """For each token of the prompt but the first its log-probability, where they were asked for."""
        request = self.stream.request
        return () if request is None else request.prompt_logprobs

    @property
    def num_listed_prompt(self) -> int:
        """Probabilities that are written with the prompt."""
        return sum(1 + each.num_top for each in self.prompt_logprobs)

    @property
    def stop_type(self) -> StopType:
        """Why it ended, in llama-server's words."""
        return _STOP_TYPES.get(self.finish_reason, "limit") if self.finish_reason else "none"

    @property
    def is_cut_off(self) -> bool:
        """Whether it ended for another reason than that it was said."""
        return self.stop_type not in ("eos", "word")

    @property
    def stopping_word(self) -> str:
        """The stop text that ended it; empty if none did."""
        request = self.stream.request
        return request.text.stop_text if request is not None and self.finish_reason == "stop" else ""

    @property
    def truncated(self) -> bool:
        """Whether it ended because the context was full."""
        return self.finish_reason in ("context", "no_room")

    @property
    def cached(self) -> int:
        """Tokens of the prompt that need not be read."""
        request = self.stream.request
        return 0 if request is None else request.stats.cached_tokens

    def take(self, emission: Emission | None) -> list[Event]:
        events: list[Event] = []
        if emission is None or not self.assembler.num_tokens:
            events += self._progress(emission)
        if emission is None:
            return events
        if self._generation.return_rounds and emission.token_ids:
            events.append(Round(emission))
        events += self.assembler.take(emission)
        for segment in emission.segments:
            if "\n" in segment.text:
                self.has_new_line = True
        if self._generation.most_predict_s is not None:
            self._check_time(self._generation.most_predict_s)
        return events

    def end(self, finish_reason: str, stats: RequestStats) -> None:
        self.finish_reason, self.stats = finish_reason, stats

    async def ended(self) -> None:
        """End the answer where it is, if it still runs, and wait until the engine has nothing of it left."""
        await self.stream.aclose()
        if self.stream.request is not None:
            generation = await self.stream.so_far()
            self.end(str(generation.finish_reason), generation.stats)

    def stop(self) -> None:
        """End the answer where it is, as it takes too long."""
        self.timed_out = True
        self.stream.cancel_soon()

    def _progress(self, emission: Emission | None) -> list[Progress]:
        """Return how far the prompt is read, where somebody wants to know; first of all what needs no reading."""
        request = self.stream.request
        if not self._generation.return_progress or request is None:
            return []
        found = []
        time_ms = (time.monotonic() - self._began_s) * 1e3
        if self._processed is None:
            self._processed = request.stats.cached_tokens
            found.append(Progress(self._processed, 0.0, is_first=True))
        # The engine may be ahead of what is told here.
        read = self.num_prompt if emission is not None else min(request.cached, self.num_prompt)
        if read > self._processed:
            self._processed = read
            found.append(Progress(read, time_ms))
        return found

    def _check_time(self, most_s: float) -> None:
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
        elif now_s - self._first_s > most_s and self.has_new_line:
            self.stop()


def _find_prefix(prompt: PreparedPrompt, generation: GenerationRequest) -> list[AnswerPart]:
    """Return the beginning of the message that is continued, where it is asked to stand before the rest."""
    chat = prompt.chat
    if not generation.echo or generation.reads_only or chat is None or not chat.continued:
        return []
    is_apart = prompt.reasoning_format != "none" and chat.markers is not None
    return split_beginning(chat.messages[-1], chat.markers, reasoning_apart=is_apart)


class Answer:
    """All answers of a request.

    Args:
        served: the model.
        request: what is asked for.
        prompts: to answer.
        namespace: whose the texts are: nothing that was read is shared with others.
        client: takes turns with others, who are told nothing of it.
        most_s: seconds after which answers end where they are; 0 for no limit.
        id_prefix: how its id begins.
        keeps: whether what was said is kept to be told at the end.

    Attributes:
        id: of the answer, for the client.
        created: when it was asked for, in seconds since 1970.
        choices: in the order of prompts, and of the choices of each.
        interrupted: whether the server ended it, as it ends itself.
    """

    def __init__(
        self,
        served: ServedModel,
        request: GenerationRequest,
        prompts: Sequence[PreparedPrompt],
        *,
        namespace: str,
        client: str,
        most_s: float,
        id_prefix: str,
        keeps: bool,
    ) -> None:
        self.id = f"{id_prefix}{secrets.token_urlsafe(24)}"
        self.created = int(time.time())
        self.client, self.namespace = client, namespace
        self.served = served
        self.request = request
        self.choices: list[Choice] = []
        self.interrupted = False
        self._timers: list[asyncio.TimerHandle] = []
        try:
            own: dict[str, object] = {"namespace": namespace, "client": client}
            shown = request.options.rules.preserved_ids
            for prompt in prompts:
                # Those that the prompt of a conversation needs come beside those that were asked for.
                own["preserved_ids"] = (*(prompt.options.get("preserved_ids") or ()), *shown)
                for choice in range(request.num_choices):
                    options = request.options.replaced({**prompt.options, **own, "choice": choice})
                    stream = served.model.astart(prompt.token_ids, options)
                    self.choices.append(Choice(len(self.choices), prompt, stream, request, keeps=keeps))
        except BaseException:
            self.cancel()
            raise
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(most_s, choice.stop) for choice in self.choices if most_s > 0]

    async def admitted(self) -> None:
        """Wait until all choices were taken by the engine, though they may still wait for their start.

        Where one is refused, all are ended.
        """
        try:
            # All at once: each wait may take as long as a round.
            await asyncio.gather(*(choice.stream.admitted() for choice in self.choices))
        except BaseException:
            self.cancel()
            raise

    async def rounds(self, every: int = 1) -> AsyncIterator[tuple[Choice, list[Event]]]:
        """Iterate over what rounds of the engine bring to any of the choices, and over the ends of choices.

        Leaving the iteration early ends all of them. ``every`` so many rounds of a choice are waited for together.
        """
        try:
            if len(self.choices) == 1:
                async for events in self._rounds_of(self.choices[0], every):
                    yield self.choices[0], events
            else:
                async with contextlib.aclosing(self._all_rounds(every)) as rounds:
                    async for round_ in rounds:
                        yield round_
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End what still runs, without waiting."""
        for timer in self._timers:
            timer.cancel()
        for choice in self.choices:
            choice.stream.cancel_soon()

    def interrupt(self) -> None:
        """End what still runs, as the server ends."""
        self.interrupted = True
        self.cancel()

    async def _rounds_of(self, choice: Choice, every: int) -> AsyncIterator[list[Event]]:
        async for emission in choice.stream.emissions(every, keep=False):
            events = choice.take(emission)
            if events:
                yield events
        generation = await choice.stream.so_far()
        choice.end(str(generation.finish_reason), generation.stats)
        yield [Ended()]

    async def _all_rounds(self, every: int) -> AsyncGenerator[tuple[Choice, list[Event]], None]:
        """Iterate over rounds of all choices, in the order in which they come."""
        queue: asyncio.Queue[tuple[Choice, list[Event]] | BaseException | None] = asyncio.Queue()

        async def follow(choice: Choice) -> None:
            try:
                async for events in self._rounds_of(choice, every):
                    queue.put_nowait((choice, events))
            except Exception as error:
                queue.put_nowait(error)
            else:
                queue.put_nowait(None)

        tasks = [asyncio.create_task(follow(choice)) for choice in self.choices]
        try:
            left = len(tasks)
            while left:
                found = await queue.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield found
        finally:
            for task in tasks:
                task.cancel()
