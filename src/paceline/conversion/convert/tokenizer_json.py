"""The tokenizer of a Hugging Face folder: ``tokenizer.json`` or ``tokenizer.model``, and what the configs say of it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from gguf import TokenType

from paceline.conversion.convert.pretokenizers import parse_pre_tokenizer
from paceline.conversion.convert.sentencepiece_model import merges_to_scores, read_sentencepiece, scores_to_merges
from paceline.conversion.convert.vocabulary import BYTE_TOKENS, PADDING_SCORE, ChatTemplate, TokenizerTables
from paceline.core.errors import InputError, ModelFileError
from paceline.models.files import explain_damaged_entries, read_json, read_json_if_present, read_text, write_json
from paceline.vocabularies.turns import unnamed_turn_ends

if TYPE_CHECKING:
    from pathlib import Path

_SPACE = "▁"
"""SentencePiece's spelling of a space."""

# --- writing ----------------------------------------------------------------------------------------------------------


def write_tokenizer(vocabulary: TokenizerTables, folder: Path, context_length: int) -> None:
    ids = vocabulary.ids()
    added = [
        _added_token(token, token_id, special=kind != TokenType.USER_DEFINED)
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if token is not None and kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    ]
    parts = _byte_level_parts(vocabulary, ids) if vocabulary.kind == "bpe" else _sentencepiece_parts(vocabulary, ids)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _post_processor(vocabulary),
        "decoder": parts["decoder"],
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **parts["model"],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    names = {
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.ends[0],
        "pad_token": vocabulary.pad,
        "unk_token": vocabulary.unknown,
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: None if token_id is None else vocabulary.tokens[token_id] for name, token_id in names.items()},
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
        },
    }
    if vocabulary.chat_template is not None:
        config["chat_template"] = vocabulary.chat_template
    write_json(folder / "tokenizer_config.json", config)


def _added_token(token: str, token_id: int, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": token, **flags, "special": special}


def _byte_level_parts(vocabulary: TokenizerTables, ids: dict[str, int]) -> dict[str, Any]:
    assert vocabulary.pre is not None, "a byte-level vocabulary has a pre-tokenizer"
    return {
        "normalizer": None,
        "pre_tokenizer": vocabulary.pre.as_json(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"ignore_merges": vocabulary.pre.ignore_merges, "vocab": ids, "merges": vocabulary.merges},
    }


def _sentencepiece_parts(vocabulary: TokenizerTables, ids: dict[str, int]) -> dict[str, Any]:
    # The older form of the Llama tokenizer: a space before every piece between special tokens, as llama.cpp has it.
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.add_space_prefix:
        steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "unk_token": None if vocabulary.unknown is None else vocabulary.tokens[vocabulary.unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": scores_to_merges(ids, vocabulary.scores),
        },
    }


def _post_processor(vocabulary: TokenizerTables) -> dict[str, Any] | None:
    before = vocabulary.bos if vocabulary.add_bos else None
    after = vocabulary.ends[0] if vocabulary.add_eos else None
    if before is None and after is None:
        if vocabulary.kind == "spm":
            return None
        return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        inner: dict[str, Any] = {"Sequence": {"id": sequence, "type_id": type_id}}
        return [
            *([] if before is None else [{"SpecialToken": {"id": vocabulary.tokens[before], "type_id": type_id}}]),
            inner,
            *([] if after is None else [{"SpecialToken": {"id": vocabulary.tokens[after], "type_id": type_id}}]),
        ]

    used = {token_id: vocabulary.tokens[token_id] for token_id in (before, after) if token_id is not None}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]} for i, token in used.items()},
    }


# --- reading ----------------------------------------------------------------------------------------------------------


def read_folder_vocabulary(folder: Path, config: dict[str, Any], vocab_size: int) -> TokenizerTables:
    """Read the tokenizer of a Hugging Face folder: ``tokenizer.json``, or else SentencePiece's ``tokenizer.model``.

    A normalizer to NFC is left out, as in every GGUF file: llama.cpp has none. Texts that are NFC already, which almost
    all are, give the same tokens. Of the ``vocab_size`` rows of the embedding, those without a token become unused
    ones.
    """
    path = folder / "tokenizer.json"
    if not path.exists() and (folder / "tokenizer.model").exists():
        path = folder / "tokenizer.model"
    elif not path.exists():
        raise ModelFileError(
            f"{folder} has neither tokenizer.json nor tokenizer.model; load its tokenizer in transformers and "
            "save_pretrained it"
        )
    with explain_damaged_entries(path):
        if path.suffix == ".json":
            vocabulary = _read_vocabulary(path, read_json(path), folder, config, vocab_size)
        else:
            vocabulary = _read_sentencepiece_vocabulary(path, folder, config, vocab_size)
        vocabulary = _add_turn_ends(vocabulary)
        vocabulary.check(str(path))
    return vocabulary


