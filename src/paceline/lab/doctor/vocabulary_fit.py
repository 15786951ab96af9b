"""Whether a draft model's tokens are its target's, in words that say what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from paceline.core.errors import VocabularyMismatchError
from paceline.lab.doctor.alignment import Alignment, align_tokenizers
from paceline.lab.doctor.measures import ALL
from paceline.vocabularies.mapping import TokenMapping, check_translation
from paceline.vocabularies.relation import (
    VocabularyRelation,
    false_ends,
    relate_vocabularies,
)

if TYPE_CHECKING:
    from paceline.core.vocabulary import Vocabulary

_MAX_LEFT_OUT: Final = 0.5
"""Share of texts that a tokenizer may not give back before nothing can be translated to its tokens."""


@dataclass(frozen=True, slots=True)
class VocabularyFit:
    """How a draft's vocabulary fits its target's.

    Attributes:
        alignment: on text; ``None`` where the ids are the same tokens.
        words: all of that in a few words.
        refusal: why paceline does not draft with it; ``None`` if it does.
        warnings: what costs acceptance, or ends answers too early; a line each.
    """

    relation: VocabularyRelation
    alignment: Alignment | None
    words: str
    refusal: str | None
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether ids of one are mostly the tokens of the other."""
        return self.relation.fits


def compare_vocabularies(target: Vocabulary, draft: Vocabulary, texts: Mapping[str, Iterable[str]]) -> VocabularyFit:
    """Compare two vocabularies by ids, and on texts (by kind) where the ids are other tokens."""
    relation = relate_vocabularies(target, draft)
    alignment = None if relation.fits else align_tokenizers(target, draft, texts)
    return VocabularyFit(
        relation,
        alignment,
        _describe(relation, alignment),
        None if relation.fits else _explain_refusal(target, draft),
        tuple(_warnings(target, draft, relation)),
    )


def _explain_refusal(target: Vocabulary, draft: Vocabulary) -> str | None:
    """Say why drafts of another vocabulary cannot be translated; ``None`` if they can."""
    try:
        check_translation(TokenMapping(target, draft))
    except VocabularyMismatchError as error:
        return str(error)
    return None


def _describe(relation: VocabularyRelation, alignment: Alignment | None) -> str:
    if relation.fit == "as is":
        return "fits as it is"
    if relation.fit == "but unused":
        return f"fits but for {relation.num_unused:,} unused ids"
    if relation.fit == "in part":
        of_text = relation.num_differing - relation.num_unused
        return f"fits but for {relation.num_differing:,} ids, {of_text:,} of them of text"
    assert alignment is not None
    if alignment.one_share is None or alignment.left_out > _MAX_LEFT_OUT * alignment.texts:
        return f"does not fit: {alignment.left_out} of {alignment.texts} texts do not come back from its tokenizer"
    ends = alignment.ends[ALL].value or 0.0
    return (
        f"another vocabulary: {alignment.one_share:.0%} of tokens are one of the draft's on text, and {ends:.0%} end "
        "where one of these does"
    )


def _warnings(target: Vocabulary, draft: Vocabulary, relation: VocabularyRelation) -> Iterable[str]:
    for difference in relation.control if relation.fits else ():
        yield f"{difference}: the draft takes one for the other"
    for role, vocabulary in (("target", target), ("draft", draft)):
        for token_id, spelling in false_ends(vocabulary).items():
            shown = spelling.decode("utf-8", "backslashreplace")
            yield f"token {token_id}, {shown!r}, is text in the {role}'s file, and llama.cpp ends answers at it"
    if relation.fits and target.end_ids != draft.end_ids:
        yield f"answers end at {_name_vocabulary(target)} for the target and at {_name_vocabulary(draft)} for the draft"


def _name_vocabulary(vocabulary: Vocabulary) -> str:
    ends = [vocabulary.token_spelling(token_id) or b"" for token_id in sorted(vocabulary.end_ids)]
    return ", ".join(repr(end.decode("utf-8", "backslashreplace")) for end in ends) or "nothing"
