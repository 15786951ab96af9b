"""Whether llama.cpp's own programs take a draft model for a target.

They compare what is not compared here: the kind of tokenizer, what is put around a text, and the spelling of every id
but the first few. Source: ``common_speculative_are_compatible`` in ``common/speculative.cpp`` of the llama.cpp that
llama-cpp-python brings along.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import llama_cpp.llama_cpp as api

from paceline.engines.llama_cpp import native

_MAX_IDS_MORE: Final = 128
"""Ids that one of the vocabularies may have more."""
_FIRST_COMPARED: Final = 5
"""First id whose spelling is compared."""


def explain_refusal(target: Path, draft: Path) -> str | None:
    """Say why llama.cpp's programs refuse a draft.

    ``None`` if they take it. Both are GGUF files; no weights are read.
    """
    with ExitStack() as stack:
        vocabularies = []
        for path in (target, draft):
            model = native.load_without_weights(path)
            stack.callback(api.llama_model_free, model)
            vocabularies.append(api.llama_model_get_vocab(model))
        return compare(*vocabularies)


def compare(target: Any, draft: Any) -> str | None:
    """As :func:`explain_refusal`, of two ``llama_vocab *``."""
    if api.llama_vocab_type(target) != api.llama_vocab_type(draft):
        return "the tokenizers are of two kinds"
    for what, adds, token in (
        ("begins", api.llama_vocab_get_add_bos, api.llama_vocab_bos),
        ("ends", api.llama_vocab_get_add_eos, api.llama_vocab_eos),
    ):
        if adds(target) != adds(draft):
            one, other = ("target", "draft") if adds(target) else ("draft", "target")
            return f"the {one} {what} every text with a token of its own, and the {other} does not"
        if adds(target) and token(target) != token(draft):
            return f"the token that {what} a text is {token(target)} to the target and {token(draft)} to the draft"
    sizes = api.llama_vocab_n_tokens(target), api.llama_vocab_n_tokens(draft)
    if abs(sizes[0] - sizes[1]) > _MAX_IDS_MORE:
        return f"the target has {sizes[0]} ids and the draft {sizes[1]}, and {_MAX_IDS_MORE} more are the most"
    for token_id in range(_FIRST_COMPARED, min(sizes)):
        if api.llama_vocab_get_text(target, token_id) != api.llama_vocab_get_text(draft, token_id):
            return f"id {token_id} is spelled otherwise, and every id from {_FIRST_COMPARED} on is compared"
    return None
