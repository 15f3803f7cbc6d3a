"""Prefix scores for PACE: which members have to be scored again, in one call of the policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_asyncrl.algorithm.staleness import prefix_mask
from lit_asyncrl.interfaces import PrefixScorer
from lit_asyncrl.pool.records import select_members
from lit_asyncrl.types import TrajectoryGroup


def score_prefixes(groups: Sequence[TrajectoryGroup], scorer: PrefixScorer) -> list[tuple[Tensor, int]]:
    """Score again, in one call, those members of each group that have tokens older than the group's completion.

    Returns:
        Per group its log-probs [L] float32, 0 in members that were not scored, and how many sampled tokens were scored.
    """
    lengths = torch.cat([group.lengths for group in groups])
    versions = torch.cat([group.token_versions for group in groups])
    sizes = torch.tensor([group.group_size for group in groups])
    completed = torch.tensor([group.completed_version for group in groups]).repeat_interleave(sizes)
    members = torch.zeros(lengths.numel(), dtype=torch.bool)
    members[torch.repeat_interleave(lengths)[prefix_mask(versions, lengths, completed)]] = True
    parts = [select_members(group, kept) for group, kept in zip(groups, members.split(sizes.tolist()), strict=True)]
    scores = scorer([part for part, _ in parts])
    scored = []
    for (part, kept), score in zip(parts, scores, strict=True):
        assert score.shape == part.token_ids.shape, (score.shape, part.token_ids.shape)
        if kept is None:
            logprobs = score.float()
        else:
            logprobs = torch.zeros(kept.shape)
            logprobs[kept] = score.float()
        scored.append((logprobs, part.num_sampled_tokens))
    return scored
