"""What requests look like: pydantic models, by which bodies are read and checked, and the OpenAPI document.

The options (fields made by ``setting()``) are not written out: names, kinds and ranges are theirs. Ranges are checked
where the options are made, whose messages say the way out.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    create_model,
)
from pydantic.json_schema import models_json_schema
from starlette.requests import Request

from paceline import __version__
from paceline.core.fields import Field as TableField
from paceline.core.fields import fields_of
from paceline.core.numbers import shown
from paceline.core.params import MAX_TOKENS, SpeculationParams
from paceline.embedder import MAX_NORM
from paceline.options import REQUEST_PARTS
from paceline.serving.errors import FieldError
from paceline.serving.json_bodies import PIECE_BYTES, BodyError, read_json
from paceline.serving.work import Kind, Work

_EXAMPLE_TEXT: Final = "def fibonacci(n):"

_INPUT: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


def as_whole(value: Any) -> Any:
    """Return a number without fraction as a whole one: clients written in JavaScript have one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(as_whole)]
"""A whole number, also where it is written as 3.0; no text and no truth value."""

MAX_TEXTS: Final = 4096
"""Texts in one list. Each is looked at by itself, and a body has room for millions."""

Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_TEXTS)]
"""Texts. The first that is none ends the look: a report on each of millions would take minutes and gigabytes."""


def _skip_copy(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Return an object as it is: pydantic would copy it, and no other thread would run until that is done."""
    return value if isinstance(value, dict) else check(value)


def _skip_copy_of_list(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Return a list of objects as it is; the first that is none is refused."""
    if not isinstance(value, list):
        return check(value)
    wrong = [item for item in value if not isinstance(item, dict)]
    return check(wrong[:1]) if wrong else value


Object = Annotated[dict[str, Any], WrapValidator(_skip_copy)]
"""An object of any fields."""

Objects = Annotated[list[dict[str, Any]], WrapValidator(_skip_copy_of_list)]
"""Objects."""

_IDS: Final = {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}
Ids = Annotated[Any, WithJsonSchema(_IDS)]
"""Token ids. They are checked where the options are made."""

_BIAS: Final = {"anyOf": [{"type": "number"}, {"const": False}]}
_BIASES: Final = {
    "anyOf": [
        {"type": "object", "additionalProperties": _BIAS},
        {
            "type": "array",
            "items": {
                "type": "array",
                "prefixItems": [{"anyOf": [{"type": "integer"}, {"type": "string"}]}, _BIAS],
                "minItems": 2,
                "maxItems": 2,
            },
        },
        {"type": "null"},
    ]
}
Biases = Annotated[Any, WithJsonSchema(_BIASES)]
"""Biases as an object or as pairs. They are checked one by one in :mod:`paceline.serving.generation_request`."""


_TEXT_OR_BLOCKS: Final = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
}


class _Body(BaseModel):
    """Fields that are not declared are kept, and looked at by :mod:`paceline.serving.fields`."""

    model_config = ConfigDict(extra="allow", strict=True, populate_by_name=True)


class StreamOptions(_Body):
    """How an answer is streamed."""

    include_usage: bool | None = Field(None, description="Send a last chunk that counts tokens.")
    continuous_usage_stats: bool | None = Field(None, description="Have each chunk count them, too.")


class Speculative(_Body):
    """How one request is sped up. None of it changes the text."""

    enabled: bool | None = Field(None, description="false decodes plainly.")
    off: bool | None = Field(None, description="true decodes plainly.")
    policy: str | None = Field(None, description="auto plans; fixed drafts as the lengths here say.")
    drafters: Texts | str | None = Field(None, description="Names of those that may draft.")
    draft_max: Whole | None = Field(None, description="Most tokens along one path.")
    draft_min: Whole | None = Field(None, description="Shorter drafts are dropped.")
    p_min: float | None = Field(None, description="A path ends where the draft's probability is below.")
    verify: Literal["coupled", "rejection"] | None = Field(None, description="How drafts are judged.")


