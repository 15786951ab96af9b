"""What the answers of one API look like: whole, and chunk by chunk."""

from __future__ import annotations

import codecs
import functools
import json
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from json.encoder import encode_basestring
from typing import Any, Final, Protocol

from paceline.chat.reasoning import PartKind, build_message
from paceline.chat.tool_calls.base import ArgumentsDelta, CallStarted
from paceline.core.logprobs import TokenLogprob
from paceline.core.stats import RequestStats
from paceline.core.vocabulary import Vocabulary
from paceline.serving.answering import Answer, Choice, Ended, Event, Part, Progress, Round, TokenEvent
from paceline.serving.model_host import BUILD
from paceline.serving.prompts import token_piece
from paceline.serving.props import biases_as_json, generation_settings
from paceline.serving.timings import metrics_of, round_of, speculation_of, timings_of, usage_of


class ResponseFormatter(Protocol):
    """Writes answers in the terms of one API.

    Attributes:
        ends_with_done: whether a stream's last line is ``[DONE]``.
    """

    ends_with_done: bool

    def whole(self) -> Any:
        """Return a finished answer."""
        ...

    def written(self, events: Sequence[Event], *, in_pieces: bool = False) -> bytes:
        """Return what a stream says of what a round brought, as server-sent events, to be sent at once."""
        ...


