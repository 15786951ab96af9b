"""Log-probabilities of emitted tokens and of prompts, by the target's own rows.

Every emitted token was chosen by one row of the target's logits: that of the token before it, drafted or not. Its
log-probability is a function of that row, so accepted drafts have theirs like all other tokens. So has a token of the
prompt, from the row of the token before it; the first one has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.fields import Option, setting, take_values
from paceline.core.processors import Candidates, largest
from paceline.core.sampling import RowSampler, finite_top

MAX_LOGPROBS: Final = 1000
"""Most tokens that can be listed beside each emitted one."""


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """Which log-probabilities come with an answer. They change nothing of the text.

    Attributes:
        logprobs: how many of the likeliest tokens are listed beside each emitted one; 0 gives that of the emitted token
            alone, ``None`` nothing.
        post_sampling_probs: whether they are those of the distribution that the token is drawn from, after bias,
            penalties, truncation and temperature. By default they are the model's own, before all of these. Where
            ``logprobs`` is ``None`` this means nothing.
        prompt_logprobs: how many of the likeliest tokens are listed beside each token of the prompt; 0 gives that of
            the token alone, ``None`` nothing. They are the model's own. All of the prompt is read for them, also what
            was read before; for several answers once.
    """

    logprobs: int | None = setting(
        None,
        Option(
            "whole",
            optional=True,
            low=0,
            high=MAX_LOGPROBS,
            way_out="0 gives the emitted token's alone, None nothing",
            variable=None,
            json=("n_probs",),
        ),
    )
    post_sampling_probs: bool = setting(False, Option("truth", variable=None))
    prompt_logprobs: int | None = setting(
        None,
        Option(
            "whole",
            optional=True,
            low=0,
            high=MAX_LOGPROBS,
            way_out="0 gives each token's own alone, None nothing",
            variable=None,
        ),
    )

    def __post_init__(self) -> None:
        take_values(self)


_LISTED: Final = np.dtype([("token_id", np.int32), ("logprob", np.float64)])


@dataclass(frozen=True, slots=True, init=False, repr=False)
class TokenLogprob:
    """How likely a token was, emitted or of the prompt, and what else was.

    The value is the same function of the target's row with drafts and without. With drafts, engines compute rows in
    wider passes, whose logits differ by rounding (``logit_tolerance`` of an engine's capabilities). The model's own
    log-probability then differs by at most twice as much. After processors, a token at the border of a truncation may
    be listed with drafts and not without them, or the other way round.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability; ``-inf`` where that is 0, as of a token that a reasoning budget
            forces and the model bans.
        top: id and log-probability of the likeliest tokens, largest first, the lowest id first among equals. The
            token may be one of them. A token whose probability is 0 in float64 is never listed.
    """

    token_id: int
    logprob: float
    _top: bytes

    def __init__(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        object.__setattr__(self, "token_id", token_id)
        object.__setattr__(self, "logprob", logprob)
        # An answer may have millions, which as Python's own numbers take ten times the memory.
        object.__setattr__(self, "_top", np.array([*top], _LISTED).tobytes() if top else b"")

    def __repr__(self) -> str:
        return f"TokenLogprob(token_id={self.token_id}, logprob={self.logprob}, top={self.top})"

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """Id and log-probability of the likeliest tokens."""
        return tuple(np.frombuffer(self._top, _LISTED).tolist())

    @property
    def num_top(self) -> int:
        """How many tokens are listed."""
        return len(self._top) // _LISTED.itemsize


def compute_logprob(
    token_id: int, logits: FloatArray, history: Sequence[int], sampler: RowSampler, params: LogprobParams
) -> TokenLogprob:
    """Return the log-probability of an emitted token, computed in float64.

    Args:
        logits: ``[vocab]`` the row that it was chosen by; not changed.
        history: all tokens before it, drafted ancestors included (may be empty if ``sampler.reads_history`` is false).
        sampler: the request's own; asked only for probabilities after all processors. Greedy decoding and a reasoning
            budget that forces a token leave one token, of probability 1.
        params: which log-probabilities; ``logprobs`` must not be ``None``.
    """
    assert params.logprobs is not None
    candidates = Candidates(None, logits, owned=False)
    if params.post_sampling_probs:
        candidates = sampler.candidates(logits, history)
        if sampler.params.greedy:
            candidates = candidates.keep(np.array([candidates.logits.argmax()]))
    return _logprob_among(candidates, token_id, params.logprobs)


def compute_prompt_logprob(token_id: int, logits: FloatArray, params: LogprobParams) -> TokenLogprob:
    """Return the log-probability of a token of the prompt, by the row of the token before it.

    Raises:
        EngineError: the row's largest logit is not a finite number.
    """
    assert params.prompt_logprobs is not None
    finite_top(logits)
    return _logprob_among(Candidates(None, logits, owned=False), token_id, params.prompt_logprobs)


def _logprob_among(candidates: Candidates, token_id: int, most: int) -> TokenLogprob:
    """Return the log-probability of a token, and those of at most so many of the likeliest."""
    logits = candidates.logits
    top = float(logits.max())
    log_total = _log_total(logits, top)
    # In this order: next to a large logit the logarithm of a sum would vanish.
    index = candidates.find(token_id)
    logprob = (-math.inf if index is None else float(logits[index])) - top - log_total
    count = min(most, len(logits))
    if count == 0:
        return TokenLogprob(token_id, logprob, ())
    # Ascending indices are ascending ids, and a stable sort leaves equal ones in that order.
    found = largest(logits, count)
    found = found[np.argsort(-logits[found], kind="stable")[:count]]
    ids = found if candidates.ids is None else candidates.ids[found]
    logprobs = logits[found].astype(np.float64) - top - log_total
    likeliest = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return TokenLogprob(token_id, logprob, tuple((one, value) for one, value in likeliest if math.exp(value) > 0.0))


def _log_total(logits: FloatArray, top: float) -> float:
    """Return the logarithm of the summed exponentials of what logits have above ``top``."""
    weights = logits.astype(np.float64)
    weights -= top
    np.exp(weights, out=weights)
    return math.log(float(weights.sum()))
