r"""The grammar of calls, for a model that must call, or that may and must do it right.

The text is in llguidance's Lark: schemas stand in it as they are, and a control token as its id. For one tool of a
family that writes ``<tool_call>{json}</tool_call>``, where a call is required::

    args_0: %json {"type": "object", "additionalProperties": false, ...}
    call_0: "<tool_call>\n{\"name\": \"get_time\", \"arguments\": " args_0 "}\n</tool_call>"
    call: call_0
    calls: call
    start: /[ \n]{0,2}/ calls
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from paceline.chat.tool_calls.argument_rules import ArgumentRules, write_arguments
from paceline.chat.tool_calls.base import ArgumentsDelta, CallStarted, ToolCallFormat, WrittenCalls
from paceline.chat.tool_calls.lark_rules import ANY_TEXT, LarkRules, as_schema, as_string
from paceline.chat.tool_calls.parser import ToolCallParser
from paceline.constraints import Calls, JsonObject, JsonSchema
from paceline.core.errors import ConstraintError
from paceline.core.numbers import shown

_PLACEHOLDERS: Final = {"{index}": "/[0-9]{1,3}/", "{id}": "/[a-zA-Z0-9]{9}/"}
_PLACED: Final = re.compile(r"(\{index\}|\{id\})")
# Lines that models put before calls and behind them.
_GAP: Final = r"/[ \n]{0,2}/"
_NO_BARE_CALL: Final = r'/(.|\n)*/ & ~/[ \t\r\n]*\{[ \t\r\n]*"(name|type|parameters)"(.|\n)*/'
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NO_IDS: Final[Mapping[str, int]] = MappingProxyType({})


def build_calls_source(
    call_format: ToolCallFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    parallel: bool,
    control_ids: Mapping[str, int] = _NO_IDS,
    content: JsonSchema | JsonObject | None = None,
) -> Calls:
    """Return the grammar of an answer, behind its reasoning.

    Args:
        call_format: of the model.
        tools: that may be called, in the form of OpenAI's API; one alone where the request names it.
        required: whether the answer is calls and nothing else. Otherwise any text may stand before them, or alone.
        parallel: whether there may be several calls.
        control_ids: the token ids of the format's marks that are control tokens, by their spelling
            (:func:`~paceline.chat.tool_calls.formats.control_marks`). Other marks are text.
        content: what an answer without calls keeps to; ``None`` for any text. An answer is then either calls or that.

    Raises:
        ConstraintError: there is no tool, no grammar for the format, or a schema that cannot be used.
    """
    written = call_format.written
    if written is None:
        raise ConstraintError(
            f"tool_choice: how {call_format.name} writes calls is described for reading alone: use tool_choice 'auto'"
        )
    if not tools:
        raise ConstraintError("tool_choice: there are no tools to call: send one at least")
    rules = LarkRules(control_ids)
    arguments = ArgumentRules(rules)
    for number, tool in enumerate(tools):
        function = _function(tool)
        # Nobody promises that the arguments of a function that is not strict keep to all of its schema.
        strict = bool(function.get("strict"))
        try:
            names = arguments.add(f"args_{number}", written.style, function.get("parameters") or {}, strict=strict)
        except ConstraintError as error:
            raise ConstraintError(f"the parameters of function {function['name']}: {error}") from None
        except RecursionError:
            raise ConstraintError(
                f"the parameters of function {function['name']}: too many parts lead to one another in a row: write "
                "them into fewer"
            ) from None
        _check_names(call_format, written, function["name"], names)
    _add_calls(rules, "call", written, tools)
    several = parallel and written.between is not None
    again = f"({rules.marks(written.between or '')} call)*" if several else ""
    rules.add("calls", f"{rules.marks(written.opening)} call {again} {rules.marks(written.closing)}")
    said = ANY_TEXT
    if content is not None:
        strict = not isinstance(content, JsonSchema) or content.strict
        said = as_schema(json.loads(content.text), content.whitespace, strict=strict)
    if written.plain:
        _add_messages(rules, written, said, required=required)
    elif required:
        rules.add("start", f"{_GAP} calls")
    elif content is not None:
        assert written.trigger, "no mark tells calls from JSON"
        rules.add("start", f"{_GAP} (calls {_GAP} | content)")
        rules.add("content", said)
    elif not written.trigger:
        rules.add("FREE", _NO_BARE_CALL)
        rules.add("start", f"{_GAP} calls | FREE")
    else:
        _add_triggered(rules, written, tools, again=again, several=several)
    names = [_function(tool)["name"] for tool in tools]
    meanings = [(f"args_{i}", f"the parameters of function {name}") for i, name in enumerate(names)]
    return Calls(rules.text(), (*meanings, *([("content", content.name)] if content is not None else [])))


def write_call(written: WrittenCalls, name: str, arguments: Mapping[str, str]) -> str:
    """Return a call as a family writes it, of a function whose arguments are texts."""

    def filled(text: str) -> str:
        return text.replace("{index}", "0").replace("{id}", "aaaaaaaaa")

    given = write_arguments(written.style, arguments)
    head = f"{written.opening}{filled(written.before)}{name}{filled(written.middle)}"
    return f"{head}{given}{filled(written.after)}{written.closing}"


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    assert isinstance(function, Mapping)
    return function


def _check_names(call_format: ToolCallFormat, written: WrittenCalls, name: str, parameters: Sequence[str]) -> None:
    """Refuse a name that would be no name any more where a call with it is read.

    Parameters are those that stand in no JSON.
    """
    # Of others every family's way of writing is known to keep them.
    odd = [one for one in parameters if not _PLAIN_NAME.fullmatch(one)]
    if _PLAIN_NAME.fullmatch(name) and not odd:
        return
    named = {"type": "function", "function": {"name": name}}
    for one in (None, *odd):
        arguments = {} if one is None else {one: "a"}
        text = write_call(written, name, arguments)
        parser = ToolCallParser(call_format, [named])
        found = [*parser.push(text), *parser.finish()]
        names = [delta.name for delta in found if isinstance(delta, CallStarted)]
        given = [json.loads(delta.text) for delta in found if isinstance(delta, ArgumentsDelta)]
        if names != [name] or given != [arguments]:
            what = f"function {shown(name)}" if one is None else f"parameter {shown(one)} of function {name}"
            raise ConstraintError(
                f"the name of {what} cannot be read where {call_format.name} writes calls: give it a name of letters, "
                "digits, _ and -"
            )


def _add_calls(
    rules: LarkRules, rule: str, written: WrittenCalls, tools: Sequence[Mapping[str, Any]], *, skipped: str = ""
) -> None:
    """Add the rule of a call of any tool, without the text ``skipped`` that it begins with."""
    for number, tool in enumerate(tools):
        # A name is a text, whatever placeholders or marks it spells.
        name = as_string(_function(tool)["name"])
        heads = [
            f"{_fill_placeholders(rules, before.removeprefix(skipped))} {name} {_fill_placeholders(rules, behind)}"
            for before, behind in ((written.before, written.middle), *written.others)
        ]
        head = heads[0] if len(heads) == 1 else f"({' | '.join(heads)})"
        rules.add(f"{rule}_{number}", f"{head} args_{number} {_fill_placeholders(rules, written.after)}")
    rules.add(rule, " | ".join(f"{rule}_{number}" for number in range(len(tools))))


def _fill_placeholders(rules: LarkRules, text: str) -> str:
    return " ".join(_PLACEHOLDERS.get(piece) or rules.marks(piece) for piece in _PLACED.split(text))


def _add_messages(rules: LarkRules, written: WrittenCalls, said: str, *, required: bool) -> None:
    """Begin with the header of a message: of a call, of an answer, or of what is said before either."""
    lead = f"({rules.marks(written.lead)})?"
    if required:
        rules.add("start", f"{lead} calls")
        return
    rules.add("content", said)
    last = f"(calls | {rules.marks(written.plain)} content)"
    if written.preamble is None:
        rules.add("start", f"{lead} {last}")
        return
    before, behind = written.preamble
    rules.add_until("said", behind)
    rules.add("start", f"{lead} ({rules.marks(before)} said {lead})? {last}")


def _add_triggered(
    rules: LarkRules, written: WrittenCalls, tools: Sequence[Mapping[str, Any]], *, again: str, several: bool
) -> None:
    """Begin with any text. Where the trigger stands in it, a call has begun."""
    rules.add_until("until_call", written.trigger)
    if written.opening:
        begun = f"{rules.marks(written.opening.removeprefix(written.trigger))} call {again}"
    else:
        # Text between calls is text before the next.
        _add_calls(rules, "begun", written, tools, skipped=written.trigger)
        begun = "begun"
    rules.add("section", f"until_call {begun} {rules.marks(written.closing)}")
    rules.add("FREE", ANY_TEXT)
    rules.add("start", "section* FREE" if several else f"section {_GAP} | FREE")
