"""``Server``, which answers requests once they are read; the sockets are in ``deployment.py``.

It has the model, the places of answers and the counts, and ends what is left of an answer.

The engine knows no places, which llama-server's ``/slots`` shows. A choice gets the lowest free one when it starts, and
leaves what it did there to be seen: the figures alone, as the answer itself may be long.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from paceline.chat.assembler import TokenEvent
from paceline.core.errors import QueueFullError
from paceline.server_options import ServerOptions
from paceline.serving.answering import Answer, Choice, Ended, Event, PreparedPrompt, Round
from paceline.serving.errors import FieldError, RefusedError, in_names_of
from paceline.serving.event_stream import EventStream, PieceByPiece, cancel_on_disconnect
from paceline.serving.generation_request import Api, GenerationRequest
from paceline.serving.json_output import json_pieces, to_json
from paceline.serving.metrics import ServerLoad, ServerMetrics
from paceline.serving.model_host import ModelHost, Served, ServedEmbedder, ServedModel
from paceline.serving.props import list_models, server_props, short_generation_settings
from paceline.serving.response_formats.base import ResponseFormatter
from paceline.serving.response_formats.chat import ChatFormatter
from paceline.serving.response_formats.completions import CompletionFormatter
from paceline.serving.response_formats.messages import MessagesFormatter
from paceline.serving.response_formats.native import NativeFormatter
from paceline.serving.response_formats.responses import ResponsesFormatter
from paceline.serving.security import get_namespace
from paceline.serving.work import MAX_AT_ONCE, Kind, Share, Shares, Work

_WHOLE_ROUNDS: Final = 16
"""Rounds that are looked at together where nobody reads them as they come."""

_PIECE_BYTES: Final = 1 << 16
"""Bytes of a long answer that are sent at once, or a little more."""

_ROOM: Final = 4
"""Requests of the most log-probabilities that there is room for at a time."""

_FORMATTERS: Final[dict[Api, type[ResponseFormatter]]] = {
    "native": NativeFormatter,
    "completions": CompletionFormatter,
    "chat": ChatFormatter,
    "messages": MessagesFormatter,
    "responses": ResponsesFormatter,
}


class Server:
    """Answers requests by the model that a host has, or will have.

    If it is verbose, answers tell prompt and settings unasked. There are metrics once there is a model. ``on_ready`` is
    called whenever there is one.
    """

    def __init__(self, host: ModelHost, options: ServerOptions, *, verbose: bool = False) -> None:
        self.host = host
        self.options = options
        self.verbose = verbose
        self.work = Work()
        self.metrics: ServerMetrics | None = None
        self.on_ready: Callable[[], object] | None = None
        self._board: SlotBoard | None = None
        self._room = Shares(_ROOM * options.max_answer_logprobs)
        self._embedding: Counter[str] = Counter()
        self._listed: dict[str, tuple[str, int]] = {}
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def board(self) -> SlotBoard:
        """The places of answers, as long as there is a model."""
        return self._get_board(self.host.served)

    def ready(self, served: Served) -> None:
        """Count what the model does from now on, beside what it did before it slept."""
        if self.metrics is None:
            self.metrics = ServerMetrics(
                model_name=served.id,
                context_length=served.context_length,
                max_running=served.max_running,
                started_s=self.host.started_s,
                load=self.load,
            )
        if isinstance(served, ServedModel):
            served.model.add_observer(self.metrics)
        if self.on_ready is not None:
            self.on_ready()

    def list_models(self) -> dict[str, Any]:
        """Return the list that has the model."""
        return list_models(self.host.loaded, created=int(self.host.started_s))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of any answer."""
        return not (self._embedding or self._endings or (self._board is not None and self._board.answers))

    async def sleep(self) -> None:
        """Free the model until somebody asks; nothing may run."""
        served = self.host.loaded
        slots = [] if isinstance(served, ServedEmbedder) else self.board.idle_facts()
        self._board = None
        told = {"models": self.list_models(), "props": server_props(served, self.options), "slots": slots}
        del served
        await self.host.sleep(told)

    def refused(self, status: int, kind: str) -> None:
        """Count a request that gets an error of this type in place of an answer."""
        if self.metrics is not None:
            self.metrics.refused(status, kind)

    def end_answers(self) -> None:
        """End all answers where they are."""
        if self._board is not None:
            for answer in self._board.answers:
                answer.interrupt()

    def load(self) -> ServerLoad:
        """Return what the server is busy with."""
        board = self._board
        choices = [choice for answer in board.answers for choice in answer.choices] if board is not None else []
        requests = [choice.stream.request for choice in choices if not choice.stream.is_over]
        running = [request for request in requests if request is not None and request.sequence >= 0]
        tokens = sum(len(request.token_ids) for request in running)
        served = self.host.loaded if self.host.state == "ready" and self.host.asleep is None else None
        if isinstance(served, ServedEmbedder):
            embedding = self._embedding.total()
            return ServerLoad(running=min(embedding, 1), waiting=max(embedding - 1, 0))
        cells = None if served is None else served.model.target.capabilities.cells
        return ServerLoad(
            running=len(running),
            waiting=len(requests) - len(running),
            tokens=tokens,
            cache_share=min(tokens / cells, 1.0) if cells else 0.0,
        )

    @contextlib.contextmanager
    def embedding_for(self, client: str) -> Iterator[None]:
        """Count a request that has passes of texts, unless too many of this client do."""
        if self._embedding[client] > self.options.max_waiting:
            raise QueueFullError(
                f"{self._embedding[client]} requests of this client wait for their passes, and no more may: "
                "ask again later"
            )
        self._embedding[client] += 1
        try:
            yield
        finally:
            self._embedding[client] -= 1
            if not self._embedding[client]:
                del self._embedding[client]

    async def answer(
        self, request: Request, generation: GenerationRequest, prompts: Sequence[PreparedPrompt]
    ) -> Response:
        """Answer prompts, whole or as a stream. What goes wrong before anything was sent is raised."""
        served = self.host.served
        client = get_namespace(request.scope)
        listed = self._may_list(generation, prompts, served.context_length)
        if listed:
            await cancel_on_disconnect(request, self._take_room(client, listed))
        namespace = get_namespace(request.scope, generation.cache_salt or None)
        make_formatter = _FORMATTERS[generation.api]
        try:
            # The server may have begun to end meanwhile.
            board = self.board
            with in_names_of(generation.names):
                answer = Answer(
                    served,
                    generation,
                    prompts,
                    namespace=namespace,
                    client=client,
                    most_s=self.options.request_s,
                    id_prefix=make_formatter.id_prefix,
                    keeps=make_formatter.repeats_answer or not generation.stream,
                )
        except BaseException:
            self._room.give_back(client, listed)
            raise
        self._listed[answer.id] = client, listed
        board.add(answer)
        formatter, share = make_formatter(answer), self.work.share_for(request.scope)
        try:
            with in_names_of(generation.names):
                await cancel_on_disconnect(request, answer.admitted())
            if not generation.stream:
                return await self._whole(request, answer, formatter, share)
        except BaseException:
            self._over(answer)
            raise
        return EventStream(
            self._stream(answer, formatter, share),
            over=lambda: self._over(answer),
            ping_s=generation.ping_s,
            ping=formatter.ping,
        )

    async def _whole(self, request: Request, answer: Answer, formatter: ResponseFormatter, share: Share) -> Response:
        """Wait for an answer for as long as the client does."""
        await cancel_on_disconnect(request, self._followed(answer))
        _check_whole(answer)
        if sum(choice.num_listed for choice in answer.choices) > MAX_AT_ONCE:
            return PieceByPiece(self._pieces(formatter, share), over=lambda: self._over(answer))
        body = to_json(formatter.whole())
        self._over(answer)
        return Response(body, media_type="application/json")

    async def _pieces(self, formatter: ResponseFormatter, share: Share) -> AsyncIterator[bytes]:
        """Iterate over a whole answer, written beside others."""
        pieces = await share.offload(Kind.WRITING, lambda: json_pieces(formatter.whole()))

        def some() -> bytes:
            found = bytearray()
            while len(found) < _PIECE_BYTES and (piece := next(pieces, b"")):
                found += piece
            return bytes(found)

        while piece := await share.offload(Kind.WRITING, some):
            yield piece

    def _may_list(self, generation: GenerationRequest, prompts: Sequence[PreparedPrompt], context: int) -> int:
        """Return how many log-probabilities answers may come to; of one request there may not be too many."""
        asked = generation.options.logprobs
        each = 0 if asked.logprobs is None else 1 + asked.logprobs
        lengths = [min(generation.options.rules.max_tokens, context - len(prompt.token_ids)) for prompt in prompts]
        most = self.options.max_answer_logprobs
        listed = sum(lengths) * generation.num_choices * each
        if asked.prompt_logprobs is not None:
            num_read = sum(len(prompt.token_ids) for prompt in prompts) * generation.num_choices
            listed += num_read * (1 + asked.prompt_logprobs)
            if listed > most:
                raise FieldError(
                    "prompt_logprobs" if generation.num_prompt_logprobs is not None else "echo",
                    f"log-probabilities of {num_read} tokens of prompts and of what is answered come to {listed:,}, "
                    f"and at most {most:,} are taken: ask for fewer, send less at once, or start the server with a "
                    "larger `max_answer_logprobs`",
                )
        if listed > most:
            num_choices = len(prompts) * generation.num_choices
            answers = f"{num_choices} answers of up to" if num_choices > 1 else "an answer of up to"
            raise FieldError(
                generation.names.get("logprobs", "logprobs"),
                f"{each} log-probabilities a token for {answers} {max(lengths)} tokens come to {listed:,}, and at most "
                f"{most:,} are taken: ask for fewer, set a smaller "
                f"{generation.names.get('max_tokens', 'max_tokens')}, or start the server with a larger "
                "`max_answer_logprobs`",
            )
        return listed

    async def _take_room(self, client: str, listed: int) -> None:
        """Wait for room for so many log-probabilities, unless too many requests of this client do."""
        try:
            await self._room.take_in_turn(client, listed, self.options.max_waiting)
        except QueueFullError as error:
            raise QueueFullError(
                f"the answers under way may come to {self._room.most:,} log-probabilities, of each key to half of what "
                f"others leave: {error}; ask again later, or set a smaller max_tokens"
            ) from None

    async def _followed(self, answer: Answer) -> None:
        # A time limit of the answer is looked at round by round.
        every = _WHOLE_ROUNDS if answer.request.most_predict_s is None else 1
        async for choice, events in answer.rounds(every):
            self._note(answer, choice, events)

    async def _stream(self, answer: Answer, formatter: ResponseFormatter, share: Share) -> AsyncGenerator[bytes, None]:
        try:
            if opening := formatter.opening():
                yield formatter.as_events(opening)
            async for choice, events in answer.rounds():
                self._note(answer, choice, events)
                _check_whole(answer)
                listed = formatter.num_echoed(choice, events)
                for event in events:
                    if not isinstance(event, TokenEvent) or event.logprobs:
                        listed += _num_listed(choice, event)
                if listed <= MAX_AT_ONCE:
                    written = formatter.written(choice, events)
                else:
                    write = functools.partial(formatter.written, choice, events, in_pieces=True)
                    written = await share.offload(Kind.WRITING, write)
                if written:
                    yield written
            if formatter.ends_with_done:
                yield b"data: [DONE]\n\n"
        except Exception as error:
            yield formatter.as_events(formatter.failed(error))

    def _note(self, answer: Answer, choice: Choice, events: Sequence[Event]) -> None:
        """Count what came to a choice, and give it a place if it has just started."""
        if choice.slot < 0:
            self._get_board(answer.served).started(answer, choice)
        if isinstance(events[-1], Ended):
            self._count(answer, choice)

    def _count(self, answer: Answer, choice: Choice) -> None:
        """Count a choice that is over; the last one takes the answer off the board.

        It is gone from there before the client gets the last event, so that whoever saw the end finds it ended.
        """
        choice.is_counted = True
        if all(each.is_counted for each in answer.choices):
            self._get_board(answer.served).remove(answer)
        if self.metrics is not None and choice.stats is not None:
            self.metrics.request_over(
                choice.stats,
                choice.finish_reason,  # type: ignore[arg-type]
                choice.num_prompt,
            )

    def _get_board(self, served: ServedModel) -> SlotBoard:
        """Return the places of answers, also while the server ends."""
        if self._board is None:
            self._board = SlotBoard(served)
        return self._board

    def _over(self, answer: Answer) -> None:
        """Have what is left of an answer end and be counted; its places are taken until then."""
        self._room.give_back(*self._listed.pop(answer.id, ("", 0)))
        answer.cancel()
        left = [choice for choice in answer.choices if not choice.is_counted]
        if not left:
            return
        ending = asyncio.create_task(self._end(answer, left))
        # An event loop holds its tasks weakly.
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _end(self, answer: Answer, left: Sequence[Choice]) -> None:
        try:
            for choice in left:
                await choice.ended()
                self._count(answer, choice)
        finally:
            self._get_board(answer.served).remove(answer)


