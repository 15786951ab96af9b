"""What the target is shown where to look at, and what it is told not to repeat."""

from __future__ import annotations

import pytest

pytest.importorskip("tomllib", reason="the recipe needs Python 3.11")
torch = pytest.importorskip("torch", reason="needs paceline[torch]")

from training.copying import followers, matches  # noqa: E402

from training import unlikelihood  # noqa: E402


def test_matches_are_places_that_the_same_tokens_end_at() -> None:
    found = matches(torch.tensor([[7, 8, 9, 7, 8, 8]]), 2)[0]
    pairs = {(row, column) for row, column in found.nonzero().tolist() if column < row}
    assert pairs == {(4, 1)}


def test_followers_are_what_came_after_the_last_two_tokens() -> None:
    found = followers(torch.tensor([[7, 8, 9, 7, 8, 5, 7, 8]]))[0]
    assert found.nonzero().tolist() == [[4, 2], [7, 2], [7, 5]]


def test_only_what_comes_once_more_after_the_prompt_is_unlikely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlikelihood, "PROMPT_LENGTH", 5)
    text = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4, 9, 9]])

    def certain(model: object, token_ids: object) -> object:
        """Give what really comes next half of the probability."""
        return torch.log(torch.full((1, 9, 10), 0.5 / 9).scatter(-1, text[:, 1:, None], 0.5))

    monkeypatch.setattr(unlikelihood, "forward", certain)
    # One token of nine, the second 4, ends a 4-gram that came before; it has a probability of a half.
    assert unlikelihood.unlikelihood(None, text).item() == pytest.approx(-torch.log(torch.tensor(0.5)).item() / 9)