def _read_vocabulary(
    path: Path, content: dict[str, Any], folder: Path, config: dict[str, Any], vocab_size: int
) -> TokenizerTables:
    settings = read_json_if_present(folder / "tokenizer_config.json")
    generation = read_json_if_present(folder / "generation_config.json")
    model = content["model"]
    if model.get("type") != "BPE" or any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        raise InputError(f"{path} has a {model.get('type')} model or one with options; plain BPE can be converted")
    tokens: list[str | None] = [None] * vocab_size
    types = [TokenType.UNUSED] * vocab_size
    byte_fallback = bool(model.get("byte_fallback"))
    for token, token_id in model["vocab"].items():
        _place_token(tokens, types, token, token_id, TokenType.NORMAL, path)
        if byte_fallback and token in BYTE_TOKENS:
            types[token_id] = TokenType.BYTE
    for added in content.get("added_tokens") or ():
        for flag in ("lstrip", "rstrip", "single_word"):
            if added.get(flag):
                raise InputError(f"{path} sets {flag} for the token {added['content']!r}, which GGUF has no word for")
        kind = TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
        _place_token(tokens, types, added["content"], added["id"], kind, path)
    ids = {token: token_id for token_id, token in enumerate(tokens) if token is not None}
    merges = [_parse_merge(merge) for merge in model["merges"]]
    common: dict[str, Any] = {
        "tokens": tokens,
        "types": types,
        "bos": _find_special_id("bos", settings, config, ids),
        "ends": _find_ends(settings, config, generation, ids),
        "pad": _find_special_id("pad", settings, config, ids),
        "add_bos": _adds("bos", 0, content, settings),
        "add_eos": _adds("eos", -1, content, settings),
        "chat_template": _read_chat_template(folder, settings),
    }
    if not byte_fallback:
        if (content.get("normalizer") or {"type": "NFC"}).get("type") != "NFC":
            raise InputError(f"{path} normalizes texts ({content['normalizer'].get('type')}), which llama.cpp does not")
        if (content.get("decoder") or {}).get("type") != "ByteLevel":
            raise InputError(f"{path} is neither byte-level BPE nor BPE with byte fallback; these can be converted")
        pre = parse_pre_tokenizer(
            content.get("pre_tokenizer"), ignore_merges=bool(model.get("ignore_merges")), file=str(path)
        )
        unknown = _find_special_id("unk", settings, config, ids)
        return TokenizerTables(kind="bpe", merges=merges, pre=pre, unknown=unknown, **common)
    if model.get("ignore_merges"):
        raise InputError(f"{path} sets ignore_merges with byte fallback, which llama.cpp cannot")
    unknown = ids.get(model.get("unk_token") or "")
    if unknown is not None:
        types[unknown] = TokenType.UNKNOWN
    known_scores = merges_to_scores(merges, ids, str(path))
    scores = [PADDING_SCORE if token is None else known_scores[i] for i, token in enumerate(tokens)]
    return TokenizerTables(
        kind="spm", scores=scores, unknown=unknown, add_space_prefix=_adds_space(content, str(path)), **common
    )


def _read_sentencepiece_vocabulary(
    path: Path, folder: Path, config: dict[str, Any], vocab_size: int
) -> TokenizerTables:
    settings = read_json_if_present(folder / "tokenizer_config.json")
    generation = read_json_if_present(folder / "generation_config.json")
    model = read_sentencepiece(path)
    tokens: list[str | None] = [None] * vocab_size
    types = [TokenType.UNUSED] * vocab_size
    scores = [PADDING_SCORE] * vocab_size
    for token_id, (piece, score, kind) in enumerate(model.pieces):
        # llama.cpp looks for user-defined tokens before it spells spaces as SentencePiece does.
        text = piece.replace(_SPACE, " ") if kind == TokenType.USER_DEFINED else piece
        _place_token(tokens, types, text, token_id, kind, path)
        scores[token_id] = score
    added = {int(token_id): token for token_id, token in (settings.get("added_tokens_decoder") or {}).items()}
    for content, token_id in read_json_if_present(folder / "added_tokens.json").items():
        added.setdefault(token_id, {"content": content})
    for token_id, token in added.items():
        kind = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
        kind = kind if token_id >= len(model.pieces) or types[token_id] == TokenType.NORMAL else types[token_id]
        _place_token(tokens, types, token["content"], token_id, kind, path)
    ids = {token: token_id for token_id, token in enumerate(tokens) if token is not None}
    own = {"bos_token_id": model.bos, "eos_token_id": model.eos}
    return TokenizerTables(
        kind="spm",
        tokens=tokens,
        types=types,
        scores=scores,
        bos=_find_special_id("bos", settings, {**own, **config}, ids),
        ends=_find_ends(settings, {**own, **config}, generation, ids),
        pad=_find_special_id("pad", settings, config, ids),
        unknown=model.unknown,
        add_bos=bool(settings.get("add_bos_token", True)),
        add_eos=bool(settings.get("add_eos_token", False)),
        add_space_prefix=model.add_space_prefix,
        chat_template=_read_chat_template(folder, settings),
    )


