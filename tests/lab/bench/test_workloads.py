from __future__ import annotations

import itertools
import random
import re

import pytest

from paceline.core.errors import InputError
from paceline.lab.bench.workloads import (
    LONG_PROMPT_ANSWER,
    WORKLOAD_NAMES,
    WORKLOADS,
    Sizes,
    check_workload_names,
    edit,
)
from paceline.lab.task import Task
from paceline.models.embedded import heldout
from tests.lab.scripted_pairs import bytes_vocabulary

VOCABULARY = bytes_vocabulary()


def tasks(name: str, sizes: Sizes, count: int = 3) -> list[Task]:
    return list(itertools.islice(WORKLOADS[name].make(VOCABULARY, sizes), count))


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_deterministic_and_differ_by_seed(name: str) -> None:
    first = tasks(name, Sizes(64, 1024), 2)
    assert tasks(name, Sizes(64, 1024), 2) == first
    assert [task.prompt_ids for task in tasks(name, Sizes(64, 1024, seed=1), 2)] != [task.prompt_ids for task in first]
    assert len({task.prompt_ids for task in first}) == len(first)
    assert len({task.seed for task in first}) == len(first)


@pytest.mark.parametrize("context_length", [200, 1024, 4096])
@pytest.mark.parametrize("name", WORKLOADS)
def test_prompt_and_answer_fit_the_context(name: str, context_length: int) -> None:
    for task in tasks(name, Sizes(64, context_length)):
        assert task.workload == name
        assert 1 <= len(task.prompt_ids) < context_length
        assert len(task.prompt_ids) + task.max_tokens <= context_length


@pytest.mark.parametrize("name", WORKLOADS)
def test_forced_workloads_say_so_and_others_have_no_reference(name: str) -> None:
    workload = WORKLOADS[name]
    assert workload.forced == name.endswith("-forced")
    assert workload.forced == ("made to" in workload.about)
    for task in tasks(name, Sizes(64, 1024)):
        assert (task.reference_ids is not None) == workload.forced
        assert task.options(0.5)["ignore_end"] == workload.forced
        if task.reference_ids is not None:
            assert len(task.reference_ids) == task.max_tokens


def test_a_long_prompt_fills_the_context_up_to_its_answer() -> None:
    (task,) = tasks("long-prompt", Sizes(256, 4096), 1)
    assert (len(task.prompt_ids), task.max_tokens) == (4096 - LONG_PROMPT_ANSWER, LONG_PROMPT_ANSWER)
    (task,) = tasks("long-prompt", Sizes(256, 8192), 1)
    assert len(task.prompt_ids) == 4096


def test_hard_text_is_sampled_whatever_the_temperature() -> None:
    (task,) = tasks("hard", Sizes(64, 1024), 1)
    options = task.options(0.0)
    assert (options["temperature"], options["top_k"], options["top_p"], options["min_p"]) == (1.0, 0, 1.0, 0.0)
    (task,) = tasks("new-code", Sizes(64, 1024), 1)
    assert task.options(0.8)["temperature"] == 0.8


def test_the_forced_rest_is_the_text_itself() -> None:
    (task,) = tasks("structured-forced", Sizes(64, 1024), 1)
    assert task.reference_ids is not None
    kind, number = task.name.split(":")
    assert bytes(task.prompt_ids + task.reference_ids).decode() in heldout(kind)[int(number) - 1]


def test_edits_are_small() -> None:
    text = "".join(f"value_{i} = total + {i}\ntotal = value_{i}\n" for i in range(30))
    edited = edit(text, random.Random(4))
    assert edited == edit(text, random.Random(4))
    assert edited != text
    shared = len(set(edited.splitlines()) & set(text.splitlines()))
    lines = len(edited.splitlines())
    assert 60 <= lines < 75
    assert shared >= 10 or "total_" in edited
    assert edit("", random.Random(1)) == ""


@pytest.mark.parametrize("seed", range(4))
def test_an_edit_changes_a_name_everywhere(seed: int) -> None:
    edited = edit("total = total + step\n" * 20, random.Random(seed))
    counts = {"total": 40, "step": 20}
    (gone,) = (name for name in counts if not re.search(rf"\b{name}\b", edited))
    renamed = re.findall(rf"\b{gone}_\w+", edited)
    assert len(set(renamed)) == 1
    assert len(renamed) == counts[gone]


def test_an_edited_file_repeats_most_of_what_is_in_the_context() -> None:
    for task in tasks("editing-forced", Sizes(200, 4096)):
        assert task.reference_ids is not None
        prompt, reference = bytes(task.prompt_ids), bytes(task.reference_ids)
        assert prompt.endswith(b"# The same file after the changes:\n\n")
        windows = [reference[i : i + 12] for i in range(0, len(reference) - 12, 12)]
        assert sum(window in prompt for window in windows) > 0.4 * len(windows)


def test_a_context_without_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(InputError, match="--tokens"):
        tasks("new-code", Sizes(256, 260))


@pytest.mark.parametrize(
    ("names", "words"), [(["prose"], "unknown workload 'prose'"), (["hard", "hard"], "twice"), ([], "no workload")]
)
def test_names_are_checked(names: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_workload_names(names)
    check_workload_names(WORKLOAD_NAMES)
