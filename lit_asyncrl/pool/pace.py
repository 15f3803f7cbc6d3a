"""PACE: reject the groups of highest effective staleness, as many as the pool holds too many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from lit_asyncrl.algorithm.staleness import (
    ForgettingScore,
    absolute_scores,
    effective_staleness,
    generation_staleness,
    members_to_reject,
    percentile_scores,
    prefix_forgetting,
    rejection_budget,
)
from lit_asyncrl.pool.ranking import RankingSampler

Scale = Literal["percentile", "absolute"]
Unit = Literal["group", "trajectory"]

MIN_MEMBERS = 2
"""Fewest members with which a group that lost others goes on: one alone is its own baseline."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """Members of the slots that were scored: [N] each, slot after slot."""

    slots: np.ndarray  # [N] int64, of each member
    member: Tensor  # [N] int64, index within its group
    start_version: Tensor  # [N] int64
    added: Tensor  # [N] float64 updates: effective less waiting staleness
    informative: bool


class PaceSampler(RankingSampler):
    """Rejects the stalest groups of a pool that holds more than its target, and takes the rest in order of completion.

    Once per batch taken, the pool's excess over its target is smoothed into a rejection share. Groups are ranked by the mean
    over their members of waiting staleness + weight * generation staleness, where the weight says how far the current policy has
    forgotten the part of a response that older weights sampled. The highest are rejected, never so many that the next batch is
    short. Ties: the older start version is rejected first, then the lower `group_id`. A prefix that was not scored counts as not
    forgotten. If the scores tell nothing (all prefixes forgotten alike; with the scale `absolute`, none forgotten), waiting
    staleness alone ranks, and of those that waited alike the first completed is rejected first: by start version or id, long
    responses would be (5 % shorter trained responses in the simulator, against under 1 %).

    Entries are TensorDicts with `group_id` and `completed_version` (integers), `lengths` [G], `token_versions` [L] (-1 where
    not sampled), and `behavior_logprobs` [L]; see `TrajectoryGroup`. With the unit `trajectory`, entries that lose members are
    rewritten: tensors of length L and of length G lose those members' rows.

    Args:
        gamma: exponent on the percentile of prefix forgetting: the higher, the fewer interrupted responses count as stale.
        ema_beta: weight in (0, 1] of the newest observation in the smoothed excess.
        target_occupancy: groups that should be waiting when a batch is taken; None: one batch.
        forgetting: how log-prob drift over a prefix is summed up: its mean (`signed`), mean size (`abs`), mean positive part
            (`pos`), or the mean of the k3 estimator of the KL divergence (`k3`).
        scale: the weight is the forgetting's `percentile` in the pool to the power gamma, or its `absolute` size,
            1 - exp(-max(forgetting, 0)), whatever the others and gamma.
        unit: what is ranked and rejected: whole groups, or single trajectories, whose groups go on without them (and leave when
            fewer than two members remain). The budget is then counted in trajectories.

    Raises:
        ConfigurationError: an argument is out of its range.

    Source: PACE (arXiv 2609.36830), known through its abstract and a public digest. gamma = 4, the smoothed excess and the
    percentile are the digest's. Ours: beta = 0.2, a target of one batch, the group as unit, ties, one decision per batch taken,
    first-in-first-out among survivors, sign and aggregation of the forgetting score, the absolute scale.
    """

    def __init__(
        self,
        gamma: float = 4.0,
        ema_beta: float = 0.2,
        target_occupancy: float | None = None,
        forgetting: ForgettingScore = "signed",
        scale: Scale = "percentile",
        unit: Unit = "group",
    ) -> None:
        self.gamma = gamma
        super().__init__(ema_beta, target_occupancy)
        self.forgetting: ForgettingScore = forgetting
        self.scale: Scale = scale
        self.unit: Unit = unit
        self.splits_groups = unit == "trajectory"
        self._scores: _Scores | None = None

    def _problems(self) -> list[str]:
        return [] if self.gamma > 0 else [f"data.sampler.gamma must be above 0, got {self.gamma}. The paper's value is 4."]

    # --- deciding -------------------------------------------------------------------------------------------------------

    def plan(self, storage: Storage, batch_size: int) -> list[int]:
        """Smooth the excess, fix the budget, and name the slots with a prefix if the budget is above 0."""
        super().plan(storage, batch_size)
        self._scores = None
        slots = np.fromiter(self._plan or (), dtype=np.int64)
        return slots[self._facts.start_version[slots] < self._facts.completed_version[slots]].tolist()

    def _new_budget(self, storage: Storage, batch_size: int) -> tuple[int, float]:
        if self.unit == "group" or not self._waiting:
            return super()._new_budget(storage, batch_size)
        self._read_unknown(storage)
        groups = len(self._waiting)
        members = int(self._facts.num_members[self._waiting_slots()].sum())
        target = batch_size if self.target_occupancy is None else self.target_occupancy
        batch = math.ceil(batch_size * members / groups)
        return rejection_budget(members, target * members / groups, batch, self.rejection_ema, self.ema_beta)

    def score(self, storage: Storage, slots: Sequence[int], logprobs: Sequence[Tensor]) -> None:
        """Turn the log-probs of planned slots into forgetting scores; slots that have left meanwhile are passed over."""
        planned = self._plan or {}
        kept = [(slot, values) for slot, values in zip(slots, logprobs, strict=True) if slot in planned]
        if not kept:
            return
        records = [storage.get(slot) for slot, _ in kept]
        lengths = torch.cat([record["lengths"] for record in records])
        sizes = torch.tensor([record["lengths"].numel() for record in records])
        of_slot = torch.tensor([slot for slot, _ in kept]).repeat_interleave(sizes)
        completed = torch.from_numpy(self._facts.completed_version[of_slot.numpy()])
        versions = torch.cat([record["token_versions"] for record in records])
        forgetting = prefix_forgetting(
            torch.cat([values for _, values in kept]),
            torch.cat([record["behavior_logprobs"] for record in records]),
            versions,
            lengths,
            completed,
            self.forgetting,
        )
        first = torch.cumsum(sizes, 0) - sizes
        member = torch.arange(int(sizes.sum())) - first.repeat_interleave(sizes)
        sampled = torch.where(versions >= 0, versions.long(), torch.iinfo(torch.int64).max)
        start = completed.scatter_reduce(0, torch.repeat_interleave(lengths), sampled, "amin")
        generation = generation_staleness(versions, lengths, completed)
        drift = forgetting[~forgetting.isnan()]
        if not drift.numel():
            return
        self._statistics["prefix_forgetting_mean"] = float(drift.mean())
        if self.scale == "absolute":
            scores, gamma = absolute_scores(forgetting), 1.0
            informative = bool((scores > 0).any())
        else:
            scores, gamma = percentile_scores(forgetting), self.gamma
            informative = bool((drift != drift[0]).any())
        added = effective_staleness(torch.zeros_like(generation), generation, scores, gamma)
        self._scores = _Scores(of_slot.numpy(), member, start, added, informative)

    def _rank(
        self, storage: Storage, candidates: np.ndarray, budget: int, batch_size: int
    ) -> tuple[list[int], dict[int, Tensor]]:
        try:
            if self.unit == "group":
                return super()._rank(storage, candidates, budget, batch_size)
            return self._rank_members(storage, candidates, budget, batch_size)
        finally:
            self._scores = None

    def _staleness(self, slots: np.ndarray) -> Tensor:
        """Mean effective staleness of each slot's members: its waiting staleness plus what its scored members add."""
        staleness = self._waiting_updates(slots)
        place, added, _ = self._added(slots)
        sizes = self._column("num_members", slots)
        return staleness.index_add_(0, place, added / sizes[place])

    def _added(self, slots: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Of scored members of these slots: the slot's position [N], the staleness added to waiting [N], and which these are."""
        scores = self._scores
        if scores is None or not scores.informative:
            nothing = torch.zeros(0, dtype=torch.int64)
            return nothing, nothing.double(), nothing
        place_of = np.full(self._facts.group_id.size, -1, dtype=np.int64)
        place_of[slots] = np.arange(slots.size)
        place = torch.from_numpy(place_of[scores.slots])
        here = (place >= 0).nonzero()[:, 0]  # a slot may have left after it was scored
        return place[here], scores.added[here], here

    def _tie_breakers(self, slots: np.ndarray) -> tuple[Tensor, Tensor]:
        if self._scores is None or self._scores.informative:
            return super()._tie_breakers(slots)
        order = torch.arange(slots.size)  # slots come in order of completion
        return order, order

    # --- trajectories as unit -------------------------------------------------------------------------------------------

    def _rank_members(
        self, storage: Storage, candidates: np.ndarray, budget: int, batch_size: int
    ) -> tuple[list[int], dict[int, Tensor]]:
        """Reject the stalest members; a group that is left with too few leaves whole, as long as a batch of groups remains."""
        sizes = self._column("num_members", candidates)
        group = torch.repeat_interleave(sizes)
        first = torch.cumsum(sizes, 0) - sizes
        staleness = self._waiting_updates(candidates)[group]
        start, ids = (column[group] for column in self._tie_breakers(candidates))
        place, added, here = self._added(candidates)
        if self._scores is not None and self._scores.informative:
            flat = first[place] + self._scores.member[here]
            staleness[flat] += added
            start[flat] = self._scores.start_version[here]
        order = members_to_reject(staleness, start, ids, len(staleness))
        self._note(staleness)

        keep = torch.ones(len(staleness), dtype=torch.bool)
        left, removable = sizes.tolist(), len(self._waiting) - batch_size
        gone: list[int] = []
        for flat_index, of in zip(order.tolist(), group[order].tolist(), strict=True):
            if budget < 1:
                break
            if left[of] == 0:  # its group has left
                continue
            if left[of] - 1 >= MIN_MEMBERS:
                left[of] -= 1
                keep[flat_index] = False
                budget -= 1
            elif removable > 0:
                budget -= left[of]
                left[of] = 0
                gone.append(of)
                removable -= 1
        kept = {}
        for slot, mask, remaining in zip(candidates.tolist(), keep.split(sizes.tolist()), left, strict=True):
            if remaining and not bool(mask.all()):
                storage.set(slot, _reduce(storage.get(slot), mask))
                self._facts.forget(slot)
                kept[slot] = mask
        return candidates[gone].tolist(), kept

    def _empty(self) -> None:
        super()._empty()
        self._scores = None


def _reduce(entry: TensorDictBase, members: Tensor) -> TensorDictBase:
    """The entry with some `members` ([G] bool) only."""
    lengths = entry["lengths"]
    tokens = torch.repeat_interleave(members, lengths)
    reduced = entry.copy()
    for key, value in entry.items():
        if value.ndim and value.shape[0] == tokens.numel():  # if L = G, both masks are the same
            reduced[key] = value[tokens]
        elif value.ndim and value.shape[0] == members.numel():
            reduced[key] = value[members]
    return reduced
