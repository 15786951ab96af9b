"""Drafters by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from paceline.core.errors import InputError, VocabularyMismatchError
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.lookup import LookupDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.translated import TranslatedDrafter
from paceline.engines.base import Engine, Vocabulary
from paceline.engines.sequence_pool import SequencePool
from paceline.vocabularies.mapping import TokenMapping, check_translation
from paceline.vocabularies.relation import check_vocabularies, relate_vocabularies
from paceline.vocabularies.token_pairs import DraftVocab, parse_pairs

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
    names: Sequence[str],
    *,
    target: Engine,
    draft: Engine | None,
    draft_pool: SequencePool | None = None,
    draft_vocab: DraftVocab = "auto",
    draft_map: Sequence[str] = (),
) -> list[Drafter]:
    """Build drafters in the order named; the first to propose a token owns it.

    Args:
        names: of the drafters.
        target: whose tokens they propose.
        draft: the draft model.
        draft_pool: keeps what the draft model has read; by default nothing is kept.
        draft_vocab: whether the draft's tokens are the target's.
        draft_map: tokens that stand for one another where drafts are translated, as ``DRAFT=TARGET``.

    Raises:
        InputError: an unknown or repeated name, ``draft`` without a draft model, or a draft model without ``draft``; or
            pairs of tokens that there are not, or that would do nothing.
        VocabularyMismatchError: the draft model has other tokens than the target, and is not to be translated or cannot
            be.
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
            drafters.append(draft_drafter(target.vocabulary, draft, draft_pool, draft_vocab, draft_map))
        elif name == "suffix":
            drafters.append(SuffixDrafter())
        else:
            drafters.append(LookupDrafter())
    return drafters


def draft_drafter(
    target: Vocabulary,
    draft: Engine,
    pool: SequencePool | None = None,
    draft_vocab: DraftVocab = "auto",
    draft_map: Sequence[str] = (),
) -> DraftModelDrafter | TranslatedDrafter:
    """Build the drafter of a draft model: one that takes its tokens for the target's, or one that translates them.

    Args:
        target: whose tokens it proposes.
        draft: the draft model.
        pool: keeps what it has read; by default nothing is kept.
        draft_vocab: which of the two; ``auto`` takes the first where the vocabularies fit.
        draft_map: as for :func:`build_drafters`.

    Raises:
        InputError: pairs of tokens that there are not, or that would do nothing.
        VocabularyMismatchError: the draft model has other tokens than the target, and is not to be translated or cannot
            be.
    """
    if draft_vocab == "same":
        try:
            relation = check_vocabularies(target, draft.vocabulary)
        except VocabularyMismatchError as error:
            raise VocabularyMismatchError(f"{error}, or have it translated (--draft-vocab auto)") from None
    elif draft_vocab == "translate" or not (relation := relate_vocabularies(target, draft.vocabulary)).fits:
        mapping = TokenMapping(target, draft.vocabulary, parse_pairs(draft_map))
        check_translation(mapping)
        return TranslatedDrafter(draft, mapping, pool=pool)
    if draft_map:
        raise InputError(
            f"the draft's tokens are the target's, so --draft-map {draft_map[0]} has no effect: leave it out, or "
            "translate all the same with --draft-vocab translate"
        )
    return DraftModelDrafter(
        draft,
        target_vocab_size=target.size,
        unshared_ids=relation.unshared_ids,
        end_ids=target.end_ids,
        pool=pool,
    )
