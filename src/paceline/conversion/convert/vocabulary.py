"""A tokenizer between the formats: its tokens, how texts become them, and which of them are special."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from gguf import TokenType

from paceline.conversion.convert.pretokenizers import PreTokenizer, find_pre_tokenizer
from paceline.core.errors import InputError, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import gguf

    from paceline.models.gguf_file import GGUFFile

ChatTemplate = str | list[dict[str, str]]
"""One template, or several as objects with ``name`` and ``template``; the one named ``default`` is used."""

BYTE_TOKENS: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""SentencePiece's tokens for single bytes."""

PADDING_SCORE: Final = -10000.0
"""Score of tokens that only fill the vocabulary up: lower than that of any token in use."""


@dataclass(frozen=True)
class TokenizerTables:
    """Everything about a tokenizer, as files store it."""

    kind: Literal["bpe", "spm"]
    """Byte-level BPE (GGUF: ``gpt2``), or SentencePiece BPE with byte fallback (``llama``)."""
    tokens: list[str | None]
    """Tokens by id, one for every row of the embedding; ``None`` for rows that no token has."""
    types: list[TokenType]
    merges: list[tuple[str, str]] = field(default_factory=list)
    """Merges of byte-level BPE, first merge first."""
    pre: PreTokenizer | None = None
    """How byte-level BPE cuts a text before it merges."""
    scores: list[float] = field(default_factory=list)
    """Scores of SentencePiece's tokens, by id."""
    bos: int | None = None
    ends: tuple[int, ...] = ()
    """Tokens that end an answer, the end-of-text token first."""
    pad: int | None = None
    unknown: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    """SentencePiece only: whether a space is put before a text."""
    chat_template: ChatTemplate | None = None

    def check(self, name: str) -> None:
        """Raise unless the parts fit together; ``name`` is the source's, for the errors.

        ``ModelFileError`` is raised where they do not fit, ``InputError`` where they cannot be written in both formats.
        """
        seen: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            if token is not None and seen.setdefault(token, token_id) != token_id:
                raise ModelFileError(f"{name} has the token {token!r} twice, as {seen[token]} and {token_id}")
        for what, token_ids in {
            "begin": [self.bos],
            "end": self.ends,
            "padding": [self.pad],
            "unknown": [self.unknown],
        }.items():
            for special_id in token_ids:
                if special_id is not None and not 0 <= special_id < len(self.tokens):
                    raise ModelFileError(
                        f"{name} has the {what} token {special_id} in a vocabulary of {len(self.tokens)}"
                    )
        for left, right in self.merges:
            if not {left, right, left + right} <= seen.keys():
                raise ModelFileError(f"{name} merges {left!r} and {right!r}, and lacks one of the tokens involved")
        if not self.ends:
            raise InputError(
                f"{name} names no end-of-text token, and llama.cpp would take any; set eos_token_id in a folder's "
                "config.json, or tokenizer.ggml.eos_token_id in a GGUF file"
            )
        if self.kind == "spm":
            missing = [token for token in BYTE_TOKENS if token not in seen]
            if missing:
                raise InputError(f"{name} has no token {missing[0]} for that byte, which llama.cpp needs")
            single = {character for token in self._plain() for character in token if len(token) > 1}
            if single - seen.keys():
                raise InputError(
                    f"{name} has tokens with {min(single - seen.keys())!r}, but that character is no token itself, "
                    "and the two formats differ there"
                )

    def _plain(self) -> list[str]:
        return [
            token
            for token, kind in zip(self.tokens, self.types, strict=True)
            if token is not None and kind == TokenType.NORMAL
        ]

    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens) if token is not None}


# --- GGUF -------------------------------------------------------------------------------------------------------------


