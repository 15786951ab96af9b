"""OpenAI's Responses: an answer is a list of items, and every event of its stream has a name and a number."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Final

from paceline.chat.assembler import AnswerBlock, TokenEvent
from paceline.chat.reasoning import AnswerPart, PartKind
from paceline.chat.tool_calls.base import CallStarted
from paceline.core.logprobs import TokenLogprob
from paceline.serving.answering import Answer, Choice, Ended, Event, Progress, Round
from paceline.serving.conversations import encrypt_reasoning
from paceline.serving.errors import status_and_body
from paceline.serving.json_output import PLACE, Listed
from paceline.serving.response_formats.base import ResponseFormatter
from paceline.serving.response_formats.native import NativeFormatter
from paceline.serving.responses_request import ResponseFacts, SentTool

_DELTAS: Final[dict[PartKind, str]] = {"content": "response.output_text", "reasoning": "response.reasoning_text"}
"""How events that tell of a text are called."""

_ERROR_CODES: Final = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""OpenAI's words for why an answer failed; for all else ``server_error``."""


class ResponsesFormatter(ResponseFormatter):
    """OpenAI's Responses API.

    An item is open in a stream until something else is said. What it came to is known to the assembler, which has the
    same items in the same order.
    """

    id_prefix = "resp_"
    names_events = True
    repeats_answer = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        assert self.request.conversation is not None
        self._facts: ResponseFacts = self.request.conversation.own
        self._num_items = 0
        self._open: AnswerBlock | None = None
        self._delta_frame: list[bytes] | None = None

    def whole(self) -> Any:
        choice = self.answer.choices[0]
        items = self._items(choice)
        found = {**self._ended(choice, items), **self.beside(choice)}
        if self.request.num_prompt_logprobs is not None:
            found["prompt_logprobs"] = self.prompt_probabilities(choice)
        if self.request.verbose:
            found["__verbose"] = NativeFormatter(self.answer).finished(choice)
        return found

    def opening(self) -> list[dict[str, Any]]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress")) for kind in kinds]

    def chunks(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, Ended):
            return self._end(choice)
        if isinstance(event, Progress):
            return [
                self._event(
                    "response.in_progress",
                    response=self._response("in_progress"),
                    prompt_progress=self.progress(choice, event),
                    **self._timings(choice, event),
                )
            ]
        if self.request.reads_only:
            return []
        if isinstance(event, Round):
            return [self._event("paceline.round", round=self.round(event))]
        return self._token_chunks(choice, event)

    def failed(self, error: Exception) -> list[dict[str, Any]]:
        status, body = status_and_body(error)
        said = body["error"]
        code = _ERROR_CODES.get(status, "server_error")
        begun = self.answer.choices[0].assembler.blocks[: self._num_items]
        output = [
            self._item(number, item, "incomplete" if item is self._open else "completed")
            for number, item in enumerate(begun)
        ]
        response = self._response("failed", output, error={"code": code, "message": said["message"]})
        return [
            self._event("error", code=said["type"], message=said["message"], param=said["param"]),
            self._event("response.failed", response=response),
        ]

    def _token_chunks(self, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        ends_in = None
        for part in event.parts:
            if isinstance(part, CallStarted) or (isinstance(part, AnswerPart) and self._kind != part.kind):
                found += self._close(choice)
                found += self._begin(choice.assembler.blocks[self._num_items])
            if isinstance(part, AnswerPart):
                found.append(self._delta(part.kind, part.segment.text))
                ends_in = found[-1] if part.kind == "content" else ends_in
            elif not isinstance(part, CallStarted) and not self._is_custom:
                found.append(self._about_item("response.function_call_arguments.delta", delta=part.text))
        if event.logprobs and ends_in is not None:
            ends_in["logprobs"] = self.probabilities(event.logprobs)
        if found and event.sources:
            found[-1]["sources"] = list(event.sources)
        if found:
            found[-1] |= self._timings(choice, event)
        return found

    def _timings(self, choice: Choice, event: Event) -> dict[str, Any]:
        return {"timings": self.running_timings(choice, event)} if self.request.timings_per_token else {}

    # Items

    @property
    def _kind(self) -> str:
        """What is open; empty for nothing."""
        return "" if self._open is None else self._open.kind

    @property
    def _is_custom(self) -> bool:
        return self._open is not None and self._open.kind == "call" and self._tool(self._open).is_custom

    def _tool(self, call: AnswerBlock) -> SentTool:
        return self._facts.tools.get(call.name, SentTool(call.name))

    def _items(self, choice: Choice) -> Sequence[AnswerBlock]:
        """Return all that was said; a message that says nothing where that is all."""
        if self.request.reads_only:
            return []
        return choice.assembler.blocks or [AnswerBlock("content")]

    def _begin(self, item: AnswerBlock) -> list[dict[str, Any]]:
        self._open, self._delta_frame = item, None
        self._num_items += 1
        added = self._item(self._num_items - 1, AnswerBlock(item.kind, call_id=item.call_id, name=item.name))
        added["status"] = "in_progress"
        if item.kind == "call":
            return [self._event("response.output_item.added", output_index=self._num_items - 1, item=added)]
        added["content"] = []
        return [
            self._event("response.output_item.added", output_index=self._num_items - 1, item=added),
            self._about_item("response.content_part.added", content_index=0, part=self._part(AnswerBlock(item.kind))),
        ]

    def _close(self, choice: Choice, status: str = "completed") -> list[dict[str, Any]]:
        """Return what tells that the open item is over, if there is one."""
        item = self._open
        if item is None:
            return []
        whole = self._item(self._num_items - 1, item, status)
        found: list[dict[str, Any]] = []
        if item.kind != "call":
            about = {"logprobs": self._logprobs(item)} if item.kind == "content" else {}
            kind = f"{_DELTAS[item.kind]}.done"
            found.append(self._about_item(kind, content_index=0, text=item.text, **about))
            found.append(self._about_item("response.content_part.done", content_index=0, part=self._part(item)))
        elif self._tool(item).is_custom:
            said = whole["input"]
            found.append(self._about_item("response.custom_tool_call_input.delta", delta=said))
            found.append(self._about_item("response.custom_tool_call_input.done", input=said))
        else:
            about = {"name": whole["name"], "arguments": whole["arguments"]}
            found.append(self._about_item("response.function_call_arguments.done", **about))
        found.append(self._event("response.output_item.done", output_index=self._num_items - 1, item=whole))
        self._open = None
        return found

    def _item(self, number: int, item: AnswerBlock, status: str = "completed") -> dict[str, Any]:
        """Return an item of the answer."""
        name = self._item_id(number, item)
        found: dict[str, Any]
        if item.kind == "reasoning":
            found = {"id": name, "type": "reasoning", "summary": [], "content": [self._part(item)]}
            if self._facts.encrypts and item.texts:
                found["encrypted_content"] = encrypt_reasoning(item.text)
            return {**found, "status": status}
        if item.kind == "content":
            found = {"id": name, "type": "message", "status": status, "role": "assistant"}
            return {**found, "content": [self._part(item)]}
        tool = self._tool(item)
        kind, said = ("custom_tool_call", "input") if tool.is_custom else ("function_call", "arguments")
        found = {"id": name, "type": kind, "status": status, "call_id": item.call_id, "name": tool.name}
        found[said] = _input_of(item.text) if tool.is_custom else item.text
        return {**found, "namespace": tool.namespace} if tool.namespace else found

    def _item_id(self, number: int, item: AnswerBlock) -> str:
        prefix = {"content": "msg", "reasoning": "rs", "call": "ctc" if self._tool(item).is_custom else "fc"}[item.kind]
        return f"{prefix}_{self.answer.id.removeprefix(self.id_prefix)}_{number}"

    def _part(self, item: AnswerBlock) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": self._logprobs(item)}

    def _logprobs(self, item: AnswerBlock) -> Listed | list[TokenLogprob]:
        return self.probabilities(item.logprobs) if item.logprobs else []

    # Events

    def _event(self, kind: str, **about: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **about}

    def _about_item(self, kind: str, **about: Any) -> dict[str, Any]:
        """Return an event of the item that is open."""
        assert self._open is not None
        number = self._num_items - 1
        return self._event(kind, item_id=self._item_id(number, self._open), output_index=number, **about)

    def _delta(self, kind: PartKind, text: str) -> dict[str, Any]:
        about: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
        return self._about_item(f"{_DELTAS[kind]}.delta", content_index=0, delta=text, **about)

    def _texts(self, event: TokenEvent) -> list[tuple[PartKind, str]] | None:
        kind = None if self._open is None else self._open.kind
        texts: list[tuple[PartKind, str]] = []
        for part in event.parts:
            if kind == "call" or part.kind != kind:
                return None
            texts.append((kind, part.segment.text))
        return texts

    def _framed(self, choice: Choice, event: TokenEvent) -> bytes | None:
        number = self._number
        framed = super()._framed(choice, event)
        if framed is None:
            self._number = number
        return framed

    def _frame(self, choice: Choice, kind: PartKind) -> list[bytes] | None:
        if self._delta_frame is None:
            number = self._number
            delta = self._delta(kind, PLACE)
            self._number = number
            self._delta_frame = self.as_events([{**delta, "sequence_number": PLACE}]).split(f'"{PLACE}"'.encode())
        return self._delta_frame

    # The response

    def _end(self, choice: Choice) -> list[dict[str, Any]]:
        items = self._items(choice)
        status = self._status(choice)
        found = self._begin(items[0]) if items and not self._num_items else []
        found += self._close(choice, status)
        response = {**self._ended(choice, items), **self.beside(choice)}
        if self.request.verbose:
            response["__verbose"] = NativeFormatter(self.answer).finished(choice, in_stream=True)
        # llama-server ends every stream in this way, and has its times beside the response.
        asks_llama_server = self.request.timings_per_token or self.request.return_progress
        kind = "response.completed" if asks_llama_server else f"response.{status}"
        return [*found, self._event(kind, response=response, timings=response["timings"])]

    def _status(self, choice: Choice) -> str:
        return "incomplete" if choice.is_cut_off else "completed"

    def _ended(self, choice: Choice, items: Sequence[AnswerBlock]) -> dict[str, Any]:
        status = self._status(choice)
        output = [
            self._item(number, item, status if number == len(items) - 1 else "completed")
            for number, item in enumerate(items)
        ]
        completion = self.num_output(choice)
        usage = {
            "input_tokens": choice.num_prompt,
            "input_tokens_details": {"cached_tokens": choice.cached, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": self.output_details("reasoning_tokens"),
            "total_tokens": choice.num_prompt + completion,
        }
        if status == "completed":
            return self._response(status, output, completed_at=int(time.time()), usage=usage)
        return self._response(status, output, incomplete_details={"reason": "max_output_tokens"}, usage=usage)

    def _response(self, status: str, output: Sequence[dict[str, Any]] = (), **about: Any) -> dict[str, Any]:
        sampling = self.request.options.params
        given = self._facts.repeated
        return {
            "id": self.answer.id,
            "object": "response",
            "created_at": self.answer.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.answer.served.id,
            "output": list(output),
            **given,
            "metadata": given["metadata"] or {},
            "parallel_tool_calls": given["parallel_tool_calls"] is not False,
            "reasoning": given["reasoning"]
            if isinstance(given["reasoning"], dict)
            else {"effort": None, "summary": None},
            "text": {"format": {"type": "text"}, **(given["text"] or {})},
            "tool_choice": given["tool_choice"] or "auto",
            "top_logprobs": given["top_logprobs"] or 0,
            "truncation": given["truncation"] or "disabled",
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "usage": None,
            **about,
        }


def _input_of(arguments: str) -> str:
    """Return the text that a custom tool is called with: of a function that stands for it an argument."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
