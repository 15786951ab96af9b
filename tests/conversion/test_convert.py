"""Conversion between GGUF and Hugging Face folders: both readers must see one model, and errors are one line each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import gguf
import llama_cpp
import tokenizers
import torch
import transformers

import paceline
from paceline.conversion import convert
from paceline.conversion.convert import exact_dtype, folder_to_gguf, gguf_to_folder
from paceline.conversion.convert.dtypes import WEIGHT_TYPES, decode, encode
from paceline.conversion.convert.llama_settings import to_gguf_rows, to_hf_rows
from paceline.conversion.convert.rope import Llama3Scaling, recover_llama3
from paceline.conversion.convert.sentencepiece_model import merges_to_scores, scores_to_merges
from paceline.conversion.quantize import quantize_gguf
from paceline.core.errors import InputError, ModelFileError, ModelWarning
from paceline.engines.llama_cpp.ends import read_end_ids
from paceline.models.embedded import embedded_draft, heldout
from tests.lab.llama_files import SMALL, write_llama
from tests.models.helpers import edited_gguf, metadata, split_gguf, with_last_tokens
from tests.tiers import some_long

Floats = npt.NDArray[np.float32]

# Root mean square, against logits that spread by about 3: llama.cpp keeps its cache in F16.
RMS_LIMIT = 0.01

ODD = "naïve — 你好 мир 🙂\t\t x\r\n\n\n   \u00a0y\u2028 1234567 don't I'LL we'Ve <|endoftext e\u0301 ½ ٣ ﷽ \ufeff"
TEXTS = [
    ODD,
    "".join(map(chr, range(1, 128))),
    "".join(map(chr, range(0xA0, 0x250))),
    "   leading\n\n  \n\ttabs  and trailing   ",
    "x" * 50 + " " * 33 + "0" * 17 + "\n" * 9,
    "",
    " ",
    *heldout("code")[:8],
]

SHAPE: dict[str, Any] = {
    "vocab_size": 4160,  # more rows than the tokenizer has tokens
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


# --- helpers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded draft as a folder; tests copy it before they change it."""
    path = tmp_path_factory.mktemp("draft") / "folder"
    gguf_to_folder(embedded_draft(), path, dtype="F32")
    return path


@pytest.fixture
def own_folder(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "own"))


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    content.update(changes)
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}), encoding="utf-8")


def open_llama(path: Path, *, vocabulary_only: bool = False) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        str(path), n_ctx=512, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, vocab_only=vocabulary_only
    )


def llama_tokens(model: llama_cpp.Llama, text: str, *, add_bos: bool = False) -> list[int]:
    token_ids: list[int] = model.tokenize(text.encode(), add_bos=add_bos, special=False) if text or add_bos else []
    return token_ids


def llama_logits(path: Path, token_ids: Sequence[int]) -> Floats:
    """``[num_tokens, vocab]``."""
    model = open_llama(path)
    model.eval(token_ids)
    logits = np.array(model.scores[: len(token_ids)], dtype=np.float32)
    model.close()
    return logits


def torch_logits(folder: Path, token_ids: Sequence[int]) -> Floats:
    """``[num_tokens, vocab]``."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.inference_mode():
        logits: Floats = model.eval()(torch.tensor([list(token_ids)])).logits[0].numpy()
    return logits


def rms(ours: Floats, reference: Floats) -> float:
    assert ours.shape == reference.shape
    return float(np.sqrt(((ours - reference) ** 2).mean()))


def hf_tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def assert_same_tokens(folder: Path, gguf_file: Path, texts: Sequence[str] = TEXTS, decodes: bool = True) -> None:
    """Both readers turn every text into the same tokens, and these, if it ``decodes``, back into the text."""
    tokenizer, model = hf_tokenizer(folder), open_llama(gguf_file, vocabulary_only=True)
    for text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        assert token_ids == llama_tokens(model, text), ascii(text)
        assert not decodes or tokenizer.decode(token_ids) == text
    for text in texts[:3]:  # with a begin token, if the model wants one
        assert tokenizer.encode(text) == llama_tokens(model, text, add_bos=True)
    model.close()


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        tensor.name: (tensor.tensor_type.name, tuple(tensor.shape.tolist()), tensor.data.tobytes())
        for tensor in gguf.GGUFReader(path).tensors
    }


@cache
def _token_ids() -> tuple[int, ...]:
    model = open_llama(embedded_draft(), vocabulary_only=True)
    token_ids = llama_tokens(model, "\n".join(heldout("code")))[:160]
    model.close()
    assert len(token_ids) == 160
    return tuple(token_ids)


def random_model(folder: Path, tokenizer_of: Path, **changes: Any) -> Any:
    """Save a model of random weights, large enough that attention and positions show in the logits."""
    options = {key: changes.pop(key) for key in ("dtype", "max_shard_size") if key in changes}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **changes})).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        spread = 0.12 if parameter.dim() > 1 else 0.3
        parameter.data.normal_(float(parameter.dim() == 1), spread, generator=generator)
    model = model.to(getattr(torch, options.get("dtype", "float32")))
    model.save_pretrained(folder, max_shard_size=options.get("max_shard_size", "50GB"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, folder / name)
    return model


# --- the embedded model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The embedded draft as llama.cpp itself makes it F32, as a folder of that, and as a file of that folder."""
    base = tmp_path_factory.mktemp("draft")
    paths = {"gguf": base / "draft-f32.gguf", "folder": base / "folder", "again": base / "again.gguf"}
    quantize_gguf(embedded_draft(), paths["gguf"], "F32")
    gguf_to_folder(paths["gguf"], paths["folder"], dtype="F32")
    folder_to_gguf(paths["folder"], paths["again"], dtype="F32")
    return paths


