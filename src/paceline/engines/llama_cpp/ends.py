"""The tokens at which llama.cpp ends an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as api

from paceline.engines.llama_cpp import native


def find_end_ids(vocabulary: Any) -> frozenset[int]:
    """Return the end-of-generation tokens of a ``llama_vocab *``.

    The tokens that a file names as end of text or of turn are among them, but where llama.cpp knows better: gpt-oss
    closes every message by ``<|end|>``, and the answer by ``<|return|>``.
    """
    size = int(api.llama_vocab_n_tokens(vocabulary))
    return frozenset(token_id for token_id in range(size) if api.llama_vocab_is_eog(vocabulary, token_id))


def read_end_ids(path: Path) -> frozenset[int]:
    """Return the end-of-generation tokens of a GGUF file.

    These are the tokens that the file names for it, and those that llama.cpp knows by their text, such as
    ``<|im_end|>``. llama.cpp is asked, as its list grows with its versions and has exceptions. Weights are not read and
    need not be there.
    """
    model = native.load_without_weights(path)
    try:
        return find_end_ids(api.llama_model_get_vocab(model))
    finally:
        api.llama_model_free(model)
