"""From what an engine answered to a trajectory group: the check, the group, its outcome, and a record for people to read.

Also the flat form that members of groups which are not complete have in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import torch

from lit_asyncrl.errors import EngineError
from lit_asyncrl.interfaces import Task
from lit_asyncrl.types import Completion, FinishReason, GroupOutcome, Prompt, TrajectoryGroup

_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


def check_completion(
    completion: Completion, prompt: Prompt, partial: Completion | None = None, vocab_size: int | None = None
) -> None:
    """Refuse an answer that cannot be trained on, or does not go on with the request's `partial`; names the prompt.

    Args:
        completion: the answer.
        prompt: what it answers.
        partial: what the request carried.
        vocab_size: number of embeddings; None: any token id.

    Raises:
        EngineError: what is wrong with it.
    """
    n = len(completion.token_ids)
    if n == 0 and completion.finish_reason != "abort":
        problem: str | None = "no tokens"
    elif len(completion.behavior_logprobs) != n or len(completion.token_versions) != n:
        problem = f"{n} tokens, {len(completion.behavior_logprobs)} log-probs, {len(completion.token_versions)} versions"
    elif any(not (value <= 1e-4 and value > float("-inf")) for value in completion.behavior_logprobs):
        problem = "a log-prob that is NaN, infinite or above 0"
    elif vocab_size is not None and n and not 0 <= min(completion.token_ids) <= max(completion.token_ids) < vocab_size:
        problem = f"a token id outside the vocabulary of {vocab_size}"
    elif partial is not None and completion.token_ids[: len(partial.token_ids)] != partial.token_ids:
        problem = f"other tokens than the {len(partial.token_ids)} that were sampled before"
    else:
        problem = None
    if problem:
        raise EngineError(
            f"The engine's answer to prompt {prompt.example.index} of task {prompt.example.task!r} (group {prompt.group_id}) has "
            f"{problem}."
        )


def build_group(
    prompt: Prompt,
    completions: Sequence[Completion],
    components: Sequence[Sequence[float]],
    task: Task,
    *,
    completed_version: int,
    mask_truncated: bool = False,
) -> TrajectoryGroup:
    """Concatenate prompt and response of every member into the flat tensors of a `TrajectoryGroup`.

    Args:
        prompt: shared by the members.
        completions: G completions, none aborted.
        components: G lists of R unweighted reward values.
        task: gives the rewards' weights and names, and the accuracy criterion.
        completed_version: version served at completion.
        mask_truncated: leave truncated members in the baseline but train none of their tokens.
    """
    prompt_ids, n_prompt = list(prompt.token_ids), len(prompt.token_ids)
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for completion in completions:
        n = len(completion.token_ids)
        trained = not (mask_truncated and completion.finish_reason == "length")
        token_ids += prompt_ids + list(completion.token_ids)
        mask += [False] * n_prompt + [trained] * n
        logprobs += [0.0] * n_prompt + list(completion.behavior_logprobs)
        versions += [-1] * n_prompt + list(completion.token_versions)
    values = torch.tensor([list(c) for c in components], dtype=torch.float32)
    weights = torch.tensor([reward.weight for reward in task.rewards], dtype=torch.float32)
    return TrajectoryGroup(
        group_id=prompt.group_id,
        prompt_index=prompt.example.index,
        epoch=prompt.epoch,
        task=prompt.example.task,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        behavior_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        token_versions=torch.tensor(versions, dtype=torch.int32),
        lengths=torch.tensor([n_prompt + len(c.token_ids) for c in completions], dtype=torch.int64),
        rewards=values @ weights,
        reward_components=values,
        correct=torch.tensor([task.is_correct(c) for c in components], dtype=torch.bool),
        truncated=torch.tensor([c.finish_reason == "length" for c in completions], dtype=torch.bool),
        completed_version=completed_version,
        reward_names=tuple(reward.name for reward in task.rewards),
    )


def outcome_of(completions: Sequence[Completion], components: Sequence[Sequence[float]], task: Task) -> GroupOutcome:
    """What came out of a group's responses, before any of them is left out."""
    weights = [reward.weight for reward in task.rewards]
    return GroupOutcome(
        num_responses=len(completions),
        num_tokens=sum(len(c.token_ids) for c in completions),
        reward_sum=sum(weight * value for values in components for weight, value in zip(weights, values, strict=True)),
        num_correct=sum(task.is_correct(values) for values in components),
    )


def sample_record(group: TrajectoryGroup, decode: Callable[[Sequence[int]], str], index: int) -> dict[str, Any]:
    """Member `index` of a group as plain values for `save_rollouts` and the text samples."""
    start = int(group.lengths[:index].sum())
    stop = start + int(group.lengths[index])
    sampled = group.token_versions[start:stop] >= 0
    ids = group.token_ids[start:stop]
    versions = group.token_versions[start:stop][sampled]
    return {
        "group_id": group.group_id,
        "task": group.task,
        "prompt_index": group.prompt_index,
        "epoch": group.epoch,
        "sample": index,
        "prompt": decode(ids[~sampled].tolist()),
        "completion": decode(ids[sampled].tolist()),
        "reward": float(group.rewards[index]),
        "reward_components": dict(zip(group.reward_names, group.reward_components[index].tolist(), strict=True)),
        "correct": bool(group.correct[index]),
        "truncated": bool(group.truncated[index]),
        "first_version": int(versions.min()) if versions.numel() else None,
        "last_version": int(versions.max()) if versions.numel() else None,
    }


def proved_part(completion: Completion, served_version: int) -> Completion | None:
    """A response up to its first token of weights newer than those that were proved to be served; None if nothing is left.

    What is left of a response that is cut is not finished: its reason is `abort`.
    """
    if all(version <= served_version for version in completion.token_versions):
        return completion if completion.token_ids else None
    n = next(i for i, version in enumerate(completion.token_versions) if version > served_version)
    if not n:
        return None
    return Completion(
        completion.request_id,
        completion.token_ids[:n],
        completion.behavior_logprobs[:n],
        completion.token_versions[:n],
        "abort",
    )


def pack_completions(completions: Iterable[Completion]) -> dict[str, Any]:
    """Finished and partial responses as a few flat tensors, for a checkpoint (loads with `weights_only=True`)."""
    completions = list(completions)
    return {
        "request_ids": torch.tensor([c.request_id for c in completions], dtype=torch.int64),
        "lengths": torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64),
        "finish_reasons": torch.tensor([_REASONS.index(c.finish_reason) for c in completions], dtype=torch.int8),
        "token_ids": torch.tensor([i for c in completions for i in c.token_ids], dtype=torch.int64),
        "behavior_logprobs": torch.tensor([v for c in completions for v in c.behavior_logprobs], dtype=torch.float64),
        "token_versions": torch.tensor([v for c in completions for v in c.token_versions], dtype=torch.int32),
    }


def unpack_completions(packed: dict[str, Any]) -> list[Completion]:
    """Undo `pack_completions`."""
    lengths = packed["lengths"].tolist()
    fields = [packed[name].split(lengths) for name in ("token_ids", "behavior_logprobs", "token_versions")]
    members = zip(packed["request_ids"].tolist(), packed["finish_reasons"].tolist(), *fields, strict=True)
    return [
        Completion(request_id, ids.tolist(), logprobs.tolist(), versions.tolist(), _REASONS[reason])
        for request_id, reason, ids, logprobs, versions in members
    ]
