"""The loss and its gradient, of whole distributions and of heads."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs paceline[torch]")

from paceline.lab.distil.objective import lk_loss, lk_loss_of_heads  # noqa: E402

VOCAB = 12


def logits(seed: int, *shape: int, scale: float = 2.0) -> Any:
    return scale * torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_loss(draft: list[float], target: list[float]) -> float:
    """The formula of arXiv 2602.23881 in plain numbers."""
    q = [math.exp(value) for value in draft]
    p = [math.exp(value) for value in target]
    q, p = [value / sum(q) for value in q], [value / sum(p) for value in p]
    variation = 0.5 * sum(abs(ours - theirs) for ours, theirs in zip(p, q, strict=True))
    divergence = sum(ours * math.log(ours / theirs) for ours, theirs in zip(p, q, strict=True))
    weight = math.exp(-3 * (1 - variation))
    return weight * divergence + (1 - weight) * variation


def head_of(target: Any, size: int) -> tuple[Any, Any, Any]:
    logprobs = target.log_softmax(-1)
    head, token_ids = logprobs.topk(size, dim=-1)
    return token_ids, head, torch.log1p(-head.exp().sum(-1).clamp_max(1.0))


def test_the_loss_is_the_formula() -> None:
    draft, target = logits(1, 5), logits(2, 5)
    wanted = [plain_loss(*each) for each in zip(draft.tolist(), target.tolist(), strict=True)]
    assert lk_loss(draft, target).item() == pytest.approx(sum(wanted) / 5)


def test_the_gradient_is_that_of_the_formula_with_its_weight_held() -> None:
    draft, target = logits(3, 1).requires_grad_(), logits(4, 1)
    lk_loss(draft, target).backward()
    p, q = target.softmax(-1)[0], draft.detach().softmax(-1)[0]
    variation = 0.5 * (p - q).abs().sum()
    weight = torch.exp(-3 * (1 - variation))
    sign = torch.sign(q - p)
    of_variation = 0.5 * q * (sign - (q * sign).sum())
    assert draft.grad[0].tolist() == pytest.approx((weight * (q - p) + (1 - weight) * of_variation).tolist())


def test_equal_distributions_cost_nothing() -> None:
    same = logits(5, 3)
    assert lk_loss(same, same + 7.0).item() == pytest.approx(0.0, abs=1e-12)


def test_a_head_without_tail_is_the_whole() -> None:
    """Also where the head has every token, or the target gives the others nothing."""
    draft, target = logits(6, 4).requires_grad_(), logits(7, 4)
    rare = target.clone()
    rare.scatter_(-1, target.topk(VOCAB - 5, largest=False).indices, -1e4)
    for wanted, size in ((target, VOCAB), (rare, 5)):
        token_ids, head, _ = head_of(wanted, size)
        whole, of_heads = lk_loss(draft, wanted), lk_loss_of_heads(draft, token_ids, head, torch.full((4,), -torch.inf))
        assert of_heads.mean().item() == pytest.approx(whole.item(), abs=1e-8)
        ours, theirs = (torch.autograd.grad(loss, draft)[0] for loss in (whole, of_heads.mean()))
        # A tail below what is told apart has no gradient.
        assert (ours - theirs).abs().max().item() < 1e-6


def test_a_tail_counts_as_one_token() -> None:
    draft, target = logits(8, 6).requires_grad_(), logits(9, 6)
    token_ids, head, tail = head_of(target, 4)
    losses = lk_loss_of_heads(draft, token_ids, head, tail)
    q = draft.detach().log_softmax(-1)
    for place in range(6):
        kept = token_ids[place].tolist()
        rest = [token for token in range(VOCAB) if token not in kept]
        lumped = [*q[place, kept].tolist(), torch.logsumexp(q[place, rest], 0).item()]
        wanted = plain_loss(lumped, [*head[place].tolist(), tail[place].item()])
        assert losses[place].item() == pytest.approx(wanted)
    losses.sum().backward()
    assert torch.isfinite(draft.grad).all()
    assert (losses.mean() <= lk_loss(draft, target) + 1e-9).item()


def test_a_draft_that_is_sure_has_finite_gradients() -> None:
    draft = torch.zeros(1, VOCAB)
    draft[0, 0] = 200.0
    draft.requires_grad_()
    token_ids, head, tail = head_of(logits(10, 1).float(), 3)
    loss = lk_loss_of_heads(draft, token_ids, head, tail).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(draft.grad).all()
