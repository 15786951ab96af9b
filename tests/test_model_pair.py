"""A target and its draft model in one memory: who comes first, and who gets what."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

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
from paceline.model_pair import default_draft, open_pair
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
    pair = open_pair(options, DraftOptions(embedded_draft()).beside(options))
    try:
        assert pair.draft is not None
        capabilities = pair.draft.capabilities
        assert (capabilities.context_length, capabilities.max_rows, capabilities.max_outputs) == (300, 64, 6)
        # A level of all requests, and two rows of each, fit.
        assert capabilities.max_sequences == 3
        assert pair.target.capabilities.max_outputs > 6
    finally:
        pair.close()


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


def test_a_context_that_was_asked_for_stays(target: Path) -> None:
    options = within(target, None)
    pair = open_pair(options, DraftOptions(embedded_draft(), context_length=512).beside(options))
    assert pair.draft is not None
    assert pair.draft.capabilities.context_length == 512
    pair.close()


def test_a_drafts_cache_has_types_of_its_own(target: Path) -> None:
    options = ModelOptions(target, threads=1, context_length=128, cache_type_k="bf16", flash_attention=False)
    for own, said in ((DraftOptions(embedded_draft()), "threads"), (COARSE, "keys in f16, values in q4_0")):
        pair = open_pair(options, own.beside(options))
        assert pair.draft is not None
        assert pair.target.description.endswith("keys in bf16, values in f16")
        assert pair.draft.description.endswith(said)
        pair.close()


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
    pair = open_pair(options, DraftOptions(path, vocab=drafts).beside(options))
    try:
        assert pair.draft is not None
        assert pair.draft.capabilities.context_length == room
    finally:
        pair.close()


def test_a_translated_draft_has_no_more_room_than_it_was_made_for(target: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "other.gguf", "llama", 0, "llama")  # for 256 tokens
    options = within(target, None)
    pair = open_pair(options, DraftOptions(path).beside(options))
    try:
        assert pair.draft is not None
        assert pair.draft.capabilities.context_length == 256
    finally:
        pair.close()


def test_a_draft_comes_first_and_its_memory_is_taken_off(target: Path, streamed: None) -> None:
    options = within(target, "100M")
    draft = DraftOptions(embedded_draft()).beside(options)
    pair = open_pair(dataclasses.replace(options, memory="64M"), draft, kept_bytes=1 << 19)
    plan = pair.target.memory_plan  # type: ignore[attr-defined]
    assert pair.draft is not None
    # All of the draft's, with its cache and scratch, of which not all was written to.
    assert plan.draft_bytes >= embedded_draft().stat().st_size
    footprint = pair.draft.footprint  # type: ignore[attr-defined]
    assert plan.draft_bytes == footprint.num_bytes
    assert 0 < footprint.untouched_bytes < footprint.num_bytes
    assert plan.prompts_bytes == 1 << 20
    parts = (
        plan.process_bytes
        + plan.draft_bytes
        + plan.prompts_bytes
        + plan.working_bytes
        + plan.others_bytes
        + plan.resident_bytes
        + plan.ring_bytes
        + plan.spare_bytes
    )
    assert parts == plan.total_bytes == 64 << 20
    assert plan.pass_s == pytest.approx(plan.pass_bytes / plan.bytes_per_s)
    pair.close()


def test_what_is_beside_the_model_leaves_less_for_it(target: Path) -> None:
    options = within(target, "4G")
    open_engine(options).close()
    other = OtherMemory(Footprint(1 << 40, 1 << 40), 0)
    with pytest.raises(
        InputError,
        match=r"4\.0G of memory \(`memory`\) are too little .*, of which 1024\.0G are the draft model's, and .*; give "
        r".*, or a shorter context \(`context_length`\), a smaller draft model \(`draft`\), or none "
        r"\(`drafters=\['suffix'\]`\)",
    ):
        open_engine(dataclasses.replace(options, other_memory=other))


def test_what_is_beside_a_target_that_would_fit_alone_counts(target: Path, streamed: None) -> None:
    # With room for the target, for Python and for little else.
    tight = ModelOptions(target, memory=held_memory() + (90 << 20), context_length=256, threads=1)
    draft = DraftOptions(embedded_draft()).beside(tight)
    pair = open_pair(tight, draft, kept_bytes=64 << 20)
    assert pair.target.memory_plan is not None  # type: ignore[attr-defined]
    assert pair.kept_bytes == tight.memory // 64  # type: ignore[operator]
    pair.close()
    roomy = within(target, "16G")
    pair = open_pair(roomy, draft, kept_bytes=64 << 20)
    assert pair.target.memory_plan is None  # type: ignore[attr-defined]
    assert pair.kept_bytes == 64 << 20
    # There it is opened as anywhere else.
    assert pair.draft_options is not None
    assert not pair.draft_options.own_weights
    pair.close()


def test_where_layers_cannot_be_streamed_after_all_the_draft_is_mapped(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: 30 << 20)
    options = within(target, None)
    with pytest.warns(paceline.ModelWarning, match="^layers are not streamed, and the file is left to the system: "):
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
        pytest.warns(paceline.ModelWarning, match=r"^no draft of the target's own: .* cannot be kept in .*; name one"),
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
        pytest.warns(paceline.ModelWarning, match=r"^no draft of the target's own: 40M of memory .* are too little"),
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
        pytest.warns(paceline.ModelWarning, match=r"^no draft of the target's own: .* of memory .* are too little"),
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
