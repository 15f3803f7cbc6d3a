"""Statistical facts that the methods rest on, by Monte Carlo with a fixed seed against closed forms.

Trajectory ratios are lognormal with mean 1: log r ~ N(-sigma^2 / 2, sigma^2). Biases are E |w - r| per trajectory, in units of
the largest |A S|.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_asyncrl.algorithm.advantages import OPOB, GroupMean
from lit_asyncrl.algorithm.losses import GMCGRPO, TICGRPO
from lit_asyncrl.algorithm.weights import effective_sample_size
from lit_asyncrl.interfaces import Objective

EPSILON = 0.2


def log_ratios(sigma: float, num: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return sigma * torch.randn(num, generator=generator, dtype=torch.float64) - sigma**2 / 2


def bias(objective: Objective, sigma: float, group_size: int, num_groups: int) -> float:
    """Mean of |w - r|, one-token trajectories."""
    logs = log_ratios(sigma, group_size * num_groups)[:, None]
    index = torch.arange(num_groups).repeat_interleave(group_size)
    weights = objective.coefficients(logs, torch.ones_like(logs, dtype=torch.bool), torch.ones(len(logs)), index)
    return float((weights - logs.exp()).abs().mean())


def normal_cdf(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def closed_forms(sigma: float) -> tuple[float, float]:
    """E[r 1{r > 1 + epsilon}] and E[(r - 1 - epsilon)_+]."""
    d1 = (-math.log1p(EPSILON) + sigma**2 / 2) / sigma
    return normal_cdf(d1), normal_cdf(d1) - (1 + EPSILON) * normal_cdf(d1 - sigma)


def test_closed_forms_are_those_of_the_table() -> None:
    assert closed_forms(0.5) == pytest.approx((0.454364, 0.131090), abs=1e-6)
    assert closed_forms(1.0) == pytest.approx((0.624636, 0.327614), abs=1e-6)
    assert closed_forms(0.25) == pytest.approx((0.272827, 0.037059), abs=1e-6)


@pytest.mark.parametrize(
    ("sigma", "group_size", "expected", "tolerance"),
    [
        (0.5, 4, 0.0411, 1e-3),
        (0.5, 8, 0.0180, 6e-4),
        (0.5, 16, 0.0057, 3e-4),
        (0.5, 64, 0.00008, 4e-5),
        (1.0, 4, 0.162, 5e-3),
        (1.0, 8, 0.105, 4e-3),
        (1.0, 16, 0.061, 3e-3),
        (1.0, 64, 0.0123, 1e-3),
        (0.25, 4, 0.0047, 3e-4),
        (0.25, 8, 0.0008, 1e-4),
    ],
)
def test_the_bias_of_group_mass_capping_falls_with_the_group(
    sigma: float, group_size: int, expected: float, tolerance: float
) -> None:
    measured = bias(GMCGRPO(EPSILON), sigma, group_size, 400_000 // group_size)
    assert measured == pytest.approx(expected, abs=tolerance)
    # Scarf's bound chi^2 / (4 G epsilon), chi^2 = e^(sigma^2) - 1
    assert measured <= math.expm1(sigma**2) / (4 * group_size * EPSILON)


@pytest.mark.parametrize("group_size", [4, 16, 64])
@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_the_bias_of_mask_and_truncation_does_not_fall_with_the_group(sigma: float, group_size: int) -> None:
    masked, truncated = closed_forms(sigma)
    num_groups = 400_000 // group_size
    assert bias(TICGRPO(EPSILON, "mask"), sigma, group_size, num_groups) == pytest.approx(masked, rel=0.02)
    assert bias(TICGRPO(EPSILON, "truncate"), sigma, group_size, num_groups) == pytest.approx(truncated, rel=0.03)


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_the_ess_ratio_of_lognormal_weights_tends_to_its_limit(sigma: float) -> None:
    # E[r]^2 / E[r^2] = e^(-sigma^2)
    ratio = effective_sample_size(log_ratios(sigma, 400_000))[1]
    assert float(ratio) == pytest.approx(math.exp(-(sigma**2)), rel=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_the_optimal_baseline_s_second_moment_is_never_above_the_group_mean_s(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.rand(8 * 40, generator=generator, dtype=torch.float64)

    rewards, norms, logs = draw().round(decimals=1), 5 * draw() ** 2, 2 * draw() - 1
    index = torch.arange(40).repeat_interleave(8)
    moments = []
    for advantage in (OPOB(normalize="none"), GroupMean("none")):
        centred = advantage(rewards, index, lengths=torch.ones(320), log_weights=logs, score_norms_squared=norms)
        moments.append(torch.zeros(40, dtype=torch.float64).index_add_(0, index, (2 * logs).exp() * norms * centred**2))
    assert bool((moments[0] <= moments[1] + 1e-12).all())
    assert float(moments[0].sum()) < 0.99 * float(moments[1].sum())
