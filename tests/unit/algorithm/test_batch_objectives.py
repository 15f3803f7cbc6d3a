"""Objectives with a quantity of the batch in their weights: M2PO's bounds, and the proximal policy of decoupled PPO."""

import math

import pytest
import torch
from torch import Tensor

from lit_asyncrl.algorithm.losses import M2PO, DecoupledPPO, PPOClip

LOGS = torch.tensor([0.0, 0.1, -0.2, 0.5, 0.8], dtype=torch.float64)
POSITIVE = torch.ones(5)


@pytest.mark.parametrize(
    ("solver", "tau"),
    [
        # A > 0: harmful d^2 = .01, .25, .64, mean .3 > .04. Mean of min(d^2, x): .01 at x = .01, (.01 + .5) / 3 at .25
        ("breakpoint", 0.1),
        ("exact", 0.2345208),  # (.01 + 2 x) / 3 = .04: x = .055
    ],
)
def test_threshold_matches_the_oracle(solver, tau: float) -> None:  # type: ignore[no-untyped-def]
    assert M2PO(solver=solver).threshold(LOGS, POSITIVE) == pytest.approx(tau, abs=1e-7)


def test_bounds_are_the_threshold_s_or_the_floors() -> None:
    # tau = .1: e^.1 - 1 = .105171 and 1 - e^-.1 = .095163, both below their floors; 1e-5 nats are allowed for rounding
    assert M2PO().clip_bounds(LOGS, POSITIVE) == pytest.approx((0.7, 1.5))
    no_floors = M2PO(min_epsilon_low=0.0, min_epsilon_high=0.0)
    assert no_floors.clip_bounds(LOGS, POSITIVE) == pytest.approx((0.904837, 1.105171), abs=2e-5)


def test_a_harmful_token_is_one_that_a_clip_would_act_on() -> None:
    # A < 0: only d = -.2 is harmful, .04 < .05
    assert M2PO(budget=0.05).threshold(LOGS, -POSITIVE) is None
    assert M2PO(budget=0.03).threshold(LOGS, -POSITIVE) == 0.0  # no |d| keeps the budget
    assert M2PO(budget=0.03, solver="exact").threshold(LOGS, -POSITIVE) == pytest.approx(math.sqrt(0.03))
    assert M2PO().threshold(LOGS, 0 * POSITIVE) is None


def coefficients(objective, log_ratio: Tensor, advantages: Tensor, *more: Tensor) -> list[float]:  # type: ignore[no-untyped-def]
    mask = torch.ones(len(log_ratio), 1, dtype=torch.bool)
    index = torch.zeros(len(log_ratio), dtype=torch.long)
    return objective.coefficients(log_ratio[:, None], mask, advantages, index, *more)[:, 0].tolist()


def test_within_the_budget_nothing_is_clipped() -> None:
    assert coefficients(M2PO(budget=0.31), LOGS, POSITIVE) == pytest.approx(LOGS.exp().tolist())


def test_above_the_budget_the_weights_are_those_of_a_clip() -> None:
    assert coefficients(M2PO(), LOGS, POSITIVE) == coefficients(PPOClip(0.3, 0.5), LOGS, POSITIVE)
    assert coefficients(M2PO(), LOGS, POSITIVE)[3:] == [0, 0]


def test_the_second_moment_is_that_of_the_batch() -> None:
    part = LOGS[:3]  # alone: d = .1 is the only harmful token, within the budget
    assert coefficients(M2PO(), part, POSITIVE[:3]) == pytest.approx(part.exp().tolist())
    narrow = M2PO(min_epsilon_low=0.0, min_epsilon_high=0.05)
    bound = narrow.for_batch(LOGS, POSITIVE)
    assert coefficients(bound, LOGS, POSITIVE)[1:2] == pytest.approx([math.exp(0.1)])  # at the threshold, not beyond it
    assert coefficients(bound, torch.tensor([0.11]), torch.ones(1)) == [0]
    assert coefficients(narrow, torch.tensor([0.11]), torch.ones(1)) != [0]  # alone: within the budget


def test_decoupled_weight_matches_the_oracle() -> None:
    # log pi_behavior -1.2, log pi_prox -1.0, log pi -.9: w = e^.2 = 1.2214028, u = e^.1 = 1.1051709, both within bounds
    log_ratio, proximal = torch.tensor([0.3], dtype=torch.float64), torch.tensor([[0.2]], dtype=torch.float64)
    assert coefficients(DecoupledPPO(), log_ratio, torch.ones(1), proximal) == pytest.approx([1.2214028 * 1.1051709], abs=1e-6)
    # u = 1.105 > 1.1: flat for A > 0, not for A < 0
    assert coefficients(DecoupledPPO(0.1, 0.1), log_ratio, torch.ones(1), proximal) == [0]
    assert coefficients(DecoupledPPO(0.1, 0.1), log_ratio, -torch.ones(1), proximal) == pytest.approx([math.exp(0.3)])


@pytest.mark.parametrize("advantage", [1.3, -0.6])
@pytest.mark.parametrize("mode", ["mask", "truncate"])
def test_decoupled_weight_is_the_slope_of_its_surrogate(mode, advantage: float) -> None:  # type: ignore[no-untyped-def]
    proximal = torch.tensor([-0.5, 0.1, 0.4, 1.2, 0.9], dtype=torch.float64)
    log_ratio = proximal + torch.tensor([0.05, -0.4, 0.5, 0.1, -0.1], dtype=torch.float64)
    weight = proximal.exp()
    weight = torch.where(weight > 2.5, 0.0 if mode == "mask" else 2.5, weight)

    def surrogate(logs: Tensor) -> Tensor:
        ratio = (logs - proximal).exp()
        return weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)

    step = 1e-6
    slope = (surrogate(log_ratio + step) - surrogate(log_ratio - step)) / (2 * step) / advantage
    result = coefficients(DecoupledPPO(0.2, 0.3, 2.5, mode), log_ratio, torch.full((5,), advantage), proximal[:, None])
    assert result == pytest.approx(slope.tolist(), abs=1e-8)


def test_a_proximal_policy_at_the_behavior_policy_gives_ppo() -> None:
    nothing = torch.zeros(5, 1, dtype=torch.float64)
    for advantages in (POSITIVE, -POSITIVE):
        assert coefficients(DecoupledPPO(), LOGS, advantages, nothing) == coefficients(PPOClip(), LOGS, advantages)
