"""How far one history agrees with another: state that is kept along the latest is good up to there."""

from __future__ import annotations


def num_common(known: list[int], history: list[int], offset: int) -> int:
    """Return with how many tokens of ``known`` the history goes on after ``offset``.

    Slices are compared, as a loop over the tokens of a long text would take longer than all else about a row.
    """
    low, high = 0, min(len(known), len(history) - offset)
    step = high
    while step:
        if history[offset + low : offset + low + step] == known[low : low + step]:
            low += step
            if low >= high:
                break
        else:
            high = low + step - 1
        step = (high - low + 1) // 2
    return low
