r"""The formats of the best-known families, for models that bring no response template, and how each is known.

::

    hermes         <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>       Qwen 2 to 3, Hermes, Granite 4
    qwen-xml       <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>      Qwen3-Coder
    llama          {"name": "f", "parameters": {"a": 1}}                                                    Llama 3.x
    seed           the same with <seed:tool_call>                                                           Seed-OSS
    mistral-list   [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]                     to Nemo
    mistral        [TOOL_CALLS]f[ARGS]{"a": 1}; mistral-ids with [CALL_ID]abcdefghi before [ARGS]         later ones
    deepseek       <|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{"a": 1}<|tool_call_end|><|tool_calls_end|>
                   (other characters in the names; deepseek-r1 has a type before the name and a fence around the object)
    deepseek-3.2   <DSML function_calls>\n<DSML invoke name="f">\n<DSML parameter name="a" string="false">1...
                   (with other characters; deepseek-4 has tool_calls for function_calls)
    minimax        <minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n...
    gemma          <|tool_call>call:f{a:1}<tool_call|>                                                      Gemma 4
    gpt-oss        <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    glm            <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>               GLM 4.x
    lfm            <|tool_call_start|>[f(a=1)]<|tool_call_end|>                                             LFM2
    kimi           <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
                   <|tool_call_end|><|tool_calls_section_end|>                                              Kimi K2
    apriel         <tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>; nemotron with <TOOLCALL>
    granite        <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]                                      Granite 3

The patterns of openings are bounded: what may be the beginning of one is tried again with every character.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.chat.tool_calls.base import END_OF_VALUE, ArgumentStyle, ToolCallFormat, WrittenCalls
from paceline.core.vocabulary import Vocabulary

_WHOLE: Final = "{content}"
_CAPTURED: Final = {"name": "{name}", "arguments": _WHOLE}


def _template(function: Any, **region: Any) -> dict[str, Any]:
    """Return a response template of one region, in which calls stand."""
    transform = {"type": "function", "function": function}
    if "(?P<id>" in region.get("open_pattern", ""):
        transform["id"] = "{id}"
    return {
        # Only what the model writes is read.
        "start_anchor": "\0\0",
        "fields": {
            "tool_calls": {"repeats": True, "transform": transform, **region},
            "content": {"content": "text"},
        },
    }


def _json(function: Any, **opening: Any) -> dict[str, Any]:
    """Return a response template of calls that end with a JSON value."""
    return _template(function, content="json", close=END_OF_VALUE, **opening)


def _tagged(name: str, tag: str, signs: tuple[tuple[str, ...], ...], *, listed: bool) -> ToolCallFormat:
    """Return the format of objects with name and arguments between tags, one in each pair of tags or all in one."""
    start, end = f"<{tag}>", f"</{tag}>"
    written = WrittenCalls(
        start,
        '{"name": "' if listed else f'{start}\n{{"name": "',
        '", "arguments": ',
        "}" if listed else f"}}\n{end}",
        opening=f"{start}[" if listed else "",
        between=", " if listed else "\n",
        closing=f"]{end}" if listed else "",
    )
    return ToolCallFormat(name, _json(_WHOLE, open=start), signs, tails=(end,), firsts="<", written=written)


def _xml(name: str, tag: str, signs: tuple[tuple[str, ...], ...]) -> ToolCallFormat:
    """Return the format in which a function and each of its parameters has tags."""
    template = _template(
        _CAPTURED,
        open_pattern=rf"<{tag}>\s{{0,9}}<function=(?P<name>[^>\s]{{1,128}})>",
        close=[f"</function>{space}</{tag}>" for space in ("\n", "")],
        content="xml-inline",
        # A value that begins with a line break ends with one. One that does not end takes the rest: were it no match,
        # each of many would be sought to the end.
        content_args={
            "tag_pattern": (
                r"<parameter=(?P<key>[^>\n]+)>(?:\n(?P<value>.*?)\n?|(?P<value>.*?))"
                r"(?:</parameter>(?=\s*(?:<parameter=|\Z))|\Z)"
            ),
        },
    )
    written = WrittenCalls(f"<{tag}>", f"<{tag}>\n<function=", ">\n", f"</function>\n</{tag}>", "parameters")
    return ToolCallFormat(name, template, signs, firsts="<", written=written)


def _invoke(name: str, section: str, prefix: str, style: ArgumentStyle, signs: tuple[str, ...]) -> ToolCallFormat:
    """Return the format of invocations in a section, whose tags have a prefix."""
    # What says whether a value is a text is read with the name.
    says_text = r'(?:" string="(?:true|false))?' if style == "typed" else ""
    template = _template(
        _CAPTURED,
        open_pattern=rf'(?:<{section}>\s{{0,9}})?<{prefix}invoke name="(?P<name>[^"\n]{{1,128}})">',
        close=f"</{prefix}invoke>",
        content="xml-inline",
        content_args={
            "tag_pattern": (
                rf'<{prefix}parameter name="(?P<key>[^"\n]+{says_text})"[^>\n]*>(?P<value>.*?)'
                rf"(?:</{prefix}parameter>(?=\s*(?:<{prefix}parameter |\Z))|\Z)"
            ),
        },
    )
    written = WrittenCalls(
        f"<{section}>",
        f'<{prefix}invoke name="',
        '">\n',
        f"</{prefix}invoke>\n",
        style,
        opening=f"<{section}>\n",
        between="",
        closing=f"</{section}>",
    )
    return ToolCallFormat(name, template, (signs,), tails=(f"</{section}>",), firsts="<", written=written)


def _deepseek(name: str, signs: tuple[str, ...], written: WrittenCalls) -> ToolCallFormat:
    """Return the format of DeepSeek's models up to V3.1, which read like each other's."""
    pattern = (
        r"(?:<｜tool▁calls▁begin｜>\s{0,9})?<｜tool▁call▁begin｜>\s{0,9}"
        r"(?:function<｜tool▁sep｜>(?P<name>[^\s<{]{1,128})\s{0,9}```json"
        r"|(?P<name>[^\s<{]{1,128})\s{0,9}<｜tool▁sep｜>(?=\s{0,9}\{))"
    )
    tails = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    template = _json(_CAPTURED, open_pattern=pattern)
    return ToolCallFormat(name, template, (signs,), tails=tails, firsts="<", written=written)


def _mistral(name: str, signs: tuple[tuple[str, ...], ...], written: WrittenCalls) -> ToolCallFormat:
    """Return the format of Mistral's models, which read like each other's."""
    pattern = (
        r"\[TOOL_CALLS\](?P<name>[^\s\[\]{}\"]{0,128})(?:\[CALL_ID\])?(?P<id>(?<=\[CALL_ID\])\w{1,64}|)"
        r"(?:\[ARGS\](?=\s{0,9}\{)|(?<!\[TOOL_CALLS\])(?=\s{0,9}\{)|(?<=\[TOOL_CALLS\])(?=\s{0,9}\[\s{0,9}[\{\]]))"
    )
    template = _json(_CAPTURED, open_pattern=pattern)
    return ToolCallFormat(name, template, signs, firsts="[", id_length=9, written=written)


_GPT_OSS_HEADER: Final = (
    r"(?:to=functions\.(?P<name>[\w.-]{1,128}) {0,9}<\|channel\|>(?:commentary|analysis)"
    r"|<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[\w.-]{1,128}))"
    r"[^<{]{0,64}(?:<\|constrain\|>[^<{]{0,64})?<\|message\|>"
)

FORMATS: Final[tuple[ToolCallFormat, ...]] = (
    ToolCallFormat(
        "gpt-oss",
        _json(_CAPTURED, open_pattern=_GPT_OSS_HEADER),
        (("<|channel|>commentary", "functions."), ("<|channel|>analysis<|message|>", "functions.")),
        tails=("<|call|>", "<|end|>"),
        firsts="<t",
        written=WrittenCalls(
            "",
            "<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            "",
            between=None,
            lead="<|start|>assistant",
            preamble=("<|channel|>commentary<|message|>", "<|end|>"),
            plain="<|channel|>final<|message|>",
            others=tuple(
                (" to=functions.", f"<|channel|>commentary {kind}json<|message|>") for kind in ("", "<|constrain|>")
            ),
        ),
    ),
    ToolCallFormat(
        "gemma",
        _template(
            _CAPTURED,
            open_pattern=r"<\|tool_call>call:(?P<name>[\w.-]{1,128})(?=\{)",
            close="<tool_call|>",
            content="json",
            content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        ),
        (("<|tool_call>call:",),),
        firsts="<",
        written=WrittenCalls("<|tool_call>", "<|tool_call>call:", "", "<tool_call|>", "gemma", between=""),
    ),
    ToolCallFormat(
        "kimi",
        _json(
            _CAPTURED,
            open_pattern=(
                r"(?:<\|tool_calls_section_begin\|>\s{0,9})?<\|tool_call_begin\|>\s{0,9}"
                r"(?P<id>(?:functions\.)?(?P<name>[^<\s:]{1,128})(?::\d{1,9})?)\s{0,9}<\|tool_call_argument_begin\|>"
            ),
        ),
        (("<|tool_calls_section_begin|>",),),
        tails=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        firsts="<",
        written=WrittenCalls(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.",
            ":{index}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            opening="<|tool_calls_section_begin|>",
            between="",
            closing="<|tool_calls_section_end|>",
        ),
    ),
    _invoke("deepseek-3.2", "｜DSML｜function_calls", "｜DSML｜", "typed", ("｜DSML｜", "function_calls>")),
    _invoke("deepseek-4", "｜DSML｜tool_calls", "｜DSML｜", "typed", ("｜DSML｜", "tool_calls>")),
    _invoke("minimax", "minimax:tool_call", "", "named", ("<minimax:tool_call>",)),
    _deepseek(
        "deepseek-r1",
        ("<｜tool▁calls▁begin｜>", "```json"),
        WrittenCalls(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            opening="<｜tool▁calls▁begin｜>",
            closing="<｜tool▁calls▁end｜>",
        ),
    ),
    _deepseek(
        "deepseek",
        ("<｜tool▁calls▁begin｜>",),
        WrittenCalls(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            opening="<｜tool▁calls▁begin｜>",
            between="",
            closing="<｜tool▁calls▁end｜>",
        ),
    ),
    _mistral(
        "mistral-ids",
        (("[TOOL_CALLS]", "[CALL_ID]"),),
        WrittenCalls("[TOOL_CALLS]", "[TOOL_CALLS]", "[CALL_ID]{id}[ARGS]", "", between=""),
    ),
    _mistral(
        "mistral",
        (("[TOOL_CALLS]", "[ARGS]"),),
        WrittenCalls("[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", "", between=""),
    ),
    _mistral(
        "mistral-list",
        (("[TOOL_CALLS]",),),
        WrittenCalls(
            "[TOOL_CALLS]",
            '{"name": "',
            '", "arguments": ',
            ', "id": "{id}"}',
            opening="[TOOL_CALLS][",
            between=", ",
            closing="]",
        ),
    ),
    ToolCallFormat(
        "lfm",
        _template(
            {"name": "{name}", "arguments": "{arguments}"},
            open="<|tool_call_start|>",
            close="<|tool_call_end|>",
            content="python-call-list",
            transform_each=True,
        ),
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        firsts="<",
        written=WrittenCalls(
            "<|tool_call_start|>",
            "",
            "(",
            ")",
            "python",
            opening="<|tool_call_start|>[",
            between=", ",
            closing="]<|tool_call_end|>",
        ),
    ),
    ToolCallFormat(
        "glm",
        _template(
            _CAPTURED,
            open_pattern=r"<tool_call>\s{0,9}(?P<name>[^\s<{]{1,128})(?=\s{0,9}<)",
            close="</tool_call>",
            content="xml-inline",
            content_args={
                "tag_pattern": (
                    r"<arg_key>\s*(?P<key>[^<]*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)"
                    r"(?:</arg_value>(?=\s*(?:<arg_key>|\Z))|\Z)"
                )
            },
        ),
        (("<tool_call>", "<arg_key>"),),
        firsts="<",
        written=WrittenCalls("<tool_call>", "<tool_call>", "", "</tool_call>", "key-values"),
    ),
    _xml("seed", "seed:tool_call", (("<function=", "<parameter=", "<seed:tool_call>"),)),
    _xml("qwen-xml", "tool_call", (("<function=", "<parameter=", "<tool_call>"),)),
    _tagged("apriel", "tool_calls", (("<tool_calls>[", "</tool_calls>"),), listed=True),
    _tagged("nemotron", "TOOLCALL", (("<TOOLCALL>[",),), listed=True),
    _tagged("hermes", "tool_call", (("<tool_call>", '"arguments"'),), listed=False),
    ToolCallFormat(
        "granite",
        _json(_WHOLE, open="<|tool_call|>"),
        (("<|tool_call|>", "JSON list"),),
        firsts="<",
        written=WrittenCalls(
            "<|tool_call|>",
            '{"name": "',
            '", "arguments": ',
            "}",
            opening="<|tool_call|>[",
            between=", ",
            closing="]",
        ),
    ),
    ToolCallFormat(
        "llama",
        _json(
            _WHOLE,
            open_pattern=r'(?:\A|<\|python_tag\|>)\s{0,99}(?=\{\s{0,99}"(?:type|name|parameters)")',
        ),
        (('{"name": function name, "parameters":', "<|start_header_id|>"),),
        tails=(";",),
        firsts="<{",
        bare=True,
        written=WrittenCalls("", '{"name": "', '", "parameters": ', "}", between="; "),
    ),
)
"""Ways in which families of models write calls, those first whose signs say more."""

PLAIN_CALLS: Final = ToolCallFormat(
    "plain",
    _json(_WHOLE, open_pattern=r'\A\s{0,99}(?=\{\s{0,99}"name")'),
    firsts="{",
    bare=True,
    written=WrittenCalls("", '{"name": "', '", "arguments": ', "}"),
)
"""Objects and nothing else, for a model that has to call where it is not known how it would."""


def find_format(template: str) -> ToolCallFormat | None:
    """Return the format that a chat template's source speaks of; ``None`` where no family is known by it."""
    known = (one for one in FORMATS if any(all(sign in template for sign in signs) for signs in one.signs))
    return next(known, None)


def control_marks(call_format: ToolCallFormat, vocabulary: Vocabulary) -> dict[str, int]:
    """Return the control tokens among a format's marks, as ids by spelling, in the target's vocabulary.

    The ids are for :attr:`~paceline.core.params.StopRules.preserved_ids`: the text of an answer lacks other control
    tokens. Tokens that end an answer are never in its text.
    """
    texts = [*_texts(call_format.template), *call_format.tails]
    if (written := call_format.written) is not None:
        texts += [written.opening, written.before, written.middle, written.after, written.closing, written.lead]
    found = {}
    for token_id in sorted(vocabulary.control_ids - vocabulary.end_ids):
        spelling = (vocabulary.token_spelling(token_id) or b"").decode("utf-8", "replace")
        # In a pattern, what is not a letter may be escaped.
        escaped = spelling.replace("|", r"\|").replace("[", r"\[").replace("]", r"\]")
        if spelling and any(spelling in text or escaped in text for text in texts):
            found[spelling] = token_id
    return found


def _texts(value: Any) -> Sequence[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []
