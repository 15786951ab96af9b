"""Chat templates in use, rendered as transformers renders them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.chat.messages import read_messages
from paceline.chat.template import ChatTemplate
from paceline.core.errors import InputError
from tests.conftest import SUMMARY_LINES
from tests.real.conversations import CONVERSATIONS

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"reasoning_effort": "high"},
    {"add_generation_prompt": False},
    {"functions": "[]", "datetime": "today"},
]


def test_templates_render_as_transformers_renders_them(models: Path, pytestconfig: pytest.Config) -> None:
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
    pytestconfig.stash[SUMMARY_LINES].append(
        f"chat templates: {len(files)}, renderings equal to transformers': {counts['equal']}, "
        f"refused by both: {counts['refused by both']}"
    )
    assert counts["equal"] >= 1800
    assert counts["refused by both"] <= counts["equal"] // 5
    assert len(rendered) == len(files)
