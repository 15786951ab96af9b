"""What a draft of another vocabulary adds to a tree, level by level. Its dice and rows are scripted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.core.errors import EngineError
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import DraftBudget, DraftJob
from paceline.drafters.translated import TranslatedDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary
from paceline.engines.sequence_pool import SequencePool
from paceline.vocabularies.mapping import TokenMapping
from tests.drafters.helpers import grow, settle
from tests.helpers import request_of

GREEDY = SamplingParams(0.0)
LIKELY = 5.0


class Draft:
    """A draft that says, after texts that end in certain ways, certain tokens; longer endings go first."""

    def __init__(self, pieces: Sequence[bytes], says: Mapping[str, Sequence[str]], ends: Sequence[int] = ()) -> None:
        self.vocabulary = ScriptedVocabulary(pieces, ends)
        self._ids = {self.vocabulary.token_spelling(i): i for i in range(len(pieces))}
        self._says = sorted(says.items(), key=lambda one: -len(one[0]))
        self.read: list[str] = []

    def __call__(self, tokens: Sequence[int]) -> Float64Array:
        text = b"".join(self.vocabulary.token_bytes(token_id) for token_id in tokens)
        row = np.zeros(self.vocabulary.size)
        found = next((said for ending, said in self._says if text.endswith(ending.encode())), ())
        for rank, piece in enumerate(found):
            row[self._ids[piece.encode()]] = LIKELY - rank
        return row


def drafter_of(target: Sequence[bytes], draft: Draft, *, ends: Sequence[int] = (), **limits: int) -> TranslatedDrafter:
    engine = ScriptedEngine(draft, draft.vocabulary, **limits)  # type: ignore[arg-type]
    mapping = TokenMapping(ScriptedVocabulary(target, ends), draft.vocabulary)
    return TranslatedDrafter(engine, mapping, pool=SequencePool(engine, max_idle=2, least_reuse=1))


def spelled(tree: DraftTree, pieces: Sequence[bytes]) -> list[str]:
    """Return the first proposals of a tree, from below the root downwards."""
    found, node = [], ROOT
    while tree.candidates(node):
        node = tree.candidates(node)[0].node
        found.append(pieces[tree.token_ids[node]].decode("utf-8", "replace"))
    return found


def asked(drafter: TranslatedDrafter, token_ids: Sequence[int], budget: DraftBudget, **wanted: object) -> DraftTree:
    request = request_of(token_ids, GREEDY, **wanted)  # type: ignore[arg-type]
    drafter.begin(request)
    (tree,) = grow(drafter, [request], budget)
    return tree


def test_a_token_of_the_draft_is_several_of_the_targets() -> None:
    target = [b"a", b"b", b"c"]
    drafter = drafter_of(target, Draft([b"a", b"bca", b"b"], {"a": ["bca", "b"], "bca": ["b"]}))
    assert spelled(asked(drafter, [0], DraftBudget(8)), target)[:4] == ["b", "c", "a", "b"]
    assert drafter.cases["split"] >= 1
    # No level goes deeper than it may.
    drafter = drafter_of(target, Draft([b"a", b"bca", b"b"], {"a": ["bca"]}))
    assert spelled(asked(drafter, [0], DraftBudget(2)), target) == ["b", "c"]


def test_tokens_of_the_draft_become_one_of_the_targets() -> None:
    target = [b"a", b"b", b"c", b"bc"]
    draft = Draft([b"a", b"b", b"c"], {"a": ["b", "c"], "ab": ["c"], "bc": ["a"]})
    drafter = drafter_of(target, draft)
    request = request_of([0], GREEDY)
    drafter.begin(request)
    job = DraftJob(request, DraftTree(0), DraftBudget(4, siblings=2, margin=True))
    assert drafter.grow([job]) == [True]
    assert [candidate.token_id for candidate in job.tree.candidates(ROOT)] == [1, 2]
    assert drafter.grow([job]) == [True]
    # What stood for the first token goes, and its runner-up with it.
    assert [target[candidate.token_id] for candidate in job.tree.candidates(ROOT)] == [b"bc"]
    assert job.tree.num_drafted == 1
    assert job.tree.num_prunings == 1
    assert drafter.cases == {"aligned": 1, "merged": 1}
    assert drafter.grow([job]) == [True]
    assert spelled(job.tree, target) == ["bc", "a"]


def test_what_another_drafter_proposed_too_stays() -> None:
    target = [b"a", b"b", b"c", b"bc"]
    drafter = drafter_of(target, Draft([b"a", b"b", b"c"], {"a": ["b"], "ab": ["c"], "bc": ["a"]}))
    request = request_of([0], GREEDY)
    drafter.begin(request)
    job = DraftJob(request, DraftTree(0), DraftBudget(4))
    other = job.tree.add(job.tree.add(ROOT, 1, "other"), 0, "other")
    assert drafter.grow([job]) == drafter.grow([job]) == [True]
    assert job.tree.path_tokens(other) == [1, 0]
    assert [(one.token_id, one.source) for one in job.tree.candidates(ROOT)] == [(1, "other"), (3, "draft")]


def test_the_beginning_of_a_character_is_no_token_yet() -> None:
    target = [b"a", b"\xc3", b"\xa9", "\u00e9".encode()]
    draft = Draft([b"a", b"\xc3", b"\xa9"], {})
    draft._says = []

    def says(tokens: Sequence[int]) -> Float64Array:
        row = np.zeros(3)
        row[{0: 1, 1: 2, 2: 0}[tokens[-1]]] = LIKELY
        return row

    engine = ScriptedEngine(says, draft.vocabulary)
    drafter = TranslatedDrafter(engine, TokenMapping(ScriptedVocabulary(target), draft.vocabulary))
    request = request_of([0], GREEDY)
    drafter.begin(request)
    job = DraftJob(request, DraftTree(0), DraftBudget(2))
    assert drafter.grow([job]) == [True]
    assert job.tree.num_drafted == 0
    assert drafter.cases == {"none": 1}
    assert drafter.grow([job]) == [True]
    assert spelled(job.tree, target) == ["\u00e9"]


def test_a_cut_word_is_healed_where_the_target_would_have_said_the_same() -> None:
    pieces = [b"w", b"or", b"world", b"worn", b"l", b"d", b"n", b"wor", b"ld", b"!"]
    says = {"": ["world", "worn", "wor"], "wor": ["!"], "world": ["!"]}
    target = [b"w", b"or", b"ld", b"n", b"!", b" "]
    drafter = drafter_of(target, Draft([*pieces, b" "], {" ": says[""], **says}))
    tree = asked(drafter, [5, 0, 1], DraftBudget(3, siblings=2))
    assert spelled(tree, target)[:2] == ["ld", "!"]
    assert [target[one.token_id] for one in tree.candidates(ROOT)] == [b"ld", b"n"], "the runner-up is healed too"
    assert drafter.cases["healed"] == 1
    # A target with a token for the whole word would have said that: the word is another one.
    target = [*target, b"world", b"worn"]
    drafter = drafter_of(target, Draft([*pieces, b" "], {" ": says[""], **says}))
    assert spelled(asked(drafter, [5, 0, 1], DraftBudget(1)), target) == ["!"]
    assert drafter.cases["healed"] == 0


def test_a_space_that_belongs_to_the_next_word_is_not_read() -> None:
    pieces = [b"a", b"\n", b" ", b" b", b" c", b"b", b"x"]
    target = [b"a", b"\n", b"  ", b"b", b"c", b" b"]
    draft = Draft(pieces, {"\n ": [" b", " c"], "\n  ": ["x"], " b": ["a"]})
    drafter = drafter_of(target, draft)
    tree = asked(drafter, [0, 1, 2], DraftBudget(2, siblings=2))
    assert spelled(tree, target) == ["b", "a"]
    assert [target[one.token_id] for one in tree.candidates(ROOT)] == [b"b", b"c"]
    assert drafter.cases["healed"] == 1
    # If it goes on as no word, the space is read after all.
    drafter = drafter_of(target, Draft(pieces, {"\n ": [" ", "a"], "\n  ": ["b"]}))
    request = request_of([0, 1, 2], GREEDY)
    drafter.begin(request)
    job = DraftJob(request, DraftTree(2), DraftBudget(1))
    assert drafter.grow([job]) == [True]
    assert job.tree.num_drafted == 0
    drafter.grow([job])
    assert spelled(job.tree, target) == ["b"]


def test_nothing_follows_an_end_and_control_tokens_are_drafted() -> None:
    target = [b"a", b"<end>"]
    drafter = drafter_of(target, Draft([b"a", b"<end>"], {"a": ["<end>"]}, [1]), ends=[1])
    request = request_of([0], GREEDY)
    drafter.begin(request)
    job = DraftJob(request, DraftTree(0), DraftBudget(4))
    assert drafter.grow([job]) == [False]
    assert job.tree.token_ids[1:] == [1]


def test_a_text_that_does_not_come_back_is_not_drafted_for() -> None:
    drafter = drafter_of([b"a", b"?"], Draft([b"a"], {"a": ["a"]}))
    request = request_of([0, 1], GREEDY)
    drafter.begin(request)
    assert grow(drafter, [request], DraftBudget(2))[0].num_drafted == 0
    assert drafter.cases == {"unreadable": 1}
    # Once it has gone on, it is read without that.
    settle(drafter, request, DraftTree(1), [], 0)
    assert grow(drafter, [request], DraftBudget(2))[0].num_drafted > 0


def read_by(drafter: TranslatedDrafter, request: Request) -> list[int]:
    """Return the tokens that the cache holds of a request."""
    follower = drafter._followers[request.id]
    assert isinstance(drafter.engine, ScriptedEngine)
    assert follower.sequence is not None
    return drafter.engine._sequences[follower.sequence].committed


@pytest.mark.parametrize("said", [np.nan, np.inf, -np.inf])
def test_a_draft_whose_arithmetic_overflows_is_an_error(said: float) -> None:
    draft = Draft([b"a", b"b"], {})
    engine = ScriptedEngine(lambda tokens: np.full(2, said), draft.vocabulary)
    drafter = TranslatedDrafter(engine, TokenMapping(ScriptedVocabulary([b"ab", b"a", b"b"]), draft.vocabulary))
    with pytest.raises(EngineError, match=f"largest logit is {said:g}"):
        asked(drafter, [1], DraftBudget(2))


def test_accepted_drafts_are_not_read_again() -> None:
    target = [b"a", b"b", b"c"]
    drafter = drafter_of(target, Draft([b"a", b"bc", b"b", b"c"], {"a": ["bc"], "c": ["a"]}))
    request = request_of([0], GREEDY)
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(4))
    assert spelled(tree, target) == ["b", "c", "a", "b"]
    path = [1, 2, 3]
    settle(drafter, request, tree, path, 1)
    assert read_by(drafter, request) == [0, 1, 0], "a, bc and a were fed, and are part of the text"
    # What came instead of a draft is read, and stands for a longer token where that is likelier.
    (tree,) = grow(drafter, [request], DraftBudget(1))
    assert spelled(tree, target) == ["c"]
    assert read_by(drafter, request) == [0, 1, 0]
    assert drafter.cases["healed"] == 1
    settle(drafter, request, tree, [], 0)
    (tree,) = grow(drafter, [request], DraftBudget(1))
    assert read_by(drafter, request) == [0, 1, 0, 2, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_under_rejection_proposals_are_certain_and_draw_nothing(temperature: float) -> None:
    target = [b"a", b"b", b"c"]
    drafter = drafter_of(target, Draft([b"a", b"b", b"c"], {"a": ["b", "c"], "b": ["c", "a"]}))
    request = request_of([0], SamplingParams(temperature, seed=3), verifier="rejection")
    state = request.verifier._rng.bit_generator.state  # type: ignore[attr-defined]
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(2, siblings=2))
    assert request.verifier._rng.bit_generator.state == state  # type: ignore[attr-defined]
    assert [one.token_id for one in tree.candidates(ROOT)] == [1, 2]
    assert all(one.draft_probs is None for node in range(len(tree)) for one in tree.candidates(node))


def test_what_may_not_be_said_is_not_proposed() -> None:
    """All that the draft says may be banned, which leaves a row of nothing."""
    target = [b"a", b"b", b"c"]
    for temperature in (0.0, 1.0):
        drafter = drafter_of(target, Draft([b"a", b"b"], {"a": ["b", "b"]}))
        params = SamplingParams(temperature, logit_bias={0: -np.inf, 1: -np.inf})
        request = request_of([0], params)
        drafter.begin(request)
        assert grow(drafter, [request], DraftBudget(2))[0].num_drafted == 0
