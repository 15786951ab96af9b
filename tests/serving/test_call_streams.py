"""Calls in streams: what the deltas of a live stream add up to is the message of the same answer sent whole.

The tokens of the model are pieces of its answers, cut at random within characters too, and the rounds of the engine
bring from one to several of them.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

import paceline
from paceline.chat.params import ChatParams
from paceline.chat.template_sources import find_template
from paceline.chat.tool_calls.formats import FORMATS
from paceline.core.arrays import Float64Array
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.options import ModelOptions
from paceline.engines.scripted import LogitFunction, ScriptedEngine
from paceline.models.embedded import embedded_draft
from paceline.serving.model_host import ServedModel
from tests.chat.conversing import CHATML, ControlledBytes
from tests.chat.tool_calls.answers import ANSWERS, SOURCES, THINK, TOOLS, Answer
from tests.serving import messages
from tests.serving.hosted import NAME, hosted
from tests.tiers import by_tier, some_long

pytest.importorskip("transformers")

HEADER: Final = len("assistant\n")
FAMILIES: Final = [one.name for one in FORMATS]
NUM_CUTTINGS: Final = by_tier(10, quick=2)
SPECULATIVE: Final[tuple[dict[str, Any], ...]] = ({}, {"draft_max": 1}, {"draft_max": 6}, {"off": True})
"""How much is drafted: rounds bring one token, or as many as were drafted and one more."""


class Pieces(ControlledBytes):
    """A vocabulary of bytes, control tokens, and pieces of texts.

    Attributes:
        said: token ids that spell each of the texts, one cutting after the other.
        start: the token that begins a message.
    """

    def __init__(self, texts: Sequence[str], cuttings: int, rng: random.Random) -> None:
        super().__init__()
        ids: dict[bytes, int] = {}
        self.said: list[list[int]] = []
        (end,) = self.end_ids
        for text in texts:
            for _ in range(cuttings):
                pieces = _cut(text.encode(), rng)
                for piece in pieces:
                    ids.setdefault(piece, self.size + len(ids))
                self.said.append([*(ids[piece] for piece in pieces), end])
        self._pieces += ids
        self._spellings += ids
        (self.start,) = self.tokenize("<|im_start|>", parse_special=True)


def _cut(text: bytes, rng: random.Random) -> list[bytes]:
    share = rng.choice((0.05, 0.2, 0.5, 0.9))
    places = [0, *(place for place in range(1, len(text)) if rng.random() < share), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


def answering(vocabulary: Pieces, *, mistakes: int = 0) -> LogitFunction:
    """Return a model that answers a message that ends with the character ``48 + i`` with the text of that number.

    Args:
        vocabulary: has the texts.
        mistakes: it says the end instead of each token of such a number; 0 for none.
    """
    (end,) = vocabulary.end_ids

    def logits(tokens: Sequence[int]) -> Float64Array:
        row: Float64Array = np.full(vocabulary.size, -9.0)
        begun = len(tokens) - 1 - next(i for i, token_id in enumerate(reversed(tokens)) if token_id == vocabulary.start)
        # The character, the end of its message and a line break stand before the beginning of the answer.
        text = vocabulary.said[(tokens[begun - 3] - 48) % len(vocabulary.said)] if begun > 3 else []
        num_said = len(tokens) - begun - 1 - HEADER
        is_mistaken = mistakes and num_said % mistakes == mistakes - 1
        row[text[num_said] if 0 <= num_said < len(text) and not is_mistaken else end] = 9.0
        return row

    return logits


def served(template: str, vocabulary: Pieces) -> ServedModel:
    """Return a model that answers, with a draft model that errs at every fifth token."""
    limits: dict[str, Any] = {"context_length": 4096, "max_sequences": 4}
    draft = ScriptedEngine(answering(vocabulary, mistakes=5), vocabulary, **limits)
    model = paceline.Model(
        ScriptedEngine(answering(vocabulary), vocabulary, **limits),
        [DraftModelDrafter(draft, target_vocab_size=vocabulary.size)],
        paceline.FixedPolicy(3),
        target_options=ModelOptions(embedded_draft(), context_length=4096),
    )
    found = find_template(embedded_draft(), vocabulary, replaced_by=template)
    return ServedModel(
        model, None, (NAME,), policy="fixed", template=found, chat=ChatParams(template=template, forget=False)
    )


def told(message: Any, reason: str | None, ids: Sequence[str]) -> dict[str, Any]:
    """Return what a message says; ids that are drawn are left out."""
    calls = message.tool_calls or []
    said = [(call.id, call.function.name, call.function.arguments) for call in calls]
    return {
        "content": message.content,
        "reasoning": getattr(message, "reasoning_content", None),
        "calls": [
            (call_id if given else "", *rest)
            for (call_id, *rest), given in zip(said, ids or [""] * len(said), strict=True)
        ],
        "reason": reason,
    }


def streamed(client: openai.OpenAI, asked: dict[str, Any], ids: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Return what the deltas of a stream add up to in OpenAI's client, and how many drafted tokens are in it."""
    state, num_accepted = ChatCompletionStreamState(), 0
    for chunk in client.chat.completions.create(**asked, stream=True):
        state.handle_chunk(chunk)
        num_accepted = (chunk.model_extra or {}).get("timings", {}).get("draft_n_accepted", 0)
    (choice,) = state.get_final_completion().choices
    return told(choice.message, choice.finish_reason, ids), num_accepted


