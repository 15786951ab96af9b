"""How two tokenizers cut the same text: which tokens are the same in both, and which of their ends meet.

That two vocabularies have most tokens in common says little of how often both cut a text at the same places, and drafts
are texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import InputError
from paceline.lab.doctor.measures import ALL, Tally
from paceline.lab.intervals import Ratio

if TYPE_CHECKING:
    from paceline.core.vocabulary import Vocabulary


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
