"""Small builders of the package's carriers, shared by the tests: `from builders import make_group`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lit_asyncrl.types import TrajectoryGroup

PROMPT_LENGTH = 2


def make_group(
    group_id: int = 0,
    responses: Sequence[Sequence[int]] = ((0, 0), (0, 0)),
    completed_version: int | None = None,
    *,
    rewards: Sequence[float] | None = None,
    truncated: Sequence[bool] | None = None,
    task: str = "toy",
    prompt_length: int = PROMPT_LENGTH,
) -> TrajectoryGroup:
    """A group whose member i has `prompt_length` prompt tokens and one trained token per entry of `responses[i]`, the entry being
    the version that sampled it. Token ids count up from 1 + 100 * group_id; behavior log-probs are -0.5 nats; rewards are
    0, 1, 0, 1, ... unless given.
    """
    lengths = [prompt_length + len(response) for response in responses]
    total = sum(lengths)
    versions: list[int] = []
    for response in responses:
        versions += [-1] * prompt_length + list(response)
    token_versions = torch.tensor(versions, dtype=torch.int32)
    sampled = token_versions >= 0
    reward_values = [float(i % 2) for i in range(len(responses))] if rewards is None else list(rewards)
    reward_tensor = torch.tensor(reward_values, dtype=torch.float32)
    return TrajectoryGroup(
        group_id=group_id,
        prompt_index=group_id,
        epoch=0,
        task=task,
        token_ids=torch.arange(1, total + 1) + 100 * group_id,
        loss_mask=sampled,
        behavior_logprobs=torch.where(sampled, -0.5, 0.0),
        token_versions=token_versions,
        lengths=torch.tensor(lengths),
        rewards=reward_tensor,
        reward_components=reward_tensor[:, None].clone(),
        correct=reward_tensor >= 1,
        truncated=torch.tensor(list(truncated) if truncated is not None else [False] * len(responses)),
        completed_version=max(versions) if completed_version is None else completed_version,
        reward_names=("match",),
    )
