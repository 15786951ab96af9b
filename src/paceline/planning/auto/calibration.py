"""How likely a drafted token is to be accepted, learned from the rounds as they go by.

Each drafter has a logistic model of its own evidence: of a draft model the margin between its best and second choice
*under the noise it was drawn with* (a token of probability 0.1 that large noise chose may be near certain), and how
sure it was without noise; of a text lookup how long the match was, how often its continuation was seen, and how often
others were; of a grammar whether the token is forced, or else how strong a habit it is. Depths and requests have
offsets of their own, shrunk towards what is common to all. Beliefs are Gaussians over the weights, updated one verdict
at a time (an extended Kalman filter), so an estimate comes with its uncertainty and a change in the text is followed
within tens of tokens.

Labels come only from drafts whose predecessors were all accepted: an estimate is the chance given that.

The priors' means are what the filters came to on recordings of an earlier embedded pair (its target had read 9 million
tokens) over held-out code, prose, JSON and logs, between greedy decoding and temperature 0.8; their variances leave
other models room to differ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from paceline.core.tree import Evidence
from paceline.planning.report import Reliability

MAX_DEPTH_OFFSET: Final = 8
"""Depths from here on share one offset."""

_BUCKETS: Final = 8
_LOGIT_LIMIT: Final = 12.0


Belief: TypeAlias = tuple[float, float]
"""Mean and variance of what is believed about the log-odds of one acceptance."""


@dataclass(frozen=True, slots=True)
class Prior:
    """A Gaussian over one weight before anything was seen, and how fast the truth may wander.

    Attributes:
        mean: expected weight.
        variance: its uncertainty, which forgetting never exceeds.
        drift: variance added with each verdict that concerns the weight.
    """

    mean: float
    variance: float
    drift: float = 0.0


@dataclass(slots=True)
class _Weight:
    prior: Prior
    mean: float = field(init=False)
    variance: float = field(init=False)

    def __post_init__(self) -> None:
        self.mean, self.variance = self.prior.mean, self.prior.variance


Inputs: TypeAlias = tuple[tuple[int, float], ...]
"""(Weight, input) of the inputs of a logistic model that are not zero."""


class Features(Protocol):
    """Turns a drafter's evidence into the inputs of its logistic model."""

    def priors(self) -> Sequence[Prior]:
        """Return the prior of every weight."""
        ...

    def inputs(self, evidence: Evidence, depth: int) -> Inputs:
        """Return the inputs; ``depth`` starts at 1."""
        ...


def _depth_priors() -> list[Prior]:
    return [Prior(0.0, 0.25, 0.0003)] * MAX_DEPTH_OFFSET


@dataclass(frozen=True, slots=True)
class MarginFeatures:
    """Of a draft model: the logarithm of its margin, the log-odds of its likeliest token, and the depth.

    Attributes:
        intercept: log-odds at a margin of 1 and a probability of 1/2.
        slope: of the log-odds over the logarithm of the margin.
        confidence: slope of the log-odds over those that the draft model gives its likeliest token.
    """

    intercept: Prior = Prior(1.4, 1.0, 0.004)
    slope: Prior = Prior(0.75, 0.25, 0.0003)
    confidence: Prior = Prior(0.45, 0.1, 0.0003)

    def priors(self) -> list[Prior]:
        return [self.intercept, self.slope, *_depth_priors(), self.confidence]

    def inputs(self, evidence: Evidence, depth: int) -> Inputs:
        """Return the inputs; an unknown margin counts as 1, an unknown probability as 1/2."""
        margin = evidence.margin if evidence.margin is not None else 1.0
        # Below e^-4 a margin is a tie, above e^3 it is certain: further out the line would only extrapolate.
        scaled = min(max(math.log(max(margin, 1e-9)), -4.0), 3.0)
        # Log-odds of 4 either way, for the same reason.
        sure = min(max(evidence.probability, 0.018), 0.982) if evidence.probability is not None else 0.5
        log_odds = math.log(sure / (1.0 - sure))
        return (0, 1.0), (1, scaled), (1 + min(depth, MAX_DEPTH_OFFSET), 1.0), (2 + MAX_DEPTH_OFFSET, log_odds)


@dataclass(frozen=True, slots=True)
class SiblingFeatures:
    """Of a draft model's runners-up: how far they are behind its first choice, and the depth.

    Attributes:
        intercept: log-odds of one that is level with the first choice.
        slope: of the log-odds over how far it is behind.
    """

    intercept: Prior = Prior(-1.2, 0.5, 0.002)
    slope: Prior = Prior(-1.0, 0.1, 0.0002)

    def priors(self) -> list[Prior]:
        return [self.intercept, self.slope, *_depth_priors()]

    def inputs(self, evidence: Evidence, depth: int) -> Inputs:
        """Return the inputs; an unknown margin counts as being behind by 2."""
        behind = -evidence.margin if evidence.margin is not None else 2.0
        return (0, 1.0), (1, min(max(behind, 0.0), 6.0)), (1 + min(depth, MAX_DEPTH_OFFSET), 1.0)


