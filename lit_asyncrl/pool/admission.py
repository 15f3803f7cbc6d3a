"""How many groups may be outstanding, from the bound on their age."""

from __future__ import annotations

from lit_asyncrl.errors import ConfigurationError

DEFAULT_CAPACITY_BATCHES = 4
"""Capacity, in batches, of a pool without an age bound."""


def admission_limit(
    batch_groups: int,
    max_policy_age: int | None,
    capacity_groups: int | None = None,
    publish_lag: int = 0,
    *,
    target_occupancy: float | None = None,
    measures_mean: bool = True,
    splits_groups: bool = False,
    updates_per_batch: int = 1,
) -> int:
    """Largest number of outstanding groups: batch_groups * (max_policy_age - publish_lag + 1), or the capacity without a bound.

    With several updates per batch that many fewer batches, since each ages the others by as much.

    Args:
        batch_groups: groups of one update.
        max_policy_age: bound in updates, or None.
        capacity_groups: what the pool may hold; None: what the bound needs, or four batches without one.
        publish_lag: updates by which the engine's weights are held back; that part of the age is spent before generation starts.
        target_occupancy: the sampler's target, in groups, which has to fit in.
        measures_mean: whether a group's age is the mean over its tokens.
        splits_groups: whether the sampler rejects single members.
        updates_per_batch: optimizer updates made of one batch.

    Raises:
        ConfigurationError: the numbers contradict each other; names every contradiction.

    Source: VCPO's released code admits batch * (k + 1) groups. That groups in training count until their update is delivered is
    ours: it makes k a bound on the age where it was k + 1.
    """
    problems = []
    limit = None  # None: unknown, because of another problem
    if batch_groups < 1:
        problems.append(f"data.batch_groups must be at least 1, got {batch_groups}. Raise it.")
    elif max_policy_age is None:
        limit = DEFAULT_CAPACITY_BATCHES * batch_groups if capacity_groups is None else capacity_groups
        if limit < batch_groups:
            problems.append(f"data.capacity_groups must hold at least one batch of {batch_groups} groups, got {limit}. Raise it.")
    elif max_policy_age < publish_lag:
        problems.append(
            f"data.max_policy_age must be at least publish_lag, got {max_policy_age} (publish_lag {publish_lag}). "
            "Every token would be over age: raise data.max_policy_age or lower publish_lag."
        )
    else:
        limit = batch_groups * max(1, (max_policy_age - publish_lag + 1) // updates_per_batch)
        if capacity_groups is not None and capacity_groups < limit:
            problems.append(
                f"data.capacity_groups must be at least {limit} groups for data.max_policy_age {max_policy_age}, "
                f"got {capacity_groups}. Leave it out, or lower data.max_policy_age."
            )
    if limit is not None and target_occupancy is not None and target_occupancy > limit:
        problems.append(
            f"data.sampler.target_occupancy must be at most the pool's capacity of {limit} groups, got {target_occupancy}. "
            "Nothing would ever be rejected: lower it, or raise data.max_policy_age or data.capacity_groups."
        )
    if splits_groups and measures_mean and max_policy_age is not None:
        problems.append(
            f"data.age_measure must be oldest with data.sampler.unit trajectory, got mean (data.max_policy_age {max_policy_age}: "
            "taking responses out of a group can raise its mean age above the bound). "
            "Set data.age_measure: oldest, or data.max_policy_age: null."
        )
    if problems or limit is None:
        raise ConfigurationError(" ".join(problems))
    return limit
