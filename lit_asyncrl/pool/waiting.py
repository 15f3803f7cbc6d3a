"""The groups that wait in the pool: a TorchRL replay buffer, and what is known of each without reading it. Not thread-safe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor
from torchrl.data import ReplayBuffer

from lit_asyncrl.pool.facts import AgeMeasure, GroupFacts, inspect_group
from lit_asyncrl.pool.records import GroupStorage, select_members
from lit_asyncrl.pool.sampler import StalenessSampler
from lit_asyncrl.pool.tape import Decision
from lit_asyncrl.pool.writer import FreeSlotWriter
from lit_asyncrl.types import TrajectoryGroup


class Reduced(NamedTuple):
    """A group that lost members: what was known of it before, what is now, and which members [G] bool it kept."""

    before: GroupFacts
    after: GroupFacts
    members: Tensor


class WaitingGroups:
    """Whole groups in a replay buffer, which drops them by age and gives them out as its sampler says.

    A group that is added is written into the buffer when the trainer next looks: together with others, which costs a third of
    one by one, and in the trainer's time instead of the producers'.

    Args:
        sampler: ranks and chooses.
        limit: most groups that ever wait.
        batch_groups: groups of one batch.
        max_policy_age: largest age of a group that is taken, in updates; None: no bound.
        age_measure: see `TrajectoryPool`.
    """

    def __init__(
        self, sampler: StalenessSampler, limit: int, batch_groups: int, max_policy_age: int | None, age_measure: AgeMeasure
    ) -> None:
        self._sampler = sampler
        self._batch_groups = batch_groups
        self._max_policy_age = max_policy_age
        self._age_measure: AgeMeasure = age_measure
        self._storage = GroupStorage(limit)
        self._buffer = ReplayBuffer(
            storage=self._storage, sampler=sampler, writer=FreeSlotWriter(sampler), batch_size=batch_groups
        )
        self._buffer.empty()  # the sampler may have served an earlier run
        self._arrived: dict[int, tuple[TrajectoryGroup, GroupFacts]] = {}  # by group_id: not in the buffer yet
        self._known: dict[int, GroupFacts] = {}  # by slot
        self._slot_of: dict[int, int] = {}  # by group_id
        self._expiring: dict[float, list[int]] = {}  # newest version at which groups may be taken -> their ids

    def __len__(self) -> int:
        return len(self._known) + len(self._arrived)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._slot_of or group_id in self._arrived

    @property
    def num_stored(self) -> int:
        """Slots of the buffer that hold a group, waiting or gone."""
        return len(self._storage)

    def last_version(self, facts: GroupFacts) -> float:
        """Newest policy version at which a group may be taken."""
        return math.inf if self._max_policy_age is None else facts.last_version(self._max_policy_age, self._age_measure)

    # --- in -------------------------------------------------------------------------------------------------------------

    def add(self, group: TrajectoryGroup, facts: GroupFacts) -> None:
        """Take over a checked group."""
        if facts.completed_version != group.completed_version:
            group = replace(group, completed_version=facts.completed_version)
        self._arrived[group.group_id] = (group, facts)

    def write(self) -> None:
        """Write what was added since into the buffer."""
        if not self._arrived:
            return
        arrived = list(self._arrived.values())
        self._arrived.clear()
        slots = self._buffer.extend([group for group, _ in arrived])
        for slot, (_, facts) in zip(slots.tolist(), arrived, strict=True):
            self._slot_of[facts.group_id] = slot
            self._know(slot, facts)

    def _know(self, slot: int, facts: GroupFacts) -> None:
        self._known[slot] = facts
        self._sampler.describe(slot, facts)
        if self._max_policy_age is not None and (last := self.last_version(facts)) != math.inf:
            self._expiring.setdefault(last, []).append(facts.group_id)

    # --- out ------------------------------------------------------------------------------------------------------------

    def remove_over_age(self, policy_version: int) -> list[int]:
        """Groups that are over age at this version leave; their ids."""
        self.write()
        gone: list[int] = []
        for last in sorted(version for version in self._expiring if version < policy_version):
            for group_id in self._expiring.pop(last):
                slot = self._slot_of.get(group_id)
                # A group that lost members may have become younger, and is then listed again.
                if slot is not None and self.last_version(self._known[slot]) < policy_version:
                    gone.append(group_id)
        self._remove(gone)
        return gone

    def _remove(self, group_ids: Sequence[int]) -> None:
        slots = [self._slot_of[group_id] for group_id in group_ids]
        self._sampler.discard(slots)
        for slot in slots:
            self._leave(slot)

    def _leave(self, slot: int) -> TrajectoryGroup:
        del self._slot_of[self._known.pop(slot).group_id]
        return self._storage.group(slot)

    def plan(self) -> list[int]:
        """Let the sampler decide how much it rejects, and name the slots that it wants scored for that."""
        self.write()
        return self._sampler.plan(self._storage, self._batch_groups)

    def score(self, slots: Sequence[int], logprobs: Sequence[Tensor]) -> None:
        """Tell the sampler the log-probs of planned slots."""
        self._sampler.score(self._storage, slots, logprobs)

    def take(self, policy_version: int) -> tuple[list[TrajectoryGroup], list[int], list[Reduced]]:
        """Consume a batch; there must be one.

        Returns:
            The batch's groups, the ids of rejected groups, and the groups that lost members (in the batch or not).
        """
        self.write()
        # What `ReplayBuffer.sample` does, without stacking the batch's entries: it leaves as groups.
        index, _ = self._sampler.sample(self._storage, self._batch_groups)
        rejected = [self._leave(slot).group_id for slot in self._sampler.rejected]
        reduced = [self._reduce(slot, members, policy_version) for slot, members in self._sampler.kept.items()]
        return [self._leave(slot) for slot in index.tolist()], rejected, reduced

    def take_decided(self, decision: Decision) -> tuple[list[TrajectoryGroup], list[Reduced]]:
        """Consume what was decided elsewhere, without the sampler; every group of the decision waits.

        Returns:
            The batch's groups, in the decision's order, and the groups that lost members.
        """
        self.write()
        reduced = []
        for group_id, members in decision.reduced.items():
            slot = self._slot_of[group_id]
            self._storage.set(slot, select_members(self._storage.group(slot), members)[0])
            reduced.append(self._reduce(slot, members, decision.policy_version))
        taken = [self._storage.group(self._slot_of[group_id]) for group_id in decision.taken]
        self._remove([*decision.rejected, *decision.taken])
        self._sampler.groups_rejected += len(decision.rejected)
        return taken, reduced

    def _reduce(self, slot: int, members: Tensor, policy_version: int) -> Reduced:
        """Learn anew what is known of a group whose entry was rewritten."""
        before, after = self._known[slot], inspect_group(self._storage.group(slot), policy_version)
        self._know(slot, after)
        return Reduced(before, after, members)

    # --- reading --------------------------------------------------------------------------------------------------------

    def groups(self, slots: Sequence[int]) -> list[TrajectoryGroup]:
        """The groups in these slots."""
        return [self._storage.group(slot) for slot in slots]

    def snapshot(self) -> tuple[list[TrajectoryGroup], list[GroupFacts]]:
        """All groups in order of arrival, and what is known of them."""
        self.write()
        slots = self._sampler.waiting
        return self.groups(slots), [self._known[slot] for slot in slots]

    def restore(self, groups: Sequence[TrajectoryGroup], facts: Sequence[GroupFacts]) -> None:
        """Hold these groups and no others."""
        self._buffer.empty()
        self._known, self._slot_of, self._expiring = {}, {}, {}
        self._arrived = {row.group_id: (group, row) for group, row in zip(groups, facts, strict=True)}
        self.write()
