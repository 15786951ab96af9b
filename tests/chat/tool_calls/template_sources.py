"""What is in the templates of models that write calls."""

from __future__ import annotations

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