def _parse_merge(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _place_token(
    tokens: list[str | None], types: list[TokenType], token: str, token_id: int, kind: TokenType, path: Path
) -> None:
    if not isinstance(token, str) or not 0 <= token_id < len(tokens):
        raise ModelFileError(f"{path} has token {token_id}, and the model has {len(tokens)} rows for tokens")
    if tokens[token_id] not in (None, token):
        raise ModelFileError(f"{path} has two tokens {token_id}, {tokens[token_id]!r} and {token!r}")
    tokens[token_id], types[token_id] = token, kind


def _find_special_id(role: str, settings: dict[str, Any], config: dict[str, Any], ids: dict[str, int]) -> int | None:
    """Return the id of a special token: by its text in the tokenizer's settings, else by its id in the model's."""
    named = settings.get(f"{role}_token")
    text = named.get("content") if isinstance(named, dict) else named
    if text is not None and text in ids:
        return ids[text]
    token_id = config.get(f"{role}_token_id")
    if isinstance(token_id, list):
        token_id = token_id[0] if token_id else None
    return None if token_id is None or token_id < 0 else int(token_id)  # -1 was written for "none"


def _find_ends(
    settings: dict[str, Any], config: dict[str, Any], generation: dict[str, Any], ids: dict[str, int]
) -> tuple[int, ...]:
    """Return the tokens that end an answer: the tokenizer's, and generation_config.json's or else the model's."""
    given = generation.get("eos_token_id")
    given = config.get("eos_token_id") if given is None else given
    ends = [_find_special_id("eos", settings, config, ids), *(given if isinstance(given, list) else [given])]
    return tuple(dict.fromkeys(int(token_id) for token_id in ends if token_id is not None))


def _add_turn_ends(vocabulary: TokenizerTables) -> TokenizerTables:
    """Return a vocabulary that ends answers where the torch engine does."""
    template = vocabulary.chat_template
    templates = [entry["template"] for entry in template] if isinstance(template, list) else [template or ""]
    control = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if token is not None and kind == TokenType.CONTROL
    }
    named = [token for token, token_id in control.items() if token_id in vocabulary.ends]
    ends = (*vocabulary.ends, *unnamed_turn_ends(templates, control, named))
    return dataclasses.replace(vocabulary, ends=tuple(dict.fromkeys(ends)))


def _adds(role: str, place: int, content: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Return whether texts get a begin (``place`` 0) or end (-1) token: by the settings, else by the template."""
    wanted = settings.get(f"add_{role}_token")
    if isinstance(wanted, bool):
        return wanted
    processor = content.get("post_processor") or {}
    for step in processor.get("processors", [processor]):
        if step.get("type") == "TemplateProcessing":
            return "SpecialToken" in step["single"][place]
    # Older Llama tokenizers have neither setting nor template, and make the template when they are loaded.
    return role == "bos" and str(settings.get("tokenizer_class", "")).startswith("LlamaTokenizer")


def _adds_space(content: dict[str, Any], name: str) -> bool:
    """Return whether a SentencePiece-like tokenizer puts a space before a text.

    Where the newer form (``prepend_scheme`` ``first``) puts one before a whole text alone, llama.cpp puts one after
    every special token as well.
    """
    normalizer, splitter = content.get("normalizer"), content.get("pre_tokenizer")
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    kinds = [
        (step["type"], step.get("prepend") or (step.get("pattern", {}).get("String"), step.get("content")))
        for step in steps
    ]
    replace, prepend = ("Replace", (" ", _SPACE)), ("Prepend", _SPACE)
    if splitter is None and kinds == [replace]:
        return False
    if splitter is None and kinds in ([prepend, replace], [replace, prepend]):
        return True
    splitter = splitter or {}
    if not kinds and (splitter.get("type"), splitter.get("replacement"), splitter.get("split")) == (
        "Metaspace",
        _SPACE,
        False,
    ):
        return bool(splitter.get("prepend_scheme", "always") != "never")
    raise InputError(f"{name} treats spaces in a way not known here; that of Llama's tokenizers can be converted")


def _read_chat_template(folder: Path, settings: dict[str, Any]) -> ChatTemplate | None:
    template = settings.get("chat_template")
    path = folder / "chat_template.jinja"
    if template is None and path.is_file():
        try:
            return read_text(path)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path} cannot be read: {error}") from None
    if isinstance(template, list):
        return [{"name": str(entry["name"]), "template": str(entry["template"])} for entry in template]
    return template if isinstance(template, str) else None
