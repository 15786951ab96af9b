"""Calls by every template in use: written as its family writes them, read back, and told of in the next turn."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("transformers")

from paceline.chat.params import ChatParams
from paceline.chat.prompt_builder import ChatPromptBuilder
from paceline.chat.template import ChatTemplate
from paceline.chat.tool_calls.formats import PLAIN_CALLS
from paceline.chat.tool_calls.grammar import build_calls_source
from paceline.chat.tool_calls.response_template import find_call_format
from paceline.core.errors import InputError
from tests.chat.conversing import ControlledBytes
from tests.chat.tool_calls.answers import BY_NAME, REFERRED, Message, added, is_referred, parser_of, tool
from tests.chat.tool_calls.machine import CONTROL_IDS, text_of, written_at_random
from tests.proofs import LINES
from tests.real.conversations import SPECIAL

NOW = tool("now", {})
NO_PARAMETERS: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


def drawn(family: str, asked: list[dict[str, Any]], rng: random.Random, *, required: bool, before: str = "") -> Message:
    """Return what an answer comes to that is drawn from the grammar of tools.

    Args:
        family: of the model.
        asked: the tools.
        rng: draws.
        required: whether the answer has to be a call.
        before: what stands before the call.
    """
    while True:
        ids = CONTROL_IDS if rng.random() < 0.5 else {}
        grammar = build_calls_source(BY_NAME[family], asked, required=True, parallel=False, control_ids=ids).text
        token_ids = written_at_random(grammar, rng, 1500)
        if token_ids is not None:
            parser = parser_of(family, asked, required=required)
            return added([*parser.push(before + text_of(token_ids).lstrip()), *parser.finish()])


def test_calls_of_every_template_are_read_and_told_of(models: Path) -> None:
    counts: Counter[str] = Counter()
    for file in sorted((models / "templates").glob("*.jinja")):
        template = ChatTemplate(file.read_text(encoding="utf-8"), origin=file.name, special_tokens=SPECIAL)
        known = find_call_format(template)
        family = PLAIN_CALLS.name if known is None else known.name
        counts["families known" if known is not None else "families unknown"] += 1
        rng = random.Random(file.name)
        reader = ChatPromptBuilder(template, ControlledBytes(), 1 << 20)
        for asked in (REFERRED, NOW, NO_PARAMETERS):
            forced = drawn(family, [asked], rng, required=True)
            assert (forced.content, len(forced.calls)) == ("", 1), file.name
            counts["forced calls"] += 1
            answers = [forced]
            if known is not None:
                said = "" if known.bare or family == "gpt-oss" else "Let me see.\n"
                free = drawn(family, [asked], rng, required=False, before=said)
                assert (free.content.replace("<|start|>assistant", ""), len(free.calls)) == (said.strip(), 1), file.name
                counts["calls under auto"] += 1
                answers.append(free)
            for answer in answers:
                [(name, arguments)] = answer.called
                assert name == asked["function"]["name"]
                assert is_referred(arguments) if asked is REFERRED else arguments == {}, file.name
                _check_history(reader, asked, answer, counts)
    assert sum(counts[name] for name in ("families known", "families unknown")) >= 70
    assert counts["told of"] > counts["refused in words"]
    LINES.append(f"calls by chat templates: {', '.join(f'{name} {number}' for name, number in counts.items())}")


def _check_history(reader: ChatPromptBuilder, asked: dict[str, Any], answer: Message, counts: Counter[str]) -> None:
    """Render the conversation as clients send it on: no content beside the call, its arguments as they came."""
    [(call_id, name, arguments)] = answer.calls
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": name, "content": "the-result-of-it"},
    ]
    told = {**asked, "function": {"description": "", "parameters": {}, **asked["function"]}}
    try:
        text = reader.prompt(messages, tools=[told], params=ChatParams(forget=False), max_tokens=0).text
    except InputError as error:
        reason = str(error)
    else:
        # Some templates leave calls out of what was said before; none may leave out what came of them.
        assert "the-result-of-it" in text
        counts["told of"] += 1
        return
    # A template without a place for what tools say: its reason names the message or the template.
    assert "chat template" in reason
    counts["refused in words"] += 1
