"""The pool against any order of events (Hypothesis), and under real threads."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import pytest
from builders import make_group
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_pool import Scorer, through_a_file

from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.pool import TrajectoryPool
from lit_asyncrl.pool.ranking import FreshestFirstSampler, MaxAgeSampler, TotalStalenessSampler
from lit_asyncrl.pool.sampler import FifoSampler
from lit_asyncrl.supervisor import Supervisor

SAMPLERS = {
    "fifo": FifoSampler,
    "pace": lambda: PaceSampler(ema_beta=0.7, target_occupancy=1),
    "trajectories": lambda: PaceSampler(ema_beta=0.7, target_occupancy=0.5, scale="absolute", unit="trajectory"),
    "total": lambda: TotalStalenessSampler(ema_beta=0.7, target_occupancy=1),
    "max age": lambda: MaxAgeSampler(ema_beta=0.7, target_occupancy=1),
    "freshest": lambda: FreshestFirstSampler(ema_beta=0.7),
}
SYNCHRONOUS = {**SAMPLERS, "pace": PaceSampler, "trajectories": lambda: PaceSampler(unit="trajectory")}
"""With targets of one batch, which is all that waits at age 0."""

PATIENCE = 40
"""Updates within which every group must have left a pool that goes on."""


class PoolMachine(RuleBasedStateMachine):
    """Arrivals in any order, takes, updates, slow deliveries, failures, skips, resumes; one prompt is one group."""

    @initialize(
        batch=st.integers(1, 3),
        age=st.sampled_from([None, 0, 1, 2]),
        measure=st.sampled_from(["mean", "oldest"]),
        sampler=st.sampled_from(sorted(SAMPLERS)),
    )
    def start(self, batch, age, measure, sampler) -> None:
        if sampler == "trajectories" and age is not None:
            measure = "oldest"  # what its mean may rise above
        self.make = lambda: TrajectoryPool(
            batch_groups=batch,
            sampler=SAMPLERS[sampler](),
            max_policy_age=age,
            age_measure=measure,
            supervisor=Supervisor(),
        )
        self.pool = self.make()
        self.pool.open_admission()
        self.age, self.measure, self.batch = age, measure, batch
        self.version = self.served = 0
        self.in_flight: dict[int, int] = {}  # id -> version that sampled its first token
        self.next_id = self.reported = 0
        self.fate: dict[int, str] = {}
        self.untrained: list[int] = []

    @rule(wanted=st.integers(1, 9))
    def reserve(self, wanted) -> None:
        for _ in range(self.pool.reserve(wanted, 0.0)):
            self.pool.record(self.next_id, "in_flight")
            self.in_flight[self.next_id] = self.served
            self.next_id += 1

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def complete(self, data) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.in_flight)))
        first = self.in_flight.pop(group_id)
        length = data.draw(st.integers(1, 3))
        responses = [[first] * length + [self.served], [self.served], [first, self.served]]
        self.pool.record(group_id, "in_flight", tokens=length + 4)
        self.pool.add(make_group(group_id, responses, self.served))
        self.reported += length + 4

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), state=st.sampled_from(["failed", "dropped"]))
    def fail(self, data, state) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.in_flight)))
        del self.in_flight[group_id]
        self.pool.record(group_id, state, tokens=3, reason="test")
        self.reported += 3
        self.pool.release(1)

    @precondition(lambda self: len(self.pool) >= self.batch)
    @rule()
    def take(self) -> None:
        taken = self.pool.take(self.version, Scorer(), 0.0)
        assert len(taken) == self.batch
        for item in taken:
            group = item.group
            ages = self.version - group.token_versions[group.loss_mask].double()
            if self.age is not None:
                assert (ages.mean() if self.measure == "mean" else ages.max()) <= self.age
            assert group.group_id not in self.fate, "taken twice"
            self.fate[group.group_id] = "taken"
            self.untrained.append(group.group_id)

    @precondition(lambda self: self.untrained)
    @rule(skip=st.booleans())
    def update(self, skip) -> None:
        self.untrained.clear()
        if skip:
            self.pool.settle_skipped()
        else:
            self.version += 1
            self.pool.set_policy_version(self.version)

    @precondition(lambda self: self.served < self.version)
    @rule(data=st.data())
    def deliver(self, data) -> None:
        self.served = data.draw(st.integers(self.served + 1, self.version))
        self.pool.delivered(self.served)

    @rule()
    def resume(self) -> None:
        state = through_a_file(self.pool.state_dict())
        self.pool = self.make()
        self.pool.load_state_dict(state)
        self.pool.open_admission()
        for group_id in self.untrained:  # their update was not applied: they wait again
            del self.fate[group_id]
        self.untrained.clear()
        self.served = self.version
        # Prompts in flight are dispatched again, as far as there is room.
        room = self.pool.reserve(len(self.in_flight), 0.0) if self.in_flight else 0
        assert room == len(self.in_flight)
        for group_id in self.in_flight:
            assert self.pool.ledger.state_of(group_id) == "pending"
            self.pool.record(group_id, "in_flight")
            self.in_flight[group_id] = self.served

    def teardown(self) -> None:
        """Goes on with ever new groups: none that was here may stay for ever."""
        if not hasattr(self, "pool"):
            return
        self.pool.settle_skipped()
        for group_id in self.in_flight:
            self.pool.record(group_id, "failed", reason="end")
        self.pool.release(len(self.in_flight))
        last = self.next_id
        for _ in range(PATIENCE):
            self.version += 1
            self.pool.set_policy_version(self.version)
            self.pool.delivered(self.version)
            for _ in range(self.pool.reserve(99, 0.0)):
                self.pool.add(make_group(self.next_id, [[self.version], [self.version]], self.version))
                self.next_id += 1
            self.pool.take(self.version, Scorer(), 0.0)
        states = [self.pool.ledger.state_of(group_id) for group_id in range(last)]
        assert not any(states), "a group waits for ever"

    @invariant()
    def capacity_is_never_exceeded(self) -> None:
        stats = self.pool.stats()
        outstanding = stats["waiting_groups"] + stats["reserved_groups"] + stats["in_training_groups"]
        assert outstanding <= self.pool.limit
        assert stats["reserved_groups"] == len(self.in_flight)
        assert self.pool._waiting.num_stored <= self.pool.limit

    @invariant()
    def the_ledger_closes(self) -> None:
        ledger = self.pool.ledger
        assert sum(row.prompts for row in ledger.rows()) == ledger.num_dispatched == self.next_id
        assert ledger.num_tokens == sum(row.tokens for row in ledger.rows()) == self.reported
        assert ledger.count("waiting") == len(self.pool)
        assert ledger.count("in_flight") == len(self.in_flight)
        skipped = ledger.count("dropped", "skipped_update")
        assert ledger.count("trained") + ledger.count("in_training") + skipped == len(self.fate)


PoolMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPoolModel = PoolMachine.TestCase


@pytest.mark.parametrize("num_groups", [8_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_eight_producers_and_one_consumer_lose_and_repeat_nothing(num_groups) -> None:
    num_producers, batch, capacity = 8, 16, 48
    supervisor = Supervisor()
    pool = TrajectoryPool(
        batch_groups=batch, sampler=FifoSampler(), max_policy_age=None, capacity_groups=capacity, supervisor=supervisor
    )
    pool.open_admission()
    ids, lock, model = iter(range(num_groups)), threading.Lock(), make_group()

    def produce() -> None:
        try:
            while True:
                granted = pool.reserve(4, 60.0)
                assert granted, "no room within 60 s"
                with lock:
                    mine = list(itertools.islice(ids, granted))
                for group_id in mine:
                    pool.add(dataclasses.replace(model, group_id=group_id))
                pool.release(granted - len(mine))
                if len(mine) < granted:
                    return
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            supervisor.fail(error, "producer")

    threads = [threading.Thread(target=produce) for _ in range(num_producers)]
    for thread in threads:
        thread.start()
    seen: list[int] = []
    for version in range(num_groups // batch):
        seen += [item.group.group_id for item in pool.take(version, None, 60.0)]
        assert pool._waiting.num_stored <= capacity
        pool.set_policy_version(version + 1)
        pool.delivered(version + 1)
    for thread in threads:
        thread.join(60.0)
    supervisor.raise_if_failed()
    assert sorted(seen) == list(range(num_groups))
    assert pool.ledger.count("trained") == num_groups
    assert pool.ledger.num_open == 0


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_at_age_zero_every_sampler_gives_the_synchronous_order(sampler) -> None:
    pool = TrajectoryPool(
        batch_groups=4, sampler=SYNCHRONOUS[sampler](), max_policy_age=0, age_measure="oldest", supervisor=Supervisor()
    )
    pool.open_admission()
    order, tokens = [], []
    for version in range(5):
        assert pool.reserve(99, 0.0) == 4
        for group_id in range(4 * version, 4 * version + 4):
            pool.add(make_group(group_id, [[version]] * (1 + group_id % 3), version))
        assert pool.reserve(99, 0.0) == 0
        taken = [item.group for item in pool.take(version, Scorer(), 0.0)]
        order += [group.group_id for group in taken]
        tokens += [token for group in taken for token in group.token_ids.tolist()]
        pool.set_policy_version(version + 1)
        pool.delivered(version + 1)
    assert order == list(range(20))
    expected = [make_group(i, [[i // 4]] * (1 + i % 3), i // 4) for i in range(20)]
    assert tokens == [token for group in expected for token in group.token_ids.tolist()]
    assert pool.groups_rejected == 0
