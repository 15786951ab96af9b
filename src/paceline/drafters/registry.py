"""Drafters by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from paceline.core.errors import InputError
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.lookup import LookupDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.base import Engine
from paceline.engines.sequence_pool import SequencePool
from paceline.vocabularies.relation import check_vocabularies

DrafterName: TypeAlias = Literal["draft", "suffix", "lookup"]
DRAFTER_NAMES: tuple[DrafterName, ...] = get_args(DrafterName)
"""Every :data:`DrafterName`."""


def check_drafter_names(names: Sequence[str]) -> None:
    """Raise unless every name is a drafter's and none comes twice.

    Raises:
        InputError: with the name and the choices.
    """
    if isinstance(names, str):
        raise InputError(f"drafters {names!r} is a text: give a list of names, such as [{names!r}]")
    for index, name in enumerate(names):
        if name not in DRAFTER_NAMES:
            raise InputError(f"unknown drafter {name!r}: choose from {', '.join(DRAFTER_NAMES)}")
        if name in names[:index]:
            raise InputError(f"drafter {name!r} is named twice: name each once, in the order they are to be asked")


def build_drafters(
    names: Sequence[str], *, target: Engine, draft: Engine | None, draft_pool: SequencePool | None = None
) -> list[Drafter]:
    """Build drafters in the order named; the first to propose a token owns it.

    Args:
        names: of the drafters.
        target: whose tokens they propose.
        draft: the draft model.
        draft_pool: keeps what the draft model has read; by default nothing is kept.

    Raises:
        InputError: an unknown or repeated name, ``draft`` without a draft model, or a draft model without ``draft``.
        VocabularyMismatchError: the draft model has other tokens than the target.
    """
    check_drafter_names(names)
    if "draft" in names and draft is None:
        raise InputError("drafter 'draft' needs a draft model: name one with -md, or leave it out of --drafters")
    if draft is not None and "draft" not in names:
        raise InputError("a draft model is given but 'draft' is not among the drafters: add it, or leave out -md")
    drafters: list[Drafter] = []
    for name in names:
        if name == "draft":
            assert draft is not None
            relation = check_vocabularies(target.vocabulary, draft.vocabulary)
            drafters.append(
                DraftModelDrafter(
                    draft,
                    target_vocab_size=target.vocabulary.size,
                    unshared_ids=relation.unshared_ids,
                    end_ids=target.vocabulary.end_ids,
                    pool=draft_pool,
                )
            )
        elif name == "suffix":
            drafters.append(SuffixDrafter())
        else:
            drafters.append(LookupDrafter())
    return drafters