def read_gguf_vocabulary(file: GGUFFile) -> TokenizerTables:
    """Read the tokenizer of a GGUF file; raise ``InputError`` for a kind that cannot be converted."""
    name, model = str(file.path), file.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise InputError(f"{name} has a tokenizer of kind {model!r}; gpt2 and llama can be converted")
    tokens: list[str] = _read_array(file, "tokens", str)
    types = [
        TokenType(kind) for kind in _read_array(file, "token_type", int, default=[1] * len(tokens), length=len(tokens))
    ]
    named_ends = [file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    common: dict[str, Any] = {
        "bos": file.get("tokenizer.ggml.bos_token_id"),
        "pad": file.get("tokenizer.ggml.padding_token_id"),
        "unknown": file.get("tokenizer.ggml.unknown_token_id"),
        "add_eos": bool(file.get("tokenizer.ggml.add_eos_token", False)),
        "chat_template": _read_chat_template(file),
    }
    if model == "llama" and named_ends[0] is None:
        named_ends[0] = 2  # llama.cpp's own number
    common["ends"] = _find_ends(file, [token_id for token_id in named_ends if token_id is not None], len(tokens))
    special = [common["bos"], common["pad"], common["unknown"], *common["ends"]]
    needed = {tokens[special_id] for special_id in special if special_id is not None and special_id < len(tokens)}
    if model == "gpt2":
        merges = [_parse_merge(merge) for merge in _read_array(file, "merges", str)]
        pre = find_pre_tokenizer(file.text("tokenizer.ggml.pre", "default"), name)
        needed |= {piece for merge in merges for piece in (*merge, "".join(merge))}
        if TokenType.BYTE in types:
            raise InputError(f"{name} has byte tokens in a byte-level vocabulary, which tokenizer.json cannot have")
        vocabulary = TokenizerTables(
            kind="bpe",
            **_drop_padding(tokens, types, needed),
            merges=merges,
            pre=pre,
            add_bos=bool(file.get("tokenizer.ggml.add_bos_token", pre.adds_bos)),
            **common,
        )
    else:
        scores = [float(score) for score in _read_array(file, "scores", (int, float), length=len(tokens))]
        # llama.cpp's own numbers where the file names none.
        common["bos"] = 1 if common["bos"] is None else common["bos"]
        common["unknown"] = 0 if common["unknown"] is None else common["unknown"]
        vocabulary = TokenizerTables(
            kind="spm",
            **_drop_padding(tokens, types, needed),
            scores=scores,
            add_bos=bool(file.get("tokenizer.ggml.add_bos_token", True)),
            add_space_prefix=bool(file.get("tokenizer.ggml.add_space_prefix", True)),
            **common,
        )
    vocabulary.check(name)
    return vocabulary


def _read_array(
    file: GGUFFile,
    key: str,
    kind: type | tuple[type, ...],
    *,
    default: list[Any] | None = None,
    length: int | None = None,
) -> list[Any]:
    values = file.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ModelFileError(
            f"{file.path} lacks a valid tokenizer.ggml.{key}; check the file with the tool that made it"
        )
    if length is not None and len(values) != length:
        raise ModelFileError(f"{file.path} has {len(values)} entries in tokenizer.ggml.{key} for {length} tokens")
    return values


def _parse_merge(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)  # as llama.cpp splits it
    return (merge, "") if cut < 0 else (merge[:cut], merge[cut + 1 :])


def _drop_padding(tokens: Sequence[str], types: Sequence[TokenType], needed: Collection[str]) -> dict[str, Any]:
    """Take out unused tokens, which only fill rows, unless ``needed``; older files have other types for them."""
    left_out = {
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token not in needed
        and (kind == TokenType.UNUSED or (token == f"[PAD{token_id}]" and kind != TokenType.NORMAL))
    }
    return {
        "tokens": [None if token_id in left_out else token for token_id, token in enumerate(tokens)],
        "types": [TokenType.UNUSED if token_id in left_out else kind for token_id, kind in enumerate(types)],
    }


def _find_ends(file: GGUFFile, named: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Return the tokens at which llama.cpp ends, those that the file names first; none if it names none."""
    from paceline.engines.llama_cpp.ends import read_end_ids

    if not named:
        return ()
    ends = read_end_ids(file.path)
    # A named token that llama.cpp leaves out is an exception of its own, unless there is no such token at all.
    kept = [token_id for token_id in named if token_id in ends or token_id >= num_tokens]
    return tuple(dict.fromkeys([*kept, *sorted(ends)]))


def _read_chat_template(file: GGUFFile) -> ChatTemplate | None:
    default: str | None = file.get("tokenizer.chat_template")
    names: list[str] = file.get("tokenizer.chat_templates", [])
    if not names:
        return default
    templates = {} if default is None else {"default": default}
    templates |= {name: file.text(f"tokenizer.chat_template.{name}") for name in sorted(names)}
    return [{"name": name, "template": template} for name, template in templates.items()]


def add_vocabulary_to_gguf(vocabulary: TokenizerTables, writer: gguf.GGUFWriter, ends: Mapping[str, int]) -> None:
    """Write the tokenizer as metadata, with the end tokens by ``eos``, ``eot`` and ``eom``."""
    if vocabulary.kind == "bpe":
        assert vocabulary.pre is not None, "a byte-level vocabulary has a pre-tokenizer"
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(vocabulary.pre.names[0])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.add_space_prefix)
    writer.add_token_list(
        [f"[PAD{token_id}]" if token is None else token for token_id, token in enumerate(vocabulary.tokens)]
    )
    writer.add_token_types([int(kind) for kind in vocabulary.types])
    writer.add_token_merges([" ".join(merge) for merge in vocabulary.merges])
    # Without a begin token of its own, llama.cpp would take token 11; it is not added to texts either way.
    writer.add_bos_token_id(ends["eos"] if vocabulary.bos is None else vocabulary.bos)
    for key, token_id in ends.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token_id)
    if vocabulary.pad is not None:
        writer.add_pad_token_id(vocabulary.pad)
    if vocabulary.unknown is not None:
        writer.add_unk_token_id(vocabulary.unknown)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    _add_chat_template(vocabulary.chat_template, writer)


def _add_chat_template(template: ChatTemplate | None, writer: gguf.GGUFWriter) -> None:
    if template is None:
        return
    templates = {"default": template} if isinstance(template, str) else {t["name"]: t["template"] for t in template}
    if "default" in templates:
        writer.add_string("tokenizer.chat_template", templates.pop("default"))
    names = {re.sub("[^A-Za-z0-9]", "_", name): text for name, text in sorted(templates.items())}
    for name, text in names.items():
        writer.add_string(f"tokenizer.chat_template.{name}", text)
    writer.add_array("tokenizer.chat_templates", list(names))
