"""A discrete-event simulation of generation, pool and trainer: the run's own pool and samplers on a virtual clock.

    admit --submit--> VirtualEngine --finished--> TrajectoryPool.add ... take --train_s--> update, swap, delivered --> admit

Between two events of the trainer only groups end, so their requests are handled in order without a global event queue.
"""

from __future__ import annotations

import numpy as np

from lit_asyncrl.errors import PoolError
from lit_asyncrl.pool.pool import TrajectoryPool
from lit_asyncrl.pool.records import TakenGroup
from lit_asyncrl.pool.sampler import StalenessSampler
from lit_asyncrl.simulation.engine import VirtualEngine, forgetting_logprobs
from lit_asyncrl.simulation.settings import SimulationResult, SimulationSettings
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import TrajectoryGroup


def simulate(
    settings: SimulationSettings, sampler: StalenessSampler, *, num_updates: int, warmup_updates: int = 50
) -> SimulationResult:
    """Run the loop for `warmup_updates`, then measure over `num_updates`.

    Args:
        settings: sizes, rates and lengths.
        sampler: a new one; it is used up.
        num_updates, warmup_updates: in optimizer updates.

    Raises:
        ConfigurationError: the settings contradict each other.
        PoolError: no batch can ever be complete.
    """
    return Simulation(settings, sampler).run(num_updates, warmup_updates)


class Simulation:
    """One simulated run.

    Args:
        settings: sizes, rates and lengths.
        sampler: a new one; it is used up.
    """

    def __init__(self, settings: SimulationSettings, sampler: StalenessSampler) -> None:
        self.settings = settings
        self.pool = TrajectoryPool(
            batch_groups=settings.batch_groups,
            sampler=sampler,
            max_policy_age=settings.max_policy_age,
            age_measure=settings.age_measure,
            capacity_groups=settings.capacity_groups,
            publish_lag=settings.publish_lag,
            supervisor=Supervisor(),
        )
        generation, jitter = np.random.SeedSequence(settings.seed).spawn(2)
        self.engine = VirtualEngine(settings, generation)
        self._jitter = np.random.default_rng(jitter)
        self._now = 0.0
        self._version = 0
        self._tally = _Tally()

    def run(self, num_updates: int, warmup_updates: int = 50) -> SimulationResult:
        """See `simulate`."""
        self.pool.open_admission()
        self._admit()
        for _ in range(warmup_updates):
            self._update()
        first = _Mark(self)
        events = self._tally.events
        self._tally = _Tally()
        self._tally.events = events
        for _ in range(num_updates):
            self._update()
        return self._result(first, _Mark(self), num_updates)

    def _update(self) -> None:
        """Wait for a batch, take it, train on it, and deliver the new weights."""
        self._fill()
        taken = self.pool.take(self._version, forgetting_logprobs, 0.0)
        self._tally.take(taken, self._version)
        self._admit()  # what was rejected made room
        spread = self.settings.train_jitter
        train_s = self.settings.train_s * (1.0 + (self._jitter.uniform(-spread, spread) if spread else 0.0))
        done = self._now + train_s
        while self.engine.next_end <= done:
            self._deliver()
        self._now = done
        self._tally.train_s += train_s
        self._version += 1
        self.pool.set_policy_version(self._version)
        self.engine.swap(done)
        self.pool.delivered(self._version)
        self._tally.events += 2
        self._admit()

    def _fill(self) -> None:
        """Let time pass until a batch is waiting."""
        while len(self.pool) < self.settings.batch_groups:
            if self.engine.next_end == float("inf"):
                raise PoolError(
                    f"A batch must hold {self.settings.batch_groups} groups, got {len(self.pool)} waiting and none in flight: "
                    "the trainer would wait for ever. Raise the capacity."
                )
            self._deliver()

    def _deliver(self) -> None:
        """Hand the group that is complete next to the pool; where it leaves at once, over age, its room is used from then on."""
        self._now = self.engine.next_end
        group = self.engine.pop()
        waiting = len(self.pool)
        self.pool.add(group)
        self._tally.add(group)
        if len(self.pool) == waiting:
            self._admit()

    def _admit(self) -> None:
        admitted = self.pool.reserve(self.pool.limit, 0.0)
        for group_id in self.engine.submit(admitted, self._now):
            self.pool.record(group_id, "in_flight")

    def _result(self, first: _Mark, last: _Mark, num_updates: int) -> SimulationResult:
        tally, elapsed = self._tally, last.now - first.now
        responses = max(tally.trained * self.settings.group_size, 1)
        trained_length = tally.trained_tokens / responses
        generated_length = tally.generated_tokens / max(tally.generated * self.settings.group_size, 1)
        return SimulationResult(
            updates=num_updates,
            groups_generated=tally.generated,
            groups_trained=tally.trained,
            groups_rejected=last.rejected - first.rejected,
            groups_over_age=last.over_age - first.over_age,
            events=tally.events,
            elapsed_s=elapsed,
            generation_staleness=tally.generation_sum / responses,
            waiting_staleness=tally.waiting_sum / max(tally.trained, 1),
            start_staleness=tally.start_sum / max(tally.trained, 1),
            policy_age_max=tally.age_max,
            length_bias=trained_length / generated_length - 1.0,
            trainer_busy=tally.train_s / elapsed,
            slots_busy=(last.busy_s - first.busy_s) / (self.settings.num_slots * elapsed),
        )


class _Mark:
    """Counters at one instant."""

    def __init__(self, simulation: Simulation) -> None:
        stats = simulation.pool.stats()
        self.now = simulation._now
        self.rejected = int(stats["groups_rejected"])
        self.over_age = int(stats["groups_over_age"])
        self.busy_s = simulation.engine.busy_s


class _Tally:
    """Sums over what was generated and trained."""

    def __init__(self) -> None:
        self.events = 0
        self.generated = self.generated_tokens = 0
        self.trained = self.trained_tokens = 0
        self.generation_sum = 0.0
        self.waiting_sum = self.start_sum = self.age_max = 0
        self.train_s = 0.0

    def add(self, group: TrajectoryGroup) -> None:
        """A group ended: one start and one end per member, and its own end."""
        size = group.group_size
        self.events += 2 * size + 1
        self.generated += 1
        self.generated_tokens += group.token_versions.numel() - size

    def take(self, taken: list[TakenGroup], policy_version: int) -> None:
        """A batch was taken at `policy_version`."""
        groups = [item.group for item in taken]
        versions = np.concatenate([group.token_versions.numpy() for group in groups])
        lengths = np.concatenate([group.lengths.numpy() for group in groups])
        completed = np.array([group.completed_version for group in groups])
        sizes = np.array([group.group_size for group in groups])
        first = lengths.cumsum() - lengths  # of each member; a prompt token of version -1
        num_sampled = lengths - 1
        version_sums = np.add.reduceat(versions, first) + 1
        versions[first] = np.iinfo(np.int32).max
        oldest = np.minimum.reduceat(versions, first[sizes.cumsum() - sizes])
        self.trained += len(groups)
        self.trained_tokens += int(num_sampled.sum())
        self.generation_sum += float((np.repeat(completed, sizes) - version_sums / num_sampled).sum())
        self.waiting_sum += int(policy_version * len(groups) - completed.sum())
        self.start_sum += int((completed - oldest).sum())
        self.age_max = max(self.age_max, policy_version - int(oldest.min()))
