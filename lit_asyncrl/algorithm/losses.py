"""The objectives: each one is a rule for the weights omega of the one policy-gradient estimator.

    gradient = sum_i sum_t c_i * omega_it * A_i * grad log pi(y_it)

Objectives say omega, `Advantage` says A, `token_scales` says c. omega is detached: for a surrogate loss (PPO) it is the
derivative of the surrogate with respect to log pi, divided by A; for REINFORCE-style losses it is the importance weight.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_asyncrl.algorithm.weights import MAX_LOG_WEIGHT, sequence_log_weights
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import Objective

Aggregation = Literal["sequence-mean-token-mean", "token-mean", "sequence-mean-token-sum", "constant-length"]


def token_scales(
    aggregation: Aggregation,
    lengths: Tensor,
    *,
    num_trajectories: int,
    num_trained_tokens: int,
    max_response_length: int | None = None,
) -> Tensor:
    """The factor c of every token of a trajectory. The denominators are the whole batch's, so that it may be split at will.

    With N trajectories and T_i trained tokens: `sequence-mean-token-mean` 1 / (N T_i) (GRPO, VCPO), `token-mean`
    1 / sum_i T_i (DAPO), `sequence-mean-token-sum` 1 / N, `constant-length` 1 / (N max_response_length) (Dr. GRPO).

    Args:
        aggregation: which.
        lengths: [B] trained tokens, at least 1 each.
        num_trajectories: N, trajectories with a trained token in the whole batch.
        num_trained_tokens: of the whole batch.
        max_response_length: tokens; for `constant-length` alone.

    Returns:
        [B] float64.
    """
    ones = torch.ones(lengths.shape, dtype=torch.float64, device=lengths.device)
    if aggregation == "sequence-mean-token-mean":
        return ones / (num_trajectories * lengths)
    if aggregation == "token-mean":
        return ones / num_trained_tokens
    if aggregation == "sequence-mean-token-sum":
        return ones / num_trajectories
    assert max_response_length is not None, "constant-length without max_response_length"
    return ones / (num_trajectories * max_response_length)


def check_aggregation(aggregation: str, max_response_length: int | None) -> None:
    """Refuse an unknown aggregation and a length that is missing, useless or not positive.

    Raises:
        ConfigurationError: naming the key.
    """
    if aggregation not in get_args(Aggregation):
        raise ConfigurationError(
            f"model.aggregation must be one of {list(get_args(Aggregation))}, got {aggregation!r}. Choose one of them."
        )
    is_useless = max_response_length is not None and max_response_length <= 0
    if is_useless or (aggregation == "constant-length") != (max_response_length is not None):
        raise ConfigurationError(
            "model.max_response_length must be a positive number of tokens with aggregation constant-length and unset otherwise, "
            f"got {max_response_length!r} (model.aggregation is {aggregation!r}). Set it to the sampler's max_new_tokens."
        )


class Reinforce(Objective):
    """No correction: omega = 1."""

    trajectory_level = True

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        return torch.ones_like(log_ratio)


class SequenceTIS(Objective):
    """Truncated sequence importance weight: omega = min(exp(sum_t log_ratio), max_weight) for every token of a trajectory.

    The log-weight is clamped to +-20 first. Capped from above only; nothing is rejected or normalized.

    Args:
        max_weight: cap C.

    Source: VCPO (arXiv 2602.17616); C = 8 and the clamp as in all released scripts.
    """

    trajectory_level = True

    def __init__(self, max_weight: float = 8.0) -> None:
        self.max_weight = _positive("max_weight", max_weight)

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        return _trajectory_ratio(log_ratio, loss_mask).clamp(max=self.max_weight)[:, None].expand_as(log_ratio)


class TokenTIS(Objective):
    """Truncated token importance weight: omega = min(exp(log_ratio), max_weight).

    Args:
        max_weight: cap C.

    Source: truncated importance sampling as commonly used against sampler mismatch; C = 2 as in verl and slime.
    """

    def __init__(self, max_weight: float = 2.0) -> None:
        self.max_weight = _positive("max_weight", max_weight)

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        return _token_ratio(log_ratio).clamp(max=self.max_weight)


class PPOClip(Objective):
    """PPO's clipped surrogate min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) per token, against the behavior policy.

    omega = r where the surrogate has a slope, else 0: it is flat for A > 0 above the upper bound and for A < 0 below the lower
    one; with `dual_clip` also for A < 0 above that value. The log-ratio is clamped to +-20.

    Args:
        epsilon_low, epsilon_high: half-widths of the interval, epsilon_low at most 1.
        dual_clip: ratio above which a negative advantage has no gradient, above 1; None: off.

    Source: PPO (arXiv 1707.06347), asymmetric bounds of DAPO (arXiv 2503.14476), dual clip (arXiv 1912.09729; 3 in verl).
    """

    def __init__(self, epsilon_low: float = 0.2, epsilon_high: float = 0.2, dual_clip: float | None = None) -> None:
        self.epsilon_low = _positive("epsilon_low", epsilon_low)
        self.epsilon_high = _positive("epsilon_high", epsilon_high)
        if epsilon_low > 1.0:
            raise _refusal("epsilon_low", "be at most 1", epsilon_low, "A ratio cannot fall below 0.")
        if dual_clip is not None and not dual_clip > 1.0:
            raise _refusal("dual_clip", "be above 1, or null", dual_clip, "Usual is 3.")
        self.dual_clip = dual_clip

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        ratio = _token_ratio(log_ratio)
        negative = (advantages < 0)[:, None]
        flat = torch.where(negative, ratio < 1.0 - self.epsilon_low, ratio > 1.0 + self.epsilon_high)
        if self.dual_clip is not None:
            flat = flat | (negative & (ratio > self.dual_clip))
        return ratio.masked_fill(flat, 0.0)


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

    def __init__(self, epsilon: float = 0.2) -> None:
        self.epsilon = _positive("epsilon", epsilon)

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        log_weights = sequence_log_weights(log_ratio, loss_mask).double()
        log_weights = log_weights.masked_fill(~loss_mask.any(-1), -torch.inf)
        num_groups = int(group_index.max()) + 1
        peak = log_weights.new_full((num_groups,), -torch.inf).scatter_reduce_(0, group_index, log_weights, "amax")
        peak = peak.masked_fill(peak.isneginf(), 0.0)
        mass = peak.new_zeros(num_groups).index_add_(0, group_index, torch.exp(log_weights - peak[group_index]))
        count = peak.new_zeros(num_groups).index_add_(0, group_index, loss_mask.any(-1).double())
        log_kappa = (math.log1p(self.epsilon) + count.log() - mass.log() - peak).clamp(max=0.0)
        weights = torch.exp(log_weights + log_kappa[group_index]).to(log_ratio.dtype)
        return weights[:, None].expand_as(log_ratio)


class TICGRPO(Objective):
    """One trajectory ratio with an upper bound 1 + epsilon: beyond it the weight is 0 (`mask`) or the bound (`truncate`).

    The log-weight is clamped to +-20.

    Args:
        epsilon: allowed excess of the ratio.
        mode: `mask` is what automatic differentiation of min(r, 1 + epsilon) A gives.

    Source: TIC-GRPO (arXiv 2508.02833), upper-only clipping of the trajectory ratio. That the weight is masked is inferred
        from published rates; the paper's epsilon is unknown, 0.2 is ours.
    """

    trajectory_level = True

    def __init__(self, epsilon: float = 0.2, mode: Literal["mask", "truncate"] = "mask") -> None:
        self.epsilon = _positive("epsilon", epsilon)
        if mode not in ("mask", "truncate"):
            raise _refusal("mode", "be mask or truncate", mode, "Choose one of them.")
        self.mode = mode

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        ratio = _trajectory_ratio(log_ratio, loss_mask)
        bound = 1.0 + self.epsilon
        weights = ratio.masked_fill(ratio > bound, 0.0) if self.mode == "mask" else ratio.clamp(max=bound)
        return weights[:, None].expand_as(log_ratio)


def _token_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


def _trajectory_ratio(log_ratio: Tensor, loss_mask: Tensor) -> Tensor:
    return _token_ratio(sequence_log_weights(log_ratio, loss_mask))


def _positive(name: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise _refusal(name, "be a finite number above 0", value, "Give a positive number.")
    return float(value)


def _refusal(name: str, contract: str, value: object, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"model.objective.init_args.{name} must {contract}, got {value!r}. {remedy}")
