"""PACE: reject the groups of highest effective staleness, as many as the pool holds too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from lit_asyncrl.algorithm.staleness import (
    ForgettingScore,
    effective_staleness,
    generation_staleness,
    group_means,
    members_to_reject,
    percentile_scores,
    prefix_forgetting,
    prefix_mask,
    rejection_budget,
)
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.pool.sampler import StalenessSampler


@dataclass(slots=True)
class _Entry:
    """What ranking needs of a waiting group; fixed when it is completed."""

    group_id: int
    completed_version: int
    start_version: int
    generation: Tensor  # [G] float64 updates
    has_prefix: bool


class PaceSampler(StalenessSampler):
    """Rejects the stalest groups of a pool that holds more than its target, and takes the rest in order of completion.

    Once per batch taken, the pool's excess over its target is smoothed into a rejection share. Groups are ranked by the mean
    over their members of waiting staleness + percentile(forgetting)^gamma * generation staleness, and the highest are rejected,
    never so many that the next batch is short. Ties: the older start version is rejected first, then the lower `group_id`.
    A prefix that was not scored counts as not forgotten.

    Entries are TensorDicts with `group_id` and `completed_version` (integers), `lengths` [G], `token_versions` [L] (-1 where
    not sampled), and `behavior_logprobs` [L]; see `TrajectoryGroup`.

    Args:
        gamma: exponent on the percentile of prefix forgetting: the higher, the fewer interrupted responses count as stale.
        ema_beta: weight in (0, 1] of the newest observation in the smoothed excess.
        target_occupancy: groups that should be waiting when a batch is taken; None: one batch.
        forgetting: how log-prob drift over a prefix is summed up: its mean (`signed`), mean size (`abs`), mean positive part
            (`pos`), or the mean of the k3 estimator of the KL divergence (`k3`).

    Raises:
        ConfigurationError: an argument is out of its range.

    Source: PACE (arXiv 2609.36830), known through its abstract and a public digest. gamma = 4, the smoothed excess and the
    percentile are the digest's. Ours: beta = 0.2, a target of one batch, the group as unit, ties, one decision per batch taken,
    first-in-first-out among survivors, sign and aggregation of the forgetting score.
    """

    def __init__(
        self,
        gamma: float = 4.0,
        ema_beta: float = 0.2,
        target_occupancy: float | None = None,
        forgetting: ForgettingScore = "signed",
    ) -> None:
        super().__init__()
        if not gamma > 0:
            raise ConfigurationError(f"data.sampler.gamma must be above 0, got {gamma}. The paper's value is 4.")
        if not 0 < ema_beta <= 1:
            raise ConfigurationError(f"data.sampler.ema_beta must be in (0, 1], got {ema_beta}. 1 does not smooth.")
        if target_occupancy is not None and not target_occupancy > 0:
            raise ConfigurationError(
                f"data.sampler.target_occupancy must be above 0 groups, got {target_occupancy}. Leave it out for one batch."
            )
        self.gamma = gamma
        self.ema_beta = ema_beta
        self.target_occupancy = target_occupancy
        self.forgetting: ForgettingScore = forgetting
        self.rejection_ema = 0.0
        self._entries: dict[int, _Entry] = {}  # of slots that were ever ranked
        self._plan: list[int] | None = None  # slots to rank; None: no plan made
        self._budget = 0
        self._scored: dict[int, Tensor] = {}  # slot -> forgetting of its members, [G]

    def plan(self, storage: Storage, batch_size: int) -> list[int]:
        """Smooth the excess, fix the budget, and name the slots with a prefix if the budget is above 0."""
        target = float(batch_size) if self.target_occupancy is None else self.target_occupancy
        self._budget, self.rejection_ema = rejection_budget(
            len(self._waiting), target, batch_size, self.rejection_ema, self.ema_beta
        )
        self._plan = self.waiting if self._budget else []
        self._scored = {}
        self._read_entries(storage, self._plan)
        return [slot for slot in self._plan if self._entries[slot].has_prefix]

    def score(self, storage: Storage, slots: Sequence[int], logprobs: Sequence[Tensor]) -> None:
        """Turn the log-probs of planned slots into forgetting scores."""
        if not slots:
            return
        records = [storage.get(slot) for slot in slots]
        lengths = [record["lengths"] for record in records]
        sizes = [part.numel() for part in lengths]
        completed = torch.tensor([self._entries[slot].completed_version for slot in slots])
        scores = prefix_forgetting(
            torch.cat(list(logprobs)),
            torch.cat([record["behavior_logprobs"] for record in records]),
            torch.cat([record["token_versions"] for record in records]),
            torch.cat(lengths),
            completed.repeat_interleave(torch.tensor(sizes)),
            self.forgetting,
        )
        self._scored.update(zip(slots, scores.split(sizes), strict=True))

    def _reject(self, storage: Storage, batch_size: int) -> list[int]:
        if self._plan is None:
            self.plan(storage, batch_size)
        candidates, budget = self._plan or [], self._budget
        self._plan, self._budget = None, 0
        if not budget:
            return []
        entries = [self._entries[slot] for slot in candidates]
        sizes = torch.tensor([entry.generation.numel() for entry in entries])
        forgetting = torch.full((int(sizes.sum()),), torch.nan, dtype=torch.float64)
        if self._scored:
            known = torch.tensor([slot in self._scored for slot in candidates])
            forgetting[known.repeat_interleave(sizes)] = torch.cat([self._scored[s] for s in candidates if s in self._scored])
        group_index = torch.repeat_interleave(sizes)
        waiting = torch.tensor([self.policy_version - entry.completed_version for entry in entries])
        staleness = effective_staleness(
            waiting[group_index],
            torch.cat([entry.generation for entry in entries]),
            percentile_scores(forgetting),
            self.gamma,
        )
        order = members_to_reject(
            group_means(staleness, group_index, len(entries)),
            torch.tensor([entry.start_version for entry in entries]),
            torch.tensor([entry.group_id for entry in entries]),
            budget,
        )
        return [candidates[i] for i in order.tolist()]

    def _read_entries(self, storage: Storage, slots: Sequence[int]) -> None:
        """Read what ranking needs of the slots that were not read before, all at once."""
        new = [slot for slot in slots if slot not in self._entries]
        if not new:
            return
        records = [storage.get(slot) for slot in new]
        sizes = torch.tensor([record["lengths"].numel() for record in records])
        lengths = torch.cat([record["lengths"] for record in records])
        versions = torch.cat([record["token_versions"] for record in records])
        completed = torch.stack([record["completed_version"] for record in records]).long()
        per_member = completed.repeat_interleave(sizes)
        generation = generation_staleness(versions, lengths, per_member).split(sizes.tolist())
        group_of_token = torch.repeat_interleave(torch.repeat_interleave(sizes), lengths)
        # Tokens that were not sampled (version -1) must not count as the oldest.
        sampled = torch.where(versions >= 0, versions.long(), torch.iinfo(torch.int64).max)
        start = completed.scatter_reduce(0, group_of_token, sampled, "amin").tolist()
        has_prefix = torch.zeros(len(new), dtype=torch.bool)
        has_prefix[group_of_token[prefix_mask(versions, lengths, per_member)]] = True
        ids = torch.stack([record["group_id"] for record in records]).tolist()
        for i, (slot, version, prefix) in enumerate(zip(new, completed.tolist(), has_prefix.tolist(), strict=True)):
            self._entries[slot] = _Entry(ids[i], version, start[i], generation[i], prefix)

    def add(self, index: int) -> None:
        """Called by the buffer: slot `index` was written."""
        super().add(index)
        self._entries.pop(int(index), None)

    def discard(self, slots: Sequence[int]) -> None:
        """Take slots out of the queue."""
        super().discard(slots)
        for slot in slots:
            self._entries.pop(slot, None)

    def state_dict(self) -> dict[str, Any]:
        """Plain Python; a plan that was not carried out is not part of it."""
        return {**super().state_dict(), "rejection_ema": self.rejection_ema}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        super().load_state_dict(state_dict)
        self.rejection_ema = state_dict["rejection_ema"]

    def _empty(self) -> None:
        super()._empty()
        self._entries.clear()
        self._plan, self._budget, self._scored = None, 0, {}
