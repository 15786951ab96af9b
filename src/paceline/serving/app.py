"""The routes of ``paceline serve``: a table of them, and what answers each.

::

    middleware                app      schema, generation_request  prompts  server, answering  response_formats
    keys, hosts, limits  ->  a route  ->  what is asked for  ->  its tokens  ->  the answer  ->  its JSON

A new route is a line in :meth:`Handlers.routes`, a method that answers it, and the class of its body in ``schema.py``.
A new API for answers also takes a formatter, which ``response_formats/__init__.py`` names; docs/parts/server.md lists
the rest ("Another format of answers").
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Final, TypeAlias, get_type_hints

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp

from paceline import __version__
from paceline.core.errors import PacelineError
from paceline.core.numbers import shown
from paceline.serving.answering import PreparedPrompt
from paceline.serving.chat_request import unread_settings
from paceline.serving.conversations import Conversation
from paceline.serving.embeddings import embed, rerank
from paceline.serving.errors import (
    FieldError,
    NotFoundError,
    NotOfferedError,
    RefusedError,
    WrongMethodError,
    error_response,
    error_type,
    speaks_anthropic,
)
from paceline.serving.event_stream import cancel_on_disconnect
from paceline.serving.fields import check_known, unknown_within
from paceline.serving.generation_request import Api, GenerationRequest, read_generation_request, warn_of_unknown_fields
from paceline.serving.json_output import to_json
from paceline.serving.messages_request import read_messages
from paceline.serving.middleware import with_security
from paceline.serving.model_host import ServedEmbedder
from paceline.serving.page import page_handlers
from paceline.serving.prompts import (
    AT_ONCE,
    check_ids,
    compile_constraint,
    encode,
    prepare_chat,
    prepare_completions,
    prepare_infill,
    read_ids,
    read_mixed,
    resolve_biases,
    token_piece,
    tokens_to_text,
)
from paceline.serving.props import list_anthropic_models, server_props
from paceline.serving.responses_request import read_response_request
from paceline.serving.schema import (
    ERROR_RESPONSES,
    ChatBody,
    CompletionBody,
    ControlBody,
    DetokenizeBody,
    EmbeddingBody,
    InfillBody,
    MessagesBody,
    RerankBody,
    ResponsesBody,
    SlotBody,
    TemplateBody,
    TokenizeBody,
    describe_body,
    openapi_document,
    parameter_error,
    read_body_as,
)
from paceline.serving.security import SecuritySettings, get_namespace
from paceline.serving.server import Server, SleepWhenIdle
from paceline.serving.slots import erase_slot, restore_slot, save_slot, slot_path
from paceline.serving.work import Kind, Share, choose_reading_kind

_GET: Final = ("GET", "HEAD")
"""The body of an answer to HEAD is left out by uvicorn."""
_POST: Final = ("POST",)

Handler: TypeAlias = Callable[..., Awaitable[Any]]
"""Answers requests of a route: the parameters are what FastAPI reads, the result is a response or becomes JSON."""


@dataclass(frozen=True, slots=True)
class Route:
    """A line of the table.

    Attributes:
        methods: that it takes; the first is the one that the OpenAPI document has.
        paths: where it is, behind the server's prefix; the first is the one that the OpenAPI document has.
        handler: answers its requests.
        summary: one line for the OpenAPI document, which has only routes with one.
        is_public: whether it may be read without a key.
        is_polled: whether whatever watches over servers asks for it again and again: logged at level DEBUG.
    """

    methods: tuple[str, ...]
    paths: tuple[str, ...]
    handler: Handler
    summary: str = ""
    is_public: bool = False
    is_polled: bool = False

    def add_to(self, router: APIRouter) -> None:
        types = get_type_hints(self.handler)
        about: dict[str, Any] = {"summary": self.summary}
        if "body" in types:
            about["openapi_extra"] = describe_body(types["body"])
        if types.get("return") is PlainTextResponse:
            about["response_class"] = PlainTextResponse
        for path in self.paths:
            # As few as may be: FastAPI looks at each of them for each request.
            is_told = bool(self.summary) and path == self.paths[0]
            if is_told:
                router.add_api_route(path, self.handler, methods=[self.methods[0]], **about)
            if hidden := [*self.methods[is_told:]]:
                router.add_api_route(path, self.handler, methods=hidden, include_in_schema=False)


def create_app(server: Server, security: SecuritySettings, routes: Sequence[Route] | None = None) -> ASGIApp:
    """Return the application, behind everything that a request has to pass; by default with all routes of a model."""
    app = FastAPI(title="paceline", docs_url=None, redoc_url=None, openapi_url=None)
    prefix = server.options.prefix
    app.state.work, app.state.prefix = server.work, prefix
    router = APIRouter(prefix=prefix, responses=ERROR_RESPONSES)
    if routes is None:
        routes = Handlers(server).routes()
    for route in routes:
        route.add_to(router)
    pages = page_handlers(server.options.static_path if server.options.ui else None)
    # A file with the path of a route is not sent, and must not make that public.
    scope = {"type": "http", "method": "GET"}
    page = [
        Route(_GET, (path,), handler, is_public=True)
        for path, handler in pages.items()
        if all(route.matches({**scope, "path": prefix + path})[0] is Match.NONE for route in router.routes)
    ]
    for route in page if server.options.ui else ():
        route.add_to(router)
    app.include_router(router)
    # It hands on streams of events as they come. Level 1, as the event loop waits for what has up to 128 KiB.
    app.add_middleware(GZipMiddleware, minimum_size=_MIN_COMPRESSED, compresslevel=1)
    for kind in (PacelineError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _error_handler(server))
    return with_security(
        SleepWhenIdle(app, server) if server.options.sleep_idle_s > 0 else app,
        security,
        server.refused,
        public_paths=frozenset(prefix + path for route in (*routes, *page) if route.is_public for path in route.paths),
        quiet_paths=frozenset(
            prefix + path for route in (*page, *(each for each in routes if each.is_polled)) for path in route.paths
        ),
    )


_MIN_COMPRESSED: Final = 4096
"""Bytes of an answer from which on it is compressed for clients that take that. Most answers to a prompt have fewer."""

_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_BYTES_AN_ITEM: Final = 100
"""Bytes of a body that take as long to look at as an item of a list."""


def _error_handler(server: Server) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return what answers requests that ended by an error, and counts them."""

    async def answered(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            # Of Starlette's own there are a path and a method that nobody offers.
            error = _no_such_route(request)
        elif isinstance(error, RequestValidationError):
            error = parameter_error(error)
        response = error_response(error, request.scope)
        server.refused(response.status_code, error_type(error))
        return response

    return answered


def _no_such_route(request: Request) -> PacelineError:
    """Return the error of a path or a method that nobody offers."""
    path, method = request.scope["path"], request.scope["method"]
    offered = [
        name
        for name in _METHODS
        if any(route.matches({**request.scope, "method": name})[0] is Match.FULL for route in request.app.routes)
    ]
    if not offered:
        # In llama-server's words first, which its clients may know.
        return NotFoundError(f"File Not Found: there is no path {shown(path)} here; /openapi.json lists the paths")
    return WrongMethodError(f"{shown(path)} does not take {shown(method)}: send {' or '.join(offered)}", offered)


_Completion = Annotated[CompletionBody, Depends(read_body_as(CompletionBody))]
_Infill = Annotated[InfillBody, Depends(read_body_as(InfillBody))]
_Chat = Annotated[ChatBody, Depends(read_body_as(ChatBody))]
_Messages = Annotated[MessagesBody, Depends(read_body_as(MessagesBody))]
_Responses = Annotated[ResponsesBody, Depends(read_body_as(ResponsesBody))]
_Embedding = Annotated[EmbeddingBody, Depends(read_body_as(EmbeddingBody))]
_Rerank = Annotated[RerankBody, Depends(read_body_as(RerankBody))]
_Control = Annotated[ControlBody, Depends(read_body_as(ControlBody))]
_Tokenize = Annotated[TokenizeBody, Depends(read_body_as(TokenizeBody))]
_Detokenize = Annotated[DetokenizeBody, Depends(read_body_as(DetokenizeBody))]
_Slot = Annotated[SlotBody, Depends(read_body_as(SlotBody, may_be_empty=True))]
_Template = Annotated[TemplateBody, Depends(read_body_as(TemplateBody))]

_NOT_OFFERED: Final = {
    "adapters": ("/lora-adapters",),
    "stored responses: nothing is stored": ("/v1/responses/{name:path}", "/responses/{name:path}"),
}
"""Routes of llama-server that this one does not have, so that clients are told."""

ConversationBody: TypeAlias = ChatBody | MessagesBody | ResponsesBody

_MAX_TOKENIZED: Final = 2 << 20
"""Bytes of a text for ``/tokenize``: no call of a tokenizer can be stopped, and at worst these take some seconds."""


class Handlers:
    """Answers the requests of all routes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._openapi: bytes | None = None

    def routes(self) -> list[Route]:
        """Return the table. FastAPI takes the first line that fits."""
        # fmt: off
        table = [
            Route(_GET, ("/health", "/v1/health", "/ping"), self.health, "Whether the model is there",
                  is_public=True, is_polled=True),
            Route(_GET, ("/metrics",), self.metrics, "Counts and times, for Prometheus", is_polled=True),
            Route(_POST, ("/completion", "/completions"), self.native, "Go on with a text"),
            Route(_POST, ("/infill",), self.infill, "Fill the gap between two texts"),
            Route(_POST, ("/v1/completions",), self.completions, "Go on with a text, as OpenAI"),
            Route(_POST, ("/v1/chat/completions", "/chat/completions"), self.chat, "Answer a conversation"),
            Route(_POST, ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"), self.input_tokens,
                  "Count the tokens of a conversation"),
            Route(_POST, ("/v1/responses", "/responses"), self.responses, "Answer a conversation, as items"),
            Route(_POST, ("/v1/responses/input_tokens", "/responses/input_tokens"), self.response_tokens,
                  "Count the tokens of a conversation of items"),
            Route(_POST, ("/v1/chat/completions/control", "/chat/completions/control"), self.control,
                  "End the reasoning of an answer that is being written"),
            Route(_POST, ("/v1/messages",), self.messages, "Answer a conversation, as Anthropic"),
            Route(_POST, ("/v1/messages/count_tokens",), self.count_tokens,
                  "Count the tokens of a conversation, as Anthropic"),
            Route(_POST, ("/v1/embeddings",), self.openai_embeddings, "Turn texts into vectors, as OpenAI"),
            Route(_POST, ("/embedding", "/embeddings"), self.embeddings, "Turn texts into vectors"),
            Route(_POST, ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking"), self.rerank,
                  "Put documents in the order of what they have to do with a query"),
            Route(_POST, ("/tokenize",), self.tokenize, "Turn a text into tokens"),
            Route(_POST, ("/detokenize",), self.detokenize, "Turn tokens into a text"),
            Route(_POST, ("/apply-template",), self.apply_template,
                  "Write a conversation as the model's template has it"),
            Route(_GET, ("/v1/models", "/models"), self.models, "The model", is_polled=True),
            Route(_GET, ("/v1/models/{name:path}",), self.model, "The model, by one of its names"),
            Route(_GET, ("/tokenizer_info",), self.tokenizer_info, "The tokens that begin and end texts"),
            Route(_GET, ("/version",), self.version, "The version of paceline"),
            Route(_GET, ("/load",), self.load, "How many answers are asked for", is_polled=True),
            Route(_GET, ("/props",), self.props, "How requests are answered that say nothing", is_polled=True),
            Route(_POST, ("/props",), self.set_props),
            Route(_GET, ("/slots",), self.slots, "What is under way", is_polled=True),
            Route(_POST, ("/slots/{number}",), self.slot_action, "Save, restore or erase what was read and said"),
            Route(_GET, ("/openapi.json",), self.openapi),
        ]
        # fmt: on
        refused = [Route((*_GET, *_POST), paths, _handler_that_refuses(what)) for what, paths in _NOT_OFFERED.items()]
        return table + refused

    async def health(self) -> dict[str, str]:
        self._server.host.check()
        return {"status": "ok"}

    async def metrics(self, request: Request) -> PlainTextResponse:
        if not self._server.options.metrics:
            raise NotOfferedError("this server has no metrics: start it with `metrics=True`")
        self._server.host.check()
        metrics = self._server.metrics
        assert metrics is not None
        accepts = request.headers.get("accept", "")
        body, kind = metrics.render(openmetrics="application/openmetrics-text" in accepts)
        response = PlainTextResponse(body, headers={"Content-Type": kind})
        # With its capitals, as llama-server sends it.
        response.raw_headers.append((b"Process-Start-Time-Unix", metrics.process_start.encode()))
        return response

    async def native(self, request: Request, body: _Completion) -> Response:
        return await self._answer(request, self._prepare_completions(request, body, "native"))

    async def infill(self, request: Request, body: _Infill) -> Response:
        return await self._answer(request, self._prepare_infill(request, body))

    async def completions(self, request: Request, body: _Completion) -> Response:
        return await self._answer(request, self._prepare_completions(request, body, "completions"))

    async def chat(self, request: Request, body: _Chat) -> Response:
        return await self._converse(request, body, "chat")

    async def input_tokens(self, request: Request, body: _Chat) -> dict[str, Any]:
        return {"object": "response.input_tokens", **await self._count_tokens(request, body, "chat")}

    async def responses(self, request: Request, body: _Responses) -> Response:
        return await self._converse(request, body, "responses")

    async def response_tokens(self, request: Request, body: _Responses) -> dict[str, Any]:
        return {"object": "response.input_tokens", **await self._count_tokens(request, body, "responses")}

    async def messages(self, request: Request, body: _Messages) -> Response:
        return await self._converse(request, body, "messages")

    async def count_tokens(self, request: Request, body: _Messages) -> dict[str, Any]:
        return await self._count_tokens(request, body, "messages")

    async def control(self, request: Request, body: _Control) -> dict[str, Any]:
        warned = self._collect_warnings(body)
        answer = self._server.board.answer(body.id, get_namespace(request.scope))
        if answer is None:
            return {"success": False, "message": "no active completion for this id", **warned}
        ended = [await choice.stream.end_reasoning() for choice in answer.choices]
        return {"success": any(ended), "message": "" if any(ended) else "the answer does not reason now", **warned}

    async def openai_embeddings(self, request: Request, body: _Embedding) -> Response:
        return await self._embed(request, body, in_openai_form=True)

    async def embeddings(self, request: Request, body: _Embedding) -> Response:
        return await self._embed(request, body, in_openai_form=False)

    async def rerank(self, request: Request, body: _Rerank) -> Response:
        warnings, kind = self._collect_warnings(body).get("warnings", ()), await _reading_kind(request)
        answer = rerank(self._server, request, kind, body, warnings=warnings)
        return _json(await cancel_on_disconnect(request, answer))

    async def tokenize(self, request: Request, body: _Tokenize) -> Response:
        loaded = self._server.host.loaded
        vocabulary = loaded.vocabulary
        beside: dict[str, Any] = self._collect_warnings(body)
        add_special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
        if add_special is None:
            add_special = body.prompt is not None

        def answer() -> bytes:
            parts = read_mixed(body.content, "content") if body.prompt is None else [body.prompt]
            length = sum(len(part.encode("utf-8", "replace")) for part in parts if isinstance(part, str))
            if length > _MAX_TOKENIZED:
                raise FieldError(
                    "content",
                    f"content has {length} bytes: at most {_MAX_TOKENIZED} are tokenized at once; send parts",
                )
            token_ids = encode(
                parts,
                vocabulary,
                add_special=add_special,
                parse_special=body.parse_special is not False,
            )
            check_ids(token_ids, vocabulary, "content")
            items: Iterator[Any] = iter(token_ids)
            if body.with_pieces:
                items = (
                    {"id": token_id, "piece": _text_or_bytes(token_piece(token_id, vocabulary))}
                    for token_id in token_ids
                )
            written = b",".join(to_json(some)[1:-1] for some in iter(lambda: list(islice(items, AT_ONCE)), []))
            if body.prompt is not None:
                beside.update(count=len(token_ids), max_model_len=loaded.context_length)
            return b'{"tokens":[%b]%b}' % (written, b"," + to_json(beside)[1:-1] if beside else b"")

        return await self._answer_in_thread(request, answer)

    async def detokenize(self, request: Request, body: _Detokenize) -> Response:
        vocabulary = self._server.host.loaded.vocabulary
        warned = self._collect_warnings(body)

        def answer() -> bytes:
            token_ids = read_ids(body.tokens, "tokens")
            check_ids(token_ids, vocabulary, "tokens")
            text = tokens_to_text(token_ids, vocabulary)
            # Under vLLM's name, too.
            return to_json({"content": text, "prompt": text, **warned})

        return await self._answer_in_thread(request, answer)

    async def apply_template(self, request: Request, body: _Template) -> Response:
        served, share = self._server.host.served, self._share(request)
        kind = await _reading_kind(request, body.messages, body.tools)
        prompt = await cancel_on_disconnect(
            request,
            prepare_chat(served, share, kind, body, Conversation(body.messages), max_tokens=0, tools=body.tools),
        )

        def answer() -> bytes:
            # A client may send what it would ask the model.
            warned = self._collect_warnings(body, also=ChatBody.model_fields, further=prompt.warnings)
            return to_json({"prompt": prompt.text, **warned})

        return _json(await share.offload(kind, answer, num_items=len(await request.body()) // _BYTES_AN_ITEM))

    async def models(self, request: Request) -> dict[str, Any]:
        asleep = self._server.host.asleep
        listed: dict[str, Any] = self._server.list_models() if asleep is None else asleep["models"]
        return list_anthropic_models(listed["data"]) if speaks_anthropic(request.scope) else listed

    async def model(self, request: Request, name: str) -> dict[str, Any]:
        asleep = self._server.host.asleep
        names = (self._server.list_models() if asleep is None else asleep["models"])["data"][0]["aliases"]
        if name not in names:
            message = f"there is no model {name!r} here: its names are {', '.join(names)}"
            raise RefusedError(404, "not_found_error", message)
        return {**(await self.models(request))["data"][0], "id": name}

    async def props(self, request: Request) -> dict[str, Any]:
        if self._server.host.asleep is not None:
            return {**self._server.host.asleep["props"], "is_sleeping": True}
        served = self._server.host.loaded
        return await self._share(request).offload(Kind.UPKEEP, lambda: server_props(served, self._server.options))

    async def tokenizer_info(self, request: Request) -> dict[str, Any]:
        props = await self.props(request)
        return {name: props[name] or None for name in ("bos_token", "eos_token", "chat_template")}

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def load(self) -> dict[str, int]:
        load = self._server.load()
        return {"server_load": load.running + load.waiting}

    async def set_props(self) -> None:
        raise WrongMethodError(
            "this server's properties cannot be changed while it runs: start it with other flags", ("GET", "HEAD")
        )

    async def slots(self, request: Request, fail_on_no_slot: int = 0) -> list[dict[str, Any]]:
        if not self._server.options.slots:
            raise NotOfferedError("this server does not list its slots: start it with `slots=True`")
        if self._server.host.asleep is not None:
            asleep: list[dict[str, Any]] = self._server.host.asleep["slots"]
            return asleep
        if isinstance(self._server.host.loaded, ServedEmbedder):
            return []
        board = self._server.board
        if fail_on_no_slot and board.num_busy >= self._server.host.served.max_running:
            raise RefusedError(503, "unavailable_error", "no slot available")
        return board.facts(get_namespace(request.scope))

    async def slot_action(self, request: Request, number: int, body: _Slot, action: str = "") -> dict[str, Any]:
        server, scope = self._server, request.scope
        warned = self._collect_warnings(body)
        if server.options.slot_save_path is None:
            raise NotOfferedError("this server stores no slot files: start it with `slot_save_path`")
        if action not in ("save", "restore", "erase"):
            raise FieldError("action", f"action {shown(action)} is unknown: give save, restore or erase")
        served, board = server.host.served, server.board
        text = board.text(number, get_namespace(scope))
        offload = functools.partial(self._share(request).offload, Kind.UPKEEP)
        if action == "erase":
            told = await offload(lambda: erase_slot(served, text))
            board.set_text(number, None)
            return {"id_slot": number, **told, **warned}
        if body.filename is None:
            raise FieldError("filename", f"{action} needs a filename")
        path = slot_path(server.options.slot_save_path, body.filename)
        if action == "save":
            told = await offload(lambda: save_slot(served, text, path, scope))
        else:
            told, restored = await offload(lambda: restore_slot(served, path, scope))
            board.set_text(number, restored)
        return {"id_slot": number, "filename": body.filename, **told, **warned}

    async def openapi(self, request: Request) -> Response:
        if self._openapi is None:
            # It takes 0.1 s.
            write = self._share(request).offload(Kind.UPKEEP, lambda: to_json(openapi_document(request.app)))
            self._openapi = await write
        return _json(self._openapi)

    def _share(self, request: Request) -> Share:
        return self._server.work.share_for(request.scope)

    async def _answer(
        self, request: Request, prepared: Coroutine[Any, Any, tuple[GenerationRequest, list[PreparedPrompt]]]
    ) -> Response:
        generation, prompts = await cancel_on_disconnect(request, prepared)
        return await self._server.answer(request, generation, prompts)

    async def _count_tokens(self, request: Request, body: ConversationBody, api: Api) -> dict[str, Any]:
        counted = self._prepare_chat(request, body, api, counts=True)
        generation, prompt = await cancel_on_disconnect(request, counted)
        warnings = [*generation.warnings, *prompt.warnings]
        return {"input_tokens": len(prompt.token_ids), **({"warnings": warnings} if warnings else {})}

    async def _converse(self, request: Request, body: ConversationBody, api: Api) -> Response:
        generation, prompt = await cancel_on_disconnect(request, self._prepare_chat(request, body, api))
        if generation.stream and prompt.reasoning_format == "deepseek-legacy":
            raise FieldError("reasoning_format", "deepseek-legacy cannot be streamed: take deepseek, or stream false")
        warnings = (*generation.warnings, *prompt.warnings)
        if generation.echo and not (prompt.chat and prompt.chat.continued):
            warnings = (*generation.warnings, "echo changed nothing: no message is continued", *prompt.warnings)
        generation = replace(generation, reasoning_format=prompt.reasoning_format, warnings=warnings)
        return await self._server.answer(request, generation, [prompt])

    async def _read(
        self,
        request: Request,
        body: CompletionBody | ConversationBody,
        api: Api,
        conversation: Conversation | None = None,
    ) -> GenerationRequest:
        """Return what a request asks for, with everything compiled and checked by the model."""
        server, share, kind = self._server, self._share(request), await _reading_kind(request)
        served, biases = server.host.served, body.logit_bias
        listed = len(biases) if isinstance(biases, dict | list) else 0
        generation = await share.offload(
            kind,
            lambda: read_generation_request(
                body,
                api,
                model=served.model,
                defaults=served.options,
                settings=server.options,
                verbose=server.verbose,
                conversation=conversation,
            ),
            # Long bodies may have many messages and names, all of which are looked at.
            num_items=listed + len(await request.body()) // _BYTES_AN_ITEM,
        )
        return await compile_constraint(served, share, await resolve_biases(served, share, kind, generation))

    async def _prepare_completions(
        self, request: Request, body: CompletionBody, api: Api
    ) -> tuple[GenerationRequest, list[PreparedPrompt]]:
        generation = await self._read(request, body, api)
        return generation, await prepare_completions(
            self._server.host.served,
            self._share(request),
            await _reading_kind(request),
            body.prompt,
            num_choices=generation.num_choices,
            most=self._server.options.max_choices,
            add_special=body.add_special_tokens is not False,
        )

    async def _embed(self, request: Request, body: EmbeddingBody, *, in_openai_form: bool) -> Response:
        warnings, kind = self._collect_warnings(body).get("warnings", ()), await _reading_kind(request)
        answer = embed(self._server, request, kind, body, in_openai_form=in_openai_form, warnings=warnings)
        return _json(await cancel_on_disconnect(request, answer))

    async def _prepare_infill(
        self, request: Request, body: InfillBody
    ) -> tuple[GenerationRequest, list[PreparedPrompt]]:
        generation = await self._read(request, body, "native")
        prompt = await prepare_infill(
            self._server.host.served,
            self._share(request),
            await _reading_kind(request),
            body,
            self._server.options,
            max_tokens=generation.options.rules.max_tokens,
        )
        return generation, [prompt]

    async def _prepare_chat(
        self, request: Request, body: ConversationBody, api: Api, *, counts: bool = False
    ) -> tuple[GenerationRequest, PreparedPrompt]:
        conversation = await self._read_conversation(request, body)
        generation = await self._read(request, body, api, conversation)
        # The template tells of the tools even where none may be called, as a history of calls is read with them.
        told = conversation.tools if generation.tools is None else generation.tools.tools
        return generation, await prepare_chat(
            self._server.host.served,
            self._share(request),
            await _reading_kind(request, conversation.messages, told),
            body,
            conversation,
            max_tokens=0 if counts else generation.options.rules.max_tokens,
            tools=told,
            offered=generation.tools,
        )

    async def _read_conversation(self, request: Request, body: ConversationBody) -> Conversation:
        if isinstance(body, ChatBody):
            return Conversation(body.messages, body.tools)
        read: Callable[[], Conversation]
        if isinstance(body, MessagesBody):
            items, read = body.messages, lambda: read_messages(body)
        else:
            items, read = body.input, lambda: read_response_request(body)
        num_items = len(await request.body()) // _BYTES_AN_ITEM
        return await self._share(request).offload(await _reading_kind(request, items), read, num_items=num_items)

    async def _answer_in_thread(self, request: Request, answer: Callable[[], bytes]) -> Response:
        """Answer about texts that may be as long as bodies: also the answer is written in a thread."""
        work = self._share(request).offload(await _reading_kind(request), answer)
        return _json(await cancel_on_disconnect(request, work))

    def _collect_warnings(
        self, body: BaseModel, *, also: Container[str] = ("model",), further: Sequence[str] = ()
    ) -> dict[str, list[str]]:
        """Return what to tell of fields that a route does not know; ``also`` are known and have no effect."""
        extra = {name: value for name, value in (body.model_extra or {}).items() if name not in also}
        extra |= {**unread_settings(dict(body)), **unknown_within(dict(body))}
        unknown = check_known(extra, strict=self._server.options.strict_fields)
        warnings = [*warn_of_unknown_fields(unknown), *further]
        return {"warnings": warnings} if warnings else {}


def _handler_that_refuses(what: str) -> Handler:
    async def refuse() -> None:
        raise NotFoundError(f"this server does not support {what}")

    return refuse


async def _reading_kind(request: Request, *lists: Sequence[Any] | str | None) -> Kind:
    """Return of which kind it is to read a request with lists of messages and tools."""
    return choose_reading_kind(len(await request.body()), sum(len(each) for each in lists if isinstance(each, list)))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
