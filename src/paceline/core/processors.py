"""From a row of logits to the candidates that may be emitted: bias, penalties, truncation, temperature.

Processors run in the order that :class:`~paceline.core.params.SamplingParams` states. Each takes and returns
:class:`Candidates`; truncation makes them sparse, so that everything after it is cheap however large the vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.core.arrays import FloatArray, Int64Array
from paceline.core.errors import SamplingError
from paceline.core.params import SamplingParams

TOP_P_FIRST_LOOK = 256
"""Largest candidates sorted first when looking for a top-p set; the look widens only if they do not reach p."""


SAMPLED_SIZE = 1024
"""Longer rows are searched for their largest values by way of a sample."""
SAMPLE_STRIDE = 64
"""Every so-manieth value is in it; of rows below 16,384 more, so that there are 256."""


@dataclass(slots=True)
class Candidates:
    """Tokens that may be emitted, with unnormalised log-probabilities.

    Attributes:
        ids: ``[n]`` ascending token ids, or ``None`` when every id is a candidate.
        logits: ``[n]`` of the engine's float type; ``-inf`` is a banned token.
        owned: whether ``logits`` may be changed in place (the engine's rows are borrowed).
    """

    ids: Int64Array | None
    logits: FloatArray
    owned: bool

    def keep(self, indices: Int64Array) -> Candidates:
        ids = indices if self.ids is None else self.ids[indices]
        return Candidates(ids, self.logits[indices], owned=True)

    def writable(self) -> FloatArray:
        """Return the logits for changing in place, copied first if they are borrowed."""
        if not self.owned:
            self.logits = self.logits.copy()
            self.owned = True
        return self.logits


Processor: TypeAlias = Callable[[Candidates, Sequence[int]], Candidates]
"""Takes candidates and the tokens before them (all of the history, drafted ancestors included)."""


def build_processors(params: SamplingParams) -> list[Processor]:
    factories: dict[str, Callable[[SamplingParams], Processor | None]] = {
        "logit_bias": _logit_bias,
        "penalties": _penalties,
        "top_k": _top_k,
        "top_p": _top_p,
        "min_p": _min_p,
        "temperature": _temperature,
    }
    # Truncation and temperature cannot change which logit is the largest, so greedy decoding leaves them out.
    names = [name for name in params.order if not params.greedy or name in ("logit_bias", "penalties")]
    processors = (factories[name](params) for name in names)
    return [processor for processor in processors if processor is not None]


def _logit_bias(params: SamplingParams) -> Processor | None:
    if not params.logit_bias:
        return None
    token_ids = np.fromiter(params.logit_bias, dtype=np.int64)
    biases = np.fromiter(params.logit_bias.values(), dtype=np.float64)
    bans = bool((biases == -math.inf).any())

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        indices, found = _find_candidates(candidates, token_ids)
        if len(indices):
            # Rounded to the type of the logits first, and then added in it.
            candidates.writable()[indices] += biases[found].astype(candidates.logits.dtype)
        if bans and candidates.logits.max() == -math.inf:
            raise SamplingError(
                "logit biases of -inf ban every token that could be emitted: lift one (`logit_bias`)",
                field="logit_bias",
            )
        return candidates

    return apply


def _penalties(params: SamplingParams) -> Processor | None:
    if not params.penalised:
        return None
    last_n, repeat = params.penalty_last_n, params.repeat_penalty
    presence, frequency = params.presence_penalty, params.frequency_penalty

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        recent = history if last_n < 0 else history[-last_n:]
        counts = Counter(recent)
        logits = candidates.writable()
        for index, token_id in _locate(candidates, counts):
            logit = logits[index]
            logit = logit / repeat if logit > 0 else logit * repeat
            logits[index] = logit - presence - frequency * counts[token_id]
        return candidates

    return apply


def _top_k(params: SamplingParams) -> Processor | None:
    k = params.top_k
    if k == 0:
        return None

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        if k >= len(candidates.logits):
            return candidates
        return candidates.keep(largest(candidates.logits, k))

    return apply


def _top_p(params: SamplingParams) -> Processor | None:
    top_p = params.top_p
    if top_p >= 1.0:
        return None

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        logits = candidates.logits
        weights = np.exp(logits - logits.max())
        goal = top_p * float(weights.sum(dtype=np.float64))
        look = TOP_P_FIRST_LOOK
        while True:
            chosen = largest(weights, look) if 4 * look < len(weights) else np.arange(len(weights))
            # Sorted by value: what numpy needs for the order of 131k takes a hundred times as long.
            found = weights[chosen]
            descending = np.sort(found)[::-1]
            mass = descending.cumsum(dtype=np.float64)
            if mass[-1] >= goal or len(chosen) == len(weights):
                break
            look *= 8
        count = min(int(mass.searchsorted(goal)) + 1, len(chosen))
        least = descending[count - 1]
        kept = (found >= least).nonzero()[0]
        if len(kept) > count:
            # Of equal weights at the border those with the lowest ids stay.
            ties = (found[kept] == least).nonzero()[0]
            kept = np.delete(kept, ties[count - len(kept) :])
        return candidates.keep(chosen[kept])

    return apply


def _min_p(params: SamplingParams) -> Processor | None:
    if params.min_p <= 0.0:
        return None
    log_min_p = math.log(params.min_p)

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        logits = candidates.logits
        kept = np.flatnonzero(logits >= logits.max() + log_min_p)
        return candidates if len(kept) == len(logits) else candidates.keep(kept)

    return apply


def _temperature(params: SamplingParams) -> Processor | None:
    temperature = params.temperature
    if temperature == 1.0:
        return None

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        return Candidates(candidates.ids, candidates.logits / temperature, owned=True)

    return apply


def largest(values: FloatArray, count: int) -> Int64Array:
    """Return the ascending indices of the ``count`` largest values, and of any equal to the smallest of them.

    Including the ties keeps the set independent of how a partition happens to order equal values.
    """
    size = len(values)
    if size > SAMPLED_SIZE:
        # Partitioning 152k values takes a millisecond, and 4k ones 30 us. A sample tells roughly where the border is;
        # what lies above a border set too low on purpose is few enough to partition, and holds the answer if it is at
        # least ``count``.
        stride = min(SAMPLE_STRIDE, size // 256)
        sample = values[::stride]
        rank = 2 * count // stride + 8
        has_border = 2 * rank < len(sample)
        border = np.partition(sample, len(sample) - 1 - rank)[len(sample) - 1 - rank] if has_border else values.min()
        above = np.flatnonzero(values >= border)
        if len(above) == size:
            # It is the least value. Where most are equal to it, as banned tokens are, a partition of all takes 20 ms.
            others = np.flatnonzero(values > border)
            if len(others) < count:
                return above
            if 2 * len(others) < size:
                above = others
        if count <= len(above) < size:
            return above[largest(values[above], count)]
    threshold = np.partition(values, size - count)[size - count]
    return np.flatnonzero(values >= threshold)


def _locate(candidates: Candidates, token_ids: Sequence[int] | dict[int, Any]) -> list[tuple[int, int]]:
    """Return (index into candidates, token id) of those ``token_ids`` that are candidates."""
    if candidates.ids is None:
        size = len(candidates.logits)
        return [(token_id, token_id) for token_id in token_ids if token_id < size]
    wanted = np.fromiter(token_ids, dtype=np.int64)
    indices, found = _find_candidates(candidates, wanted)
    return [(int(i), int(t)) for i, t in zip(indices, wanted[found], strict=True)]


def _find_candidates(candidates: Candidates, wanted: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Return the indices into candidates of those ``wanted`` token ids that are candidates, and which these are."""
    if candidates.ids is None:
        found = wanted < len(candidates.logits)
        return wanted[found], found
    indices = np.minimum(np.searchsorted(candidates.ids, wanted), len(candidates.ids) - 1)
    found = candidates.ids[indices] == wanted
    return indices[found], found
