"""Texts that pairs are looked at on, and what they are cut into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import InputError
from paceline.engines.scripted import ScriptedVocabulary
from paceline.lab.samples import PROMPT_TOKENS, Sample, file_samples, heldout_samples, make_tasks, split_samples
from paceline.models.embedded import HELDOUT_KINDS

LETTERS = ScriptedVocabulary([bytes([letter]) for letter in range(1, 127)])


def test_kinds_take_turns() -> None:
    kinds = [sample.kind for sample in heldout_samples()]
    assert tuple(kinds[:4]) == HELDOUT_KINDS
    assert kinds[:4] * (len(kinds) // 4) == kinds


def test_a_text_is_cut_where_lines_begin(tmp_path: Path) -> None:
    path = tmp_path / "my.txt"
    lines = [f"line {number} of this text" for number in range(200)]
    path.write_text("\n".join(lines))
    samples = file_samples(path)
    assert len(samples) == 24
    assert {sample.kind for sample in samples} == {"own"}
    assert all(sample.text.startswith("line ") for sample in samples)
    assert samples[0].text.startswith("line 0 "), "from its beginning"
    assert any(sample.text.startswith("line 19") for sample in samples), "to its end"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("my.txt", "a text without an end of line", ["a text without an end of line"]),
        ("my.jsonl", '{"prompt": "a"}\n{"text": "b", "id": 1}\n{"content": "c"}\n"d"\n\n', ["a", "b", "c", "d"]),
        ("my.jsonl", '{"prompt": "a"}\r\n{"text": "b"}\r\n', ["a", "b"]),
        ("my.jsonl", '{"prompt": "a\u2028b\x85c"}\n', ["a\u2028b\x85c"]),
    ],
    ids=["a short text", "lines of JSON", "lines of Windows", "what is no end of a line in JSON"],
)
def test_a_short_text_is_one_prompt_and_lines_of_json_are_several(
    name: str, content: str, prompts: list[str], encoding: str, tmp_path: Path
) -> None:
    """A byte order mark is no part of them."""
    path = tmp_path / name
    path.write_text(content, encoding=encoding, newline="")
    assert [sample.text for sample in file_samples(path)] == prompts


def test_of_many_lines_of_json_the_last_one_read_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{number} " + "x" * 1000}) + "\n" for number in range(5000)))
    samples = file_samples(path)
    assert 4000 < len(samples) < 5000
    assert {len(sample.text.partition(" ")[2]) for sample in samples} == {1000}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("my.jsonl", "{", "line 1: this is not JSON"),
        ("my.jsonl", "[" * 100_000, "line 1: this is not JSON"),
        ("my.jsonl", '"a"\n{"prompt": 3}', "line 2: there is no text"),
        ("my.jsonl", "[1]", "line 1: there is no text"),
        ("my.txt", " \n\n", "holds no text"),
        ("my.jsonl", "\n", "holds no text"),
        ("absent.txt", None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_text_is_said(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=says) as caught:
        file_samples(path)
    assert "\n" not in str(caught.value)


def test_tasks_are_beginnings_with_seeds_of_their_own() -> None:
    samples = [Sample("code", "a", "x" * 500), Sample("logs", "b", "short"), Sample("logs", "c", "y" * 20)]
    tasks = make_tasks(samples, LETTERS, tokens=10, context_length=4096, seed=7)
    assert [(task.workload, task.name, len(task.prompt_ids), task.seed) for task in tasks] == [
        ("code", "a", PROMPT_TOKENS, 7),
        ("logs", "c", 20, 9),
    ]


def test_prompts_and_answers_fit_the_context() -> None:
    samples = [Sample("code", "a", "x" * 500)]
    assert len(make_tasks(samples, LETTERS, tokens=24, context_length=40, seed=0)[0].prompt_ids) == 16
    with pytest.raises(InputError, match="leave 4 for prompts in a context of 28"):
        make_tasks(samples, LETTERS, tokens=24, context_length=28, seed=0)
    with pytest.raises(InputError, match="no text is as long as 8 tokens"):
        make_tasks([Sample("code", "a", "xyz")], LETTERS, tokens=24, context_length=4096, seed=0)


def test_halves_have_every_other_text_of_each_kind() -> None:
    samples = heldout_samples()
    first, second = split_samples(samples)
    assert sorted(sample.name for sample in (*first, *second)) == sorted(sample.name for sample in samples)
    for half in (first, second):
        assert [sum(sample.kind == kind for sample in half) for kind in HELDOUT_KINDS] == [6] * len(HELDOUT_KINDS)


def test_a_text_without_others_of_its_kind_is_in_both_halves() -> None:
    alone = Sample("own", "own:1", "a text")
    assert split_samples([alone]) == ([alone], [alone])
