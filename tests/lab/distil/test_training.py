"""Training a toy Llama for some steps, and going on with it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.lab.distil.helpers import answer, rows_for, weights_of, write_toy_folder

torch = pytest.importorskip("torch", reason="needs paceline[torch]")

from paceline.core.errors import CapabilityError, EngineError, InputError  # noqa: E402
from paceline.lab.comparison import Stopped  # noqa: E402
from paceline.lab.distil import training as module  # noqa: E402
from paceline.lab.distil.objective import lk_loss_of_heads  # noqa: E402
from paceline.lab.distil.training import Training, _collate, check_architecture, default_learning_rate, train_draft  # noqa: E402

ANSWERS = [answer(number) for number in range(12)]
ROWS = rows_for(ANSWERS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_folder(tmp_path_factory.mktemp("toy") / "toy")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_TOKENS", 90)


def train(
    source: Path,
    folder: Path,
    *,
    steps: list[int] | None = None,
    stops_at: int | None = None,
    done_share: Callable[[], float] = lambda: 0.0,
    dtype: str = "F32",
    epochs: int = 2,
    learning_rate: float | None = None,
    lora: int | None = None,
) -> Training:
    told = [] if steps is None else steps
    return train_draft(
        source,
        folder / "checkpoints",
        folder / "trained",
        ANSWERS,
        ROWS,
        dtype=dtype,
        learning_rate=learning_rate,
        epochs=epochs,
        lora=lora,
        seed=1,
        threads=1,
        done_share=done_share,
        stopped=lambda: stops_at is not None and len(told) >= stops_at,
        report=lambda number, count, loss: told.append(number),
    )


def test_the_loss_falls_and_the_folder_is_whole(source: Path, tmp_path: Path) -> None:
    found = train(source, tmp_path, epochs=8, learning_rate=3e-2)
    assert found.ended_by == "epochs"
    assert found.texts == 12
    assert found.first_loss is not None
    assert found.last_loss is not None
    assert found.last_loss < 0.8 * found.first_loss
    made = tmp_path / "trained"
    assert {path.name for path in made.iterdir()} == {path.name for path in source.iterdir()}
    before, after = weights_of(source), weights_of(made)
    assert before.keys() == after.keys()
    assert any(not np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.long
def test_an_interrupted_training_ends_as_one_that_was_not(source: Path, tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole: list[int] = []
    train(source, tmp_path / "whole", steps=whole)
    first: list[int] = []
    with pytest.raises(Stopped):
        train(source, tmp_path / "parts", steps=first, stops_at=3)
    assert not (tmp_path / "parts" / "trained").exists()
    rest: list[int] = []
    train(source, tmp_path / "parts", steps=rest)
    assert first + rest == whole
    ours, theirs = (weights_of(tmp_path / name / "trained") for name in ("whole", "parts"))
    for name, weights in ours.items():
        assert theirs[name] == pytest.approx(weights, abs=1e-5), name


def test_a_torn_checkpoint_is_passed_over(source: Path, tmp_path: Path) -> None:
    first: list[int] = []
    with pytest.raises(Stopped):
        train(source, tmp_path, steps=first, stops_at=2)
    torn = tmp_path / "checkpoints" / "checkpoint-3"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    rest: list[int] = []
    train(source, tmp_path, steps=rest)
    assert rest[0] == 3


def test_it_ends_with_its_time(source: Path, tmp_path: Path) -> None:
    clock = itertools.count()
    found = train(source, tmp_path, done_share=lambda: next(clock) / 8, epochs=50)
    assert found.ended_by == "time"
    assert found.steps < 10


def test_weights_are_written_in_the_type_that_was_asked_for(source: Path, tmp_path: Path) -> None:
    train(source, tmp_path, dtype="F16", epochs=1)
    assert {weights.dtype for weights in weights_of(tmp_path / "trained").values()} == {np.dtype(np.float16)}
    assert json.loads((tmp_path / "trained" / "config.json").read_text())["torch_dtype"] == "float16"


def test_a_full_disk_is_one_line(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data: No space left on device")

    monkeypatch.setattr(module._Distiller, "_save_optimizer_and_scheduler", full)
    with pytest.raises(InputError, match="room"):
        train(source, tmp_path, stops_at=2)
    monkeypatch.undo()
    monkeypatch.setattr(module, "BATCH_TOKENS", 90)
    assert train(source, tmp_path).steps > 2


def test_a_loss_that_is_no_number_is_an_error(source: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="--lr"):
        train(source, tmp_path, learning_rate=1e30)


def test_a_batch_asks_each_place_for_what_its_rows_say() -> None:
    """Texts with prompts of different lengths, filled up to one length."""
    texts = module._Texts(ANSWERS[:3], ROWS[:3])
    batch = _collate([texts[index] for index in range(3)])
    kept = batch["token_ids"].shape[1]
    length = batch["input_ids"].shape[1]
    assert batch["weights"].sum() == sum(len(each.token_ids) for each in ANSWERS[:3])
    for index, each in enumerate(ANSWERS[:3]):
        first = len(each.task.prompt_ids) - 1 - (length - kept)
        places = batch["weights"][index].nonzero().flatten().tolist()
        assert places == list(range(first, first + len(each.token_ids)))
    losses = lk_loss_of_heads(torch.zeros(3, kept, 384), batch["token_ids"], batch["logprobs"], batch["tail"])
    assert torch.isfinite(losses).all()


def test_smaller_models_learn_faster() -> None:
    assert default_learning_rate(10**6) == 1e-3
    assert 2e-4 < default_learning_rate(135 * 10**6) < 4e-4
    assert default_learning_rate(7 * 10**9) == 1e-4


def test_an_architecture_is_refused_by_its_configuration(source: Path, tmp_path: Path) -> None:
    check_architecture(source)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(CapabilityError, match="encoder-decoder"):
        check_architecture(tmp_path)


def test_low_rank_matrices_are_merged_and_an_interrupt_goes_on(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs paceline[distil]")
    first: list[int] = []
    with pytest.raises(Stopped):
        train(source, tmp_path, steps=first, stops_at=4, lora=4, learning_rate=3e-2, epochs=8)
    rest: list[int] = []
    found = train(source, tmp_path, steps=rest, lora=4, learning_rate=3e-2, epochs=8)
    assert rest[0] == 5
    assert found.first_loss is not None
    assert found.last_loss is not None
    assert found.last_loss < found.first_loss
    before, after = weights_of(source), weights_of(tmp_path / "trained")
    assert before.keys() == after.keys()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert "model.layers.0.self_attn.q_proj.weight" in changed
    assert "model.embed_tokens.weight" not in changed
