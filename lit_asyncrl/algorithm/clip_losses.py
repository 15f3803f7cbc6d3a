"""Objectives that are the slope of a surrogate: omega = (d surrogate / d log pi) / A, 0 where the surrogate is flat."""

from __future__ import annotations

import math
from abc import abstractmethod
from copy import copy
from typing import Literal

import torch
from torch import Tensor

from lit_asyncrl.algorithm.options import objective_options
from lit_asyncrl.algorithm.weight_losses import check_interval
from lit_asyncrl.algorithm.weights import RatioKind, bounded_exp, geometric_log_ratios
from lit_asyncrl.interfaces import Objective

ROUNDING = 1e-5
"""Nats added to M2PO's threshold, the |log r| of one token: a second pass over that token must not clip it by rounding."""


class BatchObjective(Objective):
    """An objective with a quantity of the whole batch in its weights; alone with a micro-batch, it takes that for the batch."""

    needs_batch_logprobs = True
    uses_advantages = True

    @abstractmethod
    def for_batch(self, log_ratio: Tensor, advantages: Tensor) -> Objective:
        """The objective for the micro-batches of one update.

        Args:
            log_ratio: [N] nats, of all trained tokens of the update.
            advantages: [N], of the trajectories that they belong to.
        """


class ProximalObjective(Objective):
    """An objective that also knows the proximal policy: the one at the start of the batch, before its first update."""

    needs_batch_logprobs = True

    @abstractmethod
    def coefficients(
        self,
        log_ratio: Tensor,
        loss_mask: Tensor,
        advantages: Tensor,
        group_index: Tensor,
        proximal_log_ratio: Tensor | None = None,
    ) -> Tensor:
        """See `Objective`.

        `proximal_log_ratio` [B, T]: proximal minus behavior log-probs, nats, 0 where not trained; None: the proximal policy is
        the one in training, as in the first update of a batch.
        """


class PPOClip(Objective):
    """PPO's clipped surrogate min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) per token, against the behavior policy.

    omega = r where the surrogate has a slope, else 0: it is flat for A > 0 above the upper bound and for A < 0 below the lower
    one; with `dual_clip` also for A < 0 above that value. The log-ratio is clamped to +-20.

    Args:
        epsilon_low, epsilon_high: half-widths of the interval, epsilon_low at most 1.
        dual_clip: ratio above which a negative advantage has no gradient, above 1; None: off.

    Source: PPO (arXiv 1707.06347), asymmetric bounds of DAPO (arXiv 2503.14476), dual clip (arXiv 1912.09729; 3 in verl).
    """

    uses_advantages = True

    def __init__(self, epsilon_low: float = 0.2, epsilon_high: float = 0.2, dual_clip: float | None = None) -> None:
        check = objective_options()
        check_interval(check, epsilon_low, epsilon_high)
        if dual_clip is not None:
            check.require(dual_clip > 1.0, "dual_clip", "be above 1, or null", dual_clip, "Usual is 3.")
        check.refuse()
        self.bounds = (1.0 - epsilon_low, 1.0 + epsilon_high)
        self.dual_clip = dual_clip

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        return clipped_ratio(bounded_exp(log_ratio), advantages, self.bounds, self.dual_clip)


