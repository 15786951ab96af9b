"""Errors as HTTP answers: the one place that says which is which. None of them tells a path or a traceback."""

from __future__ import annotations

import logging
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.core.errors import (
    CapabilityError,
    ClosedError,
    ContextLengthError,
    InputError,
    ModelFileError,
    PacelineError,
    QueueFullError,
)
from paceline.serving.error_bodies import error_body
from paceline.serving.fields import FieldError
from paceline.serving.hosting import NotReadyError

_log = logging.getLogger(__name__)

RETRY_S: Final = 1
"""Seconds after which a client that was turned away may ask again."""


class NotOfferedError(PacelineError):
    """A route that this server does not offer, or not without a flag."""


class NotFoundError(PacelineError):
    """A route that nobody offers."""


class RefusedError(PacelineError):
    """A request that cannot be taken for a reason of its own.

    Attributes:
        status: of the HTTP answer.
        kind: the ``type`` of the error.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        self.status, self.kind = status, kind
        super().__init__(message)


def error_of(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of the answer to a request that ended by an error."""
    message = str(error)
    if isinstance(error, RefusedError):
        return error.status, error_body(error.status, message, error.kind)
    if isinstance(error, NotReadyError):
        return 503, error_body(503, message, "unavailable_error")
    if isinstance(error, ClosedError):
        return 503, error_body(503, "the server is ending: send the request later", "unavailable_error")
    if isinstance(error, QueueFullError):
        return 429, error_body(429, message, "rate_limit_error")
    if isinstance(error, NotFoundError):
        return 404, error_body(404, message, "not_found_error")
    if isinstance(error, NotOfferedError):
        return 501, error_body(501, message, "not_supported_error")
    if isinstance(error, ContextLengthError):
        body = error_body(400, message, "exceed_context_size_error")
        if error.num_tokens is not None:
            body["error"] |= {"n_prompt_tokens": error.num_tokens, "n_ctx": error.context_length}
        return 400, body
    if isinstance(error, FieldError):
        return 400, error_body(400, message, "invalid_request_error", error.param)
    if isinstance(error, ModelFileError):
        # Its message names a file of this machine.
        _log.error("a request ended by an error of the model's file: %s", error)
        return 400, error_body(
            400, "the model's chat template cannot be used; the server's log says why", "invalid_request_error"
        )
    if isinstance(error, CapabilityError | InputError):
        return 400, error_body(400, message, "invalid_request_error")
    _log.error("a request ended by an error", exc_info=error)
    return 500, error_body(500, "the server failed; its log says why", "server_error")


def response_of(error: BaseException) -> Response:
    """Return the answer to a request that ended by an error before anything of its answer was sent."""
    status, body = error_of(error)
    headers = {"Retry-After": str(RETRY_S)} if status in (429, 503) else None
    return JSONResponse(body, status, headers)


async def handle(request: Request, error: Exception) -> Response:
    """Answer a request that ended by an error; the form that Starlette wants."""
    del request
    return response_of(error)
