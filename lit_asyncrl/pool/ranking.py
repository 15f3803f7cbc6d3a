"""Samplers that reject the stalest entries of a buffer that holds too many, each by its own idea of stale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from lit_asyncrl.algorithm.staleness import generation_staleness, group_means, members_to_reject, rejection_budget
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.pool.facts import GroupFacts
from lit_asyncrl.pool.sampler import StalenessSampler

UNKNOWN = -2
"""`completed_version` of a slot whose entry was neither described nor read."""


class FactTable:
    """What ranking needs of each slot's entry, as growing arrays, so that thousands are ranked at once.

    Attributes:
        group_id, completed_version, start_version, num_members: [slots] int64.
        generation: [slots] float64, mean generation staleness of the members, in updates.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every slot."""
        self.group_id, self.completed_version, self.start_version, self.num_members = (
            np.full(64, UNKNOWN, dtype=np.int64) for _ in range(4)
        )
        self.generation = np.zeros(64)

    def set(self, slot: int, group_id: int, completed: int, start: int, num_members: int, generation: float) -> None:
        """Enter one slot."""
        if slot >= self.group_id.size:
            self._grow(slot + 1)
        self.group_id[slot] = group_id
        self.completed_version[slot] = completed
        self.start_version[slot] = start
        self.num_members[slot] = num_members
        self.generation[slot] = generation

    def forget(self, slot: int) -> None:
        """The slot's entry is another one."""
        if slot < self.completed_version.size:
            self.completed_version[slot] = UNKNOWN

    def unknown(self, slots: np.ndarray) -> np.ndarray:
        """Those of the slots that were not entered."""
        if slots.size and (largest := int(slots.max())) >= self.group_id.size:
            self._grow(largest + 1)
        return slots[self.completed_version[slots] == UNKNOWN]

    def read(self, storage: Storage, slots: Sequence[int]) -> None:
        """Enter slots from their entries, all at once."""
        records = [storage.get(slot) for slot in slots]
        sizes = torch.tensor([record["lengths"].numel() for record in records])
        lengths = torch.cat([record["lengths"] for record in records])
        versions = torch.cat([record["token_versions"] for record in records])
        completed = torch.tensor([int(record["completed_version"]) for record in records])
        group_index = torch.repeat_interleave(sizes)
        generation = group_means(
            generation_staleness(versions, lengths, completed.repeat_interleave(sizes)), group_index, len(records)
        )
        # Tokens that were not sampled (version -1) must not count as the oldest.
        sampled = torch.where(versions >= 0, versions.long(), torch.iinfo(torch.int64).max)
        start = completed.scatter_reduce(0, torch.repeat_interleave(group_index, lengths), sampled, "amin")
        ids = [int(record["group_id"]) for record in records]
        for row in zip(slots, ids, completed.tolist(), start.tolist(), sizes.tolist(), generation.tolist(), strict=True):
            self.set(*row)

    def _grow(self, size: int) -> None:
        room = max(size, 2 * self.group_id.size) - self.group_id.size
        for name in ("group_id", "completed_version", "start_version", "num_members", "generation"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.full(room, UNKNOWN, dtype=column.dtype)]))


