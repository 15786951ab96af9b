"""Vectors of texts and scores of documents, held against llama-cpp-python's own call."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

import paceline
from paceline.core.arrays import FloatArray
from paceline.embedder import Embedder, load_embedder, normalized
from paceline.engines.llama_cpp import embedder as llama_cpp_embedder
from paceline.engines.options import ModelOptions
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft
from tests.engines.tiny_models import MEAN, RANK, VOCABULARY_SIZE, write_model
from tests.models.helpers import edited_gguf

TEXTS = ["hello world", "a cat and a hat", "z", "hello world"]

# Its vocabulary is smaller than what llama.cpp takes for the usual one of an encoder, before it reads the file's keys.
pytestmark = pytest.mark.filterwarnings("ignore::paceline.ModelWarning")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("encoder") / "mean.gguf", "bert", tokenizer="bert", pooling=MEAN)


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("encoder") / "rank.gguf", "bert", tokenizer="bert", pooling=RANK, seed=3)


def options(path: Path, **given: Any) -> ModelOptions:
    return ModelOptions(path, threads=1, flash_attention=False, **given)


@pytest.fixture(scope="module")
def embedder(path: Path) -> Iterator[Embedder]:
    with load_embedder(options(path)) as found:
        yield found


def vectors_by_the_binding(path: Path, texts: list[str], pooling: int) -> list[FloatArray]:
    """Return what llama-cpp-python makes of texts, each by itself."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(path), embedding=True, n_ctx=256, n_threads=1, n_threads_batch=1, pooling_type=pooling, verbose=False
    )
    try:
        return [np.array(model.embed(text), np.float32) for text in texts]
    finally:
        model.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "none"])
@pytest.mark.parametrize("encodes", [True, False])
def test_vectors_are_those_of_the_binding_bit_for_bit(path: Path, pooling: Any, encodes: bool) -> None:
    """Of an encoder, and of a model that writes texts."""
    model = path if encodes else embedded_draft()
    number = {"none": 0, "mean": 1, "cls": 2, "last": 3}[pooling]
    with load_embedder(options(model, context_length=256), pooling=pooling) as found:
        vectors = [vector for text in TEXTS for vector in found.embed(text, norm=-1)]
    for vector, expected in zip(vectors, vectors_by_the_binding(model, TEXTS, number), strict=True):
        np.testing.assert_array_equal(vector, expected)


def test_texts_of_one_pass_have_the_vectors_that_each_has_alone(embedder: Embedder) -> None:
    together = embedder.embed(TEXTS)
    for vector, text in zip(together, TEXTS, strict=True):
        assert np.isclose(np.linalg.norm(vector), 1.0, atol=1e-6)
        np.testing.assert_allclose(vector, embedder.embed(text)[0], atol=1e-5)
        np.testing.assert_allclose(vector, embedder.embed(embedder.engine.read_text(text))[0], atol=1e-5)
    np.testing.assert_allclose(together[0], together[3], atol=1e-5)
    assert not np.allclose(together[0], together[1], atol=0.01)


def test_passes_hold_as_many_texts_as_have_room_in_their_order(embedder: Embedder) -> None:
    most, num_texts = embedder.engine.context_length, embedder.engine.max_texts
    lengths = [most, 1, most - 1, 1, 5, 5, *[1] * (num_texts + 3)]
    texts = [[5] * length for length in lengths]
    groups = list(embedder.passes(texts))
    assert [token_ids for group in groups for token_ids in group] == texts
    assert [len(group) for group in groups] == [1, 2, num_texts, 6]
    assert all(sum(map(len, group)) <= most for group in groups)
    for given in (np.array([5]), [np.array([5])]):
        np.testing.assert_array_equal(embedder.embed(given)[0], embedder.embed([5])[0])  # type: ignore[arg-type]
    many = embedder.embed([*texts[:2], *texts[3:]])
    # Sums over more texts round otherwise, by processor.
    np.testing.assert_allclose(many[-1], embedder.embed([5])[0], atol=5e-5)


def test_what_shares_a_pass_is_short() -> None:
    with load_embedder(options(embedded_draft(), context_length=1024), pooling="mean") as found:
        texts = [[5] * length for length in (500, 12, 1, 1000, 300, 300)]
        groups = [[len(token_ids) for token_ids in group] for group in found.passes(texts)]
    assert groups == [[500, 12], [1], [1000], [300], [300]]


