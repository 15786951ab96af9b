"""What a request asks for: its fields, read into the options of a call and into how its answer is sent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, cast

from paceline.api import Model
from paceline.core.fields import fields_of
from paceline.core.numbers import shown
from paceline.core.params import MAX_TOKENS, SpeculationParams, read_samplers
from paceline.drafters.lookup import PREDICTION
from paceline.options import REQUEST_PARTS, GenerateOptions, RequestOptions
from paceline.server_options import ServerOptions
from paceline.serving.chat_request import OfferedTools, read_tools, unread_settings
from paceline.serving.constraint_fields import Named, read_constraint
from paceline.serving.conversations import Conversation
from paceline.serving.errors import FieldError, in_names_of
from paceline.serving.fields import check_known, unknown_within
from paceline.serving.schema import (
    MAX_TEXTS,
    ChatBody,
    CompletionBody,
    MessagesBody,
    ResponsesBody,
    Speculative,
    as_whole,
)

Api: TypeAlias = Literal["native", "completions", "chat", "responses", "messages"]
"""Whose fields a request has: llama-server's ``/completion``, OpenAI's completions, chat completions or responses, or
Anthropic's messages."""

DEFAULT_TOP_LOGPROBS: Final = 20
"""Likely tokens listed beside each in a chat that asks for log-probabilities without saying how many, as llama-server
does."""

_MAX_STEPS: Final = 64

_MAX_NAMED: Final = 16
"""Unknown fields that a warning names."""

_LENGTHS: Final = ("n_predict", "max_completion_tokens", "max_output_tokens", "max_tokens")
"""Names of the most tokens to generate; the first that is given counts, as in llama-server."""

_STOPS: Final = ("stop", "stop_sequences")
"""Names of the texts that end an answer."""

_DOTTED: Final[Mapping[str, str]] = {
    "speculative.n_max": "draft_max",
    "speculative.n_min": "draft_min",
    "speculative.p_min": "p_min",
    "speculative.type": "drafters",
    "speculative.types": "drafters",
}
"""llama-server's own names for how a request is sped up."""

