"""The library that reads answers: transformers' ``ResponseParser``, imported once a request has tools."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import ModelFileError
from paceline.core.extras import missing


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
        raise ModelFileError(f"the response template of {name} is none: {reason}; leave it out, or mend it") from None


def new_reader(template: Any, *, at_beginning: bool) -> Any:
    """Return a reader of an answer, in which a call may begin without a marker if it is read from its beginning."""
    # A character before the text says that the text is not at the beginning.
    reader, _ = _library()
    return reader(template, prefix="" if at_beginning else "\0")
