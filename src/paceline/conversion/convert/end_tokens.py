"""End tokens: a converted model ends its answers at the same tokens in both formats.

A Hugging Face folder lists its end tokens by id. A GGUF file names up to three, and llama.cpp adds those that it knows
by their text. Which these are is not written down here. llama.cpp is asked, of the file that is read or of a small one
with the vocabulary that is to be written: a table of ours would be wrong with llama.cpp's next version.
"""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import gguf

from paceline.conversion.convert.vocabulary import TokenizerTables, add_vocabulary_to_gguf
from paceline.conversion.llama import ARCHITECTURE
from paceline.core.errors import InputError, ModelWarning
from paceline.vocabularies.turns import END_OF_TURN

_END_OF_MESSAGE: Final = frozenset({"<|eom_id|>"})


def choose_end_keys(vocabulary: TokenizerTables, name: str) -> dict[str, int]:
    """Return the end tokens that a GGUF file has to name so that llama.cpp ends where the folder does.

    They are under ``eos`` and, where they are needed or their text says what they are, ``eot`` and ``eom``. ``name`` is
    the folder's, for messages.

    Warns:
        ModelWarning: llama.cpp would end at tokens at which the folder does not.
    """
    named = _assign_keys(vocabulary, ())
    ends = _find_llama_cpp_ends(vocabulary, named)
    unknown = [token_id for token_id in vocabulary.ends if token_id not in ends]
    if unknown:
        named = _assign_keys(vocabulary, unknown)
        ends = _find_llama_cpp_ends(vocabulary, named)
    lost = [token_id for token_id in vocabulary.ends if token_id not in ends]
    if lost:
        raise InputError(
            f"{name} has {len(vocabulary.ends)} tokens that end an answer, and llama.cpp would not end at "
            f"{_list_tokens(lost, vocabulary)}: GGUF names 3, and llama.cpp knows others by their text; take it out of "
            "eos_token_id in config.json and generation_config.json"
        )
    added = sorted(ends - set(vocabulary.ends))
    if added:
        warnings.warn(
            f"llama.cpp knows {_list_tokens(added, vocabulary)} by its text and will end an answer there, which "
            f"{name} does not; for the same ends in both, add {', '.join(map(str, added))} to eos_token_id in its "
            "generation_config.json",
            ModelWarning,
            stacklevel=3,
        )
    return named


def _assign_keys(vocabulary: TokenizerTables, unknown: Collection[int]) -> dict[str, int]:
    """Give end tokens GGUF's keys: those llama.cpp does not know before those whose text says what they are."""
    first, *others = vocabulary.ends
    named: dict[str, int] = {}
    for key, texts in (("eot", END_OF_TURN), ("eom", _END_OF_MESSAGE)):
        token_id = next((token_id for token_id in others if vocabulary.tokens[token_id] in texts), None)
        if token_id is not None:
            named[key] = token_id
    # Where no key is free, one is taken from a token that llama.cpp knows without it.
    keys = [key for key in ("eot", "eom") if key not in named] + list(named)
    named.update(zip(keys, (token_id for token_id in unknown if token_id != first), strict=False))
    return {"eos": first, **named}


def _find_llama_cpp_ends(vocabulary: TokenizerTables, named: Mapping[str, int]) -> frozenset[int]:
    """Return where llama.cpp ends with such a vocabulary, of which the first merge stands for all."""
    from paceline.engines.llama_cpp.ends import read_end_ids

    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, ARCHITECTURE)
        try:
            add_vocabulary_to_gguf(dataclasses.replace(vocabulary, merges=vocabulary.merges[:1]), writer, named)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
        finally:
            writer.close()
        return read_end_ids(path)


def _list_tokens(token_ids: Iterable[int], vocabulary: TokenizerTables) -> str:
    return ", ".join(f"{vocabulary.tokens[token_id]!r} ({token_id})" for token_id in token_ids)
