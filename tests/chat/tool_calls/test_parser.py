"""Reading calls out of answers: one message however the text was cut, and nothing lost of what is no call."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.chat.tool_calls.base import ArgumentsDelta, CallStarted, ContentDelta, ToolCallFormat
from paceline.chat.tool_calls.parser import ToolCallParser
from paceline.chat.tool_calls.response_template import parse_response_template
from paceline.core.errors import ModelFileError
from tests.chat.tool_calls.answers import (
    ANSWERS,
    BY_NAME,
    FILE,
    TIME,
    TOOLS,
    WEATHER,
    Answer,
    Message,
    added,
    of_hermes,
    parser_of,
    read,
    tool,
    written,
)
from tests.tiers import by_tier
from tests.timing import assert_grows_with_length_alone

TAGGED = ("qwen-xml", "seed", "glm", "deepseek-3.2", "deepseek-4", "minimax")
FAMILIES = list(BY_NAME)


def cut(text: str, rng: random.Random) -> list[str]:
    """Cut a text at random places: into few pieces or many."""
    share = rng.choice((0.02, 0.1, 0.3, 0.6, 0.95))
    places = [0, *(place for place in range(1, len(text)) if rng.random() < share), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


def by_characters(parser: ToolCallParser, text: str) -> Message:
    """Return what is read of a text that comes in pieces of one character."""
    return added([*(delta for character in text for delta in parser.push(character)), *parser.finish()])


def whole(family: str, text: str, tools: Sequence[dict[str, Any]] = TOOLS) -> Message:
    """Return what a text comes to, checked to be the same in pieces of one character."""
    parser = parser_of(family, tools)
    message = added([*parser.push(text), *parser.finish()])
    assert by_characters(parser_of(family, tools), text) == message
    return message


@pytest.mark.parametrize("answer", ANSWERS, ids=[answer.family for answer in ANSWERS])
def test_an_answer_is_read_as_it_was_meant_however_it_is_cut(answer: Answer) -> None:
    message = read(answer, [answer.text])
    assert message.content == answer.content
    assert message.reasoning == answer.reasoning
    assert message.called == list(answer.calls)
    if answer.ids:
        ids = [call_id for call_id, _, _ in message.calls]
        assert [call_id if given else "" for call_id, given in zip(ids, answer.ids, strict=True)] == list(answer.ids)
    rng = random.Random(answer.text)
    cuts = [cut(answer.text, rng) for _ in range(by_tier(200, quick=20))]
    assert sum(map(len, cuts)) > 10 * len(cuts)
    for pieces in cuts:
        assert read(answer, pieces) == message, pieces


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_and_their_pieces_in_any_order_lose_nothing(family: str) -> None:
    """Pieces of answers put together anew: the same message in any pieces, and no letter of the prose is lost."""
    rng = random.Random(f"pieces {family}")
    texts = [answer.text for answer in ANSWERS if answer.family == family]
    for _ in range(by_tier(300, quick=40)):
        text = ""
        for _ in range(rng.randrange(1, 6)):
            source = rng.choice(texts)
            start = rng.randrange(len(source))
            text += source[start : start + rng.randrange(1, 90)] + rng.choice(("", "QQ", "\n"))
        message = whole(family, text)
        parser = parser_of(family)
        assert (
            added([*(delta for piece in cut(text, rng) for delta in parser.push(piece)), *parser.finish()]) == message
        )
        said = message.content + "".join(itertools.chain(*message.calls))
        if family not in TAGGED:
            # In these, what stands between arguments is left out.
            assert said.count("QQ") >= text.count("QQ")


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_content_comes_back_as_it_was_written(family: str) -> None:
    text = " \n Well: a < b, [c], {d} to= t <|x|> <tool <｜tool call\n\n\t"
    assert whole(family, text) == Message(text, None, [])
    assert whole(family, "") == Message("", None, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_is_cut_off_is_content(family: str) -> None:
    answer = next(answer for answer in ANSWERS if answer.family == family and FILE in answer.calls)
    # Within the text of FILE's argument.
    text = answer.text[: answer.text.index("if a < b") + 8]
    parser = parser_of(family)
    reasoning = answer.reasoning or ""
    text = text[text.index(reasoning) + len(reasoning) :]
    message = added([*parser.push(text), *parser.finish()])
    assert FILE not in message.called
    assert message.content.endswith("if a < b")
    assert "write_file" in message.content


BROKEN = {
    "hermes": (
        '<tool_call>{"name": "get_time", "arguments": [1]}',
        '<tool_call>{"name" "f"}',
        "<tool_call>Hm.</tool_call>",
    ),
    "qwen-xml": ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n", "<tool_call>Hm.</tool_call>"),
    "seed": ("<seed:tool_call>Hm.</seed:tool_call>",),
    "glm": ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1",),
    "llama": (
        '{"name": "unknown", "parameters": {}}',
        '{"name": "get_time"}',
        '{"a": 1}',
        'Hm. {"name": "get_time", "parameters": {}}',
    ),
    "mistral": ("[TOOL_CALLS]f[ARGS]{1}", "[TOOL_CALLS]f", "[TOOL_CALLS] Hm."),
    "mistral-ids": ("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{1}",),
    "mistral-list": ("[TOOL_CALLS][1]", "[TOOL_CALLS][]", "[TOOL_CALLS][{}]"),
    "deepseek": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{a}",),
    "deepseek-r1": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\nHm.",),
    "deepseek-3.2": ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="t',),
    "deepseek-4": ("<｜DSML｜tool_calls>\nHm.",),
    "minimax": ("<minimax:tool_call>\nHm.", '<invoke name="f">'),
    "gemma": ("<|tool_call>call:f{a:}<tool_call|>", "<|tool_call>call:f{a:1"),
    "gpt-oss": ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>Hm.",),
    "lfm": ("<|tool_call_start|>[f(1)]<|tool_call_end|>", "<|tool_call_start|>[f(a=1"),
    "kimi": ("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{]",),
    "granite": ('<|tool_call|>{"arguments": {}}',),
    "apriel": ("<tool_calls>[{}]",),
    "nemotron": ('<TOOLCALL>[{"name": 1}]',),
    "plain": (
        '{"name": "unknown", "arguments": {}}',
        '{"name": "get_time", "arguments": [1]}',
        'Hm. {"name": "get_time", "arguments": {}}',
    ),
}


# Behind these all belongs to the call, as far as one can tell.
CUT_OFF = {
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="t',
    '<invoke name="f">',
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n",
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1",
    "<|tool_call>call:f{a:1",
    "<|tool_call_start|>[f(a=1",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_broken_call_is_content_and_the_next_is_read(family: str) -> None:
    assert BROKEN[family]
    for text in BROKEN[family]:
        assert whole(family, text) == Message(text, None, [])
        if family not in ("llama", "plain") and text not in CUT_OFF:
            message = whole(family, f"{text}\nBut:\n{_with_argument(family, 'a')}")
            assert message.called == [("f", {"text": "a"})], text
            assert message.content == f"{text}\nBut:"


def test_strings_may_spell_the_marks_of_a_format() -> None:
    call = (
        "write_file",
        {"path": "</tool_call>", "text": '}</tool_call>\n<tool_call>{"name": "\x1e"}', "n": ["[TOOL_CALLS]"]},
    )
    for family in ("hermes", "llama", "mistral"):
        assert whole(family, written(family, call)).called == [call]
    # A line break that the model did not escape.
    assert whole("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}').called == [("f", {"a": "x\ny"})]


def test_a_call_begins_behind_a_mark_without_one() -> None:
    text = "<tool_call>\n<tool_call>"
    assert whole("hermes", text + of_hermes(TIME)) == Message(text, None, [("made_0", "get_time", "{}")])
    text = "[TOOL_CALLS]"
    assert whole("mistral", f"{text}[TOOL_CALLS]get_time[ARGS]{{}}").called == [TIME]


def test_many_marks_without_a_call_take_no_time() -> None:
    def read(marks: int) -> None:
        text = "<tool_call>" * marks
        assert whole("hermes", text) == Message(text, None, [])

    assert_grows_with_length_alone(read, by_tier(20_000, quick=2_000))


def test_arguments_become_what_the_schema_says() -> None:
    spelled = (
        "write_file",
        {"path": "1", "text": "true", "ratio": "2.5", "is_draft": "false", "options": '{"tags": []}'},
    )
    meant = ("write_file", {"path": "1", "text": "true", "ratio": 2.5, "is_draft": False, "options": {"tags": []}})
    for family in ("qwen-xml", "glm", "llama", "hermes"):
        assert whole(family, written(family, spelled)).called == [meant]
    assert whole("qwen-xml", written("qwen-xml", ("other", {"n": "1"}))).called == [("other", {"n": "1"})]


def test_lines_and_spaces_of_a_text_argument_are_kept() -> None:
    call = ("write_file", {"path": "a", "text": "\n  def f():\n    pass\n\n"})
    for family in ("qwen-xml", "glm"):
        assert whole(family, written(family, call)).called == [call]
    call = ("write_file", {"path": "a", "text": "  def f():\n    pass\n\n"})
    assert whole("seed", written("seed", call)).called == [call]
    call = ("write_file", {"path": "a", "text": "</parameter> </arg_value> of <parameter=x> </function>"})
    for family in ("qwen-xml", "glm", "minimax"):
        assert whole(family, written(family, call)).called == [call]
    # Models of this family write line breaks in strings as they are.
    text = """<|tool_call_start|>[write_file(path="a", text='x\n"y\\'"\n')]<|tool_call_end|>"""
    assert whole("lfm", text).called == [("write_file", {"path": "a", "text": 'x\n"y\'"\n'})]


def test_arguments_may_be_a_text_or_missing() -> None:
    assert whole("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>').called == [
        ("f", {"a": 1})
    ]
    assert whole("hermes", '<tool_call>{"name": "f"}</tool_call>').called == [("f", {})]
    assert whole("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>').called == [("f", {}), ("g", {})]


BEHIND = tool(
    "f",
    {
        "unit": {"$ref": "#/$defs/Unit"},
        "n": {"$ref": "#/$defs/N"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]},
        "text": {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]},
        "inner": {"allOf": [{"$ref": "#/$defs/Inner"}]},
    },
)
BEHIND["function"]["parameters"]["$defs"] = {
    "Unit": {"enum": ["celsius", "fahrenheit"], "type": "string"},
    "N": {"type": "integer"},
    "Text": {"type": "string"},
    "Inner": {"type": "object", "properties": {"f": {"$ref": "#/$defs/Inner"}}},
}


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    "arguments",
    [
        {"unit": "celsius", "n": 1, "maybe": None, "text": None, "inner": {"f": {}}},
        {"unit": "fahrenheit", "n": -3, "maybe": 5, "text": "nulls", "inner": {}},
    ],
)
def test_values_are_of_the_types_behind_references(family: str, arguments: dict[str, Any]) -> None:
    call = ("f", arguments)
    assert whole(family, written(family, call), [BEHIND]).called == [call]


