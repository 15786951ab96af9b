"""Bodies of requests: read, checked, and told in the OpenAPI document."""

from __future__ import annotations

import gc
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from paceline.core.numbers import shown
from paceline.serving.fields import FieldError
from paceline.serving.security import PIECE_BYTES, BodyError, read_json
from paceline.serving.work import Kind, Work

_Body = TypeVar("_Body", bound=BaseModel)

_MOST_FIELDS: Final = 1000

_OF_A_CLASS: Final = re.compile(r"a valid dictionary( or instance of \w+)?")
"""What pydantic calls a JSON object."""


def body_of(model: type[_Body]) -> Callable[[Request], Awaitable[_Body]]:
    """Return a dependency that reads a request's body, whatever type the request says it has.

    FastAPI would read JSON alone, and clients such as ``curl -d`` send it as a form.
    """

    async def read(request: Request) -> _Body:
        body = await request.body()
        if len(body) <= PIECE_BYTES:
            return checked(model, read_json(body))
        work: Work = request.app.state.work
        return await work.share_of(request.scope).offload(Kind.BODIES, lambda: _read_long(model, body))

    return read


def _read_long(model: type[_Body], body: bytes) -> _Body:
    collects = gc.isenabled()
    # Nothing runs beside the garbage collector, and what grows here is nothing that it could free.
    gc.disable()
    try:
        return checked(model, read_json(body))
    finally:
        if collects:
            gc.enable()


def checked(model: type[_Body], body: dict[str, Any]) -> _Body:
    """Return a body whose fields are of their kinds.

    Raises:
        FieldError: a field is missing, or of another kind.
        BodyError: there are too many.
    """
    if len(body) > _MOST_FIELDS:
        raise BodyError(f"the body has {len(body)} fields: at most {_MOST_FIELDS} are taken, and far fewer are known")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _field_error(error) from None


def documented(model: type[BaseModel]) -> dict[str, Any]:
    """Return what a route says of its body in the OpenAPI document."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def parameter_error(error: RequestValidationError) -> FieldError:
    """Return the error of a parameter of a request's path or query."""
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return FieldError(name, f"{name} is {shown(first['input'])}: {first['msg'][0].lower() + first['msg'][1:]}")


def _field_error(error: ValidationError) -> FieldError:
    first = error.errors(include_url=False, include_context=False)[0]
    # What follows the field in the place names the branch of a union that was tried.
    path = [str(part) for part in first["loc"]]
    name = path[0] if path else "body"
    inner = path[1] if len(path) > 1 and path[0] in ("stream_options", "speculative") else ""
    param = f"{name}.{inner}" if inner else name
    if first["type"] == "missing":
        return FieldError(param, f"'{param}' is required")
    said = _OF_A_CLASS.sub("an object", first["msg"][0].lower() + first["msg"][1:])
    return FieldError(param, f"{param} is {shown(first['input'])}: {said.replace('input should', 'it should')}")
