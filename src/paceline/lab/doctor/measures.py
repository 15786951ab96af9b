"""Counts by kind of text, and the closed form of coupled acceptance. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.arrays import Float64Array
from paceline.lab.intervals import NO_ERROR, Ratio, Share, ratio, share

ALL = "all"
"""Name of the group that pools every kind of text."""


@dataclass(frozen=True, slots=True)
class Depth:
    """Chain acceptance at one depth.

    Attributes:
        depth: 1 is the first draft token of a round.
        accepted: share of the drafts at this depth that were accepted, of those whose predecessors all were.
        survival: product of the shares down to here.
        survival_error: its standard error, by leaving out one text after the other; ``None`` as for ratios.
    """

    depth: int
    accepted: Ratio
    survival: float | None
    survival_error: float | None


class Tally:
    """Sums and counts, kept by kind of text and by text."""

    def __init__(self) -> None:
        self._texts: dict[str, list[tuple[float, int]]] = {}

    def add(self, kind: str, total: float, count: int) -> None:
        self._texts.setdefault(kind, []).append((float(total), int(count)))

    def groups(self) -> dict[str, list[tuple[float, int]]]:
        return self._texts | {ALL: [text for texts in self._texts.values() for text in texts]}

    def ratios(self) -> dict[str, Ratio]:
        return {group: ratio(texts) for group, texts in self.groups().items()}

    def totals(self) -> dict[str, float]:
        return {group: sum(total for total, _ in texts) for group, texts in self.groups().items()}

    def shares(self) -> dict[str, Share]:
        """Return the share of every kind and of all, where each text's sum is how many of its count have a property."""
        return {
            group: share(round(sum(total for total, _ in texts)), sum(count for _, count in texts))
            for group, texts in self.groups().items()
        }


def depths(texts: Sequence[Sequence[tuple[float, int]]]) -> list[Depth]:
    """Chain the acceptance at each depth, given that of all before, into survivals.

    ``texts`` is ``[depth][text]`` accepted and tested drafts; texts are in the same order at every depth.
    """
    counts = np.array(texts, dtype=np.float64)
    hits, trials = counts[..., 0], counts[..., 1]
    survivals = _survivals(hits.sum(axis=1), trials.sum(axis=1))
    num_texts = counts.shape[1]
    others = np.stack(
        [
            _survivals(hits.sum(axis=1) - hits[:, text], trials.sum(axis=1) - trials[:, text])
            for text in range(num_texts)
        ]
    )
    # A depth that no other text came to has no survival without the one that did, hence no error either.
    errors = np.sqrt((num_texts - 1) / num_texts * ((others - others.mean(axis=0)) ** 2).sum(axis=0))
    return [
        Depth(
            index + 1,
            ratio(at_depth),
            None if math.isnan(survivals[index]) else float(survivals[index]),
            float(errors[index]) if errors[index] > NO_ERROR else None,
        )
        for index, at_depth in enumerate(texts)
    ]


def coupled_acceptance(target_probs: Float64Array, draft_probs: Float64Array) -> float:
    """Return ``sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)`` of two distributions ``[vocab]``.

    It is the chance that ``argmax(log p + g)`` and ``argmax(log q + g)`` with the same Gumbel noise are one token
    (arXiv 2408.07978). Where ``p_j / q_j >= p_i / q_i`` the first of the two is the larger, so once tokens are sorted
    by that quotient each inner sum is a running sum of p plus one of q.
    """
    both = (target_probs > 0.0) & (draft_probs > 0.0)
    p, q = target_probs[both], draft_probs[both]
    # A token too unlikely for a quotient to be a float64 adds 1 / inf, which is right.
    with np.errstate(over="ignore"):
        order = np.argsort(p / q)
        p, q = p[order], q[order]
        p_from_here = np.cumsum(p[::-1])[::-1] + target_probs[draft_probs == 0.0].sum()
        q_before = np.cumsum(q) - q + draft_probs[target_probs == 0.0].sum()
        return float((1.0 / (p_from_here / p + q_before / q)).sum())


def _survivals(hits: Float64Array, trials: Float64Array) -> Float64Array:
    """Return the running product of hits / trials, ``[depth]``; NaN from where nothing was tested."""
    accepted: Float64Array = np.divide(hits, trials, out=np.full_like(hits, np.nan), where=trials > 0.0)
    return accepted.cumprod()
