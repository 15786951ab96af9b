r"""Reading calls out of an answer while it arrives; what comes out does not depend on how the text was cut.

::

    push("Let me see.<tool_call>\n{...}")
      └─ character by character, or what can hold no mark at once
           ├─ outside of calls ──> ResponseParser ──> ContentDelta
           ├─ in a JSON value  ──> JsonValue, which hands the whole value on once it is complete
           └─ in another call  ──> ResponseParser
    call closed ──> CallStarted, ArgumentsDelta;  broken or cut off ──> ContentDelta of all that was written

The library's parser is fed one character at a time. Fed more, an error in a call would take with it the events of what
stood before; and where a JSON string holds a mark, it would end the call there.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from paceline.chat.tool_calls.base import (
    END_OF_VALUE,
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    ParsedDelta,
    ToolCallFormat,
)
from paceline.chat.tool_calls.parameter_schema import ParameterSchema
from paceline.chat.tool_calls.values import JsonValue, make_calls_readable, parse_value, quote_keys, restore_names
from paceline.core.errors import ConstraintError, ModelFileError
from paceline.core.extras import missing

_FIELD: Final = "tool_calls"
# Names under which models put the arguments of a call, and what else may stand beside its name.
_ARGUMENTS: Final = ("arguments", "parameters", "args", "input")
_BESIDE: Final = frozenset({"name", "id", "type", "index", *_ARGUMENTS})
# Content in which every value is a text.
_OF_TEXTS: Final = ("xml-inline", "kv-lines")
# What parts the name of an argument from whether it is a text, where a model says so.
_SAYS_TEXT: Final = '" string="'
# What reading a broken call may raise.
_FAULTS: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, ConstraintError)
# Content of these kinds says by itself whether it was cut off.
_SELF_CLOSING: Final = ("json", "python-call-list")
# Characters after which a parser is left for a new one: it keeps, and copies, all that it was fed.
_MAX_FED: Final = 4096
# Whitespace before a call that a model's own template may take for a part of it.
_MAX_SPACES: Final = 64
_LETTERS: Final = string.ascii_letters + string.digits


class ToolCallParser:
    """Reads content and calls out of an answer's text, from which reasoning was parted.

    A call that is broken or cut off is content, marks and all: nothing is lost, and no half of a call is made. So a
    call is handed on once it has closed. Whitespace before, between and after calls is left out.

    Args:
        call_format: of the model.
        tools: of the request, in the form of OpenAI's API. Arguments that were written as text are made what the
            tool's schema says.
        required: whether the answer has to be calls. Then what is no call, such as the half of one behind the last, is
            content only where there is no call.
        several: whether there may be several calls. If not, those behind the first are left out.
        new_id: returns an id for a call that has none.

    Attributes:
        num_calls: calls so far.

    Raises:
        CapabilityError: the library that reads calls is not installed.
        ModelFileError: the model's own response template is none.
    """

    def __init__(
        self,
        call_format: ToolCallFormat,
        tools: Sequence[Mapping[str, Any]],
        *,
        required: bool = False,
        several: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._format = call_format
        self._functions = {
            function.get("name"): function for tool in tools for function in [tool.get("function", tool)]
        }
        self._schemas: dict[str, ParameterSchema] = {}
        self._new_id = new_id or (lambda: random_id(call_format.id_length))
        self._template = load_template(call_format.template, call_format.name)
        self._first = re.compile(f"[{re.escape(call_format.firsts)}]") if call_format.firsts else None
        self._reader: Any = None
        self._num_fed = 0
        # Whether the reader, and the answer, are where a call may begin without a mark.
        self._reads_bare = True
        self._at_beginning = True
        # What has not become content or a call, character by character.
        self._pending: list[str] = []
        # Whitespace outside of calls, and pieces of a call, that the reader has not heard of.
        self._run: list[str] = []
        self._held: list[str] = []
        self._region: Any = None
        # Names in a call that a number stands for.
        self._replaced: list[str] = []
        # Whether the reader is in a region of its template that is neither calls nor what is left over.
        self._is_elsewhere = False
        self._value: JsonValue | None = None
        self.num_calls = 0
        # Whether nothing was said since the last call; what may be its tail; whitespace that may be left out.
        self._after_call = False
        self._tail = ""
        self._spaces: list[str] = []
        # What was said since the last of the deltas.
        self._said: list[str] = []
        self._deltas: list[ParsedDelta] = []
        self._is_required = required
        self._is_one = not several
        # Of an answer that has to be calls: what is content if there are none.
        self._left: list[str] = []

    def push(self, text: str) -> list[ParsedDelta]:
        """Add text and return what became certain."""
        at = 0
        while at < len(text):
            if self._first is not None and self._is_outside:
                found = self._first.search(text, at)
                end = len(text) if found is None else found.start()
                if end > at:
                    self._say(text[at:end])
                    at = end
                    continue
            if self._first is None and text[at].isspace() and self._is_outside:
                self._run.append(text[at])
            else:
                if self._run:
                    self._end_run()
                self._step(text[at])
            at += 1
        return self._take_deltas()

    def finish(self) -> list[ParsedDelta]:
        """Return all that was withheld; for the end of an answer."""
        self._end_run()
        if self._value is not None:
            self._refuse([])
        elif self._pending:
            self._end_reading()
        if self._after_call:
            tail, self._tail, self._after_call = self._tail, "", False
            self._put(tail)
        else:
            self._emit("".join(self._spaces))
        self._spaces = []
        if not self.num_calls:
            self._said += self._left
        self._left = []
        return self._take_deltas()

    def _take_deltas(self) -> list[ParsedDelta]:
        self._join_said()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _step(self, character: str) -> None:
        if self._is_outside and self._is_stale:
            # Where a character stands before the text, no call begins without a marker.
            reader, _ = _library()
            self._reader = reader(self._template, prefix="" if self._at_beginning else "\0")
            self._reads_bare, self._num_fed = self._at_beginning, 0
        self._pending.append(character)
        if self._value is None:
            self._held.append(character)
            if not self._can_wait(character):
                self._feed(self._take_held())
        else:
            self._value.push(character)
            self._pass_value()

    def _can_wait(self, character: str) -> bool:
        """Return whether a call goes on, so that the reader need not hear of it yet: it copies all that it was fed."""
        region = self._region
        if region is None or region.close_literals is None or region.close_literal_can_extend:
            return False
        ends = (end for end in region.close_literals if end[-1] == character)
        return not any("".join(self._pending[-len(end) :]) == end for end in ends)

    def _take_held(self) -> str:
        held, self._held = "".join(self._held), []
        if self._region is None:
            return held
        if self._region.content == "python-call-list":
            return make_calls_readable(held, self._replaced)
        return quote_keys(held) if self._region.content_args.get("string_delims") else held

    @property
    def _is_outside(self) -> bool:
        """Whether nothing is open, and nothing read may be the beginning of a mark."""
        return self._region is None and not self._pending and not self._is_elsewhere

    def _end_run(self) -> None:
        """Have the reader hear of a run of whitespace, of which it tries every place as the beginning of a mark."""
        run, self._run = "".join(self._run), []
        self._say(run[:-_MAX_SPACES])
        for character in run[-_MAX_SPACES:]:
            self._step(character)

    @property
    def _is_stale(self) -> bool:
        return self._reader is None or self._num_fed > _MAX_FED or self._reads_bare != self._at_beginning

    def _pass_value(self) -> None:
        """Hand a JSON value on that has ended. What is none ends before it began."""
        assert self._value is not None
        is_end = END_OF_VALUE in (self._region.close_literals or ())
        if self._value.is_refused and is_end:
            self._refuse(self._pending[-1:])
        elif self._value.is_refused or self._value.is_complete:
            text, self._value = self._value.take(), None
            self._feed(text + END_OF_VALUE if is_end else text)

    def _feed(self, text: str) -> None:
        self._num_fed += len(text)
        try:
            events = self._reader.feed(text)
        except _FAULTS:
            self._refuse(self._behind_close())
        else:
            self._handle_events(events)

    def _end_reading(self) -> None:
        try:
            self._handle_events(self._reader.feed(self._take_held()))
            _, events = self._reader.finalize()
        except _FAULTS:
            self._refuse([])
        else:
            self._handle_events(events, is_end=True)
        self._pending = []
        self._reader = None

    def _handle_events(self, events: Iterable[Mapping[str, Any]], *, is_end: bool = False) -> None:
        for event in events:
            kind, is_call = event["type"], event["field"] == _FIELD
            if kind != "region_chunk" and not is_call:
                self._is_elsewhere = kind == "region_open" and event["field"] != self._template.implicit
            elif kind == "region_open":
                self._open()
            elif kind == "region_close":
                is_cut = is_end and self._is_cut_off()
                self._close(None if is_cut else event["value"], [] if is_end else self._behind_close())
            elif self._value is not None:
                # The pattern that opened the call has looked ahead.
                for character in event["text"]:
                    self._value.push(character)
                self._value.take()
            elif not is_call:
                del self._pending[: len(event["text"])]
                self._say(event["text"])
        if self._value is not None:
            self._pass_value()

    def _open(self) -> None:
        self._region = self._template.fields[_FIELD]
        if self._region.content == "json" and not self._region.content_args.get("string_delims"):
            self._value = JsonValue()

    def _is_cut_off(self) -> bool:
        """Return whether an answer that ends in a call lacks the end of the call."""
        close = self._region.close_re
        if close is None or self._region.content in _SELF_CLOSING:
            return False
        return close.search("".join(self._pending)) is None

    def _behind_close(self) -> list[str]:
        """Return what was fed behind the end of a call: a pattern is certain with the character after it."""
        is_pattern = self._region is not None and self._region.close_literals is None
        return self._pending[-1:] if is_pattern else []

    def _refuse(self, behind: list[str]) -> None:
        """Make content of what cannot be read, and go on behind it with a new reader."""
        self._close(None, behind)
        behind, self._pending = self._pending, []
        self._reader = None
        for character in behind:
            self._step(character)

    def _close(self, value: Any, behind: list[str]) -> None:
        written = "".join(self._pending[: len(self._pending) - len(behind)])
        are_texts = self._region is not None and self._region.content in _OF_TEXTS
        self._region = self._value = None
        self._pending = behind
        if not behind:
            self._reader = None
        try:
            calls = [] if value is None else self._calls(value, are_texts=are_texts)
        except _FAULTS:
            calls = []
        self._replaced = []
        if not calls:
            self._say(written)
            return
        self._join_said()
        for call_id, name, arguments in calls:
            if self._is_one and self.num_calls:
                break
            self._deltas.append(CallStarted(self.num_calls, call_id or self._new_id(), name))
            self._deltas.append(ArgumentsDelta(self.num_calls, arguments))
            self.num_calls += 1
        self._spaces = []
        self._tail = ""
        self._after_call = self._at_beginning = True

    def _calls(self, value: Any, *, are_texts: bool) -> list[tuple[str, str, str]]:
        """Return ids, names and arguments of the calls that a region came to; an id may be empty."""
        if isinstance(value, list):
            return [call for item in value for call in self._calls(item, are_texts=are_texts)]
        function = value["function"]
        if isinstance(function, list):
            return self._calls([{"function": item} for item in function], are_texts=are_texts)
        if isinstance(function.get("function"), dict):
            return self._calls({"id": function.get("id"), **function}, are_texts=are_texts)
        name, arguments = function.get("name"), self._arguments(function)
        if not name and isinstance(arguments, list):
            return self._calls([{"function": item} for item in arguments], are_texts=are_texts)
        if isinstance(arguments, str):
            arguments = json.loads(arguments) if arguments.strip() else {}
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError("no call")
        if self._format.bare and name not in self._functions:
            raise ValueError("no call of a tool")
        arguments = self._read_arguments(name, restore_names(arguments, self._replaced), are_texts=are_texts)
        call_id = value.get("id") or function.get("id")
        return [(call_id if isinstance(call_id, str) else "", name, _as_json(arguments))]

    def _arguments(self, function: Mapping[str, Any]) -> Any:
        """Return the arguments of a call, by whichever name it has them, unless more stands beside its name."""
        given = next((function[name] for name in _ARGUMENTS if function.get(name) is not None), None)
        if given is None and (self._format.bare and not any(name in function for name in _ARGUMENTS)):
            raise ValueError("no call")
        if given is None and not function.keys() <= _BESIDE:
            raise ValueError("half a call")
        return {} if given is None else given

    def _read_arguments(self, name: str, arguments: dict[str, Any], *, are_texts: bool) -> dict[str, Any]:
        """Return the arguments of a function as its schema has them, if none is missing; they may all be texts."""
        known = self._get_schema(name)
        found = {}
        for key, value in arguments.items():
            key, _, said = key.partition(_SAYS_TEXT) if are_texts else (key, "", "")
            is_text = None if not are_texts or not said else said == "true"
            found[key] = _value(value, known, known.schemas.get(key, ()), are_texts=are_texts, is_text=is_text)
        if known.variants and not any(
            all(one.name in found for one in variant if one.required) for variant in known.variants
        ):
            raise ValueError("half a call")
        return found

    def _get_schema(self, name: str) -> ParameterSchema:
        """Return the schema of a function's parameters; one of any where it has none that could be used."""
        if name not in self._schemas:
            schema = self._functions.get(name, {}).get("parameters")
            try:
                known = ParameterSchema(schema if isinstance(schema, dict) else {})
                _ = known.variants
            except (ConstraintError, RecursionError):
                known = ParameterSchema({})
            self._schemas[name] = known
        return self._schemas[name]

    def _say(self, text: str) -> None:
        """Say content, but for the tail of a call."""
        if not self._after_call:
            self._put(text)
            return
        self._tail += text if self._tail else self._without_spaces(text)
        while self._tail:
            tail = next((tail for tail in self._format.tails if self._tail.startswith(tail)), None)
            if tail is None:
                break
            self._spaces = []
            self._tail = self._without_spaces(self._tail[len(tail) :])
        if self._tail and not any(tail.startswith(self._tail) for tail in self._format.tails):
            text, self._tail, self._after_call = self._tail, "", False
            self._put(text)

    def _without_spaces(self, text: str) -> str:
        """Withhold whitespace at the beginning of a text, and return the rest."""
        stripped = text.lstrip()
        self._spaces.append(text[: len(text) - len(stripped)])
        return stripped

    def _put(self, text: str) -> None:
        """Say content, but for whitespace at its end, which is left out if a call follows."""
        core = text.rstrip()
        if core:
            self._at_beginning = False
            self._emit("".join(self._spaces) + core)
            self._spaces = []
        self._spaces.append(text[len(core) :])

    def _emit(self, text: str) -> None:
        if text:
            (self._left if self._is_required else self._said).append(text)

    def _join_said(self) -> None:
        if self._said:
            self._deltas.append(ContentDelta("".join(self._said)))
            self._said = []


