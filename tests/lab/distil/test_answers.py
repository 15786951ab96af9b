"""The split of prompts, the order of tasks, and a log of answers that only grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import InputError
from paceline.engines.options import ModelOptions
from paceline.lab.comparison import Stopped
from paceline.lab.distil.answers import (
    MIN_PROMPTS,
    AnswerLog,
    answer_options,
    embedded_prompts,
    longest_prompt,
    make_tasks,
    own_prompts,
    read_log,
    split_prompts,
    write_answers,
)
from paceline.lab.samples import Sample
from paceline.models.embedded import embedded_target
from tests.lab.distil.helpers import answer
from tests.lab.scripted_pairs import bytes_vocabulary


def samples(count: int, kind: str = "own") -> list[Sample]:
    return [Sample(kind, f"{kind}:{number}", f"prompt {number} of {kind} " * 9) for number in range(count)]


def test_no_text_is_on_both_sides_and_the_split_is_of_the_texts_alone() -> None:
    texts = samples(20)
    split = split_prompts([*texts, *texts], samples(3, "other"), name="file")
    train, held = ({sample.text for sample in part} for part in (split.train, split.held))
    assert (len(split.train), len(split.held)) == (15, 5)
    assert not train & held
    again = split_prompts(texts[::-1], (), name="file")
    assert {sample.text for sample in again.held} == held


def test_few_prompts_are_refused() -> None:
    with pytest.raises(InputError, match=str(MIN_PROMPTS)):
        split_prompts(samples(MIN_PROMPTS - 1) * 2, (), name="file")


def test_paceline_s_own_texts_leave_a_kind_out() -> None:
    split = embedded_prompts()
    assert set(split.kinds) == {"code", "prose", "json"}
    assert {sample.kind for sample in split.other} == {"logs"}


def test_a_file_of_prompts_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(12)))
    split = own_prompts(path)
    assert split.as_they_are
    tasks = list(make_tasks(split, bytes_vocabulary(), max_prompt=256, tokens=32, temperature=0.0, seed=1))
    of_prompts = [task for part, task in tasks if part != "other"]
    assert len(of_prompts) == 12
    assert bytes(of_prompts[0].prompt_ids).startswith(b"say ")


def test_those_to_judge_by_come_among_those_to_train_on() -> None:
    """So that a slow target has both when the time is over."""
    split = split_prompts(samples(40), samples(4, "other"), name="file")
    tasks = list(make_tasks(split, bytes_vocabulary(), max_prompt=256, tokens=32, temperature=0.8, seed=1))
    parts = [part for part, _ in tasks]
    assert parts[:MIN_PROMPTS].count("held") >= 4
    assert parts[:30].count("train") >= 15
    assert parts.count("held") == 10
    assert parts.count("other") == 4
    # Of one seed, all answers would have the same noise.
    assert len({task.seed for _, task in tasks}) == len(tasks)


def test_prompts_have_the_room_that_answers_leave() -> None:
    target = ModelOptions(embedded_target(), context_length=128)
    assert longest_prompt(target, 64) == 63
    with pytest.raises(InputError, match="-c"):
        longest_prompt(target, 120)
    # No more than the model was made for, which is 4096.
    assert longest_prompt(ModelOptions(embedded_target()), 3968) == 127
    split = split_prompts(samples(12), samples(2, "other"), name="file")
    tasks = make_tasks(split, bytes_vocabulary(), max_prompt=20, tokens=64, temperature=0.8, seed=1)
    assert {len(task.prompt_ids) for _, task in tasks} == {20}


def test_a_log_is_read_again_and_a_torn_line_written_over(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    log = AnswerLog(path)
    answers = [answer(number) for number in range(3)]
    for each in answers[:2]:
        log.add(each)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"part": "train", "kind": "co')
    again = AnswerLog(path)
    assert again.answers == answers[:2]
    again.add(answers[2])
    assert AnswerLog(path).answers == answers
    assert path.read_bytes().startswith(whole)


def test_a_draft_reads_another_token_in_the_place_of_those_it_lacks() -> None:
    each = answer(1)
    read = each.as_read(100, 7)
    assert len(read.token_ids) == len(each.token_ids)
    assert read.token_ids == tuple(token if token < 100 else 7 for token in each.token_ids)
    assert max(read.task.prompt_ids) < 100
    assert each.as_read(256, 7) == each


def test_answers_that_loop_are_kept_and_not_used(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "answers.jsonl")
    good, other = answer(1), answer(2)
    log.add(good)
    log.add(type(other)(other.part, other.task, (5,) * 24))
    assert len(log.answers) == 2
    assert log.of_use("train") == [good]


def test_answers_go_on_where_they_stood(tmp_path: Path) -> None:
    """An interrupt loses no more than the answers under way."""
    split = split_prompts(samples(12), (), name="file")
    target = answer_options(ModelOptions(embedded_target(), threads=1, context_length=128), 16)
    path = tmp_path / "answers.jsonl"
    from paceline.engines.loading import open_vocabulary

    with open_vocabulary(target) as vocabulary:
        tasks = list(make_tasks(split, vocabulary, max_prompt=100, tokens=16, temperature=0.8, seed=1))[:6]
    log = AnswerLog(path)

    def write(into: AnswerLog, stops_at: int) -> None:
        write_answers(
            target,
            tasks,
            into,
            0.8,
            in_time=lambda: True,
            stopped=lambda: len(into.answers) >= stops_at,
            report=lambda count: None,
        )

    with pytest.raises(Stopped):
        write(log, 2)
    assert len(log.answers) == 2
    again = AnswerLog(path)
    write(again, 99)
    assert [each.task for each in again.answers] == [task for _, task in tasks]
    whole = AnswerLog(tmp_path / "whole.jsonl")
    write(whole, 99)
    assert [each.token_ids for each in again.answers] == [each.token_ids for each in whole.answers]


def test_no_more_is_asked_once_the_time_is_over(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "answers.jsonl")
    each = answer(1)
    write_answers(
        ModelOptions("absent.gguf"),
        [("train", each.task)],
        log,
        0.8,
        in_time=lambda: False,
        stopped=lambda: False,
        report=lambda count: None,
    )
    assert log.answers == []


def test_a_log_of_others_is_split_by_prompt(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [
        {"prompt": f"question {number}", "completion": f"answer {draw}"} for number in range(12) for draw in (1, 2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers, rest = read_log(path, bytes_vocabulary(), max_prompt=256, tokens=32, seed=1)
    assert len(answers) == 24
    prompts = {part: {a.task.prompt_ids for a in answers if a.part == part} for part in ("train", "held")}
    assert (len(prompts["train"]), len(prompts["held"])) == (9, 3)
    assert not prompts["train"] & prompts["held"]
    assert not rest.train
    assert rest.other
    assert bytes(answers[0].token_ids) in (b"answer 1", b"answer 2")


@pytest.mark.parametrize("line", ['{"prompt": "a"}', '{"answer": "a"}', '{"prompt": 1, "answer": "a"}', "[1]", "no"])
def test_a_log_without_answers_is_refused_by_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n" + line + "\n")
    with pytest.raises(InputError, match="line 2"):
        read_log(path, bytes_vocabulary(), max_prompt=256, tokens=32, seed=1)