MANY_CHOICES = {"anyOf": [{"anyOf": [{"const": row * 80 + i} for i in range(80)]} for row in range(80)]}


@pytest.mark.parametrize(
    ("parameters", "is_call"),
    [
        ({"properties": {"a": MANY_CHOICES}}, False),
        (MANY_CHOICES, True),
        ({"allOf": [{"properties": {"a": {"minimum": number}}} for number in range(1_500)]}, False),
        ({"allOf": [{"required": [{}]}, {"required": ["a"]}]}, True),
    ],
)
def test_a_schema_that_takes_too_much_breaks_no_answer(parameters: dict[str, Any], is_call: bool) -> None:
    asked = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = of_hermes(("f", {"a": "1"}))
    message = whole("hermes", text, [asked])
    assert (message.content, message.called) == (("", [("f", {"a": "1"})]) if is_call else (text, []))


def test_a_value_is_what_the_model_says_it_is() -> None:
    """DeepSeek's tags tell texts from all else."""
    asked = [tool("f", {"a": {"type": ["string", "null", "integer"]}, "b": {}})]
    for call in (("f", {"a": "null"}), ("f", {"a": None}), ("f", {"a": "5"}), ("f", {"a": 5}), ("f", {"b": [1]})):
        assert whole("deepseek-4", written("deepseek-4", call), asked).called == [call]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "3.0", 3),
        ({"type": "number"}, "3.5", 3.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "0", False),
        ({"type": "integer"}, "many", "many"),
        ({"type": ["string", "integer"]}, "3", 3),
        ({"type": ["string", "integer"]}, "three", "three"),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}]}, "3", "3"),
        ({"type": ["string", "integer"]}, "007", "007"),
        ({"type": ["string", "number"]}, "1_000", "1_000"),
        ({"type": ["string", "boolean"]}, "1", "1"),
        ({"type": ["string", "boolean"]}, "true", True),
        ({"type": "integer"}, "007", 7),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": ["array", "null"]}, '["a"]', ["a"]),
        ({"type": "string"}, "null", "null"),
        ({}, "3", "3"),
    ],
)
@pytest.mark.parametrize("family", ["qwen-xml", "glm", "minimax"])
def test_a_text_is_what_its_schema_says(family: str, schema: dict[str, Any], text: str, value: Any) -> None:
    asked = [tool("f", {"a": schema})]
    assert whole(family, written(family, ("f", {"a": text})), asked).called == [("f", {"a": value})]


