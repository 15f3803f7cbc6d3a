"""Bias and variance of gradients from samples, by hand."""

import pytest
import torch
from study_bias import Moments, fresh_norm, relative_bias


def moments(*vectors: list[float]) -> Moments:
    of = Moments()
    for vector in vectors:
        of.add(torch.tensor(vector, dtype=torch.float64))
    return of


def test_the_variance_is_summed_over_coordinates() -> None:
    of = moments([0.0, 1.0], [2.0, 1.0], [4.0, 4.0])
    assert of.mean.tolist() == [2.0, 2.0]
    assert of.variance == pytest.approx(7.0)  # (4 + 0 + 4) / 2 + (1 + 1 + 4) / 2


def test_bias_is_the_distance_where_nothing_varies() -> None:
    found = relative_bias(torch.tensor([0.0, 4.0]), noise=0.0, norm=3.0)
    assert (found["bias"], found["noise"]) == pytest.approx((1.33, 0.0))  # 4 / 3


def test_what_sampling_adds_to_the_distance_is_taken_off() -> None:
    found = relative_bias(torch.tensor([0.0, 2.0]), noise=1.0, norm=3.0)
    assert (found["bias"], found["noise"]) == pytest.approx((0.577, 0.333))  # sqrt(4 - 1) / 3 and sqrt(1) / 3


def test_a_distance_within_the_noise_is_no_bias() -> None:
    assert relative_bias(torch.tensor([0.1]), noise=1.0, norm=3.0)["bias"] == 0.0


def test_the_fresh_norm_is_that_of_the_expectation() -> None:
    assert fresh_norm(moments([2.0, 2.0], [4.0, 2.0])) == pytest.approx(12**0.5)  # 9 + 4 - 2 / 2
