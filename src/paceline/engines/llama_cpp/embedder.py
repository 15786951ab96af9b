"""Vectors of texts by llama.cpp: a model and a context that keeps nothing from one pass to the next."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import llama_cpp.llama_cpp as api
import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, ClosedError, EngineError, InputError
from paceline.engines.base import Pooling
from paceline.engines.context_length import choose_context_length
from paceline.engines.llama_cpp import native
from paceline.engines.llama_cpp.loading import free_model, read_model
from paceline.engines.llama_cpp.remarks import of_context, warn
from paceline.engines.llama_cpp.vocabulary import GgufVocabulary
from paceline.engines.options import ModelOptions
from paceline.engines.threads import PassThreads

_POOLINGS: Final[dict[Pooling, int]] = {
    "none": api.LLAMA_POOLING_TYPE_NONE,
    "mean": api.LLAMA_POOLING_TYPE_MEAN,
    "cls": api.LLAMA_POOLING_TYPE_CLS,
    "last": api.LLAMA_POOLING_TYPE_LAST,
    "rank": api.LLAMA_POOLING_TYPE_RANK,
}

_MAX_TEXTS: Final = 64
"""Most texts of a pass: each takes a sequence id."""


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
        file = native.check_model_file(path)
        native.log.verbose |= options.verbose
        native.initialize()
        native.check_first_load(file)
        self._context: Any = None
        self._model, self._keep_alive, remarks = read_model(options)
        try:
            if api.llama_model_has_encoder(self._model) and api.llama_model_has_decoder(self._model):
                raise CapabilityError(f"{path} turns a text into another one: no vector stands for it")
            self.vocabulary = GgufVocabulary(self._model)
            self.context_length = choose_context_length(
                options.context_length,
                api.llama_model_n_ctx_train(self._model) or None,
                model=path.name,
                may_shrink=options.context_may_shrink,
            )
            # How a query and a document are put before a reranker; empty where control tokens part them.
            self._pair_template = (api.llama_model_chat_template(self._model, b"rerank") or b"").decode(
                "utf-8", "replace"
            )
            self._threads = PassThreads(options.threads, options.threads_batch)
            self._context, more = self._create_context(options, pooling)
            names = {number: name for name, number in _POOLINGS.items()}
            self.pooling: Pooling = names[int(api.llama_pooling_type(self._context))]
            is_rank = self.pooling == "rank"
            self.width = int((api.llama_model_n_cls_out if is_rank else api.llama_model_n_embd_out)(self._model))
            if is_rank and not any(name.startswith("cls") for name in file.header.tensors):
                raise CapabilityError(f"{path} was not made to rank documents: give a reranker, or ask for its vectors")
            warn(path, [*remarks, *more])
        except BaseException:
            self._free()
            raise
        self._batch = api.llama_batch_init(self.context_length, 0, 1)

    def _create_context(self, options: ModelOptions, pooling: Pooling | None) -> tuple[Any, list[str]]:
        parameters = api.llama_context_default_params()
        # A text that is not read from left to right has to be in one pass.
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = self.context_length
        parameters.n_seq_max = self.max_texts = min(self.context_length, _MAX_TEXTS)
        parameters.kv_unified = True
        parameters.embeddings = True
        parameters.pooling_type = api.LLAMA_POOLING_TYPE_UNSPECIFIED if pooling is None else _POOLINGS[pooling]
        parameters.n_threads, parameters.n_threads_batch = self._threads.most
        if options.flash_attention is not None:
            enabled, disabled = api.LLAMA_FLASH_ATTN_TYPE_ENABLED, api.LLAMA_FLASH_ATTN_TYPE_DISABLED
            parameters.flash_attn_type = enabled if options.flash_attention else disabled
        with native.log.watch() as lines:
            context = api.llama_init_from_model(self._model, parameters)
            if not context:
                raise InputError(
                    f"llama.cpp cannot embed by {options.path}: {native.reason(lines)}; ask for a shorter context, or "
                    "for another pooling"
                )
            return context, of_context(lines)

    def read_text(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that open and close it; names of control tokens are these."""
        return self.vocabulary.encode_closed(text)

    def read_pair(self, query: str, document: str) -> list[int]:
        """Return the tokens of a query and a document, as the model wants to see them."""
        if self._pair_template:
            text = self._pair_template.replace("{query}", query).replace("{document}", document)
            return self.vocabulary.tokenize(text, add_special=False, parse_special=True)
        first, second = (self.vocabulary.tokenize(text, add_special=False) for text in (query, document))
        opening, between, closing = self.vocabulary.pair_marks
        return [*opening, *first, *between, *second, *closing]

    def forward(self, texts: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Return what a pass makes of texts: of each ``[width]``, or ``[tokens, width]`` where nothing is pooled."""
        context = self._open_context()
        num_rows = sum(map(len, texts))
        assert 0 < len(texts) <= self.max_texts
        assert all(texts)
        assert num_rows <= self.context_length
        batch = self._batch
        batch.n_tokens = num_rows
        row = 0
        for sequence, token_ids in enumerate(texts):
            for position, token_id in enumerate(token_ids):
                batch.token[row], batch.pos[row], batch.logits[row] = token_id, position, True
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                row += 1
        memory = api.llama_get_memory(context)
        if memory:
            api.llama_memory_clear(memory, False)
        api.llama_set_n_threads(context, *self._threads.look())
        with native.log.watch() as lines:
            status = api.llama_decode(context, batch)
            if status:
                why = native.reason(lines)
                raise EngineError(f"llama.cpp could not embed {num_rows} tokens (status {status}): {why}")
        if self.pooling != "none":
            return [self._copy(api.llama_get_embeddings_seq(context, place)) for place in range(len(texts))]
        rows = np.stack([self._copy(api.llama_get_embeddings_ith(context, place)) for place in range(num_rows)])
        ends = np.cumsum([len(token_ids) for token_ids in texts])
        return np.split(rows, ends[:-1])

    def _copy(self, pointer: Any) -> FloatArray:
        if not pointer:
            raise EngineError("llama.cpp gave no vector for a text")
        vector = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.width,)).copy()
        if not np.isfinite(vector).all():
            raise EngineError("the model computes no finite vector for a text: its file may be damaged")
        return vector

    def close(self) -> None:
        """Free native memory. Idempotent."""
        if self._model is not None:
            api.llama_batch_free(self._batch)
            self._free()

    def _free(self) -> None:
        if hasattr(self, "vocabulary"):
            self.vocabulary.invalidate()
        model, context, self._model, self._context = self._model, self._context, None, None
        free_model(model, context)

    def _open_context(self) -> Any:
        if self._context is None:
            raise ClosedError("the embedder was closed")
        return self._context
