"""Answers as the models of each family write them, with what they come to."""

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


def of_hermes(call: Call) -> str:
    return f'<tool_call>\n{{"name": "{call[0]}", "arguments": {dumped(call[1])}}}\n</tool_call>'


def of_list(call: Call) -> str:
    return f'{{"name": "{call[0]}", "arguments": {dumped(call[1])}}}'


def of_qwen_xml(call: Call) -> str:
    values = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in call[1].items()
    }
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={call[0]}>\n{lines}</function>\n</tool_call>"


def of_seed(call: Call) -> str:
    values = {key: value if isinstance(value, str) else dumped(value) for key, value in call[1].items()}
    lines = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
    return f"<seed:tool_call>\n<function={call[0]}>\n{lines}</function>\n</seed:tool_call>"


def of_invoke(call: Call) -> str:
    values = {key: value if isinstance(value, str) else dumped(value) for key, value in call[1].items()}
    lines = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<invoke name="{call[0]}">\n{lines}</invoke>\n'


def of_dsml(call: Call) -> str:
    values = {
        key: ("true", value) if isinstance(value, str) else ("false", dumped(value)) for key, value in call[1].items()
    }
    lines = "".join(
        f'<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n'
        for key, (is_text, value) in values.items()
    )
    return f'<｜DSML｜invoke name="{call[0]}">\n{lines}</｜DSML｜invoke>\n'


def of_glm(call: Call) -> str:
    values = {key: value if isinstance(value, str) else dumped(value) for key, value in call[1].items()}
    lines = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
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


def _told(family: str, before: str, calls: str, after: str, said: str, **given: Any) -> Answer:
    return Answer(family, before + calls + after, (WEATHER, FILE, TIME), said, **given)


_ALL: Final = (WEATHER, FILE, TIME)
_AFTER: Final = "\nDone, I < hope."
_SAID: Final = "See:\nDone, I < hope."

ANSWERS: Final = (
    _in_turn("hermes", of_hermes),
    _told("hermes", "See:\n", of_hermes(WEATHER) + of_hermes(FILE) + of_hermes(TIME), _AFTER, _SAID),
    _in_turn("qwen-xml", of_qwen_xml),
    _told("qwen-xml", "See:\n", "\n".join(map(of_qwen_xml, _ALL)), _AFTER, _SAID),
    _in_turn("seed", of_seed),
    _told("seed", "See:\n", "\n".join(map(of_seed, _ALL)), _AFTER, _SAID),
    _in_turn("glm", of_glm),
    _told("glm", "See:\n", "\n".join(map(of_glm, _ALL)), _AFTER, _SAID),
    Answer("llama", "; ".join(map(of_llama, _ALL)), _ALL, ""),
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
    Answer(
        "mistral-ids",
        "See:" + "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdefgh1[ARGS]{dumped(given)}" for name, given in _ALL),
        _ALL,
        "See:",
        ids=3 * ("abcdefgh1",),
    ),
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
    *(
        _told(f"deepseek-{version}", "See:\n\n", f"{before}\n{''.join(map(of_dsml, _ALL))}{after}", _AFTER, _SAID)
        for version, before, after in (
            ("3.2", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            ("4", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        )
    ),
    _in_turn("minimax", of_invoke, ""),
    _told(
        "minimax", "See:", f"<minimax:tool_call>\n{''.join(map(of_invoke, _ALL))}</minimax:tool_call>", _AFTER, _SAID
    ),
    _told(
        "deepseek",
        "See:\n",
        f"<｜tool▁calls▁begin｜>{''.join(map(of_deepseek, _ALL))}<｜tool▁calls▁end｜>",
        _AFTER,
        _SAID,
    ),
    _told(
        "deepseek",
        "See:\n",
        f"<｜tool▁calls▁begin｜>{chr(10).join(map(of_deepseek_r1, _ALL))}<｜tool▁calls▁end｜>",
        _AFTER,
        _SAID,
    ),
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
    _told("lfm", "See:\n", f"<|tool_call_start|>[{', '.join(map(of_lfm, _ALL))}]<|tool_call_end|>", _AFTER, _SAID),
    Answer(
        "lfm",
        f"<think>Hm.</think><|tool_call_start|>[{of_lfm(TIME)}]<|tool_call_end|>"
        f"<|tool_call_start|>[{of_lfm(FILE)}]<|tool_call_end|>",
        (TIME, FILE),
        "",
        "Hm.",
        THINK,
    ),
    Answer(
        "kimi",
        "<think>Which?</think>See:\n<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}"
            "<|tool_call_end|>"
            for index, (name, arguments) in enumerate(_ALL)
        )
        + f"<|tool_calls_section_end|>{_AFTER}",
        _ALL,
        _SAID,
        "Which?",
        THINK,
        ("functions.get_weather:0", "functions.write_file:1", "functions.get_time:2"),
    ),
    _told("granite", "See:\n", f"<|tool_call|>[{', '.join(map(of_list, _ALL))}]", _AFTER, _SAID),
    _told("apriel", "See:\n", f"<tool_calls>[{', '.join(map(of_list, _ALL))}]</tool_calls>", _AFTER, _SAID),
    _told("nemotron", "See:\n", f"<TOOLCALL>[{', '.join(map(of_list, _ALL))}]</TOOLCALL>", _AFTER, _SAID),
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
