"""Values that llama.cpp ends its process over: each is refused by its key, with the limit and the way out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelFileError
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.gguf_checks import check_tokens, check_values
from paceline.models.gguf_header import read_gguf_header, read_gguf_texts
from tests.models import damaged_gguf
from tests.models.damaged_gguf import Header, set_key


@cache
def sound() -> Header:
    return damaged_gguf.read(embedded_draft(), with_weights=False)


def damaged(tmp_path: Path, *values: tuple[str, Any]) -> Path:
    header = damaged_gguf.copied(sound())
    for key, value in values:
        set_key(header, key, value)
    return header.write(tmp_path / "model.gguf")


EXPERTS = ("llama.expert_count", 8)
USED = ("llama.expert_used_count", 2)

VALUES: dict[str, tuple[list[tuple[str, Any]], str]] = {
    "no layers": ([("llama.block_count", 0)], r"block_count 0, and layers are 1 to 512"),
    "too many layers": ([("llama.block_count", 513)], r"block_count 513"),
    "no context": ([("llama.context_length", 0)], r"context_length 0"),
    "a context beyond what is counted": ([("llama.context_length", 2**31)], r"context_length 2147483648"),
    "a vocabulary for all memory": ([("llama.vocab_size", 2**32 - 1)], r"vocab_size 4294967295"),
    "more predicting layers than layers": ([("llama.nextn_predict_layers", 99)], r"nextn_predict_layers 99"),
    "experts that none is used of": ([EXPERTS], r"expert_used_count 0, and there are 8 experts"),
    "more experts used than there are": ([EXPERTS, ("llama.expert_used_count", 9)], r"expert_used_count 9"),
    "as many in one layer": ([EXPERTS, ("llama.expert_used_count", [2, 9])], r"expert_used_count 9"),
    "experts used that are not there": ([USED], r"expert_used_count 2, and there are 0 experts"),
    "groups of no experts": ([("llama.expert_group_count", 2)], r"expert_group_count 2"),
    "groups that are not equal": ([EXPERTS, USED, ("llama.expert_group_count", 3)], r"expert_group_count 3"),
    "no group used": ([EXPERTS, USED, ("llama.expert_group_count", 4)], r"expert_group_used_count 0"),
    "a scaling nobody knows": ([("llama.rope.scaling.type", "nonsense")], r"'nonsense', and it is one of none, linear"),
    "a negative epsilon": ([("llama.attention.layer_norm_rms_epsilon", -1e-5)], r"rms_epsilon -[\d.e-]+, and"),
    "no epsilon": ([("llama.attention.layer_norm_rms_epsilon", float("nan"))], r"rms_epsilon nan, and"),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_value_that_no_model_has_is_refused_by_its_key(case: str, tmp_path: Path) -> None:
    values, words = VALUES[case]
    path = damaged(tmp_path, *values)
    with pytest.raises(ModelFileError, match=words) as caught:
        check_values(path, read_gguf_header(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [EXPERTS, USED],
        [EXPERTS, ("llama.expert_used_count", [1, 8]), ("llama.expert_group_count", 1)],
        [EXPERTS, USED, ("llama.expert_group_count", 4), ("llama.expert_group_used_count", 3)],
        [("llama.nextn_predict_layers", 1)],
        [("llama.nextn_predict_layers", 0)],
        [("llama.block_count", 512), ("llama.rope.scaling.type", "yarn")],
        [("llama.attention.layer_norm_rms_epsilon", 0.0)],
        [("llama.block_count", "2")],  # of another type: llama.cpp says so itself
    ],
)
def test_values_that_models_have_are_taken(values: list[tuple[str, Any]], tmp_path: Path) -> None:
    path = damaged(tmp_path, *values)
    check_values(path, read_gguf_header(path))


@pytest.mark.parametrize("name", ["mtp-model.gguf", "model.gguf"])
def test_layers_that_predict_are_no_model_by_themselves(name: str, tmp_path: Path) -> None:
    header = damaged_gguf.copied(sound())
    layers = header.get("llama.block_count")
    assert layers is not None
    set_key(header, "llama.nextn_predict_layers", 1)
    path = header.write(tmp_path / name)
    check_values(path, read_gguf_header(path))
    last = b"blk.%d." % (layers.value - 1)
    header.tensors = [
        each for each in header.tensors if not each.name.startswith(b"blk.") or each.name.startswith(last)
    ]
    path = header.write(tmp_path / name)
    with pytest.raises(ModelFileError, match=r"a head that drafts for one .*nextn_predict_layers is 1.* whole model"):
        check_values(path, read_gguf_header(path))


def test_the_tokens_of_sound_files_are_taken() -> None:
    for path in (embedded_draft(), embedded_target()):
        assert check_tokens(path, read_gguf_header(path).metadata)
        assert len(read_gguf_texts(path, "tokenizer.ggml.tokens")) == 4096
    assert read_gguf_texts(embedded_draft(), "no such key") == []


def _twice(tokens: list[bytes]) -> None:
    tokens[77] = tokens[33]


def _twice_no_text(tokens: list[bytes]) -> None:
    tokens[77] = tokens[33] = b"\xff\n"


TOKENS: dict[str, tuple[Callable[[list[bytes]], None], str, str]] = {
    "a token twice": (_twice, "gpt2", r"has the token '.+' 2 times in tokenizer.ggml.tokens, at 33 first"),
    "bytes twice": (_twice_no_text, "gpt2", r"has the token the bytes ff 0a 2 times"),
    "BPE called SentencePiece": (lambda _: None, "llama", r"tokenizer.ggml.model 'llama'.*'gpt2'.*convert"),
}


@pytest.mark.parametrize("case", TOKENS)
def test_tokens_that_no_vocabulary_has_are_named(case: str, tmp_path: Path) -> None:
    change, model, words = TOKENS[case]
    header = damaged_gguf.copied(sound())
    key = header.get("tokenizer.ggml.tokens")
    assert key is not None
    key.value = list(key.value)
    change(key.value)
    set_key(header, "tokenizer.ggml.model", model)
    path = header.write(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=words) as caught:
        check_tokens(path, read_gguf_header(path).metadata)
    assert "\n" not in str(caught.value)


def test_tokens_without_text_may_be_several(tmp_path: Path) -> None:
    header = damaged_gguf.copied(sound())
    key = header.get("tokenizer.ggml.tokens")
    assert key is not None
    key.value = [b"", b"", *key.value[2:]]  # llama.cpp gives each a name
    path = header.write(tmp_path / "model.gguf")
    assert check_tokens(path, read_gguf_header(path).metadata)


@pytest.mark.parametrize("architecture", ["eagle3", "dflash", "gemma4-assistant"])
def test_a_head_is_no_model(architecture: str, tmp_path: Path) -> None:
    from paceline.models.gguf_model import read_gguf_model

    path = damaged(tmp_path, ("general.architecture", architecture))
    with pytest.raises(ModelFileError, match=r"not a model but a head that drafts .* whole model"):
        read_gguf_model(path)
