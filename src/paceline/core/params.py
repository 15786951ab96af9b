"""What a request asks for: how to sample, when to stop and how to speculate. Complete and checked when built."""

from __future__ import annotations

import functools
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

from paceline.core.errors import InputError, SamplingError, blame
from paceline.core.fields import Flag, Option, described, same, setting, take_values
from paceline.core.numbers import real_number, shown, token_ids, whole_number
from paceline.core.reasoning import ReasoningBudget

LLAMA_CPP_ORDER = (
    *("logit_bias", "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"),
)
"""Processor order of llama.cpp: truncation looks at the untempered distribution, temperature comes last."""

TRANSFORMERS_ORDER = (
    *("logit_bias", "penalties", "dry", "temperature", "top_n_sigma", "top_k", "top_p", "min_p", "typical_p", "xtc"),
)
"""Processor order of transformers: temperature first, so it widens what truncation keeps. What transformers has not
stands beside what is most like it.
"""

OFF: Final[Mapping[str, Mapping[str, Any]]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typical_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    "infill": {},
}
"""By processor that an order may leave out, what switches it off. ``infill`` is on where an order names it."""

_OTHER_NAMES: Final = {"nucleus": "top_p", "typp": "typical_p", "typ": "typical_p", "temp": "temperature"}
_LETTERS: Final = {
    **{"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typical_p", "p": "top_p", "m": "min_p"},
    **{"x": "xtc", "i": "infill", "t": "temperature"},
}

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

LARGEST_BIAS: Final = 1e9
"""Most that a bias or DRY adds to a logit or takes from it."""
LOWEST_TEMPERATURE: Final = 1e-20
"""Least temperature to divide by. With these two no logit overflows in 32 bits, in whatever order it is biased,
penalised and divided: 1e9 / 1e-6 / 1e-20.
"""

_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_ESCAPE: Final = re.compile(r"\\([nrt'\"\\])")

_MAX_BREAKERS: Final = 64
_LONGEST_BREAKER: Final = 40


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


def find_processor(sampler: str) -> str | None:
    """Return the processor that llama.cpp's sampler of a name is; ``None`` where there is none."""
    plain = sampler.lower().replace("_", "").replace("-", "")
    return _OTHER_NAMES.get(plain) or next((name for name in OFF if name.replace("_", "") == plain), None)


def sampler_name(processor: str) -> str:
    """Return llama.cpp's name for a processor."""
    return "typ_p" if processor == "typical_p" else processor


