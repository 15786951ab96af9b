"""How often a draft model agrees with the target, at the places of the target's own answers.

At every place there are three figures, all after temperature and filters, as tokens are drawn: the chance that the
coupled verifier accepts (``coupled``), the overlap of both distributions, 1 - TV, which is the chance that rejection
accepts (arXiv 2211.17192), and whether both have the same most likely token, as in greedy decoding. By depth, the share
of places is counted to which the draft's own chains follow the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.core.arrays import Float64Array, FloatArray, Int64Array
from paceline.core.params import SamplingParams
from paceline.core.sampling import RowSampler
from paceline.engines.exactness import read_rows
from paceline.lab.answers import Place, WrittenAnswer, read_place
from paceline.lab.intervals import Depth, Ratio, Tally, depths

if TYPE_CHECKING:
    from paceline.engines.base import Engine
    from paceline.lab.replaying.recording import Recording

DRAFT: Final = "draft"
"""Name of what drafts with the draft model."""
MAX_CHUNK: Final = 64
"""Rows read in one pass: few enough that those of a large vocabulary fit in memory."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares by kind of text, all kinds under ``"all"``.

    Attributes:
        coupled: expected share of first draft tokens that the coupled verifier accepts.
        overlap: 1 - TV of both distributions.
        same_top: share of places where both have the same most likely token.
    """

    coupled: Mapping[str, Ratio]
    overlap: Mapping[str, Ratio]
    same_top: Mapping[str, Ratio]


@dataclass(frozen=True, slots=True)
class TextAgreement:
    """Sums over the places of one answer; see :class:`Agreement`."""

    kind: str
    places: int
    coupled: float
    overlap: float
    same_top: float


def measure_agreement(
    draft: Engine,
    written: Sequence[WrittenAnswer],
    *,
    target_vocab_size: int,
    unshared_ids: Sequence[int],
    temperature: float,
) -> Agreement:
    """Read answers with the draft model, and compare the distributions of each token with the target's.

    The draft needs a sequence to spare. It never proposes ids from ``target_vocab_size`` on, nor ``unshared_ids``,
    which are another token to the target. The answers were sampled at ``temperature``.
    """
    coupled, overlap, same_top = Tally(), Tally(), Tally()
    for text in agree_by_text(
        draft, written, target_vocab_size=target_vocab_size, unshared_ids=unshared_ids, temperature=temperature
    ):
        coupled.add(text.kind, text.coupled, text.places)
        overlap.add(text.kind, text.overlap, text.places)
        same_top.add(text.kind, text.same_top, text.places)
    return Agreement(coupled.ratios(), overlap.ratios(), same_top.ratios())


def agree_by_text(
    draft: Engine,
    written: Sequence[WrittenAnswer],
    *,
    target_vocab_size: int,
    unshared_ids: Sequence[int],
    temperature: float,
) -> Iterator[TextAgreement]:
    """Yield the agreement on each answer, as it is measured; see :func:`measure_agreement`."""
    sampler = RowSampler(SamplingParams(temperature=temperature, seed=0))
    masked = np.array([token_id for token_id in unshared_ids if token_id < target_vocab_size], dtype=np.int64)
    # The drafter puts this id in the place of those that the draft lacks, too.
    size, stand_in = draft.vocabulary.size, min(draft.vocabulary.end_ids, default=0)
    for each in written:
        token_ids = [token_id if token_id < size else stand_in for token_id in (*each.task.prompt_ids, *each.token_ids)]
        sums = [0.0, 0.0, 0.0]
        rows = read_predicting_rows(draft, token_ids, len(each.task.prompt_ids))
        for place, read in zip(each.places, rows, strict=True):
            row = fit_width(read, target_vocab_size)
            row[masked] = -np.inf
            for index, value in enumerate(compare_places(place, read_place(sampler, row))):
                sums[index] += value
        yield TextAgreement(each.task.workload, len(each.token_ids), *sums)


def compare_places(ours: Place, theirs: Place) -> tuple[float, float, float]:
    """Compare the distributions of one token.

    Returns:
        The chance that both draw one token with shared noise, 1 - TV, and 1.0 if they have the same most likely token.
    """
    ids = np.union1d(ours[0], theirs[0])
    target_probs, draft_probs = (_spread_over_ids(ids, place) for place in (ours, theirs))
    same_top = float(ours[0][ours[1].argmax()] == theirs[0][theirs[1].argmax()])
    return coupled_acceptance(target_probs, draft_probs), float(np.minimum(target_probs, draft_probs).sum()), same_top


def read_predicting_rows(
    engine: Engine, token_ids: Sequence[int], first: int = 1, *, width: int = MAX_CHUNK
) -> Iterator[FloatArray]:
    """Read a text and yield a row ``[vocab]`` for each of its tokens from index ``first`` on, which predicts it.

    The engine needs a sequence to spare; ``first`` is at least 1, as nothing predicts the first token. Passes have
    ``width`` rows, or as many as the engine takes.
    """
    width = min(width, engine.capabilities.max_rows, engine.capabilities.max_outputs)
    return read_rows(engine, token_ids[:-1], width, first_wanted=first - 1)


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


def fit_width(row: FloatArray, width: int) -> FloatArray:
    """Return a draft's row as long as the target's: a draft never proposes tokens that the target does not have."""
    if len(row) >= width:
        return row[:width]
    return np.concatenate((row, np.full(width - len(row), -np.inf, dtype=row.dtype)))


def measure_survival(recordings: Sequence[Recording], kinds: Sequence[str]) -> dict[str, list[Depth]]:
    """Return how far the draft's chains follow the answers, by kind of text (one for each recording).

    A draft token is tested at depth ``d`` where those before it were right, and where the answer goes on so far.
    """
    tallies: list[Tally] = []
    for recording, kind in zip(recordings, kinds, strict=True):
        (trace,) = (trace for trace in recording.traces if trace.name == DRAFT)
        accepted, tested = [0] * recording.depth, [0] * recording.depth
        for position, chain in enumerate(trace.chains):
            text = recording.token_ids[position + 1 :]
            for depth, token_id in enumerate(text[: recording.depth]):
                tested[depth] += 1
                if depth >= len(chain) or chain[depth].token_ids[0] != token_id:
                    break
                accepted[depth] += 1
        while len(tallies) < recording.depth:
            tallies.append(Tally())
        for tally, hits, trials in zip(tallies, accepted, tested, strict=True):
            tally.add(kind, hits, trials)
    groups = [tally.groups() for tally in tallies]
    return {group: depths([at_depth[group] for at_depth in groups]) for group in (groups[0] if groups else ())}


def _spread_over_ids(ids: Int64Array, place: Place) -> Float64Array:
    probs = np.zeros(len(ids))
    probs[np.searchsorted(ids, place[0])] = place[1]
    probs /= probs.sum()
    return probs
