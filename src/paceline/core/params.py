"""What a request asks for: how to sample, when to stop and how to speculate. Complete and checked when built."""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

from paceline.core.errors import InputError, SamplingError, blame
from paceline.core.fields import Flag, Option, described, same, setting, take_values
from paceline.core.numbers import real_number, shown, token_ids, whole_number
from paceline.core.reasoning import ReasoningBudget

LLAMA_CPP_ORDER = ("logit_bias", "penalties", "top_k", "top_p", "min_p", "temperature")
"""Processor order of llama.cpp: truncation looks at the untempered distribution, temperature comes last."""

TRANSFORMERS_ORDER = ("logit_bias", "penalties", "temperature", "top_k", "top_p", "min_p")
"""Processor order of transformers: temperature first, so it widens what truncation keeps."""

MAX_SEED = 2**64 - 1
"""Largest seed: 64 bits."""

MAX_TOKENS: Final = 2**31 - 1
"""Tokens to predict that no context has room for: an answer of as many fills it."""

VerifierName: TypeAlias = Literal["coupled", "rejection"]
VERIFIER_NAMES: tuple[VerifierName, ...] = get_args(VerifierName)
"""Every :data:`VerifierName`."""

PolicyName: TypeAlias = Literal["auto", "fixed", "accept-ratio", "profile-ev", "heuristic"]
"""What decides how much is drafted; :mod:`paceline.planning.registry` makes them."""

_LARGEST: Final = 2**31 - 1
_SEED_BITS: Final = 2**32 - 1

# With these, no logit overflows in 32 bits, in whatever order it is biased, penalised and divided: 1e9 / 1e-6 / 1e-20.
_LARGEST_BIAS: Final = 1e9
_LOWEST_TEMPERATURE: Final = 1e-20


def draw_seed() -> int:
    """Return a seed for a request that brings none: 32 random bits, short enough to be typed again."""
    return secrets.randbits(32)


def wrap_seed(number: int) -> int | None:
    """Return the seed that a number stands for, as llama.cpp reads it; ``None`` for one that is to be drawn.

    A negative number stands for its lowest 32 bits, -5 for 4294967291. Where all of them are set, as in -1, a seed is
    drawn.
    """
    if number >= 0:
        return number
    seed = number & _SEED_BITS
    return None if seed == _SEED_BITS else seed


@blame("seed")
def read_seed(given: int | None) -> int:
    """Return the seed of a request, drawn where it gives none, or a number that stands for none."""
    seed = None if given is None else wrap_seed(whole_number(given, "seed", SamplingError))
    return draw_seed() if seed is None else seed


def _parse_biases(texts: Sequence[str]) -> dict[int, float]:
    biases = {}
    for text in texts:
        token_id, _, bias = text.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise InputError(f"`logit_bias` {text!r} is not TOKEN_ID=BIAS, such as 13=-2.5 or 13=-inf") from None
    return biases


