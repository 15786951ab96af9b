"""What both models made of one token, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.core.arrays import FloatArray
from paceline.lab.disagreement.places import TokenComparer


def row(*probabilities: float) -> FloatArray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, dtype=np.float32))


TARGET = row(0.6, 0.3, 0.1, 0.0)


def comparer(temperature: float = 1.0, **options: object) -> TokenComparer:
    return TokenComparer(temperature, target_vocab_size=4, **options)  # type: ignore[arg-type]


def test_equal_rows_agree() -> None:
    found = comparer().compare(1, TARGET, TARGET)
    assert (found.overlap, found.coupled) == pytest.approx((1.0, 1.0))
    assert found.same_top
    assert found.cause is None
    assert found.target_tops == found.draft_tops
    assert [token_id for token_id, _ in found.target_tops] == [0, 1, 2]


@pytest.mark.parametrize(
    ("draft", "cause"),
    [
        (row(0.3, 0.6, 0.1, 0.0), "other top"),
        (row(0.4, 0.35, 0.25, 0.0), "too flat"),
        (row(0.9, 0.08, 0.02, 0.0), "too sharp"),
        (row(0.0, 0.7, 0.3, 0.0), "cannot say"),
    ],
)
def test_why_they_differ(draft: FloatArray, cause: str) -> None:
    found = comparer().compare(0, TARGET, draft)
    assert found.cause == cause
    assert 0.0 < found.disagreement < 1.0
    assert found.coupled <= found.overlap + 1e-9


def test_a_draft_with_nothing_to_say_disagrees_wholly() -> None:
    found = comparer(translated=True).compare(0, TARGET, None)
    assert (found.disagreement, found.coupled, found.cause) == (1.0, 0.0, "cannot say")
    assert found.draft_tops == ()
    assert found.divergence is None


def test_tokens_that_are_others_to_the_draft_are_never_proposed() -> None:
    draft = row(0.1, 0.8, 0.1, 0.0)
    found = comparer(unshared_ids=(1, 7)).compare(0, TARGET, draft)
    assert 1 not in dict(found.draft_tops)
    # The divergence is of the rows as they are.
    assert found.divergence is not None
    assert found.divergence.nll == pytest.approx(-math.log(0.1), rel=1e-5)


def test_rows_of_the_draft_may_be_shorter_or_longer() -> None:
    shorter, longer = comparer(), comparer()
    found = shorter.compare(0, TARGET, row(0.6, 0.3, 0.1))
    assert found.overlap == pytest.approx(1.0)
    found = longer.compare(0, TARGET, np.concatenate((TARGET, np.full(3, 9.0, dtype=np.float32))))
    assert found.overlap == pytest.approx(1.0)


def test_greedily_it_is_all_or_nothing_and_probabilities_are_shown() -> None:
    agreeing = comparer(0.0).compare(0, TARGET, row(0.4, 0.35, 0.25, 0.0))
    assert (agreeing.overlap, agreeing.same_top) == (1.0, True)
    assert dict(agreeing.draft_tops)[1] == pytest.approx(0.35)
    parted = comparer(0.0).compare(0, TARGET, row(0.3, 0.6, 0.1, 0.0))
    assert (parted.overlap, parted.coupled, parted.cause) == (0.0, 0.0, "other top")
