"""The loop's bookkeeping on the scripted engine, where every number can be worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import ContextLengthError, InputError, QueueFullError, SamplingError
from paceline.core.params import CacheParams, SamplingParams, SpeculationParams, StopRules
from paceline.core.reasoning import ReasoningBudget
from paceline.core.request import SOURCE_TARGET, Emission, Request
from paceline.drafters.base import Drafter, DraftJob
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.base import Step
from paceline.engines.scripted import ScriptedEngine, ScriptedOutput, ScriptedVocabulary, table_model
from paceline.engines.sequence_pool import SequencePool
from paceline.planning.base import Policy, RoundRecord
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime.loop import DecodingLoop
from paceline.runtime.scheduler import rollback_text
from tests.helpers import PLAIN_PARAMS, ForcedDrafter, decode, drain

GREEDY = SamplingParams(0.0)
COUNTING = table_model(np.roll(np.eye(10), 1, axis=1))
"""Greedily counts up: 0 is followed by 1, ..., 9 by 0."""


class RecordingEngine(ScriptedEngine):
    """Keeps the steps of every pass."""

    def __init__(self, *arguments: Any, **limits: Any) -> None:
        super().__init__(*arguments, **limits)
        self.passes: list[list[Step]] = []

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        output = super().forward(steps)
        self.passes.append(list(steps))
        return output


def counting_engine(**limits: Any) -> RecordingEngine:
    pieces = [str(digit).encode() for digit in range(10)]
    return RecordingEngine(COUNTING, ScriptedVocabulary(pieces, limits.pop("end_ids", ())), **limits)


def counting_loop(
    engine: ScriptedEngine, drafters: Sequence[Drafter] = (), policy: Policy = NO_SPECULATION
) -> DecodingLoop:
    return DecodingLoop(engine, drafters, policy, clock=engine.clock)


def text_of_emissions(emissions: Sequence[Emission]) -> str:
    return "".join(segment.text for emission in emissions for segment in emission.segments)


class TestOneRoundByHand:
    """A prompt of three tokens in the first pass, which emits token 3; the second is the round that is looked at."""

    def one_round(self, *path: int) -> tuple[Request, Emission, ForcedDrafter]:
        # A pass costs 10 s and 1 s a row.
        engine = counting_engine(cost=lambda rows, context: 10.0 + rows)
        drafter = ForcedDrafter(lambda request: [path])
        loop = counting_loop(engine, [drafter], FixedPolicy(5))
        request = loop.add([0, 1, 2], GREEDY, StopRules(50))
        (first,) = loop.step()
        assert first.token_ids == [3]
        (second,) = loop.step()
        assert engine.length(request.sequence) == len(request.token_ids) - 1
        return request, second, drafter

    def test_forced_accept(self) -> None:
        request, emission, drafter = self.one_round(4, 5, 6)
        assert emission.token_ids == [4, 5, 6, 7]
        assert emission.sources == ["forced", "forced", "forced", SOURCE_TARGET]
        stats = request.stats
        assert (stats.rounds, stats.num_drafted, stats.num_accepted, stats.num_judged) == (1, 3, 3, 3)
        assert stats.tested_by_depth == stats.accepted_by_depth == Counter({0: 1, 1: 1, 2: 1})
        assert stats.drafted_by_source == stats.accepted_by_source == Counter(forced=3)
        assert stats.predicted_tokens == 5
        assert stats.acceptance_length == 4.0
        assert drafter.commits[0].path == [1, 2, 3]

    def test_partial_reject(self) -> None:
        request, emission, drafter = self.one_round(4, 9, 9)
        assert emission.token_ids == [4, 5]
        assert emission.sources == ["forced", SOURCE_TARGET]
        stats = request.stats
        assert (stats.rounds, stats.num_drafted, stats.num_accepted, stats.num_judged) == (1, 3, 1, 2)
        assert stats.tested_by_depth == Counter({0: 1, 1: 1})
        assert stats.accepted_by_depth == Counter({0: 1})
        assert stats.drafted_by_source == Counter(forced=3)
        assert stats.accepted_by_source == Counter(forced=1)
        assert stats.accept_share == 1 / 3
        assert stats.acceptance_rate == 1 / 2
        commit = drafter.commits[0]
        assert (commit.path, commit.token_ids) == ([1], [4, 5])
        assert commit.rows.logits(1).argmax() == 5, "rows of accepted nodes can be read while observing"

    def test_immediate_reject(self) -> None:
        request, emission, _ = self.one_round(9, 5)
        assert emission.token_ids == [4]
        stats = request.stats
        assert (stats.num_drafted, stats.num_accepted, stats.num_judged) == (2, 0, 1)
        assert stats.tested_by_depth == Counter({0: 1})
        assert stats.accepted_by_depth == Counter()
        assert stats.acceptance_length == 1.0

    def test_nothing_drafted(self) -> None:
        request, emission, _ = self.one_round()
        assert emission.token_ids == [4]
        assert (request.stats.num_drafted, request.stats.num_judged) == (0, 0)
        assert request.stats.acceptance_rate is None

    def test_times_are_the_clocks(self) -> None:
        request, _, _ = self.one_round(4, 9, 9)
        stats = request.stats
        assert stats.prompt_tokens == 3
        assert stats.prompt_s == 13.0
        # The round fed the last token and three drafts.
        assert stats.decode_s == 14.0
        assert stats.phases.verify_s == 14.0
        assert stats.phases.total_s == 14.0
        assert stats.arrivals_s == [13.0, 27.0, 27.0]
        assert stats.inter_token_s() == [14.0, 0.0]
        assert stats.predicted_per_second == 2 / 14.0


def test_what_a_policy_takes_to_learn_is_part_of_the_next_round() -> None:
    engine = counting_engine(cost=lambda rows, context: 10.0 + rows)
    records = []

    class Learning(FixedPolicy):
        def observe(self, record: RoundRecord) -> None:
            records.append(record)
            engine.clock.advance(0.5)

    loop = counting_loop(engine, [ForcedDrafter(lambda request: [[4]])], Learning(5))
    request = loop.add([0, 1, 2], GREEDY, StopRules(4))
    drain(loop)
    # The prompt's pass, one of two rows, and one of a row.
    assert [record.learning_s for record in records] == [0.0, 0.5, 0.5]
    assert [record.draft_s for record in records] == [0.0, 0.5, 0.5]
    assert [record.round_s for record in records] == [13.0, 12.5, 11.5]
    assert request.stats.decode_s == 24.0
    # Nobody waited for what its last round taught.
    other = loop.add([0, 1, 2], GREEDY, StopRules(4))
    loop.step()
    assert other.stats.prompt_s == 13.0


def test_a_tree_goes_to_the_engine_as_it_is() -> None:
    engine = counting_engine()
    drafter = ForcedDrafter(lambda request: [[9, 9], [4, 5], [4, 8]])
    loop = counting_loop(engine, [drafter], FixedPolicy(3))
    request = loop.add([3], GREEDY, StopRules(4))
    loop.step()
    # The text is 3 4 by now, so the right path is not among the drafts' first tokens.
    (emission,) = loop.step()
    (step,) = engine.passes[1]
    assert list(step.token_ids) == [4, 9, 9, 4, 5, 8]
    assert list(step.parents) == [-1, 0, 1, 0, 3, 3]
    assert list(step.outputs) == [0, 1, 2, 3, 4, 5]
    assert emission.token_ids == [5]
    assert request.stats.num_judged == 1, "siblings share a position"


class TestLimits:
    @pytest.mark.parametrize(
        ("context_length", "prompt", "max_tokens", "reason", "rows"),
        # One token comes with the prompt and the round adds one of the target's own, so three drafts are enough.
        [(50, [0], 5, "length", [1, 4]), (6, [0, 1], 50, "context", [2, 3])],
    )
    def test_drafts_stop_where_the_answer_or_the_context_does(
        self, context_length: int, prompt: list[int], max_tokens: int, reason: str, rows: list[int]
    ) -> None:
        engine = counting_engine(context_length=context_length)
        drafter = ForcedDrafter(lambda request: [[(request.token_ids[-1] + k) % 10 for k in range(1, 9)]])
        answer = decode(engine, prompt, GREEDY, StopRules(max_tokens), drafters=[drafter], policy=FixedPolicy(8))
        assert answer.token_ids == list(range(len(prompt), 6))
        assert answer.finish_reason == reason
        assert [sum(len(step.token_ids) for step in steps) for steps in engine.passes] == rows

    def test_tokens_after_the_end_of_the_answer_are_dropped(self) -> None:
        engine = counting_engine(end_ids=[4])
        drafter = ForcedDrafter(lambda request: [[2, 3, 4, 5, 9]])
        loop = counting_loop(engine, [drafter], FixedPolicy(5))
        request = loop.add([0], GREEDY, StopRules(50))
        loop.step()
        (emission,) = loop.step()
        assert emission.token_ids == [2, 3, 4]
        assert emission.finish_reason == "end"
        assert text_of_emissions([emission]) == "23"
        # The walk went down to the wrong fifth draft, but the answer ended with the third.
        stats = request.stats
        assert (stats.num_drafted, stats.num_accepted, stats.num_judged) == (5, 3, 3)
        assert len(stats.arrivals_s) == stats.predicted_tokens == 4

    def test_an_ignored_end_token_goes_on_without_text(self) -> None:
        answer = decode(counting_engine(end_ids=[2]), [0], GREEDY, StopRules(4, ignore_end=True))
        assert answer.token_ids == [1, 2, 3, 4]
        assert answer.text == "134"

    def test_a_stop_text_in_the_middle_of_accepted_drafts(self) -> None:
        engine = counting_engine()
        drafter = ForcedDrafter(lambda request: [[2, 3, 4, 5]])
        answer = decode(engine, [0], GREEDY, StopRules(50, stop=("34",)), drafters=[drafter], policy=FixedPolicy(5))
        assert answer.token_ids == [1, 2, 3, 4]
        assert answer.text == "12"
        assert answer.finish_reason == "stop"

    @pytest.mark.parametrize(
        ("stop", "text"), [((), None), (("2",), "1"), (("12",), ""), (("23",), "1"), (("13",), None)]
    )
    @pytest.mark.parametrize("preserved_ids", [(), (2, 4)])
    def test_a_stop_text_may_name_a_control_token_and_one_that_is_preserved_is_text(
        self, preserved_ids: tuple[int, ...], stop: tuple[str, ...], text: str | None
    ) -> None:
        engine = counting_engine(end_ids=[2, 4] if preserved_ids else [2])
        drafter = ForcedDrafter(lambda request: [[2, 3, 4]])
        whole = "1234" if preserved_ids else "134"
        for drafters in ([], [drafter]):
            rules = StopRules(4, stop=stop, ignore_end=True, preserved_ids=preserved_ids)
            answer = decode(engine, [0], GREEDY, rules, drafters=drafters, policy=FixedPolicy(5))
            assert answer.text == (whole if text is None else text)
            assert answer.finish_reason == ("length" if text is None else "stop")

    def test_only_control_tokens_that_are_named_are_preserved(self) -> None:
        rules = StopRules(5, ignore_end=True, preserved_ids=(4, 3))
        answer = decode(counting_engine(end_ids=[2, 4]), [0], GREEDY, rules)
        assert [(segment.text, segment.source) for segment in answer.request.segments] == [
            (text, SOURCE_TARGET) for text in "1345"
        ]

    @pytest.mark.parametrize(
        "rules", [StopRules(4, preserved_ids=(2,)), StopRules(4, stop=("2",))], ids=["", "a stop text"]
    )
    def test_an_end_token_is_no_text_even_if_preserved_and_ends_before_a_stop_text(self, rules: StopRules) -> None:
        answer = decode(counting_engine(end_ids=[2]), [0], GREEDY, rules)
        assert (answer.token_ids, answer.text, answer.finish_reason) == ([1, 2], "1", "end")

    def test_what_is_taken_back_is_written_again_with_its_control_tokens(self) -> None:
        vocabulary = ScriptedVocabulary([b"a", b"[x]", b"b"], end_ids=[1])
        engine = ScriptedEngine(table_model(np.roll(np.eye(3), 1, axis=1)), vocabulary)
        loop = counting_loop(engine)
        request = loop.add([2], GREEDY, StopRules(9, ignore_end=True, preserved_ids=(1,)))
        for _ in range(6):
            loop.step()
        rollback_text(request, 6, vocabulary)
        assert [segment.text for segment in request.segments] == ["a", "[x]", "b", "a", "[x]"]

    def test_one_token_is_asked_for(self) -> None:
        answer = decode(counting_engine(), [7], GREEDY, StopRules(1))
        assert (answer.token_ids, answer.finish_reason) == ([8], "length")


class TestManyRequests:
    def test_prompts_are_read_in_chunks_beside_decoding(self) -> None:
        engine = counting_engine(max_rows=4)
        loop = counting_loop(engine)
        first = loop.add([0], GREEDY, StopRules(20))
        loop.step()
        second = loop.add([0, 1, 2, 3, 4], GREEDY, StopRules(20))
        assert [e.request for e in loop.step()] == [first]
        assert not second.decoding
        assert second.cached == engine.length(second.sequence) == 3
        assert second.stats.prompt_tokens == 3
        emissions = loop.step()
        assert [(e.request, e.token_ids) for e in emissions] == [(first, [3]), (second, [5])]
        assert second.stats.prompt_tokens == 5
        assert second.stats.prompt_s == 2.0
        assert second.stats.rounds == 0
        rows = [[len(step.token_ids) for step in steps] for steps in engine.passes]
        assert rows == [[1], [1, 3], [1, 2]]
        assert [list(step.outputs) for step in engine.passes[1]] == [[0], []]

    def test_one_pass_serves_all(self) -> None:
        engine = counting_engine()
        loop = counting_loop(engine)
        requests = [loop.add([start], GREEDY, StopRules(3)) for start in range(4)]
        drain(loop)
        assert len(engine.passes) == 3
        assert [request.output_ids for request in requests] == [
            [(start + k) % 10 for k in (1, 2, 3)] for start in range(4)
        ]

    def test_depth_is_shared_when_rows_are_short(self) -> None:
        engine = counting_engine(max_rows=8)
        drafter = ForcedDrafter(lambda request: [[(request.token_ids[-1] + k) % 10 for k in range(1, 9)]])
        loop = counting_loop(engine, [drafter], FixedPolicy(8))
        for start in (0, 5):
            loop.add([start], GREEDY, StopRules(50))
        loop.step()
        loop.step()
        assert [len(step.token_ids) for step in engine.passes[1]] == [4, 4]

    def test_a_step_without_requests_does_nothing(self) -> None:
        engine = counting_engine()
        assert counting_loop(engine).step() == []
        assert engine.passes == []


class TestNoRoom:
    def test_a_refused_pass_is_tried_again_without_drafts(self) -> None:
        engine = counting_engine(cells=4)
        drafter = ForcedDrafter(lambda request: [[9, 9, 9]])
        loop = counting_loop(engine, [drafter], FixedPolicy(3))
        request = loop.add([0, 1], GREEDY, StopRules(50))
        loop.step()
        (emission,) = loop.step()
        assert emission.token_ids == [3]
        assert request.stats.num_drafted == 0
        assert [len(steps[0].token_ids) for steps in engine.passes] == [2, 1]
        assert drafter.commits[0].path == []

    def test_a_prompt_waits_while_others_decode(self) -> None:
        engine = counting_engine(cells=5)
        loop = counting_loop(engine)
        first = loop.add([0, 1], GREEDY, StopRules(3))
        loop.step()
        second = loop.add([5, 6, 7], GREEDY, StopRules(2))
        # Two cells are used; a pass with both would want one more for the first and three for the second.
        (emission,) = loop.step()
        assert (emission.request, emission.token_ids) == (first, [3])
        (emission,) = loop.step()
        assert (emission.request, emission.finish_reason) == (first, "length")
        (emission,) = loop.step()
        assert (emission.request, emission.token_ids) == (second, [8])

    def test_the_youngest_that_holds_cells_makes_room_and_goes_on_later(self) -> None:
        engine = counting_engine(cells=6)
        loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock, growth=0)
        first = loop.add([0, 1], GREEDY, StopRules(4))
        second = loop.add([5, 6, 7], GREEDY, StopRules(3))
        loop.step()
        assert (first.num_output, second.num_output) == (1, 1)
        (emission,) = loop.step()  # five cells are used and two more are wanted
        assert (emission.request, emission.token_ids) == (first, [3])
        assert (second.sequence, second.cached, second.finish_reason) == (-1, 0, None)
        assert loop.active == [first, second]
        emissions = drain(loop)
        assert (first.output_ids, first.finish_reason) == ([2, 3, 4, 5], "length")
        assert (second.output_ids, second.finish_reason) == ([8, 9, 0], "length")
        assert text_of_emissions([e for e in emissions if e.request is second]) == "90", "nothing is said twice"
        assert (first.stats.preemptions, second.stats.preemptions) == (0, 1)
        # The prompt and the answer but for its last token, which is the root of the next tree.
        assert [list(steps[0].token_ids) for steps in engine.passes[-3:]] == [[5, 6, 7], [8], [9]]

    def test_prompts_that_do_not_fit_together_are_read_one_after_the_other(self) -> None:
        engine = counting_engine(cells=60)
        loop = counting_loop(engine)
        first = loop.add([0] * 20, GREEDY, StopRules(3))
        second = loop.add([5] * 30, GREEDY, StopRules(3))
        loop.step()
        assert (first.num_output, second.sequence) == (1, -1)
        drain(loop)
        assert (first.output_ids, second.output_ids) == ([1, 2, 3], [6, 7, 8])
        assert first.stats.preemptions == second.stats.preemptions == 0

    def test_one_that_fills_the_cache_by_itself_ends(self) -> None:
        engine = counting_engine(cells=4)
        loop = counting_loop(engine)
        request = loop.add([0, 1], GREEDY, StopRules(50))
        last = drain(loop)[-1]
        assert (last.request, last.finish_reason) == (request, "no_room")
        assert request.output_ids == [2, 3, 4]
        assert not engine._sequences


class TestCancellation:
    def test_withheld_text_is_returned(self) -> None:
        engine = counting_engine()
        drafter = ForcedDrafter(lambda request: [])
        loop = counting_loop(engine, [drafter], FixedPolicy(3))
        request = loop.add([0], GREEDY, StopRules(50, stop=("129",)))
        assert text_of_emissions(loop.step()) == ""
        assert text_of_emissions(loop.step()) == ""
        emission = loop.cancel(request)
        assert emission is not None
        assert (emission.finish_reason, emission.token_ids, text_of_emissions([emission])) == ("cancelled", [], "12")
        assert request.finish_reason == "cancelled"
        assert loop.active == []
        assert drafter.active == set()
        assert loop.cancel(request) is None
        assert loop.step() == []

    def test_while_the_prompt_is_read(self) -> None:
        engine = counting_engine(max_rows=2, max_sequences=1)
        loop = counting_loop(engine)
        request = loop.add([0, 1, 2, 3], GREEDY, StopRules(50))
        assert loop.step() == []
        emission = loop.cancel(request)
        assert emission is not None
        assert emission.token_ids == []
        loop.add([0], GREEDY, StopRules(50))

    def test_of_a_finished_request_does_nothing(self) -> None:
        loop = counting_loop(counting_engine())
        request = loop.add([0], GREEDY, StopRules(1))
        loop.step()
        assert request.finish_reason == "length"
        assert loop.cancel(request) is None


class TestAdmission:
    @pytest.mark.parametrize(
        ("prompt", "params", "error", "message"),
        [
            ([], GREEDY, InputError, "the prompt is empty"),
            ([0] * 8, GREEDY, ContextLengthError, "the prompt has 8 tokens and the context holds 8"),
            ([3, 10], GREEDY, InputError, "token id 10 is not in the vocabulary of 10"),
            ([-1], GREEDY, InputError, "token id -1 is not in the vocabulary of 10"),
            ([1], SamplingParams(logit_bias={10: 1.0}), InputError, "logit bias for token id 10"),
            ([1], SamplingParams(logit_bias=dict.fromkeys(range(10), -math.inf)), InputError, "ban every token"),
            (
                [1],
                SamplingParams(reasoning_budget=ReasoningBudget(3, (1,), (2, 11))),
                InputError,
                "token id 11 of the reasoning budget is not in the vocabulary of 10",
            ),
        ],
    )
    def test_bad_requests_are_refused(
        self, prompt: list[int], params: SamplingParams, error: type[InputError], message: str
    ) -> None:
        engine = counting_engine(context_length=8, max_sequences=1)
        loop = counting_loop(engine)
        with pytest.raises(error, match=message):
            loop.add(prompt, params, StopRules())
        assert loop.active == []
        engine.open()  # nothing was left open

    def test_a_token_to_preserve_is_one_of_the_vocabulary(self) -> None:
        with pytest.raises(InputError, match="token id 10 of preserved_ids is not in the vocabulary of 10"):
            counting_loop(counting_engine()).add([1], GREEDY, StopRules(preserved_ids=(3, 10)))

    def test_more_requests_than_sequences_wait(self) -> None:
        loop = counting_loop(counting_engine(max_sequences=2))
        requests = [loop.add([start], GREEDY, StopRules(2)) for start in range(5)]
        running = []
        while loop.active:
            loop.step()
            running.append([at for at, request in enumerate(requests) if request.sequence >= 0])
        assert running == [[0, 1], [], [2, 3], [], [4], []]
        assert [request.output_ids for request in requests] == [[1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]

    def test_the_queue_has_an_end(self) -> None:
        engine = counting_engine(max_sequences=1)
        loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock, max_waiting=2)
        loop.add([0], GREEDY, StopRules(2))
        loop.step()
        kept = [loop.add([0], GREEDY, StopRules(2)) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests wait and 1 run, which is the most"):
            loop.add([0], GREEDY, StopRules(2))
        loop.cancel(kept[0])
        loop.add([0], GREEDY, StopRules(2))

    def test_a_prompt_that_no_cache_could_hold_is_refused(self) -> None:
        loop = counting_loop(counting_engine(cells=5))
        with pytest.raises(ContextLengthError, match="the prompt has 6 tokens and the cache holds 5"):
            loop.add([0] * 6, GREEDY, StopRules())
        loop.add([0] * 5, GREEDY, StopRules())

    def test_a_request_that_cannot_start_ends_and_the_others_go_on(self) -> None:
        class Picky(ForcedDrafter):
            def begin(self, request: Request) -> None:
                super().begin(request)
                if request.token_ids[0] == 7:
                    raise ValueError("seven")

        engine = counting_engine()
        drafter = Picky(lambda request: [])
        loop = counting_loop(engine, [drafter], FixedPolicy(2))
        requests = [loop.add([start], GREEDY, StopRules(2)) for start in (1, 7, 3)]
        emissions = drain(loop)
        assert [request.finish_reason for request in requests] == ["length", "error", "length"]
        assert [request.output_ids for request in requests] == [[2, 3], [], [4, 5]]
        assert isinstance(requests[1].error, ValueError)
        assert [e.finish_reason for e in emissions if e.request is requests[1]] == ["error"]
        assert not engine._sequences
        assert drafter.active == set()

    def test_a_waiting_request_is_cancelled_before_it_starts(self) -> None:
        engine = counting_engine(max_sequences=1)
        loop = counting_loop(engine)
        loop.add([0], GREEDY, StopRules(2))
        waiting = loop.add([0], GREEDY, StopRules(2))
        loop.step()
        emission = loop.cancel(waiting)
        assert emission is not None
        assert (emission.token_ids, emission.finish_reason) == ([], "cancelled")
        drain(loop)
        assert waiting.output_ids == []


class TestWhatARequestAsksOfSpeculation:
    def drafted(self, speculation: SpeculationParams) -> tuple[Request, list[int]]:
        """Return a request beside another that leaves all to the policy, and the rows of each of its rounds."""
        engine = counting_engine()
        right = ForcedDrafter(lambda request: [[(request.token_ids[-1] + k) % 10 for k in range(1, 6)]], "right")
        wrong = ForcedDrafter(lambda request: [[request.token_ids[-1]]], "wrong")
        loop = counting_loop(engine, [wrong, right], FixedPolicy(4))
        other = loop.add([3], GREEDY, StopRules(9))
        request = loop.add([0], GREEDY, StopRules(9), speculation)
        drain(loop)
        assert request.output_ids == list(range(1, 10))
        assert other.stats.drafted_by_source.keys() == {"wrong", "right"}
        rows = [len(step.token_ids) for steps in engine.passes for step in steps if step.token_ids[0] == 1]
        return request, rows

    def test_none(self) -> None:
        request, rows = self.drafted(SpeculationParams(speculate=False))
        assert request.stats.num_drafted == 0
        assert rows == [1]

    def test_some_drafters(self) -> None:
        request, rows = self.drafted(SpeculationParams(drafters=("right",)))
        assert request.stats.drafted_by_source.keys() == {"right"}
        assert rows == [5]

    def test_short_drafts(self) -> None:
        request, rows = self.drafted(SpeculationParams(drafters=("right",), draft_max=2))
        assert rows == [3]
        assert max(request.stats.tested_by_depth) == 1

    def test_no_drafts_that_would_be_too_short(self) -> None:
        request, rows = self.drafted(SpeculationParams(drafters=("right",), draft_max=2, draft_min=2))
        assert rows == [3]
        # One token comes with the prompt, and three with each of two rounds: the two that are left have room for one
        # draft, which would be too short.
        assert request.stats.num_drafted == 4
        request, rows = self.drafted(SpeculationParams(drafters=("wrong",), draft_min=2))
        assert (request.stats.num_drafted, rows) == (0, [1])

    @pytest.mark.parametrize(("p_min", "rows"), [(0.2, 3), (0.31, 1)])
    def test_no_drafts_that_are_less_likely(self, p_min: float, rows: int) -> None:
        """The draft's likeliest token has e / (e + 9) everywhere, which is 0.23."""
        engine = counting_engine()
        draft = ScriptedEngine(COUNTING, ScriptedVocabulary.of_size(10), clock=engine.clock)
        loop = counting_loop(engine, [DraftModelDrafter(draft, target_vocab_size=10)], FixedPolicy(2))
        request = loop.add([0], GREEDY, StopRules(9), SpeculationParams(p_min=p_min))
        other = loop.add([0], GREEDY, StopRules(9))
        drain(loop)
        assert [len(step.token_ids) for step in engine.passes[1]] == [rows, 3]
        assert other.stats.num_drafted > 0
        assert request.output_ids == other.output_ids

    def test_plain_and_speculating_requests_share_passes(self) -> None:
        engine = counting_engine()
        right = ForcedDrafter(lambda request: [[(request.token_ids[-1] + k) % 10 for k in range(1, 6)]])
        loop = counting_loop(engine, [right], FixedPolicy(4))
        loop.add([0], GREEDY, StopRules(6))
        loop.add([5], GREEDY, StopRules(2), SpeculationParams(speculate=False))
        drain(loop)
        assert [[len(step.token_ids) for step in steps] for steps in engine.passes] == [[1, 1], [5, 1]]


