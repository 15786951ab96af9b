"""Errors over HTTP: the exceptions, their statuses and their bodies.

This is the one place that says which error is which status. None of them tells a path or a traceback.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from paceline.chat.params import ChatParams
from paceline.core.errors import (
    ClosedError,
    ContextLengthError,
    InputError,
    ModelFileError,
    PacelineError,
    QueueFullError,
)
from paceline.core.fields import Field, fields_of, rename_options, spell_flag
from paceline.core.params import SpeculationParams
from paceline.engines.options import ModelOptions
from paceline.options import REQUEST_PARTS
from paceline.server_options import ServerOptions
from paceline.terminal_text import printable_line


def error_body(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error, of whose message one line says the value, the limit and the way out.

    Clients tell errors apart by their kind, such as ``invalid_request_error``; ``param`` is the field at fault, if any.
    """
    # Clients of llama-server read the status here.
    return {"error": {"code": status, "message": message, "type": kind, "param": param}}


class FieldError(InputError):
    """A field of a request cannot be used; ``field`` is the name that the request has for it.

    ``code`` stands in the place of the status where clients act on it.
    """

    def __init__(self, field: str, message: str, *, code: str | None = None) -> None:
        super().__init__(message, field=field)
        self.code = code


@contextlib.contextmanager
def in_names_of(names: Mapping[str, str]) -> Iterator[None]:
    """Have errors of the library name the fields of a request in place of the options that they set.

    Args:
        names: of the fields, by option.
    """

    def rename(name: str, value: str) -> str:
        # What has no other name here is named where the error is answered.
        return _spell(names[name], value) if name in names else f"`{name}={value}`" if value else f"`{name}`"

    try:
        yield
    except InputError as error:
        if not isinstance(error, FieldError):
            if error.field is not None:
                error.field = names.get(error.field, error.field)
            error.args = (rename_options(str(error), rename),)
        raise


_OTHER_NAMES: Final[Mapping[str, str | None]] = {
    "order": "samplers",
    "speculate": "speculative.off",
    "prediction": "prediction",
    "reasoning": "enable_thinking",
    "reasoning_budget": "reasoning_budget_tokens",
    "template_variables": "chat_template_kwargs",
    # of the server, not of a request
    **dict.fromkeys(("template", "template_file", "reasoning_budget_message", "forget")),
}
"""Fields of a request by the options of the table that they set, where the names differ."""


_QUOTES: Final = "'\""


def in_fields(message: str, field: str | None = None) -> str:
    """Return a message in which options are called what requests call them.

    Options of the server itself have their flags: they say the way out to whoever starts it.

    Args:
        message: of an error.
        field: that is at fault, under the name that the request has for it.
    """

    def rename(name: str, value: str) -> str | None:
        names = _fields_by_option().get(name, ())
        if names:
            return _spell(names[0] if field not in names else str(field), value)
        own = _flagged().get(name)
        if own is not None:
            return spell_flag(own, value)
        return f"{name} {value.lower()}" if value else None

    return rename_options(message, rename)


def _spell(field: str, value: str) -> str:
    return field if value in ("", "False", "True") else f"{field} {value.strip(_QUOTES)}"


@functools.cache
def _fields_by_option() -> Mapping[str, tuple[str, ...]]:
    """Return the names that a request has for an option."""
    found: dict[str, tuple[str, ...]] = {}
    for part in (*REQUEST_PARTS, ChatParams):
        for each in fields_of(part):
            names = (_OTHER_NAMES[each.name],) if each.name in _OTHER_NAMES else each.json_names
            if part is SpeculationParams and each.name not in _OTHER_NAMES:
                names = tuple(f"speculative.{name}" for name in names)
            found[each.name] = tuple(filter(None, names))
    return found


@functools.cache
def _flagged() -> Mapping[str, Field]:
    """Return the options that are the server's, and that the command line has flags for."""
    parts = (ServerOptions, ModelOptions, ChatParams)
    return {each.name: each for part in parts for each in fields_of(part) if each.flags}


HostState: TypeAlias = Literal["loading", "ready", "failed", "closing"]
"""What has become of the model. ``closing``: the server ends, and takes nothing more."""


