"""The trajectory pool: admission, the age bound, taking batches, refusals, snapshots."""

from __future__ import annotations

import dataclasses
import io
import threading
from collections.abc import Sequence

import pytest
import torch
from builders import make_group

from lit_asyncrl.errors import CheckpointError, ConfigurationError, PoolError, StopRequested, WaitTimeoutError
from lit_asyncrl.pool.admission import admission_limit
from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.pool import TrajectoryPool
from lit_asyncrl.pool.sampler import FifoSampler
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import TrajectoryGroup


def make_pool(**changes) -> TrajectoryPool:
    arguments = {"batch_groups": 2, "sampler": FifoSampler(), "max_policy_age": 1, "supervisor": Supervisor(), **changes}
    pool = TrajectoryPool(**arguments)
    pool.open_admission()
    return pool


def fill(pool: TrajectoryPool, *groups: TrajectoryGroup) -> None:
    assert pool.reserve(len(groups), 0.0) == len(groups)
    for group in groups:
        pool.add(group)


def ids(taken) -> list[int]:
    return [item.group.group_id for item in taken]


# --- admission ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "lag", "capacity", "limit"),
    [(0, 0, None, 3), (1, 0, None, 6), (4, 0, None, 15), (4, 2, None, 9), (2, 2, 9, 3), (None, 0, None, 12), (None, 5, 7, 7)],
)
def test_the_limit_is_the_batch_times_the_remaining_age_plus_one(age, lag, capacity, limit) -> None:
    # 3 groups a batch: 3*(K - lag + 1); without a bound the capacity, four batches by default
    pool = make_pool(batch_groups=3, max_policy_age=age, publish_lag=lag, capacity_groups=capacity)
    assert pool.limit == limit
    assert pool.reserve(100, 0.0) == limit


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"batch_groups": 0}, "batch_groups"),
        ({"max_policy_age": None, "capacity_groups": 1}, "capacity_groups"),
        ({"max_policy_age": 2, "capacity_groups": 5}, "capacity_groups"),
        ({"max_policy_age": 1, "publish_lag": 2}, "max_policy_age"),
        ({"max_policy_age": 1, "sampler": PaceSampler(target_occupancy=5)}, "sampler.target_occupancy"),
    ],
)
def test_contradictory_settings_are_refused(changes, key) -> None:
    with pytest.raises(ConfigurationError, match=f"data.{key} must"):
        make_pool(**changes)


def simulate(max_policy_age: int, num_updates: int) -> list[int]:
    """Generation as eager as admission allows, delivery after each update; the age of every group that was taken."""
    pool = make_pool(max_policy_age=max_policy_age)
    ages, next_id, served = [], 0, 0
    for version in range(num_updates):
        for _ in range(pool.reserve(100, 0.0)):
            pool.add(make_group(next_id, [[served]]))
            next_id += 1
        ages += [version - item.group.completed_version for item in pool.take(version, None, 0.0)]
        # While the trainer is busy, generation fills what room there is with the weights that are served.
        for _ in range(pool.reserve(100, 0.0)):
            pool.add(make_group(next_id, [[served]]))
            next_id += 1
        pool.set_policy_version(version + 1)
        served = version + 1
        pool.delivered(served)
    assert pool.ledger.count("dropped") == 0
    return ages


@pytest.mark.parametrize("max_policy_age", [0, 1, 2, 4])
def test_eager_generation_reaches_the_age_bound_and_never_passes_it(max_policy_age) -> None:
    assert max(simulate(max_policy_age, 12)) == max_policy_age


def test_at_age_zero_whole_batches_are_admitted_only_after_delivery() -> None:
    pool = make_pool(max_policy_age=0)
    assert pool.reserve(64, 0.0) == 2
    for group_id in (0, 1):
        pool.add(make_group(group_id))
    assert pool.reserve(64, 0.0) == 0
    pool.take(0, None, 0.0)
    assert pool.reserve(64, 0.0) == 0
    pool.set_policy_version(1)
    assert pool.reserve(64, 0.0) == 0
    pool.delivered(1)
    assert pool.reserve(64, 0.0) == 2


