"""The queue of the closed forms: first in, first out, and the oldest group leaves when it is full."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.pool.sampler import StalenessSampler


class QueueDropSampler(StalenessSampler):
    """Rejects the oldest arrivals beyond a capacity, whatever their lengths or versions, and takes the oldest of the rest.

    Dropping when a batch is taken leaves the same queue as dropping at each arrival.

    Args:
        capacity_groups: groups kept; at least one batch.

    Source: Applied Compute's analysis of staleness (queue-drop).
    """

    def __init__(self, capacity_groups: int) -> None:
        super().__init__()
        if capacity_groups < 1:
            raise ConfigurationError(f"capacity_groups must be at least 1, got {capacity_groups}.")
        self.capacity_groups = capacity_groups

    def _reject(self, storage: Any, batch_size: int) -> tuple[list[int], dict[int, Tensor]]:
        waiting = self.waiting
        return waiting[: max(0, len(waiting) - max(self.capacity_groups, batch_size))], {}
