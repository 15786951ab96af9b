"""The keyed noise is a pure function with the statistics of independent uniforms.

Every statistical test here has a false-alarm rate of 1e-6. The keys are fixed: a test that passes once passes always.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from paceline.core.arrays import Float64Array
from paceline.core.noise import TAIL_ID, TAIL_PICK_ID, TokenNoise, row_keys, uniform_from_words
from paceline.core.params import MAX_SEED
from tests.proofs import chi_square

ALPHA = 1e-6
NUM = 40_000

KNOWN_UNIFORMS = [0.21952695231517427, 0.7357703123501601, 0.6290324117652298, 0.6193151257651203]

ONE_ID = np.array([17], dtype=np.int64)


@functools.cache
def along_ids() -> Float64Array:
    return TokenNoise(seed=3).uniform(11, np.arange(NUM))


@functools.cache
def along_positions() -> Float64Array:
    noise = TokenNoise(seed=3)
    return np.concatenate([noise.uniform(position, ONE_ID) for position in range(NUM)])


@functools.cache
def along_seeds() -> Float64Array:
    return np.concatenate([TokenNoise(seed).uniform(11, ONE_ID) for seed in range(NUM)])


@functools.cache
def along_choices() -> Float64Array:
    return np.concatenate([TokenNoise(3, choice).uniform(11, ONE_ID) for choice in range(NUM)])


WAYS = {"ids": along_ids, "positions": along_positions, "seeds": along_seeds, "choices": along_choices}


def dependence_p_value(first: Float64Array, second: Float64Array) -> float:
    """Return the p-value of a chi-square test of independence on a 16 x 16 grid."""
    grid, _, _ = np.histogram2d(first, second, bins=16, range=[[0, 1], [0, 1]])
    return chi_square(grid.ravel())


@pytest.mark.parametrize("way", WAYS)
def test_uniform_along(way: str) -> None:
    assert stats.kstest(WAYS[way](), "uniform").pvalue > ALPHA


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_independent_along(way: str, lag: int) -> None:
    uniforms = WAYS[way]()
    assert dependence_p_value(uniforms[:-lag], uniforms[lag:]) > ALPHA


def test_rows_are_independent_of_each_other() -> None:
    ids = np.arange(NUM)
    row = TokenNoise(3).uniform(11, ids)
    for other in (TokenNoise(3).uniform(12, ids), TokenNoise(4).uniform(11, ids), TokenNoise(3, 1).uniform(11, ids)):
        assert dependence_p_value(row, other) > ALPHA


def test_low_bits_are_uniform_too() -> None:
    uniforms = np.concatenate([TokenNoise(9).uniform(position, np.arange(400)) for position in range(100)])
    low = (uniforms * 2.0**40) % 1.0
    assert stats.kstest(low, "uniform").pvalue > ALPHA


def test_the_statistics_would_see_a_fault() -> None:
    uniforms = along_ids()
    assert stats.kstest(uniforms**1.05, "uniform").pvalue < ALPHA
    first, second, third = uniforms[:-2], uniforms[1:-1], uniforms[2:]
    assert dependence_p_value(first, np.where(third < 0.05, first, second)) < ALPHA


def test_gumbel_numbers_are_standard() -> None:
    assert stats.kstest(TokenNoise(5).gumbel(7, np.arange(NUM)), "gumbel_r").pvalue > ALPHA


@given(
    seed=st.integers(0, MAX_SEED),
    choice=st.integers(0, 2**31 - 1),
    position=st.integers(0, 10**7),
    ids=st.lists(st.integers(-2, 2**31 - 1), min_size=1, max_size=20),
)
def test_noise_is_pure_and_inside_the_open_interval(seed: int, choice: int, position: int, ids: list[int]) -> None:
    noise = TokenNoise(seed, choice)
    together = noise.uniform(position, np.array(ids))
    one_by_one = [TokenNoise(seed, choice).uniform(position, np.array([i]))[0] for i in ids]
    assert together.tolist() == one_by_one
    assert together.min() > 0.0
    assert together.max() < 1.0
    assert np.isfinite(noise.gumbel(position, np.array(ids))).all()


def test_tail_ids_collide_with_no_token() -> None:
    special = TokenNoise(1).uniform(0, np.array([TAIL_ID, TAIL_PICK_ID]))
    assert len({*special.tolist(), *TokenNoise(1).uniform(0, np.arange(200_000)).tolist()}) == 200_002


def test_keys_differ_between_rows() -> None:
    keys = {row_keys(seed, choice, position) for seed in range(20) for choice in range(20) for position in range(20)}
    assert len(keys) == 20**3


def test_known_values() -> None:
    """Seeds reproduce text across versions only as long as these stay."""
    uniforms = TokenNoise(seed=42, choice=1).uniform(5, np.array([0, 1, 2, -1]))
    assert uniforms.tolist() == KNOWN_UNIFORMS


def test_torch_computes_the_same_bits() -> None:
    torch = pytest.importorskip("torch")
    keys = np.array(row_keys(123456789, 2, 77)).reshape(2, 2, 1)
    ids = np.concatenate((np.arange(5000), [2**32 - 1, 2**32 - 2, 2**31]))
    ours = uniform_from_words(ids, keys)
    theirs = uniform_from_words(torch.from_numpy(ids), torch.from_numpy(keys))
    assert theirs.dtype == torch.float64
    assert theirs.numpy().tolist() == ours.tolist()
