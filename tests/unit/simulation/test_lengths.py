"""Distributions of response lengths."""

import numpy as np
import pytest

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.simulation.lengths import MeasuredLengths, ResponseLengths, lengths_with_mean, summarize


@pytest.mark.parametrize("shape", ["constant", "uniform", "exponential", "lognormal"])
def test_every_shape_has_the_asked_mean(shape):
    drawn = ResponseLengths(shape, 200.0).draw(np.random.default_rng(0), (1000, 100))
    assert drawn.mean() == pytest.approx(200.0, rel=0.01)


def test_tail_ratios_are_those_of_order_statistics():
    # longest of 8 in units of the mean: uniform .5 + 8/9; exponential 1 + 1/2 + ... + 1/8
    assert summarize(ResponseLengths("uniform", 50.0), 8).tail_ratio == pytest.approx(1.38889, rel=0.003)
    assert summarize(ResponseLengths("exponential", 50.0), 8).tail_ratio == pytest.approx(2.717857, rel=0.003)


def test_percentile_is_that_of_the_exponential():
    # -ln(.01) = 4.605 means
    assert summarize(ResponseLengths("exponential", 100.0), 4).p99_tokens == pytest.approx(460.5, rel=0.01)


def test_a_budget_cuts_longer_responses():
    drawn = ResponseLengths("exponential", 100.0, max_tokens=150.0).draw(np.random.default_rng(0), (1000,))
    assert drawn.max() == 150.0


def test_a_mean_after_the_cut_is_met():
    # exponential of scale s cut at L has the mean s (1 - exp(-L/s)): for s = 100, L = 150 that is 77.687
    lengths = lengths_with_mean("exponential", 77.687, 150.0)
    assert lengths.mean_tokens == pytest.approx(100.0, rel=0.02)


def test_a_mean_above_the_budget_is_refused():
    with pytest.raises(ConfigurationError, match="mean_tokens must be at most the response budget of 16"):
        lengths_with_mean("exponential", 20.0, 16)


def test_measured_lengths_are_drawn_again():
    drawn = MeasuredLengths([3, 5]).draw(np.random.default_rng(0), (200,))
    assert set(drawn.tolist()) == {3.0, 5.0}


def test_no_measured_length_is_refused():
    with pytest.raises(ConfigurationError, match="at least one length"):
        MeasuredLengths([])
