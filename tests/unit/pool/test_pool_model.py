"""The pool against any order of events (Hypothesis), and under real threads."""

from __future__ import annotations

import itertools
import threading

from builders import make_group
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_pool import Scorer, through_a_file

from lit_asyncrl.pool.pace import PaceSampler
from lit_asyncrl.pool.pool import TrajectoryPool
from lit_asyncrl.pool.sampler import FifoSampler
from lit_asyncrl.supervisor import Supervisor


class PoolMachine(RuleBasedStateMachine):
    """Arrivals in any order, takes, updates, slow deliveries, failures, skips, resumes; one prompt is one group."""

    @initialize(
        batch=st.integers(1, 3),
        age=st.sampled_from([None, 0, 1, 2]),
        measure=st.sampled_from(["mean", "oldest"]),
        pace=st.booleans(),
    )
    def start(self, batch, age, measure, pace) -> None:
        self.make = lambda: TrajectoryPool(
            batch_groups=batch,
            sampler=PaceSampler(ema_beta=0.7, target_occupancy=1) if pace else FifoSampler(),
            max_policy_age=age,
            age_measure=measure,
            supervisor=Supervisor(),
        )
        self.pool = self.make()
        self.pool.open_admission()
        self.age, self.measure, self.batch = age, measure, batch
        self.version = self.served = 0
        self.in_flight: dict[int, int] = {}  # id -> version that sampled its first token
        self.next_id = 0
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
        self.pool.add(make_group(group_id, [[first] * length + [self.served], [self.served]], self.served))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), state=st.sampled_from(["failed", "dropped"]))
    def fail(self, data, state) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.in_flight)))
        del self.in_flight[group_id]
        self.pool.record(group_id, state, tokens=3, reason="test")
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
            self.pool.record(group_id, "in_flight")
            self.in_flight[group_id] = self.served

    @invariant()
    def capacity_is_never_exceeded(self) -> None:
        stats = self.pool.stats()
        outstanding = stats["waiting_groups"] + stats["reserved_groups"] + stats["in_training_groups"]
        assert outstanding <= self.pool.limit
        assert stats["reserved_groups"] == len(self.in_flight)
        assert len(self.pool._buffer.storage) <= self.pool.limit

    @invariant()
    def the_ledger_closes(self) -> None:
        ledger = self.pool.ledger
        assert sum(row.prompts for row in ledger.rows()) == ledger.num_dispatched == self.next_id
        assert ledger.count("waiting") == len(self.pool)
        assert ledger.count("in_flight") == len(self.in_flight)
        skipped = ledger.count("dropped", "skipped_update")
        assert ledger.count("trained") + ledger.count("in_training") + skipped == len(self.fate)


PoolMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPoolModel = PoolMachine.TestCase


def test_four_producers_and_one_consumer_lose_and_repeat_nothing() -> None:
    num_groups, num_producers, batch = 4000, 4, 16
    supervisor = Supervisor()
    pool = TrajectoryPool(
        batch_groups=batch, sampler=FifoSampler(), max_policy_age=None, capacity_groups=48, supervisor=supervisor
    )
    pool.open_admission()
    ids, lock = iter(range(num_groups)), threading.Lock()

    def produce() -> None:
        try:
            while True:
                granted = pool.reserve(4, 10.0)
                assert granted, "no room within 10 s"
                with lock:
                    mine = list(itertools.islice(ids, granted))
                for group_id in mine:
                    pool.add(make_group(group_id))
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
        seen += [item.group.group_id for item in pool.take(version, None, 10.0)]
        assert len(pool._buffer.storage) <= 48
        pool.set_policy_version(version + 1)
        pool.delivered(version + 1)
    for thread in threads:
        thread.join(10.0)
    supervisor.raise_if_failed()
    assert sorted(seen) == list(range(num_groups))
    assert pool.ledger.count("trained") == num_groups
