"""Prompts in every form that callers have them in."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import InputError
from paceline.engines.scripted import ScriptedVocabulary
from paceline.prompts import read_prediction, read_prompt

VOCABULARY = ScriptedVocabulary.of_size(40)
FORMS: dict[str, Any] = {
    "list": [3, 1, 2],
    "tuple": (3, 1, 2),
    "array": array.array("i", [3, 1, 2]),
    "generator": (token_id for token_id in (3, 1, 2)),
    "numpy's numbers": [np.int64(3), np.int32(1), np.uint8(2)],
    "numpy's row": np.array([3, 1, 2]),
    "numpy's batch": np.array([[3, 1, 2]], np.int32),
    "nested list": [[3, 1, 2]],
    "list of a numpy row": [np.array([3, 1, 2])],
    "list of a list of numpy's numbers": [[np.int64(3), np.int64(1), np.int64(2)]],
}


@pytest.mark.parametrize("name", FORMS)
def test_one_row_of_token_ids(name: str) -> None:
    token_ids = read_prompt(FORMS[name], VOCABULARY)
    assert token_ids == [3, 1, 2]
    assert {type(token_id) for token_id in token_ids} == {int}


def test_one_row_of_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    row = torch.tensor([3, 1, 2])
    for form in (row, row[None], list(row), [row], row[None].to(torch.int32)):
        assert read_prompt(form, VOCABULARY) == [3, 1, 2]
    with pytest.raises(InputError):
        read_prompt(row > 1, VOCABULARY)


def test_a_text_is_read_by_the_vocabulary() -> None:
    text = (VOCABULARY.token_bytes(3) + VOCABULARY.token_bytes(5)).decode()
    assert read_prompt(text, VOCABULARY) == VOCABULARY.tokenize(text) == [3, 5]


def test_no_tokens_are_for_the_loop_to_refuse() -> None:
    forms: list[Any] = [[], [[]], np.zeros(0, int), np.zeros((1, 0), int)]
    for empty in forms:
        assert read_prompt(empty, VOCABULARY) == []


REFUSED: dict[str, Any] = {
    "rows": [[1, 2], [3]],
    "rows of an array": np.ones((3, 4), int),
    "three dimensions": np.ones((1, 1, 4), int),
    "a row among numbers": [1, [2]],
    "floats": [1, 2.0],
    "an array of floats": np.array([1.0]),
    "texts": ["a text"],
    "truth values": [True],
    "nothing": [None],
    "none": None,
    "a number": 5,
    "an array without dimensions": np.array(5),
    "bytes": b"abc",
    "a mapping": {"input_ids": [1], "attention_mask": [1]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_things_are_one_clear_line(name: str) -> None:
    with pytest.raises(InputError) as caught:
        read_prompt(REFUSED[name], VOCABULARY)
    assert caught.value.field == "prompt"
    has_rows = name in ("rows", "rows of an array", "three dimensions", "a row among numbers")
    assert (" rows" in str(caught.value)) == has_rows
    assert "\n" not in str(caught.value)


def test_a_prediction_is_a_text_or_token_ids() -> None:
    assert read_prediction("#$%", VOCABULARY, 3) == tuple(VOCABULARY.tokenize("#$%"))
    for form in ([3, 1, 2], np.array([3, 1, 2]), (np.int64(3), 1, 2)):
        found = read_prediction(form, VOCABULARY, 3)
        assert found == (3, 1, 2)
        assert {type(token_id) for token_id in found} == {int}


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("", "the prediction is empty"),
        ([], "the prediction is empty"),
        (5, "the prediction is 5"),
        (b"abc", "the prediction is b'abc'"),
        (["abc"], "'abc'"),
        ([1.5], "1.5"),
        ([-1], "-1"),
        ("#" * 9, "has at least 9 tokens"),
        ([1] * 9, "has 9 tokens, and no answer has more than the 8 "),
    ],
)
def test_what_is_no_prediction_is_said_in_one_line(prediction: object, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_prediction(prediction, VOCABULARY, 8)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.field == "prediction"
