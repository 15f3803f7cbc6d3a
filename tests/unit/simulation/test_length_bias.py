"""What samplers do to lengths when all reject the same share: PACE, total staleness and the age of the oldest token."""

import functools

import pytest
import torch

from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.ranking import MaxAgeSampler, TotalStalenessSampler
from lit_asyncrl.simulation.lengths import ResponseLengths
from lit_asyncrl.simulation.settings import SimulationSettings, saturated
from lit_asyncrl.simulation.simulator import simulate

torch.set_num_threads(1)  # tensors of a few entries

SHAPES = ["exponential", "lognormal"]
SEEDS = [0, 1]


@functools.cache
def run(make_sampler, shape, seed, forgetting_nats=0.1):
    """256 slots, 16 groups of 8 per update, generation 1.22 times as fast as training: 1 - 1/1.22 = 18 % are too many."""
    settings = SimulationSettings(
        num_slots=256,
        token_s=0.01,
        train_s=1.22 * 128 / 256,
        lengths=ResponseLengths(shape, 100.0, sigma=0.7),
        forgetting_nats=forgetting_nats,
        seed=seed,
    )
    return simulate(saturated(settings), make_sampler(), num_updates=200, warmup_updates=40)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make_sampler", [PaceSampler, TotalStalenessSampler, MaxAgeSampler])
def test_the_rejected_share_is_the_surplus_whatever_the_rule(make_sampler, shape, seed):
    assert 0.15 < run(make_sampler, shape, seed).rejected_share < 0.25


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make_sampler", [PaceSampler, TotalStalenessSampler, MaxAgeSampler])
def test_ranking_by_what_generation_took_makes_trained_responses_shorter(make_sampler, shape, seed):
    assert run(make_sampler, shape, seed).length_bias < -0.02


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_pace_has_at_most_four_fifths_of_the_bias_of_total_staleness(shape, seed):
    pace, total = (abs(run(sampler, shape, seed).length_bias) for sampler in (PaceSampler, TotalStalenessSampler))
    assert pace <= 0.8 * total


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_pace_has_at_most_seven_tenths_of_the_bias_of_the_oldest_token(shape, seed):
    pace, oldest = (abs(run(sampler, shape, seed).length_bias) for sampler in (PaceSampler, MaxAgeSampler))
    assert pace <= 0.7 * oldest


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_pace_does_not_bias_lengths_when_no_prefix_is_forgotten(shape, seed):
    assert abs(run(PaceSampler, shape, seed, forgetting_nats=0.0).length_bias) < 0.02