def test_transformers_and_llama_cpp_read_the_same_text(embedded: dict[str, Path]) -> None:
    assert_same_tokens(embedded["folder"], embedded["gguf"])
    assert_same_tokens(embedded["folder"], embedded["again"])


def test_transformers_and_llama_cpp_compute_the_same_logits(embedded: dict[str, Path]) -> None:
    token_ids = _token_ids()
    expected = llama_logits(embedded["gguf"], token_ids)
    assert expected.std() > 1
    assert rms(torch_logits(embedded["folder"], token_ids), expected) < RMS_LIMIT
    np.testing.assert_array_equal(llama_logits(embedded["again"], token_ids), expected)


def test_there_and_back_is_the_same_file(embedded: dict[str, Path]) -> None:
    assert tensors(embedded["again"]) == tensors(embedded["gguf"])
    before, after = metadata(embedded["gguf"]), metadata(embedded["again"])
    assert {key: after[key] for key in before if key != "tokenizer.ggml.add_space_prefix"} == {
        key: value for key, value in before.items() if key != "tokenizer.ggml.add_space_prefix"
    }
    assert after.keys() - before.keys() <= {"general.type"}


def test_a_quantised_file_becomes_what_llama_cpp_dequantises(embedded: dict[str, Path], tmp_path: Path) -> None:
    gguf_to_folder(embedded_draft(), tmp_path / "folder", dtype="F32")
    ours, expected = (folder / "model.safetensors" for folder in (tmp_path / "folder", embedded["folder"]))
    assert ours.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(("dtype", "limit"), [("F16", 0.01), ("BF16", 0.1)])
def test_narrow_types_stay_close(dtype: str, limit: float, embedded: dict[str, Path], tmp_path: Path) -> None:
    gguf_to_folder(embedded["gguf"], tmp_path / "folder", dtype=dtype.lower())
    folder_to_gguf(tmp_path / "folder", tmp_path / "again.gguf", dtype=dtype)
    assert exact_dtype(tmp_path / "folder") == dtype
    kinds = {kind for kind, shape, _ in tensors(tmp_path / "again.gguf").values() if len(shape) == 2}
    assert kinds == {dtype}
    token_ids = _token_ids()
    expected = torch_logits(embedded["folder"], token_ids)
    assert rms(torch_logits(tmp_path / "folder", token_ids), expected) < limit
    assert rms(llama_logits(tmp_path / "again.gguf", token_ids), expected) < limit


def test_the_torch_engine_writes_the_same_text(embedded: dict[str, Path]) -> None:
    prompt, answers = heldout("code")[0][:200], []
    for path in (embedded["folder"], embedded["gguf"]):
        options = paceline.ModelOptions(path, context_length=256, threads=1)
        with paceline.load(options, drafters=["suffix"]) as model:
            answers.append(model.generate(prompt, max_tokens=24, temperature=0.0).text)
    assert answers[0] == answers[1]
    assert answers[0].strip()


# --- random models ----------------------------------------------------------------------------------------------------