@pytest.mark.parametrize(("pooling", "is_read_in_parts"), [("last", True), ("mean", False), ("none", False)])
def test_a_long_text_is_read_in_parts_where_its_last_token_has_seen_it_all(
    pooling: Any, is_read_in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [[7] * 3, list(range(5, 205)), [9] * 20]
    with load_embedder(options(embedded_draft(), context_length=256), pooling=pooling) as found:
        whole = found.embed(texts)
    monkeypatch.setattr(llama_cpp_embedder, "_CALL_ROWS", 16)
    # llama.cpp ends the process where there are more texts than rows.
    monkeypatch.setattr(llama_cpp_embedder, "_MAX_TEXTS", 16)
    with load_embedder(options(embedded_draft(), context_length=256), pooling=pooling) as found:
        assert isinstance(found.engine, llama_cpp_embedder.LlamaCppEmbedder)
        assert (len(found.engine._batch.tokens) == 16) is is_read_in_parts
        for vector, expected in zip(found.embed(texts), whole, strict=True):
            np.testing.assert_allclose(vector, expected, atol=1e-3 if is_read_in_parts else 0)


def test_keys_and_values_have_the_types_that_are_asked_for() -> None:
    vectors = []
    for cache_type in ("f16", "q4_0"):
        asked = ModelOptions(embedded_draft(), context_length=256, threads=1, cache_type_k=cache_type)
        with load_embedder(asked, pooling="last") as found:
            vectors.append(found.embed("def f(x):")[0])
    assert 0.9 < vectors[0] @ vectors[1] < 0.99999


def test_an_embedder_that_nobody_has_any_more_is_freed(path: Path) -> None:
    found = load_embedder(options(path))
    assert isinstance(found.engine, llama_cpp_embedder.LlamaCppEmbedder)
    finalizer = found.engine._finalizer
    del found
    gc.collect()
    assert not finalizer.alive


def test_documents_are_scored_one_by_one(ranking: Path) -> None:
    with load_embedder(options(ranking)) as found:
        assert (found.engine.pooling, found.engine.width) == ("rank", 1)
        scores = found.rerank("a cat", TEXTS)
        assert np.allclose(scores, [found.rerank("a cat", [text])[0] for text in TEXTS], atol=1e-5)
        assert len({round(score, 3) for score in scores}) > 1
        # The marks of the vocabulary part the two, as in llama-server.
        read = found.engine.vocabulary.tokenize
        pair = [*read("a", add_special=False), 2, *read("b", add_special=False)]
        assert found.engine.read_pair("a", "b")[1:] == pair
        with pytest.raises(paceline.CapabilityError, match="has no vectors"):
            found.embed("a")


@pytest.mark.parametrize("norm", [-1, 0, 1, 2, 3])
def test_vectors_are_divided_by_their_norm(norm: int) -> None:
    vector = np.array([3.0, -4.0, 0.5], np.float32)
    found = normalized(vector, norm)
    assert found.dtype == np.float32
    if norm == -1:
        np.testing.assert_array_equal(found, vector)
    elif norm == 0:
        assert np.isclose(np.abs(found).max(), 32760.0)
    else:
        assert np.isclose((np.abs(found.astype(float)) ** norm).sum() ** (1 / norm), 1.0)
    np.testing.assert_array_equal(normalized(np.zeros(3, np.float32), norm), np.zeros(3))


def test_fewer_dimensions_are_the_first_ones_divided_by_their_own_norm(embedder: Embedder) -> None:
    (whole,), (short,) = embedder.embed("hello", norm=-1), embedder.embed("hello", dimensions=8)
    np.testing.assert_allclose(short, whole[:8] / np.linalg.norm(whole[:8]), rtol=1e-6)


def test_what_cannot_be_embedded_is_refused_in_one_line(embedder: Embedder, path: Path, ranking: Path) -> None:
    refused: list[tuple[type[Exception], Any]] = [
        (paceline.InputError, lambda: embedder.embed([[]])),
        (paceline.InputError, lambda: embedder.embed([VOCABULARY_SIZE])),
        (paceline.InputError, lambda: embedder.embed("a", dimensions=33)),
        (paceline.InputError, lambda: embedder.embed("a", dimensions=0)),
        (paceline.InputError, lambda: embedder.embed("a", norm=-2)),
        (paceline.InputError, lambda: embedder.embed("a", norm=101)),
        (paceline.ContextLengthError, lambda: embedder.embed("a " * 300)),
        (paceline.CapabilityError, lambda: embedder.rerank("a", ["b"])),
        (paceline.CapabilityError, lambda: load_embedder(options(embedded_draft()), pooling="rank")),
        (paceline.ContextLengthError, lambda: load_embedder(options(path, context_length=257))),
        (paceline.InputError, lambda: load_embedder(ModelOptions(path, exact=True))),
        (paceline.CapabilityError, lambda: load_embedder(ModelOptions(path, engine="torch_hf"))),
        (paceline.ModelFileError, lambda: load_embedder("missing.gguf")),
    ]
    for kind, call in refused:
        with pytest.raises(kind) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_threads_take_turns_and_nothing_is_computed_once_it_is_closed(path: Path) -> None:
    found = load_embedder(options(path))
    expected = found.embed(TEXTS)
    vectors: dict[int, list[FloatArray]] = {}
    threads = [threading.Thread(target=lambda n=n: vectors.update({n: found.embed(TEXTS)})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(vectors) == 4
    for several in vectors.values():
        np.testing.assert_array_equal(several, expected)
    found.close()
    found.close()
    with pytest.raises(paceline.ClosedError):
        found.embed([5])


def test_what_a_model_was_made_for_is_read_from_its_header(path: Path, ranking: Path) -> None:
    assert describe(path).embeds
    assert describe(ranking).embeds
    assert not describe(embedded_draft()).embeds


def test_a_rerankers_own_template_puts_query_and_document_in_place(ranking: Path, tmp_path: Path) -> None:
    edits = {"general.architecture": "bert", "tokenizer.chat_template.rerank": "find {query} in {document}</s>"}
    with load_embedder(options(edited_gguf(tmp_path / "own.gguf", edits, ranking))) as found:
        read = found.engine.vocabulary.tokenize
        assert found.engine.read_pair("cat", "a hat") == [*read("find cat in a hat", add_special=False), 2]
        # What they say is no place for the other one.
        odd = "find {document} in {query}"
        assert found.engine.read_pair("{document}", "{query}") == [*read(odd, add_special=False), 2]
