"""How a command's parameters become options of the models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.options import OF_THE_DRAFT_MODEL, options_for_draft, options_for_target
from paceline.core.errors import InputError
from paceline.engines.loading import ModelOptions
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target

NOTHING_GIVEN: dict[str, Any] = {
    "engine": None,
    "ctx_size": None,
    "gpu_layers": -1,
    "device": "",
    "threads": None,
    "threads_batch": None,
    "flash_attn": "auto",
    "exact": False,
    "dtype": None,
    "ctx_size_draft": None,
    "gpu_layers_draft": -1,
    "device_draft": "",
    "threads_draft": None,
    "threads_batch_draft": None,
}


def test_nothing_given_is_the_default_of_all_options() -> None:
    assert options_for_target("m.gguf", NOTHING_GIVEN) == ModelOptions("m.gguf")
    assert set(OF_THE_DRAFT_MODEL) < set(NOTHING_GIVEN)


def test_a_draft_runs_as_its_target_does() -> None:
    given = {**NOTHING_GIVEN, "threads": 1, "threads_batch": 2, "flash_attn": "on", "exact": True, "ctx_size": 512}
    target = options_for_target(embedded_target(), given)
    draft = options_for_draft(target, embedded_target(), given)
    assert (draft.threads, draft.threads_batch, draft.flash_attention) == (1, 2, True)
    assert (draft.context_length, draft.context_may_shrink, draft.branches, draft.exact) == (512, True, 0, False)


def test_a_draft_on_another_engine_gets_nothing_in_terms_of_its_targets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    given = {**NOTHING_GIVEN, "threads": 1, "threads_batch": 2, "flash_attn": "on"}
    draft = options_for_draft(options_for_target(embedded_target(), given), tmp_path, given)
    assert (draft.threads, draft.threads_batch, draft.flash_attention) == (1, None, None)
    given = {**NOTHING_GIVEN, "threads": 1, "dtype": "float32"}
    draft = options_for_draft(options_for_target(tmp_path, given), embedded_target(), given)
    assert (draft.threads, draft.dtype) == (1, None)


def test_what_only_some_commands_have_counts_where_it_is_given() -> None:
    given = {**NOTHING_GIVEN, "override_tensor": ["exps=CPU,a=B"], "parallel": 3, "verbose": True}
    target = options_for_target("m.gguf", given)
    assert target.override_tensors == (("exps", "CPU"), ("a", "B"))
    assert (target.max_sequences, target.verbose) == (3, True)


def test_a_context_of_0_is_all_that_the_model_was_trained_for() -> None:
    trained = describe(embedded_target()).context_length
    target = options_for_target(embedded_target(), {**NOTHING_GIVEN, "ctx_size": 0})
    assert target.context_length == trained
    draft = options_for_draft(target, embedded_draft(), {**NOTHING_GIVEN, "ctx_size_draft": 0})
    assert draft.context_length == describe(embedded_draft()).context_length
    assert not draft.context_may_shrink


@pytest.mark.parametrize("size", [1, -1])
def test_a_draft_needs_room_for_what_was_said_and_for_what_it_drafts(size: int) -> None:
    target = options_for_target(embedded_target(), NOTHING_GIVEN)
    with pytest.raises(InputError, match=f"^-cd {size}: the least is 2"):
        options_for_draft(target, embedded_draft(), {**NOTHING_GIVEN, "ctx_size_draft": size})
