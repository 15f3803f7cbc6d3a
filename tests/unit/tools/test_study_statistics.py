"""The study's definitions on numbers computed by hand."""

from typing import Any

import numpy as np
import pytest
import study_statistics as st


def run(curve: list[list[float]], **fields: Any) -> dict[str, Any]:
    return {"seed": 1, "accuracy": curve[-1][1], "curve": curve, **fields}


HEALTHY = [[0, 0.5], [20, 0.6], [40, 0.7], [60, 0.8]]
FALLEN = [[0, 0.5], [20, 0.6], [40, 0.2], [60, 0.1], [80, 0.1]]


def test_a_collapse_is_dated_by_the_first_of_three_low_evaluations() -> None:
    assert st.collapse_update(FALLEN) == 40  # 0.2, 0.1, 0.1 are all below 0.5 * 0.6


def test_two_low_evaluations_are_no_collapse() -> None:
    assert st.collapse_update([*FALLEN[:4], [80, 0.31], [100, 0.1]]) is None


def test_exactly_half_of_the_best_is_no_collapse() -> None:
    assert st.collapse_update([[0, 0.5], [20, 0.25], [40, 0.25], [60, 0.25]]) is None


def test_the_warm_start_counts_as_the_best_so_far() -> None:
    assert st.collapse_update([[0, 0.5], [20, 0.1], [40, 0.1], [60, 0.1]]) == 20


def test_the_alarm_threshold_is_the_quantile_of_the_block_maxima_of_synchronous_runs() -> None:
    runs = [run(HEALTHY, max_grad_norm=[float(i) for i in range(low, high)]) for low, high in ((0, 51), (51, 101))]
    assert st.alarm_threshold(runs, "max_grad_norm") == pytest.approx(99.0)  # 0 to 100: the 99th percentile is 99


def test_the_threshold_of_the_kl_is_at_least_what_counts_as_healthy() -> None:
    assert st.alarm_threshold([run(HEALTHY, max_kl=[1e-9, 2e-9])], "max_kl") == st.KL_HEALTHY


def test_there_is_no_threshold_without_a_synchronous_run() -> None:
    assert st.alarm_threshold([], "max_grad_norm") is None


def test_the_threshold_looks_at_a_synchronous_run_up_to_its_collapse() -> None:
    fallen = run(FALLEN, max_grad_norm=[1.0, 1.0, 1.0, 1.0, 500.0, 500.0])  # it collapses at update 40
    assert st.alarm_threshold([fallen], "max_grad_norm") == 1.0


def test_blocks_in_a_row_give_an_alarm_with_the_last_of_them() -> None:
    assert st.block_alarm([9.0, 9.0, 1.0, 9.0, 9.0, 9.0], 2.0, in_a_row=3) == 60


def test_blocks_before_the_lag_give_no_alarm() -> None:
    maxima = [9.0] * 10 + [1.0, 9.0]
    assert st.block_alarm(maxima, 2.0, start=100) == 120


@pytest.mark.parametrize(
    ("collapse", "alarm", "lead"), [(40, 12, 28), (40, 40, 0), (40, 50, None), (None, 12, None), (40, None, None)]
)
def test_the_lead_is_from_the_alarm_to_the_collapse(collapse: int | None, alarm: int | None, lead: int | None) -> None:
    assert st.lead_time(collapse, alarm) == lead


def test_the_window_ends_with_the_collapse() -> None:
    assert st.window(run(FALLEN, min_ess=[0.9, 0.8, 0.3, 0.1, 0.9, 0.9]), "min_ess", 0) == [0.9, 0.8, 0.3, 0.1]


def test_the_window_is_of_the_first_hundred_lagged_updates() -> None:
    assert st.window(run(HEALTHY, min_ess=[float(i) for i in range(30)]), "min_ess", 100) == [float(i) for i in range(10, 20)]


def test_the_ranking_is_perfect_where_every_collapsing_run_is_above_every_other() -> None:
    assert st.ranking_quality([[2.0], [3.0]], [[1.0], [0.0]]) == 1.0


def test_a_pair_is_looked_at_for_as_long_as_the_collapsing_run_lasts() -> None:
    # 2 against the first block of the other, 1, and not against its peak, 5, which comes later
    assert st.ranking_quality([[2.0]], [[1.0, 5.0]]) == 1.0


def test_noise_ranks_like_chance_however_early_the_collapse() -> None:
    draws = np.random.default_rng(0).random((400, 10))
    fallen, standing = [list(row[:2]) for row in draws[:200]], [list(row) for row in draws[200:]]
    found = st.ranking_quality(fallen, standing)
    assert found is not None and abs(found - 0.5) < 0.08  # one standard error: sqrt((200 + 200 + 1) / (12 * 200 * 200)) = 0.029


def test_the_ranking_needs_both_kinds() -> None:
    assert st.ranking_quality([[1.0], [2.0]], []) is None


def test_equal_differences_have_an_interval_of_one_point() -> None:
    assert st.paired_bootstrap([0.2, 0.2, 0.2]) == pytest.approx((0.2, 0.2))


def test_the_interval_of_two_differences_spans_them() -> None:
    # means of two draws from {0, 1}: 0 with 1/4, 0.5 with 1/2, 1 with 1/4; both 2.5 % tails lie inside the outer quarters
    assert st.paired_bootstrap([0.0, 1.0]) == (0.0, 1.0)


def test_differences_are_of_the_same_seed() -> None:
    left = [{"seed": 1, "accuracy": 0.9}, {"seed": 2, "accuracy": 0.5}, {"seed": 3, "accuracy": 0.1}]
    right = [{"seed": 2, "accuracy": 0.4}, {"seed": 1, "accuracy": 0.2}]
    assert st.paired_differences(left, right) == pytest.approx([0.7, 0.1])


def test_a_rate_is_stable_at_eighty_percent_of_the_reference() -> None:
    runs = [run([[0, 0.5], [20, a]]) for a in (0.72, 0.8, 0.9)]
    assert st.is_stable(runs, 1.0)  # the median is 0.8
    assert not st.is_stable(runs, 1.01)


def test_a_rate_with_a_collapsed_run_is_not_stable() -> None:
    assert not st.is_stable([run(HEALTHY), run(HEALTHY), run(FALLEN)], 0.5)


def test_the_best_rate_is_that_of_the_highest_mean() -> None:
    def of(*accuracies: float) -> list[dict[str, Any]]:
        return [run([[0, 0.5], [20, a]]) for a in accuracies]

    # means 0.73, 0.63, 0.4: means are compared, and the median of the second, 0.9, hides its collapse
    assert st.best_rate({1e-4: of(0.7, 0.8, 0.7), 3e-4: of(0.1, 0.9, 0.9), 6e-4: of(0.9, 0.1, 0.2)}) == 1e-4


def test_what_follows_a_collapse_is_left_out_of_a_mean() -> None:
    assert st.healthy_mean(run(FALLEN, cosine=[0.1, 0.2, 0.3, 0.4, 9.0, 9.0]), "cosine") == pytest.approx(0.25)


def test_accuracy_at_a_time_is_interpolated_from_the_warm_start_on() -> None:
    one = run([[0, 0.5], [20, 0.7], [40, 0.9]], seconds=[10.0, 20.0])
    assert st.accuracy_at(one, "seconds", 5.0) == pytest.approx(0.6)
    assert st.accuracy_at(one, "seconds", 15.0) == pytest.approx(0.8)
    assert st.accuracy_at(one, "seconds", 99.0) == pytest.approx(0.9)
