"""From a row of logits to the candidates that may be emitted: bias, penalties, truncation, temperature.

Processors run in the order that :class:`~paceline.core.params.SamplingParams` states. Each takes and returns
:class:`Candidates`; truncation makes them sparse, so that everything after it is cheap however large the vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.core.arrays import Float64Array, FloatArray, Int64Array
from paceline.core.errors import SamplingError
from paceline.core.noise import XTC_ID, TokenNoise
from paceline.core.params import LARGEST_BIAS, LOWEST_TEMPERATURE, SamplingParams
from paceline.core.vocabulary import Vocabulary

TOP_P_FIRST_LOOK = 256
"""Candidates sorted first when looking for a set of some mass; the look widens only if they do not reach it."""


MAX_REST = 20
"""Most tokens that the rest of a text has across which nothing counts as repeated; of longer ones the first."""

MOST_JOINED = 1024
"""Most tokens of which ``infill`` finds out which begin alike, the likeliest. In llama.cpp that takes the square."""

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

    def find(self, token_id: int) -> int | None:
        """Return the index of a token; ``None`` of one that is no candidate."""
        if self.ids is None:
            return token_id
        index = int(np.searchsorted(self.ids, token_id))
        return index if index < len(self.ids) and self.ids[index] == token_id else None

    def writable(self) -> FloatArray:
        """Return the logits for changing in place, copied first if they are borrowed."""
        if not self.owned:
            self.logits = self.logits.copy()
            self.owned = True
        return self.logits


Processor: TypeAlias = Callable[[Candidates, Sequence[int]], Candidates]
"""Takes candidates and the tokens before them (all of the history, drafted ancestors included)."""


@dataclass(frozen=True, slots=True)
class Breakers:
    """Where texts stand across which nothing counts as repeated.

    Attributes:
        alone: ``[vocab]`` not 0 for tokens that have such a text in themselves.
        rests: for tokens that end with the beginning of one, the tokens that the rest of it may be.
    """

    alone: bytes = b""
    rests: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def find_latest(self, reverse: Sequence[int]) -> int:
        """Return how many tokens there are behind the latest such text of a history, which is given in reverse."""
        alone, rests, size = self.alone, self.rests, len(self.alone)
        for back, token_id in enumerate(reverse):
            longest = 0 if token_id < size and alone[token_id] else -1
            for rest in rests.get(token_id, ()) if rests else ():
                if longest < len(rest) <= back and tuple(reverse[back - len(rest) : back][::-1]) == rest:
                    longest = len(rest)
            if longest >= 0:
                return back - longest
        return len(reverse)

    def is_alone(self, token_id: int) -> bool:
        return token_id < len(self.alone) and self.alone[token_id] != 0


NO_BREAKERS: Final = Breakers()
"""Everything may count as repeated."""

EndAt: TypeAlias = Callable[[Sequence[int]], int | None]
"""Returns the token that would end an answer after a history; ``None`` where it may not end."""


@dataclass(frozen=True, slots=True)
class LateTokens:
    """Tokens that are left out before a position: those that would end an answer before it has its least length."""

    token_ids: tuple[int, ...]
    position: int


def build_bans(params: SamplingParams, late: LateTokens | None) -> list[Processor]:
    """Return what leaves tokens out whatever their logits; it comes before all that has an order."""
    bans = [_allowed_tokens(params), None if late is None else _late_tokens(late)]
    return [ban for ban in bans if ban is not None]


def _allowed_tokens(params: SamplingParams) -> Processor | None:
    if params.allowed_token_ids is None:
        return None
    token_ids = np.unique(np.array(params.allowed_token_ids, dtype=np.int64))

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        indices, _ = _find_candidates(candidates, token_ids)
        if len(indices) == 0 or candidates.logits[indices].max() == -math.inf:
            raise SamplingError(
                "no token of `allowed_token_ids` is possible here: allow others, or leave it out",
                field="allowed_token_ids",
            )
        return candidates.keep(indices)

    return apply


def _late_tokens(late: LateTokens) -> Processor:
    token_ids = np.array(sorted(late.token_ids), dtype=np.int64)

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        if len(history) >= late.position:
            return candidates
        indices, _ = _find_candidates(candidates, token_ids)
        if len(indices) == 0:
            return candidates
        logits = candidates.writable()
        banned = logits[indices]
        logits[indices] = -math.inf
        if logits.max() == -math.inf:
            # A grammar, or biases, have nothing else follow.
            logits[indices] = banned
        return candidates

    return apply


def build_processors(
    params: SamplingParams,
    breakers: Breakers = NO_BREAKERS,
    vocabulary: Vocabulary | None = None,
    end_at: EndAt = lambda history: None,
) -> list[Processor]:
    """Return the processors that change anything, in their order; without a vocabulary ``infill`` is none of them."""
    factories: dict[str, Callable[[], Processor]] = {
        "logit_bias": lambda: _logit_bias(params),
        "penalties": lambda: _penalties(params),
        "dry": lambda: _dry(params, breakers),
        "top_n_sigma": lambda: _top_n_sigma(params),
        "top_k": lambda: _top_k(params),
        "typical_p": lambda: _typical_p(params),
        "top_p": lambda: _top_p(params),
        "min_p": lambda: _min_p(params),
        "xtc": lambda: _xtc(params),
        "temperature": lambda: _temperature(params) if params.dynatemp_range == 0.0 else DynamicTemperature(params),
    }
    if vocabulary is not None:
        factories["infill"] = lambda: _infill(vocabulary, end_at)
    return [factories[name]() for name in params.active if name in factories]


def _logit_bias(params: SamplingParams) -> Processor:
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


def _penalties(params: SamplingParams) -> Processor:
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


def _dry(params: SamplingParams, breakers: Breakers) -> Processor:
    last_n, allowed = params.dry_penalty_last_n, params.dry_allowed_length
    multiplier, log_base = params.dry_multiplier, math.log(params.dry_base)
    # From there on the penalty is the largest, however long the repetition. No power of e above has a float.
    most = min(math.log(LARGEST_BIAS) - math.log(multiplier), 709.0)

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        recent = [*(history if last_n < 0 else history[-last_n:])]
        recent.reverse()
        lengths = _repeated_lengths(recent, allowed, breakers)
        if lengths:
            logits = candidates.writable()
            for index, token_id in _locate(candidates, lengths):
                if not breakers.is_alone(token_id):
                    logits[index] -= multiplier * math.exp(min((lengths[token_id] - allowed) * log_base, most))
        return candidates

    return apply


def _repeated_lengths(reverse: list[int], allowed: int, breakers: Breakers) -> dict[int, int]:
    """Return which tokens would prolong a repetition of at least ``allowed`` tokens, and how long the longest is.

    That takes as many steps as there are tokens, however they repeat (the Z-algorithm, over those places alone where
    the last token stands, and the one before it if one token is too few).

    Args:
        reverse: the tokens to search, the last one first.
    """
    size = len(reverse)
    if size <= allowed or breakers.find_latest(reverse[: allowed + MAX_REST]) < allowed:
        return {}
    # How many tokens before each place are those before the end.
    counts: dict[int, int] = {}
    begin = end = place = 0
    last, second = reverse[0], reverse[1] if allowed > 1 else None
    with suppress(ValueError):
        while True:
            place = reverse.index(last, place + 1)
            if second is not None and (place + 1 == size or reverse[place + 1] != second):
                continue
            # One that was left out has one token in common.
            count = counts.get(place - begin, 1) if place < end else size
            if count >= end - place:
                begin, end = place, max(place, end)
                while end < size and reverse[end] == reverse[end - place]:
                    end += 1
                count = end - place
            counts[place] = count
    longest = max(counts.values(), default=0)
    limit = breakers.find_latest(reverse[: longest + MAX_REST])
    if min(longest, limit) < allowed:
        return {}
    lengths: dict[int, int] = dict.fromkeys(reverse[:-1], 0) if allowed == 0 else {}
    for place, count in counts.items():
        length, follower = min(count, limit), reverse[place - 1]
        if length >= max(allowed, lengths.get(follower, 0)):
            lengths[follower] = length
    return lengths


def _top_n_sigma(params: SamplingParams) -> Processor:
    count = params.top_n_sigma

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        logits = candidates.logits
        finite = logits[logits > -np.inf]
        least = float(logits.max()) - count * float(finite.std(dtype=np.float64))
        return candidates.keep(np.flatnonzero(logits >= least))

    return apply


def _top_k(params: SamplingParams) -> Processor:
    k = params.top_k

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        if k >= len(candidates.logits):
            return candidates
        return candidates.keep(largest(candidates.logits, k))

    return apply


def _typical_p(params: SamplingParams) -> Processor:
    typical_p = params.typical_p

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        possible = np.flatnonzero(candidates.logits > -np.inf)
        logprobs = _logprobs(candidates.logits[possible])
        probs = np.exp(logprobs)
        # Nearest to 0 are those whose surprise is what is expected of all.
        nearness = -np.abs(logprobs - float(probs @ logprobs))
        look = TOP_P_FIRST_LOOK
        while True:
            chosen = largest(nearness, look) if 4 * look < len(possible) else np.arange(len(possible))
            chosen = chosen[np.argsort(-nearness[chosen], kind="stable")]
            mass = probs[chosen].cumsum()
            if mass[-1] > typical_p or len(chosen) == len(possible):
                break
            look *= 8
        count = int(mass.searchsorted(typical_p, side="right")) + 1
        return candidates.keep(np.sort(possible[chosen[:count]]))

    return apply


def _top_p(params: SamplingParams) -> Processor:
    top_p = params.top_p

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


def _min_p(params: SamplingParams) -> Processor:
    log_min_p = math.log(params.min_p)

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        logits = candidates.logits
        kept = np.flatnonzero(logits >= logits.max() + log_min_p)
        return candidates if len(kept) == len(logits) else candidates.keep(kept)

    return apply


def _xtc(params: SamplingParams) -> Processor:
    noise = TokenNoise(params.seed, params.choice)
    probability, threshold = params.xtc_probability, params.xtc_threshold
    coin = np.array([XTC_ID])

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        # Of the position alone, so that drafts meet the same one as what they are judged by.
        if float(noise.uniform(len(history), coin)[0]) > probability:
            return candidates
        possible = np.flatnonzero(candidates.logits > -np.inf)
        logprobs = _logprobs(candidates.logits[possible])
        above = possible[np.exp(logprobs) >= threshold]
        if len(above) < 2:
            return candidates
        stays = np.ones(len(candidates.logits), dtype=np.bool_)
        stays[above] = False
        # Of equals the one with the lowest id.
        stays[above[candidates.logits[above].argmin()]] = True
        return candidates.keep(stays.nonzero()[0])

    return apply


def _infill(vocabulary: Vocabulary, end_at: EndAt) -> Processor:
    end_ids = np.array(sorted(vocabulary.end_ids), dtype=np.int64)

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        end_id = end_at(history)
        if end_id is None:
            return candidates
        possible = np.flatnonzero(candidates.logits > -np.inf)
        probs = np.exp(_logprobs(candidates.logits[possible]))
        token_ids = possible if candidates.ids is None else candidates.ids[possible]
        ends = np.isin(token_ids, end_ids)
        end_mass = float(probs[ends].sum())
        if 3.0 * end_mass * len(probs) > float(probs[~ends].sum()):
            return candidates.keep(possible[ends])
        order = largest(probs, MOST_JOINED) if len(probs) > MOST_JOINED else np.arange(len(probs))
        order = order[np.argsort(-probs[order], kind="stable")[:MOST_JOINED]]
        order = np.append(order, np.setdiff1d(np.flatnonzero(ends), order))
        joined = _join_beginnings(probs[order].tolist(), [vocabulary.token_bytes(i) for i in token_ids[order].tolist()])
        is_end = ends[order]
        kept = np.flatnonzero((joined > 0.0) & (is_end | (joined >= 0.2)))
        num_words = int(np.count_nonzero(~is_end[kept]))
        if num_words == 0:
            return Candidates(np.array([end_id]), np.ones(1, dtype=candidates.logits.dtype), owned=True)
        least = float(joined[kept].sum()) / (num_words + 1)
        return candidates.keep(np.sort(possible[order[kept[is_end[kept] | (joined[kept] >= least)]]]))

    return apply


def _join_beginnings(probs: list[float], pieces: list[bytes]) -> Float64Array:
    """Return probabilities once those of tokens were joined of which one's bytes begin with the other's.

    The likelier one of two gets the other's, which has 0 then. They are joined as llama.cpp does, one by one from the
    likeliest down.
    """
    by_piece: dict[bytes, list[int]] = {}
    for index, piece in enumerate(pieces):
        by_piece.setdefault(piece, []).append(index)
    longer: list[list[int]] = [[] for _ in pieces]
    for index, piece in enumerate(pieces):
        for size in range(1, len(piece) + 1):
            for beginning in by_piece.get(piece[:size], ()):
                if beginning != index:
                    longer[beginning].append(index)
    for beginning, found in enumerate(longer):
        for index in found:
            if probs[beginning] > 0.0 and probs[index] > 0.0:
                into, other = (index, beginning) if probs[index] > probs[beginning] else (beginning, index)
                probs[into] += probs[other]
                probs[other] = 0.0
    return np.array(probs)


def _temperature(params: SamplingParams) -> Processor:
    temperature = params.temperature

    def apply(candidates: Candidates, history: Sequence[int]) -> Candidates:
        return Candidates(candidates.ids, candidates.logits / temperature, owned=True)

    return apply


class DynamicTemperature:
    """Divides by a temperature that is the lower, the surer the distribution is.

    A distribution is as flat as can be where all tokens that are left are equally likely. llama.cpp counts banned ones
    among these.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._least = max(0.0, params.temperature - params.dynatemp_range)
        self._most = params.temperature + params.dynatemp_range
        self._exponent = params.dynatemp_exponent

    def __call__(self, candidates: Candidates, history: Sequence[int]) -> Candidates:
        logits, temperature = candidates.logits, self.of(candidates)
        if temperature < LOWEST_TEMPERATURE:
            return candidates.keep(np.array([logits.argmax()]))
        # Next to the largest, as the temperature may be so low that logits would overflow.
        return Candidates(candidates.ids, (logits - logits.max()) / temperature, owned=True)

    def of(self, candidates: Candidates) -> float:
        """Return the temperature of a row."""
        logprobs = _logprobs(candidates.logits[candidates.logits > -np.inf])
        if len(logprobs) < 2:
            return 1.0
        share = min(max(-float(np.exp(logprobs) @ logprobs) / math.log(len(logprobs)), 0.0), 1.0)
        return self._least + (self._most - self._least) * math.pow(share, self._exponent)


def _logprobs(logits: FloatArray) -> Float64Array:
    """Return the log-probabilities of logits above ``-inf``."""
    below = logits.astype(np.float64) - float(logits.max())
    log_total: float = np.log(np.exp(below).sum())
    return below - log_total


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
