"""``Server``, which answers requests once they are read; the sockets are in ``deployment.py``.

It has the model, the places of answers (``slots.py``) and the counts, and ends what is left of an answer. A model that
nobody asks is freed, and loaded again by the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.chat.assembler import TokenEvent
from paceline.core.errors import PacelineError, QueueFullError
from paceline.engines.memory import give_back_freed
from paceline.server_options import ServerOptions
from paceline.serving.answering import Answer, Choice, Ended, Event, PreparedPrompt, Round
from paceline.serving.errors import FieldError, RefusedError, error_response, in_names_of
from paceline.serving.event_stream import EventStream, PieceByPiece, cancel_on_disconnect
from paceline.serving.generation_request import GenerationRequest
from paceline.serving.json_output import json_pieces, to_json
from paceline.serving.metrics import ServerLoad, ServerMetrics
from paceline.serving.model_host import ModelHost, Served, ServedEmbedder, ServedModel
from paceline.serving.props import list_models, server_props
from paceline.serving.response_formats import FORMATTERS
from paceline.serving.response_formats.base import ResponseFormatter
from paceline.serving.security import get_namespace
from paceline.serving.slots import SlotBoard
from paceline.serving.work import MAX_AT_ONCE, Kind, Share, Shares, Work

_WHOLE_ROUNDS: Final = 16
"""Rounds that are looked at together where nobody reads them as they come."""

_PIECE_BYTES: Final = 1 << 16
"""Bytes of a long answer that are sent at once, or a little more."""

_ROOM: Final = 4
"""Requests of the most log-probabilities that there is room for at a time."""


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
                f"{self._embedding[client]} requests of this client are waiting, which is the limit: ask again later"
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
            await cancel_on_disconnect(request, self._take_room(client, listed, generation.names["max_tokens"]))
        namespace = get_namespace(request.scope, generation.cache_salt or None)
        make_formatter = FORMATTERS[generation.api]
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
        said = formatter.opening()
        stream = EventStream(
            self._stream(answer, formatter, share, lambda: stream.has_begun),
            over=lambda: self._over(answer),
            ping_s=generation.ping_s,
            ping=formatter.ping,
            opening=formatter.as_events(said) if said else b"",
        )
        return stream

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
                    f"and at most {most:,} are accepted: request fewer, send less at once, or start the server with a "
                    "larger `max_answer_logprobs`",
                )
        if listed > most:
            num_choices = len(prompts) * generation.num_choices
            answers = f"{num_choices} answers of up to" if num_choices > 1 else "an answer of up to"
            raise FieldError(
                generation.names.get("logprobs", "logprobs"),
                f"{each} log-probabilities a token for {answers} {max(lengths)} tokens come to {listed:,}, and at most "
                f"{most:,} are accepted: request fewer, set a smaller {generation.names['max_tokens']}, or start the "
                "server with a larger `max_answer_logprobs`",
            )
        return listed

    async def _take_room(self, client: str, listed: int, length_field: str) -> None:
        """Wait for room for so many log-probabilities, unless too many requests of this client do."""
        try:
            await self._room.take_in_turn(client, listed, self.options.max_waiting)
        except QueueFullError as error:
            raise QueueFullError(
                f"the answers under way may come to {self._room.most:,} log-probabilities, of each key to half of what "
                f"others leave: {error}; ask again later, or set a smaller {length_field}"
            ) from None

    async def _followed(self, answer: Answer) -> None:
        # A time limit of the answer is looked at round by round.
        every = _WHOLE_ROUNDS if answer.request.most_predict_s is None else 1
        async for choice, events in answer.rounds(every):
            self._note(answer, choice, events)

    async def _stream(
        self, answer: Answer, formatter: ResponseFormatter, share: Share, has_begun: Callable[[], bool]
    ) -> AsyncGenerator[bytes, None]:
        """Iterate over the events of an answer; what goes wrong before anything was sent is raised."""
        try:
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
            if not has_begun():
                raise
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


_WATCHING: Final = ("GET", "HEAD", "OPTIONS")
"""Requests that ask about the server and not the model: they neither wake it nor count. So llama-server has it."""


class SleepWhenIdle:
    """Wakes the model before a request goes on, and has it sleep once none was under way for ``sleep_idle_s``."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server
        self._under_way = 0
        self._timer: asyncio.TimerHandle | None = None
        self._falling: asyncio.Task[None] | None = None
        server.on_ready = self._wait_for_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _WATCHING:
            await self._app(scope, receive, send)
            return
        self._under_way += 1
        try:
            if self._server.host.asleep is not None:
                try:
                    await self._server.host.wake()
                except PacelineError as error:
                    await error_response(error, scope)(scope, receive, send)
                    return
            await self._app(scope, receive, send)
        finally:
            self._under_way -= 1
            self._wait_for_requests()

    def _wait_for_requests(self) -> None:
        """Count the seconds from now on."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._server.options.sleep_idle_s, self._be_idle)

    def _be_idle(self) -> None:
        if self._server.host.state != "ready" or self._server.host.asleep is not None:
            return
        if self._under_way or not self._server.is_idle:
            self._wait_for_requests()
        else:
            self._falling = asyncio.create_task(self._fall_asleep())

    async def _fall_asleep(self) -> None:
        if self._under_way:
            # It came in between.
            return
        await self._server.sleep()
        # What stayed with the model was taken out of the collector's sight.
        gc.unfreeze()
        gc.collect()
        give_back_freed()
