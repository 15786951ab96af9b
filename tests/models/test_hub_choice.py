"""Which files of a repository are the model that is asked for: llama.cpp's rule, and where it is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from paceline.core.errors import InputError, ModelFileError
from paceline.models.hub.choice import choose_files, choose_head, parse_quant
from paceline.models.hub.reference import HubModel


def chosen(reference: str, paths: Sequence[str], file: str | None = None) -> tuple[str, ...]:
    found = choose_files(HubModel.parse(reference, file=file), reversed(paths))
    assert found.is_folder is not found.paths[0].endswith(".gguf")
    return found.paths


USUAL = ("m-BF16.gguf", "m-F16.gguf", "m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf")
BESIDE = (
    *("imatrix_unsloth.gguf", "m-imatrix.gguf", "mmproj-m-Q4_K_M.gguf", "mtp-m-Q4_K_M.gguf"),
    *("eagle3-m-Q8_0.gguf", "dflash-m.gguf", "dspark-m.gguf", "m-lora-Q4_K_M.gguf", "adapter.gguf", "a/lora.gguf"),
)


@pytest.mark.parametrize(
    ("reference", "paths", "path"),
    [
        ("u/m", USUAL, "m-Q4_K_M.gguf"),
        ("u/m", ("m-Q2_K.gguf", "m-Q8_0.gguf"), "m-Q8_0.gguf"),
        ("u/m", ("m-Q2_K.gguf", "m-Q3_K_M.gguf"), "m-Q2_K.gguf"),
        ("u/m", ("model.gguf",), "model.gguf"),
        ("u/m:q4_k_m", USUAL, "m-Q4_K_M.gguf"),
        ("u/m:Q4_K", ("m-Q4_K.gguf", "m-Q4_K_S.gguf"), "m-Q4_K.gguf"),
        # llama.cpp takes BF16 here, the first that has F16 in it.
        ("u/m:F16", USUAL, "m-F16.gguf"),
        ("u/m:bf16", USUAL, "m-BF16.gguf"),
        ("u/m:Q8_0", ("m-IQ8_0.gguf", "m.q8_0.gguf"), "m.q8_0.gguf"),
        ("u/m:UD-Q8_0", ("m-Q8_0.gguf", "m-UD-Q8_0.gguf"), "m-UD-Q8_0.gguf"),
        ("u/m:Q4_K_M", ("Q4_K_M/m-Q4_K_M.gguf", "Q8_0/m-Q8_0.gguf"), "Q4_K_M/m-Q4_K_M.gguf"),
        ("u/m", (*BESIDE, "m-Q8_0.gguf"), "m-Q8_0.gguf"),
        ("u/m", ("a-lorax-Q8_0.gguf",), "a-lorax-Q8_0.gguf"),
        ("u/m:IQ2_M", ("mtp-m-IQ2_M.gguf", "m-MTP-IQ2_M.gguf", "m-MTP-Q8_0.gguf"), "m-MTP-IQ2_M.gguf"),
        ("u/m", ("M-EAGLE3-Q8_0.gguf", "eagle3-m-Q8_0.gguf"), "M-EAGLE3-Q8_0.gguf"),
        ("u/m", ("alpaca-lora-65b.Q4_K_M.gguf", "alpaca-lora-65b.Q8_0.gguf"), "alpaca-lora-65b.Q4_K_M.gguf"),
        ("u/m:q8_0", ("alpaca-lora-65b.Q8_0.gguf", "m-Q4_K_M.gguf"), "alpaca-lora-65b.Q8_0.gguf"),
        ("u/m:q8_0", ("m-lora-Q8_0.gguf", "m-Q8_0.gguf"), "m-Q8_0.gguf"),
        ("u/m", ("model.safetensors", "config.json", "m-Q2_K.gguf"), "m-Q2_K.gguf"),
    ],
)
def test_one_file_is_chosen(reference: str, paths: tuple[str, ...], path: str) -> None:
    assert chosen(reference, paths) == (path,)


def test_a_split_model_is_chosen_whole() -> None:
    parts = tuple(f"sub/m-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    assert chosen("u/m:Q8_0", parts) == chosen("u/m", (*parts, "m-Q2_K.gguf")) == parts
    assert chosen("u/m", (*parts, "m-Q4_K_M.gguf"), file=parts[1]) == parts
    with pytest.raises(ModelFileError, match=r"u/m lacks sub/m-Q8_0-00002-of-00003\.gguf, a part of a model of 3"):
        chosen("u/m", (parts[0], parts[2]))


def test_a_file_may_be_named_whatever_it_is() -> None:
    assert chosen("u/m", USUAL, file="m-Q2_K.gguf") == ("m-Q2_K.gguf",)
    assert chosen("u/m", (*USUAL, *BESIDE), file="m-lora-Q4_K_M.gguf") == ("m-lora-Q4_K_M.gguf",)


FOLDER = (
    *("config.json", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer.model", "vocab.json"),
    *("chat_template.jinja", "additional_chat_templates/tools.jinja", "README.md"),
)
NOT_NEEDED = (
    *("pytorch_model.bin", "model.pth", "onnx/model.onnx", "onnx/config.json", "picture.png", ".gitattributes"),
    *("consolidated.safetensors", "original/model.safetensors", "model.fp16.safetensors", "flax_model.msgpack"),
)


def test_a_folder_is_what_it_is_loaded_from() -> None:
    single = chosen("u/m", (*FOLDER, *NOT_NEEDED, "model.safetensors"))
    assert sorted(single) == sorted((*FOLDER, "model.safetensors"))
    assert single[-1] == "model.safetensors"
    weights = ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    several = chosen("u/m", (*FOLDER, *NOT_NEEDED, *weights))
    assert sorted(several) == sorted((*FOLDER, *weights))
    assert several[-3:] == weights
    # A single file wins, as it does where transformers loads them.
    assert chosen("u/m", (*FOLDER, *weights, "model.safetensors")) == single
    assert chosen("u/m:safetensors", (*FOLDER, "model.safetensors", "m-Q8_0.gguf")) == single


@pytest.mark.parametrize(
    ("reference", "file", "paths", "words"),
    [
        ("u/m:Q5_K", None, USUAL, "u/m has no Q5_K: choose from BF16, F16, Q2_K, Q4_K_M, Q4_K_S, Q8_0"),
        ("u/m:Q5_K", None, ("model!.gguf",), "its files name no quants, so choose one .`file`.: model!.gguf"),
        (
            "u/m:Q5_K",
            None,
            ("config.json", "model.safetensors"),
            "no GGUF file, of Q5_K or otherwise: leave out :Q5_K for its safetensors",
        ),
        ("u/m:Q5_K", None, ("config.json",), "no GGUF file, of Q5_K or otherwise: choose another repository"),
        ("u/m:Q5_K", None, ("a.txt",), "no GGUF file, of Q5_K or otherwise: choose another repository"),
        (
            "u/m",
            None,
            ("a-Q8_0.gguf", "b-Q8_0.gguf"),
            "u/m is the name of 2 files, a-Q8_0.gguf, b-Q8_0.gguf: .* .`file`.",
        ),
        ("u/m:q8_0", None, ("a-Q8_0.gguf", "b-Q8_0.gguf"), "u/m:q8_0 is the name of 2 files"),
        ("u/m", "c.gguf", ("a.gguf", "x.txt"), r"u/m has no GGUF file c.gguf \(`file`\): it has a.gguf$"),
        ("u/m", "x.txt", ("x.txt",), r"u/m has no GGUF file x.txt \(`file`\): it has none"),
        ("u/m", None, ("config.json", "pytorch_model.bin"), "u/m has no GGUF file and no safetensors model"),
        ("u/m:safetensors", None, USUAL, "u/m has no safetensors model"),
        ("u/m", None, ("adapter_config.json", "adapter_model.safetensors"), "u/m is a LoRA adapter"),
    ],
)
def test_what_there_is_is_said_where_the_choice_fails(
    reference: str, file: str | None, paths: tuple[str, ...], words: str
) -> None:
    with pytest.raises(InputError, match=words) as raised:
        chosen(reference, paths, file)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "reference", ["", "m", "u/m/x", "/m", "u/", "u /m", "u/m:", "u/m:a:b", "u/..", "a--b/m", "https://h/u/m", "-u/m"]
)
def test_what_is_no_name_of_the_hub_is_refused(reference: str) -> None:
    with pytest.raises(InputError, match=r"is not a model of the hub: give user/repo or user/repo:quant \(`repo`\)"):
        HubModel.parse(reference)


def test_what_contradicts_itself_is_refused_and_tokens_are_not_shown() -> None:
    with pytest.raises(InputError, match=r"u/m:Q8_0 names a quant and `file` a\.gguf names a file"):
        HubModel.parse("u/m:Q8_0", file="a.gguf")
    for token in ("", "hf_secret\n", "hf secret"):
        with pytest.raises(InputError, match="the token") as raised:
            HubModel.parse("u/m", token=token)
        assert "secret" not in str(raised.value)
    assert "secret" not in repr(HubModel.parse("u/m", token="hf_secret"))


def test_quants_are_read_from_names() -> None:
    names = {"a/m-Q4_K_M.gguf": "Q4_K_M", "m.q8_0.gguf": "Q8_0", "m-f16-00001-of-00002.gguf": "F16", "model.gguf": ""}
    assert {name: parse_quant(name) for name in names} == names


KINDS = ("mtp-", "eagle3-")


@pytest.mark.parametrize(
    ("model", "paths", "quant", "head"),
    [
        ("m-Q8_0.gguf", ("m-Q8_0.gguf", "m-MTP-Q8_0.gguf", "mmproj-m.gguf", "dflash-m.gguf", "a.txt"), "", None),
        ("m-Q8_0.gguf", ("eagle3-m-Q8_0.gguf", "mtp-m-F16.gguf", "mtp-m.txt"), "", "mtp-m-F16.gguf"),
        # The quant that was asked for, else as many bits as those of the model, or of that quant.
        ("m-Q4_K_M.gguf", ("mtp-m-F16.gguf", "mtp-m-Q4_0.gguf", "mtp-m-Q8_0.gguf"), "", "mtp-m-Q4_0.gguf"),
        ("m-Q4_K_M.gguf", ("mtp-m-Q4_0.gguf", "mtp-m-Q4_K_M.gguf"), "q4_k_m", "mtp-m-Q4_K_M.gguf"),
        ("m-UD-Q8_K.gguf", ("mtp-m-F16.gguf", "mtp-m-Q8_0.gguf"), "Q8_K", "mtp-m-Q8_0.gguf"),
        ("m-Q8_0.gguf", ("mtp-m-Q4_0.gguf", "mtp-m-Q8_0-00001-of-00002.gguf"), "", "mtp-m-Q4_0.gguf"),
        # In the model's folder or above it, the nearer the better.
        ("a/b/m-Q8_0.gguf", ("mtp-m-Q8_0.gguf", "a/mtp-m-Q4_0.gguf", "c/mtp-m-Q8_0.gguf"), "", "a/mtp-m-Q4_0.gguf"),
        ("a/m-Q8_0.gguf", ("b/mtp-m-Q8_0.gguf", "a/b/mtp-m-Q8_0.gguf"), "", None),
    ],
)
def test_a_head_is_chosen_beside_a_model(model: str, paths: tuple[str, ...], quant: str, head: str | None) -> None:
    assert choose_head(model, reversed(paths), KINDS, quant) == head


def test_a_draft_may_be_a_head_where_there_is_no_model() -> None:
    heads = ("README.md", "dflash-m-Q8_0.gguf", "eagle3-m-Q4_0.gguf", "eagle3-m-Q8_0.gguf")

    def drafts(reference: str, paths: Sequence[str]) -> tuple[str, ...]:
        return choose_files(dataclasses.replace(HubModel.parse(reference), heads=KINDS), paths).paths

    assert drafts("u/m", heads) == ("eagle3-m-Q8_0.gguf",)
    assert drafts("u/m:q4_0", heads) == ("eagle3-m-Q4_0.gguf",)
    assert drafts("u/m:q4_0", (*heads, "m-Q4_0.gguf")) == ("m-Q4_0.gguf",)
    assert drafts("u/m:safetensors", (*heads, "config.json", "model.safetensors"))[-1] == "model.safetensors"
    with pytest.raises(InputError, match=r"no model but heads .*, dflash-m-Q8_0\.gguf: none drafts here"):
        drafts("u/m", heads[:2])
    with pytest.raises(InputError, match=r"heads .*: name their model, and this as its draft \(`draft_repo`"):
        chosen("u/m", heads)
