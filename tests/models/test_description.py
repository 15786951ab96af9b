"""What a model says about itself, from GGUF files and from Hugging Face folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import pytest

from paceline.core.errors import ModelFileError
from paceline.engines.options import engine_for
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.fingerprints import fingerprint
from paceline.models.gguf_file import GGUFFile
from tests.models.helpers import split_gguf, write_folder, write_gguf


@pytest.mark.parametrize("path", [embedded_target(), embedded_draft()], ids=["target", "draft"])
def test_the_embedded_models_say_all_there_is_to_say(path: Path) -> None:
    what = describe(path)
    assert (what.format, what.architecture, what.file_type) == ("gguf", "llama", "Q8_0")
    assert what.num_bytes == path.stat().st_size
    # Q8_0 spends 34 bytes on 32 weights; the rest is the vocabulary's text.
    assert what.num_parameters is not None
    assert 0.8 < what.num_parameters * 34 / 32 / what.num_bytes < 1
    for known in (what.layers, what.width, what.heads, what.kv_heads, what.head_size, what.feed_forward):
        assert known is not None
    assert what.license
    assert what.summary
    assert what.card == path.with_name("MODEL_CARD.md")
    assert what.vocabulary_size == len(gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].data)


def test_a_gguf_file(tmp_path: Path) -> None:
    what = describe(
        write_gguf(
            tmp_path / "a.gguf",
            "qwen9",
            general__file_type=15,
            general__license="mit",
            general__name="A name",
            qwen9__block_count=3,
            qwen9__embedding_length=96,
            qwen9__attention__head_count=[4, 6],
            qwen9__attention__head_count_kv=[0, 2],
            qwen9__feed_forward_length=200,
            qwen9__expert_count=8,
            qwen9__context_length=777,
            paceline__inflate__source="target",
        )
    )
    assert (what.architecture, what.file_type, what.license, what.summary) == ("qwen9", "Q4_K_M", "mit", "A name")
    assert (what.layers, what.width, what.heads, what.kv_heads, what.head_size) == (3, 96, 6, 2, 16)
    assert (what.feed_forward, what.experts, what.context_length) == (200, 8, 777)
    assert (what.num_parameters, what.vocabulary_size) == (104, 3)
    assert what.provenance == {"inflate.source": "target"}
    assert what.metadata["tokenizer.ggml.tokens"] == "(3 items)"
    assert what.card is None
    (tmp_path / "a.md").write_text("# Card\n")
    assert describe(tmp_path / "a.gguf").card == tmp_path / "a.md"


def test_heads_have_the_size_that_is_said_and_else_share_the_width(tmp_path: Path) -> None:
    write_gguf(tmp_path / "plain.gguf", llama__embedding_length=96, llama__attention__head_count=4)
    plain = describe(tmp_path / "plain.gguf")
    assert (plain.head_size, plain.kv_heads) == (24, 4)
    write_gguf(
        tmp_path / "said.gguf",
        llama__embedding_length=96,
        llama__attention__head_count=4,
        llama__attention__key_length=64,
    )
    assert describe(tmp_path / "said.gguf").head_size == 64


def test_a_file_type_nobody_knows_gives_way_to_the_commonest_one(tmp_path: Path) -> None:
    assert describe(write_gguf(tmp_path / "a.gguf", general__file_type=999)).file_type == "F16"
    assert describe(write_gguf(tmp_path / "b.gguf")).file_type == "F16"


def test_a_folder(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "hf",
        hidden_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=300,
        max_position_embeddings=2048,
        torch_dtype="bfloat16",
    )
    what = describe(folder)
    assert (what.format, what.architecture, what.file_type) == ("huggingface", "llama", "bfloat16")
    assert (what.layers, what.width, what.heads, what.kv_heads, what.head_size) == (5, 64, 4, 2, 16)
    assert (what.feed_forward, what.vocabulary_size, what.context_length) == (96, 300, 2048)
    assert what.num_parameters == 28
    assert what.num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert (what.license, what.summary) == ("apache-2.0", "A model that does nothing.")
    assert what.card == folder / "README.md"


def test_a_folder_with_little_to_say(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", text_config={"model_type": "inner", "head_dim": 7})
    (folder / "README.md").unlink()
    (folder / "LICENSE").write_text("terms")
    what = describe(folder)
    assert (what.architecture, what.head_size, what.layers) == ("inner", 7, None)
    assert (what.license, what.summary, what.card) == ("see LICENSE", None, None)
    assert what.file_type == "F32"
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert describe(folder).num_parameters is None


@pytest.mark.parametrize("odd", [-1, [1, 2, 3], "x"])
def test_odd_entries_of_a_folder_are_one_line(odd: object, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", text_config=odd)
    with pytest.raises(ModelFileError, match="hf has an invalid entry") as caught:
        describe(folder)
    assert "\n" not in str(caught.value)


def test_weights_that_are_there_twice_count_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    (folder / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert describe(folder).num_parameters == 28


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "it is empty; copy or download"), (b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer")],
)
def test_weight_files_without_weights(content: bytes, words: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=f"model.safetensors holds no weights: .*{words}"):
        describe(folder)


def test_what_is_no_whole_model_is_said_in_one_line(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ModelFileError) as caught:
            describe(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert f"there is no file {tmp_path / 'nowhere.gguf'}" in refusal(tmp_path / "nowhere.gguf")
    (tmp_path / "empty").mkdir()
    assert "empty is a folder that has no config.json; give a GGUF file or a" in refusal(tmp_path / "empty")
    whole = write_folder(tmp_path / "hf")
    weights = (whole / "model.safetensors").read_bytes()
    for cut in (
        weights[:6],
        weights[:40],
        weights[:-1],
        weights[:8] + b"?" + weights[9:],
    ):
        (whole / "model.safetensors").write_bytes(cut)
        assert "model.safetensors is truncated or damaged" in refusal(whole)
    for other, begins in ((b"\xff" * 8, "the bytes ff ff ff ff ff ff ff ff"), (b"root:x:0", "'root:x:0'")):
        (whole / "model.safetensors").write_bytes(other + weights[8:])
        assert f"model.safetensors is not a safetensors file: it begins with {begins}; copy" in refusal(whole)
    (whole / "model.safetensors").write_bytes(weights)
    index = whole / "model.safetensors.index.json"
    (whole / "model.safetensors").rename(whole / "part-1.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    assert "lacks 1 of its 2 weight files, such as part-2.safetensors; copy or download" in refusal(whole)
    index.unlink()
    (whole / "part-1.safetensors").unlink()
    (whole / "training_args.bin").write_bytes(b"no weights either")
    assert "has no weights; get its *.safetensors files" in refusal(whole)
    (whole / "model-00001-of-00002.safetensors").write_bytes(weights)
    assert "neither model.safetensors nor model.safetensors.index.json; get the index" in refusal(whole)
    for text, says in (
        ("{", "is not valid JSON"),
        ("[]", "holds a JSON list, not an object"),
        ("\xff", "is not valid JSON"),
    ):
        (whole / "config.json").write_text(text, encoding="latin-1")
        assert f"config.json {says}" in refusal(whole)
        assert "fetch it again" in refusal(whole)


def test_a_split_model_is_described_as_a_whole(tmp_path: Path) -> None:
    whole, parts = describe(embedded_draft()), split_gguf(embedded_draft(), tmp_path)
    what = describe(parts[0])
    assert (what.num_parts, what.num_parameters, what.file_type) == (3, whole.num_parameters, "Q8_0")
    assert what.num_bytes == sum(part.stat().st_size for part in parts)
    assert what.vocabulary_size == whole.vocabulary_size
    assert whole.num_parts == 1
    with pytest.raises(ModelFileError, match=f"is part 2 of a split model; give the first part, {parts[0].name}"):
        describe(parts[1])


pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")


@pipes
def test_a_pipe_is_no_model_and_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "a.gguf"
    os.mkfifo(pipe)
    (tmp_path / "link.gguf").symlink_to(pipe)
    for path in (pipe, tmp_path / "link.gguf"):
        for read in (describe, fingerprint, GGUFFile):
            with pytest.raises(
                ModelFileError, match=f"^{path} is a pipe; give the path of a file, as models are read mo"
            ):
                read(path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="the system has no such device")
def test_a_device_is_no_model() -> None:
    with pytest.raises(ModelFileError, match=r"^/dev/zero is a device; give the path of a file"):
        describe(Path("/dev/zero"))


@pipes
@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "other.bin"])
def test_a_folder_with_a_pipe_in_it_is_no_model_and_is_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    (folder / "nowhere").symlink_to(tmp_path / "nowhere")
    assert describe(folder).num_parameters == 28
    os.mkfifo(folder / name)
    for read in (describe, engine_for):
        with pytest.raises(ModelFileError, match=f"{name} is a pipe; give the path of a file"):
            read(folder)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", hidden_size=64)
    for name in ("config.json", "README.md"):
        text = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(text, encoding="utf-8-sig")
    what = describe(folder)
    assert (what.width, what.license, what.summary) == (64, "apache-2.0", "A model that does nothing.")


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root may read everything")
def test_a_file_one_may_not_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    path.chmod(0)
    with pytest.raises(ModelFileError, match="Permission denied"):
        describe(path)
