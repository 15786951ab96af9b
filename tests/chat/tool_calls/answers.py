"""Answers as the models of each family write them, with what they come to, their templates, and tools to call."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.chat.reasoning import KNOWN_MARKERS, AnswerPart, ReasoningMarkers, ReasoningSplitter
from paceline.chat.tool_calls.base import ArgumentsDelta, CallStarted, ContentDelta, ParsedDelta
from paceline.chat.tool_calls.formats import FORMATS, PLAIN_CALLS
from paceline.chat.tool_calls.parser import ToolCallParser
from paceline.core.text import TextSegment

THINK: Final = ReasoningMarkers("<think>", "</think>")
OF_MISTRAL: Final = ReasoningMarkers("[THINK]", "[/THINK]")
OF_GPT_OSS: Final = KNOWN_MARKERS[0].markers
OF_GEMMA: Final = KNOWN_MARKERS[1].markers

Call = tuple[str, dict[str, Any]]


def tool(name: str, properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "...", "parameters": parameters}}


TOOLS: Final = [
    tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, ["city"]),
    tool(
        "write_file",
        {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "mode": {"enum": ["create", "append"]},
            "options": {
                "type": "object",
                "properties": {"tags": {"type": "array", "items": {"type": "string"}}},
                "additionalProperties": True,
            },
            "ratio": {"type": "number"},
            "is_draft": {"type": "boolean"},
        },
        ["path", "text"],
    ),
    tool("get_time", {}),
]

WEATHER: Final[Call] = ("get_weather", {"city": "Zürich 🌧", "days": 3})
# Beginnings of marks, braces and quotes in strings, nested values.
FILE: Final[Call] = (
    "write_file",
    {
        "path": "a/b<tool.txt",
        "text": 'x = {"a": [1, 2}\nif a < b and </ c: <| [TOOL <tool_cal "quoted" \\ 日本',
        "options": {"tags": ["<", "}", "]"], "under": {"empty": {}, "n": None}},
        "ratio": 0.5,
        "is_draft": True,
    },
)
TIME: Final[Call] = ("get_time", {})


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _in_lines(call: Call, line: str) -> str:
    """Return arguments each in a line, texts as they are and all else as JSON."""
    return "".join(
        line.format(key, value if isinstance(value, str) else dumped(value)) for key, value in call[1].items()
    )


def of_hermes(call: Call) -> str:
    return f"<tool_call>\n{of_list(call)}\n</tool_call>"


def of_list(call: Call) -> str:
    return f'{{"name": "{call[0]}", "arguments": {dumped(call[1])}}}'


def of_qwen_xml(call: Call) -> str:
    lines = _in_lines(call, "<parameter={}>\n{}\n</parameter>\n")
    return f"<tool_call>\n<function={call[0]}>\n{lines}</function>\n</tool_call>"


def of_seed(call: Call) -> str:
    lines = _in_lines(call, "<parameter={}>{}</parameter>\n")
    return f"<seed:tool_call>\n<function={call[0]}>\n{lines}</function>\n</seed:tool_call>"


def of_invoke(call: Call) -> str:
    lines = _in_lines(call, '<parameter name="{}">{}</parameter>\n')
    return f'<invoke name="{call[0]}">\n{lines}</invoke>\n'


def of_dsml(call: Call) -> str:
    lines = "".join(
        _in_lines(
            ("", {key: value}),
            f'<｜DSML｜parameter name="{{}}" string="{json.dumps(isinstance(value, str))}">{{}}</｜DSML｜parameter>\n',
        )
        for key, value in call[1].items()
    )
    return f'<｜DSML｜invoke name="{call[0]}">\n{lines}</｜DSML｜invoke>\n'


def of_glm(call: Call) -> str:
    lines = _in_lines(call, "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n")
    return f"<tool_call>{call[0]}\n{lines}</tool_call>"


def of_llama(call: Call) -> str:
    return f'{{"name": "{call[0]}", "parameters": {dumped(call[1])}}}'


def of_deepseek_r1(call: Call) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n{dumped(call[1])}\n```<｜tool▁call▁end｜>"


def of_deepseek(call: Call) -> str:
    return f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{dumped(call[1])}<｜tool▁call▁end｜>"


def of_gemma(call: Call) -> str:
    return f"<|tool_call>call:{call[0]}{_gemma_value(call[1])}<tool_call|>"


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(item)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(item) for item in value) + "]"
    return json.dumps(value)


def of_gpt_oss(call: Call) -> str:
    return f"<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>{dumped(call[1])}<|call|>"


def of_gpt_oss_by_role(call: Call) -> str:
    return f" to=functions.{call[0]}<|channel|>commentary json<|message|>{dumped(call[1])}<|call|>"


def of_lfm(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def _of_mistral(call: Call, call_id: str = "") -> str:
    return f"[TOOL_CALLS]{call[0]}{call_id}[ARGS]{dumped(call[1])}"


def _of_kimi(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumped(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )


def _several(
    write: Callable[[Call], str], before: str = "", between: str = "\n", behind: str = ""
) -> Callable[[Sequence[Call]], str]:
    return lambda calls: f"{before}{between.join(map(write, calls))}{behind}"


WRITERS: Final[dict[str, Callable[[Sequence[Call]], str]]] = {
    "hermes": _several(of_hermes),
    "qwen-xml": _several(of_qwen_xml),
    "seed": _several(of_seed),
    "glm": _several(of_glm),
    "plain": _several(of_list),
    "llama": _several(of_llama, between="; "),
    "mistral": _several(_of_mistral, between=""),
    "mistral-ids": _several(lambda call: _of_mistral(call, "[CALL_ID]abcdefgh1"), between=""),
    "mistral-list": _several(lambda call: f'{of_list(call)[:-1]}, "id": "abcdefgh1"}}', "[TOOL_CALLS][", ", ", "]"),
    "deepseek": _several(of_deepseek, "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "deepseek-r1": _several(of_deepseek_r1, "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    "deepseek-3.2": _several(of_dsml, "<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>"),
    "deepseek-4": _several(of_dsml, "<｜DSML｜tool_calls>\n", "", "</｜DSML｜tool_calls>"),
    "minimax": _several(of_invoke, "<minimax:tool_call>\n", "", "</minimax:tool_call>"),
    "gemma": _several(of_gemma, between=""),
    "gpt-oss": lambda calls: "".join(map(of_gpt_oss, calls)).removesuffix("<|call|>"),
    "lfm": _several(of_lfm, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "kimi": lambda calls: f"<|tool_calls_section_begin|>{_of_kimi(calls)}<|tool_calls_section_end|>",
    "granite": _several(of_list, "<|tool_call|>[", ", ", "]"),
    "apriel": _several(of_list, "<tool_calls>[", ", ", "]</tool_calls>"),
    "nemotron": _several(of_list, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
}
"""Writes calls and nothing else, by the family."""


def written(family: str, *calls: Call) -> str:
    """Return calls as a family writes them."""
    return WRITERS[family](calls)


@dataclass(frozen=True)
class Answer:
    """An answer, and what it comes to."""

    family: str
    text: str
    calls: tuple[Call, ...]
    content: str
    reasoning: str | None = None
    markers: ReasoningMarkers | None = None
    ids: tuple[str, ...] = ()


def _in_turn(family: str, write: Callable[[Call], str], between: str = "\n", **given: Any) -> Answer:
    """Return an answer that reasons, says something, and makes three calls."""
    text = f"<think>\nWhich < tool?\n</think>\n\nLet me <see>.\n{between.join(map(write, (WEATHER, FILE, TIME)))}\n"
    return Answer(family, text, (WEATHER, FILE, TIME), "Let me <see>.", "Which < tool?", **{"markers": THINK, **given})


_ALL: Final = (WEATHER, FILE, TIME)
_AFTER: Final = "\nDone, I < hope."
_SAID: Final = "See:\nDone, I < hope."


def _told(family: str, calls: str | None = None) -> Answer:
    """Return an answer that says something before three calls and behind them."""
    return Answer(family, f"See:\n{written(family, *_ALL) if calls is None else calls}{_AFTER}", _ALL, _SAID)


ANSWERS: Final = (
    _in_turn("hermes", of_hermes),
    _told("hermes", "".join(map(of_hermes, _ALL))),
    _in_turn("qwen-xml", of_qwen_xml),
    _told("qwen-xml"),
    _in_turn("seed", of_seed),
    _told("seed"),
    _in_turn("glm", of_glm),
    _told("glm"),
    Answer("llama", written("llama", *_ALL), _ALL, ""),
    Answer("llama", "<|python_tag|>" + of_llama(FILE) + "\n", (FILE,), ""),
    Answer("llama", f"<think>Hm.</think>\n\n{of_llama(WEATHER)}{_AFTER}", (WEATHER,), _AFTER, "Hm.", markers=THINK),
    Answer(
        "mistral",
        "[THINK]Which [tool]?[/THINK]See:"
        + "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in _ALL),
        _ALL,
        "See:",
        "Which [tool]?",
        OF_MISTRAL,
    ),
    Answer(
        "mistral",
        f"[TOOL_CALLS]get_time[CALL_ID]abcdefg12[ARGS]{{}}[TOOL_CALLS]get_weather{json.dumps(WEATHER[1])}{_AFTER}",
        (TIME, WEATHER),
        _AFTER,
        ids=("abcdefg12", ""),
    ),
    Answer("mistral-ids", "See:" + written("mistral-ids", *_ALL), _ALL, "See:", ids=3 * ("abcdefgh1",)),
    Answer(
        "mistral-list", f"See [a]:\n[TOOL_CALLS] [{', '.join(map(of_list, _ALL))}]{_AFTER}", _ALL, f"See [a]:{_AFTER}"
    ),
    Answer(
        "mistral-list",
        '[TOOL_CALLS][{"name": "get_time", "arguments": {}, "id": "abcdefg12"}]',
        (TIME,),
        "",
        ids=("abcdefg12",),
    ),
    _in_turn("deepseek", of_deepseek_r1),
    _in_turn("deepseek-r1", of_deepseek_r1),
    _told("deepseek-3.2"),
    _told("deepseek-4"),
    _in_turn("minimax", of_invoke, ""),
    _told("minimax"),
    _told("deepseek"),
    _told("deepseek", written("deepseek-r1", *_ALL)),
    Answer(
        "gemma",
        f"<|channel>thought\nWhich <|?<channel|>See:{''.join(map(of_gemma, _ALL))}{_AFTER}",
        _ALL,
        _SAID,
        "Which <|?",
        OF_GEMMA,
    ),
    Answer(
        "gpt-oss",
        "<|channel|>analysis<|message|>Which <|tool?<|end|><|start|>assistant<|channel|>commentary<|message|>"
        f"See to it:<|end|><|start|>assistant{of_gpt_oss(WEATHER)}<|start|>assistant{of_gpt_oss(FILE)}"
        f"<|start|>assistant{of_gpt_oss_by_role(TIME)}",
        _ALL,
        "See to it:",
        "Which <|tool?",
        OF_GPT_OSS,
    ),
    Answer(
        "gpt-oss",
        f"{of_gpt_oss_by_role(FILE)}<|start|>assistant{of_gpt_oss(WEATHER)}",
        (FILE, WEATHER),
        "",
        markers=OF_GPT_OSS,
    ),
    _told("lfm"),
    Answer(
        "lfm",
        f"<think>Hm.</think>{written('lfm', TIME)}{written('lfm', FILE)}",
        (TIME, FILE),
        "",
        "Hm.",
        THINK,
    ),
    Answer(
        "kimi",
        f"<think>Which?</think>See:\n{written('kimi', *_ALL)}{_AFTER}",
        _ALL,
        _SAID,
        "Which?",
        THINK,
        ("functions.get_weather:0", "functions.write_file:1", "functions.get_time:2"),
    ),
    _told("granite"),
    _told("apriel"),
    _told("nemotron"),
    Answer("plain", "".join(map(of_list, _ALL)), _ALL, ""),
    Answer("plain", f"<think>Hm.</think>\n{of_list(FILE)}\n{of_list(TIME)}", (FILE, TIME), "", "Hm.", markers=THINK),
    Answer("plain", f"{of_list(WEATHER)}{_AFTER}", (WEATHER,), _AFTER),
)

BY_NAME: Final = {one.name: one for one in (*FORMATS, PLAIN_CALLS)}


@dataclass
class Message:
    """What deltas add up to."""

    content: str
    reasoning: str | None
    calls: list[tuple[str, str, str]]

    @property
    def called(self) -> list[Call]:
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]


def parser_of(family: str, tools: Sequence[dict[str, Any]] = TOOLS, *, required: bool = False) -> ToolCallParser:
    """Return a parser whose ids are numbered."""
    numbers = itertools.count()
    return ToolCallParser(BY_NAME[family], tools, required=required, new_id=lambda: f"made_{next(numbers)}")


def added(deltas: Sequence[ParsedDelta]) -> Message:
    """Return the message that deltas come to."""
    message = Message("", None, [])
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            assert delta.text
            message.content += delta.text
        elif isinstance(delta, CallStarted):
            assert delta.index == len(message.calls)
            message.calls.append((delta.call_id, delta.name, ""))
        else:
            assert isinstance(delta, ArgumentsDelta)
            call_id, name, arguments = message.calls[delta.index]
            message.calls[delta.index] = (call_id, name, arguments + delta.text)
    return message


def read(answer: Answer, pieces: Sequence[str], tools: Sequence[dict[str, Any]] = TOOLS) -> Message:
    """Return what an answer comes to if it arrives in pieces."""
    splitter, parser = ReasoningSplitter(answer.markers), parser_of(answer.family, tools)
    reasoning: list[str] = []
    deltas: list[ParsedDelta] = []

    def part(parts: Sequence[AnswerPart]) -> None:
        for one in parts:
            if one.kind == "reasoning":
                reasoning.append(one.segment.text)
            else:
                deltas.extend(parser.push(one.segment.text))

    for piece in pieces:
        part(splitter.push([TextSegment(piece, "")]))
    part(splitter.finish())
    deltas += parser.finish()
    message = added(deltas)
    message.reasoning = "".join(reasoning) or None
    return message


SOURCES: Final = {
    "gpt-oss": '"<|start|>assistant<|channel|>analysis<|message|>" + message.thinking; "functions." + name',
    "gemma": "'<|tool_call>call:' + function['name'] + '{'",
    "kimi": "<|tool_calls_section_begin|>{% for tool_call in calls %}<|tool_call_begin|>{{ formatted_id }}",
    "deepseek": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'",
    "deepseek-r1": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json'",
    "deepseek-3.2": "{% set dsml_token = '｜DSML｜' %}<' + dsml_token + 'function_calls>",
    "deepseek-4": "{% set dsml_token = '｜DSML｜' %}<' + dsml_token + 'tool_calls>",
    "minimax": "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}",
    "mistral": "'[TOOL_CALLS]' + tool_call.function.name, '[ARGS]' + arguments | tojson",
    "mistral-ids": "'[TOOL_CALLS]' + name, '[CALL_ID]' + tool_call.id, '[ARGS]' + arguments | tojson",
    "mistral-list": '"[TOOL_CALLS]["',
    "lfm": '"<|tool_call_start|>[" + calls + "]<|tool_call_end|>"',
    "glm": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "qwen-xml": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "seed": "<seed:tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>value_1</parameter>",
    "apriel": '<tool_call></tool_call> <tool_calls>[{"name": ..., "arguments": ...}]</tool_calls>',
    "nemotron": "'<TOOLCALL>[' ~ ']</TOOLCALL>'",
    "hermes": '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    "granite": "respond only with <|tool_call|> followed by a JSON list of tools used.",
    "llama": 'Respond in the format {"name": function name, "parameters": ...}. <|start_header_id|>',
}
"""What is in the templates of models that write the formats."""

# As pydantic writes nested models and enumerations: all of it stands behind references.
REFERRED = tool(
    "f",
    {
        "unit": {"$ref": "#/$defs/Unit"},
        "n": {"$ref": "#/$defs/N"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]},
        "described": {"allOf": [{"$ref": "#/$defs/Unit"}], "description": "How it is said."},
        "level": {"$ref": "#/$defs/Level"},
        "place": {"$ref": "#/$defs/Place"},
        "same": {"$ref": "#/properties/n"},
    },
    ["unit", "n", "maybe", "described", "level", "place", "same"],
)
REFERRED["function"]["parameters"]["$defs"] = {
    "Unit": {"enum": ["celsius", "fahrenheit"], "title": "Unit", "type": "string"},
    "N": {"$ref": "#/$defs/Small"},
    "Small": {"type": "integer", "minimum": 0, "maximum": 9},
    "Level": {"enum": [1, 2]},
    "Place": {
        "type": "object",
        "properties": {
            "name": {"$ref": "#/$defs/Unit"},
            "height": {"$ref": "#/$defs/N"},
            "within": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        },
        "required": ["name", "height", "within"],
        "additionalProperties": False,
    },
}


def is_referred(arguments: dict[str, Any]) -> bool:
    """Return whether arguments are of the types that :data:`REFERRED` has."""
    return (
        {arguments["unit"], arguments["described"]} <= {"celsius", "fahrenheit"}
        and all(type(arguments[name]) is int and arguments[name] in range(10) for name in ("n", "same"))
        and (arguments["maybe"] is None or arguments["maybe"] in range(10))
        and arguments["level"] in (1, 2)
        and _is_place(arguments["place"])
    )


def _is_place(value: Any) -> bool:
    return (
        value.keys() == {"name", "height", "within"}
        and value["name"] in ("celsius", "fahrenheit")
        and value["height"] in range(10)
        and (value["within"] is None or _is_place(value["within"]))
    )
