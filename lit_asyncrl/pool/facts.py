"""What the pool knows of a group without looking at its tokens again; making it checks the group at the door."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
import torch

from lit_asyncrl.errors import PoolError
from lit_asyncrl.types import GroupOutcome, TrajectoryGroup

AgeMeasure = Literal["mean", "oldest"]

TOKEN_FIELDS = {
    "token_ids": torch.int64,
    "loss_mask": torch.bool,
    "behavior_logprobs": torch.float32,
    "token_versions": torch.int32,
}
MEMBER_FIELDS = {
    "lengths": torch.int64,
    "rewards": torch.float32,
    "correct": torch.bool,
    "truncated": torch.bool,
}
"""Fields of a group with one entry per token and per member, and their types."""


class GroupFacts(NamedTuple):
    """Counts and versions of a group, as exact integers where a bound is compared.

    `start_version` and `newest_version` are of all sampled tokens (`completed_version` and -1 if there are none), `version_sum`
    and `oldest_version` of trained ones. `generation` is the mean over members of the generation staleness, in updates.
    """

    group_id: int
    num_members: int
    num_sampled: int
    num_trained: int
    version_sum: int
    oldest_version: int
    start_version: int
    newest_version: int
    completed_version: int
    num_correct: int
    generation: float
    reward_sum: float

    @property
    def outcome(self) -> GroupOutcome:
        """What the ledger compares trained with dispatched groups by."""
        return GroupOutcome(self.num_members, self.num_sampled, self.reward_sum, self.num_correct)

    def last_version(self, max_policy_age: int, measure: AgeMeasure) -> float:
        """Newest policy version at which the group may be taken: its age is above the bound exactly from the next one on.

        A group without a trained token has no age and may always be taken.
        """
        if not self.num_trained:
            return math.inf
        if measure == "oldest":
            return max_policy_age + self.oldest_version
        # version - sum / n <= bound, for integer versions
        return max_policy_age + self.version_sum // self.num_trained


def inspect_group(group: TrajectoryGroup, policy_version: int) -> GroupFacts:
    """Check a group and count what the pool has to know of it, in one pass over its tokens.

    `completed_version` is at least the newest token's version: an engine may report a token of newer weights before it reports
    these as served.

    Args:
        group: what the rollout worker made.
        policy_version: the newest version that exists.

    Raises:
        PoolError: the group is malformed; names the field, what it must be and what it is.
    """
    _check_shapes(group)
    lengths = group.lengths.tolist()
    # Bytes of the masks: on arrays this small, comparing and counting them costs a tenth of NumPy's reductions.
    trained = group.loss_mask.numpy().tobytes()
    starts = [0, *accumulate(lengths)]
    if starts.pop() != len(trained) or not lengths or min(lengths) < 1:
        got = f"{lengths} for {len(trained)} tokens"
        raise _malformed(group, "lengths", "hold at least one member of at least one token, and add up to the tokens", got)
    if 1 in [trained[start] for start in starts]:
        raise _malformed(group, "loss_mask", "leave a trajectory's first token untrained", "a trained first token")
    logprobs = group.behavior_logprobs.numpy()
    if not math.isfinite(logprobs.dot(logprobs)) and not np.isfinite(logprobs).all():
        raise _malformed(group, "behavior_logprobs", "be finite", f"{logprobs[~np.isfinite(logprobs)][0]}")
    reward_sum = sum(group.rewards.tolist())
    if not math.isfinite(reward_sum):
        raise _malformed(group, "rewards", "be finite", f"{group.rewards.tolist()}")
    versions = group.token_versions.numpy()
    counts = _count_versions(group, versions, trained)
    newest = counts.newest
    if newest > policy_version or group.completed_version > policy_version:
        got = f"token version {newest}, completed_version {group.completed_version}"
        raise _malformed(group, "token_versions", f"be at most the trainer's version {policy_version}", got)
    completed = max(group.completed_version, newest)
    start_version = counts.earliest if counts.num_sampled else completed
    return GroupFacts(
        group.group_id,
        len(lengths),
        counts.num_sampled,
        counts.num_trained,
        counts.version_sum,
        counts.oldest,
        start_version,
        newest,
        completed,
        group.correct.tolist().count(True),
        0.0 if start_version == completed else _generation(versions, starts, completed),
        reward_sum,
    )


class _Counts(NamedTuple):
    """Sampled and trained tokens; sum and least of the trained tokens' versions; least and largest of the sampled ones'."""

    num_sampled: int
    num_trained: int
    version_sum: int
    oldest: int
    earliest: int
    newest: int


def _count_versions(group: TrajectoryGroup, versions: np.ndarray, trained: bytes) -> _Counts:
    sampled_mask = versions >= 0
    sampled = sampled_mask.tobytes()
    num_trained = trained.count(1)
    num_sampled = num_trained if trained == sampled else sampled.count(1)
    if trained == sampled and num_sampled:
        version = int(versions[sampled.index(1)])
        if (versions == version).tobytes() == sampled:  # one version sampled the whole group
            return _Counts(num_sampled, num_trained, num_trained * version, version, version, version)
    sampled_versions = versions[sampled_mask]
    trained_versions = sampled_versions if trained == sampled else versions[np.frombuffer(trained, dtype=np.bool_)]
    oldest = int(trained_versions.min()) if num_trained else 0
    if oldest < 0:
        raise _malformed(group, "loss_mask", "mark only tokens that the engine sampled", "a trained token of version -1")
    earliest, newest = (int(sampled_versions.min()), int(sampled_versions.max())) if num_sampled else (0, -1)
    return _Counts(num_sampled, num_trained, int(trained_versions.sum(dtype=np.int64)), oldest, earliest, newest)


def _generation(versions: np.ndarray, starts: list[int], completed: int) -> float:
    """Mean over members of the mean of `completed` minus version over sampled tokens; 0 for a member without any."""
    sampled = versions >= 0
    sums = np.add.reduceat((completed - versions) * sampled, starts).tolist()
    flags = sampled.tobytes()
    counts = [flags.count(1, start, stop) for start, stop in zip(starts, [*starts[1:], len(flags)], strict=True)]
    return sum([total / count for total, count in zip(sums, counts, strict=True) if count]) / len(starts)


def _check_shapes(group: TrajectoryGroup) -> None:
    """Types and shapes of every tensor."""
    tokens, members = group.token_ids.shape, group.lengths.shape
    components = group.reward_components
    if (
        len(tokens) == 1
        and len(members) == 1
        and group.token_ids.dtype is torch.int64
        and group.loss_mask.dtype is torch.bool
        and group.behavior_logprobs.dtype is torch.float32
        and group.token_versions.dtype is torch.int32
        and group.lengths.dtype is torch.int64
        and group.rewards.dtype is torch.float32
        and group.correct.dtype is torch.bool
        and group.truncated.dtype is torch.bool
        and components.dtype is torch.float32
        and group.loss_mask.shape == group.behavior_logprobs.shape == group.token_versions.shape == tokens
        and group.rewards.shape == group.correct.shape == group.truncated.shape == members
        and components.shape == (members[0], len(group.reward_names))
    ):
        return
    for shape, fields in ((tokens, TOKEN_FIELDS), (members, MEMBER_FIELDS)):
        for name, dtype in fields.items():
            value = getattr(group, name)
            if value.dtype is not dtype or len(value.shape) != 1 or value.shape != shape:
                raise _malformed(group, name, f"be {dtype} [{shape.numel()}]", f"{value.dtype} {list(value.shape)}")
    contract = f"be torch.float32 {[members[0], len(group.reward_names)]}"
    raise _malformed(group, "reward_components", contract, f"{components.dtype} {list(components.shape)}")


def _malformed(group: TrajectoryGroup, field: str, contract: str, got: str) -> PoolError:
    return PoolError(
        f"{field} must {contract}, got {got} (group {group.group_id} of task {group.task!r}). The group is refused; "
        "report the engine or reward that made it."
    )
