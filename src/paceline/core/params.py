"""What a request asks for: how to sample, when to stop and how to speculate. Complete and checked when built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

from paceline.core.errors import InputError, SamplingError
from paceline.core.numbers import real_number, shown, truth_value, whole_number

LLAMA_CPP_ORDER = ("logit_bias", "penalties", "top_k", "top_p", "min_p", "temperature")
"""Processor order of llama.cpp: truncation looks at the untempered distribution, temperature comes last."""

TRANSFORMERS_ORDER = ("logit_bias", "penalties", "temperature", "top_k", "top_p", "min_p")
"""Processor order of transformers: temperature first, so it widens what truncation keeps."""

MAX_SEED = 2**64 - 1

VerifierName: TypeAlias = Literal["coupled", "rejection"]
VERIFIER_NAMES: tuple[VerifierName, ...] = get_args(VerifierName)

_WHOLE: Final = ("top_k", "penalty_last_n", "seed", "choice")
_REAL: Final = ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's logits become a distribution, and the randomness that picks from it.

    The defaults of the filters are llama.cpp's. A value that switches a filter off is accepted everywhere:
    ``top_k=0``, ``top_p=1``, ``min_p=0``, ``repeat_penalty=1``, the other penalties 0.

    Attributes:
        temperature: 0 is greedy: the largest logit after bias and penalties, the lowest id among equals.
        top_k: keep the ``k`` largest logits (and those equal to the k-th); 0 keeps all.
        top_p: keep the smallest set of largest probabilities that reaches this mass (arXiv 1904.09751).
        min_p: keep tokens with at least this share of the largest probability (arXiv 2407.01082).
        repeat_penalty: logits of recent tokens are divided by it if positive, else multiplied (arXiv 1909.05858).
        presence_penalty: subtracted once from the logit of every recent token.
        frequency_penalty: subtracted once for every recent occurrence.
        penalty_last_n: how many last tokens (prompt included) count as recent; -1 is all of them, 0 none.
        logit_bias: added to the logits of single tokens; ``-inf`` bans one.
        seed: with ``choice``, keys all randomness: the same seed gives the same text.
        choice: index among several answers to one prompt.
        order: the processors in the order they run, a permutation of :data:`LLAMA_CPP_ORDER`.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    choice: int = 0
    order: tuple[str, ...] = LLAMA_CPP_ORDER

    def __post_init__(self) -> None:
        self._take_numbers()
        _check_range("temperature", self.temperature, 0.0, 100.0, "--temp, 0 decodes greedily")
        _check_range("top-k", self.top_k, 0, 2**31 - 1, "--top-k, 0 keeps all tokens")
        _check_range("top-p", self.top_p, 0.0, 1.0, "--top-p, 1 keeps all tokens", low_excluded=True)
        _check_range("min-p", self.min_p, 0.0, 1.0, "--min-p, 0 keeps all tokens")
        penalty = "repeat penalty"
        _check_range(penalty, self.repeat_penalty, 0.0, 100.0, "--repeat-penalty, 1 switches it off", low_excluded=True)
        way_out = "--presence-penalty, 0 switches it off"
        _check_range("presence penalty", self.presence_penalty, -100.0, 100.0, way_out)
        way_out = "--frequency-penalty, 0 switches it off"
        _check_range("frequency penalty", self.frequency_penalty, -100.0, 100.0, way_out)
        _check_range("penalty last-n", self.penalty_last_n, -1, 2**31 - 1, "--repeat-last-n, -1 counts all tokens")
        _check_range("seed", self.seed, 0, MAX_SEED, "--seed, leave it out for a random one")
        _check_range("choice", self.choice, 0, 2**31 - 1, "0 is the first answer")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or math.isnan(bias) or bias == math.inf:
                raise SamplingError(
                    f"logit bias {bias} for token {token_id}: give a token id of 0 or more and a number below inf "
                    "(--logit-bias)"
                )
        if sorted(self.order) != sorted(LLAMA_CPP_ORDER):
            raise SamplingError(
                f"processor order {','.join(self.order)}: name each of {', '.join(LLAMA_CPP_ORDER)} once"
            )

    def _take_numbers(self) -> None:
        """Replace numbers of other libraries by Python's, which hash and print as everything else expects."""
        for name in _WHOLE:
            object.__setattr__(self, name, whole_number(getattr(self, name), _named(name), SamplingError))
        for name in _REAL:
            object.__setattr__(self, name, real_number(getattr(self, name), _named(name), SamplingError))
        if not isinstance(self.logit_bias, Mapping):
            raise SamplingError(f"logit bias is {shown(self.logit_bias)}: give a mapping of token ids to numbers")
        biases = {
            whole_number(token_id, "the token id of a logit bias", SamplingError): real_number(
                bias, f"logit bias for token {token_id}", SamplingError
            )
            for token_id, bias in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", biases)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is always taken."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether recent tokens change the logits."""
        return self.penalty_last_n != 0 and (
            self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a request ends.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        stop: texts that end the answer where they begin; they are found across token borders too, and in the spelling
            of control tokens.
        ignore_end: keep going past end-of-generation tokens.
    """

    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_end: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_tokens", whole_number(self.max_tokens, "the number of tokens to predict"))
        object.__setattr__(self, "ignore_end", truth_value(self.ignore_end, "ignore_end"))
        if self.max_tokens < 1:
            raise InputError(f"{self.max_tokens} tokens to predict: the least is 1 (-n)")
        if any(not text for text in self.stop):
            raise InputError("an empty stop text would stop before the first token: leave it out (--stop)")


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How a request is sped up; what it asks for limits what the policy decides.

    Under ``coupled``, and greedily, none of it changes the text.

    Attributes:
        speculate: ``False`` decodes plainly.
        drafters: names of those that may draft for it; ``None`` is all that the model has.
        draft_max: most tokens drafted along one path, at least 1; ``None`` leaves it to the policy.
        verify: how drafts are judged.
    """

    speculate: bool = True
    drafters: tuple[str, ...] | None = None
    draft_max: int | None = None
    verify: VerifierName = "coupled"

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculate", truth_value(self.speculate, "speculate"))
        if self.draft_max is not None:
            object.__setattr__(self, "draft_max", whole_number(self.draft_max, "draft-max"))
            if self.draft_max < 1:
                raise InputError(f"draft-max {self.draft_max}: the least is 1; speculate=False drafts nothing")
        if self.drafters is not None and not self.drafters:
            raise InputError("no drafters are named: name one, or decode without speculation (speculate=False)")
        if self.verify not in VERIFIER_NAMES:
            raise InputError(f"unknown verifier {self.verify!r}: choose from {', '.join(VERIFIER_NAMES)}")


def _named(field_name: str) -> str:
    """Return a field's name as messages have it, such as ``top-k`` and ``repeat penalty``."""
    words = field_name.replace("_", " ")
    return {"top k": "top-k", "top p": "top-p", "min p": "min-p", "penalty last n": "penalty last-n"}.get(words, words)


def _check_range(name: str, value: float, low: float, high: float, way_out: str, *, low_excluded: bool = False) -> None:
    if not low <= value <= high or (low_excluded and value == low):
        bound = "above" if low_excluded else "from"
        raise SamplingError(f"{name} {value} is out of range: give a value {bound} {low} to {high} ({way_out})")
