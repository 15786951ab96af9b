"""SentencePiece's scores and BPE's merges: two ways to say which pair of pieces is joined first.

llama.cpp joins the neighbours whose joined text has the best score (``llm_tokenizer_spm_session`` in
``llama-vocab.cpp``), ``tokenizers`` those whose pair comes first in a list. Every way to split a token into two tokens
is a pair; all pairs of one token stand together in the list, and tokens stand in the order of their scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Merge = tuple[str, str]


def iter_splits(token: str, vocabulary: Mapping[str, int]) -> list[Merge]:
    """Return every way to make ``token`` of two tokens, those with the longest first part last."""
    return [
        (token[:cut], token[cut:])
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


def scores_to_merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[Merge]:
    """Return the merges of a SentencePiece vocabulary, first merge first.

    Of the scores, by id, the best is the highest.
    """
    ordered = sorted(vocabulary.items(), key=lambda item: (-scores[item[1]], item[1]))
    return [merge for token, _ in ordered for merge in reversed(iter_splits(token, vocabulary))]


def merges_to_scores(merges: Iterable[Merge], vocabulary: Mapping[str, int], name: str) -> list[float]:
    """Return scores, by id up to the largest, that join in the order of ``merges``, of which the first is made first.

    The vocabulary is one of BPE with byte fallback. Raises ``InputError`` where no scores give this order: the pairs of
    one token are apart, or some are missing.
    """
    order: dict[str, int] = {}
    pairs: dict[str, set[Merge]] = {}
    last = None
    for left, right in merges:
        token = left + right
        if token not in vocabulary:
            raise InputError(f"{name} merges {left!r} and {right!r} into a token that it does not have")
        if token in order and token != last:
            raise InputError(f"{name} has the merges into {token!r} apart, which SentencePiece scores cannot say")
        order.setdefault(token, len(order))
        pairs.setdefault(token, set()).add((left, right))
        last = token
    for token in vocabulary:
        missing = set(iter_splits(token, vocabulary)) - pairs.get(token, set())
        if missing:
            left, right = min(missing)
            raise InputError(f"{name} does not merge {left!r} and {right!r}, which SentencePiece scores cannot say")
    scores = [-float(len(order))] * (max(vocabulary.values(), default=-1) + 1)
    for token, rank in order.items():
        scores[vocabulary[token]] = -float(rank)
    return scores
