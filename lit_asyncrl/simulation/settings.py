"""What a simulation needs to know, and what it reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.simulation.lengths import LengthDistribution, ResponseLengths


@dataclass(frozen=True)
class SimulationSettings:
    """One steady loop of generation and training.

    Decoding time per token does not depend on how many slots are busy, weights are swapped between two tokens at once, and
    scoring a group takes no time.

    Args:
        batch_groups: groups per update.
        group_size: responses per group.
        num_slots: responses that the engine decodes at once; further requests queue in order.
        token_s: seconds per token of one response.
        train_s: seconds per update.
        lengths: response lengths.
        max_policy_age, age_measure, capacity_groups, publish_lag: as of `TrajectoryPool`.
        train_jitter: half-width of the uniform spread of `train_s`, relative; 0 locks the phases of generation and training.
        forgetting_nats: mean of the exponential distribution of the prefix-forgetting scores, which do not depend on length;
            0: no prefix is forgotten.
        tokens_per_mean_response: tokens with a version of their own in a response of mean length. The simulator groups real
            tokens: few are enough, since versions change once per update.
        seed: of lengths, forgetting and jitter.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    batch_groups: int = 16
    group_size: int = 8
    num_slots: int = 128
    token_s: float = 0.01
    train_s: float = 1.0
    lengths: LengthDistribution = field(default_factory=ResponseLengths)
    max_policy_age: int | None = None
    age_measure: Literal["mean", "oldest"] = "mean"
    capacity_groups: int | None = None
    publish_lag: int = 0
    train_jitter: float = 0.0
    forgetting_nats: float = 0.1
    tokens_per_mean_response: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("group_size", "num_slots", "tokens_per_mean_response"):
            if getattr(self, key) < 1:
                raise ConfigurationError(f"{key} must be at least 1, got {getattr(self, key)}.")
        for key in ("token_s", "train_s"):
            if not getattr(self, key) > 0:
                raise ConfigurationError(f"{key} must be above 0 seconds, got {getattr(self, key)}.")
        for key, least, most in (("train_jitter", 0.0, 0.99), ("forgetting_nats", 0.0, float("inf"))):
            if not least <= getattr(self, key) <= most:
                raise ConfigurationError(f"{key} must be in [{least}, {most}], got {getattr(self, key)}.")

    @property
    def batch_responses(self) -> int:
        """Responses per update."""
        return self.batch_groups * self.group_size


def saturated(settings: SimulationSettings, queue_updates: float = 1.0) -> SimulationSettings:
    """The settings without age bound and with so much room that no slot is ever idle, for a sampler that keeps the queue short.

    Args:
        settings: gives everything else.
        queue_updates: batches that the sampler lets wait.
    """
    mean_s = float(settings.lengths.draw(np.random.default_rng(0), (2**20,)).mean()) * settings.token_s
    arriving = settings.num_slots * settings.train_s / (mean_s * settings.group_size)  # groups per update
    in_slots = settings.num_slots / settings.group_size
    room = 2 * in_slots + 2 * arriving + (queue_updates + 4) * settings.batch_groups
    return replace(settings, max_policy_age=None, capacity_groups=math.ceil(room))


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Means over the updates after the warm-up. Staleness and ages are in optimizer updates.

    Attributes:
        updates, groups_generated, groups_trained, groups_rejected, groups_over_age: counts.
        events: request starts and ends, group ends, takes and updates, warm-up included.
        elapsed_s: virtual seconds.
        generation_staleness: updates that passed while a trained response was sampled, mean over its tokens, then responses.
        waiting_staleness: updates that passed while a trained group waited, mean over groups.
        start_staleness: updates between the start of a trained group and its completion, mean over groups (closed form's
            part before the queue; with `waiting_staleness` it is the closed form's total).
        policy_age_max: largest age of any trained token.
        length_bias: mean length of trained responses over that of generated ones, minus 1.
        trainer_busy, slots_busy: shares of the virtual time.
    """

    updates: int
    groups_generated: int
    groups_trained: int
    groups_rejected: int
    groups_over_age: int
    events: int
    elapsed_s: float
    generation_staleness: float
    waiting_staleness: float
    start_staleness: float
    policy_age_max: int
    length_bias: float
    trainer_busy: float
    slots_busy: float

    @property
    def policy_age(self) -> float:
        """Mean policy age of a trained response's tokens: generation and waiting together."""
        return self.generation_staleness + self.waiting_staleness

    @property
    def rejected_share(self) -> float:
        """Share of generated groups that the sampler rejected."""
        return self.groups_rejected / max(self.groups_generated, 1)

    @property
    def over_age_share(self) -> float:
        """Share of generated groups that left over age."""
        return self.groups_over_age / max(self.groups_generated, 1)
