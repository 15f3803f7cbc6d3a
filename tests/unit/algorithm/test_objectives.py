"""Weights of every objective: closed forms for stop-gradient weights, finite differences of the surrogate for PPO."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_asyncrl.algorithm.losses import (
    GMCGRPO,
    TICGRPO,
    PPOClip,
    Reinforce,
    SequenceTIS,
    TokenTIS,
    check_aggregation,
    token_scales,
)
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import Objective

RATIOS = torch.tensor([0.3, 0.6, 1.0, 2.5, 6.0], dtype=torch.float64)


def weights(objective: Objective, ratios: Tensor, advantage: float = 1.0, groups: list[int] | None = None) -> list[float]:
    """omega of one-token trajectories with these ratios."""
    log_ratio = ratios.log()[:, None]
    index = torch.tensor(groups if groups is not None else [0] * len(ratios))
    advantages = torch.full((len(ratios),), advantage)
    return objective.coefficients(log_ratio, torch.ones_like(log_ratio, dtype=torch.bool), advantages, index)[:, 0].tolist()


@pytest.mark.parametrize(
    ("objective", "advantage", "expected"),
    [
        (Reinforce(), 1.0, [1, 1, 1, 1, 1]),
        (TokenTIS(2.0), 1.0, [0.3, 0.6, 1, 2, 2]),
        (SequenceTIS(8.0), -1.0, [0.3, 0.6, 1, 2.5, 6]),
        (SequenceTIS(2.0), 1.0, [0.3, 0.6, 1, 2, 2]),
        (PPOClip(), 1.0, [0.3, 0.6, 1, 0, 0]),
        (PPOClip(), -1.0, [0, 0, 1, 2.5, 6]),
        (PPOClip(dual_clip=3.0), -1.0, [0, 0, 1, 2.5, 0]),
        (TICGRPO(), 1.0, [0.3, 0.6, 1, 0, 0]),
        (TICGRPO(mode="truncate"), -1.0, [0.3, 0.6, 1, 1.2, 1.2]),
    ],
)
def test_weights_match_the_oracle(objective: Objective, advantage: float, expected: list[float]) -> None:
    assert weights(objective, RATIOS, advantage) == pytest.approx(expected, abs=1e-12)


def clip_surrogate(low: float, high: float, dual: float | None) -> Callable[[Tensor, float], Tensor]:
    def surrogate(log_ratio: Tensor, advantage: float) -> Tensor:
        ratio = log_ratio.exp()
        value = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        return value if dual is None or advantage > 0 else value.clamp(min=dual * advantage)

    return surrogate


@pytest.mark.parametrize("advantage", [1.7, -0.8])
@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.4, 3.0)])
def test_ppo_weight_is_the_slope_of_the_clipped_surrogate(advantage: float, low: float, high: float, dual: float | None) -> None:
    surrogate, step = clip_surrogate(low, high, dual), 1e-6
    logs = RATIOS.log()
    slope = (surrogate(logs + step, advantage) - surrogate(logs - step, advantage)) / (2 * step)
    assert weights(PPOClip(low, high, dual), RATIOS, advantage) == pytest.approx((slope / advantage).tolist(), abs=1e-8)


def test_sequence_weight_is_the_product_over_trained_tokens() -> None:
    # e^(.2 - .1 + .3) = 1.4918247; the masked 5.0 does not count
    log_ratio = torch.tensor([[5.0, 0.2, -0.1, 0.3]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True, True]])
    arguments = (log_ratio, mask, torch.ones(1), torch.zeros(1, dtype=torch.long))
    assert SequenceTIS().coefficients(*arguments)[0, 1:].tolist() == pytest.approx([1.4918247] * 3, abs=1e-7)
    assert TICGRPO().coefficients(*arguments)[0, 1:].tolist() == [0, 0, 0]
    assert TICGRPO(mode="truncate").coefficients(*arguments)[0, 1:].tolist() == pytest.approx([1.2] * 3)
    for mode in ("mask", "truncate"):
        assert TICGRPO(0.5, mode).coefficients(*arguments)[0, 1:].tolist() == pytest.approx([1.4918247] * 3, abs=1e-7)


def test_group_mass_capping_matches_the_oracle() -> None:
    # mean 1.625 > 1.2: kappa = 1.2 / 1.625; the second group's mean 1.175 is below the cap
    ratios = torch.tensor([0.5, 0.8, 1.2, 4.0, 0.9, 1.0, 1.1, 1.7], dtype=torch.float64)
    result = weights(GMCGRPO(0.2), ratios, groups=[0] * 4 + [1] * 4)
    assert result[:4] == pytest.approx([0.3692308, 0.5907692, 0.8861538, 2.9538462], abs=1e-7)
    assert result[4:] == pytest.approx([0.9, 1.0, 1.1, 1.7], abs=1e-12)


def test_group_mass_capping_does_not_overflow_and_skips_untrained_members() -> None:
    log_ratio = torch.tensor([[700.0], [0.0], [0.0], [-5.0], [0.0]], dtype=torch.float64)
    mask = torch.tensor([[True]] * 4 + [[False]])
    result = GMCGRPO(0.2).coefficients(log_ratio, mask, torch.ones(5), torch.zeros(5, dtype=torch.long))[:4, 0]
    assert result[0] == pytest.approx(4.8)  # 4 members * 1.2
    assert result[1] == pytest.approx(4.8 * math.exp(-700), rel=1e-9)


@pytest.mark.parametrize("objective", [SequenceTIS(), TokenTIS(), PPOClip(), TICGRPO(), GMCGRPO()])
def test_huge_log_ratios_give_finite_float32_weights(objective: Objective) -> None:
    log_ratio = torch.tensor([[700.0], [-700.0]])
    result = objective.coefficients(
        log_ratio, torch.ones(2, 1, dtype=torch.bool), torch.tensor([1.0, -1.0]), torch.tensor([0, 0])
    )
    assert result.isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SequenceTIS(0.0), r"objective\.init_args\.max_weight must be a finite number above 0, got 0\.0"),
        (lambda: TokenTIS(-1.0), "max_weight"),
        (lambda: SequenceTIS(math.nan), "max_weight"),
        (lambda: PPOClip(epsilon_low=1.5), "epsilon_low must be at most 1"),
        (lambda: PPOClip(epsilon_high=0.0), "epsilon_high"),
        (lambda: PPOClip(dual_clip=1.0), "dual_clip must be above 1"),
        (lambda: GMCGRPO(0.0), "epsilon"),
        (lambda: TICGRPO(mode="clip"), "mode must be mask or truncate"),  # type: ignore[arg-type]
        (lambda: check_aggregation("mean", None), r"model\.aggregation must be one of"),
        (lambda: check_aggregation("constant-length", None), "max_response_length must be a positive"),
        (lambda: check_aggregation("token-mean", 5), "max_response_length must be a positive"),
        (lambda: check_aggregation("constant-length", 0), "max_response_length must be a positive"),
    ],
)
def test_impossible_values_are_refused_by_key(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence-mean-token-mean", [1 / 20, 1 / 40]),  # 1 / (10 * 2), 1 / (10 * 4)
        ("token-mean", [1 / 50, 1 / 50]),
        ("sequence-mean-token-sum", [1 / 10, 1 / 10]),
        ("constant-length", [1 / 80, 1 / 80]),  # 1 / (10 * 8)
    ],
)
def test_token_scales_use_the_whole_batch(aggregation, expected: list[float]) -> None:  # type: ignore[no-untyped-def]
    length = 8 if aggregation == "constant-length" else None
    scales = token_scales(
        aggregation, torch.tensor([2, 4]), num_trajectories=10, num_trained_tokens=50, max_response_length=length
    )
    assert scales.tolist() == pytest.approx(expected, abs=1e-15)
