"""Which family's format a chat template speaks of, and which of its marks are control tokens."""

from __future__ import annotations

import sys

import pytest

from paceline.chat.tool_calls import transformers_parser
from paceline.chat.tool_calls.base import ToolCallFormat
from paceline.chat.tool_calls.formats import FORMATS, control_marks, find_format
from paceline.chat.tool_calls.parser import ToolCallParser
from paceline.core.errors import CapabilityError
from paceline.engines.scripted import ScriptedVocabulary
from tests.chat.tool_calls.answers import BY_NAME, TOOLS

# What is in the templates of models that write the formats.
SOURCES = {
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


@pytest.mark.parametrize("family", [one.name for one in FORMATS])
def test_a_template_is_known_by_its_marks(family: str) -> None:
    found = find_format(f"{{# of a model #}}{SOURCES[family]}")
    assert found is not None
    assert found.name == family


def test_other_templates_are_of_no_family() -> None:
    assert find_format("<|im_start|>{{ message.role }}<|im_end|> <tool_response>") is None
    assert find_format("") is None


class _Vocabulary(ScriptedVocabulary):
    """All tokens but the first are control tokens."""

    @property
    def control_ids(self) -> frozenset[int]:
        return frozenset(range(1, self.size))


def test_control_tokens_among_the_marks_are_found() -> None:
    pieces = [b"a", b"[TOOL_CALLS]", b"[ARGS]", b"<|call|>", b"<|channel|>", b"<other>", b"</tool_call>", b"<|start|>"]
    # What ends an answer is not in its text.
    vocabulary = _Vocabulary(pieces, end_ids=[3])
    assert control_marks(BY_NAME["mistral"], vocabulary) == {"[TOOL_CALLS]": 1, "[ARGS]": 2}
    assert control_marks(BY_NAME["gpt-oss"], vocabulary) == {"<|channel|>": 4, "<|start|>": 7}
    assert control_marks(BY_NAME["hermes"], vocabulary) == {"</tool_call>": 6}


def test_without_the_library_there_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers_parser._library.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing", None)
    with pytest.raises(CapabilityError, match=r"pip install '\.\[serve\]'"):
        ToolCallParser(ToolCallFormat("a/model", {}), TOOLS)