def _field_type(field: TableField) -> Any:
    kinds: Mapping[str, Any] = {
        "whole": Whole,
        "real": float,
        "truth": bool,
        "texts": Texts | str,
        "choice": Literal[tuple(field.option.words)] if field.option.words else str,
    }
    return kinds.get(field.option.kind, Any)


_WRITTEN_OUT: Final = (
    *("logit_bias", "stop", "reasoning_budget", "preserved_ids", "order", "choice"),
    *("namespace", "client", "stop_token_ids", "allowed_token_ids"),
)
"""Fields of the table that a request has in another form, or that are not a client's to set."""


def _option_fields() -> dict[str, Any]:
    """Return pydantic's definitions of the table's fields, by every name that a request may use."""
    found: dict[str, Any] = {}
    for part in REQUEST_PARTS:
        for field in fields_of(part):
            if field.name in _WRITTEN_OUT or part is SpeculationParams:
                continue
            about = field.option
            limits: dict[str, Any] = {"minimum": about.low, "maximum": about.high}
            if about.low_excluded:
                limits = {"exclusiveMinimum": about.low, "maximum": about.high}
            if about.stand_ins:
                # -1 stands for something else than itself.
                limits["minimum"] = -1
            extra: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
            for name in field.json_names:
                text = field.flag.help or f"See {part.__name__}.{field.name}."
                found[name] = (_field_type(field) | None, Field(None, description=text, json_schema_extra=extra))
    return found