def test_delivery_of_an_older_version_does_not_free_a_newer_batch() -> None:
    pool = make_pool(max_policy_age=1)
    fill(pool, *(make_group(i) for i in range(4)))
    pool.take(0, None, 0.0)
    pool.take(1, None, 0.0)
    pool.delivered(1)
    assert pool.reserve(64, 0.0) == 2


def test_released_reservations_can_be_used_again() -> None:
    pool = make_pool(max_policy_age=0)
    assert pool.reserve(2, 0.0) == 2
    pool.release(1)
    assert pool.reserve(64, 0.0) == 1
    with pytest.raises(PoolError, match="num_groups must be at most the 2 reserved, got 3"):
        pool.release(3)


def test_a_closed_pool_admits_nothing() -> None:
    pool = make_pool()
    pool.close_admission()
    assert pool.reserve(1, 0.0) == 0
    pool.open_admission()
    assert pool.reserve(1, 0.0) == 1


def test_a_stop_request_ends_both_waits() -> None:
    supervisor = Supervisor()
    pool = make_pool(supervisor=supervisor, max_policy_age=0)
    supervisor.request_stop("test")
    with pytest.raises(StopRequested):
        pool.take(0, None, 60.0)
    with pytest.raises(StopRequested):
        pool.reserve(1, 60.0)


def test_a_batch_that_does_not_come_is_an_error_that_says_what_is_missing() -> None:
    pool = make_pool()
    pool.reserve(3, 0.0)
    pool.add(make_group(0))
    with pytest.raises(
        WaitTimeoutError, match=r"trainer \(batch\) waited .* 2 groups .*1 waiting, 2 in flight or scoring, 0 in training"
    ):
        pool.take(0, None, 0.01)


# --- the age bound --------------------------------------------------------------------------------------------------------


def test_a_group_over_the_mean_age_leaves_when_the_version_rises() -> None:
    # group 0: versions 0, 0, 3 -> mean age at V = 2.. cannot exist yet; at V = 3: (3+3+0)/3 = 2 = bound; at V = 4: 3 > 2
    pool = make_pool(max_policy_age=2)
    pool.set_policy_version(3)
    fill(pool, make_group(0, [[0, 0, 3]]))
    assert len(pool) == 1
    pool.set_policy_version(4)
    assert len(pool) == 0
    assert pool.ledger.count("dropped", "over_age") == 1
    assert pool.reserve(64, 0.0) == 6


def test_the_oldest_measure_looks_at_the_oldest_trained_token() -> None:
    # oldest 0 at V = 3: age 3 > 2, though the mean is 2
    pool = make_pool(max_policy_age=2, age_measure="oldest")
    pool.set_policy_version(3)
    fill(pool, make_group(0, [[0, 0, 3]]))
    assert pool.ledger.count("dropped", "over_age") == 1


def test_untrained_tokens_do_not_age_a_group() -> None:
    pool = make_pool(max_policy_age=0)
    pool.set_policy_version(3)
    group = make_group(0, [[0, 3]])
    group.loss_mask[2] = False
    fill(pool, group)
    assert len(pool) == 1


def test_no_bound_keeps_every_age() -> None:
    pool = make_pool(max_policy_age=None)
    fill(pool, make_group(0), make_group(1))
    assert ids(pool.take(1000, None, 0.0)) == [0, 1]


# --- what may enter -------------------------------------------------------------------------------------------------------


def broken(field: str, value) -> TrajectoryGroup:
    return dataclasses.replace(make_group(0), **{field: value})


