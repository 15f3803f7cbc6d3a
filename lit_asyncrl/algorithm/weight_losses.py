"""Objectives whose weight is a detached function of an importance ratio: truncated, or masked outside an interval.

Token-level ones look at r_t = exp(log_ratio_t); sequence-level ones at the product of a trajectory's ratios, r = prod_t r_t, or
at their geometric mean s = r^(1/T), T trained tokens.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lit_asyncrl.algorithm.options import OptionCheck, objective_options
from lit_asyncrl.algorithm.weights import RatioKind, bounded_exp, geometric_log_ratios, sequence_log_weights
from lit_asyncrl.interfaces import Objective

SequenceMeasure = Literal["product", "geometric_mean"]
SequenceWeight = Literal["one", "token_ratio", "sequence_ratio"]


class Reinforce(Objective):
    """No correction: omega = 1."""

    trajectory_level = True
    ratio: RatioKind = "one"

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        return torch.ones_like(log_ratio)


class TokenTIS(Objective):
    """Truncated token importance weight: omega = min(max(r_t, min_weight), max_weight).

    Args:
        max_weight: cap C.
        min_weight: floor; 0: none.

    Source: truncated importance sampling as commonly used against sampler mismatch; C = 2 as in verl and slime, [0.5, 5] in
        OpenRLHF.
    """

    def __init__(self, max_weight: float = 2.0, min_weight: float = 0.0) -> None:
        check = objective_options()
        check.positive("max_weight", max_weight)
        is_floor = 0 <= min_weight <= max_weight
        check.require(is_floor, "min_weight", f"be in [0, max_weight = {max_weight}]", min_weight, "0 is none.")
        check.refuse()
        self.max_weight = float(max_weight)
        self.min_weight = float(min_weight)

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        return bounded_exp(log_ratio).clamp(self.min_weight, self.max_weight)


class CISPO(Objective):
    """Clipped importance weight that leaves every token its gradient: omega = clip(r_t, 1 - epsilon_low, 1 + epsilon_high).

    Args:
        epsilon_low: 1 switches the lower bound off; in (0, 1].
        epsilon_high: the cap is 1 + epsilon_high.

    Source: CISPO (MiniMax-M1, arXiv 2506.13585). No lower bound and a cap of 5 as in later use (ScaleRL). Use aggregation
        token-mean.
    """

    def __init__(self, epsilon_low: float = 1.0, epsilon_high: float = 4.0) -> None:
        check = objective_options()
        check_interval(check, epsilon_low, epsilon_high)
        check.refuse()
        self.epsilon_low = float(epsilon_low)
        self.epsilon_high = float(epsilon_high)

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        return bounded_exp(log_ratio).clamp(1.0 - self.epsilon_low, 1.0 + self.epsilon_high)


class TokenMIS(Objective):
    """Masked token importance weight: omega = r_t inside [lower, upper], else 0.

    Args:
        lower: least ratio that is trained; 0: none.
        upper: largest ratio that is trained.

    Source: masked importance sampling against sampler mismatch; [0.5, 2] as in TRL.
    """

    def __init__(self, lower: float = 0.5, upper: float = 2.0) -> None:
        check = objective_options()
        check.positive("upper", upper)
        check.require(0 <= lower < upper, "lower", f"be in [0, upper = {upper})", lower, "0 is no bound.")
        check.refuse()
        self.lower = float(lower)
        self.upper = float(upper)

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        ratio = bounded_exp(log_ratio)
        return ratio.masked_fill((ratio < self.lower) | (ratio > self.upper), 0.0)


class IcePop(TokenMIS):
    """Token masking with IcePop's interval: omega = r_t inside [lower, upper], else 0.

    Args:
        lower: least ratio that is trained; 0: none.
        upper: largest ratio that is trained.

    Source: IcePop (double-sided masking); [0.5, 5] as in verl and OpenRLHF, where the ratio is of the trainer's policy at the
        start of the batch to the sampler's and multiplies PPO's surrogate. Here it is the policy in training, which is the same
        in the first update of a batch.
    """

    def __init__(self, lower: float = 0.5, upper: float = 5.0) -> None:
        super().__init__(lower, upper)


class SequenceTIS(Objective):
    """Truncated sequence importance weight: omega = min(prod_t r_t, max_weight) for every token of a trajectory.

    The log-weight is clamped to +-20 first. Capped from above only; nothing is rejected or normalized.

    Args:
        max_weight: cap C.

    Source: VCPO (arXiv 2602.17616); C = 8 and the clamp as in all released scripts.
    """

    trajectory_level = True
    ratio: RatioKind = "product"

    def __init__(self, max_weight: float = 8.0) -> None:
        check = objective_options()
        check.positive("max_weight", max_weight)
        check.refuse()
        self.max_weight = float(max_weight)

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        weights = bounded_exp(sequence_log_weights(log_ratio, loss_mask)).clamp(max=self.max_weight)
        return weights[:, None].expand_as(log_ratio)


class SequenceMask(Objective):
    """Whole trajectories are trained or left out: omega = weight if lower <= m <= upper, else 0.

    m is the product of the trajectory's token ratios or their geometric mean. With `negative_only`, trajectories of non-negative
    advantage are never left out.

    Args:
        lower, upper: bounds of m; None: none. At least one is needed.
        measure: what m is.
        weight: of a trained token: 1, its own ratio, or m.
        negative_only: leave out trajectories of negative advantage only.

    Source: sequence-level masked importance sampling (TRL: product, [0.5, 2], weight m); geometric masking (verl: geometric mean,
        [0.999, 1.001], weight 1); masked TIS (OpenRLHF: geometric mean, [0.5, 5], weight the token's ratio); off-policy sequence
        masking of DeepSeek-V3.2 (lower = exp(-delta), geometric mean, negative_only; delta 1e-4 in slime, the report has none).
    """

    def __init__(
        self,
        lower: float | None = 0.5,
        upper: float | None = 2.0,
        measure: SequenceMeasure = "product",
        weight: SequenceWeight = "one",
        negative_only: bool = False,
    ) -> None:
        check = objective_options()
        check.choice("measure", measure, SequenceMeasure)
        check.choice("weight", weight, SequenceWeight)
        for name, bound in (("lower", lower), ("upper", upper)):
            if bound is not None:
                check.positive(name, bound)
        check.require(lower is not None or upper is not None, "lower", "be set where upper is not", lower, "Set a bound.")
        if lower is not None and upper is not None:
            check.require(lower < upper, "lower", f"be below upper = {upper}", lower, "Lower it.")
        check.refuse()
        self.log_lower = -math.inf if lower is None else math.log(lower)
        self.log_upper = math.inf if upper is None else math.log(upper)
        self.measure = measure
        self.weight = weight
        self.uses_advantages = negative_only
        self.trajectory_level = weight != "token_ratio"
        self.ratio: RatioKind = {"one": "one", "token_ratio": "token", "sequence_ratio": measure}[weight]  # type: ignore[assignment]

    def coefficients(self, log_ratio: Tensor, loss_mask: Tensor, advantages: Tensor, group_index: Tensor) -> Tensor:
        """See `Objective`."""
        of_sequence = sequence_log_weights if self.measure == "product" else geometric_log_ratios
        measured = of_sequence(log_ratio, loss_mask)
        dropped = (measured < self.log_lower) | (measured > self.log_upper)
        if self.uses_advantages:
            dropped = dropped & (advantages < 0)
        logs = {"one": torch.zeros_like(log_ratio), "token_ratio": log_ratio, "sequence_ratio": measured[:, None]}[self.weight]
        return bounded_exp(logs).expand_as(log_ratio).masked_fill(dropped[:, None], 0.0)


def check_interval(check: OptionCheck, epsilon_low: float, epsilon_high: float) -> None:
    """Half-widths of an interval of ratios around 1."""
    check.positive("epsilon_low", epsilon_low)
    check.require(not epsilon_low > 1.0, "epsilon_low", "be at most 1", epsilon_low, "A ratio cannot fall below 0.")
    check.positive("epsilon_high", epsilon_high)