class _Generation(_Body):
    """What all requests for answers have, beside the fields of the table.

    Attributes:
        has_choices: whether an answer has a list of choices, and there may be several.
        length_field: the field of the most tokens, under the name that the API has for it.
        default_length: most tokens where neither request nor server says it.
    """

    has_choices: ClassVar[bool] = True
    length_field: ClassVar[str] = "max_tokens"
    default_length: ClassVar[int] = MAX_TOKENS

    model: str | None = Field(None, description="Taken for any name: the server has one model.")
    stream: bool | None = Field(None, description="Send the answer while it is written, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="What a stream sends beside the text.")
    n: Whole | None = Field(None, description="Answers to the prompt.", json_schema_extra={"minimum": 1})
    n_cmpl: Whole | None = Field(None, description="As n.", json_schema_extra={"minimum": 1})
    stop: Texts | str | None = Field(None, description="Texts that end the answer where they begin.")
    stop_token_ids: Ids = Field(None, description="Further tokens that end the answer.")
    allowed_token_ids: Ids = Field(None, description="Tokens of which the answer may be made.")
    skip_special_tokens: bool | None = Field(None, description="false spells out control tokens in the answer.")
    logit_bias: Biases = Field(None, description="Added to the logits of tokens, by id or by text; false bans.")
    samplers: Texts | str | None = Field(None, description="The order of the sampling steps, by llama.cpp's names.")
    return_tokens: bool | None = Field(None, description="Send token ids, too.")
    return_token_ids: bool | None = Field(None, description="Send token ids of prompt and answer, as vLLM does.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Name tokens token_id:N beside log-probabilities, in place of their texts."
    )
    return_progress: bool | None = Field(None, description="Send how far the prompt is read, in a stream.")
    return_rounds: bool | None = Field(
        None, description="Send what each round drafted, and the source of each token, in a stream."
    )
    timings_per_token: bool | None = Field(None, description="Send timings with each chunk of a stream.")
    sse_ping_interval: Whole | None = Field(None, description="Seconds between comments while a stream is silent.")
    t_max_predict_ms: Whole | None = Field(None, description="The answer ends after so long, at the next line.")
    response_fields: Texts | None = Field(None, description="Fields of a native answer to send.")
    verbose: bool | None = Field(None, description="Send the prompt and the settings, too.")
    cache_salt: str | None = Field(None, description="Share what was read with requests of the same salt alone.")
    speculative: Speculative | None = Field(None, description="How this request is sped up.")
    prediction: Object | str | None = Field(
        None,
        description="A text that the answer repeats for the most part, changes aside.",
    )
    response_format: Object | None = Field(
        None, description="What the answer is: text, json_object, or json_schema with a schema."
    )
    json_schema: Any = Field(None, description="A JSON schema that the answer keeps to.")
    grammar: str | None = Field(None, description="A grammar in GBNF that the answer keeps to.")
    guided_json: Any = Field(None, description="As json_schema.")
    guided_regex: str | None = Field(None, description="A regular expression that the answer matches.")
    guided_choice: Texts | None = Field(None, description="Texts of which the answer is one.")
    guided_grammar: str | None = Field(None, description="A grammar in GBNF or Lark's notation.")
    structured_outputs: Object | None = Field(
        None, description="One of json, json_object, regex, choice and grammar, as vLLM has them."
    )


_Generated = create_model("_Generated", __base__=_Generation, **_option_fields())


class CompletionBody(_Generated):  # type: ignore[misc, valid-type]
    """A text to go on with."""

    prompt: Any = Field(
        ..., description="A text, token ids, both mixed, or several of these.", examples=[_EXAMPLE_TEXT]
    )
    echo: bool | None = Field(None, description="Put the prompt before the answer.")
    add_special_tokens: bool | None = Field(
        None, description="false leaves out the tokens that the model's vocabulary puts before a text."
    )
    logprobs: Whole | bool | None = Field(None, description="How many likely tokens to list beside each.")


class InfillBody(CompletionBody):
    """A gap between two texts to fill."""

    prompt: str | None = Field(None, description="What the filling begins with.")
    input_prefix: Any = Field(..., description="The text before the gap.", examples=[_EXAMPLE_TEXT])
    input_suffix: Any = Field(..., description="The text behind it.", examples=["    return a\n"])
    input_extra: Objects | None = Field(
        None, description="Other texts to know of, each as an object of text and filename."
    )


class ChatSettings(_Body):
    """How a conversation is written, whatever form it has itself."""

    chat_template_kwargs: Object | None = Field(None, description="Further variables of the template.")
    enable_thinking: bool | None = Field(None, description="Whether to reason; as in chat_template_kwargs.")
    reasoning_effort: str | None = Field(
        None, description="How much to reason, in a word that the template knows; none switches reasoning off."
    )
    reasoning: Object | bool | None = Field(
        None, description="Settings of reasoning as OpenRouter has them: enabled, effort and max_tokens."
    )
    thinking: Object | bool | None = Field(
        None, description="Settings of reasoning as Anthropic has them: type and budget_tokens."
    )
    reasoning_budget_tokens: Whole | None = Field(None, description="Most tokens of reasoning; -1 for any number.")
    thinking_budget_tokens: Whole | None = Field(None, description="As reasoning_budget_tokens.")
    add_generation_prompt: bool | None = Field(None, description="Whether the prompt opens the answer.")
    continue_final_message: bool | None = Field(None, description="Whether the answer goes on with the last message.")


class _Conversation(ChatSettings):
    """What a chat and its template have in common."""

    messages: Objects = Field(
        ..., description="What was said so far.", examples=[[{"role": "user", "content": "Hello"}]]
    )
    tools: Objects | None = Field(None, description="Functions that the model may call.")


class ChatBody(_Generated, _Conversation):  # type: ignore[misc, valid-type]
    """A conversation to answer."""

    echo: bool | None = Field(None, description="Put the beginning of a message that is continued before the rest.")
    add_special_tokens: bool | None = Field(None, description="Taken: the template writes them.")
    tool_choice: Any = Field(None, description="none, auto, required, or the function that has to be called.")
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls.")
    logprobs: bool | Whole | None = Field(None, description="Whether to say how likely each token was.")
    top_logprobs: Whole | None = Field(None, description="How many likely tokens to list beside each.")
    reasoning_format: str | None = Field(None, description="Where reasoning comes back.")
    reasoning_control: bool | None = Field(None, description="Taken: reasoning can always be ended from outside.")


class MessagesBody(_Generated, ChatSettings):  # type: ignore[misc, valid-type]
    """A conversation to answer, in the form of Anthropic's Messages API."""

    has_choices: ClassVar[bool] = False
    # As in llama-server.
    default_length: ClassVar[int] = 4096

    messages: Objects = Field(
        ..., description="What was said so far, as texts or blocks.", examples=[[{"role": "user", "content": "Hello"}]]
    )
    system: Annotated[Any, WithJsonSchema(_TEXT_OR_BLOCKS)] = Field(None, description="What the system says.")
    tools: Objects | None = Field(None, description="Tools that the model may call.")
    tool_choice: Any = Field(None, description="An object of type auto, any, none, or tool with a name.")
    stop_sequences: Texts | None = Field(None, description="Texts that end the answer where they begin.")
    output_config: Object | None = Field(None, description="How much to reason: effort; and the answer's format.")
    output_format: Object | None = Field(None, description="As output_config.format.")
    context_management: Object | None = Field(None, description="Taken: the conversation is read as it was sent.")
    reasoning_format: str | None = Field(None, description="Where reasoning comes back.")


class ResponsesBody(_Generated, ChatSettings):  # type: ignore[misc, valid-type]
    """A conversation to go on with, as OpenAI's Responses API has it."""

    has_choices: ClassVar[bool] = False
    length_field: ClassVar[str] = "max_output_tokens"

    input: Annotated[Any, WithJsonSchema(_INPUT)] = Field(
        ..., description="What a user says, or the items of a conversation.", examples=["Hello"]
    )
    instructions: str | None = Field(None, description="What the system says before all else.")
    tools: Objects | None = Field(None, description="Functions that the model may call; other tools are left out.")
    tool_choice: Any = Field(None, description="none, auto, required, or the function that has to be called.")
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls.")
    max_output_tokens: Whole | None = Field(None, description="Most tokens to generate, reasoning included.")
    text: Object | None = Field(None, description="What the answer is: a format, with a schema where it has one.")
    include: Texts | None = Field(
        None, description="message.output_text.logprobs and reasoning.encrypted_content are sent where they are named."
    )
    top_logprobs: Whole | None = Field(None, description="How many likely tokens to list beside each.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Whether the oldest turns are left out of a conversation that is longer than the context."
    )
    reasoning_format: str | None = Field(None, description="Where reasoning comes back.")
    metadata: Object | None = Field(None, description="Said again in the answer.")
    max_tool_calls: Whole | None = Field(None, description="Taken: it counts calls of tools that OpenAI runs.")
    store: bool | None = Field(None, description="Taken: nothing is stored.")
    background: bool | None = Field(None, description="Refused where it is true.")
    previous_response_id: str | None = Field(None, description="Refused: nothing is stored.")
    conversation: Any = Field(None, description="Refused: nothing is stored.")
    prompt: Any = Field(None, description="Refused: there are no stored prompts.")


class TokenizeBody(_Body):
    """A text to turn into tokens."""

    content: Any = Field("", description="A text, or texts and token ids mixed.", examples=[_EXAMPLE_TEXT])
    prompt: str | None = Field(None, description="A text, as vLLM calls it.")
    add_special: bool | None = Field(None, description="Put the model's own tokens at the start.")
    add_special_tokens: bool | None = Field(None, description="As add_special; of a prompt it is true unless said.")
    parse_special: bool | None = Field(None, description="Take the spelling of a control token for that token.")
    with_pieces: bool | None = Field(None, description="Say what each token spells.")


class DetokenizeBody(_Body):
    """Tokens to turn into a text."""

    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer"}})] = Field(
        [], description="Token ids."
    )


