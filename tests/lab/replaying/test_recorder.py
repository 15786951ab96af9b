"""What is recorded: all that drafters say at every position, as they would outside any loop, and nothing else."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from paceline.api import Model
from paceline.core.errors import CapabilityError, InputError
from paceline.core.params import SamplingParams, StopRules, VerifierName
from paceline.core.request import FinishReason, Request
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import Commit, DraftBudget, Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.lookup import LookupDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, blended_model, random_model, table_model
from paceline.lab.replaying.recorder import record, record_answer
from paceline.lab.replaying.recording import (
    DrafterTrace,
    Level,
    Recording,
    save_recordings,
)
from paceline.planning.policies.fixed import FixedPolicy
from tests.drafters.helpers import grow, settle
from tests.helpers import ForcedDrafter, decode, looping_model, request_of, say
from tests.tiers import by_tier

GREEDY = SamplingParams(0.0)

COUNTING = table_model(4.0 * np.roll(np.eye(10), 1, axis=1))
"""Says the next digit, by a margin of 4."""


def model_with(*drafters: Drafter, end_ids: Sequence[int] = (), verify: VerifierName = "coupled") -> Model:
    target = ScriptedEngine(COUNTING, ScriptedVocabulary.of_size(10, end_ids))
    return Model(target, drafters, FixedPolicy(4), verify=verify)


def draft_model(end_ids: Sequence[int] = ()) -> DraftModelDrafter:
    engine = ScriptedEngine(COUNTING, ScriptedVocabulary.of_size(10, end_ids))
    return DraftModelDrafter(engine, target_vocab_size=10)


def test_every_position_has_what_would_be_proposed_there() -> None:
    with model_with(draft_model(), SuffixDrafter()) as model:
        recording = record(model, [0, 1], depth=3, siblings=2, max_tokens=12, temperature=0.0, name="count")
    assert (recording.name, recording.num_prompt, recording.max_tokens) == ("count", 2, 12)
    assert list(recording.token_ids) == [(2 + k) % 10 for k in range(12)]
    draft, suffix = recording.traces
    assert (draft.name, draft.is_model, suffix.name, suffix.is_model) == ("draft", True, "suffix", False)
    probability = math.exp(4) / (math.exp(4) + 9)
    for done, chain in enumerate(draft.chains, start=1):
        assert [level.token_ids[0] for level in chain] == [(2 + done + depth) % 10 for depth in range(3)]
        for level in chain:
            assert len(level.token_ids) == 2
            assert level.margins == (4.0, -4.0)
            assert level.probability == pytest.approx(probability)
    # With the prompt's two digits the text comes round to a known pair after ten more.
    assert [len(chain) for chain in suffix.chains] == [0] * 9 + [3] * 2
    assert suffix.chains[9][0] == Level((2,), (None,), 0.5, 2, 1)


def plainly_traced(
    drafter: Drafter, prompt_ids: Sequence[int], answer_ids: Sequence[int], params: SamplingParams, budget: DraftBudget
) -> DrafterTrace:
    """Return what a drafter says at every position that it is led through by hand, without any loop."""
    request = request_of(prompt_ids, params)
    drafter.begin(request)
    say(request, answer_ids[0])
    chains = []
    for token_id in answer_ids[1:]:
        (tree,) = grow(drafter, [request], budget)
        chain = []
        for depth in range(1, max(tree.depths) + 1):
            nodes = [node for node in range(len(tree)) if tree.depths[node] == depth]
            first, margins = tree.evidence[nodes[0]], tuple(tree.evidence[node].margin for node in nodes)
            token_ids = tuple(tree.token_ids[node] for node in nodes)
            chain.append(Level(token_ids, margins, first.probability, first.match_length, first.count, first.resumed))
        chains.append(tuple(chain))
        settle(drafter, request, DraftTree(request.token_ids[-1]), [], token_id)
    is_model = drafter.unread(request) is not None
    drafter.end(request)
    return DrafterTrace(drafter.name, is_model, drafter.end_ids, tuple(chains))


def test_a_recording_has_what_drafters_say_outside_any_loop(tmp_path: Path) -> None:
    """Token for token and byte for byte in the file, over random texts and ways to sample."""
    rng = random.Random(7)
    proposed: Counter[str] = Counter()
    reasons: Counter[FinishReason | None] = Counter()
    scenes = by_tier(60, quick=24)
    for scene in range(scenes):
        size = rng.randint(4, 14)
        base = looping_model(size, random_model(size, seed=scene, order=2), period=rng.randint(2, 9), pull=2.0)
        vocabulary = ScriptedVocabulary.of_size(size, rng.sample(range(size), rng.randint(0, 1)))
        target = ScriptedEngine(base, vocabulary)
        other = blended_model(base, random_model(size, seed=scene + 1000, order=2), 0.3)
        drafters: list[Drafter] = [
            SuffixDrafter(rng.randint(1, 2)),
            LookupDrafter(3, rng.randint(1, 2)),
            DraftModelDrafter(ScriptedEngine(other, vocabulary), target_vocab_size=size),
        ]
        rng.shuffle(drafters)
        params = SamplingParams(
            rng.choice((0.0, 0.7, 1.0)), 0, 1.0, 0.0, repeat_penalty=rng.choice((1.0, 1.2)), seed=scene
        )
        stop = (chr(ord("!") + rng.randrange(size)),) if rng.random() < 0.3 else ()
        rules = StopRules(rng.randint(1, 40), stop=stop, ignore_end=rng.random() < 0.3)
        prompt_ids = [rng.randrange(size) for _ in range(rng.randint(1, 20))]
        budget = DraftBudget(rng.randint(1, 6), rng.randint(1, 3), probability=True, margin=True)

        answer = decode(target, prompt_ids, params, rules)
        recording = record_answer(
            drafters,
            vocabulary,
            prompt_ids,
            answer.token_ids,
            params=params,
            rules=rules,
            finish_reason=answer.finish_reason,
            name="a text",
            depth=budget.max_depth,
            siblings=budget.siblings,
        )
        expected = Recording(
            name="a text",
            num_prompt=len(prompt_ids),
            token_ids=tuple(answer.token_ids),
            max_tokens=rules.max_tokens if answer.finish_reason == "end" else len(answer.token_ids),
            ignore_end=rules.ignore_end,
            end_ids=vocabulary.end_ids,
            temperature=params.temperature,
            vocab_size=size,
            depth=budget.max_depth,
            siblings=budget.siblings,
            traces=tuple(plainly_traced(drafter, prompt_ids, answer.token_ids, params, budget) for drafter in drafters),
        )
        assert recording == expected
        for name, each in (("recorded", recording), ("expected", expected)):
            save_recordings(tmp_path / name, [each])
        assert (tmp_path / "recorded").read_bytes() == (tmp_path / "expected").read_bytes()
        reasons[answer.finish_reason] += 1
        proposed.update({trace.name: sum(map(len, trace.chains)) for trace in recording.traces})
    assert set(reasons) == {"length", "end", "stop"}
    assert min(proposed.values()) > 8 * scenes, "too little was proposed to tell"
    assert set(proposed) == {"suffix", "lookup", "draft"}


def test_the_draft_stops_after_an_end_token_and_so_does_the_text() -> None:
    with model_with(draft_model(end_ids=[7]), end_ids=[7]) as model:
        recording = record(model, [3], depth=5, max_tokens=30, temperature=0.0)
    assert (list(recording.token_ids), recording.max_tokens) == ([4, 5, 6, 7], 30)
    assert recording.end_ids == recording.traces[0].end_ids == frozenset([7])
    assert [len(chain) for chain in recording.traces[0].chains] == [3, 2, 1]


def test_recording_leaves_the_model_as_it_was() -> None:
    """Its drafters can go on with requests that run, and nothing stays open."""
    drafter = draft_model()
    with model_with(drafter) as model:
        running = model.stream([5], max_tokens=20, temperature=0.0)
        next(running.rounds())
        told: list[float] = []
        record(model, [0], depth=2, max_tokens=5, temperature=0.0, report=told.append)
        assert told == [0.25, 0.5, 0.75, 1.0]
        assert list(running.result().token_ids) == [(6 + k) % 10 for k in range(20)]
        assert running.result().stats.acceptance_rate == 1.0


def test_an_interrupt_forgets_the_request() -> None:
    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    forced = ForcedDrafter(lambda request: [])
    with model_with(forced) as model:
        with pytest.raises(KeyboardInterrupt):
            record(model, [0], max_tokens=5, temperature=0.0, report=interrupt)
        assert forced.active == set()
        assert model.loop.active == []


def test_what_cannot_be_recorded() -> None:
    with model_with(draft_model(), verify="rejection") as model:
        with pytest.raises(InputError, match="the text depends on what is drafted"):
            record(model, [0], max_tokens=5, temperature=1.0)
        # Greedily it does not.
        assert len(record(model, [0], depth=2, max_tokens=5, temperature=0.0).token_ids) == 5
    with model_with(draft_model()) as model, pytest.raises(InputError, match="depth 0 with 4 siblings"):
        record(model, [0], depth=0, max_tokens=5)

    def forked(request: Request) -> list[list[int]]:
        return [[1, 2], [3, 4]]

    with model_with(ForcedDrafter(forked)) as model, pytest.raises(CapabilityError, match="forced drafts more than"):
        record(model, [0], max_tokens=5, temperature=0.0)


class RowReader(ForcedDrafter):
    """Wants the target's row at every position."""

    def observe(self, request: Request, commit: Commit) -> None:
        commit.rows.logits(ROOT)


