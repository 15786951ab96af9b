"""A target and its draft model in one memory: who comes first, and who gets what."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import model_pair
from paceline.core.errors import InputError
from paceline.engines.llama_cpp import settings
from paceline.engines.llama_cpp.streaming import LayerStream
from paceline.engines.loading import memory_limit, open_engine, reader_of
from paceline.engines.memory import SPARE_BYTES, Footprint, OtherMemory, held_memory
from paceline.engines.options import CacheType, DraftOptions, ModelOptions
from paceline.engines.slow_passes import slow_passes
from paceline.engines.streaming.layout import UnstreamableError
from paceline.lab.comparison import answer, explain
from paceline.model_pair import ModelPair, default_draft, open_pair
from paceline.models.embedded import embedded_draft
from paceline.options import GenerateOptions
from paceline.planning.policies.fixed import FixedPolicy
from paceline.vocabularies.token_pairs import DraftVocab
from tests.engines.streamed import exact_target, mostly_streamed
from tests.engines.tiny_models import write_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="weights are streamed on Linux alone")


@pytest.fixture
def target() -> Path:
    return exact_target()


@pytest.fixture
def streamed() -> Iterator[None]:
    with mostly_streamed():
        yield


@contextmanager
def drafting(target: ModelOptions, draft: DraftOptions, **given: Any) -> Iterator[tuple[Any, Any, ModelPair]]:
    """Open a target and its draft model."""
    with closing(open_pair(target, draft.beside(target), **given)) as pair:
        assert pair.draft is not None
        yield pair.target, pair.draft, pair


def within(target: Path, memory: str | None) -> ModelOptions:
    return ModelOptions(target, memory=memory, context_length=256, threads=1)


def test_the_limit_is_what_was_given_or_what_is_free_for_weights_that_are_more(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory_limit(within(target, "40M")) == 40 << 20
    assert memory_limit(within(target, "16G")) == 16 << 30
    assert memory_limit(within(target, None)) is None
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: 30 << 20)
    monkeypatch.setattr("paceline.engines.memory.held_memory", lambda: 0)
    assert memory_limit(within(target, None)) == (30 << 20) - int((30 << 20) * 0.05)


@pytest.mark.parametrize("memory", [None, "100M"])
def test_a_draft_takes_what_drafting_takes(
    target: Path, streamed: None, memory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its context is the target's at most, passes read a row or two of each request, and scratch is no wider."""
    monkeypatch.setattr(model_pair, "foreseen_context_length", lambda options: 300)
    options = ModelOptions(target, memory=memory, threads=1, max_sequences=3)
    with drafting(options, DraftOptions(embedded_draft())) as (opened, draft, _):
        capabilities = draft.capabilities
        assert (capabilities.context_length, capabilities.max_rows, capabilities.max_outputs) == (300, 64, 6)
        # A level of all requests, and two rows of each, fit.
        assert capabilities.max_sequences == 3
        assert opened.capabilities.max_outputs > 6


def test_what_a_draft_takes_is_counted(target: Path) -> None:
    """Scratch memory grows with the rows of a pass, and is all that is saved by fewer of them."""
    whole = ModelOptions(target, threads=1, context_length=1024, branches=0, flash_attention=False, own_weights=True)
    taken = []
    for options in (whole, dataclasses.replace(whole, rows_read=2)):
        engine = open_engine(options)
        taken.append(engine.footprint)  # type: ignore[attr-defined]
        engine.close()
    of_target, of_draft = taken
    assert of_draft.num_bytes < of_target.num_bytes
    # Weights, and keys and values of 1,024 cells, are the same.
    assert of_draft.held_bytes >= target.stat().st_size
    assert of_draft.held_bytes == pytest.approx(of_target.held_bytes, rel=0.1)


def test_a_drafts_cache_has_types_of_its_own(target: Path) -> None:
    options = ModelOptions(target, threads=1, context_length=128, cache_type_k="bf16", flash_attention=False)
    for own, said in ((DraftOptions(embedded_draft()), "threads"), (COARSE, "keys in f16, values in q4_0")):
        with drafting(options, own) as (opened, draft, _):
            assert opened.description.endswith("keys in bf16, values in f16")
            assert draft.description.endswith(said)


COARSE = DraftOptions(embedded_draft(), cache_type_v="q4_0")


