"""What a run has done over all its sessions: the counts behind its summary, which its checkpoints carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lit_asyncrl.types import TrainBatch


@dataclass
class RunTotals:
    """Sums over a run. What a killed session did after its last checkpoint did not happen, here as elsewhere.

    Attributes:
        updates: trained batches.
        trajectories, trained_tokens: in them.
        ess_ratio_sum: over the batches.
        age_sum: policy age, in updates, over the trained tokens.
        age_max: largest policy age, in updates.
        mixed_sum: trajectories with tokens of several versions.
        train_s: seconds of training, first and last evaluation left out.
        trainer_waited_s: seconds of it in which the trainer waited for a batch.
        engine_waited_s: seconds of it in which the engine had no training request.
        engine_down_s: seconds in which a dead engine was missed.
        engine_restarts: how often an engine was started anew.
        evaluations: those during training, in order.
    """

    updates: int = 0
    trajectories: int = 0
    trained_tokens: int = 0
    ess_ratio_sum: float = 0.0
    age_sum: float = 0.0
    age_max: float = 0.0
    mixed_sum: float = 0.0
    train_s: float = 0.0
    trainer_waited_s: float = 0.0
    engine_waited_s: float = 0.0
    engine_down_s: float = 0.0
    engine_restarts: int = 0
    evaluations: list[dict[str, float]] = field(default_factory=list)

    def count(self, batch: TrainBatch, ess_ratio: float) -> None:
        """Add a trained batch."""
        self.updates += 1
        self.trajectories += batch.num_trajectories
        self.trained_tokens += batch.num_trained_tokens
        self.ess_ratio_sum += ess_ratio
        self.age_sum += batch.stats["pool/policy_age_mean"] * batch.num_trained_tokens
        self.age_max = max(self.age_max, batch.stats["pool/policy_age_max"])
        self.mixed_sum += batch.stats["pool/mixed_version_share"] * batch.num_trajectories

    def plus(self, spent: Mapping[str, float]) -> RunTotals:
        """The same with what the present session has spent so far, by attribute."""
        return replace(self, **{name: getattr(self, name) + value for name, value in spent.items()})

    def state_dict(self) -> dict[str, Any]:
        """Plain Python."""
        return asdict(self)

    def means(self) -> dict[str, float]:
        """What the summary says of the trained batches on average, and per second of training."""
        return {
            "trained_tokens_per_s": self.trained_tokens / self._wall_s,
            "policy_age_mean": self.age_sum / max(self.trained_tokens, 1),
            "policy_age_max": self.age_max,
            "ess_ratio_mean": self.ess_ratio_sum / max(self.updates, 1),
            "mixed_version_share": self.mixed_sum / max(self.trajectories, 1),
            "share_trainer_waits_for_data": self.trainer_waited_s / self._wall_s,
            "share_engine_waits_for_admission": self.engine_waited_s / self._wall_s,
            "share_engine_down": self.engine_down_s / self._wall_s,
        }

    def bound(self, rejected_share: float) -> str:
        """In words, which side the run waits for, and what to do about it.

        Waiting for an engine that had died is no sign that a side is slow, and a sampler that rejects much hides that the engine
        waits.

        Args:
            rejected_share: of the groups that were dispatched.
        """
        down = self.engine_down_s / self._wall_s
        trainer, engine = (seconds / self._wall_s - down for seconds in (self.trainer_waited_s, self.engine_waited_s))
        if trainer > max(0.1, engine):
            return f"generation-bound: the trainer waited {trainer:.0%} of the time; give generation more cores or slots"
        if engine > 0.1:
            return f"train-bound: the engine waited {engine:.0%} of the time; give the trainer more cores"
        if down > 0.1:
            times = "once" if self.engine_restarts == 1 else f"{self.engine_restarts} times"
            return f"the engine was started anew {times}, and missed for {down:.0%} of the time: see its warnings"
        if rejected_share > 0.25:
            return f"train-bound: {rejected_share:.0%} of the groups were rejected as surplus; give the trainer more cores"
        return "balanced"

    @property
    def _wall_s(self) -> float:
        return max(self.train_s, 1e-9)