def _value(value: Any, known: ParameterSchema, schemas: Sequence[Any], *, are_texts: bool, is_text: bool | None) -> Any:
    """Return the value of an argument, of which its function's variants may say different things."""
    schema: Any = schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else {}
    if isinstance(value, list) and are_texts:
        # The library collects those of one name, where a template says so.
        return [parse_value(one, known, schema, is_text=is_text) if isinstance(one, str) else one for one in value]
    types = known.types(schema)
    if isinstance(value, str) and (are_texts or (types is not None and "string" not in types)):
        return parse_value(value, known, schema, is_text=is_text)
    return value


def _as_json(value: Mapping[str, Any]) -> str:
    """Return a JSON text in which what JSON lacks is no number, and what UTF-8 lacks is escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def random_id(length: int) -> str:
    """Return an id for a call that has none: of letters and digits, or in OpenAI's form for a length of 0."""
    if length == 0:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(_LETTERS) for _ in range(length))


@functools.cache
def _library() -> tuple[Any, Any]:
    """Return the class that reads answers, and the function that compiles templates for it."""
    # Takes about a second, and needs no torch.
    try:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:
        raise missing("reading tool calls", "transformers 5.24 or later", "serve", otherwise="send no tools") from None
    return ResponseParser, load_response_template


def load_template(template: Mapping[str, Any], name: str) -> Any:
    """Return a response template in Hugging Face's form, compiled; messages name whose it is.

    Raises:
        CapabilityError: the library is not installed.
        ModelFileError: the template is none.
    """
    _, load = _library()
    try:
        return load(dict(template))
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ModelFileError(
            f"the response template of {name} cannot be used: {reason}; leave it out, or correct it"
        ) from None
