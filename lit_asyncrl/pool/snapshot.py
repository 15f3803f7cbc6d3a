"""The flat form of waiting groups in a checkpoint: a few long tensors, so that ten thousand groups take well under a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_asyncrl.pool.facts import MEMBER_FIELDS, TOKEN_FIELDS, GroupFacts
from lit_asyncrl.types import TrajectoryGroup

_NUM_COUNTS = len(GroupFacts._fields) - 2  # the last two facts are not integers


def table(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> Tensor:
    """Rows of numbers as a tensor [N, columns]; NumPy reads them three times as fast as PyTorch."""
    return torch.from_numpy(np.array(rows, dtype=dtype))


def pack(groups: Sequence[TrajectoryGroup], facts: Sequence[GroupFacts]) -> dict[str, Any]:
    """Groups and their facts as a few flat tensors and plain Python, for a checkpoint (loads with `weights_only=True`)."""
    if not groups:
        return {"num_groups": 0}
    labels: dict[tuple[str, tuple[str, ...]], int] = {}
    origins = [
        (
            group.prompt_index,
            group.epoch,
            labels.setdefault((group.task, tuple(group.reward_names)), len(labels)),
            group.reward_components.shape[1],
            group.token_ids.numel(),
        )
        for group in groups
    ]
    fields = {name: torch.cat([getattr(group, name) for group in groups]) for name in (*TOKEN_FIELDS, *MEMBER_FIELDS)}
    return {
        "num_groups": len(groups),
        "counts": table([row[:_NUM_COUNTS] for row in facts], np.int64),
        "sums": table([row[_NUM_COUNTS:] for row in facts], np.float64),
        "origins": table(origins, np.int64),
        "reward_components": torch.cat([group.reward_components.flatten() for group in groups]),
        "labels": [(task, list(names)) for task, names in labels],
        **fields,
    }


def unpack(packed: dict[str, Any]) -> tuple[list[TrajectoryGroup], list[GroupFacts]]:
    """The groups and facts of `pack`, in order; the groups' tensors are views of the packed ones."""
    if not packed["num_groups"]:
        return [], []
    facts = [GroupFacts(*counts, *sums) for counts, sums in zip(packed["counts"].tolist(), packed["sums"].tolist(), strict=True)]
    origins = packed["origins"].tolist()
    labels = [(task, tuple(names)) for task, names in packed["labels"]]
    sizes = [row.num_members for row in facts]
    tokens = {name: packed[name].split([row[4] for row in origins]) for name in TOKEN_FIELDS}
    members = {name: packed[name].split(sizes) for name in MEMBER_FIELDS}
    components = packed["reward_components"].split([size * row[3] for size, row in zip(sizes, origins, strict=True)])
    groups = []
    for i, (row, (prompt_index, epoch, label, num_rewards, _)) in enumerate(zip(facts, origins, strict=True)):
        task, reward_names = labels[label]
        groups.append(
            TrajectoryGroup(
                group_id=row.group_id,
                prompt_index=prompt_index,
                epoch=epoch,
                completed_version=row.completed_version,
                task=task,
                reward_names=reward_names,
                reward_components=components[i].view(row.num_members, num_rewards),
                token_ids=tokens["token_ids"][i],
                loss_mask=tokens["loss_mask"][i],
                behavior_logprobs=tokens["behavior_logprobs"][i],
                token_versions=tokens["token_versions"][i],
                lengths=members["lengths"][i],
                rewards=members["rewards"][i],
                correct=members["correct"][i],
                truncated=members["truncated"][i],
            )
        )
    return groups, facts
