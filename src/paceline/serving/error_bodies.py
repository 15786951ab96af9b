"""The shape of every error over HTTP: OpenAI's, with llama-server's numeric code."""

from __future__ import annotations

from typing import Any


def error_body(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error.

    Args:
        status: the HTTP status, which clients of llama-server read from ``code``.
        message: one line: the value, the limit, the way out.
        kind: the type that clients tell errors apart by, such as ``invalid_request_error``.
        param: the field of the request that is at fault; ``None`` where no single one is.
    """
    return {"error": {"code": status, "message": message, "type": kind, "param": param}}
