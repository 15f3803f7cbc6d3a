"""Objectives with the full trajectory ratio r_i = exp(sum_t log_ratio) under an upper bound: per trajectory, or per group."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lit_asyncrl.algorithm.options import objective_options
from lit_asyncrl.algorithm.weights import RatioKind, bounded_exp, sequence_log_weights
from lit_asyncrl.interfaces import Objective


class TICGRPO(Objective):
    """One trajectory ratio with an upper bound 1 + epsilon: beyond it the weight is 0 (`mask`) or the bound (`truncate`).

    Both signs of the advantage have the same bound, and there is no lower one. The log-weight is clamped to +-20. The ratio does
    not depend on the token: with aggregation sequence-mean-token-sum the gradient is that of mean_i min(r_i, 1 + epsilon) A_i;
    the default sequence-mean-token-mean divides each trajectory by its length, as the methods it is compared with do.

    Args:
        epsilon: allowed excess of the ratio.
        mode: `mask` is what automatic differentiation of min(r, 1 + epsilon) A gives.

    Source: TIC-GRPO (arXiv 2508.02833), upper-only clipping of the trajectory ratio. That the weight is masked is inferred
        from published rates; the paper's epsilon and length normalization are unknown, 0.2 is ours.
    """

    trajectory_level = True
    ratio: RatioKind = "product"

    def __init__(self, epsilon: float = 0.2, mode: Literal["mask", "truncate"] = "mask") -> None:
        check = objective_options()
        check.positive("epsilon", epsilon)
        check.choice("mode", mode, Literal["mask", "truncate"])
        check.refuse()
        self.epsilon = float(epsilon)
        self.mode = mode

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        ratio = bounded_exp(sequence_log_weights(log_ratio, loss_mask))
        bound = 1.0 + self.epsilon
        weights = ratio.masked_fill(ratio > bound, 0.0) if self.mode == "mask" else ratio.clamp(max=bound)
        return weights[:, None].expand_as(log_ratio)


class GMCGRPO(Objective):
    """Group-mass capping: every weight of a group is multiplied by one factor so that their mean is at most 1 + epsilon.

        omega_i = kappa r_i,   kappa = min(1, (1 + epsilon) / mean_j r_j),   r_i = exp(sum_t log_ratio)

    The mean runs over the members that have a trained token. In log space throughout.

    Args:
        epsilon: allowed excess of the group's mean weight.

    Source: GMC-GRPO (arXiv 2610.01896), uniform rescale of the group's mass. The cap G (1 + epsilon) is our derivation; the
        paper's epsilon is unknown, 0.2 is ours.
    """

    trajectory_level = True
    needs_whole_groups = True
    ratio: RatioKind = "product"

    def __init__(self, epsilon: float = 0.2) -> None:
        check = objective_options()
        check.positive("epsilon", epsilon)
        check.refuse()
        self.epsilon = float(epsilon)

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        log_weights = sequence_log_weights(log_ratio, loss_mask).double()
        trained = loss_mask.any(-1)
        log_weights = log_weights.masked_fill(~trained, -torch.inf)
        num_groups = len(group_index.bincount())
        peak = log_weights.new_full((num_groups,), -torch.inf).scatter_reduce_(0, group_index, log_weights, "amax")
        mass = peak.new_zeros(num_groups).index_add_(0, group_index, torch.exp(log_weights - peak[group_index]))
        count = peak.new_zeros(num_groups).index_add_(0, group_index, trained.double())
        log_kappa = (math.log1p(self.epsilon) + count.log() - mass.log() - peak).clamp(max=0.0)
        weights = torch.exp(log_weights + log_kappa[group_index]).to(log_ratio.dtype)
        return weights[:, None].expand_as(log_ratio)
