"""The OpenAPI document: FastAPI's, with the bodies that routes read by themselves."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from paceline import __version__
from paceline.serving.bodies import (
    ChatBody,
    CompletionBody,
    ControlBody,
    DetokenizeBody,
    TemplateBody,
    TokenizeBody,
)

_BODIES: Final = (ChatBody, CompletionBody, ControlBody, DetokenizeBody, TemplateBody, TokenizeBody)

ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    "default": {
        "description": "An error: what is wrong, and the way out.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
}
"""What every route says of its errors."""

_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "type"],
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}


def document(app: FastAPI) -> dict[str, Any]:
    """Return the document of an application."""
    found = get_openapi(
        title="paceline",
        version=__version__,
        summary="A language model, decoded speculatively: the same text, sooner.",
        routes=app.routes,
    )
    _, schemas = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template="#/components/schemas/{model}"
    )
    components = found.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas.get("$defs", {}))
    components["Error"] = _ERROR
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    for path in found["paths"].values():
        for operation in path.values():
            # FastAPI's own answer to what it cannot validate; this server's is an error as any other.
            operation.get("responses", {}).pop("422", None)
    return found