@pytest.mark.parametrize(
    ("group", "field"),
    [
        (broken("token_ids", torch.zeros(8, dtype=torch.int32)), "token_ids"),
        (broken("loss_mask", torch.zeros(7, dtype=torch.bool)), "loss_mask"),
        (broken("rewards", torch.zeros(3)), "rewards"),
        (broken("rewards", torch.tensor([0.0, float("nan")])), "rewards"),
        (broken("reward_components", torch.zeros(2, 2)), "reward_components"),
        (broken("lengths", torch.tensor([3, 4])), "lengths"),
        (broken("lengths", torch.tensor([8, 0])), "lengths"),
        (broken("behavior_logprobs", torch.full((8,), float("inf"))), "behavior_logprobs"),
        (broken("token_versions", torch.full((8,), 1, dtype=torch.int32)), "token_versions"),
        (broken("completed_version", 1), "token_versions"),
        (broken("token_versions", torch.full((8,), -1, dtype=torch.int32)), "loss_mask"),
        (
            dataclasses.replace(
                make_group(0),
                loss_mask=torch.ones(8, dtype=torch.bool),
                token_versions=torch.zeros(8, dtype=torch.int32),
            ),
            "loss_mask",
        ),
    ],
)
def test_a_malformed_group_is_refused_counted_as_failed_and_gives_its_room_back(group, field) -> None:
    pool = make_pool()
    pool.reserve(4, 0.0)
    with pytest.raises(PoolError, match=f"^{field} must"):
        pool.add(group)
    assert pool.ledger.count("failed", "malformed") == 1
    assert pool.reserve(4, 0.0) == 1
    assert len(pool) == 0


def test_a_duplicate_is_refused_and_the_first_one_stays() -> None:
    pool = make_pool()
    fill(pool, make_group(0))
    pool.reserve(1, 0.0)
    with pytest.raises(PoolError, match="group_id must be unique, got 0"):
        pool.add(make_group(0))
    assert pool.ledger.count("waiting") == 1
    assert pool.reserve(64, 0.0) == 3


def test_a_group_without_reservation_is_refused() -> None:
    with pytest.raises(PoolError, match="add must follow reserve"):
        make_pool().add(make_group(0))


def test_completed_version_is_at_least_the_newest_token_version() -> None:
    pool = make_pool(batch_groups=1)
    pool.set_policy_version(1)
    fill(pool, make_group(0, [[0, 1]], completed_version=0))
    assert pool.take(1, None, 0.0)[0].group.completed_version == 1


# --- taking a batch -------------------------------------------------------------------------------------------------------


def test_a_group_comes_out_as_it_went_in() -> None:
    pool = make_pool(batch_groups=1)
    group = make_group(7, [[0, 0, 0], [0]], rewards=[0.25, 1.0], truncated=[True, False], task="sums")
    fill(pool, group)
    (taken,) = pool.take(0, None, 0.0)
    for field in dataclasses.fields(TrajectoryGroup):
        before, after = getattr(group, field.name), getattr(taken.group, field.name)
        assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after, field.name


def test_groups_are_taken_in_order_of_completion() -> None:
    pool = make_pool()
    fill(pool, *(make_group(i) for i in (3, 0, 2, 1)))
    assert ids(pool.take(0, None, 0.0)) == [3, 0]
    assert ids(pool.take(0, None, 0.0)) == [2, 1]


