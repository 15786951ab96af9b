"""The engine contract: one loaded model on one device, its vocabulary, its cache.

A *sequence* is a row of committed tokens in the engine's cache, followed by a *pending tree* of nodes that were
evaluated but not decided yet::

    committed tokens            pending nodes (numbered in the order they were appended)
    t0 t1 t2 ... t(n-1)   ──┬── 0 ──┬── 1 ── 3
                            │       └── 2
                            └── (a parent of -1 is the committed end)

``forward`` appends nodes, in as many passes as the caller likes; ``commit`` turns one root-to-node path into committed
tokens and forgets the other nodes. Nothing else moves tokens across that line, and only the owner of a sequence (the
decoding loop for a target, the draft-model drafter for a draft) asks for it.

All engines pass the same contract suite (``tests/engines/test_contract.py``); core never asks which one is running.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, cast

from paceline.core.arrays import FloatArray
from paceline.core.vocabulary import Vocabulary

Pooling: TypeAlias = Literal["none", "mean", "cls", "last", "rank"]
"""How the vectors of a text's tokens become one: none at all, their mean, the first one, the last one, or a score."""

COMMITTED_END = -1
"""The parent of a pending node that follows the last committed token."""


@dataclass(frozen=True, slots=True)
class Step:
    """Rows that one forward pass appends to one sequence. Plain data, so that it can cross a process.

    Attributes:
        sequence: handle returned by :meth:`Engine.open` or :meth:`Engine.fork`.
        token_ids: ``[rows]`` tokens to feed.
        parents: ``[rows]`` pending node each row follows, or :data:`COMMITTED_END`. With ``k`` nodes pending before
            the pass, row ``i`` becomes node ``k + i``; a parent is always an earlier node.
        outputs: rows (indices into ``token_ids``, ascending) whose logits are wanted.
        states: for a head (:attr:`EngineCapabilities.reads_states`) ``[rows, width]``, the target's state that each row
            is read with; ``None`` to read each with the head's own state of the row it follows.
    """

    sequence: int
    token_ids: Sequence[int]
    parents: Sequence[int]
    outputs: Sequence[int]
    states: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can do with the model it has loaded.

    Attributes:
        context_length: most tokens one sequence may hold, committed and pending together.
        max_rows: most rows in one forward pass, over all its steps.
        max_outputs: most rows of one pass whose logits can be asked for.
        max_sequences: most sequences open at once.
        cells: most tokens that all sequences together may hold, committed and pending, tokens that forks share counted
            once; ``None`` for no limit but what each may hold.
        trees: whether a pending node may have several children; without, a pending tree is a chain.
        max_rollback: most rows of a step that can be dropped again; ``None`` means that any pending nodes and committed
            tokens can be dropped, however many passes ago they were fed. With a number rows can be dropped

            - before the engine's next pass, once, and never all of the step;
            - of a step of more than ``max_rollback + 1`` rows only if it had its pass to itself;
            - not at all once the sequence was forked.
        state_width: numbers of the state that each token leaves (:meth:`Engine.states`); 0 where none are held.
        reads_states: whether it is a *head*, whose rows are tokens together with states of that width.
        logit_tolerance: difference that is put down to rounding, for these weights, without measuring it: between
            logits of the same row in passes of different width and at other places in the cache. What is more has to
            be measured (docs/parts/verification.md, "Numerics").
        shares_passes: whether rows of several sequences may share a pass; else they are rounded otherwise than by
            themselves, which nobody wants who loaded the model for exact texts.
    """

    context_length: int
    max_rows: int
    max_outputs: int
    max_sequences: int
    cells: int | None
    trees: bool
    max_rollback: int | None
    logit_tolerance: float
    shares_passes: bool = True
    state_width: int = 0
    reads_states: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SavedSequence:
    """The committed tokens of a sequence as :meth:`Engine.save` copied them to host memory.

    Attributes:
        length: number of tokens.
        num_bytes: host memory that the copy takes.
        floor: fewest tokens that a sequence restored from it, or a fork of that, can be trimmed to, but for none at
            all; 0 for any number.
        state: what only the engine that made it reads.
    """

    length: int
    num_bytes: int
    floor: int
    state: object


class ForwardOutput(Protocol):
    """What a forward pass computed, possibly still being computed.

    Valid until the engine's next ``forward``; an engine that can tell raises ``EngineError`` when it is read later.
    """

    def wait(self) -> None:
        """Return when the pass has finished."""
        ...

    def logits(self, step: int, output: int) -> FloatArray:
        """Return the logits ``[vocab]`` of ``steps[step].outputs[output]``: borrowed, read-only, waits if needed."""
        ...


class Engine(Protocol):
    """One loaded model. Sequences are small integer handles that the engine gives out.

    Every method raises :class:`~paceline.core.errors.ClosedError` for a handle that is not open, and for everything but
    :meth:`close` once the engine is closed. A sequence that an interrupt caught half changed may raise ``EngineError``
    until it is closed; the others are as they were.
    """

    @property
    def description(self) -> str:
        """The model, its quantisation and where it runs, in a few words for people."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary."""
        ...

    @property
    def capabilities(self) -> EngineCapabilities:
        """What this engine can do."""
        ...

    def open(self) -> int:
        """Start an empty sequence and return its handle.

        Raises:
            CapabilityError: ``max_sequences`` are open already.
        """
        ...

    def forward(self, steps: Sequence[Step]) -> ForwardOutput:
        """Append the rows of ``steps`` (at most one step a sequence) to their pending trees in one pass.

        Raises:
            NoRoomError: the cache cannot hold the rows; no sequence was changed.
            EngineError: the pass failed; no sequence was changed.
            CapabilityError: this process was forked after a pass, and the threads that make passes stayed behind.
            ValueError: a step breaks the contract (too many rows, unknown parent, a branch without ``trees``).
        """
        ...

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        """Make one path of the pending tree committed tokens and drop every other pending node.

        ``path`` runs from a child of the committed end downwards; an empty one drops all pending nodes.

        Raises:
            CapabilityError: more would be dropped than ``max_rollback`` allows; nothing was changed.
            ValueError: ``path`` is not a path of the pending tree.
        """
        ...

    def length(self, sequence: int) -> int:
        """Return the number of committed tokens."""
        ...

    def states(self, sequence: int, start: int, stop: int) -> FloatArray:
        """Return the states of committed tokens ``[stop - start, state_width]``: borrowed until the sequence changes.

        A state is what the output layer reads for that token, or what chosen layers do, one after the other
        (``ModelOptions.hold_states``).

        Raises:
            CapabilityError: the engine holds no states.
            ValueError: those of some of these tokens are not held (:meth:`first_state`).
        """
        ...

    def first_state(self, sequence: int) -> int:
        """Return the first committed token whose state is held, with those of all behind it.

        States of a text's beginning are let go, and those of a sequence that was restored may never have been there.

        Raises:
            CapabilityError: the engine holds no states.
        """
        ...

    def fork(self, sequence: int) -> int:
        """Start a sequence that shares the committed tokens of ``sequence``, which must have nothing pending.

        Raises:
            CapabilityError: ``max_sequences`` are open already.
            NoRoomError: the tokens could not be shared, and there are no cells for a copy.
        """
        ...

    def trim(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` committed tokens; pending nodes are dropped.

        Raises:
            CapabilityError: more would be dropped than ``max_rollback`` allows, or than leaves the ``floor`` of a
                sequence that was restored; nothing was changed.
            ValueError: fewer tokens are committed.
        """
        ...

    def saved_bytes(self, sequence: int) -> int:
        """Return the host memory that :meth:`save` would take now, in bytes."""
        ...

    def save(self, sequence: int) -> SavedSequence:
        """Copy the committed tokens' state to host memory. The sequence, which has nothing pending, stays as it is.

        Raises:
            CapabilityError: this model's state cannot be copied, or not as the engine was loaded.
            ValueError: nodes are pending.
        """
        ...

    def restore(self, saved: SavedSequence) -> int:
        """Start a sequence that holds the saved tokens, in cells of its own, and return its handle.

        Raises:
            NoRoomError: the cache has no cells for them; nothing was changed.
            CapabilityError: ``max_sequences`` are open already; nothing was changed.
            ValueError: another engine saved them, or the same one before its cache was made anew.
        """
        ...

    def close_sequence(self, sequence: int) -> None:
        """Forget a sequence and free its cells. Its handle is unknown afterwards."""
        ...

    def close(self) -> None:
        """Free native memory. Idempotent."""
        ...


def lender(head: Engine) -> Engine | None:
    """Return the target whose sequences a head has for its own, as it reads that one's cache; ``None`` for others."""
    found: Engine | None = getattr(head, "lender", None)
    return found


class LentSequences(ABC):
    """The part of a head that reads its target's cache: each of its sequences is one of the target's.

    Drafts are pending in the head alone, until its ``commit`` of whatever path forgets them.
    """

    lender: Engine

    @abstractmethod
    def commit(self, sequence: int, path: Sequence[int]) -> None: ...

    def length(self, sequence: int) -> int:
        return self.lender.length(sequence)

    def fork(self, sequence: int) -> int:
        return self.lender.fork(sequence)

    def trim(self, sequence: int, length: int) -> None:
        self.commit(sequence, ())
        self.lender.trim(sequence, min(length, self.lender.length(sequence)))

    def saved_bytes(self, sequence: int) -> int:
        return self.lender.saved_bytes(sequence)

    def save(self, sequence: int) -> SavedSequence:
        return self.lender.save(sequence)

    def restore(self, saved: SavedSequence) -> int:
        return self.lender.restore(saved)

    def close_sequence(self, sequence: int) -> None:
        self.commit(sequence, ())
        self.lender.close_sequence(sequence)


def check_lent(sequence: int, committed: int, num_pending: int) -> None:
    """Raise ``ValueError`` where nothing can be drafted behind a sequence of the target."""
    if num_pending or not committed:
        raise ValueError(
            f"sequence {sequence} of the target has {committed} committed tokens and {num_pending} pending nodes: "
            "drafts follow one token or more, and none that is pending"
        )


class Block(Protocol):
    """What a head says in one pass of the tokens after a text. Valid until the head's next pass."""

    def logits(self, drafted: Sequence[int]) -> FloatArray:
        """Return the logits ``[vocab]`` of what follows these drafts of the block: borrowed and read-only."""
        ...

    def confidence(self, drafted: Sequence[int]) -> float | None:
        """Return how likely it is that a draft after these is right; ``None`` for a head that does not say it."""
        ...


class BlockHead(Engine, Protocol):
    """A head that says several tokens in one pass. Its cache holds states: ``forward`` reads these alone.

    A step of it has states, the tokens that they are of, which are not read, and no outputs.
    """

    @property
    def block_size(self) -> int:
        """Tokens of a block: drafts that :meth:`Block.logits` is given are fewer."""
        ...

    def draft_blocks(self, roots: Sequence[tuple[int, int]]) -> Sequence[Block]:
        """Return what follows the committed states of sequences and a root behind each; nothing stays in the cache.

        Args:
            roots: sequences, one or more and with nothing pending, and a token each; so many that ``max_rows`` is not
                exceeded by ``block_rows`` for each.

        Raises:
            NoRoomError: the cache cannot hold the rows.
            EngineError: the pass failed.
            ValueError: the roots break the contract.
        """
        ...

    @property
    def block_rows(self) -> int:
        """Rows that a block takes in a pass."""
        ...


def as_block_head(head: Engine) -> BlockHead | None:
    """Return a head that says several tokens in one pass; ``None`` for all other engines."""
    return cast(BlockHead, head) if hasattr(head, "draft_blocks") else None


def paced_draft(draft: Engine | None) -> Engine | None:
    """Return a draft whose passes add one token, so that what they cost is measured before; ``None`` for others."""
    return None if draft is None or as_block_head(draft) is not None else draft


class EmbeddingEngine(Protocol):
    """One loaded model that turns texts into vectors. One thread at a time may use it."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary."""
        ...

    @property
    def pooling(self) -> Pooling:
        """How the vectors of a text's tokens become one."""
        ...

    @property
    def width(self) -> int:
        """Numbers in a vector; under ``rank`` the first of them is a text's score."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of a text, and of all texts of a pass."""
        ...

    @property
    def max_texts(self) -> int:
        """Most texts of a pass."""
        ...

    def read_text(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that open and close it; a control token's name is that token."""
        ...

    def read_pair(self, query: str, document: str) -> list[int]:
        """Return the tokens of a query and a document, as a model that ranks documents wants to see them."""
        ...

    def forward(self, texts: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Return what one pass makes of texts: of each ``[width]``, or ``[tokens, width]`` under ``none``."""
        ...

    def close(self) -> None:
        """Free native memory. Idempotent."""
        ...
