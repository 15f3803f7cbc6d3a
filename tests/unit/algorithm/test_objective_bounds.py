"""What objectives do exactly at their bounds, what they say of themselves, and which arguments they take and refuse."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_asyncrl.algorithm.losses import (
    CISPO,
    GMCGRPO,
    GSPO,
    M2PO,
    SAPO,
    TICGRPO,
    DecoupledPPO,
    IcePop,
    PPOClip,
    Reinforce,
    SequenceMask,
    SequenceTIS,
    TokenMIS,
    TokenTIS,
    check_aggregation,
)
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import Objective

LOG_LOW, LOG_HIGH = torch.tensor(-0.4, dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64)
LOW, HIGH = float(LOG_LOW.exp()), float(LOG_HIGH.exp())  # .67 and 1.49: 1 - (1 - LOW) and 1 + (HIGH - 1) are exact


def weight(objective: Objective, log_ratio: Tensor, advantage: float = 1.0) -> float:
    """omega of one one-token trajectory."""
    arguments = (torch.ones(1, 1, dtype=torch.bool), torch.tensor([advantage]), torch.zeros(1, dtype=torch.long))
    return float(objective.coefficients(log_ratio.view(1, 1), *arguments))


@pytest.mark.parametrize(
    ("objective", "log_ratio", "advantage"),
    [
        (TokenMIS(LOW, 2.0), LOG_LOW, 1.0),
        (TokenMIS(0.5, HIGH), LOG_HIGH, 1.0),
        (PPOClip(1 - LOW, 0.2), LOG_LOW, -1.0),
        (PPOClip(0.2, HIGH - 1), LOG_HIGH, 1.0),
        (PPOClip(0.2, 0.2, dual_clip=HIGH), LOG_HIGH, -1.0),
        (DecoupledPPO(max_weight=HIGH), LOG_HIGH, 1.0),
        (SequenceMask(LOW, None, weight="token_ratio"), LOG_LOW, 1.0),
        (SequenceMask(None, HIGH, weight="token_ratio"), LOG_HIGH, 1.0),
    ],
)
def test_a_ratio_of_exactly_the_bound_is_trained(objective: Objective, log_ratio: Tensor, advantage: float) -> None:
    if isinstance(objective, SequenceMask):  # compares logs, and the log of a rounded exponential is not what it came from
        bound = objective.log_lower if log_ratio < 0 else objective.log_upper
        log_ratio = torch.tensor(bound, dtype=torch.float64)
    assert weight(objective, log_ratio, advantage) == float(log_ratio.exp())


@pytest.mark.parametrize("advantage", [0.0, 0.5])
def test_only_advantages_below_0_are_clipped_from_below(advantage: float) -> None:
    assert weight(PPOClip(0.2, 0.2), LOG_LOW, advantage) == LOW
    assert weight(PPOClip(0.2, 0.2), LOG_HIGH, advantage) == 0.0
    assert weight(SequenceMask(0.9, None, negative_only=True), LOG_LOW, advantage) == 1.0


def test_the_gate_of_an_advantage_of_0_is_that_of_negative_ones() -> None:
    objective = SAPO(tau_positive=1.0, tau_negative=3.0)
    assert weight(objective, LOG_HIGH, 0.0) == weight(objective, LOG_HIGH, -1.0) != weight(objective, LOG_HIGH, 1.0)


def test_without_harm_a_batch_has_no_bounds() -> None:
    assert M2PO().clip_bounds(torch.tensor([0.1]), torch.tensor([-1.0])) == (0.0, math.inf)
    # the mean of d^2, .25, is the budget
    assert M2PO(budget=0.25).threshold(torch.tensor([0.5]), torch.tensor([1.0])) is None


def test_a_threshold_that_uses_the_budget_up_is_kept() -> None:
    # d^2 = .25, 1: mean .625 > .25, and min(d^2, .25) = .25, .25 has the mean .25
    assert M2PO(budget=0.25).threshold(torch.tensor([0.5, 1.0]), torch.tensor([1.0, 1.0])) == 0.5


def test_the_upper_bound_of_a_huge_threshold_is_that_of_e_to_the_700() -> None:
    # d^2 = 800^2 twice and 801^2: the mean of min(d^2, 800^2) is the budget
    logs = torch.tensor([800.0, 800.0, 801.0], dtype=torch.float64)
    assert M2PO(budget=640000.0).clip_bounds(logs, torch.ones(3)) == (0.0, 1.0 + math.expm1(700.0))


@pytest.mark.parametrize(
    ("objective", "flags"),
    [
        (Reinforce(), {"trajectory_level"}),
        (TokenTIS(), set()),
        (CISPO(), set()),
        (TokenMIS(), set()),
        (IcePop(), set()),
        (SequenceTIS(), {"trajectory_level"}),
        (SequenceMask(), {"trajectory_level"}),
        (SequenceMask(weight="token_ratio"), set()),
        (SequenceMask(negative_only=True), {"trajectory_level", "uses_advantages"}),
        (PPOClip(), {"uses_advantages"}),
        (GSPO(), {"trajectory_level", "uses_advantages"}),
        (SAPO(), {"uses_advantages"}),
        (DecoupledPPO(), {"uses_advantages", "needs_batch_logprobs"}),
        (M2PO(), {"uses_advantages", "needs_batch_logprobs"}),
        (TICGRPO(), {"trajectory_level"}),
        (GMCGRPO(), {"trajectory_level", "needs_whole_groups"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Objective) else "",
)
def test_objectives_say_what_they_need(objective: Objective, flags: set[str]) -> None:
    known = ("trajectory_level", "uses_advantages", "needs_batch_logprobs", "needs_whole_groups")
    assert {name for name in known if getattr(objective, name, False)} == flags


def test_defaults_are_those_of_the_papers_and_their_code() -> None:
    assert SequenceTIS().max_weight == 8.0
    assert GSPO().bounds == (1.0 - 3e-4, 1.0 + 4e-4)
    assert PPOClip().bounds == DecoupledPPO().bounds == (0.8, 1.2)
    assert DecoupledPPO().max_weight == 5.0
    assert (TokenTIS().min_weight, TokenTIS().max_weight) == (0.0, 2.0)
    assert (IcePop().lower, IcePop().upper) == (0.5, 5.0)
    assert (SAPO().tau_positive, SAPO().tau_negative) == (1.0, 1.05)
    assert (M2PO().budget, M2PO().min_epsilon_low, M2PO().min_epsilon_high) == (0.04, 0.3, 0.5)
    assert TICGRPO().epsilon == GMCGRPO().epsilon == 0.2


@pytest.mark.parametrize(
    "make",
    [
        lambda: TokenTIS(2.0, min_weight=2.0),
        lambda: TokenMIS(0.0, 2.0),
        lambda: PPOClip(dual_clip=1.5),
        lambda: PPOClip(epsilon_low=1.0),
        lambda: M2PO(min_epsilon_low=1.0),
        lambda: M2PO(min_epsilon_low=0.0, min_epsilon_high=0.0),
        lambda: SequenceMask(0.5, None),
        lambda: check_aggregation("constant-length", 1),
    ],
)
def test_values_at_the_edge_are_taken(make: Callable[[], object]) -> None:
    make()


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: TokenTIS(0.0), "max_weight must be a finite"),
        (lambda: CISPO(epsilon_low=0.0), "epsilon_low must be a finite"),
        (lambda: TokenMIS(0.0, 0.0), "upper must be a finite"),
        (lambda: TokenMIS(2.0, 2.0), r"lower must be in \[0, upper = 2.0\)"),
        (lambda: SequenceMask(-1.0, None), "lower must be a finite"),
        (lambda: SequenceMask(None, 0.0), "upper must be a finite"),
        (lambda: SequenceMask(2.0, 2.0), "lower must be below upper"),
        (lambda: SequenceMask(weight="mean"), "weight must be one of"),  # type: ignore[arg-type]
        (lambda: SAPO(tau_positive=0.0), "tau_positive must be a finite"),
        (lambda: DecoupledPPO(epsilon_low=2.0), "epsilon_low must be at most 1"),
        (lambda: DecoupledPPO(mode="clip"), "mode must be one of"),  # type: ignore[arg-type]
        (lambda: M2PO(min_epsilon_low=-0.1), "min_epsilon_low must be at least 0"),
        (lambda: M2PO(min_epsilon_high=-0.1), "min_epsilon_high must be at least 0"),
        (lambda: M2PO(solver="newton"), "solver must be one of"),  # type: ignore[arg-type]
        (lambda: TICGRPO(epsilon=0.0), "epsilon must be a finite"),
        (lambda: check_aggregation("token-mean", 0), "max_response_length must be a positive"),
        (lambda: check_aggregation("constant-length", None), "max_response_length must be a positive"),
    ],
)
def test_values_beyond_it_are_refused_by_their_own_key(make: Callable[[], object], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        make()


def group_weights(logs: list[list[float]], mask: list[list[bool]], groups: list[int]) -> Any:
    arguments = (torch.tensor(mask), torch.ones(len(groups)), torch.tensor(groups))
    return GMCGRPO(0.2).coefficients(torch.tensor(logs, dtype=torch.float64), *arguments)[:, 0].tolist()


def test_a_member_counts_in_its_group_s_mass_if_any_of_its_tokens_is_trained() -> None:
    # weights 1 (the untrained 9.0 counts not) and 3: mean 2, kappa = 1.2 / 2
    result = group_weights([[0.0, 9.0], [math.log(3.0), 0.0]], [[True, False], [True, True]], [0, 0])
    assert result == pytest.approx([0.6, 1.8])


def test_a_group_without_trained_members_leaves_the_others_their_weights() -> None:
    result = group_weights([[0.0], [0.1]], [[False], [True]], [0, 1])
    assert result[1] == pytest.approx(math.exp(0.1))