def read_samplers(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the processors that llama.cpp's samplers are, by their names, or by their letters in one text.

    Raises:
        SamplingError: there is no such sampler, or one is named twice.
    """
    order: list[str] = []
    for each in given:
        name = _LETTERS.get(each) if isinstance(given, str) else find_processor(each)
        if each == "a" if isinstance(given, str) else each.lower().replace("-", "_") == "adaptive_p":
            continue  # acts with an option alone that is not here
        if name is None:
            there_are = ", ".join(map(sampler_name, OFF))
            raise SamplingError(f"unknown sampling step {each!r}: choose from {there_are} (`order`)", field="order")
        if name in order:
            raise SamplingError(
                f"the sampling step {sampler_name(name)} is named twice: name it once (`order`)", field="order"
            )
        order.append(name)
    return tuple(order)


def _parse_order(texts: Sequence[str]) -> tuple[str, ...]:
    """Read an order as a command line has it: one of the usual two, names between semicolons, or letters."""
    text = texts[-1].strip()
    usual = {"llama.cpp": LLAMA_CPP_ORDER, "transformers": TRANSFORMERS_ORDER}
    if text.lower() in usual:
        return usual[text.lower()]
    is_name, is_letters = find_processor(text) is not None, {*text} <= {*_LETTERS, "a"}
    if is_name and is_letters:
        raise SamplingError(
            f"{text} is a name and letters too: write {sampler_name(find_processor(text) or text)}, or "
            f"{';'.join(map(sampler_name, read_samplers(text)))}",
            field="order",
        )
    return read_samplers(text if is_letters else [name for part in re.split("[;,]", text) if (name := part.strip())])


def _parse_breakers(texts: Sequence[str]) -> tuple[str, ...]:
    breakers: list[str] = []
    for text in texts:
        # As llama.cpp reads its flag.
        breakers = [] if text == "none" else [*breakers, _ESCAPE.sub(lambda found: _ESCAPED[found[1]], text)]
    return tuple(breakers)


_WHOLE = functools.partial(Option, "whole", error=SamplingError)
_REAL = functools.partial(Option, "real", error=SamplingError)
_SAMPLING = functools.partial(Flag, panel="Sampling")
_OUTPUT = functools.partial(Flag, panel="Prompt and output")
_SPECULATION = functools.partial(Flag, panel="Speculation")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's logits become a distribution, and the randomness that picks from it.

    The defaults of the filters are llama.cpp's. A value that switches a filter off is accepted everywhere:
    ``top_k=0``, ``top_p=1``, ``min_p=0``, ``top_n_sigma=-1``, ``typical_p=1``, ``xtc_probability=0``,
    ``repeat_penalty=1``, ``dry_multiplier=0``, the other penalties 0.

    Attributes:
        temperature: 0 is greedy: the largest logit after bias and penalties, and after ``typical_p`` and XTC, which may
            take the largest away; the lowest id among equals. Others are at least 1e-20.
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
        order: the processors in the order they run: those of :data:`LLAMA_CPP_ORDER`, and ``infill``, each at most
            once. One that is left out is off, whatever it is set to, but for ``logit_bias``, which is first then.
            ``infill`` ends an answer that fills a gap where no token is likely, as llama.cpp's sampler of that name.
        reasoning_budget: how long the answer may reason; ``None`` for any length. A token that it forces is emitted
            whatever the logits and all else here say.
        top_n_sigma: keep logits at most so many of their standard deviations below the largest (arXiv 2411.07641); 0 or
            less keeps all.
        typical_p: keep the tokens whose surprise is closest to the entropy, up to this mass (arXiv 2202.00666).
        dynatemp_range: the temperature is so much lower where the distribution is certain, and so much higher where it
            is flat; 0 leaves it as it is. With it temperature 0 is not greedy.
        dynatemp_exponent: the share of the largest possible entropy, to this power, says where in the range it is.
        dry_multiplier: a token that would prolong a repetition of ``n`` tokens loses
            ``dry_multiplier * dry_base ** (n - dry_allowed_length)``, at most 1e9; 0 switches it off.
        dry_base: see ``dry_multiplier``.
        dry_allowed_length: shorter repetitions may be prolonged.
        dry_penalty_last_n: how many last tokens (prompt included) are searched; -1 is all of them, 0 none.
        dry_sequence_breakers: texts across which nothing counts as repeated, at most 64 of 40 bytes each.
        xtc_probability: how often all but the least likely of the tokens that reach ``xtc_threshold`` are left out.
        xtc_threshold: a probability; above 0.5 nothing is ever left out.
        allowed_token_ids: tokens of which the answer may be made; ``None`` for all. A token that ends it is one of them
            only where it is named.
    """

    temperature: float = setting(
        0.8,
        _REAL(low=0.0, high=100.0, way_out="0 decodes greedily"),
        _SAMPLING("--temp --temperature", "Sampling temperature; 0 is greedy."),
    )
    top_k: int = setting(
        40,
        _WHOLE(called="top-k", low=0, high=_LARGEST, way_out="0 keeps all tokens"),
        _SAMPLING("--top-k", "Sample from the k most likely tokens; 0 keeps all."),
    )
    top_p: float = setting(
        0.95,
        _REAL(called="top-p", low=0.0, high=1.0, low_excluded=True, way_out="1 keeps all tokens"),
        _SAMPLING("--top-p", "Sample from the most likely tokens that add up to this probability."),
    )
    min_p: float = setting(
        0.05,
        _REAL(called="min-p", low=0.0, high=1.0, way_out="0 keeps all tokens"),
        _SAMPLING("--min-p", "Drop tokens less likely than this share of the most likely one."),
    )
    repeat_penalty: float = setting(
        1.0,
        _REAL(called="repeat penalty", low=1e-6, high=100.0, way_out="1 switches it off"),
        _SAMPLING("--repeat-penalty", "Penalty for tokens that occurred recently; 1 turns it off."),
    )
    presence_penalty: float = setting(
        0.0,
        _REAL(called="presence penalty", low=-100.0, high=100.0, way_out="0 switches it off"),
        _SAMPLING("--presence-penalty", "Flat penalty for tokens that occurred recently; 0 turns it off."),
    )
    frequency_penalty: float = setting(
        0.0,
        _REAL(called="frequency penalty", low=-100.0, high=100.0, way_out="0 switches it off"),
        _SAMPLING("--frequency-penalty", "Penalty for each recent occurrence of a token; 0 turns it off."),
    )
    penalty_last_n: int = setting(
        64,
        _WHOLE(called="penalty last-n", low=-1, high=_LARGEST, way_out="-1 counts all tokens", json=("repeat_last_n",)),
        _SAMPLING("--repeat-last-n", "How many recent tokens the penalties consider; -1 for all."),
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        metadata=described(
            Option("other", error=SamplingError, parse=_parse_biases, separator=","),
            _SAMPLING(
                "--logit-bias",
                "Add a bias to a token's logit; may be repeated.",
                repeated=True,
                metavar="TOKEN_ID=BIAS",
            ),
        ),
    )
    # A negative one is read as wrap_seed() has it.
    seed: int = setting(
        0,
        _WHOLE(high=MAX_SEED, way_out="leave it out for a random one"),
        _SAMPLING("--seed -s", "Random seed; -1 picks one, which the report shows.", shown_default=-1),
    )
    choice: int = setting(0, _WHOLE(low=0, high=_LARGEST, way_out="0 is the first answer"))
    order: tuple[str, ...] = setting(
        LLAMA_CPP_ORDER,
        Option("texts", error=SamplingError, parse=_parse_order),
        _SAMPLING(
            "--sampler-order --samplers --sampler-seq --sampling-seq",
            "Order of the samplers: llama.cpp (temperature last), transformers (temperature first), or "
            "llama.cpp's sampler names separated by semicolons, or its letters. Samplers left out are "
            "off. [dim]\\[llama.cpp][/dim]",
            metavar="ORDER",
        ),
    )
    reasoning_budget: ReasoningBudget | None = setting(
        None, Option("other", error=SamplingError, optional=True, variable=None)
    )
    top_n_sigma: float = setting(
        -1.0,
        _REAL(called="top-n-sigma", low=-_LARGEST, high=_LARGEST, way_out="-1 keeps all tokens"),
        _SAMPLING(
            "--top-nsigma --top-n-sigma",
            "Drop logits more than this many standard deviations below the best; -1 turns it off.",
        ),
    )
    typical_p: float = setting(
        1.0,
        _REAL(called="typical-p", low=0.0, high=1.0, way_out="1 keeps all tokens"),
        _SAMPLING(
            "--typical --typical-p", "Locally typical sampling: keep the most typical tokens up to this probability."
        ),
    )
    dynatemp_range: float = setting(
        0.0,
        _REAL(called="dynatemp range", low=0.0, high=100.0, way_out="0 keeps the temperature as it is"),
        _SAMPLING(
            "--dynatemp-range", "Dynamic temperature: change it by up to this, lower where the model is certain."
        ),
    )
    dynatemp_exponent: float = setting(
        1.0,
        _REAL(called="dynatemp exponent", low=0.0, high=100.0, way_out="1 follows the entropy"),
        _SAMPLING("--dynatemp-exp", "Dynamic temperature: exponent of the entropy."),
    )
    dry_multiplier: float = setting(
        0.0,
        _REAL(called="DRY multiplier", low=0.0, high=100.0, way_out="0 switches it off"),
        _SAMPLING("--dry-multiplier", "DRY: strength of the penalty for continuing a repetition; 0 turns it off."),
    )
    dry_base: float = setting(
        1.75,
        _REAL(called="DRY base", low=1.0, high=100.0, way_out="1 penalises all lengths alike"),
        _SAMPLING("--dry-base", "DRY: growth of the penalty with every further repeated token."),
    )
    dry_allowed_length: int = setting(
        2,
        _WHOLE(called="DRY allowed length", low=0, high=_LARGEST, way_out="2 is usual"),
        _SAMPLING("--dry-allowed-length", "DRY: repetitions shorter than this are not penalised."),
    )
    dry_penalty_last_n: int = setting(
        64,
        _WHOLE(called="DRY penalty last-n", low=-1, high=_LARGEST, way_out="-1 searches all tokens"),
        _SAMPLING("--dry-penalty-last-n", "DRY: how many recent tokens to search for repetitions; -1 for all."),
    )
    dry_sequence_breakers: tuple[str, ...] = setting(
        ("\n", ":", '"', "*"),
        Option("texts", called="DRY sequence breakers", error=SamplingError, parse=_parse_breakers),
        _SAMPLING(
            "--dry-sequence-breaker",
            'DRY: a text that ends a repetition; may be repeated; none for no such text. [dim]\\[\\n, :, ", *][/dim]',
            repeated=True,
        ),
    )
    xtc_probability: float = setting(
        0.0,
        _REAL(called="XTC probability", low=0.0, high=1.0, way_out="0 switches it off"),
        _SAMPLING("--xtc-probability", "XTC: how often to drop the most likely tokens; 0 turns it off."),
    )
    xtc_threshold: float = setting(
        0.1,
        _REAL(called="XTC threshold", low=0.0, high=1.0, way_out="above 0.5 it changes nothing"),
        _SAMPLING("--xtc-threshold", "XTC: of the tokens at least this likely, drop all but the least likely."),
    )
    allowed_token_ids: tuple[int, ...] | None = setting(
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
        if 0.0 < self.temperature < LOWEST_TEMPERATURE:
            raise SamplingError(
                f"temperature {self.temperature} is too low to divide by: give 0, which decodes greedily, or at least "
                f"{LOWEST_TEMPERATURE:g} (`temperature`)",
                field="temperature",
            )
        object.__setattr__(self, "logit_bias", _taken_biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            with blame("allowed_token_ids"):
                allowed = token_ids(self.allowed_token_ids, "allowed_token_ids", SamplingError)
                object.__setattr__(self, "allowed_token_ids", allowed)
                if not allowed:
                    raise SamplingError(
                        "allowed_token_ids is empty, so no token could be generated: name tokens, or leave it out"
                    )
        if len({*self.order}) < len(self.order) or not {*self.order} <= {LLAMA_CPP_ORDER[0], *OFF}:
            raise SamplingError(
                f"processor order {','.join(self.order)}: name some of {', '.join((LLAMA_CPP_ORDER[0], *OFF))}, each "
                "once",
                field="order",
            )
        if LLAMA_CPP_ORDER[0] not in self.order:
            object.__setattr__(self, "order", (LLAMA_CPP_ORDER[0], *self.order))
        for name in OFF.keys() - self.order:
            for option, value in OFF[name].items():
                object.__setattr__(self, option, value)
        with blame("dry_sequence_breakers"):
            _check_breakers(self.dry_sequence_breakers)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit that processors leave is always taken."""
        return self.temperature == 0.0 and self.dynatemp_range == 0.0

    @property
    def active(self) -> tuple[str, ...]:
        """The processors that change what is emitted, in their order."""
        in_use = self._in_use
        if self.greedy and not in_use.isdisjoint(("typical_p", "xtc", "infill")):
            in_use.discard("temperature")
        elif self.greedy:
            # Neither temperature nor truncation changes which logit is the largest, unless what truncation leaves is
            # looked at by a filter that may take the largest away.
            in_use &= {"logit_bias", "penalties", "dry"}
        return tuple(name for name in self.order if name in in_use)

    @property
    def _in_use(self) -> set[str]:
        """The processors that are not switched off."""
        is_on = {
            "logit_bias": bool(self.logit_bias),
            "penalties": self.penalised,
            "dry": self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0,
            "top_n_sigma": self.top_n_sigma > 0.0,
            "top_k": self.top_k > 0,
            "typical_p": self.typical_p < 1.0,
            "top_p": self.top_p < 1.0,
            "min_p": self.min_p > 0.0,
            "xtc": self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5,
            "temperature": self.temperature != 1.0 or self.dynatemp_range > 0.0,
            "infill": "infill" in self.order,
        }
        return {name for name, is_in_use in is_on.items() if is_in_use}

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
        min_tokens: so many tokens come before the answer may end: until then tokens that end it are left out, unless
            nothing else may follow, and stop texts do not count.
        stop_token_ids: further tokens that end the answer.
        include_stop: whether the text has the stop text that ends it, or the token of ``stop_token_ids``.
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
        _OUTPUT("-n --predict --n-predict --tokens", "Maximum tokens to generate; -1 fills the context."),
    )
    stop: tuple[str, ...] = setting(
        (), Option("texts"), _OUTPUT("--stop", "Stop before this text; may be repeated.", repeated=True)
    )
    ignore_end: bool = setting(
        False,
        Option("truth", json=("ignore_eos",)),
        _OUTPUT("--ignore-eos", "Keep generating past the end-of-sequence token."),
    )
    preserved_ids: tuple[int, ...] = setting((), Option("other", variable=None))
    min_indent: int = setting(
        0,
        Option("whole", called="min-indent", low=0, way_out="0 lets all lines pass", variable=None, json=("n_indent",)),
    )
    min_tokens: int = setting(
        0,
        Option("whole", low=0, way_out="0 lets the answer end at once"),
        _OUTPUT("--min-tokens", "Minimum tokens to generate."),
    )
    stop_token_ids: tuple[int, ...] = setting((), Option("other", variable=None))
    include_stop: bool = setting(False, Option("truth", variable=None, json=("include_stop_str_in_output",)))

    def __post_init__(self) -> None:
        take_values(self)
        for name in ("preserved_ids", "stop_token_ids"):
            with blame(name):
                object.__setattr__(self, name, token_ids(getattr(self, name), name))
        if self.min_tokens > self.max_tokens:
            raise InputError(
                f"at least {self.min_tokens} tokens of at most {self.max_tokens}: lower `min_tokens`, or raise "
                "`max_tokens`",
                field="min_tokens",
            )
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

    speculate: bool = setting(
        True, Option("truth"), _SPECULATION("--no-speculation", "Decode without speculation.", negated=True)
    )
    drafters: tuple[str, ...] | None = setting(
        None,
        Option("texts", optional=True, separator=","),
        _SPECULATION(
            "--drafters",
            "Drafters to use, in this order; there are {drafters}. [dim]\\[suffix, or suffix,lookup,draft "
            "with a draft model; with policy fixed draft alone if there is one][/dim]",
            metavar="NAME[,...]",
        ),
    )
    draft_max: int | None = setting(
        None, Option("whole", called="draft-max", optional=True, low=1, way_out="`speculate=False` drafts nothing")
    )
    verify: VerifierName = setting(
        "coupled",
        Option("choice", called="verifier", words=same(VERIFIER_NAMES)),
        _SPECULATION(
            "--verify", "How drafts are verified; with coupled a seed gives the same text with any drafts or none."
        ),
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


def _check_breakers(texts: Sequence[str]) -> None:
    if len(texts) > _MAX_BREAKERS:
        raise SamplingError(
            f"{len(texts)} DRY sequence breakers: give at most {_MAX_BREAKERS} (`dry_sequence_breakers`)"
        )
    for text in texts:
        size = len(text.encode(errors="surrogatepass"))
        if not 0 < size <= _LONGEST_BREAKER:
            raise SamplingError(
                f"a DRY sequence breaker of {size} bytes: give texts of 1 to {_LONGEST_BREAKER} bytes, or none at all "
                "(`dry_sequence_breakers`)"
            )


@blame("logit_bias")
def _taken_biases(given: object) -> dict[int, float]:
    """Return biases with numbers of Python's own; refuses those that cannot be added to a logit."""
    if not isinstance(given, Mapping):
        raise SamplingError(f"logit bias is {shown(given)}: give a mapping of token ids to numbers")
    if {*map(type, given)} <= {int} and {*map(type, given.values())} <= {float}:
        # A list that bans most of a vocabulary is looked at as a whole.
        wrong = [bias for bias in given.values() if not (-LARGEST_BIAS <= bias <= LARGEST_BIAS or bias == -math.inf)]
        if not wrong and min(given, default=0) >= 0 and max(given, default=0) <= _LARGEST:
            return dict(given)
    biases = {
        whole_number(token_id, "the token id of a logit bias", SamplingError): real_number(
            bias, f"logit bias for token {token_id}", SamplingError
        )
        for token_id, bias in given.items()
    }
    for token_id, bias in biases.items():
        if not 0 <= token_id <= _LARGEST or not (bias == -math.inf or abs(bias) <= LARGEST_BIAS):
            raise SamplingError(
                f"logit bias {bias} for token {token_id}: give the id of a token and a number from "
                f"{-LARGEST_BIAS:g} to {LARGEST_BIAS:g}, or -inf to ban the token (`logit_bias`)"
            )
    return biases
