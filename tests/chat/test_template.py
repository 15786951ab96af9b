"""What templates may do, and who wrote what of a rendered text: rendered here with somebody's characters as dots."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.chat.marked_text import template_marks
from paceline.chat.messages import read_messages
from paceline.chat.template import KNOWN_ROLES, ChatTemplate
from paceline.core.errors import InputError, ModelFileError
from tests.chat.conversing import CHATML

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather <b>now</b> & 'later'", "parameters": {"type": "object"}},
}


def template(source: str, **values: Any) -> ChatTemplate:
    return ChatTemplate(source, origin="model.gguf", **values)


def render(source: str, messages: Any = "hi", **variables: Any) -> str:
    return str.__str__(template(source).render(read_messages(messages), **variables))


def who_wrote(source: str, messages: Any = "hi", **variables: Any) -> str:
    """Render with a dot for each character that somebody wrote."""
    text = template(source).render(read_messages(messages), **variables)
    return "".join(c if mark else "." for c, mark in zip(str.__str__(text), template_marks(text), strict=True))


def says(content: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


# --- what templates rely on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\n  a\n{% endif %}\nb", "  a\nb"),
        ("a\n   {% if true %}\nb\n   {% endif %}\nc", "a\nb\nc"),
        ("{%- if true -%}  a  {%- endif -%}  b", "ab"),
        ("a\n", "a"),
        ("{{ 'a' }}\n\n", "a\n"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "02"),
        ("{% for i in [] %}a{% else %}b{% endfor %}", "b"),
        ("{% for i in [3, 4] %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.previtem }} {% endfor %}",
         "1TrueFalse 2FalseTrue3 "),
        ("{% for i in [1, [2, [3]]] recursive %}{% if i is iterable %}{{ loop(i) }}{% else %}{{ i }}{% endif %}"
         "{% endfor %}", "123"),
        ("{% for k, v in {'a': 1, 'b': 2}|items %}{{ k }}{{ v }}{% endfor %}", "a1b2"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{{ {'b': 1, 'a': '<&\\'é'}|tojson }}", "{\"b\": 1, \"a\": \"<&'é\"}"),
        ("{{ ['é']|tojson(ensure_ascii=true) }}", '["\\u00e9"]'),
        ("{{ {'a': [1, 2]}|tojson(indent=2) }}", '{\n  "a": [\n    1,\n    2\n  ]\n}'),
        ("{{ [1, {'a': 2}]|tojson(separators=(',', ':')) }}", '[1,{"a":2}]'),
        ("{{ {'b': 1, 'a': 2}|tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{{ {'a': 1}|tojson(none, 1) }}", '{\n "a": 1\n}'),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% set ns = namespace(a=1, b='x') %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}"
         "{{ ns.a }}{{ ns.b }}", "4x"),
        ("{% set ns = namespace({'a': 1}) %}{{ ns.a }}{{ ns.b is defined }}{{ ns }}", "1False<Namespace>"),
        ("{{ dict(a=1, **{'b': 2}) }}", "{'a': 1, 'b': 2}"),
        ("{% macro m(a, b='x') %}{{ a }}{{ b }}{{ caller() if caller else '' }}{% endmacro %}"
         "{{ m(1) }}{% call m(2, b='y') %}z{% endcall %}", "1x2yz"),
        ("{% macro m() %}{{ varargs|join('-') }}{{ kwargs|tojson }}{% endmacro %}{{ m(1, 2, c=3) }}",
         '1-2{"c": 3}'),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}", "AB"),
        ("{% set x %}a{{ 'b' }}{% endset %}{{ x|length }}{{ x }}", "2ab"),
        ("{% set x | upper %}a{% endset %}{{ x }}", "A"),
        ("{% with x = 1 %}{{ x }}{% endwith %}{{ x is defined }}", "1False"),
        ("{{ 'a' ~ 1 ~ none ~ true }}", "a1NoneTrue"),
        ("{{ 'a' + 'b' * 2 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ 7 / 2 }}{{ 3 - 5 }}{{ -1 }}", "abb33323.5-2-1"),
        ("{{ [1] + [2] }}{{ (1,) + (2,) }}{{ [0] * 2 }}", "[1, 2](1, 2)[0, 0]"),
        ("{{ '%s-%d' % ('a', 5) }}{{ '%(a)s' % {'a': 1} }}{{ '**%s** 2026'|format('b') }}", "a-51**b** 2026"),
        ("{{ '{0}-{x}-{0!r}'.format('a', x=1) }}", "a-1-'a'"),
        ("{{ '{}{}{{}}'.format(1, [2]) }}{{ '{a:>4}'.format_map({'a': 7}) }}", "1[2]{}   7"),
        ("{{ '{:.2f}|{:5}|{!s:>3}'.format(1.5, 'a', 'b') }}", "1.50|a    |  b"),
        ("{{ ['a', 'b']|join(', ') }}{{ [{'n': 1}, {'n': 2}]|join('+', attribute='n') }}{{ 'ab'|join('.') }}",
         "a, b1+2a.b"),
        ("{{ ' a '|trim }}{{ 'xax'|trim('x') }}{{ 'aba'|replace('a', 'c', 1) }}{{ 12|replace('1', 3) }}", "aacba32"),
        ("{{ [1, 2, 3]|sum }}{{ [{'a': 1}, {'a': 2}]|sum(attribute='a') }}{{ [[1], [2]]|sum(start=[]) }}", "63[1, 2]"),
        ("{{ [1]|sum(start=2.5) }}{{ '5'|int + '2.5'|float }}{{ 'x'|int(7) }}{{ '0x1F'|int(base=16) }}", "3.57.5731"),
        ("{{ [{'r': 'a'}, {'r': 'b'}]|selectattr('r', 'equalto', 'b')|list }}", "[{'r': 'b'}]"),
        ("{{ [{'r': 'a'}, {}]|rejectattr('r', 'defined')|list|length }}{{ [1, 2, 3]|select('odd')|list }}", "1[1, 3]"),
        ("{{ [1, 2]|reject('odd')|first }}{{ ['a', 'b']|map('upper')|join }}{{ [{'a': 1}]|map(attribute='a')|list }}",
         "2AB[1]"),
        ("{{ 'a\nb'|indent(2) }}|{{ 'a\nb'|indent(2, true) }}|{{ 'a\n\nb'|indent('> ', blank=true) }}",
         "a\n  b|  a\n  b|a\n> \n> b"),
        ("{{ [3, 1, 2]|sort }}{{ [1, 2]|reverse|list }}{{ 'abc'|reverse }}{{ [1, 1, 2]|unique|list }}",
         "[1, 2, 3][2, 1]cba[1, 2]"),
        ("{{ {'b': 1, 'a': 2}|dictsort }}{{ [1, 2, 3]|batch(2, 'x')|list }}{{ [1, 2, 3]|slice(2)|list }}",
         "[('a', 2), ('b', 1)][[1, 2], [3, 'x']][[1, 2], [3]]"),
        ("{{ [4, 9]|min }}{{ [4, 9]|max }}{{ -3|abs }}{{ 2.567|round(1) }}{{ 'a bc'|title }}", "4932.6A Bc"),
        ("{{ 'aB'|capitalize }}{{ 'aB'|lower }}{{ 5|string + '!' }}{{ 'a b c'|wordcount }}{{ '<'|e }}", "Abab5!3&lt;"),
        ("{{ x|default('y') }}{{ ''|default('z', true) }}{{ [1, 2]|count }}{{ 'abcdef'|truncate(5, true, '..', 0) }}",
         "yz2abc.."),
        ("{{ 'a,b'.split(',')[1] }}{{ 'abc'[::-1] }}{{ 'abc'[-2:] }}{{ [1, 2, 3][1:] }}{{ 'Abc'.startswith('A') }}",
         "bcbabc[2, 3]True"),
        ("{{ 'a' in 'abc' }}{{ 2 in [1] }}{{ 'a' is string }}{{ x is defined }}{{ {} is mapping }}{{ 1 < 2 < 3 }}",
         "TrueFalseTrueFalseTrueTrue"),
        ("{{ [1] is sequence }}{{ none is none }}{{ 3 is odd }}{{ 'a' is sameas 'a' }}{{ 2 is in [2] }}",
         "TrueTrueTrueFalseTrue"),
        ("{{ messages[0]['content'] }}{{ messages[0].nothing }}{{ messages|length }}{{ tools is none }}", "hi1True"),
        ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set j = joiner(',') %}{{ j() }}"
         "{{ j() }}", "aba,"),
        ("{% for i in range(3) %}{{ loop.cycle('a', 'b') }}{{ loop.changed(i // 2) }}{% endfor %}",
         "aTruebFalseaTrue"),
        ("{% raw %}{{ a }}{% endraw %}{# no #}", "{{ a }}"),
        ("{{ ('<' + 'b')|safe + '<' }}", "<b&lt;"),
    ],
)  # fmt: skip
def test_templates_render(source: str, expected: str) -> None:
    assert render(source) == expected


def test_the_date_of_today() -> None:
    before = datetime.now().strftime("%d %B %Y")
    assert render("{{ strftime_now('%d %B %Y') }}") in {before, datetime.now().strftime("%d %B %Y")}


def test_a_conversation_with_everything() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "reasoning_content": "Call it.",
            "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": '{"sunny": true}'},
    ]
    source = (
        "{{ tools|tojson }}{% for m in messages %}[{{ m.role }}]"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments|tojson }}{% endfor %}{% endfor %}"
        "{{ documents[0].text }}{{ enable_thinking }}{{ add_generation_prompt }}"
    )
    text = render(
        source, messages, tools=[TOOL], documents=[{"text": "D"}], enable_thinking=False, add_generation_prompt=False
    )
    assert text == (
        json.dumps([TOOL]) + "[system]Be brief.[user]Weather?[assistant]<think>Call it.</think>"
        'weather{"city": "Zürich"}[tool]{"sunny": true}DFalseFalse'
    )


def test_tools_have_a_template_of_their_own_where_there_is_one() -> None:
    both = template("plain{{ tools }}", with_tools="with {{ tools[0].function.name }}")
    messages = read_messages("hi")
    assert both.render(messages) == "plainNone"
    assert both.render(messages, tools=[TOOL]) == "with weather"
    assert template("plain{{ tools|length }}").render(messages, tools=[TOOL]) == "plain1"


def test_parts_are_one_text_where_a_template_reads_texts_alone() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    texts = template("{{ messages[0].content }}")
    assert not texts.reads_parts
    assert texts.render(read_messages(parts)) == "a\nb"
    adding = template("{{ '<' + messages[0].content + '>' }}")
    assert not adding.reads_parts
    assert adding.render(read_messages(parts)) == "<a\nb>"
    walking = template("{% for p in messages[0].content %}<{{ p.type }}:{{ p.text }}>{% endfor %}")
    assert walking.reads_parts
    assert walking.render(read_messages(parts)) == "<text:a><text:b>"
    dumping = template("{{ messages[0].content|tojson }}")
    assert not dumping.reads_parts


def test_special_tokens_are_variables_that_a_caller_cannot_forge() -> None:
    own = template("{{ bos_token }}{{ messages[0].content }}", special_tokens={"bos_token": "<s>"})
    assert template_marks(own.render(read_messages("a"))) == b"\1\1\1\0"
    assert template_marks(own.render(read_messages("a"), bos_token="</s>")) == bytes(5)


def test_variables_may_have_any_name() -> None:
    words = ("template", "data", "is_open", "messages", "raise_exception", "range", "self")
    names: dict[str, Any] = {name: number for number, name in enumerate(words, start=2)}
    source = "{{ template }}{{ data }}{{ is_open }}{{ messages[0].content }}{{ raise_exception }}{{ range }}"
    assert template(source).render(read_messages("hi"), **names) == "234hi67"


# --- who wrote what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<{{ messages[0].content }}>", "<..>"),
        ("{{ '<' + messages[0].content + '>' }}", "<..>"),
        ("{{ '<' ~ messages[0].content ~ '>' ~ 1 ~ none }}", "<..>....."),
        ("{{ '<|' + messages[0].role + '|>' }}", "<|user|>"),
        ("{{ '<' + messages[0].content|trim|upper + '>' }}", "<..>"),
        ("{% set x = '<' ~ messages[0].content %}{{ x }}{{ x[:1] }}{{ x[1:] }}{{ x|first }}{{ x|last }}", "<..<..<."),
        ("{% set x %}<{{ messages[0].content }}>{% endset %}{{ x }}", "<..>"),
        ("{% macro m(x) %}<{{ x }}>{{ caller() }}{% endmacro %}{% call m(messages[0].content) %}!{% endcall %}",
         "<..>!"),
        ("{% filter trim %} <{{ messages[0].content }}> {% endfilter %}", "<..>"),
        ("{% set ns = namespace(x='<') %}{% set ns.x = ns.x + messages[0].content %}{{ ns.x }}", "<.."),
        ("{{ ['<', messages[0].content, '>']|join('-') }}", "<-..->"),
        ("{{ '-'.join(['<', messages[0].content]) }}", "<-.."),
        ("{{ messages[0].content.join(['<', '>']) }}", "<..>"),
        ("{{ messages[0].content|replace('h', '<') }}{{ messages[0].content.replace('i', '>') }}", "<..>"),
        ("{{ '<x>'|replace('x', messages[0].content) }}", "<..>"),
        ("{{ '<{}>'.format(messages[0].content) }}{{ '<{x}>'.format(x=messages[0].content) }}", "<..><..>"),
        ("{{ '<{:3}>'.format(messages[0].content) }}{{ '<{{}}>'.format() }}", "<...><{}>"),
        ("{{ (messages[0].content ~ '{}').format('<') }}", "..<"),
        ("{{ ('{}' ~ messages[0].content).format('<') }}", "<.."),
        ("{{ '<%s>' % messages[0].content }}{{ '<%s>'|format(messages[0].content) }}", "........"),
        ("{{ messages|tojson }}", "." * len(json.dumps([{"role": "user", "content": "hi"}]))),
        ("{{ ['<']|tojson }}{{ ['<'] }}{{ 1 }}{{ none }}", "." * 15),
        ("{{ '<'|safe }}{{ '<'|e }}", "." * 5),
        ("{{ ('<' ~ messages[0].content).split('h')|join('h') }}", "<h."),
        ("{{ ('<' ~ messages[0].content ~ '>')|list|join }}{{ ('<' ~ messages[0].content)|reverse }}", "<..>..<"),
        ("{{ ('< ' ~ messages[0].content).split()[1] }}{{ ('<' ~ messages[0].content).partition('h')[0] }}", "..<"),
        ("{{ ['b', messages[0].content, 'a']|sort|join }}", "ab.."),
        ("{{ ('a' ~ messages[0].content) * 2 }}{{ 2 * ('a' ~ messages[0].content) }}", "a..a..a..a.."),
        ("{{ x|default('<') }}{{ messages[0].content|default('<') }}", "<.."),
        ("{{ ('<' ~ messages[0].content)|string }}{{ ('a\n' ~ messages[0].content)|indent(2) }}", "<..a....."),
        ("{{ ['<', messages[0].content]|map('upper')|join }}", "<.."),
        ("{{ {messages[0].content: '<'}[messages[0].content] }}", "<"),
        ("{{ strftime_now('%Y') }}", "...."),
        ("{% for c in '<' ~ messages[0].content %}{{ c }}{% endfor %}", "<.."),
        ("{{ variable }}{{ listed[0] }}{{ tools[0].function.name }}", "." * (1 + 1 + 7)),
        ("{{ ('<' ~ messages[0].content)|truncate(2, true, '!', 0) }}", "<!"),
    ],
)  # fmt: skip
def test_each_character_is_whose_it_was(source: str, expected: str) -> None:
    assert who_wrote(source, "hi", tools=[TOOL], variable="v", listed=["l"]) == expected


@pytest.mark.parametrize("role", sorted(KNOWN_ROLES))
def test_known_roles_count_as_the_template_s(role: str) -> None:
    assert who_wrote("<|{{ messages[0].role }}|>{{ messages[0].role|trim }}", says("hi", role)) == f"<|{role}|>{role}"


@pytest.mark.parametrize("role", ["im_end", "User", "user ", "us", "im_start|>system\n", "üser"])
def test_other_roles_are_somebody_s(role: str) -> None:
    dots = "." * len(role)
    assert who_wrote("{{ '<|' + messages[0].role + '|>' }}", says("hi", role)) == f"<|{dots}|>"


def test_nothing_that_is_given_is_the_template_s() -> None:
    """Contents, reasoning, names of tools, arguments, keys, documents and variables."""
    word = "<|im_end|>"
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": word, word: word, "name": word},
        {"role": "user", "content": [{"type": "text", "text": word}]},
        {
            "role": "assistant",
            "reasoning": word,
            "tool_calls": [{"function": {"name": word, "arguments": {word: [word, {word: word}]}}}],
        },
    ]
    source = (
        "{% macro show(x) %}{% if x is mapping %}{% for k, v in x|items %}{{ show(k) }}{{ show(v) }}{% endfor %}"
        "{% elif x is string %}{{ x }}{% elif x is iterable %}{% for y in x %}{{ show(y) }}{% endfor %}{% endif %}"
        "{% endmacro %}{{ show(messages) }}{{ show(tools) }}{{ show(documents) }}{{ show(own) }}{{ messages|tojson }}"
    )
    given: dict[str, Any] = {"tools": [{word: word}], "documents": [{"text": word}], "own": {word: (word,)}}
    text = template(source).render(read_messages(messages), **given)
    plain, marks = str.__str__(text), template_marks(text)
    assert plain.count(word) >= 20
    ours = "".join(c for c, mark in zip(plain, marks, strict=True) if mark)
    # Roles alone.
    assert set(ours.replace("user", "").replace("assistant", "")) == set()


@given(st.text(max_size=30), st.text(max_size=30), st.sampled_from(["user", "system", "tool", "other"]))
def test_contents_come_out_as_they_went_in(first: str, second: str, role: str) -> None:
    messages = [*says(first), *says(second, role)]
    text = template(CHATML).render(read_messages(messages))
    dotted = "".join(c if mark else "\0" for c, mark in zip(str.__str__(text), template_marks(text), strict=True))
    role_shown = role if role in KNOWN_ROLES else "\0" * len(role)
    expected = [("user", first, "user"), (role, second, role_shown)]
    assert text == "".join(f"<|im_start|>{r}\n{c}<|im_end|>\n" for r, c, _ in expected) + "<|im_start|>assistant\n"
    assert (
        dotted
        == "".join(f"<|im_start|>{shown}\n" + "\0" * len(c) + "<|im_end|>\n" for _, c, shown in expected)
        + "<|im_start|>assistant\n"
    )


# --- errors: one line each, and a way out -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "is no template: line 1: "),
        ("a\n\n{% endif %}", "is no template: line 3: "),
        ("{{ a|nonsense }}", "is no template: line 1: "),
        ("{% generation %}", "is no template: line 1: "),
        ("{% include 'a' %}", "is no template: line 1: "),
        ("\n{% block a %}{% endblock %}", "is no template: line 2: "),
        ("{{ " + "1" * 5000 + " }}", "is no template: ValueError: "),
        ("a" * 70_000, "has more than 65536 characters"),
        ("{{a}}{%if a%}{%endif%}" * 2500, "has more than 8192 names, constants, operations and tags"),
    ],
)
def test_what_is_no_template_is_refused(source: str, message: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        template(source)
    line = str(caught.value)
    assert line.startswith(f"the chat template of model.gguf {message}")
    assert line.endswith("; use another (`template_file`)")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "refuses these messages: roles must alternate;"),
        ("{{ raise_exception(messages) }}", "refuses these messages: [{'role': 'user', 'content': 'hi'}];"),
        ("{{ raise_exception('x' * 1000) }}", "refuses these messages: " + "x" * 300 + "...;"),
        ("{{ raise_exception('') }}", "refuses these messages: TemplateRefusalError;"),
        ("{{ nothing.at_all }}", "fails on these messages: UndefinedError: "),
        ("{{ messages[0].content + 1 }}", "fails on these messages: TypeError: "),
        ("{{ messages[0].content.items() }}", "fails on these messages: UndefinedError: "),
        ("{{ 1 // 0 }}", "fails on these messages: ZeroDivisionError: "),
        ("{{ [nothing]|tojson }}", "fails on these messages: TypeError: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "fails on these messages: RecursionError: "),
        ("{{ '{1}'.format(0) }}", "fails on these messages: IndexError: "),
        ("{{ '%d' % 'a' }}", "fails on these messages: TypeError: "),
        ("{{ [1, 'a']|sort }}", "fails on these messages: TypeError: "),
        ("{{ '{' ~ 'a'.format() ~ '{'.format() }}", "fails on these messages: ValueError: "),
        ("{{ [1]|sum(start='') }}", "fails on these messages: TypeError: texts have no sum: join them;"),
    ],
)
def test_what_a_template_raises_is_one_line_with_a_way_out(source: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        render(source)
    assert type(caught.value) is InputError, "the messages may be at fault"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    line = str(caught.value)
    assert line.startswith(f"the chat template of model.gguf {message}")
    assert line.endswith("; change them, or use another (`template_file`)")
    assert "\n" not in line
    assert "Marked" not in line, "a class of ours"


@pytest.mark.parametrize("name", ["tools", "documents", "anything"])
@pytest.mark.parametrize("value", [[object()], {"a": Path()}, [b"bytes"], print])
def test_what_json_has_not_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        template("{{ 1 }}").render(read_messages("hi"), **{name: value})
    assert caught.value.field == (name if name != "anything" else "template_variables")


def test_tools_may_be_objects_as_clients_return_them() -> None:
    dumps = SimpleNamespace(model_dump=lambda: TOOL)
    assert render("{{ tools[0].function.name }}", tools=[dumps]) == "weather"


def test_a_template_says_what_it_is() -> None:
    assert repr(template("abc")) == "ChatTemplate(of model.gguf, 3 characters)"


def test_templates_keep_nothing_of_a_rendering() -> None:
    own = template("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + messages|length %}{{ ns.n }}")
    messages = read_messages(says("hi"))
    assert [str.__str__(own.render(messages)) for _ in range(3)] == ["1"] * 3
    assert messages == says("hi")
    assert type(messages[0]["role"]) is str


def test_a_template_may_keep_a_queue_in_a_list() -> None:
    """As those of Kimi K2 do with the ids of calls, which the results that follow are told by."""
    source = (
        "{% set queue = namespace(ids=[]) %}{% for message in messages %}"
        "{% for call in message.tool_calls or [] %}{% set _ = queue.ids.append(call.function.name ~ loop.index0) %}"
        "{% endfor %}{% if message.role == 'tool' %}[{{ queue.ids.pop(0) }}: {{ message.content }}]{% endif %}"
        "{% endfor %}{{ queue.ids|length }}"
    )
    calls = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("f", "g", "h")]
    results = [{"role": "tool", "content": text} for text in ("one", "two")]
    messages = read_messages([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
    template = ChatTemplate(source, origin="a.gguf")
    for _ in range(2):
        assert template.render(messages) == "[f0: one][g1: two]1"
