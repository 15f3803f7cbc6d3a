"""Groups to padded micro-batches, and what the log wants to know of them; the only place that pads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_asyncrl.algorithm.staleness import generation_staleness, waiting_staleness
from lit_asyncrl.pool.records import TakenGroup
from lit_asyncrl.types import MicroBatch, TrainBatch


def collate(
    taken: Sequence[TakenGroup],
    *,
    max_tokens_per_micro_batch: int | None,
    temperature: float,
    policy_version: int,
) -> TrainBatch:
    """Pack whole groups into micro-batches by padded size.

    Groups are ordered by their longest trajectory (then by `group_id`), longest first, so that neighbours pad little and the
    result does not depend on the order in which they were taken. Nothing is dropped or cut.

    Args:
        taken: at least one group.
        max_tokens_per_micro_batch: most padded tokens (B * T) of a micro-batch; a group that is larger by itself gets a
            micro-batch of its own (see `groups_over_budget`). None: one micro-batch.
        temperature: of the sampler.
        policy_version: the trainer's, against which ages are measured.

    Returns:
        The batch, with `stats` and `histograms` filled.
    """
    ordered = in_training_order(taken)
    batch = TrainBatch(
        micro_batches=pad_groups(ordered, max_tokens_per_micro_batch=max_tokens_per_micro_batch, temperature=temperature),
        num_trajectories=0,
        num_trained_tokens=0,
    )
    _describe(batch, ordered, policy_version)
    return batch


def in_training_order(taken: Sequence[TakenGroup]) -> list[TakenGroup]:
    """Longest trajectory first, then by `group_id`."""
    return sorted(taken, key=lambda item: (-int(item.group.lengths.max()), item.group.group_id))


def pad_groups(ordered: Sequence[TakenGroup], *, max_tokens_per_micro_batch: int | None, temperature: float) -> list[MicroBatch]:
    """Micro-batches of groups that are in training order; rows follow the groups' order."""
    longest = {item.group.group_id: int(item.group.lengths.max()) for item in ordered}
    return [pad(part, temperature) for part in _split(ordered, longest, max_tokens_per_micro_batch)]


def groups_over_budget(taken: Sequence[TakenGroup], max_tokens_per_micro_batch: int | None) -> list[int]:
    """`group_id` of every group whose own padded size (members times longest) is above the budget."""
    if max_tokens_per_micro_batch is None:
        return []
    groups = [item.group for item in taken]
    return [g.group_id for g in groups if g.group_size * int(g.lengths.max()) > max_tokens_per_micro_batch]


def _split(ordered: Sequence[TakenGroup], longest: dict[int, int], budget: int | None) -> list[list[TakenGroup]]:
    """Fill micro-batches in order; the first group of each, its longest, sets its width."""
    parts: list[list[TakenGroup]] = []
    rows = width = 0
    for item in ordered:
        size = item.group.group_size
        if not parts or (budget is not None and (rows + size) * width > budget):
            parts.append([])
            rows, width = 0, longest[item.group.group_id]
        parts[-1].append(item)
        rows += size
    return parts


def pad(part: Sequence[TakenGroup], temperature: float) -> MicroBatch:
    """One micro-batch of the given groups, in their order: flat tokens laid into rows, padded on the right.

    Args:
        part: at least one group.
        temperature: of the sampler.
    """
    groups = [item.group for item in part]
    lengths = torch.cat([group.lengths for group in groups])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    logprobs = [item.logprobs for item in part if item.logprobs is not None]

    # Row-major order of the mask equals the order of the concatenated members.
    def lay(flat: list[Tensor], fill: int | float = 0) -> Tensor:
        values = torch.cat(flat)
        return torch.full(mask.shape, fill, dtype=values.dtype).masked_scatter_(mask, values)

    return MicroBatch(
        input_ids=lay([group.token_ids for group in groups]),
        attention_mask=mask,
        loss_mask=lay([group.loss_mask for group in groups], False),
        behavior_logprobs=lay([group.behavior_logprobs for group in groups]),
        token_versions=lay([group.token_versions for group in groups], -1),
        rewards=torch.cat([group.rewards for group in groups]),
        group_index=torch.repeat_interleave(torch.tensor([group.group_size for group in groups])),
        temperature=temperature,
        # Partly known log-probs would need the same forward pass again, so they are handed on complete or not at all.
        logprobs=lay(logprobs) if len(logprobs) == len(part) else None,
    )


