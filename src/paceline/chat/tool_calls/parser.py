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

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from paceline.chat.tool_calls.base import (
    END_OF_VALUE,
    AnswerDelta,
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    ToolCallFormat,
)
from paceline.chat.tool_calls.response_parser import load_template, new_reader
from paceline.chat.tool_calls.values import JsonValue, with_escaped_lines

_FIELD: Final = "tool_calls"
# What reading a broken call may raise.
_FAULTS: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
# Content of these kinds says by itself whether it was cut off.
_SELF_CLOSING: Final = ("json", "python-call-list")
# Characters after which a parser is left for a new one: it keeps, and copies, all that it was fed.
_MOST_FED: Final = 4096
# Whitespace before a call that a model's own template may take for a part of it.
_MOST_SPACES: Final = 64
_LETTERS: Final = string.ascii_letters + string.digits


class ToolCallParser:
    """Reads content and calls out of an answer's text, from which reasoning was parted.

    A call that is broken or cut off is content, marks and all: nothing is lost, and no half of a call is made. So a
    call is handed on once it has closed. Whitespace before, between and after calls is left out.

    Args:
        call_format: of the model.
        tools: of the request, in the form of OpenAI's API. Arguments that were written as text are made what the
            tool's schema says.
        new_id: returns an id for a call that has none.

    Raises:
        CapabilityError: the library that reads calls is not installed.
        ModelFileError: the model's own response template is none.
    """

    def __init__(
        self,
        call_format: ToolCallFormat,
        tools: Sequence[Mapping[str, Any]],
        *,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._format = call_format
        self._tools = [dict(tool) for tool in tools]
        self._names = {tool.get("function", tool).get("name") for tool in self._tools}
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
        # Whether the reader is in a region of its template that is neither calls nor what is left over.
        self._is_elsewhere = False
        self._value: JsonValue | None = None
        self._num_calls = 0
        # Whether nothing was said since the last call; what may be its tail; whitespace that may be left out.
        self._after_call = False
        self._tail = ""
        self._spaces: list[str] = []
        # What was said since the last of the deltas.
        self._said: list[str] = []
        self._deltas: list[AnswerDelta] = []

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._num_calls

    def push(self, text: str) -> list[AnswerDelta]:
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
        return self._taken()

    def finish(self) -> list[AnswerDelta]:
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
        return self._taken()

    def _taken(self) -> list[AnswerDelta]:
        self._join_said()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _step(self, character: str) -> None:
        if self._is_outside and self._is_stale:
            self._reader = new_reader(self._template, self._tools, at_beginning=self._at_beginning)
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
        in_python = self._region is not None and self._region.content == "python-call-list"
        return with_escaped_lines(held) if in_python else held

    @property
    def _is_outside(self) -> bool:
        """Whether nothing is open, and nothing read may be the beginning of a mark."""
        return self._region is None and not self._pending and not self._is_elsewhere

    def _end_run(self) -> None:
        """Have the reader hear of a run of whitespace, of which it tries every place as the beginning of a mark."""
        run, self._run = "".join(self._run), []
        self._say(run[:-_MOST_SPACES])
        for character in run[-_MOST_SPACES:]:
            self._step(character)

    @property
    def _is_stale(self) -> bool:
        return self._reader is None or self._num_fed > _MOST_FED or self._reads_bare != self._at_beginning

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
            self._hear(events)

    def _end_reading(self) -> None:
        try:
            self._hear(self._reader.feed(self._take_held()))
            _, events = self._reader.finalize()
        except _FAULTS:
            self._refuse([])
        else:
            self._hear(events, is_end=True)
        self._pending = []
        self._reader = None

    def _hear(self, events: Iterable[Mapping[str, Any]], *, is_end: bool = False) -> None:
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
        self._region = self._value = None
        self._pending = behind
        if not behind:
            self._reader = None
        try:
            calls = [] if value is None else self._calls(value)
        except _FAULTS:
            calls = []
        if not calls:
            self._say(written)
            return
        self._join_said()
        for call_id, name, arguments in calls:
            self._deltas.append(CallStarted(self._num_calls, call_id or self._new_id(), name))
            self._deltas.append(ArgumentsDelta(self._num_calls, arguments))
            self._num_calls += 1
        self._spaces = []
        self._tail = ""
        self._after_call = self._at_beginning = True

    def _calls(self, value: Any) -> list[tuple[str, str, str]]:
        """Return ids, names and arguments of the calls that a region came to; an id may be empty."""
        if isinstance(value, list):
            return [call for item in value for call in self._calls(item)]
        function = value["function"]
        if isinstance(function, list):
            return self._calls([{"function": item} for item in function])
        name, arguments = function.get("name"), function.get("arguments")
        if not name and isinstance(arguments, list):
            return self._calls([{"function": item} for item in arguments])
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError("no call")
        if self._format.bare and name not in self._names:
            raise ValueError("no call of a tool")
        call_id = value.get("id") or function.get("id")
        return [(call_id if isinstance(call_id, str) else "", name, _as_json(arguments))]

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
            self._said.append(text)

    def _join_said(self) -> None:
        if self._said:
            self._deltas.append(ContentDelta("".join(self._said)))
            self._said = []


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
