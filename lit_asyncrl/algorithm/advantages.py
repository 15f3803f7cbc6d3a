"""Rewards of whole groups to advantages: group mean (GRPO, Dr. GRPO), leave-one-out (RLOO), by length (OPO), OPOB (VCPO)."""

from __future__ import annotations

import math
from copy import copy
from typing import Literal

import torch
from torch import Tensor

from lit_asyncrl.algorithm.options import advantage_options
from lit_asyncrl.algorithm.weights import MAX_LOG_WEIGHT
from lit_asyncrl.interfaces import Advantage

Normalize = Literal["none", "population_std", "sample_std"]
ScoreNorm = Literal["batched", "logit_proxy", "per_trajectory"]
Weighting = Literal["paper", "released"]
Scope = Literal["group", "batch"]

MIN_STD = 1e-8
"""A group whose rewards spread no more counts as one of equal rewards."""

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
        check = advantage_options()
        check.choice("normalize", normalize, Normalize)
        check.refuse()
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
        size = group_index.bincount()[group_index]
        centred = (rewards - group_mean(rewards, group_index)) * reward_scale(rewards, group_index, "none")
        return (centred * size / (size - 1).clamp(min=1)).to(rewards.dtype)


class OPO(Advantage):
    """Reward minus the length-weighted mean of the group: b = sum_i T_i R_i / sum_i T_i, T_i trained tokens.

    A group without a trained token has its plain mean.

    Source: OPO (arXiv 2505.23585): the optimal on-policy baseline where a score's squared norm grows with its length.
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
        """See `Advantage`; needs rewards and lengths."""
        baselines = _weighted_means(rewards, group_index, lengths.double().log())
        return ((rewards - baselines) * reward_scale(rewards, group_index, "none")).to(rewards.dtype)


class OPOB(Advantage):
    """Off-policy optimal baseline: the b that minimizes the second moment of w (R - b) S within a group.

        b* = sum_i W_i R_i / sum_i W_i,   W_i = w_i^2 ||S_i||^2,   A_i = (R_i - b*) / sigma

    w is the raw sequence weight, S the score (gradient of the trajectory's summed log-probs), sigma the population standard
    deviation of the group's rewards. W is formed in log space. Where all norms are 0, b is the plain mean.

    With scope `batch` there is one b for the batch, of the values V_i = (R_i - group mean) / sigma in place of the rewards, and
    A_i = V_i - b. A group of equal rewards then has the advantage -b.

    Args:
        score_norm: where ||S||^2 comes from: `batched`, exact in one forward and backward; `per_trajectory`, exact for any
            model with one backward each; `logit_proxy`, the norm with respect to the logits only, almost free.
        weighting: `paper` as above; `released` multiplies W by the squared truncated weight min(w, 8)^2, as VCPO's released
            code does.
        normalize_by_length: divide W by the squared number of trained tokens, which is optimal for token-mean losses.
        normalize: divide by sigma or not.
        scope: one baseline for each group, or for the batch.

    Source: VCPO (arXiv 2602.17616), optimal baseline; options as in its released code, except the aggregations other than the
        mean. With scope `group`, an equal-reward group has advantages exactly 0 here.
    """

    def __init__(
        self,
        score_norm: ScoreNorm = "batched",
        weighting: Weighting = "paper",
        normalize_by_length: bool = False,
        normalize: Literal["none", "population_std"] = "population_std",
        scope: Scope = "group",
    ) -> None:
        check = advantage_options()
        check.choice("score_norm", score_norm, ScoreNorm)
        check.choice("weighting", weighting, Weighting)
        check.choice("normalize", normalize, Literal["none", "population_std"])
        check.choice("scope", scope, Scope)
        check.refuse()
        self.score_norm = score_norm
        self.weighting = weighting
        self.normalize_by_length = normalize_by_length
        self.normalize = normalize
        self.scope = scope
        self.given_baseline: float | None = None

    def with_baseline(self, baseline: float) -> OPOB:
        """The same advantage with a baseline that is known: that of a batch, for its micro-batches."""
        bound = copy(self)
        bound.given_baseline = baseline
        return bound

    def scope_index(self, group_index: Tensor) -> Tensor:
        """Which baseline a trajectory has, [B] int64."""
        return group_index if self.scope == "group" else torch.zeros_like(group_index)

    def values(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """What the baseline is taken from, [B] float64: rewards, or their group-relative values with scope `batch`."""
        if self.scope == "group":
            return rewards.double()
        return (rewards - group_mean(rewards, group_index)) * reward_scale(rewards, group_index, self.normalize)

    def scales(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """The factor on value minus baseline, [B] float64: 1 / sigma of the group (0 where its rewards are equal), or 1."""
        if self.scope == "group":
            return reward_scale(rewards, group_index, self.normalize)
        return torch.ones_like(rewards, dtype=torch.float64)

    def baselines(
        self, values: Tensor, scope_index: Tensor, *, lengths: Tensor, log_weights: Tensor, score_norms_squared: Tensor
    ) -> Tensor:
        """b* of each trajectory, [B] float64, from `values` and `scope_index`; the others as in `Advantage`."""
        if self.given_baseline is not None:
            return torch.full_like(values, self.given_baseline, dtype=torch.float64)
        log_w = log_weights.double()
        logs = 2.0 * log_w + score_norms_squared.double().log()
        if self.weighting == "released":
            truncated = log_w.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).clamp(max=math.log(RELEASED_MAX_WEIGHT))
            logs = logs + 2.0 * truncated
        if self.normalize_by_length:
            logs = logs - 2.0 * lengths.clamp(min=1).double().log()  # length 0 has norm 0: no weight either way
        return _weighted_means(values, scope_index, logs)

    def __call__(
        self,
        rewards: Tensor,
        group_index: Tensor,
        *,
        lengths: Tensor,
        log_weights: Tensor,
        score_norms_squared: Tensor | None,
    ) -> Tensor:
        """See `Advantage`; needs all of it. With scope `batch`, the arguments are taken for the whole batch."""
        assert score_norms_squared is not None, "OPOB was called without score norms"
        values = self.values(rewards, group_index)
        baselines = self.baselines(
            values,
            self.scope_index(group_index),
            lengths=lengths,
            log_weights=log_weights,
            score_norms_squared=score_norms_squared,
        )
        return ((values - baselines) * self.scales(rewards, group_index)).to(rewards.dtype)


def _weighted_means(values: Tensor, index: Tensor, log_weights: Tensor) -> Tensor:
    """Weighted mean of `values` over each index, [B] float64; the plain mean where every weight is 0 (log-weight -inf)."""
    num = len(index.bincount())
    peak = log_weights.new_full((num,), -torch.inf).scatter_reduce_(0, index, log_weights, "amax")
    weights = torch.where(peak.isneginf()[index], 1.0, torch.exp(log_weights - peak[index]))
    totals = weights.new_zeros(num).index_add_(0, index, weights)
    sums = weights.new_zeros(num).index_add_(0, index, weights * values.double())
    return (sums / totals)[index]


def group_mean(values: Tensor, group_index: Tensor) -> Tensor:
    """Mean of `values` [B] over each trajectory's group, [B] float64 (in which equal float32 rewards have an exact mean)."""
    sizes = group_index.bincount()
    sums = values.new_zeros(len(sizes), dtype=torch.float64).index_add_(0, group_index, values.double())
    return (sums / sizes)[group_index]


def reward_scale(rewards: Tensor, group_index: Tensor, normalize: Normalize) -> Tensor:
    """1 / standard deviation (or 1) of each trajectory's group, [B] float64; 0 for a group of equal rewards."""
    variance = group_mean((rewards - group_mean(rewards, group_index)).square(), group_index)
    if normalize == "sample_std":
        size = group_index.bincount()[group_index]
        variance = variance * size / (size - 1).clamp(min=1)
    std = variance.sqrt()
    return torch.where(std > MIN_STD, torch.ones_like(std) if normalize == "none" else 1.0 / std, 0.0)
