"""Which drafts can be trained, where the result goes, and in which type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import CapabilityError, InputError
from paceline.lab.distil.draft_files import check_made, check_trainable, choose_type
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft
from tests.engines.tiny_models import write_eagle_head, write_model
from tests.lab.llama_files import write_llama


def test_the_embedded_draft_can_be_trained() -> None:
    what = check_trainable(embedded_draft(), Path("out.gguf"))
    assert choose_type(what, Path("out.gguf"), None) == "Q8_0"
    assert choose_type(what, Path("out.gguf"), "q4_0") == "Q4_0"
    assert choose_type(what, Path("folder"), None) == "F16"


@pytest.mark.parametrize(("architecture", "reason"), [("mamba", "recurrent"), ("qwen2", "Hugging Face folder")])
def test_files_that_cannot_be_trained_are_refused_with_the_reason(
    architecture: str, reason: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "draft.gguf", architecture)
    with pytest.raises(CapabilityError, match=f"{architecture}.*{reason}"):
        check_trainable(path, tmp_path / "out.gguf")


def test_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="head"):
        check_trainable(write_eagle_head(tmp_path / "head.gguf", 32), tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "8 experts"),
        ({"model_type": "rwkv"}, "recurrent"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_folders_that_cannot_be_trained_are_refused(config: dict[str, object], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(CapabilityError, match=reason):
        check_trainable(tmp_path, tmp_path / "out")


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    draft, target = (write_llama(tmp_path / name) for name in ("draft.gguf", "target.gguf"))
    for path, force in ((draft, True), (target, True), (tmp_path, True)):
        with pytest.raises(InputError):
            check_made(target, draft, path, force=force)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"mine")
    with pytest.raises(InputError, match="--force"):
        check_made(target, draft, other, force=False)
    check_made(target, draft, other, force=True)
    check_made(target, draft, tmp_path / "new.gguf", force=False)


def test_types_that_cannot_be_written_are_refused() -> None:
    what = describe(embedded_draft())
    with pytest.raises(InputError):
        choose_type(what, Path("folder"), "Q4_0")
    with pytest.raises(InputError):
        choose_type(what, Path("out.gguf"), "Q9_9")


def test_a_folder_that_cannot_become_a_file_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(InputError, match="Qwen2ForCausalLM"):
        check_trainable(tmp_path, Path("out.gguf"))
    assert check_trainable(tmp_path, Path("out")).architecture == "qwen2"
