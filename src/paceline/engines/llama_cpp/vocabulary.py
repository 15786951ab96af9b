"""The vocabulary inside a GGUF file."""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from typing import Any, Final, TypeVar

import llama_cpp.llama_cpp as api

from paceline.core.errors import CapabilityError, ClosedError, InputError
from paceline.engines.llama_cpp.ends import end_ids_of
from paceline.vocabularies.spelling import single_characters, spell_out

_KINDS: Final = {
    api.LLAMA_VOCAB_TYPE_NONE: "none",
    api.LLAMA_VOCAB_TYPE_SPM: "spm",
    api.LLAMA_VOCAB_TYPE_BPE: "bpe",
    api.LLAMA_VOCAB_TYPE_WPM: "wpm",
    api.LLAMA_VOCAB_TYPE_UGM: "ugm",
    api.LLAMA_VOCAB_TYPE_RWKV: "rwkv",
    api.LLAMA_VOCAB_TYPE_PLAMO2: "plamo2",
}
_T = TypeVar("_T")

_INT32_MIN: Final = -(2**31)
"""Count by which llama.cpp says that a text has too many tokens."""
_NUM_TOKENIZING: Final = 8
"""Texts that are tokenized at once; others wait."""
_IDS_AT_ONCE: Final = 1 << 15
"""Token ids that are made Python's at once: no other thread runs meanwhile, for about 0.5 ms."""
_WORD_START: Final = "\u2581"
"""What a space is to SentencePiece, which puts one before a text, too."""
_PADDING_NAME: Final = re.compile(rb"\[PAD\d+\]")


