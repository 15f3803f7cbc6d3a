"""Where staleness comes from and which part of it hurts: the formulas of PACE, free of any pool.

Members are trajectories. Flat token tensors hold them one after another, member i owning `lengths[i]` tokens, as in
`TrajectoryGroup`; several groups may be concatenated, since PACE ranks over the whole pool.

Source: PACE (arXiv 2609.36830), known here through its abstract and a public digest; the parts that are reconstructions are
named in each docstring.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

ForgettingScore = Literal["signed", "abs", "pos", "k3"]


def generation_staleness(token_versions: Tensor, lengths: Tensor, completed_version: Tensor | int) -> Tensor:
    """Mean over a member's sampled tokens of `completed_version - token_version`, in updates.

    Args:
        token_versions: [L] integer, -1 where the engine sampled nothing.
        lengths: [N] integer tokens per member, summing to L.
        completed_version: version served when the member's group was complete; [N], or one number for all.

    Returns:
        [N] float64, at least 0; 0 for a member without sampled tokens.

    Source: PACE, generation staleness GS. That c is the version at which the *group* was complete is ours.
    """
    completed = _per_token(completed_version, lengths)
    return member_means(completed - token_versions, token_versions >= 0, lengths).nan_to_num(0.0)


def waiting_staleness(policy_version: int, completed_version: Tensor) -> Tensor:
    """Updates applied since the member was complete.

    Args:
        policy_version: the trainer's.
        completed_version: [N] integer.

    Returns:
        [N] float64. With `generation_staleness` it adds up to the mean policy age of the sampled tokens.

    Source: PACE, waiting staleness WS.
    """
    return (policy_version - completed_version).to(torch.float64)


def prefix_mask(token_versions: Tensor, lengths: Tensor, completed_version: Tensor | int) -> Tensor:
    """Sampled tokens older than their member's `completed_version`: those that PACE scores again.

    Returns:
        [L] bool.
    """
    return (token_versions >= 0) & (token_versions < _per_token(completed_version, lengths))


def prefix_forgetting(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    token_versions: Tensor,
    lengths: Tensor,
    completed_version: Tensor | int,
    score: ForgettingScore = "signed",
) -> Tensor:
    """How far the current policy has moved away from a member's prefix: a mean over the prefix tokens.

    With d = behavior_logprobs - logprobs (positive: the current policy finds the token less likely than its sampler did), the
    mean is that of d (`signed`), |d| (`abs`), max(d, 0) (`pos`) or e^-d + d - 1 (`k3`).

    Args:
        logprobs: [L] nats under the current policy; read at prefix tokens only.
        behavior_logprobs: [L] nats as recorded.
        token_versions: [L] integer, -1 where not sampled.
        lengths: [N] integer.
        completed_version: [N] integer, or one number for all.
        score: which mean.

    Returns:
        [N] float64; NaN for a member without prefix.

    Source: PACE, prefix-forgetting score F. The digest gives neither sign nor aggregation; the four are ours.
    """
    prefix = prefix_mask(token_versions, lengths, completed_version)
    drop = behavior_logprobs.double() - logprobs.double()
    if score == "abs":
        drop = drop.abs()
    elif score == "pos":
        drop = drop.clamp(min=0.0)
    elif score == "k3":
        drop = torch.expm1(-drop) + drop
    return member_means(drop, prefix, lengths)


def percentile_scores(forgetting: Tensor) -> Tensor:
    """Rank of each member's forgetting among those that have a prefix: (1 + number strictly smaller) / number with a prefix.

    Args:
        forgetting: [N], NaN for a member without prefix.

    Returns:
        [N] float64 in [0, 1]; 0 without prefix. Ties share the lowest rank, so that a pool in which nothing was forgotten
        scores low throughout.

    Source: PACE, percentile; the tie rule is ours.
    """
    scored = ~forgetting.isnan()
    ranked = forgetting[scored].double()
    smaller = torch.searchsorted(ranked.sort().values, ranked.contiguous(), side="left")
    scores = torch.zeros(forgetting.shape, dtype=torch.float64, device=forgetting.device)
    scores[scored] = (1 + smaller).double() / max(ranked.numel(), 1)
    return scores


def absolute_scores(forgetting: Tensor) -> Tensor:
    """How much of each member's prefix was forgotten, whatever the others: 1 - exp(-max(forgetting, 0)).

    With the `signed` forgetting that is one minus the geometric mean of the prefix tokens' probability ratios, where those fell.

    Args:
        forgetting: [N] nats, NaN for a member without prefix.

    Returns:
        [N] float64 in [0, 1); 0 without prefix and where nothing was forgotten, so that a fresh pool loses no interrupted
        response to its rank alone.

    Source: ours, as an alternative to PACE's percentile.
    """
    return -torch.expm1(-forgetting.double().nan_to_num(0.0).clamp(min=0.0))


def effective_staleness(waiting: Tensor, generation: Tensor, percentile: Tensor, gamma: float = 4.0) -> Tensor:
    """Waiting staleness in full, generation staleness as far as the prefix was forgotten: WS + percentile^gamma * GS.

    Args:
        waiting, generation: [N] updates.
        percentile: [N] in [0, 1], of `percentile_scores`.
        gamma: sharpness; 0 gives the total staleness.

    Returns:
        [N] float64 updates. For a group take the mean over its members (`group_means`).

    Source: PACE, effective staleness E; gamma = 4 as the digest states.
    """
    return waiting.double() + percentile.double() ** gamma * generation.double()


def rejection_budget(num_waiting: int, target: float, batch: int, previous_ema: float, beta: float = 0.2) -> tuple[int, float]:
    """How many waiting members to reject before the next batch is taken.

    The pool's excess over its target, max(0, (N - target) / N), is smoothed: ema = (1 - beta) * previous + beta * excess. The
    budget is floor(ema * N), at most N - batch, so that the batch is never starved. Call it once per batch taken.

    Args:
        num_waiting: N, members in the pool.
        target: members that should be waiting (Little's law: arrival rate times the wanted wait).
        batch: members that the next batch takes.
        previous_ema: last returned one; 0 at the start.
        beta: weight of the new observation.

    Returns:
        The budget and the new average.

    Source: PACE, rejection rate by smoothed excess occupancy. The denominator N, the limit N - batch and beta = 0.2 are ours.
    """
    excess = max(0.0, (num_waiting - target) / num_waiting) if num_waiting else 0.0
    ema = (1.0 - beta) * previous_ema + beta * excess
    # The tiny summand keeps a product such as 0.29 * 100 = 28.999999999999996 at its true integer.
    wanted = math.floor(ema * num_waiting + 1e-9)
    return min(wanted, max(0, num_waiting - batch)), ema


def members_to_reject(staleness: Tensor, start_version: Tensor, member_id: Tensor, budget: int) -> Tensor:
    """Positions of the `budget` stalest members; ties go to the older start version, the lower id, the lower position.

    Args:
        staleness: [N] updates.
        start_version: [N] integer, smallest token version.
        member_id: [N] integer; members of one group may share one.
        budget: of `rejection_budget`.

    Returns:
        [min(budget, N)] int64, stalest first.
    """
    order = torch.argsort(member_id, stable=True)
    order = order[torch.argsort(start_version[order], stable=True)]
    order = order[torch.argsort(staleness[order], stable=True, descending=True)]
    return order[:budget]


def member_means(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Mean of `values` over each member's tokens in `mask`: [N] float64, NaN where the mask is empty. `values`, `mask`: [L]."""
    member = torch.repeat_interleave(lengths.long())
    chosen = values.double().masked_fill(~mask, 0.0)
    sums = chosen.new_zeros(lengths.numel()).index_add_(0, member, chosen)
    counts = chosen.new_zeros(lengths.numel()).index_add_(0, member, mask.double())
    return sums / counts


def group_means(values: Tensor, group_index: Tensor, num_groups: int) -> Tensor:
    """Mean of `values` [N] over the members of each group: [num_groups] float64, NaN for a group without members."""
    sums = values.new_zeros(num_groups, dtype=torch.float64).index_add_(0, group_index, values.double())
    return sums / torch.bincount(group_index, minlength=num_groups)


def _per_token(completed_version: Tensor | int, lengths: Tensor) -> Tensor:
    """`completed_version` of each token's member, [L] (or a scalar tensor)."""
    if isinstance(completed_version, int):
        return torch.tensor(completed_version, device=lengths.device)
    return torch.repeat_interleave(completed_version, lengths.long())
