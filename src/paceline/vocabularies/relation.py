"""How the vocabularies of a target and its draft relate: which token ids are the same token to both.

A draft fits its target if the ids it is fed, and the ids it proposes, are the same tokens to both. Tokens are compared
by what they are (:meth:`~paceline.core.vocabulary.Vocabulary.token_spelling`). Three things are not compared:

* whether a token adds its spelling to a text: one file calls ``<tool_call>`` a control token, its sibling does not;
* the number of ids: families pad their rows of logits to whatever width suits a machine;
* the kind of tokenizer: only target ids are fed, so the draft's own tokenizer never runs.

What the two do not share costs acceptance and nothing else, as long as the draft never proposes it. Where it is no
token of any text, such as control tokens, those of images, and ids that were never given a meaning, it costs nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from paceline.core.errors import VocabularyMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.core.vocabulary import Vocabulary

MAX_DIFFERING_SHARE: Final = 0.5
"""Most of the ids in use by both that may be other tokens to the draft.

Vocabularies of one family differ in at most 2.4 % (Gemma 3 and 4), those of different families in 97.6 % or more. In
between drafts get worse slowly. Of four tokens that the embedded draft proposes greedily, 1.98 are accepted as it is,
1.51 where the later half of its ids are exchanged (rare tokens, as those that a family adds), 0.32 where a random half
are, and 0.05 where 95 % are.
"""

NUM_EXAMPLES: Final = 5
"""Most differing tokens that a relation keeps to show."""

Fit: TypeAlias = Literal["as is", "but unused", "in part", "none"]
"""How a draft's vocabulary fits: every id in use by both is one token; those that differ are no tokens of a text; some
that differ are; or so many that drafts are mostly wrong."""

_FILLER: Final = re.compile(
    rb"[<\[]\|?(?:unused|reserved|extra|dummy|placeholder|pad|blank|control|special)[^\s<>\[\]]*\d\|?[>\]]",
    re.IGNORECASE,
)
"""Spelling of an id that was kept free, or was one of a row of such: it never got a meaning."""
_MARKER: Final = re.compile(
    rb"<\|[^\s<>]+>|<[^\s<>]+\|>|<(?:image|audio|video|vision|start_of|end_of|begin_of|im_)[^\s<>]*>", re.IGNORECASE
)
"""Spelling of a token that marks a place in a conversation or an image, whatever its file calls it."""


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """One id that is two tokens, by their spellings."""

    token_id: int
    target: bytes
    draft: bytes

    def __str__(self) -> str:
        return f"token {self.token_id} is {_show(self.target)} to the target and {_show(self.draft)} to the draft"


@dataclass(frozen=True, slots=True)
class VocabularyRelation:
    """What two vocabularies have in common. Ids that are padding to both are counted nowhere.

    Attributes:
        num_same: ids that are the same token to both.
        num_differing: ids that are one token to the target and another to the draft.
        num_unused: those of them that stand for no text, neither to the target nor to the draft.
        num_target_only: ids that the draft lacks or pads.
        num_draft_only: ids that the target lacks or pads.
        examples: the first differing tokens, at most :data:`NUM_EXAMPLES`.
        control: the first differing control tokens that have a meaning to both, at most :data:`NUM_EXAMPLES`.
        unshared_ids: ids of the draft, ascending, that are not the same token to the target. A draft that proposes
            one proposes nonsense.
    """

    num_same: int
    num_differing: int
    num_unused: int
    num_target_only: int
    num_draft_only: int
    examples: tuple[TokenDifference, ...]
    control: tuple[TokenDifference, ...]
    unshared_ids: tuple[int, ...]

    @property
    def num_common(self) -> int:
        """Number of ids that are in use by both, as the same token or another."""
        return self.num_same + self.num_differing

    @property
    def differing_share(self) -> float:
        """Share of the common ids that differ; 0 where there are none."""
        return self.num_differing / self.num_common if self.num_common else 0.0

    @property
    def fits(self) -> bool:
        """Whether drafts can be right: something is the same, and what the draft reads is mostly what was said."""
        return self.num_same > 0 and self.differing_share <= MAX_DIFFERING_SHARE

    @property
    def fit(self) -> Fit:
        """How the draft's vocabulary fits."""
        if not self.fits:
            return "none"
        if self.num_differing > self.num_unused:
            return "in part"
        return "but unused" if self.num_differing else "as is"