_ROUTES_OF: Final[Mapping[str, tuple[Api, ...]]] = {
    "echo": ("completions", "chat"),
    "add_special_tokens": ("native", "completions"),
    "return_tokens": ("native",),
    "return_token_ids": ("completions", "chat"),
    "return_tokens_as_token_ids": ("native", "completions", "chat", "responses"),
    "response_fields": ("native",),
    "stream_options": ("completions", "chat", "responses"),
}
"""Fields that have an effect on some routes only."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a request asks for.

    Attributes:
        api: whose fields it has.
        options: complete and checked, but for the biases.
        bias_ids: what is added to the logits of tokens; none where the server's default is meant.
        bias_texts: what is added to the logits of the tokens of texts.
        num_choices: answers to each prompt.
        reasoning_format: where the answer to a conversation has its reasoning.
        reads_only: whether the prompt is read and nothing is generated.
        stream: whether the answer is sent while it is written.
        include_usage: whether a stream ends with counts of tokens.
        continuous_usage: whether each chunk has them too.
        num_logprobs: likely tokens listed beside each; ``None`` for no log-probabilities.
        num_prompt_logprobs: likely tokens listed beside each of the prompt, apart from the answer as vLLM has it;
            ``None`` for no such list.
        post_sampling: whether these are of what is sampled from, not of the model's own distribution.
        echo: whether the prompt stands before the answer; of a chat the beginning of the message that is continued.
        return_tokens: whether token ids are sent.
        return_token_ids: whether they are sent as vLLM does, with those of the prompt.
        names_ids: whether log-probabilities name tokens by their ids, in place of their texts.
        return_progress: whether a stream says how far the prompt is read.
        return_rounds: whether a stream says what each round drafted, and where each token came from.
        timings_per_token: whether each chunk has timings.
        verbose: whether prompt and settings are sent.
        response_fields: fields of a native answer to send; none for all.
        ping_s: seconds between comments in a silent stream; 0 for none.
        most_predict_s: seconds after the first token at which the answer ends at the next line; ``None`` for none.
        cache_salt: with whom what was read is shared, beside the key.
        slot: the place that the answer takes if it is free; ``None`` for any.
        warnings: what the client ought to know of its request.
        names: of the fields that set options, by the option.
        named: what the answer is to keep to, and the field that says it; ``None`` for nothing.
        tools: that the model may call; ``None`` for none.
        conversation: that is answered; ``None`` of a completion.
    """

    api: Api
    options: RequestOptions
    bias_ids: Mapping[int, float] = field(default_factory=dict)
    bias_texts: tuple[tuple[str, float], ...] = ()
    num_choices: int = 1
    reasoning_format: str = "none"
    reads_only: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    post_sampling: bool = False
    echo: bool = False
    return_tokens: bool = False
    return_token_ids: bool = False
    names_ids: bool = False
    return_progress: bool = False
    return_rounds: bool = False
    timings_per_token: bool = False
    verbose: bool = False
    response_fields: tuple[str, ...] = ()
    ping_s: float = 30.0
    most_predict_s: float | None = None
    cache_salt: str = ""
    slot: int | None = None
    warnings: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    named: Named | None = None
    tools: OfferedTools | None = None
    conversation: Conversation | None = None

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the prompt stands before the answer with log-probabilities of its own."""
        return self.echo and self.api == "completions" and self.num_logprobs is not None


def read_generation_request(
    body: CompletionBody | ChatBody | MessagesBody | ResponsesBody,
    api: Api,
    *,
    model: Model,
    defaults: GenerateOptions,
    settings: ServerOptions,
    verbose: bool,
    conversation: Conversation | None = None,
) -> GenerationRequest:
    """Return what a request asks for.

    Args:
        body: as it was sent, each field of its kind.
        api: whose fields it has.
        model: that is asked.
        defaults: options of a request that says nothing else.
        settings: of the server.
        verbose: whether the server tells prompt and settings unasked.
        conversation: that the body has; ``None`` of a completion.

    Raises:
        FieldError: a field cannot be used.
    """
    given: dict[str, Any] = {
        name: value for name in type(body).model_fields if (value := getattr(body, name, None)) is not None
    }
    extra = {**(body.model_extra or {}), **unread_settings(given), **unknown_within(given, api)}
    if conversation is not None:
        given |= conversation.given
    options, names = _read_options(given, defaults)
    speculation, speculation_names = _read_speculation(given.get("speculative"), extra)
    options.update(speculation)
    names |= speculation_names
    if "prediction" in given:
        options["prediction"] = _read_prediction(given["prediction"])
    bias_ids, bias_texts = read_biases(given.get("logit_bias"))
    reads_only, length = _read_length(given)
    names["max_tokens"] = next((name for name in _LENGTHS if name in given), body.length_field)
    if length is not None:
        options["max_tokens"] = length
    elif options.get("max_tokens") is None:
        options["max_tokens"] = body.default_length
    if stops := [name for name in _STOPS if name in given]:
        names["stop"] = stops[-1]
        options["stop"] = _read_stops([given[name] for name in stops], names["stop"], settings.max_stop)
    if "samplers" in given:
        options["order"] = _read_order(given["samplers"])
    num_choices = _read_num_choices(given, settings.max_choices, has_choices=body.has_choices)
    num_logprobs = _read_num_logprobs(given, api, is_chat=conversation is not None)
    if num_logprobs is not None:
        options["logprobs"] = num_logprobs
        names["logprobs"] = next(name for name in ("top_logprobs", "logprobs", "n_probs") if name in given)
        options["post_sampling_probs"] = bool(given.get("post_sampling_probs"))
    if given.get("skip_special_tokens") is False:
        options["preserved_ids"] = sorted(model.target.vocabulary.control_ids)
    echo = bool(given.get("echo"))
    num_prompt_logprobs = given.get("prompt_logprobs")
    if num_prompt_logprobs is not None and given.get("stream"):
        way_out = "leave out stream, or send echo" if api == "completions" else "leave out stream"
        raise FieldError("prompt_logprobs", f"prompt_logprobs come with whole answers: {way_out}")
    if echo and api == "completions" and num_logprobs is not None:
        if options["post_sampling_probs"]:
            raise FieldError(
                "post_sampling_probs",
                "post_sampling_probs are those that tokens are drawn from, and tokens of an echoed prompt are not "
                "drawn: leave out post_sampling_probs, or echo",
            )
        options["prompt_logprobs"] = max(num_logprobs, num_prompt_logprobs or 0)
    stream_options = given.get("stream_options")
    if stream_options is not None:
        extra |= {f"stream_options.{name}": value for name, value in (stream_options.model_extra or {}).items()}
    unknown = check_known(extra, strict=settings.strict_fields)
    tools = None if conversation is None else read_tools(given)
    named = read_constraint(given, {} if conversation is None else conversation.forms)
    ping_s = given.get("sse_ping_interval", 30)
    with in_names_of(names):
        request = model.read_options(options)
    return GenerationRequest(
        api=api,
        options=request,
        bias_ids=bias_ids,
        bias_texts=bias_texts,
        num_choices=num_choices,
        reads_only=reads_only,
        stream=bool(given.get("stream")),
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=bool(
            stream_options and stream_options.include_usage and stream_options.continuous_usage_stats
        ),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        post_sampling=bool(given.get("post_sampling_probs")),
        echo=echo,
        return_tokens=bool(given.get("return_tokens")),
        return_token_ids=bool(given.get("return_token_ids")),
        names_ids=bool(given.get("return_tokens_as_token_ids")),
        return_progress=bool(given.get("return_progress")),
        return_rounds=bool(given.get("return_rounds")),
        timings_per_token=bool(given.get("timings_per_token")),
        verbose=verbose or bool(given.get("verbose")),
        response_fields=tuple(given.get("response_fields", ())),
        ping_s=max(0.0, float(ping_s)),
        most_predict_s=_read_time_limit(given),
        cache_salt=given.get("cache_salt", ""),
        slot=slot if type(slot := extra.get("id_slot")) is int else None,
        warnings=(
            *warn_of_unknown_fields(unknown),
            *_warn_of_ineffective_fields(given, extra, api),
            *(() if conversation is None else conversation.warnings),
            *_warn_of_unused_prediction(request.speculation, model),
        ),
        names=names,
        named=named,
        tools=tools,
        conversation=conversation,
    )


def warn_of_unknown_fields(unknown: Sequence[str]) -> tuple[str, ...]:
    """Return what to say of names that nobody knows."""
    named = [f"unknown field {shown(name)} was ignored" for name in unknown[:_MAX_NAMED]]
    more = len(unknown) - len(named)
    return (*named, *([f"{more} more unknown fields were ignored"] if more else []))


def _warn_of_ineffective_fields(given: Mapping[str, Any], extra: Mapping[str, Any], api: Api) -> list[str]:
    """Return what to say of fields that change nothing on this route, or without a stream."""
    found = [
        f"{name} changes nothing on this route"
        for name, routes in _ROUTES_OF.items()
        if api not in routes and given.get(name) not in (None, False, [])
    ]
    if not given.get("stream"):
        streamed = ("return_rounds", "return_progress")
        found += [f"{name} changes nothing without stream" for name in streamed if given.get(name)]
    if extra.get("n_cache_reuse") not in (None, 0):
        # Above the first layer keys and values depend on all of the text before them.
        found.append(
            "n_cache_reuse changes nothing: what stands behind a change was read after another text, and reusing it "
            "would change the answer"
        )
    stream_options = given.get("stream_options")
    if stream_options and stream_options.continuous_usage_stats:
        if api == "responses":
            found.append("stream_options.continuous_usage_stats changes nothing on this route")
        elif not stream_options.include_usage:
            found.append("stream_options.continuous_usage_stats changes nothing without stream_options.include_usage")
    return found


def _warn_of_unused_prediction(asked: SpeculationParams, model: Model) -> list[str]:
    if not asked.prediction:
        return []
    if not model.policy.speculates:
        why = "the server was started without speculation"
    elif not asked.speculate:
        why = "the request is decoded plainly"
    elif asked.drafters is not None and PREDICTION not in asked.drafters:
        why = f"speculative.drafters does not name {PREDICTION}"
    elif asked.drafters is None and asked.policy == "fixed" and "draft" in model.drafter_names:
        why = f"policy fixed asks the draft model alone, unless speculative.drafters names {PREDICTION}"
    else:
        return []
    return [f"prediction changed nothing: {why}"]


def _read_options(given: Mapping[str, Any], defaults: GenerateOptions) -> tuple[GenerateOptions, dict[str, str]]:
    """Return the options that fields of the table set, and the names of these fields by option."""
    options: dict[str, Any] = {**defaults}
    names: dict[str, str] = {}
    for part in REQUEST_PARTS:
        if part is SpeculationParams:
            continue
        for entry in fields_of(part):
            if entry.name in ("logit_bias", "stop", "max_tokens", "logprobs", "post_sampling_probs"):
                continue
            for name in entry.json_names:
                if name in given:
                    options[entry.name], names[entry.name] = given[name], name
                    break
    return cast("GenerateOptions", options), names


def _read_speculation(speculative: Speculative | None, extra: dict[str, Any]) -> tuple[GenerateOptions, dict[str, str]]:
    """Return the options that say how a request is sped up, and the names of their fields by option.

    llama-server's names are taken out of ``extra``.
    """
    options: dict[str, Any] = {}
    names: dict[str, str] = {}
    is_off = False
    if speculative is not None:
        if speculative.model_extra:
            name = next(iter(speculative.model_extra))
            there_are = ", ".join(Speculative.model_fields)
            raise FieldError(f"speculative.{name}", f"speculative has no {name!r}: its fields are {there_are}")
        for entry in fields_of(SpeculationParams):
            value = getattr(speculative, entry.name, None)
            if value is not None:
                options[entry.name], names[entry.name] = value, f"speculative.{entry.name}"
        is_off = speculative.enabled is False or bool(speculative.off)
    for name, option in _DOTTED.items():
        value = extra.pop(name, None)
        if value is None:
            continue
        if option == "drafters" and value in ("none", "auto", "default"):
            is_off |= value == "none"
        elif option not in options:
            options[option], names[option] = as_whole(value), name
    if is_off or (options.get("draft_max") == 0 and options["draft_max"] is not False):
        options.pop("draft_max", None)
        options["speculate"] = False
    drafters = options.get("drafters")
    if isinstance(drafters, str):
        options["drafters"] = [name.strip() for name in drafters.split(",") if name.strip()]
    return cast("GenerateOptions", options), names


def _read_prediction(given: Any) -> str:
    """Return the text that an answer is expected to repeat, as OpenAI's API has it, or as it is."""
    if isinstance(given, str):
        return given
    if not isinstance(given, dict) or given.get("type", "content") != "content":
        raise FieldError(
            "prediction", f'prediction is {shown(given)}: give {{"type": "content", "content": ...}} with the text'
        )
    content = given.get("content")
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) and content else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise FieldError(
                "prediction.content",
                f"prediction.content has {shown(part)}: give a text, or a list of parts of type text",
            )
        texts.append(text)
    return "".join(texts)


