"""Making a target follow a given text at full cost, so that what a better model would have written can be measured.

Every pass is computed and every visited row is sampled as ever; only then the choice is replaced by the text's token.
A drafted token is accepted if it is the text's. Plain runs are forced likewise, so both do the same work for the same
text. What comes of it says what drafting gains *if* the target writes that text, not that it would.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.arrays import FloatArray
from paceline.core.tree import DraftTree
from paceline.core.verify import RowLogits, Verifier, Walk, follow


class ForcedVerifier:
    """Judges by a reference text instead of the target's choices, which it computes all the same.

    Past the reference's end the target's own choices count. ``inner``, the request's verifier, draws the proposals of
    draft models.
    """

    # Whether a draft is accepted does not depend on how it was drawn.
    judges_every_draw = False

    def __init__(self, inner: Verifier, reference: Sequence[int], num_prompt: int) -> None:
        self.name = inner.name
        self.sampler = inner.sampler
        # Proposals are drawn as always, from the draft model's own rows.
        self.propose = inner.propose
        self._reference = reference
        self._num_prompt = num_prompt

    def walk(self, tree: DraftTree, num_rows: int, row_logits: RowLogits, history: Sequence[int]) -> Walk:
        """Follow the reference through the tree until it leaves the tree."""
        return follow(tree, row_logits, history, self._choose, reads_history=self.sampler.reads_history)

    def _choose(self, row: FloatArray, position: int, history: Sequence[int]) -> int:
        choice = self.sampler.emit(row, position, history)
        index = position - self._num_prompt
        return self._reference[index] if index < len(self._reference) else choice
