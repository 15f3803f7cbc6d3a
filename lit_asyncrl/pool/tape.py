"""What the pool tells of its decisions, and where it can take them from: the seam between the pool and a run's record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from lit_asyncrl.types import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Decision:
    """What one `take` of the pool came to.

    Attributes:
        policy_version: the trainer's.
        taken: ids of the batch's groups, in order.
        completed_versions: `completed_version` of each of them.
        rejected: ids of the groups that the sampler rejected.
        reduced: which members [G] bool stayed of the groups that lost some, by id; taken or still waiting.
        logprobs: [L] float32 nats of re-scored groups of the batch, as handed on, by id.
    """

    policy_version: int
    taken: Sequence[int]
    completed_versions: Sequence[int]
    rejected: Sequence[int] = ()
    reduced: dict[int, Tensor] = field(default_factory=dict)
    logprobs: dict[int, Tensor] = field(default_factory=dict)

    @property
    def group_ids(self) -> set[int]:
        """Every group that the decision is about."""
        return {*self.taken, *self.rejected, *self.reduced}


class Tape(Protocol):
    """Hears what happens to groups, in order and with the pool's lock held; a replay also says what is to be taken."""

    def next_decision(self, policy_version: int) -> Decision | None:
        """What the next `take` has to do; None: what the sampler says."""
        ...

    def taken(self, decision: Decision) -> None:
        """The decision was carried out."""
        ...

    def added(self, group: TrajectoryGroup) -> None:
        """The group has reached the pool."""
        ...

    def left(self, group_id: int, state: str, reason: str) -> None:
        """The group was dropped or failed before it reached the pool."""
        ...

    def missing(self, decision: Decision, group_ids: set[int]) -> None:
        """These groups of the decision do not wait; raises where they cannot come any more."""
        ...
