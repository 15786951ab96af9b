"""``tokenizer.model``, SentencePiece's own file: a protocol buffer with the pieces and how texts are normalised.

Only what a conversion needs is read, so neither the sentencepiece nor the protobuf package is. Numbers of fields:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from gguf import TokenType

from paceline.core.errors import InputError, ModelFileError
from paceline.models.files import check_is_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _SPACE_AS_SUFFIX, _UNKNOWN_ID, _BOS_ID, _EOS_ID = 3, 24, 40, 41, 42
_RULES, _SPACE_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5
_BPE: Final = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class SentencePieceModel(NamedTuple):
    """The content of a ``tokenizer.model`` of type BPE."""

    pieces: list[tuple[str, float, TokenType]]
    """By id: text, score, type."""
    unknown: int
    bos: int
    """-1 where there is none, as in the file."""
    eos: int
    """-1 where there is none, as in the file."""
    add_space_prefix: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a ``tokenizer.model``.

    Raises ``InputError`` for a type or a normalization that llama.cpp's ``llama`` tokenizer has not.
    """
    try:
        check_is_file(path)
        data = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    trainer: dict[int, Any] = {_MODEL_TYPE: 1, _UNKNOWN_ID: 0, _BOS_ID: 1, _EOS_ID: 2}
    normalizer: dict[int, Any] = {_SPACE_PREFIX: 1, _REMOVE_SPACES: 1, _ESCAPE_SPACES: 1}
    pieces = []
    try:
        for number, value in _fields(data):
            if number == _PIECES:
                piece = {_SCORE: 0.0, _TYPE: 1, **dict(_fields(value))}
                pieces.append((piece[_PIECE].decode(), float(piece[_SCORE]), TokenType(piece[_TYPE])))
            elif number == _TRAINER:
                trainer.update(_fields(value))
            elif number == _NORMALIZER:
                normalizer.update(_fields(value))
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error):
        raise ModelFileError(f"{path} is not a valid SentencePiece model; fetch it again") from None
    if not pieces:
        raise ModelFileError(f"{path} has no pieces; fetch it again")
    if trainer[_MODEL_TYPE] != _BPE:
        raise InputError(
            f"{path} is a SentencePiece model of type {trainer[_MODEL_TYPE]}; BPE, type 2, can be converted"
        )
    if (
        normalizer.get(_RULES)
        or normalizer[_REMOVE_SPACES]
        or not normalizer[_ESCAPE_SPACES]
        or trainer.get(_SPACE_AS_SUFFIX)
    ):
        raise InputError(
            f"{path} normalizes texts, which llama.cpp does not; a tokenizer that does cannot be converted"
        )
    unknown, bos, eos = (_signed(trainer[key]) for key in (_UNKNOWN_ID, _BOS_ID, _EOS_ID))
    return SentencePieceModel(pieces, unknown, bos, eos, bool(normalizer[_SPACE_PREFIX]))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message: an integer, a float, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        length = {_FIXED32: 4, _FIXED64: 8}.get(wire, 0)
        if wire == _BYTES:
            length, at = _varint(data, at)
        if (wire not in (_BYTES, _FIXED32, _FIXED64)) or at + length > len(data):
            raise ValueError("not a field")
        part = data[at : at + length]
        at += length
        yield number, struct.unpack("<f", part)[0] if wire == _FIXED32 else part


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# --- scores and merges ------------------------------------------------------------------------------------------------
#
# Two ways to say which pair of pieces is joined first. llama.cpp joins the neighbours whose joined text has the best
# score (``llm_tokenizer_spm_session`` in ``llama-vocab.cpp``), ``tokenizers`` those whose pair comes first in a list.
# Every way to split a token into two tokens is a pair; all pairs of one token stand together in the list, and tokens
# stand in the order of their scores.

Merge: TypeAlias = tuple[str, str]


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
