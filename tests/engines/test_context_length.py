"""The context a model gets: asked for, its own, or none at all."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.conversion.convert import gguf_to_folder
from paceline.core.errors import ContextLengthError, ModelWarning
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.context_length import DEFAULT_CONTEXT_LENGTH, choose_context_length, fit_context_length
from paceline.engines.loading import foreseen_context_length, open_engine, settle_context
from paceline.engines.options import ENGINE_NAMES, DraftOptions, EngineName, ModelOptions
from paceline.model_pair import open_pair
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target


def test_the_default_is_the_model_s_own_within_reason() -> None:
    assert choose_context_length(None, 2048, model="m") == 2048
    assert choose_context_length(None, 131072, model="m") == DEFAULT_CONTEXT_LENGTH
    assert choose_context_length(None, None, model="m") == DEFAULT_CONTEXT_LENGTH


def test_what_is_asked_for_is_given_up_to_what_the_model_was_made_for() -> None:
    assert choose_context_length(100_000, 131072, model="m") == 100_000
    assert choose_context_length(256, 256, model="m") == 256
    assert choose_context_length(100_000, None, model="m") == 100_000
    assert choose_context_length(257, 256, model="m", may_shrink=True) == 256
    with pytest.raises(
        ContextLengthError, match=r"257 tokens is more than the 256 that m was made for: .* at most 256"
    ):
        choose_context_length(257, 256, model="m")


def test_a_context_is_halved_until_it_fits_but_not_below_the_default() -> None:
    assert fit_context_length(131072, lambda length: True) == 131072
    assert fit_context_length(131072, lambda length: length <= 40_000) == 32768
    assert fit_context_length(40960, lambda length: length <= 6000) == 5120
    assert fit_context_length(131072, lambda length: False) == DEFAULT_CONTEXT_LENGTH
    assert fit_context_length(5000, lambda length: False) == DEFAULT_CONTEXT_LENGTH
    assert fit_context_length(512, lambda length: False) == 512


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded draft, made for 131,072 tokens by its header."""
    return with_context(embedded_draft(), tmp_path_factory.mktemp("long") / "long.gguf", 131072)


def with_context(source: Path, path: Path, length: int) -> Path:
    data = bytearray(source.read_bytes())
    key = b"llama.context_length"
    value = data.index(key) + len(key) + 4  # after its type
    data[value : value + 4] = struct.pack("<I", length)
    path.write_bytes(data)
    return path


CELL_BYTES = 52 + 3 * 2 * 64 * 2
"""Of the embedded draft: what llama.cpp notes, and keys and values of a head in three layers, in F16."""


@pytest.mark.parametrize(
    ("settings", "free_cells", "length", "cells"),
    [
        ({}, 131072, 131072, None),
        ({}, 131071, 65536, None),
        ({}, 0, 4096, None),
        # Four requests share one context, and have 4,096 tokens each at least.
        ({"max_sequences": 4}, 131072, 131072, 131072),
        ({"max_sequences": 4}, 16384, 16384, 16384),
        ({"max_sequences": 4}, 16383, 4096, None),
        # Exact texts take a context each.
        ({"max_sequences": 4, "exact": True}, 4 * 32768, 32768, None),
        ({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 70_000, 65536, None),
        ({"cache_type_k": "q4_0", "cache_type_v": "q4_0"}, 70_000, 131072, None),
        ({"context_length": 9000, "max_sequences": 2}, 0, 9000, None),
        ({"cells": 9000, "max_sequences": 4}, 131072, 4096, 9000),
    ],
)
def test_where_none_is_asked_for_a_model_gets_its_own_context_as_far_as_memory_allows(
    settings: dict[str, Any],
    free_cells: int,
    length: int,
    cells: int | None,
    long: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("llama_cpp")
    weights_bytes = long.stat().st_size
    monkeypatch.setattr(
        "paceline.engines.memory.available_memory", lambda: weights_bytes + 3 * free_cells * CELL_BYTES + 3
    )
    settled = settle_context(ModelOptions(long, gpu_layers=0, **settings))
    assert (settled.context_length, settled.cells) == (length, cells)
    assert foreseen_context_length(ModelOptions(long, gpu_layers=0, **settings)) == length
    # What is said counts, not what is free.
    if not settings:
        memory = weights_bytes + 3 * 65536 * CELL_BYTES + 3
        assert foreseen_context_length(ModelOptions(long, gpu_layers=0, memory=memory)) == 65536


def test_a_context_that_memory_cuts_short_is_told_and_shared(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    free_bytes = long.stat().st_size + 3 * 20_000 * CELL_BYTES
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: free_bytes)
    options = ModelOptions(long, threads=1, max_sequences=3)
    draft = DraftOptions(embedded_draft()).beside(options)
    with pytest.warns(ModelWarning, match=r"^long\.gguf gets a context of 16384 tokens of the 131072 "):
        pair = open_pair(options, draft)
    try:
        assert pair.draft is not None
        target, of_draft = pair.target.capabilities, pair.draft.capabilities
        assert (target.context_length, target.cells) == (16384, 16384)
        # It was made for 4,096 tokens.
        assert (of_draft.context_length, of_draft.cells) == (4096, 3 * 4096)
    finally:
        pair.close()
    # One that was made for as many has room for all that the target has, and for what it drafts.
    with pytest.warns(ModelWarning):
        pair = open_pair(options, DraftOptions(long).beside(options))
    try:
        assert pair.draft is not None
        of_draft = pair.draft.capabilities
        assert (of_draft.context_length, of_draft.cells) == (16384, 16384 + 3 * 64)
    finally:
        pair.close()


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_every_engine_refuses_and_shrinks_alike(engine: EngineName, tmp_path: Path) -> None:
    path = embedded_draft()
    if engine == "torch_hf":
        pytest.importorskip("torch", reason="needs paceline[torch]")
        pytest.importorskip("transformers", reason="needs paceline[torch]")
        path = tmp_path / "folder"
        gguf_to_folder(embedded_draft(), path)
    trained = describe(path).context_length
    assert trained is not None
    options = ModelOptions(path, engine=engine, context_length=trained + 1, threads=1)
    with pytest.raises(ContextLengthError) as caught:
        open_engine(options)
    assert str(caught.value) == (
        f"a context of {trained + 1} tokens is more than the {trained} that {path.name} was made for: "
        f"give at most {trained} (`context_length`, or `DraftOptions.context_length` for a draft model)"
    )
    opened = open_engine(dataclasses.replace(options, context_may_shrink=True))
    assert opened.capabilities.context_length == trained
    opened.close()


def test_a_draft_made_for_less_than_the_target_s_context_still_drafts(tmp_path: Path) -> None:
    short = with_context(embedded_draft(), tmp_path / "short.gguf", 64)
    options = ModelOptions(embedded_target(), context_length=192, flash_attention=False)
    with paceline.load(options, draft=short, policy="fixed") as model:
        answer = model.generate("def f(x):\n", max_tokens=150, ignore_end=True, seed=1)
        drafter = model.drafters[0]
        assert isinstance(drafter, DraftModelDrafter)
        assert drafter.engine.capabilities.context_length == 64
    assert len(answer.token_ids) == 150
    assert "draft" in answer.sources[100:]
    # A context that is meant for the draft is taken at its word.
    with pytest.raises(ContextLengthError, match=r"65 tokens is more than the 64 that short\.gguf"):
        paceline.load(embedded_target(), draft=ModelOptions(short, context_length=65))
