"""What answers look like in the terms of each API: whole, and chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paceline.serving.generation_request import Api
from paceline.serving.response_formats.base import ResponseFormatter
from paceline.serving.response_formats.chat import ChatFormatter
from paceline.serving.response_formats.completions import CompletionFormatter
from paceline.serving.response_formats.messages import MessagesFormatter
from paceline.serving.response_formats.native import NativeFormatter
from paceline.serving.response_formats.responses import ResponsesFormatter

FORMATTERS: Final[Mapping[Api, type[ResponseFormatter]]] = {
    "native": NativeFormatter,
    "completions": CompletionFormatter,
    "chat": ChatFormatter,
    "messages": MessagesFormatter,
    "responses": ResponsesFormatter,
}
"""What writes the answers of each API."""
