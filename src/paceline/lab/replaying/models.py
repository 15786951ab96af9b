"""What stands for a model whose text is known already: the loop makes its rounds, and no rows are read.

::

    the text ──> TextVerifier ──> what is accepted and emitted ──┐
                                                                 ├── DecodingLoop ── drafters and a policy, as live
    seconds of passes ──> ReplayEngine ──> the virtual clock ────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.clock import VirtualClock
from paceline.core.errors import CapabilityError
from paceline.core.params import SamplingParams
from paceline.core.sampling import RowSampler
from paceline.core.tree import DraftTree
from paceline.core.verify import CoupledVerifier, Proposal, RowLogits, Walk, follow
from paceline.core.vocabulary import Vocabulary
from paceline.engines.base import EngineCapabilities, SavedSequence, Step
from paceline.engines.cell_count import CellCount
from paceline.engines.pending_tree import PendingTree
from paceline.engines.state_track import MAX_STATES

_NO_LIMIT = 1 << 30
_NO_ROW = np.empty(0, dtype=np.float32)

PassCost: TypeAlias = Callable[[int, int, int], float]
"""Seconds of a pass, from its rows, the tokens in the cache before it, and the sequences that take part."""

NoteRow: TypeAlias = Callable[[int, FloatArray], None]
"""Called with a position of a text, and the row ``[vocab]`` that predicts its token."""


class TextVerifier(CoupledVerifier):
    """Judges drafts by a text, without the target's rows; a draft model's proposals are drawn as under ``coupled``.

    Below a draft that the text does not follow the target would have said something else, but no walk ever comes there.

    Args:
        params: how proposals are drawn.
        num_prompt: tokens of the prompt.
        text: the answer, at least one token. Past its end its last token is repeated.
        note_row: called with the row of the draft for each token of the text that it is asked for, and the position of
            that token. The row is borrowed.
    """

    def __init__(
        self, params: SamplingParams, num_prompt: int, text: Sequence[int], note_row: NoteRow | None = None
    ) -> None:
        super().__init__(RowSampler(params, num_prompt))
        self._num_prompt = num_prompt
        self._text = text
        self._note_row = note_row
        # Of the token that comes next; rows for later ones are of texts that the draft made up.
        self._position = num_prompt

    def propose(
        self, logits: FloatArray, position: int, history: Sequence[int], count: int, *, margins: bool = False
    ) -> list[Proposal]:
        if self._note_row is not None and position == self._position:
            self._note_row(position, logits)
        return super().propose(logits, position, history, count, margins=margins)

    def walk(self, tree: DraftTree, num_rows: int, row_logits: RowLogits, history: Sequence[int]) -> Walk:
        """Follow the text through the tree until it leaves the tree."""
        self._position = len(history) + 1
        return follow(tree, lambda node: _NO_ROW, history, self._choose, reads_history=False)

    def _choose(self, row: FloatArray, position: int, history: Sequence[int]) -> int:
        return self._text[min(position - self._num_prompt, len(self._text) - 1)]


_NO_ROWS_HELD = "this drafter reads the target's rows, which recordings do not hold: leave it out"


class NoRows:
    """The output of a model that is not there."""

    def wait(self) -> None:
        """Virtual passes are over at once."""

    def logits(self, step: int, output: int) -> FloatArray:
        raise CapabilityError(_NO_ROWS_HELD)


@dataclass(slots=True)
class _Cached:
    """How many tokens a sequence holds, and what is undecided after them."""

    committed: int = 0
    pending: PendingTree = field(default_factory=PendingTree)


class ReplayEngine:
    """Stands for a model whose rows nobody reads: counts what its cache would hold, and charges for passes.

    Args:
        max_depth: deepest tree of a round; ``None`` for no limit.
        states: ``[tokens, width]`` of the one text that it stands for; ``None`` where none were recorded.
        max_sequences: requests that it holds at once.
        max_rows: rows of a pass.
        token_bytes: host memory of a token that is saved.
    """

    description = "replayed model"

    def __init__(
        self,
        cost: PassCost,
        clock: VirtualClock,
        vocabulary: Vocabulary,
        *,
        max_depth: int | None = None,
        states: FloatArray | None = None,
        max_sequences: int = _NO_LIMIT,
        max_rows: int = _NO_LIMIT,
        token_bytes: int = 0,
    ) -> None:
        self.vocabulary = vocabulary
        self.capabilities = EngineCapabilities(
            context_length=_NO_LIMIT,
            max_rows=max_rows,
            max_outputs=max_rows,
            max_sequences=max_sequences,
            cells=None,
            trees=True,
            # The loop drafts no deeper than can be taken back, which is how it hears what was recorded.
            max_rollback=max_depth,
            logit_tolerance=0.0,
        )
        self._cost = cost
        self._clock = clock
        self._states = states
        self._token_bytes = token_bytes
        self._sequences: dict[int, _Cached] = {}
        self._cells = CellCount()
        self._opened = 0

    def states(self, sequence: int, start: int, stop: int) -> FloatArray:
        if self._states is None:
            raise CapabilityError(_NO_ROWS_HELD)
        rows: FloatArray = self._states[start:stop]
        return rows

    def first_state(self, sequence: int) -> int:
        return max(self.length(sequence) - MAX_STATES, 0)

    def open(self) -> int:
        handle = self._opened
        self._opened += 1
        self._sequences[handle] = _Cached()
        return handle

    def forward(self, steps: Sequence[Step]) -> NoRows:
        used, rows = self._count_used(), 0
        for step in steps:
            self._sequences[step.sequence].pending.append(step.parents)
            rows += len(step.token_ids)
        self._clock.advance(self._cost(rows, used, len(steps)))
        return NoRows()

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        state = self._sequences[sequence]
        state.pending.check_path(path)
        state.committed += len(path)
        state.pending.clear()

    def length(self, sequence: int) -> int:
        return self._sequences[sequence].committed

    def fork(self, sequence: int) -> int:
        handle, length = self.open(), self.length(sequence)
        self._cells.fork(sequence, handle, length)
        self._sequences[handle].committed = length
        return handle

    def saved_bytes(self, sequence: int) -> int:
        return self.length(sequence) * self._token_bytes

    def save(self, sequence: int) -> SavedSequence:
        return SavedSequence(self.length(sequence), self.saved_bytes(sequence), 0, self)

    def restore(self, saved: SavedSequence) -> int:
        if saved.state is not self:
            raise ValueError("another engine saved this sequence: restore it there")
        handle = self.open()
        self._sequences[handle].committed = saved.length
        return handle

    def trim(self, sequence: int, length: int) -> None:
        state = self._sequences[sequence]
        self._cells.trim(sequence, length)
        state.committed = length
        state.pending.clear()

    def close_sequence(self, sequence: int) -> None:
        self._cells.close(sequence)
        del self._sequences[sequence]

    def close(self) -> None:
        self._sequences.clear()

    def _count_used(self) -> int:
        """Return the tokens in the cache; what sequences share counts once."""
        states = self._sequences
        committed = self._cells.used({handle: state.committed for handle, state in states.items()})
        return committed + sum(len(state.pending) for state in states.values())
