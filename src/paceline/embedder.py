"""Texts as vectors, and documents ranked by a query, by models that are made for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, ClosedError, ContextLengthError, InputError
from paceline.core.numbers import shown
from paceline.engines.base import EmbeddingEngine, Pooling
from paceline.engines.loading import open_embedder
from paceline.engines.options import ModelOptions, check_range
from paceline.models.registry import resolve_model

EmbeddedText: TypeAlias = str | Sequence[int]
"""A text, or the token ids of one."""

EUCLIDEAN: Final = 2
"""The usual norm of a vector."""

MAX_NORM: Final = 100
"""Largest exponent of a norm: powers of more would be too large for any number."""

_SHARED_TOKENS: Final = 512
"""Most tokens of texts that share a pass. More of them take no less time each, as attention looks at all of a pass, and
whoever comes next waits for it.

[64 texts of 50 tokens, SmolLM2-135M in Q4_1, seconds of one core: passes of 256 tokens 14.5, 512 14.4, 1,024 14.9,
2,048 15.9, 4,096 17.8.]
"""


class Embedder:
    """A model that turns texts into vectors, or scores documents by a query. Any thread may use it; they take turns."""

    def __init__(self, engine: EmbeddingEngine) -> None:
        self.engine = engine
        self._turn = threading.Lock()
        self._is_closed = False

    def embed(
        self, texts: EmbeddedText | Sequence[EmbeddedText], *, norm: int = EUCLIDEAN, dimensions: int | None = None
    ) -> list[FloatArray]:
        """Return a vector ``[width]`` of each text; without pooling ``[tokens, width]``, as it is.

        Args:
            texts: one or several; each a text or its token ids.
            norm: see :func:`normalized`.
            dimensions: keep so many numbers of each vector, for models that were trained for that (arXiv 2205.13147).

        Raises:
            InputError: a text is empty, there are fewer dimensions, or no such norm.
            ContextLengthError: a text is longer than what the model reads at once.
            CapabilityError: the model only scores documents.
        """
        if self.engine.pooling == "rank":
            raise CapabilityError("this model scores documents by a query and has no vectors: rank documents by it")
        is_one = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int | np.integer))
        several: Sequence[EmbeddedText] = [texts] if is_one else texts  # type: ignore[list-item, assignment]
        read = [self.engine.read_text(text) if isinstance(text, str) else [*map(index, text)] for text in several]
        return [self.finished(vector, norm, dimensions) for vector in self._run(read)]

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        """Return the score of each document: how much it has to do with the query, as the model sees it.

        Raises:
            CapabilityError: the model was not made for that.
            ContextLengthError: query and a document are longer than what the model reads at once.
        """
        if self.engine.pooling != "rank":
            raise CapabilityError("this model was not made to rank documents; load a reranker")
        return [float(vector[0]) for vector in self._run([self.engine.read_pair(query, each) for each in documents])]

    def finished(self, vector: FloatArray, norm: int = EUCLIDEAN, dimensions: int | None = None) -> FloatArray:
        """Return what a pass made of a text as it is handed out."""
        check_range("norm", norm, -1, MAX_NORM)
        if dimensions is not None:
            if not 1 <= dimensions <= self.engine.width:
                raise InputError(
                    f"{dimensions} dimensions: vectors of this model have from 1 to {self.engine.width}",
                    field="dimensions",
                )
            vector = vector[..., :dimensions]
        return vector if self.engine.pooling == "none" else normalized(vector, norm)

    def passes(self, texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        """Yield texts by the pass, in their order: short ones share one, as many as have room."""
        group: list[Sequence[int]] = []
        most = min(self.engine.context_length, _SHARED_TOKENS)
        room = most
        for token_ids in texts:
            self._check(token_ids)
            if group and (len(token_ids) > room or len(group) == self.engine.max_texts):
                yield group
                group, room = [], most
            group.append(token_ids)
            room -= len(token_ids)
        if group:
            yield group

    def forward(self, texts: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Return what one pass makes of texts, once it is this thread's turn."""
        with self._turn:
            if self._is_closed:
                raise ClosedError("the embedder was closed")
            return self.engine.forward(texts)

    def close(self) -> None:
        """Free the model, once no pass is under way. Idempotent."""
        with self._turn:
            self._is_closed = True
            self.engine.close()

    def __enter__(self) -> Embedder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, texts: Sequence[Sequence[int]]) -> list[FloatArray]:
        # All are checked before the first pass.
        return [vector for group in list(self.passes(texts)) for vector in self.forward(group)]

    def _check(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InputError("an empty text has no tokens, and so no vector: give at least one character")
        size, most = self.engine.vocabulary.size, self.engine.context_length
        wrong = next((each for each in token_ids if not 0 <= each < size), None)
        if wrong is not None:
            raise InputError(f"token id {shown(wrong)} is not in the vocabulary of {size}")
        if len(token_ids) > most:
            raise ContextLengthError(
                f"the input ({len(token_ids)} tokens) is too large to process at once: at most {most} tokens are read; "
                "shorten it, or load the model with a larger `context_length` if it was made for more"
            ).with_lengths(len(token_ids), most, is_least=False)


def normalized(vector: FloatArray, norm: int = EUCLIDEAN) -> FloatArray:
    """Return a vector divided by its norm, as llama.cpp does.

    Args:
        vector: ``[width]`` in 32 bits.
        norm: -1 leaves it as it is, 0 makes its largest number 32760, 1 is the sum of the absolute values, 2 the
            Euclidean length, and so on up to :data:`MAX_NORM`.
    """
    if norm < 0:
        return vector
    if norm == 0:
        length = float(np.abs(vector).max()) / 32760.0
    elif norm == EUCLIDEAN:
        length = float(np.sqrt((vector * vector).sum(dtype=np.float64)))
    else:
        length = float((np.abs(vector.astype(np.float64)) ** norm).sum() ** (1.0 / norm))
    return vector * np.float32(1.0 / length if length > 0.0 else 0.0)


def load_embedder(model: ModelOptions | str | Path, *, pooling: Pooling | None = None) -> Embedder:
    """Load a model that turns texts into vectors.

    Args:
        model: a GGUF file, or a name that :func:`paceline.load` takes. Any model will do; one that was made for it does
            better.
        pooling: how the vectors of a text's tokens become one; ``None`` is what the model was made for, which is none
            for a model that writes texts.

    Raises:
        ModelFileError: the file is missing or damaged.
        CapabilityError: the model has no vectors.
        InputError: it has no such pooling.
    """
    options = model if isinstance(model, ModelOptions) else ModelOptions(resolve_model(model))
    return Embedder(open_embedder(options, pooling))
