"""States follow a sequence: those of its latest tokens are held, and those of pending nodes until they are decided."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.core.arrays import FloatArray
from paceline.engines.state_track import StateTrack


def rows(*values: int) -> FloatArray:
    return np.array([[value, -value] for value in values], np.float32)


def test_a_path_is_committed_and_other_nodes_are_forgotten() -> None:
    track = StateTrack(2)
    track.append(rows(1, 2))
    track.append(rows(3))
    assert track.pending(2).tolist() == [3, -3]
    track.commit([0, 2])
    track.append(rows(4))
    track.commit([])
    assert (track.start, track.end) == (0, 2)
    np.testing.assert_array_equal(track.read(0, 2), rows(1, 3))
    with pytest.raises(ValueError, match="not held"):
        track.read(0, 3)


def on_host(most: int) -> tuple[StateTrack, Callable[[FloatArray], Any]]:
    return StateTrack(2, most=most), lambda given: given


def on_device(most: int) -> tuple[StateTrack, Callable[[FloatArray], Any]]:
    torch = pytest.importorskip("torch", reason="needs paceline[torch]")
    from paceline.engines.torch_hf.states import DeviceTrack

    return DeviceTrack(2, torch.device("cpu"), torch.bfloat16, most=most), lambda given: torch.tensor(
        given, dtype=torch.bfloat16
    )


@pytest.mark.parametrize("make", [on_host, on_device])
@pytest.mark.parametrize("most", [1, 3, 64])
def test_the_latest_are_held_whatever_comes(most: int, make: Callable[[int], Any]) -> None:
    """Beside a list of all of them; at least so many are there."""
    rng = random.Random(most)
    track, given = make(most)
    all_of_them: list[int] = []
    for _ in range(400):
        count = rng.choice((1, 1, 2, 5, 30))
        track.append(given(rows(*range(count))))
        path = list(range(rng.randint(0, count)))
        track.commit(path)
        all_of_them += path
        if rng.random() < 0.1:
            length = rng.randint(0, len(all_of_them))
            track.trim(length)
            del all_of_them[length:]
        if rng.random() < 0.1:
            copy = track.copy()
            copy.append(given(rows(77)))
            copy.commit([0])
            copy.trim(0)
        assert track.end == len(all_of_them)
        assert track.end - track.start <= 2 * most + 30
        held = all_of_them[track.start :]
        np.testing.assert_array_equal(track.read(track.start, track.end), rows(*held).reshape(-1, 2))
    track.trim(0)
    track.append(given(rows(*range(most))))
    track.commit(range(most))
    assert (track.start, track.end) == (0, most)


def test_nodes_that_were_not_noted_lose_the_states_before_them() -> None:
    """An interrupt may come between a pass and the copying of its states."""
    track = StateTrack(2)
    track.append(rows(1, 2, 3))
    track.commit([0, 1, 2])
    track.commit([0, 1])
    assert (track.start, track.end) == (5, 5)
    track.append(rows(6))
    track.commit([0])
    np.testing.assert_array_equal(track.read(5, 6), rows(6))
