"""What tool calls are made of: the deltas that an answer comes to, and the format that a family writes calls in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from paceline.core.text import TextSegment

ArgumentStyle: TypeAlias = Literal["json", "parameters", "named", "typed", "key-values", "gemma", "python"]
"""How arguments are written.

=============== ===================================================================================
``json``        an object
``parameters``  ``<parameter=key>value</parameter>``, the value mostly in lines of its own
``named``       ``<parameter name="key">value</parameter>``
``typed``       ``<｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter>``
``key-values``  ``<arg_key>key</arg_key><arg_value>value</arg_value>``
``gemma``       an object with bare keys and strings between ``<|"|>``
``python``      ``key=value`` with commas between
=============== ===================================================================================
"""

END_OF_VALUE = "\x1e"
"""Stands in a response template where the end of a JSON value ends a call: a character that JSON's strings lack."""


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of what an answer says, to be put behind what came before, calls or not."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of a tool in a streamed answer; its arguments come next.

    Attributes:
        kind: ``"call"``.
        index: of the call in the answer, from 0.
        call_id: what the tool's result will name.
        name: of the function.
        source: where the token that completed it came from.
    """

    kind: ClassVar[Literal["call"]] = "call"
    index: int
    call_id: str
    name: str
    source: str = ""

    @property
    def segment(self) -> TextSegment:
        """No text: a loop over all parts of an answer may ask each for its own."""
        return TextSegment("", self.source)


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments in a streamed answer.

    Attributes:
        kind: ``"arguments"``.
        index: of the call in the answer, from 0.
        text: a piece of a JSON object's text.
        source: where the token that completed it came from.
    """

    kind: ClassVar[Literal["arguments"]] = "arguments"
    index: int
    text: str
    source: str = ""

    @property
    def segment(self) -> TextSegment:
        """The text with its source, as in :class:`~paceline.AnswerPart`."""
        return TextSegment(self.text, self.source)


ParsedDelta: TypeAlias = ContentDelta | CallStarted | ArgumentsDelta
"""What a piece of an answer's text came to."""


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    r"""How a family writes calls, for a grammar that forces them.

    ::

        opening  before name middle arguments after  between  before name middle arguments after  closing

    Attributes:
        trigger: what shows that a call begins, and does not stand in other text; empty where only the beginning of an
            answer shows.
        before: stands before the name; begins with the trigger, unless ``opening`` does.
        middle: stands between the name and the arguments.
        after: stands behind the arguments.
        style: how the arguments are written.
        opening: stands before the first call.
        between: stands between two calls; ``None`` where an answer has one call at most.
        closing: stands behind the last call.
        lead: may stand before all, such as the beginning of a message's header.
        preamble: stands before and behind what may be said before calls, where an answer is made of messages.
        plain: what an answer without a call begins with, where an answer is made of messages.
        others: further pairs of what stands before a name and behind it.

    In these, ``{index}`` stands for the number of the call, and ``{id}`` for an id of nine letters and digits.
    """

    trigger: str
    before: str
    middle: str
    after: str
    style: ArgumentStyle = "json"
    opening: str = ""
    between: str | None = "\n"
    closing: str = ""
    lead: str = ""
    preamble: tuple[str, str] | None = None
    plain: str = ""
    others: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How the models of a family write calls.

    Attributes:
        name: of the family.
        template: describes an answer as Hugging Face's ``response_template`` does, reasoning left out.
        signs: ways to know the family's chat templates: each has texts that are all in the source.
        tails: what follows a call and belongs to it; with whitespace before it.
        firsts: characters that the template's openings begin with; empty where these are not known.
        bare: whether nothing marks a call: then one of an unknown function is content.
        id_length: of ids made for calls that have none, letters and digits; 0 for OpenAI's form.
        written: for a grammar; ``None`` where there is none.
    """

    name: str
    template: Mapping[str, Any]
    signs: tuple[tuple[str, ...], ...] = ()
    tails: tuple[str, ...] = ()
    firsts: str = ""
    bare: bool = False
    id_length: int = 0
    written: WrittenCalls | None = None


@dataclass(frozen=True, slots=True)
class ExpectedCalls:
    """The calls that an answer may have, to be read out of its text.

    Attributes:
        call_format: how the model writes them.
        tools: that may be called, in the form of OpenAI's API.
        required: whether the answer has to be calls.
        several: whether there may be several.
    """

    call_format: ToolCallFormat
    tools: Sequence[Mapping[str, Any]]
    required: bool = False
    several: bool = True
