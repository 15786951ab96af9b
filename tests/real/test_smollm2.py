"""A chat model that others made: the same conversation by Python, by ``run --chat`` and in ``paceline chat``."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.engines.options import ModelOptions
from tests.engines.streamed import ASKED_BYTES, mostly_streamed
from tests.timing import WAIT_S

FIRST, SECOND = "The capital of France is", "And what is it known for?"
MAX = 48
GREEDY = ("--temp", "0", "-n", str(MAX))
# The choice by measuring may fall either way, and rounding turns near-ties in one of them.
ATTENTION = ("-fa", "on")


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[paceline.Model]:
    # A length of its own: on so small a model costs alone would mostly decide against drafting.
    options = ModelOptions(smollm2, flash_attention=True)
    with paceline.load(options, policy=paceline.FixedPolicy(4)) as loaded:
        yield loaded


def run_command(*arguments: str, said: str = "") -> str:
    """Return what the command writes to standard output."""
    command = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(command, input=said, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout


def test_a_conversation_has_the_tokens_of_transformers_and_the_same_answers_everywhere(
    model: paceline.Model, smollm2: Path, transformers_tokenizer: Any
) -> None:
    messages: list[dict[str, Any]] = []
    answers: list[str] = []
    for said in (FIRST, SECOND):
        messages.append({"role": "user", "content": said})
        reply = model.chat(messages, temperature=0, max_tokens=MAX)
        theirs = transformers_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(reply.prompt.token_ids) == theirs
        assert reply.text
        answers.append(reply.text)
        messages.append(reply.message)

    plainly = ("-m", str(smollm2), *ATTENTION, "--no-speculation")
    one = json.loads(run_command("run", "--chat", *plainly, *GREEDY, "-p", FIRST, "--json"))
    assert one["message"] == {"role": "assistant", "content": answers[0]}
    assert one["stats"]["prompt_n"] == len(model.chat_prompt(FIRST).token_ids)
    lines = run_command("chat", *plainly, *GREEDY, "--json", said=f"{FIRST}\n{SECOND}\n").splitlines()
    assert [json.loads(line)["message"]["content"] for line in lines] == answers
    assert run_command("chat", *plainly, *GREEDY, said=f"{FIRST}\n{SECOND}\n") == "".join(f"{a}\n" for a in answers)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_leaves_answers_as_they_are(model: paceline.Model, temperature: float) -> None:
    said = "Say this again, word for word: the granite quay took eleven years, the oaken one a single winter."
    drafted = model.chat(said, temperature=temperature, seed=5, max_tokens=64)
    plain = model.chat(said, temperature=temperature, seed=5, max_tokens=64, speculate=False)
    assert drafted.generation.stats.num_drafted > 0
    assert drafted.generation.token_ids == plain.generation.token_ids


@pytest.mark.skipif(sys.platform != "linux", reason="weights are streamed on Linux alone")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_with_streamed_layers_are_those_without(
    smollm2: Path, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    # What is laid out anew for a processor's own kernels rounds by them, and layers that are streamed never are.
    mapped = ModelOptions(smollm2, context_length=512, flash_attention=False, stream=False, repack=False)
    streamed = dataclasses.replace(mapped, stream=None, memory=ASKED_BYTES)
    answers = []
    for options in (mapped, streamed):
        with mostly_streamed():
            model = paceline.load(options, draft="self:Q2_K", policy=paceline.FixedPolicy(8))
        with model:
            assert (model.memory_plan is None) == (options is mapped)
            # Weights in Q4_1 round by the width of a pass, so that near-ties turn; but as they do without.
            replies = [
                model.chat(FIRST, speculate=speculate, temperature=temperature, seed=5, max_tokens=MAX)
                for speculate in (False, True)
            ]
        assert replies[1].generation.stats.num_accepted > 0
        answers.append([reply.text for reply in replies])
    assert answers[0] == answers[1]