@pytest.mark.parametrize(
    ("tokens", "drafts", "room"),
    [
        ("as_its_target", "auto", 100),
        ("as_its_target", "translate", 200),
        ("others", "auto", 200),
        ("others", "same", 100),
    ],
)
def test_a_text_in_tokens_of_another_vocabulary_has_room(
    target: Path, tmp_path: Path, tokens: str, drafts: DraftVocab, room: int
) -> None:
    """Where the target still sees all of a text, a draft whose tokens are shorter does, too."""
    path = embedded_draft() if tokens == "as_its_target" else write_model(tmp_path / "other.gguf", "llama", 0, "llama")
    options = dataclasses.replace(within(target, None), context_length=100)
    with drafting(options, DraftOptions(path, vocab=drafts)) as (_, draft, _):
        assert draft.capabilities.context_length == room


def test_a_draft_has_no_more_room_than_it_was_made_for_or_as_much_as_was_asked_for(
    target: Path, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "other.gguf", "llama", 0, "llama")  # for 256 tokens
    for given, room in ((DraftOptions(path), 256), (DraftOptions(embedded_draft(), context_length=512), 512)):
        with drafting(within(target, None), given) as (_, draft, _):
            assert draft.capabilities.context_length == room


def test_a_draft_comes_first_and_its_memory_is_taken_off(target: Path, streamed: None) -> None:
    with drafting(within(target, "64M"), DraftOptions(embedded_draft()), kept_bytes=1 << 19) as (opened, draft, _):
        plan, footprint = opened.memory_plan, draft.footprint
    # All of the draft's, with its cache and scratch, of which not all was written to.
    assert plan.draft_bytes >= embedded_draft().stat().st_size
    assert plan.draft_bytes == footprint.num_bytes
    assert 0 < footprint.untouched_bytes < footprint.num_bytes
    assert plan.prompts_bytes == 1 << 20
    parts = ("process", "draft", "prompts", "working", "others", "resident", "ring", "spare")
    assert sum(getattr(plan, f"{part}_bytes") for part in parts) == plan.total_bytes == 64 << 20
    assert plan.pass_s == pytest.approx(plan.pass_bytes / plan.bytes_per_s)


def test_what_is_beside_the_model_leaves_less_for_it(target: Path) -> None:
    options = within(target, "4G")
    open_engine(options).close()
    other = OtherMemory(Footprint(1 << 40, 1 << 40), 0)
    with pytest.raises(InputError, match=r"1024\.0G are the draft model's"):
        open_engine(dataclasses.replace(options, other_memory=other))


def test_what_is_beside_a_target_that_would_fit_alone_counts(target: Path, streamed: None) -> None:
    # With room for the target, for Python and for little else.
    tight = ModelOptions(target, memory=held_memory() + (90 << 20), context_length=256, threads=1)
    draft = DraftOptions(embedded_draft())
    with drafting(tight, draft, kept_bytes=64 << 20) as (opened, _, pair):
        assert opened.memory_plan is not None
        assert pair.kept_bytes == tight.memory // 64  # type: ignore[operator]
    with drafting(within(target, "16G"), draft, kept_bytes=64 << 20) as (opened, _, pair):
        assert opened.memory_plan is None
        assert pair.kept_bytes == 64 << 20
        # There it is opened as anywhere else.
        assert pair.draft_options is not None
        assert not pair.draft_options.own_weights


def test_where_layers_cannot_be_streamed_after_all_the_draft_is_mapped(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: 30 << 20)
    options = within(target, None)
    with pytest.warns(paceline.ModelWarning, match="^layers are not streamed"):
        pair = open_pair(options, DraftOptions(embedded_draft()).beside(options))
    assert slow_passes(pair.target) is None
    assert pair.draft_options is not None
    assert not pair.draft_options.own_weights
    pair.close()
    with pytest.raises(UnstreamableError, match="too little"):
        open_pair(within(target, "30M"), None)


