"""Whether a draft model speaks its target's tokens, and if not, in what they differ."""

from __future__ import annotations

from paceline.core.errors import VocabularyMismatchError
from paceline.engines.base import Vocabulary

MAX_PADDING = 128
"""Most ids by which two sizes of one vocabulary differ; model families pad theirs differently (llama.cpp allows it)."""


def check_vocabularies(target: Vocabulary, draft: Vocabulary) -> None:
    """Raise unless both vocabularies give their common ids the same meaning.

    Which tokens end an answer may differ, as between a base model and its instructed sibling: the target decides.

    Raises:
        VocabularyMismatchError: they differ in type, size, or a token; the message says where.
    """
    if target.kind != draft.kind:
        raise _mismatch(f"the target's tokenizer is {target.kind}, the draft's {draft.kind}")
    if abs(target.size - draft.size) > MAX_PADDING:
        raise _mismatch(f"the target has {target.size} tokens, the draft {draft.size}")
    for token_id in range(min(target.size, draft.size)):
        ours, theirs = target.token_bytes(token_id), draft.token_bytes(token_id)
        if ours != theirs:
            raise _mismatch(f"token {token_id} is {_show(ours)} to the target and {_show(theirs)} to the draft")


def _mismatch(difference: str) -> VocabularyMismatchError:
    return VocabularyMismatchError(
        f"the draft model's vocabulary differs from the target's: {difference}; "
        "choose a draft of the same family, or draft without a model (--drafters suffix)"
    )


def _show(token: bytes) -> str:
    return repr(token.decode("utf-8", "backslashreplace"))