def test_a_text_in_quotes_is_a_text() -> None:
    asked = [
        tool("f", {"a": {"type": ["string", "integer"]}, "b": {"type": ["string", "null"]}, "n": {"type": "integer"}})
    ]
    call = ("f", {"a": "5", "b": "null"})
    for family in ("hermes", "gemma", "lfm"):
        assert whole(family, written(family, call), asked).called == [call]
    # What is no text by its schema is what the text spells.
    assert whole("hermes", of_hermes(("f", {"n": "5"})), asked).called == [("f", {"n": 5})]


CITY = tool("w", {"city": {"type": "string"}, "days": {"type": "integer"}}, ["city"])
NOW = tool("now", {})


@pytest.mark.parametrize("name", ["arguments", "parameters", "args", "input"])
def test_arguments_are_read_by_the_names_that_models_use(name: str) -> None:
    asked = [CITY, NOW]
    text = f'{{"name": "w", "{name}": {{"city": "Rome"}}}}'
    called = [("w", {"city": "Rome"})]
    assert whole("hermes", f"<tool_call>{text}</tool_call>", asked).called == called
    assert whole("hermes", f'<tool_call>{{"type": "function", "function": {text}}}</tool_call>', asked).called == called
    assert whole("llama", text, asked).called == called
    assert whole("mistral-list", f"[TOOL_CALLS][{text}]", asked).called == called
    assert whole("hermes", f'<tool_call>{{"name": "now", "{name}": ""}}</tool_call>', asked).called == [("now", {})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "w"}',
        '{"name": "w", "arguments": {}}',
        '{"name": "w", "arguments": ""}',
        '{"name": "w", "arguments": null}',
        '{"name": "w", "arguments": {"days": 3}}',
        '{"name": "w", "city": "Rome"}',
        '{"name": "now", "zone": "CET"}',
        '{"name": "now", "with": {"zone": "CET"}}',
    ],
)
def test_half_a_call_is_content(text: str) -> None:
    text = f"<tool_call>{text}"
    assert whole("hermes", text, [CITY, NOW]) == Message(text, None, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_without_what_it_needs_is_content(family: str) -> None:
    text = _with_argument(family, "a").replace("get_time", "f")
    assert whole(family, text, [tool("f", {"text": {}}, ["text"])]).called == [("f", {"text": "a"})]
    assert whole(family, text, [tool("f", {"text": {}, "more": {}}, ["text", "more"])]) == Message(text, None, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_half_of_a_call_that_had_to_be_is_left_out_behind_a_whole_one(family: str) -> None:
    if family == "gpt-oss":
        cut_off = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"
    else:
        cut_off = _with_argument(family, "b" * 40).partition("bbb")[0]
    text = _with_argument(family, "a").replace("get_time", "f") + "\n"
    asked = [tool("f", {"text": {}}, ["text"])]

    def read_required(answer: str) -> Message:
        return by_characters(ToolCallParser(BY_NAME[family], asked, required=True), answer)

    message = read_required(text + cut_off)
    assert (message.content, message.called) == ("", [("f", {"text": "a"})])
    # Where there is no call nothing is lost.
    assert read_required(cut_off) == Message(cut_off, None, [])


def test_one_call_alone_is_read_where_there_may_be_one() -> None:
    parser = ToolCallParser(BY_NAME["hermes"], TOOLS, several=False)
    text = f"See:\n{of_hermes(TIME)}\n{of_hermes(WEATHER)}"
    message = added([*parser.push(text), *parser.finish()])
    assert (message.content, message.called) == ("See:", [TIME])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_what_is_no_number_of_json_breaks_a_call(number: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}'
    assert whole("hermes", text) == Message(text, None, [])


def test_half_a_surrogate_stays_escaped() -> None:
    message = whole("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83c"}}</tool_call>')
    assert message.calls[0][2] == '{"a": "\\ud83c"}'
    assert message.calls[0][2].encode()


def test_brackets_within_each_other_without_end_are_content() -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 100_000}{"]" * 100_000}}}}}</tool_call>'
    parser = parser_of("hermes")
    assert added([*parser.push(text), *parser.finish()]) == Message(text, None, [])


