"""The exact distribution of a text: the loop is run once for every way in which its dice can fall."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from paceline.core.arrays import Float64Array
from paceline.core.constraint import Constraint
from paceline.core.params import (
    SamplingParams,
    SpeculationParams,
    StopRules,
)
from paceline.core.request import Request
from paceline.core.sampling import RowSampler
from paceline.core.verify import RejectionVerifier
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.lookup import LookupDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.translated import TranslatedDrafter
from paceline.engines.scripted import LogitFunction, ScriptedEngine, ScriptedVocabulary, table_model
from paceline.planning.base import Policy
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.runtime.loop import DecodingLoop
from paceline.vocabularies.mapping import TokenMapping
from tests.helpers import PLAIN_PARAMS, ForcedDrafter, softmax
from tests.proofs import COUNTS

Distribution: TypeAlias = dict[tuple[int, ...], float]

MakeDrafters: TypeAlias = Callable[[], Sequence[Drafter]]

REJECTION = SpeculationParams(verify="rejection")

EXACT = 1e-12
"""Largest total variation that rounding explains."""

PAIRED = (b"!", b'"', b"#", b'!"', b'""')
"""A draft's tokens that are one or two characters: those of a target of three characters, and pairs of them."""


class Chooser:
    """Takes a scripted branch at each choice, then the first possible one; keeps the probability of it all."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.trace: list[tuple[int, Sequence[float]]] = []
        self.probability = 1.0

    def choose(self, weights: Sequence[float]) -> int:
        place = len(self.trace)
        branch = self._script[place] if place < len(self._script) else _next_branch(weights, -1)
        assert branch is not None
        self.trace.append((branch, weights))
        self.probability *= weights[branch]
        return branch


def _next_branch(weights: Sequence[float], after: int) -> int | None:
    return next((i for i in range(after + 1, len(weights)) if weights[i] > 0.0), None)


def enumerate_outcomes(run: Callable[[Chooser], tuple[int, ...]]) -> Distribution:
    """Return the exact distribution of what ``run`` returns, by running it once for every sequence of choices."""
    COUNTS["enumerations"] += 1
    outcomes: defaultdict[tuple[int, ...], float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        chooser = Chooser(script)
        COUNTS["enumerated outcomes"] += 1
        outcomes[run(chooser)] += chooser.probability
        trace = chooser.trace
        script = None
        while trace and script is None:
            branch, weights = trace.pop()
            following = _next_branch(weights, branch)
            if following is not None:
                script = [*(b for b, _ in trace), following]
    return dict(outcomes)


class _Uniform:
    """A uniform number that is only ever compared: ``u * scale < limit`` is a branch with a known probability."""

    def __init__(self, chooser: Chooser, scale: float = 1.0) -> None:
        self._chooser = chooser
        self._scale = scale

    def __mul__(self, factor: float) -> _Uniform:
        return _Uniform(self._chooser, self._scale * float(factor))

    def __lt__(self, limit: float) -> bool:
        accept = min(1.0, float(limit) / self._scale)
        return self._chooser.choose((accept, 1.0 - accept)) == 0


class EnumeratedVerifier(RejectionVerifier):
    """The real verifier with its dice replaced."""

    def __init__(
        self,
        params: SamplingParams,
        num_prompt: int,
        chooser: Chooser,
        constraint: Constraint | None = None,
        vocabulary: ScriptedVocabulary | None = None,
    ) -> None:
        super().__init__(RowSampler(params, num_prompt, constraint, vocabulary=vocabulary))
        self._chooser = chooser
        self._rng: Any = self

    def random(self) -> _Uniform:
        return _Uniform(self._chooser)

    def _draw(self, probs: Float64Array) -> int:
        return self._chooser.choose([float(prob) for prob in probs / probs.sum()])


def text_distribution(
    model: LogitFunction,
    vocab_size: int,
    make_drafters: MakeDrafters = tuple,
    policy: Policy = NO_SPECULATION,
    *,
    params: SamplingParams = PLAIN_PARAMS,
    num_tokens: int = 4,
    prompt: Sequence[int] = (0,),
    end_ids: Sequence[int] = (),
    num_requests: int = 1,
    speculation: SpeculationParams = REJECTION,
    constraint: Constraint | None = None,
    vocabulary: ScriptedVocabulary | None = None,
    **engine_limits: Any,
) -> Distribution:
    """Return the exact distribution of the text of the first of ``num_requests`` requests, through the whole loop.

    The others decode greedily beside it, so that they fill passes without multiplying the outcomes.
    """

    def run(chooser: Chooser) -> tuple[int, ...]:
        engine = ScriptedEngine(model, vocabulary or ScriptedVocabulary.of_size(vocab_size, end_ids), **engine_limits)
        loop = DecodingLoop(engine, make_drafters(), policy, clock=engine.clock)
        rules = StopRules(num_tokens, ignore_end=constraint is None)
        others = [loop.add(prompt, SamplingParams(0.0), rules) for _ in range(num_requests - 1)]
        verifier = EnumeratedVerifier(params, len(prompt), chooser, constraint, engine.vocabulary)
        request = loop.add(prompt, params, rules, speculation, verifier=verifier)
        while request.finish_reason is None:
            loop.step()
        assert request.finish_reason == "length"
        assert all(other.finish_reason != "no_room" for other in others)
        return tuple(request.output_ids)

    return enumerate_outcomes(run)


def total_variation(first: Distribution, second: Distribution) -> float:
    return sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in first.keys() | second.keys()) / 2


def table(vocab_size: int, seed: int, spread: float = 1.5) -> Float64Array:
    return np.random.default_rng(seed).normal(0.0, spread, (vocab_size, vocab_size))


def markov_text(logits: Float64Array, num_tokens: int, last: int = 0) -> Distribution:
    """Return the distribution of ``num_tokens`` tokens of a Markov model, straight from its table."""
    probs = np.apply_along_axis(softmax, 1, logits)
    text: Distribution = {}
    for tokens in product(range(len(logits)), repeat=num_tokens):
        steps = zip((last, *tokens), tokens, strict=False)
        text[tokens] = float(np.prod([probs[before, after] for before, after in steps]))
    return text


def bias(
    make_drafters: MakeDrafters,
    policy: Policy,
    *,
    num_tokens: int = 4,
    prompt: Sequence[int] = (0,),
    expected: Distribution | None = None,
    **how: Any,
) -> float:
    """Return how far a text of ``TARGET_3`` with drafts is from what it should be, by default the model's own."""
    model = table_model(TARGET_3)
    spoken = text_distribution(model, 3, make_drafters, policy, num_tokens=num_tokens, prompt=prompt, **how)
    return total_variation(spoken, expected or markov_text(TARGET_3, num_tokens, last=prompt[-1]))


