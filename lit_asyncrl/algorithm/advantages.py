"""Rewards of whole groups to advantages: group mean (GRPO), leave-one-out (RLOO), off-policy optimal baseline (VCPO)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_asyncrl.algorithm.weights import MAX_LOG_WEIGHT
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import Advantage

Normalize = Literal["none", "population_std", "sample_std"]
ScoreNorm = Literal["batched", "logit_proxy", "per_trajectory"]
Weighting = Literal["paper", "released"]

MIN_STD = 1e-8
"""A group whose rewards spread less counts as one of equal rewards."""

RELEASED_MAX_WEIGHT = 8.0
"""Cap on the sequence weight in VCPO's released scripts, used by the released weighting."""


class GroupMean(Advantage):
    """Reward minus the group's mean, divided by the group's standard deviation (GRPO) or not (Dr. GRPO).

    A group of equal rewards has advantages 0. Nothing is added to the standard deviation.

    Args:
        normalize: `population_std` divides by sqrt(mean square), `sample_std` by the (G - 1) one, `none` by 1.

    Source: GRPO (arXiv 2402.03300) and Dr. GRPO (arXiv 2503.20783). The usual 1e-6 in the denominator is left out.
    """

    def __init__(self, normalize: Normalize = "population_std") -> None:
        _check_choice("normalize", normalize, Normalize)
        self.normalize = normalize

    def __call__(
        self,
        rewards: Tensor,
        group_index: Tensor,
        *,
        lengths: Tensor,
        log_weights: Tensor,
        score_norms_squared: Tensor | None,
    ) -> Tensor:
        """See `Advantage`; needs the rewards only."""
        centred = rewards - group_mean(rewards, group_index)
        return (centred * reward_scale(rewards, group_index, self.normalize)).to(rewards.dtype)


class LeaveOneOut(Advantage):
    """Reward minus the mean of the *other* members: G / (G - 1) (R - mean); 0 for a member without others.

    Source: RLOO (arXiv 2402.14740).
    """

    def __call__(
        self,
        rewards: Tensor,
        group_index: Tensor,
        *,
        lengths: Tensor,
        log_weights: Tensor,
        score_norms_squared: Tensor | None,
    ) -> Tensor:
        """See `Advantage`; needs the rewards only."""
        size = _group_sizes(group_index)[group_index]
        centred = (rewards - group_mean(rewards, group_index)) * reward_scale(rewards, group_index, "none")
        return (centred * size / (size - 1).clamp(min=1)).to(rewards.dtype)


class OPOB(Advantage):
    """Off-policy optimal baseline: the b that minimizes the second moment of w (R - b) S within a group.

        b* = sum_i W_i R_i / sum_i W_i,   W_i = w_i^2 ||S_i||^2,   A_i = (R_i - b*) / sigma

    w is the raw sequence weight, S the score (gradient of the trajectory's summed log-probs), sigma the population standard
    deviation of the group's rewards. W is formed in log space. A group whose norms are all 0 falls back to its mean reward.

    Args:
        score_norm: where ||S||^2 comes from: `batched`, exact in one forward and backward; `per_trajectory`, exact for any
            model with one backward each; `logit_proxy`, the norm with respect to the logits only, almost free.
        weighting: `paper` as above; `released` multiplies W by the squared truncated weight min(w, 8)^2, as VCPO's released
            code does.
        normalize_by_length: divide W by the squared number of trained tokens, which is optimal for token-mean losses.
        normalize: divide by sigma or not.

    Source: VCPO (arXiv 2602.17616), optimal baseline; options as in its released code, except the aggregations other than the
        mean. An equal-reward group has advantages exactly 0 here.
    """

    def __init__(
        self,
        score_norm: ScoreNorm = "batched",
        weighting: Weighting = "paper",
        normalize_by_length: bool = False,
        normalize: Literal["none", "population_std"] = "population_std",
    ) -> None:
        _check_choice("score_norm", score_norm, ScoreNorm)
        _check_choice("weighting", weighting, Weighting)
        _check_choice("normalize", normalize, Literal["none", "population_std"])
        self.score_norm = score_norm
        self.weighting = weighting
        self.normalize_by_length = normalize_by_length
        self.normalize = normalize

    def baselines(
        self, rewards: Tensor, group_index: Tensor, *, lengths: Tensor, log_weights: Tensor, score_norms_squared: Tensor
    ) -> Tensor:
        """b* of each trajectory's group, [B] float64. Arguments as in `Advantage`."""
        log_w = log_weights.double()
        logs = 2.0 * log_w + score_norms_squared.double().log()
        if self.weighting == "released":
            truncated = log_w.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).clamp(max=math.log(RELEASED_MAX_WEIGHT))
            logs = logs + 2.0 * truncated
        if self.normalize_by_length:
            logs = logs - 2.0 * lengths.clamp(min=1).double().log()  # length 0 has norm 0: no weight either way
        num_groups = _num_groups(group_index)
        peak = logs.new_full((num_groups,), -torch.inf).scatter_reduce_(0, group_index, logs, "amax")
        without_score = peak.isneginf()[group_index]
        weights = torch.where(without_score, 1.0, torch.exp(logs - peak[group_index]))
        totals = weights.new_zeros(num_groups).index_add_(0, group_index, weights)
        sums = weights.new_zeros(num_groups).index_add_(0, group_index, weights * rewards.double())
        return (sums / totals)[group_index]

    def scales(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """1 / sigma of each trajectory's group, [B] float64; 0 for a group of equal rewards."""
        return reward_scale(rewards, group_index, self.normalize)

    def __call__(
        self,
        rewards: Tensor,
        group_index: Tensor,
        *,
        lengths: Tensor,
        log_weights: Tensor,
        score_norms_squared: Tensor | None,
    ) -> Tensor:
        """See `Advantage`; needs all of it."""
        assert score_norms_squared is not None, "OPOB was called without score norms"
        baselines = self.baselines(
            rewards, group_index, lengths=lengths, log_weights=log_weights, score_norms_squared=score_norms_squared
        )
        return ((rewards - baselines) * self.scales(rewards, group_index)).to(rewards.dtype)


def group_mean(values: Tensor, group_index: Tensor) -> Tensor:
    """Mean of `values` [B] over each trajectory's group, [B] float64 (in which equal float32 rewards have an exact mean)."""
    sums = values.new_zeros(_num_groups(group_index), dtype=torch.float64).index_add_(0, group_index, values.double())
    return (sums / _group_sizes(group_index))[group_index]


def reward_scale(rewards: Tensor, group_index: Tensor, normalize: Normalize) -> Tensor:
    """1 / standard deviation (or 1) of each trajectory's group, [B] float64; 0 for a group of equal rewards."""
    variance = group_mean((rewards - group_mean(rewards, group_index)).square(), group_index)
    if normalize == "sample_std":
        size = _group_sizes(group_index)[group_index]
        variance = variance * size / (size - 1).clamp(min=1)
    std = variance.sqrt()
    return torch.where(std > MIN_STD, torch.ones_like(std) if normalize == "none" else 1.0 / std, 0.0)


def _group_sizes(group_index: Tensor) -> Tensor:
    return torch.bincount(group_index, minlength=_num_groups(group_index))


def _num_groups(group_index: Tensor) -> int:
    return int(group_index.max()) + 1 if group_index.numel() else 0


def _check_choice(name: str, value: str, choices: object) -> None:
    if value not in get_args(choices):
        raise ConfigurationError(
            f"model.advantage.init_args.{name} must be one of {list(get_args(choices))}, got {value!r}. Choose one of them."
        )
