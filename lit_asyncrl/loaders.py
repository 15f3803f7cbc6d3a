"""What Lightning iterates over: training batches from the pool, held-out sets, and the re-scoring that PACE asks for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_asyncrl.errors import StopRequested
from lit_asyncrl.evaluation import EvaluationBatch
from lit_asyncrl.pool.collate import in_training_order, pad_groups
from lit_asyncrl.pool.records import TakenGroup
from lit_asyncrl.types import TrainBatch, TrajectoryGroup

if TYPE_CHECKING:
    from lit_asyncrl.datamodule import RolloutDataModule
    from lit_asyncrl.module import PolicyModule


class PromptsExhausted(Exception):  # noqa: N818 - the end of the data, not a fault
    """The prompt source has ended and the pool holds less than a batch."""


def end_training(trainer: Any) -> None:
    """Let `fit` end at the next boundary, also before `min_steps` and `min_epochs`: there is nothing more to train."""
    trainer.should_stop = True
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None


class TrainLoader:
    """Iterates over training batches; a stop request or the end of the prompts ends it early, so that the loop can leave."""

    def __init__(self, data: RolloutDataModule) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.updates_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Nothing: where a resumed run goes on is in the datamodule's pool and prompts. Without it Lightning would warn."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore."""

    def __iter__(self) -> Iterator[TrainBatch]:
        self._data.is_epoch_broken_off = False
        for _ in range(len(self)):
            try:
                batch = self._data.take_batch()
            except (StopRequested, PromptsExhausted) as reason:
                assert self._data.trainer is not None
                end_training(self._data.trainer)
                self._data.is_epoch_broken_off = True
                left = len(self._data.pool)
                if left and isinstance(reason, PromptsExhausted):
                    warnings.warn(f"The prompts have ended: {left} groups, fewer than a batch, stay untrained.", stacklevel=2)
                return
            yield batch


class EvaluationLoader:
    """One held-out set as a loader of one batch."""

    def __init__(self, batch: EvaluationBatch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[EvaluationBatch]:
        yield self._batch


def score_groups(
    module: PolicyModule, groups: Sequence[TrajectoryGroup], max_tokens: int | None, temperature: float
) -> list[Tensor]:
    """Log-probs [L] of each group's flat tokens under the module's current policy, many groups a forward pass."""
    ordered = in_training_order([TakenGroup(group, None) for group in groups])
    micro_batches = pad_groups(ordered, max_tokens_per_micro_batch=max_tokens, temperature=temperature)
    flat = torch.cat([module.score(part.to(module.device))[part.attention_mask].cpu() for part in micro_batches])
    parts = flat.split([int(item.group.lengths.sum()) for item in ordered])
    by_id = {item.group.group_id: part for item, part in zip(ordered, parts, strict=True)}
    return [by_id[group.group_id] for group in groups]