def _read_length(given: Mapping[str, Any]) -> tuple[bool, int | None]:
    """Return whether nothing is to be generated, and the most tokens; ``None`` where that is not said."""
    for name in _LENGTHS:
        if name in given:
            length = given[name]
            if length < -1:
                raise FieldError(name, f"{name} is {length}: give 1 or more, 0 to read the prompt, or -1 for no limit")
            return length == 0, 1 if length == 0 else MAX_TOKENS if length == -1 else min(length, MAX_TOKENS)
    return False, None


def _read_stops(given: Sequence[str | Sequence[str]], name: str, most: int) -> tuple[str, ...]:
    stops = tuple(text for texts in given for text in ([texts] if isinstance(texts, str) else texts) if text)
    if len(stops) > most:
        raise FieldError(
            name, f"{len(stops)} stop texts: send at most {most}, or start the server with a larger `max_stop`"
        )
    return stops


def _read_order(given: str | Sequence[str]) -> tuple[str, ...]:
    if len(given) > _MAX_STEPS:
        raise FieldError("samplers", f"samplers names {len(given)} sampling steps: at most {_MAX_STEPS} are accepted")
    with in_names_of({"order": "samplers"}):
        return read_samplers(given)


def _read_num_choices(given: Mapping[str, Any], most: int, *, has_choices: bool) -> int:
    name = "n_cmpl" if "n_cmpl" in given else "n"
    count = given.get(name, 1)
    if count != 1 and not has_choices:
        raise FieldError(name, f"{name} is {count}: this API has one answer; use /v1/chat/completions for more")
    if not 1 <= count <= most:
        raise FieldError(
            name, f"{name} is {count}: give a number from 1 to {most}, or start the server with a larger `max_choices`"
        )
    return int(count)


