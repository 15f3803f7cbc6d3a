"""TaskMixture: several tasks as one, in fixed proportions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import RewardFn, Task
from lit_asyncrl.types import Example

PERIOD = 1000
"""The mixture repeats its order of tasks after so many examples; weights are rounded to multiples of 1 / PERIOD."""


class TaskMixture(Task):
    """Interleaves tasks by weight, deterministically and evenly.

    An example keeps the name of the task it comes from, whose rewards score it, and gets its index in the mixture. An epoch ends
    when every task has been passed through at least once, so that the others start again before; the held-out split ends before
    any example would come twice.

    Args:
        tasks: what to mix; names must differ.
        weights: share of each task, in any scale; by default equal.
        name: name of the mixture in messages.
    """

    def __init__(self, tasks: list[Task], weights: list[float] | None = None, name: str = "mixture") -> None:
        weights = [1.0] * len(tasks) if weights is None else weights
        if not tasks or len(weights) != len(tasks) or not all(weight > 0 for weight in weights):
            raise ConfigurationError(
                f"weights must have one number above 0 for each of the tasks, of which there must be at least one, got "
                f"{weights} ({len(tasks)} tasks). Leave out a task instead of giving it weight 0."
            )
        names = [task.name for task in tasks]
        if len(set(names)) < len(names) or any(isinstance(task, TaskMixture) for task in tasks):
            raise ConfigurationError(f"tasks must have different names and be no mixtures, got {names}. Set `name`.")
        self.name = name
        self.tasks = list(tasks)
        self.rewards: Sequence[RewardFn] = ()
        self._order = _interleave(weights)
        self._counts = [self._order.count(k) for k in range(len(tasks))]
        if 0 in self._counts:
            raise ConfigurationError(f"weights must be at least 1/{PERIOD} of their sum, got {weights}.")
        # How often the same task came earlier in the period, and the other way round.
        self._ranks = [self._order[:slot].count(k) for slot, k in enumerate(self._order)]
        self._slots = [[slot for slot, k in enumerate(self._order) if k == j] for j in range(len(tasks))]

    @property
    def num_train(self) -> int:
        """Number of training examples: one epoch."""
        return max(self._index_of(k, task.num_train) for k, task in enumerate(self.tasks))

    @property
    def num_heldout(self) -> int:
        """Number of held-out examples."""
        return min(self._index_of(k, task.num_heldout) for k, task in enumerate(self.tasks))

    def train_example(self, index: int) -> Example:
        """Training example `index` in [0, num_train)."""
        task, position = self._locate(index)
        return replace(task.train_example(position % task.num_train), index=index)

    def heldout_example(self, index: int) -> Example:
        """Held-out example `index` in [0, num_heldout)."""
        task, position = self._locate(index)
        return replace(task.heldout_example(position), index=index)

    def is_correct(self, components: Sequence[float]) -> bool:
        """Not defined for a mixture: ask the example's own task."""
        raise TypeError("a mixture has no accuracy criterion; ask the task named by the example")

    def setup(self) -> None:
        """Set up every task."""
        for task in self.tasks:
            task.setup()

    def close(self) -> None:
        """Close every task."""
        for task in self.tasks:
            task.close()

    def _locate(self, index: int) -> tuple[Task, int]:
        period, slot = divmod(index, PERIOD)
        k = self._order[slot]
        return self.tasks[k], period * self._counts[k] + self._ranks[slot]

    def _index_of(self, k: int, position: int) -> int:
        """The mixture's index of example `position` of task k: the inverse of `_locate`."""
        period, rank = divmod(position, self._counts[k])
        return period * PERIOD + self._slots[k][rank]


def leaf_tasks(task: Task) -> list[Task]:
    """The tasks that score examples: a mixture's parts, else the task itself."""
    return list(task.tasks) if isinstance(task, TaskMixture) else [task]


def _interleave(weights: Sequence[float]) -> list[int]:
    """A task for each slot of the period: always the one that lags most behind its share."""
    total = sum(weights)
    behind = [0.0] * len(weights)
    order = []
    for _ in range(PERIOD):
        behind = [b + weight / total for b, weight in zip(behind, weights, strict=True)]
        k = behind.index(max(behind))
        behind[k] -= 1.0
        order.append(k)
    return order
