"""Prompts of requests, as token ids: read by the tokenizer or by the model's chat template.

One prompt of a completion is a text, token ids, both mixed, or an object with a ``prompt_string``; several are a list
of these, which is told from one by having no number of its own. So it is in llama-server.
"""

from __future__ import annotations

import codecs
import contextlib
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from paceline.chat.params import ChatParams
from paceline.chat.prompts import ChatPrompt, expect_calls
from paceline.chat.template import ChatTemplate
from paceline.chat.tool_calls.base import ExpectedCalls
from paceline.constraints import JsonSchema
from paceline.constraints.schema_preparation import list_places
from paceline.core.constraint import Constraint
from paceline.core.errors import CapabilityError, ConstraintError, ContextLengthError, InputError, longer_context
from paceline.core.numbers import shown
from paceline.core.vocabulary import Vocabulary
from paceline.server_options import ServerOptions
from paceline.serving.answering import PreparedPrompt
from paceline.serving.chat_request import (
    OfferedTools,
    choose_call_format,
    constrain_calls,
    drop_unfollowed,
    read_chat_params,
    tools_for_template,
)
from paceline.serving.constraint_fields import Named
from paceline.serving.conversations import Conversation, iter_merged
from paceline.serving.errors import FieldError, NotOfferedError, in_names_of
from paceline.serving.generation_request import GenerationRequest
from paceline.serving.model_host import ServedModel
from paceline.serving.schema import MAX_TEXTS, ChatSettings, InfillBody
from paceline.serving.work import Kind, Share
from paceline.vocabularies.length import most_tokens


async def prepare_completions(
    served: ServedModel,
    share: Share,
    kind: Kind,
    prompt: Any,
    *,
    num_choices: int,
    most: int,
    add_special: bool = True,
) -> list[PreparedPrompt]:
    """Return the prompts of a completion.

    Control tokens that the text of a prompt spells are control tokens, as in llama-server: whoever completes texts
    writes templates by hand. At most ``most`` answers may be asked for, to all prompts together.
    """
    vocabulary = served.model.target.vocabulary

    def read() -> list[PreparedPrompt]:
        found = []
        for parts in read_prompts(prompt, num_choices=num_choices, most=most):
            _check_least(parts, served)
            token_ids = encode(parts, vocabulary, add_special=add_special, parse_special=True)
            check_ids(token_ids, vocabulary, "prompt")
            if not token_ids:
                raise FieldError("prompt", "the prompt is empty: give at least one token to go on from")
            check_length(len(token_ids), served)
            found.append(PreparedPrompt(token_ids, tokens_to_text(token_ids, vocabulary)))
        return found

    return await share.offload(kind, read)


_MAX_INFILL_BYTES: Final = 2 << 20
"""Bytes of all texts of a gap and around it: no call of a tokenizer can be stopped, and at worst these take seconds."""

_SNIPPET: Final = "\n\n--- snippet ---\n\n"
"""Stands before each further text where the model has no token for that, as in llama-server."""


