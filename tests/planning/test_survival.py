"""How far a tree is expected to be accepted, by what its drafters propose together."""

from __future__ import annotations

import pytest

from paceline.core.tree import ROOT, DraftTree, Evidence
from paceline.planning.auto.survival import Chances, SurvivalModel

REQUEST = 0
ONCE = Evidence(1 / 2, 4, 1)
"""Of a lookup: seen once, and nothing else."""
RARELY = Evidence(1 / 5, 4, 1)
"""Of a lookup: seen once, as something else was three times."""
SURE = Evidence(margin=8.0)
"""Of a model."""


def chances(*proposals: tuple[str, int, Evidence]) -> list[float]:
    """Return the survivals of first tokens, of (drafter, token, evidence)."""
    model = SurvivalModel()
    for name in ("grammar", "suffix", "lookup", "draft"):
        model.know(name, Chances.of(name, says_margins=name == "draft"))
    model.begin(REQUEST)
    tree = DraftTree(0)
    for source, token_id, evidence in proposals:
        tree.add(ROOT, token_id, source, evidence)
    return list(model.score(REQUEST, tree).survivals[1:])


def test_of_two_lookups_that_agree_the_more_cautious_is_believed() -> None:
    (both,) = chances(("suffix", 7, RARELY), ("lookup", 7, ONCE))
    (cautious,) = chances(("suffix", 7, RARELY), ("lookup", 7, RARELY))
    (certain,) = chances(("suffix", 7, ONCE), ("lookup", 7, ONCE))
    assert both == pytest.approx(cautious)
    assert both < certain


def test_where_a_model_and_a_lookup_agree_neither_has_the_last_word() -> None:
    (both,) = chances(("suffix", 7, RARELY), ("draft", 7, SURE))
    (lookups,) = chances(("suffix", 7, RARELY), ("draft", 7, Evidence(margin=0.02)))
    (models,) = chances(("suffix", 7, ONCE), ("draft", 7, SURE))
    assert lookups < both < models


def test_agreement_makes_a_token_likelier_and_disagreement_less_likely() -> None:
    (alone,) = chances(("suffix", 7, ONCE))
    (agreed,) = chances(("suffix", 7, ONCE), ("draft", 7, Evidence()))
    first, second = chances(("suffix", 7, ONCE), ("draft", 8, Evidence()))
    assert first < alone < agreed
    assert first + second <= 1.0


def test_what_a_grammar_forces_is_not_for_others_to_judge() -> None:
    forced = ("grammar", 7, Evidence(match_length=1))
    (alone,) = chances(forced)
    (agreed,) = chances(forced, ("suffix", 7, RARELY), ("draft", 7, Evidence(margin=0.02)))
    assert agreed == alone > 0.85
    # Nor does another become surer of what it would say anyway.
    (_, other) = chances(forced, ("suffix", 8, RARELY))
    (by_itself,) = chances(("suffix", 8, RARELY))
    assert other <= by_itself
