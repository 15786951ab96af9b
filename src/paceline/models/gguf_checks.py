"""Values of a damaged GGUF header over which llama.cpp ends its process instead of refusing the file.

Values of a wrong type and shapes that do not fit are left to llama.cpp, which says so in words.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from paceline.core.errors import ModelFileError
from paceline.core.numbers import shown
from paceline.core.text import spelled_bytes
from paceline.models.gguf_header import GgufHeader, Value, read_gguf_texts
from paceline.models.gguf_model import HEAD_ARCHITECTURES

MAX_LAYERS: Final = 512
"""llama.cpp's ``LLAMA_MAX_LAYERS``."""
_LONGEST_CONTEXT: Final = 2**31 - 1
"""Tokens that llama.cpp can count."""
LARGEST_VOCABULARY: Final = 1 << 24
"""Most tokens of a vocabulary; llama.cpp writes to memory for as many as a file claims."""

_ROPE_SCALINGS: Final = ("none", "linear", "yarn", "longrope")
_EPSILONS: Final = ("layer_norm_rms_epsilon", "layer_norm_epsilon", "group_norm_epsilon")

_LAYER: Final = re.compile(r"blk\.(\d{1,9})\.")

_TOKENS: Final = "tokenizer.ggml.tokens"

_BYTE_LEVEL_SPACE: Final = "\u0120".encode()
"""What the tokens of byte-level BPE have in place of a space."""
_SENTENCEPIECE_BYTES: Final = frozenset(b"<0x%02X>" % byte for byte in range(256))


def check_values(path: Path, header: GgufHeader, *, may_be_head: bool = False) -> None:
    """Raise ``ModelFileError`` for a value in a header over which llama.cpp would end the process.

    As a whole model it would be ended by a file with the layers of a head alone, too.
    """
    said = header.metadata
    architecture = str(said.get("general.architecture"))

    def whole(key: str) -> int | None:
        value = said.get(f"{architecture}.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def check_range(key: str, least: int, most: int, of_what: str) -> None:
        value = whole(key)
        if value is not None and not least <= value <= most:
            raise _damage_error(path, f"{architecture}.{key}", value, f"{of_what} are {least} to {most}")

    check_range("block_count", 1, MAX_LAYERS, "layers")
    check_range("context_length", 1, _LONGEST_CONTEXT, "tokens of a context")
    check_range("vocab_size", 1, LARGEST_VOCABULARY, "tokens of a vocabulary")
    layers, predicting = whole("block_count"), whole("nextn_predict_layers") or 0
    if layers is not None:
        check_range("nextn_predict_layers", 0, layers, "layers of this model")
        if not may_be_head and is_mtp_file(header):
            raise ModelFileError(
                f"{path} is not a model but a head that drafts for one ({architecture}.nextn_predict_layers is "
                f"{predicting}, and there are no layers before these); give the file of the whole model"
            )
    _check_experts(path, said, architecture)
    scaling = said.get(f"{architecture}.rope.scaling.type")
    if isinstance(scaling, str) and scaling not in _ROPE_SCALINGS:
        raise _damage_error(
            path, f"{architecture}.rope.scaling.type", scaling, f"it is one of {', '.join(_ROPE_SCALINGS)}"
        )
    for name in _EPSILONS:
        key = f"{architecture}.attention.{name}"
        value = said.get(key)
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            raise _damage_error(path, key, value, "it is a number of 0 or more")


def check_tokens(path: Path, metadata: Mapping[str, Value]) -> bool:
    """Check the tokens of a vocabulary, and return whether any text can be spelled by them.

    It takes longer than :func:`check_values`. llama.cpp ends the process over a byte that a SentencePiece vocabulary
    has no token for.
    """
    tokens = read_gguf_texts(path, _TOKENS)
    counts = Counter(token for token in tokens if token)
    if len(counts) < len(tokens):
        token, count = max(counts.items(), key=lambda item: item[1], default=(b"", 0))
        if count > 1:
            raise ModelFileError(
                f"{path} has the token {_spell_token(token)} {count} times in {_TOKENS}, at {tokens.index(token)} "
                "first, and no token may be there twice; copy or download it again, or convert the model again"
            )
    if metadata.get("tokenizer.ggml.model") != "llama":
        return True
    spelled = _SENTENCEPIECE_BYTES.intersection(counts)
    if not spelled and any(token.startswith(_BYTE_LEVEL_SPACE) for token in counts):
        raise ModelFileError(
            f"{path} has tokenizer.ggml.model 'llama', which is SentencePiece, and the tokens of 'gpt2': they have "
            f"{_BYTE_LEVEL_SPACE.decode()!r} for a space, and none is a byte such as '<0x0A>'; convert the model again"
        )
    return len(spelled) == len(_SENTENCEPIECE_BYTES)


def _check_experts(path: Path, said: Mapping[str, Value], architecture: str) -> None:
    def whole(key: str) -> int:
        value = said.get(f"{architecture}.{key}", 0)
        numbers = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
        return max(numbers, default=0)

    experts, used = whole("expert_count"), whole("expert_used_count")
    groups, groups_used = whole("expert_group_count"), whole("expert_group_used_count")
    if architecture.startswith("hunyuan") and experts <= 1:  # says 1 where there are none
        return
    key, value, limit = "", 0, ""
    of_experts = f"there are {experts} experts ({architecture}.expert_count)"
    if experts < 0:
        key, value, limit = "expert_count", experts, "it is 0 or more"
    elif experts == 0 and used != 0:
        key, value, limit = "expert_used_count", used, of_experts
    elif experts > 0 and not 1 <= used <= experts:
        key, value, limit = "expert_used_count", used, f"{of_experts}, of which 1 or more are used"
    elif groups and not (groups < experts and (groups <= 1 or experts % groups == 0)):
        key, value, limit = "expert_group_count", groups, f"{of_experts}, in equal groups"
    elif groups > 1 and not 0 < groups_used < groups:
        key, value, limit = "expert_group_used_count", groups_used, f"1 to {groups - 1} groups can be used"
    if key:
        raise _damage_error(path, f"{architecture}.{key}", value, limit)


def is_head_file(header: GgufHeader) -> bool:
    """Return whether a file holds a head alone, without the model that it drafts for."""
    return is_mtp_file(header) or header.metadata.get("general.architecture") in HEAD_ARCHITECTURES


def is_mtp_file(header: GgufHeader) -> bool:
    """Return whether a file has the MTP layers of a model and none of those before them."""
    said = header.metadata
    architecture = said.get("general.architecture")
    layers, predicting = (said.get(f"{architecture}.{key}") for key in ("block_count", "nextn_predict_layers"))
    if not isinstance(layers, int) or not isinstance(predicting, int) or predicting <= 0 or "split.count" in said:
        # The first of several files may have any of the layers.
        return False
    numbers = {int(found[1]) for name in header.tensors if (found := _LAYER.match(name)) is not None}
    return bool(numbers) and min(numbers) >= layers - predicting


def _damage_error(path: Path, key: str, value: object, limit: str) -> ModelFileError:
    return ModelFileError(
        f"{path} has {key} {shown(value)}, and {limit}; copy or download it again, or convert the model again"
    )


def _spell_token(token: bytes) -> str:
    try:
        return shown(token.decode())
    except UnicodeDecodeError:
        return spelled_bytes(token[:16])