@dataclass(frozen=True, slots=True)
class MatchFeatures:
    """Of a text lookup: match length and count in buckets, each twice as wide as the one before, share, and depth.

    Attributes:
        intercept: log-odds common to all.
        lengths: of the offset of each bucket of match lengths.
        count: of the offset of each bucket of counts.
        share: slope of the log-odds over the logarithm of the share of the continuations seen that were this one; 1
            before anything was seen, as if a rare one were as likely as it was frequent.
        resumed: of the offset of a match near where a copy broke off.
    """

    intercept: Prior = Prior(0.8, 1.0, 0.004)
    lengths: Sequence[Prior] = tuple(Prior(mean, 0.5, 0.001) for mean in (-0.4, 0.4, 0.4, 1.0, 1.0, 1.0, 1.0, 1.0))
    count: Prior = Prior(0.0, 0.5, 0.001)
    share: Prior = Prior(1.0, 1.0, 0.001)
    resumed: Prior = Prior(0.8, 0.5, 0.001)

    def priors(self) -> list[Prior]:
        return [self.intercept, *_depth_priors(), *self.lengths, *[self.count] * _BUCKETS, self.share, self.resumed]

    def inputs(self, evidence: Evidence, depth: int) -> Inputs:
        """Return the inputs; what is unknown counts as 1, and a continuation as the only one."""
        length, count = evidence.match_length or 1, evidence.count or 1
        return _match_inputs(
            min(depth, MAX_DEPTH_OFFSET), length.bit_length(), count, evidence.probability, evidence.resumed
        )


@dataclass(frozen=True, slots=True)
class GrammarFeatures:
    """Of a grammar: whether the token is forced or a habit, what the habit is of and how strong, and the depth.

    Attributes:
        forced: log-odds of a token that spells what has to follow.
        after: log-odds of what often followed the token before it, as often as all else together.
        altogether: log-odds of what is often said in narrow places, as often as all else together.
        share: slope of the log-odds over those of a habit's share.
    """

    forced: Prior = Prior(2.5, 1.0, 0.004)
    after: Prior = Prior(0.5, 1.0, 0.004)
    altogether: Prior = Prior(0.0, 1.0, 0.004)
    share: Prior = Prior(0.7, 0.25, 0.0003)

    def priors(self) -> list[Prior]:
        return [self.forced, self.after, self.altogether, self.share, *_depth_priors()]

    def inputs(self, evidence: Evidence, depth: int) -> Inputs:
        """Return the inputs; a token without a probability is forced."""
        at_depth = 3 + min(depth, MAX_DEPTH_OFFSET), 1.0
        if evidence.probability is None:
            return (0, 1.0), at_depth
        share = min(max(evidence.probability, 0.018), 0.982)
        return (1 if evidence.match_length else 2, 1.0), (3, math.log(share / (1.0 - share))), at_depth


class CoProposals(NamedTuple):
    """Whether others' first choices are what a drafter proposes first; ``None`` where none of that kind proposes.

    Attributes:
        lookups: of the text lookups.
        models: of the draft models.
    """

    lookups: bool | None = None
    models: bool | None = None


SOLO: Final = CoProposals()
"""Nobody else proposes."""

_CO_PROPOSAL_PRIORS: Final[Mapping[bool, Prior]] = {True: Prior(1.5, 0.5, 0.001), False: Prior(-1.0, 0.5, 0.001)}


