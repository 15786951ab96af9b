from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.tree import ROOT, Candidate, DraftTree, Evidence


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Trees of three tokens, so that the same token is proposed twice below a node now and then."""
    tree = DraftTree(draw(st.integers(0, 2)))
    for index in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(0, len(tree) - 1))
        probs = np.full(3, index / 100) if draw(st.booleans()) else None
        tree.add(parent, draw(st.integers(0, 2)), f"drafter {index}", Evidence(count=index), probs)
    return tree


def described(tree: DraftTree) -> dict[tuple[int, ...], tuple[str, Evidence, list[tuple[int, float | None]]]]:
    """Return all there is to know about a tree, by path and without node numbers."""
    return {
        tuple(tree.path_tokens(node)): (
            tree.sources[node],
            tree.evidence[node],
            [
                (candidate.token_id, None if candidate.draft_probs is None else float(candidate.draft_probs[0]))
                for candidate in tree.candidates(node)
            ],
        )
        for node in range(len(tree))
    }


def check_consistent(tree: DraftTree) -> None:
    assert len(tree) == len(tree.parents) == len(tree.depths) == len(tree.sources) == len(tree.evidence)
    assert tree.parents[ROOT] == -1
    assert tree.num_drafted == len(tree) - 1
    for node in range(1, len(tree)):
        assert tree.parents[node] < node
        assert tree.depths[node] == len(tree.path_tokens(node)) == tree.depths[tree.parents[node]] + 1
        assert tree.child(tree.parents[node], tree.token_ids[node]) == node
        assert node in [candidate.node for candidate in tree.candidates(tree.parents[node])]
    for node in range(len(tree)):
        for candidate in tree.candidates(node):
            assert tree.parents[candidate.node] == node
            assert tree.token_ids[candidate.node] == candidate.token_id


@given(tree=trees(), data=st.data())
def test_keep_drops_the_rest_and_nothing_else(tree: DraftTree, data: st.DataObject) -> None:
    kept = {ROOT}
    for node in range(1, len(tree)):
        if tree.parents[node] in kept and data.draw(st.booleans()):
            kept.add(node)
    paths = {tuple(tree.path_tokens(node)) for node in kept}
    before = described(tree)
    check_consistent(tree)
    assert len(before) == len(tree), "a token stands at most once below a parent"
    tree.keep(kept - {ROOT})
    check_consistent(tree)
    after = described(tree)
    assert after.keys() == paths
    for path, (source, evidence, candidates) in after.items():
        assert (source, evidence) == before[path][:2]
        assert candidates == [c for c in before[path][2] if (*path, c[0]) in paths]


@st.composite
def shared_trees(draw: st.DrawFn) -> DraftTree:
    """Trees that two drafters wrote."""
    tree = DraftTree(0)
    for index in range(draw(st.integers(0, 14))):
        parent = draw(st.integers(0, len(tree) - 1))
        tree.add(parent, draw(st.integers(0, 2)), draw(st.sampled_from(("one", "other"))), Evidence(count=index))
    return tree


@given(tree=shared_trees(), data=st.data())
def test_what_is_withdrawn_goes_and_what_others_proposed_stays(tree: DraftTree, data: st.DataObject) -> None:
    parent = data.draw(st.integers(0, len(tree) - 1))
    path, prunings = tuple(tree.path_tokens(parent)), tree.num_prunings
    before = {
        place: [(one.token_id, one.source) for one in tree.candidates(node)]
        for node in range(len(tree))
        for place in [tuple(tree.path_tokens(node))]
    }
    tree.withdraw(parent, "one")
    check_consistent(tree)
    assert tree.num_prunings == prunings + 1
    assert tree.num_proposals == sum(len(tree.candidates(node)) for node in range(len(tree)))
    kept = {tuple(tree.path_tokens(node)): node for node in range(len(tree))}
    for place, candidates in before.items():
        is_below = place[: len(path)] == path
        if place in kept:
            left = [one for one in candidates if not is_below or one[1] != "one"]
            assert [(one.token_id, one.source) for one in tree.candidates(kept[place])] == left
        else:
            assert is_below
            assert place != path
            # It was proposed by that drafter alone, or what led to it was.
            steps = [(place[:depth], place[depth]) for depth in range(len(path), len(place))]
            assert any((token, "other") not in before[above] for above, token in steps)
    for place, node in kept.items():
        if place[: len(path)] == path and place != path:
            assert tree.sources[node] == "other"


@given(tree=trees(), data=st.data())
def test_below_is_the_subtree(tree: DraftTree, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, len(tree) - 1))
    top = tuple(tree.path_tokens(node))
    below = tree.below(node)
    check_consistent(below)
    assert below.token_ids[ROOT] == tree.token_ids[node]
    expected = {path[len(top) :]: what for path, what in described(tree).items() if path[: len(top)] == top}
    expected[()] = ("", Evidence(), expected[()][2])
    assert described(below) == expected


def test_a_second_proposal_of_a_token_shares_its_node() -> None:
    tree = DraftTree(5)
    probs = np.array([0.5, 0.5])
    first = tree.add(ROOT, 7, "suffix", Evidence(match_length=3))
    assert tree.add(ROOT, 7, "draft", Evidence(probability=0.9), probs) == first
    assert tree.sources == ["", "suffix"]
    assert tree.evidence[first] == Evidence(match_length=3)
    assert list(tree.candidates(ROOT)) == [
        Candidate(7, first, None, "suffix", Evidence(match_length=3)),
        Candidate(7, first, probs, "draft", Evidence(probability=0.9)),
    ]
    assert tree.child(ROOT, 7) == first
    assert tree.child(ROOT, 8) is None
    assert list(tree.candidates(first)) == []


def test_keep_refuses_orphans() -> None:
    tree = DraftTree(0)
    child = tree.add(ROOT, 1, "a")
    grandchild = tree.add(child, 2, "a")
    with pytest.raises(ValueError, match="node 2 is kept without its parent 1"):
        tree.keep([grandchild])
