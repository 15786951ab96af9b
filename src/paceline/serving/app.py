"""The routes of ``paceline serve``.

::

    security                  app      schema, generation_request  prompts  server, answering  response_formats
    keys, hosts, limits  ->  a route  ->  what is asked for  ->  its tokens  ->  the answer  ->  its JSON
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.errors import PacelineError
from paceline.core.numbers import shown
from paceline.serving.answering import PreparedPrompt
from paceline.serving.auth import get_namespace
from paceline.serving.chat_request import unread_settings
from paceline.serving.errors import (
    FieldError,
    NotFoundError,
    NotOfferedError,
    RefusedError,
    WrongMethodError,
    error_response,
    error_type,
)
from paceline.serving.event_stream import cancel_on_disconnect
from paceline.serving.fields import check_known, unknown_within
from paceline.serving.generation_request import Api, GenerationRequest, read_generation_request, warn_of_unknown_fields
from paceline.serving.page import add_page
from paceline.serving.prompts import (
    AT_ONCE,
    check_ids,
    compile_constraint,
    encode,
    prepare_chat,
    prepare_completions,
    read_ids,
    read_mixed,
    resolve_biases,
    token_piece,
    tokens_to_text,
)
from paceline.serving.props import list_models, server_props
from paceline.serving.response_formats import to_json
from paceline.serving.schema import (
    ERROR_RESPONSES,
    ChatBody,
    CompletionBody,
    ControlBody,
    DetokenizeBody,
    TemplateBody,
    TokenizeBody,
    describe_body,
    openapi_document,
    parameter_error,
    read_body_as,
)
from paceline.serving.security import SecuritySettings, with_security
from paceline.serving.server import Server
from paceline.serving.work import Kind, choose_reading_kind


def create_app(server: Server, security: SecuritySettings) -> ASGIApp:
    """Return the application, behind everything that a request has to pass.

    Args:
        server: answers.
        security: who may ask, and for how much.
    """
    app = FastAPI(title="paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.work = server.work
    router = APIRouter(prefix=server.options.prefix, responses=ERROR_RESPONSES)
    _add_health(router, server)
    _add_generation(router, server)
    _add_tokens(router, server)
    _add_facts(router, server)
    _add_not_offered(router)
    if server.options.ui:
        add_page(router)

    @functools.cache
    def described() -> bytes:
        return to_json(openapi_document(app))

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        # It takes 0.1 s at the first time.
        return _json(await server.work.share_for(request.scope).offload(Kind.UPKEEP, described))

    app.include_router(router)
    # It hands on streams of events as they come. Level 1, as the event loop waits for what has up to 128 KiB.
    app.add_middleware(GZipMiddleware, minimum_size=_MIN_COMPRESSED, compresslevel=1)
    for kind in (PacelineError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _error_handler(server))
    return with_security(_HeadAsGet(app), security, server.refused)


_MIN_COMPRESSED: Final = 4096
"""Bytes of an answer from which on it is compressed for clients that take that. Most answers to a prompt have fewer."""

_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


_BYTES_AN_ITEM: Final = 100
"""Bytes of a body that take as long to look at as an item of a list."""


class _HeadAsGet:
    """Has every route that answers GET answer HEAD too, which FastAPI's do not; uvicorn leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def _error_handler(server: Server) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return what answers requests that ended by an error, and counts them."""

    async def answered(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            # Of Starlette's own there are a path and a method that nobody offers.
            error = _no_such_route(request)
        elif isinstance(error, RequestValidationError):
            error = parameter_error(error)
        response = error_response(error)
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
        return NotFoundError(
            f"File Not Found: there is no path {shown(path)} here, and /openapi.json lists what there is"
        )
    allowed = ["GET", "HEAD", *offered[1:]] if "GET" in offered else offered
    return WrongMethodError(f"{shown(path)} does not take {shown(method)}: send {' or '.join(allowed)}", allowed)


def _add_health(router: APIRouter, server: Server) -> None:
    @router.get("/health", summary="Whether the model is there")
    @router.get("/v1/health", include_in_schema=False)
    async def health() -> dict[str, str]:
        _ = server.host.served
        return {"status": "ok"}

    @router.get("/metrics", summary="Counts and times, for Prometheus", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        if not server.options.metrics:
            raise NotOfferedError("this server offers no metrics: start it with --metrics")
        _ = server.host.served
        assert server.metrics is not None
        accepts = request.headers.get("accept", "")
        body, kind = server.metrics.render(openmetrics="application/openmetrics-text" in accepts)
        response = Response(body, headers={"Content-Type": kind})
        # With its capitals, as llama-server sends it.
        response.raw_headers.append((b"Process-Start-Time-Unix", server.metrics.process_start.encode()))
        return response


def _add_generation(router: APIRouter, server: Server) -> None:
    async def read_request(request: Request, body: CompletionBody | ChatBody, api: Api) -> GenerationRequest:
        served, biases, share = server.host.served, body.logit_bias, server.work.share_for(request.scope)
        listed = len(biases) if isinstance(biases, dict | list) else 0
        kind = await _reading_kind(request)
        generation = await share.offload(
            kind,
            lambda: read_generation_request(
                body, api, model=served.model, defaults=served.options, settings=server.options, verbose=server.verbose
            ),
            # Long bodies may have many messages and names, all of which are looked at.
            num_items=listed + len(await request.body()) // _BYTES_AN_ITEM,
        )
        return await compile_constraint(server.host, share, await resolve_biases(server.host, share, kind, generation))

    async def prepared_completion(
        request: Request, body: CompletionBody, api: Api
    ) -> tuple[GenerationRequest, list[PreparedPrompt]]:
        generation = await read_request(request, body, api)
        return generation, await prepare_completions(
            server.host,
            server.work.share_for(request.scope),
            await _reading_kind(request),
            body.prompt,
            num_choices=generation.num_choices,
            most=server.options.max_choices,
        )

    async def prepared_chat(
        request: Request, body: ChatBody, *, counts: bool = False
    ) -> tuple[GenerationRequest, PreparedPrompt]:
        generation = await read_request(request, body, "chat")
        # The template tells of the tools even where none may be called, as a history of calls is read with them.
        told = body.tools if generation.tools is None else generation.tools.tools
        return generation, await prepare_chat(
            server.host,
            server.work.share_for(request.scope),
            await _reading_kind(request, body.messages, told),
            body,
            max_tokens=0 if counts else generation.options.rules.max_tokens,
            tools=told,
            offered=generation.tools,
        )

    async def complete(request: Request, body: CompletionBody, api: Api) -> Response:
        generation, prompts = await cancel_on_disconnect(request, prepared_completion(request, body, api))
        return await server.answer(request, generation, prompts)

    @router.post("/completion", summary="Go on with a text", openapi_extra=describe_body(CompletionBody))
    @router.post("/completions", include_in_schema=False)
    async def native(
        request: Request, body: Annotated[CompletionBody, Depends(read_body_as(CompletionBody))]
    ) -> Response:
        return await complete(request, body, "native")

    @router.post("/v1/completions", summary="Go on with a text, as OpenAI", openapi_extra=describe_body(CompletionBody))
    async def completions(
        request: Request, body: Annotated[CompletionBody, Depends(read_body_as(CompletionBody))]
    ) -> Response:
        return await complete(request, body, "completions")

    @router.post("/v1/chat/completions", summary="Answer a conversation", openapi_extra=describe_body(ChatBody))
    @router.post("/chat/completions", include_in_schema=False)
    async def chat(request: Request, body: Annotated[ChatBody, Depends(read_body_as(ChatBody))]) -> Response:
        generation, prompt = await cancel_on_disconnect(request, prepared_chat(request, body))
        if generation.stream and prompt.reasoning_format == "deepseek-legacy":
            raise FieldError("reasoning_format", "deepseek-legacy cannot be streamed: take deepseek, or stream false")
        if generation.echo and not (prompt.chat and prompt.chat.continued):
            generation = replace(
                generation, warnings=(*generation.warnings, "echo changed nothing: no message is continued")
            )
        generation = replace(
            generation, reasoning_format=prompt.reasoning_format, warnings=(*generation.warnings, *prompt.warnings)
        )
        return await server.answer(request, generation, [prompt])

    @router.post(
        "/v1/chat/completions/input_tokens",
        summary="Count the tokens of a conversation",
        openapi_extra=describe_body(ChatBody),
    )
    @router.post("/chat/completions/input_tokens", include_in_schema=False)
    async def input_tokens(
        request: Request, body: Annotated[ChatBody, Depends(read_body_as(ChatBody))]
    ) -> dict[str, Any]:
        _, prompt = await cancel_on_disconnect(request, prepared_chat(request, body, counts=True))
        return {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}

    @router.post(
        "/v1/chat/completions/control",
        summary="End the reasoning of an answer that is being written",
        openapi_extra=describe_body(ControlBody),
    )
    @router.post("/chat/completions/control", include_in_schema=False)
    async def control(
        request: Request, body: Annotated[ControlBody, Depends(read_body_as(ControlBody))]
    ) -> dict[str, Any]:
        warned = _collect_warnings(body, server)
        answer = server.board.answer(body.id, get_namespace(request.scope))
        if answer is None:
            return {"success": False, "message": "no active completion for this id", **warned}
        ended = [await choice.stream.end_reasoning() for choice in answer.choices]
        return {"success": any(ended), "message": "" if any(ended) else "the answer does not reason now", **warned}


_NOT_OFFERED: Final = (
    ("/embedding", "embeddings"),
    ("/embeddings", "embeddings"),
    ("/v1/embeddings", "embeddings"),
    ("/rerank", "reranking"),
    ("/reranking", "reranking"),
    ("/v1/rerank", "reranking"),
    ("/v1/reranking", "reranking"),
    ("/infill", "infilling"),
    ("/v1/responses", "the Responses API: use /v1/chat/completions"),
    ("/responses", "the Responses API: use /v1/chat/completions"),
    ("/v1/messages", "Anthropic's API: use /v1/chat/completions"),
    ("/lora-adapters", "adapters"),
    ("/slots/{number}", "slot files: what was read is kept in memory"),
)


def _add_not_offered(router: APIRouter) -> None:
    """Add routes of llama-server that this one does not have, so that clients are told."""
    for path, what in _NOT_OFFERED:
        router.add_api_route(path, _route_that_refuses(what), methods=["GET", "POST"], include_in_schema=False)


def _route_that_refuses(what: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise NotFoundError(f"this server does not support {what}")

    return refuse


_MAX_TOKENIZED: Final = 2 << 20
"""Bytes of a text for ``/tokenize``: no call of a tokenizer can be stopped, and at worst these take some seconds."""


def _add_tokens(router: APIRouter, server: Server) -> None:
    async def answered(request: Request, answer: Callable[[], bytes]) -> Response:
        # Texts may be as long as bodies. All that is done with them is done in threads, the writing of answers too.
        work = server.work.share_for(request.scope).offload(await _reading_kind(request), answer)
        return _json(await cancel_on_disconnect(request, work))

    @router.post("/tokenize", summary="Turn a text into tokens", openapi_extra=describe_body(TokenizeBody))
    async def tokenize(
        request: Request, body: Annotated[TokenizeBody, Depends(read_body_as(TokenizeBody))]
    ) -> Response:
        vocabulary = server.host.served.model.target.vocabulary
        warned = _collect_warnings(body, server)

        def answer() -> bytes:
            parts = read_mixed(body.content, "content")
            length = sum(len(part.encode("utf-8", "replace")) for part in parts if isinstance(part, str))
            if length > _MAX_TOKENIZED:
                raise FieldError(
                    "content",
                    f"content has {length} bytes: at most {_MAX_TOKENIZED} are tokenized at once; send parts",
                )
            token_ids = encode(
                parts,
                vocabulary,
                add_special=bool(body.add_special),
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
            return b'{"tokens":[%b]%b}' % (written, b"," + to_json(warned)[1:-1] if warned else b"")

        return await answered(request, answer)

    @router.post("/detokenize", summary="Turn tokens into a text", openapi_extra=describe_body(DetokenizeBody))
    async def detokenize(
        request: Request, body: Annotated[DetokenizeBody, Depends(read_body_as(DetokenizeBody))]
    ) -> Response:
        vocabulary = server.host.served.model.target.vocabulary
        warned = _collect_warnings(body, server)

        def answer() -> bytes:
            token_ids = read_ids(body.tokens, "tokens")
            check_ids(token_ids, vocabulary, "tokens")
            return to_json({"content": tokens_to_text(token_ids, vocabulary), **warned})

        return await answered(request, answer)

    @router.post(
        "/apply-template", summary="Write a conversation as the model's template has it",
        openapi_extra=describe_body(TemplateBody),
    )  # fmt: skip
    async def apply_template(
        request: Request, body: Annotated[TemplateBody, Depends(read_body_as(TemplateBody))]
    ) -> Response:
        share, kind = server.work.share_for(request.scope), await _reading_kind(request, body.messages, body.tools)
        prompt = await cancel_on_disconnect(
            request, prepare_chat(server.host, share, kind, body, max_tokens=0, tools=body.tools)
        )

        def answer() -> bytes:
            # A client may send what it would ask the model.
            warned = _collect_warnings(body, server, also=ChatBody.model_fields, further=prompt.warnings)
            return to_json({"prompt": prompt.text, **warned})

        return _json(await share.offload(kind, answer, num_items=len(await request.body()) // _BYTES_AN_ITEM))


async def _reading_kind(request: Request, *lists: Sequence[Any] | str | None) -> Kind:
    """Return of which kind it is to read a request with lists of messages and tools."""
    return choose_reading_kind(len(await request.body()), sum(len(each) for each in lists if isinstance(each, list)))


def _collect_warnings(
    body: BaseModel, server: Server, *, also: Container[str] = ("model",), further: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Return what to tell of fields that a route does not know; ``also`` are known and have no effect."""
    extra = {name: value for name, value in (body.model_extra or {}).items() if name not in also}
    extra |= {**unread_settings(dict(body)), **unknown_within(dict(body))}
    warnings = [*warn_of_unknown_fields(check_known(extra, strict=server.options.strict_fields)), *further]
    return {"warnings": warnings} if warnings else {}


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _add_facts(router: APIRouter, server: Server) -> None:
    @router.get("/v1/models", summary="The model")
    @router.get("/models", include_in_schema=False)
    async def models() -> dict[str, Any]:
        return list_models(server.host.served, created=int(server.host.started_s))

    @router.get("/v1/models/{name:path}", summary="The model, by one of its names")
    async def model(name: str) -> dict[str, Any]:
        served = server.host.served
        if name not in served.names:
            raise RefusedError(404, "not_found_error", f"there is no model {name!r} here: its names are "
                               f"{', '.join(served.names)}")  # fmt: skip
        found: dict[str, Any] = list_models(served, created=int(server.host.started_s))["data"][0]
        return {**found, "id": name}

    @router.get("/props", summary="How requests are answered that say nothing")
    async def props(request: Request) -> dict[str, Any]:
        served, share = server.host.served, server.work.share_for(request.scope)
        return await share.offload(Kind.UPKEEP, lambda: server_props(served, server.options))

    @router.post("/props", include_in_schema=False)
    async def set_props() -> None:
        raise WrongMethodError(
            "this server's properties cannot be changed while it runs: start it with other flags", ("GET", "HEAD")
        )

    @router.get("/slots", summary="What is under way")
    async def slots(request: Request, fail_on_no_slot: int = 0) -> list[dict[str, Any]]:
        if not server.options.slots:
            raise NotOfferedError("this server does not tell what is under way: start it with --slots")
        board = server.board
        if fail_on_no_slot and board.num_busy >= server.host.served.max_running:
            raise RefusedError(503, "unavailable_error", "no slot available")
        return board.facts(get_namespace(request.scope))