class RankingSampler(StalenessSampler):
    """Rejects the stalest entries, as many as the buffer holds too many, and takes the rest in order of completion.

    Once per batch taken, the excess of the buffer over its target is smoothed into a rejection share; never so many are rejected
    that the next batch is short. Ties: the older start version is rejected first, then the lower `group_id`.

    Entries are TensorDicts with `group_id` and `completed_version` (integers), `lengths` [G], `token_versions` [L] (-1 where
    not sampled), and `behavior_logprobs` [L]; see `TrajectoryGroup`.

    Args:
        ema_beta: weight in (0, 1] of the newest observation in the smoothed excess.
        target_occupancy: groups that should be waiting when a batch is taken; None: one batch.

    Raises:
        ConfigurationError: an argument is out of its range.
    """

    def __init__(self, ema_beta: float = 0.2, target_occupancy: float | None = None) -> None:
        super().__init__()
        problems = self._problems()
        if not 0 < ema_beta <= 1:
            problems.append(f"data.sampler.ema_beta must be in (0, 1], got {ema_beta}. 1 does not smooth.")
        if target_occupancy is not None and not target_occupancy > 0:
            problems.append(
                f"data.sampler.target_occupancy must be above 0 groups, got {target_occupancy}. Leave it out for one batch."
            )
        if problems:
            raise ConfigurationError(" ".join(problems))
        self.ema_beta = ema_beta
        self.target_occupancy = target_occupancy
        self.rejection_ema = 0.0
        self._facts = FactTable()
        self._plan: dict[int, None] | None = None  # slots to rank; None: no plan made
        self._budget, self._planned_ema = 0, 0.0
        self._statistics: dict[str, float] = {}

    def _problems(self) -> list[str]:
        """What is wrong with the arguments of a subclass."""
        return []

    # --- deciding -------------------------------------------------------------------------------------------------------

    def plan(self, storage: Storage, batch_size: int) -> list[int]:
        """Smooth the excess and fix the budget; if it is above 0, see to it that every waiting slot can be ranked."""
        self._budget, self._planned_ema = self._new_budget(storage, batch_size)
        self._plan = dict(self._waiting) if self._budget else {}
        if self._plan:
            self._read_unknown(storage)
        self._statistics = {"rejection_budget": float(self._budget)}
        return []

    def _new_budget(self, storage: Storage, batch_size: int) -> tuple[int, float]:
        target = float(batch_size) if self.target_occupancy is None else self.target_occupancy
        return rejection_budget(len(self._waiting), target, batch_size, self.rejection_ema, self.ema_beta)

    def _read_unknown(self, storage: Storage) -> None:
        unknown = self._facts.unknown(self._waiting_slots())
        if unknown.size:
            self._facts.read(storage, unknown.tolist())

    def _reject(self, storage: Storage, batch_size: int) -> tuple[list[int], dict[int, Tensor]]:
        if self._plan is None:
            self.plan(storage, batch_size)
        self.rejection_ema = self._planned_ema  # not before: a run may end while prefixes are scored
        candidates = np.fromiter(self._plan or (), dtype=np.int64)
        try:
            if not candidates.size:
                return [], {}
            return self._rank(storage, candidates, self._budget, batch_size)
        finally:
            self._plan, self._budget = None, 0

    def _rank(
        self, storage: Storage, candidates: np.ndarray, budget: int, batch_size: int
    ) -> tuple[list[int], dict[int, Tensor]]:
        """Slots to reject and members that reduced entries keep, given slots to choose from and a budget above 0."""
        staleness = self._staleness(candidates)
        order = members_to_reject(
            staleness,
            *self._tie_breakers(candidates),
            max(0, min(budget, len(self._waiting) - batch_size)),  # groups may have left since the plan was made
        )
        self._note(staleness)
        return candidates[order.numpy()].tolist(), {}

    def _staleness(self, slots: np.ndarray) -> Tensor:
        """[N] float64 updates: what the slots are ranked by."""
        raise NotImplementedError

    def _tie_breakers(self, slots: np.ndarray) -> tuple[Tensor, Tensor]:
        """[N] int64 each: of slots ranked alike the lower first number is rejected first, then the lower second one."""
        return self._column("start_version", slots), self._column("group_id", slots)

    def _note(self, staleness: Tensor) -> None:
        self._statistics["effective_staleness_mean"] = float(staleness.mean())
        self._statistics["effective_staleness_max"] = float(staleness.max())

    def _column(self, name: str, slots: np.ndarray) -> Tensor:
        return torch.from_numpy(getattr(self._facts, name)[slots])

    def _waiting_updates(self, slots: np.ndarray) -> Tensor:
        """Waiting staleness of the slots, [N] float64."""
        return torch.from_numpy((self.policy_version - self._facts.completed_version[slots]).astype(np.float64))

    def _waiting_slots(self) -> np.ndarray:
        return np.fromiter(self._waiting, dtype=np.int64, count=len(self._waiting))

    # --- slots and state ------------------------------------------------------------------------------------------------

    def describe(self, slot: int, facts: GroupFacts) -> None:
        """Tell what is known of the entry in `slot`, so that it need not be read for ranking."""
        self._facts.set(slot, facts.group_id, facts.completed_version, facts.start_version, facts.num_members, facts.generation)

    def _arrive(self, slots: Sequence[int]) -> None:
        super()._arrive(slots)
        for slot in slots:
            self._facts.forget(slot)
            if self._plan:
                self._plan.pop(slot, None)

    def discard(self, slots: Sequence[int]) -> None:
        """Take slots out of the queue."""
        super().discard(slots)
        if self._plan:
            for slot in slots:
                self._plan.pop(slot, None)

    def statistics(self) -> dict[str, float]:
        """Numbers about the last decision, for the log."""
        return dict(self._statistics)

    def state_dict(self) -> dict[str, Any]:
        """Plain Python; a plan that was not carried out is not part of it."""
        return {**super().state_dict(), "rejection_ema": self.rejection_ema}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        super().load_state_dict(state_dict)
        self.rejection_ema = state_dict.get("rejection_ema", 0.0)  # absent where the run had another sampler

    def _empty(self) -> None:
        super()._empty()
        self._facts.clear()
        self._plan, self._budget = None, 0


class TotalStalenessSampler(RankingSampler):
    """Ranks by total staleness: how many updates ago, on average, a group's tokens were sampled.

    It counts the time a response took to generate in full, and so rejects long responses more often than short ones.

    Args:
        ema_beta, target_occupancy: see `RankingSampler`.

    Source: the ranking that PACE (arXiv 2609.36830) improves on; PACE with a weight of 1 on generation staleness.
    """

    def _staleness(self, slots: np.ndarray) -> Tensor:
        return self._waiting_updates(slots) + self._column("generation", slots)


class MaxAgeSampler(RankingSampler):
    """Ranks by the age of a group's oldest sampled token. Of all rules here it rejects long responses most often.

    Args:
        ema_beta, target_occupancy: see `RankingSampler`.

    Source: age gates of released asynchronous trainers, as a ranking.
    """

    def _staleness(self, slots: np.ndarray) -> Tensor:
        return (self.policy_version - self._column("start_version", slots)).double()


class FreshestFirstSampler(TotalStalenessSampler):
    """Takes the freshest groups (least total staleness; ties in order of completion) and rejects the stalest.

    Its target is one batch, so that what is passed over leaves the buffer soon: with a larger one, old groups would never leave.

    Args:
        ema_beta: see `RankingSampler`.

    Source: ours, the opposite of first-in-first-out.
    """

    def __init__(self, ema_beta: float = 0.2) -> None:
        super().__init__(ema_beta)

    def _choose(self, storage: Storage, batch_size: int) -> list[int]:
        self._read_unknown(storage)
        slots = self._waiting_slots()
        freshest = torch.argsort(self._staleness(slots), stable=True)[:batch_size]
        return slots[freshest.sort().values.numpy()].tolist()
