"""How a text is split before byte-level BPE: llama.cpp's names, and the entries of tokenizer.json that do the same.

llama.cpp knows some sixty names for about thirty ways to split (``llm_tokenizer_bpe`` in ``llama-vocab.cpp``). Here are
the ways that a ``tokenizer.json`` can repeat exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import InputError

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CONTRACTIONS_SPELLED_OUT: Final = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LIKE_LLAMA_3: Final = (
    r"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One way to split."""

    names: tuple[str, ...]
    """llama.cpp's names for it; files are written with the first."""
    digits: str | None
    """The part of the regular expression that takes digits; ``None`` for GPT-2's own expression."""
    digits_apart: bool = False
    """Whether every digit is split off before anything else."""
    ignore_merges: bool = False
    """Whether a piece that is a token as a whole is taken as it is."""
    adds_bos: bool = False
    """Whether llama.cpp puts a begin token before texts where the file does not say."""

    def as_json(self) -> dict[str, Any]:
        """Return the ``pre_tokenizer`` of ``tokenizer.json``."""
        if self.digits is None:
            step = _byte_level(use_regex=True)
            apart = {"type": "Digits", "individual_digits": True}
            return {"type": "Sequence", "pretokenizers": [apart, step]} if self.digits_apart else step
        pattern = _LIKE_LLAMA_3.format(contractions=_CONTRACTIONS, digits=self.digits)
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


_KNOWN: Final = (
    PreTokenizer(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum", "gigachat"), None),
    PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"),
        r"\p{N}{1,3}",
        ignore_merges=True,
        adds_bos=True,
    ),
    PreTokenizer(("smaug-bpe", "dbrx"), r"\p{N}{1,3}"),
    PreTokenizer(("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan", "solar-open"), r"\p{N}"),
    PreTokenizer(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), None, digits_apart=True
    ),
)


def find_pre_tokenizer(name: str, file: str) -> PreTokenizer:
    for known in _KNOWN:
        if name in known.names:
            return known
    names = ", ".join(sorted(name for known in _KNOWN for name in known.names))
    raise InputError(f"{file} has the pre-tokenizer {name!r}; those that can be converted are {names}")


def parse_pre_tokenizer(content: dict[str, Any] | None, *, ignore_merges: bool, file: str) -> PreTokenizer:
    """Return the way to split that a ``tokenizer.json`` describes; ``file`` is for the error.

    Raises ``InputError`` where llama.cpp has no such way, or not with this ``ignore_merges``.
    """
    wanted = _normalise(content)
    for known in _KNOWN:
        if _normalise(known.as_json()) == wanted and known.ignore_merges == ignore_merges:
            return known
    if any(_normalise(known.as_json()) == wanted for known in _KNOWN):
        raise InputError(f"{file} sets ignore_merges to {ignore_merges}, which llama.cpp has not with this splitting")
    raise InputError(
        f"{file} splits texts in a way not known here ({_summary(wanted)}); those of "
        f"{', '.join(known.names[0] for known in _KNOWN)} can be converted"
    )


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _normalise(content: dict[str, Any] | None) -> list[tuple[object, ...]]:
    """Return the steps with what bears on the result, so that equal splittings compare equal."""
    if content is None:
        return []
    kind = content.get("type")
    if kind == "Sequence":
        return [step for part in content.get("pretokenizers") or () for step in _normalise(part)]
    if kind == "ByteLevel":
        return [(kind, content.get("add_prefix_space", True), content.get("use_regex", True))]
    if kind == "Digits":
        return [(kind, content.get("individual_digits", False))]
    if kind == "Split":
        pattern = (content.get("pattern") or {}).get("Regex", "")
        pattern = pattern.replace(_CONTRACTIONS_SPELLED_OUT, _CONTRACTIONS).replace(r"\p{N}{1}|", r"\p{N}|")
        return [(kind, pattern, content.get("behavior"), content.get("invert", False))]
    return [(kind, repr(content))]


def _summary(steps: list[tuple[object, ...]]) -> str:
    return " + ".join(str(step[0]) for step in steps) or "not at all"
