"""A head reads each token with the state before it, and what it proposes depends on the text alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import Request
from paceline.drafters.base import DraftBudget
from paceline.drafters.head import HeadDrafter
from paceline.engines.base import Step
from paceline.engines.scripted import ScriptedEngine
from paceline.engines.state_track import StateTrack
from paceline.planning.policies.fixed import FixedPolicy
from tests.drafters.helpers import grow
from tests.drafters.scripted_heads import SIZE, Head, block_head, drafter_of, own, said, target
from tests.helpers import BlockHead, CacheHead, MoodyPolicy, decode, request_of, say

GREEDY = SamplingParams(0.0)


def test_each_token_is_read_with_the_state_before_it_and_drafts_with_the_heads_own() -> None:
    engine, head = target(), Head()
    drafter = HeadDrafter(head, target=engine.vocabulary)
    request = request_of([4, 7, 9, 2], GREEDY, target=engine)
    assert engine.open() == request.sequence
    engine.forward([Step(request.sequence, [4, 7, 9], [-1, 0, 1], [])])
    engine.commit(request.sequence, [0, 1, 2])
    drafter.begin(request)
    assert drafter.unread(request) == 3
    (tree,) = grow(drafter, [request], DraftBudget(3))
    first, second = tree.token_ids[1:3]
    assert head.fed == [[(7, 1), (9, 2), (2, 3)], [(first, None)], [(second, None)]]
    assert tree.token_ids[1:] == plain([4, 7, 9, 2], 3)


def plain(prompt: Sequence[int], count: int) -> list[int]:
    return decode(target(), prompt, GREEDY, StopRules(count)).token_ids


def cache_head(engine: ScriptedEngine, max_rows: int = 64) -> CacheHead:
    """Return a head that knows what a target says, where the states that it is given do."""
    return CacheHead(engine, lambda cached, rows: said(rows), lambda cached, rows: own(rows), max_rows)


def test_a_head_that_reads_the_cache_is_fed_the_root_and_its_drafts_alone() -> None:
    engine = target()
    head = cache_head(engine)
    drafter = drafter_of(engine, head)
    request = request_of([4, 7, 9, 2], GREEDY, target=engine)
    assert engine.open() == request.sequence
    engine.forward([Step(request.sequence, [4, 7, 9], [-1, 0, 1], [])])
    engine.commit(request.sequence, [0, 1, 2])
    drafter.begin(request)
    assert drafter.unread(request) == 0
    (tree,) = grow(drafter, [request], DraftBudget(3, siblings=2))
    first, second, _ = drafts = tree.path_tokens(5)  # each level has two proposals, the best one first
    fed = [(token_id, int(state[0])) for rows in head.fed for token_id, state in rows]
    assert fed == [(2, 3), (first, 4), (second, 5)]
    assert drafts == plain([4, 7, 9, 2], 3)
    assert engine.length(request.sequence) == 3


def test_what_an_interrupt_left_is_not_drafted_on() -> None:
    """One that came after the pass, before the drafter knew of it."""
    engine = target()
    head = cache_head(engine)
    drafter = drafter_of(engine, head)
    request = request_of([4, 7], GREEDY, target=engine)
    assert engine.open() == request.sequence
    engine.forward([Step(request.sequence, [4], [-1], [])])
    engine.commit(request.sequence, [0])
    drafter.begin(request)
    forward = head.forward

    def interrupt(steps: Sequence[Step]) -> Any:
        forward(steps)
        raise KeyboardInterrupt

    head.forward = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        grow(drafter, [request], DraftBudget(2))
    head.forward = forward  # type: ignore[method-assign]
    engine.forward([Step(request.sequence, [7], [-1], [])])
    engine.commit(request.sequence, [0])
    say(request, 9)
    (tree,) = grow(drafter, [request], DraftBudget(2))
    assert tree.token_ids[1:] == plain([4, 7, 9], 2)


def test_a_head_of_blocks_reads_the_states_of_the_text_and_drafts_in_one_pass() -> None:
    engine, head = target(), block_head()
    drafter = drafter_of(engine, head)
    request = request_of([4, 7, 9, 2], GREEDY, target=engine)
    assert engine.open() == request.sequence
    engine.forward([Step(request.sequence, [4, 7, 9], [-1, 0, 1], [])])
    engine.commit(request.sequence, [0, 1, 2])
    drafter.begin(request)
    assert drafter.unread(request) is None
    for depth in (3, 8):
        (tree,) = grow(drafter, [request], DraftBudget(depth, siblings=2))
        assert tree.token_ids[1:] == plain([4, 7, 9, 2], min(depth, 5))
    assert head.num_blocks == 2
    assert head.length(0) == 3


@pytest.mark.parametrize("kind", ["own cache", "target's cache", "blocks"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_head_that_knows_the_target_has_every_draft_accepted(depth: int, kind: str) -> None:
    """Of a state too early, too late, or of the head where the target's is due, some would be refused."""
    engine = target()
    heads: dict[str, Callable[[], Head | CacheHead | BlockHead]] = {
        "own cache": Head,
        "target's cache": lambda: cache_head(engine),
        "blocks": block_head,
    }
    drafter = drafter_of(engine, heads[kind]())
    answer = decode(engine, [1, 2, 3], GREEDY, StopRules(61), drafters=[drafter], policy=FixedPolicy(depth))
    assert answer.token_ids == plain([1, 2, 3], 61)
    counts = answer.request.stats
    assert counts.num_drafted == counts.num_accepted > 0


class Whims(MoodyPolicy):
    """Drafts chains of any length, or none."""

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        return [self._rng.choice((None, DraftBudget(self._rng.randint(0, 6)))) for _ in requests]


@pytest.mark.parametrize("kind", ["own cache", "target's cache", "blocks"])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_proposed_depends_on_the_text_alone(seed: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was drafted before, left out, or thrown away; also where older states were let go."""
    rng = random.Random(seed)
    monkeypatch.setattr(StateTrack.__init__, "__defaults__", (0, rng.choice((4, 9, 2048))))
    engine = target()
    context_length, max_rows = rng.choice((7, 20, 4096)), rng.choice((2, 5, 64))
    heads: dict[str, Callable[[], Head | CacheHead | BlockHead]] = {
        "own cache": lambda: Head(context_length=context_length, max_rows=max_rows),
        "target's cache": lambda: cache_head(engine, rng.choice((1, 5))),
        "blocks": lambda: block_head(context_length=context_length + 6, max_rows=max_rows + 4),
    }
    drafter = drafter_of(engine, heads[kind]())
    prompt = [rng.randrange(SIZE) for _ in range(rng.randint(2, 30))]
    answer = decode(engine, prompt, GREEDY, StopRules(50), drafters=[drafter], policy=Whims(rng))
    assert answer.token_ids == plain(prompt, 50)
    assert answer.request.stats.num_drafted == answer.request.stats.num_accepted > 0
