"""Inflated models against their sources: the same logits, bit for bit wherever the arithmetic allows it."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.conversion.quantize import quantize_gguf
from paceline.core.errors import InputError, ModelFileError
from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.options import ModelOptions
from paceline.lab.inflate import (
    FILE_TYPES,
    PRESETS,
    VOCABULARIES,
    LlamaShape,
    fit_shape,
    inflate,
    inflate_head,
    is_up_to_date,
    preset_shape,
)
from paceline.lab.inflate import writer as writing_module
from paceline.lab.inflate.banned import CONSTANT, PROJECTION, banning_block, constant_block
from paceline.lab.inflate.layout import NOTHING, place_heads, place_layers
from paceline.lab.inflate.shape import MULTIPLE, check_holds, estimate_bytes
from paceline.models.embedded import embedded_draft
from paceline.planning.policies.fixed import FixedPolicy
from tests.engines.tiny_models import BYTE_VOCABULARY_SIZE, write_eagle_head, write_model
from tests.lab.llama_files import LARGE, SMALL, Logits, logits, write_llama
from tests.tiers import some_long

# --- helpers ----------------------------------------------------------------------------------------------------------


def inflated_logits(folder: Path, source: Path, shape: LlamaShape, file_type: str = "F32") -> tuple[Logits, Logits]:
    """Logits of the source quantised by llama.cpp alone, and of the inflated model."""
    quantize_gguf(source, folder / "plain.gguf", file_type)
    inflate(source, folder / "large.gguf", shape, file_type=file_type)
    return logits(folder / "plain.gguf"), logits(folder / "large.gguf")


def tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("small") / "small.gguf")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("untied") / "small.gguf", replace(SMALL, tied=False))


# --- the same function ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_logits_are_the_same_bits_in_every_type(tmp_path: Path, small: Path, file_type: str) -> None:
    plain, large = inflated_logits(tmp_path, small, LARGE, file_type)
    np.testing.assert_array_equal(large, plain)
    assert plain.std() > 0.1  # of a model that says something


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 512},  # two copies in the residual stream
        {"width": 1536},  # six
        {"width": 2048},  # two, among as many zeros
        {"layers": 9},
        {"feed_forward": 2048},
        {"heads": 24, "kv_heads": 8},  # groups of 3 for groups of 4
        {"heads": 8, "kv_heads": 8},
        {"heads": 32, "kv_heads": 2},
        {"tied": False},
    ],
    ids=str,
)
def test_logits_are_the_same_bits_whichever_dimension_grows(
    tmp_path: Path, small: Path, changes: dict[str, Any]
) -> None:
    plain, large = inflated_logits(tmp_path, small, replace(SMALL, **changes), "Q4_K_M")
    np.testing.assert_array_equal(large, plain)


def test_an_output_projection_of_its_own_is_kept(tmp_path: Path, untied: Path) -> None:
    plain, large = inflated_logits(tmp_path, untied, LARGE, "Q4_0")
    np.testing.assert_array_equal(large, plain)
    assert not LlamaShape.from_gguf(tmp_path / "large.gguf").tied


def test_norms_that_cannot_be_exact_are_close(tmp_path: Path, small: Path) -> None:
    plain, large = inflated_logits(tmp_path, small, replace(LARGE, width=1792, vocab_size=500))
    assert 0 < np.abs(large[:, : SMALL.vocab_size] - plain).max() < 5e-3


@pytest.mark.parametrize("file_type", some_long(["F32", "Q8_0", "Q4_K_M"], quick=["Q8_0", "Q4_K_M"]))
@pytest.mark.parametrize("rope_factors", [False, True])
@pytest.mark.parametrize("head_size", some_long([128, 256], quick=[128]))
def test_larger_heads_keep_their_rotary_frequencies(
    tmp_path: Path, file_type: str, rope_factors: bool, head_size: int
) -> None:
    source = write_llama(tmp_path / "source.gguf", rope_factors=rope_factors)
    plain, large = inflated_logits(
        tmp_path, source, replace(LARGE, head_size=head_size, heads=8, kv_heads=2), file_type
    )
    tolerance = {"F32": 5e-3, "Q8_0": 0.2, "Q4_K_M": 0.7}[file_type]  # queries are rounded again
    assert np.abs(large - plain).max() < tolerance
    assert ("rope_freqs.weight" in tensors(tmp_path / "large.gguf")) == rope_factors


def test_rope_factors_matter_to_that_test(tmp_path: Path) -> None:
    with_factors = write_llama(tmp_path / "with.gguf", rope_factors=True)
    assert np.abs(logits(with_factors) - logits(write_llama(tmp_path / "without.gguf"))).max() > 0.05


def test_groups_that_share_a_block_are_quantised_anew(tmp_path: Path) -> None:
    shape = replace(SMALL, heads=4, kv_heads=2)
    source = write_llama(tmp_path / "source.gguf", shape)
    large_shape = replace(LARGE, heads=16, kv_heads=4)
    exact, same = inflated_logits(tmp_path, source, large_shape, "Q4_0")
    np.testing.assert_array_equal(same, exact)  # blocks of 32 lie within a head
    plain, large = inflated_logits(tmp_path, source, large_shape, "Q4_K_M")
    assert 0 < np.abs(large - plain).max() < 1


def test_the_embedded_draft_can_be_inflated(tmp_path: Path) -> None:
    source = embedded_draft()
    shape = LlamaShape.from_gguf(source)
    large_shape = preset_shape("0.3b", shape)
    plain, large = inflated_logits(tmp_path, source, replace(large_shape, layers=shape.layers + 1), "Q8_0")
    assert np.abs(large - plain).max() < 0.05
    np.testing.assert_array_equal(large.argmax(1), plain.argmax(1))


def test_q8_0_of_a_q8_0_source_has_the_same_blocks(tmp_path: Path, small: Path) -> None:
    quantize_gguf(small, tmp_path / "q8.gguf", "Q8_0")
    inflate(tmp_path / "q8.gguf", tmp_path / "large.gguf", LARGE, file_type="Q8_0")
    source, large = tensors(tmp_path / "q8.gguf"), tensors(tmp_path / "large.gguf")
    layer = place_layers(SMALL.layers, LARGE.layers).index(1)
    kept = source["blk.1.ffn_gate.weight"].data
    found = large[f"blk.{layer}.ffn_gate.weight"].data
    np.testing.assert_array_equal(found[: len(kept), : kept.shape[1]], kept)
    assert not found[:, kept.shape[1] :].any()
    assert not found[len(kept) :].any()


# --- banned ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_type", some_long(FILE_TYPES, quick=["F16", "Q4_0", "Q4_K_M"]))
def test_padded_ids_never_win_and_change_nothing(tmp_path: Path, small: Path, file_type: str) -> None:
    # Kernels of a processor with AMX take multiples of 32 rows alone, and others round otherwise.
    plain, large = inflated_logits(tmp_path, small, replace(LARGE, width=2048, vocab_size=992), file_type)
    assert large.shape[1] == 992
    np.testing.assert_array_equal(large[:, : SMALL.vocab_size], plain)
    weights = np.exp(large.astype(np.float64) - large.max(axis=1, keepdims=True))
    assert weights[:, SMALL.vocab_size :].sum() == 0
    assert np.isfinite(large).all()


def test_a_padded_id_in_the_prompt_does_not_lift_the_ban(tmp_path: Path, small: Path) -> None:
    inflate(small, tmp_path / "large.gguf", replace(LARGE, vocab_size=1000), file_type="Q4_K_M")
    engine = LlamaCppEngine(ModelOptions(tmp_path / "large.gguf", context_length=64, threads=1))
    try:
        row = np.array(engine.forward([Step(engine.open(), [999], [COMMITTED_END], [0])]).logits(0, 0))
    finally:
        engine.close()
    assert row[SMALL.vocab_size :].max() < row[: SMALL.vocab_size].min() - 1000


def test_padded_tokens_have_names_of_their_own(tmp_path: Path, small: Path) -> None:
    inflate(small, tmp_path / "large.gguf", replace(LARGE, vocab_size=1000), file_type="Q8_0")
    fields = gguf.GGUFReader(tmp_path / "large.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == len(set(tokens)) == 1000
    assert tokens[: SMALL.vocab_size] == gguf.GGUFReader(small).fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    assert types[SMALL.vocab_size :] == [int(gguf.TokenType.UNUSED)] * (1000 - SMALL.vocab_size)


# Those that llama.cpp gives to embeddings and output under FILE_TYPES, also where rows are no whole blocks of 256.
EMBEDDING_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_0")
OUTPUT_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q6_K")


@pytest.mark.parametrize(
    ("make", "name", "wanted"),
    [(constant_block, name, CONSTANT) for name in EMBEDDING_TYPES]
    + [(banning_block, name, PROJECTION) for name in OUTPUT_TYPES],
)
def test_the_blocks_that_ban_hold_one_weight(
    make: Callable[[gguf.GGMLQuantizationType], npt.NDArray[np.uint8]], name: str, wanted: float
) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block = make(kind)
    values = gguf.quants.dequantize(block.view(f"<f{len(block)}") if name in ("F32", "F16") else block, kind)
    assert values[0] == pytest.approx(wanted, rel=0.05)
    assert not values[1:].any()


# --- shapes and sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file_type", "layers"),
    some_long(
        [*((name, 4) for name in FILE_TYPES), ("Q4_K_M", 1), ("Q4_K_M", 3), ("Q4_K_M", 8)],
        quick=[("F16", 4), ("Q4_K_M", 3), ("Q8_0", 4)],
    ),
)
def test_types_are_those_llama_cpp_would_give_to_the_larger_model(tmp_path: Path, file_type: str, layers: int) -> None:
    source = write_llama(tmp_path / "source.gguf", replace(SMALL, layers=layers, width=256, heads=4, kv_heads=1))
    shape = replace(SMALL, layers=18, width=512)
    inflate(source, tmp_path / "large.gguf", shape, file_type=file_type)
    inflate(source, tmp_path / "f16.gguf", shape, file_type="F16")
    quantize_gguf(tmp_path / "f16.gguf", tmp_path / "quantised.gguf", file_type)
    found, wanted = (
        {name: tensor.tensor_type for name, tensor in tensors(tmp_path / file).items()}
        for file in ("large.gguf", "quantised.gguf")
    )
    assert found == wanted
    num_bytes = (tmp_path / "large.gguf").stat().st_size
    assert estimate_bytes(shape, file_type) == pytest.approx(num_bytes, rel=0.03)


def test_parameters_are_counted(tmp_path: Path, small: Path, untied: Path) -> None:
    for path in (small, untied):
        assert LlamaShape.from_gguf(path).num_parameters == sum(int(t.n_elements) for t in tensors(path).values())
    originals = {name: round(shape.num_parameters / 1e9, 2) for name, shape in PRESETS.items()}
    # Llama 3.2 1B and 3B, Llama 3 8B as their cards give them; the smallest one is wider than SmolLM2-360M.
    assert originals == {"0.3b": 0.39, "1b": 1.24, "3b": 3.21, "8b": 8.03}


def test_presets_keep_the_head_size_and_the_cost() -> None:
    for name, original in PRESETS.items():
        shape = fit_shape(SMALL, name)
        assert shape.head_size == SMALL.head_size
        assert shape.attention_width == original.attention_width
        assert shape.kv_heads * shape.head_size == original.kv_heads * original.head_size
        assert shape.vocab_size == SMALL.vocab_size
    assert all(size % MULTIPLE == 0 for size in VOCABULARIES.values())
    padded = fit_shape(SMALL, "1b", VOCABULARIES["128k"])
    assert padded.vocab_size == PRESETS["1b"].vocab_size
    assert not padded.tied


@given(
    kv_heads=st.integers(1, 6),
    group=st.integers(1, 8),
    larger_kv_heads=st.integers(1, 24),
    larger_group=st.integers(1, 8),
    head_size=st.sampled_from([32, 64, 128, 256]),
)
def test_heads_go_on_reading_their_own_keys(
    kv_heads: int, group: int, larger_kv_heads: int, larger_group: int, head_size: int
) -> None:
    source = replace(SMALL, heads=kv_heads * group, kv_heads=kv_heads, head_size=head_size)
    shape = replace(SMALL, heads=larger_kv_heads * larger_group, kv_heads=larger_kv_heads, head_size=head_size)
    try:
        check_holds(shape, source)
    except InputError:
        assert larger_kv_heads < kv_heads * -(-group // larger_group)
        return
    heads, kv = place_heads(source, shape)
    assert sorted(heads[heads != NOTHING].tolist()) == list(range(source.heads))
    for slot, head in enumerate(heads.tolist()):
        if head != NOTHING:
            assert kv[slot // larger_group] == head // group


@given(source_layers=st.integers(1, 12), added=st.integers(0, 30))
def test_layers_stay_in_order(source_layers: int, added: int) -> None:
    placed = place_layers(source_layers, source_layers + added)
    assert len(placed) == source_layers + added
    assert [layer for layer in placed if layer != NOTHING] == list(range(source_layers))


# --- files ------------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_model(tmp_path: Path, small: Path) -> None:
    tracemalloc.start()
    inflate(small, tmp_path / "large.gguf", replace(LARGE, layers=2, width=2048, feed_forward=8192))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "large.gguf").stat().st_size > 200e6
    assert peak_bytes < 50e6


@pytest.mark.parametrize("stage", ["quantising to F16", "writing"])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, small: Path, stage: str) -> None:
    destination = tmp_path / "large.gguf"
    destination.write_text("what was there")

    def interrupt(what: str, _done: int, _total: int) -> None:
        if what == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inflate(small, destination, LARGE, report=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["large.gguf"]
    assert destination.read_text() == "what was there"


def test_a_full_disk_is_seen_before_and_during_the_work(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = tmp_path / "large.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: type("Usage", (), {"free": 10_000_000})())
        with pytest.raises(InputError, match=r"needs 66\.\d MB, and 10\.0 MB are free"):
            inflate(small, destination, LARGE)

    def no_space(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing_module, "write_gguf", no_space)
    with pytest.raises(InputError, match="No space left on device"):
        inflate(small, destination, LARGE)
    assert list(tmp_path.iterdir()) == []


def test_a_file_knows_what_it_was_made_from(tmp_path: Path, small: Path, untied: Path) -> None:
    destination = tmp_path / "large.gguf"
    assert not is_up_to_date(destination, small, LARGE, "Q8_0")
    inflate(small, destination, LARGE, file_type="Q8_0")
    assert is_up_to_date(destination, small, LARGE, "Q8_0")
    assert not is_up_to_date(destination, small, LARGE, "F16")
    assert not is_up_to_date(destination, small, replace(LARGE, layers=6), "Q8_0")
    assert not is_up_to_date(destination, untied, LARGE, "Q8_0")
    destination.write_bytes(destination.read_bytes()[:-4096])
    assert not is_up_to_date(destination, small, LARGE, "Q8_0")


BAD_SHAPES: dict[str, tuple[LlamaShape | str, dict[str, Any], str]] = {
    "preset": ("2b", {}, "no preset '2b': choose from 0.3b"),
    "type": (LARGE, {"file_type": "Q9"}, "file type 'Q9'"),
    "layers beyond all": (
        replace(LARGE, layers=10**11),
        {},
        "layers 100000000000 is out of range: the least is 1, the most 512",
    ),
    "no layers": (replace(LARGE, layers=0), {}, "layers 0 is out of range"),
    "fewer layers": (replace(LARGE, layers=1), {}, "layers 1 is less than the source's 2"),
    "narrower": (replace(SMALL, feed_forward=256), {}, "feed-forward 256 is less than the source's 512"),
    "multiple": (
        replace(LARGE, width=1000),
        {},
        "width 1000 is not a multiple of 256, as K-quants need: take 768 or 1024",
    ),
    "small multiple": (replace(LARGE, width=100), {}, "take 256"),
    "heads": (replace(LARGE, heads=20, kv_heads=6), {}, "20 heads cannot share 6 kv heads evenly: take 5 kv heads"),
    "odd heads": (replace(LARGE, head_size=65), {}, "head size 65 is odd"),
    "few kv heads": (replace(LARGE, heads=16, kv_heads=1), {}, "take at least 2 kv heads"),
    "head size": (replace(LARGE, head_size=96), {}, "head size 96 is not a multiple of the source's 64"),
    "vocabulary": (LARGE, {"vocab_size": 300}, "vocabulary 300 is less than the source's 384"),
    "no room to ban": (replace(LARGE, width=256), {"vocab_size": 1000}, "width 256 leaves no room to ban"),
}


@pytest.mark.parametrize("case", BAD_SHAPES)
def test_what_cannot_be_made_is_said_in_one_line(tmp_path: Path, small: Path, case: str) -> None:
    shape, options, message = BAD_SHAPES[case]
    with pytest.raises(InputError) as raised:
        inflate(small, tmp_path / "large.gguf", shape, **options)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


BAD_SOURCES: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "architecture": (lambda w: w.add_string("general.architecture", "gemma3"), "'gemma3'; 'llama'"),
    "experts": (lambda w: w.add_expert_count(8), "mixture of experts"),
    "biases": (lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(512, np.float32)), "blk.0.attn_q.bias"),
    "partly rotary": (
        lambda w: w.kv_data[0].pop("llama.rope.dimension_count") and w.add_rope_dimension_count(32),
        "32",
    ),
    "split": (lambda w: w.add_uint16("split.count", 2), "the first of 2 parts of a split model"),
    "missing tensor": (lambda w: w.tensors[0].pop("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight"),
    "missing key": (lambda w: w.kv_data[0].pop("llama.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_source_that_is_no_plain_llama_is_refused(tmp_path: Path, case: str) -> None:
    change, message = BAD_SOURCES[case]
    if case == "architecture":
        source = tmp_path / "source.gguf"
        writer = gguf.GGUFWriter(source, "gemma3")
        writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        source = write_llama(tmp_path / "source.gguf", change=change)
    with pytest.raises(ModelFileError, match=message.replace("'", ".")):
        inflate(source, tmp_path / "large.gguf", LARGE)
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]


def test_damaged_and_missing_files_are_named(tmp_path: Path, small: Path) -> None:
    whole = small.read_bytes()
    for name, data in {
        "empty": b"",
        "text": b"hello, world",
        "cut": whole[: len(whole) // 2],
        "head": whole[:900],
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelFileError, match=name):
            inflate(tmp_path / name, tmp_path / "large.gguf", LARGE)
    with pytest.raises(ModelFileError, match="nowhere"):
        inflate(tmp_path / "nowhere", tmp_path / "large.gguf", LARGE)
    with pytest.raises(InputError, match="no directory"):
        inflate(small, tmp_path / "no" / "large.gguf", LARGE)
    with pytest.raises(InputError, match="the source itself"):
        inflate(small, small, LARGE)


# --- Hugging Face folders ---------------------------------------------------------------------------------------------


def test_a_folder_computes_the_same_and_bans_the_same(tmp_path: Path, small: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    plain = logits(small)
    token_ids = np.random.default_rng(3).integers(0, 256, len(plain))
    shape = replace(LARGE, heads=32, kv_heads=8, vocab_size=1000)
    inflate(small, tmp_path / "hf", shape, file_type="F32")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    for dtype, tolerance in ((torch.float32, 0.01), (torch.float16, 0.05)):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=dtype)
        with torch.inference_mode():
            rows = model(torch.tensor([token_ids.tolist()])).logits[0].float().numpy()
        assert rows.shape == (len(plain), 1000)
        assert np.abs(rows[:, : SMALL.vocab_size] - plain).max() < tolerance
        assert rows[:, SMALL.vocab_size :].max() < -1000
        assert not np.isnan(rows).any()


def test_a_folder_is_a_source_too(tmp_path: Path, small: Path) -> None:
    inflate(small, tmp_path / "hf", SMALL, file_type="F32")
    inflate(tmp_path / "hf", tmp_path / "large.gguf", LARGE, file_type="Q8_0")
    quantize_gguf(small, tmp_path / "plain.gguf", "Q8_0")
    np.testing.assert_array_equal(logits(tmp_path / "large.gguf"), logits(tmp_path / "plain.gguf"))


def test_a_folder_that_transformers_would_refuse_is_not_made(tmp_path: Path, small: Path) -> None:
    with pytest.raises(InputError, match="Q8_0"):
        inflate(small, tmp_path / "hf", LARGE, file_type="Q8_0")
    with pytest.raises(InputError, match="24 heads do not divide the width 1024"):
        inflate(small, tmp_path / "hf", LARGE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("added", "known"),
    [(0, None), (128, None), (128, [*range(100, 150)])],
    ids=["the same tokens", "more tokens", "more tokens, few known"],
)
def test_a_head_drafts_for_the_larger_model_as_for_its_source(
    tmp_path: Path, added: int, known: list[int] | None
) -> None:
    source = write_model(tmp_path / "source.gguf", "llama", tokenizer="bytes", layers=4)
    head = write_eagle_head(tmp_path / "head.gguf", 32, draft_ids=known)
    its = LlamaShape.from_gguf(source)
    shape = replace(its, layers=9, width=512, feed_forward=512, heads=16, vocab_size=its.vocab_size + added)
    inflate(source, tmp_path / "large.gguf", shape, file_type="F32")
    inflate_head(head, tmp_path / "large-head.gguf", its, shape)
    answers = []
    for path, drafting in ((source, head), (tmp_path / "large.gguf", tmp_path / "large-head.gguf")):
        options = ModelOptions(path, context_length=256, cache_type_k="f32", cache_type_v="f32")
        with paceline.load(options, draft=drafting, policy=FixedPolicy(3)) as model:
            answers.append(model.generate("a text", max_tokens=60, allowed_token_ids=[*range(100, 110)], seed=1))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].stats.num_accepted == answers[1].stats.num_accepted > 0


def test_a_head_of_another_model_is_not_carried(tmp_path: Path) -> None:
    source = LlamaShape(4, 64, 64, heads=2, kv_heads=1, head_size=16, vocab_size=BYTE_VOCABULARY_SIZE, tied=True)
    with pytest.raises(InputError, match="reads layers 1, 2, 3 of width 32, and the source has 4 of width 64"):
        inflate_head(write_eagle_head(tmp_path / "head.gguf", 32), tmp_path / "out.gguf", source, LARGE)
    with pytest.raises(InputError, match=r"has \d+ tokens and the source 384"):
        inflate_head(
            write_eagle_head(tmp_path / "head.gguf", 64),
            tmp_path / "out.gguf",
            replace(source, vocab_size=384),
            LARGE,
        )
    borrowing = write_eagle_head(tmp_path / "head.gguf", 64, borrows=True)
    with pytest.raises(InputError, match="with embeddings and an output layer of its own"):
        inflate_head(borrowing, tmp_path / "out.gguf", source, LARGE)
