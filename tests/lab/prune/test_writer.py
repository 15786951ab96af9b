"""Cut files: the weights that are left are the source's own, and the metadata says what is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import ModelFileError
from paceline.lab.prune.writer import Cut, cut_tensors, pass_bytes, provenance, split_merge, write_cut
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.gguf_file import GGUFFile
from tests.lab.llama_files import SMALL, logits, write_llama
from tests.models.helpers import edited_gguf


def ids(*given: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(given, np.int64)


@pytest.fixture(scope="module")
def draft() -> GGUFFile:
    return GGUFFile(embedded_draft())


def test_nothing_cut_is_the_same_model(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source.gguf")
    write_cut(GGUFFile(source), tmp_path / "copy.gguf", Cut())
    np.testing.assert_array_equal(logits(tmp_path / "copy.gguf"), logits(source))


def test_rows_of_tokens_are_taken_as_they_are(draft: GGUFFile, tmp_path: Path) -> None:
    kept = ids(*range(1, 300), 777, 0)
    write_cut(draft, tmp_path / "cut.gguf", Cut(token_ids=kept))
    made = GGUFFile(tmp_path / "cut.gguf")
    for name, tensor in draft.tensors.items():
        rows = tensor.stored_rows()
        np.testing.assert_array_equal(
            made.tensors[name].stored_rows(), rows[kept] if name == "token_embd.weight" else rows
        )
    tokens = draft.get("tokenizer.ggml.tokens")
    assert made.get("tokenizer.ggml.tokens") == [tokens[token_id] for token_id in kept]
    assert len(made.get("tokenizer.ggml.token_type")) == len(kept)
    assert made.integer("llama.vocab_size") == len(kept)
    there = set(made.get("tokenizer.ggml.tokens"))
    merges = made.get("tokenizer.ggml.merges")
    assert merges
    assert all({left, right, left + right} <= there for left, right in map(split_merge, merges))


def test_ids_that_the_metadata_names_go_along(tmp_path: Path) -> None:
    named = {"tokenizer.ggml.eos_token_id": 9, "tokenizer.ggml.padding_token_id": 2**32 - 1}
    file = GGUFFile(edited_gguf(tmp_path / "named.gguf", named))
    write_cut(file, tmp_path / "cut.gguf", Cut(token_ids=ids(*range(2, 300))))
    made = GGUFFile(tmp_path / "cut.gguf")
    assert made.integer("tokenizer.ggml.eos_token_id") == 7
    assert made.integer("tokenizer.ggml.padding_token_id") == 2**32 - 1


def test_a_key_that_may_name_tokens_is_refused(tmp_path: Path) -> None:
    file = GGUFFile(edited_gguf(tmp_path / "odd.gguf", {"llama.favourite_id": 3}))
    with pytest.raises(ModelFileError, match="favourite_id"):
        write_cut(file, tmp_path / "cut.gguf", Cut(token_ids=ids(*range(300))))


def test_layers_close_ranks(draft: GGUFFile, tmp_path: Path) -> None:
    write_cut(draft, tmp_path / "cut.gguf", Cut(layers=(1,)))
    made = GGUFFile(tmp_path / "cut.gguf")
    assert made.integer("llama.block_count") == 2
    for new, old in enumerate((0, 2)):
        np.testing.assert_array_equal(
            made.tensors[f"blk.{new}.attn_q.weight"].stored_rows(),
            draft.tensors[f"blk.{old}.attn_q.weight"].stored_rows(),
        )
    assert not [name for name in made.tensors if name.startswith("blk.2.")]


def test_units_that_do_nothing_can_go(tmp_path: Path) -> None:
    """Cutting blocks whose columns are zero changes no logit but by the order of sums."""
    source = write_llama(tmp_path / "source.gguf")
    mapped = np.memmap(source, np.uint8, "r+")
    file = GGUFFile(source)
    for layer in range(SMALL.layers):
        start = next(t.data_offset for t in file._reader.tensors if t.name == f"blk.{layer}.ffn_down.weight")
        shape = (SMALL.width, SMALL.feed_forward)
        weights = mapped[start : start + 4 * SMALL.width * SMALL.feed_forward].view(np.float32).reshape(shape)
        weights[:, 32 * layer : 32 * layer + 32] = 0.0
    mapped.flush()
    number = SMALL.feed_forward // 32
    blocks = tuple(np.array([n for n in range(number) if n != layer]) for layer in range(SMALL.layers))
    write_cut(GGUFFile(source), tmp_path / "cut.gguf", Cut(blocks=blocks, block_units=32))
    assert GGUFFile(tmp_path / "cut.gguf").integer("llama.feed_forward_length") == SMALL.feed_forward - 32
    np.testing.assert_allclose(logits(tmp_path / "cut.gguf"), logits(source), atol=1e-4)


def test_a_table_that_is_looked_up_is_no_part_of_a_pass() -> None:
    untied, tied = GGUFFile(embedded_target()), GGUFFile(embedded_draft())
    for file, has_output in ((untied, True), (tied, False)):
        tensors = cut_tensors(file, Cut())
        everything = sum(tensor.num_bytes for tensor in tensors)
        looked_up = file.tensors["token_embd.weight"].stored_rows().size
        assert pass_bytes(tensors) == everything - has_output * looked_up


def test_a_cut_file_says_what_it_was_cut_from(draft: GGUFFile, tmp_path: Path) -> None:
    cut = Cut(token_ids=ids(*range(300)), layers=(1,))
    about = provenance(draft, draft.path, "1234", cut, "Q8_0")
    write_cut(draft, tmp_path / "cut.gguf", cut, about)
    said = describe(tmp_path / "cut.gguf").provenance
    assert said["pruned.source"] == draft.path.name
    assert said["pruned.source_fingerprint"] == "1234"
    assert (said["pruned.tokens"], said["pruned.tokens_before"]) == (300, 4096)
    assert (said["pruned.removed_layers"], said["pruned.layers_before"]) == ([1], 3)
    assert said["pruned.file_type"] == "Q8_0"
    # What was cut once more says so of the last cut alone.
    write_cut(GGUFFile(tmp_path / "cut.gguf"), tmp_path / "again.gguf", Cut())
    assert not describe(tmp_path / "again.gguf").provenance