_WHOLE = functools.partial(Option, "whole", error=SamplingError)
_REAL = functools.partial(Option, "real", error=SamplingError)
_SAMPLING = functools.partial(Flag, panel="Sampling")
_OUTPUT = functools.partial(Flag, panel="Prompt and output")
_SPECULATION = functools.partial(Flag, panel="Speculation")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's logits become a distribution, and the randomness that picks from it.

    The defaults of the filters are llama.cpp's. A value that switches a filter off is accepted everywhere:
    ``top_k=0``, ``top_p=1``, ``min_p=0``, ``repeat_penalty=1``, the other penalties 0.

    Attributes:
        temperature: 0 is greedy: the largest logit after bias and penalties, the lowest id among equals. Others are
            at least 1e-20.
        top_k: keep the ``k`` largest logits (and those equal to the k-th); 0 keeps all.
        top_p: keep the smallest set of largest probabilities that reaches this mass (arXiv 1904.09751).
        min_p: keep tokens with at least this share of the largest probability (arXiv 2407.01082).
        repeat_penalty: logits of recent tokens are divided by it if positive, else multiplied (arXiv 1909.05858).
        presence_penalty: subtracted once from the logit of every recent token.
        frequency_penalty: subtracted once for every recent occurrence.
        penalty_last_n: how many last tokens (prompt included) count as recent; -1 is all of them, 0 none.
        logit_bias: added to the logits of single tokens, at most 1e9 either way; ``-inf`` bans one.
        seed: with ``choice``, keys all randomness: the same seed gives the same text.
        choice: index among several answers to one prompt.
        order: the processors in the order they run, a permutation of :data:`LLAMA_CPP_ORDER`.
        reasoning_budget: how long the answer may reason; ``None`` for any length. A token that it forces is emitted
            whatever the logits and all else here say.
    """

    temperature: float = setting(
        0.8,
        _REAL(low=0.0, high=100.0, way_out="0 decodes greedily"),
        _SAMPLING("--temp --temperature", "0 decodes greedily."),
    )
    top_k: int = setting(
        40,
        _WHOLE(called="top-k", low=0, high=_LARGEST, way_out="0 keeps all tokens"),
        _SAMPLING("--top-k", "Keep the k likeliest tokens; 0 keeps all."),
    )
    top_p: float = setting(
        0.95,
        _REAL(called="top-p", low=0.0, high=1.0, low_excluded=True, way_out="1 keeps all tokens"),
        _SAMPLING("--top-p", "Keep the likeliest tokens up to this mass."),
    )
    min_p: float = setting(
        0.05,
        _REAL(called="min-p", low=0.0, high=1.0, way_out="0 keeps all tokens"),
        _SAMPLING("--min-p", "Keep tokens with this share of the best one's."),
    )
    repeat_penalty: float = setting(
        1.0,
        _REAL(called="repeat penalty", low=1e-6, high=100.0, way_out="1 switches it off"),
        _SAMPLING("--repeat-penalty", "1 switches it off."),
    )
    presence_penalty: float = setting(
        0.0,
        _REAL(called="presence penalty", low=-100.0, high=100.0, way_out="0 switches it off"),
        _SAMPLING("--presence-penalty", "0 switches it off."),
    )
    frequency_penalty: float = setting(
        0.0,
        _REAL(called="frequency penalty", low=-100.0, high=100.0, way_out="0 switches it off"),
        _SAMPLING("--frequency-penalty", "0 switches it off."),
    )
    penalty_last_n: int = setting(
        64,
        _WHOLE(called="penalty last-n", low=-1, high=_LARGEST, way_out="-1 counts all tokens", json=("repeat_last_n",)),
        _SAMPLING("--repeat-last-n", "Tokens that penalties look at; -1 for all."),
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        metadata=described(
            Option("other", error=SamplingError, parse=_parse_biases, separator=","),
            _SAMPLING("--logit-bias", "May be repeated.", repeated=True, metavar="TOKEN_ID=BIAS"),
        ),
    )
    # A negative one is read as wrap_seed() has it.
    seed: int = setting(
        0,
        _WHOLE(high=MAX_SEED, way_out="leave it out for a random one"),
        _SAMPLING("--seed -s", "-1 picks one; the report says which.", shown_default=-1),
    )
    choice: int = setting(0, _WHOLE(low=0, high=_LARGEST, way_out="0 is the first answer"))
    order: tuple[str, ...] = setting(
        LLAMA_CPP_ORDER,
        Option("texts", error=SamplingError, words={"llama.cpp": LLAMA_CPP_ORDER, "transformers": TRANSFORMERS_ORDER}),
        _SAMPLING("--sampler-order", "Temperature last, or before truncation."),
    )
    reasoning_budget: ReasoningBudget | None = setting(
        None, Option("other", error=SamplingError, optional=True, variable=None)
    )

    def __post_init__(self) -> None:
        take_values(self)
        object.__setattr__(self, "seed", read_seed(self.seed))
        if not isinstance(self.reasoning_budget, ReasoningBudget | None):
            raise SamplingError(
                f"the reasoning budget is {shown(self.reasoning_budget)}: give a ReasoningBudget, or None for no limit",
                field="reasoning_budget",
            )
        if 0.0 < self.temperature < _LOWEST_TEMPERATURE:
            raise SamplingError(
                f"temperature {self.temperature} is too low to divide by: give 0, which decodes greedily, or at least "
                f"{_LOWEST_TEMPERATURE:g} (`temperature`)",
                field="temperature",
            )
        object.__setattr__(self, "logit_bias", _taken_biases(self.logit_bias))
        if sorted(self.order) != sorted(LLAMA_CPP_ORDER):
            raise SamplingError(
                f"processor order {','.join(self.order)}: name each of {', '.join(LLAMA_CPP_ORDER)} once", field="order"
            )

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
    """When a request ends, and which control tokens its text shows.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        stop: texts that end the answer where they begin; they are found across token borders too, and in the spelling
            of control tokens.
        ignore_end: keep going past end-of-generation tokens.
        preserved_ids: control tokens that are spelled out in the text, such as the markers of reasoning. Others add
            nothing to it. A token that ends the answer is never written.
        min_indent: a line behind the first that begins with fewer blanks than this ends the answer behind its blanks,
            an empty line, too; 0 lets all lines pass. For code that fills a gap within a block.
    """

    max_tokens: int = setting(
        256,
        Option(
            "whole",
            called="the number of tokens to predict",
            counted="{} tokens to predict",
            low=1,
            way_out="-1 on the command line fills the context",
            stand_ins={-1: lambda: MAX_TOKENS},
            json=("max_completion_tokens", "n_predict"),
        ),
        _OUTPUT("-n --predict --n-predict", "Most tokens to generate; -1 fills the context."),
    )
    stop: tuple[str, ...] = setting(
        (), Option("texts"), _OUTPUT("--stop", "End where this text begins; may be repeated.", repeated=True)
    )
    ignore_end: bool = setting(
        False, Option("truth", json=("ignore_eos",)), _OUTPUT("--ignore-eos", "Go on past the end of the answer.")
    )
    preserved_ids: tuple[int, ...] = setting((), Option("other", variable=None))
    min_indent: int = setting(
        0,
        Option("whole", called="min-indent", low=0, way_out="0 lets all lines pass", variable=None, json=("n_indent",)),
    )

    def __post_init__(self) -> None:
        take_values(self)
        with blame("preserved_ids"):
            object.__setattr__(self, "preserved_ids", token_ids(self.preserved_ids, "preserved_ids"))
        if any(not text for text in self.stop):
            raise InputError(
                "an empty stop text would stop before the first token: leave it out (`stop`)", field="stop"
            )


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How a request is sped up; what it asks for limits what the policy decides.

    Under ``coupled``, and greedily, none of it changes the text.

    Attributes:
        speculate: ``False`` decodes plainly.
        drafters: names of those that may draft for it; ``None`` is all that the model has.
        draft_max: most tokens drafted along one path, at least 1; ``None`` leaves it to the policy.
        verify: how drafts are judged.
        draft_min: paths shorter than this are not verified. Above 1 it is refused under ``rejection``, but for greedy
            requests.
        p_min: drafting stops where the drafter's likeliest token is less likely than this, at the first token too; see
            :attr:`~paceline.drafters.base.DraftBudget.min_probability`. 0 never stops it.
        policy: what decides how much is drafted: the policy that the model was loaded with, which is also ``None``; or
            ``fixed``, which drafts a chain of ``draft_max`` tokens every round, whatever that costs. Without
            ``draft_max`` these are :class:`~paceline.planning.policies.fixed.FixedPolicy`'s. Without ``drafters`` the
            draft model drafts them, if there is one. Of several drafters the first that proposes anything does.
        prediction: tokens that the answer is expected to repeat for the most part, changes aside: the drafter
            ``prediction`` copies from them. Empty for none.
    """

    speculate: bool = setting(True, Option("truth"), _SPECULATION("--no-speculation", "Decode plainly.", negated=True))
    drafters: tuple[str, ...] | None = setting(
        None,
        Option("texts", optional=True, separator=","),
        _SPECULATION(
            "--drafters",
            "Among {drafters}, in the order to ask. [dim]\\[suffix, or suffix,lookup,draft with a draft model; of "
            "policy fixed, draft alone if there is one][/dim]",
            metavar="NAME[,...]",
        ),
    )
    draft_max: int | None = setting(
        None, Option("whole", called="draft-max", optional=True, low=1, way_out="`speculate=False` drafts nothing")
    )
    verify: VerifierName = setting(
        "coupled",
        Option("choice", called="verifier", words=same(VERIFIER_NAMES)),
        _SPECULATION("--verify", "coupled: a seed's text is the same with any drafts or none."),
    )
    draft_min: int = setting(
        0, Option("whole", called="draft-min", low=0, way_out="0 keeps drafts of any length", variable=None)
    )
    p_min: float = setting(
        0.0, Option("real", called="draft-p-min", low=0.0, high=1.0, way_out="0 keeps all drafts", variable=None)
    )
    policy: PolicyName | None = setting(
        None, Option("choice", optional=True, words=same(get_args(PolicyName)), variable=None)
    )
    prediction: tuple[int, ...] = setting((), Option("other", variable=None))

    def __post_init__(self) -> None:
        take_values(self)
        with blame("prediction"):
            object.__setattr__(self, "prediction", token_ids(self.prediction, "prediction"))
        if self.drafters is not None and not self.drafters:
            raise InputError(
                "no drafter is named: name one, or decode without speculation (`speculate=False`)", field="drafters"
            )
        if self.draft_max is not None:
            check_draft_min(self.draft_min, self.draft_max)

    @property
    def follows_policy(self) -> bool:
        """Whether the policy that the model was loaded with decides how much is drafted."""
        return self.speculate and self.policy != "fixed"