RANDOM_MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "heads wider than hidden": {"head_dim": 32},
    "every head its own key": {"num_key_value_heads": 4},
    "llama3 rope": {"rope_scaling": LLAMA3, "head_dim": 32, "rope_theta": 5000.0},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "bf16 in shards": {"dtype": "bfloat16", "max_shard_size": "300KB"},
    "f16": {"dtype": "float16"},
    "another base and epsilon": {"rope_theta": 500000.0, "rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("name", some_long(RANDOM_MODELS, quick=["tied", "llama3 rope", "bf16 in shards"]))
def test_a_saved_model_and_its_gguf_agree(name: str, folder: Path, tmp_path: Path) -> None:
    random_model(tmp_path / "hf", folder, **RANDOM_MODELS[name])
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > (2 if name == "bf16 in shards" else 0)
    folder_to_gguf(tmp_path / "hf", tmp_path / "model.gguf", dtype="F32")
    token_ids = _token_ids()
    expected = torch_logits(tmp_path / "hf", token_ids)
    assert expected.std() > 0.5
    assert rms(llama_logits(tmp_path / "model.gguf", token_ids), expected) < RMS_LIMIT
    gguf_to_folder(tmp_path / "model.gguf", tmp_path / "back", dtype="F32")
    # The scaling of rope is computed anew, everything else is the same bits.
    np.testing.assert_allclose(torch_logits(tmp_path / "back", token_ids), expected, rtol=0, atol=1e-4)
    ours, theirs = (transformers.AutoConfig.from_pretrained(tmp_path / path) for path in ("back", "hf"))
    for key in [*SHAPE, "rms_norm_eps", "head_dim", "rope_parameters"]:
        if key != "rope_theta":
            assert getattr(ours, key) == getattr(theirs, key), key
    folder_to_gguf(tmp_path / "back", tmp_path / "again.gguf", dtype="F32")
    assert tensors(tmp_path / "again.gguf") == tensors(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["llama3 rope", "linear rope"])
def test_the_scaling_of_rope_shows_in_the_logits(name: str, folder: Path, tmp_path: Path) -> None:
    """Without this, the test above would not notice a scaling that is lost."""
    random_model(tmp_path / "scaled", folder, **RANDOM_MODELS[name])
    random_model(tmp_path / "unscaled", folder, **{**RANDOM_MODELS[name], "rope_scaling": None})
    scaled, unscaled = (torch_logits(tmp_path / path, _token_ids()) for path in ("scaled", "unscaled"))
    assert rms(scaled, unscaled) > 10 * RMS_LIMIT


def test_a_mistral_folder_is_a_llama(folder: Path, tmp_path: Path) -> None:
    random_model(tmp_path / "hf", folder)
    folder_to_gguf(tmp_path / "hf", tmp_path / "llama.gguf")
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    edit_json(tmp_path / "hf" / "config.json", **changes)
    folder_to_gguf(tmp_path / "hf", tmp_path / "mistral.gguf")
    assert tensors(tmp_path / "mistral.gguf") == tensors(tmp_path / "llama.gguf")
    edit_json(tmp_path / "hf" / "config.json", sliding_window=128)
    with pytest.raises(InputError, match="sliding window of 128"):
        folder_to_gguf(tmp_path / "hf", tmp_path / "mistral.gguf")


def test_large_tensors_are_converted_in_pieces(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(tmp_path / "hf", folder, head_dim=32)
    folder_to_gguf(tmp_path / "hf", tmp_path / "whole.gguf")
    gguf_to_folder(tmp_path / "whole.gguf", tmp_path / "whole")
    monkeypatch.setattr(convert, "_CHUNK_BYTES", 4 * 64 * 40)  # 40 rows, so one head at a time
    reports: list[tuple[int, int]] = []
    folder_to_gguf(tmp_path / "hf", tmp_path / "pieces.gguf", report=lambda *counts: reports.append(counts))
    assert tensors(tmp_path / "pieces.gguf") == tensors(tmp_path / "whole.gguf")
    assert len(reports) > 2 * SHAPE["vocab_size"] // 40
    done, total = zip(*reports, strict=True)
    assert list(done) == sorted(done)
    assert set(total) == {done[-1]}
    assert done[-1] >= 2 * sum(parameter.numel() for parameter in model.parameters())
    gguf_to_folder(tmp_path / "whole.gguf", tmp_path / "shards", shard_bytes=100_000)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(names) > 3
    assert sorted(set(index["weight_map"].values())) == names
    np.testing.assert_array_equal(
        torch_logits(tmp_path / "shards", _token_ids()), torch_logits(tmp_path / "whole", _token_ids())
    )


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_numbers_are_rounded_as_torch_rounds_them(name: str) -> None:
    bits = np.random.default_rng(5).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    bits[:6] = [0x3F808000, 0x3F818000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x80000000]  # ties, infinities, NaN, -0
    values = bits.view(np.float32)
    if name == "F16":
        values = values[~(np.abs(values) > 65504) | np.isinf(values)]
    kind = WEIGHT_TYPES[name]
    ours = decode(encode(values, kind, "x"), name)
    expected = torch.from_numpy(values.copy()).to(getattr(torch, kind.config_name)).float().numpy()
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(np.signbit(ours[~np.isnan(ours)]), np.signbit(expected[~np.isnan(expected)]))


def test_the_order_of_rotated_rows() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of four
    assert to_gguf_rows(rows, 4)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    np.testing.assert_array_equal(to_hf_rows(to_gguf_rows(rows, 4), 4), rows)


# --- rope -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize(
    "scaling",
    [
        Llama3Scaling(8.0, 1.0, 4.0, 8192),
        Llama3Scaling(32.0, 1.0, 4.0, 8192),
        Llama3Scaling(4.0, 1.0, 2.5, 300),
        Llama3Scaling(16.0, 2.0, 7.0, 4096),
    ],
)
def test_llama3_scaling_is_recovered(scaling: Llama3Scaling, theta: float, head_dim: int) -> None:
    divisors = scaling.divisors(head_dim, theta)
    found = recover_llama3(divisors, head_dim, theta, "model.gguf")
    assert found is not None
    np.testing.assert_allclose(found.divisors(head_dim, theta), divisors, rtol=1e-5)
    if (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0):
        assert found == scaling


def test_divisors_that_no_recipe_gives_are_refused() -> None:
    assert recover_llama3(np.ones(32, np.float32), 64, 10000.0, "model.gguf") is None
    for divisors in (np.linspace(1, 3, 32), np.full(32, 0.5), np.full(16, 8.0), np.full(32, np.nan)):
        with pytest.raises(InputError, match=r"rope_freqs\.weight"):
            recover_llama3(divisors.astype(np.float32), 64, 10000.0, "model.gguf")


# --- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pre",
    some_long(
        ["gpt-2", "llama-bpe", "smaug-bpe", "qwen2", "smollm", "starcoder", "llama3"],
        quick=["llama-bpe", "qwen2", "smollm"],
    ),
)
def test_texts_are_split_as_llama_cpp_splits_them(pre: str, tmp_path: Path) -> None:
    tokens = metadata(embedded_draft())["tokenizer.ggml.tokens"]
    tokens[-1] = "zqzqzq"  # no merge leads to it: only a splitter that takes whole pieces finds it
    merges = [m for m in metadata(embedded_draft())["tokenizer.ggml.merges"] if m.replace(" ", "") in tokens]
    edits = {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": None,
    }
    source = edited_gguf(tmp_path / "model.gguf", edits)
    gguf_to_folder(source, tmp_path / "folder")
    texts = [*TEXTS, "zqzqzq 12345 1a2b3 'Tis I'LL\r\n\r\n  x\n\n"]
    assert_same_tokens(tmp_path / "folder", source, texts)
    folder_to_gguf(tmp_path / "folder", tmp_path / "again.gguf")
    assert_same_tokens(tmp_path / "folder", tmp_path / "again.gguf", texts)
    whole = hf_tokenizer(tmp_path / "folder").encode("zqzqzq", add_special_tokens=False) == [len(tokens) - 1]
    assert whole == (pre in ("llama-bpe", "llama3"))