def _describe(batch: TrainBatch, taken: Sequence[TakenGroup], policy_version: int) -> None:
    """Fill the batch's counts, stats and histograms."""
    groups = [item.group for item in taken]
    lengths = torch.cat([group.lengths for group in groups])
    sizes = torch.tensor([group.group_size for group in groups])
    versions = torch.cat([group.token_versions for group in groups]).long()
    loss_mask = torch.cat([group.loss_mask for group in groups])
    num_members = lengths.numel()
    member = torch.repeat_interleave(lengths)

    trained_versions, trained_member = versions[loss_mask], member[loss_mask]
    num_trained = torch.bincount(trained_member, minlength=num_members)
    is_trained = num_trained > 0
    newest = torch.zeros(num_members, dtype=torch.int64).scatter_reduce(0, trained_member, trained_versions, "amax")
    oldest = newest.scatter_reduce(0, trained_member, trained_versions, "amin")
    ages = policy_version - trained_versions
    member_age = torch.zeros(num_members, dtype=torch.float64).index_add_(0, trained_member, ages.double())

    response_length = torch.bincount(member[versions >= 0], minlength=num_members).double()
    p5, p95 = _quantiles(response_length, (0.05, 0.95))
    rewards = torch.cat([group.rewards for group in groups]).double()
    completed = torch.tensor([group.completed_version for group in groups]).repeat_interleave(sizes)
    generation = generation_staleness(versions, lengths, completed)
    waiting = waiting_staleness(policy_version, completed)
    group_index = torch.repeat_interleave(sizes)
    highest = rewards.new_full((len(groups),), -torch.inf).scatter_reduce(0, group_index, rewards, "amax")
    lowest = highest.scatter_reduce(0, group_index, rewards, "amin")
    num_padded = sum(part.input_ids.numel() for part in batch.micro_batches)

    batch.num_trajectories = int(is_trained.sum())
    batch.num_trained_tokens = int(ages.numel())
    batch.stats = {
        "reward/mean": float(rewards.mean()),
        "reward/accuracy": float(torch.cat([group.correct for group in groups]).double().mean()),
        **_component_means(taken),
        "reward/zero_variance_share": float((highest == lowest).sum()) / len(groups),
        "rollout/response_length_mean": float(response_length.mean()),
        "rollout/response_length_p5": p5,
        "rollout/response_length_p95": p95,
        "rollout/truncated_share": float(torch.cat([group.truncated for group in groups]).double().mean()),
        "pool/policy_age_mean": float(ages.double().mean()) if ages.numel() else 0.0,
        "pool/policy_age_max": float(ages.max()) if ages.numel() else 0.0,
        "pool/generation_staleness_mean": float(generation.mean()),
        "pool/waiting_staleness_mean": float(waiting.mean()),
        "pool/mixed_version_share": float((newest != oldest).sum()) / max(batch.num_trajectories, 1),
        "batch/num_tokens": float(lengths.sum()),
        "batch/num_trained_tokens": float(batch.num_trained_tokens),
        "batch/padding_share": 1.0 - float(lengths.sum()) / num_padded,
    }
    batch.histograms = {
        "policy_age": (member_age / num_trained)[is_trained],
        "generation_staleness": generation,
        "waiting_staleness": waiting,
        "response_length": response_length,
    }


def _quantiles(values: Tensor, levels: Sequence[float]) -> list[float]:
    """Linear interpolation between order statistics (as `torch.quantile`, which is slow on a hundred values)."""
    ordered = values.sort().values.tolist()
    quantiles = []
    for level in levels:
        place = level * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        quantiles.append(ordered[below] + (place - below) * (ordered[above] - ordered[below]))
    return quantiles


def _component_means(taken: Sequence[TakenGroup]) -> dict[str, float]:
    """Mean of each reward function over the members whose task has it, as `reward/<name>`."""
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    by_names: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    for item in taken:
        by_names[tuple(item.group.reward_names)].append(item.group.reward_components)
    for names, parts in by_names.items():
        components = torch.cat(parts)
        for name, total in zip(names, components.double().sum(0).tolist(), strict=True):
            sums[name] += total
            counts[name] += components.shape[0]
    return {f"reward/{name}": total / counts[name] for name, total in sums.items()}
