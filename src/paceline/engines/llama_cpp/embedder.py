"""Vectors of texts by llama.cpp: a model and a context that keeps nothing from one pass to the next."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import llama_cpp.llama_cpp as api
import numpy as np
from gguf.constants import GGMLQuantizationType

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, ClosedError, EngineError, InputError
from paceline.engines.base import Pooling
from paceline.engines.context_length import choose_context_length
from paceline.engines.llama_cpp import native
from paceline.engines.llama_cpp.lines import NativeBatch
from paceline.engines.llama_cpp.remarks import of_context, warn
from paceline.engines.llama_cpp.vocabulary import GgufVocabulary
from paceline.engines.llama_cpp.weights import free_model, read_model
from paceline.engines.options import ModelOptions, cache_types, has_quantized_cache
from paceline.engines.process_forks import native_threads
from paceline.engines.threads import PassThreads
from paceline.models.gguf_model import read_gguf_model

_POOLINGS: Final[dict[Pooling, int]] = {
    "none": api.LLAMA_POOLING_TYPE_NONE,
    "mean": api.LLAMA_POOLING_TYPE_MEAN,
    "cls": api.LLAMA_POOLING_TYPE_CLS,
    "last": api.LLAMA_POOLING_TYPE_LAST,
    "rank": api.LLAMA_POOLING_TYPE_RANK,
}

_MAX_TEXTS: Final = 64
"""Most texts of a pass: each takes a sequence id."""

_CALL_ROWS: Final = 512
"""Tokens of a native call where a text may be read in parts. llama.cpp has memory for logits of all of them."""


class LlamaCppEmbedder:
    """Runs :class:`~paceline.engines.base.EmbeddingEngine`'s contract on a GGUF file."""

    def __init__(self, options: ModelOptions, pooling: Pooling | None = None) -> None:
        for name, is_foreign in (
            ("exact", options.exact),
            ("memory", options.memory is not None),
            ("dtype", options.dtype is not None),
        ):
            if is_foreign:
                raise InputError(f"`{name}` is for models that write texts, and this one embeds them: leave it out")
        path = Path(options.path)
        self._context: Any = None
        model, self._keep_alive, remarks = read_model(options)
        try:
            if api.llama_model_has_encoder(model) and api.llama_model_has_decoder(model):
                raise CapabilityError(f"{path} is an encoder-decoder model, which has no vectors for texts")
            self.vocabulary = GgufVocabulary(model)
            self.context_length = choose_context_length(
                options.context_length,
                api.llama_model_n_ctx_train(model) or None,
                model=path.name,
                may_shrink=options.context_may_shrink,
            )
            # How a query and a document are put before a reranker; empty where control tokens part them.
            self._pair_template = (api.llama_model_chat_template(model, b"rerank") or b"").decode("utf-8", "replace")
            self.max_texts = min(self.context_length, _MAX_TEXTS)
            self._threads = PassThreads(options.threads, options.threads_batch)
            rows = min(self.context_length, _CALL_ROWS)
            more = self._create_context(model, options, pooling, rows)
            if rows < self.context_length and not self._reads_in_parts():
                api.llama_free(self._context)
                rows = self.context_length
                more = self._create_context(model, options, pooling, rows)
            names = {number: name for name, number in _POOLINGS.items()}
            self.pooling: Pooling = names[int(api.llama_pooling_type(self._context))]
            is_rank = self.pooling == "rank"
            self.width = int((api.llama_model_n_cls_out if is_rank else api.llama_model_n_embd_out)(model))
            if is_rank and not any(name.startswith("cls") for name in read_gguf_model(path).header.tensors):
                raise CapabilityError(f"{path} is not a reranker: give one, or request vectors")
            warn(path, [*remarks, *more])
        except BaseException:
            free_model(model, self._context)
            raise
        self._batch = NativeBatch(rows, 1)
        self._batch.wanted[:] = 1
        self._finalizer = weakref.finalize(self, _release, model, self._context, self.vocabulary)

    def _create_context(self, model: Any, options: ModelOptions, pooling: Pooling | None, rows: int) -> list[str]:
        """Create the context, and return llama.cpp's remarks on it."""
        self._context = None
        parameters = api.llama_context_default_params()
        parameters.n_ctx = self.context_length
        parameters.n_batch = parameters.n_ubatch = rows
        parameters.n_seq_max = self.max_texts
        parameters.kv_unified = True
        parameters.embeddings = True
        parameters.pooling_type = api.LLAMA_POOLING_TYPE_UNSPECIFIED if pooling is None else _POOLINGS[pooling]
        parameters.n_threads, parameters.n_threads_batch = self._threads.most
        parameters.type_k, parameters.type_v = (GGMLQuantizationType[each.upper()] for each in cache_types(options))
        if options.flash_attention is not None or has_quantized_cache(options):
            is_off = options.flash_attention is False
            parameters.flash_attn_type = (
                api.LLAMA_FLASH_ATTN_TYPE_DISABLED if is_off else api.LLAMA_FLASH_ATTN_TYPE_ENABLED
            )
        with native.log.watch() as lines:
            self._context = api.llama_init_from_model(model, parameters)
            if not self._context:
                raise InputError(
                    f"llama.cpp cannot embed by {options.path}: {native.reason(lines)}; ask for a shorter context, or "
                    "for another pooling"
                )
            return of_context(lines)

    def _reads_in_parts(self) -> bool:
        """Return whether a text may be read by several native calls."""
        # Each token sees those before it alone, which are kept, and what comes of the text is that of its last one.
        pooling = api.llama_pooling_type(self._context)
        return bool(
            api.llama_get_memory(self._context)
            and api.llama_get_causal_attn(self._context)
            and pooling in (api.LLAMA_POOLING_TYPE_LAST, api.LLAMA_POOLING_TYPE_RANK)
        )

    def read_text(self, text: str) -> list[int]:
        return self.vocabulary.encode_closed(text)

    def read_pair(self, query: str, document: str) -> list[int]:
        """Return the tokens of a query and a document, as the model wants to see them."""
        if self._pair_template:
            given = {"{query}": query, "{document}": document}
            text = re.sub("{query}|{document}", lambda name: given[name[0]], self._pair_template)
            return self.vocabulary.tokenize(text, add_special=False, parse_special=True)
        first, second = (self.vocabulary.tokenize(text, add_special=False) for text in (query, document))
        opening, between, closing = self.vocabulary.pair_marks
        return [*opening, *first, *between, *second, *closing]

    def forward(self, texts: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Return what a pass makes of texts: of each ``[width]``, or ``[tokens, width]`` where nothing is pooled."""
        context, batch = self._open_context(), self._batch
        native_threads.use()
        lengths = [len(token_ids) for token_ids in texts]
        ends = np.cumsum(lengths)
        assert 0 < len(texts) <= self.max_texts
        assert all(lengths)
        assert ends[-1] <= self.context_length
        token_ids = np.concatenate([np.asarray(each, np.int32) for each in texts])
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        sequences = np.repeat(np.arange(len(texts), dtype=np.int32), lengths)
        memory = api.llama_get_memory(context)
        if memory:
            api.llama_memory_clear(memory, False)
        api.llama_set_n_threads(context, *self._threads.look())
        pooled: list[FloatArray] = []
        for start in range(0, len(token_ids), len(batch.tokens)):
            part = slice(start, start + len(batch.tokens))
            rows = batch.native.n_tokens = len(token_ids[part])
            batch.tokens[:rows], batch.positions[:rows] = token_ids[part], positions[part]
            batch.ids[:rows, 0] = sequences[part]
            with native.log.watch() as lines:
                status = api.llama_decode(context, batch.native)
                if status:
                    why = native.reason(lines)
                    raise EngineError(f"llama.cpp could not embed {rows} tokens (status {status}): {why}")
            if self.pooling == "none":
                found = [self._copy(api.llama_get_embeddings_ith(context, row)) for row in range(rows)]
                return np.split(np.stack(found), ends[:-1])
            while len(pooled) < len(texts) and ends[len(pooled)] <= start + rows:
                pooled.append(self._copy(api.llama_get_embeddings_seq(context, len(pooled))))
        return pooled

    def _copy(self, pointer: Any) -> FloatArray:
        if not pointer:
            raise EngineError("llama.cpp gave no vector for a text")
        vector = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.width,)).copy()
        if not np.isfinite(vector).all():
            raise EngineError("the model computes no finite vector for a text: its file may be damaged")
        return vector

    def close(self) -> None:
        self._finalizer()
        self._context = None

    def _open_context(self) -> Any:
        if self._context is None:
            raise ClosedError("the embedder was closed")
        return self._context


def _release(model: Any, context: Any, vocabulary: GgufVocabulary) -> None:
    vocabulary.invalidate()
    free_model(model, context)
