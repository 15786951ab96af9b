"""How far a model's distributions are from a base model's on a text, in the figures that llama-perplexity prints.

They are of the models' own logits, before any request's temperature and filters: KL(base || model), and what the text's
own tokens were given. Source: ``tools/perplexity`` of llama.cpp, whose names for these figures are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from paceline.core.arrays import Float64Array, FloatArray

MIN_LOG_PROB: Final = -16.0
"""Tokens that the base model gives less than e to this are left out of the divergence, as llama-perplexity does."""

_MIN_FOR_ERRORS: Final = 10
"""Tokens up to which no standard errors are given."""

_KLD_PERCENTS: Final = (100, 99.9, 99, 95, 90, 50, 10, 5, 1, 0.1, 0)
_DELTA_P_PERCENTS: Final = (100, 99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1, 0)


class Divergence(NamedTuple):
    """What a base model and another one gave one token of a text.

    Attributes:
        base_nll: negative log-probability of the token to the base model, in nats.
        nll: negative log-probability of the token to the other model.
        kld: KL(base || other) of both distributions, in nats.
        same_top: whether both have the same most likely token.
    """

    base_nll: float
    nll: float
    kld: float
    same_top: bool


def diverge(base_row: FloatArray, row: FloatArray, token_id: int) -> Divergence:
    """Compare two rows of logits, ``[vocab]`` each, that predict ``token_id``. The ids that one lacks are left out."""
    width = min(len(base_row), len(row))
    base, other = log_probs(base_row[:width]), log_probs(row[:width])
    likely = base > MIN_LOG_PROB
    kld = float(np.exp(base[likely]) @ (base[likely] - other[likely]))
    return Divergence(-float(base[token_id]), -float(other[token_id]), kld, int(base.argmax()) == int(other.argmax()))


def log_probs(row: FloatArray) -> Float64Array:
    """Return the logarithms of softmax of a row of logits."""
    logits = row.astype(np.float64)
    logits -= logits.max()
    logits -= math.log(np.exp(logits).sum())
    return logits


class WithError(NamedTuple):
    """A mean with its standard error, all tokens taken for independent."""

    value: float
    error: float


class DivergenceStatistics(NamedTuple):
    """The figures of a whole text. Probabilities are from 0 to 1; percentiles go by percent.

    Attributes:
        ppl: perplexity of the model that is compared.
        base_ppl: perplexity of the base model.
        correlation: of both models' log-probabilities of the text; ``None`` where one of them does not vary.
        ln_ratio: of both perplexities.
        delta_p: what the model gives a token of the text beyond what the base model gives it.
        rms_delta_p: root of the mean square of ``delta_p``.
        same_top: share of tokens at which both have the same most likely one.
    """

    tokens: int
    ppl: WithError
    base_ppl: WithError
    correlation: float | None
    ln_ratio: WithError
    ratio: WithError
    difference: WithError
    kld: WithError
    kld_percentiles: Mapping[float, float]
    delta_p: WithError
    delta_p_percentiles: Mapping[float, float]
    rms_delta_p: WithError
    same_top: WithError

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, value in self._asdict().items():
            if isinstance(value, Mapping):
                data[name] = {f"{percent:g}": at for percent, at in value.items()}
            else:
                data[name] = value._asdict() if isinstance(value, WithError) else value
        return data


def summarize(divergences: Sequence[Divergence]) -> DivergenceStatistics:
    """Return the figures of a text of at least one token."""
    base_nll, nll, kld, same_top = np.array(divergences, dtype=np.float64).T
    base_log, log = _mean(base_nll), _mean(nll)
    covariance = 0.0
    if len(nll) > _MIN_FOR_ERRORS:
        covariance = float((nll * base_nll).mean() - nll.mean() * base_nll.mean()) / (len(nll) - 1)
    ln_ratio = WithError(
        log.value - base_log.value, math.sqrt(max(log.error**2 + base_log.error**2 - 2 * covariance, 0.0))
    )
    ppl, base_ppl, ratio = _exp(log), _exp(base_log), _exp(ln_ratio)
    difference_error = ppl.error**2 + base_ppl.error**2 - 2 * ppl.value * base_ppl.value * covariance
    delta_p = np.exp(-nll) - np.exp(-base_nll)
    squared = _mean(delta_p**2)
    rms = math.sqrt(squared.value)
    share = float(same_top.mean())
    return DivergenceStatistics(
        tokens=len(nll),
        ppl=ppl,
        base_ppl=base_ppl,
        correlation=covariance / (log.error * base_log.error) if log.error and base_log.error else None,
        ln_ratio=ln_ratio,
        ratio=ratio,
        difference=WithError(ppl.value - base_ppl.value, math.sqrt(max(difference_error, 0.0))),
        kld=_mean(kld),
        kld_percentiles=_percentiles(kld, _KLD_PERCENTS),
        delta_p=_mean(delta_p),
        delta_p_percentiles=_percentiles(delta_p, _DELTA_P_PERCENTS),
        rms_delta_p=WithError(rms, 0.5 / rms * squared.error if rms else 0.0),
        same_top=WithError(share, math.sqrt(share * (1 - share) / max(len(nll) - 1, 1))),
    )


def _mean(values: Float64Array) -> WithError:
    mean = float(values.mean())
    variance = float((values**2).mean()) - mean**2
    enough = len(values) > _MIN_FOR_ERRORS and variance > 0
    return WithError(mean, math.sqrt(variance / (len(values) - 1)) if enough else 0.0)


def _exp(log: WithError) -> WithError:
    value = math.exp(log.value)
    return WithError(value, value * log.error)


def _percentiles(values: Float64Array, percents: Sequence[float]) -> dict[float, float]:
    return dict(zip(percents, np.percentile(values, percents).tolist(), strict=True))
