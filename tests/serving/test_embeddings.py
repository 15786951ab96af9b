"""``/v1/embeddings`` and ``/v1/rerank``: forms of requests and answers, turns, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import openai
import pytest

pytest.importorskip("llama_cpp")

from paceline.core.arrays import FloatArray
from paceline.embedder import Embedder, load_embedder
from paceline.engines.base import Pooling
from paceline.engines.options import ModelOptions
from paceline.server_options import ServerOptions
from paceline.serving import embeddings
from paceline.serving.model_host import ServedEmbedder
from tests.engines.tiny_models import MEAN, RANK, write_model
from tests.serving.hosted import Hosted, hosted
from tests.timing import WAIT_S

pytestmark = pytest.mark.filterwarnings("ignore::paceline.ModelWarning")

DOCUMENTS = ["a cat", "hello world", "zebra", "the hat of a cat"]
EMBEDDING_PATHS = ["/v1/embeddings", "/embeddings", "/embedding"]
RERANK_PATHS = ["/v1/rerank", "/v1/reranking", "/rerank", "/reranking"]


def serve(folder: Path, pooling: int, asked: Pooling | None = None) -> ServedEmbedder:
    path = write_model(folder / f"{pooling}.gguf", "bert", tokenizer="bert", pooling=pooling, seed=3)
    options = ModelOptions(path, threads=1, flash_attention=False)
    return ServedEmbedder(load_embedder(options, pooling=asked), None, ("tiny",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embeddings")


@pytest.fixture(scope="module")
def embedding(folder: Path) -> Iterator[Hosted]:
    with hosted(lambda: serve(folder, MEAN), ServerOptions(metrics=True)) as running:
        yield running


@pytest.fixture(scope="module")
def ranking(folder: Path) -> Iterator[Hosted]:
    with hosted(lambda: serve(folder, RANK)) as running:
        yield running


def embedder_of(running: Hosted) -> Embedder:
    return running.host.embedder.embedder


def test_openais_client_gets_vectors_as_numbers_and_in_base64(embedding: Hosted) -> None:
    expected = embedder_of(embedding).embed(["hello world", "a cat"])
    with embedding.client() as client:
        answer = client.embeddings.create(model="any", input=["hello world", "a cat"], encoding_format="float")
        short = client.embeddings.create(model="any", input="a cat", encoding_format="float", dimensions=8)
    # What is strict looks at answers before base64 is read, of OpenAI's own API too.
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none", max_retries=0) as client:
        packed = client.embeddings.create(model="any", input=["hello world", "a cat"])
    told = embedding.answer("/v1/embeddings", {"input": "a cat", "encoding_format": "base64"})["data"][0]["embedding"]
    # The lowest byte comes first.
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(told), "<f4"), embedder_of(embedding).embed("a cat")[0]
    )
    assert [each.index for each in answer.data] == [0, 1]
    for listed, again, vector in zip(answer.data, packed.data, expected, strict=True):
        np.testing.assert_array_equal(np.array(listed.embedding, np.float32), vector)
        np.testing.assert_array_equal(np.array(again.embedding, np.float32), vector)
    assert (answer.model, answer.usage.prompt_tokens) == ("any", answer.usage.total_tokens)
    lengths = [len(embedder_of(embedding).engine.read_text(text)) for text in ("hello world", "a cat")]
    assert answer.usage.prompt_tokens == sum(lengths)
    assert len(short.data[0].embedding) == 8
    assert np.isclose(np.linalg.norm(short.data[0].embedding), 1.0, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "alike"),
    [
        ("", [[1, 2]]),
        ("a cat", ["a cat"]),
        ([12, 34, 56], [[12, 34, 56]]),
        ([12, 34, "a", 56], [[12, 34, 32, 56]]),
        (["a", "b"], ["a", "b"]),
        (["a", [12, 34]], ["a", [12, 34]]),
        ([[12, 34], [12, "a", 34]], [[12, 34], [12, 32, 34]]),
        ({"prompt_string": "a"}, ["a"]),
        ({"content": [{"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]}, ["a cat"]),
        (["a", {"prompt_string": "b"}, {"content": [{"type": "text", "text": "c"}]}], ["a", "b", "c"]),
    ],
)
def test_inputs_have_all_forms_of_llama_server(embedding: Hosted, given: Any, alike: list[Any]) -> None:
    data = embedding.answer("/v1/embeddings", {"input": given})["data"]
    for each, vector in zip(data, embedder_of(embedding).embed(alike), strict=True):
        np.testing.assert_allclose(each["embedding"], vector, atol=1e-5)


@pytest.mark.parametrize("path", EMBEDDING_PATHS)
def test_llama_servers_own_form_has_a_list_of_vectors(embedding: Hosted, path: str) -> None:
    found = embedding.answer(path, {"content": ["a", "b c"], "embd_normalize": -1})
    assert [each["index"] for each in found] == [0, 1]
    expected = embedder_of(embedding).embed(["a", "b c"], norm=-1)
    for each, vector in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.array(each["embedding"], np.float32), [vector])
    if path != "/v1/embeddings":
        assert embedding.answer(path, {"input": ["a", "b c"], "embd_normalize": -1}) == found


def test_without_pooling_each_token_has_a_vector(folder: Path) -> None:
    with hosted(lambda: serve(folder, MEAN, "none")) as running:
        (found,) = running.answer("/embedding", {"input": "hello"})
        vectors = np.array(found["embedding"], np.float32)
        np.testing.assert_array_equal(vectors, embedder_of(running).embed("hello")[0])
        assert not np.isclose(np.linalg.norm(vectors, axis=1), 1.0).any()
        assert "pooling" in running.refusal("/v1/embeddings", {"input": "hello"})["message"]


@pytest.mark.parametrize("path", RERANK_PATHS)
def test_documents_come_in_the_order_of_their_scores(ranking: Hosted, path: str) -> None:
    scores = embedder_of(ranking).rerank("a cat", DOCUMENTS)
    order = sorted(range(4), key=lambda place: -scores[place])
    body = {"query": "a cat", "documents": [*DOCUMENTS[:3], {"text": DOCUMENTS[3]}], "model": "any"}
    answer = ranking.answer(path, body)
    assert [each["index"] for each in answer["results"]] == order
    np.testing.assert_allclose([each["relevance_score"] for each in answer["results"]], sorted(scores)[::-1], atol=1e-5)
    assert (answer["object"], answer["model"]) == ("list", "any")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    best = ranking.answer(path, {**body, "top_n": 2, "return_documents": True})["results"]
    assert [each["document"]["text"] for each in best] == [DOCUMENTS[place] for place in order[:2]]
    assert len(ranking.answer(path, {**body, "top_n": 99})["results"]) == 4
    inference = ranking.answer(path, {"query": "a cat", "texts": DOCUMENTS, "return_text": True, "top_n": 3})
    assert [(each["index"], each["text"]) for each in inference] == [(place, DOCUMENTS[place]) for place in order[:3]]
    assert "text" not in ranking.answer(path, {"query": "a cat", "texts": DOCUMENTS})[0]


REFUSED: Final[dict[str, list[Any]]] = {
    "input": [
        *(None, [], 5, [True], [[1.5]], [[]], [10**6], ["a"] * 5000, "a" * (3 << 20)),
        *({"content": "a"}, {"content": [{"type": "image_url"}]}, {"content": []}),
    ],
    "content": [{"a": 1}],
    "encoding_format": ["int8"],
    "dimensions": [33, 0],
    "embd_normalize": [-2, 2**62],
}
REFUSED_TO_RANK: Final[dict[str, list[Any]]] = {
    "query": [None, 5, "a" * (1 << 20)],
    "documents": [[], None, 123, [1, 2, 3], [{"title": "a"}]],
    "texts": [[]],
    "top_n": [0],
}


def test_what_cannot_be_embedded_or_ranked_is_refused_by_field(embedding: Hosted, ranking: Hosted) -> None:
    for name, values in REFUSED.items():
        for value in values:
            body = {name: value} if name == "content" else {"input": "a", name: value}
            assert embedding.refusal("/v1/embeddings", body)["param"] == name, value
    for name, values in REFUSED_TO_RANK.items():
        for value in values:
            body = {"query": "a", "documents": ["b"] * 20, name: value}
            assert ranking.refusal("/v1/rerank", body)["param"] == name, value


def test_a_text_that_is_longer_than_the_context_is_refused_with_its_length(embedding: Hosted, ranking: Hosted) -> None:
    error = embedding.refusal("/v1/embeddings", {"input": ["a", "a " * 300]})
    assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 256)
    assert "too large" in error["message"]
    assert "too large" in ranking.refusal("/v1/rerank", {"query": "a " * 300, "documents": ["b"]})["message"]


def test_what_a_model_was_not_made_for_is_refused_in_words(embedding: Hosted, ranking: Hosted, server: Hosted) -> None:
    messages = [{"role": "user", "content": "a"}]
    for path, body in (("/completion", {"prompt": "a"}), ("/v1/chat/completions", {"messages": messages})):
        assert "/v1/embeddings" in embedding.refusal(path, body, 404)["message"]
        assert "/v1/rerank" in ranking.refusal(path, body, 404)["message"]
    assert "is not a reranker" in embedding.refusal("/v1/rerank", {"query": "a", "documents": ["b"]})["message"]
    assert "/v1/rerank" in ranking.refusal("/v1/embeddings", {"input": "a"})["message"]
    assert "--embedding" in server.refusal("/v1/embeddings", {"input": "a"}, 404)["message"]


def test_unknown_fields_are_named(embedding: Hosted, ranking: Hosted) -> None:
    warnings = ["unknown field 'truncate' was ignored"]
    body = {"input": "a", "user": "me", "truncate": True}
    assert embedding.answer("/v1/embeddings", body)["warnings"] == warnings
    asked = {"query": "a", "documents": ["b"], "truncate": True}
    assert ranking.answer("/v1/rerank", asked)["warnings"] == warnings


def test_lists_have_warnings_in_their_first_object(embedding: Hosted, ranking: Hosted) -> None:
    body = {"input": ["a", "b"], "content": "c", "encoding_format": "base64", "truncate": True}
    first, second = embedding.answer("/embedding", body)
    assert [warning.split(" ")[0] for warning in first.pop("warnings")] == ["unknown", "content", "encoding_format"]
    # Numbers, as llama-server has them there.
    assert [len(each["embedding"][0]) for each in (first, second)] == [32, 32]
    assert set(second) == {"index", "embedding"}
    asked = {"query": "a", "documents": ["b"], "texts": ["b", "c"], "return_documents": True}
    found = ranking.answer("/rerank", asked)
    assert found[0]["warnings"] == ["documents changed nothing beside texts"]
    assert {each["text"] for each in found} == {"b", "c"}


def test_an_answer_has_no_more_numbers_than_there_is_room_for(
    embedding: Hosted, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "_MAX_NUMBERS", 5 * 32)
    assert len(embedding.answer("/v1/embeddings", {"input": [[5]] * 5})["data"]) == 5
    error = embedding.refusal("/v1/embeddings", {"input": [[5]] * 6})
    assert (error["param"], "192 numbers" in error["message"]) == ("input", True)
    with hosted(lambda: serve(folder, MEAN, "none")) as running:
        assert len(running.answer("/embedding", {"input": [5] * 5})[0]["embedding"]) == 5
        assert "192 numbers" in running.refusal("/embedding", {"content": [5] * 6})["message"]


def test_an_embedder_is_told_as_one(embedding: Hosted) -> None:
    models = embedding.get("/v1/models").json()
    assert (models["data"][0]["id"], models["models"][0]["capabilities"]) == ("tiny", ["embedding"])
    props = embedding.get("/props").json()
    assert (props["pooling"], props["default_generation_settings"]["n_ctx"]) == ("mean", 256)
    # The page reads them.
    assert props["speculative"]["drafters"] == []
    assert embedding.get("/slots").json() == []
    assert embedding.get("/health").json() == {"status": "ok"}
    assert embedding.answer("/tokenize", {"content": "a"})["tokens"] == [32]
    values = [httpx_values(embedding.get("/metrics"))]
    embedding.answer("/v1/embeddings", {"input": [[5, 6, 7], [8]]})
    values.append(httpx_values(embedding.get("/metrics")))
    name = "llamacpp:prompt_tokens_total"
    assert values[1][name] - values[0][name] == 4
    assert values[1]["llamacpp:n_decode_total"] - values[0]["llamacpp:n_decode_total"] == 1
    assert values[1]["llamacpp:tokens_predicted_total"] == 0


def httpx_values(response: httpx.Response) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in response.text.splitlines() if line.startswith("llamacpp:")]
    return {name: float(value) for name, value in lines}


class Gate:
    """Lets passes of an embedder through one by one, and notes their texts."""

    def __init__(self, embedder: Embedder, patch: pytest.MonkeyPatch) -> None:
        self.passes: list[Sequence[Sequence[int]]] = []
        self.entered = threading.Semaphore(0)
        self._let = threading.Semaphore(0)
        forward = embedder.engine.forward

        def halting(texts: Sequence[Sequence[int]]) -> list[FloatArray]:
            self.passes.append(texts)
            self.entered.release()
            assert self._let.acquire(timeout=WAIT_S)
            return forward(texts)

        patch.setattr(embedder.engine, "forward", halting)

    def let(self, count: int) -> None:
        self._let.release(count)


async def test_keys_take_turns_between_passes_and_who_waits_is_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ServerOptions(api_key=("one", "two"), max_waiting=1)
    long = {"input": [[5] * 200] * 3}
    with hosted(lambda: serve(folder, MEAN), keys) as running:
        gate = Gate(embedder_of(running), monkeypatch)

        url = f"{running.url}/v1/embeddings"
        async with httpx.AsyncClient(timeout=WAIT_S) as client:

            def post(key: str, body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(client.post(url, json=body, headers={"Authorization": f"Bearer {key}"}))

            first = post("one", long)
            assert await asyncio.to_thread(gate.entered.acquire, timeout=WAIT_S)
            second, other = post("one", {"input": [[6]]}), post("two", {"input": [[7]]})
            while running.server._embedding.total() < 3:
                await asyncio.sleep(0)
            refused = await post("one", {"input": [[8]]})
            assert refused.json()["error"]["type"] == "rate_limit_error"
            gate.let(5)
            answers = [await task for task in (first, second, other)]
            assert [answer.status_code for answer in (refused, *answers)] == [429, 200, 200, 200]
        asked = [texts[0][0] for texts in gate.passes]
        assert sorted(asked) == [5, 5, 5, 6, 7]
        # The other key waits for one pass at most, whichever request came first.
        assert asked.index(7) <= 2


async def test_nothing_more_is_computed_for_a_client_that_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted(lambda: serve(folder, MEAN)) as running:
        gate = Gate(embedder_of(running), monkeypatch)

        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            body = {"input": [[5] * 200] * 4}
            asked = asyncio.create_task(client.post(f"{running.url}/v1/embeddings", json=body))
            assert await asyncio.to_thread(gate.entered.acquire, timeout=WAIT_S)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        while running.server._embedding.total():
            await asyncio.sleep(0)
        gate.let(2)
        assert len(running.answer("/v1/embeddings", {"input": [[9]]})["data"]) == 1
        assert [texts[0][0] for texts in gate.passes] == [5, 9]