@dataclass(frozen=True, slots=True)
class CacheParams:
    """Whose a request is: what it may start from of all that was read before, who may start from it, and when it may.

    A beginning that is not read again is the same text. Its rows may differ by rounding where passes of another width,
    or at other places in the cache, made them.

    Attributes:
        cache_prompt: whether tokens that were read for other requests need not be read again.
        namespace: whose the text is: nothing is shared between namespaces.
        client: whose turn it is: requests that wait start in the order they came for one client, and by turns among
            several. A client may have several namespaces.
    """

    cache_prompt: bool = setting(True, Option("truth"))
    namespace: str = setting("", Option("other", parse=lambda texts: texts[-1]))
    client: str = setting("", Option("other", parse=lambda texts: texts[-1]))

    def __post_init__(self) -> None:
        take_values(self)
        for name, value in (("namespace", self.namespace), ("client", self.client)):
            if not isinstance(value, str):
                raise InputError(f"the {name} is {shown(value)}: give a text", field=name)


def check_draft_min(draft_min: int, draft_max: int) -> None:
    if not 0 <= draft_min <= draft_max:
        raise InputError(f"draft-min {draft_min} is out of range: give 0 to draft-max, {draft_max}", field="draft_min")


@blame("logit_bias")
def _taken_biases(given: object) -> dict[int, float]:
    """Return biases with numbers of Python's own; refuses those that cannot be added to a logit."""
    if not isinstance(given, Mapping):
        raise SamplingError(f"logit bias is {shown(given)}: give a mapping of token ids to numbers")
    if {*map(type, given)} <= {int} and {*map(type, given.values())} <= {float}:
        # A list that bans most of a vocabulary is looked at as a whole.
        wrong = [bias for bias in given.values() if not (-_LARGEST_BIAS <= bias <= _LARGEST_BIAS or bias == -math.inf)]
        if not wrong and min(given, default=0) >= 0 and max(given, default=0) <= _LARGEST:
            return dict(given)
    biases = {
        whole_number(token_id, "the token id of a logit bias", SamplingError): real_number(
            bias, f"logit bias for token {token_id}", SamplingError
        )
        for token_id, bias in given.items()
    }
    for token_id, bias in biases.items():
        if not 0 <= token_id <= _LARGEST or not (bias == -math.inf or abs(bias) <= _LARGEST_BIAS):
            raise SamplingError(
                f"logit bias {bias} for token {token_id}: give the id of a token and a number from "
                f"{-_LARGEST_BIAS:g} to {_LARGEST_BIAS:g}, or -inf to ban the token (`logit_bias`)"
            )
    return biases