def test_an_unknown_splitter_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    source = edited_gguf(tmp_path / "model.gguf", {"tokenizer.ggml.pre": "tekken"})
    with pytest.raises(InputError, match=r"'tekken'.*gpt-2.*llama-bpe.*qwen2.*smollm"):
        gguf_to_folder(source, tmp_path / "folder")


def test_special_user_defined_and_padding_tokens(tmp_path: Path) -> None:
    content = metadata(embedded_draft())
    tokens, types = content["tokenizer.ggml.tokens"], content["tokenizer.ggml.token_type"]
    size = len(tokens)
    tokens[-5:] = ["<tool>", "<|im_end|>", "<|pad|>", f"[PAD{size - 2}]", f"[PAD{size - 1}]"]
    types[-5:] = [4, 3, 3, 5, 5]
    template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    source = edited_gguf(
        tmp_path / "model.gguf",
        {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": [m for m in content["tokenizer.ggml.merges"] if m.replace(" ", "") in tokens],
            "tokenizer.ggml.eot_token_id": size - 4,
            "tokenizer.ggml.padding_token_id": size - 3,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": template,
            "general.name": "A name",
        },
    )
    gguf_to_folder(source, tmp_path / "folder")
    tokenizer = hf_tokenizer(tmp_path / "folder")
    assert len(tokenizer) == size - 2
    assert tokenizer.pad_token == "<|pad|>"
    assert tokenizer.eos_token_id == content["tokenizer.ggml.eos_token_id"]
    assert tokenizer.chat_template == template
    assert tokenizer.encode("x")[0] == content["tokenizer.ggml.bos_token_id"]
    assert tokenizer.encode("a<tool>b<|im_end|>", add_special_tokens=False)[1::2] == [size - 5, size - 4]
    assert tokenizer.decode(tokenizer.encode("a<tool>b<|im_end|>"), skip_special_tokens=True) == "a<tool>b"
    assert_same_tokens(tmp_path / "folder", source, ["a<tool>b", "<tool><tool>", "x [PAD4095]", "<|im_end"])
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "folder")
    assert generation.eos_token_id == [content["tokenizer.ggml.eos_token_id"], size - 4]
    folder_to_gguf(tmp_path / "folder", tmp_path / "again.gguf")
    before, after = metadata(source), metadata(tmp_path / "again.gguf")
    for key in before:
        if key.startswith("tokenizer.") and key != "tokenizer.ggml.add_space_prefix":
            assert after[key] == before[key], key
    assert after["general.name"] == "A name"
    folder_to_gguf(tmp_path / "folder", tmp_path / "again.gguf", name="B", description="C", license="mit")
    general = [metadata(tmp_path / "again.gguf")[f"general.{key}"] for key in ("name", "description", "license")]
    assert general == ["B", "C", "mit"]


def test_several_chat_templates_are_kept(own_folder: Path, tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
    edit_json(own_folder / "tokenizer_config.json", chat_template=templates)
    folder_to_gguf(own_folder, tmp_path / "model.gguf")
    content = metadata(tmp_path / "model.gguf")
    assert content["tokenizer.chat_template"] == "{{ 1 }}"
    assert content["tokenizer.chat_template.tool_use"] == "{{ 2 }}"
    gguf_to_folder(tmp_path / "model.gguf", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())["chat_template"] == templates
    edit_json(own_folder / "tokenizer_config.json", chat_template=...)
    (own_folder / "chat_template.jinja").write_text("{{ 3 }}")
    folder_to_gguf(own_folder, tmp_path / "model.gguf")
    assert metadata(tmp_path / "model.gguf")["tokenizer.chat_template"] == "{{ 3 }}"


def ends_of_folder(folder: Path) -> set[int]:
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return set(ends) if isinstance(ends, list) else {ends}


KNOWN_BY_TEXT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "as in SmolLM2": (("<|im_end|>", "<reponame>"), ()),
    "more than GGUF names": (("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<end_of_turn>", "<EOT>"), ("<tool>",)),
    "as in gpt-oss": (("<|return|>", "<|call|>"), ("<|end|>",)),
    "end but no return": (("<|end|>", "<|call|>"), ("<|start|>",)),
    "as in Gemma 4": (("<|tool_response>", "<turn|>"), ("</s>",)),
    "an ordinary end": (("</s>",), ("<s>",)),
}