def draft_of(
    logits: Float64Array, target_vocab_size: int | None = None, unshared_ids: Sequence[int] = (), **limits: Any
) -> DraftModelDrafter:
    size = logits.shape[1]
    model = table_model(logits)
    engine = ScriptedEngine(
        lambda tokens: model([tokens[-1] % len(logits)]), ScriptedVocabulary.of_size(max(size, 8)), **limits
    )
    return DraftModelDrafter(engine, target_vocab_size=target_vocab_size or size, unshared_ids=unshared_ids)


def translated_of(
    logits: Float64Array, target: ScriptedVocabulary | None = None, pieces: Sequence[bytes] = PAIRED, **limits: Any
) -> TranslatedDrafter:
    draft = ScriptedVocabulary(pieces)
    engine = ScriptedEngine(table_model(logits), draft, **limits)
    return TranslatedDrafter(engine, TokenMapping(target or ScriptedVocabulary.of_size(3), draft))


TARGET_3, DRAFT_3 = table(3, 1), table(3, 2)

TARGET_4, DRAFT_4 = table(4, 3), table(4, 4)


def forced(request: Request) -> list[list[int]]:
    """Paths that branch, repeat each other, and change with the text."""
    last = request.token_ids[-1]
    return [[(last + 1) % 3, last], [last, last], [(last + 1) % 3, (last + 2) % 3]]


MERGES: dict[str, MakeDrafters] = {
    "forced": lambda: [ForcedDrafter(forced)],
    "forced before draft": lambda: [ForcedDrafter(forced), draft_of(DRAFT_3)],
    "draft before forced": lambda: [draft_of(DRAFT_3), ForcedDrafter(forced)],
    "suffix before draft": lambda: [SuffixDrafter(1), draft_of(DRAFT_3)],
    "draft before lookup": lambda: [draft_of(DRAFT_3), LookupDrafter(2, 1)],
    "two drafts": lambda: [draft_of(DRAFT_3), draft_of(TARGET_3)],
}
