"""Per-token terms of policy objectives, as pure functions of tensors of one shape.

Nothing here averages: what a token weighs is decided over the whole update batch by ``credit.token_weights``, so a
sum over micro-batches and learners is the gradient of the whole. All log-probabilities are natural logarithms.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Surrogate(NamedTuple):
    """The clipped surrogate and what it was made of; each has the shape of ``logp``."""

    objective: Tensor
    ratio: Tensor
    clipped: Tensor


def clipped_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Surrogate:
    """``min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`` with ``rho = exp(logp - old_logp)``, to be maximised.

    Source: PPO, arXiv:1707.06347, equation 7; two-sided bounds as in DAPO, arXiv:2503.14476, equation 10. With
    ``dual_clip = c > 1`` the objective of a negative advantage is at least ``c A`` (arXiv:1912.09729, equation 5).

    >>> one = torch.zeros(1)
    >>> clipped_surrogate(torch.log(torch.tensor([1.5])), one, torch.ones(1)).objective.item()
    1.2000000476837158
    """
    ratio = torch.exp(logp - old_logp)
    unclipped = ratio * advantage
    bounded = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
    objective = torch.minimum(unclipped, bounded)
    if dual_clip is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, dual_clip * advantage), objective)
    return Surrogate(objective, ratio.detach(), (bounded < unclipped).detach())


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None) -> Tensor:
    """``max((V - G)^2, (V_clipped - G)^2) / 2`` with V kept within ``clip`` of its old value; tensors of one shape.

    Source: the PPO implementation of OpenAI baselines; arXiv:2005.12729, section 2.

    >>> clipped_value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), 0.5).item()
    0.125
    """
    losses = (values - returns) ** 2
    if clip is not None:
        kept = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.maximum(losses, (kept - returns) ** 2)
    return 0.5 * losses


def kl_k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``logp - ref``: unbiased for KL(policy || reference), of either sign. Source: http://joschu.net/blog/kl-approx.html."""
    return logp - ref_logp


def kl_k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``(logp - ref)**2 / 2``: low variance, biased, never negative. Source: as k1."""
    return 0.5 * (logp - ref_logp) ** 2


def kl_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``exp(ref - logp) - (ref - logp) - 1``: unbiased, never negative. Source: as k1; GRPO, arXiv:2402.03300, (4)."""
    difference = ref_logp - logp
    return torch.exp(difference) - difference - 1.0


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of each distribution, at the temperature that was sampled from.

    Args:
        logits: (..., V); tokens: (...,) ids.

    Returns:
        ``log softmax(logits / temperature)[token]`` and the entropy in nats (with gradient if asked), (...,), float32.

    >>> token_logprobs(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), 0.5)[0].exp().round(decimals=4).item()
    0.8808000087738037
    """
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy
