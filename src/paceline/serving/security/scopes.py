"""What the layers in front of the routes read of a request, and keep of it for the routes."""

from __future__ import annotations

from typing import Any, Final, cast

from starlette.types import Scope

LONGEST_SHOWN: Final = 200
"""Characters of a value from a request that a log line or an error repeats."""


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """Return all values of a header, in the order they were sent.

    Args:
        scope: of an HTTP request.
        name: of the header, in lower case.
    """
    return [value for key, value in scope["headers"] if key == name]


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first value of a header as text; ``None`` where the request does not have the header."""
    values = header_values(scope, name)
    return values[0].decode("latin-1") if values else None


def declared_length(scope: Scope) -> int | None:
    """Return the bytes of the body that the request announces; ``None`` where it announces no number."""
    value = header(scope, b"content-length")
    return int(value) if value is not None and value.isascii() and value.isdigit() else None


def has_body(scope: Scope) -> bool:
    """Return whether a body follows the headers of a request."""
    return bool(declared_length(scope)) or bool(header_values(scope, b"transfer-encoding"))


def state_of(scope: Scope) -> dict[str, Any]:
    """Return what is kept of a request for all layers and routes; a route sees the same as ``request.state``."""
    return cast("dict[str, Any]", scope.setdefault("state", {}))
