"""From one row of logits to one token: the Gumbel argmax with keyed noise, and the distribution it draws from.

Sampling is ``argmax(log p + g)`` with ``g`` standard Gumbel noise keyed by (seed, choice, position, token id). Noise
for a whole vocabulary is too dear (2.4 ms a row at 152k entries in numpy), so tokens far from the top are lumped:

* the *head* is every candidate within :data:`HEAD_RANGE_NATS` of the largest logit, the largest :data:`HEAD_SIZE` of
  them if there are more; each draws its own Gumbel number;
* the *tail* is everything else, one entry with the summed probability and one Gumbel number of its own. When it wins,
  a keyed uniform number picks the token inside it by inverse transform.

The maximum of independent Gumbel numbers shifted by ``log p_i`` is a Gumbel number shifted by ``log sum p_i``, so the
emitted token is distributed exactly by ``p``. Head and tail depend on the row alone, so the token depends on nothing
but the row and the key: it is the same with any drafter, policy or batch, or none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.arrays import BoolArray, Float64Array, FloatArray, Int64Array
from paceline.core.constraint import Constraint, ConstraintKeeper
from paceline.core.errors import ConstraintError, EngineError, SamplingError
from paceline.core.noise import TAIL_ID, TAIL_PICK_ID, TokenNoise
from paceline.core.params import LLAMA_CPP_ORDER, LOWEST_TEMPERATURE, TRANSFORMERS_ORDER, SamplingParams
from paceline.core.processors import (
    NO_BREAKERS,
    SAMPLE_STRIDE,
    Breakers,
    Candidates,
    DynamicTemperature,
    LateTokens,
    build_bans,
    build_processors,
    largest,
)
from paceline.core.reasoning import BudgetKeeper
from paceline.core.tree import DraftTree
from paceline.core.vocabulary import Vocabulary

HEAD_SIZE = 4096
"""Most tokens that draw noise of their own (more only where logits tie at the border)."""

HEAD_RANGE_NATS = 14.0
"""Tokens this far below the largest logit are left to the tail even when the head has room."""

_REACH_NATS = 8.0
"""Within so much of the largest logit most rows have what truncation leaves, and not many more tokens."""

_MAX_NEAR = 1024
"""Most tokens there that are taken out."""

_MAX_SORTED = 128
"""Most tokens that are sorted by Python."""

_ROUNDING = {2: 2.0**-6, 4: 2.0**-19, 8: 2.0**-48}
"""By the bytes of a float, sixteen times the step from 1 to the next."""

_BLOCK = 1024
_TAIL_PICK_IDS = np.array([TAIL_PICK_ID], dtype=np.int64)


class Tail:
    """The candidates outside the head, as one entry whose score is computed only if it could win.

    Attributes:
        noise: its Gumbel number.
        score_bound: no less than its score; cheap.
    """

    __slots__ = ("_candidates", "_head", "_top", "_weights", "noise", "score_bound")

    def __init__(self, candidates: Candidates, head: Int64Array, top: float, border: float, noise: float) -> None:
        self._candidates = candidates
        self._head = head
        self._top = top
        self._weights: FloatArray | None = None
        self.noise = noise
        # Nothing in the tail is above the border, so its mass is no more than if everything were at it.
        self.score_bound = border + math.log(len(candidates.logits) - len(head)) + noise

    def weights(self) -> FloatArray:
        """Return ``exp(logit - top)`` of all candidates, 0 for those in the head."""
        if self._weights is None:
            weights = np.exp(self._candidates.logits - self._top)
            weights[self._head] = 0.0
            self._weights = weights
        return self._weights

    def beats(self, score: float) -> bool:
        """Return whether the tail as one entry scores higher than ``score``."""
        return self.score_bound > score and self.score() > score

    def score(self) -> float:
        """Return the score of the tail as one entry; ``-inf`` if it has no probability."""
        mass = float(self.weights().sum())
        return math.log(mass) + self._top + self.noise if mass > 0.0 else -math.inf

    def pick(self, uniform: float) -> int:
        """Return the token that a uniform number in (0, 1) picks by inverse transform."""
        weights = self.weights()
        # Find the block first: a running sum over 152k entries takes longer than everything else together.
        whole = len(weights) // _BLOCK * _BLOCK
        sums = [*weights[:whole].reshape(-1, _BLOCK).sum(axis=1), weights[whole:].sum()]
        ends = np.cumsum(sums, dtype=np.float64)
        goal = uniform * ends[-1]
        block = int(np.searchsorted(ends, goal, side="right"))
        inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
        goal -= ends[block - 1] if block else 0.0
        index = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), goal, side="right"))
        # Rounding may put the goal past the block's last weight; a token without weight must never come out.
        last = int(np.flatnonzero(inside)[-1])
        return token_at(self._candidates, block * _BLOCK + min(index, last))


@dataclass(frozen=True, slots=True)
class PerturbedRow:
    """A row's head with its noise: the scores whose argmax is the emitted token.

    Attributes:
        ids: ``[head]`` token ids.
        scores: ``[head]`` ``log p + g`` up to a constant.
        tail: everything else, or ``None`` if the head is all there is.
    """

    ids: Int64Array
    scores: Float64Array
    tail: Tail | None


_FEW_KNOW = {"logit_bias", "penalties", "dry", "top_k", "top_p", "min_p", "temperature"}
"""Processors that come before :class:`FewCandidates`, or that it repeats. It is not used where there is another."""


class FewCandidates:
    """The fast path of sampling: chooses by Python's numbers where few tokens are left and rounding decides nothing.

    The choice is the one that the processors and the Gumbel argmax define. These are some fifty calls of numpy: 70 us
    for one row after the other, and 400 us after a pass of a model, which leaves nothing of them in the processor's
    caches. Here numpy finds what is near the top, and the rest is a few numbers, in another order and precision. Where
    two of them are closer than that could matter, nothing is chosen.

    Args:
        params: sampling parameters for which :meth:`suits` holds.
        noise: of the request.
    """

    def __init__(self, params: SamplingParams, noise: TokenNoise) -> None:
        self._noise = noise
        # The temperature, where it comes after truncation: then it has not been applied yet.
        self._temperature = params.temperature if _is_in(LLAMA_CPP_ORDER, params.active) else 1.0
        self._top_k = params.top_k
        self._top_p = params.top_p
        # How far below the largest logit tokens may be.
        self._most_below = -math.log(params.min_p) if params.min_p > 0.0 else math.inf
        self._needs_all = params.top_p < 1.0 or params.min_p == 0.0

    @staticmethod
    def suits(params: SamplingParams) -> bool:
        """Return whether logits near the largest decide, by known processors in one of the usual orders."""
        is_cut = 0 < params.top_k <= _MAX_SORTED or (params.top_p == 1.0 and params.min_p > 0.0)
        active = params.active
        if params.greedy or params.dynatemp_range > 0.0 or not is_cut or not _FEW_KNOW.issuperset(active):
            return False
        return _is_in(LLAMA_CPP_ORDER, active) or _is_in(TRANSFORMERS_ORDER, active)

    def best(self, candidates: Candidates, position: int) -> tuple[int, float] | None:
        """Return the best token, and its score less that of the next; ``None`` where rounding may decide."""
        logits, temperature = candidates.logits, self._temperature
        top = float(logits[logits.argmax()])
        # What rounding adds to logits that are divided and subtracted, and to probabilities, with room to spare.
        slack = 1e-6 + _ROUNDING[logits.itemsize] * (abs(top) + 32.0) / min(temperature, 1.0)
        if not slack < 1e-2:
            # Or the largest is not finite.
            return None
        near = self._near(logits, top)
        if near is None:
            return None
        indices, values = near
        kept = self._truncate(values, top, slack)
        if kept is None:
            return None
        token_ids = [indices[index] for index in kept] if indices is not None else kept
        if candidates.ids is not None:
            token_ids = candidates.ids[token_ids].tolist()
        if len(kept) == 1:
            return token_ids[0], math.inf
        gumbels = self._noise.gumbel_of_few(position, token_ids)
        scores = [values[index] / temperature + gumbel for index, gumbel in zip(kept, gumbels, strict=True)]
        best = max(scores)
        winner = scores.index(best)
        del scores[winner]
        margin = best - max(scores)
        return (token_ids[winner], margin) if margin > 4.0 * slack else None

    def _near(self, logits: FloatArray, top: float) -> tuple[list[int] | None, list[float]] | None:
        """Return the indices and values of a few logits among which are all that truncation may leave.

        Where all of the ``k`` largest are needed they are among them, and all that are equal to the least of these.
        """
        if len(logits) <= _MAX_SORTED:
            return None, logits.tolist()
        least = min(self._top_k, len(logits)) if self._needs_all else 0
        reach = _REACH_NATS if self._needs_all else self._most_below + 0.1
        is_near = logits > top - reach
        if least <= np.count_nonzero(is_near) <= _MAX_NEAR:
            indices = is_near.nonzero()[0]
        elif self._top_k:
            indices = largest(logits, min(self._top_k, len(logits)))
        else:
            return None
        if 0 < self._top_k < len(indices) > _MAX_SORTED:
            indices = indices[largest(logits[indices], self._top_k)]
        if len(indices) > _MAX_SORTED:
            return None
        return indices.tolist(), logits[indices].tolist()

    def _truncate(self, values: list[float], top: float, slack: float) -> list[int] | None:
        """Return the indices of the values that truncation leaves; ``None`` where rounding may decide.

        Args:
            values: logits of tokens, in the order of their ids.
            top: the largest.
            slack: how far off what is computed here may be.
        """
        most_below, top_k = self._most_below, self._top_k
        order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
        if 0 < top_k < len(order):
            count = top_k
            while count < len(order) and values[order[count]] == values[order[top_k - 1]]:
                count += 1
            del order[count:]
        weights = [math.exp(values[index] - top) for index in order]
        goal = self._top_p * sum(weights) if self._top_p < 1.0 else math.inf
        mass = 0.0
        for rank, index in enumerate(order):
            below = top - values[index]
            if below >= most_below - slack:
                if below <= most_below + slack:
                    return None
                return order[:rank]
            mass += weights[rank]
            if mass >= goal * (1.0 - slack):
                # Of weights that rounding makes equal those with the lowest ids stay.
                is_clear = mass > goal * (1.0 + slack) and not any(
                    0.0 < abs(values[other] - values[index]) <= slack for other in order
                )
                return order[: rank + 1] if is_clear else None
        return order


class RowSampler:
    """Turns rows of logits into tokens for one request.

    ``history`` arguments are all tokens before the row's token, drafted ancestors included; only penalties, DRY, XTC
    (which asks for their number), the reasoning budget, the constraint and a least length read them.

    Args:
        params: how the request is sampled.
        num_prompt: how many tokens of every history are the prompt; only the reasoning budget and the constraint ask.
        constraint: what the answer may say; ``None`` for anything.
        breakers: where the texts stand that ``params.dry_sequence_breakers`` names.
        late: tokens that are left out at its beginning; ``None`` for none.
        vocabulary: whose tokens the rows are of; only ``infill`` asks, and is off without.
    """

    def __init__(
        self,
        params: SamplingParams,
        num_prompt: int = 0,
        constraint: Constraint | None = None,
        breakers: Breakers = NO_BREAKERS,
        late: LateTokens | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.params = params
        self.noise = TokenNoise(params.seed, params.choice)
        active = params.active
        bans = build_bans(params, late)
        self._late = late
        self._end_id = None if vocabulary is None or "infill" not in active else _find_end(params, vocabulary)
        self._processors = [*bans, *build_processors(params, breakers, vocabulary, self._end_at)]
        self._needs_history = late is not None or not {"penalties", "dry", "xtc"}.isdisjoint(active)
        budget = params.reasoning_budget
        self._keeper = None if budget is None else BudgetKeeper(budget, num_prompt, opens_once=constraint is not None)
        self._constraint: ConstraintKeeper | None = None
        if constraint is not None:
            opening = budget.start if budget is not None and not budget.begun else ()
            self._constraint = ConstraintKeeper(constraint, num_prompt, self._keeper, opening)
        self._plain_argmax = params.greedy and not self._processors and not self.reads_history
        self._few = FewCandidates(params, self.noise) if FewCandidates.suits(params) else None
        lead = ("logit_bias", "penalties", "dry", *(() if _is_in(LLAMA_CPP_ORDER, active) else ("temperature",)))
        self._lead = self._processors[: len(bans) + sum(name in lead for name in active)]

    @property
    def reads_history(self) -> bool:
        """Whether ``history`` changes the outcome; callers may pass an empty one otherwise."""
        return self._needs_history or self._may_force or self.is_constrained

    @property
    def is_constrained(self) -> bool:
        return self._constraint is not None

    @property
    def _may_force(self) -> bool:
        return self._keeper is not None and self._keeper.may_force

    def temperature(self, logits: FloatArray, history: Sequence[int]) -> float:
        """Return the temperature of a row of logits ``[vocab]``, by which they can be divided; greedily 1."""
        if self.params.dynatemp_range == 0.0:
            return self.params.temperature or 1.0
        candidates = self._candidates(logits, history)
        for process in self._processors:
            if isinstance(process, DynamicTemperature):
                return max(process.of(candidates), LOWEST_TEMPERATURE)
            candidates = process(candidates, history)
        raise AssertionError("a range of the temperature has a processor")

    def _end_at(self, history: Sequence[int]) -> int | None:
        """Return the token that would end the answer after ``history``; ``None`` where none may."""
        if self._end_id is None or (self._late is not None and len(history) < self._late.position):
            return None
        mask = None if self._constraint is None else self._constraint.mask(history)
        return self._end_id if mask is None or (self._end_id < len(mask) and mask[self._end_id]) else None

    def end_reasoning(self, history: Sequence[int]) -> bool:
        """Have the reasoning that is open after ``history`` closed from there on, if one is; return whether one is."""
        if self._keeper is None or not self._keeper.end(history):
            return False
        self._plain_argmax = False
        return True

    def forced(self, history: Sequence[int]) -> int | None:
        """Return the token that the reasoning budget puts after ``history``; ``None`` where the choice is free."""
        return None if self._keeper is None else self._keeper.forced(history)

    def drafts(self, history: Sequence[int]) -> Sequence[int]:
        """Return tokens that spell what a constraint has follow; others may spell the same, so they are drafts."""
        return () if self._constraint is None else self._constraint.forced(history)

    def allowed(self, history: Sequence[int]) -> BoolArray | None:
        """Return ``[vocab]`` which tokens a constraint allows, for drafters; ``None`` where that is all or none."""
        return None if self._constraint is None else self._constraint.allowed(history)

    def allowed_nodes(self, tree: DraftTree, history: Sequence[int]) -> list[int]:
        """Return the drafted nodes that the constraint allows, and whose parents it allows."""
        return list(range(1, len(tree))) if self._constraint is None else self._constraint.allowed_nodes(tree, history)

    def mask(self, logits: FloatArray, history: Sequence[int]) -> FloatArray:
        """Return a row ``[vocab]`` with ``-inf`` for what the constraint forbids; the row itself if that is nothing."""
        mask = None if self._constraint is None else self._constraint.mask(history)
        if mask is None:
            return logits
        size = min(len(mask), len(logits))
        row = np.full_like(logits, -np.inf)
        np.copyto(row[:size], logits[:size], where=mask[:size])
        if row.max() == -np.inf:
            raise ConstraintError("the grammar allows no token here that the model could produce: widen the grammar")
        return row

    def candidates(self, logits: FloatArray, history: Sequence[int]) -> Candidates:
        """Return the candidates of a row of logits ``[vocab]`` after every processor: one where a token is forced."""
        forced = self.forced(history)
        if forced is not None:
            return Candidates(np.array([forced]), np.zeros(1, dtype=logits.dtype), owned=True)
        candidates = self._candidates(logits, history)
        for process in self._processors:
            candidates = process(candidates, history)
        return candidates

    def _candidates(self, logits: FloatArray, history: Sequence[int]) -> Candidates:
        """Return the candidates of a row before any processor."""
        if self._processors or self._constraint is not None:
            # Filters would turn NaN and infinity into an arbitrary token, and a constraint may hide them.
            finite_top(logits)
        row = self.mask(logits, history)
        if row is logits and not _mostly_banned(logits):
            return Candidates(None, logits, owned=False)
        allowed = np.flatnonzero(row > -np.inf)
        if 0 < len(allowed) <= HEAD_SIZE:
            # All that follows is cheap where there are few.
            return Candidates(allowed, row[allowed], owned=True)
        return Candidates(None, row, owned=row is not logits)

    def emit(self, logits: FloatArray, position: int, history: Sequence[int]) -> int:
        """Return the token that a row of logits ``[vocab]`` emits at an absolute position."""
        if self._plain_argmax:
            token_id = int(logits.argmax())
            if not math.isfinite(logits[token_id]):
                raise _not_numbers(float(logits[token_id]))
            return token_id
        return self.best(logits, position, history, margin=False)[0]

    def best(
        self, logits: FloatArray, position: int, history: Sequence[int], *, margin: bool = True
    ) -> tuple[int, float]:
        """Return what a row ``[vocab]`` emits, and its score less the best score of any other token.

        Without ``margin`` that may be anything.
        """
        if self._few is not None and self.forced(history) is None:
            candidates = Candidates(None, logits, owned=False)
            if self._lead or self._constraint is not None:
                candidates = self._candidates(logits, history)
                for process in self._lead:
                    candidates = process(candidates, history)
            found = self._few.best(candidates, position)
            if found is not None:
                return found
        candidates = self.candidates(logits, history)
        if not margin:
            return self.rank(candidates, position, 1)[0], math.nan
        return self.ranked_with_margins(candidates, position, 1)[0]

    def perturb(self, candidates: Candidates, position: int) -> PerturbedRow:
        """Split candidates into head and tail and add the noise of ``position``."""
        logits = candidates.logits
        top = finite_top(logits)
        if len(logits) > HEAD_SIZE:
            border = top - HEAD_RANGE_NATS
            head = (logits >= border).nonzero()[0]
            if len(head) > HEAD_SIZE:
                head = largest(logits, HEAD_SIZE)
                border = float(logits[head].min())
            if len(head) < len(logits):
                ids = head if candidates.ids is None else candidates.ids[head]
                noise = self.noise.gumbel(position, np.append(ids, TAIL_ID))
                tail = Tail(candidates, head, top, border, float(noise[-1]))
                return PerturbedRow(ids, logits[head] + noise[:-1], tail)
        ids = np.arange(len(logits)) if candidates.ids is None else candidates.ids
        return PerturbedRow(ids, logits + self.noise.gumbel(position, ids), None)

    def rank(self, candidates: Candidates, position: int, count: int) -> list[int]:
        """Return the ``count`` tokens with the largest perturbed scores, best first (fewer if there are fewer).

        The first is what the target emits; a draft proposes the first of its own, then the runners-up. Greedy ranks
        by the logits alone. Tokens of the tail come up at most once: as the one its uniform number picks.
        """
        if count > 1:
            return [token_id for token_id, _ in self._ranked_scores(candidates, position, count)]
        if self.params.greedy:
            return [token_at(candidates, int(candidates.logits.argmax()))]
        return [self._best(self.perturb(candidates, position), position)[0]]

    def ranked_with_margins(self, candidates: Candidates, position: int, count: int) -> list[tuple[int, float]]:
        """Return what :meth:`rank` does, each with its score less the best score of any other token.

        That is positive for the first unless it ties, at most 0 for the runners-up, and ``inf`` for a candidate without
        others. The tail counts as another token only where it comes out itself: a margin is not worth summing it up.
        """
        if count > 1:
            scored = self._ranked_scores(candidates, position, count)
            if not scored:
                return []
            best, second = scored[0][1], scored[1][1] if len(scored) > 1 else -math.inf
            return [(scored[0][0], best - second), *((token_id, score - best) for token_id, score in scored[1:])]
        if self.params.greedy:
            logits = candidates.logits
            index = int(logits.argmax())
            return [(token_at(candidates, index), float(logits[index]) - _largest_other(logits, index))]
        row = self.perturb(candidates, position)
        token_id, score, index = self._best(row, position)
        second = _largest_other(row.scores, index) if index >= 0 else float(row.scores.max())
        return [(token_id, score - second)]

    def _best(self, row: PerturbedRow, position: int) -> tuple[int, float, int]:
        """Return the winner of a row, its score, and its index in the head (-1 if the tail won)."""
        index = int(row.scores.argmax())
        score = float(row.scores[index])
        if row.tail is not None and row.tail.beats(score):
            return self._pick_in_tail(row.tail, position), row.tail.score(), -1
        return int(row.ids[index]), score, index

    def _ranked_scores(self, candidates: Candidates, position: int, count: int) -> list[tuple[int, float]]:
        if self.params.greedy:
            logits = candidates.logits
            top = largest(logits, min(count, len(logits)))
            order = np.argsort(-logits[top], kind="stable")[:count]
            scored = [(token_at(candidates, int(index)), float(logits[index])) for index in top[order]]
            return [(token_id, score) for token_id, score in scored if score > -math.inf]
        row = self.perturb(candidates, position)
        order = np.argsort(-row.scores, kind="stable")[:count]
        ranked = [(int(row.ids[index]), float(row.scores[index])) for index in order if row.scores[index] > -np.inf]
        if row.tail is not None:
            rank = next((i for i, index in enumerate(order) if row.tail.beats(float(row.scores[index]))), len(order))
            if rank < count and row.tail.score() > -math.inf:
                ranked.insert(rank, (self._pick_in_tail(row.tail, position), row.tail.score()))
        return ranked[:count]

    def _pick_in_tail(self, tail: Tail, position: int) -> int:
        return tail.pick(float(self.noise.uniform(position, _TAIL_PICK_IDS)[0]))


def _find_end(params: SamplingParams, vocabulary: Vocabulary) -> int | None:
    """Return the token that ends a filled gap; ``None`` where it is none of those that may be emitted."""
    end_id = vocabulary.infill_tokens.end
    if end_id is None:
        end_id = min(vocabulary.end_ids, default=None)
    if end_id is None or params.logit_bias.get(end_id) == -math.inf:
        return None
    return end_id if params.allowed_token_ids is None or end_id in params.allowed_token_ids else None


def _is_in(order: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether names stand as they do in an order that has all of them."""
    return [*names] == [name for name in order if name in names]


