"""What a method asks of the data that it trains on: contradictions between settings of `model` and of `data`."""

from __future__ import annotations

from typing import Protocol

from lit_asyncrl.interfaces import Advantage, Objective
from lit_asyncrl.types import SamplingParams


class DataSettings(Protocol):
    """The settings of a `RolloutDataModule` that are looked at."""

    batch_groups: int
    group_size: int
    max_policy_age: int | None
    max_tokens_per_micro_batch: int | None
    sampling: SamplingParams


def contradictions(objective: Objective, advantage: Advantage, updates_per_batch: int, data: DataSettings) -> list[str]:
    """Messages with keys, values and remedies."""
    problems = []
    age, budget, size = data.max_policy_age, data.max_tokens_per_micro_batch, data.group_size
    if size < advantage.min_group_size:
        problems.append(
            f"data.group_size must be at least {advantage.min_group_size} with {type(advantage).__name__}, got {size} (the "
            "baseline of one response is its own reward: every advantage would be 0). Raise group_size."
        )
    if updates_per_batch > data.batch_groups:
        problems.append(
            f"model.updates_per_batch must be at most data.batch_groups, got {updates_per_batch} updates for "
            f"{data.batch_groups} groups. Lower updates_per_batch or raise batch_groups."
        )
    if age is not None and updates_per_batch - 1 > age:
        problems.append(
            f"data.max_policy_age must be at least model.updates_per_batch - 1, got {age} for {updates_per_batch} updates (the "
            "last one trains on what was sampled that many updates before). Raise max_policy_age or lower updates_per_batch."
        )
    longest = data.sampling.max_new_tokens
    if getattr(objective, "needs_whole_groups", False) and budget is not None and size * (longest + 1) > budget:
        problems.append(
            "data.max_tokens_per_micro_batch must hold a whole group where model.objective couples its members, got "
            f"{budget} tokens for {size} prompts with responses of up to {longest} tokens ({type(objective).__name__}). Raise it "
            f"to at least {size * (longest + 1)}, or lower data.group_size or data.sampling.max_new_tokens."
        )
    return problems
