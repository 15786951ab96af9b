"""Which layers are chosen, and which models are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import InputError, ModelFileError
from paceline.lab.prune.layers import check_layers, choose_layers
from paceline.models.embedded import embedded_draft
from paceline.models.gguf_file import GGUFFile
from tests.engines.tiny_models import write_model
from tests.models.helpers import edited_gguf


def test_the_cheapest_are_chosen_and_each_is_measured_once() -> None:
    without = [0.1, 0.9, 0.5, 0.8, 0.9]
    asked: list[int] = []
    told: list[tuple[int, int]] = []

    def measure(layer: int) -> float:
        asked.append(layer)
        return without[layer]

    found = choose_layers(5, 3, measure, lambda done, total: told.append((done, total)))
    assert found.removed == (1, 3, 4)
    assert asked == [0, 1, 2, 3, 4]
    assert dict(found.alone) == dict(enumerate(without))
    assert told[-1] == (5, 5)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("gemma3", "window of 48"), ("lfm2", "recurrent"), ("qwen35", "recurrent")],
)
def test_layers_that_depend_on_their_place_are_refused(tmp_path: Path, architecture: str, reason: str) -> None:
    file = GGUFFile(write_model(tmp_path / "model.gguf", architecture))
    with pytest.raises(ModelFileError, match=reason):
        check_layers(file, 1)


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ({"llama.expert_count": 4, "llama.expert_used_count": 2}, "mixture of 4 experts"),
        ({"llama.attention.sliding_window": 64}, "window of 64"),
        ({"llama.attention.head_count_kv": [1, 2, 1]}, "differs between its layers"),
    ],
)
def test_metadata_that_differs_between_layers_is_refused(tmp_path: Path, edits: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelFileError, match=reason):
        check_layers(GGUFFile(edited_gguf(tmp_path / "other.gguf", edits)), 1)


def test_a_window_as_long_as_the_context_does_not_matter(tmp_path: Path) -> None:
    edits = {"llama.attention.sliding_window": 4096}
    check_layers(GGUFFile(edited_gguf(tmp_path / "wide.gguf", edits)), 1)


@pytest.mark.parametrize("count", [0, 3, 9])
def test_some_layers_go_and_some_stay(count: int) -> None:
    with pytest.raises(InputError, match="1 to 2 can be removed"):
        check_layers(GGUFFile(embedded_draft()), count)
