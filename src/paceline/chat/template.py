"""A chat template: it turns messages into the text that the model was trained to answer.

::

    messages ──read_messages──> plain data ──render──> MarkedText ──token_ids──> token ids      (chat/prompts.py)
                                                |
                                     in a sandbox, with limits          (chat/sandbox.py, chat/template_limits.py)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.meta import find_undeclared_variables

from paceline.chat.marked_text import MarkedText
from paceline.chat.messages import Message, plain_data
from paceline.chat.sandbox import TemplateEnvironment, TemplateRefusalError
from paceline.chat.template_limits import MAX_SOURCE, LimitError, check_items, limit_rendering
from paceline.core.errors import InputError, ModelFileError, blame

KNOWN_ROLES: Final = frozenset(("system", "developer", "user", "assistant", "tool"))
"""Roles that count as the template's own text: some templates make control tokens of them, ``'<|' + role + '|>'``."""

_ANOTHER: Final = "use another (`template_file`)"
_PROBE: Final = "probe"


class ChatTemplate:
    """A compiled chat template. Immutable; any thread may render.

    Args:
        source: in jinja2's language.
        origin: where it came from, for messages, such as the model's path.
        special_tokens: variables that templates have of a tokenizer, such as ``bos_token``.
        with_tools: the template for conversations with tools, where the model has one for these.
        adds_opening: whether the tokens that the tokenizer puts before a text go before a rendered one as well, if
            the template did not write them: llama.cpp does so with GGUF files, and transformers does not with folders.
        response_template: what the model says of how its answers are read, in Hugging Face's form; nobody looked at it.

    Raises:
        ModelFileError: the source is no template, or too long.
    """

    def __init__(
        self,
        source: str,
        *,
        origin: str,
        special_tokens: Mapping[str, str] | None = None,
        with_tools: str | None = None,
        adds_opening: bool = False,
        response_template: Any = None,
    ) -> None:
        self.source = source
        self.origin = origin
        self.adds_opening = adds_opening
        self.response_template = response_template
        self.special_tokens = dict(special_tokens or {})
        self._template = self._compile(source)
        self._with_tools = None if with_tools is None else self._compile(with_tools)

    def __repr__(self) -> str:
        return f"ChatTemplate(of {self.origin}, {len(self.source)} characters)"

    @functools.cached_property
    def reads_parts(self) -> bool:
        """Whether the template can read contents that are lists of parts; others get one text of them."""
        parts = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        try:
            text = self._render_messages(self._template, _mark(parts), {"tools": None}, False)
        except (InputError, ModelFileError):
            return False
        return _PROBE in text and "'text'" not in text and '"text"' not in text

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set."""
        return frozenset(find_undeclared_variables(_build_environment().parse(self.source)))

    @property
    def reads_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        return self._with_tools is not None or not self.variables.isdisjoint(("tools", "functions"))

    @functools.cached_property
    def reads_system(self) -> bool:
        """Whether the template has a place for what the system says."""
        said = (("system", _PROBE), ("user", "Hello"))
        messages: list[Message] = [{"role": role, "content": text} for role, text in said]
        try:
            return _PROBE in self._render_messages(self._template, _mark(messages), {"tools": None}, False)
        except (InputError, ModelFileError):
            return False

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> MarkedText:
        """Return the text that messages come to.

        Args:
            messages: as :func:`~paceline.chat.messages.read_messages` returns them.
            tools: functions that the model may call, as JSON schemas in the form of OpenAI's API.
            documents: texts to answer from, for templates that know them.
            add_generation_prompt: end with the beginning of an answer.
            variables: further variables of this template, such as ``enable_thinking``. The text of those is
                somebody's, whatever their names are.

        Raises:
            InputError: the template refuses the messages, or fails on them; or they are too long, or what is given
                is not what JSON has.
            ModelFileError: the template itself does what it must not, takes too long, or makes too much.
        """
        template = self._template if tools is None or self._with_tools is None else self._with_tools
        given = [dict(message) for message in messages]
        if any(isinstance(message.get("content"), list) for message in given) and not self.reads_parts:
            given = [_join_parts(message) for message in given]
        data = {"tools": tools, "documents": documents, **variables}
        for name, value in data.items():
            with blame("template_variables" if name in variables else name):
                data[name] = plain_data(value, f"{name!r}")
        try:
            check_items((given, data))
        except LimitError as error:
            raise InputError(f"the input of the chat template {error}; give less") from None
        return self._render_messages(template, _mark(given), _mark(data), add_generation_prompt)

    def _render_messages(self, template: Any, messages: Any, data: dict[str, Any], is_open: bool) -> MarkedText:
        special = {name: MarkedText.of_template(text) for name, text in self.special_tokens.items()}
        for message in messages:
            if message.get("role") in KNOWN_ROLES:
                message["role"] = MarkedText.of_template(message["role"])
        try:
            with limit_rendering(len(messages)):
                return MarkedText(
                    template.render({**special, **data, "messages": messages, "add_generation_prompt": is_open})
                )
        except TemplateRefusalError as error:
            raise InputError(
                self._describe_fault(f"refuses these messages: {one_line(error)}", "change them")
            ) from None
        except LimitError as error:
            raise ModelFileError(self._describe_fault(str(error))) from None
        except SecurityError as error:
            raise ModelFileError(self._describe_fault(f"reaches for what is not its own: {one_line(error)}")) from None
        except Exception as error:
            # Templates run into whatever Python has to say of their messages.
            what = f"fails on these messages: {type(error).__name__}: {one_line(error)}"
            raise InputError(self._describe_fault(what, "change them")) from None

    def _compile(self, source: str) -> Any:
        if len(source) > MAX_SOURCE:
            raise ModelFileError(self._describe_fault(f"has more than {MAX_SOURCE} characters"))
        try:
            with limit_rendering():
                return _build_environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelFileError(
                self._describe_fault(f"is no template: line {error.lineno}: {one_line(error)}")
            ) from None
        except LimitError as error:
            raise ModelFileError(self._describe_fault(str(error))) from None
        except (TemplateError, RecursionError, MemoryError, ValueError, SyntaxError) as error:
            what = f"is no template: {type(error).__name__}: {one_line(error)}"
            raise ModelFileError(self._describe_fault(what)) from None

    def _describe_fault(self, what: str, way_out: str = "") -> str:
        return f"the chat template of {self.origin} {what}; {way_out + ', or ' if way_out else ''}{_ANOTHER}"


@functools.cache
def _build_environment() -> TemplateEnvironment:
    return TemplateEnvironment()


def one_line(error: BaseException) -> str:
    """Return an error's message without its line breaks, of a length for one line."""
    # Whoever wrote the template knows texts, and nothing of marks on them.
    said = (
        str(error).replace(f"{MarkedText.__module__}.{MarkedText.__name__}", "str").replace(MarkedText.__name__, "str")
    )
    words = " ".join(said.split()).rstrip(".") or type(error).__name__
    return words if len(words) <= 300 else f"{words[:300]}..."


def _mark(value: Any) -> Any:
    """Return a copy of plain data whose texts are marked as somebody's."""
    if isinstance(value, str):
        return MarkedText(str.__str__(value))
    if isinstance(value, dict):
        return {_mark(key): _mark(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item) for item in value]
    return value


def _join_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "\n".join(part["text"] for part in content)
    return message