class TestPromptsBesideStreams:
    """Rounds of one row take a second, and each further row a tenth."""

    def gaps(self, *, prompt_rounds: float = 2.5, prompts: Sequence[int] = (400,)) -> list[float]:
        """Return seconds between tokens of three streams while prompts of other requests are read."""
        engine = counting_engine(cost=lambda rows, context: 1.0 + 0.1 * (rows - 1), max_rows=128, max_sequences=8)
        loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock, prompt_rounds=prompt_rounds)
        streams = [loop.add([start], GREEDY, StopRules(400)) for start in range(3)]
        for _ in range(8):
            loop.step()
        late = [loop.add([0] * length, GREEDY, StopRules(1)) for length in prompts]
        seen = [len(stream.stats.arrivals_s) for stream in streams]
        while any(request.finish_reason is None for request in late):
            loop.step()
        return [
            gap
            for stream, first in zip(streams, seen, strict=True)
            for gap in stream.stats.inter_token_s()[first - 1 :]
        ]

    def test_streams_never_wait_longer_than_a_few_rounds(self) -> None:
        plain_s = 1.2
        gaps = self.gaps()
        assert max(gaps) <= 2.6 * plain_s
        assert np.median(gaps) >= 1.8 * plain_s, "prompts are read as fast as that allows"

    def test_prompts_may_be_read_as_fast_as_can_be(self) -> None:
        assert max(self.gaps(prompt_rounds=math.inf)) > 10.0

    def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one(self) -> None:
        engine = counting_engine(cost=lambda rows, context: 1.0 + 0.1 * rows, max_sequences=8, max_rows=64)
        loop = counting_loop(engine)
        long = loop.add([0] * 1000, GREEDY, StopRules(1))
        short = loop.add([0] * 10, GREEDY, StopRules(1))
        while short.finish_reason is None:
            loop.step()
        assert long.cached <= 128
        drain(loop)
        assert long.output_ids == short.output_ids == [1]

    def test_a_long_prompt_is_read_however_many_short_ones_come(self) -> None:
        engine = counting_engine(cost=lambda rows, context: 1.0 + 0.1 * rows, max_sequences=3, max_rows=16)
        loop = counting_loop(engine)
        long = loop.add([0] * 100, GREEDY, StopRules(1))
        passes = 0
        while long.finish_reason is None:
            while len(loop.active) < 3:
                loop.add([0] * 16, GREEDY, StopRules(1))
            loop.step()
            passes += 1
        assert passes <= 2 * 7, "every other pass is its own"

    def test_of_prompts_alike_the_first_is_done_first(self) -> None:
        engine = counting_engine(cost=lambda rows, context: 1.0 + 0.1 * rows, max_sequences=4, max_rows=16)
        loop = counting_loop(engine)
        requests = [loop.add([0] * 40, GREEDY, StopRules(1)) for _ in range(4)]
        drain(loop)
        firsts = [request.stats.arrivals_s[0] for request in requests]
        assert firsts == sorted(firsts)
        assert len(set(firsts)) == 4

    def test_a_policy_that_would_not_be_lossless(self) -> None:
        engine = counting_engine(max_sequences=1)
        loop = counting_loop(engine, policy=FixedPolicy(4, draft_min=3))
        with pytest.raises(SamplingError, match=r"use .verify='coupled'."):
            loop.add([0], PLAIN_PARAMS, StopRules(), SpeculationParams(verify="rejection"))
        loop.add([0], PLAIN_PARAMS, StopRules())

    def test_the_longest_prompt_gets_one_token(self) -> None:
        answer = decode(counting_engine(context_length=8), [0] * 7, GREEDY, StopRules(50))
        assert (answer.token_ids, answer.finish_reason) == ([1], "context")


