"""Pending trees, as every engine keeps them: which node follows which, and whether a step fits."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engines.base import COMMITTED_END, EngineCapabilities, Step


class PendingTree:
    """The undecided nodes of one sequence, in the order they were appended.

    ``depths[i]`` is 1 for a child of the committed end, so node ``i`` sits at position ``committed + depths[i] - 1``.
    """

    __slots__ = ("depths", "parents")

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.depths: list[int] = []

    def __len__(self) -> int:
        return len(self.parents)

    def append(self, parents: Sequence[int]) -> None:
        for parent in parents:
            self.depths.append(1 if parent == COMMITTED_END else self.depths[parent] + 1)
            self.parents.append(parent)

    def truncate(self, size: int) -> None:
        """Forget the nodes after the first ``size``: the undo of :meth:`append`."""
        del self.parents[size:]
        del self.depths[size:]

    def clear(self) -> None:
        self.parents.clear()
        self.depths.clear()

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from a child of the committed end down to ``node``; empty for the committed end."""
        path = []
        while node != COMMITTED_END:
            path.append(node)
            node = self.parents[node]
        path.reverse()
        return path

    def check_path(self, path: Sequence[int]) -> None:
        """Raise ``ValueError`` unless ``path`` runs downwards from a child of the committed end."""
        previous = COMMITTED_END
        for node in path:
            if not 0 <= node < len(self.parents) or self.parents[node] != previous:
                raise ValueError(f"{list(path)} is not a path of the pending tree {self.parents}")
            previous = node


def check_pass(
    steps: Sequence[Step],
    sequences: Sequence[tuple[PendingTree, int]],
    capabilities: EngineCapabilities,
    vocabulary_size: int,
) -> int:
    """Return the rows of a pass; raise ``ValueError`` if it breaks the contract. Changes nothing.

    ``sequences`` are the pending tree of each step's sequence and the number of its committed tokens.
    """
    if not steps:
        raise ValueError("a pass needs at least one step")
    if len({step.sequence for step in steps}) < len(steps):
        raise ValueError("a pass takes at most one step a sequence")
    rows = outputs = 0
    for step, (pending, committed) in zip(steps, sequences, strict=True):
        check_step(step, pending, committed, capabilities)
        if min(step.token_ids) < 0 or max(step.token_ids) >= vocabulary_size:
            raise ValueError(f"tokens {list(step.token_ids)} are not all in a vocabulary of {vocabulary_size}")
        rows += len(step.token_ids)
        outputs += len(step.outputs)
    if rows > capabilities.max_rows:
        raise ValueError(f"a pass of {rows} rows is over the limit of {capabilities.max_rows}")
    if outputs > capabilities.max_outputs:
        raise ValueError(f"a pass with logits of {outputs} rows is over the limit of {capabilities.max_outputs}")
    return rows


def check_step(step: Step, pending: PendingTree, committed: int, capabilities: EngineCapabilities) -> None:
    """Raise ``ValueError`` if ``step`` breaks the contract for a sequence in this state; changes nothing."""
    rows = len(step.token_ids)
    before = len(pending)
    if rows == 0:
        raise ValueError("a step needs at least one row")
    if step.states is not None and not capabilities.reads_states:
        raise ValueError("a step brings states, and this engine is no head")
    if len(step.parents) != rows:
        raise ValueError(f"a step of {rows} tokens has {len(step.parents)} parents")
    deepest = 0
    depths = pending.depths
    new_depths: list[int] = []
    for row, parent in enumerate(step.parents):
        if not COMMITTED_END <= parent < before + row:
            raise ValueError(f"row {row} follows node {parent}, which is not pending before it")
        if parent == COMMITTED_END:
            depth = 1
        else:
            depth = 1 + (depths[parent] if parent < before else new_depths[parent - before])
        new_depths.append(depth)
        deepest = max(deepest, depth)
        if not capabilities.trees and parent != before + row - 1:
            raise ValueError(f"row {row} branches off node {parent}, and this engine has no trees")
    if committed + deepest > capabilities.context_length:
        raise ValueError(
            f"{committed} committed and {deepest} pending tokens exceed the context of {capabilities.context_length}"
        )
    previous = -1
    for row in step.outputs:
        if not previous < row < rows:
            raise ValueError(f"outputs {list(step.outputs)} are not ascending rows of a step of {rows}")
        previous = row
