"""Calls of tools in a finished answer, as a message of OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.chat.tool_calls.base import CallStarted, ContentDelta, ToolCallFormat
from paceline.chat.tool_calls.formats import control_marks
from paceline.chat.tool_calls.parser import ToolCallParser, random_id
from paceline.core.vocabulary import Vocabulary

if TYPE_CHECKING:
    from paceline.options import GenerateOptions


@dataclass(frozen=True, slots=True)
class CallReader:
    """Reads the calls of one answer, however often it is asked: a call that has no id gets one, and keeps it.

    Attributes:
        call_format: of the model.
        tools: of the request, in the form of OpenAI's API.
    """

    call_format: ToolCallFormat
    tools: Sequence[Mapping[str, Any]]
    _ids: list[str] = field(default_factory=list, repr=False, compare=False)

    def read(self, content: str) -> dict[str, Any]:
        """Return the fields of a message that a content comes to: ``content``, and ``tool_calls`` if there are any.

        As in OpenAI's API, the content of calls alone is ``None``. A call that is broken or cut off is content.
        """
        given = self._iter_ids()
        parser = ToolCallParser(self.call_format, self.tools, new_id=lambda: next(given))
        said = ""
        calls: list[dict[str, Any]] = []
        for delta in (*parser.push(content), *parser.finish()):
            if isinstance(delta, ContentDelta):
                said += delta.text
            elif isinstance(delta, CallStarted):
                function = {"name": delta.name, "arguments": ""}
                calls.append({"id": delta.call_id, "type": "function", "function": function})
            else:
                calls[delta.index]["function"]["arguments"] += delta.text
        return {"content": said or None, "tool_calls": calls} if calls else {"content": said}

    def _iter_ids(self) -> Iterator[str]:
        yield from self._ids
        while True:
            self._ids.append(random_id(self.call_format.id_length))
            yield self._ids[-1]


def preserve_call_marks(
    options: GenerateOptions, call_format: ToolCallFormat, vocabulary: Vocabulary
) -> GenerateOptions:
    """Return options of a request whose text has the control tokens that are marks of calls."""
    marks = control_marks(call_format, vocabulary).values()
    preserved = (*(options.get("preserved_ids") or ()), *marks)
    return {**options, "preserved_ids": tuple(dict.fromkeys(preserved))}