class GgufVocabulary:
    """Token ids of a loaded model. Valid until the engine it belongs to is closed. Any thread may use it.

    llama.cpp only reads a vocabulary, so several threads may at once. What they need locks for is the end: the model is
    freed once nobody is in llama.cpp any more. Long texts have locks of their own, and whoever looks up a token waits
    for none of them.

    Args:
        pointer: ``llama_vocab *`` of the model.
    """

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        self._kind = _KINDS.get(api.llama_vocab_type(pointer), "unknown")
        self._size = int(api.llama_vocab_n_tokens(pointer))
        self._bytes: list[bytes | None] = [None] * self._size
        self._spellings: list[bytes | None] = [None] * self._size  # empty for padding, None if not read yet
        # A slice of it is bytes, which its type does not say; ``raw`` would copy all of it, for every token.
        self._piece: Any = ctypes.create_string_buffer(64)
        # Reentrant, as an engine may be collected, and freed, in the middle of a look.
        self._looking = threading.RLock()
        self._tokenizing = tuple(threading.RLock() for _ in range(_NUM_TOKENIZING))
        self._turns = itertools.count()

    def invalidate(self) -> None:
        """Forget the native vocabulary, once nobody reads it; called when its model is freed."""
        with ExitStack() as nobody:
            for lock in (self._looking, *self._tokenizing):
                nobody.enter_context(lock)
            self._pointer = None

    def _look(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Return what a function of llama.cpp that takes no time says of the vocabulary."""
        with self._looking:
            return function(self._open_pointer(), *arguments)

    def _open_pointer(self) -> Any:
        if self._pointer is None:
            raise ClosedError("the vocabulary belongs to an engine that was closed")
        return self._pointer

    @property
    def kind(self) -> str:
        """``"bpe"``, ``"spm"``, ``"wpm"``, ``"ugm"``, ``"rwkv"``, ``"plamo2"``, or ``"none"`` without a tokenizer."""
        return self._kind

    @property
    def size(self) -> int:
        """Number of token ids, which is the length of a row of logits."""
        return self._size

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """End-of-generation tokens: those at which llama.cpp ends an answer."""
        return self._look(end_ids_of)

    @cached_property
    def text_end_ids(self) -> frozenset[int]:
        """End tokens that the file has as ordinary text: llama.cpp goes by spelling, such as that of ``</s>``."""
        text = api.LLAMA_TOKEN_ATTR_NORMAL | api.LLAMA_TOKEN_ATTR_USER_DEFINED
        return frozenset(token_id for token_id in self.end_ids if self._has(token_id, text))

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Tokens that stand for no text, that for what the vocabulary does not know among them."""
        return frozenset(filter(self._is_control, range(self._size)))

    def _is_control(self, token_id: int) -> bool:
        return self._has(token_id, api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_UNKNOWN)

    def _is_unknown(self, token_id: int) -> bool:
        return self._has(token_id, api.LLAMA_TOKEN_ATTR_UNKNOWN)

    def _has(self, token_id: int, attributes: int) -> bool:
        # Without a tokenizer llama.cpp ends the process at the question.
        return self._kind != "none" and bool(self._look(api.llama_vocab_get_attr, token_id) & attributes)

    def _spelling_of_control(self, token_id: int) -> bytes:
        """Return the text of a control token, even one that is padding by its name."""
        return self._read_piece(token_id, spell_control=True)

    @cached_property
    def _single_ids(self) -> dict[bytes, int]:
        # SentencePiece's tokens of bytes come last, as it uses those of characters where there are any.
        token_ids = sorted(range(self._size), key=lambda token_id: self._has(token_id, api.LLAMA_TOKEN_ATTR_BYTE))
        return single_characters(token_ids, self.token_bytes, self.control_ids)

    @cached_property
    def strips_leading_space(self) -> bool:
        """Whether the tokenizer puts a space before a text, as SentencePiece models do.

        The bytes of such a text's tokens then start with a space the text does not have: take it off when turning a
        *whole* text back, and leave it when the tokens continue another text, as generated ones do.
        """
        first = self.tokenize("a", add_special=False)
        return bool(first) and b"".join(map(self.token_bytes, first)).startswith(b" ")

    @cached_property
    def _opening_ids(self) -> list[int]:
        """What the tokenizer puts before a text. What some tokenizers put after a text is left out.

        Files with ``add_eos_token`` have texts closed by an end token, and so have the tokenizers of encoders: a
        prompt that is closed has no answer.
        """
        plain = self._encode("a", add_special=False, parse_special=False)
        opened = self._encode("a", add_special=True, parse_special=False)
        starts = range(len(opened) - len(plain) + 1)
        return opened[: next((start for start in starts if opened[start : start + len(plain)] == plain), 0)]

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Turn text into token ids.

        Args:
            text: any text; it may be empty and may contain NUL characters.
            add_special: put the tokens before the text that the model wants there (such as a begin token), if any; the
                text is never closed with one.
            parse_special: read the spelling of control tokens (such as ``<|im_end|>``) as these tokens. Only for text
                that the program wrote itself, such as a chat template. Without, no text makes one of them.

        Raises:
            CapabilityError: the file has no tokenizer.
            InputError: the text is not valid Unicode, or too long for llama.cpp; or it spells a control token, and
                there are no other tokens to spell that with.
        """
        token_ids = self._encode(text, add_special=False, parse_special=parse_special)
        if not parse_special:
            control_ids = list(filter(self._is_control, set(token_ids)))
            if control_ids:
                unknown_ids = list(filter(self._is_unknown, control_ids))
                token_ids = spell_out(
                    token_ids, text, control_ids, unknown_ids, self._spelling_of_control, lambda: self._single_ids
                )
        return [*self._opening_ids, *token_ids] if add_special else token_ids

    def _encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Turn text into token ids as llama.cpp does, which may close the text."""
        self._open_pointer()
        if self._kind == "none":
            raise CapabilityError("this GGUF file has no tokenizer; pass token ids instead of text")
        try:
            encoded = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has half a surrogate pair at character {error.start}; send valid Unicode"
            ) from None
        if self._kind == "spm":
            self._check_spelled(text, parse_special=parse_special)
        capacity = len(encoded) + 8  # one token a byte, and the special ones
        while True:
            buffer = (ctypes.c_int32 * capacity)()
            with self._tokenizing[next(self._turns) % _NUM_TOKENIZING]:
                count = api.llama_tokenize(
                    self._open_pointer(), encoded, len(encoded), buffer, capacity, add_special, parse_special
                )
            if count >= 0:
                token_ids: list[int] = []
                for start in range(0, count, _IDS_AT_ONCE):
                    token_ids += buffer[start : min(start + _IDS_AT_ONCE, count)]
                return token_ids
            if count == _INT32_MIN:
                raise InputError(f"a text of {len(encoded)} bytes has more tokens than llama.cpp can count; shorten it")
            capacity = -count

    def _check_spelled(self, text: str, *, parse_special: bool) -> None:
        """Refuse what a SentencePiece vocabulary cannot spell: llama.cpp ends the process over it.

        Raises:
            InputError: a character is no token, and one of its bytes is none.
        """
        if self._spells_all_bytes:
            return
        whole = api.LLAMA_TOKEN_ATTR_USER_DEFINED
        if parse_special:
            whole |= api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_UNKNOWN
        whole_ids = (token_id for token_id in range(self._size) if self._has(token_id, whole))
        for spelling in sorted(map(self._spelling_of_control, whole_ids), key=len, reverse=True):
            text = text.replace(spelling.decode(errors="replace") or " ", " ")
        for character in sorted({*text.replace(" ", _WORD_START), _WORD_START}):
            encoded = character.encode()
            if encoded not in self._texts and not all(
                b"<0x%02X>" % byte in self._texts or bytes([byte]) in self._texts for byte in encoded
            ):
                raise InputError(
                    f"the model's vocabulary has no token for {character!r} nor for its bytes: leave it out of the text"
                )

    @cached_property
    def _spells_all_bytes(self) -> bool:
        usual = range(3, 3 + 256)  # where nearly all models have them
        if self._size >= usual.stop and all(
            self._look(api.llama_vocab_get_text, token_id) == b"<0x%02X>" % byte for byte, token_id in enumerate(usual)
        ):
            return True
        return all(b"<0x%02X>" % byte in self._texts for byte in range(256))

    @cached_property
    def _texts(self) -> frozenset[bytes]:
        """What the file has for the tokens."""
        return frozenset(self._look(api.llama_vocab_get_text, token_id) for token_id in range(self._size))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; empty for control tokens.

        Raises:
            ValueError: there is no such token.
        """
        self._check(token_id)
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._read_piece(token_id, spell_control=False)
        return known

    def token_spelling(self, token_id: int) -> bytes | None:
        """Return what a token is: its bytes, or the text of a control token.

        ``None`` for padding; empty in a file without a tokenizer.

        Raises:
            ValueError: there is no such token.
        """
        self._check(token_id)
        if self._kind == "none":
            return b""
        known = self._spellings[token_id]
        if known is None:
            known = self._spellings[token_id] = self._read_spelling(token_id)
        return known or None

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self._size:
            raise ValueError(f"token {token_id} is not in a vocabulary of {self._size}")

    def _read_spelling(self, token_id: int) -> bytes:
        """Return the spelling of a token, empty if it is padding."""
        # llama.cpp spells nothing for unused tokens. Older converters call padding user-defined or unknown instead.
        spelling = self._read_piece(token_id, spell_control=True)
        if _PADDING_NAME.fullmatch(spelling):
            return spelling if self._has(token_id, api.LLAMA_TOKEN_ATTR_NORMAL) else b""
        return spelling

    def _read_piece(self, token_id: int, *, spell_control: bool) -> bytes:
        with self._looking:
            pointer = self._open_pointer()
            if self._kind == "none":
                return b""
            length = api.llama_token_to_piece(pointer, token_id, self._piece, len(self._piece), 0, spell_control)
            if length < 0:
                self._piece = ctypes.create_string_buffer(-length)
                length = api.llama_token_to_piece(pointer, token_id, self._piece, len(self._piece), 0, spell_control)
            piece: bytes = self._piece[:length]
            return piece
