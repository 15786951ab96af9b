"""What fits: the rows of a pass and the cells of the cache, for starts, drafts and prompts alike.

::

    rows     a pass has ``max_rows``; ``max_outputs`` of them give logits: those of trees, and ends of prompts
    cells    all sequences share ``cells``; each holds ``context_length`` tokens at most

Cells are counted before a request starts, not before each pass. Where the engine refuses a pass for want of cells all
the same (``NoRoomError``), the loop gives up, in this order: prompts and drafts (``sparing``), then the place of one
request after another, and at last the only request that is left, which ends (``no_room``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.core.errors import ContextLengthError
from paceline.core.request import Request
from paceline.core.stats import OffReason
from paceline.engines.base import EngineCapabilities
from paceline.engines.sequence_pool import SequencePool
from paceline.runtime.prefill_budget import PrefillBudget


class PassBudget:
    """Counts rows and cells against what the target has.

    Args:
        capabilities: the target's.
        pool: holds the target's sequences.
        prefill: how many rows of prompts are worth their time beside requests that decode.
        growth: tokens that every request that runs must be able to say before the cache is full, for one to start.
    """

    def __init__(
        self, capabilities: EngineCapabilities, pool: SequencePool, prefill: PrefillBudget, *, growth: int
    ) -> None:
        self._capabilities = capabilities
        self._pool = pool
        self._prefill = prefill
        self._growth = growth

    # --- a request ----------------------------------------------------------------------------------------------------

    def check_prompt(self, num_tokens: int) -> None:
        """Refuse a prompt that never fits.

        Raises:
            ContextLengthError: it leaves no room in the context for a token of answer, or is longer than the cache.
        """
        context_length, cells = self._capabilities.context_length, self._capabilities.cells
        if num_tokens >= context_length:
            raise ContextLengthError.of_prompt(num_tokens, context_length)
        if cells is not None and num_tokens > cells:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens and the cache holds {cells}: shorten the prompt or load the model "
                "with more cells"
            )

    def may_start(self, request: Request, running: Collection[Request]) -> bool:
        """Return whether there are cells for all a request has, and for what those that run read and say meanwhile."""
        cells = self._capabilities.cells
        if cells is None:
            return True
        unread = sum(len(other.token_ids) - other.cached for other in running)
        growing = self._growth * (len(running) + 1)
        missing = self._pool.used_cells + unread + len(request.token_ids) + growing - cells
        if missing > 0 and request.most_reused:
            most, namespace = request.most_reused, request.cache.namespace
            missing -= self._pool.shared_cells(request.token_ids, most=most, namespace=namespace)
        return missing <= 0

    # --- its draft ----------------------------------------------------------------------------------------------------

    @property
    def trees(self) -> bool:
        """Whether a draft may branch."""
        return self._capabilities.trees

    def may_draft(self, num_prompts: int) -> bool:
        """Return whether anything is drafted for a pass in which so many prompts are read."""
        return not (num_prompts and self._prefill.bounds)

    def max_draft(self, request: Request, num_sharing: int) -> int:
        """Return the most tokens of a draft, 0 or less for none, where so many requests share the pass."""
        can = self._capabilities
        # One token fewer than are left, and than a share of the rows: the target adds one of its own, from the root.
        most = min(self._num_left(request), can.max_outputs // max(1, num_sharing)) - 1
        return most if can.max_rollback is None else min(most, can.max_rollback)

    def why_no_draft(self, request: Request) -> OffReason:
        """Return which limit leaves a request no token to draft."""
        return "short" if self._num_left(request) <= 1 else "no_room"

    def _num_left(self, request: Request) -> int:
        return min(request.num_left, self._capabilities.context_length - len(request.token_ids))

    # --- a pass -------------------------------------------------------------------------------------------------------

    def tree_rows(self, sizes: Sequence[int], *, reads: bool, sparing: bool) -> list[int]:
        """Return for each tree, the first ones where there are too many, how many of its nodes a pass takes.

        Args:
            sizes: nodes of the trees, their roots included.
            reads: whether prompts are to be read, too.
            sparing: take roots alone.
        """
        room = self._capabilities.max_outputs
        # Wide trees leave a row for what is read beside them, and one for each tree that follows.
        room -= reads and room > len(sizes)
        if sum(sizes) <= room and not sparing:
            return [*sizes]
        rows: list[int] = []
        for size, num_after in zip(sizes, reversed(range(len(sizes))), strict=True):
            if room == 0:
                break
            rows.append(1 if sparing else min(size, max(1, room - num_after)))
            room -= rows[-1]
        return rows

    def prompt_rows(self, decoding: Sequence[Request], num_tree_rows: int, left: int, prompts: int) -> tuple[int, int]:
        """Return how many rows of prompts a pass takes, and how many of these may give logits.

        Args:
            decoding: requests with trees in the pass.
            num_tree_rows: rows of these trees.
            left: rows of the first prompt.
            prompts: how many are to be read.
        """
        room = self._capabilities.max_rows - num_tree_rows
        return self._prefill.max_rows(decoding, left, prompts, room), self._capabilities.max_outputs - num_tree_rows
