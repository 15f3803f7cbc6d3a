"""Closed forms of staleness: the published numbers, and values worked out by hand."""

import pytest

from lit_asyncrl.algorithm.staleness_forms import (
    generation_staleness_form,
    throughput_ratio,
    waiting_staleness_finite,
    waiting_staleness_form,
    waiting_staleness_locked,
)

UNIFORM = 1.38889  # longest of 8 uniform lengths in [.5, 1.5]: .5 + 8/9
EXPONENTIAL = 2.717857  # longest of 8 exponential lengths: 1 + 1/2 + ... + 1/8


def test_throughput_ratio_is_generated_over_trained_responses():
    # 128 slots at 2 s a response: 64 a second; 32 responses in 1 s: 32 a second
    assert throughput_ratio(128, 2.0, 32, 1.0) == 2.0
    assert throughput_ratio(128, 2.0, 32, 0.5) == 1.0  # twice as many are trained


@pytest.mark.parametrize(
    ("slots", "batch", "queue", "rho", "tail", "before", "waiting"),
    [
        (128, 128, 1, 0.6, UNIFORM, 1.389, 0.600),
        (256, 128, 1, 0.6, UNIFORM, 2.778, 0.600),
        (128, 256, 1, 0.8, UNIFORM, 0.694, 0.800),
        (128, 128, 2, 1.5, UNIFORM, 0.926, 1.500),
        (128, 128, 1, 1.5, UNIFORM, 0.926, 0.833),
        (128, 128, 4, 1.5, UNIFORM, 0.926, 2.833),
        (128, 128, 1, 3.0, UNIFORM, 0.463, 0.667),
        (128, 128, 1, 0.9, EXPONENTIAL, 2.718, 0.900),
        (256, 128, 1, 0.6, EXPONENTIAL, 5.436, 0.600),
        (128, 128, 2, 1.15, EXPONENTIAL, 2.363, 1.804),
        (128, 128, 1, 1.5, EXPONENTIAL, 1.812, 0.833),
    ],
)
def test_smoothed_forms_give_the_table_of_the_analysis(slots, batch, queue, rho, tail, before, waiting):
    assert generation_staleness_form(slots, batch, rho, tail) == pytest.approx(before, abs=6e-4)
    assert waiting_staleness_form(rho, queue) == pytest.approx(waiting, abs=6e-4)


@pytest.mark.parametrize(
    ("slots", "batch", "queue", "rho", "tail", "total"),
    [(120, 240, 2, 0.63, 1.42, 1.340), (240, 120, 2, 0.92, 1.43, 3.780), (128, 128, 2, 1.07, 1.44, 3.248)],
)
def test_smoothed_forms_give_the_published_predictions(slots, batch, queue, rho, tail, total):
    form = generation_staleness_form(slots, batch, rho, tail) + waiting_staleness_form(rho, queue)
    assert form == pytest.approx(total, abs=6e-4)


@pytest.mark.parametrize(
    ("queue", "rho", "expected"),
    [
        (1, 1.5, 1.0),  # a in [0, .667]
        (2, 1.5, 1.5),  # a in [.667, 1.333]: half of it below 1, half below 2
        (4, 1.5, 3.0),  # a in [2, 2.667]
        (2, 1.15, 1.85),  # a in [.870, 1.739]: .15 of it below 1
        (1, 3.0, 1.0),  # a in [0, .333]
        (2, 2.0, 1.0),  # a in [.5, 1]
    ],
)
def test_phase_locked_waiting_rounds_each_age_up(queue, rho, expected):
    assert waiting_staleness_locked(rho, queue) == pytest.approx(expected, abs=1e-9)


def test_finite_groups_round_the_rollout_bound_form_down():
    # 16 groups per update: .6 * 16 = 9.6, so 9 of 16 arrive while the previous update still runs
    assert waiting_staleness_finite(0.6, 16) == 9 / 16


def test_a_train_bound_queue_needs_a_capacity():
    with pytest.raises(ValueError, match="queue_updates must be given"):
        waiting_staleness_form(1.5)


def test_at_a_ratio_of_1_the_queue_s_capacity_is_needed():
    assert waiting_staleness_form(1.0, 2.0) == 2.0  # (2 * 2 + 1 - 1) / 2
    with pytest.raises(ValueError, match="queue_updates must be given"):
        waiting_staleness_form(1.0)
