"""CollapseGuard: notices a run that is collapsing, says so in words, and lowers the learning rate or stops if asked to."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lit_asyncrl.algorithm.gradients import has_fallen
from lit_asyncrl.algorithm.ranks import mean_over_ranks, pooled_ess_ratio
from lit_asyncrl.callbacks.step_rate import StepRateCallback, scale_rate
from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.module import PolicyModule

Action = Literal["warn", "lower_lr", "stop"]


class CollapseGuard(StepRateCallback):
    """Alarms when the ESS ratio stays under `ess_threshold` for `num_updates` updates while reward or evaluation falls.

    Reward: the mean of the last `num_updates` batches against the best such mean of the run. Evaluation: the last accuracy of any
    held-out set against its best. After an alarm the next one needs `num_updates` further low ratios.

    Args:
        ess_threshold: ESS ratio below which an update counts as low.
        num_updates: low updates in a row, and batches in a mean reward.
        min_drop: share of the best reward or accuracy that has to be lost.
        action: `warn` says it; `lower_lr` also multiplies the rate of every later step by `lr_factor`, again at each alarm, while
            the schedule and the rate in checkpoints stay as they are; `stop` ends training after this update.
        lr_factor: for `lower_lr`, in (0, 1).

    Raises:
        ConfigurationError: arguments out of range; all at once.

    Source: ours. Runs of a tiny model showed ratios of .01 to .06 within 10 to 20 updates before a collapse, and high ones after
    it; under a forced lag the training reward falls only later, hence the evaluation.
    """

    def __init__(
        self,
        ess_threshold: float = 0.05,
        num_updates: int = 5,
        min_drop: float = 0.1,
        action: Action = "warn",
        lr_factor: float = 0.5,
    ) -> None:
        super().__init__()
        problems = []
        if not 0 < ess_threshold < 1:
            problems.append(f"CollapseGuard.ess_threshold must be in (0, 1), got {ess_threshold}. Give 0.05 or so.")
        if num_updates < 1:
            problems.append(f"CollapseGuard.num_updates must be 1 or above, got {num_updates}. Give some updates.")
        if not min_drop >= 0:
            problems.append(f"CollapseGuard.min_drop must be 0 or above, got {min_drop}. Give 0 for any loss.")
        if not 0 < lr_factor < 1:
            problems.append(f"CollapseGuard.lr_factor must be in (0, 1), got {lr_factor}. Give 0.5 to halve the rate.")
        if action not in ("warn", "lower_lr", "stop"):
            problems.append(f"CollapseGuard.action must be warn, lower_lr or stop, got {action!r}. Give one of them.")
        if problems:
            raise ConfigurationError(" ".join(problems))
        self.ess_threshold = ess_threshold
        self.num_updates = num_updates
        self.min_drop = min_drop
        self.action = action
        self.lr_factor = lr_factor
        self.rate_scale = 1.0
        self.num_alarms = 0
        self._num_low = 0
        self._rewards: deque[float] = deque(maxlen=num_updates)
        self._values: dict[str, float] = {}
        self._best: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Use the lowered rate."""
        assert isinstance(pl_module, PolicyModule) and pl_module.step is not None
        if self.rate_scale < 1.0:
            scale_rate(optimizer, self.rate_scale)
        pl_module.step.metrics["control/guard_lr_scale"] = self.rate_scale
        pl_module.step.metrics["control/collapse_alarms"] = float(self.num_alarms)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Look at this update."""
        assert isinstance(pl_module, PolicyModule) and pl_module.step is not None
        ess_ratio = pooled_ess_ratio(pl_module.step.log_weights)
        if ess_ratio == 0.0:  # nothing was trained
            return
        self._num_low = self._num_low + 1 if ess_ratio < self.ess_threshold else 0
        self._rewards.append(mean_over_ranks(batch.stats["reward/mean"]))
        if len(self._rewards) == self.num_updates:
            self._see("the mean reward", sum(self._rewards) / self.num_updates)
        if self._num_low >= self.num_updates:
            fallen = [
                f"{what} has fallen from {self._best[what]:.3g} to {value:.3g}"
                for what, value in self._values.items()
                if has_fallen(value, self._best[what], self.min_drop)
            ]
            if fallen:
                self._num_low = 0
                self._alarm(trainer, pl_module, ess_ratio, " and ".join(fallen))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the accuracies of evaluations during training."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            for key, value in trainer.callback_metrics.items():
                if key.startswith("val/") and key.endswith("/accuracy"):
                    self._see(key, float(value))

    def _see(self, what: str, value: float) -> None:
        self._values[what] = value
        self._best[what] = max(value, self._best.get(what, value))

    def _alarm(self, trainer: Trainer, module: PolicyModule, ess_ratio: float, what: str) -> None:
        self.num_alarms += 1
        consequence = "Training goes on unchanged."
        if self.action == "lower_lr":
            self.rate_scale *= self.lr_factor
            consequence = f"The learning rate is multiplied by {self.rate_scale:.3g} from the next update on."
        elif self.action == "stop":
            trainer.should_stop = True
            consequence = "Training stops here; go back to an earlier checkpoint."
        rank_zero_warn(
            f"CollapseGuard: at policy_version {module.policy_version} the ESS ratio ({ess_ratio:.3g}) has been under "
            f"{self.ess_threshold} for {self.num_updates} updates, and {what}: the policy is collapsing. {consequence} "
            "Lower data.max_policy_age or the learning rate, or add EssLrScale."
        )

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far, and the lowered rate."""
        return {
            "rate_scale": self.rate_scale,
            "num_alarms": self.num_alarms,
            "num_low": self._num_low,
            "rewards": list(self._rewards),
            "values": dict(self._values),
            "best": dict(self._best),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.rate_scale = state_dict["rate_scale"]
        self.num_alarms = state_dict["num_alarms"]
        self._num_low = state_dict["num_low"]
        self._rewards.extend(state_dict["rewards"])
        self._values = dict(state_dict["values"])
        self._best = dict(state_dict["best"])
