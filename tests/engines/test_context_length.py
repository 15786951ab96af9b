"""The context a model gets: asked for, its own, or none at all."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import pytest

import paceline
from paceline.core.errors import ContextLengthError
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.context_length import DEFAULT_CONTEXT_LENGTH, choose_context_length
from paceline.engines.loading import open_engine
from paceline.engines.options import ENGINE_NAMES, EngineName, ModelOptions
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


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_every_engine_refuses_and_shrinks_alike(engine: EngineName) -> None:
    if engine == "torch_hf":
        pytest.importorskip("torch", reason="needs paceline[torch]")
        pytest.importorskip("transformers", reason="needs paceline[torch]")
    path = embedded_draft()
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
    data = bytearray(embedded_draft().read_bytes())
    key = b"llama.context_length"
    value = data.index(key) + len(key) + 4  # after its type
    data[value : value + 4] = struct.pack("<I", 64)
    short = tmp_path / "short.gguf"
    short.write_bytes(data)
    with paceline.load(embedded_target(), draft=short, context_length=192, policy="fixed") as model:
        answer = model.generate("def f(x):\n", max_tokens=150, ignore_end=True, seed=1)
        drafter = model.drafters[0]
        assert isinstance(drafter, DraftModelDrafter)
        assert drafter.engine.capabilities.context_length == 64
    assert len(answer.token_ids) == 150
    assert "draft" in answer.sources[100:]
    # A context that is meant for the draft is taken at its word.
    with pytest.raises(ContextLengthError, match=r"65 tokens is more than the 64 that short\.gguf"):
        paceline.load(embedded_target(), draft=ModelOptions(short, context_length=65))
