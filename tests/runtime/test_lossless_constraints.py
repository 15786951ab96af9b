"""Answers that keep to a grammar are those of plain decoding under it, in the scenes of ``test_lossless.py``.

Grammars are random automata over the tokens of a scene. Some follow what a request says without one, so that drafts are
right often. Some say of tokens that they are forced though they are not, or are forbidden: then they are bad drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from paceline.core.arrays import BoolArray
from paceline.core.errors import ConstraintError
from paceline.core.params import StopRules
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.planning.base import Policy, RoundRecord
from paceline.planning.policies.fixed import FixedPolicy
from paceline.runtime.loop import DecodingLoop
from tests.automaton import AutomatonConstraint
from tests.helpers import PLAIN_PARAMS, ForcedDrafter, WatchingPolicy, decode, drain
from tests.proofs import Tally
from tests.runtime.amended import with_grammar
from tests.runtime.scenes import EVERY_END, Scene, check_scene, play
from tests.tiers import by_tier

MIN_CASES = {
    **EVERY_END,
    "forced accepted": by_tier(2000, quick=400),
    "said to be forced, and turned down": by_tier(200, quick=40),
    "habits accepted": by_tier(1000, quick=200),
    "habits turned down": by_tier(1000, quick=200),
    "drafts accepted beside": by_tier(4000, quick=800),
    "ended by end": by_tier(250, quick=50),
    "reasoning, then grammar, in one round": by_tier(100, quick=5),
    "ended by error": by_tier(50, quick=5),
    "preempted": by_tier(150, quick=20),
}
"""Rounds or requests of each hard case that the examples have to show: every way in which a grammar and drafts meet."""


class ConstraintWatch(WatchingPolicy):
    """Another policy, and a count of how grammars and drafts met. No draft that is verified is forbidden."""

    def __init__(self, inner: Policy, cases: Counter[str]) -> None:
        super().__init__(inner)
        self._cases = cases

    def count(self, record: RoundRecord) -> None:
        super().count(record)
        for request, tree, path, emitted in zip(
            record.requests, record.trees, record.paths, record.emitted, strict=True
        ):
            if request.verifier.sampler.is_constrained:
                self._check(request, tree, emitted)
                self._count(request, tree, path[:emitted])

    def _check(self, request: Request, tree: DraftTree, emitted: int) -> None:
        before = request.token_ids[: len(request.token_ids) - emitted]
        for node in range(1, len(tree)):
            row = np.zeros(max(tree.token_ids[node], max(before)) + 1)
            history = [*before, *tree.path_tokens(tree.parents[node])]
            assert request.verifier.sampler.mask(row, history)[tree.token_ids[node]] == 0.0

    def _count(self, request: Request, tree: DraftTree, path: Sequence[int]) -> None:
        cases = self._cases
        accepted = [tree.sources[node] for node in path]
        cases["drafts accepted beside"] += len(accepted) - accepted.count("grammar")
        drafted = [node for node in range(1, len(tree)) if tree.sources[node] == "grammar"]
        forced = [node for node in drafted if tree.evidence[node].probability is None]
        habits = set(drafted) - set(forced)
        cases["said to be forced, and turned down"] += bool(forced) and forced[0] not in path
        cases["forced accepted"] += len(set(forced) & set(path))
        cases["habits accepted"] += len(habits & set(path))
        cases["habits turned down"] += len(habits - set(path))
        budget = request.params.reasoning_budget
        if budget is not None and path:
            text = tuple(tree.token_ids[node] for node in path)
            ends = range(1, len(text))
            cases["reasoning, then grammar, in one round"] += any(
                text[max(end - len(budget.end), 0) : end] == budget.end for end in ends
            )


def test_constrained_is_plain() -> None:
    tally = Tally()

    def check(scene: Scene) -> None:
        check_scene(scene, tally, amend=with_grammar, watch=lambda inner: ConstraintWatch(inner, tally))

    play("grammars", by_tier(250, quick=80), check)
    tally.report("lossless, under grammars", MIN_CASES)


class Exhausted(AutomatonConstraint):
    """Cannot be asked for anything in its last state, as a grammar that has taken too much."""

    def fork(self) -> Exhausted:
        return Exhausted(self._table, self._state, self._runs)

    def forced(self) -> Sequence[int]:
        self._check()
        return super().forced()

    def allows(self, token_ids: Sequence[int]) -> int:
        self._check()
        return super().allows(token_ids)

    def mask(self) -> BoolArray:
        self._check()
        return super().mask()

    def _check(self) -> None:
        if self._state == len(self._table) - 1:
            raise ConstraintError("too much")


def test_a_grammar_that_fails_ends_no_other_request() -> None:
    model, vocabulary = random_model(6, seed=3), ScriptedVocabulary.of_size(6)
    rules = StopRules(12)
    # Any token in each state, and on to the next one.
    constraint = Exhausted(np.tile(np.minimum(np.arange(1, 6), 4)[:, None], (1, 6)))
    alone = decode(ScriptedEngine(model, vocabulary), [0, 1], PLAIN_PARAMS, rules)
    for drafters in ([], [ForcedDrafter(lambda request: [[1, 2], [3]])]):
        engine = ScriptedEngine(model, vocabulary)
        loop = DecodingLoop(engine, drafters, FixedPolicy(3), clock=engine.clock)
        failing = loop.add([0, 1], PLAIN_PARAMS, rules, constraint=constraint)
        other = loop.add([0, 1], PLAIN_PARAMS, rules)
        drain(loop)
        assert failing.finish_reason == "error"
        assert str(failing.error) == "too much"
        assert failing.output_ids == alone.token_ids[:4]
        assert (other.output_ids, other.finish_reason) == (alone.token_ids, alone.finish_reason)
