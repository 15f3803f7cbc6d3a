"""Staleness of single groups: the exact age that admission bounds, and the prefix scores that PACE asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lit_asyncrl.algorithm.staleness import prefix_mask
from lit_asyncrl.interfaces import PrefixScorer
from lit_asyncrl.pool.records import select_members
from lit_asyncrl.types import TrajectoryGroup

AgeMeasure = Literal["mean", "oldest"]


@dataclass(frozen=True, slots=True)
class GroupAges:
    """Versions of a group's tokens, as exact sums: a bound compared in integers cannot be off by a rounding.

    `num_sampled` and `newest_version` (-1: nothing) are of all sampled tokens, the rest of trained ones.
    """

    group_id: int
    num_sampled: int
    newest_version: int
    num_trained: int
    version_sum: int
    oldest_version: int

    @classmethod
    def of(cls, group: TrajectoryGroup) -> GroupAges:
        """The ages of a group; one without a trained token has none and is never too old."""
        versions = group.token_versions.numpy()
        trained = versions[group.loss_mask.numpy()]
        return cls(
            group_id=group.group_id,
            num_sampled=int(np.count_nonzero(versions >= 0)),
            newest_version=int(versions.max()),
            num_trained=trained.size,
            version_sum=int(trained.sum(dtype=np.int64)),
            oldest_version=int(trained.min()) if trained.size else 0,
        )

    def exceeds(self, max_policy_age: int | None, measure: AgeMeasure, policy_version: int) -> bool:
        """Whether the age is above the bound: mean over trained tokens, or that of the oldest one."""
        if max_policy_age is None or not self.num_trained:
            return False
        if measure == "oldest":
            return policy_version - self.oldest_version > max_policy_age
        return policy_version * self.num_trained - self.version_sum > max_policy_age * self.num_trained


def score_prefixes(groups: Sequence[TrajectoryGroup], scorer: PrefixScorer) -> list[tuple[Tensor, int]]:
    """Score again, in one call, those members of each group that have tokens older than the group's completion.

    Returns:
        Per group its log-probs [L] float32, 0 in members that were not scored, and how many sampled tokens were scored.
    """
    parts = []
    for group in groups:
        prefix = prefix_mask(group.token_versions, group.lengths, group.completed_version)
        member = torch.repeat_interleave(group.lengths)
        members = torch.zeros(group.group_size, dtype=torch.bool)
        members[member[prefix]] = True
        parts.append(select_members(group, members))
    scores = scorer([part for part, _ in parts])
    scored = []
    for (part, kept), score in zip(parts, scores, strict=True):
        assert score.shape == part.token_ids.shape, (score.shape, part.token_ids.shape)
        logprobs = torch.zeros(kept.shape)
        logprobs[kept] = score.float()
        scored.append((logprobs, part.num_sampled_tokens))
    return scored