class GSPO(Objective):
    """PPO's clip on one ratio per trajectory, the geometric mean s of its token ratios: omega = s, or 0 where it is clipped.

    The surrogate min(s A, clip(s) A) has the slope s A / T with respect to each log pi: the 1 / T is the aggregation's
    (sequence-mean-token-mean).

    Args:
        epsilon_low, epsilon_high: half-widths of the interval; much smaller than PPO's, since s averages over a trajectory.

    Source: GSPO (arXiv 2507.18071); 3e-4 and 4e-4 as in the paper and TRL.
    """

    trajectory_level = True
    uses_advantages = True
    ratio: RatioKind = "geometric_mean"

    def __init__(self, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> None:
        check = objective_options()
        check_interval(check, epsilon_low, epsilon_high)
        check.refuse()
        self.bounds = (1.0 - epsilon_low, 1.0 + epsilon_high)

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        ratio = bounded_exp(geometric_log_ratios(log_ratio, loss_mask))[:, None]
        return clipped_ratio(ratio, advantages, self.bounds).expand_as(log_ratio)


class SAPO(Objective):
    """A soft gate in place of the clip: surrogate (4 / tau) sigmoid(tau (r - 1)) A per token, tau by the advantage's sign.

        omega = 4 sigmoid(z) (1 - sigmoid(z)) r,   z = tau (r - 1)

    Args:
        tau_positive, tau_negative: how fast the gate closes for advantages above 0, and for all others.

    Source: SAPO (soft adaptive policy optimization); 1.0 and 1.05 as in TRL.
    """

    uses_advantages = True

    def __init__(self, tau_positive: float = 1.0, tau_negative: float = 1.05) -> None:
        check = objective_options()
        check.positive("tau_positive", tau_positive)
        check.positive("tau_negative", tau_negative)
        check.refuse()
        self.tau_positive = float(tau_positive)
        self.tau_negative = float(tau_negative)

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        ratio = bounded_exp(log_ratio)
        positive = (advantages > 0)[:, None]
        z = torch.where(positive, self.tau_positive * (ratio - 1.0), self.tau_negative * (ratio - 1.0))
        return 4.0 * torch.sigmoid(z) * torch.sigmoid(-z) * ratio


class DecoupledPPO(ProximalObjective):
    """PPO's clip around a proximal policy, weighted by the proximal policy's importance against the behavior policy.

        omega = w u (0 where PPO's surrogate of u is flat),   w = pi_prox / pi_behavior,   u = pi / pi_prox

    The clip acts from the second update of a batch on (`model.updates_per_batch`); in the first, u = 1.

    Args:
        epsilon_low, epsilon_high: half-widths of the interval of u.
        max_weight: bound on w.
        mode: a w above the bound gives the token weight 0 (`mask`) or counts as the bound (`truncate`).

    Source: decoupled PPO objective (arXiv 2110.00641) as used by AReaL (arXiv 2505.24298): 0.2 and a bound of 5.
    """

    uses_advantages = True

    def __init__(
        self,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        max_weight: float = 5.0,
        mode: Literal["mask", "truncate"] = "mask",
    ) -> None:
        check = objective_options()
        check_interval(check, epsilon_low, epsilon_high)
        check.positive("max_weight", max_weight)
        check.choice("mode", mode, Literal["mask", "truncate"])
        check.refuse()
        self.bounds = (1.0 - epsilon_low, 1.0 + epsilon_high)
        self.max_weight = float(max_weight)
        self.mode = mode

    def coefficients(
        self,
        log_ratio: Tensor,
        loss_mask: Tensor,
        advantages: Tensor,
        group_index: Tensor,
        proximal_log_ratio: Tensor | None = None,
    ) -> Tensor:
        """See `ProximalObjective`."""
        proximal = log_ratio if proximal_log_ratio is None else proximal_log_ratio
        weight = bounded_exp(proximal)
        if self.mode == "mask":
            weight = weight.masked_fill(weight > self.max_weight, 0.0)
        clipped = clipped_ratio(bounded_exp(log_ratio - proximal), advantages, self.bounds)
        return weight.clamp(max=self.max_weight) * clipped


class M2PO(BatchObjective):
    """PPO's clip with bounds found for each batch, so that the second moment of harmful log-ratios stays within a budget.

    Harmful tokens are those that a clip would act on: A > 0 and r > 1, or A < 0 and r < 1. With d = log r: if the mean of d^2
    over them is within the budget, nothing is clipped. Else tau is such that the mean of min(d^2, tau^2) is within it, and the
    bounds are 1 - max(1 - e^-tau, min_epsilon_low) and 1 + max(e^tau - 1, min_epsilon_high).

    Args:
        budget: largest mean of d^2, nats^2.
        min_epsilon_low, min_epsilon_high: the interval is never narrower than these half-widths.
        solver: tau is the largest |d| of a harmful token that keeps the budget (`breakpoint`), or uses it up (`exact`).

    Source: M2PO (Prosperity before collapse), released code: budget 0.04, floors 0.3 and 0.5, `breakpoint`. `exact`
        and a margin of 1e-5 nats on tau are ours.
    """

    def __init__(
        self,
        budget: float = 0.04,
        min_epsilon_low: float = 0.3,
        min_epsilon_high: float = 0.5,
        solver: Literal["breakpoint", "exact"] = "breakpoint",
    ) -> None:
        check = objective_options()
        check.positive("budget", budget)
        for name, value in (("min_epsilon_low", min_epsilon_low), ("min_epsilon_high", min_epsilon_high)):
            check.require(value >= 0, name, "be at least 0", value, "0 is none.")
        check.require(not min_epsilon_low > 1, "min_epsilon_low", "be at most 1", min_epsilon_low, "A ratio is at least 0.")
        check.choice("solver", solver, Literal["breakpoint", "exact"])
        check.refuse()
        self.budget = float(budget)
        self.min_epsilon_low = float(min_epsilon_low)
        self.min_epsilon_high = float(min_epsilon_high)
        self.solver = solver
        self._bounds: tuple[float, float] | None = None

    def for_batch(self, log_ratio: Tensor, advantages: Tensor) -> Objective:
        """See `BatchObjective`."""
        bound = copy(self)
        bound._bounds = self.clip_bounds(log_ratio, advantages)
        return bound

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        bounds = self._bounds
        if bounds is None:
            bounds = self.clip_bounds(log_ratio[loss_mask], advantages[:, None].expand_as(log_ratio)[loss_mask])
        return clipped_ratio(bounded_exp(log_ratio), advantages, bounds)

    def clip_bounds(self, log_ratio: Tensor, advantages: Tensor) -> tuple[float, float]:
        """Lower and upper bound of the ratio, (0, inf) if nothing is clipped. Arguments as in `for_batch`."""
        tau = self.threshold(log_ratio, advantages)
        if tau is None:
            return 0.0, math.inf
        tau += ROUNDING
        low = max(-math.expm1(-tau), self.min_epsilon_low)
        return 1.0 - low, 1.0 + max(math.expm1(min(tau, 700.0)), self.min_epsilon_high)

    def threshold(self, log_ratio: Tensor, advantages: Tensor) -> float | None:
        """tau, or None where the budget is kept without a clip. Arguments as in `for_batch`."""
        squares = log_ratio.double().square()[log_ratio * advantages.sign() > 0].sort().values
        num = squares.numel()
        if num == 0 or float(squares.mean()) <= self.budget:
            return None
        before = squares.cumsum(0) - squares
        left = torch.arange(num, 0, -1, device=squares.device)
        # The mean of min(d^2, x) at x = squares[k] is (before[k] + left[k] squares[k]) / num; it rises with k beyond the budget.
        num_kept = int((before + left * squares <= self.budget * num).sum())
        if self.solver == "exact":
            return math.sqrt(float(self.budget * num - before[num_kept]) / (num - num_kept))
        return math.sqrt(float(squares[num_kept - 1])) if num_kept else 0.0


def clipped_ratio(ratio: Tensor, advantages: Tensor, bounds: tuple[float, float], dual_clip: float | None = None) -> Tensor:
    """The ratio where min(r A, clip(r, *bounds) A) has a slope, else 0.

    Args:
        ratio: [B, T], or [B, 1] for one of a trajectory.
        advantages: [B].
        bounds: lower and upper.
        dual_clip: the surrogate is flat for a negative advantage above it.
    """
    negative = (advantages < 0)[:, None]
    flat = torch.where(negative, ratio < bounds[0], ratio > bounds[1])
    if dual_clip is not None:
        flat = flat | (negative & (ratio > dual_clip))
    return ratio.masked_fill(flat, 0.0)
