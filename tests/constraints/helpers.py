"""Small vocabularies to keep answers by, and texts through a constraint."""

from __future__ import annotations

import numpy as np

from paceline.constraints import ConstraintCompiler, Source
from paceline.core.constraint import Constraint
from paceline.core.vocabulary import Vocabulary
from paceline.engines.scripted import ScriptedVocabulary

END = 256


def byte_vocabulary() -> ScriptedVocabulary:
    """Return a vocabulary of all bytes and an end."""
    return ScriptedVocabulary([*(bytes([byte]) for byte in range(256)), b"<end>"], [END])


BYTES = byte_vocabulary()


def start_of(source: Source, vocabulary: Vocabulary = BYTES) -> Constraint:
    return ConstraintCompiler(vocabulary).compile(source)


def accepts(source: Source | Constraint, text: str) -> bool:
    """Return whether a text is a whole answer, by every way a constraint has to say so.

    Args:
        source: for a vocabulary of bytes.
        text: the text.
    """
    state = source.fork() if hasattr(source, "fork") else start_of(source)
    token_ids = [*text.encode(), END]
    allowed = state.allows(token_ids)
    for i, token_id in enumerate(token_ids):
        mask = state.mask()
        assert mask[token_id] == (i < allowed)
        if not mask[token_id]:
            return False
        state.advance(token_id)
    assert allowed == len(token_ids)
    return True


def allowed_texts(state: Constraint, vocabulary: Vocabulary) -> set[bytes]:
    """Return what the tokens that may follow spell."""
    return {vocabulary.token_spelling(int(token_id)) or b"" for token_id in np.flatnonzero(state.mask())}