def _read_num_logprobs(given: Mapping[str, Any], api: Api, *, is_chat: bool) -> int | None:
    """Return how many likely tokens to list beside each; ``None`` for no log-probabilities."""
    logprobs = given.get("logprobs")
    if is_chat:
        if given.get("top_logprobs") and not logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs to be true")
        if logprobs:
            return int(given.get("top_logprobs", DEFAULT_TOP_LOGPROBS if logprobs is True else logprobs))
    # 0 asks for the chosen tokens alone in OpenAI's API, and for nothing in llama-server's.
    elif logprobs is not None and logprobs is not False and (api != "native" or logprobs):
        return int(logprobs)
    return given.get("n_probs") or None


def _read_time_limit(given: Mapping[str, Any]) -> float | None:
    value = given.get("t_max_predict_ms")
    return value / 1000.0 if value is not None and value > 0 else None


_ID: Final = re.compile("-?[0-9]{1,18}")
"""A text that is a token's id: longer ones than any id are texts to be biased, as all others."""


def read_biases(given: Any) -> tuple[dict[int, float], tuple[tuple[str, float], ...]]:
    """Return biases of token ids, and those of texts, which the tokenizer has to read.

    Args:
        given: as it was sent; ``None`` for none.

    Raises:
        FieldError: it has another form.
    """
    ids: dict[int, float] = {}
    texts: list[tuple[str, float]] = []
    for token, bias in _iter_biases(given):
        if bias is not False and (isinstance(bias, bool) or not isinstance(bias, int | float)):
            raise FieldError(
                "logit_bias", f"logit_bias has {shown(bias)} for {shown(token)}: give a number, or false to ban it"
            )
        value = -math.inf if bias is False else float(bias)
        if isinstance(token, str) and not _ID.fullmatch(token):
            texts.append((token, value))
            if len(texts) > MAX_TEXTS:
                raise FieldError(
                    "logit_bias", f"logit_bias has more than {MAX_TEXTS} texts: give token ids, or fewer texts"
                )
        else:
            ids[int(token)] = value
    return ids, tuple(texts)


def _iter_biases(given: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(given, Mapping):
        yield from given.items()
        return
    if given is not None and not isinstance(given, list):
        raise _malformed_biases(given)
    for pair in given or ():
        if not isinstance(pair, list) or len(pair) != 2 or not _is_token(as_whole(pair[0])):
            raise _malformed_biases(pair)
        yield as_whole(pair[0]), pair[1]


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _malformed_biases(found: Any) -> FieldError:
    return FieldError(
        "logit_bias",
        f"logit_bias has {shown(found)}: give an object of biases by token id or text, or a list of such pairs",
    )
