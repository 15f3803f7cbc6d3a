"""The counts behind a run's summary: summed over batches and sessions, and what they say of who waited for whom."""

from __future__ import annotations

import pytest

from lit_asyncrl.callbacks.totals import RunTotals
from lit_asyncrl.types import TrainBatch


def batch(trajectories: int, tokens: int, age_mean: float, age_max: float, mixed: float) -> TrainBatch:
    stats = {"pool/policy_age_mean": age_mean, "pool/policy_age_max": age_max, "pool/mixed_version_share": mixed}
    return TrainBatch([], trajectories, tokens, stats)


def two_batches() -> RunTotals:
    totals = RunTotals()
    totals.count(batch(4, 10, 1.0, 2.0, 0.5), 0.8)
    totals.count(batch(12, 30, 3.0, 5.0, 0.25), 0.6)
    return totals


def test_means_are_over_tokens_batches_and_trajectories():
    means = two_batches().plus({"train_s": 20.0}).means()
    assert means["policy_age_mean"] == 2.5  # (10 * 1 + 30 * 3) / 40
    assert means["policy_age_max"] == 5.0
    assert means["ess_ratio_mean"] == pytest.approx(0.7)  # (0.8 + 0.6) / 2
    assert means["mixed_version_share"] == 0.3125  # (4 * 0.5 + 12 * 0.25) / 16
    assert means["trained_tokens_per_s"] == 2.0  # 40 / 20


def test_a_run_in_two_sessions_has_the_counts_of_one():
    whole = two_batches().plus({"train_s": 8.0, "trainer_waited_s": 2.0, "engine_restarts": 1})
    first = RunTotals()
    first.count(batch(4, 10, 1.0, 2.0, 0.5), 0.8)
    saved = first.plus({"train_s": 3.0, "trainer_waited_s": 1.5, "engine_restarts": 1}).state_dict()
    second = RunTotals(**saved)
    second.count(batch(12, 30, 3.0, 5.0, 0.25), 0.6)
    assert second.plus({"train_s": 5.0, "trainer_waited_s": 0.5, "engine_restarts": 0}) == whole


def test_what_a_session_has_spent_is_not_counted_twice():
    totals = RunTotals()
    for seconds in (1.0, 2.0):  # two checkpoints of one session
        assert totals.plus({"train_s": seconds}).train_s == seconds


def test_a_run_without_an_update_has_no_means_but_zeros():
    assert set(RunTotals().means().values()) == {0.0}


@pytest.mark.parametrize(
    ("spent", "rejected", "hint"),
    [
        ({"trainer_waited_s": 4.0}, 0.0, "generation-bound: the trainer waited 40%"),
        # 40 % waited, 35 % of it for an engine that had died: 5 % are left, which is no bound
        ({"trainer_waited_s": 4.0, "engine_down_s": 3.5, "engine_restarts": 1}, 0.0, "the engine was started anew once, and"),
        ({"trainer_waited_s": 4.0, "engine_down_s": 3.5, "engine_restarts": 3}, 0.0, "started anew 3 times, and missed for 35%"),
        # 30 % are left
        ({"trainer_waited_s": 4.0, "engine_down_s": 1.0, "engine_restarts": 1}, 0.0, "generation-bound: the trainer waited 30%"),
        # groups in training wait for the delivery that the death had lost: nothing is admitted meanwhile
        ({"trainer_waited_s": 4.0, "engine_waited_s": 4.0, "engine_down_s": 4.0, "engine_restarts": 1}, 0.0, "started anew once"),
        ({"engine_waited_s": 2.0, "trainer_waited_s": 1.5}, 0.0, "train-bound: the engine waited 20%"),
        ({"engine_waited_s": 0.5}, 0.3, "train-bound: 30% of the groups were rejected"),
        ({"engine_waited_s": 0.5, "trainer_waited_s": 0.5}, 0.2, "balanced"),
    ],
)
def test_the_hint_names_who_was_waited_for(spent, rejected, hint):
    assert hint in RunTotals().plus({"train_s": 10.0, **spent}).bound(rejected)