@pytest.mark.parametrize("name", some_long(KNOWN_BY_TEXT, quick=["as in SmolLM2", "end but no return"]))
def test_end_tokens_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    ending, others = KNOWN_BY_TEXT[name]
    source = with_last_tokens(tmp_path / "model.gguf", [*others, *ending])
    size = len(metadata(source)["tokenizer.ggml.tokens"])
    expected = {0, *range(size - len(ending), size)}
    assert read_end_ids(source) == expected
    gguf_to_folder(source, tmp_path / "folder")
    assert ends_of_folder(tmp_path / "folder") == expected
    assert hf_tokenizer(tmp_path / "folder").eos_token_id == 0
    folder_to_gguf(tmp_path / "folder", tmp_path / "again.gguf")
    assert read_end_ids(tmp_path / "again.gguf") == expected


def test_ends_of_which_one_is_named_and_one_is_known_by_its_text(tmp_path: Path) -> None:
    source = with_last_tokens(tmp_path / "model.gguf", ["<mine>", "<|im_end|>"], eot_token_id=4094)
    assert read_end_ids(source) == {0, 4094, 4095}
    gguf_to_folder(source, tmp_path / "folder")
    assert ends_of_folder(tmp_path / "folder") == {0, 4094, 4095}
    folder_to_gguf(tmp_path / "folder", tmp_path / "again.gguf")
    assert read_end_ids(tmp_path / "again.gguf") == {0, 4094, 4095}


def folder_with_ends(tmp_path: Path, last_tokens: list[str], ends: int | list[int] | None) -> Path:
    """A folder whose last tokens are control tokens, and which says so where answers end."""
    folder = tmp_path / "folder"
    gguf_to_folder(with_last_tokens(tmp_path / "model.gguf", last_tokens), folder)
    for config in ("config.json", "generation_config.json"):
        edit_json(folder / config, eos_token_id=ends)
    return folder


def test_ends_that_llama_cpp_adds_to_those_of_a_folder_are_told(tmp_path: Path) -> None:
    folder = folder_with_ends(tmp_path, ["<|im_end|>", "</s>"], 0)
    words = r"knows '<\|im_end\|>' \(4094\), '</s>' \(4095\) by its text.*add 4094, 4095 to eos_token_id"
    with pytest.warns(ModelWarning, match=words):
        folder_to_gguf(folder, tmp_path / "again.gguf")
    assert read_end_ids(tmp_path / "again.gguf") == {0, 4094, 4095}
    with pytest.raises(ModelWarning):
        folder_to_gguf(folder, tmp_path / "refused.gguf")
    assert not (tmp_path / "refused.gguf").exists()


def test_a_token_that_closes_turns_is_an_end_where_none_that_is_named_closes_any(tmp_path: Path) -> None:
    folder = folder_with_ends(tmp_path, ["<|im_end|>"], 0)
    edit_json(folder / "tokenizer_config.json", chat_template="{{ 1 }}<|im_end|>")
    folder_to_gguf(folder, tmp_path / "again.gguf")
    assert metadata(tmp_path / "again.gguf")["tokenizer.ggml.eot_token_id"] == 4095


@pytest.mark.parametrize(
    ("generation", "model", "keys"),
    [(7, 9, [0, 7, None]), ([0, 7, 9], 0, [0, 7, 9]), ([0, 7, 9, 11], 0, "4 tokens that end an answer")],
)
def test_all_end_tokens_find_a_place_or_are_refused(
    generation: Any, model: Any, keys: list[int | None] | str, own_folder: Path, tmp_path: Path
) -> None:
    """The generation configuration goes before the model's."""
    edit_json(own_folder / "generation_config.json", eos_token_id=generation)
    edit_json(own_folder / "config.json", eos_token_id=model)
    if isinstance(keys, str):
        with pytest.raises(InputError, match=keys):
            folder_to_gguf(own_folder, tmp_path / "model.gguf")
        return
    folder_to_gguf(own_folder, tmp_path / "model.gguf")
    content = metadata(tmp_path / "model.gguf")
    assert [content.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")] == keys


def test_ends_that_there_are_none_of_or_that_llama_cpp_would_not_take_are_refused(
    own_folder: Path, tmp_path: Path
) -> None:
    folder = folder_with_ends(tmp_path, ["<|end|>", "<|return|>", "<|call|>"], [0, 4093, 4094, 4095])
    with pytest.raises(InputError, match=r"would not end at '<\|end\|>' \(4093\).*take it out of eos_token_id"):
        folder_to_gguf(folder, tmp_path / "again.gguf")
    assert not (tmp_path / "again.gguf").exists()
    for name, key in (
        ("generation_config", "eos_token_id"),
        ("config", "eos_token_id"),
        ("tokenizer_config", "eos_token"),
    ):
        edit_json(own_folder / f"{name}.json", **{key: None})
    with pytest.raises(InputError, match="no end-of-text token"):
        folder_to_gguf(own_folder, tmp_path / "again.gguf")


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("normalizer", {"type": "Lowercase"}, "normalizes texts"),
        ("pre_tokenizer", {"type": "Whitespace"}, "splits texts in a way not known"),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True}, "splits texts in a way not known"),
        ("pre_tokenizer", None, "splits texts in a way not known"),
        ("decoder", {"type": "WordPiece"}, "neither byte-level"),
        ("model", {"type": "Unigram", "vocab": []}, "Unigram model"),
    ],
)
def test_tokenizers_that_llama_cpp_cannot_follow_are_refused(
    part: str, value: Any, words: str, own_folder: Path, tmp_path: Path
) -> None:
    edit_json(own_folder / "tokenizer.json", **{part: value})
    with pytest.raises(InputError, match=words):
        folder_to_gguf(own_folder, tmp_path / "model.gguf")


