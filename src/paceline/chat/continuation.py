r"""Going on with the last message of a conversation, an assistant's, instead of answering it.

::

    template's      <|im_start|>user\nThe capital?<|im_end|>\n<|im_start|>assistant\n
    somebody's                                                                          The capital of Fr

What the template writes before an answer comes first, and the message as it was given comes behind it. No template
trims it there, and nothing ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.chat.marked_text import MarkedText, trailing_template_text
from paceline.chat.messages import Message
from paceline.chat.params import ChatParams
from paceline.chat.reasoning import AnswerPart, ReasoningMarkers, opens_reasoning
from paceline.core.errors import InputError
from paceline.core.numbers import shown
from paceline.core.text import TextSegment

_WAY_OUT = "or have it answered by another, with continue_final_message=False"


def is_continued(messages: Sequence[Message], params: ChatParams) -> bool:
    """Return whether the last message is to be continued; where nothing is said, an assistant's is.

    Raises:
        InputError: the last message cannot be continued.
    """
    *before, last = messages
    wanted = params.continue_final_message
    if wanted is None:
        wanted = last["role"] == "assistant" and params.add_generation_prompt is not True
    if not wanted:
        return False
    if last["role"] != "assistant":
        raise InputError(
            f"the last message is of role {last['role']!r}, and only an assistant's is continued: end with one, or "
            "leave out continue_final_message",
            field="continue_final_message",
        )
    if last.get("tool_calls"):
        raise InputError(f"the last message calls tools, so there is nothing to continue: add the results, {_WAY_OUT}")
    if before and before[-1]["role"] == "assistant":
        raise InputError(
            f"there are two assistant messages at the end, and one is continued: make one message of them, {_WAY_OUT}"
        )
    return True


def add_beginning(
    opening: MarkedText, message: Message, markers: ReasoningMarkers | None, *, origin: str
) -> tuple[MarkedText, bool]:
    """Return a prompt that ends with the beginning of a message, and whether that ends within its reasoning.

    A message with reasoning alone is continued there. One with content has its reasoning closed, if it has any or the
    template has opened one.

    Args:
        opening: what the template writes before an answer.
        message: whose ``content`` and ``reasoning_content`` are continued; parts of a content are parted by an empty
            line.
        markers: ``None`` where the model knows of no reasoning.
        origin: where the template came from, for messages.

    Raises:
        InputError: the message has reasoning, and the template knows nothing of it.
    """
    content, reasoning = _content_text(message.get("content", "")), message.get("reasoning_content", "")
    if not isinstance(reasoning, str):
        raise InputError(f"reasoning_content of the last message is {shown(reasoning)}: give a text, or leave it out")
    if markers is None:
        if reasoning:
            raise InputError(
                f"the chat template of {origin} does not support reasoning: leave out reasoning_content of the last "
                "message"
            )
        return opening + content, False
    ending = trailing_template_text(opening)
    is_open = opens_reasoning(ending, markers)
    parts: list[str] = [opening]
    if not is_open and (reasoning or (content and markers.forced and markers.closing not in ending)):
        # A template that was told not to reason may have written an empty reasoning.
        start = ending.rfind(markers.start)
        if start >= 0:
            parts = [opening[: len(opening) - len(ending) + start]]
        parts.append(MarkedText.of_template(markers.start))
        is_open = True
    parts.append(reasoning)
    if content and is_open:
        parts.append(MarkedText.of_template(markers.closing))
        is_open = False
    return MarkedText.joined([*parts, content]), is_open


def split_beginning(message: Message, markers: ReasoningMarkers | None, *, reasoning_apart: bool) -> list[AnswerPart]:
    """Return the beginning that a continued message had, as parts of the answer that goes on with it.

    Reasoning is a part of its own where answers have theirs apart, else within the content, with markers.
    """
    content, reasoning = _content_text(message.get("content", "")), message.get("reasoning_content", "")
    if reasoning and not reasoning_apart and markers is not None:
        content = f"{markers.start}{reasoning}{markers.closing + content if content else ''}"
        reasoning = ""
    parts = [AnswerPart("reasoning", TextSegment(reasoning, "")), AnswerPart("content", TextSegment(content, ""))]
    return [part for part in parts if part.segment.text]


def _content_text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n\n".join(part["text"] for part in content)
