"""The trajectory pool: whole groups between generation and training, with staleness under control.

    rollout worker --reserve--> in flight, scoring --add--> waiting --take--> in training --delivered--> (room again)
                   '--release (failed, dropped)                '--> dropped: over_age, rejected

One lock guards everything; re-scoring under the policy runs outside it, so that producers never wait for a forward pass.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer

from lit_asyncrl.errors import CheckpointError, PoolError, WaitTimeoutError
from lit_asyncrl.interfaces import PrefixScorer
from lit_asyncrl.pool.admission import admission_limit
from lit_asyncrl.pool.ages import AgeMeasure, GroupAges, score_prefixes
from lit_asyncrl.pool.ledger import Ledger
from lit_asyncrl.pool.records import GroupCodec, TakenGroup, check_group, pack, unpack
from lit_asyncrl.pool.sampler import StalenessSampler
from lit_asyncrl.pool.writer import FreeSlotWriter
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import TrajectoryGroup

ADMISSION_WAITER = "rollout worker"
BATCH_WAITER = "trainer (batch)"
"""Names under which `Supervisor.waited_s` accounts the two waits of the pool."""


class TrajectoryPool:
    """Whole groups in a TorchRL replay buffer, admitted, aged, ranked and dequeued.

    *Admission.* Outstanding groups are those reserved (in flight or scoring), waiting, and in training until the update that used
    them has been delivered to the engine. They never exceed `limit`, which is batch_groups * (max_policy_age - publish_lag + 1),
    or `capacity_groups` where no age is bounded.
    *Age.* A group over `max_policy_age` leaves as soon as that is known, for the reason `over_age`: none is ever taken.
    *Order.* First completed, first taken, among those that the sampler does not reject.

    Producers may be many threads; there is one consumer, and it is the thread that sets the policy version.

    Args:
        batch_groups: groups of one update.
        sampler: decides what is rejected.
        max_policy_age: largest age, in updates, of a group that is taken; None: no bound, only `capacity_groups`.
        age_measure: age of a group: the `mean` over its trained tokens, or that of its `oldest` trained token.
        capacity_groups: largest number of outstanding groups; None: what the age bound needs, or four batches without one.
        publish_lag: updates by which the engine's weights are held back on purpose.
        supervisor: owns the waits.

    Raises:
        ConfigurationError: the numbers contradict each other.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        sampler: StalenessSampler,
        max_policy_age: int | None,
        age_measure: AgeMeasure = "mean",
        capacity_groups: int | None = None,
        publish_lag: int = 0,
        supervisor: Supervisor,
    ) -> None:
        self.batch_groups = batch_groups
        self.sampler = sampler
        self.max_policy_age = max_policy_age
        self.age_measure = age_measure
        self.limit = admission_limit(batch_groups, max_policy_age, capacity_groups, publish_lag, sampler.target_occupancy)
        self.ledger = Ledger()
        self._supervisor = supervisor
        self._changed = threading.Condition()  # re-entrant: a method may call another one
        storage = LazyStackStorage(self.limit)
        self._buffer = ReplayBuffer(storage=storage, sampler=sampler, writer=FreeSlotWriter(sampler), batch_size=batch_groups)
        self._codec = GroupCodec()
        self._policy_version = 0
        self._open = False
        self._reserved = 0
        self._waiting: dict[int, GroupAges] = {}  # by slot
        # group_id -> version it was taken at, and its record until the update has been applied
        self._in_training: dict[int, tuple[int, TensorDictBase | None]] = {}
        self._dropped: Counter[str] = Counter()

    # --- admission: the rollout worker ----------------------------------------------------------------------------------

    def open_admission(self) -> None:
        """Let `reserve` admit groups. A new pool is closed."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def close_admission(self) -> None:
        """Admit no more groups; what was admitted may still be added."""
        with self._changed:
            self._open = False

    def reserve(self, max_groups: int, timeout_s: float) -> int:
        """Room for new groups; each reservation ends with `add` or `release`.

        A batch's room is freed all at once, so that at an age bound of 0 a caller that asks for `batch_groups` or more gets
        whole batches, and generation sees each in one message (fewer only to replace groups that failed or were dropped).

        Args:
            max_groups: most groups the caller can use.
            timeout_s: seconds to wait for the first one.

        Returns:
            How many groups were admitted; 0 if none could be within `timeout_s`.

        Raises:
            StopRequested: or the first fault of another part.
        """
        with self._changed:
            try:
                self._supervisor.wait_for(
                    self._changed,
                    lambda: self._open and self._outstanding < self.limit,
                    timeout_s=timeout_s,
                    who=ADMISSION_WAITER,
                    what="room in the pool",
                )
            except WaitTimeoutError:
                return 0
            granted = min(max_groups, self.limit - self._outstanding)
            self._reserved += granted
            return granted

    def release(self, num_groups: int) -> None:
        """Give back reservations of groups that failed or were dropped before they entered. The caller tells the ledger."""
        with self._changed:
            if num_groups > self._reserved:
                raise PoolError(f"num_groups must be at most the {self._reserved} reserved, got {num_groups}. Release each once.")
            self._reserved -= num_groups
            self._changed.notify_all()

    def record(self, group_id: int, state: str, *, tokens: int = 0, reason: str | None = None) -> None:
        """Tell the ledger what became of a group outside the pool (`in_flight`, `scoring`, `dropped`, `failed`)."""
        self.ledger.move(group_id, state, tokens, reason)

    def add(self, group: TrajectoryGroup) -> None:
        """Take over a finished group under one reservation, which it uses up in any case.

        `completed_version` is raised to the newest token's version where the engine reported a token of newer weights before it
        reported these as served.

        Raises:
            PoolError: the group is malformed (then it is recorded as failed), a duplicate, or has no reservation. It is not
                trained.
        """
        fault: PoolError | None = None
        try:
            check_group(group, self._policy_version)
            ages = GroupAges.of(group)
            if ages.newest_version > group.completed_version:
                group = replace(group, completed_version=ages.newest_version)
        except PoolError as error:
            fault = error
        with self._changed:
            self._use_reservation(group)
            if fault is not None:
                self.ledger.move(group.group_id, "scoring")
                self.ledger.move(group.group_id, "failed", reason="malformed")
                raise fault
            self.ledger.move(group.group_id, "waiting", tokens=ages.num_sampled)
            if ages.exceeds(self.max_policy_age, self.age_measure, self._policy_version):
                self._drop(ages, "over_age")
            else:
                self._store(group, ages)

    def _store(self, group: TrajectoryGroup, ages: GroupAges) -> None:
        self._waiting[self._buffer.add(self._codec.encode(group))] = ages

    def _use_reservation(self, group: TrajectoryGroup) -> None:
        """End one reservation; refuse a group that has none or that is here already."""
        if self._reserved < 1:
            raise PoolError(f"add must follow reserve, got no reservation (group {group.group_id}). Reserve before generating.")
        self._reserved -= 1
        self._changed.notify_all()
        if group.group_id in self._in_training or self.ledger.state_of(group.group_id) == "waiting":
            raise PoolError(f"group_id must be unique, got {group.group_id} again. Each dispatch of a prompt needs a new id.")

    # --- the trainer ----------------------------------------------------------------------------------------------------

    def set_policy_version(self, policy_version: int) -> None:
        """An update was applied: groups in training are trained, waiting ones age, and those over age leave.

        Call it before the new weights are sent to the engine: tokens of an unknown version are refused.
        """
        with self._changed:
            self._policy_version = self.sampler.policy_version = policy_version
            for group_id, (taken_at, record) in self._in_training.items():
                if record is not None and taken_at < policy_version:
                    self._in_training[group_id] = (taken_at, None)
                    self.ledger.move(group_id, "trained")
            self._drop_over_age()
            self._changed.notify_all()

    def take(self, policy_version: int, scorer: PrefixScorer | None, timeout_s: float) -> list[TakenGroup]:
        """The next batch: waits for `batch_groups` groups, rejects what the sampler says, and takes the oldest arrivals.

        Args:
            policy_version: the trainer's.
            scorer: scores prefixes for the sampler, outside the pool's lock, and only if something is to be rejected; None:
                prefixes count as not forgotten.
            timeout_s: seconds to wait.

        Returns:
            Exactly `batch_groups` groups, in order of completion.

        Raises:
            WaitTimeoutError: too few groups within `timeout_s`; the message says how many are where.
            StopRequested: or the first fault of another part.
        """
        self.set_policy_version(policy_version)
        storage = self._buffer.storage
        with self._changed:
            self._wait_for_batch(timeout_s)
            slots = self.sampler.plan(storage, self.batch_groups) if scorer is not None else []
            groups = [self._codec.decode(storage.get(slot)) for slot in slots]
        scored = score_prefixes(groups, scorer) if scorer is not None and groups else []
        with self._changed:
            self.sampler.score(storage, slots, [logprobs for logprobs, _ in scored])
            self.sampler.tokens_rescored += sum(num_tokens for _, num_tokens in scored)
            complete = {
                group.group_id: logprobs
                for group, (logprobs, num_tokens) in zip(groups, scored, strict=True)
                if num_tokens == group.num_sampled_tokens
            }
            batch, info = self._buffer.sample(return_info=True)
            for slot in info["rejected"].tolist():
                self._drop(self._waiting.pop(slot), "rejected")
            for slot, record in zip(info["index"].tolist(), batch.unbind(0), strict=True):
                group_id = self._waiting.pop(slot).group_id
                self._in_training[group_id] = (policy_version, record)
                self.ledger.move(group_id, "in_training")
            taken = [self._codec.decode(record) for record in batch.unbind(0)]
            self._changed.notify_all()
        return [TakenGroup(group, complete.get(group.group_id)) for group in taken]

    def delivered(self, policy_version: int) -> None:
        """The weights of `policy_version` are served: groups taken before it make room for new ones."""
        with self._changed:
            for group_id in [key for key, (taken_at, _) in self._in_training.items() if taken_at < policy_version]:
                _, record = self._in_training.pop(group_id)
                if record is not None:  # `set_policy_version` was not told of the update
                    self.ledger.move(group_id, "trained")
            self._changed.notify_all()

    def settle_skipped(self) -> None:
        """The groups just taken led to no update: they leave for the reason `skipped_update` and make room."""
        with self._changed:
            for group_id in [key for key, (_, record) in self._in_training.items() if record is not None]:
                del self._in_training[group_id]
                self._dropped["skipped_update"] += 1
                self.ledger.move(group_id, "dropped", reason="skipped_update")
            self._changed.notify_all()

    def _drop_over_age(self) -> None:
        if self.max_policy_age is None:
            return
        bound = (self.max_policy_age, self.age_measure, self._policy_version)
        over_age = [slot for slot, ages in self._waiting.items() if ages.exceeds(*bound)]
        self.sampler.discard(over_age)
        for slot in over_age:
            self._drop(self._waiting.pop(slot), "over_age")

    def _wait_for_batch(self, timeout_s: float) -> None:
        places = f"{len(self._waiting)} waiting, {self._reserved} in flight or scoring, {len(self._in_training)} in training"
        self._supervisor.wait_for(
            self._changed,
            lambda: len(self._waiting) >= self.batch_groups,
            timeout_s=timeout_s,
            who=BATCH_WAITER,
            what=f"{self.batch_groups} groups in the pool (at the start of the wait: {places}; limit {self.limit})",
        )

    def _drop(self, ages: GroupAges, reason: str) -> None:
        self._dropped[reason] += 1
        self.ledger.move(ages.group_id, "dropped", reason=reason)

    @property
    def _outstanding(self) -> int:
        return self._reserved + len(self._waiting) + len(self._in_training)

    # --- reading and checkpoints ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Groups waiting."""
        return len(self._waiting)

    @property
    def groups_rejected(self) -> int:
        """Groups that the sampler rejected so far."""
        return self.sampler.groups_rejected

    @property
    def tokens_rescored(self) -> int:
        """Sampled tokens that were scored again so far, for the sampler's ranking."""
        return self.sampler.tokens_rescored

    def stats(self) -> dict[str, float]:
        """Numbers for the log: groups per place, counts since the start, waiting times (seconds) since this process started."""
        with self._changed:
            return {
                "waiting_groups": len(self._waiting),
                "reserved_groups": self._reserved,
                "in_training_groups": len(self._in_training),
                "rejection_ema": self.sampler.rejection_ema,
                "groups_rejected": self.groups_rejected,
                "groups_over_age": self._dropped["over_age"],
                "groups_skipped": self._dropped["skipped_update"],
                "tokens_rescored": self.tokens_rescored,
                "admission_wait_s": self._supervisor.waited_s(ADMISSION_WAITER),
                "batch_wait_s": self._supervisor.waited_s(BATCH_WAITER),
            }

    def state_dict(self) -> dict[str, Any]:
        """One consistent snapshot as flat tensors and plain Python; loads with `torch.load(..., weights_only=True)`.

        Groups taken for an update that was not applied are in it, ahead of the waiting ones: none is lost.
        """
        with self._changed:
            storage = self._buffer.storage
            records = [record for _, record in self._in_training.values() if record is not None]
            records += [storage.get(slot) for slot in self._waiting]
            groups = [self._codec.decode(record) for record in records]
            state = {
                "policy_version": self._policy_version,
                "dropped": dict(self._dropped),
                "sampler": self.sampler.state_dict(),
                "ledger": self.ledger.state_dict(),
            }
        return {**state, "groups": pack(groups)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict` in a pool from which nothing was taken yet. Reservations are not restored: prompts in flight are
        dispatched again by whoever kept them.

        Raises:
            CheckpointError: more groups were waiting than this pool holds.
        """
        groups = unpack(state["groups"])
        if len(groups) > self.limit:
            raise CheckpointError(
                f"data.max_policy_age and data.capacity_groups must leave room for the {len(groups)} groups of the checkpoint, "
                f"got room for {self.limit}. Resume with the settings of the run that wrote it."
            )
        with self._changed:
            self._reserved, self._waiting, self._in_training = 0, {}, {}
            self._policy_version = state["policy_version"]
            self._dropped = Counter(state["dropped"])
            self.ledger.load_state_dict(state["ledger"])
            self.sampler.load_state_dict(state["sampler"])
            self._buffer.empty()
            for group in groups:
                self.ledger.move(group.group_id, "waiting")
                self._store(group, GroupAges.of(group))
            self.set_policy_version(self._policy_version)
