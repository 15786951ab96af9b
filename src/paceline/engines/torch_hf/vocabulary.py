"""A transformers tokenizer as the engine contract wants it: token ids and the exact bytes each one adds."""

from __future__ import annotations

import copy
import json
import re
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from paceline.core.errors import CapabilityError, InputError
from paceline.core.vocabulary import InfillTokens
from paceline.vocabularies.length import TokenReach
from paceline.vocabularies.spelling import single_characters, spell_out
from paceline.vocabularies.turns import unnamed_turn_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_INFILL_NAMES: Final = (
    ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
    ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
    ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|file_sep|>",),
)
"""Names of the tokens that :class:`InfillTokens` lists, in the order of its fields: those that llama.cpp looks for."""

_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the rest from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {chr(byte): byte for byte in printable}
    spelling.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return spelling


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:  # a token written outside the alphabet stands for its own text
        return piece.encode()


def _sentencepiece(space: str, byte_fallback: bool) -> Callable[[str], bytes]:
    def to_bytes(piece: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(piece) if byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else piece.replace(space, " ").encode()

    return to_bytes


class TokenizerVocabulary:
    """The vocabulary of a fast (``tokenizers``-backed) tokenizer.

    Control tokens add no bytes and other added tokens add their literal text. A sentencepiece token keeps its leading
    space even at the start of a text, where ``tokenizer.decode`` would strip one. ``size`` is that of a row of logits:
    ids that the tokenizer does not know are padding and add no bytes. ``end_ids`` are those that the model's own
    configuration names.

    Raises ``CapabilityError`` where it is unknown how the tokenizer turns tokens into text.
    """

    def __init__(self, tokenizer: Any, *, size: int, end_ids: Iterable[int] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CapabilityError(
                f"{type(tokenizer).__name__} is not backed by the tokenizers library, so the bytes of its tokens are "
                "unknown; save a tokenizer.json beside the model"
            )
        self._tokenizer = tokenizer
        # Whether control tokens are read is a setting of a tokenizer, for all threads: each way has its own one.
        self._readers: dict[bool, Any] = {}
        self._making = threading.Lock()
        self._size = size
        self._kind, self._piece_bytes = _spelling(backend)
        self._pieces: dict[int, str] = {
            token_id: piece for piece, token_id in backend.get_vocab(with_added_tokens=False).items()
        }
        added = backend.get_added_tokens_decoder()
        self._added: dict[int, bytes] = {token_id: token.content.encode() for token_id, token in added.items()}
        self._control_ids = frozenset(
            token_id
            for token_id in [
                *(token_id for token_id, token in added.items() if token.special),
                *tokenizer.all_special_ids,
            ]
            if token_id < size  # a token that is named but in no file gets the next id
        )
        own_end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._end_ids = self._with_turn_ends(token_id for token_id in [*end_ids, *own_end] if 0 <= token_id < size)
        self._prefix = self._special_prefix()

    @property
    def kind(self) -> str:
        """``"bpe"`` for byte-level BPE, ``"spm"`` for sentencepiece BPE, ``"ugm"`` for unigram: llama.cpp's names."""
        return self._kind

    @property
    def size(self) -> int:
        return self._size

    @property
    def end_ids(self) -> frozenset[int]:
        """End tokens of the model's configuration, of the tokenizer and, if need be, of its template."""
        return self._end_ids

    @property
    def text_end_ids(self) -> frozenset[int]:
        return self._end_ids - self._control_ids

    @property
    def control_ids(self) -> frozenset[int]:
        return self._control_ids

    @cached_property
    def infill_tokens(self) -> InfillTokens:
        ids = {spelling.decode(): token_id for token_id, spelling in self._added.items() if token_id < self._size}
        return InfillTokens(*(next((ids[name] for name in names if name in ids), None) for names in _INFILL_NAMES))

    @cached_property
    def _single_ids(self) -> dict[bytes, int]:
        # SentencePiece's byte tokens come last, as it uses the token of a character where there is one.
        token_ids = sorted(range(self._size), key=lambda token_id: bool(_BYTE_TOKEN.fullmatch(self._piece(token_id))))
        return single_characters(token_ids, self.token_spelling, self._control_ids)

    def _piece(self, token_id: int) -> str:
        return self._pieces.get(token_id, "")

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        token_ids = self._encode(text, add_special=False, parse_special=parse_special)
        if not parse_special and not self._control_ids.isdisjoint(token_ids):
            token_ids = spell_out(
                token_ids,
                text,
                self._control_ids,
                [self._tokenizer.unk_token_id],
                lambda token_id: self.token_spelling(token_id) or b"",
                lambda: self._single_ids,
            )
        return [*self._prefix, *token_ids] if add_special else token_ids

    def token_bytes(self, token_id: int) -> bytes:
        spelling = self.token_spelling(token_id)
        return b"" if spelling is None or token_id in self._control_ids else spelling

    def token_spelling(self, token_id: int) -> bytes | None:
        if not 0 <= token_id < self._size:
            raise ValueError(f"token {token_id} is outside the vocabulary of {self._size}")
        added = self._added.get(token_id)
        if added is not None:
            return added
        piece = self._pieces.get(token_id)
        return None if piece is None else self._piece_bytes(piece)

    def fewest_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least; 0 where that is not known.

        It is known of byte-level vocabularies whose tokenizers do not normalise texts, and split them without leaving
        anything out.
        """
        return 0 if self._reach is None else self._reach.fewest_tokens(text)

    @cached_property
    def _reach(self) -> TokenReach | None:
        backend = self._tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder().values()
        if self._kind != "bpe" or backend.normalizer is not None or not _keeps_all(backend.pre_tokenizer):
            return None
        spellings = [self.token_spelling(token_id) or b"" for token_id in range(self._size)]
        if any(bytes([byte]) not in self._single_ids for byte in (*range(0xC0), *range(0xC2, 0xF5))):
            return None
        return TokenReach.of(spellings, keeps_blanks=not any(token.lstrip or token.rstrip for token in added))

    def _with_turn_ends(self, named: Iterable[int]) -> frozenset[int]:
        """Return named end tokens, with the one that closes turns in the chat template where no named token does."""
        ends = frozenset(named)
        template = getattr(self._tokenizer, "chat_template", None)
        templates = template.values() if isinstance(template, dict) else [template]
        control = {token.decode(): token_id for token_id, token in self._added.items() if token_id in self._control_ids}
        return ends.union(
            unnamed_turn_ends(
                [text for text in templates if isinstance(text, str)],
                {token: token_id for token, token_id in control.items() if token_id < self._size},
                [token for token, token_id in control.items() if token_id in ends],
            )
        )

    def _encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        try:
            token_ids = _encode_ids(self._reader(parse_special), text, add_special, parse_special)
        except TypeError:
            # tokenizers takes only what is UTF-8, and calls anything else a wrong type.
            raise InputError("the text has half a surrogate pair; send valid Unicode") from None
        return token_ids

    def _reader(self, parse_special: bool) -> Any:
        """Return the tokenizer that reads control tokens, or the one that does not: neither waits for the other."""
        reader = self._readers.get(parse_special)
        if reader is None:
            with self._making:
                reader = copy.deepcopy(self._tokenizer)
                # It sets what it needs now, while no other thread uses it.
                _encode_ids(reader, "", False, parse_special)
                self._readers[parse_special] = reader
        return reader

    def _special_prefix(self) -> list[int]:
        plain = self._encode("a", add_special=False, parse_special=False)
        special = self._encode("a", add_special=True, parse_special=False)
        return special[: special.index(plain[0])] if plain and plain[0] in special else []


def _encode_ids(tokenizer: Any, text: str, add_special: bool, parse_special: bool) -> list[int]:
    token_ids: list[int] = tokenizer.encode(
        text,
        add_special_tokens=add_special,
        split_special_tokens=not parse_special,
        verbose=False,  # no warning about the length in the tokenizer's configuration
    )
    return token_ids


def _spelling(backend: Any) -> tuple[str, Callable[[str], bytes]]:
    """Return the kind of vocabulary and how its pieces spell bytes, from the decoder.

    Raises ``CapabilityError`` for an unknown kind of decoder.
    """
    # The decoder's pickled state is its part of tokenizer.json, without writing out the whole vocabulary.
    decoder: dict[str, Any] = {"type": None}
    if backend.decoder is not None:
        decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    by_type = {step["type"]: step for step in steps}
    model = type(backend.model).__name__
    if model == "BPE" and set(by_type) in ({"ByteLevel"}, {"ByteLevel", "Fuse"}):
        return "bpe", _byte_level
    if model in {"BPE", "Unigram"} and by_type and set(by_type) <= _SENTENCEPIECE_STEPS:
        space = by_type.get("Metaspace", {}).get("replacement") or _replaced_by_space(by_type.get("Replace"))
        if space is not None:
            return ("spm" if model == "BPE" else "ugm"), _sentencepiece(space, "ByteFallback" in by_type)
    names = " + ".join(str(step["type"]) for step in steps)
    raise CapabilityError(
        f"the bytes of tokens are unknown for a {model} tokenizer that decodes by {names}; the torch engine knows "
        "byte-level BPE and sentencepiece"
    )


def _keeps_all(pre_tokenizer: Any) -> bool:
    """Return whether what splits texts into words leaves nothing out."""
    state: dict[str, Any] = {"type": None}
    if pre_tokenizer is not None:
        state = json.loads(pre_tokenizer.__getstate__())
    steps: list[dict[str, Any]] = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    return all(
        step["type"] in ("ByteLevel", "Digits") or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in steps
    )


def _replaced_by_space(replace: dict[str, Any] | None) -> str | None:
    if replace is None or replace["content"] != " ":
        return None
    pattern: str | None = replace["pattern"].get("String")
    return pattern
