"""Texts as tokens and back, and conversations as the prompts that they come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from paceline.chat.params import ChatParams
from paceline.serving.schema import MAX_TEXTS
from tests.chat.conversing import THINKING
from tests.serving.hosted import Hosted, hosted, scripted

TEXT: Final = "ab 中😀<|im_end|>\n"
MESSAGES: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <|im_end|>"},
]
PROMPT: Final = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay <|im_end|><|im_end|>\n<|im_start|>assistant\n"
)


def test_a_text_becomes_tokens_and_they_become_the_text(server: Hosted) -> None:
    tokens = server.answer("/tokenize", {"content": TEXT})["tokens"]
    assert tokens.count(257) == 1
    assert server.answer("/detokenize", {"tokens": tokens}) == {"content": TEXT, "prompt": TEXT}
    spelled = server.answer("/tokenize", {"content": TEXT, "parse_special": False})["tokens"]
    assert spelled == list(TEXT.encode())
    mixed = server.answer("/tokenize", {"content": ["ab", 257, "c"]})["tokens"]
    assert mixed == [97, 98, 257, 99]
    assert server.answer("/tokenize", {"content": ""}) == {"tokens": []}
    assert server.answer("/tokenize", {}) == {"tokens": []}
    assert server.answer("/detokenize", {"tokens": [65.0, 66]})["content"] == "AB"
    assert server.answer("/detokenize", {"tokens": []}) == {"content": "", "prompt": ""}


def test_each_token_comes_with_what_it_spells(server: Hosted) -> None:
    tokens = server.answer("/tokenize", {"content": "aß<|im_end|>", "with_pieces": True})["tokens"]
    assert tokens == [
        {"id": 97, "piece": "a"},
        {"id": 195, "piece": [195]},
        {"id": 159, "piece": [159]},
        {"id": 257, "piece": "<|im_end|>"},
    ]


@pytest.mark.parametrize("at_once", [1, 3])
def test_many_tokens_are_spelled_and_written_as_few_are(
    server: Hosted, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [97, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 98, 257, 0xC3]
    bodies: list[tuple[str, dict[str, Any]]] = [("/detokenize", {"tokens": tokens})]
    bodies += [("/tokenize", {"content": TEXT, "with_pieces": pieces, "odd": 1}) for pieces in (False, True)]
    expected = [server.answer(path, body) for path, body in bodies]
    assert expected[0] == dict.fromkeys(("content", "prompt"), "a中\ufffdb<|im_end|>\ufffd")
    for module in ("app", "prompts"):
        monkeypatch.setattr(f"paceline.serving.{module}.AT_ONCE", at_once)
    assert [server.answer(path, body) for path, body in bodies] == expected


def test_a_text_that_would_take_long_to_tokenize_is_refused(server: Hosted) -> None:
    error = server.refusal("/tokenize", {"content": ["a" * (1 << 20), 97, "é" * (1 << 19) + "a"]})
    assert error["param"] == "content"
    assert error["message"] == "content has 2097153 bytes: at most 2097152 are tokenized at once; send parts"


REFUSED: Final[list[tuple[str, dict[str, list[Any]], dict[str, Any]]]] = [
    ("/tokenize", {"content": [5, [1.5], [260], ["a"] * (MAX_TEXTS + 1)], "with_pieces": ["yes"]}, {"content": "a"}),
    ("/detokenize", {"tokens": ["a", "5", 5, None, [True], ["5"], [5.5], [[5]], [260], [-1], [10**15]]}, {}),
    ("/apply-template", {"messages": [None, "hello"]}, {}),
    ("/v1/chat/completions/input_tokens", {"messages": [None]}, {}),
    ("/v1/chat/completions/control", {"action": [None, "explode"]}, {"id": "x"}),
]


@pytest.mark.parametrize(("path", "refused", "body"), REFUSED)
def test_what_cannot_be_used_names_its_field(
    server: Hosted, path: str, refused: dict[str, list[Any]], body: dict[str, Any]
) -> None:
    for param, values in refused.items():
        for value in values:
            assert server.refusal(path, {**body, param: value})["param"] == param, value


def test_the_embedded_pair_has_tokens_of_its_own(pair_server: Hosted) -> None:
    text = "def fibonacci(n):  # 中"
    plain, opened = (
        pair_server.answer("/tokenize", {"content": text, "add_special": special})["tokens"]
        for special in (False, True)
    )
    assert opened[len(opened) - len(plain) :] == plain
    assert pair_server.answer("/detokenize", {"tokens": plain})["content"].strip() == text
    vocabulary = pair_server.model.target.vocabulary
    assert opened == list(vocabulary.tokenize(text, add_special=True, parse_special=True))


def test_a_conversation_is_written_as_the_template_has_it(server: Hosted) -> None:
    body = {"messages": MESSAGES}
    assert server.answer("/apply-template", body) == {"prompt": PROMPT}
    closed = server.answer("/apply-template", {**body, "add_generation_prompt": False})
    assert closed == {"prompt": PROMPT.removesuffix("<|im_start|>assistant\n")}
    going_on = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    continued = server.answer("/apply-template", {"messages": going_on, "continue_final_message": True})
    assert continued == {"prompt": f"{PROMPT}It is"}


def test_a_conversation_is_counted_as_it_is_answered(server: Hosted) -> None:
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        count = server.answer(path, {"messages": MESSAGES})["input_tokens"]
        usage = server.answer("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})["usage"]
        assert count == usage["prompt_tokens"]
    # What the user wrote is text, and no control token.
    assert count == server.answer("/v1/chat/completions/input_tokens", {"messages": MESSAGES})["input_tokens"]
    parsed = server.answer("/tokenize", {"content": PROMPT})["tokens"]
    assert count == len(parsed) + len("<|im_end|>") - 1


def test_variables_reach_the_template() -> None:
    with hosted(lambda: scripted(THINKING)) as running:
        body = {"messages": MESSAGES[:1]}
        quiet = running.answer("/apply-template", {**body, "chat_template_kwargs": {"enable_thinking": False}})
        assert quiet["prompt"].endswith("<think>\n\n</think>\n\n")
        assert not running.answer("/apply-template", body)["prompt"].endswith("</think>\n\n")


def test_a_model_without_a_template_answers_completions_alone() -> None:
    with hosted(lambda: replace(scripted(), template=None, chat=ChatParams(forget=False))) as running:
        error = running.refusal("/v1/chat/completions", {"messages": MESSAGES})
        assert "no chat template" in error["message"]
        assert "use /v1/completions" in error["message"]
        assert running.answer("/completion", {"prompt": "a", "n_predict": 1})["tokens_predicted"] == 1
        assert running.get("/v1/models").json()["models"][0]["capabilities"] == ["completion"]