# --- SentencePiece ----------------------------------------------------------------------------------------------------


@cache
def sentencepiece_tokens() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types such as SentencePiece makes, learned from a little code."""
    text = [piece.replace(" ", "▁").replace("\n", "▁") for piece in heldout("code")[:40]]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("▁*[^▁]+"), "isolated")
    backend.train_from_iterator(text, tokenizers.trainers.BpeTrainer(vocab_size=900, show_progress=False))
    learned = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned, "<tool>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(learned), 4]
    scores = [0.0] * 259 + [-float(index) for index in range(len(learned))] + [0.0]
    return tokens, scores, kinds


@pytest.fixture(scope="module", params=[True, False], ids=["space before", "no space before"])
def sentencepiece(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with a SentencePiece vocabulary and random weights."""
    base = tmp_path_factory.mktemp("spm")
    gguf_to_folder(embedded_draft(), base / "bpe")
    tokens, scores, kinds = sentencepiece_tokens()
    random_model(base / "hf", base / "bpe", bos_token_id=1, eos_token_id=2)
    folder_to_gguf(base / "hf", base / "bpe.gguf")
    fill = SHAPE["vocab_size"] - len(tokens)
    edits = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{len(tokens) + index}]" for index in range(fill)],
        "tokenizer.ggml.scores": scores + [-10000.0] * fill,
        "tokenizer.ggml.token_type": kinds + [5] * fill,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.eot_token_id": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": request.param,
    }
    return edited_gguf(base / "spm.gguf", edits, base / "bpe.gguf")


def test_sentencepiece_reads_as_llama_cpp_does(sentencepiece: Path, tmp_path: Path) -> None:
    texts = [text for text in TEXTS if text not in ("", " ")]
    gguf_to_folder(sentencepiece, tmp_path / "folder")
    tokenizer = hf_tokenizer(tmp_path / "folder")
    assert len(tokenizer.encode(texts[-1])) < len(texts[-1]) / 2, "the vocabulary is put to use"
    assert_same_tokens(tmp_path / "folder", sentencepiece, texts)
    folder_to_gguf(tmp_path / "folder", tmp_path / "again.gguf")
    assert_same_tokens(tmp_path / "folder", tmp_path / "again.gguf", texts)
    # After such a token both put another space, which decoding does not take off.
    assert_same_tokens(tmp_path / "folder", sentencepiece, ["a<tool>b <tool> c", "<tool>", " <tool>"], decodes=False)
    before, after = metadata(sentencepiece), metadata(tmp_path / "again.gguf")
    for key in before:
        if key.startswith("tokenizer.") and key != "tokenizer.ggml.scores":
            assert after[key] == before[key], key


def test_the_newer_form_of_a_llama_tokenizer_is_read_too(sentencepiece: Path, tmp_path: Path) -> None:
    gguf_to_folder(sentencepiece, tmp_path / "folder")
    prefix = metadata(sentencepiece)["tokenizer.ggml.add_space_prefix"]
    edit_json(
        tmp_path / "folder" / "tokenizer.json",
        normalizer=None,
        pre_tokenizer={
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first" if prefix else "never",
            "split": False,
        },
    )
    folder_to_gguf(tmp_path / "folder", tmp_path / "again.gguf")
    # It puts no second space before a text that starts with one: llama.cpp, like the older form, does.
    texts = [text for text in TEXTS if text.strip() and not text.startswith(" ")]
    assert_same_tokens(tmp_path / "folder", tmp_path / "again.gguf", texts)


def varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + varint(value >> 7)


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def sentencepiece_model(path: Path, model_type: int = 2, normalizer: bytes = b"\x20\x00") -> None:
    """Write a ``tokenizer.model``: pieces, the trainer's settings, the normalizer's (field 4 is 0)."""
    data = b""
    for token, score, kind in zip(*sentencepiece_tokens(), strict=True):
        piece = message(1, token.encode()) + b"\x15" + np.float32(score).tobytes() + b"\x18" + bytes([kind])
        data += message(1, piece)
    data += message(2, b"\x18" + bytes([model_type]) + varint(43 << 3) + varint((1 << 64) - 1))
    path.write_bytes(data + message(3, message(1, b"identity") + normalizer))


def test_a_sentencepiece_model_is_read(sentencepiece: Path, tmp_path: Path) -> None:
    gguf_to_folder(sentencepiece, tmp_path / "folder")
    expected = metadata(sentencepiece)
    (tmp_path / "folder" / "tokenizer.json").unlink()
    prefix = expected["tokenizer.ggml.add_space_prefix"]
    sentencepiece_model(tmp_path / "folder" / "tokenizer.model", normalizer=bytes([0x18, prefix, 0x20, 0]))
    folder_to_gguf(tmp_path / "folder", tmp_path / "again.gguf")
    content = metadata(tmp_path / "again.gguf")
    for key in expected:
        if key.startswith("tokenizer."):
            assert content[key] == expected[key], key


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model_type": 1}, "type 1; BPE"),
        ({"normalizer": b"\x20\x01"}, "normalizes texts"),
        ({"normalizer": b"\x20\x00" + message(2, b"rules")}, "normalizes texts"),
        ({"normalizer": b"\x20\x00\x0a\x7f"}, "not a valid SentencePiece model"),
    ],
)
def test_sentencepiece_models_that_cannot_be_converted(
    arguments: dict[str, Any], words: str, own_folder: Path, tmp_path: Path
) -> None:
    (own_folder / "tokenizer.json").unlink()
    sentencepiece_model(own_folder / "tokenizer.model", **arguments)
    with pytest.raises(InputError, match=words):
        folder_to_gguf(own_folder, tmp_path / "model.gguf")


