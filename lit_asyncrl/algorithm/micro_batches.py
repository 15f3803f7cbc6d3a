"""Parts of micro-batches: chosen trajectories, the mini-batches of several updates, and groups that have become too old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from lit_asyncrl.types import MicroBatch


def select(batch: MicroBatch, rows: Tensor) -> MicroBatch:
    """The given trajectories (at least one) of a micro-batch, without padding that none of them needs."""
    width = int(batch.attention_mask[rows].sum(-1).max())
    return replace(
        batch,
        input_ids=batch.input_ids[rows, :width],
        attention_mask=batch.attention_mask[rows, :width],
        loss_mask=batch.loss_mask[rows, :width],
        behavior_logprobs=batch.behavior_logprobs[rows, :width],
        token_versions=batch.token_versions[rows, :width],
        rewards=batch.rewards[rows],
        group_index=batch.group_index[rows],
        logprobs=None if batch.logprobs is None else batch.logprobs[rows, :width],
    )


def split_updates(micro_batches: Sequence[MicroBatch], num_updates: int) -> list[list[MicroBatch]]:
    """Deal the groups of a batch out to mini-batches: group j goes to number j mod `num_updates`.

    Groups come sorted by length, so that the mini-batches are alike; each micro-batch is split where it is, so that no part is
    larger than it was. Fewer groups than updates give fewer mini-batches.

    Args:
        micro_batches: whole groups.
        num_updates: at least 1.
    """
    if num_updates == 1:
        return [list(micro_batches)]
    updates: list[list[MicroBatch]] = [[] for _ in range(num_updates)]
    dealt = 0
    for part in micro_batches:
        number = (part.group_index + dealt) % num_updates
        dealt += int(part.group_index.max()) + 1
        for i in number.unique().tolist():
            chosen = select(part, (number == i).nonzero().squeeze(-1))
            updates[i].append(replace(chosen, group_index=chosen.group_index.unique(return_inverse=True)[1]))
    return [update for update in updates if update]


def policy_ages(micro_batch: MicroBatch, policy_version: int) -> Tensor:
    """Ages in updates of all trained tokens, 1-d int64."""
    return policy_version - micro_batch.token_versions[micro_batch.loss_mask].long()


def without_over_age(
    micro_batch: MicroBatch, policy_version: int, max_policy_age: int, measure: Literal["mean", "oldest"]
) -> tuple[MicroBatch, list[int]]:
    """Train no token of groups whose age is above the bound; they stay where they are.

    Args:
        micro_batch: whole groups.
        policy_version: that of the policy about to be updated.
        max_policy_age: bound in updates.
        measure: age of a group: the mean over its trained tokens, or that of its oldest one.

    Returns:
        The micro-batch with their loss mask cleared, and which groups those are, by `group_index`.
    """
    index = micro_batch.group_index
    group = index[:, None].expand_as(micro_batch.loss_mask)[micro_batch.loss_mask]
    excess = policy_ages(micro_batch, policy_version) - max_policy_age
    over = excess.new_zeros(len(index.bincount()))  # a group without trained tokens stays at 0
    if measure == "oldest":
        over.scatter_reduce_(0, group, excess, "amax")
    else:  # in integers: a bound is not missed by a rounding
        over.index_add_(0, group, excess)
    kept = micro_batch.loss_mask & (over <= 0)[index][:, None]
    return replace(micro_batch, loss_mask=kept), (over > 0).nonzero().squeeze(-1).tolist()


def trained_counts(micro_batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Trajectories with a trained token, and trained tokens: the denominators of every aggregation."""
    masks = [part.loss_mask for part in micro_batches]
    return sum(int(mask.any(-1).sum()) for mask in masks), sum(int(mask.sum()) for mask in masks)
