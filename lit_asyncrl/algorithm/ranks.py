"""Scalars pooled over the processes of a data-parallel run, so that every process takes the same branch.

Without `torch.distributed`, or with one process, each function gives what this process has.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


def summed_over_ranks(values: Tensor) -> Tensor:
    """Elementwise sum over all processes; a new tensor of the same shape and dtype, equal bit for bit everywhere."""
    return _reduced(values, "sum")


def pooled_ess_ratio(log_weights: Tensor) -> float:
    """Effective sample size over the number of trajectories, of all processes' trajectories together.

    (sum w)^2 / (B sum w^2), with w = exp(log_weights) of any size: the largest one is divided out first.

    Args:
        log_weights: [B] raw sequence log-weights of this process, nats; B may differ between processes and be 0.

    Returns:
        In (0, 1]; 0 if no process has a trajectory of weight above 0.

    Source: VCPO (arXiv 2602.17616). A mean of the processes' own ratios would be too large.
    """
    values = log_weights.detach().double()
    peak = _reduced(values.max() if values.numel() else values.new_tensor(-math.inf), "max")
    if peak == -math.inf:
        return 0.0
    weights = (values - peak).exp()
    moments = torch.stack([weights.sum(), weights.square().sum(), values.new_tensor(float(values.numel()))])
    first, second, count = summed_over_ranks(moments).tolist()
    return first * first / (count * second)


def mean_over_ranks(value: float) -> float:
    """Mean of one number a process."""
    total, count = summed_over_ranks(torch.tensor([value, 1.0], dtype=torch.float64)).tolist()
    return total / count


def _reduced(values: Tensor, operation: str) -> Tensor:
    result = values.clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(result, op=dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM)
    return result
