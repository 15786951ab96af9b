"""Vectors of texts, and documents ranked by a query: what is asked for, the passes, and the answers' JSON.

A request has one pass at a time, and requests of all keys take turns between passes.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from starlette.requests import Request

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, InputError
from paceline.core.numbers import shown
from paceline.embedder import Embedder
from paceline.serving.errors import FieldError
from paceline.serving.json_output import Listed, json_pieces
from paceline.serving.model_host import ServedEmbedder
from paceline.serving.prompts import TextOrId, read_prompt
from paceline.serving.schema import MAX_TEXTS, EmbeddingBody, RerankBody
from paceline.serving.server import Server
from paceline.serving.work import Kind, Share

_MAX_TEXT: Final = 2 << 20
"""Bytes of a text: no call of a tokenizer can be stopped, and at worst these take some seconds."""

_MAX_PAIRS: Final = 16 << 20
"""Bytes of a query, as often as it is read: once for each document."""

_MAX_NUMBERS: Final = 1 << 23
"""Numbers of all vectors of an answer, which is written as a whole: 20 bytes each in JSON."""

_Passes: TypeAlias = list[list[Sequence[int]]]
"""Token ids of texts, by the pass."""


async def embed(
    server: Server,
    request: Request,
    kind: Kind,
    body: EmbeddingBody,
    *,
    in_openai_form: bool,
    warnings: Sequence[str],
) -> bytes:
    """Return the JSON of the vectors of texts."""
    served = server.host.embedder
    embedder = served.embedder
    pooling = embedder.engine.pooling
    if pooling == "rank":
        raise CapabilityError(f"{served.id} scores documents by a query and has no vectors: use /v1/rerank")
    name, given = ("input", body.input) if body.input is not None else ("content", body.content)
    in_openai_form = in_openai_form and name == "input"
    if given is None:
        raise FieldError("input", "input is missing: give a text, token ids, or a list of these")
    if in_openai_form and pooling == "none":
        raise InputError(
            "the vectors of tokens are not pooled, and OpenAI's API has one vector a text: use /embedding, or start "
            "the server with another `pooling`"
        )
    if name == "input" and body.content is not None:
        warnings = [*warnings, "content changed nothing beside input"]
    as_text = body.encoding_format == "base64"
    if as_text and not in_openai_form:
        warnings = [*warnings, "encoding_format changed nothing: only OpenAI's form has vectors in base64"]
    norm = server.options.embd_normalize if body.embd_normalize is None else body.embd_normalize
    share = server.work.share_for(request.scope)

    def read() -> _Passes:
        # Before the passes, which may take long.
        embedder.finished(np.zeros(embedder.engine.width, np.float32), norm, body.dimensions)
        texts = [_encode(parts, name, served) for parts in _read_inputs(given, name)]
        num_vectors = sum(map(len, texts)) if pooling == "none" else len(texts)
        num_numbers = num_vectors * embedder.engine.width
        if num_numbers > _MAX_NUMBERS:
            raise FieldError(
                name,
                f"the vectors of {name} come to {num_numbers:,} numbers: at most {_MAX_NUMBERS:,} are sent at once; "
                "send parts",
            )
        return _deal(texts, embedder, name)

    passes = await share.offload(kind, read)
    vectors = await _run(server, share, embedder, passes)

    def write() -> bytes:
        finished = [embedder.finished(vector, norm, body.dimensions) for vector in vectors]
        if not in_openai_form:
            rows = [[vector] if vector.ndim == 1 else list(vector) for vector in finished]
            found = [{"index": place, "embedding": [*map(_listed, each)]} for place, each in enumerate(rows)]
            return _written(found, warnings)
        form = {"encoding_format": "base64"} if as_text else {}
        data = [
            {"object": "embedding", "index": place, "embedding": _in_base64(each) if as_text else _listed(each), **form}
            for place, each in enumerate(finished)
        ]
        answer = {"object": "list", "data": data, "model": body.model or served.id, "usage": _usage(passes)}
        return _written(answer, warnings)

    return await share.offload(Kind.WRITING, write, num_items=sum(vector.size for vector in vectors))


async def rerank(server: Server, request: Request, kind: Kind, body: RerankBody, *, warnings: Sequence[str]) -> bytes:
    """Return the JSON of documents in the order of their scores: in Jina's form, or in TEI's where it has ``texts``."""
    served = server.host.embedder
    embedder = served.embedder
    if embedder.engine.pooling != "rank":
        raise CapabilityError(f"{served.id} is not a reranker: serve one")
    is_tei = body.texts is not None
    name, given = ("texts", body.texts) if is_tei else ("documents", body.documents)
    if is_tei and body.documents is not None:
        warnings = [*warnings, "documents changed nothing beside texts"]
    share = server.work.share_for(request.scope)

    def read() -> tuple[list[str], _Passes]:
        documents = _read_documents(given, name)
        if len(body.query.encode("utf-8", "replace")) * len(documents) > _MAX_PAIRS:
            message = f"the query is too large to process with {len(documents)} {name}: send fewer at once"
            raise FieldError("query", message)
        texts = [embedder.engine.read_pair(body.query, document) for document in documents]
        return documents, _deal(texts, embedder, name)

    documents, passes = await share.offload(kind, read)
    scores = [float(vector[0]) for vector in await _run(server, share, embedder, passes)]

    def tell(place: int) -> dict[str, Any]:
        found: dict[str, Any] = {"index": place, "score" if is_tei else "relevance_score": scores[place]}
        if body.return_documents or body.return_text:
            found |= {"text": documents[place]} if is_tei else {"document": {"text": documents[place]}}
        return found

    def write() -> bytes:
        best = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
        results = [tell(place) for place in best]
        if is_tei:
            return _written(results, warnings)
        answer = {"object": "list", "results": results, "model": body.model or served.id, "usage": _usage(passes)}
        return _written(answer, warnings)

    return await share.offload(kind, write)


def _deal(texts: Sequence[Sequence[int]], embedder: Embedder, name: str) -> _Passes:
    """Return texts by the pass, all of them checked; ``name`` is the field that has them."""
    try:
        return list(embedder.passes(texts))
    except InputError as error:
        error.field = error.field or name
        raise


async def _run(server: Server, share: Share, embedder: Embedder, passes: _Passes) -> list[FloatArray]:
    """Return what passes make of texts. Whoever leaves has no further pass."""
    vectors: list[FloatArray] = []
    with server.embedding_for(share.key):
        for texts in passes:

            def compute(texts: Sequence[Sequence[int]] = texts) -> tuple[list[FloatArray], float]:
                started_s = time.perf_counter()
                return embedder.forward(texts), time.perf_counter() - started_s

            found, seconds = await share.offload(Kind.EMBEDDING, compute)
            vectors += found
            if server.metrics is not None:
                server.metrics.texts_read(sum(map(len, texts)), seconds)
    return vectors


def _read_inputs(given: Any, name: str) -> list[list[TextOrId]]:
    """Return texts to embed, each as texts and token ids in their order."""
    if given == []:
        raise FieldError(name, f"{name} is empty: give a text, token ids, or a list of these")
    is_several = isinstance(given, list) and not any(isinstance(item, int) for item in given)
    items = given if is_several else [given]
    if len(items) > MAX_TEXTS:
        raise FieldError(name, f"{name} has {len(items)} texts: at most {MAX_TEXTS} are accepted at once; send parts")
    return [_read_content(item, name) if _has_content(item) else read_prompt(item, name) for item in items]


def _has_content(item: Any) -> bool:
    return isinstance(item, dict) and "content" in item


def _read_content(item: Mapping[str, Any], name: str) -> list[TextOrId]:
    """Return the text of an object that has it in parts, as a message has."""
    texts: list[str] = []
    for part in item["content"] if isinstance(item["content"], list) else []:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            texts = []
            break
        texts.append(part["text"])
    if not texts:
        raise FieldError(name, f"{name} has {shown(item)}: give content as a list of parts of type text")
    return ["".join(texts)]


def _encode(parts: Sequence[TextOrId], name: str, served: ServedEmbedder) -> list[int]:
    """Return the tokens of texts and ids. A text that comes first is opened and closed, as in llama-server."""
    engine = served.embedder.engine
    _check_size([part for part in parts if isinstance(part, str)], name)
    token_ids: list[int] = []
    for place, part in enumerate(parts):
        if not isinstance(part, str):
            token_ids.append(part)
        elif place == 0:
            token_ids += engine.read_text(part)
        else:
            token_ids += engine.vocabulary.tokenize(part, add_special=False, parse_special=True)
    return token_ids


def _check_size(texts: Sequence[str], name: str) -> None:
    num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
    if num_bytes > _MAX_TEXT:
        raise FieldError(
            name, f"{name} has a text of {num_bytes} bytes, too large to process: at most {_MAX_TEXT} are; send parts"
        )


def _read_documents(given: Any, name: str) -> list[str]:
    """Return the texts of documents, which may be objects that have them."""
    if not isinstance(given, list) or not given:
        raise FieldError(name, f'"{name}" must be a non-empty string array: it is {shown(given)}')
    if len(given) > MAX_TEXTS:
        raise FieldError(name, f"{name} has {len(given)} texts: at most {MAX_TEXTS} are ranked at once; send fewer")
    texts: list[str] = []
    for item in given:
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise FieldError(name, f"{name} has {shown(item)}: give texts, or objects with a text")
        _check_size([text], name)
        texts.append(text)
    return texts


def _usage(passes: _Passes) -> dict[str, int]:
    num_tokens = sum(len(token_ids) for texts in passes for token_ids in texts)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _listed(vector: FloatArray) -> Listed:
    return Listed(vector, lambda numbers: np.asarray(numbers).tolist())  # type: ignore[arg-type]


def _in_base64(vector: FloatArray) -> str:
    """Return numbers of 32 bits, the lowest byte first."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _written(answer: dict[str, Any] | list[dict[str, Any]], warnings: Sequence[str]) -> bytes:
    """Return the JSON of an answer. A list has warnings in its first object."""
    if warnings:
        (answer if isinstance(answer, dict) else answer[0])["warnings"] = list(warnings)
    return b"".join(json_pieces(answer))
