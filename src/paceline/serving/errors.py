"""Errors as HTTP answers: the one place that says which is which. None of them tells a path or a traceback."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from starlette.responses import JSONResponse, Response

from paceline.core.errors import (
    ClosedError,
    ContextLengthError,
    InputError,
    ModelFileError,
    PacelineError,
    QueueFullError,
)
from paceline.options import in_flags
from paceline.serving.error_bodies import error_body
from paceline.serving.fields import FieldError, in_fields
from paceline.serving.hosting import NotReadyError

_log = logging.getLogger(__name__)

RETRY_S: Final = 1
"""Seconds after which a client that was turned away may ask again."""


class NotOfferedError(PacelineError):
    """A route that this server does not offer without a flag; llama-server's status, which says so to whoever polls."""


class NotFoundError(PacelineError):
    """A route that this server does not have. Its status is one that clients do not try again."""


class WrongMethodError(PacelineError):
    """A route that is there, and is asked by another method.

    Attributes:
        allowed: methods that it takes.
    """

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        self.allowed = allowed
        super().__init__(message)


class RefusedError(PacelineError):
    """A request that cannot be taken for a reason of its own.

    Attributes:
        status: of the HTTP answer.
        kind: the ``type`` of the error.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        self.status, self.kind = status, kind
        super().__init__(message)


_KINDS: Final[tuple[tuple[type[PacelineError], int, str], ...]] = (
    (NotReadyError, 503, "unavailable_error"),
    (ClosedError, 503, "unavailable_error"),
    (QueueFullError, 429, "rate_limit_error"),
    (NotFoundError, 404, "not_found_error"),
    (WrongMethodError, 405, "invalid_request_error"),
    (NotOfferedError, 501, "not_supported_error"),
    (ContextLengthError, 400, "exceed_context_size_error"),
    (InputError, 400, "invalid_request_error"),
)
"""Status and type of each error, the first that fits; all others are the server's own, and tell nothing."""


def error_of(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of the answer to a request that ended by an error."""
    message = in_flags(str(error))
    if isinstance(error, RefusedError):
        return error.status, error_body(error.status, message, error.kind)
    status, kind = next(((status, kind) for known, status, kind in _KINDS if isinstance(error, known)), (500, ""))
    if status == 500:
        _log.error("a request ended by an error", exc_info=error)
        return 500, error_body(500, "the server failed; its log says why", "server_error")
    if isinstance(error, ClosedError):
        message = "the server is ending: send the request later"
    if isinstance(error, ModelFileError):
        # Its message names a file of this machine.
        _log.error("a request ended by an error of the model's file: %s", error)
        message = "the model's chat template cannot be used; the server's log says why"
    param = error.param if isinstance(error, FieldError) else None
    if isinstance(error, InputError):
        message = in_fields(message, param)
    body = error_body(status, message, kind, param)
    if isinstance(error, ContextLengthError) and error.num_tokens is not None:
        body["error"] |= {"n_prompt_tokens": error.num_tokens, "n_ctx": error.context_length}
    return status, body


def response_of(error: BaseException) -> Response:
    """Return the answer to a request that ended by an error before anything of its answer was sent."""
    status, body = error_of(error)
    headers = {"Retry-After": str(RETRY_S)} if status in (429, 503) else {}
    if isinstance(error, WrongMethodError):
        headers["Allow"] = ", ".join(error.allowed)
    return JSONResponse(body, status, headers)


def kind_of(error: BaseException) -> str:
    """Return the type that clients tell an error by; nothing is logged."""
    if isinstance(error, RefusedError):
        return error.kind
    return next((kind for known, _, kind in _KINDS if isinstance(error, known)), "server_error")