def relate_vocabularies(target: Vocabulary, draft: Vocabulary) -> VocabularyRelation:
    num_same = num_differing = num_unused = num_target_only = num_draft_only = 0
    examples: list[TokenDifference] = []
    control: list[TokenDifference] = []
    unshared_ids: list[int] = []
    pairs = zip_longest(_spellings(target), _spellings(draft))
    for token_id, (ours, theirs) in enumerate(pairs):
        if ours == theirs and ours is not None:
            num_same += 1
            continue
        unshared_ids.append(token_id)
        if ours is not None and theirs is not None:
            num_differing += 1
            if num_differing <= NUM_EXAMPLES:
                examples.append(TokenDifference(token_id, ours, theirs))
            num_unused += _is_unused(target, token_id, ours) and _is_unused(draft, token_id, theirs)
            if len(control) < NUM_EXAMPLES and _mean_something(target, draft, token_id, ours, theirs):
                control.append(TokenDifference(token_id, ours, theirs))
        elif ours is not None:
            num_target_only += 1
        elif theirs is not None:
            num_draft_only += 1
    return VocabularyRelation(
        num_same=num_same,
        num_differing=num_differing,
        num_unused=num_unused,
        num_target_only=num_target_only,
        num_draft_only=num_draft_only,
        examples=tuple(examples),
        control=tuple(control),
        unshared_ids=tuple(token_id for token_id in unshared_ids if token_id < draft.size),
    )


def check_vocabularies(target: Vocabulary, draft: Vocabulary) -> VocabularyRelation:
    """Return the relation of two vocabularies if drafts of one can be right for the other.

    Which tokens end an answer may differ, as between a base model and its instructed sibling: the target decides.

    Raises:
        VocabularyMismatchError: too many tokens differ; the message says how many, and names the first.
    """
    relation = relate_vocabularies(target, draft)
    if not relation.fits:
        raise VocabularyMismatchError(
            f"the draft model speaks other tokens than the target: {_describe_mismatch(relation)}; "
            "choose a draft of the same family, or draft without a model (`drafters=['suffix']`)"
        )
    return relation


def false_ends(vocabulary: Vocabulary) -> dict[int, bytes]:
    """Return the end tokens that a model's file has as ordinary text, by id: an answer ends where one is written."""
    ends = {token_id: vocabulary.token_spelling(token_id) or b"" for token_id in sorted(vocabulary.text_end_ids)}
    return {token_id: spelling for token_id, spelling in ends.items() if not _MARKER.fullmatch(spelling)}


def is_filler(spelling: bytes) -> bool:
    """Return whether a token is spelled as one that never got a meaning, such as ``<unused7>``."""
    return _FILLER.fullmatch(spelling) is not None


def _is_unused(vocabulary: Vocabulary, token_id: int, spelling: bytes) -> bool:
    """Return whether an id stands for no text: it is a control token, or spelled as one, or kept free."""
    if spelling[:1] in (b"<", b"[") and (_FILLER.fullmatch(spelling) or _MARKER.fullmatch(spelling)):
        return True
    return not vocabulary.token_bytes(token_id)


def _mean_something(target: Vocabulary, draft: Vocabulary, token_id: int, ours: bytes, theirs: bytes) -> bool:
    """Return whether an id is a control token to both, with a meaning."""
    if _FILLER.fullmatch(ours) or _FILLER.fullmatch(theirs):
        return False
    # All that has a spelling and adds none of it to a text.
    return not (target.token_bytes(token_id) or draft.token_bytes(token_id))


def _spellings(vocabulary: Vocabulary) -> Iterable[bytes | None]:
    return map(vocabulary.token_spelling, range(vocabulary.size))


def _describe_mismatch(relation: VocabularyRelation) -> str:
    if not relation.num_common:
        return "they have no token id in common"
    return (
        f"{relation.num_differing} of the {relation.num_common} token ids in use by both differ "
        f"({relation.differing_share:.2%}, and {MAX_DIFFERING_SHARE:.0%} is the most), and {relation.examples[0]}"
    )


def _show(spelling: bytes) -> str:
    return repr(spelling.decode("utf-8", "backslashreplace"))