async def prepare_infill(
    served: ServedModel, share: Share, kind: Kind, body: InfillBody, settings: ServerOptions, *, max_tokens: int
) -> PreparedPrompt:
    """Return the prompt of a gap to fill, in llama-server's order and with its parts.

    ::

        REPOSITORY myproject  FILE name text  FILE name text  ...  FILE filename  PREFIX before  SUFFIX behind  MIDDLE
        |<---- as much of its end as the context has room for --->|        |<--- settings.infill_tokens --->|

    Raises:
        NotOfferedError: the model has no tokens that say what a gap is.
        FieldError: a field cannot be used.
        ContextLengthError: the context is too small for what is around the gap.
    """
    vocabulary = served.model.target.vocabulary
    tokens = vocabulary.infill_tokens
    start, hole, end = tokens.prefix, tokens.suffix, tokens.middle
    if start is None or hole is None or end is None:
        parts = {"prefix": start, "suffix": hole, "middle": end}
        missing = " ".join(f"{name} token is missing." for name, token_id in parts.items() if token_id is None)
        raise NotOfferedError(f"Infill is not supported by this model: {missing} Serve one that was made to fill gaps")

    def encoded(parts: Sequence[TextOrId], name: str, *, parse_special: bool = False) -> list[int]:
        token_ids = encode(parts, vocabulary, add_special=False, parse_special=parse_special)
        check_ids(token_ids, vocabulary, name)
        return token_ids

    def write() -> PreparedPrompt:
        prefix, suffix = read_mixed(body.input_prefix, "input_prefix"), read_mixed(body.input_suffix, "input_suffix")
        if len(body.input_extra or ()) > MAX_TEXTS:
            raise FieldError(
                "input_extra", f"input_extra has more than {MAX_TEXTS} texts: send those nearest to the gap"
            )
        extra = [_read_extra(each, number) for number, each in enumerate(body.input_extra or ())]
        texts = [body.prompt or "", *(part for part in (*prefix, *suffix) if isinstance(part, str))]
        texts += [part for pair in extra for part in pair]
        num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if num_bytes > _MAX_INFILL_BYTES:
            raise FieldError(
                "input_prefix",
                f"the texts have {num_bytes} bytes: at most {_MAX_INFILL_BYTES} are "
                "accepted; send what is near the gap",
            )
        context, rows = served.context_length, settings.infill_tokens
        if rows >= context:
            rows = context // 2
        before, behind = encoded(prefix, "input_prefix"), encoded(suffix, "input_suffix")
        begun = encoded([body.prompt or ""], "prompt", parse_special=True)
        first = [start, *before[max(0, len(before) - 3 * (rows // 4)) :], *begun]
        second = [hole, *behind[: max(0, rows // 4 - 2 - len(begun))]]
        if settings.spm_infill:
            first, second = second, first
        gap = [*vocabulary.tokenize("", add_special=True), *first, *second, end]
        others = _encode_extra(extra, vocabulary)
        room = context - rows - 2 * (served.options.get("max_tokens") or -1)
        # llama-server leaves it at that, and may have no room for the answer.
        room = max(0, min(room, context - len(gap) - min(max_tokens, rows)))
        token_ids = [*others[max(0, len(others) - room) :], *gap]
        check_length(len(token_ids), served)
        return PreparedPrompt(token_ids, tokens_to_text(token_ids, vocabulary))

    return await share.offload(kind, write)


def _read_extra(given: Mapping[str, Any], number: int) -> tuple[str, str]:
    """Return the name of a further text, and the text."""
    name, text = given.get("filename"), given.get("text")
    if not isinstance(text, str) or not isinstance(name, str | None):
        raise FieldError(
            "input_extra",
            f"input_extra[{number}] is {shown(given)}: give an object with a text, and a filename if you like",
        )
    return "tmp" if name is None else name, text


def _encode_extra(extra: Sequence[tuple[str, str]], vocabulary: Vocabulary) -> list[int]:
    """Return the tokens of further texts, each behind the model's token for a file and its name, if there is one."""
    tokens = vocabulary.infill_tokens

    def plain(text: str) -> list[int]:
        return vocabulary.tokenize(text, add_special=False)

    token_ids = [] if tokens.repository is None else [tokens.repository, *plain("myproject\n")]
    snippet = plain(_SNIPPET) if extra and tokens.file is None else []
    for name, text in extra:
        token_ids += snippet if tokens.file is None else [tokens.file, *plain(f"{name}\n")]
        token_ids += plain(text)
    return token_ids if tokens.file is None else [*token_ids, tokens.file, *plain("filename\n")]


async def prepare_chat(
    served: ServedModel,
    share: Share,
    kind: Kind,
    body: ChatSettings,
    conversation: Conversation,
    *,
    max_tokens: int | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    offered: OfferedTools | None = None,
) -> PreparedPrompt:
    """Return the prompt of a conversation, written as a body says.

    The template may describe ``tools``; those of them that are ``offered`` are read out of the answer.
    """
    params, names = read_chat_params(body, served.chat)
    if served.template is None:
        raise CapabilityError(
            f"{served.id} has no chat template, as models without one only continue texts: use /v1/completions, or "
            "start the server with `template_file`"
        )
    try:
        chat, warnings = await share.offload(kind, lambda: _write_chat(served, body, conversation, tools, max_tokens))
    except ContextLengthError as error:
        if error.num_tokens is None:
            raise
        raise prompt_too_long(error.num_tokens, served, is_least=error.is_least) from None
    except InputError as error:
        if type(error) is not InputError:
            raise
        raise FieldError(names.get(error.field or "", error.field or conversation.called), str(error)) from None
    call_format = choose_call_format(offered, served.call_format)
    if call_format is not None and offered is not None:
        calls = ExpectedCalls(call_format, offered.tools, required=offered.required, several=offered.several)
        # The library that reads calls takes a second to import.
        chat = await share.offload(Kind.UPKEEP, lambda: expect_calls(chat, calls, served.model.target.vocabulary))
    return PreparedPrompt(
        chat.token_ids,
        chat.text,
        options=chat.options,
        chat=chat,
        reasoning_format=params.reasoning_format,
        warnings=warnings,
    )


_PUT_TOGETHER: Final = "messages were put together, as the model's chat template refuses them in the order they have"


def _write_chat(
    served: ServedModel,
    body: ChatSettings,
    conversation: Conversation,
    tools: Sequence[Mapping[str, Any]] | None,
    max_tokens: int | None,
) -> tuple[ChatPrompt, tuple[str, ...]]:
    """Return what a conversation comes to, and what the client ought to know of how it was written."""
    template = served.template
    assert template is not None
    asked, names = read_chat_params(body, served.chat)
    params, warnings = drop_unfollowed(asked, names, template)
    told = tools_for_template(tools)
    if told and not template.reads_tools:
        warnings = (*warnings, "tools: the model's chat template knows none, so the model is told of none")
    variables = {**_usual_variables(template, params, told), **params.template_variables}
    params = replace(params, template_variables=variables)

    def write(messages: Sequence[Mapping[str, Any]]) -> ChatPrompt:
        return served.model.chat_prompt(messages, tools=told, chat=params, max_tokens=max_tokens)

    try:
        return write(conversation.messages), warnings
    except InputError as error:
        if type(error) is not InputError or not conversation.merges:
            raise
        for messages in iter_merged(conversation.messages):
            with contextlib.suppress(InputError):
                return write(messages), (*warnings, _PUT_TOGETHER)
        raise


def _usual_variables(
    template: ChatTemplate, params: ChatParams, tools: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    """Return variables that llama-server gives templates that know them, and transformers does not.

    Who switches reasoning is not overruled.
    """
    today = datetime.date.today()
    usual: dict[str, Any] = {
        "date_string": today.strftime("%d %b %Y"),
        "datetime": today.strftime("%b %d %Y"),
        "functions": json.dumps(list(tools), indent=2) if tools else "",
    }
    if params.reasoning == "auto":
        usual["enable_thinking"] = True
    return {name: value for name, value in usual.items() if name in template.variables}


async def resolve_biases(
    served: ServedModel, share: Share, kind: Kind, request: GenerationRequest
) -> GenerationRequest:
    """Return what is asked for, with biases of texts as those of tokens, and end tokens banned where it says so."""
    vocabulary = served.model.target.vocabulary
    given = request.bias_ids or request.options.params.logit_bias

    def read() -> dict[int, float]:
        biases = dict(given)
        for text, bias in request.bias_texts:
            biases.update(dict.fromkeys(vocabulary.tokenize(text, add_special=False), bias))
        if request.options.rules.ignore_end:
            # The model says something else in their place, as under llama-server, instead of going on behind them.
            biases.update(dict.fromkeys(sorted(vocabulary.end_ids), float("-inf")))
        unknown = next((token_id for token_id in biases if not 0 <= token_id < vocabulary.size), None)
        if unknown is not None:
            raise FieldError("logit_bias", f"token id {unknown} is not in the vocabulary of {vocabulary.size}")
        return biases

    biases = await share.offload(kind, read, num_items=None if request.bias_texts else len(given))
    with in_names_of(request.names):
        return replace(request, options=request.options.replaced({"logit_bias": biases})) if biases else request


async def compile_constraint(served: ServedModel, share: Share, request: GenerationRequest) -> GenerationRequest:
    """Return what is asked for, with what the answer is to keep to compiled for the model."""
    named = request.named
    constraint = None
    if named is not None:
        constraint, request = (
            await _compile(served, share, request, named),
            await _warn_unenforced(share, request, named),
        )
    if request.tools is not None:
        call_format = choose_call_format(request.tools, served.call_format)
        # Large schemas take a while.
        tools, vocabulary = request.tools, served.model.target.vocabulary
        with_calls = await share.offload(Kind.COMPILING, lambda: constrain_calls(tools, named, call_format, vocabulary))
        if with_calls is not None and with_calls != named:
            named, constraint = with_calls, await _compile(served, share, request, with_calls)
            request = await _warn_unenforced_tools(share, request, tools)
    return replace(request, named=named, options=replace(request.options, constraint=constraint))


async def _compile(served: ServedModel, share: Share, request: GenerationRequest, named: Named) -> Constraint:
    try:
        model, salt = served.model, request.cache_salt
        return await share.offload(Kind.COMPILING, lambda: model.compile(named.source, namespace=share.key, salt=salt))
    except ConstraintError as error:
        raise FieldError(named.field, str(error)) from None


async def _warn_unenforced(share: Share, request: GenerationRequest, named: Named) -> GenerationRequest:
    """Say what of a schema nothing keeps the answer to."""
    source = named.source
    if not isinstance(source, JsonSchema):
        return request
    places = await share.offload(Kind.COMPILING, lambda: source.unenforced)
    if not places:
        return request
    warning = f"{named.field} is not strict, and nothing keeps the answer to {list_places(places)}: check it"
    return replace(request, warnings=(*request.warnings, warning))


async def _warn_unenforced_tools(share: Share, request: GenerationRequest, tools: OfferedTools) -> GenerationRequest:
    """Say what of the parameters of functions that are not strict nothing keeps calls to."""

    def read() -> list[str]:
        found = []
        for tool in tools.tools:
            function = tool["function"]
            if function.get("strict") or tools.only not in ("", function["name"]):
                continue
            if places := JsonSchema(function.get("parameters") or {}, strict=False).unenforced:
                found.append(
                    f"function {function['name']} is not strict, and nothing keeps its arguments to "
                    f"{list_places(places)}: check them"
                )
        return found

    return replace(request, warnings=(*request.warnings, *await share.offload(Kind.COMPILING, read)))


def check_length(num_tokens: int, served: ServedModel) -> None:
    """Refuse a prompt that leaves no room for an answer."""
    if num_tokens >= served.context_length:
        raise prompt_too_long(num_tokens, served)


def _check_least(parts: Sequence[TextOrId], served: ServedModel) -> None:
    """Refuse a prompt that is too long by its bytes, before it is read, which takes seconds."""
    if sum(most_tokens(part) if isinstance(part, str) else 1 for part in parts) < served.context_length:
        return
    least = sum(served.vocabulary.fewest_tokens(part) if isinstance(part, str) else 1 for part in parts)
    if least >= served.context_length:
        raise prompt_too_long(least, served, is_least=True)


def prompt_too_long(num_tokens: int, served: ServedModel, *, is_least: bool = False) -> ContextLengthError:
    """Return the error of a prompt that is too long, in the words that clients of llama-server look for."""
    context_length, trained = served.context_length, None if served.about is None else served.about.context_length
    way_out = longer_context(context_length, trained, "start the server with a larger context (`context_length`)")
    return ContextLengthError(
        f"request ({'at least ' if is_least else ''}{num_tokens} tokens) exceeds the available context size "
        f"({context_length} tokens): shorten it, or {way_out}"
    ).with_lengths(num_tokens, context_length, is_least=is_least)


TextOrId: TypeAlias = str | int


def read_prompts(prompt: Any, *, num_choices: int, most: int) -> list[list[TextOrId]]:
    """Return the prompts of a request, each as texts and token ids in their order."""
    several = isinstance(prompt, list) and bool(prompt) and not any(_is_id(item) for item in prompt)
    items = prompt if several else [prompt]
    if len(items) * num_choices > most:
        each = f" with {num_choices} answers each" if num_choices > 1 else ""
        raise FieldError(
            "prompt",
            f"{len(items)} prompts{each}: at most {most} answers are written at once; send fewer, or start the server "
            "with a larger `max_choices`",
        )
    return [read_prompt(item, "prompt") for item in items]


def encode(parts: Sequence[TextOrId], vocabulary: Vocabulary, *, add_special: bool, parse_special: bool) -> list[int]:
    """Return the token ids of texts and ids in their order.

    ``add_special`` puts the model's own tokens at the start, if a text stands there.
    """
    token_ids: list[int] = []
    for place, part in enumerate(parts):
        if isinstance(part, str):
            token_ids += vocabulary.tokenize(part, add_special=add_special and place == 0, parse_special=parse_special)
        else:
            token_ids.append(part)
    return token_ids


def read_mixed(content: Any, name: str) -> list[TextOrId]:
    """Return what a field has, a text or texts and token ids mixed, as a list of them."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, list) and all(isinstance(item, str) or _is_id(item) for item in content):
        num_texts = sum(isinstance(item, str) for item in content)
        if num_texts > MAX_TEXTS:
            raise FieldError(name, f"{name} is made of {num_texts} texts: at most {MAX_TEXTS} are accepted; join them")
        return list(content)
    raise FieldError(name, f"{name} is {shown(content)}: give a text, token ids, or both in a list")


def read_prompt(prompt: Any, name: str) -> list[TextOrId]:
    """Return one prompt, which a field has, as texts and token ids in their order."""
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise FieldError(name, f"the {name} has multimodal_data, and this model reads text alone: leave it out")
        if not isinstance(prompt.get("prompt_string"), str):
            raise FieldError(name, f"the {name} is an object without a text in prompt_string: give one")
        return [prompt["prompt_string"]]
    return read_mixed(prompt, name)


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


_NONE: Final = object()

AT_ONCE: Final = 1 << 12
"""Tokens that are spelled or written at once: no other thread runs meanwhile, for about a millisecond."""


def tokens_to_text(token_ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """Return the text of tokens, control tokens spelled out; bytes that are no character become U+FFFD."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    texts = [
        decode(b"".join(token_piece(token_id, vocabulary) for token_id in token_ids[start : start + AT_ONCE]))
        for start in range(0, len(token_ids), AT_ONCE)
    ]
    return "".join([*texts, decode(b"", True)])


def token_piece(token_id: int, vocabulary: Vocabulary) -> bytes:
    """Return what a token adds to a text, or the name of a control token."""
    return vocabulary.token_bytes(token_id) or vocabulary.token_spelling(token_id) or b""


def read_ids(given: Any, name: str) -> list[int]:
    """Return the token ids that a field has. 3.0 is 3 there: clients written in JavaScript have one kind of number."""
    if not isinstance(given, list):
        raise FieldError(name, f"{name} is {shown(given)}: give a list of token ids")
    token_ids = [int(item) if isinstance(item, float) and item.is_integer() else item for item in given]
    wrong = next((item for item in token_ids if not isinstance(item, int) or isinstance(item, bool)), _NONE)
    if wrong is not _NONE:
        raise FieldError(name, f"{name} has {shown(wrong)}: give token ids alone")
    return token_ids


def check_ids(token_ids: Sequence[int], vocabulary: Vocabulary, name: str) -> None:
    """Refuse ids that the vocabulary does not have."""
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary.size:
            raise FieldError(name, f"token id {shown(token_id)} is not in the vocabulary of {vocabulary.size}")
