"""What a loss may hold beside the policy gradient: a KL penalty to a reference model, and an entropy bonus.

    regularization = sum_i sum_t c_i (kl_coefficient * k(l_it) - entropy_coefficient * H_it),   l = log pi - log pi_reference

H is the exact entropy of the distribution that the token was drawn from, with its gradient; c is the aggregation's factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_asyncrl.algorithm.options import OptionCheck
from lit_asyncrl.algorithm.weights import MAX_LOG_WEIGHT

KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class ReferenceKL:
    """A KL penalty to a frozen reference model, which is loaded only where this is given.

    Args:
        coefficient: factor of the penalty; 0: only measured.
        estimator: `k1`, `k2` or `k3`, see `kl_estimate`.
        path: folder of the reference model; None: `model.policy.path`, the policy as it was before training.

    Raises:
        ConfigurationError: a coefficient below 0, or an unknown estimator.
    """

    coefficient: float = 0.001
    estimator: KLEstimator = "k3"
    path: str | None = None

    def __post_init__(self) -> None:
        check = OptionCheck("model.reference_kl")
        check.choice("estimator", self.estimator, KLEstimator)
        is_valid = self.coefficient >= 0 and math.isfinite(self.coefficient)
        check.require(is_valid, "coefficient", "be a finite number of at least 0", self.coefficient, "0 only measures it.")
        check.refuse()


@dataclass(frozen=True)
class Regularizer:
    """Coefficients of both terms; see the module.

    Args:
        kl_coefficient: at least 0.
        kl_estimator: see `kl_estimate`.
        entropy_coefficient: bonus on entropy; 0: none.
    """

    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0

    @property
    def acts(self) -> bool:
        """Whether there is any term."""
        return self.kl_coefficient > 0 or self.entropy_coefficient != 0

    def loss(
        self, logprobs: Tensor, entropy: Tensor, reference_logprobs: Tensor | None, scales: Tensor, loss_mask: Tensor
    ) -> Tensor:
        """The micro-batch's part of the regularization, a scalar.

        Args:
            logprobs, entropy: [B, T] nats, with gradient.
            reference_logprobs: [B, T] nats; None where there is no reference.
            scales: [B], the aggregation's c.
            loss_mask: [B, T] bool.
        """
        weights = scales.to(logprobs.dtype)[:, None].expand_as(logprobs)[loss_mask]
        total = logprobs.new_zeros(())
        if self.kl_coefficient > 0 and reference_logprobs is not None:
            log_ratio = logprobs[loss_mask] - reference_logprobs[loss_mask]
            total = total + self.kl_coefficient * (weights * kl_estimate(log_ratio, self.kl_estimator)).sum()
        if self.entropy_coefficient != 0:
            total = total - self.entropy_coefficient * (weights * entropy[loss_mask]).sum()
        return total


def kl_estimate(log_ratio: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, of any shape, with gradient.

    With l = log pi - log pi_reference at a token drawn from the policy: k1 = l (unbiased, of any sign; its gradient has mean 0,
    so that as a penalty it does nothing but add noise), k2 = l^2 / 2 (biased, with the gradient of the KL divergence),
    k3 = e^-l - 1 + l (unbiased, at least 0).

    Args:
        log_ratio: l; clamped to +-20 inside the exponential, beyond which k3 grows linearly.
        estimator: which.

    Source: Schulman, Approximating KL Divergence (2020); k3 as GRPO (arXiv 2402.03300). The tokens are those that the behavior
        policy drew, and are not weighted for it, as in the usual implementations.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(-log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)) + log_ratio