def probabilities(candidates: Candidates, vocab_size: int, *, greedy: bool) -> Float64Array:
    """Return the distribution ``[vocab_size]`` of candidates as float64: one-hot if ``greedy``.

    ``vocab_size`` may differ from the row's own width when two vocabularies are padded differently.

    Raises:
        SamplingError: no candidate has an id below ``vocab_size``, as where a draft lacks the one that ends an answer.
    """
    probs = np.zeros(vocab_size, dtype=np.float64)
    if greedy:
        candidates = candidates.keep(np.array([candidates.logits.argmax()]))
    logits = candidates.logits.astype(np.float64)
    weights = np.exp(logits - logits.max())
    if candidates.ids is None:
        width = min(vocab_size, len(weights))
        probs[:width] = weights[:width]
    else:
        inside = candidates.ids < vocab_size
        probs[candidates.ids[inside]] = weights[inside]
    mass = probs.sum()
    if mass == 0.0:
        raise SamplingError(f"none of the first {vocab_size} tokens may follow")
    probs /= mass
    return probs


def finite_top(logits: FloatArray) -> float:
    """Return the largest logit, or raise ``EngineError`` where it is not a finite number."""
    top = float(logits.max())
    if not math.isfinite(top):
        raise _not_numbers(top)
    return top


def largest_probability(logits: FloatArray) -> float:
    """Return the largest probability of ``softmax(logits)``."""
    return 1.0 / float(np.exp(logits - logits.max()).sum(dtype=np.float64))


def _mostly_banned(logits: FloatArray) -> bool:
    """Return whether a sample of a row is ``-inf`` for the most part, as rows are that stand for a few tokens alone."""
    sample = logits[::SAMPLE_STRIDE]
    return len(logits) > HEAD_SIZE and 2 * int(np.count_nonzero(sample == -np.inf)) > len(sample)


def _largest_other(values: FloatArray, index: int) -> float:
    """Return the largest value but the one at ``index``; ``-inf`` if there is no other."""
    before = float(values[:index].max()) if index else -math.inf
    after = float(values[index + 1 :].max()) if index + 1 < len(values) else -math.inf
    return max(before, after)


def token_at(candidates: Candidates, index: int) -> int:
    return index if candidates.ids is None else int(candidates.ids[index])


def _not_numbers(value: float) -> EngineError:
    return EngineError(
        f"the model's largest logit is {value:g}: its weights or its arithmetic overflow; "
        "try another file or a wider type"
    )
