"""Pairs of tokens that a user says stand for one another, as ``DRAFT=TARGET``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, get_args

from paceline.core.errors import InputError

DraftVocab: TypeAlias = Literal["auto", "same", "translate"]
"""``same``: the draft's ids are the target's; ``translate``: its text is put into the target's tokens; ``auto``: the
first where that fits, and else the second."""

DRAFT_VOCABS: Final[tuple[DraftVocab, ...]] = get_args(DraftVocab)
"""Every :data:`DraftVocab`."""


def parse_pairs(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return pairs of spellings from texts like ``<|im_start|>=<start_of_turn>``, the draft's token first."""
    pairs = []
    for text in texts:
        ours, _, its = text.partition("=")
        if not (ours and its):
            raise InputError(
                f"`DraftOptions.token_map` {text!r} is no pair of tokens: give DRAFT=TARGET, such as "
                "'<|im_start|>=<start_of_turn>'"
            )
        pairs.append((ours, its))
    return tuple(pairs)


def check_pairs(texts: Sequence[str], vocab: DraftVocab) -> None:
    """Raise unless the texts are pairs of tokens, which drafts that are not translated have no use for."""
    if parse_pairs(texts) and vocab == "same":
        raise InputError(
            "`DraftOptions.token_map` has no effect with `DraftOptions.vocab='same'`, which "
            "translates nothing: leave out one"
        )