class Listed:
    """A list that may be long, and whose parts are made and written some at a time.

    Args:
        items: what the parts are made of, one by one.
        made_of: returns the parts that some items come to.
        num_each: values in each part.
    """

    def __init__(self, items: Sequence[Any], made_of: Callable[[Sequence[Any]], list[Any]], num_each: int = 1) -> None:
        self._items = items
        self._made_of = made_of
        self._at_once = max(_MAX_AT_ONCE // num_each, 1)

    def whole(self) -> list[Any]:
        """Return the list."""
        return self._made_of(self._items)

    def pieces(self) -> Iterator[bytes]:
        """Iterate over the JSON of the list."""
        between = b"["
        for start in range(0, len(self._items), self._at_once):
            yield between + to_json(self._made_of(self._items[start : start + self._at_once]))[1:-1]
            between = b","
        yield b"[]" if between == b"[" else b"]"


_MAX_AT_ONCE: Final = 1000
"""Values that are written at once. Python writes JSON beside nothing else, and takes some 2 ms for these."""

_PLACE: Final = secrets.token_hex(8)
"""Text that stands for a long list in JSON. No answer has it."""


def as_events(chunks: Sequence[dict[str, Any]], *, in_pieces: bool = False) -> bytes:
    """Return chunks as server-sent events, to be sent at once.

    Args:
        chunks: of a stream.
        in_pieces: let other threads run while they are written.
    """
    if in_pieces:
        return b"".join(b"".join((b"data: ", *json_pieces(chunk), b"\n\n")) for chunk in chunks)
    return b"".join(b"data: " + to_json(chunk) + b"\n\n" for chunk in chunks)


def to_json(value: Any, default: Callable[[Any], Any] = Listed.whole) -> bytes:
    """Return JSON. Characters that UTF-8 cannot write, such as half a pair of surrogates, are escaped.

    Args:
        value: to write.
        default: returns what is written in the place of a :class:`Listed`.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=default)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=default).encode()


def json_pieces(value: Any) -> Iterator[bytes]:
    """Iterate over JSON. Other threads run while a :class:`Listed` in it is written."""
    found: list[Listed] = []

    def place(listed: Listed) -> str:
        found.append(listed)
        return _PLACE

    written = to_json(value, place)
    # Of JSON that was written once more the lists come a second time.
    for part, listed in zip_longest(written.split(f'"{_PLACE}"'.encode()), found[: written.count(_PLACE.encode())]):
        yield part
        if listed is not None:
            yield from listed.pieces()


def list_probabilities(
    logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary, *, post_sampling: bool
) -> list[dict[str, Any]]:
    """Return how likely tokens were, as OpenAI's chats and llama-server have it.

    Args:
        logprobs: of tokens.
        vocabulary: spells them.
        post_sampling: say probabilities of what was sampled from, in place of logarithms.
    """
    found = []
    for each in logprobs:
        entry = _probability(each.token_id, each.logprob, vocabulary, post_sampling=post_sampling)
        entry["top_probs" if post_sampling else "top_logprobs"] = [
            _probability(token_id, logprob, vocabulary, post_sampling=post_sampling) for token_id, logprob in each.top
        ]
        found.append(entry)
    return found


_LOWEST: Final = -3.4028234663852886e38
"""Number that stands for the logarithm of 0, which JSON has no word for; llama-server's is the same."""


def _probability(token_id: int, logprob: float, vocabulary: Vocabulary, *, post_sampling: bool) -> dict[str, Any]:
    spelling = vocabulary.token_bytes(token_id)
    value = math.exp(logprob) if post_sampling else max(logprob, _LOWEST)
    return {
        "id": token_id,
        "token": spelling.decode("utf-8", "replace"),
        "bytes": list(spelling),
        "prob" if post_sampling else "logprob": value,
    }


class _Formatter(ABC):
    """What all formatters have in common.

    Attributes:
        answer: what is written.
        request: the request that is answered.
        vocabulary: spells tokens.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.request = answer.request
        self.vocabulary = answer.served.model.target.vocabulary
        self._num_ended = 0
        self._begun: set[int] = set()
        # By choice and kind of text.
        self._frames: dict[tuple[int, PartKind], list[bytes] | None] = {}
        request = answer.request
        self._are_alike = not (request.reads_only or request.timings_per_token or request.verbose)

    @abstractmethod
    def chunks(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Return what a stream says of what a round brought."""

    def written(self, events: Sequence[Event], *, in_pieces: bool = False) -> bytes:
        """Return :meth:`chunks` as server-sent events, to be sent at once.

        Nearly all chunks differ in the text of a token alone, or in its number too. What stands around these is written
        once.

        Args:
            events: what a round brought.
            in_pieces: let other threads run while they are written.
        """
        found = []
        for event in events:
            framed = self._framed(event) if isinstance(event, TokenEvent) else None
            found.append(as_events(self.chunks([event]), in_pieces=in_pieces) if framed is None else framed)
        return b"".join(found)

    def _framed(self, tokens: TokenEvent) -> bytes | None:
        """Return what :meth:`chunks` comes to of a token, or ``None`` where that may differ in something else."""
        number = tokens.choice.number
        if number not in self._begun:
            # Something may come before the first.
            self._begun.add(number)
            return None
        parts = self._texts(tokens) if self._are_alike and not (tokens.logprobs or tokens.sources) else None
        if parts is None:
            return None
        found: list[bytes] = []
        try:
            for kind, text in parts:
                frame = self._frame(tokens.choice, kind)
                if frame is None:
                    return None
                found += (frame[0], encode_basestring(text).encode(), frame[1])
                if len(frame) > 2:
                    token_ids = ",".join(map(str, tokens.token_ids))
                    found += (token_ids.encode(), frame[2], b"%d" % tokens.num_said, frame[3])
        except UnicodeEncodeError:
            # All of that chunk is escaped.
            return None
        return b"".join(found)

    def _texts(self, tokens: TokenEvent) -> list[tuple[PartKind, str]] | None:
        """Return the texts that become a chunk each; ``None`` where chunks have anything else."""
        return [("content", tokens.text)]

    def _frame(self, choice: Choice, kind: PartKind) -> list[bytes] | None:
        """Return what a chunk has around its text, and around ids and number of its tokens where it has them."""
        key = choice.number, kind
        if key not in self._frames:
            place: Any = _PLACE
            event = as_events(self.chunks([TokenEvent(choice, [(kind, place)], [place], (), place)]))
            # In a name that UTF-8 cannot write: all is escaped then.
            is_escaped = b"\\ud" in event
            self._frames[key] = None if is_escaped else event.split(f'"{_PLACE}"'.encode())
        return self._frames[key]

    def timings(self, choice: Choice) -> dict[str, Any]:
        """Return the times of an answer that is over."""
        stats = choice.stats
        assert stats is not None
        timings = timings_of(stats)
        if self.request.reads_only:
            timings |= {"predicted_n": 0}
        return timings

    def running_timings(self, choice: Choice, event: Event | None = None) -> dict[str, Any]:
        """Return the times of an answer so far.

        Args:
            choice: the answer.
            event: that the times go with. The first of a prompt comes before anything of it is read, however far the
                engine is when that is told.
        """
        request = choice.stream.request
        assert request is not None
        if isinstance(event, Progress) and event.is_first:
            return timings_of(RequestStats(cached_tokens=request.stats.cached_tokens))
        return timings_of(request.stats)

    def times(self, choice: Choice) -> dict[str, Any]:
        """Return what an answer took, and what speculation gave."""
        stats = choice.stats
        assert stats is not None
        return {
            "timings": self.timings(choice),
            "speculative": speculation_of(stats, choice.stream.speculation, self.answer.served.policy),
            "metrics": metrics_of(stats),
        }

    def beside(self, choice: Choice) -> dict[str, Any]:
        """Return what stands beside the answer in its last or only part."""
        found = self.times(choice)
        if self.request.warnings:
            found["warnings"] = list(self.request.warnings)
        return found

    def is_last(self, event: Ended) -> bool:
        """Return whether an end is that of the last choice; asked once for each end."""
        del event
        self._num_ended += 1
        return self._num_ended == len(self.answer.choices)

    def usage(self) -> dict[str, Any]:
        """Return the counts of tokens of all answers."""
        return usage_of(self.answer.choices, reads_only=self.request.reads_only)

    def native(self, choice: Choice, *, in_stream: bool) -> dict[str, Any]:
        """Return a finished answer as llama-server's ``/completion`` has it.

        Args:
            choice: the answer.
            in_stream: whether its text was sent before.
        """
        request = self.request
        shows_text = not in_stream and not request.reads_only
        found: dict[str, Any] = {
            "index": choice.number,
            "content": choice.written if shows_text else "",
            "tokens": Listed(choice.token_ids, list) if shows_text and request.return_tokens else [],
            "id_slot": choice.slot,
            "stop": True,
            "model": self.answer.served.id,
            "tokens_predicted": 0 if request.reads_only else choice.num_said,
            "tokens_evaluated": choice.num_prompt,
            "generation_settings": generation_settings(
                choice.stream.params, choice.stream.rules, request, self.answer.served
            )
            | {"logit_bias": Listed([*choice.stream.params.logit_bias.items()], biases_as_json)},
            "prompt": choice.prompt.text,
            "has_new_line": choice.has_new_line,
            "truncated": choice.truncated,
            "stop_type": choice.stop_type,
            "stopping_word": choice.stopping_word,
            "tokens_cached": choice.num_prompt + choice.num_said - 1,
            **self.beside(choice),
        }
        if shows_text and request.num_logprobs is not None:
            found["completion_probabilities"] = self.probabilities(choice.logprobs)
        return found

    def probabilities(self, logprobs: Sequence[TokenLogprob]) -> Listed:
        """Return how likely tokens were."""
        write = functools.partial(
            list_probabilities, vocabulary=self.vocabulary, post_sampling=self.request.post_sampling
        )
        return Listed(logprobs, write, 1 + (self.request.num_logprobs or 0))

    def progress(self, event: Progress) -> dict[str, Any]:
        """Return how far a prompt is read."""
        return {
            "total": event.choice.num_prompt,
            "cache": event.choice.cached,
            "processed": event.processed,
            "time_ms": int(event.time_ms),
        }


class NativeFormatter(_Formatter):
    """llama-server's ``/completion``."""

    ends_with_done = False

    def whole(self) -> Any:
        """Return the answer; a list where there are several."""
        found = [self._chosen(self.native(choice, in_stream=False)) for choice in self.answer.choices]
        return found[0] if len(found) == 1 else found

    def chunks(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Return what a stream says of what a round brought."""
        found = []
        for event in events:
            choice = event.choice
            if isinstance(event, Ended):
                found.append(self._chosen(self.native(choice, in_stream=True)))
                continue
            tokens = event if isinstance(event, TokenEvent) else None
            if self.request.reads_only and not isinstance(event, Progress):
                continue
            chunk: dict[str, Any] = {
                "index": choice.number,
                "content": "" if tokens is None else tokens.text,
                "tokens": [] if tokens is None else list(tokens.token_ids),
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": _num_said(event),
                "tokens_evaluated": choice.num_prompt,
            }
            if self.request.timings_per_token:
                chunk["timings"] = self.running_timings(choice, event)
            if isinstance(event, Progress):
                chunk["prompt_progress"] = self.progress(event)
            elif isinstance(event, Round):
                chunk["round"] = round_of(event.emission, self.vocabulary)
            if tokens is not None and tokens.sources:
                chunk["sources"] = list(tokens.sources)
            if tokens is not None and tokens.logprobs:
                chunk["completion_probabilities"] = self.probabilities(tokens.logprobs)
            found.append(chunk)
        return found

    def _chosen(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return those fields that were asked for; ``a/b`` is ``b`` of ``a``, under that name."""
        if not self.request.response_fields:
            return answer
        found: dict[str, Any] = {}
        for path in self.request.response_fields:
            value: Any = answer
            for name in path.split("/"):
                if not isinstance(value, dict) or name not in value:
                    break
                value = value[name]
            else:
                found[path] = value
        return found


def _num_said(event: Event) -> int:
    """Return how many tokens of the answer were said with an event, or before it."""
    if isinstance(event, TokenEvent):
        return event.num_said
    return event.choice.num_said - len(event.emission.token_ids) if isinstance(event, Round) else 0


class _OpenAiFormatter(_Formatter):
    """What OpenAI's two APIs have in common."""

    ends_with_done = True
    whole_object = ""
    chunk_object = ""

    def head(self, *, in_stream: bool) -> dict[str, Any]:
        """Return what every part of the answer has."""
        return {
            "id": self.answer.id,
            "object": self.chunk_object if in_stream else self.whole_object,
            "created": self.answer.created,
            "model": self.answer.served.id,
            "system_fingerprint": BUILD,
        }

    def finish_reason(self, choice: Choice) -> str:
        """Return why an answer ended, in OpenAI's words."""
        if choice.stop_type not in ("eos", "word"):
            return "length"
        return "tool_calls" if choice.calls else "stop"

    def whole(self) -> Any:
        """Return the answer."""
        choices = [self.choice(choice) for choice in self.answer.choices]
        if len(choices) > 1:
            # Each has its own times; beside the list stand those of the first.
            for found, choice in zip(choices, self.answer.choices, strict=True):
                found |= self.times(choice)
        found = {
            **self.head(in_stream=False),
            "choices": choices,
            "usage": self.usage(),
            **self.beside(self.answer.choices[0]),
        }
        if self.request.verbose:
            found["__verbose"] = self.native(self.answer.choices[0], in_stream=False)
        return found

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return one finished answer."""


class CompletionFormatter(_OpenAiFormatter):
    """OpenAI's completions. Log-probabilities come in both of the forms that clients read."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._offsets = [_Offsets() for _ in answer.choices]
        self._echoed: set[int] = set()

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return one finished answer."""
        return {
            "index": choice.number,
            "text": (choice.prompt.text if self.request.echo else "")
            + ("" if self.request.reads_only else choice.written),
            "logprobs": self._logprobs(choice, choice.logprobs),
            "finish_reason": self.finish_reason(choice),
        }

    def chunks(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Return what a stream says of what a round brought."""
        found = []
        for event in events:
            choice = event.choice
            chunk = self.head(in_stream=True)
            if self.request.echo and choice.number not in self._echoed:
                self._echoed.add(choice.number)
                found.append({**chunk, "choices": [self._delta(choice, choice.prompt.text)]})
            if isinstance(event, TokenEvent):
                if self.request.reads_only:
                    continue
                chunk["choices"] = [self._delta(choice, event.text, self._logprobs(choice, event.logprobs))]
                if event.sources:
                    chunk["sources"] = list(event.sources)
                if self.request.timings_per_token:
                    chunk["timings"] = self.running_timings(choice)
                if self.request.verbose:
                    (chunk["__verbose"],) = NativeFormatter(self.answer).chunks([event])
            elif isinstance(event, Round):
                if self.request.reads_only:
                    continue
                chunk["choices"] = [self._delta(choice, "")]
                chunk["round"] = round_of(event.emission, self.vocabulary)
            elif isinstance(event, Progress):
                chunk["choices"] = [self._delta(choice, "")]
                chunk["prompt_progress"] = self.progress(event)
            else:
                chunk["choices"] = [{**self._delta(choice, ""), "finish_reason": self.finish_reason(choice)}]
                chunk |= self.beside(choice)
                if self.request.verbose:
                    chunk["__verbose"] = self.native(choice, in_stream=True)
            found.append(chunk)
            if isinstance(event, Ended) and self.is_last(event) and self.request.include_usage:
                found.append({**self.head(in_stream=True), "choices": [], "usage": self.usage(), **self.beside(choice)})
        return found

    def _delta(self, choice: Choice, text: str, logprobs: Any = None) -> dict[str, Any]:
        return {"index": choice.number, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.request.num_logprobs is None or self.request.reads_only or not logprobs:
            return None
        # Control tokens add nothing to the text, which the tokens are to spell.
        spelled = [self.vocabulary.token_bytes(each.token_id) for each in logprobs]
        return {
            "tokens": [_token_name(piece) for piece in spelled],
            "token_logprobs": [max(each.logprob, _LOWEST) for each in logprobs],
            "top_logprobs": Listed(
                [*zip(logprobs, spelled, strict=True)],
                lambda some: [self._top(each, piece) for each, piece in some],
                1 + self.request.num_logprobs,
            ),
            "text_offset": [self._offsets[choice.number].next(piece) for piece in spelled],
            "content": self.probabilities(logprobs),
        }

    def _top(self, logprob: TokenLogprob, spelled: bytes) -> dict[str, float]:
        """Return the likeliest tokens by text, and as in OpenAI's API the sampled one under the text that it has."""
        found: dict[str, float] = {}
        for token_id, value in logprob.top:
            if token_id != logprob.token_id:
                # Of tokens with one text the likelier counts.
                found.setdefault(_token_name(token_piece(token_id, self.vocabulary)), max(value, _LOWEST))
        found[_token_name(spelled)] = max(logprob.logprob, _LOWEST)
        return found


class _Offsets:
    """Counts the characters before each token of a text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0

    def next(self, piece: bytes) -> int:
        """Return where a token begins; one that goes on with a character begins where that does."""
        begin, unfinished = self._count, self._decoder.getstate()[0]
        if unfinished and len((unfinished + piece[:1]).decode("utf-8", "replace")) > 1:
            # Those bytes are no character, which is known now and stands for itself.
            begin += 1
        self._count += len(self._decoder.decode(piece))
        return begin


def _token_name(piece: bytes) -> str:
    """Return the text of a token, or as OpenAI does the bytes of one that is a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


_FIELDS: Final = {"content": "content", "reasoning": "reasoning_content"}
"""Fields of a message by the kind of a part."""


def _part_delta(part: Part) -> dict[str, Any]:
    """Return a part of an answer as a chunk of a stream has it."""
    if isinstance(part, CallStarted):
        function = {"name": part.name, "arguments": ""}
        return {"tool_calls": [{"index": part.index, "id": part.call_id, "type": "function", "function": function}]}
    if isinstance(part, ArgumentsDelta):
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
    kind, text = part
    return {_FIELDS[kind]: text}


class ChatFormatter(_OpenAiFormatter):
    """OpenAI's chat completions, with reasoning apart as llama-server and DeepSeek have it."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._opened: set[int] = set()

    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return one finished answer."""
        chat = choice.prompt.chat
        assert chat is not None
        message: dict[str, Any] = {"role": "assistant"}
        message |= build_message(
            "" if self.request.reads_only else choice.written,
            chat.markers,
            begun=chat.begun,
            continued=chat.continued,
            reasoning_format=choice.prompt.reasoning_format,
        )
        if choice.prompt.call_format is not None:
            # As in OpenAI's API, an answer that is calls alone has no content.
            message["content"] = choice.content or (None if choice.calls else "")
            if choice.calls:
                message["tool_calls"] = choice.calls
        for kind, text in choice.echoed:
            name = _FIELDS[kind]
            message[name] = text + (message.get(name) or "")
        found: dict[str, Any] = {
            "index": choice.number,
            "message": message,
            "finish_reason": self.finish_reason(choice),
        }
        found["logprobs"] = self._logprobs(choice.logprobs)
        return found

    def chunks(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Return what a stream says of what a round brought."""
        found = []
        for event in events:
            choice = event.choice
            chunk = self.head(in_stream=True)
            if isinstance(event, Progress):
                chunk["choices"] = [self._delta(choice, {"role": "assistant", "content": None})]
                chunk["prompt_progress"] = self.progress(event)
                found.append(chunk)
                continue
            if choice.number not in self._opened:
                self._opened.add(choice.number)
                opening = self._delta(choice, {"role": "assistant", "content": None})
                found.append({**self.head(in_stream=True), "choices": [opening]})
            if isinstance(event, TokenEvent):
                if not self.request.reads_only:
                    found += self._token_chunks(event)
                continue
            if isinstance(event, Round):
                if not self.request.reads_only:
                    told = round_of(event.emission, self.vocabulary)
                    found.append({**chunk, "choices": [self._delta(choice, {})], "round": told})
                continue
            chunk["choices"] = [{**self._delta(choice, {}), "finish_reason": self.finish_reason(choice)}]
            if self.request.verbose:
                chunk["__verbose"] = self.native(choice, in_stream=True)
            found.append(chunk)
            is_last = self.is_last(event)
            if not self.request.include_usage or len(self.answer.choices) > 1:
                chunk |= self.beside(choice)
            if self.request.include_usage and is_last:
                found.append({**self.head(in_stream=True), "choices": [], "usage": self.usage(), **self.beside(choice)})
        return found

    def _texts(self, tokens: TokenEvent) -> list[tuple[PartKind, str]] | None:
        texts = [part for part in tokens.parts if isinstance(part, tuple)]
        return texts if len(texts) == len(tokens.parts) else None

    def _token_chunks(self, tokens: TokenEvent) -> list[dict[str, Any]]:
        """Return the chunks of one token: one for each kind of text that it ends."""
        found = []
        for part in tokens.parts:
            found.append({**self.head(in_stream=True), "choices": [self._delta(tokens.choice, _part_delta(part))]})
        if not found and (tokens.logprobs or tokens.sources):
            # The end of the answer, which adds no text.
            found.append({**self.head(in_stream=True), "choices": [self._delta(tokens.choice, {})]})
        if not found:
            return []
        if tokens.logprobs:
            found[-1]["choices"][0]["logprobs"] = self._logprobs(tokens.logprobs)
        if tokens.sources:
            found[-1]["sources"] = list(tokens.sources)
        if self.request.timings_per_token:
            found[-1]["timings"] = self.running_timings(tokens.choice)
        return found

    def _delta(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice.number, "delta": delta, "finish_reason": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.request.num_logprobs is None or self.request.reads_only or not logprobs:
            return None
        return {"content": self.probabilities(logprobs), "refusal": None}
