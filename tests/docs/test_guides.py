"""The code of the guides, run as it stands there."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

import paceline
from paceline import DraftBudget, Drafter, Model
from paceline.core.params import SamplingParams, StopRules
from paceline.core.stats import OFF_REASONS
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.planning.policies.fixed import FixedPolicy
from tests.docs.scripts import DOCS
from tests.drafters.helpers import grow
from tests.helpers import PLAIN_PARAMS, decode, looping_model, request_of


def blocks(page: str) -> list[str]:
    """Return the Python code of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def guide() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(blocks("guides/add-a-drafter.md")[0], "add-a-drafter.md", "exec"), names)
    return names


@pytest.mark.parametrize("params", [SamplingParams(0.0), PLAIN_PARAMS], ids=["greedy", "sampled"])
def test_the_drafter_is_lossless_and_of_use(guide: dict[str, Any], params: SamplingParams) -> None:
    vocabulary = ScriptedVocabulary.of_size(8)
    model = looping_model(8, random_model(8, seed=1), period=3, pull=4.0)
    drafter: Drafter = guide["PairDrafter"]()
    plain = decode(ScriptedEngine(model, vocabulary), [1, 2, 3], params, StopRules(80))
    answer = decode(
        ScriptedEngine(model, vocabulary), [1, 2, 3], params, StopRules(80), drafters=[drafter], policy=FixedPolicy(4)
    )
    assert answer.token_ids == plain.token_ids
    assert answer.request.stats.num_accepted > 10


def test_the_drafter_keeps_to_its_budget(guide: dict[str, Any]) -> None:
    drafter: Drafter = guide["PairDrafter"]()
    request = request_of([1, 2, 3, 1, 2, 3, 1, 2])
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(3))
    assert tree.token_ids[1:] == [3, 1, 2]
    assert grow(drafter, [request], DraftBudget(3, min_probability=0.9))[0].num_drafted == 0
    drafter.end(request)
    assert vars(drafter) == {"followed": {}, "read": {}}


def test_the_drafter_is_used_as_the_guide_says(guide: dict[str, Any]) -> None:
    model = looping_model(8, random_model(8, seed=1), period=3, pull=4.0)
    guide["target"] = ScriptedEngine(model, ScriptedVocabulary.of_size(8))
    exec(compile(blocks("guides/add-a-drafter.md")[1], "add-a-drafter.md", "exec"), guide)
    used: Model = guide["model"]
    with used:
        answer = used.generate([1, 2, 3], max_tokens=60, temperature=0.0)
    assert answer.stats.num_accepted > 10
    assert "pairs" in answer.sources


def run_with_the_embedded_pair(page: str) -> None:
    """Run the code of a page that loads the embedded pair."""
    found = [block for block in blocks(page) if "paceline.load()" in block]
    assert found
    for block in found:
        exec(compile(block, page, "exec"), {"__name__": "page"})


def test_the_quickstart_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_with_the_embedded_pair("quickstart.md")
    assert capsys.readouterr().out


@pytest.mark.parametrize("length", [None, 1, 2, 3, 4, 6, 8])
def test_the_promise_holds_for_every_draft_length(
    length: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``auto`` chooses one by the clock: a near-tie that some lengths turn would show on a busy machine alone."""
    if length is not None:
        chosen = partial(paceline.load, drafters=["suffix", "lookup", "draft"], policy=FixedPolicy(length))
        monkeypatch.setattr(paceline, "load", chosen)
    run_with_the_embedded_pair("promise.md")
    said = capsys.readouterr().out
    assert said.strip()
    assert said == said[: len(said) // 3] * 3


def test_every_reason_for_drafting_nothing_is_explained() -> None:
    text = (DOCS / "limits.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| what it says .*\n\|---.*\n((?:\|.*\n)+)", text)
    assert {line.split("|")[1].strip() for line in table.splitlines()} == set(OFF_REASONS.values())
