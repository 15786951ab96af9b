"""Which control tokens end an answer although nothing names them."""

from __future__ import annotations

import pytest

from paceline.vocabularies.turns import unnamed_turn_ends

CONTROL = {"</s>": 2, "<|im_start|>": 30, "<|im_end|>": 31, "<|end|>": 32, "<|return|>": 33, "<|eot_id|>": 34}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("templates", "named", "ends"),
    [
        ([CHATML], ["</s>"], [31]),
        ([CHATML], [], [31]),
        (["{{ 1 }}", CHATML], ["</s>"], [31]),
        # One that is named closes turns.
        ([CHATML], ["<|im_end|>"], []),
        ([CHATML + "</s>"], ["</s>"], []),
        ([CHATML + "{{ eos_token }}"], ["</s>"], []),
        (["<|start|>assistant{{ m.content }}<|end|><|return|>"], ["<|return|>"], []),
        # It closes messages, of which an answer may have several.
        (["<|start|>assistant{{ m.content }}<|end|>"], ["</s>"], []),
        # No token of the vocabulary, or none that closes turns.
        (["{{ m.content }}<end_of_turn>"], ["</s>"], []),
        (["<|im_start|>{{ m.content }}"], ["</s>"], []),
        ([], ["</s>"], []),
        ([""], [], []),
    ],
)
def test_what_closes_turns_ends_an_answer_where_nothing_named_does(
    templates: list[str], named: list[str], ends: list[int]
) -> None:
    assert unnamed_turn_ends(templates, CONTROL, named) == ends