class TestWhatFails:
    """Drafters, policies and observers of others: what they break is theirs, and the requests go on."""

    def test_a_drafter_that_fails_to_begin_again_ends_its_request_only(self) -> None:
        class Sulking(ForcedDrafter):
            grown = sulks = False

            def begin(self, request: Request) -> None:
                if self.sulks and request.token_ids[0] == 5:
                    raise ValueError("no more")
                super().begin(request)

            def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
                if not self.grown:
                    self.grown = self.sulks = True
                    raise RuntimeError("once")
                return super().grow(jobs)

        engine = counting_engine()
        loop = counting_loop(engine, [Sulking(lambda request: [])], FixedPolicy(2))
        requests = [loop.add([start], GREEDY, StopRules(4)) for start in (1, 5)]
        loop.step()
        with pytest.raises(RuntimeError, match="once"):
            loop.step()
        drain(loop)
        assert requests[0].output_ids == [2, 3, 4, 5]
        assert requests[1].finish_reason == "error"
        assert isinstance(requests[1].error, ValueError)
        assert not engine._sequences

    def test_a_drafter_that_fails_to_forget_keeps_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        class Clinging(ForcedDrafter):
            def end(self, request: Request) -> None:
                raise ValueError("mine")

        engine = counting_engine(max_sequences=1)
        loop = counting_loop(engine, [Clinging(lambda request: [])], FixedPolicy(2))
        request = loop.add([1], GREEDY, StopRules(50))
        loop.step()
        emission = loop.cancel(request)
        assert emission is not None
        assert loop.active == []
        assert "failed to forget" in caplog.text
        other = loop.add([5], GREEDY, StopRules(2))
        drain(loop)
        assert other.output_ids == [6, 7]

    def test_what_stands_is_not_lost_where_an_observer_fails(self) -> None:
        class Failing:
            def observe(self, record: RoundRecord) -> None:
                if record.requests:
                    raise ValueError("not mine")

        engine = counting_engine()
        loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock, observers=[Failing()])
        short, long = (loop.add([start], GREEDY, StopRules(number)) for start, number in ((1, 2), (5, 9)))
        loop.step()
        with pytest.raises(ValueError, match="not mine"):
            loop.step()
        kept = loop.take_emissions()
        assert [(e.request, e.token_ids, e.finish_reason) for e in kept] == [(short, [3], "length"), (long, [7], None)]
        with pytest.raises(ValueError, match="not mine"):
            loop.step()
        last = loop.cancel(long)
        assert last is not None
        assert (last.token_ids, last.finish_reason) == ([8], "cancelled"), "with what its reader has not got yet"
        assert loop.take_emissions() == []

    def test_requests_of_a_round_that_was_cut_short_are_active(self) -> None:
        engine = counting_engine()
        clumsy = ForcedDrafter(lambda request: [])
        loop = counting_loop(engine, [clumsy], FixedPolicy(2))
        first, second = (loop.add([start], GREEDY, StopRules(1)) for start in (1, 5))
        commit = engine.commit

        def failing(sequence: int, path: Sequence[int]) -> None:
            if sequence == second.sequence:
                raise RuntimeError("once")
            commit(sequence, path)

        engine.commit = failing  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="once"):
            loop.step()
        engine.commit = commit  # type: ignore[method-assign]
        assert set(loop.active) == {first, second}
        assert {e.request: e.token_ids for e in drain(loop)} == {first: [2], second: [6]}