def test_deltas_come_as_soon_as_they_are_certain() -> None:
    parser = parser_of("hermes")
    assert parser.push("One <") == [ContentDelta("One")]
    assert parser.push("b> two\n") == [ContentDelta(" <b> two")]
    assert parser.push('<tool_call>\n{"name": "f", "arguments": {}') == []
    assert parser.push("}") == [CallStarted(0, "made_0", "f"), ArgumentsDelta(0, "{}")]
    assert parser.push("\n</tool_call>\n") == []
    assert parser.num_calls == 1
    assert parser.finish() == []


def test_ids_are_in_the_form_of_the_family() -> None:
    def id_of(family: str, text: str) -> str:
        [started, _] = ToolCallParser(BY_NAME[family], TOOLS).push(text)
        assert isinstance(started, CallStarted)
        return started.call_id

    made = {id_of("hermes", of_hermes(TIME)) for _ in range(20)}
    assert len(made) == 20
    assert all(one.startswith("call_") and len(one) == 29 for one in made)
    for_mistral = id_of("mistral", "[TOOL_CALLS]get_time[ARGS]{}")
    assert len(for_mistral) == 9
    assert for_mistral.isalnum()


# As transformers has it for Qwen 3, with a region for reasoning and whitespace before a call.
OF_FOLDER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
    },
}


