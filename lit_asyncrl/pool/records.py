"""Trajectory groups as the replay buffer stores them: conversion, the check at the door, and the flat form of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lit_asyncrl.errors import PoolError
from lit_asyncrl.types import TrajectoryGroup

_TOKEN_FIELDS = {
    "token_ids": torch.int64,
    "loss_mask": torch.bool,
    "behavior_logprobs": torch.float32,
    "token_versions": torch.int32,
}
_MEMBER_FIELDS = {
    "lengths": torch.int64,
    "rewards": torch.float32,
    "correct": torch.bool,
    "truncated": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """A group on its way into an update.

    Attributes:
        group: the group.
        logprobs: [L] float32 nats under the current policy, if every member of the group was scored for PACE; else None.
    """

    group: TrajectoryGroup
    logprobs: Tensor | None = None


class GroupCodec:
    """Turns a `TrajectoryGroup` into one flat TensorDict and back.

    Keys are the group's fields; `origin` holds (prompt_index, epoch, label), where a label stands for the two fields that are
    strings, (task, reward_names). A run has few distinct ones, so they are kept once, in `labels`. Not thread-safe.
    """

    def __init__(self) -> None:
        self.labels: list[tuple[str, tuple[str, ...]]] = []
        self._label_of: dict[tuple[str, tuple[str, ...]], int] = {}

    def encode(self, group: TrajectoryGroup) -> TensorDict:
        """The TensorDict (batch size []) of a group; shares its tensors."""
        fields: dict[str, Tensor] = {name: getattr(group, name) for name in (*_TOKEN_FIELDS, *_MEMBER_FIELDS)}
        fields["reward_components"] = group.reward_components
        label = self._label(group.task, tuple(group.reward_names))
        header = torch.tensor([group.group_id, group.completed_version, group.prompt_index, group.epoch, label])
        fields["group_id"], fields["completed_version"], fields["origin"] = header[0], header[1], header[2:]
        return TensorDict(fields)

    def decode(self, record: TensorDictBase) -> TrajectoryGroup:
        """The group of a TensorDict made by `encode`; shares its tensors."""
        fields = dict(record.items())
        prompt_index, epoch, label = fields.pop("origin").tolist()
        task, reward_names = self.labels[label]
        return TrajectoryGroup(
            group_id=int(fields.pop("group_id")),
            completed_version=int(fields.pop("completed_version")),
            prompt_index=prompt_index,
            epoch=epoch,
            task=task,
            reward_names=reward_names,
            **fields,
        )

    def _label(self, task: str, reward_names: tuple[str, ...]) -> int:
        key = (task, reward_names)
        if key not in self._label_of:
            self._label_of[key] = len(self.labels)
            self.labels.append(key)
        return self._label_of[key]


def pack(groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
    """Groups as a few flat tensors and plain Python, for a checkpoint (loads with `weights_only=True`)."""
    if not groups:
        return {"num_groups": 0}
    labels: dict[tuple[str, tuple[str, ...]], int] = {}
    scalars = [
        (
            group.group_id,
            group.prompt_index,
            group.epoch,
            group.completed_version,
            labels.setdefault((group.task, tuple(group.reward_names)), len(labels)),
            group.group_size,
            group.reward_components.shape[1],
        )
        for group in groups
    ]
    fields = {name: torch.cat([getattr(group, name) for group in groups]) for name in (*_TOKEN_FIELDS, *_MEMBER_FIELDS)}
    return {
        "num_groups": len(groups),
        "scalars": torch.tensor(scalars),
        "reward_components": torch.cat([group.reward_components.flatten() for group in groups]),
        "labels": [(task, list(names)) for task, names in labels],
        **fields,
    }


def unpack(packed: dict[str, Any]) -> list[TrajectoryGroup]:
    """The groups of `pack`, in order; their tensors are views of the packed ones."""
    if not packed["num_groups"]:
        return []
    scalars = packed["scalars"].tolist()
    sizes = [row[5] for row in scalars]
    lengths = packed["lengths"].split(sizes)
    num_tokens = torch.stack([part.sum() for part in lengths]).tolist()
    tokens = {name: packed[name].split(num_tokens) for name in _TOKEN_FIELDS}
    members = {name: packed[name].split(sizes) for name in _MEMBER_FIELDS}
    components = packed["reward_components"].split([row[5] * row[6] for row in scalars])
    groups = []
    for i, (group_id, prompt_index, epoch, completed_version, label, size, num_rewards) in enumerate(scalars):
        task, names = packed["labels"][label]
        groups.append(
            TrajectoryGroup(
                group_id=group_id,
                prompt_index=prompt_index,
                epoch=epoch,
                completed_version=completed_version,
                task=task,
                reward_names=tuple(names),
                reward_components=components[i].view(size, num_rewards),
                **{name: parts[i] for name, parts in {**tokens, **members}.items()},
            )
        )
    return groups


def select_members(group: TrajectoryGroup, members: Tensor) -> tuple[TrajectoryGroup, Tensor]:
    """The group reduced to the `members` ([G] bool) kept, and which of its tokens those are ([L] bool)."""
    kept = torch.repeat_interleave(members, group.lengths)
    if bool(members.all()):
        return group, kept
    parts: dict[str, Any] = {name: getattr(group, name)[kept] for name in _TOKEN_FIELDS}
    parts |= {name: getattr(group, name)[members] for name in (*_MEMBER_FIELDS, "reward_components")}
    return replace(group, **parts), kept


def check_group(group: TrajectoryGroup, policy_version: int) -> None:
    """Refuse a malformed group.

    Args:
        group: what the rollout worker made.
        policy_version: the newest version that exists.

    Raises:
        PoolError: naming the field, what it must be and what it is.
    """
    for shape, fields in ((group.token_ids.shape, _TOKEN_FIELDS), (group.lengths.shape, _MEMBER_FIELDS)):
        for name, dtype in fields.items():
            value = getattr(group, name)
            if value.dtype != dtype or value.shape != shape or len(shape) != 1:
                raise _malformed(group, name, f"be {dtype} [{shape.numel()}]", f"{value.dtype} {list(value.shape)}")
    _check_members(group)
    # NumPy views: on arrays this small its calls cost a third of torch's.
    versions, trained = group.token_versions.numpy(), group.loss_mask.numpy()
    newest = int(versions.max())
    if newest > policy_version or group.completed_version > policy_version:
        got = f"token version {newest}, completed_version {group.completed_version}"
        raise _malformed(group, "token_versions", f"be at most the trainer's version {policy_version}", got)
    logprobs = group.behavior_logprobs.numpy()
    if not np.isfinite(logprobs).all():
        raise _malformed(group, "behavior_logprobs", "be finite", f"{logprobs[~np.isfinite(logprobs)][0]}")
    if (trained & (versions < 0)).any():
        raise _malformed(group, "loss_mask", "mark only tokens that the engine sampled", "a trained token of version -1")
    lengths = group.lengths.numpy()
    if trained[lengths.cumsum() - lengths].any():
        raise _malformed(group, "loss_mask", "leave a trajectory's first token untrained", "a trained first token")


def _check_members(group: TrajectoryGroup) -> None:
    """The fields with one entry per member."""
    lengths = group.lengths.numpy()
    if lengths.size < 1 or (lengths < 1).any():
        raise _malformed(group, "lengths", "hold at least one member, each of at least one token", f"{lengths.tolist()}")
    if lengths.sum() != group.token_ids.numel():
        total = f"{lengths.sum()} for {group.token_ids.numel()} tokens"
        raise _malformed(group, "lengths", "add up to the number of tokens", total)
    shape = (lengths.size, len(group.reward_names))
    if group.reward_components.dtype != torch.float32 or group.reward_components.shape != shape:
        got = f"{group.reward_components.dtype} {list(group.reward_components.shape)}"
        raise _malformed(group, "reward_components", f"be torch.float32 {list(shape)}", got)
    if not np.isfinite(group.rewards.numpy()).all():
        raise _malformed(group, "rewards", "be finite", f"{group.rewards.tolist()}")


def _malformed(group: TrajectoryGroup, field: str, contract: str, got: str) -> PoolError:
    return PoolError(
        f"{field} must {contract}, got {got} (group {group.group_id} of task {group.task!r}). The group is refused; "
        "report the engine or reward that made it."
    )