class NotReadyError(PacelineError):
    """The model is not loaded yet, or the server ends."""

    def __init__(self, state: HostState, share: float | None = None) -> None:
        self.state = state
        measured = "" if share is None else f": {share:.0%} of what it costs here is measured"
        super().__init__(
            {
                "loading": f"Loading model{measured}",
                "failed": "the model could not be loaded; the server's log says why",
                "closing": "the server is ending: send the request to another one, or later",
            }.get(state, state)
        )


_log = logging.getLogger(__name__)

RETRY_S: Final = 1
"""Seconds after which a client that was turned away may ask again."""


class NotOfferedError(PacelineError):
    """A route that this server does not offer without a flag; llama-server's status, which says so to whoever polls."""


class NotFoundError(PacelineError):
    """A route that this server does not have. Its status is one that clients do not try again."""


class WrongMethodError(PacelineError):
    """A route that is there, and is asked by another method than the allowed ones."""

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        self.allowed = allowed
        super().__init__(message)


class RefusedError(PacelineError):
    """A request that cannot be taken, with the status and the type of the error that say so."""

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


def _classify(error: BaseException) -> tuple[int, str]:
    """Return the status of an error, and the type that clients tell it by."""
    if isinstance(error, RefusedError):
        return error.status, error.kind
    return next(((status, kind) for known, status, kind in _KINDS if isinstance(error, known)), (500, "server_error"))


def status_and_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of the answer to a request that ended by an error."""
    status, kind = _classify(error)
    if isinstance(error, RefusedError):
        return status, error_body(status, in_fields(str(error)), kind)
    if status == 500:
        _log.error("a request ended by an error", exc_info=error)
        return 500, error_body(500, "the server failed; its log says why", kind)
    param = error.field if isinstance(error, InputError) else None
    message = in_fields(str(error), param)
    if isinstance(error, ClosedError):
        message = "the server is ending: send the request later"
    if isinstance(error, ModelFileError):
        # Its message names a file of this machine.
        _log.error("a request ended by an error of the model's file: %s", error)
        message = "the model's chat template cannot be used; the server's log says why"
    body = error_body(status, message, kind, param)
    if isinstance(error, FieldError) and error.code is not None:
        body["error"]["code"] = error.code
    if isinstance(error, ContextLengthError) and error.num_tokens is not None:
        body["error"] |= {"n_prompt_tokens": error.num_tokens, "n_ctx": error.context_length}
    return status, body


_MESSAGES_PATH: Final = re.compile("/v1/messages(/|$)")


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's API, whose clients send this header with all of them."""
    return bool(_MESSAGES_PATH.search(scope["path"])) or "anthropic-version" in Headers(scope=scope)


_ANTHROPIC_KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_body(error: BaseException, request_id: str | None = None) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error in the form of Anthropic's API."""
    status, body = status_and_body(error)
    told = body["error"]
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    found = {"type": kind, "message": told["message"], **({"param": told["param"]} if told["param"] else {})}
    if "n_ctx" in told:
        # In words that Claude Code knows: it makes its conversation shorter then.
        too_long = f"prompt is too long: {told['n_prompt_tokens']} tokens > {told['n_ctx']} maximum"
        found["message"] = f"{too_long}: {told['message']}"
    return status, {"type": "error", "error": found, **({"request_id": request_id} if request_id else {})}


def error_response(error: BaseException, scope: Scope) -> Response:
    """Return the answer to a request that ended by an error before anything of its answer was sent."""
    if speaks_anthropic(scope):
        status, body = anthropic_body(error, scope.get("state", {}).get("request_id"))
    else:
        status, body = status_and_body(error)
    headers = {"Retry-After": str(RETRY_S)} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, WrongMethodError):
        headers["Allow"] = ", ".join(error.allowed)
    return JSONResponse(body, status, headers)


def error_type(error: BaseException) -> str:
    """Return the type that clients tell an error by; nothing is logged."""
    return _classify(error)[1]


LONGEST_SHOWN: Final = 200
"""Characters of a value from a request that a log line or an error repeats."""


def shorten(text: str) -> str:
    """Return a text from a request as a log line or an error repeats it: in one line, cut where it is long."""
    return printable_line(text)[:LONGEST_SHOWN]