def answers_of(family: str) -> list[Answer]:
    """Return answers of a family, of which one at least has reasoning and two calls or more."""
    answers = [answer for answer in ANSWERS if answer.family == family]
    if not any(answer.reasoning and len(answer.calls) > 1 for answer in answers):
        most = max(answers, key=lambda answer: len(answer.calls))
        text = f"<think>\nWhich < tool?\n</think>\n\n{most.text}"
        answers.append(replace(most, text=text, reasoning="Which < tool?", markers=THINK))
    return answers


@pytest.mark.parametrize("family", some_long(FAMILIES, quick=FAMILIES[::3]))
def test_a_stream_adds_up_to_the_message_of_the_whole_answer(family: str) -> None:
    answers = answers_of(family)
    (markers,) = {answer.markers for answer in answers if answer.reasoning}
    assert markers is not None
    signs = f"{SOURCES[family]} {markers.start} {markers.end}".replace("#", "")
    vocabulary = Pieces([answer.text for answer in answers], NUM_CUTTINGS, random.Random(family))
    template = f"{{# {signs} #}}{CHATML}"
    tools = [
        {**tool["function"], "input_schema": tool["function"].get("parameters", {}), "parameters": None}
        for tool in TOOLS
    ]
    with (
        hosted(lambda: served(template, vocabulary)) as server,
        server.client() as client,
        server.anthropic_client() as other,
    ):
        accepted = set()
        for number, answer in enumerate(answers):
            asked: dict[str, Any] = {"model": NAME, "tools": TOOLS, "temperature": 0, "max_tokens": 2000}
            asked["messages"] = [{"role": "user", "content": chr(48 + number * NUM_CUTTINGS)}]
            (choice,) = client.chat.completions.create(**asked).choices
            message = told(choice.message, choice.finish_reason, answer.ids)
            assert message["reasoning"] == answer.reasoning
            assert (message["content"] or "") == answer.content
            assert [(name, json.loads(arguments)) for _, name, arguments in message["calls"]] == list(answer.calls)
            assert message["reason"] == "tool_calls"
            asked_other = {**asked, "tools": tools, "extra_body": {"temperature": 0}}
            del asked_other["temperature"]
            blocks = messages.said(other.messages.create(**asked_other))
            assert "".join(block.get("thinking", "") for block in blocks) == (answer.reasoning or "")
            assert "".join(block.get("text", "") for block in blocks) == answer.content
            assert [(block["name"], block["input"]) for block in blocks if "name" in block] == list(answer.calls)
            for cutting in range(NUM_CUTTINGS):
                asked["messages"] = [{"role": "user", "content": chr(48 + number * NUM_CUTTINGS + cutting)}]
                asked["extra_body"] = {"speculative": SPECULATIVE[(number + 3 * cutting) % len(SPECULATIVE)]}
                found, num_accepted = streamed(client, asked, answer.ids)
                assert found == message
                if cutting % 2 == 0:
                    asked_other["messages"] = asked["messages"]
                    asked_other["extra_body"] = {**asked["extra_body"], "temperature": 0}
                    assert messages.said(messages.streamed(other, **asked_other)) == blocks
                accepted.add(num_accepted)
        assert 0 in accepted
        assert max(accepted) > 3