class TemplateBody(_Conversation):
    """A conversation to write as the model's template has it."""


class EmbeddingBody(_Body):
    """Texts to turn into vectors."""

    model: str | None = Field(None, description="Taken for any name: the server has one model.")
    input: Any = Field(None, description="A text, token ids, both mixed, or several of these.", examples=["Hello"])
    content: Any = Field(None, description="As input; the answer is in llama-server's form.")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="How vectors are written.")
    dimensions: Whole | None = Field(None, description="Keep so many numbers of each vector.")
    embd_normalize: Annotated[int, Field(ge=-1, le=MAX_NORM), BeforeValidator(as_whole)] | None = Field(
        None, description="The norm that vectors are divided by: 2 is the Euclidean one, -1 none."
    )


class RerankBody(_Body):
    """Documents to put in the order of what they have to do with a query."""

    model: str | None = Field(None, description="Taken for any name: the server has one model.")
    query: str = Field(..., description="What is looked for.", examples=["What is a panda?"])
    documents: Any = Field(None, description="Texts, or objects with a text.", examples=[["hi", "It is a bear."]])
    texts: Any = Field(None, description="As documents; the answer is in the form of Text Embeddings Inference.")
    top_n: Annotated[int, Field(ge=1), BeforeValidator(as_whole)] | None = Field(
        None, description="How many of the best to send."
    )
    return_documents: bool | None = Field(None, description="Send the documents, too.")
    return_text: bool | None = Field(None, description="As return_documents.")


