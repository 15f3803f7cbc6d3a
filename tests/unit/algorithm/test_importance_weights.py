"""Log-ratios, effective sample size and the weights' diagnostics."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_asyncrl.algorithm.weights import (
    effective_sample_size,
    full_log_weights,
    geometric_log_ratios,
    k3_sum,
    log_ratios,
    sequence_log_weights,
    weight_diagnostics,
)


@pytest.mark.parametrize(
    ("weights", "ratio"),
    [
        ([1, 1, 4], 2 / 3),  # 6^2 / 18 = 2
        ([1, 1, 1, 1], 1.0),
        ([0, 0, 1], 1 / 3),
        ([0.001, 0.001, 0.001, 8], 0.2501875),
        ([1, 1, 20], 0.4013267),  # 22^2 / 402 / 3
    ],
)
def test_ess_ratio_matches_the_oracle(weights: list[float], ratio: float) -> None:
    ess, ess_ratio = effective_sample_size(torch.tensor(weights, dtype=torch.float64).log())
    assert float(ess_ratio) == pytest.approx(ratio, abs=1e-7)
    assert float(ess) == pytest.approx(ratio * len(weights), abs=1e-6)


def test_clipped_ess_counts_large_weights_as_the_cap() -> None:
    # (1 + 1 + 8)^2 / 66 / 3
    ratio = effective_sample_size(torch.tensor([1.0, 1, 20]).log(), max_weight=8.0)[1]
    assert float(ratio) == pytest.approx(0.5050505, abs=1e-7)


def test_ess_of_huge_log_weights_stays_finite() -> None:
    for sign in (1, -1):
        ratio = effective_sample_size(torch.tensor([700.0, 0.0, 0.0, -5.0]) * sign)[1]
        assert 0.25 <= float(ratio) <= 1.0
    assert float(effective_sample_size(torch.tensor([700.0, 0.0, 0.0, -5.0]))[1]) == pytest.approx(0.25)
    assert float(effective_sample_size(torch.tensor([-torch.inf, -torch.inf]))[0]) == 0.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-700, 700), min_size=1, max_size=30), st.floats(-300, 300))
def test_ess_lies_between_one_and_n_and_ignores_a_common_factor(logs: list[float], shift: float) -> None:
    ess = float(effective_sample_size(torch.tensor(logs, dtype=torch.float64))[0])
    assert 1.0 - 1e-9 <= ess <= len(logs) + 1e-9
    shifted = float(effective_sample_size(torch.tensor(logs, dtype=torch.float64) + shift)[0])
    assert shifted == pytest.approx(ess, rel=1e-9)


def test_ess_ratio_of_lognormal_weights_tends_to_its_population_value() -> None:
    for sigma in (0.5, 1.0):
        logs = torch.randn(200_000, dtype=torch.float64) * sigma - sigma**2 / 2
        assert float(effective_sample_size(logs)[1]) == pytest.approx(math.exp(-(sigma**2)), rel=0.03)


def test_log_ratios_ignore_whatever_stands_in_masked_slots() -> None:
    mask = torch.tensor([[False, True, True, False]])
    logprobs = torch.tensor([[float("nan"), -1.0, -0.5, float("inf")]])
    behavior = torch.tensor([[float("inf"), -1.2, -0.4, float("nan")]])
    ratio = log_ratios(logprobs, behavior, mask)
    assert ratio[0].tolist() == pytest.approx([0, 0.2, -0.1, 0], abs=1e-6)
    assert float(sequence_log_weights(ratio, mask)) == pytest.approx(0.1, abs=1e-6)


RATIO = torch.tensor([[9.0, 0.2, -0.1], [9.0, 9.0, 0.4], [9.0, 9.0, 9.0]])
MASK = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])


def test_geometric_ratios_are_means_over_trained_tokens_and_0_without_any() -> None:
    # (.2 - .1) / 2, .4 / 1
    assert geometric_log_ratios(RATIO, MASK).tolist() == pytest.approx([0.05, 0.4, 0.0])


def test_the_full_weight_is_that_of_the_kind_of_ratio() -> None:
    assert full_log_weights("one", RATIO, MASK).tolist() == [[0.0] * 3] * 3
    assert full_log_weights("token", RATIO, MASK) is RATIO
    assert full_log_weights("product", RATIO, MASK).flatten().tolist() == pytest.approx([0.1, 0.4, 0.0])
    assert full_log_weights("geometric", RATIO, MASK).flatten().tolist() == pytest.approx([0.05, 0.4, 0.0])


def test_a_weight_of_exactly_the_cap_is_not_clipped() -> None:
    assert (
        weight_diagnostics(torch.tensor([math.log(8.0)], dtype=torch.float64), torch.tensor([1]), 8.0)[
            "sequence_clipped_fraction"
        ]
        == 0
    )
    assert weight_diagnostics(torch.tensor([3.0]), torch.tensor([1]))["sequence_clipped_fraction"] == 0.0  # no cap


def test_diagnostics_are_means_over_trajectories() -> None:
    numbers = weight_diagnostics(torch.tensor([math.log(16.0), 0.0]), torch.tensor([2, 5]), max_weight=8.0)
    assert numbers["sequence_mean"] == pytest.approx(8.5)
    assert numbers["sequence_max"] == pytest.approx(16.0)
    assert numbers["sequence_clipped_fraction"] == 0.5
    assert numbers["geometric_ratio_mean"] == pytest.approx(2.5)  # (16^(1/2) + 1) / 2
    assert numbers["ess_ratio"] == pytest.approx(17**2 / 257 / 2)
    assert numbers["ess_ratio_clipped"] == pytest.approx(9**2 / 65 / 2)


def test_diagnostics_of_overflowing_weights_are_finite() -> None:
    numbers = weight_diagnostics(torch.tensor([800.0, -800.0]), torch.tensor([1, 1]), max_weight=8.0)
    assert all(math.isfinite(value) for value in numbers.values())
    assert numbers["sequence_max"] == pytest.approx(math.exp(700.0))
    assert numbers["geometric_ratio_mean"] == pytest.approx(math.exp(700.0) / 2)


def test_k3_sums_over_trained_tokens() -> None:
    ratio, mask = torch.tensor([[0.5, 9.0]]), torch.tensor([[True, False]])
    assert float(k3_sum(ratio, mask)) == pytest.approx(math.exp(0.5) - 1.5)
    assert float(k3_sum(torch.tensor([[800.0]]), mask[:, :1])) == pytest.approx(math.exp(700.0))