def of_folder() -> ToolCallFormat:
    found = parse_response_template(OF_FOLDER, "a/model")
    assert found is not None
    return found


def test_a_models_own_template_is_read() -> None:
    text = f"Let me.\n{of_hermes(WEATHER)}\n{of_hermes(FILE)}\nDone <b>.<|im_end|>"
    rng = random.Random(1)
    for _ in range(by_tier(500, quick=50)):
        parser = ToolCallParser(of_folder(), TOOLS, new_id=lambda: "x")
        pieces = cut(text, rng)
        message = added([*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()])
        assert message.called == [WEATHER, FILE]
        assert message.content == "Let me.\nDone <b>."


def test_whitespace_before_a_call_of_a_models_own_template_takes_no_time() -> None:
    """Its pattern takes whitespace for a part of a call, and tries that at every place."""

    def read(length: int) -> None:
        spaces = " \n" * length
        message = by_characters(ToolCallParser(of_folder(), TOOLS), f"Oh.{spaces}Ah.{spaces}{of_hermes(TIME)}")
        assert message.called == [TIME]
        assert message.content == f"Oh.{spaces}Ah."

    assert_grows_with_length_alone(read, by_tier(50_000, quick=10_000))


def test_a_broken_call_of_a_models_own_template_is_content() -> None:
    parser = ToolCallParser(of_folder(), TOOLS)
    text = f'Oh.\n<tool_call>{{"a" 1}}</tool_call>\n{of_hermes(TIME)}'
    message = added([*parser.push(text), *parser.finish()])
    assert message.content == 'Oh.\n<tool_call>{"a" 1}</tool_call>'
    assert message.called == [TIME]


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(ModelFileError, match="the response template of a/model cannot be used"):
        ToolCallParser(ToolCallFormat("a/model", {"fields": 1}), TOOLS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("what", ["prose", "marks", "spaces", "argument"])
def test_time_grows_with_length_alone(family: str, what: str) -> None:
    """Of long answers in pieces of one character."""

    def read(length: int) -> None:
        if what == "argument":
            text = _with_argument(family, "x <b> y\n" * (length // 8))
        else:
            text = {"prose": "Hello, wörld. ", "marks": "<[{t ", "spaces": "     "}[what] * (length // 5)
        assert len(by_characters(parser_of(family), text).calls) == (what == "argument")

    assert_grows_with_length_alone(read, by_tier(100_000, quick=10_000))


BEGINNINGS = [
    ("qwen-xml", "<tool_call>\n<function=f>\n", "<parameter=a>\n"),
    ("qwen-xml", "<tool_call>", "\n"),
    ("qwen-xml", "<tool_call>\n<function=", "a"),
    ("minimax", '<invoke name="f">', '<parameter name="a">'),
    ("glm", "<tool_call>f\n", "<arg_key>a</arg_key>\n<arg_value>"),
    ("glm", "<tool_call>", "f"),
    ("lfm", "<|tool_call_start|>[f(a=", "["),
    ("lfm", "<|tool_call_start|>", "'"),
    ("lfm", '<|tool_call_start|>[f(a="', '\\"'),
    ("gemma", "<|tool_call>call:f{", 'a:<|"|>b<|"|>,'),
    ("kimi", "<|tool_call_begin|>", "a"),
    ("mistral", "[TOOL_CALLS]", "a"),
    ("mistral-list", "[TOOL_CALLS]", " "),
    ("gpt-oss", "<|channel|>commentary to=functions.f ", "a"),
    ("deepseek", "<｜tool▁call▁begin｜>", "a"),
    ("llama", "{", " "),
    ("hermes", "<tool_call>", '{"a":'),
]


@pytest.mark.parametrize(("family", "beginning", "again"), BEGINNINGS)
def test_a_model_that_writes_the_same_on_and_on_takes_no_time(family: str, beginning: str, again: str) -> None:
    def read(length: int) -> None:
        text = beginning + again * (length // len(again))
        assert by_characters(parser_of(family), text) == Message(text, None, [])

    assert_grows_with_length_alone(read, by_tier(50_000, quick=10_000))


def _with_argument(family: str, value: str) -> str:
    """Return an answer of a family with one call that has a long argument."""
    return written(family, ("get_time" if family in ("llama", "plain") else "f", {"text": value}))