class TestNobodyWaitsForEver:
    def test_a_request_waits_for_earlier_readers_only(self) -> None:
        engine = counting_engine(max_rows=16, max_sequences=8)
        loop = DecodingLoop(engine, [], NO_SPECULATION, pool=SequencePool(engine), clock=engine.clock)
        beginning = [number % 7 for number in range(120)]
        loop.add(beginning, GREEDY, StopRules(1))
        loop.step()
        waiting = loop.add([*beginning, 1], GREEDY, StopRules(1))
        anew = CacheParams(cache_prompt=False)
        for _ in range(40):
            loop.add([*beginning, 2], GREEDY, StopRules(1), cache=anew)
            for _ in range(4):
                loop.step()
        assert waiting.finish_reason == "length"
        assert waiting.stats.cached_tokens > 120 - 32, "less is not worth waiting for"

    def test_wide_trees_leave_a_row_for_prompts(self) -> None:
        engine = counting_engine(max_outputs=8, max_rows=16)
        wide = ForcedDrafter(lambda request: [[9, other] for other in range(9)])
        loop = counting_loop(engine, [wide], FixedPolicy(4, siblings=4))
        loop.add([0], GREEDY, StopRules(300))
        loop.step()
        late = loop.add([1, 2, 3], GREEDY, StopRules(1))
        for _ in range(6):
            loop.step()
        assert late.output_ids == [4]

    def test_the_queue_counts_what_cannot_start(self) -> None:
        loop = DecodingLoop(counting_engine(max_sequences=4), [], NO_SPECULATION, max_waiting=0)
        requests = [loop.add([start], GREEDY, StopRules(2)) for start in range(4)]
        with pytest.raises(QueueFullError, match="0 requests wait and 4 run"):
            loop.add([4], GREEDY, StopRules(2))
        drain(loop)
        assert all(request.finish_reason == "length" for request in requests)

    @pytest.mark.parametrize(
        ("limits", "message"),
        [({"max_waiting": -1}, "max_waiting -1: the least is 0"), ({"max_running": 0}, "max_running 0: the least is 1"),
         ({"max_waiting": "3"}, "max_waiting is '3', which is not a whole number")],
    )  # fmt: skip
    def test_limits_that_cannot_be(self, limits: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            DecodingLoop(counting_engine(), [], NO_SPECULATION, **limits)


class TestPassesOfTheirOwn:
    def test_requests_take_turns_at_passes(self) -> None:
        engine = counting_engine(shares_passes=False, max_rows=8)
        loop = counting_loop(engine)
        first, second = (loop.add([start], GREEDY, StopRules(4)) for start in (0, 5))
        loop.step()
        loop.step()
        third = loop.add([9] * 12, GREEDY, StopRules(2))
        drain(loop)
        order = [[0], [5], [9] * 8, [1], [6], [9] * 4, [2], [7], [0], [3], [8]]
        assert [[list(step.token_ids) for step in steps] for steps in engine.passes] == [[rows] for rows in order]
        assert [request.output_ids for request in (first, second, third)] == [[1, 2, 3, 4], [6, 7, 8, 9], [0, 1]]

    def test_drafts_are_grown_for_the_one_whose_pass_it_is(self) -> None:
        engine = counting_engine(shares_passes=False)
        drafter = ForcedDrafter(lambda request: [[(request.token_ids[-1] + k) % 10 for k in range(1, 4)]])
        loop = counting_loop(engine, [drafter], FixedPolicy(3))
        requests = [loop.add([start], GREEDY, StopRules(9)) for start in (0, 5)]
        drain(loop)
        assert [len(steps[0].token_ids) for steps in engine.passes] == [1, 1, 4, 4, 4, 4]
        assert all(request.stats.rounds == 2 for request in requests)

    def test_the_wait_for_others_is_part_of_the_time(self) -> None:
        engine = counting_engine(shares_passes=False, cost=lambda rows, context: 1.0)
        loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock)
        requests = [loop.add([start], GREEDY, StopRules(5)) for start in (0, 5)]
        drain(loop)
        for request in requests:
            stats = request.stats
            assert stats.decode_s == stats.phases.total_s == stats.arrivals_s[-1] - stats.arrivals_s[0] == 8.0