class Calibration:
    """One drafter's chances, shared by all requests, with an offset for each.

    Args:
        features: the drafter's evidence as inputs.
        offset: prior of a request's own offset.
    """

    def __init__(self, features: Features, offset: Prior = Prior(0.0, 0.5, 0.003)) -> None:
        self._features = features
        self._weights = [_Weight(prior) for prior in features.priors()]
        # Learned for each kind: lookups read the same text, so that one agrees with another may say little.
        self._co_proposals = [
            {agrees: _Weight(prior) for agrees, prior in _CO_PROPOSAL_PRIORS.items()} for _ in CoProposals._fields
        ]
        self._offset_prior = offset
        self._offsets: dict[int, _Weight] = {}
        self.reliability = Reliability()

    def to_json(self) -> list[list[float]]:
        """Return what was learned of all requests: means and variances."""
        return [[weight.mean, weight.variance] for weight in self._common()]

    def resume(self, learned: Any) -> None:
        """Go on from what :meth:`to_json` returned, or raise; this calibration is of no use then."""
        for weight, (mean, variance) in zip(self._common(), learned, strict=True):
            if not (abs(mean) < math.inf and 0 < variance <= weight.prior.variance):
                raise ValueError(f"a weight of mean {mean} and variance {variance} is no belief")
            weight.mean, weight.variance = float(mean), float(variance)

    def begin(self, request_id: int) -> None:
        self._offsets[request_id] = _Weight(self._offset_prior)

    def end(self, request_id: int) -> None:
        """Forget a request; what it taught about all requests stays."""
        self._offsets.pop(request_id, None)

    def belief(self, request_id: int, evidence: Evidence, depth: int, co_proposals: CoProposals = SOLO) -> Belief:
        """Return what is believed of a draft at ``depth``, given that everything above it is accepted."""
        return self._believe(self._features.inputs(evidence, depth), self._collect_offsets(request_id, co_proposals))

    def chance(self, request_id: int, evidence: Evidence, depth: int, co_proposals: CoProposals = SOLO) -> float:
        """Return the :func:`probability` of :meth:`belief`."""
        return probability(self.belief(request_id, evidence, depth, co_proposals))

    def observe(
        self, request_id: int, evidence: Evidence, depth: int, accepted: bool, co_proposals: CoProposals = SOLO
    ) -> None:
        """Learn from one verdict, of a draft whose predecessors were all accepted."""
        inputs, offsets = self._features.inputs(evidence, depth), self._collect_offsets(request_id, co_proposals)
        belief = self._believe(inputs, offsets)
        chance, variance = probability(belief), belief[1]
        self.reliability.add(chance, accepted)
        # The filter's step: the verdict's own noise in log-odds has variance 1 / (p (1 - p)).
        information = max(chance * (1.0 - chance), 1e-3)
        gain = 1.0 / (variance + 1.0 / information)
        surprise = (float(accepted) - chance) / information
        active = [(self._weights[index], value) for index, value in inputs] + [(weight, 1.0) for weight in offsets]
        for weight, value in active:
            step = weight.variance * value * gain
            weight.mean += step * surprise
            shrunk = weight.variance - step * value * weight.variance
            weight.variance = min(shrunk + weight.prior.drift, weight.prior.variance)

    def _common(self) -> list[_Weight]:
        """Return the weights that are common to all requests."""
        return self._weights + [weight for of_kind in self._co_proposals for weight in of_kind.values()]

    def _believe(self, inputs: Inputs, offsets: list[_Weight]) -> Belief:
        # Asked of every proposal of every round, so this makes no lists of its own.
        mean = variance = 0.0
        weights = self._weights
        for index, value in inputs:
            weight = weights[index]
            mean += weight.mean * value
            variance += weight.variance * value * value
        for weight in offsets:
            mean += weight.mean
            variance += weight.variance
        return min(max(mean, -_LOGIT_LIMIT), _LOGIT_LIMIT), variance

    def _collect_offsets(self, request_id: int, co_proposals: CoProposals) -> list[_Weight]:
        """Return the weights that have a say whatever the evidence is, with an input of 1."""
        offsets = []
        if co_proposals is not SOLO:
            for kind, agrees in enumerate(co_proposals):
                if agrees is not None:
                    offsets.append(self._co_proposals[kind][agrees])
        own = self._offsets.get(request_id)
        if own is not None:
            offsets.append(own)
        return offsets


@functools.lru_cache(maxsize=4096)
def _match_inputs(depth: int, length_bits: int, count: int, probability: float | None, resumed: bool) -> Inputs:
    """Return the inputs of a match: one of each group, by numbers of bits, so every bucket is twice as wide."""
    lengths = 1 + MAX_DEPTH_OFFSET
    counts = lengths + _BUCKETS
    share = counts + _BUCKETS
    active = (0, depth, lengths + min(length_bits, _BUCKETS) - 1, counts + min(count.bit_length(), _BUCKETS) - 1)
    inputs = [(index, 1.0) for index in active]
    if probability is not None and 0.0 < probability < count / (count + 1):
        # By Laplace's rule it is count / (all + 1), and the share is count / all.
        inputs.append((share, math.log(probability * count / (count - probability))))
    if resumed:
        inputs.append((share + 1, 1.0))
    return tuple(inputs)


def probability(belief: Belief) -> float:
    """Return the chance of acceptance, the uncertainty averaged out.

    The probit approximation of D. MacKay, "The evidence framework applied to classification networks" (1992),
    equation 10: ``sigmoid(mean / sqrt(1 + pi * variance / 8))``.
    """
    mean, variance = belief
    return 1.0 / (1.0 + math.exp(-mean / math.sqrt(1.0 + math.pi * variance / 8.0)))