def test_drafters_that_read_the_target_are_refused_and_forget_the_request() -> None:
    beside, reads = ForcedDrafter(lambda request: [[1]]), RowReader(lambda request: [])
    with model_with(beside, reads) as model:
        with pytest.raises(CapabilityError, match="reads the target's rows, which recordings do not hold: leave it"):
            record(model, [0], max_tokens=5, temperature=0.0)
        assert beside.active == reads.active == set()


def test_a_recorded_request_has_a_number_that_no_other_loop_gives_out() -> None:
    numbers: list[int] = []

    def number(request: Request) -> list[list[int]]:
        numbers.append(request.id)
        return []

    with model_with(ForcedDrafter(number)) as model:
        for _ in range(2):
            record(model, [0], max_tokens=5, temperature=0.0)
            model.generate([0], max_tokens=5, temperature=0.0)
    assert len(set(numbers)) == 4


def test_an_answer_of_one_token_has_no_positions() -> None:
    with model_with(draft_model(), SuffixDrafter()) as model:
        recording = record(model, [0], max_tokens=1, temperature=0.0)
    assert [(trace.is_model, trace.chains) for trace in recording.traces] == [(True, ()), (False, ())]
    with pytest.raises(InputError, match="an answer of no tokens"):
        record_answer(
            [], ScriptedVocabulary.of_size(10), [0], [], params=GREEDY, rules=StopRules(5), finish_reason="no_room"
        )