class ControlBody(_Body):
    """Something to do with an answer that is being written."""

    id: str = Field(..., description="Of the answer.")
    action: Literal["reasoning_end"] = Field(..., description="reasoning_end: the answer begins now.")


class SlotBody(_Body):
    """Where a slot is saved to, or restored from."""

    filename: str | None = Field(None, description="Of the file, without a path.")


_BodyT = TypeVar("_BodyT", bound=BaseModel)

_MAX_FIELDS: Final = 1000

_OF_A_CLASS: Final = re.compile(r"a valid dictionary( or instance of \w+)?")
"""What pydantic calls a JSON object."""


def read_body_as(model: type[_BodyT], *, may_be_empty: bool = False) -> Callable[[Request], Awaitable[_BodyT]]:
    """Return a dependency that reads a request's body, whatever type the request says it has.

    FastAPI would read JSON alone, and clients such as ``curl -d`` send it as a form.
    """

    async def read(request: Request) -> _BodyT:
        body = await request.body()
        if may_be_empty and not body:
            return model()
        if len(body) <= PIECE_BYTES:
            return validate_body(model, read_json(body))
        work: Work = request.app.state.work
        return await work.share_for(request.scope).offload(Kind.BODIES, lambda: _read_long(model, body))

    return read


def _read_long(model: type[_BodyT], body: bytes) -> _BodyT:
    collects = gc.isenabled()
    # Nothing runs beside the garbage collector, and what grows here is nothing that it could free.
    gc.disable()
    try:
        return validate_body(model, read_json(body))
    finally:
        if collects:
            gc.enable()


def validate_body(model: type[_BodyT], body: dict[str, Any]) -> _BodyT:
    """Return a body whose fields are of their kinds.

    Raises:
        FieldError: a field is missing, or of another kind.
        BodyError: there are too many.
    """
    if len(body) > _MAX_FIELDS:
        raise BodyError(f"the body has {len(body)} fields: at most {_MAX_FIELDS} are accepted")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _field_error(error) from None


def describe_body(model: type[BaseModel]) -> dict[str, Any]:
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


_ANTHROPIC_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {name: {"type": "string"} for name in ("type", "message", "param")},
        },
        "request_id": {"type": "string"},
    },
}


_REFERENCE: Final = re.compile(r"#/components/schemas/(\w+)")


def _iter_bodies(base: type[_Body]) -> Iterator[type[_Body]]:
    for body in base.__subclasses__():
        yield body
        yield from _iter_bodies(body)


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the document of an application."""
    found = get_openapi(
        title="paceline",
        version=__version__,
        summary="A language model, decoded speculatively: the same text, sooner.",
        routes=app.routes,
    )
    named = {*_REFERENCE.findall(json.dumps(found["paths"]))}
    bodies = sorted({body for body in _iter_bodies(_Body) if body.__name__ in named}, key=lambda body: body.__name__)
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    components = found.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas.get("$defs", {}))
    components |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    for name, path in found["paths"].items():
        for operation in path.values():
            if "/v1/messages" in name:
                answer = operation["responses"]["default"]["content"]["application/json"]
                answer["schema"] = {"$ref": "#/components/schemas/AnthropicError"}
            # FastAPI's own answer to what it cannot validate; this server's is an error as any other.
            operation.get("responses", {}).pop("422", None)
    return found
