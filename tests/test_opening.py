"""A target and its draft model in one memory: who comes first, and who gets what."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.core.errors import InputError
from paceline.engines.llama_cpp import loading
from paceline.engines.loading import DraftOptions, ModelOptions, foreseen_memory, open_engine, reader_of
from paceline.engines.memory import NOTHING_BESIDE, Beside
from paceline.models.embedded import embedded_draft
from paceline.opening import default_draft, open_pair
from tests.engines.streamed import exact_target, mostly_streamed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="weights are streamed on Linux alone")


@pytest.fixture
def target() -> Path:
    return exact_target()


@pytest.fixture
def streamed() -> Iterator[None]:
    with mostly_streamed():
        yield


def within(target: Path, memory: str | None) -> ModelOptions:
    return ModelOptions(target, memory=memory, context_length=256, threads=1)


def test_what_fits_by_all_one_can_see_is_not_foreseen_to_be_streamed(target: Path) -> None:
    assert foreseen_memory(within(target, "40M")) == 40 << 20
    assert foreseen_memory(within(target, "16G")) is None
    assert foreseen_memory(within(target, None)) is None


def test_more_weights_than_memory_is_free_are_foreseen_to_be_streamed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda: 30 << 20)
    monkeypatch.setattr(loading, "held_memory", lambda: (0, 0))
    assert foreseen_memory(within(target, None)) == (30 << 20) - int((30 << 20) * 0.05)


def test_a_draft_comes_first_and_its_memory_is_taken_off(target: Path, streamed: None) -> None:
    options = within(target, "100M")
    draft = DraftOptions(embedded_draft()).beside(options)
    pair = open_pair(dataclasses.replace(options, memory="1M"), draft, prompts_bytes=1 << 20)
    plan = pair.target.memory_plan  # type: ignore[attr-defined]
    assert pair.draft is not None
    # All of the draft's, with its cache and scratch, of which not all was written to.
    assert plan.beside.draft_bytes >= embedded_draft().stat().st_size
    assert 0 < plan.beside.reserved_bytes < plan.beside.draft_bytes
    assert plan.beside.prompts_bytes == 1 << 20
    parts = (
        plan.process_bytes
        + plan.beside.draft_bytes
        + plan.beside.prompts_bytes
        + plan.working_bytes
        + plan.others_bytes
        + plan.resident_bytes
        + plan.ring_bytes
        + plan.spare_bytes
    )
    assert parts == plan.total_bytes == 1 << 20
    assert plan.pass_s == pytest.approx(plan.pass_bytes / plan.bytes_per_s)
    pair.close()


def test_what_is_beside_the_model_leaves_less_for_it(target: Path) -> None:
    options = within(target, "90M")
    with pytest.raises(InputError, match="of memory \\(--memory\\) are too little"):
        open_engine(dataclasses.replace(options, beside=Beside(1 << 40, 1 << 40)))
    assert options.beside == NOTHING_BESIDE


def test_a_streamed_target_drafts_with_its_own_copy_where_none_is_named(
    target: Path, streamed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "SPARE_BYTES", 0)
    own = default_draft(within(target, "40M"))
    assert own is not None
    assert own.file_type == "Q4_0"
    # What is more than half of the memory is quantised smaller, or not at all.
    assert default_draft(within(target, "4M")) is None
    assert default_draft(within(target, "16G")) is None
    with paceline.load(within(target, "40M"), policy=paceline.FixedPolicy(4)) as model:
        assert [drafter.name for drafter in model.drafters] == ["draft"]
        assert model.memory_plan is not None
        answer = model.generate("def f(x):", max_tokens=24, temperature=0.0)
        assert answer.stats.num_accepted > 0
    with paceline.load(within(target, "40M"), drafters=["suffix"]) as model:
        assert [drafter.name for drafter in model.drafters] == ["suffix"]
    with paceline.load(within(target, "16G"), policy=paceline.FixedPolicy(4)) as model:
        assert [drafter.name for drafter in model.drafters] == ["suffix"]
        assert model.memory_plan is None


def test_a_model_that_is_streamed_is_not_streamed_twice_to_read_a_text(target: Path, streamed: None) -> None:
    options = within(target, "1M")
    reader = reader_of(options)(64)
    assert reader.memory_plan is None  # type: ignore[attr-defined]
    reader.close()