def test_scores_and_merges_by_hand() -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "ba": 3, "aba": 4}
    scores = [0.0, 0.0, -2.0, -1.0, -3.0]
    merges = scores_to_merges(vocabulary, scores)
    assert merges == [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")]
    back = merges_to_scores(merges, vocabulary, "tokenizer.json")
    assert sorted([2, 3, 4], key=lambda token_id: -back[token_id]) == [3, 2, 4]
    with pytest.raises(InputError, match="apart"):
        merges_to_scores([("ab", "a"), ("b", "a"), ("a", "b"), ("a", "ba")], vocabulary, "tokenizer.json")
    with pytest.raises(InputError, match="does not merge 'a' and 'ba'"):
        merges_to_scores(merges[:3], vocabulary, "tokenizer.json")
    with pytest.raises(InputError, match="does not have"):
        merges_to_scores([*merges, ("b", "b")], vocabulary, "tokenizer.json")


# --- what cannot be converted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM; LlamaForCausalLM and MistralForCausalLM"),
        ({"architectures": None, "model_type": "mixtral"}, "mixtral"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act to 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'; default, linear and llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "not complete"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"hidden_size": "wide"}, "hidden_size in config.json is 'wide'"),
        ({"num_hidden_layers": ...}, "num_hidden_layers in config.json is None"),
        ({"num_key_value_heads": 3}, "impossible sizes|shape"),
        ({"vocab_size": 100}, "the model has 100 rows"),
        ({"intermediate_size": 17}, "sizes ask for"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"num_hidden_layers": 9}, "lacks model.layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers in config.json is 1000000000, .* 1 to 512"),
        ({"vocab_size": 10**9}, "vocab_size in config.json is 1000000000"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings in config.json is 10{30}"),
        ({"hidden_size": "x" * 5000}, "hidden_size in config.json is of type str"),
        ({"architectures": 1}, "config.json has an invalid entry"),
        ({"layer_types": [[]]}, "config.json has an invalid entry"),
        ({"gguf_metadata": "x"}, "config.json has an invalid entry"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps in config.json is nan"),
        ({"rope_theta": 1e39}, "not above 0 and at most 1e"),
        ({"rope_theta": float("inf")}, "not above 0 and at most 1e"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "not above 0 and at most 1e"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": float("inf")}}, "not complete"),
    ],
)
def test_folders_that_cannot_be_converted(
    changes: dict[str, Any], words: str, own_folder: Path, tmp_path: Path
) -> None:
    edit_json(own_folder / "config.json", **changes)
    with pytest.raises(InputError, match=words) as caught:
        folder_to_gguf(own_folder, tmp_path / "model.gguf")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_tokenizer_with_odd_entries_is_one_line(own_folder: Path, tmp_path: Path) -> None:
    path = own_folder / "tokenizer.json"
    sound = json.loads(path.read_text())
    edit_json(own_folder / "tokenizer_config.json", add_bos_token=..., add_eos_token=...)
    for odd in ({"single": [], "type": "TemplateProcessing"}, {"processors": 1}, [1]):
        path.write_text(json.dumps({**sound, "post_processor": odd}))
        with pytest.raises(ModelFileError, match=r"tokenizer\.json has an invalid entry"):
            folder_to_gguf(own_folder, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"general.architecture": "qwen2"}, "'qwen2'; 'llama'"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.attention.value_length": 2}, "value_length"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'; gpt2 and llama"),
        ({"split.count": 3}, "the first of 3 parts"),
        ({"general.type": "adapter"}, "not a model but a LoRA adapter"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
        ({"llama.block_count": 1}, "blk.1"),
        ({"llama.feed_forward_length": 5}, "sizes ask for"),
        ({"llama.attention.head_count_kv": [1, 2]}, "differs between layers"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "4096|2 tokens"),
        ({"tokenizer.ggml.eos_token_id": 999999}, "999999"),
        ({"tokenizer.ggml.merges": ["a nonsense"]}, "lacks one of the tokens"),
    ],
)
def test_gguf_files_that_cannot_be_converted(edits: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = edited_gguf(tmp_path / "model.gguf", edits)
    with pytest.raises(InputError, match=words) as caught:
        gguf_to_folder(source, tmp_path / "folder")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_shape_that_transformers_would_refuse_is_not_converted(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model.gguf", replace(SMALL, heads=6, kv_heads=2))
    with pytest.raises(InputError, match="6 heads do not divide the width 256"):
        gguf_to_folder(source, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_values_that_f16_cannot_hold_are_refused(folder: Path, tmp_path: Path) -> None:
    model = random_model(tmp_path / "hf", folder)
    model.lm_head.weight.data[3, 5] = 70000.0
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(InputError, match=r"lm_head.weight has a value of 70000.*BF16 or F32"):
        folder_to_gguf(tmp_path / "hf", tmp_path / "model.gguf", dtype="F16")
    assert not (tmp_path / "model.gguf").exists()
    folder_to_gguf(tmp_path / "hf", tmp_path / "model.gguf", dtype="BF16")
    with pytest.raises(InputError, match="cannot be stored as 'Q8_0'; choose from F32, F16, BF16"):
        folder_to_gguf(tmp_path / "hf", tmp_path / "model.gguf", dtype="Q8_0")


# --- damaged files ----------------------------------------------------------------------------------------------------


def _truncate(name: str, keep: float) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return damage


def _write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return damage


def _index(data: bytes) -> Callable[[Path], object]:
    """Let an index say where the weights are, which are in ``model-1.safetensors``."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_bytes(data)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights cut off": (_truncate("model.safetensors", 0.9), "does not hold all of"),
    "header cut off": (
        _truncate("model.safetensors", 0.0005),
        "damaged: its header has .* bytes, the file",
    ),
    "header is not JSON": (_write("model.safetensors", b"\x04" + bytes(7) + b"{{{{"), "no valid safetensors header"),
    "a tensor is missing": (_header(lambda h: h.pop("model.norm.weight")), "lacks model.norm.weight"),
    "a tensor is misshapen": (
        _header(lambda h: h["model.norm.weight"].update(shape=[2, h["model.norm.weight"]["shape"][0] // 2])),
        "in shape",
    ),
    "a tensor is of integers": (_header(lambda h: h["model.norm.weight"].update(dtype="I32")), "of type I32"),
    "an offset is negative": (_header(lambda h: h["model.norm.weight"].update(data_offsets=[-4, 0])), "not hold all"),
    "an offset is text": (_header(lambda h: h["model.norm.weight"].update(data_offsets="ab")), "no valid safetensors"),
    "pickled weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "has pickled weights; load it in transformers and save_pretrained it",
    ),
    "an index that leads elsewhere": (
        _index(b'{"weight_map": {"a": "../model-1.safetensors"}}'),
        "no weight_map of file names",
    ),
    "an index of other names": (
        _index(b'{"weight_map": {"a": "model-1.safetensors"}}'),
        "lacks a, which",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "neither tokenizer.json nor tokenizer.model"),
    "tokenizer cut off": (_truncate("tokenizer.json", 0.5), "tokenizer.json is not valid JSON"),
    "tokenizer of nothing": (_write("tokenizer.json", b"{}"), "an invalid entry"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_clear_line(name: str, own_folder: Path, tmp_path: Path) -> None:
    damage, words = DAMAGES[name]
    damage(own_folder)
    with pytest.raises(ModelFileError, match=words) as caught:
        folder_to_gguf(own_folder, tmp_path / "model.gguf")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_a_split_file_is_to_be_joined_first(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    first, second, _ = split_gguf(embedded_draft(), tmp_path / "parts")
    with pytest.raises(ModelFileError, match=f"join them with: llama-gguf-split --merge {first.name} WHOLE.gguf"):
        gguf_to_folder(first, tmp_path / "folder")
    with pytest.raises(ModelFileError, match="is part 2 of a split model; give the first part"):
        gguf_to_folder(second, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="there is no file"):
        gguf_to_folder(tmp_path / "none.gguf", tmp_path / "folder")
    with pytest.raises(ModelFileError, match="there is no folder"):
        folder_to_gguf(tmp_path / "none", tmp_path / "model.gguf")
    with pytest.raises(InputError, match="there is no directory"):
        gguf_to_folder(embedded_draft(), tmp_path / "none" / "folder")


# --- destinations -----------------------------------------------------------------------------------------------------


def test_a_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    gguf_to_folder(embedded_draft(), tmp_path / "folder", dtype="BF16")
    (tmp_path / "folder" / "left over").write_text("x")
    with pytest.raises(InputError, match=r"not empty.*`force=True`"):
        gguf_to_folder(embedded_draft(), tmp_path / "folder")
    assert exact_dtype(tmp_path / "folder") == "BF16"
    gguf_to_folder(embedded_draft(), tmp_path / "folder", force=True)
    assert exact_dtype(tmp_path / "folder") == "F16"
    assert not (tmp_path / "folder" / "left over").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_is_not_a_model_folder_is_never_replaced(tmp_path: Path) -> None:
    source = Path(shutil.copy(embedded_draft(), tmp_path / "model.gguf"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="holds the source"):
        gguf_to_folder(source, tmp_path, force=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one").write_text("x")
    with pytest.raises(InputError, match="not a model folder"):
        gguf_to_folder(source, tmp_path / "photos", force=True)
    with pytest.raises(InputError, match="is a file"):
        gguf_to_folder(source, tmp_path / "config.json", force=True)
    assert (tmp_path / "photos" / "one").read_text() == "x"


def test_too_little_room_is_said_beforehand(own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 12345))
    with pytest.raises(InputError, match=r"needs 4\.4\d MB, and 12\.3 kB are free"):
        gguf_to_folder(embedded_draft(), tmp_path / "folder")
    with pytest.raises(InputError, match=r"needs 4\.4\d MB, and 12\.3 kB are free"):
        folder_to_gguf(own_folder, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_an_interrupt_leaves_everything_as_it_was(own_folder: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    (tmp_path / "model.gguf").write_bytes(b"former")
    with pytest.raises(KeyboardInterrupt):
        folder_to_gguf(own_folder, tmp_path / "model.gguf", report=interrupt)
    before = {path.name: path.read_bytes() for path in own_folder.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        gguf_to_folder(embedded_draft(), own_folder, report=interrupt, force=True)
    assert (tmp_path / "model.gguf").read_bytes() == b"former"
    assert {path.name: path.read_bytes() for path in own_folder.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "own"]