class TestTurns:
    """Clients take turns; the requests of one of them keep their order."""

    @staticmethod
    def add(loop: DecodingLoop, client: str, count: int = 1, *, tokens: int = 2) -> list[Request]:
        return [loop.add([1, 2], GREEDY, StopRules(tokens), cache=CacheParams(client=client)) for _ in range(count)]

    @staticmethod
    def ends(loop: DecodingLoop) -> list[str]:
        """Return whose requests ended, in that order."""
        ended = [emission.request for emission in drain(loop) if emission.finish_reason is not None]
        for client in {request.cache.client for request in ended}:
            ids = [request.id for request in ended if request.cache.client == client]
            assert ids == sorted(ids)
        return [request.cache.client for request in ended]

    @pytest.mark.parametrize("places", [1, 2, 4])
    def test_a_hundred_that_wait_hold_up_nobody_else(self, places: int) -> None:
        loop = DecodingLoop(counting_engine(), [], NO_SPECULATION, max_running=places)
        self.add(loop, "many", 100)
        loop.step()
        self.add(loop, "one")
        ends = self.ends(loop)
        # Those that run, and one more, as the turn was the other's before it came.
        assert ends.index("one") <= places + 1
        assert ends.count("many") == 100

    def test_turns_alternate(self) -> None:
        loop = DecodingLoop(counting_engine(), [], NO_SPECULATION, max_running=1)
        for client in "aaabbc":
            self.add(loop, client)
        assert self.ends(loop) == list("abcaba")

    def test_who_comes_again_and_again_takes_no_turns_of_others(self) -> None:
        loop = DecodingLoop(counting_engine(), [], NO_SPECULATION, max_running=1)
        self.add(loop, "many", 8)
        ends = []
        for _ in range(30):
            if all(request.cache.client != "again" for request in loop.active):
                self.add(loop, "again")
            ends += [emission.request.cache.client for emission in loop.step() if emission.finish_reason is not None]
        assert ends[:12] == ["many", "again"] * 6

    def test_places_are_shared_alike_whoever_takes_longer(self) -> None:
        loop = DecodingLoop(counting_engine(), [], NO_SPECULATION, max_running=4)
        self.add(loop, "long", 8, tokens=40)
        self.add(loop, "short", 40, tokens=2)
        loop.step()
        for _ in range(10):
            running = Counter(request.cache.client for request in loop.active if request.sequence >= 0)
            assert running["long"] == 2
            loop.step()

    def test_each_client_has_a_queue_of_its_own(self) -> None:
        loop = DecodingLoop(counting_engine(), [], NO_SPECULATION, max_running=2, max_waiting=3)
        self.add(loop, "many", 5)
        with pytest.raises(QueueFullError, match="3 requests wait and 2 run"):
            self.add(loop, "many")
        self.add(loop, "other", 3)
        with pytest.raises(QueueFullError, match="3 requests wait and 0 run"):
            self.add(loop, "other")
        assert Counter(self.ends(loop)) == {"many": 5, "other": 3}
        self.add(loop, "many", 5)

    def test_who_has_most_makes_room(self) -> None:
        """The youngest of the client with most requests, not of all."""
        engine = counting_engine(cells=20)
        loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock, growth=0)
        many = self.add(loop, "many", 3, tokens=8)
        (one,) = self.add(loop, "one", tokens=8)
        drain(loop)
        assert one.stats.preemptions == 0
        assert [request.stats.preemptions > 0 for request in many] == [False, True, True]
        assert [request.output_ids for request in (*many, one)] == [[3, 4, 5, 6, 7, 8, 9, 0]] * 4

    @staticmethod
    def rounds(loop: DecodingLoop, count: int) -> list[str]:
        """Return whose requests ended in some rounds."""
        emissions = [emission for _ in range(count) for emission in loop.step()]
        return [each.request.cache.client for each in emissions if each.finish_reason is not None]

    @staticmethod
    def running(loop: DecodingLoop) -> Counter[str]:
        return Counter(request.cache.client for request in loop.active if request.sequence >= 0)

    def test_long_answers_of_one_client_give_way_to_another(self) -> None:
        """After a second; the youngest of them goes on later, with the text that it would have had."""
        engine = counting_engine(cost=lambda rows, context: 0.1)
        loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock, max_running=4)
        long = self.add(loop, "long", 5, tokens=60)
        loop.step()
        (one,) = self.add(loop, "one")
        assert self.rounds(loop, 9) == []
        assert self.running(loop) == {"long": 4}
        assert self.rounds(loop, 5) == ["one"]
        drain(loop)
        assert [request.stats.preemptions for request in long] == [0, 0, 0, 1, 0]
        assert [request.output_ids for request in long] == [[(3 + i) % 10 for i in range(60)]] * 5
        assert (one.stats.preemptions, one.output_ids) == (0, [3, 4])

    def test_places_come_to_be_shared_alike(self) -> None:
        """A client with one place less than another takes none of it."""
        engine = counting_engine(cost=lambda rows, context: 0.1)
        loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock, max_running=4)
        many = self.add(loop, "many", 4, tokens=200)
        loop.step()
        others = [*self.add(loop, "a", 3, tokens=200), *self.add(loop, "b", 3, tokens=200)]
        self.rounds(loop, 100)
        assert self.running(loop) == {"many": 2, "a": 1, "b": 1}
        assert sum(request.stats.preemptions for request in (*many, *others)) == 2

    def test_who_comes_again_and_again_takes_little_of_an_answer(self) -> None:
        engine = counting_engine(cost=lambda rows, context: 0.1)
        loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock, max_running=2)
        many = self.add(loop, "many", 2, tokens=300)
        loop.step()
        while any(request in loop.active for request in many):
            if self.running(loop) == {"many": 2} and len(loop.active) == 2:
                self.add(loop, "again")
            loop.step()
        # After a second, two, four, eight and sixteen.
        assert all(3 <= request.stats.preemptions <= 5 for request in many)

    def test_nothing_is_kept_of_a_client_that_is_gone(self) -> None:
        loop = DecodingLoop(counting_engine(), [], NO_SPECULATION, max_running=2)
        for client in map(str, range(10)):
            self.add(loop, client)
        loop.cancel(loop.active[-1])
        drain(loop)
        assert not loop._scheduler._turns


def test_what_is_read_again_is_no_further_prompt() -> None:
    engine = counting_engine(cells=44, cost=lambda rows, context: 1.0)
    loop = DecodingLoop(engine, [], NO_SPECULATION, clock=engine.clock, growth=0)
    first = loop.add([0] * 20, GREEDY, StopRules(10))
    second = loop.add([5] * 20, GREEDY, StopRules(10))
    drain(loop)
    assert second.stats.preemptions > 0
    for request in (first, second):
        stats = request.stats
        assert (stats.prompt_tokens, stats.prompt_s) == (20, 1.0)
        assert stats.rounds == 9
        assert stats.decode_s == stats.phases.total_s
    assert second.stats.decode_s > 9.0, "reading again made it wait"
