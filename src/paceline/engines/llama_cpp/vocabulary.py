"""The vocabulary inside a GGUF file."""

from __future__ import annotations

import ctypes
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final, TypeVar

import llama_cpp.llama_cpp as api
import numpy as np

from paceline.core.deep_stack import with_deep_stack
from paceline.core.errors import CapabilityError, ClosedError, InputError
from paceline.core.vocabulary import InfillTokens
from paceline.engines.llama_cpp.ends import find_end_ids
from paceline.engines.llama_cpp.tokenizing import (
    LONG,
    Mark,
    Marks,
    check_unknown,
    check_words,
    splits_by_regex,
)
from paceline.vocabularies.length import TokenReach
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
_IDS_AT_ONCE: Final = 1 << 15
"""Token ids that are made Python's at once: no other thread runs meanwhile, for about 0.5 ms."""
_WORD_START: Final = "\u2581"
"""What a space is to SentencePiece, which puts one before a text, too."""
_PADDING_NAME: Final = re.compile(rb"\[PAD\d+\]")


class GgufVocabulary:
    """Token ids of a loaded model. Valid until the engine it belongs to is closed.

    Any thread may use it. llama.cpp only reads a vocabulary, so any number of threads may at once. What has to be known
    is who is in llama.cpp when the model is to be freed: it is freed once nobody is. Whoever looks up a token waits for
    no text.
    """

    def __init__(self, model: Any) -> None:
        self._pointer = pointer = api.llama_model_get_vocab(model)
        self._kind = _KINDS.get(api.llama_vocab_type(pointer), "unknown")
        self._tokenizer = _read_metadata(model, b"tokenizer.ggml.model")
        # Without the first key, the tokenizer's name decides.
        self._splitter = _read_metadata(model, b"tokenizer.ggml.pre") or self._tokenizer
        self._deep = splits_by_regex(self._kind, self._splitter)
        self._size = int(api.llama_vocab_n_tokens(pointer))
        self._bytes: list[bytes | None] = [None] * self._size
        self._spellings: list[bytes | None] = [None] * self._size  # empty for padding, None if not read yet
        # A slice of the buffer is bytes, which its type does not say; ``raw`` would copy all of it, for every token.
        self._piece: Any = ctypes.create_string_buffer(64)
        # Reentrant, as an engine may be collected, and freed, in the middle of a look.
        self._looking = threading.RLock()
        self._using = threading.Condition(threading.RLock())
        self._users: Counter[int] = Counter()  # threads that read texts

    def invalidate(self) -> None:
        """Forget the native vocabulary, once nobody reads it; called when its model is freed."""
        with self._looking:
            self._pointer = None
        me = threading.get_ident()
        with self._using:
            self._using.wait_for(lambda: not self._users.keys() - {me})

    @contextmanager
    def _in_use(self) -> Iterator[Any]:
        """Give the native vocabulary, which is not freed within the block."""
        me = threading.get_ident()
        with self._using:
            pointer = self._open_pointer()
            self._users[me] += 1
        try:
            yield pointer
        finally:
            with self._using:
                self._users[me] -= 1
                if not self._users[me]:
                    del self._users[me]
                    self._using.notify_all()

    def _look(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function of llama.cpp that takes no time, with the vocabulary."""
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
        return self._size

    @cached_property
    def end_ids(self) -> frozenset[int]:
        return self._look(find_end_ids)

    @cached_property
    def text_end_ids(self) -> frozenset[int]:
        """End tokens that the file has as ordinary text: llama.cpp goes by spelling, such as that of ``</s>``."""
        text = api.LLAMA_TOKEN_ATTR_NORMAL | api.LLAMA_TOKEN_ATTR_USER_DEFINED
        return frozenset(token_id for token_id in self.end_ids if self._has(token_id, text))

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Tokens that stand for no text, the one for unknown text included."""
        return frozenset(filter(self._is_control, range(self._size)))

    @cached_property
    def infill_tokens(self) -> InfillTokens:
        """As llama.cpp finds them: by the file's keys, else by the usual names."""
        finders = (
            api.llama_vocab_fim_pre,
            api.llama_vocab_fim_suf,
            api.llama_vocab_fim_mid,
            api.llama_vocab_fim_rep,
            api.llama_vocab_fim_sep,
        )
        found = (int(self._look(finder)) for finder in finders)
        ends = (int(self._look(finder)) for finder in (api.llama_vocab_eot, api.llama_vocab_eos))
        end = next((token_id for token_id in ends if token_id in self.end_ids), None)
        fillers = InfillTokens(*(token_id if 0 <= token_id < self._size else None for token_id in found))
        return fillers._replace(end=end)

    def _is_control(self, token_id: int) -> bool:
        return self._has(token_id, api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_UNKNOWN)

    def _is_unknown(self, token_id: int) -> bool:
        return self._has(token_id, api.LLAMA_TOKEN_ATTR_UNKNOWN)

    def _has(self, token_id: int, attributes: int) -> bool:
        # Without a tokenizer llama.cpp ends the process.
        return self._kind != "none" and bool(self._look(api.llama_vocab_get_attr, token_id) & attributes)

    def _spelling_of_control(self, token_id: int) -> bytes:
        return self._read_piece(token_id, spell_control=True)

    @cached_property
    def _single_ids(self) -> dict[bytes, int]:
        # SentencePiece's byte tokens come last, as it uses the token of a character where there is one.
        token_ids = sorted(range(self._size), key=lambda token_id: self._has(token_id, api.LLAMA_TOKEN_ATTR_BYTE))
        return single_characters(token_ids, self.token_bytes, self.control_ids)

    @cached_property
    def _opening_ids(self) -> list[int]:
        """What the tokenizer puts before a text. What some tokenizers put after a text is left out.

        Files with ``add_eos_token`` have texts closed by an end token, and so have the tokenizers of encoders: a prompt
        that is closed has no answer.
        """
        return self._marks_around[0]

    @cached_property
    def _marks_around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind a text."""
        plain = self._encode("a", add_special=False, parse_special=False)
        opened = self._encode("a", add_special=True, parse_special=False)
        starts = range(len(opened) - len(plain) + 1)
        start = next((start for start in starts if opened[start : start + len(plain)] == plain), None)
        return ([], []) if start is None else (opened[:start], opened[start + len(plain) :])

    def encode_closed(self, text: str) -> list[int]:
        """Turn a text that nothing follows into token ids; control tokens that it spells are these."""
        before, behind = self._marks_around
        return [*before, *self._tokenize(text, parse_special=True), *behind]

    @cached_property
    def pair_marks(self) -> tuple[list[int], list[int], list[int]]:
        """What stands before, between and behind two texts of which one is ranked by the other, as in llama-server."""
        separator = self._look(api.llama_vocab_sep)
        end = self._look(api.llama_vocab_eos)
        ends = [end if end >= 0 else separator] if self._look(api.llama_vocab_get_add_eos) else []
        begins = [self._look(api.llama_vocab_bos)] if self._look(api.llama_vocab_get_add_bos) else []
        return begins, [*ends, *([separator] if self._look(api.llama_vocab_get_add_sep) else [])], ends

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Turn text into token ids. The tokens are those of llama.cpp, but a text is never closed with one.

        Raises ``CapabilityError`` where the file has no tokenizer, and ``InputError`` where the text is not valid
        Unicode, too long for llama.cpp, or spells a control token with no other tokens to spell it.
        """
        token_ids = self._tokenize(text, parse_special=parse_special)
        if not parse_special:
            distinct: set[int] = set()
            for start in range(0, len(token_ids), _IDS_AT_ONCE):
                distinct.update(token_ids[start : start + _IDS_AT_ONCE])
            control_ids = list(filter(self._is_control, distinct))
            if control_ids:
                unknown_ids = list(filter(self._is_unknown, control_ids))
                token_ids = spell_out(
                    token_ids, text, control_ids, unknown_ids, self._spelling_of_control, lambda: self._single_ids
                )
        return [*self._opening_ids, *token_ids] if add_special else token_ids

    def _tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Turn text into token ids as llama.cpp does, in pieces where it cannot take a text of this length."""
        if len(text) <= LONG:
            return self._encode(text, add_special=False, parse_special=parse_special)
        token_ids: list[int] = []
        for part in self._marks[parse_special].split(text):
            if isinstance(part, int):
                token_ids.append(part)
            else:
                # Where none is spelled, llama.cpp need not look for each of them.
                token_ids += self._encode(part[0], add_special=False, parse_special=parse_special and part[1])
        return token_ids

    @cached_property
    def _marks(self) -> tuple[Marks, Marks]:
        """The marks in texts in which control tokens are not read, and in which they are."""
        control = api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_UNKNOWN
        return self._collect_marks(api.LLAMA_TOKEN_ATTR_USER_DEFINED, control), self._collect_marks(
            api.LLAMA_TOKEN_ATTR_USER_DEFINED | control, 0
        )

    def _collect_marks(self, attributes: int, others: int) -> Marks:
        found: dict[str, Mark | None] = {}
        for token_id in range(self._size):
            told = int(self._look(api.llama_vocab_get_attr, token_id))
            text = ""
            if told & attributes and not told & others:
                # No text has what is not Unicode.
                text = (self._look(api.llama_vocab_get_text, token_id) or b"").decode("utf-8", "surrogateescape")
            if text:
                mark = Mark(
                    token_id, bool(told & api.LLAMA_TOKEN_ATTR_LSTRIP), bool(told & api.LLAMA_TOKEN_ATTR_RSTRIP)
                )
                found[text] = None if text in found else mark
        return Marks(found)

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
        if len(text) <= LONG:
            return self._call(encoded, add_special, parse_special)
        if self._kind == "spm":
            check_unknown(text, len(encoded), self._has_own_token)
        elif self._kind == "bpe":
            check_words(text, self._splitter)
        if not self._deep:
            return self._call(encoded, add_special, parse_special)
        return with_deep_stack(lambda: self._call(encoded, add_special, parse_special))

    def _has_own_token(self, character: str) -> bool:
        # SentencePiece writes spaces as this one.
        token_id = self._single_ids.get(character.replace("\u2581", " ").encode())
        return token_id is not None and not self._has(token_id, api.LLAMA_TOKEN_ATTR_BYTE)

    def _call(self, encoded: bytes, add_special: bool, parse_special: bool) -> list[int]:
        capacity = len(encoded) + 8  # one token a byte, and the special ones
        while True:
            # Not from ctypes, which would fill it with zeros while no other thread runs.
            ids = np.empty(capacity, np.int32)
            buffer = (ctypes.c_int32 * capacity).from_buffer(ids.data)
            with self._in_use() as pointer:
                count = api.llama_tokenize(pointer, encoded, len(encoded), buffer, capacity, add_special, parse_special)
            if count >= 0:
                token_ids: list[int] = []
                for start in range(0, count, _IDS_AT_ONCE):
                    token_ids += ids[start : min(start + _IDS_AT_ONCE, count)].tolist()
                return token_ids
            if count == _INT32_MIN:
                raise InputError(f"a text of {len(encoded)} bytes has more tokens than llama.cpp can count; shorten it")
            capacity = -count

    def _check_spelled(self, text: str, *, parse_special: bool) -> None:
        """Raise ``InputError`` for what a SentencePiece vocabulary cannot spell: llama.cpp ends the process over it."""
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
        return frozenset(self._look(api.llama_vocab_get_text, token_id) for token_id in range(self._size))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; raise ``ValueError`` if there is no such token."""
        self._check(token_id)
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._read_piece(token_id, spell_control=False)
        return known

    def token_spelling(self, token_id: int) -> bytes | None:
        """Return a token's bytes, or the text of a control token.

        ``None`` is padding. In a file without a tokenizer all spellings are empty.
        """
        self._check(token_id)
        if self._kind == "none":
            return b""
        known = self._spellings[token_id]
        if known is None:
            known = self._spellings[token_id] = self._read_spelling(token_id)
        return known or None

    def fewest_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least; 0 where that is not known.

        llama.cpp rewrites texts for WordPiece and unigram vocabularies, leaves blanks out for the tokenizer of that
        name, and a byte-level one without tokens for all bytes leaves out what it does not know: there, bytes tell
        nothing.
        """
        return 0 if self._reach is None else self._reach.fewest_tokens(text)

    @cached_property
    def _reach(self) -> TokenReach | None:
        # All bytes that UTF-8 has.
        singles = (bytes([byte]) for byte in (*range(0xC0), *range(0xC2, 0xF5)))
        if self._kind not in ("bpe", "spm") or self._tokenizer == "whitespace":
            return None
        if any(single not in self._single_ids for single in singles):
            return None
        spellings = (self.token_spelling(token_id) or b"" for token_id in range(self._size))
        lower = "\u2581".encode()
        if (
            b"".join(map(self.token_bytes, self._encode("a\u2581", add_special=False, parse_special=False)))[-3:]
            != lower
        ):
            # Either is read as a space.
            spellings = (spelling.replace(b" ", lower) for spelling in spellings)
        strips = api.LLAMA_TOKEN_ATTR_LSTRIP | api.LLAMA_TOKEN_ATTR_RSTRIP
        return TokenReach.of(spellings, keeps_blanks=not any(self._has(each, strips) for each in range(self._size)))

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self._size:
            raise ValueError(f"token {token_id} is not in a vocabulary of {self._size}")

    def _read_spelling(self, token_id: int) -> bytes:
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


def _read_metadata(model: Any, key: bytes) -> str:
    buffer = ctypes.create_string_buffer(64)
    if api.llama_model_meta_val_str(model, key, buffer, len(buffer)) < 0:
        return ""
    return buffer.value.decode("utf-8", "replace")
