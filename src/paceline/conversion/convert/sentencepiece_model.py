"""``tokenizer.model``, SentencePiece's own file: a protocol buffer with the pieces and how texts are normalised.

Only what a conversion needs is read, so neither the sentencepiece nor the protobuf package is. Numbers of fields:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
