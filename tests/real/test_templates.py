"""Chat templates in use, rendered as transformers renders them."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from paceline.chat.messages import read_messages
from paceline.chat.params import ChatParams
from paceline.chat.prompt_builder import ChatPromptBuilder
from paceline.chat.template import ChatTemplate
from paceline.core.errors import InputError
from paceline.serving.chat_request import drop_unfollowed, read_chat_params, tools_for_template
from paceline.serving.conversations import iter_merged
from paceline.serving.messages_request import read_messages as read_messages_body
from paceline.serving.prompts import _usual_variables
from paceline.serving.schema import MessagesBody, TemplateBody, validate_body
from tests.chat.conversing import ControlledBytes
from tests.proofs import LINES
from tests.real.conversations import CONVERSATIONS, HISTORIES, SPECIAL, TOOLS, assistant, user
from tests.serving.messages import CLAUDE_CODE

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"reasoning_effort": "high"},
    {"add_generation_prompt": False},
    {"functions": "[]", "datetime": "today"},
]


# These have no place for calls or results, or need variables that a server gives.
NO_CALLS = 10


def readers_of(models: Path) -> list[ChatPromptBuilder]:
    files = sorted((models / "templates").glob("*.jinja"))
    templates = [
        ChatTemplate(file.read_text(encoding="utf-8"), origin=file.name, special_tokens=SPECIAL) for file in files
    ]
    assert len(templates) >= 70
    return [ChatPromptBuilder(template, ControlledBytes(), 1 << 16) for template in templates]


def prompt_of(reader: ChatPromptBuilder, messages: list[dict[str, Any]]) -> str | None:
    try:
        return reader.prompt(messages, tools=TOOLS, params=ChatParams(forget=False), max_tokens=0).text
    except InputError as error:
        refusal = str(error)
    assert "Marked" not in refusal
    return None


@pytest.mark.parametrize(("name", "sent", "same"), HISTORIES, ids=[name for name, _, _ in HISTORIES])
def test_histories_as_clients_send_them_are_read(
    models: Path, name: str, sent: list[dict[str, Any]], same: list[dict[str, Any]]
) -> None:
    num_read = 0
    for reader in readers_of(models):
        text = prompt_of(reader, sent)
        assert text == prompt_of(reader, same), reader.template.origin
        assert text is None or '"arguments": }' not in text
        num_read += text is not None and ("arguments" not in name or "4 pm sharp" in text)
    assert num_read >= 70 - NO_CALLS


def test_what_claude_code_sends_is_read_whole(models: Path) -> None:
    conversation = read_messages_body(validate_body(MessagesBody, CLAUDE_CODE))
    tools = tools_for_template(conversation.tools)
    said = ("You are an agent.", "List the files.", "agent types", "a.py", "Be careful.", "5000 tokens left")
    num_read = num_merged = 0
    for reader in readers_of(models):
        for number, messages in enumerate((conversation.messages, *iter_merged(conversation.messages))):
            with contextlib.suppress(InputError):
                text = reader.prompt(messages, tools=tools, params=ChatParams(forget=False), max_tokens=0).text
                assert [words for words in said if words not in text] == [], reader.template.origin
                num_read += 1
                num_merged += number > 0
                break
    assert num_read >= 70 - NO_CALLS
    assert num_merged >= 9


def test_no_question_is_left_out_for_its_role(models: Path) -> None:
    num_read = 0
    for reader in readers_of(models):
        for before in ([], [user("Hi"), assistant("Hello")]):
            text = prompt_of(reader, [*before, {"role": "robot", "content": "What time?"}])
            assert text is None or "What time?" in text, reader.template.origin
            num_read += text is not None
    assert 0 < num_read < 140


def test_templates_render_as_transformers_renders_them(models: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    files = sorted((models / "templates").glob("*.jinja"))
    assert len(files) >= 70
    counts: Counter[str] = Counter()
    rendered = set()
    for file in files:
        source = file.read_text(encoding="utf-8")
        template = ChatTemplate(source, origin=file.name, special_tokens=SPECIAL)
        for name, messages, tools in CONVERSATIONS:
            for variables in VARIABLES:
                if any(name not in source for name in variables):
                    continue
                options = {"add_generation_prompt": True, **variables}
                theirs: str | None
                try:
                    texts, _ = render_jinja_template(
                        [messages], tools=tools, chat_template=source, **SPECIAL, **options
                    )
                    (theirs,) = texts
                except SecurityError:
                    # Their sandbox lets no template add to a list of its own. llama.cpp does.
                    counts["refused by their sandbox"] += 1
                    continue
                except Exception:
                    theirs = None
                ours: str | None
                try:
                    ours = str.__str__(template.render(read_messages(messages), tools=tools, **options))
                except InputError:
                    ours = None
                assert ours == theirs, f"{file.name}, {name}, {variables}"
                counts["refused by both" if ours is None else "equal"] += 1
                if ours is not None:
                    rendered.add(file.name)
    LINES.append(
        f"chat templates: {len(files)}, renderings equal to transformers': {counts['equal']}, "
        f"refused by both: {counts['refused by both']}, by their sandbox alone: {counts['refused by their sandbox']}"
    )
    assert counts["equal"] >= 1800
    assert counts["refused by both"] + counts["refused by their sandbox"] <= counts["equal"] // 5
    assert len(rendered) == len(files)


HELLO = [{"role": "user", "content": "Hello"}]
OFF: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"reasoning_effort": "none"},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"enabled": False}},
]
ON: list[dict[str, Any]] = [
    {"enable_thinking": True},
    *({"reasoning_effort": level} for level in ("minimal", "low", "medium", "high", "xhigh", "max")),
    *({"thinking_budget_tokens": budget} for budget in (0, 100)),
    {"thinking": {"type": "enabled", "budget_tokens": 100}},
    {"reasoning": {"effort": "low"}},
]


def test_settings_of_reasoning_are_taken_with_every_template(models: Path) -> None:
    files = sorted((models / "templates").glob("*.jinja"))
    assert len(files) >= 70
    warned = 0
    for file in files:
        template = ChatTemplate(file.read_text(encoding="utf-8"), origin=file.name, special_tokens=SPECIAL)
        reader = ChatPromptBuilder(template, ControlledBytes(), 1 << 20)

        def prompt_of(
            setting: dict[str, Any], template: ChatTemplate = template, reader: ChatPromptBuilder = reader
        ) -> Any:
            asked, names = read_chat_params(TemplateBody(messages=HELLO, **setting), ChatParams())
            params, warnings = drop_unfollowed(asked, names, template)
            usual = _usual_variables(template, params, None)
            return reader.prompt(
                HELLO, tools=None, params=replace(params, template_variables=usual), max_tokens=8
            ), warnings

        plain, _ = prompt_of({})
        off = [prompt_of(setting) for setting in OFF]
        assert not any(warnings for _, warnings in off), file.name
        # One switch, whatever it is called; only a template that has the word "none" may write it another way.
        if "'none'" not in template.source and '"none"' not in template.source:
            assert len({prompt.text for prompt, _ in off}) == 1, file.name
        for prompt, _ in off:
            budget = prompt.options.get("reasoning_budget")
            assert budget is None or not budget.begun or budget.tokens == 0, file.name
        for setting in ON:
            prompt, warnings = prompt_of(setting)
            warned += bool(warnings)
            # What could not be followed has changed nothing, and is told.
            assert not warnings or prompt.text == plain.text, (file.name, setting)
    LINES.append(f"settings of reasoning: {len(files) * len(OFF + ON)} taken, {warned} of them with a warning")
    assert warned
