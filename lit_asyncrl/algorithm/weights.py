"""Log-ratios to importance weights, their effective sample size, and what to log about them.

Everything stays in log space as long as it can: a log-weight of 700 is an ordinary number, its exponential is not.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

RatioKind = Literal["one", "token", "product", "geometric_mean"]
"""What a weight is a function of: nothing, a token's ratio, or the product or geometric mean of a trajectory's ratios."""

MAX_LOG_WEIGHT = 20.0
"""Log-weights are clamped to +-20 before exp where a gradient is weighted, so that no coefficient overflows float32."""


def log_ratios(logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """`logprobs - behavior_logprobs` at trained tokens and exactly 0 elsewhere, whatever stands there (NaN included).

    Args:
        logprobs, behavior_logprobs: [B, T] nats.
        loss_mask: [B, T] bool.

    Returns:
        [B, T] nats, detached, in the wider dtype of the two.
    """
    return (logprobs.detach() - behavior_logprobs).masked_fill(~loss_mask, 0.0)


def sequence_log_weights(log_ratio: Tensor, loss_mask: Tensor) -> Tensor:
    """Raw log importance weight of each trajectory: the sum (not the mean) of its trained tokens' log-ratios.

    Args:
        log_ratio: [B, T] nats.
        loss_mask: [B, T] bool.

    Returns:
        [B] nats.
    """
    return log_ratio.masked_fill(~loss_mask, 0.0).sum(-1)


def geometric_log_ratios(log_ratio: Tensor, loss_mask: Tensor) -> Tensor:
    """Mean log-ratio of each trajectory's trained tokens, [B] nats; 0 without any. Arguments as in `sequence_log_weights`."""
    return sequence_log_weights(log_ratio, loss_mask) / loss_mask.sum(-1).clamp(min=1)


def bounded_exp(log_weights: Tensor) -> Tensor:
    """exp of log-weights clamped to +-MAX_LOG_WEIGHT."""
    return log_weights.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


def full_log_weights(kind: RatioKind, log_ratio: Tensor, loss_mask: Tensor) -> Tensor:
    """Log of the weight that a kind of ratio gives before truncation, masking or clipping, [B, T] or [B, 1] nats.

    Arguments as in `sequence_log_weights`.
    """
    if kind == "one":
        return torch.zeros_like(log_ratio)
    if kind == "token":
        return log_ratio
    of_sequence = sequence_log_weights if kind == "product" else geometric_log_ratios
    return of_sequence(log_ratio, loss_mask)[:, None]


def effective_sample_size(log_weights: Tensor, max_weight: float | None = None) -> tuple[Tensor, Tensor]:
    """Kish's effective sample size (sum w)^2 / sum w^2 and its share of the number of trajectories.

    Args:
        log_weights: [N] nats, N >= 1; -inf is a weight of 0. Of the whole batch: a mean over micro-batches is another number.
        max_weight: weights above it count as it; None: raw weights.

    Returns:
        ess: float64 scalar in [1, N], in trajectories (0 if every weight is 0).
        ess_ratio: ess / N.

    Source: VCPO (arXiv 2602.17616), its step-size rule. Computed in log space; the released code's 1e-8 in the denominator is
        left out.
    """
    assert log_weights.numel() > 0, "effective_sample_size of no trajectory"
    logs = log_weights.detach().double()
    if max_weight is not None:
        logs = logs.clamp(max=math.log(max_weight))
    ess = torch.exp(2.0 * logs.logsumexp(0) - (2.0 * logs).logsumexp(0)).nan_to_num(0.0)
    return ess, ess / logs.numel()


def weight_diagnostics(log_weights: Tensor, lengths: Tensor, max_weight: float | None = None) -> dict[str, float]:
    """Numbers about a batch's sequence weights for the log.

    Args:
        log_weights: [N] raw nats, N >= 1.
        lengths: [N] trained tokens, at least 1 each.
        max_weight: the objective's cap; None: none.

    Returns:
        `sequence_mean` and `sequence_max`: of the raw weights (read as at most e^700); `sequence_clipped_fraction`: share above
        `max_weight`; `geometric_ratio_mean`: mean of exp(log_weight / length); `ess`, `ess_ratio`; with a cap also
        `ess_ratio_clipped`.
    """
    logs = log_weights.detach().double()
    weights = logs.clamp(max=700.0).exp()
    ess, ess_ratio = effective_sample_size(logs)
    numbers = {
        "sequence_mean": float((weights / logs.numel()).sum()),
        "sequence_max": float(weights.max()),
        "sequence_clipped_fraction": float((logs > math.log(max_weight)).double().mean()) if max_weight else 0.0,
        "geometric_ratio_mean": float((logs / lengths).clamp(max=700.0).exp().mean()),
        "ess": float(ess),
        "ess_ratio": float(ess_ratio),
    }
    if max_weight:
        numbers["ess_ratio_clipped"] = float(effective_sample_size(logs, max_weight)[1])
    return numbers


def k3_sum(log_ratio: Tensor, loss_mask: Tensor) -> Tensor:
    """Sum over trained tokens of e^l - l - 1: divided by their number, an estimate of KL(behavior || current) in nats.

    Args:
        log_ratio: [B, T] nats.
        loss_mask: [B, T] bool.

    Returns:
        float64 scalar, at least 0.
    """
    ratio = log_ratio.double().masked_fill(~loss_mask, 0.0)
    return (torch.expm1(ratio.clamp(max=700.0)) - ratio).sum()