def test_a_draft_that_nobody_named_is_done_without_where_it_cannot_be_made(
    target: Path, streamed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    policy = paceline.FixedPolicy(4)
    with (
        pytest.warns(paceline.ModelWarning, match="^no draft of the target's own: "),
        paceline.load(within(target, "40M"), policy=policy) as model,
    ):
        assert [drafter.name for drafter in model.drafters] == ["suffix"]
    # Whoever names it counts on it.
    for asked in ({"drafters": ["draft"]}, {"draft": "self"}):
        with pytest.raises(InputError, match="cannot be kept in"):
            paceline.load(within(target, "40M"), policy=policy, **asked)


def test_a_draft_that_nobody_named_is_done_without_where_it_leaves_too_little(
    target: Path, streamed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    policy = paceline.FixedPolicy(4)
    # All of its context and wide passes, so that the draft takes more than Python comes to hold from load to load.
    monkeypatch.setattr(settings, "DRAFT_BATCH", 512)
    options = dataclasses.replace(within(target, "40M"), context_length=4096)
    with paceline.load(options, policy=policy) as model:
        plan = model.memory_plan
    assert plan is not None
    assert plan.draft_bytes > 80 << 20
    left_bytes = plan.total_bytes - plan.process_bytes - plan.prompts_bytes - plan.working_bytes - SPARE_BYTES
    monkeypatch.setattr(LayerStream, "least_bytes", left_bytes - plan.draft_bytes // 2)
    with (
        pytest.warns(paceline.ModelWarning, match="^no draft of the target's own: "),
        paceline.load(options, policy=policy) as model,
    ):
        assert [drafter.name for drafter in model.drafters] == ["suffix"]
    with pytest.raises(InputError, match="are the draft model's"):
        paceline.load(options, draft="self", policy=policy)


def test_a_draft_that_nobody_named_goes_before_layers_are_not_streamed(
    target: Path, streamed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody said how much memory there is: with the draft the plan failed, and the file was run mapped."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(model_pair, "SPARE_BYTES", 0)
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: 40 << 20)
    monkeypatch.setattr(settings, "DRAFT_BATCH", 512)
    options = dataclasses.replace(within(target, None), context_length=4096)
    with paceline.load(options, policy=paceline.FixedPolicy(4)) as model:
        plan = model.memory_plan
        assert [drafter.name for drafter in model.drafters] == ["draft"]
    assert plan is not None
    left_bytes = plan.total_bytes - plan.process_bytes - plan.prompts_bytes - plan.working_bytes
    monkeypatch.setattr(LayerStream, "least_bytes", left_bytes - SPARE_BYTES - plan.draft_bytes // 2)
    with (
        pytest.warns(paceline.ModelWarning, match="^no draft of the target's own: "),
        paceline.load(options, policy=paceline.FixedPolicy(4)) as model,
    ):
        assert ([drafter.name for drafter in model.drafters], model.memory_plan is None) == (["suffix"], False)


def test_draft_options_say_how_a_draft_runs_beside_its_target(target: Path) -> None:
    options = within(target, None)
    with paceline.load(options, draft=DraftOptions("draft", threads=2), policy=paceline.FixedPolicy(4)) as model:
        assert [drafter.name for drafter in model.drafters] == ["draft"]
    with paceline.load(options, draft=DraftOptions(threads=2), policy=paceline.FixedPolicy(4)) as model:
        assert [drafter.name for drafter in model.drafters] == ["suffix"]


def test_a_streamed_target_drafts_with_its_own_copy_where_none_is_named(
    target: Path, streamed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(model_pair, "SPARE_BYTES", 0)
    assert default_draft(within(target, "40M")) == "self:Q4_0"
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
    reader = reader_of(options, is_streamed=True)(64)
    assert reader.memory_plan is None  # type: ignore[attr-defined]
    reader.close()


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
def test_drafts_turn_no_more_than_near_ties_of_a_quantised_cache(target: Path, cache_type: CacheType) -> None:
    options = ModelOptions(target, threads=1, context_length=256, cache_type_k=cache_type, cache_type_v=cache_type)
    draft = DraftOptions(embedded_draft(), cache_type_k=cache_type, cache_type_v=cache_type)
    with paceline.load(options, draft=draft, policy=FixedPolicy(4), remember=False) as model:
        for seed, prompt in enumerate(("def add(a, b):\n", "import os\n", "The model reads")):
            asked = GenerateOptions(max_tokens=40, temperature=0.0, seed=seed, ignore_end=True)
            plain, drafted = (answer(model, prompt, asked, speculate=speculates) for speculates in (False, True))
            assert drafted.stats.num_accepted > 0
            divergence = explain(model, prompt, asked, plain, drafted)
            assert divergence is None or divergence.verdict == "near-tie"