class Scorer:
    """Log-prob -0.5 - group_id at every token; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[torch.Tensor]:
        self.asked += [(group.group_id, group.group_size) for group in groups]
        return [torch.full((group.token_ids.numel(),), -0.5 - group.group_id) for group in groups]


def pace_pool() -> TrajectoryPool:
    """Four groups waiting, all completed at version 1: group 0 without prefix, 1 and 2 with, 3 with one old member of two."""
    pool = make_pool(sampler=PaceSampler(ema_beta=0.5), batch_groups=2, max_policy_age=3)
    pool.set_policy_version(1)
    fill(
        pool,
        make_group(0, [[1], [1]], 1),
        make_group(1, [[0, 1], [0, 0, 1]], 1),
        make_group(2, [[0, 1], [0, 1]], 1),
        make_group(3, [[1, 1], [0, 1]], 1),
    )
    return pool


def test_only_members_with_an_old_prefix_are_scored_again() -> None:
    # excess (4-2)/4 = .5, q = .25, budget floor(1) = 1 > 0: score. Tokens: 5 + 4 + 2 (group 3's old member) = 11
    pool, scorer = pace_pool(), Scorer()
    pool.take(1, scorer, 0.0)
    assert scorer.asked == [(1, 2), (2, 2), (3, 1)]
    assert pool.tokens_rescored == 11


def test_pace_rejects_the_forgotten_group_and_hands_log_probs_on() -> None:
    # F = group_id; members: 1, 1, 2, 2, 3 -> p: .2, .2, .6, .6, 1 of n = 5
    # GS: group 1 (.5, 2/3), group 2 (.5, .5), group 3 (0, .5): E = ..., .6^4*.5 = .0648 for 2, (0 + .5)/2 = .25 for 3
    pool, scorer = pace_pool(), Scorer()
    taken = pool.take(1, scorer, 0.0)
    assert ids(taken) == [0, 1]
    assert pool.groups_rejected == 1
    assert pool.ledger.count("dropped", "rejected") == 1
    assert taken[0].logprobs is None
    assert torch.equal(taken[1].logprobs, torch.full((9,), -1.5))


def test_log_probs_of_a_partly_scored_group_are_not_handed_on() -> None:
    pool = make_pool(sampler=PaceSampler(ema_beta=1.0), batch_groups=1, max_policy_age=3)
    pool.set_policy_version(1)
    fill(pool, make_group(0, [[1, 1], [0, 1]], 1), make_group(9, [[0, 1], [0, 1]], 1))
    (taken,) = pool.take(1, Scorer(), 0.0)
    assert taken.group.group_id == 0
    assert taken.logprobs is None


def test_rejected_groups_make_room() -> None:
    pool = pace_pool()
    pool.take(1, Scorer(), 0.0)
    assert pool.reserve(64, 0.0) == 8 - 3


def test_producers_are_not_held_up_by_scoring() -> None:
    pool = pace_pool()
    added = threading.Event()

    def produce() -> None:
        pool.reserve(1, 1.0)
        pool.add(make_group(20, [[1]], 1))
        added.set()

    def scorer(groups):
        thread = threading.Thread(target=produce)
        thread.start()
        assert added.wait(5.0)  # would time out if take held a lock here
        thread.join(5.0)
        return Scorer()(groups)

    assert len(pool.take(1, scorer, 1.0)) == 2
    assert added.is_set()


def test_a_skipped_batch_makes_room_and_is_counted() -> None:
    pool = make_pool(max_policy_age=0)
    fill(pool, make_group(0), make_group(1))
    pool.take(0, None, 0.0)
    pool.settle_skipped()
    assert pool.ledger.count("dropped", "skipped_update") == 2
    assert pool.reserve(64, 0.0) == 2


def test_a_skip_leaves_the_batch_before_it_alone() -> None:
    pool = make_pool(max_policy_age=1)
    fill(pool, *(make_group(i) for i in range(4)))
    pool.take(0, None, 0.0)
    pool.take(1, None, 0.0)
    pool.settle_skipped()
    assert pool.ledger.count("trained") == 2
    assert pool.reserve(64, 0.0) == 2


# --- snapshots ------------------------------------------------------------------------------------------------------------


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_run_that_ends_while_prefixes_are_scored_smooths_their_excess_once() -> None:
    def stop(groups):
        raise StopRequested("SIGTERM")

    broken, unbroken = pace_pool(), pace_pool()
    with pytest.raises(StopRequested):
        broken.take(1, stop, 0.0)
    resumed = make_pool(sampler=PaceSampler(ema_beta=0.5), batch_groups=2, max_policy_age=3)
    resumed.load_state_dict(through_a_file(broken.state_dict()))
    assert ids(resumed.take(1, Scorer(), 0.0)) == ids(unbroken.take(1, Scorer(), 0.0))
    assert resumed.sampler.rejection_ema == unbroken.sampler.rejection_ema > 0
    assert resumed.groups_rejected == unbroken.groups_rejected


def test_a_snapshot_continues_where_it_was_made() -> None:
    pool = pace_pool()
    pool.take(1, Scorer(), 0.0)
    pool.set_policy_version(2)
    pool.reserve(1, 0.0)
    pool.record(30, "in_flight", tokens=7)
    fill(pool, make_group(31, [[1, 2], [2]], 2, task="sums"))
    state = through_a_file(pool.state_dict())
    resumed = make_pool(sampler=PaceSampler(ema_beta=0.5), batch_groups=2, max_policy_age=3)
    resumed.load_state_dict(state)
    assert resumed.groups_rejected == pool.groups_rejected
    assert resumed.sampler.rejection_ema == pool.sampler.rejection_ema
    assert resumed.ledger.count("trained") == 2
    assert resumed.ledger.state_of(30) == "pending"
    assert resumed.ledger.tokens("dropped", "interrupted") == 7
    expected, got = pool.take(2, Scorer(), 0.0), resumed.take(2, Scorer(), 0.0)
    assert ids(got) == ids(expected) == [2, 31]
    for before, after in zip(expected, got, strict=True):
        for field in dataclasses.fields(TrajectoryGroup):
            a, b = getattr(before.group, field.name), getattr(after.group, field.name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name


def test_a_batch_taken_but_not_trained_is_waiting_again_after_resume() -> None:
    pool = make_pool()
    fill(pool, *(make_group(i) for i in range(3)))
    pool.take(0, None, 0.0)
    resumed = make_pool()
    resumed.load_state_dict(through_a_file(pool.state_dict()))
    assert ids(resumed.take(0, None, 0.0)) == [0, 1]
    assert resumed.ledger.count("waiting") == 1


def test_an_empty_pool_round_trips() -> None:
    resumed = make_pool()
    resumed.load_state_dict(through_a_file(make_pool().state_dict()))
    assert len(resumed) == 0


def test_a_snapshot_that_does_not_fit_is_refused() -> None:
    pool = make_pool()
    fill(pool, *(make_group(i) for i in range(4)))
    with pytest.raises(CheckpointError, match="4 groups of the checkpoint, got room for 2"):
        make_pool(max_policy_age=0).load_state_dict(pool.state_dict())


def test_stats_tell_where_groups_are() -> None:
    pool = make_pool()
    fill(pool, *(make_group(i) for i in range(3)))
    pool.reserve(1, 0.0)
    pool.take(0, None, 0.0)
    stats = pool.stats()
    assert (stats["waiting_groups"], stats["reserved_groups"], stats["in_training_groups"]) == (1, 1, 2)


# --- what leaves otherwise ------------------------------------------------------------------------------------------------


def test_rejected_trajectories_leave_their_groups() -> None:
    # 2 groups of 3, batch 1; V = c = 4; member 0 of group 0 was forgotten most, then the two of group 1 leave with their group
    sampler = PaceSampler(ema_beta=1.0, unit="trajectory")
    pool = make_pool(batch_groups=1, max_policy_age=None, sampler=sampler)
    pool.set_policy_version(4)
    fill(pool, make_group(0, [[2], [4], [4]], 4), make_group(1, [[3], [3], [3]], 4))

    def scorer(groups):
        return [torch.full((g.token_ids.numel(),), -2.0 if g.group_id == 0 else -0.5) for g in groups]

    (taken,) = pool.take(4, scorer, 0.0)
    assert taken.group.token_versions.tolist() == [-1, -1, 4, -1, -1, 4]
    assert taken.group.rewards.tolist() == [1.0, 0.0]
    assert taken.logprobs is None
    assert pool.ledger.tokens("dropped", "rejected") == 1 + 3
    pool.set_policy_version(5)
    assert pool.ledger.tokens("trained") == 2


def test_every_contradiction_is_told_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"capacity_groups must be at least 6.*target_occupancy must.*age_measure must"):
        make_pool(max_policy_age=2, capacity_groups=5, sampler=PaceSampler(target_occupancy=9, unit="trajectory"))


def test_staleness_at_completion_is_given_once() -> None:
    # c = 2: (2-0 + 2-2) / 2 = 1 for one member, 0 for the other: mean .5; V - c = 3 - 2
    pool = make_pool(max_policy_age=9)
    pool.set_policy_version(3)
    fill(pool, make_group(0, [[0, 2], [2]], 2))
    completed = pool.completed_staleness()
    assert completed["completed_generation_staleness"].tolist() == [0.5]
    assert completed["completed_waiting_staleness"].tolist() == [1.0]
    assert pool.completed_staleness()["completed_waiting_staleness"].tolist() == []


@pytest.mark.parametrize(("updates", "limit"), [(1, 8), (2, 4), (3, 2), (4, 2), (9, 2)])
def test_several_updates_per_batch_admit_that_many_fewer_batches(updates, limit):
    # 2 groups a batch, K = 3: (3 + 1) // updates batches, at least one
    assert admission_limit(2, 3, updates_per_batch=updates) == limit