def _num_listed(choice: Choice, event: Event) -> int:
    """Return how many items are written of an event."""
    if isinstance(event, Ended):
        return choice.num_listed
    return event.num_listed if isinstance(event, TokenEvent | Round) else 0


def _check_whole(answer: Answer) -> None:
    """Raise where the end of the server cut an answer off, so that nobody takes what there is for all of it."""
    if answer.interrupted and any(
        choice.finish_reason == "cancelled" and not choice.timed_out for choice in answer.choices
    ):
        raise RefusedError(503, "unavailable_error", "the server is ending, and the answer is not complete: ask again")


@dataclass(frozen=True, slots=True)
class SlotText:
    """What was last read and said in a place.

    Attributes:
        client: whose answer it was.
        namespace: whose texts these are.
        token_ids: of prompt and answer.
    """

    client: str
    namespace: str
    token_ids: Sequence[int]


class SlotBoard:
    """The places of a server, and all answers under way, those that wait among them."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._latest: list[tuple[int, Answer, Choice] | None] = [None] * served.max_running
        # Of places whose latest answer is over: whose it was, and what is known of it.
        self._past: list[tuple[str, dict[str, Any]] | None] = [None] * served.max_running
        self._texts: list[SlotText | None] = [None] * served.max_running
        self._answers: dict[str, Answer] = {}
        self._tasks = 0

    @property
    def answers(self) -> list[Answer]:
        """Those under way."""
        return list(self._answers.values())

    def answer(self, answer_id: str, client: str) -> Answer | None:
        """Return the answer of a client that is under way and has this id."""
        answer = self._answers.get(answer_id)
        return answer if answer is not None and answer.client == client else None

    def add(self, answer: Answer) -> None:
        self._answers[answer.id] = answer

    def started(self, answer: Answer, choice: Choice) -> None:
        """Give a choice that has started, and has no place yet, one that is free: the one asked for, if it is."""
        numbers = [number for number in range(len(self._latest)) if not self._is_busy(number)]
        asked = answer.request.slot
        free = asked if asked in numbers else next(iter(numbers), None)
        if free is not None:
            self._tasks += 1
            choice.slot = free
            self._latest[free] = (self._tasks, answer, choice)
        elif choice.stream.is_over:
            # It ended before anybody looked, and those that started after it have all places by now.
            choice.slot = 0

    def remove(self, answer: Answer) -> None:
        """Take note of an answer that is over."""
        self._answers.pop(answer.id, None)
        for number, latest in enumerate(self._latest):
            if latest is not None and latest[1] is answer:
                self._past[number] = (answer.client, self._facts(number))
                self._latest[number] = None
                request = latest[2].stream.request
                token_ids = latest[2].prompt.token_ids if request is None else request.token_ids
                self._texts[number] = SlotText(answer.client, answer.namespace, token_ids)

    def text(self, number: int, client: str) -> SlotText:
        """Return the latest text of a place, which is no longer written."""
        if not 0 <= number < len(self._latest):
            raise RefusedError(
                400, "invalid_request_error", f"there is no slot {number}: they are 0 to {len(self._latest) - 1}"
            )
        if self._is_busy(number):
            raise RefusedError(503, "unavailable_error", f"slot {number} is answering: ask again when it is done")
        text = self._texts[number]
        # Others are not told that there is one.
        return text if text is not None and text.client == client else SlotText(client, client, ())

    def set_text(self, number: int, text: SlotText | None) -> None:
        """Say what a place holds that gave no answer."""
        self._texts[number] = text

    @property
    def num_busy(self) -> int:
        """Places in use."""
        return sum(self._is_busy(number) for number in range(len(self._latest)))

    def facts(self, client: str) -> list[dict[str, Any]]:
        """Return what a client may know of each place: of answers to others how much they say, not what they ask."""
        found = []
        for number, (latest, past) in enumerate(zip(self._latest, self._past, strict=True)):
            facts = self._facts(number)
            owner = latest[1].client if latest is not None else past[0] if past is not None else client
            if owner != client:
                del facts["params"]
            found.append(facts)
        return found

    def idle_facts(self) -> list[dict[str, Any]]:
        """Return what there is to know of places of which nobody remembers an answer."""
        return [self._empty_facts(number) for number in range(len(self._latest))]

    def _empty_facts(self, number: int) -> dict[str, Any]:
        served = self._served
        return {
            "id": number,
            "n_ctx": served.context_length,
            "speculative": bool(served.drafters),
            "is_processing": False,
        }

    def _is_busy(self, number: int) -> bool:
        latest = self._latest[number]
        return latest is not None and not latest[2].stream.is_over

    def _facts(self, number: int) -> dict[str, Any]:
        served, busy = self._served, self._is_busy(number)
        facts = {**self._empty_facts(number), "is_processing": busy}
        latest = self._latest[number]
        if latest is None:
            past = self._past[number]
            return facts if past is None else past[1].copy()
        task, answer, choice = latest
        request = choice.stream.request
        # What is not streamed is looked at by several rounds at once, and the engine is ahead.
        said = choice.assembler.num_tokens if request is None else request.num_output
        rules = choice.stream.rules
        left = -1 if not busy else max(rules.max_tokens - said, 0)
        return {
            **facts,
            "id_task": task,
            "n_prompt_tokens": choice.num_prompt + said,
            "n_prompt_tokens_processed": 0 if request is None else request.stats.prompt_tokens,
            "n_prompt_tokens_cache": choice.cached,
            "params": short_generation_settings(choice.stream.params, rules, answer.request, served),
            "next_token": [
                {
                    "has_next_token": busy,
                    "has_new_line": choice.has_new_line,
                    "n_remain": left,
                    "n_decoded": said if busy else 0,
                }
            ],
        }
