"""The trajectory pool: whole groups between generation and training, with staleness under control.

    rollout worker --reserve--> in flight, scoring --add--> waiting --take--> in training --delivered--> (room again)
                   '--release (failed, dropped)                '--> dropped: over_age, rejected

One lock guards everything; re-scoring under the policy runs outside it, so that producers never wait for a forward pass.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lit_asyncrl.errors import CheckpointError, PoolError, WaitTimeoutError
from lit_asyncrl.interfaces import PrefixScorer
from lit_asyncrl.pool.admission import admission_limit
from lit_asyncrl.pool.facts import AgeMeasure, inspect_group
from lit_asyncrl.pool.ledger import FINAL_STATES, Ledger
from lit_asyncrl.pool.records import TakenGroup
from lit_asyncrl.pool.rescoring import score_prefixes
from lit_asyncrl.pool.sampler import StalenessSampler
from lit_asyncrl.pool.snapshot import pack, unpack
from lit_asyncrl.pool.tape import Decision, Tape
from lit_asyncrl.pool.waiting import Reduced, WaitingGroups
from lit_asyncrl.supervisor import Supervisor
from lit_asyncrl.types import GroupOutcome, TrajectoryGroup
from lit_asyncrl.waits import Changed

ADMISSION_WAITER = "rollout worker"
BATCH_WAITER = "trainer (batch)"
"""Names under which `Supervisor.waited_s` accounts the two waits of the pool."""

MAX_RECORDED = 4096
"""Staleness of newly completed groups is kept, for histograms, of this many."""


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
        updates_per_batch: optimizer updates made of one batch.
        supervisor: owns the waits.

    Attributes:
        tape: hears what happens to groups, and may say what is taken; None for neither.

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
        updates_per_batch: int = 1,
        supervisor: Supervisor,
    ) -> None:
        self.limit = admission_limit(
            batch_groups,
            max_policy_age,
            capacity_groups,
            publish_lag,
            target_occupancy=sampler.target_occupancy,
            measures_mean=age_measure == "mean",
            splits_groups=sampler.splits_groups,
            updates_per_batch=updates_per_batch,
        )
        self.batch_groups = batch_groups
        self.sampler = sampler
        self.max_policy_age = max_policy_age
        self.age_measure: AgeMeasure = age_measure
        self.ledger = Ledger()
        self.tape: Tape | None = None
        self._supervisor = supervisor
        self._changed = Changed()  # re-entrant: a method may call another one
        self._waiting = WaitingGroups(sampler, self.limit, batch_groups, max_policy_age, age_measure)
        self._policy_version = 0
        self._open = False
        self._reserved = 0
        self._in_training: dict[int, int] = {}  # group_id -> version it was taken at, rising
        self._untrained: dict[int, TrajectoryGroup] = {}  # of those, whose update was not applied yet
        self._dropped: Counter[str] = Counter()
        self._completed: deque[tuple[float, float]] = deque(maxlen=MAX_RECORDED)

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
            timeout_s: seconds to wait for the first one; 0 only looks.

        Returns:
            How many groups were admitted; 0 if none could be within `timeout_s`.

        Raises:
            StopRequested: or the first fault of another part.
        """
        with self._changed:
            if not self._wait(lambda: self._open and self._outstanding < self.limit, timeout_s, ADMISSION_WAITER, _room):
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

    def record(
        self,
        group_id: int,
        state: str,
        *,
        tokens: int | None = None,
        reason: str | None = None,
        outcome: GroupOutcome | None = None,
    ) -> None:
        """Tell the ledger what became of a group outside the pool (`in_flight`, `scoring`, `dropped`, `failed`)."""
        if self.tape is not None and state in FINAL_STATES:
            self.tape.left(group_id, state, reason or "")
        self.ledger.move(group_id, state, tokens, reason, outcome)

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
            facts = inspect_group(group, self._policy_version)
        except PoolError as error:
            fault = error
        with self._changed:
            self._use_reservation(group.group_id)
            if fault is not None:
                self._changed.notify_all()
                self.ledger.move(group.group_id, "scoring")
                self.ledger.move(group.group_id, "failed", reason="malformed")
                raise fault
            if self.tape is not None:
                self.tape.added(group)
            self.ledger.move(group.group_id, "waiting", facts.num_sampled, None, facts.outcome)
            self._completed.append((facts.generation, self._policy_version - facts.completed_version))
            if self._waiting.last_version(facts) < self._policy_version:
                self._drop([facts.group_id], "over_age")
                self._changed.notify_all()
            else:
                self._waiting.add(group, facts)
                if len(self._waiting) == self.batch_groups or self.tape is not None:
                    self._changed.notify_all()  # with fewer nobody can go on, with more only a replay waits

    def _use_reservation(self, group_id: int) -> None:
        """End one reservation; refuse a group that has none or that is here already."""
        if self._reserved < 1:
            raise PoolError(f"add must follow reserve, got no reservation (group {group_id}). Reserve before generating.")
        self._reserved -= 1
        if group_id in self._waiting or group_id in self._in_training:
            raise PoolError(f"group_id must be unique, got {group_id} again. Each dispatch of a prompt needs a new id.")

    # --- the trainer ----------------------------------------------------------------------------------------------------

    def set_policy_version(self, policy_version: int) -> None:
        """An update was applied: groups in training are trained, waiting ones age, and those over age leave.

        Call it before the new weights are sent to the engine: tokens of an unknown version are refused.
        """
        with self._changed:
            self._policy_version = self.sampler.policy_version = policy_version
            trained = [group_id for group_id in self._untrained if self._in_training[group_id] < policy_version]
            for group_id in trained:
                del self._untrained[group_id]
            self.ledger.move_all(trained, "trained")
            self._drop(self._waiting.remove_over_age(policy_version), "over_age")
            self._changed.notify_all()

    def take(self, policy_version: int, scorer: PrefixScorer | None, timeout_s: float) -> list[TakenGroup]:
        """The next batch: waits for `batch_groups` groups, rejects what the sampler says, and takes what it chooses.

        Args:
            policy_version: the trainer's.
            scorer: scores prefixes for the sampler, outside the pool's lock, and only if something is to be rejected; None:
                prefixes count as not forgotten.
            timeout_s: seconds to wait; 0 only looks.

        Returns:
            Exactly `batch_groups` groups, in order of completion.

        Raises:
            WaitTimeoutError: too few groups within `timeout_s`; the message says how many are where.
            StopRequested: or the first fault of another part.
        """
        self.set_policy_version(policy_version)
        decision = None if self.tape is None else self.tape.next_decision(policy_version)
        if decision is not None:
            return self._take_decided(decision, timeout_s)
        with self._changed:
            self._wait_for_batch(timeout_s)
            slots = self._waiting.plan()
            groups = self._waiting.groups(slots) if scorer is not None else []
        scored = score_prefixes(groups, scorer) if scorer is not None and groups else []
        complete = {
            group.group_id: logprobs
            for group, (logprobs, num_tokens) in zip(groups, scored, strict=True)
            if num_tokens == group.num_sampled_tokens
        }
        with self._changed:
            self._wait_for_batch(timeout_s)  # a group may have failed meanwhile
            self._waiting.score(slots if scored else (), [logprobs for logprobs, _ in scored])
            self.sampler.tokens_rescored += sum(num_tokens for _, num_tokens in scored)
            taken, rejected, reduced = self._waiting.take(policy_version)
            for _, after, _ in reduced:  # the log-probs are of more members than it has
                complete.pop(after.group_id, None)
            ids = [group.group_id for group in taken]
            decision = Decision(
                policy_version,
                ids,
                [group.completed_version for group in taken],
                rejected,
                {after.group_id: members for _, after, members in reduced},
                {group_id: complete[group_id] for group_id in ids if group_id in complete},
            )
            return self._carry_out(decision, taken, reduced)

    def _take_decided(self, decision: Decision, timeout_s: float) -> list[TakenGroup]:
        """Wait for the groups of a decision that was made before, and take them whatever else waits."""

        def all_here() -> bool:
            missing = {group_id for group_id in decision.group_ids if group_id not in self._waiting}
            if missing and self.tape is not None:
                self.tape.missing(decision, missing)
            return not missing

        with self._changed:
            if not self._wait(all_here, timeout_s, BATCH_WAITER, self._missing):
                raise WaitTimeoutError(f"{BATCH_WAITER} waited {timeout_s:.1f} s for {self._missing()}.")
            taken, reduced = self._waiting.take_decided(decision)
            versions = zip(taken, decision.completed_versions, strict=True)
            taken = [replace(group, completed_version=completed) for group, completed in versions]
            return self._carry_out(decision, taken, reduced)

    def _carry_out(self, decision: Decision, taken: Sequence[TrajectoryGroup], reduced: Sequence[Reduced]) -> list[TakenGroup]:
        """Account for a batch that has left the waiting groups; the lock is held."""
        self._drop(decision.rejected, "rejected")
        for before, after, _ in reduced:
            self.ledger.remove_members(after.group_id, before.num_sampled - after.num_sampled, "rejected", after.outcome)
        self.ledger.move_all(decision.taken, "in_training")
        for group in taken:
            self._in_training[group.group_id] = decision.policy_version
            self._untrained[group.group_id] = group
        if self.tape is not None:
            self.tape.taken(decision)
        self._changed.notify_all()
        return [TakenGroup(group, decision.logprobs.get(group.group_id)) for group in taken]

    def delivered(self, policy_version: int) -> None:
        """The weights of `policy_version` are served: groups taken before it make room for new ones."""
        with self._changed:
            done = [group_id for group_id, taken_at in self._in_training.items() if taken_at < policy_version]
            for group_id in done:
                del self._in_training[group_id]
            # `set_policy_version` may not have been told of the update.
            self.ledger.move_all([group_id for group_id in done if self._untrained.pop(group_id, None)], "trained")
            self._changed.notify_all()

    def leave_out(self, group_ids: Sequence[int], reason: str) -> None:
        """Of the groups just taken, these are not trained, though others may be: they leave; the delivery makes their room."""
        with self._changed:
            for group_id in group_ids:
                del self._untrained[group_id]
            self._drop(group_ids, reason)

    @property
    def untrained(self) -> int:
        """Groups that were taken, and whose update was neither applied nor skipped."""
        return len(self._untrained)

    def settle_skipped(self) -> None:
        """The groups just taken led to no update: they leave for the reason `skipped_update` and make room."""
        with self._changed:
            self._in_training = {g: taken_at for g, taken_at in self._in_training.items() if taken_at < self._policy_version}
            self._drop(list(self._untrained), "skipped_update")
            self._untrained.clear()
            self._changed.notify_all()

    def _drop(self, group_ids: Sequence[int], reason: str) -> None:
        self._dropped[reason] += len(group_ids)
        self.ledger.move_all(group_ids, "dropped", reason)

    # --- waiting --------------------------------------------------------------------------------------------------------

    def _wait_for_batch(self, timeout_s: float) -> None:
        if not self._wait(lambda: len(self._waiting) >= self.batch_groups, timeout_s, BATCH_WAITER, self._missing):
            raise WaitTimeoutError(f"{BATCH_WAITER} waited {timeout_s:.1f} s for {self._missing()}.")

    def _missing(self) -> str:
        places = f"{len(self._waiting)} waiting, {self._reserved} in flight or scoring, {len(self._in_training)} in training"
        return f"{self.batch_groups} groups in the pool (at the start of the wait: {places}; limit {self.limit})"

    def _wait(self, predicate: Callable[[], bool], timeout_s: float, who: str, what: Callable[[], str]) -> bool:
        """Whether the predicate came true within `timeout_s`; the lock is held. Cheap where it holds, or no wait is wanted."""
        self._supervisor.raise_if_stopping()
        if predicate():
            return True
        if timeout_s <= 0:
            return False
        try:
            self._supervisor.wait_for(self._changed, predicate, timeout_s=timeout_s, who=who, what=what())
        except WaitTimeoutError:
            return False
        return True

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
                "waiting_groups": len(self),
                "reserved_groups": self._reserved,
                "in_training_groups": len(self._in_training),
                "rejection_ema": self.sampler.rejection_ema,
                "groups_rejected": self.groups_rejected,
                "groups_over_age": self._dropped["over_age"],
                "groups_skipped": self._dropped["skipped_update"],
                "tokens_rescored": self.tokens_rescored,
                "admission_wait_s": self._supervisor.waited_s(ADMISSION_WAITER),
                "batch_wait_s": self._supervisor.waited_s(BATCH_WAITER),
                **self.sampler.statistics(),
                **self.ledger.bias.metrics(),
            }

    def completed_staleness(self) -> dict[str, Tensor]:
        """Staleness of the groups added since the last call, when they were complete ([N] updates each): for histograms."""
        with self._changed:
            rows = torch.tensor(list(self._completed), dtype=torch.float64).view(-1, 2)
            self._completed.clear()
        return {"completed_generation_staleness": rows[:, 0], "completed_waiting_staleness": rows[:, 1]}

    def state_dict(self, unfinished_tokens: int = 0, carried: Mapping[int, int] = MappingProxyType({})) -> dict[str, Any]:
        """One consistent snapshot as flat tensors and plain Python; loads with `torch.load(..., weights_only=True)`.

        Groups taken for an update that was not applied are in it, ahead of the waiting ones: none is lost.

        Args:
            unfinished_tokens, carried: see `Ledger.state_dict`.
        """
        with self._changed:
            untrained = list(self._untrained.values())
            groups, facts = self._waiting.snapshot()
            state = {
                "policy_version": self._policy_version,
                "dropped": dict(self._dropped),
                "sampler": self.sampler.state_dict(),
                "ledger": self.ledger.state_dict(unfinished_tokens, carried),
            }
        facts = [*(inspect_group(group, self._policy_version) for group in untrained), *facts]
        return {**state, "groups": pack([*untrained, *groups], facts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict` in a pool from which nothing was taken yet. Reservations are not restored: prompts in flight are
        dispatched again by whoever kept them.

        Raises:
            CheckpointError: more groups were waiting than this pool holds.
        """
        groups, facts = unpack(state["groups"])
        if len(groups) > self.limit:
            raise CheckpointError(
                f"data.max_policy_age and data.capacity_groups must leave room for the {len(groups)} groups of the checkpoint, "
                f"got room for {self.limit}. Resume with the settings of the run that wrote it."
            )
        with self._changed:
            self._reserved, self._in_training, self._untrained = 0, {}, {}
            self._dropped = Counter(state["dropped"])
            self.ledger.load_state_dict(state["ledger"])
            self.sampler.load_state_dict(state["sampler"])
            self._waiting.restore(groups, facts)
            self.ledger.move_all([row.group_id for row in facts], "waiting")
            self.set_policy_version(state["policy_version"])


def _room() -> str:
    return "room in the pool"
