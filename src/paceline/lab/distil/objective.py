"""What a draft is trained for: the adaptive LK loss (arXiv 2602.23881), of whole distributions or of their heads."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

_STEEPNESS: Final = 3.0
"""By which the weight of KL falls with acceptance."""

_LEAST: Final = 1e-9
"""Least probability that a draft's tail is taken to have; below, float32 has only rounding."""


def lk_loss(draft_logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Return the adaptive LK loss, lambda * KL(target || draft) + (1 - lambda) * total variation.

    1 - total variation is the acceptance rate of speculative sampling (arXiv 2211.17192, section 3.2), but its
    gradient vanishes where the two are far apart; lambda = exp(-3 * acceptance), held constant in the gradient, leaves
    those positions to KL. Both logits are ``[..., vocab]``; the mean over positions is returned.
    """
    return _losses(functional.log_softmax(draft_logits, dim=-1), functional.log_softmax(target_logits, dim=-1)).mean()


def lk_loss_of_heads(
    draft_logits: torch.Tensor, token_ids: torch.Tensor, target_logprobs: torch.Tensor, tail: torch.Tensor
) -> torch.Tensor:
    """Return the LK loss of each position, ``[...]``, where the target's distribution is known by its head.

    All other tokens together count as one. So total variation is at most that of the whole distributions, and is equal
    to it where the target's tail is nothing.

    Args:
        draft_logits: ``[..., vocab]``.
        token_ids: the head's tokens, ``[..., head]``.
        target_logprobs: their log-probabilities, ``[..., head]``.
        tail: log-probability of all other tokens together, ``[...]``; ``-inf`` for none.
    """
    head = draft_logits.gather(-1, token_ids) - draft_logits.logsumexp(dim=-1, keepdim=True)
    draft_tail = (1.0 - head.exp().sum(dim=-1, keepdim=True)).clamp_min(_LEAST).log()
    return _losses(torch.cat((head, draft_tail), dim=-1), torch.cat((target_logprobs, tail[..., None]), dim=-1))


def _losses(draft_logprobs: torch.Tensor, target_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the loss of each position of distributions over the same outcomes, ``[..., outcomes]``."""
    target_probs = target_logprobs.exp()
    # An outcome that the target never has adds nothing to KL.
    target_logprobs = target_logprobs.clamp_min(torch.finfo(target_logprobs.dtype).min)
    divergence = (target_probs * (target_logprobs - draft_logprobs)).sum(dim=-1)
    variation = 0.5 * (target_probs - draft_logprobs.exp()).abs().sum(dim=-1)
    weight = torch.exp(-_STEEPNESS * (1 - variation.detach()))
    return weight * divergence + (1 - weight) * variation
