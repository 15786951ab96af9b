"""Drafters by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from paceline.core.errors import InputError, VocabularyMismatchError, blame
from paceline.core.vocabulary import Vocabulary
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.head import BlockHeadDrafter, CacheHeadDrafter, HeadDrafter
from paceline.drafters.lookup import LookupDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.translated import TranslatedDrafter
from paceline.engines.base import Engine, as_block_head, lender
from paceline.engines.sequence_pool import SequencePool
from paceline.vocabularies.mapping import TokenMapping, check_translation
from paceline.vocabularies.relation import VocabularyRelation, check_vocabularies, relate_vocabularies
from paceline.vocabularies.token_pairs import DraftVocab, parse_pairs

DrafterName: TypeAlias = Literal["draft", "suffix", "lookup"]
DraftTokens: TypeAlias = VocabularyRelation | TokenMapping
"""What a draft model's ids are to its target: mostly the same tokens, or other ones, which are translated."""

DRAFTER_NAMES: tuple[DrafterName, ...] = get_args(DrafterName)
"""Every :data:`DrafterName`."""


@blame("drafters")
def check_drafter_names(names: Sequence[str]) -> None:
    """Raise unless every name is a drafter's and none comes twice."""
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
    draft_tokens: DraftTokens | None = None,
) -> list[Drafter]:
    """Build drafters in the order named; the first to propose a token owns it.

    Args:
        draft_pool: keeps what the draft model has read; by default nothing is kept.
        draft_vocab: as for :func:`relate_draft`.
        draft_map: as for :func:`relate_draft`.
        draft_tokens: what :func:`relate_draft` returned for the two models; by default it is asked.

    Raises:
        InputError: an unknown or repeated name, ``draft`` without a draft model, or a draft model without ``draft``; or
            see :func:`relate_draft`.
        VocabularyMismatchError: likewise.
    """
    check_drafter_names(names)
    if "draft" in names and draft is None:
        raise InputError("drafter 'draft' needs a draft model: name one (`draft`), or leave it out of `drafters`")
    if draft is not None and "draft" not in names:
        raise InputError("a draft model is given but 'draft' is not among the drafters: add it, or leave out `draft`")
    drafters: list[Drafter] = []
    for name in names:
        if name == "draft":
            assert draft is not None
            if draft.capabilities.reads_states:
                drafters.append(_head_drafter(target.vocabulary, draft))
                continue
            tokens = draft_tokens or relate_draft(target.vocabulary, draft.vocabulary, draft_vocab, draft_map)
            drafters.append(_draft_drafter(target.vocabulary, draft, draft_pool, tokens))
        elif name == "suffix":
            drafters.append(SuffixDrafter())
        elif name == "lookup":
            drafters.append(LookupDrafter())
        else:
            raise AssertionError(f"{name}: a name of no drafter")
    return drafters


def relate_draft(
    target: Vocabulary, draft: Vocabulary, draft_vocab: DraftVocab = "auto", draft_map: Sequence[str] = ()
) -> DraftTokens:
    """Return what a draft model's tokens are to its target. It takes up to a second, and serves any number of drafters.

    Args:
        target: vocabulary of the target.
        draft: vocabulary of the draft model.
        draft_vocab: whether the draft's ids are taken for the target's; ``auto`` takes them where the vocabularies fit.
        draft_map: tokens that stand for one another where drafts are translated, as ``DRAFT=TARGET``.

    Raises:
        InputError: pairs of tokens that there are not, or that would do nothing.
        VocabularyMismatchError: the draft model has other tokens than the target, and is not to be translated or cannot
            be.
    """
    if draft_vocab == "same":
        try:
            relation = check_vocabularies(target, draft)
        except VocabularyMismatchError as error:
            raise VocabularyMismatchError(f"{error}, or have it translated (`DraftOptions.vocab='auto'`)") from None
    elif draft_vocab == "translate" or not (relation := relate_vocabularies(target, draft)).fits:
        mapping = TokenMapping(target, draft, parse_pairs(draft_map))
        check_translation(mapping)
        return mapping
    if draft_map:
        raise InputError(
            f"the draft's tokens are the target's, so `DraftOptions.token_map` {draft_map[0]} has "
            "no effect: leave it out, or "
            "translate all the same (`DraftOptions.vocab='translate'`)"
        )
    return relation


def _head_drafter(target: Vocabulary, head: Engine) -> HeadDrafter:
    block_head = as_block_head(head)
    if block_head is not None:
        return BlockHeadDrafter(block_head, target=target)
    return HeadDrafter(head, target=target) if lender(head) is None else CacheHeadDrafter(head, target=target)


def _draft_drafter(
    target: Vocabulary, draft: Engine, pool: SequencePool | None, tokens: DraftTokens
) -> DraftModelDrafter | TranslatedDrafter:
    if isinstance(tokens, TokenMapping):
        return TranslatedDrafter(draft, tokens, pool=pool)
    return DraftModelDrafter(
        draft,
        target_vocab_size=target.size,
        unshared_ids=tokens.unshared_ids,
        end_ids=target.end_ids,
        pool=pool,
    )
