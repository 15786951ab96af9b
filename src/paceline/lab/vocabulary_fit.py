"""Whether a draft model's tokens are its target's, in words that say what to do about it.

Where ids are other tokens, both tokenizers cut texts. That two vocabularies have most tokens in common says little of
how often both cut a text at the same places, and drafts are texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from paceline.core.errors import InputError, VocabularyMismatchError
from paceline.lab.intervals import ALL, Ratio, Tally
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
class Alignment:
    """How a draft's tokenizer cuts texts beside the target's. Figures go by kind of text, all kinds under ``"all"``.

    Attributes:
        one: share of the target's tokens that are exactly one token of the draft.
        ends: share of the ends of the target's tokens at which a token of the draft ends too.
        draft_tokens: tokens of the draft for one of the target.
        left_out: texts that one of the tokenizers does not give back as they were, of all of them.
        texts: texts that were cut.
    """

    one: Mapping[str, Ratio]
    ends: Mapping[str, Ratio]
    draft_tokens: Mapping[str, Ratio]
    left_out: int
    texts: int

    @property
    def one_share(self) -> float | None:
        """Share of all target tokens that are exactly one token of the draft; ``None`` if no text could be cut."""
        return self.one[ALL].value


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


def align_tokenizers(target: Vocabulary, draft: Vocabulary, texts: Mapping[str, Iterable[str]]) -> Alignment:
    """Cut texts, by kind, with both tokenizers."""
    one, ends, draft_tokens = Tally(), Tally(), Tally()
    left_out = num_texts = 0
    for kind, of_kind in texts.items():
        for text in of_kind:
            num_texts += 1
            ours, theirs = token_ends(target, text), token_ends(draft, text)
            if ours is None or theirs is None:
                left_out += 1
                continue
            their_spans = set(itertools.pairwise((0, *theirs)))
            num_one = sum(span in their_spans for span in itertools.pairwise((0, *ours)))
            one.add(kind, num_one, len(ours))
            ends.add(kind, len(set(ours).intersection(theirs)), len(ours))
            draft_tokens.add(kind, len(theirs), len(ours))
    return Alignment(one.ratios(), ends.ratios(), draft_tokens.ratios(), left_out, num_texts)


def token_ends(vocabulary: Vocabulary, text: str) -> Sequence[int] | None:
    """Return where the tokens of a text end, in bytes of it; ``None`` where they are not that text's bytes.

    A tokenizer may normalise what it reads, or be unable to spell it.
    """
    try:
        pieces = [vocabulary.token_bytes(token_id) for token_id in vocabulary.tokenize(text, add_special=False)]
    except InputError:
        return None
    encoded = text.encode()
    if pieces and b"".join(pieces) == b" " + encoded:
        # The space that SentencePiece puts before a text.
        pieces[0] = pieces[0][1:]
    if b"".join(pieces) != encoded:
        return None
    return [end for end in itertools.accumulate(map(len, pieces)) if end]
