"""Edits of code files, and answers that are decoded where passes cost what a profile says."""

from __future__ import annotations

import random

import pytest
from benchmarks.edits import SIDES, Answered, _decode_virtually, _Side, _Task, make_edit
from benchmarks.planner_ab.corpus import priced

from paceline.core.errors import InputError
from paceline.models.embedded import heldout


def test_each_kind_of_edit_leaves_most_of_a_text() -> None:
    kinds = set()
    for number, text in enumerate(heldout("code")[:8]):
        edit = make_edit(text, number, random.Random(number))
        assert edit == make_edit(text, number, random.Random(number))
        assert edit.text != text
        before, after = set(text.splitlines()), set(edit.text.splitlines())
        assert len(before & after) > len(before) / 2
        kinds.add(edit.words.split()[0])
    assert kinds == {"rename", "delete", "log", "rewrite"}
    with pytest.raises(InputError, match="4 lines"):
        make_edit("a\nb\n", 1, random.Random(0))


def test_answers_are_decoded_again_and_counted() -> None:
    before = list(range(10, 70))
    after = [*before[:20], 5, 6, *before[23:]]
    answered: list[Answered] = [(_Task("forced", [1, 2, 3], before, after), after)] * 3
    found = {side: _Side() for side in SIDES}
    for side, one in found.items():
        _decode_virtually(answered, side, priced("h100-llama-8b-q4_0").costs, one)
        assert one.equal == len(one.speeds) == 3
    # Nothing of the answer stands in the prompt.
    assert found["plain"].accepted == found["lookups"].accepted == found["lookups"].drafted == 0
    assert 3 * 40 < found["prediction"].accepted < found["prediction"].drafted
    assert found["prediction"].speeds[-1] > 3 * found["plain"].speeds[-1]
