"""Which steps of a pass of a recurrent model llama.cpp computes together.

Of each sequence llama.cpp keeps the recurrent state, and snapshots of it to step back to, after the last rows of the
latest *native call* (one ``llama_decode``). It computes a native call in one graph run only where all its sequences
have as many rows. Else a later run may move the state of a sequence of an earlier one, and the snapshots stay behind: a
step back then reads another sequence's state, and nothing says so. So what may be stepped back is in the last native
call of a pass, where all steps are padded to the longest::

    pass of four steps        native calls             rows of the second
    prompt, 200 rows    ──►   first: the prompt        root, draft, draft, draft
    root, 3 drafts      ──┐                            root, draft, pad, pad
    root, 1 draft       ──┼►  second                   root, pad, pad, pad
    root                ──┘

Padding saves time too: steps of 5, 3 and 1 rows would be three graph runs, each of which reads all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_GRAPH_RUN_ROWS: Final = 8
"""Rows that are taken to cost as much as another graph run."""


@dataclass(frozen=True, slots=True)
class NativeCall:
    """Steps of a pass that llama.cpp computes together.

    Attributes:
        steps: numbers of the steps in the pass, ascending.
        rows: rows that each is padded to; 0 for no padding.
        even: whether all steps have as many rows then, so that all may be stepped back if no other call comes after.
    """

    steps: Sequence[int]
    rows: int
    even: bool


def deal_steps(lengths: Sequence[int], max_rollback: int) -> list[NativeCall]:
    """Deal the steps of a pass, by their rows, out to native calls, in their order.

    A step of one row is never stepped back, nor is one of more rows than there are snapshots (``max_rollback``), unless
    it is alone. Such steps get a call of their own, the first, where padding them would cost more than another graph
    run.
    """
    everything = range(len(lengths))
    is_even = min(lengths) == max(lengths)
    if max_rollback == 0 or is_even:
        return [NativeCall(everything, 0, is_even)]
    longest = max((length for length in lengths if length <= max_rollback + 1), default=0)
    apart = {index for index, length in enumerate(lengths) if length > max_rollback + 1}
    single = [index for index, length in enumerate(lengths) if length == 1]
    if longest > 1 and (apart or (longest - 1) * len(single) > _GRAPH_RUN_ROWS):
        apart.update(single)
    calls = []
    if apart:
        calls.append(NativeCall([index for index in everything if index in apart], 0, even=len(apart) == 1))
    if len(apart) < len(lengths):
        calls.append(NativeCall([index for index in everything if index not in apart], longest, even=True))
    return calls
