"""Trajectory groups as the replay buffer stores them, and as they leave for an update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyStackStorage

from lit_asyncrl.pool.facts import MEMBER_FIELDS, TOKEN_FIELDS
from lit_asyncrl.types import TrajectoryGroup

_TENSORS = (*TOKEN_FIELDS, *MEMBER_FIELDS, "reward_components")


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """A group on its way into an update.

    Attributes:
        group: the group.
        logprobs: [L] float32 nats under the current policy, if every member of the group was scored for PACE; else None.
    """

    group: TrajectoryGroup
    logprobs: Tensor | None = None


class GroupStorage(LazyStackStorage):
    """A `LazyStackStorage` of trajectory groups, which it keeps as they are and shows as TensorDicts.

    Thousands of waiting TensorDicts would cost more in garbage collection than all else here. Entries are written as groups; a
    sampler that rewrites one gives the TensorDict that it changed.

    Args:
        max_size: slots.
    """

    def __init__(self, max_size: int) -> None:
        # Counters for other processes would have names in /dev/shm, which a SIGKILL leaves there: a "compilable" one has none.
        super().__init__(max_size, compilable=True)

    def group(self, slot: int) -> TrajectoryGroup:
        """The group in a slot."""
        return self._storage[slot]

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write one slot, or several given as a list of slots and a list of entries."""
        if isinstance(cursor, list):
            for slot, entry in zip(cursor, data, strict=True):
                self._set_item(slot, entry)
            self._bump_mutation_revision()
        else:
            super().set(cursor, data, set_cursor=set_cursor)

    def _set_item(self, cursor: int, data: Any) -> None:
        if isinstance(data, TensorDictBase):
            changed = {name: data[name] for name in _TENSORS}
            data = replace(self.group(cursor), **changed)
        super()._set_item(cursor, data)

    def _get_item(self, index: int) -> TensorDict:
        return as_entry(self.group(index))

    def _get_list(self, index: Any) -> list:
        # Indexing a list by the elements of a tensor converts each of them apart.
        return [as_entry(self.group(slot)) for slot in (index.tolist() if isinstance(index, Tensor) else index)]


def as_entry(group: TrajectoryGroup) -> TensorDict:
    """The tensors of a checked group as a TensorDict (batch size []); shares them."""
    fields: dict[str, Any] = {name: getattr(group, name) for name in _TENSORS}
    fields["group_id"] = torch.tensor(group.group_id)
    fields["completed_version"] = torch.tensor(group.completed_version)
    return TensorDict(fields)


def select_members(group: TrajectoryGroup, members: Tensor) -> tuple[TrajectoryGroup, Tensor | None]:
    """The group reduced to the `members` ([G] bool) kept, and which of its tokens those are ([L] bool; None: all)."""
    if bool(members.all()):
        return group, None
    kept = torch.repeat_interleave(members, group.lengths)
    parts: dict[str, Any] = {name: getattr(group, name)[kept] for name in TOKEN_FIELDS}
    parts |= {name: getattr(group, name)[members] for name in (*MEMBER_FIELDS, "reward_components")}
    return replace(group, **parts), kept
